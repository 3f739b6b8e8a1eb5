"""The speculative-decoding operators of SGLang (sgl-kernel) over ours.

Names, arguments and in-place writes are theirs, so that `register` can swap them under a running
SGLang, or a caller of theirs can import them from here::

    draft   select_top_k_tokens x steps -> organize_draft_results -> build_tree_kernel_efficient
    n-gram  reconstruct_indices_from_tree_mask
    verify  verify_tree_greedy, or tree_speculative_sampling_target_only
    mask    segment_packbits

Candidates are numbered level by level: 0 .. K-1 under the root, K + (i-1)*K*K and on for step
i >= 1. Candidate c belongs to group c // K; ``parent_list[:, group]`` is the candidate that the
group hangs under, and group 0 hangs under the root. A tree has ``draft_token_num`` slots, the root
first; ``retrieve_index`` numbers the slots of the whole batch (request * draft_token_num + slot),
links are slots of their own request. The arguments spelled ``retrieve_...`` may be given as
``retrive_...`` too. Integers may be int32 or int64, outputs keep the dtype they have.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _checks, ops
from ..expand import expand_topk
from ..flatten import flatten_tree, pack_tree_mask, unpack_tree_mask
from ..verify import verify_tree, verify_tree_coins
from ._layouts import pack_segments, parents_of_mask

_build_tree = getattr(torch.ops, ops.NAMESPACE).build_tree.default
_INTEGERS = (torch.int32, torch.int64)
_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def _both_spellings(function: _Function) -> _Function:
    """Let keyword arguments ``retrieve_...`` be spelled ``retrive_...``, as in sgl-kernel."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in [key for key in kwargs if key.startswith("retrive_")]:
            right = "retrieve_" + name.removeprefix("retrive_")
            if right in kwargs:
                raise TypeError(f"{right}: expected one spelling of the argument, got two")
            kwargs[right] = kwargs.pop(name)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@_both_spellings
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
    _checks.tensor("verified_seq_len", verified_seq_len, _INTEGERS, (None,), "[B]")
    b = verified_seq_len.shape[0]
    _checks.tensor("selected_index", selected_index, _INTEGERS, (b, n - 1), "[B, n - 1]")
    _checks.tensor("parent_list", parent_list, _INTEGERS, (b, None), "[B, topk * (depth - 1) + 1]")
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


@_both_spellings
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
    _checks.tensor("verified_seq_len", verified_seq_len, _INTEGERS, (b,), "[B]")
    mask = tree_mask.reshape(b, n, n)
    _, first_child, next_sibling, _ = _structure(parents_of_mask(mask), n)
    depths = mask.tril(-1).sum(-1)
    _write("positions", positions, verified_seq_len.long()[:, None] + depths)
    _write_links(
        retrieve_index, retrieve_next_token, retrieve_next_sibling, first_child, next_sibling
    )


@_both_spellings
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's own tokens through each tree; results are written in place.

    ::

        candidates [x, a, b]   target_predict[x] = b, [b] = c     accept_index  [0, 2]
        links x -> a, b                                           accept_token_num  1
                                                                  predicts  [b, ?, c]

    Only what the walk visits is written: ``predicts`` at the visited slots, ``accept_index`` up to
    the last of them. The rest keeps what the caller put there (SGLang: -1).

    Args:
        predicts: [all slots] int, **written** at retrieve_index of the visited slots: the target's
            token there. The last one is the bonus.
        accept_index: [B, S] int, **written**: retrieve_index of the visited slots, the root first.
            At most S - 1 drafts are accepted.
        accept_token_num: [B] int, **written**: drafts accepted, without root and bonus.
        candidates: [B, N], the token in each slot.
        retrieve_index: [B, N], where a slot lies in ``predicts`` and ``target_predict``.
        retrieve_next_token: [B, N], first child, -1 for none.
        retrieve_next_sibling: [B, N], -1 for none.
        target_predict: the target's token after each slot; [B, N] or flat.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: sgl-kernel's operator of this name; `eagle2_kernels.verify_tree` does the work.
    """
    links, max_depth = _check_verification(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
    )
    target_tokens = target_predict.reshape(-1)[retrieve_index.long()].long()
    visited, lengths, _ = verify_tree(target_tokens, candidates.long(), *links, max_depth)
    tokens = target_tokens.gather(1, visited.long().clamp(min=0))
    _write_path(predicts, accept_index, accept_token_num, retrieve_index, visited, lengths, tokens)


@_both_spellings
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    r"""Walk each tree by the caller's coins; results are written in place.

    ::

        accepted child c:  p(c1) + .. + p(c) > coin * threshold_acc   or   p(c) >= threshold_single

    The first such child in sibling order is accepted (only where p(c) > 0), else the bonus is drawn
    from what the children leave. With both thresholds 1, their default, the tokens follow the
    target's law exactly. **Thresholds below 1 are lossy**: they accept more drafts than the target
    would have chosen.

    Two things differ from sgl-kernel, by intent: a token of probability 0 is never emitted (a coin
    of exactly 0 or 1 included), and ``draft_probs`` is neither read nor written, so a buffer that
    is stale or was never zeroed does no harm.

    Args:
        predicts: [all slots] int, **written** at retrieve_index of the visited slots: the accepted
            child's token, the bonus at the last.
        accept_index: [B, S] int, **written** up to the last visited slot; see `verify_tree_greedy`.
        accept_token_num: [B] int, **written**: drafts accepted.
        candidates: [B, N], the token in each slot.
        retrieve_index: [B, N], where a slot lies in ``predicts``.
        retrieve_next_token: [B, N], first child, -1 for none.
        retrieve_next_sibling: [B, N], -1 for none.
        uniform_samples: [B, N] float, in [0, 1): the coin of a slot decides among its children.
        uniform_samples_for_final_sampling: [B] float, in [0, 1): draws the bonus.
        target_probs: [B, N, V] float, the target's distribution after each slot.
        draft_probs: ignored.
        threshold_single: in [0, 1].
        threshold_acc: in [0, 1].
        deterministic: ignored; the result is always deterministic.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: sgl-kernel's operator of this name; `eagle2_kernels.verify_tree_coins` does the work.
    """
    links, max_depth = _check_verification(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrieve_index,
        retrieve_next_token,
        retrieve_next_sibling,
    )
    if draft_probs is not None and not isinstance(draft_probs, Tensor):
        raise TypeError(
            f"draft_probs: expected a tensor or None, got {type(draft_probs).__name__}; give the "
            "thresholds by name"
        )
    for name, threshold in (("single", threshold_single), ("acc", threshold_acc)):
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold_{name}: expected a value from 0 to 1, got {threshold}")
    coins, tokens = uniform_samples, candidates.long()
    if threshold_acc < 1:
        coins = coins.double() * threshold_acc
    if threshold_single < 1:
        coins = _lower_coins(coins, tokens, *links, target_probs, threshold_single)
    visited, lengths, bonus = verify_tree_coins(
        target_probs, tokens, *links, coins, uniform_samples_for_final_sampling, max_depth
    )
    following = torch.nn.functional.pad(visited.long(), (0, 1), value=-1)[:, 1:]
    emitted = torch.where(following < 0, bonus[:, None], tokens.gather(1, following.clamp(min=0)))
    _write_path(predicts, accept_index, accept_token_num, retrieve_index, visited, lengths, emitted)


def _lower_coins(
    coins: Tensor,
    tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    target_probs: Tensor,
    threshold: float,
) -> Tensor:
    """A coin no larger than what lies before the first child whose probability is ``threshold``.

    Then `verify_tree_coins` accepts that child or an earlier one.
    """
    b, n, vocab = target_probs.shape
    request = torch.arange(b, device=tokens.device)[:, None]
    slots = torch.arange(n, device=tokens.device)
    coins = coins.double()
    before = torch.zeros_like(coins)
    child = first_child.long()
    for _ in range(n):
        there = (child >= 0) & (child < n)
        if tokens.device.type == "cpu" and not bool(there.any()):
            break
        at = torch.where(there, child, 0)
        token = tokens.gather(1, at)
        known = there & (token >= 0) & (token < vocab)
        p = target_probs[request, slots, torch.where(known, token, 0)].double()
        p = torch.where(known & (p > 0), p, 0)
        large = known & (p >= threshold)
        coins = torch.where(large, torch.minimum(coins, before), coins)
        before = before + p
        child = torch.where(there, next_sibling.long().gather(1, at), -1)
    return coins


def _check_verification(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
) -> tuple[tuple[Tensor, Tensor], int]:
    """The links as int32 and the most drafts that ``accept_index`` has room for."""
    _checks.tensor("candidates", candidates, _INTEGERS, (None, None), "[B, N]")
    b, n = candidates.shape
    for name, value in (
        ("retrieve_index", retrieve_index),
        ("retrieve_next_token", retrieve_next_token),
        ("retrieve_next_sibling", retrieve_next_sibling),
    ):
        _checks.tensor(name, value, _INTEGERS, (b, n), "[B, N]")
    _checks.tensor("predicts", predicts, _INTEGERS, (None,), "[all slots]")
    _checks.tensor("accept_index", accept_index, _INTEGERS, (b, None), "[B, S]")
    _checks.tensor("accept_token_num", accept_token_num, _INTEGERS, (b,), "[B]")
    if accept_index.shape[1] < 1 or n < 1:
        raise ValueError("accept_index: expected room for the root (S of at least 1)")
    return (retrieve_next_token.int(), retrieve_next_sibling.int()), accept_index.shape[1] - 1


def _write_path(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    retrieve_index: Tensor,
    visited: Tensor,
    lengths: Tensor,
    tokens: Tensor,
) -> None:
    """Write at the ``visited`` slots [B, S] (-1 padded) only; ``tokens`` [B, S] go to predicts."""
    reached = visited >= 0
    places = retrieve_index.long().gather(1, visited.long().clamp(min=0))
    accept_index.copy_(torch.where(reached, places, accept_index))
    accept_token_num.copy_(lengths)
    # A place that is not written stands for the root's, which gets the same token again.
    tokens = torch.where(reached, tokens, tokens[:, :1]).to(predicts.dtype)
    predicts[torch.where(reached, places, places[:, :1])] = tokens


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
        _checks.tensor(name, indptr, _INTEGERS, (None,), "[B + 1]")
        if indptr.shape[0] < batch_size + 1:
            raise ValueError(f"{name}: expected {batch_size + 1} entries, got {indptr.shape[0]}")
        starts.append(indptr.long()[: batch_size + 1])
    if not batch_size:
        return
    packed, touched = pack_segments(x, starts[0], starts[1], y.shape[0])
    y.copy_(torch.where(touched, packed, y))


def organize_draft_results(
    score_list: Sequence[Tensor],
    token_list: Sequence[Tensor],
    parents_list: Sequence[Tensor],
    num_draft_token: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best ``num_draft_token - 1`` candidates of all steps, in ascending order.

    Unlike a plain top-k, a candidate counts for no more than its parent, equal scores go to the
    smaller number and NaN is never chosen, so each candidate's parent is chosen too. Where fewer
    can be chosen, candidate 0 is repeated: one more child of the root with the same token.

    Args:
        score_list: per step [B, 1, K], then [B, K, K]: the probability of each candidate's path.
        token_list: per step [B, K], then [B, K*K].
        parents_list: per step [B, K + 1] (-1, 0, .., K-1), then [B, K]: the candidates that the
            next step's groups hang under.
        num_draft_token: slots of the tree, root included.

    Returns:
        parent_list [B, K * (steps - 1) + 1], or [B, 0] int64 for one step.
        top_scores_index int64 [B, num_draft_token - 1]: the chosen candidates.
        draft_tokens [B, num_draft_token - 1]: their tokens.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or there are fewer candidates.

    Source: SGLang's function of this name; `eagle2_kernels.build_tree` does the work.
    """
    scores = torch.cat([score.flatten(1) for score in score_list], 1)
    tokens = torch.cat(list(token_list), 1)
    b, m = scores.shape
    _checks.tensor("token_list", tokens, _INTEGERS, (b, m), "[B, candidates]")
    _checks.integer("num_draft_token", num_draft_token, 1, m + 1)
    top_k, device = token_list[0].shape[1], tokens.device
    if len(parents_list) > 1:
        parent_list = torch.cat(list(parents_list[:-1]), 1)
    else:
        parent_list = torch.empty(b, 0, dtype=torch.int64, device=device)
    candidate = torch.arange(m, device=device)
    group = candidate // top_k
    groups = (m + top_k - 1) // top_k
    if groups > max(parent_list.shape[1], 1):
        raise ValueError(
            f"parents_list: expected {groups} entries before the last step's, got "
            f"{parent_list.shape[1]}"
        )
    padded = torch.nn.functional.pad(parent_list, (0, 1), value=-1)
    parents = torch.where(group == 0, -1, padded[:, group])
    zeros = torch.zeros(b, dtype=torch.int64, device=device)
    # Its number is the candidate's token, so that the tree tells which ones it took.
    # The op compares scores, whatever their scale; the wrapper may insist on logarithms.
    chosen, *_ = _build_tree(
        zeros,
        zeros.int(),
        candidate.expand(b, m).contiguous(),
        scores.float(),
        parents.int(),
        num_draft_token,
    )
    top_scores_index = chosen[:, 1:].sort(-1).values
    return parent_list, top_scores_index, tokens.gather(1, top_scores_index)


def select_top_k_tokens(
    i: int,
    topk_p: Tensor,
    topk_index: Tensor,
    hidden_states: Tensor | None,
    scores: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The next frontier of each request: the best ``topk`` of its topk * topk new candidates.

    Args:
        i: draft step; at step 0 the candidates of the root are the frontier.
        topk_p: [B, K] at step 0, then [B * K, K]: probabilities of each parent's best tokens.
        topk_index: their ids.
        hidden_states: [B, H] at step 0, then [B * K, H], or None.
        scores: [B, K], the path probabilities of the frontier; ignored at step 0.
        topk: K.

    Returns:
        input_ids [B * K]: the tokens of the next frontier.
        hidden_states [B * K, H]: those of its parents.
        scores [B, K]: its path probabilities, in descending order; equal ones by number.
        tree_info: the scores [B, 1 or K, K], tokens [B, K or K*K] and parents [B, K + 1 or K] that
            `organize_draft_results` takes.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: SGLang's function of this name; `eagle2_kernels.expand_topk` does the choosing.
    """
    _checks.integer("i", i, 0)
    _checks.integer("topk", topk, 1)
    if i == 0:
        _checks.tensor("topk_p", topk_p, _checks.FLOATS, (None, topk), "[B, K]")
        if hidden_states is not None:
            hidden_states = hidden_states.repeat_interleave(topk, 0)
        groups = torch.arange(-1, topk, device=topk_index.device).expand(topk_p.shape[0], -1)
        return topk_index.flatten(), hidden_states, topk_p, (topk_p[:, None], topk_index, groups)
    if scores is None:
        raise TypeError("scores: expected a tensor [B, K] after step 0, got None")
    _checks.tensor("scores", scores, _checks.FLOATS, (None, topk), "[B, K]")
    b = scores.shape[0]
    products = scores[:, :, None] * topk_p.reshape(b, topk, topk)
    flat, ids = products.flatten(1), topk_index.reshape(b, topk * topk)
    # Products as the logits of one row: its best tokens are the places of the largest.
    none = torch.zeros(b, 1, dtype=torch.float32, device=flat.device)
    best = expand_topk(flat[:, None], none, topk)[0]
    if hidden_states is not None and hidden_states.shape[0] > 0:
        first = topk * torch.arange(b, device=best.device)[:, None]
        hidden_states = hidden_states[(first + best // topk).flatten()]
    numbers = best + topk * topk * (i - 1) + topk
    return (
        ids.gather(1, best).flatten(),
        hidden_states,
        flat.gather(1, best),
        (products, ids, numbers),
    )


_HOMES: dict[str, dict[str, Callable[..., Any]]] = {
    "sgl_kernel": {
        "build_tree_kernel_efficient": build_tree_kernel_efficient,
        "build_tree_kernel_efficient_cpu": build_tree_kernel_efficient,
        "reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask,
        "segment_packbits": segment_packbits,
        "tree_speculative_sampling_target_only": tree_speculative_sampling_target_only,
        "verify_tree_greedy": verify_tree_greedy,
        "verify_tree_greedy_cpu": verify_tree_greedy,
    },
    "sglang.kernels.ops.speculative.tree": {
        "build_tree_kernel_efficient": build_tree_kernel_efficient,
        "reconstruct_indices_from_tree_mask": reconstruct_indices_from_tree_mask,
        "verify_tree_greedy": verify_tree_greedy,
    },
    "sglang.srt.speculative.eagle_utils": {"organize_draft_results": organize_draft_results},
    "sglang.srt.speculative.spec_utils": {"select_top_k_tokens": select_top_k_tokens},
}
"""Where SGLang keeps its functions: the ones of a name in other modules are others."""

_replaced: list[tuple[Any, str, Any]] = []


def register() -> list[str]:
    """Put our functions in the place of SGLang's, in every module that has imported them.

    Call it once SGLang is imported, in the process that runs the model; `unregister` undoes it.

    Returns:
        What was replaced, as "module.name".

    Raises:
        ImportError: neither sglang nor sgl_kernel can be imported.
        RuntimeError: they have none of the functions at the places known here.

    Source: the modules of SGLang 0.5 (``sgl_kernel``, ``sglang.kernels.ops.speculative.tree``,
    ``sglang.srt.speculative``).
    """
    reasons: list[str] = []
    ours: dict[int, Callable[..., Any]] = {}
    for home, functions in _HOMES.items():
        try:
            module = importlib.import_module(home)
        except ImportError as error:
            reasons.append(f"{home}: {error}")
            continue
        for name, function in functions.items():
            theirs = getattr(module, name, None)
            if theirs is not None and theirs is not function:
                ours[id(theirs)] = function
    if len(reasons) == len(_HOMES):
        raise ImportError("SGLang cannot be imported here: " + "; ".join(reasons))
    done = []
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] not in ("sglang", "sgl_kernel") or module is None:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ours:
                _replaced.append((module, name, value))
                setattr(module, name, ours[id(value)])
                done.append(f"{path}.{name}")
    if not done and not _replaced:
        raise RuntimeError(
            "SGLang was imported, but has none of the functions this adapter knows at "
            + ", ".join(_HOMES)
        )
    return sorted(done)


def unregister() -> None:
    """Give SGLang its own functions back."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)
