"""build_tree and build_tree_from_marginals against the oracle and Python's heapq."""

from __future__ import annotations

import heapq

import torch
from runner import Case

import eagle2_kernels as ek
from eagle2_kernels import reference


def _candidates(top_k: int, depth: int) -> tuple[torch.Tensor, ...]:
    """An EAGLE tree's candidate list from random logits."""
    generator = torch.Generator().manual_seed(depth)
    parents = torch.empty(1, top_k + (depth - 1) * top_k**2, dtype=torch.int32)
    mask = torch.zeros(1, top_k, (top_k * depth + 63) // 64, dtype=torch.int64)
    beam, scores = torch.zeros(1, top_k, dtype=torch.int64), torch.zeros(1, 1)
    tokens, all_scores = [], []
    for level in range(depth):
        mask = ek.extend_draft_tree(parents, mask, beam, level)
        logits = torch.randn(1, 1 if level == 0 else top_k, 1000, generator=generator) * 3
        t, s, beam, _, scores, _ = ek.expand_topk(logits, scores, top_k)
        tokens.append(t)
        all_scores.append(s)
    return torch.cat(tokens, 1), torch.cat(all_scores, 1), parents


def _heap_prefixes(log_probs: list[list[float]], count: int) -> list[tuple[float, int, int, int]]:
    """Best-first with heapq: (-score, depth, rank, parent) of each prefix taken."""
    heap, taken = [(-log_probs[0][0], 1, 0, -1)], []
    while heap and len(taken) < count:
        best = heapq.heappop(heap)
        taken.append(best)
        cost, depth, rank, parent = best
        if rank + 1 < len(log_probs[0]):
            above = taken[parent][0] if parent >= 0 else 0.0
            heapq.heappush(heap, (above - log_probs[depth - 1][rank + 1], depth, rank + 1, parent))
        if depth < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth][0], depth + 1, 0, len(taken) - 1))
    return taken


def _heap_tree(root, prefix_lens, tokens, log_probs, n: int) -> ek.DraftTree:
    """What one would write without the op: the search in Python, the structure by flatten_tree."""
    taken = _heap_prefixes(log_probs[0].tolist(), n - 1)
    order = sorted(range(len(taken)), key=lambda i: (taken[i][1], i))
    slot = {-1: 0} | {i: s for s, i in enumerate(order, start=1)}
    ids = tokens[0].tolist()
    drafted = [ids[taken[i][1] - 1][taken[i][2]] for i in order]
    parents = torch.tensor([[-1, *(slot[taken[i][3]] for i in order)]], dtype=torch.int32)
    num_nodes = torch.tensor([n], dtype=torch.int32)
    depths, positions, child, sibling, mask = ek.flatten_tree(parents, num_nodes, prefix_lens)
    return ek.DraftTree(
        torch.tensor([[int(root), *drafted]]),
        parents,
        depths,
        positions,
        torch.tensor([[0.0, *(-taken[i][0] for i in order)]]),
        child,
        sibling,
        mask,
        num_nodes,
    )


def _marginals() -> list[Case]:
    result = []
    for depth, top_k, nodes in ((8, 8, 16), (16, 16, 64), (16, 32, 512)):
        generator = torch.Generator().manual_seed(nodes)
        logits = torch.randn(1, depth, 1000, generator=generator) * 3
        log_probs, tokens = logits.log_softmax(-1).topk(top_k)
        root, prefix_lens = torch.tensor([1]), torch.tensor([9], dtype=torch.int32)
        args = (root, prefix_lens, tokens, log_probs, nodes)
        expected = reference.build_tree_from_marginals(*args)

        def check(name, got, expected=expected):
            for i, (one, other) in enumerate(zip(got, expected, strict=False)):
                close = torch.allclose(one, other, atol=1e-5) if i == 4 else torch.equal(one, other)
                assert close, name

        result.append(
            Case(
                "build_tree_from_marginals",
                f"depth {depth}, top_k {top_k}, nodes {nodes}",
                {
                    "ours": lambda args=args: ek.build_tree_from_marginals(*args),
                    "heapq": lambda args=args: _heap_tree(*args),
                },
                check,
                bytes=depth * top_k * 12
                + nodes * (8 * 3 + 4 * 5)
                + nodes * ((nodes + 63) // 64) * 8,
            )
        )
    return result


def cases() -> list[Case]:
    """EAGLE-2's published shape and a large one; block drafters' shapes."""
    result = _marginals()
    for top_k, depth, nodes in ((4, 4, 16), (10, 6, 60), (32, 8, 512)):
        args = (
            torch.tensor([1]),
            torch.tensor([9], dtype=torch.int32),
            *_candidates(top_k, depth),
            nodes,
        )
        expected = reference.build_tree(*args)

        def check(name, got, expected=expected):
            for one, other in zip(got, expected, strict=False):
                assert torch.equal(one, other), name

        candidates = args[2].numel()
        result.append(
            Case(
                "build_tree",
                f"top_k {top_k}, depth {depth}, nodes {nodes}",
                {
                    "ours": lambda args=args: ek.build_tree(*args),
                    "reference.py": lambda args=args: reference.build_tree(*args),
                },
                check,
                bytes=candidates * 16 + nodes * (8 * 3 + 4 * 5) + nodes * ((nodes + 63) // 64) * 8,
            )
        )
    return result
