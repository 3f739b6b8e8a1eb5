r"""One decode step on the device: draft a tree, verify it in one target forward, commit the path.

::

    head --logits--> expand_topk, extend_draft_tree  (x max_depth)  --candidates--> build_tree
    target --logits--> process_logits --> sample_and_verify --> compact_kv,
        prefix_lens += accept_length + 1

A step takes a `State` to the next one. It reads no value back (but for `TreeConfig.stop_below`) and
sends none, and shapes are the same at every step, so the loop (`decode.py`) may run it as it is or
as a CUDA graph (`graphs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .cache import compact_kv
from .flatten import build_tree
from .logits import count_tokens, process_logits, token_logprobs
from .models.draft import (
    Candidates,
    DraftCache,
    HeadDrafter,
    grow_candidates,
    refeed,
    take_rows,
)
from .tree import DraftTree
from .verify import sample_and_verify, sample_tokens

if TYPE_CHECKING:
    from .decode import TreeConfig
    from .models.heads import EagleHead
    from .models.target import SlotCache, TargetModel

__all__ = [
    "PlainStep",
    "State",
    "TreeStep",
    "Verified",
    "count_emitted",
    "logprobs_of",
    "process",
    "target_features",
]


@dataclass
class State:
    """A batch on the device, between two steps.

    Attributes:
        cache: the target's keys and values, ``prefix_lens`` of them per request.
        draft_cache: the head's.
        seeds: [B] int64.
        filters: of `sample_tokens`, [B] each.
        processors: of `process_logits`, with the history it counts.
        ends: [B] int32, length of the prompt and all wanted tokens.
        alive: [B] int32, 1 for a request that wants tokens, 0 for one that stands still.
        prefix_lens: [B] int32.
        roots: [B] int64.
        root_hidden: [B, 1, H], the head's output at the root's row, but for the pending pairs.
        pending: true pairs the head has not seen: tokens [B, R] int64, features [B, R, F] and how
            many of them [B] int32.
    """

    cache: SlotCache
    draft_cache: DraftCache
    seeds: Tensor
    filters: dict[str, Tensor]
    processors: dict[str, Tensor]
    ends: Tensor
    alive: Tensor
    prefix_lens: Tensor
    roots: Tensor
    root_hidden: Tensor | None = None
    pending: tuple[Tensor, Tensor, Tensor] | None = None
    _sent: list[int] = field(default_factory=list)

    def send_alive(self, alive: Sequence[int]) -> None:
        """Tell the device who still wants tokens, where that has changed; nobody waits."""
        if list(alive) == self._sent:
            return
        self._sent = list(alive)
        pinned = self.alive.device.type == "cuda"
        values = torch.tensor(self._sent, dtype=torch.int32, pin_memory=pinned)
        self.alive.copy_(values, non_blocking=True)

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the caches, by name."""
        named: dict[str, Tensor | None] = {name: getattr(self, name) for name in _TENSORS}
        for name in _TABLES:
            named |= {f"{name}.{key}": value for key, value in getattr(self, name).items()}
        if self.pending is not None:
            named |= {f"pending.{i}": value for i, value in enumerate(self.pending)}
        return {name: value for name, value in named.items() if value is not None}

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take other tensors, named as by `tensors`."""
        for name in _TENSORS:
            setattr(self, name, tensors.get(name))
        for name in (*_TABLES, "pending"):
            parts = {key: t for key, t in tensors.items() if key.startswith(f"{name}.")}
            table = {key.removeprefix(f"{name}."): t for key, t in parts.items()}
            setattr(self, name, table if name in _TABLES else tuple(table.values()) or None)


_TENSORS = ("seeds", "ends", "alive", "prefix_lens", "roots", "root_hidden")
_TABLES = ("filters", "processors")


class Verified(NamedTuple):
    """What a step emitted: the one thing the host reads, and what was asked for beside it.

    ``emitted`` [B, max_depth + 1] int64 tokens, -1 past the accepted path; ``accept_index`` its
    slots; ``logits`` [B, max_depth + 1, V] and ``logprobs`` [B, max_depth + 1] behind them or None.
    """

    emitted: Tensor
    accept_index: Tensor
    logits: Tensor | None
    logprobs: Tensor | None


@dataclass(frozen=True)
class TreeStep:
    """A step of one target, head and tree shape; ``taps`` are the layers an EAGLE-3 head reads."""

    target: TargetModel
    head: EagleHead
    taps: tuple[int, ...] | None
    config: TreeConfig
    keep_logits: bool = False
    logprobs: bool | str = False

    def __call__(self, state: State) -> Verified:
        """Draft and verify; ``state``'s fields become those of the next step."""
        tree, _ = self.draft(state)
        return self.verify(state, tree)

    def draft(self, state: State) -> tuple[DraftTree, Candidates]:
        """Grow the levels from the root's row, then keep the best ``max_nodes`` nodes."""
        if state.pending is not None:
            state.root_hidden = self._refeed(state, *state.pending)
            state.pending = None
        assert state.root_hidden is not None
        config = self.config
        drafter = HeadDrafter(self.head, state.draft_cache, state.prefix_lens, state.root_hidden)
        candidates = grow_candidates(
            drafter, len(state.roots), config.top_k, config.max_depth, config.stop_below
        )
        # A path of depth d emits d + 1 tokens: no deeper than tokens are wanted. Its deepest
        # position then stays inside the position table whenever `ends` does.
        deepest = state.ends - state.prefix_lens - 2
        limits = torch.stack([state.alive * config.max_nodes, state.alive * deepest], dim=1)
        tree = build_tree(state.roots, state.prefix_lens, *candidates, config.max_nodes, limits)
        return DraftTree(*tree), candidates

    def _refeed(self, state: State, tokens: Tensor, features: Tensor, lengths: Tensor) -> Tensor:
        """The committed pairs through the head; [B, 1, H] its output at the root's, the last."""
        before = state.prefix_lens - lengths
        hidden = refeed(self.head, state.draft_cache, tokens, features, before, lengths)
        last = take_rows(hidden, (lengths - 1).clamp(min=0)[:, None])
        if state.root_hidden is None:
            return last
        # Without a pair the last output stands.
        return torch.where((lengths > 0)[:, None, None], last, state.root_hidden)

    def verify(self, state: State, tree: DraftTree) -> Verified:
        """One target forward of the tree; the path the target agrees with joins the prefix."""
        features, for_head = target_features(
            self.target,
            self.taps,
            state.cache,
            tree.draft_tokens,
            tree.position_ids,
            state.prefix_lens,
            tree_mask=tree.tree_mask,
            depths=tree.depths,
            lengths=tree.num_nodes,
        )
        logits = self.target.logits(features)
        processed = process(logits, state.processors, tree)
        emitted, accept_index, accept_length, bonus = sample_and_verify(
            processed,
            tree.position_ids,
            state.seeds,
            tree.draft_tokens,
            tree.first_child,
            tree.next_sibling,
            self.config.max_depth,
            tree.num_nodes,
            **state.filters,
        )
        logprobs = logprobs_of(self.logprobs, logits, processed, accept_index, emitted)
        count_emitted(state.processors, emitted)
        compact_kv(state.cache.tensors, accept_index, accept_length, state.prefix_lens)
        taken = accept_length + 1
        path = accept_index.clamp(min=0)
        state.prefix_lens = state.prefix_lens + taken
        # A request that stands still keeps its root; its bonus token is -1.
        state.roots = torch.where(taken > 0, bonus, state.roots)
        state.pending = (emitted.clamp(min=0), take_rows(for_head, path), taken)
        kept = take_rows(logits, path) if self.keep_logits else None
        return Verified(emitted, accept_index, kept, logprobs)


@dataclass(frozen=True)
class PlainStep:
    """A step without a tree: one token. Rows past the first are empty, see `generate_plain`."""

    target: TargetModel
    rows: int
    keep_logits: bool = False
    logprobs: bool | str = False

    def __call__(self, state: State) -> Verified:
        """Sample behind the root; ``state``'s fields become those of the next step."""
        b, rows, device = len(state.roots), self.rows, state.roots.device
        tokens, mask, depths = state.roots[:, None], None, None
        positions = state.prefix_lens.long()[:, None].expand(b, rows).contiguous()
        if rows > 1:
            # Every row but the first sees nothing.
            tokens = torch.cat([tokens, tokens.new_zeros(b, rows - 1)], dim=1)
            mask = torch.zeros(b, rows, (rows + 63) // 64, dtype=torch.int64, device=device)
            mask[:, 0, 0] = 1
            depths = torch.zeros(b, rows, dtype=torch.int32, device=device)
        features = self.target.forward(
            state.cache,
            tokens,
            positions,
            state.prefix_lens,
            tree_mask=mask,
            depths=depths,
            lengths=state.alive,
        )
        logits = self.target.logits(features)[:, :1]
        processed = process(logits, state.processors)
        sampled = sample_tokens(processed, positions[:, :1], state.seeds, **state.filters)
        slot = torch.zeros(b, 1, dtype=torch.int32, device=device)
        logprobs = logprobs_of(self.logprobs, logits, processed, slot, sampled)
        count_emitted(state.processors, sampled)
        state.roots = sampled[:, 0]
        state.prefix_lens = state.prefix_lens + state.alive
        return Verified(sampled, slot, logits if self.keep_logits else None, logprobs)


def target_features(
    target: TargetModel, taps: Sequence[int] | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """A target forward's features for its lm_head, and those for the head."""
    if taps is not None:
        return target.forward_tapped(taps, *args, **kwargs)
    features = target.forward(*args, **kwargs)
    return features, features


def process(logits: Tensor, processors: dict[str, Tensor], tree: DraftTree | None = None) -> Tensor:
    """The logits after bias and penalties, in float32 at least; the same tensor without any."""
    if not processors:
        return logits
    processed = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    nodes = () if tree is None else (tree.draft_tokens, tree.parents, tree.num_nodes)
    process_logits(processed, *nodes, **processors)
    return processed


def count_emitted(processors: dict[str, Tensor], tokens: Tensor) -> None:
    """Emitted tokens [B, T] join the history that the next step's penalties count."""
    if "output_counts" in processors:
        count_tokens(processors["output_counts"], tokens)


def logprobs_of(
    asked: bool | str, logits: Tensor, processed: Tensor, slots: Tensor, tokens: Tensor
) -> Tensor | None:
    """[B, T] log-probabilities of the tokens drawn at these slots, where asked for."""
    if not asked:
        return None
    return token_logprobs(processed if asked == "processed" else logits, slots, tokens)
