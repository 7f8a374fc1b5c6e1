"""``python -m patcher`` and the ``dynspec`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        from . import __version__

        print(f"dynspec {__version__}")
        return
    import gc

    from .cli import run

    # A short-lived process that builds large syntax trees without cycles: collecting them costs a fifth of the time.
    gc.disable()
    sys.exit(run())


if __name__ == "__main__":
    main()
