"""Tree, plain and Hugging Face decoding of one prompt, side by side, and what identical means.

Speeds are medians of rounds in which the three take turns, so that a slow spell of the machine
meets all of them. Tokens are compared first; a difference is explained by its margin: greedy
decoding may legally part ways where the two best logits lie closer than twice the largest
difference between the logits that the two forwards compute there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .decode import EagleDecoder
    from .models.target import TargetModel


@dataclass(frozen=True)
class Row:
    """One way of decoding: median seconds of a whole call, prompt included."""

    name: str
    seconds: float
    new_tokens: int
    target_forwards: int
    accept_length: float

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over wall time."""
        return self.new_tokens / self.seconds


@dataclass(frozen=True)
class Difference:
    """Where two greedy decodings part ways.

    ``margin`` is the gap between the two best logits of the one-row forward there, ``logit_error``
    the largest difference between its logits and those of the tree-sized forward.
    """

    index: int
    plain_token: int
    tree_token: int
    margin: float
    logit_error: float

    @property
    def legal(self) -> bool:
        """Whether rounding alone explains it."""
        return self.margin <= 2 * self.logit_error


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    ``difference`` is None when tree and plain tokens are the same. ``row_floor`` is the least row
    count from which this machine gives a row the same bits (`TargetModel.row_invariant_rows`);
    where tokens differ, ``identical_when_padded`` says whether plain decoding in forwards of that
    many rows, bit-identical to a tree's, emits the tree's tokens.
    """

    rows: list[Row]
    difference: Difference | None
    row_floor: int | None
    identical_when_padded: bool | None

    @property
    def verdict(self) -> str:
        """The line under the table."""
        d = self.difference
        if d is None:
            return "identical: yes"
        where = (
            f"at token {d.index}: plain {d.plain_token}, tree {d.tree_token}; margin "
            f"{d.margin:.3g}, largest logit difference of the two forwards {d.logit_error:.3g}"
        )
        kind = "a rounding tie" if d.legal else "NOT explained by rounding"
        if self.identical_when_padded:
            return (
                "identical: yes, bit for bit with plain decoding in "
                f"{self.row_floor}-row forwards\n"
                f"(one-row forwards round differently here and part {where}: {kind})"
            )
        text = f"identical: no, first difference {where}: {kind}"
        if self.identical_when_padded is not None:
            text += f"; plain decoding in {self.row_floor}-row forwards differs too"
        return text

    @property
    def lossless(self) -> bool:
        """Whether the tree changed nothing that rounding does not explain."""
        d = self.difference
        return d is None or (d.legal and self.identical_when_padded is not False)


def compare(
    decoder: EagleDecoder, prompt: list[int], max_new_tokens: int = 128, rounds: int = 3
) -> Comparison:
    """Decode ``prompt`` greedily in three ways, ``rounds`` times in turn.

    Args:
        decoder: target and head.
        prompt: token ids.
        max_new_tokens: cap of each run.
        rounds: timed calls of each way; the median counts.

    Raises:
        ValueError: a way gave different tokens in different rounds.
    """
    ways: dict[str, Callable[[], tuple[list[int], int, float]]] = {
        "Hugging Face generate": lambda: _hugging_face(decoder, prompt, max_new_tokens),
        "plain": lambda: _ours(decoder.generate_plain(prompt, max_new_tokens=max_new_tokens)),
        "EAGLE-2 tree": lambda: _ours(decoder.generate(prompt, max_new_tokens=max_new_tokens)),
    }
    results: dict[str, tuple[list[int], int, float]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # The first round warms up caches and thread pools and is not timed.
    for turn in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            result = run()
            if turn > 0:
                seconds[name].append(time.perf_counter() - start)
            if results.setdefault(name, result)[0] != result[0]:
                raise ValueError(f"{name} gave different tokens in two runs of the same prompt")
    rows = [
        Row(name, statistics.median(seconds[name]), len(tokens), forwards, accept)
        for name, (tokens, forwards, accept) in results.items()
    ]
    plain, tree = results["plain"][0], results["EAGLE-2 tree"][0]
    difference = first_difference(decoder.target, prompt, plain, tree, decoder.config.max_nodes)
    floor, padded = decoder.target.row_invariant_rows(), None
    if difference is not None and floor is not None and floor > 1:
        again = decoder.generate_plain(prompt, max_new_tokens=max_new_tokens, pad_rows=floor)
        padded = again.token_ids == tree
    return Comparison(rows, difference, floor, padded)


def _ours(result: Any) -> tuple[list[int], int, float]:
    stats = result.stats
    return result.token_ids, stats.target_forwards, stats.accept_length


def _hugging_face(
    decoder: EagleDecoder, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], int, float]:
    model = decoder.target.hf_model
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
    tokens = out[0, len(prompt) :].tolist()
    # The first token comes from the prefill, as in our own count.
    return tokens, len(tokens) - 1, 1.0


def first_difference(
    target: TargetModel, prompt: list[int], plain: list[int], tree: list[int], num_rows: int
) -> Difference | None:
    """The first token at which ``tree`` leaves ``plain``, with its margin; None when it never does.

    A sequence that is a prefix of the other differs at its end, with token -1.
    """
    if plain == tree:
        return None
    index = next(
        (i for i, (a, b) in enumerate(zip(plain, tree, strict=False)) if a != b),
        min(len(plain), len(tree)),
    )
    common = plain[:index]
    one = _logits_after(target, prompt, common, 1)
    many = _logits_after(target, prompt, common, num_rows)
    best = one.topk(2).values
    return Difference(
        index,
        plain[index] if index < len(plain) else -1,
        tree[index] if index < len(tree) else -1,
        float(best[0] - best[1]),
        float((one - many).abs().max()),
    )


@torch.inference_mode()
def _logits_after(
    target: TargetModel, prompt: list[int], emitted: list[int], num_rows: int
) -> Tensor:
    """Float32 [V]: logits after prompt + emitted, the emitted run in forwards of num_rows."""
    cache = target.new_cache(1, len(prompt) + len(emitted) + num_rows)
    device = target.device
    prefix = torch.zeros(1, dtype=torch.int32, device=device)
    ids = torch.tensor([prompt], device=device)
    features = target.forward(cache, ids, torch.arange(len(prompt), device=device)[None], prefix)
    last = features[:, -1]
    prefix = prefix + len(prompt)
    for token in emitted:
        # Rows past the first are filler: a tree's other nodes, as far as the row count goes.
        ids = torch.full((1, num_rows), token, device=device)
        positions = prefix.long()[:, None] + torch.arange(num_rows, device=device)
        lengths = torch.ones_like(prefix)
        last = target.forward(cache, ids, positions, prefix, lengths=lengths)[:, 0]
        prefix = prefix + 1
    return target.logits(last[:, None])[0, 0].float()
