"""Level ``exercise`` on real sglang: it passes on both releases and both workers, and fails on every sabotage."""

# ruff: noqa: F811 (fixtures that are imported by name are also parameters)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_verify_sglang import V1, V2, Sabotaged, Site, originals, patched  # noqa: F401

from patcher import engine
from patcher.outcomes import Exit, Level, Verdict

pytestmark = pytest.mark.sglang

SWITCH = "srt/speculative/dynspec_switch.py"
CHAIN = (
    "--speculative-num-steps",
    "3",
    "--speculative-eagle-topk",
    "1",
    "--speculative-num-draft-tokens",
    "4",
)
TREE = (
    "--speculative-num-steps",
    "2",
    "--speculative-eagle-topk",
    "4",
    "--speculative-num-draft-tokens",
    "8",
)


def arguments(algorithm: str, shape: tuple[str, ...], threshold: int, models: Path) -> list[str]:
    """Server arguments whose models exist as configurations only: selection reads no weights."""
    for name in ("target", "draft"):
        folder = models / name
        folder.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).parent.parent / "scripts" / "demo" / name / "config.json"
        (folder / "config.json").write_text(source.read_text())
    return [
        *("--model-path", str(models / "target"), "--speculative-draft-model-path", str(models / "draft")),
        *("--speculative-algorithm", algorithm, *shape, "--skip-tokenizer-init"),
        *("--speculative-disable-batch-threshold", str(threshold)),
    ]


@pytest.mark.parametrize(
    ("version", "algorithm", "shape", "environment", "threshold", "worker"),
    [
        ("0.5.9", "EAGLE", CHAIN, None, 5, V1),
        ("0.5.9", "EAGLE3", CHAIN, "True", 3, V2),
        ("0.5.12", "EAGLE3", CHAIN, None, 3, V2),
        ("0.5.12", "EAGLE", TREE, None, 2, V1),
        ("0.5.12", "EAGLE3", CHAIN, "False", 1, V1),
    ],
)
def test_it_passes(
    version: str,
    algorithm: str,
    shape: tuple[str, ...],
    environment: str | None,
    threshold: int,
    worker: str,
    patched: Callable[[str], Site],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = patched(version)
    monkeypatch.setenv("PYTHONPATH", str(site.directory))
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)
    if environment is not None:
        monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", environment)
    result = site.verify(*arguments(algorithm, shape, threshold, tmp_path), level=Level.EXERCISE)
    assert (result.verdict, result.level, result.exit_code) == (Verdict.ACTIVE, Level.EXERCISE, Exit.OK)
    assert result.selected is not None
    assert result.selected.class_name == worker
    assert "tokens equal to the run without speculation" in result.detail


def test_threshold_zero_never_skips(
    patched: Callable[[str], Site],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = patched("0.5.9")
    monkeypatch.setenv("PYTHONPATH", str(site.directory))
    result = site.verify(*arguments("EAGLE", CHAIN, 0, tmp_path), level=Level.EXERCISE)
    assert (result.verdict, result.level) == (Verdict.OFF, Level.EXERCISE)
    assert "exercise: 0 steps skipped" in result.detail


def undone_kv(call: str, pool: str) -> str:
    """The draft extend runs, but what it wrote to the draft's KV cache is taken back."""
    keep = f"_kept = [(_b, _b.clone()) for _p in ({pool}.k_buffer, {pool}.v_buffer) for _b in _p]; "
    return f"{keep}{call}; [_b.copy_(_c) for _b, _c in _kept]"


EXTEND_V1 = "returned = worker.forward_draft_extend_after_decode(batch)"
EXTEND_V2 = "draft_worker._draft_extend_for_decode(batch, result)"
DECIDE = "skip = running >= self.threshold"
# The draft extend runs and writes its KV, but what it hands to the next step is made up; the shapes are right.
STUB = "_d.hidden_states = _d.hidden_states * 0; _d.topk_index = _d.topk_index * 0"
LENGTHS = "result.accept_lens = result.accept_lens + (self.skipped_steps == 3)"
ALLOCATE = "batch.out_cache_loc = _sglang().alloc_for_decode(batch, token_per_req=1)"
LEAK = "worker.token_to_kv_pool_allocator.alloc(1) if self.skipped_steps == 2 else None"

SABOTAGES = [
    ("never skips", DECIDE, "skip = False", "was not skipped", (V1, V2)),
    ("always skips", DECIDE, "skip = True", "it did not speculate", (V1, V2)),
    ("off by one", DECIDE, "skip = running > self.threshold", "was not skipped", (V1, V2)),
    ("draft state not kept", EXTEND_V1, undone_kv(EXTEND_V1, "worker.draft_model_runner.token_to_kv_pool"), "KV cache was not kept in step", (V1,)),
    ("draft state not kept", EXTEND_V2, undone_kv(EXTEND_V2, "draft_worker.draft_runner.token_to_kv_pool"), "KV cache was not kept in step", (V2,)),
    ("draft state made up", "return draft if returned is None else returned", f"_d = draft if returned is None else returned; {STUB}; return _d", "state was not kept in step", (V1,)),
    ("draft state made up", EXTEND_V2, f"{EXTEND_V2}; _d = result.next_draft_input; {STUB}", "state was not kept in step", (V2,)),
    ("lengths wrong", "self._draft_extend(batch, result)", f"self._draft_extend(batch, result); {LENGTHS}", "advanced by", (V2,)),
    ("output dropped", "req.output_ids.append(token)", "self.skipped_steps == 3 or req.output_ids.append(token)", "advanced by", (V1,)),
    ("output wrong", "next_token_ids=tokens,\n            can_run_cuda_graph=graph,\n            next_draft_input", "next_token_ids=tokens if self.skipped_steps != 3 else tokens * 0,\n            can_run_cuda_graph=graph,\n            next_draft_input", "differs from the run without speculation", (V2,)),
    ("slot lost", ALLOCATE, f"{ALLOCATE}; worker = self.worker; {LEAK}", "slots were lost", (V1,)),
    ("slot lost", "worker = self.worker\n        bs = len(batch.seq_lens)\n        before", f"worker = self.worker; {LEAK}\n        bs = len(batch.seq_lens)\n        before", "slots were lost", (V2,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said", "worker"),
    [pytest.param(o, n, s, w, id=f"{name}-{w}") for name, o, n, s, workers in SABOTAGES for w in workers],
)
def test_every_sabotage_of_the_switch_fails(
    old: str,
    new: str,
    said: str,
    worker: str,
    patched: Callable[[str], Site],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = patched("0.5.9" if worker == V1 else "0.5.12")
    copy = whole.copy(tmp_path / "site")
    site = Sabotaged(copy.version, copy.directory)
    # The source level would notice the edit at once. Told that it is ours, only the exercise is left to notice.
    site.believed = engine.status(whole.tree)
    site.rewrite(SWITCH, lambda text: text.replace(old, new, 1))
    monkeypatch.setenv("PYTHONPATH", str(site.directory))
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)
    result = site.verify(*arguments("EAGLE", CHAIN, 3, tmp_path / "models"), level=Level.EXERCISE)
    assert (result.verdict, result.exit_code) == (Verdict.BROKEN, Exit.NOT_AS_ASKED)
    assert result.selected is not None
    assert result.selected.class_name == worker
    assert result.level is Level.EXERCISE
    assert said in result.detail
