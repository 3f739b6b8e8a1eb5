"""The timing half of `gpu_check.py`: operators and whole steps beside what others offer.

Every provider's result is checked before it is timed. Rounds interleave the providers. On a card a
call is timed by CUDA events behind a kernel that sleeps while the host enqueues, so that only the
device's time counts; "cold" rounds overwrite the L2 cache first. On a CPU the clock is the host's.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from costs import Cost
from gpu_correct import Device, i32, random_parents, small_models
from gpu_report import NotHereError, Report, Row, failed, priced
from roofline import Card
from shapes import (
    ATTEND,
    BUILD,
    COMPACT,
    EXPAND,
    VERIFY,
    WRITE,
    Attend,
    Build,
    Compact,
    Expand,
    Verify,
    Write,
)
from torch import Tensor

import eagle2_kernels as ek
from eagle2_kernels import reference
from eagle2_kernels.models.draft import grow_candidates

Call = Callable[[], Any]
# Shapes that FlexAttention is compiled for; each compilation takes seconds.
FLEX = {(1, 8192, 32), (8, 8192, 8), (32, 1024, 64)}
CYCLES_PER_SECOND = 2e9
NAMESPACE = torch.ops.eagle2_kernels


class Clock:
    """Seconds of a call on a device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.modes = ("warm", "cold") if self.cuda else ("",)
        if self.cuda:
            size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
            self._flush = torch.empty(2 * size, dtype=torch.uint8, device=device)

    def prepare(self, call: Call) -> int:
        """Cycles to sleep so that the host has enqueued the call before the device begins it."""
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        enqueued = time.perf_counter() - began
        torch.cuda.synchronize()
        return int((2 * enqueued + 50e-6) * CYCLES_PER_SECOND)

    def time(self, call: Call, sleep: int, mode: str) -> float:
        """One call."""
        if not self.cuda:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if mode == "cold":
            self._flush.zero_()
        torch.cuda._sleep(sleep)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


@dataclass
class Timing:
    """One shape: makers of providers (the maker may raise `NotHereError`), and their check."""

    op: str
    shape: str
    cost: Cost
    makers: dict[str, Callable[[], Call]]
    check: Callable[[str, Any], None]


def run(report: Report, clock: Clock, card: Card | None, timing: Timing, quick: bool) -> None:
    """Check and time one shape's providers; each becomes a row a mode."""
    calls: dict[str, Call] = {}
    floor = None if card is None else card.floor(timing.cost)
    for name, make in timing.makers.items():
        row = priced(Row("time", timing.op, timing.shape, name), timing.cost, floor)
        try:
            call = make()
            timing.check(name, call())
            report.settle()
        except NotHereError as error:
            row.result = str(error)
            report.add(row)
        except Exception as error:
            row.result = failed(error)
            report.add(row)
            report.check_device()
        else:
            calls[name] = call
    sleeps = {name: clock.prepare(call) for name, call in calls.items()}
    for mode in clock.modes:
        times: dict[str, list[float]] = {name: [] for name in calls}
        until = time.monotonic() + (0.1 if quick else 1.0)
        while calls:
            for name, call in calls.items():
                times[name].append(clock.time(call, sleeps[name], mode))
            rounds = len(next(iter(times.values())))
            if rounds >= (3 if quick else 40) or (rounds >= 5 and time.monotonic() > until):
                break
        ours = statistics.median(times["ours"]) if "ours" in times else None
        for name, values in times.items():
            row = Row("time", timing.op, timing.shape, name, mode)
            measured(row, values)
            if ours is not None:
                row.ratio = statistics.median(values) / ours
            report.add(priced(row, timing.cost, floor))


def measured(row: Row, seconds: list[float]) -> Row:
    """Median and fifths into a row."""
    fifths = statistics.quantiles(seconds, n=5) if len(seconds) > 1 else seconds * 4
    row.median_us, row.p20_us, row.p80_us = (
        1e6 * x for x in (statistics.median(seconds), fifths[0], fifths[3])
    )
    return row


def imported(name: str) -> Any:
    """A module of somebody else's."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise NotHereError(f"not importable: {type(error).__name__}") from error


# expand_topk


def expand(shape: Expand, device: torch.device) -> Timing:
    """Against log_softmax, topk, add, topk."""
    logits = torch.randn(shape.batch, shape.parents, shape.vocab, device=device).mul_(4)
    logits = logits.to(torch.float16 if device.type == "cpu" else torch.bfloat16)
    beam = -torch.rand(shape.batch, shape.parents, device=device)
    k = shape.top_k

    def torch_composition() -> Tensor:
        scores, _ = torch.log_softmax(logits.float(), -1).topk(k, -1)
        return (scores + beam[..., None]).flatten(1).topk(k, -1).values

    exact = torch.log_softmax(logits.double(), -1).topk(k, -1).values + beam[..., None]
    exact = exact.flatten(1).topk(k, -1).values

    def check(name: str, got: Any) -> None:
        scores = got[4] if name == "ours" else got
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-4)

    makers = {
        "ours": lambda: lambda: ek.expand_topk(logits, beam, k),
        "torch composition": lambda: torch_composition,
    }
    return Timing(shape.op, str(shape), shape.cost(), makers, check)


# build_tree


def build(shape: Build, device: torch.device) -> Timing:
    """Against topk, sort and searchsorted (the choice alone), and sgl-kernel's tree."""
    b, k, m, n = shape.batch, shape.top_k, shape.candidates, shape.nodes
    up = [-1] * k + [i // k for i in range(m - k)]
    parents = i32([up] * b).to(device)
    steps = torch.rand(b, m, device=device).neg()
    scores = steps.clone()
    for first in range(k, m, k * k):
        last = min(first + k * k, m)
        scores[:, first:last] += scores.gather(1, parents[:, first:last].long())
    tokens = torch.randint(32_000, (b, m), device=device)
    roots = torch.ones(b, dtype=torch.int64, device=device)
    prefix = torch.full((b,), 1000, dtype=torch.int32, device=device)

    def choice() -> Tensor:
        best = scores.topk(n - 1, -1).indices.sort(-1).values
        above = parents.long().gather(1, best)
        return torch.searchsorted(best, above.clamp(min=0)) + 1

    def check(name: str, got: Any) -> None:
        if name == "ours":
            args = (x.cpu() for x in (roots, prefix, tokens, scores, parents))
            for one, other in zip(got[:9], reference.build_tree(*args, n), strict=True):
                assert torch.equal(one.cpu(), other)

    makers = {
        "ours": lambda: lambda: ek.build_tree(roots, prefix, tokens, scores, parents, n),
        "torch, choice only": lambda: choice,
    }
    return Timing(shape.op, str(shape), shape.cost(), makers, check)


# tree_attention


def attend(shape: Attend, device: torch.device) -> Timing:
    """Against SDPA with a mask, compiled FlexAttention and FlashInfer's custom masks."""
    b, n, prefix = shape.batch, shape.nodes, shape.prefix
    (heads, kv_heads), dim, dim_v = shape.layer
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    keys = prefix + n
    q = torch.randn(b, n, heads, dim, device=device, dtype=dtype)
    k = torch.randn(b, keys, kv_heads, dim, device=device, dtype=dtype)
    v = k[..., :dim_v] if shape.latent else torch.randn_like(k)
    lens = torch.full((b,), prefix, dtype=torch.int32, device=device)
    parents = i32([random_parents(n, r) for r in range(b)]).to(device)
    counts = torch.full((b,), n, dtype=torch.int32, device=device)
    tree = ek.DraftTree(
        torch.zeros(b, n, dtype=torch.int64, device=device),
        parents,
        *ek.flatten_tree(parents, counts, lens)[:2],
        torch.zeros(b, n, device=device),
        *ek.flatten_tree(parents, counts, lens)[2:],
        counts,
    )
    seen = torch.ones(b, 1, n, keys, dtype=torch.bool, device=device)
    seen[..., prefix:] = ek.unpack_tree_mask(tree.tree_mask, n)[:, None]
    scale = dim**-0.5

    def exact(r: int) -> Tensor:
        wide = (x[r].double().transpose(0, 1) for x in (q, k, v))
        qs, ks, vs = wide
        ks, vs = (x.repeat_interleave(heads // kv_heads, 0) for x in (ks, vs))
        scores = (qs @ ks.transpose(1, 2) * scale).masked_fill(~seen[r], float("-inf"))
        return (scores.softmax(-1) @ vs).transpose(0, 1)

    wanted = {r: exact(r) for r in {0, b - 1}}
    eps = torch.finfo(dtype).eps

    def check(name: str, got: Tensor) -> None:
        for r, want in wanted.items():
            atol = float(4 * eps * want.std())
            torch.testing.assert_close(got[r].double(), want, rtol=2 * eps, atol=atol)

    def sdpa() -> Call:
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))

        def call() -> Tensor:
            out = F.scaled_dot_product_attention(
                qt, kt, vt, attn_mask=seen, scale=scale, enable_gqa=heads != kv_heads
            )
            return out.transpose(1, 2)

        return call

    def flex() -> Call:
        if device.type != "cuda":
            raise NotHereError("left out: compiled for a card only")
        if (b, prefix, n) not in FLEX or shape.latent:
            raise NotHereError("left out: a compilation takes seconds")
        from eagle2_kernels.integrations import flex_attention as adapter

        module = imported("torch.nn.attention.flex_attention")
        compiled = torch.compile(module.flex_attention, dynamic=False)
        mask = module.create_block_mask(
            adapter.tree_mask_mod(tree, lens), b, None, n, keys, device=device
        )
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        return lambda: compiled(
            qt, kt, vt, block_mask=mask, scale=scale, enable_gqa=heads != kv_heads
        ).transpose(1, 2)

    def flashinfer() -> Call:
        module = imported("flashinfer")
        if shape.latent:
            raise NotHereError("left out: another wrapper serves MLA")
        from eagle2_kernels.integrations import flashinfer as adapter

        page = 16
        pages = (keys + page - 1) // page
        pool = torch.zeros(b * pages, 2, page, kv_heads, dim, device=device, dtype=dtype)
        for which, cache in enumerate((k, v)):
            rows = torch.zeros(b, pages * page, kv_heads, dim, device=device, dtype=dtype)
            rows[:, :keys] = cache
            pool[:, which] = rows.view(b * pages, page, kv_heads, dim)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        counting = torch.arange(b + 1, dtype=torch.int32, device=device)
        wrapper.plan(
            counting * n,
            counting * pages,
            torch.arange(b * pages, dtype=torch.int32, device=device),
            torch.full((b,), (keys - 1) % page + 1, dtype=torch.int32, device=device),
            heads,
            kv_heads,
            dim,
            page,
            custom_mask=adapter.custom_mask(tree, lens),
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        flat = q.view(b * n, heads, dim)
        return lambda: wrapper.run(flat, pool).view(b, n, heads, dim)

    makers = {
        "ours": lambda: (
            lambda: ek.tree_attention(q, k, v, lens, tree.tree_mask, max_prefix_len=prefix)
        ),
        "SDPA with a mask": sdpa,
        "FlexAttention": flex,
        "FlashInfer": flashinfer,
    }
    pairs = int(seen.sum())
    return Timing(shape.op, str(shape), shape.cost(pairs), makers, check)


# sample_and_verify


def verify(shape: Verify, device: torch.device) -> Timing:
    """Against sampling at every node with torch, and sgl-kernel's greedy walk."""
    b, n, vocab = shape.batch, shape.nodes, shape.vocab
    depth = max(shape.accepted + 2, 4)
    parents = [-1, *range(shape.accepted), *[0] * (n - 1 - shape.accepted)]
    rows = i32([parents] * b).to(device)
    counts = torch.full((b,), n, dtype=torch.int32, device=device)
    lens = torch.full((b,), 1000, dtype=torch.int32, device=device)
    _, positions, child, sibling, _ = ek.flatten_tree(rows, counts, lens)
    logits = torch.randn(b, n, vocab, device=device)
    logits = logits.to(torch.float16 if device.type == "cpu" else torch.bfloat16)
    # The path's tokens are certain, so that the walk is as long as the shape says.
    draft = torch.arange(n, device=device).repeat(b, 1) + 5
    for slot in range(shape.accepted):
        logits[:, slot, 5 + slot + 1] = 1000
    logits[:, shape.accepted, 3] = 1000
    seeds = torch.arange(b, device=device)
    filters: dict[str, Any] = (
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02} if shape.filtered else {}
    )
    # Tensors once, as a loop has them.
    types = {"top_k": torch.int32}
    filters = {
        name: torch.full((b,), value, dtype=types.get(name, torch.float32), device=device)
        for name, value in filters.items()
    }

    def ours() -> Any:
        return NAMESPACE.sample_and_verify(
            logits, positions, seeds, draft, child, sibling, depth, counts, **filters
        )

    def every_node() -> Any:
        if not shape.filtered:
            targets = logits.argmax(-1)
        else:
            scaled = logits.float() / 0.8
            kept = scaled.topk(40, -1)
            probs = kept.values.softmax(-1)
            over = probs.cumsum(-1) - probs >= 0.9
            low = probs < 0.02 * probs[..., :1]
            probs = probs.masked_fill(over | low, 0)
            drawn = torch.multinomial(probs.flatten(0, 1), 1).view(b, n, 1)
            targets = kept.indices.gather(-1, drawn)[..., 0]
        return ek.verify_tree(targets, draft, child, sibling, depth, num_nodes=counts)

    def sgl() -> Call:
        kernel = imported("sgl_kernel")
        if shape.filtered:
            raise NotHereError("left out: its sampled walk draws another way")
        index = torch.arange(b * n, device=device).view(b, n)
        predicts = torch.zeros(b * n, dtype=torch.int32, device=device)
        accept = torch.full((b, depth + 1), -1, dtype=torch.int32, device=device)
        number = torch.zeros(b, dtype=torch.int32, device=device)
        links = (child.long(), sibling.long())

        def call() -> Any:
            kernel.verify_tree_greedy(
                predicts, accept, number, draft, index, *links, logits.argmax(-1)
            )
            return None, number, None

        return call

    def check(name: str, got: Any) -> None:
        lengths = got[2] if name == "ours" else got[1]
        assert lengths.tolist() == [shape.accepted] * b, lengths

    makers = {
        "ours": lambda: ours,
        "torch at every node": lambda: every_node,
        "sgl-kernel": sgl,
    }
    return Timing(shape.op, str(shape), shape.cost(), makers, check)


# compact_kv, write_kv


def compact(shape: Compact, device: torch.device) -> Timing:
    """Against indexing layer by layer."""
    b, slots = shape.batch, 256
    size = (b, slots, shape.heads, shape.dim)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    caches = [torch.randn(size, device=device, dtype=dtype) for _ in range(2 * shape.layers)]
    lens = torch.full((b,), 100, dtype=torch.int32, device=device)
    # Sources lie behind all targets: a second call moves the same rows again.
    path = [0, *range(shape.accepted + 5, 2 * shape.accepted + 5)]
    index = i32([path] * b).to(device)
    lengths = torch.full((b,), shape.accepted, dtype=torch.int32, device=device)
    request = torch.arange(b, device=device)[:, None]
    source = 100 + index.long()
    target = 100 + torch.arange(len(path), device=device).repeat(b, 1)
    expected = caches[-1][request, source].clone()

    def with_torch() -> None:
        for cache in caches:
            cache[request, target] = cache[request, source]

    def check(name: str, got: Any) -> None:
        assert torch.equal(caches[-1][request, target], expected)
        caches[-1][request, target[:, 1:]] = 0

    makers = {
        "ours": lambda: lambda: ek.compact_kv(caches, index, lengths, lens),
        "torch, layer by layer": lambda: with_torch,
    }
    return Timing(shape.op, str(shape), shape.cost(), makers, check)


def write(shape: Write, device: torch.device) -> Timing:
    """Against an indexed assignment."""
    b, n = shape.batch, shape.nodes
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    caches = [torch.zeros(b, 256, shape.heads, shape.dim, device=device, dtype=dtype) for _ in "kv"]
    rows = [torch.randn(b, n, shape.heads, shape.dim, device=device, dtype=dtype) for _ in "kv"]
    lens = torch.full((b,), 100, dtype=torch.int32, device=device)
    request = torch.arange(b, device=device)[:, None]
    slots = lens.long()[:, None] + torch.arange(n, device=device)

    def with_torch() -> None:
        for cache, new in zip(caches, rows, strict=True):
            cache[request, slots] = new

    def check(name: str, got: Any) -> None:
        for cache, new in zip(caches, rows, strict=True):
            assert torch.equal(cache[request, slots], new)
            cache.zero_()

    makers = {
        "ours": lambda: lambda: ek.write_kv(*caches, *rows, lens),
        "torch": lambda: with_torch,
    }
    return Timing(shape.op, str(shape), shape.cost(), makers, check)


# Steps


class FixedLogits:
    """A drafter whose model costs nothing."""

    draft_to_target = None

    def __init__(self, batch: int, top_k: int, vocab: int, device: torch.device) -> None:
        dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
        self._logits = torch.randn(batch, top_k, vocab, device=device).to(dtype)

    def root(self) -> Tensor:
        """[B, 1, V]."""
        return self._logits[:, :1]

    def level(self, tokens: Tensor, rows: Tensor, mask: Tensor, level: int) -> Tensor:
        """[B, K, V]."""
        return self._logits


def outside_the_models(device: torch.device, quick: bool) -> Timing:
    """The operators of one step, as a graph and eagerly; attention belongs to the models."""
    b, k, depth, n = (1, 2, 2, 6) if quick else (1, 10, 6, 60)
    vocab, layers, heads, dim = (300, 2, 2, 16) if quick else (128_256, 32, 8, 128)
    drafter = FixedLogits(b, k, vocab, device)
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    logits = torch.randn(b, n, vocab, device=device).to(dtype)
    caches = [
        torch.randn(b, 256, heads, dim, device=device, dtype=dtype) for _ in range(2 * layers)
    ]
    roots = torch.zeros(b, dtype=torch.int64, device=device)
    lens = torch.full((b,), 100, dtype=torch.int32, device=device)
    seeds = torch.zeros(b, dtype=torch.int64, device=device)

    def step() -> Any:
        candidates = grow_candidates(drafter, b, k, depth)
        tree = ek.DraftTree(*ek.build_tree(roots, lens, *candidates, n))
        links = (tree.draft_tokens, tree.first_child, tree.next_sibling, depth, tree.num_nodes)
        emitted, index, length, _ = NAMESPACE.sample_and_verify(
            logits, tree.position_ids, seeds, *links
        )
        ek.compact_kv(caches, index, length, lens)
        return emitted

    want = step().cpu()

    def captured() -> Call:
        if device.type == "cpu":
            # The same code path, eagerly: there are no graphs on a CPU.
            return step
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = step()

        def call() -> Any:
            graph.replay()
            return out

        return call

    def check(name: str, got: Tensor) -> None:
        assert torch.equal(got.cpu(), want)

    cost = Verify(b, vocab, n, 0, False).cost() + Build(b, k, depth, n).cost()
    for level in range(depth):
        cost += Expand(b, 1 if level == 0 else k, vocab, k).cost()
    shape = f"B{b}-V{vocab}-K{k}-D{depth}-N{n}-L{layers}"
    eager = "torch.ops, eager"
    return Timing(
        "step outside the models", shape, cost, {"ours": captured, eager: lambda: step}, check
    )


def whole_steps(report: Report, where: Device, quick: bool) -> None:
    """Seconds a step of `EagleDecoder`, captured and not, and of plain decoding."""
    device = where.device
    if quick:
        sizes: dict[str, int] = {}
    else:
        sizes = {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    config = ek.TreeConfig(6, 2, 2) if quick else ek.TreeConfig(60, 10, 6)
    models: dict[bool, ek.EagleDecoder] = {}
    shape = "tiny Llama" if quick else "1.2 B Llama, bf16, 60/10/6"
    tokens = 3 if quick else 64

    def decoder(graph: bool) -> ek.EagleDecoder:
        if not models:
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
            models[False] = ek.EagleDecoder(*small_models(device, dtype, **sizes))
        if graph not in models:
            eager = models[False]
            models[True] = ek.EagleDecoder(eager.target, eager.head, cuda_graph=True)
        return models[graph]

    for plain in (False, True):
        for graph in (True, False):
            if graph and device.type == "cpu":
                continue
            name = f"{'plain' if plain else 'tree'}, {'captured' if graph else 'eager'}"
            row = Row("time", "whole step", shape, name)

            def body(plain: bool = plain, graph: bool = graph, row: Row = row) -> str:
                run_it = decoder(graph).generate_plain if plain else decoder(graph).generate
                settings: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_ids": ()}
                if not plain:
                    settings["config"] = config
                seconds = []
                for _ in range(1 if quick else 6):
                    stats = run_it([5, 6, 7, 8], **settings).stats
                    spent = stats.seconds["draft"] + stats.seconds["verify"]
                    seconds.append(spent / stats.target_forwards)
                # The first run compiles and captures.
                measured(row, seconds[1:] or seconds)
                return f"accept length {stats.accept_length:.2f}"

            report.run(row, body)


def timings(device: torch.device, quick: bool) -> Iterator[Callable[[], Timing]]:
    """One of each family first, then the rest in turn: whatever time there is, all are seen."""
    families: list[list[Callable[[], Timing]]] = [
        [lambda s=s, make=make: make(s, device) for s in (shapes[:1] if quick else shapes[1:])]
        for make, shapes in (
            (attend, ATTEND),
            (expand, EXPAND),
            (build, BUILD),
            (verify, VERIFY),
            (compact, COMPACT),
            (write, WRITE),
        )
    ]
    families.insert(1, [lambda: outside_the_models(device, quick)])
    for i in range(max(map(len, families))):
        yield from (family[i] for family in families if i < len(family))


def time_all(report: Report, where: Device, card: Card | None, quick: bool) -> None:
    """Stage (e)."""
    clock = Clock(where.device)
    makes = list(timings(where.device, quick))
    for number, make in enumerate(makes):
        if report.due():
            try:
                with torch.inference_mode():
                    run(report, clock, card, make(), quick)
            except Exception as error:
                # What providers do wrong is caught where it happens: this is the row's own.
                report.add(Row("time", "timing", f"number {number}", result=failed(error)))
                report.check_device()
        # One of each family has been timed: the step they are for.
        if number == min(6, len(makes) - 1):
            whole_steps(report, where, quick)
        if where.device.type == "cuda":
            torch.cuda.empty_cache()
