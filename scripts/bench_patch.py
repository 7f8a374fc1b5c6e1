#!/usr/bin/env python3
"""Whole-process times of the commands that a person waits for, on real sglang 0.5.12.

    python scripts/bench_patch.py [RUNS]

Prints the median, least and most of RUNS (default 7) runs, wall clock and processor time, and where the time of one
patch goes: import, parse, edit, check (compiling, stripping, comparing) and write. Other work on the machine shows as
wall clock above processor time.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHARES = """
import gc, sys, time
start = time.perf_counter()
gc.disable()
from patcher import cli, commit, engine, locate, plan, targets
from patcher.transforms import TRANSFORMS, base
import libcst
shares = {"import": time.perf_counter() - start}

def timed(owner, name, share):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        began = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            shares[share] = shares.get(share, 0.0) + time.perf_counter() - began
    setattr(owner, name, call)

timed(base, "parse", "parse")
timed(base, "_does_not_compile", "compile the result")
for transform in TRANSFORMS.values():
    timed(transform, "edit", "edit")
timed(libcst.Module, "_codegen_impl", "generate code")
timed(commit, "commit", "write")
tree = locate.find_root(__import__("pathlib").Path(sys.argv[1]))
engine.patch(tree)
shares["all else"] = time.perf_counter() - start - sum(shares.values())
total = sum(shares.values())
for name, seconds in shares.items():
    print(f"  {name:20} {seconds:6.3f} s  {seconds / total:4.0%}")
"""


def timed(command: list[str], code: int = 0) -> tuple[float, float]:
    """Wall clock and processor seconds of a command that ends with ``code``."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, cwd=ROOT)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode != code:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stderr.decode()}")
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, spent


def row(name: str, times: list[tuple[float, float]]) -> None:
    wall = [w for w, _ in times]
    print(
        f"{name:32} median {statistics.median(wall):5.2f} s   least {min(wall):5.2f}   most {max(wall):5.2f}"
        f"   processor {statistics.median(p for _, p in times):5.2f} s"
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
        patches, checks, reverts = [], [], []
        for _ in range(runs):
            patches.append(timed([*dynspec, "patch", *root]))
            checks.append(timed([*dynspec, "patch", "--check", *root]))
            reverts.append(timed([*dynspec, "revert", *root]))
        row("dynspec patch", patches)
        row("dynspec patch --check, patched", checks)
        row("dynspec revert", reverts)
        print("one patch:")
        subprocess.run([sys.executable, "-c", SHARES, str(site)], check=True, cwd=ROOT)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 7)
