"""FlashInfer's masks, index pointers and log-sum-exp from ours, and back.

A tree becomes the ``custom_mask`` (or ``packed_custom_mask``) of a batch prefill plan: request b
has num_nodes[b] query rows and prefix_lens[b] + num_nodes[b] keys, its mask is that many bools,
row by row, one request after another::

    wrapper.plan(qo_indptr(tree), *paged_indptr(page_table, kv_lens, page_size), ...,
                 custom_mask=custom_mask(tree, prefix_lens))

FlashInfer's log-sum-exp is base 2, that of `eagle2_kernels.tree_attention` base e.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .. import _checks
from ..flatten import unpack_tree_mask
from ..tree import DraftTree
from ._layouts import pack_segments, parents_of_mask, rebuild

_INTEGERS = (torch.int32, torch.int64)


def qo_indptr(tree: DraftTree) -> Tensor:
    """Int32 [B + 1]: where the rows of each request begin among all trees' nodes, flattened."""
    return _starts(tree.num_nodes).int()


def custom_mask(tree: DraftTree, prefix_lens: Tensor) -> Tensor:
    """Which keys each node sees, flattened as FlashInfer takes it.

    ::

        prefix 2, nodes 0 -> 1, 2     1 1 | 1 . .   1 1 | 1 1 .   1 1 | 1 . 1

    Reads the sizes to the host, as FlashInfer's plan does.

    Args:
        tree: a `DraftTree`.
        prefix_lens: [B] int, tokens in the cache before the tree.

    Returns:
        bool [sum over requests of num_nodes * (prefix_lens + num_nodes)].

    Raises:
        TypeError: ``prefix_lens`` has the wrong type or dtype.
        ValueError: ``prefix_lens`` has the wrong shape.

    Source: ``custom_mask`` of FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper.plan``.
    """
    b, n = tree.draft_tokens.shape
    _checks.tensor("prefix_lens", prefix_lens, _INTEGERS, (b,), "[B]")
    seen = unpack_tree_mask(tree.tree_mask, n)
    parts = []
    for r, (length, count) in enumerate(
        zip(prefix_lens.tolist(), tree.num_nodes.tolist(), strict=True)
    ):
        among = seen[r, :count, :count]
        parts.append(torch.cat([among.new_ones(count, length), among], 1).flatten())
    return torch.cat(parts) if parts else seen.new_zeros(0)


def packed_custom_mask(tree: DraftTree, prefix_lens: Tensor) -> tuple[Tensor, Tensor]:
    """`custom_mask` as bits, lowest first, every request beginning a byte.

    Args:
        tree: a `DraftTree`.
        prefix_lens: [B] int, tokens in the cache before the tree.

    Returns:
        packed_custom_mask uint8 [bytes], and mask_indptr int32 [B + 1], where each request begins.

    Raises:
        TypeError: ``prefix_lens`` has the wrong type or dtype.
        ValueError: ``prefix_lens`` has the wrong shape.

    Source: FlashInfer's ``segment_packbits`` with ``bitorder="little"``, whose result its plan
    takes; `eagle2_kernels.pack_tree_mask` does the work.
    """
    bits = custom_mask(tree, prefix_lens)
    counts = tree.num_nodes.long()
    return segment_packbits(bits, _starts(counts * (prefix_lens + counts)))


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "little") -> tuple[Tensor, Tensor]:
    """Pack segments of bits to bytes; every segment begins a byte.

    Args:
        x: [indptr[-1]] bool.
        indptr: [segments + 1] int, where each segment begins.
        bitorder: "little" (the lowest bit first), the order masks have; no other is here.

    Returns:
        uint8 [bytes], and int32 [segments + 1], where each segment begins.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: FlashInfer's function of this name.
    """
    _checks.tensor("x", x, torch.bool, (None,), "[bits]")
    _checks.tensor("indptr", indptr, _INTEGERS, (None,), "[segments + 1]")
    if bitorder != "little":
        raise ValueError(f'bitorder: expected "little", got {bitorder!r}')
    if not indptr.shape[0]:
        raise ValueError("indptr: expected at least one entry, got none")
    starts = indptr.long()
    byte_starts = _starts((starts[1:] - starts[:-1] + 7) // 8)
    size = int(byte_starts[-1])
    if not size:
        return x.new_zeros(0, dtype=torch.uint8), byte_starts.int()
    packed, _ = pack_segments(x, starts, byte_starts, size)
    return packed, byte_starts.int()


def from_custom_mask(
    mask: Tensor, qo_indptr: Tensor, prefix_lens: Tensor, draft_tokens: Tensor
) -> DraftTree:
    """The `DraftTree` of a flattened mask.

    Args:
        mask: bool [sum of rows * (prefix + rows)], or the packed uint8 bytes of the same bits,
            every request beginning a byte.
        qo_indptr: [B + 1] int, where the rows of each request begin.
        prefix_lens: [B] int, tokens in the cache before the tree.
        draft_tokens: [B, N] int, the token of each slot, or flat [rows of all requests].

    Returns:
        `DraftTree` with the slots as they are, N the largest number of rows unless
        ``draft_tokens`` says more; scores are NaN, which a mask does not keep.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape.
    """
    _checks.tensor("mask", mask, (torch.bool, torch.uint8), (None,), "[bits or bytes]")
    _checks.tensor("prefix_lens", prefix_lens, _INTEGERS, (None,), "[B]")
    b = prefix_lens.shape[0]
    _checks.tensor("qo_indptr", qo_indptr, _INTEGERS, (b + 1,), "[B + 1]")
    rows = qo_indptr.tolist()
    counts = [end - start for start, end in itertools.pairwise(rows)]
    flat = draft_tokens.dim() == 1
    n = max(counts, default=0) if flat else draft_tokens.shape[1]
    tokens = draft_tokens.new_zeros(b, n)
    seen = torch.zeros(b, n, n, dtype=torch.bool, device=mask.device)
    at = 0
    for r, (length, count) in enumerate(zip(prefix_lens.tolist(), counts, strict=True)):
        size = count * (length + count)
        stored = size if mask.dtype == torch.bool else (size + 7) // 8
        part = mask[at : at + stored]
        if part.shape[0] != stored:
            raise ValueError(f"mask: expected {at + stored} elements or more, got {mask.shape[0]}")
        at += stored
        bits = part if mask.dtype == torch.bool else _unpack(part)[:size]
        seen[r, :count, :count] = bits.view(count, length + count)[:, length:]
        tokens[r, :count] = draft_tokens[rows[r] : rows[r + 1]] if flat else draft_tokens[r, :count]
    num_nodes = torch.tensor(counts, dtype=torch.int32, device=mask.device)
    return rebuild(tokens, parents_of_mask(seen), num_nodes, prefix_lens)


def paged_indptr(
    page_table: Tensor, kv_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A page table as FlashInfer's index pointers.

    ::

        page_table  [7, 3, -1]      kv_lens  5      page_size  4     indptr         0 2 3
                    [2, -1, -1]              4                       indices        7 3 | 2
                                                                     last_page_len  1 4

    Args:
        page_table: [B, max_pages] int.
        kv_lens: [B] int, keys of each request, the tree's included. Reads them to the host.
        page_size: slots of a page.

    Returns:
        paged_kv_indptr int32 [B + 1], paged_kv_indices int32 [pages] and paged_kv_last_page_len
        int32 [B] (from 1 to page_size; 0 for a request without keys).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, or a request has more keys than pages.

    Source: the page table of FlashInfer's KV-cache layout.
    """
    _checks.tensor("page_table", page_table, _INTEGERS, (None, None), "[B, max_pages]")
    b, most = page_table.shape
    _checks.tensor("kv_lens", kv_lens, _INTEGERS, (b,), "[B]")
    _checks.integer("page_size", page_size, 1)
    pages = (kv_lens.long() + page_size - 1) // page_size
    _checks.refuse_where(
        pages > most, "kv_lens", f"at most {most} pages of {page_size} keys", kv_lens
    )
    used = torch.arange(most, device=page_table.device) < pages[:, None]
    last = kv_lens - (pages - 1).clamp(min=0) * page_size
    return _starts(pages).int(), page_table[used].int(), last.int()


def page_table(paged_kv_indptr: Tensor, paged_kv_indices: Tensor) -> Tensor:
    """Int32 [B, max_pages], -1 padded: FlashInfer's index pointers as `tree_attention` takes them.

    Raises:
        TypeError: an argument has the wrong type or dtype.
    """
    _checks.tensor("paged_kv_indptr", paged_kv_indptr, _INTEGERS, (None,), "[B + 1]")
    _checks.tensor("paged_kv_indices", paged_kv_indices, _INTEGERS, (None,), "[pages]")
    starts = paged_kv_indptr.long()
    counts = starts[1:] - starts[:-1]
    most = int(counts.max()) if counts.numel() else 0
    column = torch.arange(most, device=starts.device)
    used = column < counts[:, None]
    place = torch.where(used, starts[:-1, None] + column, 0)
    return torch.where(used, paged_kv_indices[place], -1).int() if most else place.int()


def lse_to_base2(lse: Tensor) -> Tensor:
    """Natural log-sum-exp, as `tree_attention` gives it, to base 2, as FlashInfer does."""
    return lse * math.log2(math.e)


def lse_from_base2(lse: Tensor) -> Tensor:
    """FlashInfer's log-sum-exp to base e, as `merge_attention_states` takes it."""
    return lse * math.log(2)


def _starts(counts: Tensor) -> Tensor:
    """Running sums with a 0 before them."""
    return torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))


def _unpack(packed: Tensor) -> Tensor:
    """The bits of bytes, lowest first."""
    words = torch.nn.functional.pad(packed, (0, -packed.shape[0] % 8)).view(torch.int64)
    return unpack_tree_mask(words, 8 * packed.shape[0])
