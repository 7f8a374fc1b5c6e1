"""``dynspec verify``: which worker do these server arguments select, and does the switch live in it?

The source level is answered here. Everything further runs in a fresh process of the serving interpreter
(:mod:`patcher.probe`), since only that process can say what a server started with it would do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from . import __version__
from .errors import DynspecError
from .outcomes import Exit, FileResult, Level, Outcome, SetResult, Verdict

Progress = Callable[[str], None]

DEFAULT_TIMEOUT_S = 600.0
_PATCHED = frozenset({Outcome.ALREADY, Outcome.APPLIED, Outcome.NOT_NEEDED})
_FOREIGN = frozenset({Outcome.FOREIGN, Outcome.PARTIAL, Outcome.ERROR})
_WORKER_ROLES = frozenset({"eagle_worker", "eagle_worker_v2"})
_LOG_LINES = 12


class Tree(Protocol):
    """What is needed of :class:`patcher.locate.SglangTree`."""

    @property
    def package(self) -> Path: ...
    @property
    def version(self) -> str | None: ...


@dataclass(frozen=True)
class Selected:
    """The worker class that sglang selects, its file, and the setting that decided."""

    class_name: str
    module: str
    file: str
    because: str | None

    def to_json(self) -> dict[str, str | None]:
        """The ``selected`` object of the contract."""
        return {"class": self.class_name, "module": self.module, "file": self.file, "because": self.because}


@dataclass(frozen=True)
class VerifyResult:
    """A verdict, the level that established it, and the evidence. ``threshold`` is what sglang resolved."""

    root: str
    sglang_version: str | None
    verdict: Verdict
    level: Level
    selected: Selected | None = None
    threshold: int | None = None
    marker: str | None = None
    attribute: int | None = None
    stand_ins: tuple[str, ...] = ()
    detail: str = ""
    exit_code: Exit = Exit.NOT_AS_ASKED

    def to_json(self) -> dict[str, Any]:
        """The object that ``dynspec verify --json`` prints; see ``schemas/verify.schema.json``."""
        return {
            "dynspec": __version__,
            "root": self.root,
            "sglang_version": self.sglang_version,
            "verdict": self.verdict.value,
            "level": self.level.value,
            "selected": self.selected.to_json() if self.selected else None,
            "threshold": self.threshold,
            "marker": self.marker,
            "attribute": self.attribute,
            "stand_ins": list(self.stand_ins),
            "detail": self.detail,
            "exit_code": int(self.exit_code),
        }


def run(
    tree: Tree,
    python: str,
    server_args: Sequence[str] = (),
    level: Level = Level.CONSTRUCT,
    require_active: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    progress: Progress | None = None,
    source: SetResult | None = None,
) -> VerifyResult:
    """Verifies ``tree`` with the interpreter ``python`` and the arguments of ``launch_server``.

    Args:
        level: a floor. ``construct`` is always gone to, since ``ACTIVE`` may not be said on less.
        timeout: seconds for the probe process; past it the verdict is ``BROKEN``.
        source: what ``status`` says of the tree, where the caller knows already.

    Raises:
        DynspecError: usage (level ``serve``), or ``python`` is no interpreter.
    """
    if level is Level.SERVE:
        raise DynspecError(
            "a level up to exercise",
            "serve",
            "--level",
            "use `--level exercise`; serve comes with a later version",
            Exit.USAGE,
        )
    if source is None:
        from .engine import status

        source = status(tree)  # type: ignore[arg-type]
    result = _from_source(tree, source)
    if result is None:
        result = _from_probe(
            tree, source, python, list(server_args), level, timeout, progress or (lambda _text: None)
        )
    return replace(result, exit_code=_exit_code(result, level, require_active))


def _exit_code(result: VerifyResult, asked: Level, require_active: bool) -> Exit:
    as_asked = result.verdict is Verdict.ACTIVE or (result.verdict is Verdict.OFF and not require_active)
    return Exit.OK if as_asked and result.level.rank >= asked.rank else Exit.NOT_AS_ASKED


def _from_source(tree: Tree, source: SetResult) -> VerifyResult | None:
    """``UNPATCHED`` where nothing of ours is in the tree; ``None`` where the probe has to say."""
    if any(f.outcome in _PATCHED and f.role != "spec_switch" for f in source.files if _is_ours(f)):
        return None
    if any(f.outcome in _FOREIGN for f in source.files):
        return None
    return VerifyResult(
        root=str(tree.package),
        sglang_version=tree.version,
        verdict=Verdict.UNPATCHED,
        level=Level.SOURCE,
        detail=f"no file of this sglang is patched. Patch it with `dynspec patch --sglang-root {tree.package}`",
    )


def _is_ours(file: FileResult) -> bool:
    # `not_needed` says that upstream has it; alone it makes no patched tree.
    return file.outcome is not Outcome.NOT_NEEDED


def _from_probe(
    tree: Tree,
    source: SetResult,
    python: str,
    server_args: list[str],
    level: Level,
    timeout: float,
    progress: Progress,
) -> VerifyResult:
    with tempfile.TemporaryDirectory(prefix="dynspec-verify-") as name:
        directory = Path(name)
        request = {
            "package": str(tree.package),
            "level": level.value,
            "argv": server_args,
            "directory": str(directory / "models"),
            "events": str(directory / "events"),
            "files": [
                {
                    "role": f.role,
                    "path": f.path,
                    "patched": f.outcome in _PATCHED,
                    "outcome": f.outcome.value,
                    "detail": f.detail,
                }
                for f in source.files
            ],
        }
        ended = _probe(python, request, directory, timeout, progress)
    found = ended.answer
    verdict, detail = Verdict(found["verdict"]), str(found["detail"])
    selected = found["selected"]
    result = VerifyResult(
        root=str(tree.package),
        sglang_version=tree.version,
        verdict=verdict,
        level=Level(found["level"]),
        selected=Selected(selected["class"], selected["module"], selected["file"], selected["because"])
        if selected
        else None,
        threshold=found["threshold"],
        marker=found["marker"],
        attribute=found["attribute"],
        stand_ins=tuple(found["stand_ins"]),
        detail=detail,
    )
    return _checked(result)


def _checked(result: VerifyResult) -> VerifyResult:
    """``ACTIVE`` and ``OFF`` only with the evidence that they claim."""
    on = result.verdict is Verdict.ACTIVE
    if not on and result.verdict is not Verdict.OFF:
        return result
    proven = (
        result.level.rank >= Level.CONSTRUCT.rank
        and result.selected is not None
        and result.threshold is not None
        and (result.threshold > 0) is on
        and result.attribute == result.threshold
        and (result.marker is not None) is on
    )
    if proven:
        return result
    return replace(
        result,
        verdict=Verdict.BROKEN,
        detail=f"the probe said {result.verdict.value} without the evidence for it: level {result.level.value}, "
        f"threshold {result.threshold}, attribute {result.attribute}, marker {result.marker!r}",
    )


# ------------------------------------------------------------------- the probe process


@dataclass(frozen=True)
class _Ended:
    answer: dict[str, Any]


def _probe(
    python: str, request: dict[str, Any], directory: Path, timeout: float, progress: Progress
) -> _Ended:
    """Starts the probe, passes its events on, and returns its answer; an answer of our own where it gave none."""
    request_path, result_path, log_path = (
        directory / "request.json",
        directory / "result.json",
        directory / "log",
    )
    events_path = Path(request["events"])
    events_path.touch()
    request_path.write_text(json.dumps(request), encoding="utf-8")
    main = Path(__file__).resolve().parent / "probe" / "main.py"
    with open(log_path, "wb") as log, open(events_path, encoding="utf-8") as events:
        try:
            process = subprocess.Popen(
                [python, str(main), str(request_path), str(result_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise _not_python(python, f"{type(error).__name__}: {error.strerror or error}") from error
        follow = _Events(events, progress)
        deadline = time.monotonic() + timeout
        try:
            while process.poll() is None and time.monotonic() < deadline:
                follow.read()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            timed_out = process.poll() is None
        finally:
            _kill(process)
        follow.read()
    last = _tail(log_path)
    if timed_out:
        return _Ended(_broken(follow, f"no answer within {timeout:g} s; last lines of its output:\n{last}"))
    if not follow.seen:
        raise _not_python(
            python, f"it ended with {_status(process.returncode)} before the probe began. {last}".strip()
        )
    if process.returncode != 0 or not result_path.exists():
        return _Ended(
            _broken(
                follow,
                f"the process ended with {_status(process.returncode)} while {follow.text}; last lines of its output:\n{last}",
            )
        )
    answer: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
    return _Ended(answer)


class _Events:
    """Follows the probe's event file."""

    def __init__(self, stream: Any, progress: Progress) -> None:
        self._stream, self._progress, self._rest = stream, progress, ""
        self.seen, self.level, self.text = False, Level.IMPORT, "starting"

    def read(self) -> None:
        self._rest += self._stream.read()
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            event = json.loads(line)
            self.seen, self.text = True, event["text"]
            level = Level(event["level"])
            self.level = level if level is not Level.SOURCE else Level.IMPORT
            self._progress(self.text)


def _broken(follow: _Events, detail: str) -> dict[str, Any]:
    return {
        "verdict": Verdict.BROKEN.value,
        "level": follow.level.value,
        "selected": None,
        "threshold": None,
        "marker": None,
        "attribute": None,
        "stand_ins": [],
        "detail": detail,
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the probe and whatever it started; both are in a session of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _status(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-_LOG_LINES:])


def _not_python(python: str, found: str) -> DynspecError:
    return DynspecError(
        "a Python interpreter that can import sglang",
        found,
        python,
        "give the interpreter that starts the server: `dynspec verify --python /path/to/python`",
        Exit.ENVIRONMENT,
    )


# ----------------------------------------------------------------------- for people


@contextlib.contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """What happens now: a live status with the seconds on a terminal, else one plain line an event."""
    if not sys.stderr.isatty():
        start = time.monotonic()
        yield lambda text: print(f"[{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting the serving interpreter", total=None)
        yield lambda text: bar.update(task, description=text)


_NEXT = {
    Verdict.UNPATCHED: "dynspec patch --sglang-root {root}",
    Verdict.INERT: "dynspec patch --sglang-root {root}",
    Verdict.STALE: "dynspec status --sglang-root {root}",
    Verdict.BROKEN: "dynspec status --sglang-root {root}",
    Verdict.OFF: "give the server --speculative-disable-batch-threshold N",
    Verdict.NOT_SPECULATIVE: "give the server --speculative-algorithm EAGLE or EAGLE3 and its draft model",
    Verdict.UNSUPPORTED: "leave the threshold out, or use EAGLE or EAGLE3",
    Verdict.REFUSED: "mend the server arguments",
}


def render(result: VerifyResult) -> str:
    """The result as text: verdict first, then the evidence, then what to do next."""
    lines = [f"{result.verdict.value} (proven at level {result.level.value})"]

    def line(name: str, value: object) -> None:
        if value is not None and value != "":
            lines.append(f"  {name:<11}{str(value).replace(chr(10), chr(10) + ' ' * 13)}")

    line("sglang", f"{result.sglang_version or 'unknown version'} in {result.root}")
    if result.selected:
        line("worker", f"{result.selected.class_name} ({result.selected.file})")
        line("because", result.selected.because)
    line("threshold", result.threshold)
    line("attribute", result.attribute)
    line("logged", result.marker)
    line("detail", result.detail)
    if result.stand_ins:
        lines.append("  stand-ins")
        lines += [f"    - {text}" for text in result.stand_ins]
    step = _NEXT.get(result.verdict)
    if step:
        line("next", step.format(root=result.root))
    return "\n".join(lines)
