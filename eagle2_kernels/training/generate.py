"""Training text by the target itself: `write_text(DataConfig(output=...))`, or ``eagle2 data``.

A head learns its target's distribution, so its text is best written by that target. Answers come
from prompts in a file, or from prompts the target writes too: it continues its own chat template
where a user's message would stand. Requests run in lockstep batches; request i draws with seed
``seed + i``, so what it says does not depend on its batch or on interruptions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle2_kernels.evaluation import read_prompts

if TYPE_CHECKING:
    from eagle2_kernels.decode import EagleDecoder

__all__ = ["DataConfig", "write_text"]


@dataclass
class DataConfig:
    """What to write, and how much of it."""

    output: str = ""
    """The .jsonl file of {prompt, response, greedy, index}: token ids, one conversation a line."""
    target: str = "demo"
    """Hugging Face causal LM with its tokenizer, directory or hub name; "demo" is the demo's."""
    prompts: str | None = None
    """A .jsonl file of {"prompt": text}, taken in order, again from its start when it ends. Without
    it the target writes the prompts too, at temperature 1. Leave out what you measure with."""
    conversations: int = 1000
    """Conversations in all, those of earlier runs of this file included."""
    batch_size: int = 64
    """Requests decoded together."""
    max_prompt_tokens: int = 96
    """Longest user message that the target writes."""
    max_new_tokens: int = 256
    """Longest answer."""
    temperature: float = 0.0
    """Of the answers. 0 is greedy: the text that a head for greedy decoding should learn from."""
    resume: bool = False
    """Continue an output file that holds conversations; without it such a file is an error."""
    threads: int | None = None
    """CPU threads. Default: torch's choice."""
    seed: int = 0
    """Request i draws with seed + i: its prompt, then its answer."""


class _Writer:
    """The target, its tokenizer, and the text around a user's message."""

    def __init__(
        self, config: DataConfig, prompts: list[str] | None, target: nn.Module, tokenizer: Any
    ) -> None:
        self.config, self.prompts, self.tokenizer = config, prompts, tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"target: expected a tokenizer with a chat template, {config.target}")
        self.decoder = _plain_decoder(target, tokenizer)
        # Where a user's message begins: the template's text before a message's first letter.
        mark = "eagle2-user-message"
        before, found, _ = self._template(mark).partition(mark)
        if not found:
            raise ValueError(f"target: expected a chat template that holds the message, {before!r}")
        self.opening = self._ids(before)

    def _template(self, message: str) -> str:
        chat = [{"role": "user", "content": message}]
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def messages(self, indices: range) -> list[str]:
        """The user's message of each conversation."""
        if self.prompts is not None:
            return [self.prompts[i % len(self.prompts)] for i in indices]
        starts = [self.opening] * len(indices)
        results = self._generate(starts, indices, self.config.max_prompt_tokens, 1.0)
        return [r.text.strip() for r in results]

    def rows(self, indices: range) -> Iterator[dict[str, Any]]:
        """The conversations of one batch; those without a message or an answer are left out."""
        c = self.config
        messages = self.messages(indices)
        # A conversation without a message keeps its place in the batch: request i has seed + i.
        starts = [self._ids(self._template(m)) if m else self.opening for m in messages]
        results = self._generate(starts, indices, c.max_new_tokens, c.temperature)
        for i, message, ids, result in zip(indices, messages, starts, results, strict=True):
            if message and result.token_ids:
                yield {
                    "prompt": ids,
                    "response": result.token_ids,
                    "greedy": c.temperature == 0,
                    "index": i,
                }

    def _generate(
        self, starts: list[list[int]], indices: range, most: int, temperature: float
    ) -> list[Any]:
        from eagle2_kernels.generation import SamplingParams

        sampling = SamplingParams(temperature=temperature, seed=self.config.seed + indices[0])
        return self.decoder.generate_plain(starts, max_new_tokens=most, sampling=sampling)


def write_text(
    config: DataConfig, progress: Callable[[int, int, str], None] | None = None
) -> tuple[int, int]:
    """Append conversations to ``config.output`` up to ``config.conversations``.

    Each batch is on disk before the next begins, and an interrupted run continues with ``resume``.
    ``progress(done, all, text)`` is called after each. Returns (conversations, tokens) written by
    this call.

    Raises FileExistsError for a file with conversations without ``resume``, FileNotFoundError
    without the file of prompts, ValueError for prompts that cannot be read or a tokenizer without a
    chat template.
    """
    if not config.output:
        raise ValueError("output: expected a .jsonl file, got ''")
    for name in ("conversations", "batch_size", "max_prompt_tokens", "max_new_tokens"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(config, name)}")
    path = Path(config.output)
    start = _next_index(path, config.resume)
    if config.threads:
        torch.set_num_threads(config.threads)
    # Before the target is loaded: a wrong file is told at once.
    prompts = None
    if config.prompts is not None:
        prompts = [p.text for p in read_prompts(config.prompts)]
    writer = _Writer(config, prompts, *_load(config.target))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = tokens = 0
    with path.open("a") as file:
        for first in range(start, config.conversations, config.batch_size):
            indices = range(first, min(first + config.batch_size, config.conversations))
            for row in writer.rows(indices):
                file.write(json.dumps(row) + "\n")
                written += 1
                tokens += len(row["prompt"]) + len(row["response"])
            file.flush()
            os.fsync(file.fileno())
            if progress is not None:
                progress(indices[-1] + 1, config.conversations, f"{tokens / 1e6:.2f} M tokens")
    return written, tokens


def _next_index(path: Path, resume: bool) -> int:
    """One past the last conversation of a file; with `resume` a line that was cut is removed."""
    whole = path.read_bytes() if path.is_file() else b""
    if not whole:
        return 0
    end = whole.rfind(b"\n") + 1
    lines, cut = whole[:end].splitlines(), whole[end:]
    ours = cut.startswith(_OPENING[: len(cut)]) and (b"}" not in cut or b'"index"' in cut)
    try:
        start = int(json.loads(lines[-1])["index"]) + 1 if lines else 0
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ValueError(
            f"output: expected lines that `eagle2 data` wrote, {path} ends with "
            f"{(cut or lines[-1])[:80]!r}"
        )
    if not resume:
        raise FileExistsError(
            f"output: {path} holds {start} conversations; continue it (resume=True, --resume) or "
            "name another file"
        )
    if cut:
        os.truncate(path, end)
    return start


_OPENING = b'{"prompt": ['
"""How every line begins."""


def _load(name: str) -> tuple[nn.Module, Any]:
    if name == "demo":
        from eagle2_kernels.demo import load_target, load_tokenizer

        return load_target(), load_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    return model, AutoTokenizer.from_pretrained(name)


def _plain_decoder(target: nn.Module, tokenizer: Any) -> EagleDecoder:
    """A decoder for `generate_plain`, which never runs its head."""
    from eagle2_kernels.decode import EagleDecoder
    from eagle2_kernels.models.heads import EagleHead
    from eagle2_kernels.models.target import TargetModel

    head = EagleHead.from_target(target, [0])
    return EagleDecoder(TargetModel(target, pack_weights=True), head, tokenizer)
