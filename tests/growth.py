"""Growing a draft tree with the operators, for tests: a head is a function of paths."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

import eagle2_kernels as e2


def i32(values) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def candidate_count(top_k: int, max_depth: int) -> int:
    return top_k + (max_depth - 1) * top_k * top_k


def grow(
    head: Callable[[int, list[list[int]]], Tensor], top_k: int, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, scores, parents) of all candidates, [1, M] each.

    ``head(level, paths)`` gives logits [len(paths), V]; paths are the frontier's tokens after the
    root, in beam order.
    """
    m = candidate_count(top_k, max_depth)
    parents = torch.full((1, m), -7, dtype=torch.int32)
    mask = torch.zeros(1, top_k, (max_depth * top_k + 63) // 64, dtype=torch.int64)
    tokens, scores = [], []
    beam = torch.zeros(1, top_k, dtype=torch.int64)
    beam_scores, paths = torch.zeros(1, 1), [[]]
    for level in range(max_depth):
        mask = e2.extend_draft_tree(parents, mask, beam, level)
        logits = head(level, paths)[None]
        t, s, beam, beam_tokens, beam_scores, rows = e2.expand_topk(logits, beam_scores, top_k)
        tokens.append(t)
        scores.append(s)
        paths = [
            [*paths[r], x] for r, x in zip(rows[0].tolist(), beam_tokens[0].tolist(), strict=True)
        ]
    return torch.cat(tokens, 1), torch.cat(scores, 1), parents


def hashed_head(vocab: int, seed: int, scale: float = 2.0) -> Callable[[int, list], Tensor]:
    """Random logits that depend on the path alone."""

    def head(level: int, paths: list[list[int]]) -> Tensor:
        rows = []
        for path in paths:
            key = seed
            for token in path:
                key = (key * 1_000_003 + token + 1) % (2**62)
            generator = torch.Generator().manual_seed(key)
            rows.append(torch.randn(vocab, generator=generator) * scale)
        return torch.stack(rows)

    return head


def random_parents(n: int, generator: torch.Generator, start: int = 1) -> Tensor:
    """A random tree over n slots: slot 0 is the root, parents come first."""
    rows = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(start, n)]
    return i32(rows[:n])


def all_trees(n: int) -> list[tuple[int, ...]]:
    """Parents of every tree of n slots whose parents come first."""
    return [(-1, *rest) for rest in itertools.product(*(range(i) for i in range(1, n)))]
