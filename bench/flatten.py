"""build_tree against the oracle in plain PyTorch and Python."""

from __future__ import annotations

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


def cases() -> list[Case]:
    """EAGLE-2's published shape and a large one."""
    result = []
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
