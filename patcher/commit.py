"""Write a plan to disk: all of it, or none.

Each file is replaced by a rename of a complete, synced file beside it, never written through: hard links (uv's cache,
sibling environments) keep their bytes. Originals and manifest are in place before the first file changes, so that a
run killed at any moment leaves a tree that the next ``patch`` completes or the next ``revert`` undoes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from .errors import DynspecError
from .manifest import MANIFEST_NAME, ORIGINALS_DIR, STATE_DIR, Manifest
from .outcomes import Exit
from .plan import Write

_TEMP_MARK = ".dynspec-tmp-"
_LOCK_WAIT_S = 10.0


@contextlib.contextmanager
def locked(package: Path) -> Iterator[None]:
    """Hold the lock of one tree, kept outside it (a read-only tree has one too).

    Raises:
        DynspecError: another dynspec holds it for longer than ten seconds.
    """
    key = hashlib.sha256(os.fsencode(os.path.realpath(package))).hexdigest()[:24]
    try:
        path = Path(tempfile.gettempdir()) / f"dynspec-{key}.lock"
    except OSError as error:
        raise DynspecError(
            "a temporary folder that can be written", str(error), "TMPDIR", "make room, or set TMPDIR"
        ) from error
    try:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except PermissionError:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise DynspecError(
            "a lock file that can be opened",
            error.strerror or str(error),
            str(path),
            "remove what stands in its place, or set TMPDIR to a folder that can be written",
        ) from error
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DynspecError(
                        "this tree for dynspec alone",
                        "another dynspec at work on it",
                        str(package),
                        "wait for it to end, then run the command again",
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def read_file(path: Path) -> bytes | None:
    """The bytes, or None where there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def link_target(path: Path) -> str | None:
    """Where a symbolic link leads, as it is written there; None for anything else."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def read_state(package: Path) -> tuple[Manifest | None, dict[str, bytes]]:
    """The manifest and the kept originals; anything unreadable counts as not there."""
    state = package / STATE_DIR
    data = None
    with contextlib.suppress(OSError):
        data = read_file(state / MANIFEST_NAME)
    manifest = Manifest.from_bytes(data) if data is not None else None
    originals = {}
    for entry in manifest.entries if manifest else ():
        if "/" in entry.role or entry.role.startswith("."):
            continue
        with contextlib.suppress(OSError):
            original = read_file(state / ORIGINALS_DIR / entry.role)
            if original is not None:
                originals[entry.role] = original
    return manifest, originals


def commit(
    package: Path, writes: Sequence[Write], manifest: Manifest | None, originals: Mapping[str, bytes]
) -> None:
    """Carry out ``writes`` in order and leave ``manifest`` and ``originals`` (None: no state at all) behind.

    Raises:
        DynspecError: a file could not be written, or is not what the plan saw. Everything is rolled back.
        KeyboardInterrupt: passed on, after everything is rolled back.
    """
    state = package / STATE_DIR
    before_state = _snapshot(state)
    done: list[Write] = []
    try:
        if manifest is not None:
            _write_state(state, manifest, originals)
        for write in writes:
            done.append(write)
            _carry_out(package, write)
        _verify(package, writes)
        if manifest is None:
            _remove_tree(state)
    except BaseException as error:
        _roll_back(package, done, state, before_state)
        if isinstance(error, OSError):
            raise _as_error(error, package) from error
        raise


def _carry_out(package: Path, write: Write) -> None:
    path = package / write.path
    if read_file(path) != write.old:
        raise DynspecError(
            "the bytes that were planned for",
            "a file changed by somebody else meanwhile",
            str(path),
            "run the command again",
        )
    if write.new is None:
        path.unlink()
        _sync_directory(path.parent)
    else:
        _put(path, write.new, write.new_link)
    _drop_bytecode(path)


def _put(path: Path, data: bytes, link: str | None) -> None:
    """The bytes, as the symbolic link that they were found behind where that still leads to them, else as a file."""
    if link is not None and read_file(path.parent / link) == data:
        temporary = path.parent / f"{_TEMP_MARK}{os.getpid()}-{path.name}"
        os.symlink(link, temporary)
        try:
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_directory(path.parent)
    else:
        replace(path, data)


def replace(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` by rename; mode and owner stay as they were (0644 and ours for a new file)."""
    try:
        info: os.stat_result | None = path.stat()
    except FileNotFoundError:
        info = None
    temporary = path.parent / f"{_TEMP_MARK}{os.getpid()}-{path.name}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            os.fchmod(handle, stat.S_IMODE(info.st_mode) if info else 0o644)
            if info and (info.st_uid, info.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):
                    os.fchown(handle, info.st_uid, info.st_gid)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _write_state(state: Path, manifest: Manifest, originals: Mapping[str, bytes]) -> None:
    (state / ORIGINALS_DIR).mkdir(parents=True, exist_ok=True)
    for role, data in originals.items():
        kept = state / ORIGINALS_DIR / role
        if read_file(kept) != data:
            replace(kept, data)
    replace(state / MANIFEST_NAME, manifest.to_bytes())
    _sync_directory(state.parent)


def _verify(package: Path, writes: Sequence[Write]) -> None:
    """Success only after reading the bytes again."""
    for write in writes:
        if read_file(package / write.path) != write.new:
            raise DynspecError(
                "the bytes just written",
                "other bytes",
                str(package / write.path),
                "look for another program that writes this tree; dynspec rolled back",
            )


def _roll_back(
    package: Path, done: Sequence[Write], state: Path, before_state: dict[str, bytes] | None
) -> None:
    for write in reversed(done):
        path = package / write.path
        with contextlib.suppress(OSError):
            current = read_file(path)
            if current == write.new and current != write.old:
                if write.old is None:
                    path.unlink()
                else:
                    _put(path, write.old, write.old_link)
                _drop_bytecode(path)
    with contextlib.suppress(OSError):
        _restore_snapshot(state, before_state)


def _snapshot(state: Path) -> dict[str, bytes] | None:
    if not state.is_dir():
        return None
    return {str(p.relative_to(state)): p.read_bytes() for p in state.rglob("*") if p.is_file()}


def _restore_snapshot(state: Path, before: dict[str, bytes] | None) -> None:
    if before is None:
        _remove_tree(state)
        return
    for name, data in before.items():
        if read_file(state / name) != data:
            (state / name).parent.mkdir(parents=True, exist_ok=True)
            replace(state / name, data)


def _remove_tree(state: Path) -> None:
    if state.exists():
        (state / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(state)
        _sync_directory(state.parent)


def remove_leftovers(package: Path, paths: Iterable[str]) -> None:
    """Remove temporary files that a killed run left beside the files it wrote.

    Raises:
        DynspecError: there is one and it can't be removed.
    """
    state = package / STATE_DIR
    try:
        for directory in {*((package / p).parent for p in paths), state, state / ORIGINALS_DIR}:
            for path in directory.glob(_TEMP_MARK + "*"):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise _as_error(error, package) from error


def _drop_bytecode(path: Path) -> None:
    """Remove cached bytecode of a module: Python would go on running an unchecked-hash ``.pyc`` for ever."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _as_error(error: OSError, package: Path) -> DynspecError:
    advice = {
        errno.EACCES: "run as the owner of the installation, or patch a copy (`--sglang-root`)",
        errno.EPERM: "run as the owner of the installation, or patch a copy (`--sglang-root`)",
        errno.EROFS: "patch where the file system is writable, for example while the image is built",
        errno.ENOSPC: "free some space (three files and their originals: about 2 MB)",
        errno.EDQUOT: "free some space (three files and their originals: about 2 MB)",
    }.get(error.errno or 0, "mend the cause and run the command again")
    return DynspecError(
        "a tree that can be written",
        f"{error.strerror or error} (nothing is changed: rolled back)",
        str(error.filename or package),
        advice,
        Exit.ENVIRONMENT,
    )
