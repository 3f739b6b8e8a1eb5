"""process_logits and token_logprobs against dense torch, the way serving engines write them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from runner import Case

import eagle2_kernels as ek

OPS = ("process_logits", "token_logprobs")
VOCAB, NODES = 49152, 32


def _penalties(
    logits: torch.Tensor, in_prompt: torch.Tensor, counts: torch.Tensor, paths: torch.Tensor
) -> torch.Tensor:
    """``paths`` [N, D]: each node's path tokens, padded with id V."""
    total = torch.nn.functional.pad(counts, (0, 1)).repeat(logits.shape[1], 1)
    total = total.scatter_add_(1, paths, torch.ones_like(paths, dtype=total.dtype))[:, :-1]
    repeated = torch.where(logits > 0, logits / 1.5, logits * 1.5)
    edited = torch.where(in_prompt | (total > 0), repeated, logits)
    return edited - 0.5 * total - 0.25 * (total > 0)


def _edited(logits: torch.Tensor, tree: tuple, history: dict) -> torch.Tensor:
    """Ours on a copy, which the loop takes too."""
    copy = logits.clone()
    ek.process_logits(copy, *tree, **history)
    return copy


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """32 nodes of SmolLM2's vocabulary behind 1 000 prompt and 500 generated tokens."""
    generator = torch.Generator().manual_seed(0)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, shape, generator=generator).to(device)

    logits = (torch.randn(1, NODES, VOCAB, generator=generator) * 4).to(device)
    up = [-1, *[i // 2 for i in range(NODES - 1)]]
    draft = ids(1, NODES)
    tree = (draft, torch.tensor([up], dtype=torch.int32, device=device))
    mask = torch.zeros(1, (VOCAB + 31) // 32, dtype=torch.int32, device=device)
    counts = torch.zeros(1, VOCAB, dtype=torch.int32, device=device)
    prompt, output = ids(1, 1000), ids(1, 500)
    ek.mark_tokens(mask, prompt)
    ek.count_tokens(counts, output)
    history = {
        "prompt_mask": mask,
        "output_counts": counts,
        "repetition_penalty": torch.tensor([1.5], device=device),
        "frequency_penalty": torch.tensor([0.5], device=device),
        "presence_penalty": torch.tensor([0.25], device=device),
    }
    in_prompt = torch.zeros(VOCAB, dtype=torch.bool, device=device)
    in_prompt[prompt[0]] = True
    paths = torch.full((NODES, 8), VOCAB, device=device)
    for node in range(NODES):
        slot, depth = node, 0
        while slot > 0:
            paths[node, depth] = draft[0, slot]
            slot, depth = up[slot], depth + 1
    slots = torch.arange(5, dtype=torch.int32, device=device)[None]
    tokens = ids(1, 5)

    def log_softmax() -> torch.Tensor:
        return torch.log_softmax(logits[0, slots[0].long()], -1).gather(1, tokens.view(5, 1))

    expected = _penalties(logits, in_prompt, counts, paths)
    logprobs = log_softmax().view(1, 5)

    def check_edited(name: str, got: object) -> None:
        torch.testing.assert_close(got, expected)

    def check_logprobs(name: str, got: torch.Tensor) -> None:
        torch.testing.assert_close(got.view(1, 5), logprobs, rtol=1e-5, atol=1e-5)

    shape = f"V{VOCAB}-N{NODES}"
    yield Case(
        "process_logits",
        f"{shape}, 1500 tokens of history, copy included",
        {
            "ours": lambda: _edited(logits, tree, history),
            "dense torch": lambda: _penalties(logits, in_prompt, counts, paths),
        },
        check_edited,
        bytes=2 * logits.nbytes + counts.nbytes + mask.nbytes,
    )
    yield Case(
        "token_logprobs",
        f"{shape}, 5 rows",
        {
            "ours": lambda: ek.token_logprobs(logits, slots, tokens),
            "gather+log_softmax+gather": log_softmax,
        },
        check_logprobs,
        bytes=5 * VOCAB * 4,
    )
