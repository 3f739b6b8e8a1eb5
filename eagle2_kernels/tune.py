"""Which tree pays on this machine: `tune(decoder)`, or ``eagle2 tune``.

A step of a tree with N slots, K branches and D levels costs

    seconds(N, K, D) = verify(N) + draft(K, D)

and emits tokens(N, K, D) on average. ``verify`` is measured at a few N and interpolated; ``draft``
at the first and last D, and is linear between them. ``tokens`` comes from texts the target writes
greedily here: the head drafts at each of their positions once per K, with the deepest tree, and
every smaller tree's accepted drafts follow from the ranks of the text's own tokens among the
candidates. The best shape has the most tokens per second.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .decode import TreeConfig

if TYPE_CHECKING:
    from .decode import EagleDecoder

__all__ = ["DEFAULT_PROMPTS", "Tuning", "TuningRow", "tune"]

DEFAULT_PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short letter to a landlord about a broken heater.",
    "What is the difference between weather and climate?",
    "List five ways to save water at home, with a sentence on each.",
    "Write a Python function that reverses a list, and explain it.",
    "Summarise why the Roman roads were built.",
)
"""User messages for the demo's target and other chat models; bring your own for your traffic."""


@dataclass(frozen=True)
class TuningRow:
    """One shape: tokens emitted per step, seconds per step, and their ratio."""

    max_nodes: int
    top_k: int
    max_depth: int
    accept_length: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Expected speed, prefill apart."""
        return self.accept_length / self.seconds


@dataclass(frozen=True)
class Tuning:
    """What `tune` found: ``rows`` of all shapes, fastest first, and plain decoding beside them."""

    rows: list[TuningRow]
    plain_seconds: float
    verify_seconds: dict[int, float]
    draft_seconds: dict[tuple[int, int], float]

    @property
    def best(self) -> TreeConfig:
        """The shape with the most expected tokens per second."""
        row = self.rows[0]
        return TreeConfig(row.max_nodes, row.top_k, row.max_depth)

    @property
    def speedup(self) -> float:
        """Expected speed of `best` over plain decoding's; below 1 a tree does not pay here."""
        return self.rows[0].tokens_per_second * self.plain_seconds


def tune(
    decoder: EagleDecoder,
    prompts: Sequence[Any] | None = None,
    *,
    max_nodes: Sequence[int] = (1, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    top_k: Sequence[int] = (2, 4, 8),
    max_depth: int = 8,
    max_new_tokens: int = 64,
    rounds: int = 3,
    progress: Callable[[str], None] | None = None,
) -> Tuning:
    """Measure this decoder on this machine and rank the shapes of a tree.

    Args:
        decoder: target and head; its configuration is left alone.
        prompts: token ids or text of what will be asked; `DEFAULT_PROMPTS` in the chat template.
        max_nodes: slot counts to measure a verification at, and to choose from.
        top_k: branch counts to choose from.
        max_depth: deepest tree considered.
        max_new_tokens: tokens of each prompt's text.
        rounds: times each step is measured; medians count.
        progress: called with a line before each part.

    Raises:
        ValueError: a count below 1, shapes that cannot be, no prompts, or texts too short to draft
            for.
        TypeError: one text in place of a list.
    """
    for name, values in (
        ("max_nodes", max_nodes),
        ("top_k", top_k),
        ("max_depth", [max_depth]),
        ("max_new_tokens", [max_new_tokens]),
        ("rounds", [rounds]),
    ):
        if not values or min(values) < 1:
            raise ValueError(f"{name}: expected values of at least 1, got {list(values)}")
    head = decoder.head
    vocab = head.config.vocab_size if head.draft_to_target is None else len(head.draft_to_target)
    if max(top_k) > vocab:
        raise ValueError(
            f"top_k: expected at most the {vocab} tokens the head proposes, got {list(top_k)}"
        )
    most = 1 + max(top_k) + (max_depth - 1) * max(top_k) ** 2
    if not any(1 < n <= most for n in max_nodes):
        raise ValueError(
            f"max_nodes: expected a count of 2 to {most}, what top_k and max_depth can fill, got "
            f"{list(max_nodes)}"
        )
    if isinstance(prompts, str):
        raise TypeError(f"prompts: expected a list of texts or token ids, got {prompts[:80]!r}")
    say = progress or (lambda text: None)
    say("writing texts to draft for")
    asked = _ids(decoder, DEFAULT_PROMPTS if prompts is None else prompts)
    texts = _texts(decoder, asked, max_new_tokens)
    nodes, branches = sorted(set(max_nodes)), sorted(set(top_k))
    say("timing verification and drafting")
    plain, verify, draft = _costs(decoder, texts[0][0], nodes, branches, max_depth, rounds)
    rows = []
    for k in branches:
        say(f"drafting with {k} branches")
        ranks = _ranks(decoder, texts, k, max_depth)
        for depth in range(1, max_depth + 1):
            most = 1 + k + (depth - 1) * k * k
            for n in nodes:
                if 1 < n <= most:
                    accept = _accept_length(ranks, n, depth)
                    seconds = verify[n] + _between(draft, k, depth, max_depth)
                    rows.append(TuningRow(n, k, depth, round(accept, 4), seconds))
    rows.sort(key=lambda row: -row.tokens_per_second)
    return Tuning(rows, plain, verify, draft)


def _ids(decoder: EagleDecoder, prompts: Sequence[Any]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append(list(prompt))
            continue
        tokenizer = decoder.tokenizer
        if tokenizer is None:
            raise ValueError("prompts: expected token ids, a decoder without tokenizer reads none")
        if getattr(tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        found.append(list(tokenizer(prompt, add_special_tokens=False)["input_ids"]))
    if not found:
        raise ValueError("prompts: expected at least one, got none")
    return found


def _texts(
    decoder: EagleDecoder, prompts: list[list[int]], most: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt, what the target says to it greedily); answers shorter than three tokens left out."""
    answers = [decoder.generate_plain(p, max_new_tokens=most).token_ids for p in prompts]
    texts = [(p, a) for p, a in zip(prompts, answers, strict=True) if len(a) >= 3]
    if not texts:
        raise ValueError("prompts: expected answers of at least three tokens, got none")
    return texts


def _costs(
    decoder: EagleDecoder,
    prompt: list[int],
    nodes: list[int],
    branches: list[int],
    max_depth: int,
    rounds: int,
) -> tuple[float, dict[int, float], dict[tuple[int, int], float]]:
    """Seconds of a plain step, of a verification per N, of a draft per (K, first and last D)."""
    ends = sorted({1, max_depth})
    shapes: dict[tuple[Any, ...], TreeConfig] = {
        ("verify", n): TreeConfig(n, branches[-1], max_depth) for n in nodes
    }
    shapes |= {("draft", k, d): TreeConfig(max(nodes[0], 2), k, d) for k in branches for d in ends}
    seconds: dict[Any, list[float]] = {key: [] for key in shapes}
    plain: list[float] = []
    # The first round warms up; then all take turns, so that a slow spell meets each of them.
    for turn in range(rounds + 1):
        stats = decoder.generate_plain(prompt, max_new_tokens=9, eos_token_ids=()).stats
        if turn:
            plain.append(stats.seconds["verify"] / stats.target_forwards)
        for key, shape in shapes.items():
            stats = decoder.generate(
                prompt, max_new_tokens=13, eos_token_ids=(), config=shape
            ).stats
            if turn:
                seconds[key].append(stats.seconds[key[0]] / stats.target_forwards)
    found = {key: statistics.median(times) for key, times in seconds.items()}
    verify = {n: found["verify", n] for n in nodes}
    draft = {(k, d): found["draft", k, d] for k in branches for d in ends}
    return statistics.median(plain), verify, draft


def _between(draft: dict[tuple[int, int], float], k: int, depth: int, last: int) -> float:
    if depth == 1:
        return draft[k, 1]
    share = (depth - 1) / (last - 1)
    return draft[k, 1] + share * (draft[k, last] - draft[k, 1])


@torch.inference_mode()
def _ranks(
    decoder: EagleDecoder, texts: list[tuple[list[int], list[int]]], k: int, max_depth: int
) -> list[torch.Tensor]:
    from .training.data import target_features
    from .training.evaluate import path_ranks

    model, head = decoder.target.hf_model, decoder.head
    taps = head.taps(decoder.target.num_layers)
    found = []
    for prompt, answer in texts:
        ids = torch.tensor(prompt + answer, device=decoder.target.device)
        features = target_features(model, ids[None], taps)[0, :, -head.feature_size :]
        found.append(path_ranks(head, ids, features, len(prompt), k, max_depth))
    return found


def _accept_length(ranks: list[torch.Tensor], max_nodes: int, max_depth: int) -> float:
    from .training.evaluate import accepted_of, walk

    tokens = forwards = 0
    for part in ranks:
        emitted, used = walk(accepted_of(part, max_nodes, max_depth))
        tokens, forwards = tokens + emitted, forwards + used
    return tokens / max(forwards, 1)


def as_dict(tuning: Tuning) -> dict[str, Any]:
    """Everything of a `Tuning`, ready for JSON."""
    return {
        "best": dataclasses.asdict(tuning.best),
        "speedup": tuning.speedup,
        "plain_seconds": tuning.plain_seconds,
        "verify_seconds": {str(n): s for n, s in tuning.verify_seconds.items()},
        "draft_seconds": {f"{k}/{d}": s for (k, d), s in tuning.draft_seconds.items()},
        "rows": [
            dataclasses.asdict(row) | {"tokens_per_second": row.tokens_per_second}
            for row in tuning.rows
        ],
    }


def plot(tuning: Tuning, image: str) -> None:
    """Draw expected tokens per second against slots, the best depth of each top_k, into a file.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for k in sorted({row.top_k for row in tuning.rows}):
        best: dict[int, TuningRow] = {}
        # Rows come fastest first.
        for row in tuning.rows:
            if row.top_k == k:
                best.setdefault(row.max_nodes, row)
        line = sorted(best.values(), key=lambda row: row.max_nodes)
        axes.plot(
            [row.max_nodes for row in line],
            [row.tokens_per_second for row in line],
            "o-",
            label=f"top_k {k}",
        )
        for row in line:
            axes.annotate(f"{row.max_depth}", (row.max_nodes, row.tokens_per_second), fontsize=7)
    axes.axhline(1 / tuning.plain_seconds, color="k", lw=0.8, ls="--", label="plain")
    axes.set(xlabel="max_nodes (label: best max_depth)", ylabel="expected tokens/s")
    axes.legend()
    figure.savefig(image, dpi=110)
