"""Selection: the next frontier of a draft, and the candidates that become the tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import _checks, ops
from ...expand import expand_topk
from ._arguments import INTEGERS

_build_tree = getattr(torch.ops, ops.NAMESPACE).build_tree.default


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
    _checks.tensor("token_list", tokens, INTEGERS, (b, m), "[B, candidates]")
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
