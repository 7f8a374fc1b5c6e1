"""The closed sets of outcomes, levels and verdicts, and the values that carry them.

Nothing here does I/O. Every other module returns these; only :mod:`patcher.cli` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum


class Outcome(str, Enum):
    """What became of one file, or of the set."""

    APPLIED = "applied"
    ALREADY = "already"
    NOT_NEEDED = "not_needed"
    WOULD_APPLY = "would_apply"
    REVERTED = "reverted"
    DRIFT = "drift"
    UNSUPPORTED = "unsupported"
    PARTIAL = "partial"
    FOREIGN = "foreign"
    ERROR = "error"


class Exit(IntEnum):
    """Exit codes, the same for every command."""

    OK = 0
    NOT_AS_ASKED = 1
    USAGE = 2
    DRIFT = 3
    ENVIRONMENT = 4
    INTERRUPTED = 130


class Verdict(str, Enum):
    """The answer of ``dynspec verify``."""

    ACTIVE = "ACTIVE"
    OFF = "OFF"
    INERT = "INERT"
    NOT_SPECULATIVE = "NOT_SPECULATIVE"
    UNSUPPORTED = "UNSUPPORTED"
    REFUSED = "REFUSED"
    UNPATCHED = "UNPATCHED"
    STALE = "STALE"
    BROKEN = "BROKEN"


class Level(str, Enum):
    """How far a verdict was proven, weakest first."""

    SOURCE = "source"
    IMPORT = "import"
    SELECT = "select"
    CONSTRUCT = "construct"
    EXERCISE = "exercise"
    SERVE = "serve"

    @property
    def rank(self) -> int:
        """Position in the order ``source < import < select < construct < exercise < serve``."""
        return list(Level).index(self)


@dataclass(frozen=True)
class FileResult:
    """One file of the set. ``path`` is relative to the ``sglang`` package directory."""

    role: str
    path: str
    outcome: Outcome
    before_sha256: str | None = None
    after_sha256: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class SetResult:
    """The whole set, as ``patch``, ``revert`` and ``status`` report it."""

    command: str
    root: str
    sglang_version: str | None
    outcome: Outcome
    exit_code: Exit
    files: tuple[FileResult, ...] = ()
    detail: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)
