"""A tree as the ``mask_mod`` of PyTorch's FlexAttention, and back.

FlexAttention asks of every query and key whether the one sees the other. Queries are the slots of
the tree, keys the slots of the cache: the prefix, then the tree::

    mask_mod = tree_mask_mod(tree, prefix_lens)
    block_mask = create_block_mask(mask_mod, B, None, N, max_kv_len, device=...)
    flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

A row that sees nothing (padding) gives 0, as in `eagle2_kernels.tree_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _checks
from ..tree import DraftTree
from ._layouts import parents_of_mask, rebuild

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_INTEGERS = (torch.int32, torch.int64)


def tree_mask_mod(tree: DraftTree, prefix_lens: Tensor, *, window: int | None = None) -> MaskMod:
    """mask_mod(b, h, q, kv): does slot q of request b see cache slot kv?

    ::

        kv < prefix_lens[b], or bit kv - prefix_lens[b] of tree_mask[b, q]
        and, with a window, position(q) - position(kv) < window, positions by depth

    The tensors are kept by reference: refill them in place and the same function serves the next
    step (a BlockMask made from it does not).

    Args:
        tree: of N slots.
        prefix_lens: [B] int, tokens in the cache before the tree.
        window: keys further back than this are not seen, as in `tree_attention`.

    Returns:
        A function for ``create_block_mask`` and ``create_mask``; every head sees the same.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: ``torch.nn.attention.flex_attention``.
    """
    b, n = tree.draft_tokens.shape
    _checks.tensor("prefix_lens", prefix_lens, _INTEGERS, (b,), "[B]")
    if window is not None:
        _checks.integer("window", window, 1)
    words, depths = tree.tree_mask, tree.depths

    def mask_mod(request: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        prefix = prefix_lens[request].long()
        slot = key - prefix
        at = slot.clamp(0, n - 1)
        row = query.clamp(0, n - 1)
        own = (words[request, row, row // 64] >> (row % 64)) & 1
        bit = (words[request, row, at // 64] >> (at % 64)) & 1
        # Padding, whose own bit is not set, sees nothing, and so do queries behind the tree.
        seen = ((slot < 0) | ((bit != 0) & (slot < n))) & (own != 0) & (query < n)
        if window is not None:
            position = torch.where(slot < 0, slot, depths[request, at])
            seen = seen & (depths[request, row] - position < window)
        return seen

    return mask_mod


def from_mask_mod(
    mask_mod: MaskMod, draft_tokens: Tensor, num_nodes: Tensor, prefix_lens: Tensor
) -> DraftTree:
    """The `DraftTree` whose slots see each other as ``mask_mod`` says (head 0).

    Args:
        mask_mod: a function as `tree_mask_mod` gives it; an ancestor's slot is the smaller one.
        draft_tokens: [B, N] int, the token in each slot.
        num_nodes: [B] int, slots in use.
        prefix_lens: [B] int, tokens in the cache before the tree.

    Returns:
        `DraftTree` with the slots as they are; scores are NaN, which a mask does not keep.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape.
    """
    _checks.tensor("draft_tokens", draft_tokens, _INTEGERS, (None, None), "[B, N]")
    b, n = draft_tokens.shape
    _checks.tensor("prefix_lens", prefix_lens, _INTEGERS, (b,), "[B]")
    device = draft_tokens.device
    request, query, slot = torch.meshgrid(
        *(torch.arange(size, device=device) for size in (b, n, n)), indexing="ij"
    )
    key = prefix_lens.long()[:, None, None] + slot
    mask = mask_mod(request, torch.zeros_like(request), query, key)
    return rebuild(draft_tokens, parents_of_mask(mask), num_nodes, prefix_lens)
