"""Verification against torch at every node.

sample_and_verify and sample_tokens against softmax, sort, cumsum and multinomial; verify_tree_coins
against a walk in Python over cumulative sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import cases as table
import torch
from runner import Case

import eagle2_kernels as ek
from eagle2_kernels import reference

OPS = ("sample_tokens", "sample_and_verify", "verify_tree_coins")


def eager_samples(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """A token for every row of [N, V], as serving code without a fused kernel draws it."""
    if temperature == 0:
        return logits.argmax(-1)
    probs = torch.softmax(logits / temperature, -1)
    if top_p == 1:
        return torch.multinomial(probs, 1)
    ranked, order = probs.sort(-1, descending=True)
    ranked = torch.where(ranked.cumsum(-1) - ranked < top_p, ranked, 0)
    return order.gather(-1, torch.multinomial(ranked, 1))


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """Binary trees in which the oracle's draws lead to a leaf of the last level."""
    for case in table.VERIFY_CASES:
        if quick != (case.vocab == 1000):
            continue
        x = _on(table.verify_inputs(case), device)
        draw = (x.logits, x.position_ids, x.seeds)
        links = (x.draft_tokens, x.first_child, x.next_sibling, x.max_depth, x.num_nodes)
        torch_name = "argmax" if case.temperature == 0 else "softmax+multinomial"
        if case.top_p < 1:
            torch_name = "softmax+sort+cumsum+multinomial"

        def peer(case=case, logits=x.logits[0]):
            return eager_samples(logits, case.temperature, case.top_p)

        def check_walk(name, got, x=x):
            if name == "ours":
                assert torch.equal(got[0], x.emitted) and got[1][0].tolist() == x.path

        def check_draws(name, got, x=x):
            if name == "ours":
                assert torch.equal(got[:, x.path], x.emitted)

        yield Case(
            "sample_and_verify",
            case.name,
            {
                "ours": lambda d=draw, t=links, f=x.filters: ek.sample_and_verify(*d, *t, **f),
                f"{torch_name}, all nodes": peer,
            },
            check_walk,
            bytes=len(x.path) * case.vocab * 4,
        )
        yield Case(
            "sample_tokens",
            case.name,
            {
                "ours": lambda d=draw, f=x.filters: ek.sample_tokens(*d, **f),
                torch_name: peer,
            },
            check_draws,
            bytes=x.logits.nbytes,
        )
        if quick or (case.temperature == 1 and case.top_p == 1):
            yield _coins(case, x, links)


def _coins(case: table.VerifyCase, x: table.VerifyInputs, links: tuple) -> Case:
    probs = x.logits.softmax(-1)
    coins = torch.full(x.draft_tokens.shape, 0.5, device=probs.device)
    final = torch.tensor([0.5], device=probs.device)
    args = (probs, *links[:3], coins, final, x.max_depth, x.num_nodes)
    expected = reference.verify_tree_coins(*args)

    def check(name, got):
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other), name

    return Case(
        "verify_tree_coins",
        case.name,
        {
            "ours": lambda: ek.verify_tree_coins(*args),
            "walk with cumsum": lambda: _eager_coins(*args[:-1]),
        },
        check,
        bytes=case.vocab * 4,
    )


def _eager_coins(
    probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    max_depth: int,
) -> tuple[torch.Tensor, ...]:
    """The links read to the host; the residual distribution is made where the walk ends."""
    tokens, first, sibling = (t[0].tolist() for t in (draft_tokens, first_child, next_sibling))
    slot, path = 0, [0]
    while True:
        children, child = [], first[slot] if len(path) <= max_depth else -1
        while child >= 0:
            children.append(child)
            child = sibling[child]
        ids = torch.tensor([tokens[c] for c in children], dtype=torch.int64, device=probs.device)
        above = (probs[0, slot, ids].double().cumsum(0) > coins[0, slot]).nonzero()
        if len(above) == 0:
            break
        slot = children[int(above[0])]
        path.append(slot)
    rest = probs[0, slot].double()
    rest[ids] = 0
    cumulative = rest.cumsum(0)
    bonus = torch.searchsorted(cumulative, final_coins.double() * cumulative[-1], right=True)
    index = torch.full((1, max_depth + 1), -1, dtype=torch.int32, device=probs.device)
    index[0, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return index, index.new_tensor([len(path) - 1]), bonus


def _on(x: table.VerifyInputs, device: torch.device) -> table.VerifyInputs:
    def move(value):
        if isinstance(value, dict):
            return {key: move(one) for key, one in value.items()}
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return table.VerifyInputs(**{key: move(value) for key, value in vars(x).items()})
