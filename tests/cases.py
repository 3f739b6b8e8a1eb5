"""The case table: shapes that break kernels or that are measured, and random inputs for them.

Tests of every backend and the benchmarks draw from here, so a shape is written down once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from eagle2_kernels import reference

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
FLOAT8 = torch.float8_e4m3fn
TREE_SIZES = [1, 3, 31, 32, 33, 59, 60, 63, 64, 65, 128, 1024]


@dataclass(frozen=True)
class AttentionCase:
    """One call of tree_attention.

    ``page_size`` None is a dense cache. ``v_dim`` None is K's head dim; ``latent`` lays V into K's
    first columns. ``float8`` caches come with two scales.
    """

    nodes: int
    heads: tuple[int, int]
    head_dim: int
    prefix: int
    batch: int = 1
    page_size: int | None = None
    interleaved: bool = False
    chain: bool = False
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    kv_chunk: int | None = None
    v_dim: int | None = None
    latent: bool = False
    float8: bool = False

    @property
    def name(self) -> str:
        parts = [
            f"B{self.batch}-N{self.nodes}-H{self.heads[0]}/{self.heads[1]}-D{self.head_dim}"
            f"-P{self.prefix}"
        ]
        for option in fields(self)[5:]:
            value = getattr(self, option.name)
            if value:
                parts.append(option.name if value is True else f"{option.name}{value}")
        return "-".join(parts)


ATTENTION_CASES = [
    AttentionCase(1, (1, 1), 64, 0),
    AttentionCase(1, (3, 1), 64, 1),
    AttentionCase(1, (9, 3), 64, 600),
    AttentionCase(3, (4, 4), 64, 255),
    AttentionCase(3, (9, 3), 80, 256, batch=3),
    AttentionCase(31, (4, 1), 64, 257, page_size=16),
    AttentionCase(32, (7, 1), 128, 127),
    AttentionCase(33, (3, 3), 96, 128, page_size=5),
    AttentionCase(59, (6, 2), 64, 129, interleaved=True),
    AttentionCase(60, (4, 2), 80, 600, page_size=24),
    AttentionCase(63, (2, 2), 64, 1, batch=2, page_size=1),
    AttentionCase(64, (3, 1), 64, 256),
    AttentionCase(65, (7, 1), 64, 60, page_size=16, interleaved=True),
    AttentionCase(128, (2, 1), 64, 257),
    AttentionCase(5, (2, 1), 1, 9),
    AttentionCase(7, (2, 1), 37, 130, interleaved=True),
    AttentionCase(4, (2, 2), 200, 70, page_size=5),
    AttentionCase(9, (4, 1), 256, 33),
    AttentionCase(33, (4, 2), 64, 300, window=17),
    AttentionCase(20, (3, 1), 80, 40, window=1, page_size=5),
    AttentionCase(16, (4, 2), 64, 200, window=150, softcap=20.0, sinks=True),
    AttentionCase(33, (4, 1), 64, 100, softcap=5.0),
    AttentionCase(12, (3, 3), 96, 50, sinks=True),
    AttentionCase(600, (2, 1), 64, 0, chain=True),
    AttentionCase(65, (3, 1), 80, 257, batch=2, chain=True, page_size=24),
    AttentionCase(33, (4, 2), 64, 100, chain=True, window=20),
    AttentionCase(30, (3, 1), 64, 50, kv_chunk=7, window=21),
    AttentionCase(30, (3, 1), 64, 50, kv_chunk=1),
    AttentionCase(1024, (2, 1), 48, 70),
    AttentionCase(6, (4, 1), 32, 600, batch=2),
    AttentionCase(7, (7, 1), 48, 130, page_size=24),
    AttentionCase(5, (3, 1), 112, 257, page_size=1),
    AttentionCase(5, (3, 3), 160, 65),
    AttentionCase(6, (4, 2), 192, 64, window=40),
    AttentionCase(5, (4, 1), 224, 90, interleaved=True),
    AttentionCase(5, (4, 4), 192, 130, v_dim=128, page_size=16),
    AttentionCase(6, (16, 1), 576, 70, v_dim=512, latent=True, page_size=5),
    AttentionCase(33, (3, 1), 64, 130, v_dim=96, window=50),
    AttentionCase(7, (2, 1), 37, 70, v_dim=50),
    AttentionCase(7, (2, 1), 64, 70, v_dim=3, chain=True),
]

FLOAT8_CASES = [
    AttentionCase(1, (3, 1), 64, 0, float8=True),
    AttentionCase(33, (4, 2), 64, 300, float8=True),
    AttentionCase(20, (7, 1), 80, 127, batch=2, page_size=5, float8=True),
    AttentionCase(60, (3, 1), 37, 129, interleaved=True, float8=True),
    AttentionCase(16, (4, 2), 128, 200, window=150, softcap=20.0, sinks=True, float8=True),
    AttentionCase(65, (2, 2), 96, 60, chain=True, page_size=24, float8=True),
    AttentionCase(6, (16, 1), 576, 70, v_dim=512, latent=True, page_size=16, float8=True),
]


def random_parents(nodes: int, seed: int, *, any_order: bool = False) -> list[int]:
    """Parents of a random tree; with ``any_order`` a parent's slot may exceed its child's."""
    r = random.Random(seed)
    reach = r.choice([1, 3, 8, nodes])
    parents = [-1] + [r.randrange(max(0, i - reach), i) for i in range(1, nodes)]
    if not any_order:
        return parents
    order = list(range(1, nodes))
    r.shuffle(order)
    slot = [0, *order]
    shuffled = [-1] * nodes
    for child, parent in enumerate(parents[1:], start=1):
        shuffled[slot[child]] = slot[parent]
    return shuffled


def path_of(parents: list[int], slot: int) -> list[int]:
    """Slots from the root to ``slot``."""
    path = [slot]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@dataclass
class AttentionInputs:
    """Arguments of one call: ``args`` are positional, ``kwargs`` by name."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    prefix_lens: Tensor
    tree_mask: Tensor | None
    kwargs: dict[str, object] = field(default_factory=dict)
    parents: list[list[int]] = field(default_factory=list)
    # The caches as [B, S, Hkv, D], whatever the layout of k_cache and v_cache.
    k: Tensor | None = None
    v: Tensor | None = None

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        return (self.q, self.k_cache, self.v_cache, self.prefix_lens, self.tree_mask)

    def double(self) -> AttentionInputs:
        return replace(self.unscaled(torch.float64), q=self.q.double())

    def unscaled(self, dtype: torch.dtype) -> AttentionInputs:
        """The caches (and sinks) in ``dtype``; float8 ones times their scales, in float32."""
        kwargs = {key: x for key, x in self.kwargs.items() if key not in ("k_scale", "v_scale")}
        if "sinks" in kwargs:
            kwargs["sinks"] = kwargs["sinks"].to(dtype)  # type: ignore[attr-defined]

        def wide(cache: Tensor, name: str) -> Tensor:
            scale = self.kwargs.get(name)
            return (cache if scale is None else cache.float() * scale).to(dtype)

        assert self.k is not None and self.v is not None
        return replace(
            self,
            k_cache=wide(self.k_cache, "k_scale"),
            v_cache=wide(self.v_cache, "v_scale"),
            k=wide(self.k, "k_scale"),
            v=wide(self.v, "v_scale"),
            kwargs=kwargs,
        )


def paged(
    k: Tensor, v: Tensor, page_size: int, seed: int, *, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense [B, S, Hkv, D] caches as shuffled pages and their page table; spare pages hold NaN."""
    b, s, heads, _ = k.shape
    entries = (s + page_size - 1) // page_size
    g = torch.Generator().manual_seed(seed)
    pages = b * entries + 3
    table = torch.randperm(pages, generator=g)[: b * entries].view(b, entries)
    wide = max(k.shape[3], v.shape[3])
    pool = torch.full((pages, 2, page_size, heads, wide), float("nan")).to(k.dtype)
    for which, cache in enumerate((k, v)):
        rows = torch.full((b, entries * page_size, *cache.shape[2:]), float("nan")).to(k.dtype)
        rows[:, :s] = cache
        paged_rows = rows.view(b * entries, page_size, *cache.shape[2:])
        pool[table.flatten(), which, ..., : cache.shape[3]] = paged_rows
    parts = (pool[:, 0, ..., : k.shape[3]], pool[:, 1, ..., : v.shape[3]])
    if not interleaved:
        parts = (parts[0].contiguous(), parts[1].contiguous())
    return *parts, table.int()


def attention_inputs(
    case: AttentionCase,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    any_order: bool = False,
    parents: list[list[int]] | None = None,
) -> AttentionInputs:
    """Random tensors of a case; request b has ``prefix - 2 b`` prefix tokens, its own tree."""
    g = torch.Generator().manual_seed(seed)
    b, n, (hq, hkv), d = case.batch, case.nodes, case.heads, case.head_dim
    slots = case.prefix + n + 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    v_dim = case.v_dim or d
    q, k, v = normal(b, n, hq, d), normal(b, slots, hkv, d), normal(b, slots, hkv, v_dim)
    prefix_lens = torch.tensor([max(case.prefix - 2 * r, 0) for r in range(b)], dtype=torch.int32)
    kwargs: dict[str, object] = {}
    if case.float8:
        k, v = k.to(FLOAT8), v.to(FLOAT8)
        kwargs |= {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor(1.3)}
    if case.latent:
        v = k[..., :v_dim]
    k_cache, v_cache = k, v
    if case.page_size is not None:
        k_cache, v_cache, kwargs["page_table"] = paged(
            k, v, case.page_size, seed, interleaved=case.interleaved
        )
        if case.latent:
            v_cache = k_cache[..., :v_dim]
    elif case.interleaved:
        both = torch.stack([k, v], dim=2)
        k_cache, v_cache = both[:, :, 0], both[:, :, 1]
    if parents is None:
        parents = [random_parents(n, seed * 100 + r, any_order=any_order) for r in range(b)]
    tree_mask = None
    if not case.chain:
        depths, _, _, _, tree_mask = reference.flatten_tree(
            torch.tensor(parents, dtype=torch.int32),
            torch.full((b,), n, dtype=torch.int32),
            prefix_lens,
        )
        if case.window is not None:
            kwargs["depths"] = depths
    if case.window is not None:
        kwargs["window"] = case.window
    if case.softcap:
        kwargs["softcap"] = case.softcap
    if case.sinks:
        kwargs["sinks"] = torch.randn(hq, generator=g, dtype=torch.float64).float()
    if case.kv_chunk is not None:
        kwargs["kv_chunk"] = case.kv_chunk
    return AttentionInputs(q, k_cache, v_cache, prefix_lens, tree_mask, kwargs, parents, k, v)


def visibility(inputs: AttentionInputs) -> Tensor:
    """Bool [B, N, S]: which cache positions each query sees, by the oracle's rule."""
    assert inputs.k is not None
    b, n = inputs.q.shape[:2]
    seen = torch.zeros(b, n, inputs.k.shape[1], dtype=torch.bool)
    mask, depths = inputs.tree_mask, inputs.kwargs.get("depths")
    for r in range(b):
        for i in range(n):
            keys = reference.visible_keys(
                i,
                n,
                int(inputs.prefix_lens[r]),
                int(inputs.kwargs.get("tree_len", n)),  # type: ignore[call-overload]
                None if mask is None else mask[r],
                None if depths is None else depths[r],  # type: ignore[index]
                inputs.kwargs.get("window"),  # type: ignore[arg-type]
            )
            seen[r, i, keys] = True
    return seen


@dataclass(frozen=True)
class ExpandCase:
    """One call of expand_topk."""

    batch: int
    parents: int
    vocab: int
    top_k: int

    @property
    def name(self) -> str:
        return f"B{self.batch}-P{self.parents}-V{self.vocab}-K{self.top_k}"


EXPAND_CASES = [
    ExpandCase(1, 1, 1, 1),
    ExpandCase(1, 1, 3, 5),
    ExpandCase(2, 3, 17, 4),
    ExpandCase(2, 4, 1023, 4),
    ExpandCase(1, 2, 1024, 1),
    ExpandCase(1, 10, 1025, 10),
    ExpandCase(1, 3, 5000, 60),
    # EAGLE-2's levels on the vocabularies of a draft head, SmolLM2 and Llama 3
    ExpandCase(1, 10, 8192, 10),
    ExpandCase(1, 10, 49152, 10),
    ExpandCase(1, 10, 128256, 10),
]


def expand_inputs(case: ExpandCase, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and the parents' scores."""
    g = torch.Generator().manual_seed(case.vocab + case.top_k)
    logits = (torch.randn(case.batch, case.parents, case.vocab, generator=g) * 4).to(dtype)
    return logits, -torch.rand(case.batch, case.parents, generator=g) * 5


@dataclass(frozen=True)
class DraftCase:
    """A draft tree's shape, as in TreeConfig."""

    max_nodes: int
    top_k: int
    max_depth: int

    @property
    def name(self) -> str:
        return f"K{self.top_k}-D{self.max_depth}-N{self.max_nodes}"

    @property
    def candidates(self) -> int:
        return self.top_k + (self.max_depth - 1) * self.top_k**2


DRAFT_CASES = [
    DraftCase(6, 1, 5),
    DraftCase(16, 4, 4),
    DraftCase(60, 10, 6),
    DraftCase(512, 32, 8),
]


def draft_candidates(case: DraftCase, vocab: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, scores, parents), [1, M] each, of a tree grown by the oracle from random logits."""
    g = torch.Generator().manual_seed(case.max_depth)
    k = case.top_k
    parents = torch.empty(1, case.candidates, dtype=torch.int32)
    mask = torch.zeros(1, k, (k * case.max_depth + 63) // 64, dtype=torch.int64)
    beam, beam_scores = torch.zeros(1, k, dtype=torch.int64), torch.zeros(1, 1)
    tokens, scores = [], []
    for level in range(case.max_depth):
        mask = reference.extend_draft_tree(parents, mask, beam, level)
        logits = torch.randn(1, 1 if level == 0 else k, vocab, generator=g) * 3
        t, s, beam, _, beam_scores, _ = reference.expand_topk(logits, beam_scores, k)
        tokens.append(t)
        scores.append(s)
    return torch.cat(tokens, 1), torch.cat(scores, 1), parents


@dataclass(frozen=True)
class VerifyCase:
    """One call of sample_and_verify on a binary tree."""

    vocab: int
    nodes: int
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def name(self) -> str:
        return f"V{self.vocab}-N{self.nodes}-T{self.temperature:g}-p{self.top_p:g}"


VERIFY_CASES = [
    VerifyCase(1000, 7),
    VerifyCase(1000, 7, 1.0),
    VerifyCase(1000, 7, 1.0, 0.9),
    VerifyCase(49152, 32),
    VerifyCase(49152, 32, 1.0),
    VerifyCase(49152, 32, 1.0, 0.9),
]


@dataclass
class VerifyInputs:
    """Arguments of a call, and the tokens the oracle draws along ``path``, which ends in a leaf."""

    logits: Tensor
    position_ids: Tensor
    seeds: Tensor
    draft_tokens: Tensor
    first_child: Tensor
    next_sibling: Tensor
    max_depth: int
    num_nodes: Tensor
    filters: dict[str, Tensor]
    path: list[int]
    emitted: Tensor


def verify_inputs(case: VerifyCase) -> VerifyInputs:
    """Random logits, and a binary tree in which the oracle's draws lead to the last slot."""
    g = torch.Generator().manual_seed(case.nodes)
    n = case.nodes
    logits = torch.randn(1, n, case.vocab, generator=g) * 4
    up = [-1, *((i - 1) // 2 for i in range(1, n))]
    num_nodes, prefix_lens = (torch.tensor([x], dtype=torch.int32) for x in (n, 100))
    depths, positions, first, sibling, _ = reference.flatten_tree(
        torch.tensor([up], dtype=torch.int32), num_nodes, prefix_lens
    )
    filters = {}
    if case.temperature:
        filters["temperature"] = torch.tensor([case.temperature])
    if case.top_p < 1:
        filters["top_p"] = torch.tensor([case.top_p])
    seeds = torch.tensor([7])
    path = path_of(up, n - 1)
    emitted = reference.sample_tokens(logits[:, path], positions[:, path], seeds, **filters)
    # ids that no draw of the path has
    others = [token for token in range(n + len(path)) if token not in emitted[0].tolist()]
    drafts = torch.tensor([others[:n]])
    drafts[0, path[1:]] = emitted[0, :-1]
    max_depth = int(depths.max())
    return VerifyInputs(
        logits,
        positions,
        seeds,
        drafts,
        first,
        sibling,
        max_depth,
        num_nodes,
        filters,
        path,
        emitted,
    )
