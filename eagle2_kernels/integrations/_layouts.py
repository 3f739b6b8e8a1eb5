"""What the adapters share: trees from masks and links, and bits packed segment by segment."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from ..flatten import flatten_tree, pack_tree_mask
from ..tree import DraftTree


def rebuild(
    draft_tokens: Tensor, parents: Tensor, num_nodes: Tensor, prefix_lens: Tensor
) -> DraftTree:
    """A `DraftTree` from tokens and parents, [B, N] each, slots as they are.

    Engines carry no scores: drafted slots get NaN.
    """
    b, n = draft_tokens.shape
    _checks.tensor("num_nodes", num_nodes, (torch.int32, torch.int64), (b,), "[B]")
    _checks.tensor("prefix_lens", prefix_lens, (torch.int32, torch.int64), (b,), "[B]")
    num_nodes, prefix_lens = num_nodes.int(), prefix_lens.int()
    slots = torch.arange(n, device=draft_tokens.device)
    live = slots < num_nodes[:, None]
    parents = torch.where(live & (slots > 0), parents, -1).int()
    depths, positions, first_child, next_sibling, mask = flatten_tree(
        parents, num_nodes, prefix_lens
    )
    scores = torch.full((b, n), float("nan"), device=draft_tokens.device)
    scores = torch.where(live, torch.where(slots == 0, 0.0, scores), float("-inf"))
    return DraftTree(
        torch.where(live, draft_tokens.long(), 0),
        parents,
        depths,
        positions,
        scores,
        first_child,
        next_sibling,
        mask,
        num_nodes,
    )


def parents_of_mask(mask: Tensor) -> Tensor:
    """The largest earlier slot that each row of a bool mask [B, N, N] holds, -1 for none."""
    slots = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask.tril(-1), slots, -1).amax(-1).int()


def pack_segments(
    bits: Tensor, starts: Tensor, byte_starts: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Bits to ``size`` bytes, lowest bit first; segment s goes to byte_starts[s] and on.

    ``starts`` and ``byte_starts`` are [S + 1] int64. Also returns which bytes any bit went to.
    """
    count = starts.shape[0] - 1
    bit = torch.arange(bits.shape[0], device=bits.device)
    segment = torch.searchsorted(starts.contiguous(), bit, right=True) - 1
    inside = (segment >= 0) & (segment < count)
    segment = segment.clamp(0, count - 1)
    place = 8 * byte_starts[segment] + bit - starts[segment]
    # What belongs to no segment goes behind the last byte, where nothing is read.
    place = torch.where(inside & (place < 8 * size), place, 8 * size)
    rows = torch.zeros(2, 8 * size + 1, dtype=torch.bool, device=bits.device)
    rows[0, place] = bits
    rows[1, place] = True
    packed, touched = pack_tree_mask(rows).view(torch.uint8)[:, :size]
    return packed, touched != 0
