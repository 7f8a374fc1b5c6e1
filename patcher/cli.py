"""The command line: maps outcomes to text, JSON and exit codes, and does nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from . import __version__
from .errors import DynspecError
from .outcomes import Exit, Outcome, SetResult

if TYPE_CHECKING:
    from .locate import SglangTree
    from .targets import Targets
    from .verify import VerifyResult

T = TypeVar("T")

app = typer.Typer(
    name="dynspec",
    help="Give SGLang's EAGLE workers a batch-size switch for speculation (--speculative-disable-batch-threshold), "
    "and prove that it is active.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
pins_app = typer.Typer(
    help="The pinned sglang releases of targets.toml.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(pins_app, name="pins")

RootOption = Annotated[
    Path | None,
    typer.Option(
        "--sglang-root",
        metavar="PATH",
        help="A git checkout, its python/ folder, a site-packages folder, or the sglang package itself.",
    ),
]
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="EXE",
        help="The sglang that this interpreter would import. Default: the one dynspec runs in.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout; text for people goes to stderr.")
]
TargetsOption = Annotated[
    Path | None, typer.Option("--targets", metavar="FILE", help="Another targets.toml.")
]


class LevelChoice(str, Enum):
    """Levels that ``verify`` can be asked for."""

    source = "source"
    import_ = "import"
    select = "select"
    construct = "construct"
    exercise = "exercise"
    serve = "serve"


def run() -> int:
    """Parse ``sys.argv``, run the command, return the exit code."""
    try:
        app()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else (0 if ended.code is None else 1)
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    if code == Exit.INTERRUPTED:  # typer makes an exit of an interrupt, without a word
        _say("interrupted; nothing is left half done")
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _leave(code: Exit) -> NoReturn:
    raise typer.Exit(int(code))


def _guard(command: str, as_json: bool, work: Callable[[], T]) -> T:
    """Run ``work``; an error that a person has to act on becomes text, JSON and an exit code."""
    try:
        return work()
    except DynspecError as error:
        _say(
            f"dynspec {command}: expected {error.expected}\n  found: {error.found}\n  where: {error.where}\n  next:  {error.next_step}"
        )
        if as_json:
            _print_json(_error_json(command, error.exit_code, str(error)))
        _leave(error.exit_code)
    except KeyboardInterrupt:
        if as_json:
            _print_json(_error_json(command, Exit.INTERRUPTED, "interrupted; nothing is left half done"))
        raise


def _error_json(command: str, code: Exit, detail: str) -> dict[str, Any]:
    """The command's own keys, empty: nothing is known of the tree."""
    value: dict[str, Any] = {"dynspec": __version__}
    if command == "verify":
        value |= {"root": None, "sglang_version": None, "verdict": None, "level": None, "selected": None}
        value |= {"threshold": None, "marker": None, "attribute": None, "stand_ins": []}
    elif command.startswith("pins"):
        value |= {"command": command, "outcome": "error"}
    else:
        value |= {"command": command, "root": None, "sglang_version": None, "outcome": "error", "files": []}
    return value | {"detail": detail, "exit_code": int(code)}


def _tree(root: Path | None, python: str | None) -> SglangTree:
    from . import locate

    return locate.find(root, python)


def _targets(path: Path | None) -> Targets:
    from .targets import load

    return load(path)


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _as_json(result: SetResult) -> dict[str, Any]:
    return {
        "dynspec": __version__,
        "command": result.command,
        "root": result.root,
        "sglang_version": result.sglang_version,
        "outcome": result.outcome.value,
        "exit_code": int(result.exit_code),
        "files": [
            {
                "role": f.role,
                "path": f.path,
                "outcome": f.outcome.value,
                "before_sha256": f.before_sha256,
                "after_sha256": f.after_sha256,
                "detail": f.detail,
            }
            for f in result.files
        ],
        "detail": result.detail,
        "notes": list(result.notes),
    }


_STYLE = {
    Outcome.APPLIED: "green",
    Outcome.ALREADY: "green",
    Outcome.REVERTED: "green",
    Outcome.WOULD_APPLY: "yellow",
    Outcome.PARTIAL: "yellow",
    Outcome.DRIFT: "red",
    Outcome.FOREIGN: "red",
    Outcome.UNSUPPORTED: "red",
    Outcome.ERROR: "red",
}


def _paint(outcome: Outcome, text: str, stream: Any) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return typer.style(text, fg=_STYLE.get(outcome), bold=True)


def _report(result: SetResult, as_json: bool, diff_shown: bool = False) -> NoReturn:
    """A line a file, a summary, then the exit. With --json (or a diff on stdout) the text goes to stderr."""
    from .locate import shown

    stream = sys.stderr if as_json or diff_shown else sys.stdout
    lines = [f"sglang {shown(result.sglang_version)} at {result.root}"]
    for f in result.files:
        lines.append(
            f"  {_paint(f.outcome, f.outcome.value.ljust(11), stream)} {f.path}"
            + (f"\n              {f.detail}" if f.detail else "")
        )
    lines += [f"note: {note}" for note in result.notes]
    lines.append(
        f"{result.command}: {_paint(result.outcome, result.outcome.value, stream)}"
        + (f": {result.detail}" if result.detail else "")
    )
    print("\n".join(lines), file=stream)
    if as_json:
        _print_json(_as_json(result))
    _leave(result.exit_code)


def _version(value: bool) -> None:
    if value:
        print(f"dynspec {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def patch(
    sglang_root: RootOption = None,
    python: PythonOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the unified diff and write nothing.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if anything would change.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="ROLE",
            help="A deliberate part (repeatable): server_args, eagle_worker, eagle_worker_v2.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE",
            help="Write the patch to FILE (git apply, patch -p1 in the folder that holds sglang) and nothing else.",
        ),
    ] = None,
    as_json: JsonOption = False,
    targets: TargetsOption = None,
) -> None:
    """Patch an sglang: all files or none, idempotently."""

    def work() -> None:
        from . import engine

        tree = _tree(sglang_root, python)
        preview = dry_run or export is not None
        done = engine.patch(
            tree, only=only or (), dry_run=preview, check=check, want_diff=preview, targets=_targets(targets)
        )
        if export is not None and done.diff:
            engine.export(done.diff, export)
            _say(f"wrote {export}")
        elif export is not None:
            _say(f"{export} is not written: there is nothing to export")
        shown = dry_run and bool(done.diff) and not as_json
        if shown:
            sys.stdout.flush()
            sys.stdout.buffer.write(done.diff.encode("utf-8", "surrogateescape"))
            sys.stdout.flush()
        _report(done.result, as_json, diff_shown=shown)

    _guard("patch", as_json, work)


@app.command()
def revert(
    sglang_root: RootOption = None,
    python: PythonOption = None,
    as_json: JsonOption = False,
    targets: TargetsOption = None,
) -> None:
    """Put the original bytes back; added files and the manifest go."""

    def work() -> None:
        from . import engine

        _report(engine.revert(_tree(sglang_root, python), _targets(targets)), as_json)

    _guard("revert", as_json, work)


@app.command()
def status(
    sglang_root: RootOption = None,
    python: PythonOption = None,
    as_json: JsonOption = False,
    targets: TargetsOption = None,
) -> None:
    """What is installed and what of it is patched. Reads only; whether the switch is live is verify's to say."""

    def work() -> None:
        from . import engine

        _report(engine.status(_tree(sglang_root, python), _targets(targets)), as_json)

    _guard("status", as_json, work)


@app.command(
    epilog="Example: dynspec verify -- --model-path M --speculative-algorithm EAGLE3 ... --speculative-disable-batch-threshold 16",
)
def verify(
    server_args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SERVER ARGS]", help="Exactly what `python -m sglang.launch_server` gets."
        ),
    ] = None,
    sglang_root: RootOption = None,
    python: PythonOption = None,
    level: Annotated[
        LevelChoice, typer.Option("--level", help="The least level to prove.")
    ] = LevelChoice.construct,
    require_active: Annotated[bool, typer.Option("--require-active", help="Exit 1 on OFF, too.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", help="For the probe process.")
    ] = 600.0,
    as_json: JsonOption = False,
    targets: TargetsOption = None,
) -> None:
    """Is the switch active in the worker that these server arguments select?"""

    def work() -> VerifyResult:
        from . import engine, verify
        from .outcomes import Level

        tree = _tree(sglang_root, None if sglang_root is not None else python)
        serving = python or tree.python or sys.executable
        source = engine.status(tree, _targets(targets))
        with verify.progress_on_stderr() as progress:
            return verify.run(
                tree,
                serving,
                server_args or (),
                Level(level.value),
                require_active,
                timeout,
                progress,
                source,
            )

    result = _guard("verify", as_json, work)
    from .verify import render

    print(render(result), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        _print_json(result.to_json())
    _leave(result.exit_code)


@pins_app.command("list")
def pins_list(as_json: JsonOption = False, targets: TargetsOption = None) -> None:
    """The pinned releases and their wheels."""

    def work() -> None:
        found = _targets(targets)
        if as_json:
            releases = [
                {
                    "version": r.version,
                    "wheels": [{"filename": w.filename, "sha256": w.sha256} for w in r.wheels],
                    "roles": dict(r.roles),
                }
                for r in found.releases.values()
            ]
            _print_json(
                {"dynspec": __version__, "command": "pins list", "releases": releases, "exit_code": 0}
            )
            return
        for release in found.releases.values():
            print(f"{release.version}: {len(release.wheels)} wheel(s); " + ", ".join(release.roles))

    _guard("pins list", as_json, work)


@pins_app.command("fetch")
def pins_fetch(
    versions: Annotated[list[str], typer.Argument(metavar="VERSION...")],
    as_json: JsonOption = False,
    targets: TargetsOption = None,
) -> None:
    """Fetch pinned releases from PyPI by name and sha256 into the cache; prints the path of each wheel."""

    def work() -> list[Path]:
        from . import pins

        pinned = _targets(targets)
        return [pins.fetch(version, pinned, _say) for version in versions]

    paths = _guard("pins fetch", as_json, work)
    if as_json:
        _print_json(
            {
                "dynspec": __version__,
                "command": "pins fetch",
                "wheels": [str(p) for p in paths],
                "exit_code": 0,
            }
        )
        return
    for path in paths:
        print(path)
