"""expand_topk against what a user would write: log_softmax, topk, add, topk."""

from __future__ import annotations

import torch
from runner import Case

import eagle2_kernels as ek


def _eager(logits: torch.Tensor, beam_scores: torch.Tensor, top_k: int) -> torch.Tensor:
    scores, _ = torch.log_softmax(logits.float(), -1).topk(top_k, -1)
    return (scores + beam_scores[..., None]).flatten(1).topk(top_k, -1).values


def cases() -> list[Case]:
    """10 rows of three vocabularies, bfloat16 and float32."""
    result = []
    for dtype in (torch.bfloat16, torch.float32):
        for vocab in (8192, 49152, 128256):
            generator = torch.Generator().manual_seed(vocab)
            logits = (torch.randn(1, 10, vocab, generator=generator) * 4).to(dtype)
            beam = torch.randn(1, 10, generator=generator)
            expected = _eager(logits, beam, 10)

            def check(name, got, expected=expected):
                scores = got[4] if name == "ours" else got
                torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)

            result.append(
                Case(
                    "expand_topk",
                    f"rows 10, V {vocab}, K 10",
                    {
                        "ours": lambda x=logits, b=beam: ek.expand_topk(x, b, 10),
                        "log_softmax+topk+add+topk": lambda x=logits, b=beam: _eager(x, b, 10),
                    },
                    check,
                    bytes=logits.nbytes,
                    dtype=dtype,
                )
            )
    return result
