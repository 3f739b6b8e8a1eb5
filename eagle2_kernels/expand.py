"""One level of the draft tree: from the head's logits to the next frontier.

The loop calls, for each level, `extend_draft_tree` (where do this level's candidates hang, and what
does the frontier see), the head, then `expand_topk` (which tokens, how good, which go on); after
the last level `eagle2_kernels.build_tree` keeps the best of all levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, ops

_expand_topk = getattr(torch.ops, ops.NAMESPACE).expand_topk.default
_extend_draft_tree = getattr(torch.ops, ops.NAMESPACE).extend_draft_tree.default


def expand_topk(
    logits: Tensor,
    beam_scores: Tensor,
    top_k: int,
    draft_to_target: Tensor | None = None,
    *,
    validate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """score(p, id) = beam_scores[p] + log_softmax(logits[p])[id]: top-k per parent, then of all.

    ::

        parent p=0 (score -0.1)        parent p=1 (score -2.0)      top_k = 2, beam = [0, 2]
          |-- "cat"  -0.3   index 0      |-- "sat"  -2.1  index 2
          `-- "dog"  -2.5   index 1      `-- "ran"  -4.0  index 3

    Inside a parent candidates are ordered by (logit descending, id ascending); the beam takes the
    best ``top_k`` of all P * K by (score descending, index ascending). NaN logits count as -inf, a
    +inf logit as the largest finite value; a -inf candidate has score -inf and token 0, and so have
    the places past the vocabulary when ``top_k`` exceeds it. Logits are read once.

    Args:
        logits: [B, P, V] float32, float64, float16 or bfloat16, any strides. P is 1 at the first
            level, then K.
        beam_scores: [B, P] float32, cumulative log-probability (nats) of each parent; 0 for a root.
        top_k: K, candidates kept per parent and width of the next frontier.
        draft_to_target: [V] int64, the target's id of each draft id (absolute, no two alike); None
            when the vocabularies are one.
        validate: check the values of ``beam_scores`` and ``draft_to_target`` too (reads them back
            to the host).

    Returns:
        candidate_tokens int64 [B, P*K]: target ids.
        candidate_scores float32 [B, P*K]: cumulative log-probabilities.
        beam int64 [B, K]: the frontier, as indices into the candidates.
        beam_tokens int64 [B, K] and beam_scores float32 [B, K]: the candidates at ``beam``.
        beam_rows int32 [B, K]: ``beam // K``, the parent row whose hidden state goes on.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or requires grad in grad mode.

    Source: EAGLE-2, arXiv 2406.16858, section 4.1 (expansion phase).
    """
    _checks.refuse_grad(logits=logits, beam_scores=beam_scores)
    return _checks.call(
        _expand_topk, _check_expand_topk, validate, logits, beam_scores, top_k, draft_to_target
    )


def _check_expand_topk(
    logits: Tensor,
    beam_scores: Tensor,
    top_k: int,
    draft_to_target: Tensor | None,
    *,
    values: bool,
) -> None:
    _checks.tensor("logits", logits, _checks.FLOATS, (None, None, None), "[B, P, V]")
    b, p, v = logits.shape
    if p < 1 or v < 1:
        raise ValueError(f"logits: expected P and V of at least 1, got shape {tuple(logits.shape)}")
    _checks.tensor("beam_scores", beam_scores, torch.float32, (b, p), "[B, P]")
    _checks.integer("top_k", top_k, 1, 2**31 - 1)
    if draft_to_target is not None:
        _checks.tensor("draft_to_target", draft_to_target, torch.int64, (v,), "[V]")
    _checks.same_device(logits=logits, beam_scores=beam_scores, draft_to_target=draft_to_target)
    if values:
        _checks.log_probabilities("beam_scores", beam_scores)
    if values and draft_to_target is not None:
        _checks.vocabulary_map("draft_to_target", draft_to_target, 2**31)


def extend_draft_tree(
    candidate_parents: Tensor,
    draft_mask: Tensor,
    beam: Tensor,
    level: int,
    *,
    validate: bool = False,
) -> Tensor:
    """Hang level ``level``'s candidates under the frontier, and say what the frontier sees.

    ::

        level 0   candidates 0 .. K-1                 under the root (-1)
        level 1   candidates K .. K+K*K-1             K under each of beam(level 0)
        level 2   the next K*K                        K under each of beam(level 1)

        frontier at level i, entry j = draft slot (i-1)*K + j
        next_draft_mask[j] = draft_mask[its parent's row] | its own bit

    Call it before the head runs at ``level``, with the ``beam`` that `expand_topk` gave at the
    level before (ignored at level 0, where the frontier is the root: it has no draft slot, and the
    mask is returned as it came). The root's KV belongs to the prefix as far as the head is
    concerned, so the mask has bits for drafted slots only.

    Args:
        candidate_parents: [B, M] int32, **mutated**: the entries of this level are written.
            M is at least K + level * K*K.
        draft_mask: [B, K, W] int64, the mask of the level before; zeros at level 0 and 1. W words
            hold level * K bits.
        beam: [B, K] int64, indices into the previous level's candidates.
        level: 0 for the candidates of the root.
        validate: check that the entries of ``beam`` are in range and differ (reads it back).

    Returns:
        next_draft_mask int64 [B, K, W], to be used as the head's tree mask at ``level``.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: EAGLE-2, arXiv 2406.16858, section 4.1 (expansion phase).
    """
    return _checks.call(
        _extend_draft_tree,
        _check_extend_draft_tree,
        validate,
        candidate_parents,
        draft_mask,
        beam,
        level,
    )


def _check_extend_draft_tree(
    candidate_parents: Tensor, draft_mask: Tensor, beam: Tensor, level: int, *, values: bool
) -> None:
    _checks.tensor("draft_mask", draft_mask, torch.int64, (None, None, None), "[B, K, W]")
    b, k, words = draft_mask.shape
    if k < 1:
        raise ValueError(f"draft_mask: expected K of at least 1, got {tuple(draft_mask.shape)}")
    _checks.tensor("beam", beam, torch.int64, (b, k), "[B, K]")
    _checks.tensor("candidate_parents", candidate_parents, torch.int32, (b, None), "[B, M]")
    _checks.written(candidate_parents=candidate_parents)
    _checks.integer("level", level, 0, 2**63 - 1)
    _checks.same_device(candidate_parents=candidate_parents, draft_mask=draft_mask, beam=beam)
    needed, m = k + level * k * k, candidate_parents.shape[1]
    if m < needed:
        raise ValueError(
            f"candidate_parents: expected at least {needed} candidates for level {level} with "
            f"top_k {k}, got {m}"
        )
    if level * k > 64 * words:
        raise ValueError(
            f"draft_mask: expected at least {(level * k + 63) // 64} words for level {level} with "
            f"top_k {k}, got {words}"
        )
    if values and level > 0:
        _checks.values_in("beam", beam, 0, (k if level == 1 else k * k) - 1)
        _checks.distinct_in_rows("beam", beam)
