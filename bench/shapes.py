"""Shapes that the GPU benches time and `roofline.py` prices: one list for both.

The first of each list is small: the interpreter and a CPU run it in CI.
"""

from __future__ import annotations

from dataclasses import dataclass

import costs
from costs import Cost

BF16 = 2
LLAMA = (32, 8), 128, 128
MLA = (16, 1), 576, 512


@dataclass(frozen=True)
class Expand:
    """One level of a draft: ``parents`` rows a request."""

    batch: int
    parents: int
    vocab: int
    top_k: int

    op = "expand_topk"

    def __str__(self) -> str:
        return f"B{self.batch}-P{self.parents}-V{self.vocab}-K{self.top_k}"

    def cost(self) -> Cost:
        """Logits in bfloat16."""
        return costs.expand_topk(self.batch, self.parents, self.vocab, self.top_k, BF16)


@dataclass(frozen=True)
class Build:
    """An EAGLE tree of ``max_depth`` levels, ``nodes`` of it kept."""

    batch: int
    top_k: int
    max_depth: int
    nodes: int

    op = "build_tree"

    @property
    def candidates(self) -> int:
        """Of all levels."""
        return self.top_k + (self.max_depth - 1) * self.top_k**2

    def __str__(self) -> str:
        return f"B{self.batch}-M{self.candidates}-N{self.nodes}"

    def cost(self) -> Cost:
        """Of one call."""
        return costs.build_tree(self.batch, self.candidates, self.nodes)


@dataclass(frozen=True)
class Attend:
    """One layer of a target forward of a tree."""

    batch: int
    prefix: int
    nodes: int
    layer: tuple[tuple[int, int], int, int] = LLAMA

    op = "tree_attention"

    @property
    def latent(self) -> bool:
        """Whether V lies in K's first columns."""
        return self.layer is MLA

    def __str__(self) -> str:
        (heads, kv_heads), dim, dim_v = self.layer
        dims = f"{dim}" if dim == dim_v else f"{dim}/{dim_v}"
        return f"B{self.batch}-S{self.prefix}-N{self.nodes}-H{heads}/{kv_heads}-D{dims}"

    def cost(self, seen: int | None = None) -> Cost:
        """In bfloat16; ``seen`` as in `costs.tree_attention`."""
        heads, dim, dim_v = self.layer
        lens = [self.prefix] * self.batch
        return costs.tree_attention(
            lens, self.nodes, heads, dim, dim_v, BF16, seen=seen, latent=self.latent
        )


@dataclass(frozen=True)
class Verify:
    """A tree's logits verified; the accepted path has ``accepted`` drafts."""

    batch: int
    vocab: int
    nodes: int
    accepted: int
    filtered: bool

    op = "sample_and_verify"

    def __str__(self) -> str:
        kind = "filters" if self.filtered else "greedy"
        return f"B{self.batch}-V{self.vocab}-N{self.nodes}-A{self.accepted}-{kind}"

    def cost(self) -> Cost:
        """Only visited rows are read."""
        rows = self.batch * (self.accepted + 1)
        return costs.sample_rows(rows, self.vocab, BF16, filtered=self.filtered)


@dataclass(frozen=True)
class Compact:
    """The accepted path moved in the caches of ``layers`` layers."""

    batch: int
    layers: int
    heads: int
    dim: int
    accepted: int

    op = "compact_kv"

    def __str__(self) -> str:
        return f"B{self.batch}-L{self.layers}-H{self.heads}-D{self.dim}-A{self.accepted}"

    def cost(self) -> Cost:
        """The root's row stays where it is."""
        moved = self.batch * self.accepted
        return costs.compact_kv(moved, 2 * self.layers, self.heads, self.dim, BF16)


@dataclass(frozen=True)
class Write:
    """One layer's new keys and values stored."""

    batch: int
    nodes: int
    heads: int
    dim: int

    op = "write_kv"

    def __str__(self) -> str:
        return f"B{self.batch}-N{self.nodes}-H{self.heads}-D{self.dim}"

    def cost(self) -> Cost:
        """Of one call."""
        return costs.write_kv(self.batch * self.nodes, self.heads, self.dim, self.dim, BF16)


EXPAND = [
    Expand(1, 3, 300, 3),
    Expand(1, 10, 32_000, 10),
    Expand(1, 10, 128_256, 10),
    Expand(1, 1, 128_256, 10),
    Expand(8, 10, 128_256, 10),
    Expand(32, 10, 32_000, 10),
]
BUILD = [
    Build(1, 2, 3, 6),
    Build(1, 10, 6, 60),
    Build(32, 10, 6, 60),
    Build(1, 32, 16, 1024),
    Build(8, 32, 8, 512),
]
ATTEND = [
    Attend(1, 40, 5, ((4, 2), 16, 16)),
    *(Attend(1, prefix, nodes) for prefix in (1024, 8192, 32_768) for nodes in (8, 32, 64)),
    Attend(8, 1024, 32),
    Attend(8, 8192, 8),
    Attend(8, 8192, 64),
    Attend(32, 1024, 8),
    Attend(32, 1024, 64),
    Attend(32, 8192, 32),
    Attend(32, 32_768, 8),
    Attend(1, 8192, 8, MLA),
    Attend(8, 8192, 32, MLA),
]
VERIFY = [
    Verify(1, 300, 6, 2, True),
    Verify(1, 128_256, 60, 4, False),
    Verify(1, 128_256, 60, 4, True),
    Verify(32, 128_256, 32, 3, False),
    Verify(32, 128_256, 32, 3, True),
]
COMPACT = [
    Compact(1, 2, 2, 16, 3),
    Compact(1, 32, 8, 128, 4),
    Compact(32, 32, 8, 128, 4),
    Compact(1, 80, 8, 128, 4),
]
WRITE = [Write(1, 5, 2, 16), Write(1, 60, 8, 128), Write(32, 32, 8, 128)]
SHAPES = [*EXPAND, *BUILD, *ATTEND, *VERIFY, *COMPACT, *WRITE]
