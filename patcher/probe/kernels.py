"""EAGLE's two tree kernels in plain Python, with the CUDA kernels' own arguments, for a machine without a GPU.

After sgl-kernel's ``csrc/speculative/eagle_utils.cu``. Needed to run a worker, not to construct one.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from . import standins


def build_tree_kernel_efficient(
    parent_list: Any,
    selected_index: Any,
    verified_seq_len: Any,
    tree_mask: Any,
    positions: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fills mask, positions and the first-child/next-sibling links of each request's draft tree, in place."""
    n = draft_token_num
    full_mask = int(tree_mask_mode) == 0
    base = 0
    for b, seq_len in enumerate(verified_seq_len.tolist()):
        selected = selected_index[b].tolist()
        parents = parent_list[b].tolist()
        for token in range(n):
            row = base + (seq_len + n) * token + seq_len if full_mask else n * n * b + n * token
            tree_mask[row] = True
            tree_mask[row + 1 : row + n] = False
            if token == 0:
                positions[b * n] = seq_len
                continue
            depth_of, node = 0, token - 1
            while True:
                depth_of += 1
                tree_mask[row + 1 + node] = True
                parent = selected[node] // topk
                if parent == 0:
                    break
                node = selected.index(parents[parent])
            positions[b * n + token] = depth_of + seq_len
        for i in range(n - 1, 0, -1):
            retrieve_index[b, i] = b * n + i
            parent = selected[i - 1] // topk
            slot = selected.index(parents[parent]) + 1 if parent > 0 else 0
            sibling = int(retrieve_next_token[b, slot])
            retrieve_next_token[b, slot] = i
            if sibling != -1:
                retrieve_next_sibling[b, i] = sibling
        retrieve_index[b, 0] = b * n
        base += seq_len * n + n * n


def verify_tree_greedy(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    target_predict: Any,
) -> None:
    """Walks each draft tree along the target's argmax; fills ``predicts`` and the two ``accept_*``, in place."""
    wanted = target_predict.flatten()
    for b in range(candidates.shape[0]):
        last = int(retrieve_index[b, 0])
        accept_index[b, 0] = last
        accepted = node = 0
        for _ in range(1, accept_index.shape[1]):
            node = int(retrieve_next_token[b, node])
            while node != -1:
                if int(candidates[b, node]) == int(wanted[last]):
                    predicts[last] = wanted[last]
                    accepted += 1
                    last = int(retrieve_index[b, node])
                    accept_index[b, accepted] = last
                    break
                node = int(retrieve_next_sibling[b, node])
            if node == -1:
                break
        accept_token_num[b] = accepted
        predicts[last] = wanted[last]


def install(worker: Any = None) -> list[str]:
    """Puts the kernels where sglang looks for them on a machine without a GPU. Returns what was replaced."""
    if standins.has_gpu():
        return []
    from sglang.srt.speculative import eagle_utils

    used = []
    if not hasattr(eagle_utils, "sgl_build_tree_kernel_efficient"):
        eagle_utils.sgl_build_tree_kernel_efficient = build_tree_kernel_efficient
        used.append("kernel build_tree_kernel_efficient: plain Python")
    original = getattr(eagle_utils, "verify_tree_greedy_func", None)
    if original is not None and not hasattr(original, "dynspec_standin"):
        signature = inspect.signature(original)

        def verify_tree_greedy_func(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            values = {k.replace("retrive_", "retrieve_"): v for k, v in bound.items() if k != "topk"}
            verify_tree_greedy(**values)
            return tuple(bound.values())[:3]

        verify_tree_greedy_func.dynspec_standin = True  # type: ignore[attr-defined]
        for module in list(sys.modules.values()):
            name = getattr(module, "__name__", None) or ""
            if name.startswith("sglang.") and vars(module).get("verify_tree_greedy_func") is original:
                vars(module)["verify_tree_greedy_func"] = verify_tree_greedy_func
        used.append("kernel verify_tree_greedy: plain Python")
    # Has branches for GPUs only, and returns None on a CPU; the CUDA branch is a Triton kernel.
    info_v2: Any = sys.modules.get("sglang.srt.speculative.eagle_info_v2")
    if info_v2 is not None and hasattr(info_v2, "assign_extend_cache_locs_func") and not info_v2._is_cuda:
        info_v2._is_cuda = True
        used.append("eagle_info_v2._is_cuda: True, so that its Triton kernel runs (in the interpreter)")
    return used
