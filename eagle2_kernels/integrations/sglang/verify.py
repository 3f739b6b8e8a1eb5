"""Verification: which drafts the target accepts, written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks
from ...verify import verify_tree, verify_tree_coins
from ._arguments import INTEGERS, both_spellings


@both_spellings
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


@both_spellings
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
    _checks.tensor("candidates", candidates, INTEGERS, (None, None), "[B, N]")
    b, n = candidates.shape
    for name, value in (
        ("retrieve_index", retrieve_index),
        ("retrieve_next_token", retrieve_next_token),
        ("retrieve_next_sibling", retrieve_next_sibling),
    ):
        _checks.tensor(name, value, INTEGERS, (b, n), "[B, N]")
    _checks.tensor("predicts", predicts, INTEGERS, (None,), "[all slots]")
    _checks.tensor("accept_index", accept_index, INTEGERS, (b, None), "[B, S]")
    _checks.tensor("accept_token_num", accept_token_num, INTEGERS, (b,), "[B]")
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
