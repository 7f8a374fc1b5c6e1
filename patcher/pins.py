"""Fetch pinned releases from PyPI by name and sha256 into a cache outside the tree."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import DynspecError
from .targets import Targets, Wheel

Progress = Callable[[str], None]
_STAMP = ".dynspec-wheel"  # the sha256 of the wheel that a tree was unpacked from


def cache_dir() -> Path:
    """``$DYNSPEC_CACHE``, or ``~/.cache/dynspec``."""
    return Path(os.environ.get("DYNSPEC_CACHE") or Path.home() / ".cache" / "dynspec")


def fetch(version: str, targets: Targets, progress: Progress | None = None) -> Path:
    """A pinned wheel of ``version`` for this machine, from the cache or from PyPI; its sha256 is checked each time.

    Raises:
        DynspecError: not pinned, not to be had, or not the pinned bytes.
    """
    release = targets.release(version)
    folder = cache_dir() / "wheels"
    with _locked(folder):
        for wheel in release.wheels:
            cached = folder / wheel.filename
            if cached.exists() and _digest(cached) == wheel.sha256 and _fits(wheel):
                return cached
        if progress:
            progress(f"fetching sglang {version} from PyPI")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            fetched = _download(version, Path(temporary))
            pinned = release.wheel(fetched.name)
            if pinned is None:
                raise DynspecError(
                    "one of " + ", ".join(w.filename for w in release.wheels),
                    fetched.name,
                    f"PyPI, sglang {version}",
                    "add its name and sha256 to targets.toml if it is genuine",
                )
            digest = _digest(fetched)
            if digest != pinned.sha256:
                raise DynspecError(
                    f"sha256 {pinned.sha256}",
                    f"sha256 {digest}",
                    fetched.name,
                    "do not use that file; PyPI or the way to it served another",
                )
            os.replace(fetched, folder / fetched.name)
    return folder / pinned.filename


def unpack(version: str, targets: Targets, progress: Progress | None = None) -> Path:
    """A folder that holds ``sglang/`` and its dist-info as the pinned wheel has them. Read it, don't write to it.

    Raises:
        DynspecError: as :func:`fetch`.
    """
    wheel = fetch(version, targets, progress)
    folder = cache_dir() / "trees"
    digest = _digest(wheel)
    tree = folder / f"{version}-{digest[:12]}"
    with _locked(folder):
        if _complete(tree, wheel, digest):
            return tree
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".unpack-"))
        aside = temporary.with_name(temporary.name + "-old")
        try:
            _extract(wheel, temporary)
            (temporary / _STAMP).write_text(digest + "\n", "ascii")
            temporary.chmod(0o755)
            if tree.exists():  # damaged, or of a dynspec that left no stamp
                os.rename(tree, aside)
            os.rename(temporary, tree)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(aside, ignore_errors=True)
    return tree


def _complete(tree: Path, wheel: Path, digest: str) -> bool:
    """Whether a tree was unpacked from this very wheel and every file is still there at its size."""
    try:
        if (tree / _STAMP).read_text("ascii").strip() != digest:
            return False
        with zipfile.ZipFile(wheel) as archive:
            return all(
                (tree / item.filename).stat().st_size == item.file_size
                for item in archive.infolist()
                if not item.is_dir()
            )
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def _extract(wheel: Path, into: Path) -> None:
    no_use = "do not use that file; remove its pin"
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                parts = name.replace("\\", "/").split("/")
                if ".." in parts or not parts[0] or ":" in parts[0]:
                    raise DynspecError("only paths inside the wheel", repr(name), str(wheel), no_use)
            archive.extractall(into)
    except zipfile.BadZipFile as error:
        raise DynspecError("a wheel", str(error), str(wheel), no_use) from error


def _fits(wheel: Wheel) -> bool:
    """Whether this interpreter's pip would take the wheel; pure-Python ones fit everywhere."""
    tag = wheel.filename.split("-")[2]
    machine = os.uname().machine
    return wheel.filename.endswith("-none-any.whl") or (
        tag == f"cp{sys.version_info[0]}{sys.version_info[1]}" and wheel.filename.endswith(f"_{machine}.whl")
    )


def _download(version: str, into: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*command, "-q", "-d", str(into), f"sglang=={version}"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [
            line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line
        ] or ["pip gave no reason"]
        raise DynspecError(
            f"sglang {version} from PyPI",
            errors[-1].strip(),
            " ".join(command),
            "look at the network and pip's configuration, then run it again",
        )
    return wheels[0]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(file.read()).hexdigest()
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; an OSError in here or in the body is a DynspecError about the cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
    except OSError as error:
        raise DynspecError(
            "a cache folder that can be written",
            error.strerror or str(error),
            str(error.filename or folder),
            "make room, or set DYNSPEC_CACHE to another folder",
        ) from error
