"""The op table: one row per operator of ``torch.ops.eagle2_kernels``.

A row states the schema, the oracle (`reference.py`) and the fake kernel (shapes and dtypes only).
Tests, opcheck, the benches and the README's list are derived from `OPS`. C++ and Triton hold
implementations only.

An op that allocates its outputs has a twin ``<name>_out`` that writes caller-provided tensors
instead; engines that capture graphs use the twin. No op returns one of its arguments. An output
shares no memory with another argument unless the wrapper says that it may.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference

NAMESPACE = "eagle2_kernels"

Outputs = tuple[Tensor, ...]

OPTIONS = {
    "allowed_mask": "allowed tokens",
    "bias_tokens": "logit bias",
    "draft_to_target": "draft vocabulary",
    "frequency_penalty": "frequency penalty",
    "k_scale": "float8 caches",
    "limits": "limits per request",
    "lse": "log-sum-exp",
    "min_p": "min-p",
    "page_table": "paged",
    "presence_penalty": "presence penalty",
    "q_weight": "norms of q and k",
    "qo_indptr": "ragged rows",
    "repetition_penalty": "repetition penalty",
    "sinks": "sinks",
    "softcap": "softcap",
    "temperature": "temperature",
    "top_k": "top-k",
    "top_p": "top-p",
    "window": "window by depth",
}
"""Optional arguments that are a feature, in the README's words."""


@dataclass(frozen=True)
class Op:
    """One row.

    ``args`` is the schema's argument list. ``outs`` names the tensors an allocating op returns, in
    order; an op without ``outs`` mutates arguments in place. ``triton`` names the module of
    ``triton_kernels`` that serves CUDA tensors, by a function of the op's name, or of the ``_out``
    twin's where there is one.
    ``floats`` names the arguments that take any of `_checks.FLOATS` (all of one call the same one),
    ``moves`` those that take any dtype; the dtype of every other argument is fixed.
    ``cpu_only``: on other devices torch's own operators are right, and this one refuses.
    """

    name: str
    args: str
    outs: tuple[str, ...]
    reference: Callable[..., object]
    fake: Callable[..., object]
    summary: str
    triton: str | None = None
    floats: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    cpu_only: bool = False

    @property
    def options(self) -> list[str]:
        """What a caller may ask for, by the optional arguments of the schema."""
        optional = re.findall(r"(\w+)=", self.args)
        return [OPTIONS[name] for name in optional if name in OPTIONS]

    @property
    def schema(self) -> str:
        """The schema as PyTorch's parser reads it."""
        returns = ", ".join(["Tensor"] * len(self.outs))
        return f"{self.name}({self.args}) -> {returns if len(self.outs) == 1 else f'({returns})'}"

    @property
    def out_schema(self) -> str | None:
        """Schema of the ``_out`` twin, or None for an op that allocates nothing."""
        if not self.outs:
            return None
        outs = ", ".join(f"Tensor({chr(ord('a') + i)}!) {n}" for i, n in enumerate(self.outs))
        star = "" if "*," in self.args else "*, "
        return f"{self.name}_out({self.args}, {star}{outs}) -> ()"


def _words(n: int) -> int:
    return (n + 63) // 64


def _i32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _i64(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int64)


def _f32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _expand_topk(logits: Tensor, beam_scores: Tensor, top_k: int, draft_to_target=None) -> Outputs:
    b, p, _ = logits.shape
    return (
        _i64(logits, b, p * top_k),
        _f32(logits, b, p * top_k),
        _i64(logits, b, top_k),
        _i64(logits, b, top_k),
        _f32(logits, b, top_k),
        _i32(logits, b, top_k),
    )


def _extend_draft_tree(
    candidate_parents: Tensor, draft_mask: Tensor, beam: Tensor, level: int
) -> Tensor:
    return torch.empty_like(draft_mask, memory_format=torch.contiguous_format)


def _structure(like: Tensor, b: int, n: int) -> Outputs:
    return (
        _i32(like, b, n),
        _i64(like, b, n),
        _i32(like, b, n),
        _i32(like, b, n),
        _i64(like, b, n, _words(n)),
    )


def _tree(root_tokens: Tensor, n: int) -> Outputs:
    b = root_tokens.shape[0]
    depths, position_ids, first_child, next_sibling, tree_mask = _structure(root_tokens, b, n)
    return (
        _i64(root_tokens, b, n),
        _i32(root_tokens, b, n),
        depths,
        position_ids,
        _f32(root_tokens, b, n),
        first_child,
        next_sibling,
        tree_mask,
        _i32(root_tokens, b),
    )


def _build_tree(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    max_nodes: int,
    limits=None,
) -> Outputs:
    return _tree(root_tokens, max_nodes)


def _build_tree_from_marginals(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    max_nodes: int,
    limits=None,
) -> Outputs:
    return _tree(root_tokens, max_nodes)


def _flatten_tree(parents: Tensor, num_nodes: Tensor, prefix_lens: Tensor) -> Outputs:
    return _structure(parents, parents.shape[0], parents.shape[1])


def _retrieve_indices(parents: Tensor, num_nodes: Tensor, max_depth: int) -> Tensor:
    return _i64(parents, parents.shape[0], parents.shape[1], max_depth + 1)


def _pack_tree_mask(mask: Tensor) -> Tensor:
    return mask.new_empty((*mask.shape[:-1], _words(mask.shape[-1])), dtype=torch.int64)


def _unpack_tree_mask(words: Tensor, num_keys: int) -> Tensor:
    return words.new_empty((*words.shape[:-1], num_keys), dtype=torch.bool)


def _nothing(*args, **kwargs) -> None:
    return None


def _merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Outputs:
    return (
        torch.empty_like(out_a, memory_format=torch.contiguous_format),
        torch.empty_like(lse_a, memory_format=torch.contiguous_format),
    )


def _rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x.new_empty(x.shape)


def _silu_and_mul(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _rope_and_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, *args, **kw
) -> Tensor:
    b, n, width = qkv.shape
    heads, dim = k_cache.shape[2:]
    return qkv.new_empty((b, n, width // dim - 2 * heads, dim))


def _sample_tokens(logits: Tensor, position_ids: Tensor, seeds: Tensor, **filters) -> Tensor:
    return _i64(logits, logits.shape[0], logits.shape[1])


def _verify_tree(
    target_tokens: Tensor, draft_tokens, first_child, next_sibling, max_depth: int, num_nodes=None
) -> Outputs:
    b = target_tokens.shape[0]
    return (
        _i32(target_tokens, b, max_depth + 1),
        _i32(target_tokens, b),
        _i64(target_tokens, b),
    )


def _sample_and_verify(
    logits: Tensor,
    position_ids,
    seeds,
    draft_tokens,
    first_child,
    next_sibling,
    max_depth: int,
    num_nodes=None,
    **filters,
) -> Outputs:
    b = logits.shape[0]
    return (_i64(logits, b, max_depth + 1), *_verify_tree(logits, None, None, None, max_depth))


def _verify_tree_coins(
    target_probs: Tensor,
    draft_tokens,
    first_child,
    next_sibling,
    coins,
    final_coins,
    max_depth: int,
    num_nodes=None,
) -> Outputs:
    return _verify_tree(target_probs, None, None, None, max_depth)


def _pack_linear_weight(weight: Tensor) -> Tensor:
    return weight.new_empty(((weight.shape[0] + 31) // 32, (weight.shape[1] + 1) // 2, 32, 2))


def _packed_linear(x: Tensor, packed: Tensor, out_features: int, bias=None) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _token_logprobs(logits: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
    return _f32(logits, *slots.shape)


_FILTERS = (
    "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    "Tensor? allowed_mask=None"
)
_LINKS = "Tensor draft_tokens, Tensor first_child, Tensor next_sibling"
_TREE = (
    "draft_tokens",
    "parents",
    "depths",
    "position_ids",
    "scores",
    "first_child",
    "next_sibling",
    "tree_mask",
    "num_nodes",
)
_ACCEPTED = ("accept_index", "accept_length", "bonus_token")

OPS: tuple[Op, ...] = (
    Op(
        "expand_topk",
        "Tensor logits, Tensor beam_scores, SymInt top_k, Tensor? draft_to_target=None",
        (
            "candidate_tokens",
            "candidate_scores",
            "beam",
            "beam_tokens",
            "next_beam_scores",
            "beam_rows",
        ),
        reference.expand_topk,
        _expand_topk,
        "log-softmax, per-row top-k, the parent's score and the next beam, fused",
        triton="expand",
        floats=("logits",),
    ),
    Op(
        "extend_draft_tree",
        "Tensor(z!) candidate_parents, Tensor draft_mask, Tensor beam, SymInt level",
        ("next_draft_mask",),
        reference.extend_draft_tree,
        _extend_draft_tree,
        "parents of one level's candidates and the draft mask of the frontier it grows from",
    ),
    Op(
        "build_tree",
        "Tensor root_tokens, Tensor prefix_lens, Tensor candidate_tokens, Tensor candidate_scores, "
        "Tensor candidate_parents, SymInt max_nodes, Tensor? limits=None",
        _TREE,
        reference.build_tree,
        _build_tree,
        "re-rank the candidates of all levels and flatten the best into a DraftTree",
    ),
    Op(
        "build_tree_from_marginals",
        "Tensor root_tokens, Tensor prefix_lens, Tensor tokens, Tensor log_probs, "
        "SymInt max_nodes, Tensor? limits=None",
        _TREE,
        reference.build_tree_from_marginals,
        _build_tree_from_marginals,
        "the best prefixes of independent per-position distributions, as a DraftTree",
    ),
    Op(
        "flatten_tree",
        "Tensor parents, Tensor num_nodes, Tensor prefix_lens",
        ("depths", "position_ids", "first_child", "next_sibling", "tree_mask"),
        reference.flatten_tree,
        _flatten_tree,
        "depths, position ids, links and mask words of a tree given by its parents",
    ),
    Op(
        "retrieve_indices",
        "Tensor parents, Tensor num_nodes, SymInt max_depth",
        ("indices",),
        reference.retrieve_indices,
        _retrieve_indices,
        "one root-to-leaf row of slots per leaf",
    ),
    Op(
        "pack_tree_mask",
        "Tensor mask",
        ("words",),
        reference.pack_tree_mask,
        _pack_tree_mask,
        "bool mask rows to int64 words",
    ),
    Op(
        "unpack_tree_mask",
        "Tensor words, SymInt num_keys",
        ("mask",),
        reference.unpack_tree_mask,
        _unpack_tree_mask,
        "int64 words to bool mask rows",
    ),
    Op(
        "tree_attention_out",
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor prefix_lens, Tensor? tree_mask=None, *, "
        "SymInt? tree_len=None, Tensor? qo_indptr=None, SymInt? max_q=None, "
        "Tensor? page_table=None, Tensor? depths=None, SymInt? max_prefix_len=None, "
        "float? sm_scale=None, float softcap=0.0, "
        "SymInt? window=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
        "SymInt? kv_chunk=None, Tensor(a!) out, Tensor(b!)? lse=None",
        (),
        reference.tree_attention_out,
        _nothing,
        "attention of every tree node over the prefix and its own ancestors, dense or paged cache",
        triton="attention",
        floats=("q", "k_cache", "v_cache", "out"),
    ),
    Op(
        "merge_attention_states",
        "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b",
        ("out", "lse"),
        reference.merge_attention_states,
        _merge_attention_states,
        "merge two partial attention results by their log-sum-exp",
        triton="attention",
        floats=("out_a", "out_b"),
    ),
    Op(
        "process_logits",
        "Tensor(a!) logits, Tensor? draft_tokens=None, Tensor? parents=None, "
        "Tensor? num_nodes=None, *, Tensor? prompt_mask=None, Tensor? output_counts=None, "
        "Tensor? repetition_penalty=None, Tensor? frequency_penalty=None, "
        "Tensor? presence_penalty=None, Tensor? bias_tokens=None, Tensor? bias_values=None",
        (),
        reference.process_logits,
        _nothing,
        "logit bias and penalties in place, each node's own path counted",
        triton="logits",
        floats=("logits",),
    ),
    Op(
        "count_tokens",
        "Tensor(a!) counts, Tensor tokens",
        (),
        reference.count_tokens,
        _nothing,
        "add emitted tokens to each request's counts",
        triton="logits",
    ),
    Op(
        "mark_tokens",
        "Tensor(a!) mask, Tensor tokens",
        (),
        reference.mark_tokens,
        _nothing,
        "set the bits of tokens in each request's int32 mask words",
        triton="logits",
    ),
    Op(
        "token_logprobs",
        "Tensor logits, Tensor slots, Tensor tokens",
        ("logprobs",),
        reference.token_logprobs,
        _token_logprobs,
        "log-softmax at the visited rows, read at the emitted tokens",
        triton="logits",
        floats=("logits",),
    ),
    Op(
        "sample_tokens",
        f"Tensor logits, Tensor position_ids, Tensor seeds, *, {_FILTERS}",
        ("tokens",),
        reference.sample_tokens,
        _sample_tokens,
        "argmax, or Gumbel-max with noise keyed by (seed, position, token), after the filters",
        triton="verify",
        floats=("logits",),
    ),
    Op(
        "verify_tree",
        f"Tensor target_tokens, {_LINKS}, SymInt max_depth, Tensor? num_nodes=None",
        _ACCEPTED,
        reference.verify_tree,
        _verify_tree,
        "walk from the root along the target's own tokens",
    ),
    Op(
        "sample_and_verify",
        f"Tensor logits, Tensor position_ids, Tensor seeds, {_LINKS}, SymInt max_depth, "
        f"Tensor? num_nodes=None, *, {_FILTERS}",
        ("emitted_tokens", *_ACCEPTED),
        reference.sample_and_verify,
        _sample_and_verify,
        "sample_tokens at the visited nodes only, fused with verify_tree",
        triton="verify",
        floats=("logits",),
    ),
    Op(
        "verify_tree_coins",
        f"Tensor target_probs, {_LINKS}, Tensor coins, Tensor final_coins, SymInt max_depth, "
        "Tensor? num_nodes=None",
        _ACCEPTED,
        reference.verify_tree_coins,
        _verify_tree_coins,
        "the same law from the caller's uniform coins",
        floats=("target_probs",),
    ),
    Op(
        "compact_kv",
        "Tensor(a!)[] kv_caches, Tensor accept_index, Tensor accept_length, Tensor prefix_lens, "
        "Tensor? page_table=None",
        (),
        reference.compact_kv,
        _nothing,
        "move the accepted path's keys and values to the end of the prefix, all layers at once",
        moves=("kv_caches",),
    ),
    Op(
        "write_kv",
        "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor prefix_lens, "
        "Tensor? lengths=None, Tensor? page_table=None, *, Tensor? k_scale=None, "
        "Tensor? v_scale=None",
        (),
        reference.write_kv,
        _nothing,
        "store new keys and values behind each request's prefix",
        triton="cache",
        moves=("k_cache", "v_cache", "k", "v"),
    ),
    Op(
        "pack_linear_weight",
        "Tensor weight",
        ("packed",),
        reference.pack_linear_weight,
        _pack_linear_weight,
        "a bfloat16 weight in the layout that `packed_linear` reads",
        cpu_only=True,
    ),
    Op(
        "packed_linear",
        "Tensor x, Tensor packed, SymInt out_features, Tensor? bias=None",
        ("out",),
        reference.packed_linear,
        _packed_linear,
        "a bfloat16 linear layer; a row's bits do not depend on the other rows",
        cpu_only=True,
    ),
    Op(
        "rope_and_write_kv",
        "Tensor qkv, Tensor cos, Tensor sin, Tensor(y!) k_cache, Tensor(z!) v_cache, "
        "Tensor prefix_lens, Tensor? lengths=None, Tensor? page_table=None, *, "
        "Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-6",
        ("q",),
        reference.rope_and_write_kv,
        _rope_and_write_kv,
        "rotate q and k of a merged product; q comes back, k and v are stored as by `write_kv`",
        floats=("qkv", "cos", "sin", "k_cache", "v_cache", "q_weight", "k_weight"),
        cpu_only=True,
    ),
    Op(
        "rms_norm",
        "Tensor x, Tensor weight, float eps=1e-6",
        ("out",),
        reference.rms_norm,
        _rms_norm,
        "a row over its root mean square, times a weight",
        floats=("x", "weight"),
        cpu_only=True,
    ),
    Op(
        "fused_add_rms_norm",
        "Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6",
        (),
        reference.fused_add_rms_norm,
        _nothing,
        "add to the residual stream and norm the sum, both in place",
        floats=("x", "residual", "weight"),
        cpu_only=True,
    ),
    Op(
        "silu_and_mul",
        "Tensor x",
        ("out",),
        reference.silu_and_mul,
        _silu_and_mul,
        "silu of the first half of a row times the second half",
        floats=("x",),
        cpu_only=True,
    ),
    Op(
        "decoder_layer",
        "Tensor(x!) hidden, Tensor cos, Tensor sin, Tensor(y!) k_cache, Tensor(z!) v_cache, "
        "Tensor prefix_lens, Tensor qkv_packed, Tensor o_packed, Tensor post_norm_weight, "
        "Tensor gate_up_packed, Tensor down_packed, SymInt num_heads, SymInt intermediate_size, "
        "Tensor? norm_weight=None, Tensor? tree_mask=None, Tensor? lengths=None, *, "
        "Tensor? attention_input=None, Tensor? qkv_bias=None, Tensor? o_bias=None, "
        "Tensor? gate_up_bias=None, Tensor? down_bias=None, Tensor? q_weight=None, "
        "Tensor? k_weight=None, float eps=1e-6, Tensor? page_table=None, SymInt? tree_len=None, "
        "Tensor? depths=None, float? sm_scale=None, float softcap=0.0, SymInt? window=None",
        (),
        reference.decoder_layer,
        _nothing,
        "a whole Llama layer from packed weights, in place: the bits of its operators in one call",
        cpu_only=True,
    ),
)

CUDA_CPP = (
    "extend_draft_tree",
    "build_tree",
    "build_tree_from_marginals",
    "flatten_tree",
    "retrieve_indices",
    "pack_tree_mask",
    "unpack_tree_mask",
    "verify_tree",
    "verify_tree_coins",
    "compact_kv",
)
"""Operators with a kernel in csrc/cuda, as far as this release goes."""

_library = torch.library.Library(NAMESPACE, "DEF")
_implementations: list[torch.library.Library] = []


def _reference_out(op: Op) -> Callable[..., None]:
    def run(*args, **kwargs) -> None:
        outs = [kwargs.pop(name) for name in op.outs]
        results: Any = op.reference(*args, **kwargs)
        for out, result in zip(outs, [results] if len(outs) == 1 else results, strict=True):
            out.copy_(result)

    return run


def _raiser(message: str) -> Callable[..., None]:
    def run(*args, **kwargs) -> None:
        raise RuntimeError(message)

    return run


def _on_one_device(name: str, fake: Callable[..., object], cpu_only: bool) -> Callable[..., object]:
    """A fake kernel that refuses tensors of several devices, or of one that has no kernel.

    PyTorch sends a call with one meta tensor among others here: the caller would get memory that
    nobody wrote.
    """

    @functools.wraps(fake)
    def run(*args, **kwargs) -> object:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = sorted({str(x.device) for x in leaves if isinstance(x, Tensor)})
        if len(devices) > 1:
            raise RuntimeError(
                f"{NAMESPACE}::{name}: expected tensors on one device, got {' and '.join(devices)}"
            )
        if cpu_only and devices not in (["cpu"], ["meta"]):
            raise RuntimeError(_for_cpus(name, devices[0]))
        return fake(*args, **kwargs)

    return run


def _define() -> None:
    tags = (torch.Tag.pt2_compliant_tag,)
    for op in OPS:
        _library.define(op.schema, tags=tags)
        fake = _on_one_device(op.name, op.fake, op.cpu_only)
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", fake, lib=_library)
        if op.out_schema is not None:
            _library.define(op.out_schema, tags=tags)
            fake = _on_one_device(f"{op.name}_out", _nothing, op.cpu_only)
            torch.library.register_fake(f"{NAMESPACE}::{op.name}_out", fake, lib=_library)


def use_reference(keys: tuple[str, ...] = ("CPU", "CUDA")) -> None:
    """Register the oracle as the implementation of every op (``EAGLE2_BACKEND=reference``)."""
    library = torch.library.Library(NAMESPACE, "IMPL")
    _implementations.append(library)
    for key in keys:
        for op in OPS:
            library.impl(op.name, op.reference, key)
            if op.outs:
                library.impl(f"{op.name}_out", _reference_out(op), key)


def use_compiled(key: str, absent: str) -> None:
    """Leave ``key`` to the compiled library; what it lacks raises: nothing falls back in silence.

    ``absent`` says why a kernel may be missing and what to do about it.
    """
    library = torch.library.Library(NAMESPACE, "IMPL")
    _implementations.append(library)
    for op in OPS:
        if key == "CUDA" and op.triton is not None:
            use_triton(library, op, key)
            continue
        for name in (op.name, f"{op.name}_out") if op.outs else (op.name,):
            if key != "CPU" and op.cpu_only:
                library.impl(name, _raiser(_for_cpus(name, key)), key)
            elif not has_kernel(name, key):
                library.impl(name, _raiser(f"{NAMESPACE}::{name}: {absent}"), key)


def _for_cpus(name: str, device: str) -> str:
    return (
        f"{NAMESPACE}::{name}: expected CPU tensors, got {device}: "
        "there torch's own operators are right"
    )


def use_triton(library: torch.library.Library, op: Op, key: str) -> None:
    """Register an op's launcher; what allocates does so by its fake kernel, then calls the twin.

    Under Triton's interpreter the launchers take CPU tensors.
    """
    if not op.outs:
        library.impl(op.name, _triton_launcher(op, op.name), key)
        return
    fill = _triton_launcher(op, f"{op.name}_out")

    def run(*args, **kwargs) -> object:
        result = op.fake(*args, **kwargs)
        outs: Any = (result,) if isinstance(result, Tensor) else result
        fill(*args, **kwargs, **dict(zip(op.outs, outs, strict=True)))
        return result

    library.impl(op.name, run, key)
    library.impl(f"{op.name}_out", fill, key)


def _triton_launcher(op: Op, name: str) -> Callable[..., object]:
    """A launcher that imports Triton at its first call, not at registration."""

    def run(*args, **kwargs) -> object:
        kernels = importlib.import_module(f"{__package__}.triton_kernels.{op.triton}")
        return getattr(kernels, name)(*args, **kwargs)

    return run


def has_kernel(name: str, key: str) -> bool:
    """Whether something is registered for op ``name`` under dispatch key ``key``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key)


def backend() -> str:
    """``"reference"`` when ``EAGLE2_BACKEND`` asks for the oracle, else ``"compiled"``."""
    value = os.environ.get("EAGLE2_BACKEND") or "compiled"
    if value not in ("compiled", "reference"):
        raise ValueError(f"EAGLE2_BACKEND: expected 'compiled' or 'reference', got {value!r}")
    return value


def describe() -> str:
    """The op list as README shows it: a Markdown row per operator, then what a backend is worth."""
    rows = ["| operator | what it does | CPU | CUDA | dtypes; options |", "|---|---|---|---|---|"]
    for op in OPS:
        cuda = "C++" if op.name in CUDA_CPP else "Triton" if op.triton else ""
        cuda = f"{cuda}, not run" if cuda else "for CPUs only" if op.cpu_only else "raises"
        dtypes = "float64/32/16, bfloat16" if op.floats else "any dtype" if op.moves else ""
        supports = "; ".join(filter(None, (dtypes, ", ".join(op.options))))
        rows.append(f"| `{op.name}` | {op.summary} | C++ | {cuda} | {supports} |")
    return "\n".join([*rows, "", *_BACKENDS]) + "\n"


_BACKENDS = (
    "* CPU: the compiled kernels, which the test suite runs against the oracle.",
    "* CUDA: **nothing has run on a card yet**. The C++ kernels are compiled by nvcc and share",
    "  `csrc/tree.h` with the CPU's; the Triton kernels are tested under Triton's interpreter and",
    "  compiled ahead of time for sm_80, sm_90, sm_100 and sm_120.",
    "* Every operator has a fake kernel (`torch.compile`, meta tensors) and an oracle in plain",
    "  PyTorch in `eagle2_kernels/reference.py`, which `EAGLE2_BACKEND=reference` runs.",
)


_define()
