"""The batch-size switch for EAGLE speculative decoding: what ``dynspec`` adds to SGLang.

With ``--speculative-disable-batch-threshold N`` a decode batch of N or more requests advances by one plain decode
step of the target worker (no draft, no verify); below N it speculates. The decision is taken anew for each decode
step from nothing but the batch's length, so it is the same on every tensor-parallel rank and needs no hysteresis.

A skipped step does three things:

1. *target decode*: ``ForwardMode.DECODE`` on an attention backend of its own (sharing one with the verify CUDA graphs
   would overwrite the buffers that they were captured on), then the plain sampler. Hidden states are captured, since
   the draft worker needs them.
2. *commit*: in v1 the worker itself appends tokens and checks for finished requests, as ``EagleVerifyInput.verify``
   does; in v2 the scheduler does so from the result.
3. *draft extend*: one token a request, so that the draft worker's KV cache has no hole when speculation resumes.
   Without it output stays right but acceptance collapses (measured in SGLang, vLLM #53420, TensorRT-LLM #16888).

``server_args.speculative_*`` keep their speculative values throughout: the v2 scheduler sizes its allocation by them.

This file is a copy made by dynspec (https://github.com/sgl-project/sglang/issues/1979 asks for the feature); it needs
nothing but SGLang. `dynspec revert` removes it. torch and SGLang are imported late: ``server_args.py`` imports this
module while SGLang is still being set up.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

DYNSPEC_VERSION = "0.0.0+source"
FLAG = "--speculative-disable-batch-threshold"
LOG_INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


class SpecSwitchError(ValueError):
    """The threshold can't be honoured. ``code``: ``not_speculative``, ``unsupported_worker`` or ``conflict``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# ---------------------------------------------------------------- server arguments


def threshold_type(text: str) -> int:
    """argparse type of the flag: a non-negative integer.

    Raises:
        argparse.ArgumentTypeError: not an integer, or negative.
    """
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(
            f"expected an integer >= 0 (0 = never skip speculation), got {value}"
        )
    return value


def add_cli_args(parser: argparse.ArgumentParser, default: int) -> None:
    """Register the flag beside SGLang's own speculative arguments."""
    parser.add_argument(
        FLAG,
        type=threshold_type,
        default=default,
        metavar="N",
        help="Skip speculation (no draft, no verify) while a decode batch holds N or more requests; below N it speculates. "
        "0 (default) never skips, 1 never speculates. For the EAGLE and EAGLE3 workers. Added by dynspec.",
    )


_CONFLICTS: tuple[tuple[str, str], ...] = (
    ("enable_dp_attention", "--enable-dp-attention: ranks would see different batch sizes and disagree"),
    ("speculative_adaptive", "--speculative-adaptive: it changes the number of draft steps itself"),
    ("enable_two_batch_overlap", "--enable-two-batch-overlap: it splits the batch that the switch counts"),
    ("enable_pdmux", "--enable-pdmux: it decodes on attention backends of its own"),
    ("enable_lora", "--enable-lora: LoRA's CUDA graph state is tied to the verify graphs"),
    ("lora_paths", "--lora-paths: LoRA's CUDA graph state is tied to the verify graphs"),
    (
        "enable_deterministic_inference",
        "--enable-deterministic-inference: the two modes use different kernels",
    ),
    ("enable_hisparse", "--enable-hisparse: its coordinator follows verify steps"),
)


def validate_server_args(server_args: Any) -> None:
    """Refuse a threshold that can't be honoured; warn about one that can never trigger.

    Called at the end of ``ServerArgs.__post_init__``, when every argument is resolved.

    Raises:
        SpecSwitchError: the other arguments can't be combined with the threshold; the message says why.
        ValueError: the threshold is not a non-negative integer (``ServerArgs`` built without the command line).
    """
    threshold = server_args.speculative_disable_batch_threshold
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
        raise ValueError(
            f"speculative_disable_batch_threshold must be an integer >= 0 (0 = never skip), got {threshold!r}"
        )
    if threshold == 0:
        return

    def refuse(code: str, why: str) -> SpecSwitchError:
        return SpecSwitchError(code, f"{FLAG} {threshold} can't be honoured: {why}. Remove one of the two.")

    def get(name: str) -> Any:
        return getattr(server_args, name, None)

    algorithm = get("speculative_algorithm")
    if algorithm is None:
        raise refuse(
            "not_speculative", "no --speculative-algorithm is set, so there is no speculation to skip"
        )
    if str(algorithm).upper() not in ("EAGLE", "EAGLE3"):
        raise refuse(
            "unsupported_worker",
            f"the worker of --speculative-algorithm {algorithm} has no switch (EAGLE, EAGLE3 have)",
        )
    if get("enable_multi_layer_eagle"):
        raise refuse(
            "unsupported_worker", "the multi-layer EAGLE worker (--enable-multi-layer-eagle) has no switch"
        )
    for name, why in _CONFLICTS:
        if get(name):
            raise refuse("conflict", why)
    if (get("pp_size") or 1) > 1:
        raise refuse(
            "conflict", f"--pp-size {get('pp_size')}: pipeline parallelism is not supported with the switch"
        )
    if get("disaggregation_mode") not in (None, "null"):
        raise refuse(
            "conflict", f"--disaggregation-mode {get('disaggregation_mode')}: not supported with the switch"
        )

    limit = get("max_running_requests")
    if limit is not None and threshold > limit:
        _warn_never_triggers(threshold, limit)


def _warn_never_triggers(threshold: int, limit: int) -> None:
    logger.warning(
        "%s %d can never trigger: at most %d requests run at once. Raise --max-running-requests "
        "(48 by default under speculation) or lower the threshold.",
        FLAG,
        threshold,
        limit,
    )


# ---------------------------------------------------------------- hooks in the workers


def build(worker: Any, version: int) -> SpecSwitch | None:
    """Make the switch of a worker; the last thing that its constructor does.

    Args:
        worker: ``EAGLEWorker`` (version 1) or ``EAGLEWorkerV2`` (version 2), fully constructed.
        version: 1 when ``forward_batch_generation`` takes a ``ScheduleBatch`` and commits tokens itself, 2 when it takes
            a ``ModelWorkerBatch`` under the overlap schedule.

    Returns:
        None when the threshold is 0: the worker then runs exactly as without dynspec.

    Raises:
        SpecSwitchError: the target model, or a class derived from the worker, can't honour the threshold.
    """
    threshold = getattr(worker.server_args, "speculative_disable_batch_threshold", 0)
    if not threshold:
        return None
    expected = {1: "EAGLEWorker", 2: "EAGLEWorkerV2"}[version]
    if type(worker).__name__ != expected:
        raise SpecSwitchError(
            "unsupported_worker",
            f"{FLAG} {threshold}: {type(worker).__name__} derives from {expected} but has no switch",
        )
    runner = worker.target_worker.model_runner
    for name, what in (
        ("hybrid_gdn_config", "a hybrid linear-attention model"),
        ("mamba2_config", "a Mamba-2 hybrid model"),
        ("hybrid_lightning_config", "a hybrid lightning-attention model"),
        ("is_hybrid_swa", "a hybrid sliding-window model"),
    ):
        if getattr(runner, name, None):
            raise SpecSwitchError(
                "conflict", f"{FLAG} {threshold}: the target is {what}, which the switch does not support"
            )
    limit = getattr(worker.target_worker, "max_running_requests", None)
    asked = worker.server_args.max_running_requests
    if limit is not None and threshold > limit and (asked is None or threshold <= asked):
        _warn_never_triggers(threshold, limit)
    return (SpecSwitchV1 if version == 1 else SpecSwitchV2)(worker, threshold)


def skips(worker: Any, batch: Any) -> bool:
    """Whether this step skips speculation. False for prefill, idle batches, threshold 0 and unhooked subclasses."""
    switch = getattr(worker, "spec_switch", None)
    return switch is not None and switch.decide(batch)


def step(worker: Any, batch: Any) -> Any:
    """Run the skipped step that :func:`skips` announced; returns SGLang's ``GenerationBatchResult``."""
    return worker.spec_switch.step(batch)


# ---------------------------------------------------------------- the switch


@functools.cache
def _sglang() -> SimpleNamespace:
    """SGLang's names that the switch uses, under this release's spelling (0.5.12 renamed several)."""
    from sglang.srt.layers.moe.utils import (
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.common import alloc_for_decode
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.speculative import eagle_info
    from sglang.srt.speculative.eagle_info_v2 import assign_extend_cache_locs_func
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    draft_fields = eagle_info.EagleDraftInput.__dataclass_fields__
    result_fields = GenerationBatchResult.__dataclass_fields__
    return SimpleNamespace(
        CaptureHiddenMode=CaptureHiddenMode,
        EagleDraftInput=eagle_info.EagleDraftInput,
        EagleDraftExtendInput=getattr(eagle_info, "EagleDraftExtendInput", None),
        ForwardBatch=ForwardBatch,
        ForwardMode=ForwardMode,
        GenerationBatchResult=GenerationBatchResult,
        SpeculativeAlgorithm=SpeculativeAlgorithm,
        alloc_for_decode=alloc_for_decode,
        assign_extend_cache_locs=assign_extend_cache_locs_func,
        moe_contexts=(speculative_moe_backend_context, speculative_moe_a2a_backend_context),
        last_token="bonus_tokens" if "bonus_tokens" in draft_fields else "verified_id",
        accepted="num_correct_drafts" if "num_correct_drafts" in result_fields else "num_accepted_tokens",
        accepted_per_req="num_correct_drafts_per_req_cpu"
        if "num_correct_drafts_per_req_cpu" in result_fields
        else "accept_length_per_req_cpu",
        result_has_stride="speculative_num_draft_tokens" in result_fields,
    )


@contextlib.contextmanager
def _swapped(*swaps: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes for the duration of a block and put every one back, also when the block raises."""
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    try:
        for owner, name, value in swaps:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)


class TargetDecode:
    """Plain decode of the target model beside its verify path.

    Owns the attention backend, built while the model runner is told that there is no speculation (backends read the
    draft width and topk when they are constructed).
    """

    def __init__(self, model_runner: Any) -> None:
        sglang = _sglang()
        self.model_runner = model_runner
        workspace = model_runner.init_new_workspace if hasattr(model_runner, "init_new_workspace") else False
        with _swapped((model_runner, "spec_algorithm", sglang.SpeculativeAlgorithm.NONE)):
            self.attn_backend = model_runner._get_attention_backend(init_new_workspace=True)
        model_runner.init_new_workspace = workspace
        self.graph_runner = None

    def forward(self, batch: Any) -> tuple[Any, Any, bool]:
        """One decode step of a ``ModelWorkerBatch`` whose ``input_ids``, ``seq_lens`` (this token included) and
        ``out_cache_loc`` are set, each of shape (bs,).

        Returns:
            The logits output (hidden states of shape (bs, hidden)), the sampled tokens (bs,), and whether a CUDA graph ran.
        """
        sglang = _sglang()
        runner = self.model_runner
        batch.forward_mode = sglang.ForwardMode.DECODE
        batch.spec_info = None
        batch.capture_hidden_mode = sglang.CaptureHiddenMode.FULL
        with _swapped(
            (runner, "attn_backend", self.attn_backend), (runner, "graph_runner", self.graph_runner)
        ):
            forward_batch = sglang.ForwardBatch.init_new(batch, runner)
            output = runner.forward(forward_batch)
        tokens = runner.sample(output.logits_output, forward_batch)
        return output.logits_output, tokens, output.can_run_graph


class SpecSwitch:
    """State and counters of one worker's switch.

    Attributes:
        threshold: N, a number of requests.
        skipped_steps, speculative_steps: decode steps taken in each mode since start.
        crossings: changes of mode since start.
    """

    def __init__(self, worker: Any, threshold: int) -> None:
        self.worker = worker
        self.threshold = threshold
        self.skipped_steps = 0
        self.speculative_steps = 0
        self.crossings = 0
        self._skipping: bool | None = None
        self._last_log = float("-inf")
        self._unlogged = 0
        self.target = TargetDecode(worker.target_worker.model_runner)

    # -- decision

    def decide(self, batch: Any) -> bool:
        """Whether a step of ``batch`` skips; counts it. Pure in the batch's length: equal on every rank."""
        mode = batch.forward_mode
        if mode.is_extend() or mode.is_idle() or batch.is_extend_in_batch:
            return False
        running = len(batch.seq_lens)
        skip = running >= self.threshold
        if skip:
            self.skipped_steps += 1
        else:
            self.speculative_steps += 1
        if skip is not self._skipping:
            first = self._skipping is None
            self._skipping = skip
            if not first:
                self.crossings += 1
            if skip or not first:
                self._log_crossing(skip, running)
        return skip

    def _log_crossing(self, skip: bool, running: int) -> None:
        """At most one line in LOG_INTERVAL_S seconds; the clock touches the log only, never the decision."""
        now = time.monotonic()
        if now - self._last_log < LOG_INTERVAL_S:
            self._unlogged += 1
            return
        if getattr(self.worker, "tp_rank", 0) == 0:
            logger.info(
                "Dynamic speculation %s: running=%d %s threshold=%d; skipped_steps=%d speculative_steps=%d crossings=%d%s",
                "skipped" if skip else "resumed",
                running,
                ">=" if skip else "<",
                self.threshold,
                self.skipped_steps,
                self.speculative_steps,
                self.crossings,
                f" ({self._unlogged} changes not logged)" if self._unlogged else "",
            )
        self._last_log = now
        self._unlogged = 0

    # -- step

    def step(self, batch: Any) -> Any:
        raise NotImplementedError

    @contextlib.contextmanager
    def _draft_context(self, owner: Any, model_runner: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(owner.draft_tp_context(model_runner.tp_group))
            for context in _sglang().moe_contexts:
                stack.enter_context(context())
            yield


class SpecSwitchV1(SpecSwitch):
    """The switch of ``EAGLEWorker``: no overlap schedule, the worker commits tokens itself."""

    def step(self, batch: Any) -> Any:
        sglang = _sglang()
        worker = self.worker
        bs = len(batch.seq_lens)
        last_tokens = getattr(batch.spec_info, sglang.last_token)
        logits_output, tokens, graph = self._decode(batch, last_tokens)
        next_draft = self._draft_extend(batch, tokens, logits_output.hidden_states)
        keep = self._commit(batch, tokens, logits_output)
        if not keep:
            worker._draft_preprocess_idle(batch)
        else:
            if len(keep) < bs:  # the scheduler expects finished rows to have left `spec_info` already
                import torch

                next_draft.filter_batch(
                    torch.tensor(keep, dtype=torch.int64, device=tokens.device), has_been_filtered=False
                )
            batch.spec_info = next_draft
        return sglang.GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=graph,
            **{sglang.accepted: 0, sglang.accepted_per_req: [0] * bs},
        )

    def _decode(self, batch: Any, last_tokens: Any) -> tuple[Any, Any, bool]:
        """Allocate one KV slot a request and run the target; leaves the batch's lengths advanced by one."""
        import torch

        for req in batch.reqs:
            req.decode_batch_idx += 1
        penalties = batch.sampling_info.penalizer_orchestrator
        if penalties.is_required:
            penalties.cumulate_output_tokens(last_tokens.to(torch.int64))
        batch.input_ids = last_tokens.to(torch.int64)
        batch.out_cache_loc = _sglang().alloc_for_decode(batch, token_per_req=1)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        batch.spec_info = None
        result = self.target.forward(batch.get_model_worker_batch())
        # A grammar mask left here would be applied again by the next verify.
        batch.sampling_info.vocab_mask = None
        return result

    def _draft_extend(self, batch: Any, tokens: Any, hidden_states: Any) -> Any:
        """Write the draft worker's KV for the new tokens (bs,) from hidden_states (bs, hidden); returns the next
        ``EagleDraftInput``. Enqueued before the tokens are read on the CPU."""
        import torch

        sglang = _sglang()
        worker = self.worker
        bs = len(batch.seq_lens)
        zeros = torch.zeros(bs, dtype=torch.int32, device=tokens.device)
        tokens = tokens.to(torch.int32)
        if sglang.EagleDraftExtendInput is not None:
            batch.spec_info = sglang.EagleDraftExtendInput(
                hidden_states=hidden_states,
                num_correct_drafts=zeros,
                num_accept_tokens=zeros + 1,
                num_accept_tokens_cpu=[1] * bs,
                input_ids=tokens,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=batch.seq_lens_cpu,
                req_pool_indices=batch.req_pool_indices,
            )
        else:
            batch.spec_info = sglang.EagleDraftInput(
                hidden_states=hidden_states,
                verified_id=tokens,
                accept_length=zeros,
                accept_length_cpu=[0] * bs,
                seq_lens_for_draft_extend=batch.seq_lens,
                seq_lens_for_draft_extend_cpu=batch.seq_lens_cpu,
                req_pool_indices_for_draft_extend=batch.req_pool_indices,
            )
        draft = batch.spec_info
        with (
            self._draft_context(worker, worker.draft_model_runner),
            _swapped(
                (worker, "speculative_num_steps", 0), (worker, "cuda_graph_runner_for_draft_extend", None)
            ),
        ):
            returned = worker.forward_draft_extend_after_decode(batch)
        return draft if returned is None else returned

    def _commit(self, batch: Any, tokens: Any, logits_output: Any) -> list[int]:
        """Append each request's token, as ``EagleVerifyInput.verify`` does for an accepted root; returns the indices of
        the requests that go on."""
        values = tokens.tolist()
        logprobs = _Logprobs(logits_output) if batch.return_logprob else None
        keep = []
        for i, (req, token) in enumerate(zip(batch.reqs, values, strict=True)):
            req.output_ids.append(token)
            self._accept(req, token, batch.model_config)
            req.kv_committed_len += 1
            req.kv_allocated_len = req.kv_committed_len
            req.spec_verify_ct += 1
            histogram = (
                getattr(req, "update_spec_correct_drafts_histogram", None)
                or req.update_spec_acceptance_histogram
            )
            histogram(0)
            if logprobs is not None and req.return_logprob:
                logprobs.append(req, i, token)
            if not req.finished():
                keep.append(i)
        return keep

    @staticmethod
    def _accept(req: Any, token: int, model_config: Any) -> None:
        """Finish and grammar checks, in the order of this release's verify."""
        reasoning = hasattr(req, "update_reasoning_tokens")
        if reasoning:
            think_end = getattr(model_config, "think_end_id", None)
            if req.require_reasoning and think_end is not None:
                req.update_reasoning_tokens(token, think_end)
        req.check_finished()
        if not req.finished() and req.grammar is not None:
            req.grammar.accept_token(token)
            if reasoning:  # releases that count reasoning tokens check again for a terminated grammar
                req.check_finished()


class _Logprobs:
    """The sampler's log-probabilities of one step, as Python lists, in the shape of requests' own fields."""

    def __init__(self, logits_output: Any) -> None:
        self.token = logits_output.next_token_logprobs.tolist()
        self.top_val = self._rows(logits_output.next_token_top_logprobs_val)
        self.top_idx = self._rows(logits_output.next_token_top_logprobs_idx)

    @staticmethod
    def _rows(rows: Sequence[Any] | None) -> list[Any]:
        return [row.tolist() if hasattr(row, "tolist") else row for row in rows or ()]

    def append(self, req: Any, i: int, token: int) -> None:
        req.output_token_logprobs_val.append(self.token[i])
        req.output_token_logprobs_idx.append(token)
        if req.top_logprobs_num > 0:
            req.output_top_logprobs_val.append(self.top_val[i])
            req.output_top_logprobs_idx.append(self.top_idx[i])


class SpecSwitchV2(SpecSwitch):
    """The switch of ``EAGLEWorkerV2``: overlap schedule, the scheduler commits tokens from the result.

    ``EagleDraftInput.prepare_for_decode`` has already reserved the KV slots behind every request, so there is nothing
    to allocate; the step uses the first of them.
    """

    def step(self, batch: Any) -> Any:
        import torch

        sglang = _sglang()
        worker = self.worker
        bs = len(batch.seq_lens)
        before = (batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum)
        device = torch.get_device_module(worker.device)
        # allocated on the scheduler's stream, read on this one
        batch.seq_lens.record_stream(device.current_stream())
        batch.input_ids = getattr(batch.spec_info, sglang.last_token).to(torch.int64)
        batch.seq_lens = before[0] + 1
        batch.seq_lens_cpu = before[1] + 1
        batch.seq_lens_sum = before[2] + bs
        batch.out_cache_loc = sglang.assign_extend_cache_locs(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=worker.req_to_token_pool.req_to_token,
            start_offset=before[0],
            end_offset=batch.seq_lens,
            batch_size=bs,
            draft_token_num=1,
            device=worker.device,
        )
        if hasattr(batch.sampling_info, "acc_linear_penalties"):
            # These releases' v2 never cumulates penalties (upstream), so applying them here would differ between modes
            # and make `min_new_tokens` suppress the end token for ever.
            batch.sampling_info.acc_linear_penalties = None
        logits_output, tokens, graph = self.target.forward(batch)
        tokens = tokens.to(torch.int32)
        if batch.return_logprob and sglang.result_has_stride:
            logits_output.next_token_logprobs = logits_output.next_token_logprobs.unsqueeze(1)
        verify_done = device.Event()
        verify_done.record()
        next_draft = sglang.EagleDraftInput(
            new_seq_lens=batch.seq_lens, verify_done=verify_done, **{sglang.last_token: tokens}
        )
        result = sglang.GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=graph,
            next_draft_input=next_draft,
            accept_lens=torch.ones(bs, dtype=torch.int32, device=tokens.device),
            **({"speculative_num_draft_tokens": 1} if sglang.result_has_stride else {}),
        )
        batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = before
        self._draft_extend(batch, result)
        if not sglang.result_has_stride:
            # the output processor of these releases reads rows of the worker's own draft width
            padded = tokens.new_zeros(bs, worker.speculative_num_draft_tokens)
            padded[:, 0] = tokens
            result.next_token_ids = padded.flatten()
        return result

    def _draft_extend(self, batch: Any, result: Any) -> None:
        """One token a request through the draft worker; fills ``topk_p``, ``topk_index`` (bs, topk) and ``hidden_states``
        of ``result.next_draft_input``. Eager: a captured draft-extend graph has a stride of draft width."""
        draft_worker = self.worker.draft_worker
        with (
            self._draft_context(draft_worker, draft_worker.draft_runner),
            _swapped(
                (draft_worker, "speculative_num_steps", 0),
                (draft_worker, "speculative_num_draft_tokens", 1),
                (draft_worker, "cuda_graph_runner_for_draft_extend", None),
            ),
        ):
            draft_worker._draft_extend_for_decode(batch, result)
