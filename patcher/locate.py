"""Find an sglang without importing it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from .errors import DynspecError
from .outcomes import Exit

_SIGN = Path("srt/server_args.py")
_TIMEOUT_S = 60
# Finding a top-level package's spec runs none of its code. An editable install's finder is asked as `import` would ask it.
_ASK = """
import importlib.metadata, importlib.util, json, sys
try:
    spec = importlib.util.find_spec("sglang")
except Exception as error:
    spec, problem = None, repr(error)
else:
    problem = None
locations = list(spec.submodule_search_locations or []) if spec else []
try:
    version = importlib.metadata.version("sglang")
except Exception:
    version = None
answer = {"locations": locations, "executable": sys.executable, "problem": problem, "version": version}
print("DYNSPEC" + json.dumps({**answer, "path": [p for p in sys.path if p]}))
"""


@dataclass(frozen=True)
class SglangTree:
    """One sglang. ``package``: its ``sglang`` folder; ``how`` it was found; ``python``: the interpreter that it belongs to."""

    package: Path
    version: str | None
    how: str
    python: str | None = None


_PEP440 = re.compile(
    r"v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<pre>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<pre_n>\d*))?"
    r"(?:-(?P<post_bare>\d+)|[-_.]?(?P<post>post|rev|r)[-_.]?(?P<post_n>\d*))?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?(?P<dev_n>\d*))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?"
)
_PRE = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}


def normalized(version: str) -> str | None:
    """A version as PEP 440 normalises it; None for what is no version."""
    match = _PEP440.fullmatch(version.strip().lower())
    if match is None:
        return None
    part = match.groupdict()
    text = f"{int(part['epoch'])}!" if part["epoch"] and int(part["epoch"]) else ""
    text += ".".join(str(int(n)) for n in part["release"].split("."))
    if part["pre"]:
        text += _PRE.get(part["pre"], part["pre"]) + str(int(part["pre_n"] or 0))
    if part["post"] or part["post_bare"]:
        text += f".post{int(part['post_n'] or part['post_bare'] or 0)}"
    if part["dev"]:
        text += f".dev{int(part['dev_n'] or 0)}"
    if part["local"]:
        numbers = (str(int(n)) if n.isdigit() else n for n in re.split("[-_.]", part["local"]))
        text += "+" + ".".join(numbers)
    return text


def shown(version: str | None) -> str:
    """A version for people: raw, and normalised where that differs."""
    if version is None:
        return "(version unknown)"
    normal = normalized(version)
    if normal is None:
        return f"{version} (not a PEP 440 version)"
    return version if normal == version else f"{version} (normalised: {normal})"


def is_package(path: Path) -> bool:
    """Whether a folder is an sglang package rather than what is left of one.

    Raises:
        DynspecError: it can't be looked into.
    """
    try:
        return (path / _SIGN).is_file()
    except OSError as error:  # Path.is_file answers False for what is not there, and raises for EACCES
        raise DynspecError(
            "a folder that can be read",
            error.strerror or str(error),
            str(path / _SIGN),
            "run as a user who may read it",
        ) from error


def find_root(path: Path) -> SglangTree:
    """The sglang of a git checkout, its ``python/`` folder, a site-packages folder, or the package folder itself.

    Raises:
        DynspecError: none there, or two; every path is named.
    """
    path = Path(os.path.abspath(path.expanduser()))
    looked = {
        path: "the package folder",
        path / "sglang": "site-packages or python/",
        path / "python" / "sglang": "a git checkout",
    }
    hits = [p for p in looked if is_package(p)]
    if not hits:
        state = "no such folder" if not path.exists() else "nothing of that kind"
        raise DynspecError(
            f"an sglang (a folder with {_SIGN})",
            f"{state}; looked at " + ", ".join(str(p) for p in looked),
            f"--sglang-root {path}",
            "name a git checkout, its python/ folder, a site-packages folder, or the sglang package folder",
        )
    if len({os.path.realpath(p) for p in hits}) > 1:
        raise DynspecError(
            "one sglang",
            " and ".join(str(p) for p in hits),
            f"--sglang-root {path}",
            "name the one that is meant",
        )
    package = hits[0]
    return SglangTree(package, read_version(package), looked[package], _interpreter_of(package))


def find_for_python(exe: str) -> SglangTree:
    """The sglang that an interpreter would import, asked from a neutral folder.

    Raises:
        DynspecError: it is no interpreter, or it would import no sglang.
    """
    with tempfile.TemporaryDirectory(prefix="dynspec-") as neutral:
        try:
            done = subprocess.run(
                [exe if os.sep not in exe else os.path.abspath(exe), "-c", _ASK],
                cwd=neutral,
                env=_environment(),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise _not_an_interpreter(exe, f"no answer within {_TIMEOUT_S} s") from None
        except (OSError, ValueError) as error:
            raise _not_an_interpreter(exe, getattr(error, "strerror", None) or str(error)) from error
    line = next((x for x in reversed(done.stdout.splitlines()) if x.startswith("DYNSPEC")), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise _not_an_interpreter(exe, f"exit code {done.returncode}: {last}")
    answer = json.loads(line[len("DYNSPEC") :])
    return _from_locations(answer, exe)


def find(root: Path | None, python: str | None) -> SglangTree:
    """The sglang of either option, or of the interpreter that runs dynspec where neither is given.

    Raises:
        DynspecError: none there, or two; also where both are given and mean different ones.
    """
    if root is None:
        return find_for_python(python) if python is not None else find_for_current()
    tree = find_root(root)
    if python is None:
        return tree
    other = find_for_python(python)
    if os.path.realpath(other.package) != os.path.realpath(tree.package):
        raise DynspecError(
            "one sglang",
            f"{tree.package} and {other.package}",
            f"--sglang-root {root} --python {python}",
            "leave one of the two options away",
            Exit.USAGE,
        )
    return replace(tree, version=tree.version or other.version, python=other.python)


def _environment() -> dict[str, str]:
    """This process's environment; relative entries of PYTHONPATH still mean the user's folder, not the neutral one."""
    env = dict(os.environ)
    if env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, env["PYTHONPATH"].split(os.pathsep)))
    return env


def find_for_current() -> SglangTree:
    """The sglang that the interpreter which runs dynspec would import."""
    return find_for_python(sys.executable)


def _from_locations(answer: dict[str, Any], exe: str) -> SglangTree:
    locations: list[str] = answer["locations"]
    packages = [Path(p) for p in locations if is_package(Path(p))]
    if not packages:
        if answer["problem"]:
            found = str(answer["problem"])
        elif locations:
            found = f"no {_SIGN} in " + ", ".join(locations)
        else:
            found = "none; looked at " + ", ".join(answer["path"])
        raise DynspecError(
            "an sglang that this interpreter imports",
            found,
            f"--python {exe}",
            "install sglang there, or name another with --python or --sglang-root",
        )
    if len({os.path.realpath(p) for p in packages}) > 1:
        raise DynspecError(
            "one sglang",
            " and ".join(str(p) for p in packages),
            f"--python {exe}",
            "name the one that is meant with --sglang-root",
        )
    # An editable install's metadata is not beside its package: then the interpreter knows, where no file says.
    version = read_version(packages[0]) or answer["version"]
    return SglangTree(packages[0], version, f"imported by {exe}", answer["executable"] or exe)


def _not_an_interpreter(exe: str, found: str) -> DynspecError:
    return DynspecError(
        "a Python interpreter",
        found,
        f"--python {exe}",
        "name one, for example /path/to/venv/bin/python",
        Exit.ENVIRONMENT,
    )


def read_version(package: Path) -> str | None:
    """The version of the distribution beside a package, else that of its version file, else None. Raw, not normalised."""
    versions = set()
    for metadata in package.parent.glob("sglang-*.dist-info/METADATA"):
        try:
            value = HeaderParser().parsestr(metadata.read_text("utf-8", "replace")).get("Version")
        except OSError:
            continue
        if value:
            versions.add(str(value).strip())
    if len(versions) == 1:
        return versions.pop()
    for name in ("_version.py", "version.py"):
        value = _assigned(package / name)
        if value:
            return value
    return None


def _assigned(path: Path) -> str | None:
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in module.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        names = {t.id for t in targets if isinstance(t, ast.Name)}
        value = getattr(node, "value", None)
        if (
            names & {"__version__", "version"}
            and isinstance(value, ast.Constant)
            and isinstance(value.value, str)
        ):
            return value.value
    return None


def _interpreter_of(package: Path) -> str | None:
    """The interpreter of the virtual environment that a site-packages folder belongs to."""
    for parent in (*package.parents, *Path(os.path.realpath(package.parent), "sglang").parents):
        if (parent / "pyvenv.cfg").is_file():
            exe = parent / "bin" / "python"
            site = package.parent if parent in package.parents else Path(os.path.realpath(package.parent))
            inside = re.search(r"/lib(64)?/python3\.\d+t?/site-packages$", site.as_posix())
            return str(exe) if exe.exists() and inside else None
    return None
