"""What dynspec keeps beside a patched sglang: ``<sglang>/.dynspec/manifest.json`` and the originals.

The manifest is input like any other: whoever reads it checks each digest against the bytes at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from . import __version__

STATE_DIR = ".dynspec"
MANIFEST_NAME = "manifest.json"
ORIGINALS_DIR = "originals"
_FORMAT = 1


@dataclass(frozen=True)
class Entry:
    """One file: digests of the bytes before and after; ``before_sha256`` None for a file that dynspec added.

    ``renews_sha256``: what another dynspec had written there, while this one's bytes replace it (a killed run may leave
    either). ``link``: where the symbolic link led that stood in the file's place.
    """

    role: str
    path: str
    before_sha256: str | None
    after_sha256: str
    renews_sha256: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class Manifest:
    """Which files dynspec wrote, bound to the sglang version that they belong to."""

    dynspec: str
    sglang_version: str | None
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, sglang_version: str | None, entries: Iterable[Entry]) -> Manifest:
        """This dynspec's manifest of these entries."""
        return cls(__version__, sglang_version, tuple(sorted(entries, key=lambda e: e.role)))

    def entry(self, role: str) -> Entry | None:
        """The entry of a role, if there is one."""
        return next((e for e in self.entries if e.role == role), None)

    def to_bytes(self) -> bytes:
        """Canonical JSON: equal manifests give equal bytes."""
        value = {
            "format": _FORMAT,
            "dynspec": self.dynspec,
            "sglang_version": self.sglang_version,
            "files": [
                {
                    "role": e.role,
                    "path": e.path,
                    "before_sha256": e.before_sha256,
                    "after_sha256": e.after_sha256,
                    "renews_sha256": e.renews_sha256,
                    "link": e.link,
                }
                for e in self.entries
            ],
        }
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest | None:
        """None for anything that is not a manifest of this format."""
        try:
            value = json.loads(data)
            if value["format"] != _FORMAT:
                return None
            entries = tuple(
                Entry(
                    str(f["role"]),
                    str(f["path"]),
                    _optional(f["before_sha256"]),
                    str(f["after_sha256"]),
                    _optional(f.get("renews_sha256")),
                    _optional(f.get("link")),
                )
                for f in value["files"]
            )
            return cls(str(value["dynspec"]), _optional(value["sglang_version"]), entries)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def _optional(value: object) -> str | None:
    return None if value is None else str(value)
