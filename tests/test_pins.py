"""Fetching by name and sha256, and unpacking: real pip, an index in a folder; then the real releases from PyPI."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import stat
import threading
import zipfile
from pathlib import Path

import pytest

from patcher import pins
from patcher.errors import DynspecError
from patcher.outcomes import Exit
from patcher.targets import Release, Targets, Wheel

NAME = "sglang-1.0-py3-none-any.whl"


def make_wheel(folder: Path, extra: dict[str, str] | None = None) -> Path:
    files = {
        "sglang/__init__.py": "",
        "sglang/srt/server_args.py": "x = 1\n",
        "sglang-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\n",
        "sglang-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "sglang-1.0.dist-info/RECORD": "",
        **(extra or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return folder / NAME


def pinned(wheel: Path) -> Targets:
    return pinned_as(hashlib.sha256(wheel.read_bytes()).hexdigest())


def pinned_as(digest: str, name: str = NAME) -> Targets:
    return Targets(Path("targets.toml"), {}, {"1.0": Release("1.0", (Wheel(name, digest),), {})})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip sees, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("DYNSPEC_CACHE", str(tmp_path / "cache"))
    return folder


def refused(targets: Targets, unpack: bool = False) -> DynspecError:
    with pytest.raises(DynspecError) as caught:
        (pins.unpack if unpack else pins.fetch)("1.0", targets)
    assert caught.value.exit_code is Exit.ENVIRONMENT
    return caught.value


def leftovers() -> list[str]:
    return [p.name for p in pins.cache_dir().glob("*/.*") if p.name != ".lock"]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNSPEC_CACHE", str(tmp_path))
    assert pins.cache_dir() == tmp_path
    monkeypatch.setenv("DYNSPEC_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pins.cache_dir() == tmp_path / ".cache" / "dynspec"


def test_fetch_once_and_say_so(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = make_wheel(index)
    targets, said = pinned(source), list[str]()
    wheel = pins.fetch("1.0", targets, said.append)
    assert wheel == pins.cache_dir() / "wheels" / NAME
    assert wheel.read_bytes() == source.read_bytes()
    assert len(said) == 1
    source.unlink()
    assert pins.fetch("1.0", targets, said.append) == wheel
    assert len(said) == 1
    assert leftovers() == []
    assert capfd.readouterr() == ("", "")


def test_a_damaged_cached_wheel_is_fetched_anew(index: Path) -> None:
    source = make_wheel(index)
    cached = pins.fetch("1.0", pinned(source))
    cached.write_bytes(cached.read_bytes()[:-1])
    assert pins.fetch("1.0", pinned(source)).read_bytes() == source.read_bytes()


def test_other_bytes_than_pinned_are_not_kept(index: Path) -> None:
    source = make_wheel(index)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    error = refused(pinned_as("0" * 64))
    assert ("0" * 64 in error.expected, digest in error.found, error.where) == (True, True, NAME)
    assert not (pins.cache_dir() / "wheels" / NAME).exists()
    assert leftovers() == []


def test_a_wheel_that_is_not_pinned(index: Path) -> None:
    make_wheel(index)
    error = refused(pinned_as("0" * 64, "sglang-1.0-cp310-cp310-manylinux_2_34_x86_64.whl"))
    assert error.found == NAME


def test_pips_reason_is_given(index: Path) -> None:
    error = refused(pinned_as("0" * 64))
    assert error.found == "ERROR: No matching distribution found for sglang==1.0"
    assert leftovers() == []


def test_no_network(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    for name, value in {
        "INDEX_URL": "http://127.0.0.1:9/simple",
        "EXTRA_INDEX_URL": "",
        "RETRIES": "0",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert refused(pinned_as("0" * 64)).found.startswith("ERROR: ")


def test_not_pinned_is_a_usage_error(index: Path) -> None:
    with pytest.raises(DynspecError) as caught:
        pins.fetch("2.0", pinned_as("0" * 64))
    assert caught.value.exit_code is Exit.USAGE


def test_a_cache_that_can_not_be_written(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DYNSPEC_CACHE", str(tmp_path / "file"))
    assert "DYNSPEC_CACHE" in refused(pinned(make_wheel(index))).next_step


def test_no_space_while_unpacking(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = pinned(make_wheel(index))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(zipfile.ZipFile, "extractall", full)
        assert refused(targets, unpack=True).found == "No space left on device"
    assert leftovers() == []
    assert (pins.unpack("1.0", targets) / "sglang").is_dir()


def test_unpack_once(index: Path) -> None:
    targets = pinned(make_wheel(index))
    tree = pins.unpack("1.0", targets)
    assert (tree / "sglang" / "srt" / "server_args.py").read_text() == "x = 1\n"
    assert stat.S_IMODE(tree.stat().st_mode) == 0o755
    inode = tree.stat().st_ino
    assert (pins.unpack("1.0", targets), tree.stat().st_ino) == (tree, inode)
    assert leftovers() == []


@pytest.mark.parametrize("damage", ["file gone", "file cut", "no stamp", "other stamp"])
def test_a_damaged_tree_is_unpacked_anew(damage: str, index: Path) -> None:
    targets = pinned(make_wheel(index))
    tree = pins.unpack("1.0", targets)
    file, stamp = tree / "sglang" / "srt" / "server_args.py", tree / ".dynspec-wheel"
    if damage == "file gone":
        file.unlink()
    elif damage == "file cut":
        file.write_text("")
    elif damage == "no stamp":
        stamp.unlink()
    else:
        stamp.write_text("0" * 64)
    assert pins.unpack("1.0", targets) == tree
    assert file.read_text() == "x = 1\n"
    assert len(stamp.read_text().strip()) == 64
    assert leftovers() == []


@pytest.mark.parametrize(
    "name", ["../evil.py", "sglang/../../evil.py", "/evil.py", "..\\evil.py", "C:/evil.py"]
)
def test_a_path_out_of_the_wheel(name: str, index: Path) -> None:
    # Not through pip, which refuses some of these itself: as if the pin were of such a file.
    source = make_wheel(pins.cache_dir() / "wheels", {name: "evil"})
    assert refused(pinned(source), unpack=True).expected == "only paths inside the wheel"
    assert not list(pins.cache_dir().parent.rglob("*evil*"))
    assert leftovers() == []


def test_a_pinned_file_that_is_no_zip(index: Path) -> None:
    (pins.cache_dir() / "wheels").mkdir(parents=True)
    source = pins.cache_dir() / "wheels" / NAME
    source.write_text("hello")
    assert refused(pinned(source), unpack=True).expected == "a wheel"


def _unpack(targets: Targets) -> str:
    tree = pins.unpack("1.0", targets)
    return f"{os.stat(tree).st_ino} {(tree / 'sglang/srt/server_args.py').read_text()}"


def test_at_the_same_time(index: Path) -> None:
    targets = pinned(make_wheel(index))
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(_unpack, [targets] * 8, chunksize=1))) == 1
    assert leftovers() == []


@pytest.mark.parametrize("folder", ["wheels", "trees"])
def test_waits_for_another_process(folder: str, index: Path) -> None:
    targets = pinned(make_wheel(index))
    tree = pins.unpack("1.0", targets)
    with open(pins.cache_dir() / folder / ".lock", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done: list[Path] = []
        other = threading.Thread(target=lambda: done.append(pins.unpack("1.0", targets)), daemon=True)
        other.start()
        other.join(0.5)
        assert done == []
    other.join(30)
    assert done == [tree]


@pytest.mark.parametrize("version", ["0.5.9", "0.5.12"])
def test_a_real_release_from_pypi(
    version: str, targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNSPEC_CACHE", str(tmp_path))
    said = list[str]()
    tree = pins.unpack(version, targets, said.append)
    assert len(said) == 1
    for path in targets.roles_for(version).values():
        assert (tree / "sglang" / path).is_file()
    wheel = pins.fetch(version, targets, said.append)
    assert len(said) == 1
    found = targets.release(version).wheel(wheel.name)
    assert found is not None
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == found.sha256
