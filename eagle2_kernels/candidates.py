r"""Candidates for `eagle2_kernels.build_tree` from drafters other than a tree-growing head.

Each function returns `Candidates`, parents before children, siblings distinct where the drafter's
tokens are::

    tree = build_tree(root_tokens, prefix_lens, *candidates_from_choices(choices, tokens), 64)

Without log-probabilities candidates score -1, -2, .. in order of precedence: these are places, not
nats, and a tree cut short keeps the first ones.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _checks


class Candidates(NamedTuple):
    """The nodes a tree may be built from, but the root; in the order `build_tree` takes them.

    Attributes:
        tokens: [B, M] int64.
        scores: [B, M] float32; cumulative log-probability, -inf for a candidate that is none.
        parents: [B, M] int32; the index of an earlier candidate, -1 for the root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


def candidates_from_choices(
    choices: Sequence[Sequence[int]], tokens: Tensor, log_probs: Tensor | None = None
) -> Candidates:
    r"""A static tree over the top-k tokens of each position: the paths of ranks in ``choices``.

    ::

        choices [0] [1] [0, 0] [0, 1] [1, 0]              root
                                                         /    \
        tokens  position 0:  a  b  c                    a      b
                position 1:  x  y  z                   / \     |
                                                      x   y    x

    The path [0, 1] is the node of the second token of position 1 under the first token of position
    0; it scores log_probs[b, 0, 0] + log_probs[b, 1, 1]. Candidates are ordered by (depth, place in
    ``choices``).

    Args:
        choices: paths of ranks, each path's prefixes among them, in order of precedence.
        tokens: [B, D, K] int64, the K best tokens of each of the D next positions.
        log_probs: [B, D, K] float32, their log-probabilities (nats); None: the scores are -1, -2,
            .. by place in ``choices`` (no log-probabilities).

    Returns:
        `Candidates` [B, len(choices)].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape is wrong, or a path is empty, repeated, lacks a prefix, or leaves the
            table.

    Source: the tree choices of Medusa, arXiv 2401.10774.
    """
    _checks.tensor("tokens", tokens, torch.int64, (None, None, None), "[B, D, K]")
    b, depth, top_k = tokens.shape
    if log_probs is not None:
        _checks.tensor("log_probs", log_probs, torch.float32, (b, depth, top_k), "[B, D, K]")
        _checks.same_device(tokens=tokens, log_probs=log_probs)
    paths = tuple(tuple(_integers(f"choices[{i}]", path)) for i, path in enumerate(choices))
    plan = _plan_choices(paths, depth, top_k)
    # A tensor would not do as what is kept: one made under inference or fake mode is of no use
    # outside it.
    levels, ranks, parents, order = torch.tensor(plan, dtype=torch.int64, device=tokens.device)
    if log_probs is None:
        scores = (-1.0 - order).to(torch.float32).expand(b, -1)
    else:
        own = log_probs[:, levels, ranks]
        scores = own.clone()
        # Level by level, so that a sum is rounded as build_tree_from_marginals rounds it.
        for level in range(1, depth):
            at = (levels == level).nonzero()[:, 0]
            scores[:, at] = scores[:, parents[at]] + own[:, at]
    return Candidates(
        tokens[:, levels, ranks], scores.contiguous(), parents.to(torch.int32).repeat(b, 1)
    )


@functools.lru_cache(maxsize=64)
def _plan_choices(
    paths: tuple[tuple[int, ...], ...], depth: int, top_k: int
) -> tuple[list[int], ...]:
    """Levels, ranks, parents and places in the list of the choices, by (depth, place).

    Kept between calls: an engine passes the same choices at every step.
    """
    order = sorted(range(len(paths)), key=lambda i: (len(paths[i]), i))
    place: dict[tuple[int, ...], int] = {(): -1}
    for c, i in enumerate(order):
        path = paths[i]
        if not 1 <= len(path) <= depth or not all(0 <= rank < top_k for rank in path):
            raise ValueError(
                f"choices[{i}]: expected 1 to {depth} ranks from 0 to {top_k - 1}, got {list(path)}"
            )
        if path in place:
            raise ValueError(f"choices[{i}]: expected distinct paths, got {list(path)} again")
        if path[:-1] not in place:
            raise ValueError(
                f"choices[{i}]: expected the prefix {list(path[:-1])} of {list(path)} among the "
                "choices"
            )
        place[path] = c
    return (
        [len(paths[i]) - 1 for i in order],
        [paths[i][-1] for i in order],
        [place[paths[i][:-1]] for i in order],
        order,
    )


def candidates_from_chain(
    tokens: Tensor, log_probs: Tensor | None = None, lengths: Tensor | None = None
) -> Candidates:
    """A chain: each drafted token under the one before it.

    ::

        tokens  a  b  c          root - a - b - c
        parents -1 0  1

    Args:
        tokens: [B, D] int64, the drafted continuation.
        log_probs: [B, D] float32, log-probability of each token after those before it; None: the
            scores are -1, -2, .. by depth (no log-probabilities).
        lengths: [B] int32, tokens drafted for each request; None: all D.

    Returns:
        `Candidates` [B, D].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape.

    Source: speculative decoding, arXiv 2211.17192.
    """
    _checks.tensor("tokens", tokens, torch.int64, (None, None), "[B, D]")
    b, depth = tokens.shape
    _checks.same_device(tokens=tokens, log_probs=log_probs, lengths=lengths)
    place = torch.arange(depth, device=tokens.device)
    if log_probs is None:
        scores = (-1.0 - place).to(torch.float32).repeat(b, 1)
    else:
        _checks.tensor("log_probs", log_probs, torch.float32, (b, depth), "[B, D]")
        scores = log_probs.cumsum(1)
    if lengths is not None:
        _checks.tensor("lengths", lengths, torch.int32, (b,), "[B]")
        scores = torch.where(place < lengths[:, None], scores, -math.inf)
    return Candidates(tokens, scores, (place - 1).to(torch.int32).repeat(b, 1))


def candidates_from_continuations(
    continuations: Sequence[Sequence[Sequence[int]]],
    weights: Sequence[Sequence[float]] | None = None,
    *,
    device: torch.device | str | None = None,
) -> Candidates:
    r"""Guessed continuations of each request, merged into a trie: n-grams, prompt lookup, a cache.

    ::

        a b c                root
        a b d               /    \
        e           2/3    a      e    1/3
                           |
                    2/3    b
                          / \
                  1/3    c   d    1/3

    A node scores log(weight of the continuations through it / weight of all): the chance that one
    drawn by its weight goes that way. Candidates are ordered by (depth, first appearance).

    Args:
        continuations: for each request, any number of token id sequences, of any lengths.
        weights: for each request, a positive number per continuation; None: 1 each.
        device: where the tensors go.

    Returns:
        `Candidates` [B, M]; M is the largest trie of the batch, the others are padded with -inf.

    Raises:
        TypeError: ``continuations`` lacks a level (those of one request go in a list of one), or a
            continuation is not a sequence of ids.
        ValueError: the weights are not one positive finite number per continuation.

    Source: token trees, SpecInfer, arXiv 2305.09781.
    """
    if weights is not None and len(weights) != len(continuations):
        raise ValueError(f"weights: expected {len(continuations)} requests, got {len(weights)}")
    rows: list[tuple[list[int], list[float], list[int]]] = []
    for r, sequences in enumerate(continuations):
        if not isinstance(sequences, Iterable) or not all(
            isinstance(sequence, Iterable) for sequence in sequences
        ):
            raise TypeError(
                f"continuations[{r}]: expected a list of token id sequences, got {sequences!r}"
            )
        own = [1.0] * len(sequences) if weights is None else list(weights[r])
        if len(own) != len(sequences) or not all(0 < w < math.inf for w in own):
            raise ValueError(
                f"weights[{r}]: expected {len(sequences)} positive finite numbers, got {own}"
            )
        ids = [_integers(f"continuations[{r}][{i}]", s) for i, s in enumerate(sequences)]
        rows.append(_merge(ids, own))
    m = max((len(tokens) for tokens, _, _ in rows), default=0)
    table = [
        (tokens + [0] * pad, scores + [-math.inf] * pad, parents + [-1] * pad)
        for tokens, scores, parents in rows
        for pad in [m - len(tokens)]
    ]
    shape = (len(rows), m)
    return Candidates(
        torch.tensor([row[0] for row in table], dtype=torch.int64, device=device).view(shape),
        torch.tensor([row[1] for row in table], dtype=torch.float32, device=device).view(shape),
        torch.tensor([row[2] for row in table], dtype=torch.int32, device=device).view(shape),
    )


def _integers(name: str, values: Iterable[Any]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise TypeError(f"{name}: expected a sequence of integers, got {values!r}") from None


def _merge(
    sequences: Sequence[Sequence[int]], weights: Sequence[float]
) -> tuple[list[int], list[float], list[int]]:
    """(tokens, scores, parents) of the trie of one request's continuations."""
    node: dict[tuple[int, int], int] = {}
    depth: list[int] = []
    through: list[float] = []
    for sequence, weight in zip(sequences, weights, strict=True):
        at = -1
        for level, token in enumerate(sequence):
            key = (at, token)
            if key not in node:
                node[key] = len(node)
                depth.append(level)
                through.append(0.0)
            at = node[key]
            through[at] += weight
    keys, total = list(node), sum(weights)
    order = sorted(range(len(keys)), key=depth.__getitem__)
    place = {i: c for c, i in enumerate(order)} | {-1: -1}
    return (
        [keys[i][1] for i in order],
        [math.log(min(through[i] / total, 1.0)) for i in order],
        [place[keys[i][0]] for i in order],
    )


def prompt_lookup(
    token_ids: Sequence[int],
    *,
    length: int = 8,
    limit: int = 8,
    max_ngram: int = 3,
    min_ngram: int = 1,
) -> list[list[int]]:
    """What followed the last tokens where they occurred before: continuations without a model.

    ::

        token_ids   the cat sat on the cat           max_ngram = 2, length = 2
                    ^^^^^^^                          "the cat" was followed by [sat, on]

    The longest n-grams come first, then the latest occurrences; an occurrence counts once, at its
    longest match.

    Args:
        token_ids: one request's tokens so far, the tree's root last.
        length: tokens per continuation, at most.
        limit: continuations, at most.
        max_ngram: longest suffix of ``token_ids`` to look for.
        min_ngram: shortest one.

    Returns:
        Continuations, for `candidates_from_continuations`; none when nothing recurs.

    Raises:
        TypeError: a bound or a token is not an int.
        ValueError: a bound is out of range.

    Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
    """
    _checks.integer("length", length, 1)
    _checks.integer("limit", limit, 1)
    _checks.integer("min_ngram", min_ngram, 1)
    _checks.integer("max_ngram", max_ngram, min_ngram)
    ids = _integers("token_ids", token_ids)
    found: dict[int, list[int]] = {}
    for n in range(min(max_ngram, len(ids) - 1), min_ngram - 1, -1):
        suffix = ids[-n:]
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == suffix:
                found.setdefault(end, ids[end : end + length])
                if len(found) == limit:
                    return list(found.values())
    return list(found.values())
