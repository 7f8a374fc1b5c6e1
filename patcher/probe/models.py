"""A tiny llama target and an EAGLE or EAGLE3 draft for it, written as real safetensors checkpoints.

The target is nearly a Markov chain on the last token: its embedding passes through to the lm_head, and attention
and MLP change the argmax for a good part of the tokens, so that a lost KV slot shows in greedy output. The drafts know
the Markov part, so about half of their tokens are accepted, and they lean on the target's hidden state and on their own
KV cache as well, so that a stale draft state shows in what is accepted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One head: Triton's interpreter runs a Python loop over requests, heads and splits.
HIDDEN, INTERMEDIATE, VOCAB, HEADS, HEAD_DIM, LAYERS = 64, 128, 256, 1, 64, 4
MAX_POSITIONS = 2048

# How far attention and MLP move the residual stream of the target (its embedding has rms 1).
TARGET_ATTENTION, TARGET_MLP = 0.15, 0.05
# How sharply the target attends: the standard deviation of its attention logits.
TARGET_SHARPNESS = 4.0
# How much of the target's hidden state, and of its own attention, a draft's output carries.
DRAFT_HIDDEN, DRAFT_ATTENTION = 0.2, 0.25


@dataclass(frozen=True)
class TinyModels:
    """Paths of the checkpoints, and the algorithm that the draft is for (``EAGLE`` or ``EAGLE3``)."""

    target: str
    draft: str
    kind: str


def tiny_models(directory: str | Path, kind: str) -> TinyModels:
    """Writes target and draft under ``directory`` (once) and returns their paths. ``kind``: EAGLE or EAGLE3."""
    if kind not in ("EAGLE", "EAGLE3"):
        raise ValueError(f"expected a draft for EAGLE or EAGLE3; found {kind!r}")
    root = Path(directory)
    target, draft = root / "target", root / f"draft_{kind.lower()}"
    if not (target / "config.json").exists():
        _write(target, *_target())
    if not (draft / "config.json").exists():
        _write(draft, *(_draft_eagle() if kind == "EAGLE" else _draft_eagle3()))
    return TinyModels(str(target), str(draft), kind)


def _config(**own: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **own,
    }


def _write(directory: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: w.contiguous() for name, w in weights.items()},
        str(directory / "model.safetensors"),
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _normal(seed: int, *shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _orthogonal(seed: int, n: int) -> Any:
    import torch

    return torch.linalg.qr(_normal(seed, n, n))[0]


def _embedding() -> Any:
    return _normal(1, VOCAB, HIDDEN)


def _lm_head() -> Any:
    return _normal(2, VOCAB, HIDDEN) / HIDDEN**0.5


def _mlp(prefix: str, seed: int, gain: float) -> dict[str, Any]:
    return {
        f"{prefix}mlp.gate_proj.weight": _normal(seed, INTERMEDIATE, HIDDEN) / HIDDEN**0.5,
        f"{prefix}mlp.up_proj.weight": _normal(seed + 1, INTERMEDIATE, HIDDEN) / HIDDEN**0.5,
        f"{prefix}mlp.down_proj.weight": gain
        * 2.5
        * _normal(seed + 2, HIDDEN, INTERMEDIATE)
        / INTERMEDIATE**0.5,
    }


def _target() -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    weights = {
        "model.embed_tokens.weight": _embedding(),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _lm_head(),
    }
    for i in range(LAYERS):
        seed, prefix = 100 + 10 * i, f"model.layers.{i}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": TARGET_SHARPNESS
            * _normal(seed, HIDDEN, HIDDEN)
            / HIDDEN**0.5,
            f"{prefix}self_attn.k_proj.weight": _normal(seed + 1, HIDDEN, HIDDEN) / HIDDEN**0.5,
            f"{prefix}self_attn.v_proj.weight": _orthogonal(seed + 2, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": TARGET_ATTENTION * _orthogonal(seed + 3, HIDDEN),
            f"{prefix}input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
            **_mlp(prefix, seed + 4, TARGET_MLP),
        }
    return _config(architectures=["LlamaForCausalLM"], num_hidden_layers=LAYERS), weights


def _draft_eagle() -> tuple[dict[str, Any], dict[str, Any]]:
    """fc passes the token's embedding on and a part of the target's hidden state; attention adds a little."""
    import torch

    weights = {
        "fc.weight": torch.cat([torch.eye(HIDDEN), DRAFT_HIDDEN * torch.eye(HIDDEN)], 1),
        "fc.bias": torch.zeros(HIDDEN),
        "embed_tokens.weight": _embedding(),
        "layers.0.self_attn.q_proj.weight": _normal(300, HIDDEN, HIDDEN) / HIDDEN**0.5,
        "layers.0.self_attn.k_proj.weight": _normal(301, HIDDEN, HIDDEN) / HIDDEN**0.5,
        "layers.0.self_attn.v_proj.weight": _orthogonal(302, HIDDEN),
        "layers.0.self_attn.o_proj.weight": DRAFT_ATTENTION * _orthogonal(303, HIDDEN),
        "layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN),
        **_mlp("layers.0.", 304, 0.05),
    }
    return _config(architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1), weights


def _draft_eagle3() -> tuple[dict[str, Any], dict[str, Any]]:
    """The embedding can only come through attention: each position attends mostly to itself.

    ``v`` is the embedding minus a part of the normalised hidden state, which the residual adds again.
    """
    import torch

    eye, zero = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    look = 1.6 * _orthogonal(400, HIDDEN)
    weights = {
        "fc.weight": torch.cat([eye, eye, eye], 1) / 3,
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _lm_head(),
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
        "midlayer.self_attn.q_proj.weight": torch.cat([look, zero], 1),
        "midlayer.self_attn.k_proj.weight": torch.cat([look, zero], 1),
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, (DRAFT_HIDDEN - 1) * eye], 1),
        "midlayer.self_attn.o_proj.weight": eye.clone(),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        **_mlp("midlayer.", 404, 0.05),
    }
    config = _config(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=VOCAB,
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    )
    return config, weights
