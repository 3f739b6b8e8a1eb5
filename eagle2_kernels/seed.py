"""One EAGLE-2 step as two functions, for any draft callable and any causal LM, without caches.

`eagle2_generate_tree` grows and prunes a draft tree; `verify_with_target` runs prefix and tree
through the target in one forward and returns the tokens it agrees with. `EagleDecoder` does the
same with caches on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .flatten import build_tree, flatten_tree
from .generation import SamplingParams, check_count
from .models.draft import Drafter, HeadDrafter, grow_candidates, new_draft_cache, refeed
from .tree import DraftTree
from .verify import sample_and_verify

if TYPE_CHECKING:
    from .models.heads import EagleHead
    from .models.target import TargetModel

__all__ = ["VerifiedTree", "eagle2_generate_tree", "verify_with_target"]

DraftCallable = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class VerifiedTree(NamedTuple):
    """What the target made of a tree, per request.

    Attributes:
        tokens: the accepted drafts, then the target's own next token; [] for an inactive request.
        acceptance_rate: accepted drafts / depth of the tree, 0 for a tree without drafts.
        accept_index: int32 [B, N] slots of the accepted path, root first, then -1.
        hidden_states: [L + 1 + accepted, H] the target's hidden states of prefix, root and accepted
            drafts: with the tokens, the next call's arguments.
    """

    tokens: list[list[int]]
    acceptance_rate: list[float]
    accept_index: Tensor
    hidden_states: list[Tensor]


@torch.no_grad()
def eagle2_generate_tree(
    draft_model: EagleHead | DraftCallable,
    hidden_states: Tensor,
    token_ids: Tensor,
    max_nodes: int = 8,
    top_k: int = 4,
    max_depth: int = 4,
) -> DraftTree:
    """Grow a draft tree level by level and keep the ``max_nodes`` most probable nodes.

    ::

        probability(child) = probability(parent) * softmax(draft logits at parent)[child]

    Each level expands the ``top_k`` best nodes of the level above into ``top_k`` children each; in
    the end the best nodes of all levels stay.

    Args:
        draft_model: an `EagleHead`, or a callable (hidden_states, token_ids) -> (logits,
            hidden_states). It is called with [R, T, H] and [R, T + 1]: R = B rows of what was given
            here at the first level, then R = B * top_k rows, each its parent's row with the node's
            token and the draft's own hidden state behind. Of what it returns the last position
            counts, as [R, .., V] or [R, V], and [R, .., H] or [R, H].
        hidden_states: [B, L, H], the target's hidden states of token_ids[:, :L]; for an
            `Eagle3Head` the outputs of its layers side by side (`TargetModel.forward_tapped`).
        token_ids: [B, L + 1] int64, committed tokens; the last one is the root.
        max_nodes: nodes kept, the root included.
        top_k: children per node, and nodes expanded per level.
        max_depth: levels.

    Returns:
        A `DraftTree` with ``prefix_ids`` = token_ids[:, :L]; its `paths()` are the candidates.

    Raises:
        ValueError: a count below 1, shapes that do not belong together, or a draft model whose
            output has other rows than its input.
    """
    for name, value in (("max_nodes", max_nodes), ("top_k", top_k), ("max_depth", max_depth)):
        check_count(name, value)
    if token_ids.ndim != 2 or token_ids.shape[1] < 2:
        raise ValueError(f"token_ids: expected [B, L + 1], L >= 1, got {tuple(token_ids.shape)}")
    b, length = token_ids.shape[0], token_ids.shape[1] - 1
    if hidden_states.ndim != 3 or tuple(hidden_states.shape[:2]) != (b, length):
        raise ValueError(
            f"hidden_states: expected [{b}, {length}, H] (one per token before the root), "
            f"got {tuple(hidden_states.shape)}"
        )
    from .models.heads import EagleHead

    token_ids = token_ids.long()
    prefix_lens = torch.full((b,), length, dtype=torch.int32, device=token_ids.device)
    drafter: Drafter
    if isinstance(draft_model, EagleHead):
        width = draft_model.feature_size
        if hidden_states.shape[2] != width:
            raise ValueError(
                f"hidden_states: expected the head's width {width}, got {hidden_states.shape[2]}"
            )
        cache = new_draft_cache(draft_model, b, length + max_depth * top_k)
        nothing = torch.zeros_like(prefix_lens)
        shifted = token_ids[:, 1:].contiguous()
        hidden = refeed(draft_model, cache, shifted, hidden_states, nothing, prefix_lens)
        drafter = HeadDrafter(draft_model, cache, prefix_lens, hidden[:, -1:])
    else:
        drafter = _CallableDrafter(draft_model, hidden_states, token_ids)
    candidates = grow_candidates(drafter, b, top_k, max_depth)
    tree = build_tree(token_ids[:, -1].contiguous(), prefix_lens, *candidates, max_nodes)
    return DraftTree(*tree[:9], prefix_ids=token_ids[:, :-1])


@torch.no_grad()
def verify_with_target(
    target_model: TargetModel | nn.Module,
    tree: DraftTree,
    *,
    sampling: SamplingParams | None = None,
    taps: Sequence[int] | None = None,
) -> VerifiedTree:
    """Run prefix and tree through the target in one forward and keep the path it agrees with.

    At every node the target's own token is chosen (greedily, or by ``sampling``, whose noise
    belongs to the position) and followed if the tree has it. So the tokens are those that plain
    decoding emits, however good the drafts.

    Args:
        target_model: a transformers causal LM, or a `TargetModel`; left as it is.
        tree: a tree with ``prefix_ids``.
        sampling: greedy by default; request i uses ``seed + i``.
        taps: the layers whose outputs an `Eagle3Head` reads (its ``taps(num_layers)``): the
            result's hidden_states are these then, side by side.

    Raises:
        ValueError: the tree has no prefix_ids, or the model is of a kind `TargetModel` refuses.
    """
    from .models.target import TargetModel

    if tree.prefix_ids is None:
        raise ValueError("tree: expected prefix_ids (the tokens before the root), got None")
    target = target_model if isinstance(target_model, TargetModel) else TargetModel(target_model)
    sampling = sampling or SamplingParams()
    b, length = tree.prefix_ids.shape
    n, device = tree.draft_tokens.shape[1], tree.draft_tokens.device
    # The prefix is a chain and the tree hangs from its end: one larger tree behind an empty cache.
    chain = torch.arange(-1, length - 1, dtype=torch.int32, device=device).expand(b, length)
    below = torch.where(tree.parents < 0, length - 1, tree.parents + length)
    nothing = torch.zeros(b, dtype=torch.int32, device=device)
    lengths = tree.num_nodes + length
    depths, position_ids, _, _, mask = flatten_tree(
        torch.cat([chain, below.int()], dim=1), lengths, nothing
    )
    args = (
        target.new_cache(b, length + n),
        torch.cat([tree.prefix_ids, tree.draft_tokens], dim=1),
        position_ids,
        nothing,
    )
    tree_args = {"tree_mask": mask, "depths": depths, "lengths": lengths}
    if taps is None:
        hidden = features = target.forward(*args, **tree_args)
    else:
        features, hidden = target.forward_tapped(taps, *args, **tree_args)
    deepest = max(n - 1, 1)
    _, accept_index, accept_length, _ = verified = sample_and_verify(
        target.logits(features[:, length:]),
        tree.position_ids,
        torch.tensor(sampling.seeds(b), dtype=torch.int64, device=device),
        tree.draft_tokens,
        tree.first_child,
        tree.next_sibling,
        deepest,
        tree.num_nodes,
        **sampling.tensors(b, device),
    )
    tokens = [[t for t in row if t >= 0] for row in verified[0].tolist()]
    depth = tree.depths.amax(1).tolist()
    accepted = accept_length.tolist()
    return VerifiedTree(
        tokens,
        [max(a, 0) / d if d else 0.0 for a, d in zip(accepted, depth, strict=True)],
        accept_index,
        [
            torch.cat([hidden[r, :length], hidden[r, length + accept_index[r, : a + 1].long()]])
            for r, a in enumerate(accepted)
        ],
    )


class _CallableDrafter:
    """A callable without a cache: every node's whole history goes through it."""

    def __init__(self, model: DraftCallable, hidden_states: Tensor, token_ids: Tensor) -> None:
        self.draft_to_target: Tensor | None = None
        self.model = model
        # [B, P, ...]: one row of history for each of the level's P nodes.
        self.history = hidden_states[:, None]
        self.tokens = token_ids[:, None]

    def root(self) -> Tensor:
        return self._run()

    def level(self, tokens: Tensor, rows: Tensor, mask: Tensor, level: int) -> Tensor:
        batch = torch.arange(len(tokens), device=tokens.device)[:, None]
        rows = rows.long()
        history = torch.cat([self.history, self.last[:, :, None].to(self.history.dtype)], dim=2)
        self.history = history[batch, rows]
        self.tokens = torch.cat([self.tokens[batch, rows], tokens[..., None]], dim=2)
        return self._run()

    def _run(self) -> Tensor:
        b, p = self.tokens.shape[:2]
        logits, hidden = self.model(self.history.flatten(0, 1), self.tokens.flatten(0, 1))
        self.last = self._last(hidden, "hidden_states", b, p)
        width = self.history.shape[-1]
        if self.last.shape[-1] != width:
            raise ValueError(
                f"draft_model: expected hidden_states of the width given, {width}, "
                f"got {self.last.shape[-1]}"
            )
        return self._last(logits, "logits", b, p)

    @staticmethod
    def _last(out: Tensor, name: str, b: int, p: int) -> Tensor:
        out = out[:, -1] if out.ndim == 3 else out
        if out.ndim != 2 or out.shape[0] != b * p:
            raise ValueError(
                f"draft_model: expected {name} of {b * p} rows, [R, T, ..] or [R, ..], "
                f"got {tuple(out.shape)}"
            )
        return out.unflatten(0, (b, p)).contiguous()
