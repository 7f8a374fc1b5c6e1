"""``python -m patcher`` and the ``dynspec`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from . import __version__

        print(f"dynspec {__version__}")
        return
    from .cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
