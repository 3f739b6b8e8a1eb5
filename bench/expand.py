"""expand_topk against what a user would write: log_softmax, topk, add, topk."""

from __future__ import annotations

from collections.abc import Iterator

import cases as table
import torch
from runner import Case

import eagle2_kernels as ek
from eagle2_kernels import reference

OPS = ("expand_topk",)


def eager(logits: torch.Tensor, beam_scores: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    """What `expand_topk` returns, as a composition of torch's operators."""
    scores, tokens = torch.log_softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)
    scores, tokens = (scores + beam_scores[..., None]).flatten(1), tokens.flatten(1)
    next_scores, beam = scores.topk(top_k, -1)
    return scores, beam, tokens.gather(1, beam), next_scores, beam // top_k


def _case(shape: str, inputs: tuple, top_k: int, **options) -> Case:
    expected = reference.expand_topk(*inputs, top_k)[4]

    def check(name, got):
        scores = got[4] if name == "ours" else got[3]
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)

    return Case(
        "expand_topk",
        shape,
        {
            "ours": lambda: ek.expand_topk(*inputs, top_k),
            "log_softmax+topk+add+topk": lambda: eager(*inputs, top_k),
        },
        check,
        bytes=inputs[0].nbytes,
        dtype=inputs[0].dtype,
        **options,
    )


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """10 rows of three vocabularies. The logits are read once.

    In turn with each other both find them, and their own code, in caches. "behind a product" times
    them as a decode step meets them: just written, by a product whose weights went through the
    caches too (SmolLM2's width, 576).
    """
    for dtype in (torch.bfloat16, torch.float32):
        for case in table.EXPAND_CASES:
            if case.vocab < 8192 or (quick and case.vocab > 8192):
                continue
            inputs = tuple(x.to(device) for x in table.expand_inputs(case, dtype))
            yield _case(case.name, inputs, case.top_k)
            if quick:
                continue
            generator = torch.Generator().manual_seed(case.vocab)
            hidden = torch.randn(case.parents, 576, generator=generator).to(device, dtype)
            weight = (torch.randn(576, case.vocab, generator=generator) / 6).to(device, dtype)
            logits = hidden @ weight
            yield _case(
                f"{case.name} behind a product",
                (logits[None], inputs[1]),
                case.top_k,
                before=lambda h=hidden, w=weight, x=logits: torch.mm(h, w, out=x),
            )
