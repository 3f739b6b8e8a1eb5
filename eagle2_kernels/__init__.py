"""Operators for tree-structured speculative decoding, and EAGLE-2 decoding built from them.

Importing the package registers ``torch.ops.eagle2_kernels`` (schemas, fakes and the compiled
kernels of this build). Public names are resolved on first use, so that calling one operator does
not import the decode loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _library, ops
from ._version import __version__
from .tree import DraftTree

if TYPE_CHECKING:
    from .attention import merge_attention_states, tree_attention, tree_attention_varlen
    from .cache import compact_kv, rope_and_write_kv, write_kv
    from .candidates import (
        Candidates,
        candidates_from_chain,
        candidates_from_choices,
        candidates_from_continuations,
        prompt_lookup,
    )
    from .decode import (
        EagleDecoder,
        SamplingParams,
        TreeConfig,
        eagle2_generate_tree,
        verify_with_target,
    )
    from .expand import expand_topk, extend_draft_tree
    from .flatten import (
        build_tree,
        build_tree_from_marginals,
        flatten_tree,
        pack_tree_mask,
        retrieve_indices,
        unpack_tree_mask,
    )
    from .layer import decoder_layer, fused_add_rms_norm, rms_norm, silu_and_mul
    from .linear import pack_linear_weight, packed_linear
    from .logits import count_tokens, mark_tokens, process_logits, token_logprobs
    from .models.heads import Eagle3Head, EagleHead
    from .models.target import TargetModel
    from .verify import (
        expected_accept_length,
        sample_and_verify,
        sample_tokens,
        verify_tree,
        verify_tree_coins,
    )

_HOME = {
    "tree_attention": "attention",
    "tree_attention_varlen": "attention",
    "merge_attention_states": "attention",
    "compact_kv": "cache",
    "rope_and_write_kv": "cache",
    "write_kv": "cache",
    "Candidates": "candidates",
    "candidates_from_chain": "candidates",
    "candidates_from_choices": "candidates",
    "candidates_from_continuations": "candidates",
    "prompt_lookup": "candidates",
    "EagleDecoder": "decode",
    "SamplingParams": "decode",
    "TreeConfig": "decode",
    "eagle2_generate_tree": "decode",
    "verify_with_target": "decode",
    "expand_topk": "expand",
    "extend_draft_tree": "expand",
    "build_tree": "flatten",
    "build_tree_from_marginals": "flatten",
    "flatten_tree": "flatten",
    "pack_tree_mask": "flatten",
    "retrieve_indices": "flatten",
    "unpack_tree_mask": "flatten",
    "decoder_layer": "layer",
    "fused_add_rms_norm": "layer",
    "rms_norm": "layer",
    "silu_and_mul": "layer",
    "pack_linear_weight": "linear",
    "packed_linear": "linear",
    "count_tokens": "logits",
    "mark_tokens": "logits",
    "process_logits": "logits",
    "token_logprobs": "logits",
    "Eagle3Head": "models.heads",
    "EagleHead": "models.heads",
    "TargetModel": "models.target",
    "expected_accept_length": "verify",
    "sample_and_verify": "verify",
    "sample_tokens": "verify",
    "verify_tree": "verify",
    "verify_tree_coins": "verify",
}

__all__ = [
    "Candidates",
    "DraftTree",
    "Eagle3Head",
    "EagleDecoder",
    "EagleHead",
    "SamplingParams",
    "TargetModel",
    "TreeConfig",
    "__version__",
    "build_tree",
    "build_tree_from_marginals",
    "candidates_from_chain",
    "candidates_from_choices",
    "candidates_from_continuations",
    "compact_kv",
    "count_tokens",
    "decoder_layer",
    "eagle2_generate_tree",
    "expand_topk",
    "expected_accept_length",
    "extend_draft_tree",
    "flatten_tree",
    "fused_add_rms_norm",
    "mark_tokens",
    "merge_attention_states",
    "pack_linear_weight",
    "pack_tree_mask",
    "packed_linear",
    "process_logits",
    "prompt_lookup",
    "retrieve_indices",
    "rms_norm",
    "rope_and_write_kv",
    "sample_and_verify",
    "sample_tokens",
    "silu_and_mul",
    "token_logprobs",
    "tree_attention",
    "tree_attention_varlen",
    "unpack_tree_mask",
    "verify_tree",
    "verify_tree_coins",
    "verify_with_target",
    "write_kv",
]


def _register() -> None:
    if ops.backend() == "reference":
        ops.use_reference()
        return
    libraries = _library.load()
    for key, name in (("CPU", "_C"), ("CUDA", "_C_cuda")):
        reason = libraries[name].reason
        ops.use_compiled(key, reason or f"{name} of this release has no {key} kernel for it yet")


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_register()
