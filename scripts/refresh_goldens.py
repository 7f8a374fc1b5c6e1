#!/usr/bin/env python3
"""Write anew what is derived from the pinned releases: tests/fixtures/golden/ (zero-context diffs of dynspec's own
lines) and patcher/transforms/proven.py (digests before and after).

python scripts/refresh_goldens.py [--check]      # --check writes nothing and exits 1 if one differs
"""

from __future__ import annotations

import difflib
import hashlib
import sys
from pathlib import Path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_transforms import GOLDEN, PATHS, zero_context_diff  # noqa: E402

from patcher import pins  # noqa: E402
from patcher.targets import load  # noqa: E402
from patcher.transforms import TRANSFORMS  # noqa: E402
from patcher.transforms.base import Edited  # noqa: E402

PROVEN = ROOT / "patcher" / "transforms" / "proven.py"
HEAD = '''"""What the transforms make of the pinned releases' files; written by scripts/refresh_goldens.py.

role -> sha256 of the original -> sha256 of the result, and how many of the original's lines stand before each block.
"""

PROVEN: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
'''


def proven_text(pairs: dict[str, dict[str, tuple[str, tuple[int, ...]]]]) -> str:
    """The text of proven.py."""
    text = HEAD
    for role, digests in pairs.items():
        text += f'    "{role}": {{\n'
        text += "".join(f'        "{before}": (\n            "{after}",\n            {places},\n        ),\n' for before, (after, places) in digests.items())
        text += "    },\n"
    return text + "}\n"


def places(before: bytes, after: bytes) -> tuple[int, ...]:
    """How many of the original's lines stand before each insertion."""
    lines = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return tuple(i for tag, i, *_ in lines.get_opcodes() if tag == "insert")


def main(check: bool) -> int:
    targets, differs = load(), False
    pairs: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {role: {} for role in PATHS}
    for version in targets.releases:
        tree = pins.unpack(version, targets, lambda text: print(text, file=sys.stderr))
        for role, path in PATHS.items():
            source = (tree / "sglang" / path).read_bytes()
            result = TRANSFORMS[role].apply(source)
            if not isinstance(result, Edited):
                print(f"{version} {role}: {result}")
                return 3
            pairs[role][sha256(source)] = (sha256(result.new), places(source, result.new))
            golden, diff = GOLDEN / version / f"{role}.diff", zero_context_diff(role, source, result.new)
            if not golden.exists() or golden.read_text() != diff:
                differs = True
                print(f"{version} {role}: {'differs' if check else 'written'}")
                if not check:
                    golden.parent.mkdir(parents=True, exist_ok=True)
                    golden.write_text(diff)
    if PROVEN.read_text() != proven_text(pairs):
        differs = True
        print(f"{PROVEN.name}: {'differs' if check else 'written'}")
        if not check:
            PROVEN.write_text(proven_text(pairs))
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
