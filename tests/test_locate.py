"""Where an sglang is found, and that nothing of it runs meanwhile. Made-up packages; no text of sglang's own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from patcher import locate
from patcher.errors import DynspecError
from patcher.outcomes import Exit


def make_package(folder: Path, init: bool = True, version_file: str | None = None) -> Path:
    """``folder/sglang``, which leaves a file ``imported`` behind if anybody imports it."""
    package = folder / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt" / "server_args.py").write_text("")
    if init:
        (package / "__init__.py").write_text(
            "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\nraise RuntimeError\n"
        )
    if version_file is not None:
        (package / "version.py").write_text(version_file)
    return package


def add_dist_info(folder: Path, version: str) -> None:
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n\nVersion: 9\n")


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A bare virtual environment: its interpreter and its site-packages folder."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    return str(tmp_path / "venv" / "bin" / "python"), site


def refused(call: Callable[[], object]) -> DynspecError:
    with pytest.raises(DynspecError) as caught:
        call()
    assert caught.value.exit_code is Exit.ENVIRONMENT
    return caught.value


# --sglang-root


@pytest.mark.parametrize(
    ("below", "given"),
    [("python", ""), ("python", "python"), ("", ""), ("", "sglang"), ("python", "python/sglang")],
    ids=["checkout", "python folder", "site-packages", "package", "package of a checkout"],
)
def test_root_of_each_kind(below: str, given: str, tmp_path: Path) -> None:
    package = make_package(tmp_path / below)
    tree = locate.find_root(tmp_path / given)
    assert (tree.package, tree.version, tree.python) == (package, None, None)


def test_relative_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert locate.find_root(Path(".")).package == package
    monkeypatch.chdir(package)
    assert locate.find_root(Path(".")).package == package


@pytest.mark.parametrize("kind", ["missing", "empty folder", "file", "remnant"])
def test_root_without_sglang_names_every_path(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    if kind == "file":
        root.write_text("")
    elif kind != "missing":
        root.mkdir()
    if kind == "remnant":
        (root / "sglang" / "srt" / "speculative").mkdir(parents=True)
    error = refused(lambda: locate.find_root(root))
    for looked in (root, root / "sglang", root / "python" / "sglang"):
        assert str(looked) in error.found.replace(",", " ").split()
    assert ("no such folder" in error.found) == (kind == "missing")
    assert f"--sglang-root {root}" in error.where


def test_two_candidates_are_both_named(tmp_path: Path) -> None:
    one, two = make_package(tmp_path), make_package(tmp_path / "python")
    error = refused(lambda: locate.find_root(tmp_path))
    assert error.expected == "one sglang"
    assert str(one) in error.found
    assert str(two) in error.found


def test_a_link_to_the_same_package_is_no_second_one(tmp_path: Path) -> None:
    make_package(tmp_path / "python")
    (tmp_path / "sglang").symlink_to(tmp_path / "python" / "sglang")
    assert locate.find_root(tmp_path).package == tmp_path / "sglang"


def test_symlinked_site_packages(env: tuple[str, Path], tmp_path: Path) -> None:
    exe, site = env
    package = make_package(site)
    link = tmp_path / "link"
    link.symlink_to(site)
    tree = locate.find_root(link)
    assert tree.package == link / "sglang"
    assert os.path.samefile(tree.package, package)
    assert tree.python == exe


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", deny)
    assert refused(lambda: locate.find_root(tmp_path)).found == "Permission denied"


def test_python_of_a_virtual_environment(env: tuple[str, Path]) -> None:
    exe, site = env
    make_package(site)
    assert locate.find_root(site).python == exe
    assert locate.find_root(site / "sglang").python == exe
    os.unlink(exe)
    assert locate.find_root(site).python is None


def test_a_checkout_inside_a_virtual_environment_is_not_its_site_packages(env: tuple[str, Path]) -> None:
    checkout = Path(env[0]).parent.parent / "src" / "sglang"
    make_package(checkout / "python")
    assert locate.find_root(checkout).python is None


# version


def test_version_is_that_of_the_metadata(tmp_path: Path) -> None:
    package = make_package(tmp_path, version_file='__version__ = "1.0"\n')
    add_dist_info(tmp_path, "0.5.9")
    (tmp_path / "sglang_router-0.1.dist-info").mkdir()
    assert locate.read_version(package) == "0.5.9"


def test_two_metadata_folders_decide_nothing(tmp_path: Path) -> None:
    package = make_package(tmp_path, version_file='__version__ = "1.0"\n')
    add_dist_info(tmp_path, "0.5.9")
    add_dist_info(tmp_path, "0.5.12")
    assert locate.read_version(package) == "1.0"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('__version__ = "0.5.9"', "0.5.9"),
        ('__version__ = version = "0.5.12.dev3+gabc"', "0.5.12.dev3+gabc"),
        ('version: str\n__version__: str = "2"', "2"),
        ("__version__ = compute()", None),
        ("raise SystemExit('run')", None),
        ("not python (", None),
        ("\0", None),
        ("", None),
    ],
)
def test_version_file_is_read_and_never_run(text: str, version: str | None, tmp_path: Path) -> None:
    assert locate.read_version(make_package(tmp_path, version_file=text)) == version


@pytest.mark.parametrize("version", ["0.5.9", "0.5.12"])
def test_a_real_release(version: str, release_tree: Callable[[str], Path]) -> None:
    site = release_tree(version)
    assert locate.find_root(site).version == version
    for info in site.glob("*.dist-info"):
        (info / "METADATA").unlink()
    assert locate.find_root(site).version == version  # from its version file


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("0.5.12", "0.5.12"),
        ("v0.5.12", "0.5.12"),
        ("0.5.9.post1+CU12.6-x", "0.5.9.post1+cu12.6.x"),
        ("0.5.9-1", "0.5.9.post1"),
        ("0.6.0RC1", "0.6.0rc1"),
        ("0.6.0-alpha.02.dev", "0.6.0a2.dev0"),
        ("1!00.06", "1!0.6"),
        ("0.0.0.dev1+g1234567.d20260101", "0.0.0.dev1+g1234567.d20260101"),
        ("main", None),
        ("", None),
    ],
)
def test_normalised_versions(raw: str, normal: str | None) -> None:
    assert locate.normalized(raw) == normal
    assert raw in locate.shown(raw)
    assert normal is None or normal in locate.shown(raw)


def test_normalised_as_packaging_does() -> None:
    packaging = pytest.importorskip("packaging.version")
    for raw in ("1.0-rev", "1.0r2", "1.0c1", "1.0_preview_3", "1.0.post.2.dev_4", "2!1.0.0+Ab_07.c"):
        assert locate.normalized(raw) == str(packaging.Version(raw))


# --python


def test_installed_and_not_imported(env: tuple[str, Path]) -> None:
    exe, site = env
    package = make_package(site)
    add_dist_info(site, "0.5.9")
    tree = locate.find_for_python(exe)
    assert (tree.package, tree.version, tree.python) == (package, "0.5.9", exe)
    assert not (package / "imported").exists()


def test_none_installed_names_where_it_looked(env: tuple[str, Path]) -> None:
    exe, site = env
    error = refused(lambda: locate.find_for_python(exe))
    assert error.found.startswith("none; looked at ")
    assert str(site) in error.found


def test_editable_by_pth(env: tuple[str, Path], tmp_path: Path) -> None:
    exe, site = env
    package = make_package(tmp_path / "checkout" / "python")
    (site / "__editable__.sglang.pth").write_text(f"{package.parent}\n")
    add_dist_info(site, "0.5.12.dev7")
    tree = locate.find_for_python(exe)
    assert (tree.package, tree.version) == (package, "0.5.12.dev7")


def test_editable_by_a_pep_660_finder(env: tuple[str, Path], tmp_path: Path) -> None:
    exe, site = env
    package = make_package(tmp_path / "checkout" / "python")
    (site / "sglang_finder.py").write_text(
        "import sys\n"
        "from importlib.util import spec_from_file_location\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name == 'sglang':\n"
        f"            return spec_from_file_location(name, {str(package / '__init__.py')!r})\n"
        "def install():\n"
        "    sys.meta_path.append(Finder)\n"
    )
    (site / "sglang.pth").write_text("import sglang_finder; sglang_finder.install()\n")
    assert locate.find_for_python(exe).package == package
    assert not (package / "imported").exists()


def test_a_remnant_alone_is_no_sglang(env: tuple[str, Path]) -> None:
    exe, site = env
    (site / "sglang" / "srt" / "speculative").mkdir(parents=True)
    error = refused(lambda: locate.find_for_python(exe))
    assert error.found == f"no srt/server_args.py in {site / 'sglang'}"


def test_a_remnant_before_the_real_one(
    env: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exe, site = env
    (tmp_path / "first" / "sglang" / "srt").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "first"))
    package = make_package(site)
    assert locate.find_for_python(exe).package == package


def test_namespace_packages(env: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exe, site = env
    package = make_package(site, init=False)
    (tmp_path / "a" / "sglang" / "srt").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "a"))
    assert locate.find_for_python(exe).package == package
    second = make_package(tmp_path / "b", init=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "b"))
    error = refused(lambda: locate.find_for_python(exe))
    assert str(package) in error.found
    assert str(second) in error.found


def test_pythonpath_counts_and_the_current_folder_does_not(
    env: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exe, site = env
    installed, here = make_package(site), make_package(tmp_path / "here")
    monkeypatch.chdir(here.parent)
    assert locate.find_for_python(exe).package == installed
    for value in (
        str(here.parent),
        ".",
        f"{os.pathsep}/nosuch",
    ):  # relative and empty entries mean this folder
        monkeypatch.setenv("PYTHONPATH", value)
        assert locate.find_for_python(exe).package == here


def test_noise_on_stdout(env: tuple[str, Path]) -> None:
    exe, site = env
    package = make_package(site)
    (site / "sitecustomize.py").write_text("import atexit\nprint('hello')\natexit.register(print, 'bye')\n")
    assert locate.find_for_python(exe).package == package


def test_a_relative_interpreter(env: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    exe, site = env
    package = make_package(site)
    monkeypatch.chdir(Path(exe).parent)
    assert locate.find_for_python("./python").package == package


def test_a_finder_that_fails_is_said(env: tuple[str, Path]) -> None:
    exe, site = env
    (site / "broken.py").write_text("class F:\n    def find_spec(*a): raise OSError('boom')\n")
    (site / "x.pth").write_text("import sys, broken; sys.meta_path.insert(0, broken.F())\n")
    error = refused(lambda: locate.find_for_python(exe))
    assert "boom" in error.found


@pytest.mark.parametrize("kind", ["missing", "not on PATH", "true", "folder", "text", "empty", "failing"])
def test_not_an_interpreter(kind: str, tmp_path: Path) -> None:
    text, failing = tmp_path / "text", tmp_path / "failing"
    text.write_text("hello\n")
    failing.write_text("#!/bin/sh\necho first >&2\necho the last line >&2\nexit 3\n")
    failing.chmod(0o755)
    exe = {
        "missing": str(tmp_path / "nosuch"),
        "not on PATH": "dynspec-no-such-python",
        "true": "/bin/true",
        "folder": str(tmp_path),
        "text": str(text),
        "empty": "",
        "failing": str(failing),
    }[kind]
    error = refused(lambda: locate.find_for_python(exe))
    assert error.expected == "a Python interpreter"
    assert error.where == f"--python {exe}"
    if kind == "failing":
        assert error.found == "exit code 3: the last line"


def test_an_interpreter_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(locate, "_TIMEOUT_S", 0.3)
    assert "no answer within" in refused(lambda: locate.find_for_python(str(slow))).found


def test_current_interpreter(env: tuple[str, Path]) -> None:
    exe, site = env
    package = make_package(site)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from patcher import locate; print(locate.find_for_current().package)"
    root = str(Path(locate.__file__).parent.parent)
    run = subprocess.run([exe, "-c", code, root], capture_output=True, text=True, check=True, cwd=site.parent)
    assert run.stdout.strip() == str(package)
    assert not (package / "imported").exists()
    assert Path(sys.executable) != Path(exe)
