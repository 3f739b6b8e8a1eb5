"""What any implementation of an operator must move and compute: the formulas behind every floor.

Bytes are compulsory: each value that the result depends on is read once, each output written once;
what a kernel reads twice or parks in scratch is its own affair. Operations are those of matrix
units (a multiply-add is two), and for operators without matrices a count for the vector units.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """``flops`` on matrix units, ``vector`` operations in float32 beside them."""

    bytes: int
    flops: int = 0
    vector: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.vector + other.vector)


def _words(n: int) -> int:
    return (n + 63) // 64


def _structure(nodes: int) -> int:
    """Bytes of depths, position_ids, first_child, next_sibling and tree_mask."""
    return nodes * (20 + 8 * _words(nodes))


def _tree(nodes: int) -> int:
    """Bytes of a `DraftTree` of one request: tokens, parents, scores and num_nodes beside them."""
    return _structure(nodes) + nodes * 16 + 4


def expand_topk(
    batch: int, parents: int, vocab: int, top_k: int, element: int, *, mapped: bool = False
) -> Cost:
    """Each logit once: a comparison, a difference, an exponential and a sum."""
    rows = batch * parents
    candidates = rows * top_k
    outputs = candidates * 12 + batch * top_k * 24
    ids = min(candidates, vocab) * 8 if mapped else 0
    return Cost(rows * (vocab * element + 4) + ids + outputs, vector=4 * rows * vocab)


def extend_draft_tree(batch: int, top_k: int, level: int, words: int) -> Cost:
    """The beam and its parents' rows in; the level's parents and the next rows out."""
    count = top_k if level == 0 else top_k * top_k
    rows = 0 if level == 0 else 8 * top_k * words
    beam = 0 if level == 0 else 8 * top_k
    return Cost(batch * (beam + rows + 4 * count + 8 * top_k * words))


def build_tree(batch: int, candidates: int, nodes: int) -> Cost:
    """Scores and parents of all candidates, tokens of the kept ones, root and prefix length."""
    kept = min(nodes - 1, candidates)
    return Cost(batch * (8 * candidates + 8 * kept + 12 + _tree(nodes)), vector=batch * candidates)


def build_tree_from_marginals(batch: int, depth: int, top_k: int, nodes: int) -> Cost:
    """A best-first search looks at two marginals for each node it takes, at most."""
    seen = min(2 * nodes, depth * top_k)
    return Cost(batch * (4 * seen + 8 * min(nodes - 1, seen) + 12 + _tree(nodes)))


def flatten_tree(batch: int, nodes: int) -> Cost:
    """Parents, counts and prefix lengths in; the structure out."""
    return Cost(batch * (4 * nodes + 8 + _structure(nodes)))


def retrieve_indices(batch: int, nodes: int, max_depth: int) -> Cost:
    """Parents and counts in; a row of int64 per slot out."""
    return Cost(batch * (4 * nodes + 4 + 8 * nodes * (max_depth + 1)))


def tree_mask_words(rows: int, keys: int) -> Cost:
    """pack_tree_mask and unpack_tree_mask: bools on one side, words on the other."""
    return Cost(rows * (keys + 8 * _words(keys)))


def tree_attention(
    prefix_lens: list[int],
    nodes: int,
    heads: tuple[int, int],
    dim: int,
    dim_v: int,
    element: int,
    *,
    seen: int | None = None,
    cache_element: int | None = None,
    latent: bool = False,
    lse: bool = False,
) -> Cost:
    """Q, the prefixes' and the trees' K and V, the masks and the output, once each.

    ``seen`` counts the visible (query, key) pairs of all requests, by default every prefix key and
    every tree key: 2 (D + Dv) operations a pair and query head, an exponential and a sum. With
    ``latent`` V lies in K's first columns and is not read again.
    """
    batch, (query_heads, kv_heads) = len(prefix_lens), heads
    keys = sum(prefix_lens) + batch * nodes
    pairs = nodes * keys if seen is None else seen
    rows = batch * nodes
    per_key = kv_heads * (dim + (0 if latent else dim_v)) * (cache_element or element)
    return Cost(
        keys * per_key
        + rows * query_heads * ((dim + dim_v) * element + (4 if lse else 0))
        + rows * 8 * _words(nodes)
        + 4 * batch,
        flops=2 * (dim + dim_v) * query_heads * pairs,
        vector=2 * query_heads * pairs,
    )


def merge_attention_states(rows: int, dim: int, element: int) -> Cost:
    """Two states in, one out; ``rows`` counts heads too."""
    return Cost(rows * 3 * (dim * element + 4), vector=rows * 3 * dim)


def sample_rows(
    rows: int, vocab: int, element: int, *, filtered: bool = False, masked: bool = False
) -> Cost:
    """sample_tokens, and the visited rows of sample_and_verify and verify_tree_coins.

    A greedy row is compared; a sampled one is scaled, made noisy (about 40 operations of Philox and
    two logarithms) and, ``filtered``, summed and ranked.
    """
    per_logit = 1 if not filtered else 48
    mask = rows * ((vocab + 31) // 32) * 4 if masked else 0
    return Cost(rows * vocab * element + mask + rows * 16, vector=rows * vocab * per_logit)


def verify_tree(batch: int, nodes: int, max_depth: int) -> Cost:
    """A walk at worst looks at every link and token once."""
    return Cost(batch * (nodes * 24 + 4 + 4 * (max_depth + 1) + 12))


def compact_kv(moved: int, tensors: int, heads: int, dim: int, element: int) -> Cost:
    """``moved`` rows over all requests, read and written in every tensor."""
    return Cost(2 * moved * tensors * heads * dim * element)


def write_kv(rows: int, heads: int, dim: int, dim_v: int, element: int) -> Cost:
    """New rows of K and V, read and written."""
    return Cost(2 * rows * heads * (dim + dim_v) * element)


def process_logits(
    batch: int, nodes: int, vocab: int, element: int, *, counts: bool, prompt: bool
) -> Cost:
    """Every logit read and written, a request's history read once."""
    history = batch * ((4 * vocab if counts else 0) + (4 * ((vocab + 31) // 32) if prompt else 0))
    return Cost(2 * batch * nodes * vocab * element + history, vector=4 * batch * nodes * vocab)


def token_logprobs(rows: int, vocab: int, element: int) -> Cost:
    """The visited rows once."""
    return Cost(rows * (vocab * element + 16), vector=3 * rows * vocab)
