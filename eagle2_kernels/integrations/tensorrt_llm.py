"""The tree tensors of TensorRT-LLM from a `DraftTree`, and back.

TensorRT-LLM takes the mask as int32 words (bit j % 32 of word j // 32 is slot j), positions
relative to the root, and slots numbered inside their own request, all int32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..flatten import retrieve_indices, unpack_tree_mask
from ..tree import DraftTree
from ._layouts import parents_of_mask, rebuild


class TreeTensors(NamedTuple):
    """A batch of trees as TensorRT-LLM's attention and verification read it; all int32.

    Attributes:
        packed_mask: [B, N, words] (``spec_decoding_packed_mask``); rows behind a tree are 0.
        position_offsets: [B, N] (``spec_decoding_position_offsets``), depths.
        generation_lengths: [B] (``spec_decoding_generation_lengths``), slots in use.
        retrieve_index: [B, N], the slot itself; 0 behind a tree.
        retrieve_next_token: [B, N], first child, -1 for none.
        retrieve_next_sibling: [B, N], -1 for none.
    """

    packed_mask: Tensor
    position_offsets: Tensor
    generation_lengths: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


def to_tensorrt_llm(tree: DraftTree, words_per_row: int | None = None) -> TreeTensors:
    """The tensors of a tree.

    ::

        tree_mask row  1 0 1 1 | 33 slots     packed_mask row  0b1101, 0     ceil(33 / 32) words

    Args:
        tree: of N slots.
        words_per_row: int32 words of a mask row, where the engine's buffer is wider than
            ceil(N / 32); the rest is 0.

    Returns:
        `TreeTensors`.

    Raises:
        TypeError: ``words_per_row`` is not an int.
        ValueError: ``words_per_row`` is too small.

    Source: TensorRT-LLM's ``dynamicTreeKernels.h`` and the ``spec_decoding_*`` attention inputs.
    """
    n = tree.draft_tokens.shape[1]
    needed = (n + 31) // 32
    if words_per_row is not None:
        _checks.integer("words_per_row", words_per_row, needed)
    # The low half of a little-endian int64 word comes first.
    words = tree.tree_mask.contiguous().view(torch.int32)[..., :needed]
    spare = 0 if words_per_row is None else words_per_row - needed
    slots = torch.arange(n, dtype=torch.int32, device=words.device)
    return TreeTensors(
        torch.nn.functional.pad(words, (0, spare)).contiguous(),
        tree.depths,
        tree.num_nodes,
        torch.where(slots < tree.num_nodes[:, None], slots, 0),
        tree.first_child,
        tree.next_sibling,
    )


def draft_paths(tree: DraftTree, max_path_len: int) -> Tensor:
    """Int32 [B, N, max_path_len]: the slots of each root-to-leaf path, -1 padded.

    Args:
        tree: of N slots.
        max_path_len: slots of the longest path, root included; longer ones are cut.

    Raises:
        TypeError: ``max_path_len`` is not an int.
        ValueError: ``max_path_len`` is below 1.

    Source: the ``draft_paths`` of TensorRT-LLM's Medusa and EAGLE decoding;
    `eagle2_kernels.retrieve_indices` does the work.
    """
    _checks.integer("max_path_len", max_path_len, 1)
    return retrieve_indices(tree.parents, tree.num_nodes, max_path_len - 1).int()


def from_tensorrt_llm(
    packed_mask: Tensor, generation_lengths: Tensor, draft_tokens: Tensor, prefix_lens: Tensor
) -> DraftTree:
    """The `DraftTree` of packed mask rows.

    Args:
        packed_mask: [B, N, words] int32; a slot's ancestors have smaller numbers.
        generation_lengths: [B] int, slots in use.
        draft_tokens: [B, N] int, the token in each slot.
        prefix_lens: [B] int, tokens in the cache; the root's position.

    Returns:
        `DraftTree` with the slots as they are; scores are NaN, which the engine does not keep.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape.
    """
    integers = (torch.int32, torch.int64)
    _checks.tensor("draft_tokens", draft_tokens, integers, (None, None), "[B, N]")
    b, n = draft_tokens.shape
    _checks.tensor("packed_mask", packed_mask, torch.int32, (b, n, None), "[B, N, words]")
    words = packed_mask.shape[2]
    if words < (n + 31) // 32:
        raise ValueError(f"packed_mask: expected {(n + 31) // 32} words or more, got {words}")
    even = torch.nn.functional.pad(packed_mask, (0, words % 2)).contiguous()
    mask = unpack_tree_mask(even.view(torch.int64), n)
    return rebuild(draft_tokens, parents_of_mask(mask), generation_lengths, prefix_lens)
