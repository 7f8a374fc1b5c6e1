"""Errors that tell what was expected, what was found, where, and what to do next."""

from __future__ import annotations

from .outcomes import Exit


class DynspecError(Exception):
    """A failure that a person has to act on.

    Args:
        expected: what should have been there.
        found: what was there instead.
        where: the path, option or interpreter it is about.
        next_step: what to do about it.
        exit_code: the process exit code that it maps to.
    """

    def __init__(
        self, expected: str, found: str, where: str, next_step: str, exit_code: Exit = Exit.ENVIRONMENT
    ) -> None:
        self.expected = expected
        self.found = found
        self.where = where
        self.next_step = next_step
        self.exit_code = exit_code
        super().__init__(f"expected {expected}; found {found} ({where}). Next: {next_step}")
