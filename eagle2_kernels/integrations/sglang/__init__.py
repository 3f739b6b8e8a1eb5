"""The speculative-decoding operators of SGLang (sgl-kernel) over ours.

Names, arguments and in-place writes are theirs, so that `register` can swap them under a running
SGLang, or a caller of theirs can import them from here::

    draft   select_top_k_tokens x steps -> organize_draft_results -> build_tree_kernel_efficient
    n-gram  reconstruct_indices_from_tree_mask
    verify  verify_tree_greedy, or tree_speculative_sampling_target_only
    mask    segment_packbits

Candidates are numbered level by level: 0 .. K-1 under the root, K + (i-1)*K*K and on for step
i >= 1. Candidate c belongs to group c // K; ``parent_list[:, group]`` is the candidate that the
group hangs under, and group 0 hangs under the root. A tree has ``draft_token_num`` slots, the root
first; ``retrieve_index`` numbers the slots of the whole batch (request * draft_token_num + slot),
links are slots of their own request. The arguments spelled ``retrieve_...`` may be given as
``retrive_...`` too. Integers may be int32 or int64, outputs keep the dtype they have.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from .draft import organize_draft_results, select_top_k_tokens
from .tree import (
    TreeMaskMode,
    build_tree_kernel_efficient,
    reconstruct_indices_from_tree_mask,
    segment_packbits,
)
from .verify import tree_speculative_sampling_target_only, verify_tree_greedy

__all__ = [
    "TreeMaskMode",
    "build_tree_kernel_efficient",
    "organize_draft_results",
    "reconstruct_indices_from_tree_mask",
    "register",
    "segment_packbits",
    "select_top_k_tokens",
    "tree_speculative_sampling_target_only",
    "unregister",
    "verify_tree_greedy",
]

_HOMES: dict[str, dict[str, Callable[..., Any]]] = {
    "sgl_kernel": {
        "build_tree_kernel_efficient": build_tree_kernel_efficient,
        "build_tree_kernel_efficient_cpu": build_tree_kernel_efficient,
        "reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask,
        "segment_packbits": segment_packbits,
        "tree_speculative_sampling_target_only": tree_speculative_sampling_target_only,
        "verify_tree_greedy": verify_tree_greedy,
        "verify_tree_greedy_cpu": verify_tree_greedy,
    },
    "sglang.kernels.ops.speculative.tree": {
        "build_tree_kernel_efficient": build_tree_kernel_efficient,
        "reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask,
        "verify_tree_greedy": verify_tree_greedy,
    },
    "sglang.srt.speculative.eagle_utils": {"organize_draft_results": organize_draft_results},
    "sglang.srt.speculative.spec_utils": {"select_top_k_tokens": select_top_k_tokens},
}
"""Where SGLang keeps its functions: the ones of a name in other modules are others."""

_replaced: list[tuple[Any, str, Any]] = []


def register() -> list[str]:
    """Put our functions in the place of SGLang's, in every module that has imported them.

    Call it once SGLang is imported, in the process that runs the model; `unregister` undoes it.

    Returns:
        What was replaced, as "module.name".

    Raises:
        ImportError: neither sglang nor sgl_kernel can be imported.
        RuntimeError: they have none of the functions at the places known here.

    Source: the modules of SGLang 0.5 (``sgl_kernel``, ``sglang.kernels.ops.speculative.tree``,
    ``sglang.srt.speculative``).
    """
    reasons: list[str] = []
    ours: dict[int, Callable[..., Any]] = {}
    for home, functions in _HOMES.items():
        try:
            module = importlib.import_module(home)
        except ImportError as error:
            reasons.append(f"{home}: {error}")
            continue
        for name, function in functions.items():
            theirs = getattr(module, name, None)
            if theirs is not None and theirs is not function:
                ours[id(theirs)] = function
    if len(reasons) == len(_HOMES):
        raise ImportError("SGLang cannot be imported here: " + "; ".join(reasons))
    done = []
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] not in ("sglang", "sgl_kernel") or module is None:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                _replaced.append((module, name, value))
                setattr(module, name, ours[id(value)])
                done.append(f"{path}.{name}")
    if not done and not _replaced:
        raise RuntimeError(
            "SGLang was imported, but has none of the functions this adapter knows at "
            + ", ".join(_HOMES)
        )
    return sorted(done)


def unregister() -> None:
    """Give SGLang its own functions back."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)
