"""Tree decoding over a prompt set, beside what a user would otherwise call: ``eagle2 eval``.

The protocol of the EAGLE papers' tables (arXiv 2406.16858, table 1): accept length tau (tokens
emitted after the first / target forwards after prefill) and speed over plain decoding, at
temperature 0 and 1, per category. Every way of decoding meets a prompt before the next prompt
begins, so a slow spell of the machine meets all of them, and the tree's tokens are compared with
plain decoding's of the same seed before any speed is reported.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .generation import SamplingParams, check_count

if TYPE_CHECKING:
    from .decode import EagleDecoder

__all__ = ["PLAIN", "TREE", "Evaluation", "EvaluationRow", "Prompt", "evaluate", "read_prompts"]

TREE, PLAIN = "EAGLE-2 tree", "plain"
HF_PLAIN, HF_LOOKUP = "Hugging Face generate", "Hugging Face prompt lookup"
HF_ASSISTED = "Hugging Face assisted"


@dataclass(frozen=True)
class Prompt:
    """One request: its text (chat template applied later) or token ids, and its category."""

    text: str
    category: str = "all"


@dataclass
class EvaluationRow:
    """One way of decoding one category at one temperature, sums over its prompts.

    ``histogram[i]`` counts the target forwards that emitted i + 1 tokens (our two ways only).
    ``different`` counts prompts whose tokens are not plain decoding's of the same seed, nor those
    of plain decoding in forwards of as many rows as give a row the tree's bits.
    """

    provider: str
    temperature: float
    category: str
    prompts: int = 0
    new_tokens: int = 0
    after_first: int = 0
    target_forwards: int = 0
    seconds: float = 0.0
    histogram: list[int] = field(default_factory=list)
    different: int = 0

    @property
    def accept_length(self) -> float | None:
        """tau; None for Hugging Face's ways, which do not say how often they ran the target."""
        return self.after_first / self.target_forwards if self.target_forwards else None

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over wall time, prefill included."""
        return self.new_tokens / self.seconds

    def add(self, other: EvaluationRow) -> None:
        """Sum another row into this one."""
        for name in ("prompts", "new_tokens", "after_first", "target_forwards", "different"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.seconds += other.seconds
        longer = max(len(self.histogram), len(other.histogram))
        pad = [[*h, *[0] * (longer - len(h))] for h in (self.histogram, other.histogram)]
        self.histogram = [a + b for a, b in zip(*pad, strict=True)]


@dataclass(frozen=True)
class Evaluation:
    """Rows by temperature, category ("all" last) and way of decoding."""

    rows: list[EvaluationRow]

    def row(self, provider: str, temperature: float, category: str = "all") -> EvaluationRow:
        """The one row with these three; KeyError when there is none."""
        for row in self.rows:
            if (row.provider, row.temperature, row.category) == (provider, temperature, category):
                return row
        raise KeyError((provider, temperature, category))

    def as_dicts(self) -> list[dict[str, Any]]:
        """One flat dict a row, ``speedup`` over plain decoding included."""
        out = []
        for row in self.rows:
            plain = self.row(PLAIN, row.temperature, row.category)
            tau = row.accept_length
            out.append(
                {
                    "provider": row.provider,
                    "temperature": row.temperature,
                    "category": row.category,
                    "prompts": row.prompts,
                    "new_tokens": row.new_tokens,
                    "target_forwards": row.target_forwards,
                    "accept_length": None if tau is None else round(tau, 3),
                    "tokens_per_second": round(row.tokens_per_second, 2),
                    "speedup": round(row.tokens_per_second / plain.tokens_per_second, 3),
                    "different": row.different,
                    "histogram": row.histogram,
                }
            )
        return out


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a .jsonl file of {"prompt": text, "category"?: text}.

    Raises FileNotFoundError without the file, ValueError naming the line that is not such an
    object.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"prompts: expected a .jsonl file, got {path}")
    found = []
    # At line feeds only: JSON strings may hold what else ends a line in Unicode.
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["prompt"], str):
                raise TypeError("token ids are no text")
            found.append(Prompt(row["prompt"], str(row.get("category", "all"))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'prompts: {path}, line {number}: expected {{"prompt": text, "category"?: text}}, '
                f"got {line[:80]!r}"
            ) from error
    if not found:
        raise ValueError(f"prompts: expected at least one in {path}, got none")
    return found


def evaluate(
    decoder: EagleDecoder,
    prompts: Sequence[tuple[list[int], str]],
    *,
    max_new_tokens: int = 128,
    temperatures: Sequence[float] = (0.0, 1.0),
    hugging_face: bool = True,
    assistant: Any = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Decode (token ids, category) pairs in every way at every temperature.

    Args:
        decoder: target and head.
        prompts: token ids with their category.
        max_new_tokens: cap of each answer.
        temperatures: 0 is greedy; above it only the temperature is on. One named twice counts once.
        hugging_face: also run the model's own ``generate``, plain and with prompt lookup, in the
            same dtype on the same weights.
        assistant: a smaller transformers causal LM with the same tokenizer, for assisted
            generation beside these.
        seed: of the sampled runs; prompt i draws with seed + i.
        progress: called with (prompts done, all of them) over all temperatures.

    Raises:
        ValueError: no prompts or temperatures, or what `EagleDecoder.generate` refuses.
    """
    check_count("max_new_tokens", max_new_tokens)
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    if not temperatures:
        raise ValueError("temperatures: expected at least one, got none")
    temperatures = list(dict.fromkeys(temperatures))
    ways = _ways(decoder, max_new_tokens, hugging_face, assistant)
    floor = decoder.target.row_invariant_rows() or 1
    rows: dict[tuple[float, str, str], EvaluationRow] = {}
    done, total = 0, len(prompts) * len(temperatures)
    # Not timed: it warms up caches, thread pools and the first calls of every way.
    for run in ways.values():
        run(prompts[0][0], SamplingParams(temperature=temperatures[0], seed=seed), 8)
    for temperature in temperatures:
        for i, (ids, category) in enumerate(prompts):
            sampling = SamplingParams(temperature=temperature, seed=seed + i)
            answers = {}
            for name, run in ways.items():
                start = time.perf_counter()
                tokens, stats = run(ids, sampling, max_new_tokens)
                seconds = time.perf_counter() - start
                answers[name] = tokens
                row = EvaluationRow(name, temperature, category, 1, len(tokens), seconds=seconds)
                row.after_first = max(len(tokens) - 1, 0)
                if stats is not None:
                    row.target_forwards = stats.target_forwards
                    row.histogram = list(stats.accept_histogram)
                for kind in dict.fromkeys((category, "all")):
                    key = (temperature, kind, name)
                    rows.setdefault(key, EvaluationRow(name, temperature, kind)).add(row)
            if answers[TREE] != answers[PLAIN] and not _same_when_padded(
                decoder, ids, sampling, max_new_tokens, floor, answers[TREE]
            ):
                for kind in dict.fromkeys((category, "all")):
                    rows[temperature, kind, TREE].different += 1
            done += 1
            if progress is not None:
                progress(done, total)
    order = [*dict.fromkeys(c for _, c in prompts if c != "all"), "all"]
    return Evaluation(
        [
            rows[t, c, name]
            for t in temperatures
            for c in order
            for name in ways
            if (t, c, name) in rows
        ]
    )


def _same_when_padded(
    decoder: EagleDecoder,
    ids: list[int],
    sampling: SamplingParams,
    most: int,
    floor: int,
    tree: list[int],
) -> bool:
    if floor == 1:
        return False
    again = decoder.generate_plain(ids, max_new_tokens=most, sampling=sampling, pad_rows=floor)
    return again.token_ids == tree


def _ways(
    decoder: EagleDecoder, most: int, hugging_face: bool, assistant: Any
) -> dict[str, Callable[[list[int], SamplingParams, int], tuple[list[int], Any]]]:
    def tree(ids: list[int], sampling: SamplingParams, count: int) -> tuple[list[int], Any]:
        result = decoder.generate(ids, max_new_tokens=count, sampling=sampling)
        return result.token_ids, result.stats

    def plain(ids: list[int], sampling: SamplingParams, count: int) -> tuple[list[int], Any]:
        result = decoder.generate_plain(ids, max_new_tokens=count, sampling=sampling)
        return result.token_ids, result.stats

    ways: dict[str, Any] = {PLAIN: plain, TREE: tree}
    if hugging_face:
        ways[HF_PLAIN] = _hugging_face(decoder)
        ways[HF_LOOKUP] = _hugging_face(decoder, prompt_lookup_num_tokens=10)
    if assistant is not None:
        ways[HF_ASSISTED] = _hugging_face(decoder, assistant_model=assistant)
    return ways


def _hugging_face(decoder: EagleDecoder, **options: Any) -> Any:
    model: Any = decoder.target.hf_model

    @torch.inference_mode()
    def run(ids: list[int], sampling: SamplingParams, count: int) -> tuple[list[int], None]:
        given = torch.tensor([ids], device=model.device)
        how: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            # top_k is on in transformers unless told otherwise.
            how = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(sampling.seed or 0)
        out = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            pad_token_id=0,
            **how,
            **options,
        )
        return out[0, len(ids) :].tolist(), None

    return run


def append_csv(evaluation: Evaluation, path: str | Path, common: dict[str, Any]) -> None:
    """Append the rows to a CSV file, each with ``common`` and what it was measured on.

    Raises ValueError for a file whose columns are others.
    """
    from . import env

    found = env.provenance()
    lines = [
        common | row | {"histogram": " ".join(map(str, row["histogram"]))} | found
        for row in evaluation.as_dicts()
    ]
    path, names = Path(path), list(lines[0])
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            header = next(csv.reader(file), [])
        if header != names:
            raise ValueError(f"csv: expected the columns {names} in {path}, got {header}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names)
        if new:
            writer.writeheader()
        writer.writerows(lines)


def plot(evaluation: Evaluation, image: str | Path) -> None:
    """Draw tokens per target forward (histogram) and accept length by category into a file.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row.temperature for row in evaluation.rows))
    categories = list(dict.fromkeys(row.category for row in evaluation.rows))
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(temperatures)
    for i, temperature in enumerate(temperatures):
        row = evaluation.row(TREE, temperature)
        share = [count / max(row.target_forwards, 1) for count in row.histogram]
        at = [1 + n + (i - (len(temperatures) - 1) / 2) * width for n in range(len(share))]
        left.bar(at, share, width, label=f"temperature {temperature:g}")
        taus = [evaluation.row(TREE, temperature, c).accept_length or 0.0 for c in categories]
        at = [n + (i - (len(temperatures) - 1) / 2) * width for n in range(len(taus))]
        right.bar(at, taus, width)
    left.set(xlabel="tokens a target forward emitted", ylabel="share of forwards")
    left.legend()
    right.set(ylabel="accept length")
    right.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    figure.savefig(image, dpi=110)
