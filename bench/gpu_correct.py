"""The correctness half of `gpu_check.py`: every operator on a device against the float64 oracle.

Small and hostile inputs of each operator first, then the attention case table, poison, and the row
rule over batch, pages and trees, then a decode step captured as a graph against an eager one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_report import NotHereError, Report, Row
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from cases import (
    ATTENTION_CASES,
    FLOAT8_CASES,
    AttentionCase,
    AttentionInputs,
    attention_inputs,
    paged,
    random_parents,
    visibility,
)

import eagle2_kernels as ek
from eagle2_kernels import ops, reference

BY_NAME = {op.name: op for op in ops.OPS}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# The oracle of these is exact in the inputs' own dtype: their results are tokens.
DRAWS = ("sample_tokens", "sample_and_verify", "verify_tree_coins")
QUICK_CASES = [
    AttentionCase(5, (2, 1), 16, 40),
    AttentionCase(9, (4, 2), 24, 33, batch=2, page_size=5),
    AttentionCase(7, (2, 1), 16, 20, window=9, softcap=5.0, sinks=True),
]


class Device:
    """Where calls go: a card, or the CPU with the compiled or the interpreted kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def has(self, name: str) -> bool:
        """Whether an operator has a kernel here."""
        if self.device.type == "cpu":
            return True
        return BY_NAME[name].triton is not None or name in ops.CUDA_CPP

    def to(self, value: Any) -> Any:
        """Fresh copies of all tensors, with their strides, on the device."""
        return torch.utils._pytree.tree_map_only(Tensor, self._copy, value)

    def _copy(self, x: Tensor) -> Tensor:
        if x.numel() == 0 or x.is_contiguous():
            return x.to(self.device, copy=True)
        # The whole storage, so that views of one tensor keep their gaps.
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        moved = whole.to(self.device, copy=True)
        return moved.as_strided(x.shape, x.stride(), x.storage_offset())


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a call's arguments or result."""
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def in_double(op: ops.Op, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The oracle's arguments: what the row calls a float, in float64."""
    names = [a.name for a in getattr(torch.ops.eagle2_kernels, op.name).default._schema.arguments]

    def wide(name: str, value: Any) -> Any:
        if op.name in DRAWS or name not in op.floats or not isinstance(value, Tensor):
            return value
        return value.double()

    return (
        tuple(wide(name, value) for name, value in zip(names, args, strict=False)),
        {name: wide(name, value) for name, value in kwargs.items()},
    )


def agree(got: list[Tensor], want: list[Tensor], tolerance: float) -> str:
    """Raise where two results differ; returns the largest error of their floats."""
    worst = 0.0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a = a.cpu()
        if not a.is_floating_point():
            if not torch.equal(a, b):
                at = (a != b).nonzero()[:1].tolist() if a.shape == b.shape else "shapes"
                raise AssertionError(f"result {i}: expected equal integers, differ at {at}")
            continue
        x, y = a.double(), b.double()
        finite = x.isfinite() & y.isfinite()
        same = torch.where(finite, True, (x == y) | (x.isnan() & y.isnan()))
        if not bool(same.all()):
            raise AssertionError(f"result {i}: expected the same infinities and NaN")
        error = ((x - y).abs() / (1 + y.abs()))[finite]
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
    if not worst <= tolerance:
        raise AssertionError(f"expected an error of at most {tolerance:.1e}, got {worst:.1e}")
    return f"error {worst:.1e}"


def call_op(where: Device, name: str, args: tuple, kwargs: dict) -> str:
    """One call against the oracle: results, and what was written into arguments."""
    op = BY_NAME[name]
    packet = getattr(torch.ops.eagle2_kernels, name).default
    wide_args, wide_kwargs = in_double(op, *clone((args, kwargs)))
    want = op.reference(*wide_args, **wide_kwargs)
    there = where.to((args, kwargs))
    got = packet(*there[0], **there[1])
    dtypes = {x.dtype for x in tensors_of((args, kwargs)) if x.is_floating_point()}
    low = dtypes & {torch.float16, torch.bfloat16}
    eps = max((torch.finfo(d).eps for d in low), default=2e-6)
    remark = agree(
        [*tensors_of(got), *tensors_of(there)],
        [*tensors_of(want), *tensors_of((wide_args, wide_kwargs))],
        8 * eps,
    )
    if not op.outs:
        return remark
    # The twin fills what it is given, to the last element, with the same bits.
    outs = {
        key: torch.full_like(value, 77) for key, value in zip(op.outs, tensors_of(got), strict=True)
    }
    there = where.to((args, kwargs))
    getattr(torch.ops.eagle2_kernels, f"{name}_out").default(*there[0], **there[1], **outs)
    for a, b in zip(tensors_of(got), outs.values(), strict=True):
        if not torch.equal(bits(a), bits(b)):
            raise AssertionError("expected the out variant to give the same bits")
    return remark


def clone(value: Any) -> Any:
    """Copies, strides and shared storage forgotten."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.clone(), value)


def bits(x: Tensor) -> Tensor:
    """For comparisons that tell NaN from NaN and 0 from -0."""
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


# Inputs


def i32(values: Any) -> Tensor:
    """Lengths, parents and slots."""
    return torch.as_tensor(values, dtype=torch.int32)


def trees(batch: int, nodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """parents [B, N], num_nodes and prefix lengths [B] of random trees; the last is inactive."""
    parents = i32([random_parents(nodes, seed * 100 + r) for r in range(batch)])
    counts = [nodes] * batch
    if batch > 1:
        counts[-1] = 0
    return parents, i32(counts), i32([7 + 3 * r for r in range(batch)])


def op_calls(quick: bool) -> Iterator[tuple[str, str, tuple, dict]]:
    """(op, what, args, kwargs), beside the small example of each operator."""
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    for dtype in DTYPES[:2] if quick else DTYPES:
        for b, p, v, k in (
            [(1, 3, 300, 3)]
            if quick
            else [
                (1, 1, 1, 1),
                (2, 3, 4097, 4),
                (2, 10, 32_000, 10),
                (1, 10, 128_256, 10),
                (1, 8, 5000, 64),
            ]
        ):
            logits = (normal(b, p, v) * 6).round().div(2).to(dtype)
            scores = -torch.rand(b, p, generator=g) * (p > 1)
            table = torch.randperm(2 * v, generator=g)[:v] if k != 4 else None
            yield (
                "expand_topk",
                f"{b}x{p}x{v}-K{k} {SHORT[dtype]}, ties",
                (logits, scores, k, table),
                {},
            )
    inf, nan = math.inf, math.nan
    hostile = torch.tensor([[[1.0, nan, inf, 2.0, inf, -inf], [nan] * 6, [-inf, 0, -0.0, 0, 1, 1]]])
    # An infinity is the largest finite value of the dtype, which float64 is not.
    yield "expand_topk", "hostile", (hostile.nan_to_num(posinf=9.0), torch.zeros(1, 3), 4), {}

    for b, n in [(2, 6)] if quick else [(3, 1), (3, 33), (2, 65), (2, 600), (1, 1024)]:
        parents, counts, prefix = trees(b, n, n)
        yield "flatten_tree", f"{b}x{n}", (parents, counts, prefix), {}
        yield "retrieve_indices", f"{b}x{n}", (parents, counts, 5), {}
        _, _, child, sibling, words = reference.flatten_tree(parents, counts, prefix)
        mask = reference.unpack_tree_mask(words, n)
        yield "unpack_tree_mask", f"{b}x{n}", (words, n), {}
        yield "pack_tree_mask", f"{b}x{n}", (mask,), {}
        target, draft = torch.randint(3, (2, b, n), generator=g)
        yield "verify_tree", f"{b}x{n}", (target, draft, child, sibling, 6, counts), {}
    for b, k, depth, n in (
        [(1, 2, 3, 6)] if quick else [(2, 10, 6, 60), (2, 4, 4, 16), (1, 32, 8, 512)]
    ):
        m = k + (depth - 1) * k * k
        up = [-1] * k + [(i // k) for i in range(m - k)]
        scores = (normal(b, m).abs().neg() * 4).round() / 4
        args = (
            torch.arange(b),
            i32([3 + r for r in range(b)]),
            torch.arange(b * m).view(b, m),
            scores,
            i32([up] * b),
            n,
        )
        yield "build_tree", f"M{m}-N{n}, ties", args, {}
        limits = i32([[n // 2, 2]] * b)
        yield "build_tree", f"M{m}-N{n}, limits", (*args, limits), {}
    for b, depth, k, n in [(1, 3, 4, 6)] if quick else [(2, 9, 20, 60), (1, 16, 32, 512)]:
        marginals = normal(b, depth, k).log_softmax(-1).sort(-1, descending=True).values
        tokens = torch.arange(b * depth * k).view(b, depth, k)
        args = (torch.arange(b), i32([4] * b), tokens, marginals, n)
        yield "build_tree_from_marginals", f"{depth}x{k}-N{n}", args, {}

    for v in [70] if quick else [5, 1024, 32_003]:
        b, n = 2, 4 if quick else 20
        parents, counts, prefix = trees(b, n, v)
        _, positions, child, sibling, _ = reference.flatten_tree(parents, counts, prefix)
        draft = torch.randint(min(v, 9), (b, n), generator=g)
        seeds = torch.tensor([3, -(2**40)])
        filters = {
            "temperature": torch.tensor([0.8, 1.3]),
            "top_k": i32([4, 0]),
            "top_p": torch.tensor([0.9, 0.7]),
            "min_p": torch.tensor([0.0, 0.05]),
        }
        for dtype in DTYPES[:1] if quick else DTYPES:
            logits = (normal(b, n, v) * 4).round().div(2).to(dtype)
            for kind, chosen in (("greedy", {}), ("filters", filters)):
                what = f"{b}x{n}x{v} {SHORT[dtype]} {kind}"
                # The interpreter takes a minute for the filters of all rows.
                if not (quick and chosen):
                    yield "sample_tokens", what, (logits, positions, seeds), chosen
                links = (draft, child, sibling, 6, counts)
                yield "sample_and_verify", what, (logits, positions, seeds, *links), chosen
        probs = torch.softmax(normal(b, n, v) * 3, -1)
        coins = torch.rand(b, n, generator=g), torch.rand(b, generator=g)
        args = (probs, draft, child, sibling, *coins, 6, counts)
        yield "verify_tree_coins", f"{b}x{n}x{v}", args, {}

    for dtype in DTYPES[:1] if quick else DTYPES:
        for page in (None, 5):
            shape = (2, 24, 2, 8) if page is None else (12, page, 2, 8)
            caches = [normal(*shape).to(dtype) for _ in range(4)]
            table = None if page is None else torch.randperm(12, generator=g)[:10].view(2, 5).int()
            index = i32([[0, 2, 3, 7], [0, 1, -1, -1]])
            args = (caches, index, i32([3, 1]), i32([9, 4]), table)
            yield "compact_kv", f"page {page} {SHORT[dtype]}", args, {}
            rows = normal(2, 6, 2, 8).to(dtype), normal(2, 6, 2, 8).to(dtype)
            args = (caches[0], caches[1], *rows, i32([9, 4]), i32([6, 3]), table)
            yield "write_kv", f"page {page} {SHORT[dtype]}", args, {}
        states = [normal(2, 5, 4, 24).to(dtype), normal(2, 5, 4)]
        states[1][0, 0] = -inf
        other = [normal(2, 5, 4, 24).to(dtype), normal(2, 5, 4)]
        yield "merge_attention_states", f"one empty {SHORT[dtype]}", (*states, *other), {}


# tree_attention


def attend(where: Device, inputs: AttentionInputs, **changes: Any) -> tuple[Tensor, Tensor]:
    """Poisoned outputs, filled."""
    args, kwargs = where.to((inputs.args, {**inputs.kwargs, **changes}))
    shape = inputs.q.shape[:3]
    out = torch.full((*shape, inputs.v_cache.shape[3]), math.nan, dtype=inputs.q.dtype)
    lse = torch.full(shape, math.nan)
    outs = where.to({"out": out, "lse": lse})
    torch.ops.eagle2_kernels.tree_attention_out(*args, **kwargs, **outs)
    return outs["out"].cpu(), outs["lse"].cpu()


def attention_agrees(where: Device, inputs: AttentionInputs) -> str:
    """Error at most a few roundings of what was added up: softmax times the size of V."""
    out, lse = attend(where, inputs)
    exact = inputs.double()
    want, want_lse = torch.empty(out.shape, dtype=torch.float64), torch.empty(lse.shape)
    reference.tree_attention_out(*exact.args, **exact.kwargs, out=want, lse=want_lse)
    sizes = replace(exact, v_cache=exact.v_cache.abs())
    size = torch.empty_like(want)
    reference.tree_attention_out(*sizes.args, **sizes.kwargs, out=size)
    eps = torch.finfo(inputs.q.dtype).eps
    allowed = size * eps * (32 if inputs.q.dtype == torch.float32 else 2)
    error = (out.double() - want).abs()
    if not bool((error <= allowed).all()):
        share = float((error / allowed.clamp(min=1e-300)).nan_to_num(math.inf).max())
        raise AssertionError(f"error {float(error.max()):.1e}, {share:.1f} times the allowed one")
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    return f"error {float(error.max()):.1e}"


def poison_agrees(where: Device, inputs: AttentionInputs) -> str:
    """NaN in a slot that a row does not see changes none of its bits, and spoils those that do."""
    before, lse = attend(where, inputs)
    seen = visibility(inputs)
    k, v = inputs.k.clone(), inputs.v.clone()  # type: ignore[union-attr]
    hidden = ~seen.any(1)
    k[hidden], v[hidden] = math.nan, math.inf
    last = int(inputs.prefix_lens[0]) + inputs.q.shape[1] - 1
    k[0, last], v[0, last] = math.nan, math.nan
    sees_last = seen[:, :, last].clone()
    sees_last[1:] = False
    changed = replace(inputs, k_cache=k, v_cache=v, k=k, v=v)
    if "page_table" in inputs.kwargs:
        pages = paged(k, v, 5, 3)
        changed.k_cache, changed.v_cache = pages[:2]
        changed.kwargs = {**inputs.kwargs, "page_table": pages[2]}
    after, after_lse = attend(where, changed)
    for old, new in ((before, after), (lse, after_lse)):
        if not torch.equal(bits(old[~sees_last]), bits(new[~sees_last])):
            raise AssertionError("a row changed that does not see the poison")
    if bool(after[sees_last].isfinite().any()):
        raise AssertionError("a row that sees NaN is finite")
    return f"{int(sees_last.sum())} rows see it, {int((~sees_last).sum())} do not"


def rows_do_not_depend_on_company(where: Device, dtype: torch.dtype, big: bool) -> str:
    """The same bits alone and in a batch, through other pages, in a part of the tree, bounded."""
    # The interpreter takes seconds for a call of the large one.
    case = AttentionCase(20, (8, 2), 64, 700, batch=3)
    if not big:
        case = AttentionCase(9, (2, 1), 16, 70, batch=2)
    inputs = attention_inputs(case, dtype)
    want = attend(where, inputs)
    k, v = inputs.k, inputs.v
    assert k is not None and v is not None and inputs.tree_mask is not None

    def same(what: str, got: tuple[Tensor, Tensor], rows: Callable[[Tensor], Tensor]) -> None:
        for a, b in zip(got, want, strict=True):
            if not torch.equal(bits(a), bits(rows(b))):
                raise AssertionError(f"other bits: {what}")

    for r in range(case.batch):
        alone = AttentionInputs(
            *(x[r : r + 1] for x in (inputs.q, k, v, inputs.prefix_lens, inputs.tree_mask))
        )
        same(f"request {r} alone", attend(where, alone), lambda x, r=r: x[r : r + 1])
    for page in (1, 5, 16) if big else (5,):
        pk, pv, table = paged(k, v, page, page)
        other = replace(inputs, k_cache=pk, v_cache=pv)
        same(f"pages of {page}", attend(where, other, page_table=table), lambda x: x)
    first = case.nodes - 7
    tail = replace(inputs, q=inputs.q[:, first:], tree_mask=inputs.tree_mask[:, first:])
    same("the last rows", attend(where, tail, tree_len=case.nodes), lambda x: x[:, first:])
    same("a bound", attend(where, inputs, max_prefix_len=case.prefix), lambda x: x)
    return SHORT[dtype]


# Stages


def check_ops(report: Report, where: Device, quick: bool) -> None:
    """Stage (b), the operators."""
    calls: list[tuple[str, str, tuple, dict]] = []
    try:
        from test_ops import example
    except ImportError as error:
        missing = f"not importable: {error}"
        report.add(Row("ops", "all", "the example of each operator", result=missing))
    else:
        calls += [(name, "example", *example(name)) for name in BY_NAME]
    calls += op_calls(quick)
    for name, what, args, kwargs in calls:
        if name == "tree_attention_out":
            continue
        row = Row("ops", name, what)
        if not where.has(name):
            if what == "example":
                cpu_only = BY_NAME[name].cpu_only
                row.result = "for CPUs only" if cpu_only else "no kernel for this device"
                report.add(row)
            continue
        report.run(row, lambda name=name, a=args, k=kwargs: call_op(where, name, a, k))


def check_attention(report: Report, where: Device, quick: bool) -> None:
    """Stage (b), attention: the case table, poison, the row rule."""
    table = QUICK_CASES if quick else ATTENTION_CASES + FLOAT8_CASES
    for case in table:
        for dtype in DTYPES[1:2] if quick else DTYPES:
            row = Row("attention", "tree_attention", case.name, mode=SHORT[dtype])

            def body(case: AttentionCase = case, dtype: torch.dtype = dtype) -> str:
                inputs = attention_inputs(case, dtype, any_order=case.nodes % 2 == 0)
                return attention_agrees(where, inputs)

            report.run(row, body)
    for case in (
        QUICK_CASES[:2]
        if quick
        else [
            AttentionCase(20, (4, 2), 64, 300, batch=2),
            AttentionCase(33, (7, 1), 128, 65, page_size=5),
            AttentionCase(12, (3, 3), 80, 40, window=9),
        ]
    ):
        for dtype in DTYPES[:1] if quick else DTYPES:
            row = Row("attention", "tree_attention", f"poison {case.name}", mode=SHORT[dtype])
            report.run(row, lambda c=case, d=dtype: poison_agrees(where, attention_inputs(c, d)))
    for dtype in DTYPES[:1] if quick else DTYPES:
        row = Row("attention", "tree_attention", "row rule", mode=SHORT[dtype])
        report.run(row, lambda d=dtype: rows_do_not_depend_on_company(where, d, not quick))


def check_steps(report: Report, where: Device, quick: bool) -> None:
    """Stage (c): whole steps as graphs and not, the same tokens."""
    for sampled in (False, True):
        for batch in (1, 3):
            if quick and (batch > 1 or sampled):
                continue
            row = Row("step", "EagleDecoder", f"B{batch}-{'sampled' if sampled else 'greedy'}")
            report.run(row, lambda b=batch, s=sampled: _step_agrees(where, b, s, quick))


def _step_agrees(where: Device, batch: int, sampled: bool, quick: bool) -> str:
    target, head = small_models(where.device, torch.float32 if quick else torch.bfloat16)
    sampling = ek.SamplingParams(1.0, 20, 0.9, 0.01, seed=1) if sampled else None
    prompts = [[3 + r, 4, 5, 6 + r] for r in range(batch)]
    settings = {
        "max_new_tokens": 3 if quick else 48,
        "eos_token_ids": (),
        "sampling": sampling,
        "config": ek.TreeConfig(6, 2, 2) if quick else ek.TreeConfig(24, 6, 5),
    }
    eager = ek.EagleDecoder(target, head)
    want = eager.generate(prompts, **settings)
    if where.device.type == "cpu":
        again = eager.generate(prompts, **settings)
        if again.token_ids != want.token_ids:
            raise AssertionError("expected the same tokens from a second eager run")
        return "no graphs on a CPU: an eager run in their place"
    captured = ek.EagleDecoder(eager.target, head, cuda_graph=True)
    for _ in range(2):
        got = captured.generate(prompts, **settings)
        if got.token_ids != want.token_ids:
            raise AssertionError("expected the same tokens from captured steps")
        got = captured.generate_plain(prompts, **_plain(settings))
        if got.token_ids != eager.generate_plain(prompts, **_plain(settings)).token_ids:
            raise AssertionError("expected the same tokens from captured plain steps")
    return f"accept length {want.stats.accept_length:.2f}"


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "config"}


def small_models(device: torch.device, dtype: torch.dtype, **changes: int) -> tuple[Any, Any]:
    """A random Llama and a head for it; raises `NotHere` without transformers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM

        from eagle2_kernels.models.heads import EagleHead
    except ImportError as error:
        raise NotHereError(f"not importable: {error}") from error
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**(sizes | changes))).to(dtype).eval()
    return model, EagleHead.from_target(model).eval()
