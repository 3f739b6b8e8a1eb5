"""Training text, batches, and the target's features for them.

Text comes as JSON lines {prompt: ids, response: ids, greedy: bool}: conversations the target wrote
itself. Features (last hidden state after the final norm; for EAGLE-3 heads the outputs of three
layers too) are computed the first time a conversation is met and kept, so that training starts at
once and later epochs skip the target.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "Conversation",
    "FeatureCache",
    "batches",
    "draft_vocabulary",
    "read_conversations",
    "split",
    "target_features",
]


@dataclass(frozen=True)
class Conversation:
    """One prompt with the target's answer to it, as token ids."""

    prompt: list[int]
    response: list[int]
    greedy: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return self.prompt + self.response

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def read_conversations(path: str | os.PathLike[str]) -> list[Conversation]:
    """Read a .jsonl or .jsonl.gz file of {prompt, response, greedy?}.

    Raises ValueError naming the line that is not such an object.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    found = []
    with opener(path, "rt") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                item = Conversation(
                    [int(t) for t in row["prompt"]],
                    [int(t) for t in row["response"]],
                    bool(row.get("greedy", False)),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected an object with lists of token ids `prompt` "
                    f"and `response`, got {error!r}"
                ) from error
            if item.prompt and item.response:
                found.append(item)
    if not found:
        raise ValueError(f"{path}: expected at least one conversation, got none")
    return found


def split(
    conversations: Sequence[Conversation], held_out: int, max_tokens: int | None, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """(training, validation): `held_out` greedy conversations apart, training cut to `max_tokens`.

    Greedy text is preferred on both sides: it is what a greedy decoder drafts. The same seed gives
    the same split.
    """
    order = np.random.default_rng(seed).permutation(len(conversations))
    ranked = sorted(order.tolist(), key=lambda i: not conversations[i].greedy)
    if held_out >= len(ranked):
        raise ValueError(
            f"held_out: expected fewer than the {len(ranked)} conversations there are, "
            f"got {held_out}"
        )
    validation = [conversations[i] for i in ranked[:held_out]]
    training: list[Conversation] = []
    total = 0
    for i in ranked[held_out:]:
        if max_tokens is not None and training and total + len(conversations[i]) > max_tokens:
            break
        training.append(conversations[i])
        total += len(conversations[i])
    return training, validation


def draft_vocabulary(
    conversations: Sequence[Conversation], size: int, always: Sequence[int] = ()
) -> list[int]:
    """Return the `size` most frequent response ids, ascending, `always` (EOS) among them."""
    counts: Counter[int] = Counter()
    for c in conversations:
        counts.update(c.response)
    kept = dict.fromkeys(always)
    for token, _ in counts.most_common():
        if len(kept) >= size:
            break
        kept[token] = None
    return sorted(kept)


def batches(
    conversations: Sequence[Conversation], batch_size: int, epoch: int, seed: int
) -> Iterator[list[int]]:
    """Yield lists of conversation indices: every conversation once, the order drawn per epoch.

    Within windows of 16 batches, neighbours in length share a batch, which keeps padding low.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(conversations))
    window = 16 * batch_size
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window].tolist(), key=lambda i: len(conversations[i]))
        groups = [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
        for g in rng.permutation(len(groups)):
            yield groups[g]


def pad(conversations: Sequence[Conversation], device: torch.device | str = "cpu") -> Tensor:
    """Token ids [B, T] int64, right-padded with 0 (causal attention keeps padding out of rows)."""
    longest = max(len(c) for c in conversations)
    out = torch.zeros(len(conversations), longest, dtype=torch.int64)
    for row, c in enumerate(conversations):
        out[row, : len(c)] = torch.tensor(c.tokens)
    return out.to(device)


@torch.no_grad()
def target_features(target: nn.Module, tokens: Tensor, taps: Sequence[int] | None = None) -> Tensor:
    """[f; outputs of the layers ``taps``], f the last hidden state after the final norm.

    tokens [B, T] -> [B, T, (1 + len(taps)) * H]. What a head reads is the last `feature_size`
    columns: f itself without taps. The last layer cannot be tapped here.
    """
    states = target.get_decoder()(
        input_ids=tokens, use_cache=False, output_hidden_states=taps is not None
    )
    if taps is None:
        return states.last_hidden_state
    # hidden_states[i + 1] is the output of layer i.
    tapped = [states.hidden_states[i + 1] for i in taps]
    return torch.cat([states.last_hidden_state, *tapped], dim=-1)


class FeatureCache:
    """Features of every conversation, computed once, kept in bfloat16 in a file of `directory`.

    The file is a memory map (1.15 KB a token at H = 576, four times that with three taps), so an
    interrupted run keeps what it has computed, and so does one that goes on with more conversations
    behind the same ones; features of other text or another target are computed anew.
    `batch(indices)` -> tokens [B, T], features [B, T, W] as `target_features` has them (zero in
    padding).
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        target: nn.Module,
        directory: str | os.PathLike[str],
        name: str = "features",
        taps: Sequence[int] | None = None,
    ) -> None:
        self.conversations = conversations
        self.target, self.taps = target, taps
        weight = target.get_input_embeddings().weight
        self.width, self.device = weight.shape[1] * (1 + len(taps or ())), weight.device
        lengths = np.array([len(c) for c in conversations], dtype=np.int64)
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        # bfloat16 travels as int16: numpy has no such type.
        shape, file = (int(self.offsets[-1]), self.width), path / f"{name}.bin"
        done, key = path / f"{name}.done", path / f"{name}.key"
        # A file written before there were keys is known by its size.
        kept = done.stat().st_size if done.is_file() and file.is_file() else 0
        if key.is_file():
            kept = kept if key.read_text() == self._owner(kept) else 0
        elif kept != len(conversations) or file.stat().st_size != 2 * shape[0] * shape[1]:
            kept = 0
        # One that was cut would get zeros for what it lost.
        if kept and file.stat().st_size < 2 * int(self.offsets[: kept + 1][-1]) * self.width:
            kept = 0
        if not kept:
            done.unlink(missing_ok=True)
        self.store = _memmap(file, shape, np.int16)
        self.done = _memmap(done, (len(conversations),), np.uint8)
        key.write_text(self._owner(len(conversations)))

    def _owner(self, count: int) -> str:
        """A digest of what the features of the first ``count`` conversations are of."""
        digest = hashlib.sha256(self.offsets[: count + 1].tobytes())
        for c in self.conversations[:count]:
            digest.update(np.array(c.tokens, dtype=np.int64).tobytes())
        weights = [self.target.get_input_embeddings().weight, *self.target.parameters()]
        first = torch.cat([w.detach().flatten()[:64].float().cpu() for w in weights])
        digest.update(first.numpy().tobytes() + str(self.taps).encode())
        return digest.hexdigest()

    def fill(self, indices: Sequence[int]) -> int:
        """Compute what is missing of these conversations; return how many tokens that were."""
        missing = [i for i in indices if not self.done[i]]
        if not missing:
            return 0
        rows = [self.conversations[i] for i in missing]
        features = target_features(self.target, pad(rows, self.device), self.taps)
        packed = features.to("cpu", torch.bfloat16).view(torch.int16).numpy()
        for row, i in enumerate(missing):
            start, stop = self.offsets[i], self.offsets[i + 1]
            self.store[start:stop] = packed[row, : stop - start]
            self.done[i] = 1
        return sum(len(c) for c in rows)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens [B, T] int64 and features [B, T, W] bfloat16 of these conversations."""
        self.fill(indices)
        tokens = pad([self.conversations[i] for i in indices])
        features = torch.zeros(*tokens.shape, self.width, dtype=torch.bfloat16)
        for row, i in enumerate(indices):
            values = np.asarray(self.store[self.offsets[i] : self.offsets[i + 1]])
            features[row, : len(values)] = torch.from_numpy(values.copy()).view(torch.bfloat16)
        return tokens.to(self.device), features.to(self.device)

    def flush(self) -> None:
        """Write what is still in memory to the files."""
        self.store.flush()
        self.done.flush()


def _memmap(path: Path, shape: tuple[int, ...], dtype: type[np.generic]) -> np.memmap:
    """The file as an array, cut or lengthened (with zeros) to that shape."""
    path.touch()
    os.truncate(path, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)
