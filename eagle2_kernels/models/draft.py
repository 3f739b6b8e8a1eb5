"""The draft at decode time: the head's K/V cache, the re-feed of true features, the tree's levels.

Feature f_i of the target pairs with token t_{i+1}; the pair's row sits at draft position i. With L
committed tokens before the root, the draft prefix is the L pairs ending in (f_{L-1}, root), and
beam entry j of tree level i is a row of its own at position L + i, in slot L + i*K + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..expand import expand_topk, extend_draft_tree
from .fused import CacheRows
from .heads import EagleHead

__all__ = [
    "Candidates",
    "DraftCache",
    "Drafter",
    "HeadDrafter",
    "grow_candidates",
    "new_draft_cache",
    "refeed",
    "take_rows",
]


class Candidates(NamedTuple):
    """All levels' drafted tokens, [B, M] each: what `build_tree` chooses from."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor


class Drafter(Protocol):
    """What `grow_candidates` asks for logits, [B, P, V], level by level."""

    draft_to_target: Tensor | None

    def root(self) -> Tensor:
        """Logits [B, 1, V] behind the root."""

    def level(self, tokens: Tensor, rows: Tensor, mask: Tensor, level: int) -> Tensor:
        """Logits [B, K, V] behind one level's beam.

        tokens [B, K] int64; rows [B, K] int32, each entry's parent among the last call's rows; mask
        [B, K, W] int64 words over draft tree slots. Levels count from 0.
        """


def grow_candidates(
    drafter: Drafter, batch: int, top_k: int, max_depth: int, stop_below: float = 0.0
) -> Candidates:
    """Draft up to ``max_depth`` levels: each expands the level above's ``top_k`` best nodes.

    ::

        score(child) = score(parent) + log_softmax(logits at parent)[child]

    ``stop_below``: draft no further level once no request has a node in the frontier whose path has
    at least this probability; above 0 each level reads one number back to the host.
    """
    logits = drafter.root()
    device = logits.device
    words = max(((max_depth - 1) * top_k + 63) // 64, 1)
    mask = torch.zeros(batch, top_k, words, dtype=torch.int64, device=device)
    count = top_k + (max_depth - 1) * top_k**2
    parents = torch.empty(batch, count, dtype=torch.int32, device=device)
    scores = torch.zeros(batch, 1, dtype=torch.float32, device=device)
    beam = torch.zeros(batch, top_k, dtype=torch.int64, device=device)
    beam_tokens = beam
    rows = torch.zeros(batch, top_k, dtype=torch.int32, device=device)
    all_tokens, all_scores = [], []
    for level in range(max_depth):
        mask = extend_draft_tree(parents, mask, beam, level)
        if level > 0:
            logits = drafter.level(beam_tokens, rows, mask, level - 1)
        tokens, token_scores, beam, beam_tokens, scores, rows = expand_topk(
            logits, scores, top_k, drafter.draft_to_target
        )
        all_tokens.append(tokens)
        all_scores.append(token_scores)
        if stop_below > 0 and level + 1 < max_depth and scores.max().exp() < stop_below:
            parents = parents[:, : top_k + level * top_k**2].contiguous()
            break
    return Candidates(torch.cat(all_tokens, dim=1), torch.cat(all_scores, dim=1), parents)


@dataclass
class DraftCache:
    """Keys and values of the head's one layer, [B, S, Hkv, D]."""

    k: Tensor
    v: Tensor

    def narrow(self, batch: int) -> DraftCache:
        """The first ``batch`` requests, as views."""
        return DraftCache(self.k[:batch], self.v[:batch])


def new_draft_cache(head: EagleHead, batch: int, capacity: int) -> DraftCache:
    """An empty cache of ``capacity`` slots for ``batch`` requests, in the head's dtype."""
    c, weight = head.config, head.fc.weight
    shape = (batch, capacity, c.num_key_value_heads, c.head_dim)
    return DraftCache(
        torch.zeros(shape, dtype=weight.dtype, device=weight.device),
        torch.zeros(shape, dtype=weight.dtype, device=weight.device),
    )


def refeed(
    head: EagleHead,
    cache: DraftCache,
    token_ids: Tensor,
    features: Tensor,
    prefix_lens: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Append ``lengths[b]`` true (feature, token) pairs behind ``prefix_lens[b]`` pairs.

    token_ids [B, R] int64, features [B, R, F] (token_ids[:, i] follows features[:, i]), prefix_lens
    and lengths [B] int32 -> the head's output [B, R, H]; rows from lengths[b] on are padding.
    K/V that tree rows of the last step left in these slots are overwritten.
    """
    positions = prefix_lens[:, None] + torch.arange(token_ids.shape[1], device=token_ids.device)
    rows = CacheRows(cache.k, cache.v, lengths, prefix_lens)
    return head.advance(token_ids, head.fuse_packed(features), positions, rows)


class HeadDrafter:
    """An `EagleHead` as drafter: ``hidden`` [B, 1, H] is its output at the root's row.

    ``prefix_lens`` [B] int32 counts the rows in the cache, the root's included; the tree's rows go
    behind them, and the next re-feed overwrites them.
    """

    def __init__(
        self, head: EagleHead, cache: DraftCache, prefix_lens: Tensor, hidden: Tensor
    ) -> None:
        self.draft_to_target = head.draft_to_target
        self._head, self._cache = head, cache
        self._prefix_lens, self._hidden = prefix_lens, hidden

    def root(self) -> Tensor:
        """Logits [B, 1, V] behind the root."""
        return self._head.logits(self._hidden)

    def level(self, tokens: Tensor, rows: Tensor, mask: Tensor, level: int) -> Tensor:
        """Logits [B, K, V] behind one level's beam; see `Drafter`."""
        head, cache, prefix_lens = self._head, self._cache, self._prefix_lens
        top_k = tokens.shape[1]
        tree_len = (level + 1) * top_k
        words = mask[..., : (tree_len + 63) // 64]
        place = CacheRows(cache.k, cache.v, None, prefix_lens, words, tree_len)
        positions = (prefix_lens.long() + level)[:, None].expand(tokens.shape)
        self._hidden = head.advance(tokens, take_rows(self._hidden, rows), positions, place)
        return head.logits(self._hidden)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]]: x [B, N, H], index [B, M] of any integer dtype -> [B, M, H]."""
    return x.gather(1, index.long()[..., None].expand(-1, -1, x.shape[-1]))
