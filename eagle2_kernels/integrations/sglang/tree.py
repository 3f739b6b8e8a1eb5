"""Masks, positions and links of trees, written in place."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ... import _checks
from ...flatten import flatten_tree, pack_tree_mask, unpack_tree_mask
from .._layouts import pack_segments, parents_of_mask
from ._arguments import INTEGERS, both_spellings


class TreeMaskMode(IntEnum):
    """What `build_tree_kernel_efficient` writes to ``tree_mask``; n is ``draft_token_num``.

    Attributes:
        FULL_MASK: bool, for each request n rows of its seq_len + n keys, one request after another.
            The columns of the prefix belong to the caller and are not written.
        QLEN_ONLY: bool [B, n, n].
        QLEN_ONLY_BITPACKING: for each slot the same number of bytes, bit j % 8 of byte j // 8 being
            column j. SGLang takes 1 byte for up to 8 slots, 2 for up to 16 and 4 for up to 32; any
            larger item will do, and more slots need one.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


@both_spellings
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = TreeMaskMode.FULL_MASK,
) -> None:
    """Mask, positions and links of the tree of the selected candidates, written in place.

    ::

        topk 2, selected [0, 1, 2], parent_list [-1, 0, 1]       slot 0      root, position seq_len
          candidate 0, 1: group 0, under the root                slot 1 2    candidates 0 and 1
          candidate 2: group 1, under candidate 0                slot 3      candidate 2, under 1

    A candidate whose parent is not among those of its own request stays without a place in the
    links, and a walk towards the root ends there or after ``depth`` steps; its mask row holds the
    root and the slots walked over, its position counts them. So a malformed tree (NaN scores, a
    cycle) ends bounded, and no verifier reaches what hangs in the air.

    Args:
        parent_list: [B, topk * (depth - 1) + 1], the candidate that each group hangs under.
        selected_index: [B, draft_token_num - 1], the candidates of slots 1 and on.
        verified_seq_len: [B], tokens in the cache; the root's position.
        tree_mask: **written**, see `TreeMaskMode`; contiguous.
        positions: [B * draft_token_num], **written**: verified_seq_len + depth.
        retrieve_index: [B, draft_token_num], **written**: request * draft_token_num + slot.
        retrieve_next_token: [B, draft_token_num], **written**: first child, -1 for none.
        retrieve_next_sibling: [B, draft_token_num], **written**: -1 for none.
        topk: K.
        depth: draft steps, the depth of the deepest slot.
        draft_token_num: slots, root included.
        tree_mask_mode: see `TreeMaskMode`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: sgl-kernel's operator of this name; `eagle2_kernels.flatten_tree` does the work.
    """
    _checks.integer("topk", topk, 1)
    _checks.integer("depth", depth, 1)
    _checks.integer("draft_token_num", draft_token_num, 1)
    n = draft_token_num
    _checks.tensor("verified_seq_len", verified_seq_len, INTEGERS, (None,), "[B]")
    b = verified_seq_len.shape[0]
    _checks.tensor("selected_index", selected_index, INTEGERS, (b, n - 1), "[B, n - 1]")
    _checks.tensor("parent_list", parent_list, INTEGERS, (b, None), "[B, topk * (depth - 1) + 1]")
    mode = TreeMaskMode(tree_mask_mode)

    group = torch.div(selected_index.long(), topk, rounding_mode="floor")
    listed = (group > 0) & (group < parent_list.shape[1])
    # One more column, so that a list without groups (one step) can be gathered from.
    padded = torch.nn.functional.pad(parent_list.long(), (0, 1), value=-1)
    candidate = padded.gather(1, torch.where(listed, group, 0))
    is_parent = candidate[:, :, None] == selected_index.long()[:, None, :]
    slot = torch.where(listed, _first(is_parent) + 1, 0)
    # No slot of its own request: -2, which is neither a slot nor the root's mark.
    above = torch.where(group == 0, 0, torch.where(slot > 0, slot, -2))
    parents = torch.nn.functional.pad(above, (1, 0), value=-1).int()

    depths, first_child, next_sibling, mask = _structure(parents, depth)
    _write("positions", positions, verified_seq_len.long()[:, None] + depths)
    _write_links(
        retrieve_index, retrieve_next_token, retrieve_next_sibling, first_child, next_sibling
    )
    _write_mask(tree_mask, mask, verified_seq_len, mode)


def _structure(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Depths, first_child, next_sibling [B, n] and bool mask [B, n, n] of possibly broken trees."""
    b, n = parents.shape
    nothing = torch.zeros(b, dtype=torch.int32, device=parents.device)
    depths, _, first_child, next_sibling, words = flatten_tree(parents, nothing + n, nothing)
    mask = unpack_tree_mask(words, n)
    broken = (depths < 0) | (depths > max_depth)
    # On a GPU the question would be a synchronisation, so there the answer is always yes.
    if parents.device.type == "cpu" and not bool(broken.any()):
        return depths, first_child, next_sibling, mask
    slots = torch.arange(n, device=parents.device)
    walk = slots.expand(b, n)
    on_way = walk > 0
    mask = (slots == 0).expand(b, n, n).clone()
    depths = torch.zeros_like(parents)
    for _ in range(max_depth):
        mask |= on_way[..., None] & (walk[..., None] == slots)
        depths += on_way
        up = parents.long().gather(1, walk)
        on_way = on_way & (up > 0)
        walk = torch.where(on_way, up, 0)
    linked = (parents >= 0)[:, None, :]
    first_child = _first(linked & (parents[:, None, :] == slots[:, None]))
    later = slots > slots[:, None]
    next_sibling = _first(linked & later & (parents[:, None, :] == parents[:, :, None]))
    return depths, first_child, next_sibling, mask


def _first(mask: Tensor) -> Tensor:
    """Index of the first True of each row, -1 where there is none."""
    if mask.shape[-1] == 0:
        return torch.full(mask.shape[:-1], -1, dtype=torch.int64, device=mask.device)
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)


def _write(name: str, out: Tensor, value: Tensor) -> None:
    """``out[...] = value`` for an output whose shape may be flat."""
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: expected a tensor to write to, got {type(out).__name__}")
    if out.numel() != value.numel():
        raise ValueError(f"{name}: expected {value.numel()} elements, got shape {tuple(out.shape)}")
    _checks.written(**{name: out})
    out.copy_(value.reshape(out.shape))


def _write_links(
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
) -> None:
    b, n = first_child.shape
    every = torch.arange(b * n, device=first_child.device).view(b, n)
    _write("retrieve_index", retrieve_index, every)
    _write("retrieve_next_token", retrieve_next_token, first_child)
    _write("retrieve_next_sibling", retrieve_next_sibling, next_sibling)


def _write_mask(tree_mask: Tensor, mask: Tensor, seq_lens: Tensor, mode: TreeMaskMode) -> None:
    b, n, _ = mask.shape
    if not isinstance(tree_mask, Tensor):
        raise TypeError(f"tree_mask: expected a tensor, got {type(tree_mask).__name__}")
    if not tree_mask.is_contiguous():
        raise ValueError("tree_mask: expected a contiguous tensor")
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        needed = (n + 7) // 8
        items = tree_mask.view(-1).view(torch.uint8)
        size = items.numel() // max(b * n, 1)
        if items.numel() != size * b * n or (b and size < needed):
            raise ValueError(
                f"tree_mask: expected {b * n} items of the same size, {needed} bytes or more, got "
                f"{items.numel()} bytes"
            )
        packed = pack_tree_mask(mask).view(torch.uint8)
        spare = max(size - packed.shape[-1], 0)
        items.copy_(torch.nn.functional.pad(packed, (0, spare))[..., :size].reshape(-1))
        return
    if tree_mask.dtype != torch.bool:
        raise TypeError(f"tree_mask: expected dtype bool, got {str(tree_mask.dtype)[6:]}")
    if mode == TreeMaskMode.QLEN_ONLY:
        _write("tree_mask", tree_mask, mask)
        return
    width = seq_lens.long() + n
    start = n * (width.cumsum(0) - width)
    column = torch.arange(n, device=mask.device)
    row = start[:, None] + column * width[:, None] + seq_lens[:, None]
    tree_mask.view(-1)[row[..., None] + column] = mask


@both_spellings
def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees given by their masks, written in place.

    ::

        mask  1 . . .      parent = the largest earlier slot of a row       -1  0  0  1
              1 1 . .      depth = its number of earlier slots               0  1  1  2
              1 . 1 .
              1 1 . 1

    Args:
        tree_mask: bool, batch_size * n * n elements, n being ``draft_token_num``; a row holds the
            slot and its ancestors, which have smaller numbers.
        verified_seq_len: [B], the root's position.
        positions: [B * n], **written**.
        retrieve_index: [B, n], **written**.
        retrieve_next_token: [B, n], **written**.
        retrieve_next_sibling: [B, n], **written**.
        batch_size: B.
        draft_token_num: n.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: sgl-kernel's operator of this name, for n-gram drafts; `eagle2_kernels.flatten_tree`
    does the work.
    """
    b, n = batch_size, draft_token_num
    _checks.integer("batch_size", b, 0)
    _checks.integer("draft_token_num", n, 1)
    if not isinstance(tree_mask, Tensor) or tree_mask.dtype != torch.bool:
        got = (
            str(tree_mask.dtype)[6:] if isinstance(tree_mask, Tensor) else type(tree_mask).__name__
        )
        raise TypeError(f"tree_mask: expected a bool tensor, got {got}")
    if tree_mask.numel() != b * n * n:
        raise ValueError(f"tree_mask: expected {b} * {n} * {n} elements, got {tree_mask.numel()}")
    _checks.tensor("verified_seq_len", verified_seq_len, INTEGERS, (b,), "[B]")
    mask = tree_mask.reshape(b, n, n)
    _, first_child, next_sibling, _ = _structure(parents_of_mask(mask), n)
    depths = mask.tril(-1).sum(-1)
    _write("positions", positions, verified_seq_len.long()[:, None] + depths)
    _write_links(
        retrieve_index, retrieve_next_token, retrieve_next_sibling, first_child, next_sibling
    )


def segment_packbits(
    x: Tensor,
    input_indptr: Tensor,
    output_indptr: Tensor,
    y: Tensor,
    batch_size: int,
) -> None:
    """Pack segments of bits to bytes, lowest bit first; every segment begins a byte.

    ::

        x  1 0 1 1 0 | 1 1     input_indptr [0, 5, 7], output_indptr [0, 1, 2]     y  13 | 3

    Args:
        x: [bits] bool.
        input_indptr: [>= B + 1] int, where each segment begins in ``x``.
        output_indptr: [>= B + 1] int, where each begins in ``y``; segment b takes
            ceil(length / 8) bytes.
        y: [bytes] uint8, **written** where a segment has a bit.
        batch_size: B.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: sgl-kernel's operator of this name; `eagle2_kernels.pack_tree_mask` does the work.
    """
    _checks.tensor("x", x, torch.bool, (None,), "[bits]")
    _checks.tensor("y", y, torch.uint8, (None,), "[bytes]")
    _checks.integer("batch_size", batch_size, 0)
    starts = []
    for name, indptr in (("input_indptr", input_indptr), ("output_indptr", output_indptr)):
        _checks.tensor(name, indptr, INTEGERS, (None,), "[B + 1]")
        if indptr.shape[0] < batch_size + 1:
            raise ValueError(f"{name}: expected {batch_size + 1} entries, got {indptr.shape[0]}")
        starts.append(indptr.long()[: batch_size + 1])
    if not batch_size:
        return
    packed, touched = pack_segments(x, starts[0], starts[1], y.shape[0])
    y.copy_(torch.where(touched, packed, y))
