"""sglang's own Scheduler, in this process: build it, feed it requests, take it down. Shared by construct and exercise."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import kernels, standins
from .models import TinyModels, tiny_models

__all__ = [
    "Stop",
    "TinyModels",
    "build_scheduler",
    "close_scheduler",
    "cpu_overrides",
    "install_kernels",
    "make_request",
    "run_event_loop",
    "same_choice",
    "tiny_models",
    "without_options",
]

install_kernels = kernels.install

# A tiny model's whole KV cache, in tokens. Without it sglang would take a share of the machine's memory.
CPU_KV_TOKENS = 4096

# Options of the user's that only make sense for the user's own model or for several GPUs. Dropped where the tiny
# model stands in, so that sglang's defaults hold; each dropped one is listed.
_OF_THE_MODEL = (
    "model_path",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "tokenizer_path",
    "revision",
    "load_format",
    "speculative_draft_load_format",
    "model_loader_extra_config",
    "quantization",
    "quantization_param_path",
    "speculative_draft_model_quantization",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "kv_cache_dtype",
    "torchao_config",
    "context_length",
    "json_model_override_args",
    "speculative_token_map",
    "enable_multimodal",
    "mm_attention_backend",
    "lora_paths",
    "enable_lora",
)
_OF_THE_MACHINE = (
    "device",
    "dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "speculative_moe_runner_backend",
    "speculative_moe_a2a_backend",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "expert_parallel_size",
    "data_parallel_size",
    "attention_context_parallel_size",
    "moe_data_parallel_size",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "base_gpu_id",
    "gpu_id_step",
    "mem_fraction_static",
    "max_total_tokens",
    "triton_attention_num_kv_splits",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "cuda_graph_max_bs",
    "cuda_graph_bs",
    "disable_cuda_graph",
    "disable_piecewise_cuda_graph",
    "enable_piecewise_cuda_graph",
    "enforce_piecewise_cuda_graph",
    "enable_torch_compile",
    "skip_tokenizer_init",
    "port",
    "nccl_port",
    "enable_memory_saver",
    "enable_symm_mem",
    "enable_nccl_nvls",
    "enable_flashinfer_allreduce_fusion",
    "numa_node",
    "hicache_storage_backend",
    "enable_hierarchical_cache",
)


class Stop(Exception):
    """Raise it from ``on_receive`` to end :func:`run_event_loop`."""


def expanded(argv: Sequence[str]) -> list[str]:
    """``argv`` with ``--config FILE`` merged in, by sglang's own code."""
    argv = list(argv)
    if "--config" not in argv:
        return argv
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    parser = _parser()
    try:
        merged = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    except TypeError:
        merged = ConfigArgumentMerger().merge_config_with_args(argv)
    return list(merged)


def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def _action(parser: argparse.ArgumentParser, token: str) -> argparse.Action | None:
    """The action that argparse takes for ``token`` (``--name`` or ``--name=value``, abbreviations too)."""
    if not token.startswith("-"):
        return None
    name = token.split("=", 1)[0]
    known = parser._option_string_actions
    if name in known:
        return known[name]
    longer = (
        {id(a): a for option, a in known.items() if option.startswith(name)} if name.startswith("--") else {}
    )
    return next(iter(longer.values())) if len(longer) == 1 else None


def without_options(argv: Sequence[str], dests: Iterable[str]) -> tuple[list[str], list[str]]:
    """``argv`` without the options that set one of ``dests``, and the options taken out as they were written."""
    parser, unwanted = _parser(), set(dests)
    kept: list[str] = []
    dropped: list[str] = []
    i = 0
    while i < len(argv):
        action = _action(parser, argv[i])
        end = i + 1
        if action is not None and "=" not in argv[i] and action.nargs != 0:
            limit = (
                action.nargs
                if isinstance(action.nargs, int)
                else 1
                if action.nargs in (None, "?")
                else len(argv)
            )
            while end < len(argv) and end - i <= limit and not argv[end].startswith("--"):
                end += 1
        if action is not None and action.dest in unwanted:
            dropped.append(" ".join(argv[i:end]))
        else:
            kept += argv[i:end]
        i = end
    return kept, dropped


def cpu_overrides(argv: Sequence[str], models: TinyModels | None = None) -> tuple[list[str], list[str]]:
    """The user's ``argv`` as a machine without a GPU can construct it, and every replacement in words.

    Args:
        models: tiny models that stand in for the user's; ``None`` leaves the model options alone.
    """
    argv, used = expanded(argv), []
    argv, dropped = without_options(argv, (*_OF_THE_MACHINE, *(_OF_THE_MODEL if models else ())))
    quiet = ("--port", "--nccl-port", "--model", "--speculative-draft-model-path")
    gone = [option for option in dropped if not option.startswith(quiet)]
    if models:
        argv += ["--model-path", models.target]
        used.append(
            f"model: a tiny llama of dynspec's (4 layers, random weights), for {_given(dropped, '--model')}"
        )
        argv += ["--speculative-draft-model-path", models.draft]
        used.append(
            f"draft model: a tiny {models.kind} draft of dynspec's, for "
            f"{_given(dropped, '--speculative-draft-model-path')}"
        )
    cpu = [
        "--device", "cpu", "--dtype", "float32", "--attention-backend", "triton", "--disable-cuda-graph",
        "--skip-tokenizer-init", "--max-total-tokens", str(CPU_KV_TOKENS), "--triton-attention-num-kv-splits", "1",
    ]  # fmt: skip
    argv += cpu
    used.append(f"server arguments for a CPU: {' '.join(cpu)}")
    gone = [option for option in gone if f" {option} " not in f" {' '.join(cpu)} "]
    if gone:
        used.append(f"server arguments left out: {', '.join(gone)}")
    argv += ["--port", str(21000 + os.getpid() % 5000)]
    return argv, used


def same_choice(argv: Sequence[str], resolved: Any) -> list[str]:
    """Lets sglang choose the draft's shape as it did for the user's model, in this process from now on.

    Without ``--speculative-num-steps`` and its two companions sglang chooses them by the model's architecture. They
    can't be given as options instead: 0.5.12 decides on the overlap schedule before it chooses.

    Args:
        resolved: the ``ServerArgs`` that the user's own ``argv`` resolved to.
    """
    import sglang.srt.server_args as module

    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    _, given = without_options(expanded(argv), names)
    if given or not hasattr(module, "auto_choose_speculative_params"):
        return []
    steps, topk, tokens = chosen = tuple(getattr(resolved, name) for name in names)
    module.auto_choose_speculative_params = lambda _server_args: chosen
    return [
        f"draft shape: {steps} steps, top-k {topk}, {tokens} draft tokens, as sglang chose for the user's model"
    ]


def _given(options: Sequence[str], flag: str) -> str:
    values = [o for o in options if o.startswith(flag)]
    return values[-1] if values else "none given"


def build_scheduler(argv: Sequence[str]) -> tuple[Any, Any]:
    """``(server_args, scheduler)``, through sglang's own argument parsing and its own ``Scheduler``.

    Raises whatever sglang raises (``SystemExit`` from its argument parser included).
    """
    import torch
    from sglang.srt.server_args import PortArgs, prepare_server_args

    standins.after_server_args()
    server_args = prepare_server_args(list(argv))
    import sglang.srt.server_args as server_args_module

    publish = getattr(server_args_module, "set_global_server_args_for_scheduler", None)
    if publish is not None:
        publish(server_args)
    from sglang.srt.managers.scheduler import Scheduler

    port_args = PortArgs.init_new(server_args)
    offered = {
        "server_args": server_args,
        "port_args": port_args,
        "gpu_id": int(getattr(server_args, "base_gpu_id", 0) or 0),
        "tp_rank": 0,
        "moe_ep_rank": 0,
        "pp_rank": 0,
        "attn_cp_rank": 0,
        "moe_dp_rank": 0,
        "dp_rank": None,
    }
    wanted = inspect.signature(Scheduler.__init__).parameters
    # As ``run_scheduler_process`` has it: no autograd state is kept by what the constructor computes.
    with torch.no_grad():
        scheduler = Scheduler(**{name: value for name, value in offered.items() if name in wanted})
    return server_args, scheduler


def close_scheduler(scheduler: Any) -> None:
    """Forget the process groups, so that another Scheduler may be built in this process."""
    from sglang.srt import distributed
    from sglang.srt.distributed import parallel_state

    del scheduler
    for name in ("destroy_model_parallel", "destroy_distributed_environment"):
        destroy = getattr(distributed, name, None)
        if destroy is not None:
            destroy()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, parallel_state.GroupCoordinator):  # some groups are not in sglang's own list
            setattr(parallel_state, name, None)


class _Sink:
    """Takes every message for the tokenizer and detokenizer processes, which are not running here."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def run_event_loop(scheduler: Any, on_receive: Callable[[], Sequence[Any]]) -> None:
    """Runs sglang's own event loop until ``on_receive`` raises :class:`Stop`.

    ``on_receive`` is called once a turn, before the batch is formed, and returns the requests that arrive in it.
    """
    for name in ("send_to_tokenizer", "send_to_detokenizer"):
        setattr(scheduler, name, _Sink())
    scheduler.recv_requests = lambda *_args, **_kwargs: list(on_receive())
    try:
        if hasattr(scheduler, "run_event_loop"):  # from 0.5.12 on; chooses among the loops itself
            scheduler.run_event_loop()
        elif scheduler.enable_overlap:
            scheduler.event_loop_overlap()
        else:
            scheduler.event_loop_normal()
    except Stop:
        pass
    finally:
        del scheduler.recv_requests


def make_request(rid: str, input_ids: Sequence[int], max_new_tokens: int, **sampling: Any) -> Any:
    """A ``TokenizedGenerateReqInput``: greedy and without end-of-sequence stop unless ``sampling`` says otherwise."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(
        **{"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **sampling}
    )
    params.normalize(None)
    offered = {
        "rid": rid,
        "input_text": "",
        "input_ids": list(input_ids),
        "mm_inputs": None,
        "sampling_params": params,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    wanted = inspect.signature(TokenizedGenerateReqInput.__init__).parameters
    return TokenizedGenerateReqInput(**{name: value for name, value in offered.items() if name in wanted})
