"""``targets.toml``: what it says, and that a wrong one is refused with the place in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patcher.errors import DynspecError
from patcher.outcomes import Exit
from patcher.targets import Targets, default_path, load

A = "a" * 64
GOOD = f"""
[roles]
server_args = "srt/server_args.py"

[[release]]
version = "1.0"
[release.wheels]
"sglang-1.0-py3-none-any.whl" = "{A}"
[release.roles]
eagle_worker = "srt/moved/eagle_worker.py"
"""


def refused(text: str | bytes, tmp_path: Path) -> DynspecError:
    file = tmp_path / "targets.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DynspecError) as caught:
        load(file)
    assert caught.value.exit_code is Exit.USAGE
    assert str(file) in caught.value.where
    assert caught.value.next_step
    return caught.value


def test_our_own(targets: Targets) -> None:
    assert set(targets.releases) == {"0.5.9", "0.5.12"}
    assert set(targets.default_roles) == {"server_args", "eagle_worker", "eagle_worker_v2"}
    assert [w.filename for w in targets.releases["0.5.9"].wheels] == ["sglang-0.5.9-py3-none-any.whl"]
    assert {w.filename for w in targets.releases["0.5.12"].wheels} == {
        f"sglang-0.5.12-cp3{minor}-cp3{minor}-manylinux_2_34_{machine}.whl"
        for minor in (10, 11, 12, 13)
        for machine in ("aarch64", "x86_64")
    }
    digests = [w.sha256 for r in targets.releases.values() for w in r.wheels]
    assert len(set(digests)) == len(digests)
    assert default_path().name == "targets.toml"


def test_roles_of_a_release_and_of_none(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(GOOD)
    found = load(file)
    assert found.roles_for("1.0") == {"eagle_worker": "srt/moved/eagle_worker.py"}
    for version in (None, "2.0"):
        assert found.roles_for(version) == {"server_args": "srt/server_args.py"}
    wheel = found.release("1.0").wheel("sglang-1.0-py3-none-any.whl")
    assert wheel is not None
    assert wheel.sha256 == A
    assert found.release("1.0").wheel("other") is None
    with pytest.raises(DynspecError, match=re.escape("1.0; found 2.0")) as caught:
        found.release("2.0")
    assert caught.value.exit_code is Exit.USAGE


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("[roles]", "[rolls]", "top level"),
        ('version = "1.0"', 'version = "1.0"\nyanked = true', "release[0]"),
        ('version = "1.0"', "version = 1.0", "release[0].version"),
        ('version = "1.0"', 'version = ""', "release[0].version"),
        ('version = "1.0"', 'version = "1.1"', "release[0].wheels"),
        (A, A[1:], "release[0].wheels.sglang-1.0-py3-none-any.whl"),
        (A, A.upper(), "release[0].wheels.sglang-1.0-py3-none-any.whl"),
        (A, "g" * 64, "release[0].wheels.sglang-1.0-py3-none-any.whl"),
        (f'"{A}"', "3", "release[0].wheels.sglang-1.0-py3-none-any.whl"),
        ("sglang-1.0-py3-none-any.whl", "torch-1.0-py3-none-any.whl", "release[0].wheels"),
        ("sglang-1.0-py3-none-any.whl", "../sglang-1.0-py3-none-any.whl", "release[0].wheels"),
        (f'"sglang-1.0-py3-none-any.whl" = "{A}"', "", "release[0].wheels"),
        ("[release.wheels]", "[release.wheel]", "release[0]"),
        ('eagle_worker = "', 'scheduler = "', "release[0].roles"),
        ("srt/moved", "../moved", "release[0].roles.eagle_worker"),
        ("srt/moved", "/moved", "release[0].roles.eagle_worker"),
        ('"srt/server_args.py"', '"srt/server_args.txt"', "roles.server_args"),
        ('"srt/server_args.py"', '["srt"]', "roles.server_args"),
        ('server_args = "srt/server_args.py"', "", "roles"),
    ],
)
def test_what_it_may_not_say(old: str, new: str, where: str, tmp_path: Path) -> None:
    assert GOOD.count(old) == 1
    assert refused(GOOD.replace(old, new), tmp_path).where.endswith(f", {where}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "roles = 1",
        "release = 1\n[roles]\nserver_args='a.py'",
        "release = [1]\n[roles]\nserver_args='a.py'",
    ],
)
def test_shapes(text: str, tmp_path: Path) -> None:
    refused(text, tmp_path)


def test_a_version_twice(tmp_path: Path) -> None:
    again = GOOD[GOOD.index("[[release]]") :]
    assert refused(GOOD + again, tmp_path).expected == "each version once"


@pytest.mark.parametrize("text", [b"[roles", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_not_toml(text: bytes, tmp_path: Path) -> None:
    assert refused(text, tmp_path).expected == "TOML"


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "nosuch.toml", tmp_path):
        with pytest.raises(DynspecError, match="a file that can be read") as caught:
            load(path)
        assert caught.value.exit_code is Exit.USAGE
