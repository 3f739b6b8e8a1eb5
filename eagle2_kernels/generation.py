"""Requests and results: what the host keeps about a call of the decoder.

Tokens arrive here step by step, as many as the target accepted. A request takes them one at a time
and stops at the first that ends it, so the cut is the same however many came at once.
"""

from __future__ import annotations

import math
import numbers
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .logits import SMALLEST, mark_tokens

__all__ = ["Batch", "Generation", "Generations", "SamplingParams", "Stats", "TextStream"]

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")


@dataclass(frozen=True)
class SamplingParams:
    """How the target's tokens are chosen; the default is greedy.

    ``temperature`` 0 takes the argmax. Otherwise logits are divided by it, then cut by ``top_k``
    (0: off), ``top_p`` (1: off) and ``min_p`` (0: off) in this order. Request i of a call uses
    ``seed + i``; None draws a seed, greedy or not, from torch's global generator, and the
    statistics report it.

    Before that, and greedy or not: ``logit_bias`` (id -> value) is added, -inf bans a token; the
    logit of every token of prompt or output is divided by ``repetition_penalty`` when positive,
    else multiplied by it (1: off); ``frequency_penalty`` is taken away for each time a token was
    generated and ``presence_penalty`` once if it was (0: off). See `process_logits`.

    ``logprobs`` asks for the log-probability of each emitted token in `Generation.logprobs`: True
    or ``"raw"`` under the model's own softmax, ``"processed"`` under that after bias and penalties.
    Temperature and the cuts are in neither.

    Raises ValueError for a value out of range, TypeError for what is no number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logprobs: bool | str = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real):
                raise TypeError(f"{name}: expected a number, got {value!r}")
        if not (0 <= self.temperature <= torch.finfo(torch.float32).max):
            raise ValueError(
                f"temperature: expected a finite float32 value >= 0, got {self.temperature}"
            )
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k: expected an integer >= 0, got {self.top_k!r}")
        if not (0 < self.top_p <= 1):
            raise ValueError(f"top_p: expected a value in (0, 1], got {self.top_p}")
        if not (0 <= self.min_p <= 1):
            raise ValueError(f"min_p: expected a value in [0, 1], got {self.min_p}")
        if self.seed is not None and not (
            isinstance(self.seed, int) and -(2**63) <= self.seed < 2**64
        ):
            raise ValueError(f"seed: expected a 64-bit integer or None, got {self.seed!r}")
        largest = torch.finfo(torch.float32).max
        if not (SMALLEST <= self.repetition_penalty <= largest):
            raise ValueError(
                "repetition_penalty: expected a finite float32 value > 0, got "
                f"{self.repetition_penalty}"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            if not (-largest <= value <= largest):
                raise ValueError(f"{name}: expected a finite float32 value, got {value}")
        if self.logit_bias is not None:
            self._check_bias(self.logit_bias, largest)
            # A copy: the caller's may change later.
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.logprobs not in (False, True, "raw", "processed"):
            raise ValueError(
                f"logprobs: expected True, False, 'raw' or 'processed', got {self.logprobs!r}"
            )

    @staticmethod
    def _check_bias(bias: Mapping[int, float], largest: float) -> None:
        if not isinstance(bias, Mapping):
            raise ValueError(f"logit_bias: expected a mapping of ids to values, got {bias!r}")
        for token, value in bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"logit_bias: expected token ids, got {token!r}")
            if not isinstance(value, numbers.Real):
                raise TypeError(f"logit_bias: expected a number for token {token}, got {value!r}")
            if not (value == -math.inf or -largest <= value <= largest):
                raise ValueError(
                    f"logit_bias: expected a finite float32 value or -inf for token {token}, "
                    f"got {value!r}"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for a biased id outside the vocabulary, or when nothing is left."""
        bias = self.logit_bias or {}
        for token in bias:
            if token >= vocab_size:
                raise ValueError(f"logit_bias: expected ids in [0, {vocab_size}), got {token}")
        if sum(value == -math.inf for value in bias.values()) == vocab_size:
            raise ValueError("logit_bias: expected a token that is not banned, got none")

    @property
    def edits_logits(self) -> bool:
        """Whether a bias or a penalty is on."""
        return bool(self.logit_bias) or any(
            getattr(self, name) != getattr(type(self), name) for name in _PENALTIES
        )

    def seeds(self, count: int) -> list[int]:
        """One 64-bit seed (as a signed integer) per request."""
        first = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        return [(first + i + 2**63) % 2**64 - 2**63 for i in range(count)]

    def tensors(self, batch: int, device: torch.device) -> dict[str, Tensor]:
        """Keyword arguments of `sample_tokens`: [B] tensors of the filters that are on."""
        if self.temperature == 0:
            return {}
        values = {
            "temperature": (self.temperature, 0.0, torch.float32),
            "top_k": (min(self.top_k, 2**31 - 1), 0, torch.int32),
            "top_p": (self.top_p, 1.0, torch.float32),
            "min_p": (self.min_p, 0.0, torch.float32),
        }
        return {
            name: torch.full((batch,), value, dtype=dtype, device=device)
            for name, (value, off, dtype) in values.items()
            if value != off
        }

    def processors(
        self, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
    ) -> dict[str, Tensor]:
        """Keyword arguments of `process_logits` for these prompts; none when nothing is on."""
        batch = len(prompts)
        processors = {
            name: torch.full((batch,), getattr(self, name), dtype=torch.float32, device=device)
            for name in _PENALTIES
            if getattr(self, name) != getattr(type(self), name)
        }
        if processors:
            processors["output_counts"] = torch.zeros(
                batch, vocab_size, dtype=torch.int32, device=device
            )
        if "repetition_penalty" in processors:
            longest = max(map(len, prompts))
            padded = torch.tensor([[*p, *[-1] * (longest - len(p))] for p in prompts])
            mask = torch.zeros(batch, (vocab_size + 31) // 32, dtype=torch.int32, device=device)
            mark_tokens(mask, padded.to(device))
            processors["prompt_mask"] = mask
        if self.logit_bias:
            tokens = torch.tensor(list(self.logit_bias), dtype=torch.int64, device=device)
            values = torch.tensor(list(self.logit_bias.values()), dtype=torch.float32)
            processors["bias_tokens"] = tokens.repeat(batch, 1)
            processors["bias_values"] = values.to(device).repeat(batch, 1)
        return processors


@dataclass
class Stats:
    """What a generation cost.

    Attributes:
        new_tokens: tokens emitted, EOS included.
        target_forwards: target forwards after prefill.
        accept_length: tokens emitted after the first / target forwards; 0 without a forward. It
            counts the bonus token, as papers do; the operators' ``accept_length`` does not.
        accept_histogram: entry i counts the forwards that emitted i + 1 tokens.
        seconds: wall time of the whole call by phase (``prefill``, ``draft``, ``verify``,
            ``total``). On a GPU the host waits only for emitted tokens: ``verify`` holds the wait.
        seeds: the seed of each request.
    """

    new_tokens: int = 0
    target_forwards: int = 0
    accept_length: float = 0.0
    accept_histogram: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)


@dataclass
class Generation:
    """One request's result.

    Attributes:
        token_ids: new tokens, EOS and the token that completed a stop string included.
        text: their text without special tokens, cut before a stop string; "" without a tokenizer.
        stats: see `Stats`.
        finish_reason: ``"eos"``, ``"stop"``, ``"length"`` (max_new_tokens) or ``"positions"`` (the
            end of the model's position table).
        logits: [new_tokens, V] the target's logits behind each token, before bias and penalties,
            where asked for.
        logprobs: the log-probability of each token, where `SamplingParams.logprobs` asks for it.
    """

    token_ids: list[int]
    text: str
    stats: Stats
    finish_reason: str
    logits: Tensor | None = None
    logprobs: list[float] | None = None


class Generations(list[Generation]):
    """Results of several requests, in order, with ``stats`` of the batch.

    The batch's ``target_forwards`` counts the forwards that were run; its ``accept_length`` is the
    mean over all requests' forwards.
    """

    stats: Stats

    @property
    def token_ids(self) -> list[list[int]]:
        """Each request's new tokens."""
        return [g.token_ids for g in self]

    @property
    def text(self) -> list[str]:
        """Each request's text."""
        return [g.text for g in self]


class TextStream:
    """Token ids in, text out, never half a character.

    `push` returns the text that became final; text that ends inside a multi-byte character waits.
    The pieces together are the text of all ids decoded at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # ids[:_done] are out. Decoding restarts at _start, one piece earlier, because a token's
        # text may depend on its left neighbour (the space before a word).
        self._start = 0
        self._done = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that the new tokens complete."""
        self._ids.extend(token_ids)
        return self._advance(hold_back=True)

    def flush(self) -> str:
        """What is left; an incomplete character becomes U+FFFD."""
        return self._advance(hold_back=False)

    def _advance(self, hold_back: bool) -> str:
        shown = decode_text(self._tokenizer, self._ids[self._start : self._done])
        text = decode_text(self._tokenizer, self._ids[self._start :])
        if len(text) <= len(shown) or (hold_back and text.endswith("\ufffd")):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(shown) :]


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of ``ids`` without special tokens, spaces as the tokens have them."""
    if not ids:
        return ""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass
class Request:
    """One prompt, what it wants, and what it has got so far.

    ``wanted`` tokens at most; ``short`` when the position table, not the caller, set that number.
    ``text`` grows with the tokens only when someone looks at it (``follow_text``).
    """

    prompt: list[int]
    wanted: int
    short: bool
    eos: frozenset[int]
    stops: list[str]
    tokenizer: Any
    follow_text: bool
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    text: str = ""
    shown: int = 0
    histogram: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer) if self.follow_text else None

    def take(self, tokens: list[int], forward: bool) -> list[int]:
        """Accept a step's tokens up to the one that ends the request; returns those kept.

        ``forward`` says that a target forward after prefill brought them, for the histogram.
        """
        if self.finish_reason or not tokens:
            return []
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            self.finish_reason = self._ending(token)
            if self.finish_reason:
                break
        kept = self.tokens[before:]
        if forward:
            self.histogram += [0] * (len(kept) - len(self.histogram))
            self.histogram[len(kept) - 1] += 1
        return kept

    def take_piece(self) -> Any:
        """Text that is certain by now and was not taken yet (ids without a tokenizer)."""
        if self._stream is None:
            ids, self.shown = self.tokens[self.shown :], len(self.tokens)
            return ids
        end = len(self.text)
        if not self.finish_reason:
            end -= max((_overlap(self.text, stop) for stop in self.stops), default=0)
        piece, self.shown = self.text[self.shown : end], max(end, self.shown)
        return piece

    def final_text(self) -> str:
        """Text of the tokens, cut before a stop string."""
        if self.finish_reason == "stop":
            return self.text
        return "" if self.tokenizer is None else decode_text(self.tokenizer, self.tokens)

    def _ending(self, token: int) -> str:
        """Why ``token`` is the last one, or "" when it is not."""
        if self._follow(token):
            return "stop"
        if token in self.eos:
            reason = "eos"
        elif len(self.tokens) >= self.wanted:
            reason = "positions" if self.short else "length"
        else:
            return ""
        if self._stream is not None:
            self.text += self._stream.flush()
        return reason

    def _follow(self, token: int) -> bool:
        """Extend the text; cut it and return True when a stop string is complete."""
        if self._stream is None:
            return False
        old = len(self.text)
        self.text += self._stream.push([token])
        found = [
            at
            for stop in self.stops
            if (at := self.text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)


def read_prompts(prompts: Any, tokenizer: Any, vocab_size: int) -> tuple[bool, list[list[int]]]:
    """Whether one request was given, and every request's token ids.

    A request is text, a list of ids or a 1-D tensor; several are a list of those or a 2-D tensor.
    Raises ValueError naming the request that is none, empty, or outside the vocabulary.
    """
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    single = isinstance(prompts, str) or _is_ids(prompts)
    items = [prompts] if single else prompts
    if not isinstance(items, (list, tuple)) or not items:
        hint = ' (take its "input_ids")' if isinstance(items, Mapping) else ""
        raise ValueError(
            f"prompts: expected text, token ids, or a non-empty list of such, got {prompts!r}{hint}"
        )
    requests = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            if tokenizer is None:
                raise ValueError(f"prompts[{i}]: text needs a tokenizer, this decoder has none")
            item = tokenizer(item)["input_ids"]
        elif isinstance(item, Tensor):
            item = item.tolist()
        if not _is_ids(item):
            hint = " (apply the chat template first)" if isinstance(item, Mapping) else ""
            raise ValueError(
                f"prompts[{i}]: expected text or at least one token id, got {item!r}{hint}"
            )
        strange = [t for t in item if not 0 <= t < vocab_size]
        if strange:
            raise ValueError(f"prompts[{i}]: expected ids in [0, {vocab_size}), got {strange[0]}")
        requests.append(list(item))
    return single, requests


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
    )


def make_requests(
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    max_positions: int | None,
    eos_token_ids: Iterable[int],
    stop: str | Sequence[str],
    tokenizer: Any,
    follow_text: bool,
) -> list[Request]:
    """Requests whose end is checked for room and sense.

    Prompt and new tokens together fill the position table at most. Raises ValueError naming the
    argument.
    """
    check_count("max_new_tokens", max_new_tokens)
    stops = [stop] if isinstance(stop, str) or not isinstance(stop, Iterable) else list(stop)
    if any(not isinstance(s, str) or not s for s in stops):
        raise ValueError(f"stop: expected non-empty strings, got {stop!r}")
    if stops and tokenizer is None:
        raise ValueError("stop: stop strings need a tokenizer, this decoder has none")
    try:
        eos = frozenset(operator.index(token) for token in eos_token_ids)
    except TypeError:
        raise ValueError(
            f"eos_token_ids: expected a sequence of ids, got {eos_token_ids!r}"
        ) from None
    requests = []
    for i, prompt in enumerate(prompts):
        room = max_new_tokens
        if max_positions is not None:
            room = min(room, max_positions - len(prompt))
        if room < 1:
            raise ValueError(
                f"prompts[{i}]: expected fewer than {max_positions} tokens (the model's position "
                f"table), got {len(prompt)}"
            )
        short = room < max_new_tokens
        follow = follow_text or bool(stops)
        requests.append(Request(prompt, room, short, eos, stops, tokenizer, follow))
    return requests


class Batch:
    """The requests of one call, and the clock."""

    def __init__(
        self, requests: list[Request], single: bool, sampling: SamplingParams, keep_logits: bool
    ) -> None:
        self.requests = requests
        self.single = single
        self.sampling = sampling
        self.seeds = sampling.seeds(len(requests))
        self.keep_logits = keep_logits
        self.forwards = 0
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        self._start = time.perf_counter()

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def active(self) -> bool:
        """Whether any request still wants tokens."""
        return any(not r.finish_reason for r in self.requests)

    def alive(self) -> list[int]:
        """1 for a request that still wants tokens, 0 for one that stands still."""
        return [int(not r.finish_reason) for r in self.requests]

    def spend(self, phase: str, since: float) -> float:
        """Add the time since ``since`` to a phase; returns the time."""
        now = time.perf_counter()
        self.seconds[phase] += now - since
        return now

    def take(self, emitted: list[list[int]], forward: bool = True) -> list[list[int]]:
        """Hand each request its step's tokens; returns those kept."""
        self.forwards += forward
        return [r.take(t, forward) for r, t in zip(self.requests, emitted, strict=True)]

    def take_pieces(self) -> Any:
        """Each request's certain new text; that of the only one when one prompt was given."""
        pieces = [r.take_piece() for r in self.requests]
        return pieces[0] if self.single else pieces

    def results(self) -> Generation | Generations:
        """The finished requests' results."""
        seconds = {**self.seconds, "total": time.perf_counter() - self._start}
        results = Generations()
        for request, seed in zip(self.requests, self.seeds, strict=True):
            stats = _stats(len(request.tokens), [request.histogram], seconds, [seed])
            results.append(
                Generation(
                    list(request.tokens),
                    request.final_text(),
                    stats,
                    request.finish_reason,
                    torch.cat(request.logits) if self.keep_logits else None,
                    torch.cat(request.logprobs).tolist() if self.sampling.logprobs else None,
                )
            )
        if self.single:
            return results[0]
        new_tokens = sum(len(r.tokens) for r in self.requests)
        histograms = [r.histogram for r in self.requests]
        results.stats = _stats(new_tokens, histograms, seconds, self.seeds)
        results.stats.target_forwards = self.forwards
        return results


def _stats(
    new_tokens: int, histograms: list[list[int]], seconds: dict[str, float], seeds: list[int]
) -> Stats:
    longest = max((len(h) for h in histograms), default=0)
    total = [sum(h[i] for h in histograms if i < len(h)) for i in range(longest)]
    forwards = sum(total)
    emitted = sum((i + 1) * n for i, n in enumerate(total))
    return Stats(
        new_tokens=new_tokens,
        target_forwards=forwards,
        accept_length=emitted / forwards if forwards else 0.0,
        accept_histogram=total,
        seconds=dict(seconds),
        seeds=list(seeds),
    )
