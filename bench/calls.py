"""What a call costs when there is nothing to compute: each public wrapper on tiny tensors.

"operator" is the same call without the wrapper, `torch.ops.eagle2_kernels.<name>.default`. The goal
is 8 us for the wrapper: dispatch, outputs and validation. A sample is 200 calls in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from runner import Case

import eagle2_kernels as ek
from eagle2_kernels import ops

OPS = ("call",)
NAMESPACE = torch.ops.eagle2_kernels


def _tiny(device: torch.device) -> dict[str, tuple[tuple, dict]]:
    """Arguments of each operator, public wrapper and ``torch.ops`` alike."""

    def i32(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    def i64(*values):
        return torch.tensor(values, dtype=torch.int64, device=device)

    def ones(*shape):
        return torch.ones(*shape, device=device)

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    def packed(out_features, in_features):
        return ops.reference.pack_linear_weight(ones(out_features, in_features).bfloat16())

    one, root = i32(1), i64(0)
    parents, tokens, links = i32([-1, 0]), i64([0, 1]), i32([1, -1])
    sibling = i32([-1, -1])
    logits, state = ones(1, 2, 4), (ones(1, 1, 1, 8), zeros(1, 1, 1))
    k_cache, v_cache = ones(2, 1, 8, 1, 8)
    return {
        "expand_topk": ((ones(1, 1, 4), zeros(1, 1), 2), {}),
        "extend_draft_tree": ((i32([0, 0]), i64([[0], [0]]), i64([0, 1]), 0), {}),
        "build_tree": ((root, one, tokens, -ones(1, 2), i32([-1, -1]), 3), {}),
        "build_tree_from_marginals": ((root, one, i64([[1, 2]]), -ones(1, 1, 2), 3), {}),
        "flatten_tree": ((parents, i32(2), one), {}),
        "retrieve_indices": ((parents, i32(2), 1), {}),
        "pack_tree_mask": ((zeros(1, 2, dtype=torch.bool),), {}),
        "unpack_tree_mask": ((i64([3]), 2), {}),
        "tree_attention": ((ones(1, 1, 1, 8), k_cache, v_cache, one), {}),
        "merge_attention_states": ((*state, *state), {}),
        "process_logits": (
            (ones(1, 2, 4), tokens, parents),
            {"bias_tokens": i64([1]), "bias_values": zeros(1, 1)},
        ),
        "count_tokens": ((zeros(1, 4, dtype=torch.int32), i64([0])), {}),
        "mark_tokens": ((zeros(1, 1, dtype=torch.int32), i64([0])), {}),
        "token_logprobs": ((logits, i32([0]), i64([0])), {}),
        "sample_tokens": ((logits, tokens, root), {}),
        "verify_tree": ((tokens, tokens, links, sibling, 1), {}),
        "sample_and_verify": ((logits, tokens, root, tokens, links, sibling, 1), {}),
        "verify_tree_coins": (
            (logits, tokens, links, sibling, zeros(1, 2), zeros(1), 1),
            {},
        ),
        "compact_kv": (([k_cache, v_cache], i32([0, 1]), one, one), {}),
        "pack_linear_weight": ((ones(2, 2).bfloat16(),), {}),
        "packed_linear": (
            (ones(1, 2).bfloat16(), zeros(1, 1, 32, 2, dtype=torch.bfloat16), 2),
            {},
        ),
        "rms_norm": ((ones(1, 1, 8), ones(8)), {}),
        "fused_add_rms_norm": ((ones(1, 1, 8), zeros(1, 1, 8), ones(8)), {}),
        "silu_and_mul": ((ones(1, 1, 8),), {}),
        "rope_and_write_kv": (
            (ones(1, 1, 24), ones(1, 1, 8), zeros(1, 1, 8), k_cache, v_cache, one),
            {},
        ),
        "decoder_layer": (
            (
                *(ones(1, 1, 8).bfloat16(), ones(1, 1, 8).bfloat16(), zeros(1, 1, 8).bfloat16()),
                *(k_cache.bfloat16(), v_cache.bfloat16(), one),
                *(packed(24, 8), packed(8, 8), ones(8).bfloat16()),
                *(packed(16, 8), packed(8, 8), 1, 8, ones(8).bfloat16()),
            ),
            {},
        ),
        "write_kv": ((k_cache, v_cache, ones(1, 1, 1, 8), ones(1, 1, 1, 8), one), {}),
    }


def _attention_operator(q, k_cache, v_cache, prefix_lens) -> Callable[[], torch.Tensor]:
    """`tree_attention_out` takes its output; allocating it is part of the call."""

    def run():
        out = torch.empty_like(q)
        NAMESPACE.tree_attention_out.default(q, k_cache, v_cache, prefix_lens, out=out)
        return out

    return run


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """One row an operator."""
    x = torch.ones(1, device=device)
    cpu_only = {op.name for op in ops.OPS if op.cpu_only}
    for name, (args, kwargs) in _tiny(device).items():
        if name in cpu_only and device.type != "cpu":
            continue
        wrapper = getattr(ek, name)
        if name == "tree_attention":
            operator = _attention_operator(*args)
        else:
            operator = _bound(getattr(NAMESPACE, name).default, args, kwargs)
        ours = _bound(wrapper, args, kwargs)

        def check(provider, got, operator=operator, name=name):
            # What changes its arguments returns nothing; its results are the tests' matter.
            if provider != "torch.add":
                for one, other in zip(_tensors(got), _tensors(operator()), strict=True):
                    assert torch.equal(one, other), name

        providers = {"ours": ours, "operator": operator, "torch.add": lambda: torch.add(x, x)}
        yield Case("call", name, providers, check, bytes=0, calls=1 if quick else 200)


def _bound(function: Callable, args: tuple, kwargs: dict) -> Callable[[], object]:
    return lambda: function(*args, **kwargs)


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for x in result or () if isinstance(x, torch.Tensor)]  # type: ignore[attr-defined]
