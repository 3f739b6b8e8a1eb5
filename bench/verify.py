"""sample_and_verify against softmax, sort, cumsum and multinomial at every node."""

from __future__ import annotations

import torch
from runner import Case

import eagle2_kernels as ek


def _eager(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    probs = torch.softmax(logits.float() / temperature, -1)
    ranked, order = probs.sort(-1, descending=True)
    keep = ranked.cumsum(-1) - ranked < top_p
    ranked = torch.where(keep, ranked, 0)
    drawn = torch.multinomial(ranked / ranked.sum(-1, keepdim=True), 1)
    return order.gather(-1, drawn)


def cases() -> list[Case]:
    """32 nodes of SmolLM2's vocabulary, T = 1, top_p 0.9, and greedy."""
    vocab, nodes = 49152, 32
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, nodes, vocab, generator=generator) * 4
    prefix = torch.tensor([100], dtype=torch.int32)
    parents = torch.tensor([[-1, *[i // 2 for i in range(nodes - 1)]]], dtype=torch.int32)
    count = torch.tensor([nodes], dtype=torch.int32)
    depths, positions, first, sibling, _ = ek.flatten_tree(parents, count, prefix)
    depth = int(depths.max())
    tokens = torch.randint(0, vocab, (1, nodes), generator=generator)
    seeds = torch.tensor([7])
    links = (tokens, first, sibling, depth, count)
    result = []
    for temperature, top_p in ((0.0, 1.0), (1.0, 0.9)):
        filters = {"temperature": temperature, "top_p": top_p}
        targets = ek.sample_tokens(logits, positions, seeds, **filters)
        expected = ek.verify_tree(targets, *links)

        def check(name, got, expected=expected):
            if name == "ours":
                for one, other in zip(got[1:], expected, strict=True):
                    assert torch.equal(one, other)

        peer = (
            (lambda: logits.argmax(-1))
            if temperature == 0
            else (lambda: _eager(logits[0], 1.0, 0.9))
        )
        result.append(
            Case(
                "sample_and_verify",
                f"V {vocab}, nodes {nodes}, T {temperature}, top_p {top_p}",
                {
                    "ours": lambda f=filters: ek.sample_and_verify(
                        logits, positions, seeds, *links, **f
                    ),
                    "every node with torch": peer,
                },
                check,
                bytes=vocab * 4,
            )
        )
    return result
