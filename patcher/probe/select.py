"""Level ``select``: which speculative worker class do these arguments and this environment select, and why?

sglang's own argument parsing and its own ``SpeculativeAlgorithm.create_worker`` answer. Why is found by asking again
with one thing changed at a time.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import harness, standins

FLAG = "--speculative-disable-batch-threshold"
FIELD = "speculative_disable_batch_threshold"
SPEC_V2 = "SGLANG_ENABLE_SPEC_V2"


class RefusedError(Exception):
    """sglang refused the arguments. ``code`` is the switch's own reason, if it was the switch that refused."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class UnavailableError(Exception):
    """The arguments are fine, but the module of the worker that they select can't be imported here."""

    def __init__(self, algorithm: str, message: str) -> None:
        super().__init__(message)
        self.algorithm = algorithm


@dataclass(frozen=True)
class Selection:
    """What sglang selects. ``worker`` is ``None`` where there is no speculation."""

    server_args: Any
    worker: type | None
    threshold: int
    used: tuple[str, ...]


def select(argv: Sequence[str]) -> Selection:
    """Resolves ``argv`` as a GPU host would and asks sglang for the class.

    Raises:
        RefusedError: sglang refused the arguments, with its own message.
        UnavailableError: sglang could not import the worker.
    """
    import sglang.srt.server_args as module

    used: list[str] = standins.after_server_args()
    answers: Any = contextlib.nullcontext()
    if _device(argv) in (None, "cuda") and not standins.has_gpu():
        answers = standins.gpu_answers(module, used)
    said = io.StringIO()
    with _environment({}), answers:
        try:
            with contextlib.redirect_stderr(_Tee(said)):
                server_args = module.prepare_server_args(list(argv))
            worker = _worker(server_args)
        except UnavailableError:
            raise
        except SystemExit as error:
            raise RefusedError(_argparse_message(said.getvalue(), error)) from error
        except Exception as error:
            raise RefusedError(
                _explained(argv, error), code=getattr(error, "code", None) if _is_ours(error) else None
            ) from error
    threshold = getattr(server_args, FIELD, 0)
    return Selection(server_args, worker, threshold, tuple(used))


def why(argv: Sequence[str], selected: Selection) -> str:
    """The setting that made sglang select this class, found by changing one thing at a time."""
    server_args, worker = selected.server_args, selected.worker
    assert worker is not None
    overlap_off = bool(server_args.disable_overlap_schedule)
    fact = f"disable_overlap_schedule={overlap_off}"
    changes = list(_changes(argv, server_args))
    flips = []
    for change in changes:
        other = _try(change.argv, change.environment)
        if other is not None and other is not worker:
            flips.append((change, other.__name__))
    if flips:
        causes = " and ".join(change.present for change, _ in flips)
        ways = "; ".join(f"with {change.text} sglang would select {name}" for change, name in flips)
        return f"{fact} because {causes}; {ways}"
    # Nothing alone: several settings choose the same class, each of them enough.
    for i, one in enumerate(changes):
        for two in changes[i + 1 :]:
            environment = {**one.environment, **two.environment}
            other = _try(two.on(one.argv), environment)
            if other is not None and other is not worker:
                return (
                    f"{fact} because {one.present}, and also because {two.present}; with both {one.text} and "
                    f"{two.text} sglang would select {other.__name__}"
                )
    algorithm = getattr(server_args, "speculative_algorithm", None)
    return (
        f"--speculative-algorithm {algorithm}, {fact}; no other setting that dynspec knows changes the class"
    )


@dataclass(frozen=True)
class _Change:
    """One thing changed: what it is now, and what it is changed to, in words."""

    present: str
    text: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    removes: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()

    def on(self, argv: Sequence[str]) -> list[str]:
        kept, _ = harness.without_options(argv, self.removes)
        return kept + list(self.adds)


def _changes(argv: Sequence[str], server_args: Any) -> Iterator[_Change]:
    argv = harness.expanded(argv)

    def change(
        present: str, text: str, removes: Sequence[str] = (), adds: Sequence[str] = (), **environment: str
    ) -> _Change:
        made = _Change(present, text, (), environment, tuple(removes), tuple(adds))
        return _Change(present, text, tuple(made.on(argv)), environment, tuple(removes), tuple(adds))

    state = _spec_v2_state()
    if state is not None:
        on, words = state
        other = "False" if on else "True"
        yield change(f"{SPEC_V2} is {words}", f"{SPEC_V2}={other}", **{SPEC_V2: other})
    _, given = harness.without_options(argv, ["disable_overlap_schedule"])
    if given:
        yield change(
            "--disable-overlap-schedule is given",
            "--disable-overlap-schedule left out",
            removes=["disable_overlap_schedule"],
        )
    elif not server_args.disable_overlap_schedule:
        yield change(
            "--disable-overlap-schedule is not given",
            "--disable-overlap-schedule",
            adds=["--disable-overlap-schedule"],
        )
    topk = getattr(server_args, "speculative_eagle_topk", None)
    if topk is not None and topk != 1:
        steps = getattr(server_args, "speculative_num_steps", None) or 3
        _, given = harness.without_options(argv, ["speculative_eagle_topk"])
        chosen = "" if given else " (sglang's own choice for this model)"
        yield change(
            f"--speculative-eagle-topk is {topk}{chosen}",
            "--speculative-eagle-topk 1",
            removes=["speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"],
            adds=[
                *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
                *("--speculative-num-draft-tokens", str(steps + 1)),
            ],
        )


def _try(argv: Sequence[str], environment: dict[str, str]) -> type | None:
    with _environment(environment):
        try:
            return select(argv).worker
        except (RefusedError, UnavailableError):
            return None


def _spec_v2_state() -> tuple[bool, str] | None:
    """Whether sglang takes ``SGLANG_ENABLE_SPEC_V2`` as on, in words; ``None`` where it has no such variable."""
    try:
        from sglang.srt.environ import envs

        field = envs.SGLANG_ENABLE_SPEC_V2
    except (ImportError, AttributeError):
        return None
    on = bool(field.get())
    word = "on" if on else "off"
    raw = os.environ.get(SPEC_V2)
    return on, f"{word} (set to {raw!r})" if raw is not None else f"{word} (unset, default {word})"


def _worker(server_args: Any) -> type | None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
    if algorithm.is_none():
        return None
    try:
        worker = algorithm.create_worker(server_args)
    except ImportError as error:
        raise UnavailableError(algorithm.name, f"{type(error).__name__}: {error}") from error
    return worker if isinstance(worker, type) else None


def _is_ours(error: BaseException) -> bool:
    return type(error).__name__ == "SpecSwitchError" and type(error).__module__.endswith(".dynspec_switch")


def parsed(argv: Sequence[str]) -> Any:
    """What sglang's parser makes of ``argv`` before anything is resolved; ``None`` where it refuses."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return harness._parser().parse_args(harness.expanded(argv))
        except (SystemExit, Exception):
            return None


def _device(argv: Sequence[str]) -> str | None:
    device = getattr(parsed(argv), "device", None)
    return device if device is None else str(device)


def missing_model_path(argv: Sequence[str]) -> str | None:
    """A sentence about the first model path that is a path and does not exist."""
    arguments = parsed(argv)
    for name in ("model_path", "speculative_draft_model_path"):
        value = getattr(arguments, name, None)
        if not isinstance(value, str) or "://" in value or value.lower() in ("none", "dummy"):
            continue
        looks_local = value.startswith(("/", ".", "~")) or value.count("/") > 1 or value.endswith("/")
        if looks_local and not os.path.exists(value):
            return f"--{name.replace('_', '-')} {value}: this path does not exist"
    return None


def _explained(argv: Sequence[str], error: BaseException) -> str:
    text = str(error).strip() or repr(error)
    message = text if _is_ours(error) else f"{type(error).__name__}: {text}"
    arguments = parsed(argv)
    model = getattr(arguments, "model_path", None)
    names_it = isinstance(error, ValueError) and not _is_ours(error) and str(model) in text
    if isinstance(model, str) and not os.path.exists(model) and (isinstance(error, OSError) or names_it):
        message = f"--model-path {model} is no directory here, and sglang could not fetch it: {message}"
    return message


def _argparse_message(said: str, error: SystemExit) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    for line in reversed(lines):
        if ": error: " in line:
            return line.split(": error: ", 1)[1]
    if error.code in (0, None):
        return "sglang's argument parser printed help or a version and ended; there is no server to verify"
    return lines[-1] if lines else f"sglang's argument parser ended with {error.code!r}"


class _Tee(io.TextIOBase):
    """Keeps what argparse says, and lets it through to the log as well."""

    def __init__(self, copy: io.StringIO) -> None:
        self._copy, self._through = copy, sys.stderr

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._through.write(text)

    def flush(self) -> None:
        self._through.flush()


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """The environment with ``changes``; afterwards exactly as it was, whatever sglang's resolution set in it."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
