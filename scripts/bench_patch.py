#!/usr/bin/env python3
"""Whole-process times of the commands that a person waits for, on real sglang 0.5.12.

    python scripts/bench_patch.py [RUNS]

Prints the median, least and most of RUNS (default 7) runs, and the shares of one patch: import, parse and edit, write.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHARES = """
import time; t = time.perf_counter()
import gc; gc.disable()
import libcst, libcst.matchers
from pathlib import Path
from patcher import engine, locate
imported = time.perf_counter() - t
tree = locate.find_root(Path({root!r}))
t = time.perf_counter(); engine.patch(tree, dry_run=True); planned = time.perf_counter() - t
t = time.perf_counter(); engine.patch(tree); both = time.perf_counter() - t
print(f"import {{imported:.2f}} s, read, parse and edit {{planned:.2f}} s, write {{both - planned:.2f}} s")
"""


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def row(name: str, times: list[float]) -> None:
    print(
        f"{name:34} median {statistics.median(times):5.2f} s   least {min(times):5.2f}   most {max(times):5.2f}"
    )


def main(runs: int) -> None:
    from patcher import pins
    from patcher.targets import load

    source = pins.unpack("0.5.12", load(), lambda text: print(text, file=sys.stderr))
    dynspec = [sys.executable, "-m", "patcher"]
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        shutil.copytree(source, site)
        root = ["--sglang-root", str(site)]
        row("dynspec --help", [timed([*dynspec, "--help"]) for _ in range(runs)])
        patches = []
        for _ in range(runs):
            patches.append(timed([*dynspec, "patch", *root]))
            timed([*dynspec, "revert", *root])
        row("dynspec patch (0.5.12)", patches)
        timed([*dynspec, "patch", *root])
        row(
            "dynspec patch --check, patched",
            [timed([*dynspec, "patch", "--check", *root]) for _ in range(runs)],
        )
        timed([*dynspec, "revert", *root])
        print(
            subprocess.run(
                [sys.executable, "-c", SHARES.format(root=str(site))],
                capture_output=True,
                text=True,
                check=True,
            ).stdout,
            end="",
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 7)
