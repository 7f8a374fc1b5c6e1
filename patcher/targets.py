"""``targets.toml``: the releases that dynspec is checked against, by wheel name and sha256, and their files."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DynspecError
from .outcomes import Exit

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

KNOWN_ROLES = ("server_args", "eagle_worker", "eagle_worker_v2")


@dataclass(frozen=True)
class Wheel:
    """One file of a release on PyPI."""

    filename: str
    sha256: str


@dataclass(frozen=True)
class Release:
    """One pinned release. ``roles``: role -> path below the ``sglang`` package."""

    version: str
    wheels: tuple[Wheel, ...]
    roles: Mapping[str, str]

    def wheel(self, filename: str) -> Wheel | None:
        """The wheel of that name, if it is pinned."""
        return next((w for w in self.wheels if w.filename == filename), None)


@dataclass(frozen=True)
class Targets:
    """All of ``targets.toml``."""

    path: Path
    default_roles: Mapping[str, str]
    releases: Mapping[str, Release]

    def roles_for(self, version: str | None) -> Mapping[str, str]:
        """The files of a version; of an unknown one, the default ones (its content then decides)."""
        release = self.releases.get(version) if version else None
        return release.roles if release else self.default_roles

    def release(self, version: str) -> Release:
        """A pinned release.

        Raises:
            DynspecError: it is not pinned.
        """
        if version not in self.releases:
            raise DynspecError(
                f"a pinned release: {', '.join(self.releases)}",
                version,
                str(self.path),
                "name one of those",
                Exit.USAGE,
            )
        return self.releases[version]


def default_path() -> Path:
    """``targets.toml`` inside the installed package, or at the root of a checkout."""
    packaged = Path(__file__).with_name("targets.toml")
    return packaged if packaged.exists() else Path(__file__).resolve().parent.parent / "targets.toml"


def load(path: Path | None = None) -> Targets:
    """Read and validate a targets file; None means dynspec's own.

    Raises:
        DynspecError: the file is missing, is not TOML, or says something that it may not.
    """
    path = path or default_path()
    try:
        value = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise _bad(path, "a file that can be read", error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _bad(path, "TOML", str(error)) from error
    _only(path, "", value, {"roles", "release"})
    default = _roles(path, "roles", value.get("roles", {}))
    releases: dict[str, Release] = {}
    for i, item in enumerate(_list(path, "release", value.get("release", []))):
        where = f"release[{i}]"
        if not isinstance(item, dict):
            raise _bad(path, "a table", repr(item), where)
        _only(path, where, item, {"version", "wheels", "roles"})
        version = item.get("version")
        if not isinstance(version, str) or not version:
            raise _bad(path, "a version", repr(version), f"{where}.version")
        if version in releases:
            raise _bad(path, "each version once", version, f"{where}.version")
        wheels = tuple(
            _wheel(path, f"{where}.wheels", version, name, digest)
            for name, digest in _table(path, f"{where}.wheels", item.get("wheels")).items()
        )
        if not wheels:
            raise _bad(path, "at least one wheel", "none", f"{where}.wheels")
        roles = _roles(path, f"{where}.roles", item["roles"]) if "roles" in item else default
        releases[version] = Release(version, wheels, roles)
    return Targets(path, default, releases)


def _wheel(path: Path, where: str, version: str, name: str, digest: Any) -> Wheel:
    if not re.fullmatch(r"sglang-[\w.]+(-[\w.]+)+\.whl", name):
        raise _bad(path, "the file name of an sglang wheel", name, where)
    if name.split("-")[1] != version:
        raise _bad(path, f"a wheel of {version}", name, where)
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _bad(path, "a sha256 (64 hex digits)", repr(digest), f"{where}.{name}")
    return Wheel(name, digest)


def _roles(path: Path, where: str, value: Any) -> dict[str, str]:
    table = _table(path, where, value)
    for role, file in table.items():
        if role not in KNOWN_ROLES:
            raise _bad(path, f"a role: {', '.join(KNOWN_ROLES)}", role, where)
        parts = Path(file).parts if isinstance(file, str) else ("..",)
        if not parts or ".." in parts or Path(str(file)).is_absolute() or not str(file).endswith(".py"):
            raise _bad(path, "a path of a .py file below the sglang package", repr(file), f"{where}.{role}")
    if not table:
        raise _bad(path, "at least one role", "none", where)
    return {str(role): str(file) for role, file in table.items()}


def _table(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(path, "a table", repr(value), where)
    return value


def _list(path: Path, where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(path, "an array of tables", repr(value), where)
    return value


def _only(path: Path, where: str, table: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise _bad(
            path, f"only the keys {', '.join(sorted(known))}", ", ".join(unknown), where or "top level"
        )


def _bad(path: Path, expected: str, found: str, where: str = "") -> DynspecError:
    place = f"{path}, {where}" if where else str(path)
    return DynspecError(expected, found, place, "mend the file, or leave --targets away", Exit.USAGE)
