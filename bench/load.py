"""Load: many decode steps of a synthetic target and draft against plain decoding.

``python bench/load.py --steps 100000`` draws requests (batches of 1 to 16, tree shapes, stops, EOS
sets, limits, seeds, filters, penalties), decodes each batch with trees and plainly through
`EagleDecoder`, and ends at the first token that differs. What the process holds (resident memory,
live tensors, file descriptors, threads) is sampled along the way and must not grow.

The models are real in what the loop sees: float64, one attention layer over the slot cache with
positions, a real `EagleHead`. They are small enough that a step is mostly the loop's own work.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

import eagle2_kernels as ek
from eagle2_kernels.decode import EagleDecoder, SamplingParams, TreeConfig
from eagle2_kernels.models.heads import EagleConfig, EagleHead
from eagle2_kernels.models.packed import PackedLinears
from eagle2_kernels.models.target import SlotCache, TargetModel

_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 8
_POSITIONS = 192
_LONGEST_PROMPT = 24
_BATCH = 16


class SyntheticTarget(TargetModel):
    """feature = e(token) + history * W_o attention(e(token) + p(position)); logits = W feature.

    ``history`` says how much the past matters: at 0 the next token depends on the last one alone.
    """

    def __init__(
        self, vocab: int, seed: int, history: float, window: int | None, hidden: int = 16
    ) -> None:
        # Not TargetModel's own: that one looks at how a transformers model attends.
        g = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, scale: float) -> nn.Parameter:
            values = torch.randn(rows, columns, generator=g, dtype=torch.float64) * scale
            return nn.Parameter(values, requires_grad=False)

        self.hf_model = self
        self.config = PretrainedConfig(
            num_hidden_layers=1, max_position_embeddings=_POSITIONS, eos_token_id=0
        )
        self._embedding = nn.Embedding(vocab, hidden, _weight=normal(vocab, hidden, 1.0))
        self._lm_head = nn.Linear(hidden, vocab, bias=False)
        self._lm_head.weight = normal(vocab, hidden, 1.0)
        self._positions = normal(_POSITIONS, hidden, 0.5)
        query, key = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
        self._qkv = normal(query + 2 * key, hidden, hidden**-0.5)
        self._o = normal(hidden, query, history * query**-0.5)
        self._window = window
        self._finish_logits = None
        self.pack_weights, self._packed_head = False, PackedLinears()
        self.fuse_layers, self._fused, self._is_settled = False, None, False

    @property
    def num_layers(self) -> int:
        return 1

    def get_input_embeddings(self) -> nn.Embedding:
        return self._embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self._lm_head

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        shape = (batch, capacity, _KV_HEADS, _HEAD_DIM)
        # What nobody wrote must not be read: NaN, where a model's own cache has zeros.
        k, v = (torch.full(shape, float("nan"), dtype=self.dtype) for _ in range(2))
        return SlotCache([k], [v])

    def forward(
        self,
        cache: SlotCache,
        token_ids: Tensor,
        position_ids: Tensor,
        prefix_lens: Tensor,
        *,
        tree_mask: Tensor | None = None,
        depths: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        e = F.embedding(token_ids, self._embedding.weight)
        x = F.linear(e + F.embedding(position_ids, self._positions), self._qkv)
        heads = x.unflatten(-1, (-1, _HEAD_DIM))
        q, k, v = heads.split((_HEADS, _KV_HEADS, _KV_HEADS), dim=-2)
        ek.write_kv(cache.k[0], cache.v[0], k, v, prefix_lens, lengths)
        attn = ek.tree_attention(
            q,
            cache.k[0],
            cache.v[0],
            prefix_lens,
            tree_mask,
            depths=None if self._window is None else depths,
            window=self._window,
            # Sharp: single keys decide, so that a wrong one shows.
            sm_scale=1.0,
        )
        return e + F.linear(attn.flatten(-2), self._o)


def synthetic_head(target: SyntheticTarget, draft_vocab: list[int] | None, seed: int) -> EagleHead:
    """A head that passes the token's embedding on, blurred: right where the past matters little."""
    config = EagleConfig(
        hidden_size=target.hidden_size,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=target.vocab_size,
        draft_vocab_size=None if draft_vocab is None else len(draft_vocab),
    )
    table = None if draft_vocab is None else torch.tensor(draft_vocab)
    head = EagleHead(config, table, dtype=torch.float64)
    head.reset_parameters(seed)
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, : config.hidden_size] += torch.eye(config.hidden_size)
        head.layers[0].self_attn.o_proj.weight.mul_(0.3)
        head.layers[0].mlp.down_proj.weight.mul_(0.3)
    return head.bind(target).eval()


class Letters:
    """A tokenizer whose token i is the character 0x4E00 + i."""

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        return "".join(chr(0x4E00 + i) for i in ids)


def make_decoders() -> list[EagleDecoder]:
    """Vocabularies, windows, draft vocabularies, and drafts from mostly right to mostly wrong."""
    decoders = []
    for seed, (vocab, history, window, draft) in enumerate(
        [
            (48, 0.2, None, None),
            (97, 0.5, None, None),
            (64, 1.5, 7, None),
            (300, 0.3, None, 120),
            (33, 3.0, 3, 20),
        ]
    ):
        target = SyntheticTarget(vocab, seed, history, window)
        ids = None if draft is None else random.Random(seed).sample(range(vocab), draft)
        decoders.append(EagleDecoder(target, synthetic_head(target, ids, seed), Letters()))
    return decoders


class Held(NamedTuple):
    """What the process holds: bytes, and numbers of things; tensors of before the run excepted."""

    rss: int
    tensors: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        # type(), not isinstance(): some objects answer the latter by importing themselves.
        tensors = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            tensors,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )


@dataclass
class Load:
    """A run. ``steps`` counts decode steps with a tree: target forwards after prefill."""

    seed: int = 0
    steps: int = 0
    plain_steps: int = 0
    requests: int = 0
    tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    samples: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._decoders = make_decoders()
        # Caches of the largest size first: they are kept from call to call. Any token ends a text.
        for decoder in self._decoders:
            decoder.generate(
                [[1] * _LONGEST_PROMPT] * _BATCH,
                max_new_tokens=_POSITIONS,
                eos_token_ids=range(decoder.target.vocab_size),
                config=TreeConfig(40, 8, 6),
            )

    def run(self, steps: int, samples: int = 40) -> None:
        """Decode until ``steps`` tree steps are done, looking at the process now and then.

        Raises AssertionError with the request's settings where tree and plain decoding differ.
        """
        # What is alive by now is none of the run's, and most of a collection's time.
        gc.collect()
        gc.freeze()
        try:
            due = [steps * (i + 1) // samples for i in range(samples)]
            while due:
                self._batch()
                if self.steps >= due[0]:
                    self.samples.append(Held.now())
                    due = [d for d in due if d > self.steps]
        finally:
            gc.unfreeze()

    def growth(self) -> Held:
        """What was held at the end beyond what was held after a tenth of the run."""
        first, last = self.samples[len(self.samples) // 10], self.samples[-1]
        return Held(*(b - a for a, b in zip(first, last, strict=True)))

    def _sampling(self, vocab: int) -> SamplingParams:
        rng = self._rng
        values: dict[str, Any] = {}
        if rng.random() < 0.6:
            values = {
                "temperature": rng.choice([0.3, 0.7, 1.0, 1.5]),
                "top_k": rng.choice([0, 0, 1, 5, 20]),
                "top_p": rng.choice([1.0, 1.0, 0.5, 0.9]),
                "min_p": rng.choice([0.0, 0.0, 0.05]),
                "seed": rng.randrange(-(2**63), 2**64),
            }
        if rng.random() < 0.3:
            values |= {
                "repetition_penalty": rng.choice([1.0, 0.8, 1.3]),
                "frequency_penalty": rng.choice([0.0, 0.4]),
                "presence_penalty": rng.choice([0.0, -0.3, 0.9]),
                "logit_bias": {t: rng.choice([-math.inf, -2.0, 3.0]) for t in range(5, vocab, 7)},
                "logprobs": rng.choice([False, "raw", "processed"]),
            }
        return SamplingParams(**values)

    def _batch(self) -> None:
        rng = self._rng
        decoder = rng.choice(self._decoders)
        vocab = decoder.target.vocab_size
        prompts = [
            [rng.randrange(vocab) for _ in range(rng.randint(1, _LONGEST_PROMPT))]
            for _ in range(rng.randint(1, _BATCH))
        ]
        settings: dict[str, Any] = {
            "max_new_tokens": rng.choice([1, 2, rng.randint(3, 40), rng.randint(3, 400)]),
            "sampling": self._sampling(vocab),
            "eos_token_ids": rng.sample(range(vocab), rng.choice([0, 0, 1, 2])),
        }
        if rng.random() < 0.3:
            text = decoder.tokenizer.decode([rng.randrange(vocab) for _ in range(4)])
            settings["stop"] = [text[:1], text[1:3]][: rng.randint(1, 2)]
        config = TreeConfig(rng.randint(1, 40), rng.randint(1, 8), rng.randint(1, 6))
        plain = decoder.generate_plain(prompts, **settings)
        tree = decoder.generate(prompts, **settings, config=config)
        where = f"{settings} {config}, batch {len(prompts)}, after {self.steps} steps"
        assert tree.token_ids == plain.token_ids, f"other tokens: {where}"
        assert tree.text == plain.text, f"another text: {where}"
        for a, b in zip(tree, plain, strict=True):
            pairs = zip(a.logprobs or [], b.logprobs or [], strict=True)
            assert all(math.isclose(x, y, abs_tol=1e-5) for x, y in pairs), f"logprobs: {where}"
        reasons = [g.finish_reason for g in plain]
        assert [g.finish_reason for g in tree] == reasons, f"another end: {where}"
        if rng.random() < 0.1:
            # Streamed, and left alone half way: the next call takes the caches it gives back.
            settings["sampling"] = replace(settings["sampling"], logprobs=False)
            stream = decoder.stream(prompts, **settings, config=config)
            pieces = [next(stream, [""] * len(prompts)) for _ in range(3)]
            stream.close()
            texts = ["".join(p) for p in zip(*pieces, strict=True)]
            agree = [a.startswith(b) for a, b in zip(plain.text, texts, strict=True)]
            assert all(agree), f"another stream: {where}"
        self.steps += tree.stats.target_forwards
        self.plain_steps += plain.stats.target_forwards
        self.requests += len(prompts)
        self.tokens += tree.stats.new_tokens
        for reason in reasons:
            self.finished[reason] = self.finished.get(reason, 0) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="decode steps with a tree")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-mb", type=float, default=32, help="growth of memory allowed, MB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    load = Load(options.seed)
    load.run(options.steps)
    first, last, growth = load.samples[0], load.samples[-1], load.growth()
    print(
        f"load: {load.steps} tree steps ({load.plain_steps} plain), {load.requests} requests, "
        f"{load.tokens} tokens identical, ends {load.finished}, "
        f"RSS {first.rss / 1e6:.0f} -> {last.rss / 1e6:.0f} MB, tensors {first.tensors} -> "
        f"{last.tensors}, files {first.files} -> {last.files}, threads {first.threads} -> "
        f"{last.threads}, {time.perf_counter() - start:.0f} s, seed {options.seed}"
    )
    more = {name: n for name, n in growth._asdict().items() if n > 0 and name != "rss"}
    if growth.rss > options.most_mb * 1e6 or more:
        sys.exit(f"load: the process grew: {growth}")


if __name__ == "__main__":
    main()
