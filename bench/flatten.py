"""build_tree and build_tree_from_marginals against the oracle and Python's heapq."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import cases as table
import torch
from runner import Case

import eagle2_kernels as ek
from eagle2_kernels import reference

OPS = ("build_tree", "build_tree_from_marginals")


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
    rows = [[-1, *(slot[taken[i][3]] for i in order)]]
    parents = torch.tensor(rows, dtype=torch.int32, device=root.device)
    num_nodes = torch.tensor([n], dtype=torch.int32, device=root.device)
    depths, positions, child, sibling, mask = ek.flatten_tree(parents, num_nodes, prefix_lens)
    return ek.DraftTree(
        torch.tensor([[int(root), *drafted]], device=root.device),
        parents,
        depths,
        positions,
        torch.tensor([[0.0, *(-taken[i][0] for i in order)]], device=root.device),
        child,
        sibling,
        mask,
        num_nodes,
    )


def _tree_bytes(nodes: int) -> int:
    return nodes * (8 * 3 + 4 * 5) + nodes * ((nodes + 63) // 64) * 8


def _marginals(device: torch.device, *, quick: bool) -> Iterator[Case]:
    for depth, top_k, nodes in ((8, 8, 16), (16, 16, 64), (16, 32, 512))[: 1 if quick else None]:
        generator = torch.Generator().manual_seed(nodes)
        logits = torch.randn(1, depth, 1000, generator=generator) * 3
        log_probs, tokens = (x.to(device) for x in logits.log_softmax(-1).topk(top_k))
        root = torch.tensor([1], device=device)
        prefix_lens = torch.tensor([9], dtype=torch.int32, device=device)
        args = (root, prefix_lens, tokens, log_probs, nodes)
        expected = reference.build_tree_from_marginals(*args)

        def check(name, got, expected=expected):
            for i, (one, other) in enumerate(zip(got, expected, strict=False)):
                if i == 4:
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
                else:
                    assert torch.equal(one, other), f"{name}: {ek.DraftTree._fields[i]} differs"

        yield Case(
            "build_tree_from_marginals",
            f"K{top_k}-D{depth}-N{nodes}",
            {
                "ours": lambda args=args: ek.build_tree_from_marginals(*args),
                "heapq": lambda args=args: _heap_tree(*args),
            },
            check,
            bytes=depth * top_k * 12 + _tree_bytes(nodes),
        )


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """EAGLE-2's published shape, the default and a large one; block drafters' shapes."""
    yield from _marginals(device, quick=quick)
    for case in table.DRAFT_CASES[: 2 if quick else None]:
        if case.top_k == 1:
            continue
        args = (
            torch.tensor([1], device=device),
            torch.tensor([9], dtype=torch.int32, device=device),
            *(x.to(device) for x in table.draft_candidates(case)),
            case.max_nodes,
        )
        expected = reference.build_tree(*args)

        def check(name, got, expected=expected):
            for field, one, other in zip(ek.DraftTree._fields, got, expected, strict=False):
                assert torch.equal(one, other), f"{name}: {field} differs"

        yield Case(
            "build_tree",
            case.name,
            {
                "ours": lambda args=args: ek.build_tree(*args),
                "reference.py": lambda args=args: reference.build_tree(*args),
            },
            check,
            bytes=case.candidates * 16 + _tree_bytes(case.max_nodes),
        )
