"""The draft head at decode time: its K/V cache, the re-feed of true features, the tree's levels.

Feature f_i of the target pairs with token t_{i+1}; the pair's row sits at draft position i. With L
committed tokens before the root, the draft prefix is the L pairs ending in (f_{L-1}, root), and
beam entry j of tree level i is a row of its own at position L + i, in slot L + i*K + j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import tree_attention
from ..cache import write_kv
from .heads import EagleHead

__all__ = ["DraftCache", "grow_level", "new_draft_cache", "refeed", "take_rows"]


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

    token_ids [B, R] int64, features [B, R, H] (token_ids[:, i] follows features[:, i]), prefix_lens
    and lengths [B] int32 -> the head's features [B, R, H]; rows from lengths[b] on are padding.
    K/V that tree rows of the last step left in these slots are overwritten.
    """
    rows = torch.arange(token_ids.shape[1], device=token_ids.device)
    x = head.inputs(token_ids, features)
    q, k, v = head.project_qkv(x, prefix_lens[:, None] + rows)
    write_kv(cache.k, cache.v, k, v, prefix_lens, lengths)
    return head.finish(x, tree_attention(q, cache.k, cache.v, prefix_lens))


def grow_level(
    head: EagleHead,
    cache: DraftCache,
    token_ids: Tensor,
    features: Tensor,
    prefix_lens: Tensor,
    draft_mask: Tensor,
    level: int,
) -> Tensor:
    """Run the head on one level's beam; its K/V go to draft tree slots level*K .. level*K + K - 1.

    token_ids [B, K] int64, features [B, K, H] (the parents' own outputs), prefix_lens [B] int32
    (rows before the tree, root included), draft_mask [B, K, W] int64 (bit s of row j: draft tree
    slot s is entry j or an ancestor) -> the head's features [B, K, H]. Levels count from 0.
    """
    k_beam = token_ids.shape[1]
    tree_len = (level + 1) * k_beam
    x = head.inputs(token_ids, features)
    q, k, v = head.project_qkv(x, (prefix_lens + level)[:, None])
    write_kv(cache.k, cache.v, k, v, prefix_lens + level * k_beam)
    words = draft_mask[..., : (tree_len + 63) // 64]
    return head.finish(
        x, tree_attention(q, cache.k, cache.v, prefix_lens, words, tree_len=tree_len)
    )


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]]: x [B, N, H], index [B, M] of any integer dtype -> [B, M, H]."""
    return x.gather(1, index.long()[..., None].expand(-1, -1, x.shape[-1]))
