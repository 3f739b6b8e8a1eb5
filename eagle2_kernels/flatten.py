"""From candidates of all levels to the flat tree the target runs: re-rank, links, mask words.

`build_tree` ends the drafting half of a step; the other functions serve trees from any source.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, ops
from .tree import DraftTree

_ops = getattr(torch.ops, ops.NAMESPACE)
_build_tree = _ops.build_tree.default
_build_tree_from_marginals = _ops.build_tree_from_marginals.default
_flatten_tree = _ops.flatten_tree.default
_retrieve_indices = _ops.retrieve_indices.default
_pack_tree_mask = _ops.pack_tree_mask.default
_unpack_tree_mask = _ops.unpack_tree_mask.default


def build_tree(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    max_nodes: int,
    limits: Tensor | None = None,
    *,
    validate: bool = False,
) -> DraftTree:
    """Keep the ``max_nodes - 1`` candidates of largest min(own score, parent's effective score).

    ::

        candidate   0     1     2     3     4          max_nodes = 4
        parent     -1    -1     0     0     1
        score     -.2   -1.  -.3  -2.   -1.1          slot   0     1    2    3
        kept        x     x     x                     from root    0    1    2
                                                      parent -1    0    0    1

    A candidate counts for no more than its parent, so the kept set always contains its own
    ancestors; ties go to the smaller index. NaN counts as -inf; -inf candidates, and those whose
    parent is neither -1 nor an earlier candidate, are never kept: the tree shrinks and
    ``num_nodes`` says so. Slots are ordered by (depth, candidate index), the root first.

    Args:
        root_tokens: [B] int64, the last committed token of each request.
        prefix_lens: [B] int32, tokens in the cache; the root's position.
        candidate_tokens: [B, M] int64.
        candidate_scores: [B, M] float32, cumulative log-probability (nats).
        candidate_parents: [B, M] int32, candidate indices, -1 for the root; parents come before
            their children. M = K + (max_depth - 1) * K*K for an EAGLE tree, but any list will do.
        max_nodes: N, slots of the flat tree, root included.
        limits: [B, 2] int32 (slots, depth) bounds of each request: room left in its cache, tokens
            it still wants. No slots: the request is inactive, ``num_nodes`` 0.
        validate: check by value too that parents come first, siblings differ, scores are
            log-probabilities and no bound is negative (reads them back to the host).

    Returns:
        A `DraftTree` of N slots. Shapes do not depend on the limits: the rest is padding.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or requires grad in grad mode.

    Source: EAGLE-2, arXiv 2406.16858, section 4.2 (reranking phase), with the parent's score as a
    bound so that ties cannot orphan a node.
    """
    _checks.refuse_grad(candidate_scores=candidate_scores)
    return DraftTree(
        *_checks.call(
            _build_tree,
            _check_build_tree,
            validate,
            root_tokens,
            prefix_lens,
            candidate_tokens,
            candidate_scores,
            candidate_parents,
            max_nodes,
            limits,
        )
    )


def _check_build_tree(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    max_nodes: int,
    limits: Tensor | None,
    *,
    values: bool,
) -> None:
    _checks.tensor("root_tokens", root_tokens, torch.int64, (None,), "[B]")
    b = root_tokens.shape[0]
    _checks.tensor("prefix_lens", prefix_lens, torch.int32, (b,), "[B]")
    _checks.tensor("candidate_tokens", candidate_tokens, torch.int64, (b, None), "[B, M]")
    m = candidate_tokens.shape[1]
    _checks.tensor("candidate_scores", candidate_scores, torch.float32, (b, m), "[B, M]")
    _checks.tensor("candidate_parents", candidate_parents, torch.int32, (b, m), "[B, M]")
    _checks.integer("max_nodes", max_nodes, 1, 2**30 - 1)
    if limits is not None:
        _checks.tensor("limits", limits, torch.int32, (b, 2), "[B, 2]")
    _checks.same_device(
        root_tokens=root_tokens,
        prefix_lens=prefix_lens,
        candidate_tokens=candidate_tokens,
        candidate_scores=candidate_scores,
        candidate_parents=candidate_parents,
        limits=limits,
    )
    if not values:
        return
    _checks.values_in("prefix_lens", prefix_lens, 0, 2**31 - 1)
    _check_limits(limits)
    _checks.log_probabilities("candidate_scores", candidate_scores)
    live = (candidate_scores > float("-inf")).tolist()
    for r in range(b):
        tokens, parents = candidate_tokens[r].tolist(), candidate_parents[r].tolist()
        seen: dict[tuple[int, int], int] = {}
        for c in range(m):
            if not live[r][c]:
                continue
            if not -1 <= parents[c] < c:
                raise ValueError(
                    f"candidate_parents[{r}, {c}]: expected -1 or an earlier candidate, "
                    f"got {parents[c]}"
                )
            twin = seen.setdefault((parents[c], tokens[c]), c)
            if twin != c:
                raise ValueError(
                    f"candidate_tokens[{r}, {c}]: expected siblings to differ, got token "
                    f"{tokens[c]} of candidate {twin}, which has the same parent"
                )


def _check_limits(limits: Tensor | None) -> None:
    """A bound below 0 works as 0, but is a sum gone wrong."""
    if limits is not None:
        _checks.values_in("limits", limits, 0, 2**31 - 1)


def build_tree_from_marginals(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    max_nodes: int,
    limits: Tensor | None = None,
    *,
    validate: bool = False,
) -> DraftTree:
    r"""The ``max_nodes - 1`` most probable prefixes when every position is drafted on its own.

    ::

        position    1           2                       root
        tokens    a    b      x    y                   /    \
        log p   -.1  -2.4   -.4  -1.2          -0.1   a      b   -2.4
                                                     / \
        max_nodes = 5                         -0.5  x   y  -1.3

    A block drafter gives each position one distribution that knows nothing of the tokens chosen
    before it, so a prefix of ranks (r_1, .., r_d) scores log_probs[0, r_1] + .. +
    log_probs[d-1, r_d], summed in float32 from the root. Prefixes are taken best-first: taking one
    opens its next sibling and its first child; ties go to the smaller depth, then the smaller rank,
    then the parent that was taken earlier. Slots are ordered by (depth, order of being taken).

    An entry counts for no more than 0 and no more than the entries before it in its level, NaN for
    -inf; a prefix of -inf is never taken: the tree shrinks and ``num_nodes`` says so.

    Args:
        root_tokens: [B] int64, the last committed token of each request.
        prefix_lens: [B] int32, tokens in the cache; the root's position.
        tokens: [B, D, K] int64, the K best tokens of each of the D next positions.
        log_probs: [B, D, K] float32, their log-probabilities (nats), descending in each position.
        max_nodes: N, slots of the flat tree, root included.
        limits: [B, 2] int32 (slots, depth) bounds of each request, as in `build_tree`.
        validate: check order, sign and distinct tokens of each position and the limits too (reads
            them back to the host).

    Returns:
        A `DraftTree` of N slots. Shapes do not depend on the limits: the rest is padding.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or requires grad in grad mode.

    Source: the tree of DDTree, arXiv 2604.12989.
    """
    _checks.refuse_grad(log_probs=log_probs)
    return DraftTree(
        *_checks.call(
            _build_tree_from_marginals,
            _check_build_tree_from_marginals,
            validate,
            root_tokens,
            prefix_lens,
            tokens,
            log_probs,
            max_nodes,
            limits,
        )
    )


def _check_build_tree_from_marginals(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    max_nodes: int,
    limits: Tensor | None,
    *,
    values: bool,
) -> None:
    _checks.tensor("root_tokens", root_tokens, torch.int64, (None,), "[B]")
    b = root_tokens.shape[0]
    _checks.tensor("prefix_lens", prefix_lens, torch.int32, (b,), "[B]")
    _checks.tensor("tokens", tokens, torch.int64, (b, None, None), "[B, D, K]")
    shape = tuple(tokens.shape)
    _checks.tensor("log_probs", log_probs, torch.float32, shape, "[B, D, K]")
    _checks.integer("max_nodes", max_nodes, 1, 2**30 - 1)
    if limits is not None:
        _checks.tensor("limits", limits, torch.int32, (b, 2), "[B, 2]")
    _checks.same_device(
        root_tokens=root_tokens,
        prefix_lens=prefix_lens,
        tokens=tokens,
        log_probs=log_probs,
        limits=limits,
    )
    if not values:
        return
    _checks.values_in("prefix_lens", prefix_lens, 0, 2**31 - 1)
    _check_limits(limits)
    _checks.log_probabilities("log_probs", log_probs)
    live = torch.where(log_probs.isnan(), float("-inf"), log_probs)
    rises = (live[..., 1:] > live[..., :-1]).nonzero()
    if len(rises):
        r, d, k = rises[0].tolist()
        raise ValueError(
            f"log_probs[{r}, {d}, {k + 1}]: expected descending order in a position, got "
            f"{log_probs[r, d, k + 1].item()} after {log_probs[r, d, k].item()}"
        )
    same = (tokens[..., :, None] == tokens[..., None, :]) & (live > float("-inf"))[..., None]
    twins = same.tril(-1).nonzero()
    if len(twins):
        r, d, k, earlier = twins[0].tolist()
        raise ValueError(
            f"tokens[{r}, {d}, {k}]: expected distinct tokens in a position, got "
            f"{tokens[r, d, k].item()}, which entry {earlier} has too"
        )


def flatten_tree(
    parents: Tensor, num_nodes: Tensor, prefix_lens: Tensor, *, validate: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Depths, positions, links and mask words of trees given by their parents, in any slot order.

    ::

        parents  -1  0  0  1        depth  0  1  1  2       row 3 sees slots 3, 1, 0
           0                        first_child   1  3 -1 -1
          / \                       next_sibling -1  2 -1 -1
         1   2                      tree_mask    0b0001 0b0011 0b0101 0b1011
         |
         3

    Slot 0 is the root when its parent is -1; every other slot belongs to the tree when its walk
    over parents reaches slot 0 inside ``num_nodes``. A slot that does not (a cycle, a parent out of
    range, a second root) gets depth -1, position ``prefix_lens``, no links and an empty mask row.

    Args:
        parents: [B, N] int32.
        num_nodes: [B] int32, slots in use; the rest is padding.
        prefix_lens: [B] int32, the root's position.
        validate: raise for a slot that does not reach the root (reads the parents back).

    Returns:
        depths int32 [B, N], position_ids int64 [B, N], first_child and next_sibling int32 [B, N]
        (-1: none; siblings in ascending slot order), tree_mask int64 [B, N, ceil(N / 64)].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: tree attention, SpecInfer, arXiv 2305.09781, as used in EAGLE-2, arXiv 2406.16858.
    """
    return _checks.call(
        _flatten_tree, _check_flatten_tree, validate, parents, num_nodes, prefix_lens
    )


def _check_flatten_tree(
    parents: Tensor, num_nodes: Tensor, prefix_lens: Tensor, *, values: bool
) -> None:
    _checks.parents(parents, num_nodes, values=values)
    _checks.tensor("prefix_lens", prefix_lens, torch.int32, (parents.shape[0],), "[B]")
    _checks.same_device(parents=parents, num_nodes=num_nodes, prefix_lens=prefix_lens)
    if values:
        _checks.values_in("prefix_lens", prefix_lens, 0, 2**31 - 1)


def retrieve_indices(
    parents: Tensor, num_nodes: Tensor, max_depth: int, *, validate: bool = False
) -> Tensor:
    r"""One row of slots per leaf, from the root down: the candidate paths of each tree.

    ::

           0            parents -1 0 0 1,  max_depth 2
          / \
         1   2          [[0, 2, -1],
         |               [0, 1, 3],
         3               [-1, -1, -1], [-1, -1, -1]]

    Leaves are slots under the root without children, in ascending order. Rows and columns that are
    not needed hold -1; a path longer than ``max_depth + 1`` is cut to its first slots.

    Args:
        parents: [B, N] int32.
        num_nodes: [B] int32, slots in use.
        max_depth: depth of the deepest node that is asked for.
        validate: raise for a slot that does not reach the root (reads the parents back).

    Returns:
        int64 [B, N, max_depth + 1].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source: `retrieve_indices` of the EAGLE and Medusa (arXiv 2401.10774) reference code.
    """
    return _checks.call(
        _retrieve_indices, _check_retrieve_indices, validate, parents, num_nodes, max_depth
    )


def _check_retrieve_indices(
    parents: Tensor, num_nodes: Tensor, max_depth: int, *, values: bool
) -> None:
    _checks.parents(parents, num_nodes, values=values)
    _checks.integer("max_depth", max_depth, 0, 2**31 - 2)


def pack_tree_mask(mask: Tensor, *, validate: bool = False) -> Tensor:
    """Bit j % 64 of word j // 64 is ``mask[..., j]``; the bits past the last column are 0.

    Args:
        mask: [..., M] bool.
        validate: accepted for symmetry; every value is legal.

    Returns:
        int64 [..., ceil(M / 64)].

    Raises:
        TypeError: ``mask`` is not a bool tensor.
        ValueError: ``mask`` has no dimension.

    Source: the layout of `DraftTree.tree_mask`.
    """
    return _checks.call(_pack_tree_mask, _check_pack_tree_mask, validate, mask)


def _check_pack_tree_mask(mask: Tensor, *, values: bool) -> None:
    if isinstance(mask, Tensor) and mask.dim() == 0:
        raise ValueError("mask: expected at least 1 dimension, got 0")
    rank = mask.dim() if isinstance(mask, Tensor) else 1
    _checks.tensor("mask", mask, torch.bool, (None,) * rank, "[..., M]")


def unpack_tree_mask(words: Tensor, num_keys: int, *, validate: bool = False) -> Tensor:
    """The inverse of `pack_tree_mask`: ``mask[..., j]`` is bit j % 64 of word j // 64.

    Args:
        words: [..., W] int64.
        num_keys: columns wanted, at most 64 * W.
        validate: accepted for symmetry; every value is legal.

    Returns:
        bool [..., num_keys].

    Raises:
        TypeError: ``words`` is not an int64 tensor.
        ValueError: ``num_keys`` is more than the words hold.

    Source: the layout of `DraftTree.tree_mask`.
    """
    return _checks.call(_unpack_tree_mask, _check_unpack_tree_mask, validate, words, num_keys)


def _check_unpack_tree_mask(words: Tensor, num_keys: int, *, values: bool) -> None:
    if isinstance(words, Tensor) and words.dim() == 0:
        raise ValueError("words: expected at least 1 dimension, got 0")
    rank = words.dim() if isinstance(words, Tensor) else 1
    _checks.tensor("words", words, torch.int64, (None,) * rank, "[..., W]")
    _checks.integer("num_keys", num_keys, 0, 64 * words.shape[-1])
