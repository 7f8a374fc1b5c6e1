#!/usr/bin/env python3
"""Build the environments that the demo and the tests need. Standard library only.

    setup.py tool                       the project's own environment, .venv
    setup.py env VERSION...             a CPU environment with a real sglang, for each VERSION
    setup.py env VERSION --at DIR       the same in DIR, for one that will be patched
    setup.py pristine VERSION [--at DIR]   exit 0 if sglang there is what its wheel holds, else 1

Paths of interpreters go to stdout, one a line; progress goes to stderr.

sglang environments are stacked, so that a second one costs little: ``torch`` and ``common`` are shared, ``VERSION-deps``
holds what differs, and the environment itself holds sglang alone. Each layer is a virtual environment whose packages
the ones above reach through a ``.pth`` file. Layers lie in the cache (``$DYNSPEC_CACHE``, default ``~/.cache/dynspec``),
named by a digest of their list; a layer without its ``.complete`` stamp is built anew.

Exit codes: 0 done, 1 not pristine, 2 usage, 4 environment (Python, network, space, lock), 130 interrupted.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import csv
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
LISTS = REPO / "scripts" / "requirements"
SGLANG_PYTHON = (3, 11)
SCHEME = "1"  # raise it when the way layers are built changes
NEEDED_GIB = {"torch": 2.0, "common": 2.5}  # with what pip keeps in its temporary folder meanwhile
# Variables that would send pip's work elsewhere, or keep bytecode from being written.
NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PYTHONDONTWRITEBYTECODE",
                 "PYTHONPYCACHEPREFIX"}  # fmt: skip
# Bytecode is written for what sglang may import: `dynspec verify` writes none, and without it each run takes 20 s more.
NOT_COMPILED = (
    r"/tests?/|/torch/testing/_internal/|/setuptools/|/jedi/third_party/|/onnx/|/distributed/_tools/"
    r"|/transformers/models/[^/]+/|/sglang/(?!srt/)[^/]+/"
)
HELD: list[int] = []  # file descriptors of the locks that this process holds
STAMP = ".complete"
PTH = "dynspec_layers.pth"


class SetupError(Exception):
    """A failure that a person has to act on; the text says what to do."""


def say(text: str) -> None:
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    return Path(os.environ.get("DYNSPEC_CACHE") or Path.home() / ".cache" / "dynspec").expanduser().absolute()


def site_packages(env: Path) -> Path:
    return env / "lib" / f"python{SGLANG_PYTHON[0]}.{SGLANG_PYTHON[1]}" / "site-packages"


def read_list(name: str) -> list[str]:
    """The requirement lines of ``scripts/requirements/NAME.txt``, comments dropped."""
    path = LISTS / f"{name}.txt"
    if not path.is_file():
        known = sorted(p.stem for p in LISTS.glob("[0-9]*.txt"))
        raise SetupError(
            f"no requirement list for sglang {name} ({path}). There are lists for: {', '.join(known)}."
        )
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


# ---- running a step, with progress ----------------------------------------------------------------------------------


def last_line(log: Path) -> str:
    """The last telling line of a pip log, shortened to what a person wants to see."""
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 4096))
        lines = handle.read().decode("utf-8", "replace").splitlines()
    for line in reversed(lines):
        text = line.strip()
        if text.startswith("Installing collected packages:"):
            return f"unpacking {text.count(',') + 1} packages"
        if text.startswith("Successfully installed"):
            return "finishing"
        if text.startswith(("Collecting", "Downloading", "Using cached", "Processing")):
            return text if len(text) <= 80 else text[:77] + "..."
    return ""


def explain(output: str) -> str:
    """What most likely went wrong, from the end of pip's output."""
    low = output.lower()
    if "no space left" in low:
        return f"The disk is full. Free some space or set DYNSPEC_CACHE (now {cache_dir()}) to a larger disk."
    if "hashes do not match" in low or "do not match the hashes" in low:
        return "A download does not have the pinned sha256. Nothing of it was installed."
    network = ("name or service not known", "temporary failure in name resolution", "newconnectionerror",
               "connection refused", "network is unreachable", "read timed out", "max retries exceeded",
               "connection broken", "sslerror")  # fmt: skip
    if any(word in low for word in network):
        return "PyPI could not be reached. Check the network or pip's index settings, then run the same command again."
    if "no matching distribution" in low or "could not find a version" in low:
        return "The package index could not be reached, or has no such release for this Python and platform."
    return "Run the same command again; finished layers are kept."


def run_step(label: str, command: Sequence[str], log: Path, *, may_fail: bool = False) -> None:
    """Run ``command`` with its output in ``log``, telling every few seconds how far it is.

    Raises SetupError with the end of the output if it fails (unless ``may_fail``), KeyboardInterrupt after ending it
    if interrupted.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    live = sys.stderr.isatty()
    width = shutil.get_terminal_size().columns - 1
    told = 0.0
    env = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
    with log.open("wb") as out:
        # A group of its own, so that an interrupt ends all of it. It inherits the locks: should this process be killed
        # outright, they are held until the step has ended too.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            pass_fds=HELD,
        )
        try:
            while child.poll() is None:
                time.sleep(0.2)
                elapsed = time.monotonic() - start
                if live:
                    line = f"[setup] {label}: {elapsed:4.0f} s  {last_line(log)}"
                    print("\r" + line[:width].ljust(width), end="", file=sys.stderr, flush=True)
                elif elapsed - told >= 10:
                    told = elapsed
                    say(f"{label}: {elapsed:.0f} s  {last_line(log)}")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
        finally:
            if live:
                print("\r" + " " * width + "\r", end="", file=sys.stderr, flush=True)
    if child.returncode and not may_fail:
        output = log.read_text(encoding="utf-8", errors="replace")
        tail = [line for line in output.splitlines() if "neither a file nor a directory" not in line][-15:]
        raise SetupError(
            f"{label} failed (exit {child.returncode}).\n"
            + "\n".join(f"    {line}" for line in tail)
            + f"\n  {explain(output)}\n  Command: {' '.join(command)}\n  Whole output: {log}"
        )
    say(f"{label}: done in {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock NAME in the cache; says so while it waits for another run."""
    path = cache_dir() / "locks" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        raise SetupError(
            f"cannot write in the cache: {error}. Set DYNSPEC_CACHE to a folder that can be written."
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is building {name}; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        HELD.append(handle.fileno())
        try:
            yield
        finally:
            HELD.remove(handle.fileno())


def stamped(env: Path, digest: str) -> bool:
    try:
        return (env / STAMP).read_text(encoding="utf-8").strip() == digest
    except OSError:
        return False


def digest_of(*parts: str) -> str:
    return hashlib.sha256("\n".join((SCHEME, sys.platform, os.uname().machine, *parts)).encode()).hexdigest()[
        :16
    ]


def remove(path: Path) -> None:
    """Remove a folder that an earlier run made. The stamp goes first, so that a half-removed one never counts."""
    (path / STAMP).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


# ---- interpreters ---------------------------------------------------------------------------------------------------


def python_version(exe: str) -> tuple[int, int] | None:
    """(major, minor) of a CPython that works and has venv, else None."""
    code = "import sys, venv, ensurepip; print(sys.implementation.name, *sys.version_info[:2])"
    try:
        done = subprocess.run([exe, "-I", "-c", code], capture_output=True, text=True, timeout=30)
        name, major, minor = done.stdout.split()
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return (int(major), int(minor)) if name == "cpython" and done.returncode == 0 else None


def sglang_base_python() -> str:
    """A CPython 3.11: the pinned torch and sglang wheels are for that one."""
    asked = os.environ.get("DYNSPEC_PYTHON")
    tried = [asked] if asked else [sys.executable, "python3.11", "python3", "/usr/bin/python3.11"]
    seen = []
    for exe in tried:
        version = python_version(exe)
        if version == SGLANG_PYTHON:
            return exe
        seen.append(
            f"{exe} ({'.'.join(map(str, version)) if version else 'absent, or without venv and ensurepip'})"
        )
    raise SetupError(
        "no CPython 3.11 with venv was found. Tried: " + "; ".join(seen) + ".\n"
        "  Install it (Debian: apt-get install python3.11 python3.11-venv) or set DYNSPEC_PYTHON to one."
    )


# ---- .venv ----------------------------------------------------------------------------------------------------------


def ensure_tool() -> Path:
    """The project's own environment with dynspec installed editable. Returns its ``bin`` folder."""
    env = REPO / ".venv"
    python = env / "bin" / "python"
    lists = [(REPO / "pyproject.toml").read_text(encoding="utf-8"), *read_list("dev")]
    digest = digest_of(str(REPO), *lists)
    with locked(f"venv-{hashlib.sha256(str(REPO).encode()).hexdigest()[:12]}"):
        if stamped(env, digest) and python.exists():
            return env / "bin"
        base = sglang_base_python()
        say(f"project environment: {env}")
        remove(env)
        log = cache_dir() / "logs" / "venv.log"
        run_step("project environment: create", [base, "-m", "venv", str(env)], log)
        run_step(
            "project environment: dynspec and its tools",
            [str(python), "-m", "pip", "install", "--progress-bar", "off", "-c", str(LISTS / "dev.txt"),
             "-e", f"{REPO}[dev]"],
            log,
        )  # fmt: skip
        (env / STAMP).write_text(digest + "\n", encoding="utf-8")
    return env / "bin"


# ---- layers and environments ----------------------------------------------------------------------------------------


def check_space(layer: str) -> None:
    need = NEEDED_GIB.get(layer, 0.5)
    free = shutil.disk_usage(cache_dir()).free / 2**30
    if free < need:
        raise SetupError(
            f"{need:g} GiB are needed for the {layer} layer and {cache_dir()} has {free:.1f} GiB free. "
            "Free some, or set DYNSPEC_CACHE to a folder on another disk."
        )


def new_venv(env: Path, below: Sequence[Path]) -> None:
    """An empty environment without pip that also sees the packages of the layers ``below`` (nearest first)."""
    remove(env)
    env.parent.mkdir(parents=True, exist_ok=True)
    run = subprocess.run(
        [sglang_base_python(), "-m", "venv", "--without-pip", str(env)], capture_output=True, text=True
    )
    if run.returncode:
        raise SetupError(f"cannot create {env}: {(run.stderr or run.stdout).strip()}")
    if below:
        text = "".join(f"{site_packages(layer)}\n" for layer in below)
        (site_packages(env) / PTH).write_text(text, encoding="utf-8")


def install(label: str, env: Path, tool: Path, arguments: Sequence[str], log: Path) -> None:
    """Install into ``env`` with the project environment's pip, then write bytecode for what may be imported."""
    python = str(env / "bin" / "python")
    # As `pip --python` does it, but without a second process. (`python .../site-packages/pip` would count the packages
    # beside pip as installed.)
    runner = str(site_packages(tool.parent) / "pip" / "__pip-runner__.py")
    pip = [python, runner, "install", "--no-compile", "--progress-bar", "off"]
    run_step(label, [*pip, *arguments], log)
    # Not every file of every package is for this Python: one that does not compile is no failure.
    compiled = [python, "-m", "compileall", "-q", "-j", "2", "-x", NOT_COMPILED, str(site_packages(env))]
    run_step(f"{label}: bytecode", compiled, log.with_suffix(".bytecode.log"), may_fail=True)


def ensure_layer(
    name: str, arguments: Sequence[str], wanted: Sequence[str], below: Sequence[Path], tool: Path
) -> Path:
    """The layer NAME with the packages ``wanted``, built if it is not there. Returns its folder."""
    digest = digest_of(*wanted, *(layer.name for layer in below))
    env = cache_dir() / "layers" / f"{name}-{digest}"
    with locked(env.name):
        if stamped(env, digest):
            return env
        check_space(name)
        new_venv(env, below)
        install(f"{name} layer", env, tool, arguments, cache_dir() / "logs" / f"{env.name}.log")
        (env / STAMP).write_text(digest + "\n", encoding="utf-8")
    return env


def ensure_layers(version: str, tool: Path) -> list[Path]:
    """The layers below an environment for sglang ``version``, nearest first."""
    own = read_list(version)  # first: an unknown version is said before anything is downloaded
    torch_list, common_list = read_list("torch"), read_list("common")
    index = os.environ.get("DYNSPEC_TORCH_INDEX")
    torch = ensure_layer(
        "torch",
        # With dependencies: PyPI's torch for Linux, where no CPU build is at hand, needs NVIDIA's packages to import.
        ["-r", str(LISTS / "torch.txt"), *(["--extra-index-url", index] if index else [])],
        torch_list,
        [],
        tool,
    )
    common = ensure_layer(
        "common", ["--no-deps", "-r", str(LISTS / "common.txt")], common_list, [torch], tool
    )
    deps = ensure_layer(
        f"{version}-deps", ["--no-deps", "-r", str(LISTS / f"{version}.txt")], own, [common, torch], tool
    )
    return [deps, common, torch]


def fetch_wheel(version: str, tool: Path) -> Path:
    """The sglang wheel pinned in targets.toml, fetched by dynspec, which checks its sha256 before it is used."""
    command = [str(tool / "dynspec"), "pins", "fetch", version]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=REPO)
    path = Path(done.stdout.strip())
    if done.returncode or not path.is_file():
        raise SetupError(
            f"the wheel of sglang {version} could not be fetched: {' '.join(command)} (see above)."
        )
    return path


def changed_files(env: Path) -> list[str]:
    """Files of the installed sglang that are not what its wheel's RECORD says; ``[""]`` if there is no sglang."""
    site = site_packages(env)
    records = list(site.glob("sglang-*.dist-info/RECORD"))
    if len(records) != 1:
        return [""]
    known: set[str] = set()
    changed = []
    with records[0].open(encoding="utf-8", newline="") as handle:
        for name, digest, _size in csv.reader(handle):
            known.add(name)
            if not digest or not name.startswith("sglang/"):
                continue
            try:
                data = (site / name).read_bytes()
            except OSError:
                changed.append(name)
                continue
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if digest != f"sha256={found}":
                changed.append(name)
    for path in (site / "sglang").rglob("*"):
        name = path.relative_to(site).as_posix()
        if path.is_file() and path.suffix != ".pyc" and name not in known:
            changed.append(name)
    return sorted(changed)


def missing_packages(python: Path, version: str) -> list[str]:
    """Pinned packages that ``python`` does not see in the pinned version."""
    pins = [line for name in ("torch", "common", version) for line in read_list(name)]
    code = (
        "import sys, importlib.metadata as m\n"
        "for pin in sys.argv[1:]:\n"
        "    name, wanted = pin.split('==')\n"
        "    try: found = m.version(name)\n"
        "    except m.PackageNotFoundError: found = 'absent'\n"
        "    if found.split('+')[0] != wanted: print(f'{pin} ({found})')\n"
    )
    done = subprocess.run([str(python), "-I", "-c", code, *pins], capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr.strip()]


def ensure_env(version: str, tool: Path, at: Path | None) -> Path:
    """An environment with a pristine sglang ``version``. Returns its interpreter."""
    layers = ensure_layers(version, tool)
    env = (at or cache_dir() / "envs" / version).absolute()
    python = env / "bin" / "python"
    digest = digest_of(version, *(layer.name for layer in layers))
    with locked(f"env-{hashlib.sha256(str(env).encode()).hexdigest()[:12]}"):
        if stamped(env, digest):
            changed = changed_files(env)
            if not changed:
                return python
            say(
                f"{env}: {len(changed)} file(s) of sglang differ from the wheel ({changed[0]}, ...); laying it anew"
            )
        elif env.exists() and any(env.iterdir()) and not (env / "pyvenv.cfg").is_file():
            raise SetupError(
                f"{env} is there and is no virtual environment; remove it or name another folder."
            )
        wheel = fetch_wheel(version, tool)
        new_venv(env, layers)
        log = cache_dir() / "logs" / f"env-{version}.log"
        install(f"sglang {version}", env, tool, ["--no-deps", "--no-index", str(wheel)], log)
        changed = changed_files(env)
        if changed:
            raise SetupError(f"sglang in {env} is not what its wheel holds: {', '.join(changed[:5])}")
        missing = missing_packages(python, version)
        if missing:
            layer_paths = " ".join(str(layer) for layer in layers)
            raise SetupError(
                f"{env} does not see what it should: {', '.join(missing)}. Remove its layers and run the same command "
                f"again: rm -r {layer_paths}"
            )
        (env / STAMP).write_text(digest + "\n", encoding="utf-8")
    return python


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tool", help="the project's own environment")
    env = commands.add_parser("env", help="environments with a real sglang")
    env.add_argument("versions", nargs="+", metavar="VERSION")
    env.add_argument("--at", type=Path, help="build it in this folder instead of the cache (one VERSION)")
    pristine = commands.add_parser("pristine", help="is sglang there what its wheel holds?")
    pristine.add_argument("version", metavar="VERSION")
    pristine.add_argument("--at", type=Path)
    args = parser.parse_args(argv)
    if args.command == "env" and args.at and len(args.versions) > 1:
        parser.error("--at takes one VERSION")

    if args.command == "pristine":
        place = (args.at or cache_dir() / "envs" / args.version).absolute()
        changed = changed_files(place)
        for name in changed:
            say(f"{place}: {name or 'no sglang, or more than one'}")
        return 1 if changed else 0
    start = time.monotonic()
    tool = ensure_tool()
    if args.command == "tool":
        print(tool / "dynspec")
    else:
        for version in args.versions:
            print(ensure_env(version, tool, args.at), flush=True)
    say(f"ready ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except SetupError as error:
        say(f"error: {error}")
        sys.exit(4)
    except OSError as error:
        say(f"error: {error}")
        sys.exit(4)
    except KeyboardInterrupt:
        say("interrupted; finished layers are kept, run the same command again to go on")
        sys.exit(130)
