r"""The decoding loop: draft a tree, verify it in one target forward, commit the accepted path.

::

    head --logits--> expand_topk, extend_draft_tree  (x max_depth)  --candidates--> build_tree
    target --logits--> process_logits --> sample_and_verify --> compact_kv,
        prefix_lens += accept_length + 1

Shapes are the same at every step, and the only thing a step reads back is the tokens it emitted.
Plain decoding (`EagleDecoder.generate_plain`) is the same loop without the tree. The noise of a
sampled token belongs to its position, so both emit the same tokens from the same seed.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .cache import compact_kv
from .flatten import build_tree
from .generation import (
    Batch,
    Generation,
    Generations,
    Request,
    SamplingParams,
    Stats,
    check_count,
    make_requests,
    read_prompts,
)
from .logits import count_tokens, process_logits, token_logprobs
from .models.draft import (
    Candidates,
    DraftCache,
    HeadDrafter,
    grow_candidates,
    new_draft_cache,
    refeed,
    take_rows,
)
from .seed import VerifiedTree, eagle2_generate_tree, verify_with_target
from .tree import DraftTree
from .verify import sample_and_verify, sample_tokens

if TYPE_CHECKING:
    from .models.heads import EagleHead
    from .models.target import SlotCache, TargetModel

__all__ = [
    "DraftCandidate",
    "DraftStep",
    "EagleDecoder",
    "Generation",
    "Generations",
    "SamplingParams",
    "Stats",
    "TreeConfig",
    "VerifiedTree",
    "eagle2_generate_tree",
    "verify_with_target",
]

_PREFILL_ROWS = 512


@dataclass(frozen=True)
class TreeConfig:
    """Shape of the draft tree.

    ``max_nodes`` slots, root included; ``top_k`` children per node and rows per level;
    ``max_depth`` levels. A level is drafted only while some request's frontier has a node whose
    path the head gives a probability of at least ``stop_below`` (0: all levels; above it, a level
    costs a read by the host). Raises ValueError for a count below 1 or a probability outside
    [0, 1).
    """

    max_nodes: int = 16
    top_k: int = 4
    max_depth: int = 4
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_nodes", "top_k", "max_depth"):
            check_count(name, getattr(self, name))
        if not 0 <= self.stop_below < 1:
            raise ValueError(f"stop_below: expected a value in [0, 1), got {self.stop_below!r}")

    @classmethod
    def auto(cls, decoder: EagleDecoder, prompts: Sequence[Any] | None = None) -> TreeConfig:
        """Measure the shape with the most expected tokens per second on this machine; see `tune`.

        Takes about a minute on a CPU; ``prompts`` are a few like those that will be asked.
        """
        from .tune import tune

        return tune(decoder, prompts).best

    @property
    def num_candidates(self) -> int:
        """Candidates of all levels: K + (max_depth - 1) K^2."""
        return self.top_k + (self.max_depth - 1) * self.top_k**2


class DraftCandidate(NamedTuple):
    """One drafted token: ``parent`` is a candidate or -1 (root), ``slot`` is -1 if pruned."""

    level: int
    token: int
    parent: int
    probability: float
    slot: int


class DraftStep(NamedTuple):
    """One step of one request, read back: what was drafted, kept, and accepted.

    ``prompt`` is followed by the root; ``candidates`` lists all levels' candidates in the order of
    `build_tree`'s input; ``accepted`` are the accepted path's slots, root first; ``emitted`` the
    tokens committed after the root, bonus last.
    """

    prompt: list[int]
    tree: DraftTree
    candidates: list[DraftCandidate]
    accepted: list[int]
    emitted: list[int]


@dataclass
class _State:
    """A batch on the device. ``pending`` are the true pairs the head has not seen yet."""

    cache: SlotCache
    draft_cache: DraftCache
    seeds: Tensor  # [B] int64
    filters: dict[str, Tensor]
    processors: dict[str, Tensor]  # of process_logits, with the history it counts
    prefix_lens: Tensor  # [B] int32
    roots: Tensor  # [B] int64
    root_hidden: Tensor | None = None  # [B, 1, H], the head's output at the root's row
    pending: tuple[Tensor, Tensor, Tensor] | None = None


class EagleDecoder:
    """Lossless decoding with EAGLE-2 trees, and plain decoding on the same stack.

    Args:
        target: a `TargetModel`, or a transformers causal LM to make one of.
        head: the draft head; it is bound to the target's embedding and lm_head here.
        tokenizer: needed for prompts given as text, for text in results, and for stop strings.
        config: shape of the draft tree.

    Raises:
        ValueError: the head's hidden size, vocabulary or device is not the target's, or the target
            lacks the layers that an EAGLE-3 head reads.
    """

    def __init__(
        self,
        target: TargetModel | nn.Module,
        head: EagleHead,
        tokenizer: Any = None,
        config: TreeConfig | None = None,
    ) -> None:
        self.target = _as_target(target)
        self.head = head
        self.tokenizer = tokenizer
        self.config = TreeConfig() if config is None else config
        _check_pair(self.target, head)
        # Again if it was bound: to these weights, in their present dtype and place.
        head.bind(self.target.hf_model)
        if self.target.pack_weights:
            head.pack_weights()
        self._taps = head.taps(self.target.num_layers)
        # The caches of the last call, taken by the next one that fits into them.
        self._idle: tuple[SlotCache, DraftCache] | None = None

    @classmethod
    def from_pretrained(
        cls,
        target: str | os.PathLike[str],
        draft: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        config: TreeConfig | None = None,
        pack_weights: bool = True,
    ) -> EagleDecoder:
        """Load a target with its tokenizer, and a head of either kind (directory or hub name).

        ``dtype`` defaults to that of the target's files, for the head too.
        ``pack_weights``: on a CPU in bfloat16, spend the memory of a second copy of the linear
        layers' weights on faster forwards (the values are the same).
        """
        from .models.heads import EagleHead
        from .models.target import load_target_model

        model, tokenizer = load_target_model(
            target, dtype=dtype, device=device, pack_weights=pack_weights
        )
        head = EagleHead.from_pretrained(draft, model.hf_model, dtype=model.dtype)
        return cls(model, head.eval(), tokenizer, config)

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        eos_token_ids: Sequence[int] | None = None,
        config: TreeConfig | None = None,
        keep_logits: bool = False,
    ) -> Any:
        """Continue each prompt, several tokens per target forward.

        Args:
            prompts: text or token ids of one request, or a list of such. Text is tokenized as it
                is: a chat needs the tokenizer's template first (the command applies it).
            max_new_tokens: most tokens per request; the end of the position table may come first.
            sampling: greedy by default.
            stop: strings that end a request; the text is cut before the first one found. They are
                looked for in the text without special tokens.
            eos_token_ids: ids that end a request; the model's by default, () for none.
            config: another tree than the decoder's.
            keep_logits: keep the logits behind every token in `Generation.logits`.

        Returns:
            A `Generation` for one request, `Generations` for a list.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a prompt that leaves no room
                in the position table, text or ``stop`` without a tokenizer, a bias that bans every
                token.
        """
        config = self._tree_config(config)
        batch = self._batch(prompts, max_new_tokens, sampling, stop, eos_token_ids, keep_logits)
        for _ in self._tree_steps(batch, config):
            pass
        return batch.results()

    def generate_plain(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        eos_token_ids: Sequence[int] | None = None,
        pad_rows: int = 1,
        keep_logits: bool = False,
    ) -> Any:
        """`generate`, one token per target forward.

        ``pad_rows`` gives each request that many rows per forward, all but the first empty: for
        comparing bits, because matrix products of one row may round differently from a tree's.
        """
        check_count("pad_rows", pad_rows)
        batch = self._batch(prompts, max_new_tokens, sampling, stop, eos_token_ids, keep_logits)
        for _ in self._plain_steps(batch, pad_rows):
            pass
        return batch.results()

    def stream(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        eos_token_ids: Sequence[int] | None = None,
        config: TreeConfig | None = None,
        plain: bool = False,
        token_ids: bool = False,
        logits: Sequence[list[Tensor]] | None = None,
    ) -> Iterator[Any]:
        """Yield each step's new text (token ids without a tokenizer); arguments of `generate`.

        ``token_ids`` asks for ids in any case; it excludes ``stop``. ``logits`` holds one list per
        request, to which each step appends the target's logits [tokens, V] behind its tokens.

        One prompt yields pieces, a list of prompts yields a list of pieces per step. A character
        whose bytes are not complete, and text that may turn out to begin a stop string, waits for a
        later step; the pieces together are `generate`'s text. Raises ValueError for logprobs, which
        have no place in the pieces.
        """
        config = self._tree_config(config)
        _refuse_logprobs(sampling, "stream")
        if token_ids and stop:
            raise ValueError("token_ids: expected no stop strings, which are looked for in text")
        follow = self.tokenizer is not None and not token_ids
        keep = logits is not None
        batch = self._batch(prompts, max_new_tokens, sampling, stop, eos_token_ids, keep, follow)
        if logits is not None:
            for request, pieces in zip(batch.requests, logits, strict=True):
                request.logits = pieces
        steps = self._plain_steps(batch, 1) if plain else self._tree_steps(batch, config)
        return _pieces(batch, steps)

    @torch.inference_mode()
    def draft_step(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        config: TreeConfig | None = None,
    ) -> DraftStep:
        """Prefill one prompt, draft and verify one tree, and read it all back to look at.

        The candidates of pruned nodes are listed too. Raises as `generate` does, and ValueError for
        logprobs.
        """
        config = self._tree_config(config)
        _refuse_logprobs(sampling, "draft_step")
        batch = self._batch(prompt, config.max_depth + 2, sampling, (), (), False)
        if not batch.single:
            raise ValueError(f"prompt: expected one request, got {len(batch)}")
        request = batch.requests[0]
        with self._device_state(batch, config.max_nodes, config) as state:
            self._prefill(batch, state, draft=True)
            if not batch.active:
                raise ValueError("prompt: expected room in the position table for a second token")
            tree, candidates = self._draft(batch, state, config)
            accept_index, emitted = self._verify(batch, state, config, tree)
        return DraftStep(
            request.prompt,
            tree,
            _list_candidates(tree, candidates, config.top_k),
            [slot for slot in accept_index[0].tolist() if slot >= 0],
            emitted[0],
        )

    def _tree_config(self, config: TreeConfig | None) -> TreeConfig:
        if config is not None and not isinstance(config, TreeConfig):
            raise TypeError(f"config: expected a TreeConfig, got {type(config).__name__}")
        return self.config if config is None else config

    def _batch(
        self,
        prompts: Any,
        max_new_tokens: int,
        sampling: SamplingParams | None,
        stop: str | Sequence[str],
        eos_token_ids: Sequence[int] | None,
        keep_logits: bool,
        follow_text: bool = False,
    ) -> Batch:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling: expected SamplingParams, got {type(sampling).__name__}")
        sampling = sampling or SamplingParams()
        sampling.check_vocabulary(self.target.vocab_size)
        eos = self.target.eos_token_ids() if eos_token_ids is None else eos_token_ids
        single, ids = read_prompts(prompts, self.tokenizer, self.target.vocab_size)
        requests = make_requests(
            ids,
            max_new_tokens=max_new_tokens,
            max_positions=self.target.max_positions,
            eos_token_ids=eos,
            stop=stop,
            tokenizer=self.tokenizer,
            follow_text=follow_text,
        )
        return Batch(requests, single, sampling, keep_logits)

    @torch.inference_mode()
    def _tree_steps(self, batch: Batch, config: TreeConfig) -> Iterator[None]:
        with self._device_state(batch, config.max_nodes, config) as state:
            self._prefill(batch, state, draft=True)
            yield
            while batch.active:
                tree, _ = self._draft(batch, state, config)
                self._verify(batch, state, config, tree)
                yield

    @torch.inference_mode()
    def _plain_steps(self, batch: Batch, rows: int) -> Iterator[None]:
        with self._device_state(batch, rows, None) as state:
            self._prefill(batch, state, draft=False)
            yield
            device, b = self.target.device, len(batch)
            tokens = torch.zeros(b, rows, dtype=torch.int64, device=device)
            first_slot = torch.zeros(b, 1, dtype=torch.int32, device=device)
            mask = depths = None
            if rows > 1:
                # Every row but the first sees nothing.
                mask = torch.zeros(b, rows, (rows + 63) // 64, dtype=torch.int64, device=device)
                mask[:, 0, 0] = 1
                depths = torch.zeros(b, rows, dtype=torch.int32, device=device)
            while batch.active:
                start = time.perf_counter()
                alive = torch.tensor(batch.alive(), dtype=torch.int32, device=device)
                tokens[:, 0] = state.roots
                positions = state.prefix_lens.long()[:, None].expand(b, rows).contiguous()
                features = self.target.forward(
                    state.cache,
                    tokens,
                    positions,
                    state.prefix_lens,
                    tree_mask=mask,
                    depths=depths,
                    lengths=alive,
                )
                logits = self.target.logits(features)[:, :1]
                processed = _process(logits, state.processors)
                sampled = sample_tokens(processed, positions[:, :1], state.seeds, **state.filters)
                logprobs = _logprobs(batch, logits, processed, first_slot, sampled)
                _count(state.processors, sampled)
                state.roots = sampled[:, 0]
                state.prefix_lens = state.prefix_lens + alive
                kept = batch.take(sampled.tolist())
                _keep(batch, batch.requests, list(map(len, kept)), logits, logprobs)
                batch.spend("verify", start)
                yield

    def _forward(self, draft: bool, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The target's features, for its lm_head and (to ``draft``) for the head."""
        if draft and self._taps is not None:
            return self.target.forward_tapped(self._taps, *args, **kwargs)
        features = self.target.forward(*args, **kwargs)
        return features, features

    def _prefill(self, batch: Batch, state: _State, draft: bool) -> None:
        """Prompts through the target and their pairs through the head; the first new tokens.

        Chunks of all prompts go together, each row padded at its end.
        """
        start = time.perf_counter()
        device, lens = self.target.device, [len(r.prompt) for r in batch.requests]
        b, longest = len(batch), max(lens)
        # The token after position i is column i + 1: one column more than the longest prompt.
        tokens = torch.zeros(b, longest + 1, dtype=torch.int64)
        for i, request in enumerate(batch.requests):
            tokens[i, : lens[i]] = torch.tensor(request.prompt)
        tokens = tokens.to(device)
        totals = torch.tensor(lens, dtype=torch.int32, device=device)
        last = totals.long() - 1
        for first in range(0, longest, _PREFILL_ROWS):
            width = min(_PREFILL_ROWS, longest - first)
            columns = torch.arange(first, first + width, device=device)
            before, lengths = totals.clamp(max=first), (totals - first).clamp(0, width)
            features, for_head = self._forward(
                draft,
                state.cache,
                tokens[:, first : first + width].contiguous(),
                # Padding repeats the last position, so a position table is never overrun.
                torch.minimum(columns, last[:, None]),
                before,
                lengths=lengths,
            )
            ending = [i for i, n in enumerate(lens) if first < n <= first + width]
            rows = torch.tensor(ending, dtype=torch.int64, device=device)
            if ending:
                at = last[rows]
                logits = self.target.logits(features[rows, at - first][:, None])
                filters = {name: value[rows] for name, value in state.filters.items()}
                processors = {name: value[rows] for name, value in state.processors.items()}
                processed = _process(logits, processors)
                sampled = sample_tokens(processed, at[:, None], state.seeds[rows], **filters)
                tokens[rows, at + 1] = sampled[:, 0]
                first_slot = torch.zeros(len(ending), 1, dtype=torch.int32, device=device)
                logprobs = _logprobs(batch, logits, processed, first_slot, sampled)
                requests = [batch.requests[i] for i in ending]
                _keep(batch, requests, [1] * len(ending), logits, logprobs)
            if draft:
                following = tokens[:, first + 1 : first + 1 + width].contiguous()
                hidden = refeed(self.head, state.draft_cache, following, for_head, before, lengths)
                if state.root_hidden is None:
                    state.root_hidden = hidden.new_zeros(b, 1, hidden.shape[-1])
                if ending:
                    state.root_hidden[rows, 0] = hidden[rows, at - first]
        state.prefix_lens = totals
        state.roots = tokens.gather(1, last[:, None] + 1)[:, 0]
        _count(state.processors, state.roots[:, None])
        batch.take([[token] for token in state.roots.tolist()], forward=False)
        batch.spend("prefill", start)

    def _draft(
        self, batch: Batch, state: _State, config: TreeConfig
    ) -> tuple[DraftTree, Candidates]:
        """Grow the levels from the root's row, then keep the best ``max_nodes`` nodes."""
        start = time.perf_counter()
        if state.pending is not None:
            state.root_hidden = self._refeed(state, *state.pending)
            state.pending = None
        assert state.root_hidden is not None
        drafter = HeadDrafter(self.head, state.draft_cache, state.prefix_lens, state.root_hidden)
        candidates = grow_candidates(
            drafter, len(batch), config.top_k, config.max_depth, config.stop_below
        )
        limits = torch.tensor(
            batch.limits(config.max_nodes), dtype=torch.int32, device=self.target.device
        )
        tree = build_tree(state.roots, state.prefix_lens, *candidates, config.max_nodes, limits)
        batch.spend("draft", start)
        return DraftTree(*tree), candidates

    def _refeed(self, state: _State, tokens: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """The committed pairs through the head; [B, 1, H] its output at the root's, the last."""
        before = state.prefix_lens - lengths
        hidden = refeed(self.head, state.draft_cache, tokens, features, before, lengths)
        return take_rows(hidden, (lengths - 1).clamp(min=0)[:, None])

    def _verify(
        self, batch: Batch, state: _State, config: TreeConfig, tree: DraftTree
    ) -> tuple[Tensor, list[list[int]]]:
        """One target forward of the tree; the path the target agrees with joins the prefix.

        Returns the path's slots [B, max_depth + 1] and the tokens kept.
        """
        start = time.perf_counter()
        features, for_head = self._forward(
            True,
            state.cache,
            tree.draft_tokens,
            tree.position_ids,
            state.prefix_lens,
            tree_mask=tree.tree_mask,
            depths=tree.depths,
            lengths=tree.num_nodes,
        )
        logits = self.target.logits(features)
        processed = _process(logits, state.processors, tree)
        emitted, accept_index, accept_length, bonus = sample_and_verify(
            processed,
            tree.position_ids,
            state.seeds,
            tree.draft_tokens,
            tree.first_child,
            tree.next_sibling,
            config.max_depth,
            tree.num_nodes,
            **state.filters,
        )
        logprobs = _logprobs(batch, logits, processed, accept_index, emitted)
        _count(state.processors, emitted)
        compact_kv(state.cache.tensors, accept_index, accept_length, state.prefix_lens)
        taken = accept_length + 1
        path = accept_index.clamp(min=0)
        state.prefix_lens = state.prefix_lens + taken
        # A request that stands still keeps its root; its bonus token is -1.
        state.roots = torch.where(taken > 0, bonus, state.roots)
        state.pending = (emitted.clamp(min=0), take_rows(for_head, path), taken)
        # The step's one read: -1 past the accepted path.
        kept = batch.take([[t for t in row if t >= 0] for row in emitted.tolist()])
        if batch.keep_logits:
            logits = take_rows(logits, path)
        _keep(batch, batch.requests, list(map(len, kept)), logits, logprobs)
        batch.spend("verify", start)
        return accept_index, kept

    @contextmanager
    def _device_state(self, batch: Batch, rows: int, config: TreeConfig | None) -> Iterator[_State]:
        """A state with room for every request's tokens and ``rows`` spare slots past them."""
        b = len(batch)
        most = max(len(r.prompt) + r.wanted for r in batch.requests)
        draft_rows = 0 if config is None else config.top_k * config.max_depth
        caches = self._take_caches(b, most + max(rows, draft_rows, 1))
        device = self.target.device
        unset = torch.zeros(b, dtype=torch.int64, device=device)
        try:
            yield _State(
                cache=caches[0].narrow(b),
                draft_cache=caches[1].narrow(b),
                seeds=torch.tensor(batch.seeds, dtype=torch.int64, device=device),
                filters=batch.sampling.tensors(b, device),
                processors=batch.sampling.processors(
                    [r.prompt for r in batch.requests], self.target.vocab_size, device
                ),
                prefix_lens=unset.int(),
                roots=unset,
            )
        finally:
            self._idle = caches

    def _take_caches(self, batch: int, capacity: int) -> tuple[SlotCache, DraftCache]:
        """The idle caches when they are large enough, else new ones (they grow between calls)."""
        idle, self._idle = self._idle, None
        if (
            idle is not None
            and idle[0].batch >= batch
            and idle[0].capacity >= capacity
            # The models may have been moved or converted since.
            and all(
                (cache.dtype, cache.device) == (model.dtype, model.device)
                for cache, model in (
                    (idle[0].tensors[0], self.target),
                    (idle[1].k, self.head.fc.weight),
                )
            )
        ):
            return idle
        capacity = math.ceil(capacity / 256) * 256
        return (
            self.target.new_cache(batch, capacity),
            new_draft_cache(self.head, batch, capacity),
        )


def _as_target(target: TargetModel | nn.Module) -> TargetModel:
    from .models.target import TargetModel

    return target if isinstance(target, TargetModel) else TargetModel(target)


def _check_pair(target: TargetModel, head: EagleHead) -> None:
    width = head.config.target_hidden_size or head.config.hidden_size
    for name, expected, got in (
        ("hidden_size", target.hidden_size, width),
        ("vocab_size", target.vocab_size, head.config.vocab_size),
        ("device", target.device, head.fc.weight.device),
    ):
        if expected != got:
            raise ValueError(f"head: expected the target's {name} {expected}, got {got}")


def _refuse_logprobs(sampling: SamplingParams | None, call: str) -> None:
    if getattr(sampling, "logprobs", False):
        raise ValueError(f"logprobs: {call} has no place for them; use generate")


def _process(
    logits: Tensor, processors: dict[str, Tensor], tree: DraftTree | None = None
) -> Tensor:
    """The logits after bias and penalties, in float32 at least; the same tensor without any."""
    if not processors:
        return logits
    processed = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    nodes = () if tree is None else (tree.draft_tokens, tree.parents, tree.num_nodes)
    process_logits(processed, *nodes, **processors)
    return processed


def _count(processors: dict[str, Tensor], tokens: Tensor) -> None:
    """Emitted tokens [B, T] join the history that the next step's penalties count."""
    if "output_counts" in processors:
        count_tokens(processors["output_counts"], tokens)


def _logprobs(
    batch: Batch, logits: Tensor, processed: Tensor, slots: Tensor, tokens: Tensor
) -> Tensor | None:
    """[B, T] log-probabilities of the tokens drawn at these slots, where asked for."""
    asked = batch.sampling.logprobs
    if not asked:
        return None
    return token_logprobs(processed if asked == "processed" else logits, slots, tokens)


def _keep(
    batch: Batch,
    requests: Sequence[Request],
    counts: Sequence[int],
    logits: Tensor,
    logprobs: Tensor | None,
) -> None:
    """What was asked for behind each request's ``counts`` new tokens; it stays on the device."""
    for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
        if batch.keep_logits:
            request.logits.append(logits[i, :count].clone())
        if logprobs is not None:
            request.logprobs.append(logprobs[i, :count].clone())


def _pieces(batch: Batch, steps: Iterator[None]) -> Iterator[Any]:
    for _ in steps:
        pieces = batch.take_pieces()
        if pieces if batch.single else any(pieces):
            yield pieces


def _list_candidates(tree: DraftTree, drafted: Candidates, top_k: int) -> list[DraftCandidate]:
    """All candidates of request 0; a kept one is the child of its parent's slot with its token."""
    count = int(tree.num_nodes[0])
    slot_of = {
        (parent, token): slot
        for slot, (parent, token) in enumerate(
            zip(tree.parents[0].tolist(), tree.draft_tokens[0].tolist(), strict=True)
        )
        if 0 < slot < count
    }
    slots = {-1: 0}
    candidates = []
    for i, (token, score, parent) in enumerate(zip(*(t[0].tolist() for t in drafted), strict=True)):
        alive = score > -math.inf and slots[parent] >= 0
        slots[i] = slot_of.get((slots[parent], token), -1) if alive else -1
        level = 0 if i < top_k else 1 + (i - top_k) // top_k**2
        candidates.append(DraftCandidate(level, token, parent, math.exp(score), slots[i]))
    return candidates
