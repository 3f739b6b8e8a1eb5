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


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """10 rows of three vocabularies. The logits are read once."""
    for dtype in (torch.bfloat16, torch.float32):
        for case in table.EXPAND_CASES:
            if case.vocab < 8192 or (quick and case.vocab > 8192):
                continue
            logits, beam_scores = (x.to(device) for x in table.expand_inputs(case, dtype))
            expected = reference.expand_topk(logits, beam_scores, case.top_k)[4]

            def check(name, got, expected=expected):
                scores = got[4] if name == "ours" else got[3]
                torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)

            yield Case(
                "expand_topk",
                case.name,
                {
                    "ours": lambda x=logits, b=beam_scores, k=case.top_k: ek.expand_topk(x, b, k),
                    "log_softmax+topk+add+topk": lambda x=logits, b=beam_scores, k=case.top_k: (
                        eager(x, b, k)
                    ),
                },
                check,
                bytes=logits.nbytes,
                dtype=dtype,
            )
