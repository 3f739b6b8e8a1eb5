r"""The decoding loop: requests in, steps on the device (`step.py`), tokens out.

Shapes are the same at every step, and the only thing that is read back is the tokens it emitted.
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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

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
from .graphs import CudaRecorder, StepGraphs, check_capturable
from .models.draft import Candidates, DraftCache, new_draft_cache, refeed
from .seed import VerifiedTree, eagle2_generate_tree, verify_with_target
from .step import (
    PlainStep,
    State,
    TreeStep,
    Verified,
    count_emitted,
    logprobs_of,
    process,
    target_features,
)
from .tree import DraftTree
from .verify import sample_tokens

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
class _Caches:
    """The caches of a call, and the graphs that were captured over them."""

    target: SlotCache
    draft: DraftCache
    graphs: StepGraphs | None


class EagleDecoder:
    """Lossless decoding with EAGLE-2 trees, and plain decoding on the same stack.

    Args:
        target: a `TargetModel`, or a transformers causal LM to make one of.
        head: the draft head; it is bound to the target's embedding and lm_head here.
        tokenizer: needed for prompts given as text, for text in results, and for stop strings.
        config: shape of the draft tree.
        cuda_graph: run whole steps as CUDA graphs: the first two steps with a new number of
            requests, tree shape or set of filters run eagerly, the third is captured, and from then
            on a step is one launch. Tokens are the same. Memory of a step's temporaries is kept for
            each of the last few of these; changing the models' weights in place is seen, replacing
            Python values inside them is not.
        compile: on a CPU, run the layers of target and head as fused kernels (`torch.compile`'s
            Inductor; it needs a C++ compiler) around their matrix products and attention. Compiled
            here, once for any number of requests and rows: some ten seconds for layers of one code,
            less when Inductor's cache has them. Tree and plain decoding go through the same
            kernels, prompts too. The model itself is as it was; see `TargetModel.compiled`. For
            models whose layers are not fused anyway (`TargetModel.is_fused`): those are faster.

    Raises:
        ValueError: the head's hidden size, vocabulary or device is not the target's, or the target
            lacks the layers that an EAGLE-3 head reads; ``cuda_graph`` off a CUDA device, over
            several devices, or with checks that read values back (`eagle2_kernels.graphs`);
            ``compile`` off the CPU, or of layers that cannot be traced, by name.
        RuntimeError: ``compile`` found no C++ compiler.
    """

    # What turns steps into graphs; tests put their own here.
    _recorder = CudaRecorder

    def __init__(
        self,
        target: TargetModel | nn.Module,
        head: EagleHead,
        tokenizer: Any = None,
        config: TreeConfig | None = None,
        *,
        cuda_graph: bool = False,
        compile: bool = False,
    ) -> None:
        self.target = _as_target(target)
        self.head = head
        self.tokenizer = tokenizer
        self.config = TreeConfig() if config is None else config
        _check_pair(self.target, head)
        # Again if it was bound: to these weights, in their present dtype and place.
        head.bind(self.target.hf_model)
        if self.target.pack_weights:
            head.pack_weights(self.target.packed_lm_head)
        if compile:
            self.target = self.target.compiled()
            head.compile_layer()
        elif self.target.fuse_layers:
            head.fuse_layer()
        self._taps = head.taps(self.target.num_layers)
        self.cuda_graph = cuda_graph
        if cuda_graph:
            check_capturable(self.target, head, self._recorder.device_type)
        # The caches of the last call, taken by the next one that fits into them.
        self._idle: _Caches | None = None

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
        fuse_layers: bool = True,
        cuda_graph: bool = False,
        compile: bool = False,
    ) -> EagleDecoder:
        """Load a target with its tokenizer, and a head of either kind (directory or hub name).

        ``dtype`` defaults to that of the target's files, for the head too.
        ``pack_weights``: on a CPU in bfloat16, spend the memory of a second copy of the linear
        layers' weights on faster forwards (the values are the same).
        ``fuse_layers``: on a CPU, run layers whose code is known by few operators of this library;
        see `TargetModel`.
        ``cuda_graph``, ``compile``: see the class.
        """
        from .models.heads import EagleHead
        from .models.target import load_target_model

        model, tokenizer = load_target_model(
            target,
            dtype=dtype,
            device=device,
            pack_weights=pack_weights,
            fuse_layers=fuse_layers,
        )
        head = EagleHead.from_pretrained(draft, model.hf_model, dtype=model.dtype)
        options = {"cuda_graph": cuda_graph, "compile": compile}
        return cls(model, head.eval(), tokenizer, config, **options)

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
        with self._device_state(batch, config.max_nodes, config) as (state, _):
            self._prefill(batch, state, draft=True)
            if not batch.active:
                raise ValueError("prompt: expected room in the position table for a second token")
            step = self._tree_step(batch, config)
            tree, candidates = step.draft(state)
            verified = step.verify(state, tree)
            emitted = self._take(batch, state, verified)
        return DraftStep(
            request.prompt,
            tree,
            _list_candidates(tree, candidates, config.top_k),
            [slot for slot in verified.accept_index[0].tolist() if slot >= 0],
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
        with self._device_state(batch, config.max_nodes, config) as (state, graphs):
            self._prefill(batch, state, draft=True)
            yield
            step = self._tree_step(batch, config)
            graph = graphs.take(step, state) if graphs is not None else None
            while batch.active:
                start = time.perf_counter()
                if graph is None:
                    tree, _ = step.draft(state)
                    start = batch.spend("draft", start)
                    verified = step.verify(state, tree)
                else:
                    verified = graph()
                self._take(batch, state, verified)
                batch.spend("verify", start)
                yield

    @torch.inference_mode()
    def _plain_steps(self, batch: Batch, rows: int) -> Iterator[None]:
        with self._device_state(batch, rows, None) as (state, graphs):
            self._prefill(batch, state, draft=False)
            yield
            step = PlainStep(
                self.target.settled(), rows, batch.keep_logits, batch.sampling.logprobs
            )
            run = partial(step, state) if graphs is None else graphs.take(step, state)
            while batch.active:
                start = time.perf_counter()
                self._take(batch, state, run())
                batch.spend("verify", start)
                yield

    def _tree_step(self, batch: Batch, config: TreeConfig) -> TreeStep:
        keep = batch.keep_logits, batch.sampling.logprobs
        return TreeStep(self.target.settled(), self.head, self._taps, config, *keep)

    def _take(self, batch: Batch, state: State, verified: Verified) -> list[list[int]]:
        """Read a step's tokens (-1 past the path) and hand them out; returns those kept."""
        kept = batch.take([[t for t in row if t >= 0] for row in verified.emitted.tolist()])
        counts = list(map(len, kept))
        _keep(batch, batch.requests, counts, verified.logits, verified.logprobs)
        if batch.active:
            state.send_alive(batch.alive())
        return kept

    def _prefill(self, batch: Batch, state: State, draft: bool) -> None:
        """Prompts through the target and their pairs through the head; the first new tokens.

        Chunks of all prompts go together, each row padded at its end.
        """
        start = time.perf_counter()
        taps = self._taps if draft else None
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
            features, for_head = target_features(
                self.target,
                taps,
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
                processed = process(logits, processors)
                sampled = sample_tokens(processed, at[:, None], state.seeds[rows], **filters)
                tokens[rows, at + 1] = sampled[:, 0]
                first_slot = torch.zeros(len(ending), 1, dtype=torch.int32, device=device)
                logprobs = logprobs_of(
                    batch.sampling.logprobs, logits, processed, first_slot, sampled
                )
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
        count_emitted(state.processors, state.roots[:, None])
        batch.take([[token] for token in state.roots.tolist()], forward=False)
        if batch.active:
            state.send_alive(batch.alive())
        batch.spend("prefill", start)

    @contextmanager
    def _device_state(
        self, batch: Batch, rows: int, config: TreeConfig | None
    ) -> Iterator[tuple[State, StepGraphs | None]]:
        """A state with room for every request's tokens and ``rows`` spare slots past them.

        With it come the graphs over its caches, where asked for.
        """
        b = len(batch)
        ends = [len(r.prompt) + r.wanted for r in batch.requests]
        draft_rows = 0 if config is None else config.top_k * config.max_depth
        caches = self._take_caches(b, max(ends) + max(rows, draft_rows, 1))
        device = self.target.device
        unset = torch.zeros(b, dtype=torch.int64, device=device)
        try:
            state = State(
                cache=caches.target.narrow(b),
                draft_cache=caches.draft.narrow(b),
                seeds=torch.tensor(batch.seeds, dtype=torch.int64, device=device),
                filters=batch.sampling.tensors(b, device),
                processors=batch.sampling.processors(
                    [r.prompt for r in batch.requests], self.target.vocab_size, device
                ),
                ends=torch.tensor(ends, dtype=torch.int32, device=device),
                alive=unset.int(),
                prefix_lens=unset.int(),
                roots=unset,
            )
            yield state, caches.graphs
        finally:
            self._idle = caches

    def _take_caches(self, batch: int, capacity: int) -> _Caches:
        """The idle caches when they are large enough, else new ones (they grow between calls)."""
        idle, self._idle = self._idle, None
        if (
            idle is not None
            and idle.target.batch >= batch
            and idle.target.capacity >= capacity
            # The models may have been moved or converted since.
            and all(
                (cache.dtype, cache.device) == (model.dtype, model.device)
                for cache, model in (
                    (idle.target.tensors[0], self.target),
                    (idle.draft.k, self.head.fc.weight),
                )
            )
        ):
            return idle
        if self.cuda_graph:
            check_capturable(self.target, self.head, self._recorder.device_type)
        capacity = math.ceil(capacity / 256) * 256
        return _Caches(
            self.target.new_cache(batch, capacity),
            new_draft_cache(self.head, batch, capacity),
            StepGraphs(self._recorder(self.target.device)) if self.cuda_graph else None,
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
