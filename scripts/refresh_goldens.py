#!/usr/bin/env python3
"""Write tests/fixtures/golden/ anew: zero-context diffs of dynspec's own lines, for each pinned release.

python scripts/refresh_goldens.py [--check]      # --check writes nothing and exits 1 if one differs
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_transforms import GOLDEN, PATHS, zero_context_diff  # noqa: E402

from patcher import pins  # noqa: E402
from patcher.targets import load  # noqa: E402
from patcher.transforms import TRANSFORMS  # noqa: E402
from patcher.transforms.base import Edited  # noqa: E402


def main(check: bool) -> int:
    targets, differs = load(), False
    for version in targets.releases:
        tree = pins.unpack(version, targets, lambda text: print(text, file=sys.stderr))
        for role, path in PATHS.items():
            source = (tree / "sglang" / path).read_bytes()
            result = TRANSFORMS[role].apply(source)
            if not isinstance(result, Edited):
                print(f"{version} {role}: {result}")
                return 3
            golden, diff = GOLDEN / version / f"{role}.diff", zero_context_diff(role, source, result.new)
            if not golden.exists() or golden.read_text() != diff:
                differs = True
                print(f"{version} {role}: {'differs' if check else 'written'}")
                if not check:
                    golden.parent.mkdir(parents=True, exist_ok=True)
                    golden.write_text(diff)
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
