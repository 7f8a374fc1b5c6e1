"""``verify`` without a real sglang: the parent's side, and the probe's checks on made-up workers."""

from __future__ import annotations

import json
import logging
import stat
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from patcher import verify
from patcher.errors import DynspecError
from patcher.outcomes import Exit, FileResult, Level, Outcome, SetResult, Verdict
from patcher.probe import construct, harness, live

SCHEMA = json.loads(resources.files("patcher").joinpath("schemas/verify.schema.json").read_text())


@dataclass(frozen=True)
class Tree:
    package: Path
    version: str | None = "0.5.9"


def source(**outcomes: Outcome) -> SetResult:
    files = tuple(FileResult(role, f"srt/{role}.py", outcome) for role, outcome in outcomes.items())
    return SetResult("status", "/x", "0.5.9", Outcome.ALREADY, Exit.OK, files)


PATCHED = source(server_args=Outcome.ALREADY, eagle_worker=Outcome.ALREADY, spec_switch=Outcome.ALREADY)


def checked(result: verify.VerifyResult) -> verify.VerifyResult:
    jsonschema.validate(result.to_json(), SCHEMA)
    assert verify.render(result).startswith(result.verdict.value)
    return result


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], str]:
    """An 'interpreter' that runs the given Python in place of the probe, with ``request`` and ``result`` at hand."""

    def make(body: str) -> str:
        script = tmp_path / "fake.py"
        script.write_text(
            "import json, os, signal, sys, time\n"
            "request, result = json.load(open(sys.argv[2])), sys.argv[3]\n"
            "def say(level, text):\n"
            "    open(request['events'], 'a').write(json.dumps({'level': level, 'text': text}) + '\\n')\n"
            + body
        )
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return str(python)

    return make


ANSWER = {
    "verdict": "ACTIVE",
    "level": "construct",
    "selected": {"class": "EAGLEWorker", "module": "m", "file": "/f", "because": "b"},
    "threshold": 4,
    "marker": "Dynamic speculation disable enabled: threshold=4",
    "attribute": 4,
    "stand_ins": [],
    "detail": "",
}


def answering(**changes: Any) -> str:
    return f"say('construct', 'constructing'); json.dump({ ({**ANSWER, **changes})!r}, open(result, 'w'))\n"


@pytest.mark.parametrize(
    "files",
    [
        source(
            server_args=Outcome.WOULD_APPLY, eagle_worker=Outcome.WOULD_APPLY, spec_switch=Outcome.WOULD_APPLY
        ),
        source(server_args=Outcome.WOULD_APPLY, eagle_worker=Outcome.DRIFT, spec_switch=Outcome.ALREADY),
        source(server_args=Outcome.NOT_NEEDED, eagle_worker=Outcome.WOULD_APPLY),
    ],
)
def test_unpatched_is_said_without_an_interpreter(tmp_path: Path, files: SetResult) -> None:
    result = checked(verify.run(Tree(tmp_path), "/no/python", source=files))
    assert (result.verdict, result.level, result.exit_code) == (Verdict.UNPATCHED, Level.SOURCE, 1)
    assert f"dynspec patch --sglang-root {tmp_path}" in result.detail


def test_active_passes_progress_on(tmp_path: Path, interpreter: Callable[[str], str]) -> None:
    heard: list[str] = []
    result = checked(
        verify.run(Tree(tmp_path), interpreter(answering()), source=PATCHED, progress=heard.append)
    )
    assert (result.verdict, result.exit_code, heard) == (Verdict.ACTIVE, 0, ["constructing"])


def test_a_lower_level_than_asked_is_a_failure(tmp_path: Path, interpreter: Callable[[str], str]) -> None:
    python = interpreter(answering())
    assert verify.run(Tree(tmp_path), python, source=PATCHED, level=Level.EXERCISE).exit_code == 1
    assert verify.run(Tree(tmp_path), python, source=PATCHED, level=Level.SOURCE).exit_code == 0


@pytest.mark.parametrize(("require", "code"), [(False, 0), (True, 1)])
def test_off(tmp_path: Path, interpreter: Callable[[str], str], require: bool, code: int) -> None:
    python = interpreter(answering(verdict="OFF", threshold=0, attribute=0, marker=None))
    result = checked(verify.run(Tree(tmp_path), python, source=PATCHED, require_active=require))
    assert (result.verdict, result.exit_code) == (Verdict.OFF, code)


@pytest.mark.parametrize(
    "missing",
    [
        {"marker": None},
        {"attribute": None},
        {"attribute": 5},
        {"threshold": 0},
        {"selected": None},
        {"level": "select"},
        {"verdict": "OFF"},
    ],
)
def test_active_is_not_believed_without_evidence(
    tmp_path: Path, interpreter: Callable[[str], str], missing: dict[str, Any]
) -> None:
    result = checked(verify.run(Tree(tmp_path), interpreter(answering(**missing)), source=PATCHED))
    assert (result.verdict, result.exit_code) == (Verdict.BROKEN, 1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("say('construct', 'constructing'); print('last words'); os._exit(0)\n", "exit code 0"),
        ("say('construct', 'constructing'); print('last words', flush=True); os.abort()\n", "SIGABRT"),
        (answering() + "print('last words', flush=True); os._exit(3)\n", "exit code 3"),
    ],
)
def test_a_crashed_probe_is_broken(
    tmp_path: Path, interpreter: Callable[[str], str], body: str, said: str
) -> None:
    if "os._exit(0)" in body:
        body = body.replace("print('last words')", "print('last words', flush=True)")
    result = checked(verify.run(Tree(tmp_path), interpreter(body), source=PATCHED))
    assert (result.verdict, result.level, result.exit_code) == (Verdict.BROKEN, Level.CONSTRUCT, 1)
    assert said in result.detail
    assert "last words" in result.detail


def test_a_timeout_is_broken_and_leaves_no_process(tmp_path: Path, interpreter: Callable[[str], str]) -> None:
    body = (
        "say('import', 'importing'); print('last words', flush=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)\n"
    )
    result = checked(verify.run(Tree(tmp_path), interpreter(body), source=PATCHED, timeout=1.5))
    assert (result.verdict, result.level) == (Verdict.BROKEN, Level.IMPORT)
    assert "within 1.5 s" in result.detail
    assert "last words" in result.detail
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true", __file__])
def test_not_an_interpreter(tmp_path: Path, python: str) -> None:
    with pytest.raises(DynspecError) as caught:
        verify.run(Tree(tmp_path), python, source=PATCHED)
    assert caught.value.exit_code == Exit.ENVIRONMENT
    assert python in str(caught.value)


def test_serve_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(DynspecError) as caught:
        verify.run(Tree(tmp_path), sys.executable, source=PATCHED, level=Level.SERVE)
    assert caught.value.exit_code == Exit.USAGE


# ------------------------------------------------------------------ the checks of construct

WORKER = """
import logging
logger = logging.getLogger(__name__)
def elsewhere(n):
    logger.info("Dynamic speculation disable enabled: threshold=%d", n)
class EAGLEWorker:
    def __init__(self, n):
        self.spec_disable_batch_threshold = n
        if n > 0:
            logger.info("Dynamic speculation disable enabled: threshold=%d (worker=%s)", n, type(self).__name__)
class Other(EAGLEWorker):
    pass
"""
LOG_CALL = (
    'logger.info("Dynamic speculation disable enabled: threshold=%d (worker=%s)", n, type(self).__name__)'
)


def constructed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str = WORKER,
    threshold: int = 4,
    build: str = "EAGLEWorker",
    config: Callable[[], None] = lambda: None,
) -> construct.Constructed:
    """Runs the checks of the construct level on a made-up worker module."""
    file = tmp_path / "made_up_worker.py"
    file.write_text(text)
    module = types.ModuleType("made_up_worker")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))

    def build_scheduler(_argv: object) -> tuple[Any, Any]:
        config()
        return None, types.SimpleNamespace(draft_worker=vars(module)[build](threshold))

    monkeypatch.setattr(harness, "build_scheduler", build_scheduler)
    return construct.construct([], module.EAGLEWorker, threshold)


def quiet() -> None:
    logging.basicConfig(level=logging.ERROR, force=True)


@pytest.mark.parametrize("config", [lambda: None, quiet])
def test_a_good_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Callable[[], None]) -> None:
    found = constructed(tmp_path, monkeypatch, config=config)
    assert found.fault == ""
    assert (found.attribute, found.marker) == (
        4,
        "Dynamic speculation disable enabled: threshold=4 (worker=EAGLEWorker)",
    )


def test_a_good_worker_with_threshold_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = constructed(tmp_path, monkeypatch, threshold=0)
    assert (found.fault, found.attribute, found.marker) == ("", 0, None)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ((LOG_CALL, "pass"), "was not logged"),
        ((LOG_CALL, LOG_CALL.replace(".info", ".debug")), "logged at DEBUG"),
        ((LOG_CALL, LOG_CALL.replace(".info", ".warning")), "logged at WARNING"),
        ((LOG_CALL, f"{LOG_CALL}; {LOG_CALL}"), "logged 2 times"),
        ((LOG_CALL, LOG_CALL.replace(" n,", " n + 1,")), "found threshold=5"),
        ((LOG_CALL, LOG_CALL.replace(" n,", " 10 * n + 1,")), "found threshold=41"),
        ((LOG_CALL, "elsewhere(n)"), "logged by elsewhere"),
        (
            (LOG_CALL, LOG_CALL.replace("logger.", "logging.getLogger('other').")),
            "not logged by made_up_worker",
        ),
        (("self.spec_disable_batch_threshold = n", "pass"), "no attribute"),
        (
            ("self.spec_disable_batch_threshold = n", "type(self).spec_disable_batch_threshold = n"),
            "no attribute",
        ),
        (("self.spec_disable_batch_threshold = n", "self.spec_disable_batch_threshold = n + 1"), "is 5"),
        (("self.spec_disable_batch_threshold = n", "self.spec_disable_batch_threshold = str(n)"), "is '4'"),
        (("self.spec_disable_batch_threshold = n", "self.spec_disable_batch_threshold = float(n)"), "is 4.0"),
    ],
)
def test_a_sabotaged_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], fault: str
) -> None:
    text = WORKER.replace(*change)
    assert text != WORKER
    assert fault in constructed(tmp_path, monkeypatch, text).fault


def test_a_marker_with_threshold_0_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = constructed(tmp_path, monkeypatch, WORKER.replace("if n > 0", "if True"), threshold=0)
    assert "the threshold is 0, yet" in found.fault


def test_another_class_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "constructed made_up_worker.Other" in constructed(tmp_path, monkeypatch, build="Other").fault


# ---------------------------------------------------------------------- the check of live code


def key(text: str) -> Any:
    return live._key(compile(text, "f", "exec"))


def test_line_numbers_are_not_code() -> None:
    assert key("def f(x):\n    return x + 1\n") == key("\n\n# said\ndef f(x):\n\n    return x + 1\n\n")


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("def f(x): return x + 1", "def f(x): return x + 2"),
        ("def f(x): return x + 1", "def f(x): return x + 1.0"),
        ("def f(x): return x + 1", "def f(x): return x + True"),
        ("def f(x): return x + 1", "def f(x, y=0): return x + 1"),
        ("def f(x): return x.a", "def f(x): return x.b"),
        ("class A:\n  def f(self): return 1", "class A:\n  def f(self): return 2"),
        ("x: int = 0", "x: int = 1"),
    ],
)
def test_other_code_is_seen(one: str, two: str) -> None:
    assert key(one) != key(two)


@pytest.mark.parametrize(
    "replace",
    ["EAGLEWorker.__init__ = lambda self: None", "EAGLEWorker = type('EAGLEWorker', (EAGLEWorker,), {})"],
)
def test_a_method_or_class_replaced_at_run_time(tmp_path: Path, replace: str) -> None:
    text = "class EAGLEWorker:\n    def __init__(self): self.x = 1\n    def forward_batch_generation(self, b): return b\n"
    file = tmp_path / "eagle_worker.py"
    file.write_text(text)
    module = types.ModuleType("made_up_worker")
    exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))
    live.check_live(str(tmp_path), "eagle_worker", "eagle_worker.py", module)
    exec(replace, vars(module))
    with pytest.raises(live.StaleError, match="EAGLEWorker"):
        live.check_live(str(tmp_path), "eagle_worker", "eagle_worker.py", module)
