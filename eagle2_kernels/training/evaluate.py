"""How well a head drafts a known text: agreement with the target, and accept length of its trees.

Plain PyTorch in place of the library's operators, and the text in place of the target (teacher
forced: the text is what the target wrote greedily). It steers training and checks the real loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle2_kernels.models.heads import EagleHead
from eagle2_kernels.training.data import Conversation, target_features

__all__ = ["TreeShape", "accept_length", "accepted_at", "accepted_of", "path_ranks", "walk"]

# Rank of a token that no candidate proposes.
_ABSENT = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class TreeShape:
    """Tree to draft: slots with the root, children per node, draft levels."""

    max_nodes: int = 16
    top_k: int = 4
    max_depth: int = 4


def accept_length(
    head: EagleHead, target: nn.Module, texts: Sequence[Conversation], shape: TreeShape
) -> float:
    """Tokens emitted after the first per target forward, over texts the target wrote greedily."""
    tokens = forwards = 0
    taps = head.taps(target.config.get_text_config().num_hidden_layers)
    for c in texts:
        ids = torch.tensor(c.tokens, device=target.get_input_embeddings().weight.device)
        features = target_features(target, ids[None], taps)[0, :, -head.feature_size :]
        emitted, used = walk(accepted_at(head, ids, features, len(c.prompt), shape))
        tokens, forwards = tokens + emitted, forwards + used
    return tokens / max(forwards, 1)


def accepted_at(
    head: EagleHead, tokens: Tensor, features: Tensor, first_root: int, shape: TreeShape
) -> Tensor:
    """Count the drafts a greedy target accepts, were the tree rooted at each position.

    tokens [T] int64 (prompt and text), features [T, F], roots first_root .. T - 2 (all at least 1)
    -> int64 [T - 1 - first_root].

    The tree is EAGLE-2's: `top_k` children per node, the `top_k` best candidates of a level are
    its frontier (by cumulative log-probability), the best max_nodes - 1 candidates of all levels
    stay. Accepted is the longest prefix of tokens[root + 1:] that the tree holds.
    """
    ranks = path_ranks(head, tokens, features, first_root, shape.top_k, shape.max_depth)
    return accepted_of(ranks, shape.max_nodes, shape.max_depth)


def accepted_of(ranks: Tensor, max_nodes: int, max_depth: int) -> Tensor:
    """`accepted_at` of a smaller tree, from the `path_ranks` of one at least as deep."""
    # A parent never ranks behind its child, so a kept on-path node has its ancestors kept.
    return (ranks[max_depth - 1] < max_nodes - 1).sum(dim=-1)


@torch.no_grad()
def path_ranks(
    head: EagleHead,
    tokens: Tensor,
    features: Tensor,
    first_root: int,
    top_k: int,
    max_depth: int,
) -> Tensor:
    """Where the text stands among the candidates of trees of every depth up to ``max_depth``.

    Arguments as in `accepted_at` -> int64 [max_depth, T - 1 - first_root, max_depth]: entry
    [d - 1, r, l - 1] is the rank of tokens[root + l] among the candidates of levels 1 .. d (0 is
    the best; ties by order), as a child of the text's own path; a large number where it is none.
    """
    k, c = top_k, head.config
    roots = torch.arange(first_root, tokens.numel() - 1, device=tokens.device)
    n, group = roots.numel(), c.num_attention_heads // c.num_key_value_heads
    scale = c.head_dim**-0.5
    # True rows: draft position i holds (token i + 1, feature i).
    rows = torch.arange(tokens.numel() - 1, device=tokens.device)
    x = head.inputs(tokens[1:], head.fuse(features[:-1]))
    q, key, value = head.project_qkv(x, rows)
    attn = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=group > 1,
    )[0].transpose(0, 1)
    hidden = head.finish(x, attn)[roots - 1]
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))  # [T-1, Hq, D]
    seen = rows[None, :] < roots[:, None]  # prefix rows of each root

    def expand(hidden: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(head.logits(hidden).float(), dim=-1)
        best, ids = logp.topk(k, dim=-1)
        if head.draft_to_target is not None:
            ids = head.draft_to_target[ids]
        return ids.flatten(1), (scores[..., None] + best).flatten(1)

    ids, scores = expand(hidden[:, None], torch.zeros(n, 1, device=x.device))
    all_scores = [scores]
    on_path = _matches(ids, tokens, roots, 1)
    hits = [on_path]
    # Frontier state: features of the nodes' parents, whether the node lies on the text's path.
    pick = torch.arange(k, device=x.device).expand(n, k)
    parent_hidden = hidden[:, None].expand(-1, k, -1)
    trail_k: list[Tensor] = []
    trail_v: list[Tensor] = []
    beam_ids, beam_scores, beam_path = ids, scores, on_path
    for level in range(1, max_depth):
        x = head.inputs(beam_ids, parent_hidden)
        q, kk, vv = head.project_qkv(x, (roots + level - 1)[:, None])
        kk, vv = (t.repeat_interleave(group, dim=2) for t in (kk, vv))  # [n, k, Hq, D]
        trail_k.append(kk)
        trail_v.append(vv)
        tk, tv = torch.stack(trail_k, dim=2), torch.stack(trail_v, dim=2)  # [n, k, level, Hq, D]
        prefix = torch.einsum("nkhd,thd->nkht", q.float(), key.float()) * scale
        prefix = prefix.masked_fill(~seen[:, None, None, :], float("-inf"))
        own = torch.einsum("nkhd,nklhd->nkhl", q.float(), tk.float()) * scale
        w = torch.softmax(torch.cat((prefix, own), dim=-1), dim=-1)
        split = key.shape[0]
        attn = torch.einsum("nkht,thd->nkhd", w[..., :split], value.float())
        attn = attn + torch.einsum("nkhl,nklhd->nkhd", w[..., split:], tv.float())
        hidden = head.finish(x, attn.to(x.dtype))
        ids, scores = expand(hidden, beam_scores)
        on_path = _matches(ids, tokens, roots, level + 1) & beam_path.repeat_interleave(k, dim=1)
        all_scores.append(scores)
        hits.append(on_path)
        beam_scores, pick = scores.topk(k, dim=-1)
        parent = pick // k
        beam_ids, beam_path = ids.gather(1, pick), on_path.gather(1, pick)
        parent_hidden = hidden.gather(1, parent[..., None].expand(-1, -1, hidden.shape[-1]))
        trail_k = [t.gather(1, parent[..., None, None].expand_as(t)) for t in trail_k]
        trail_v = [t.gather(1, parent[..., None, None].expand_as(t)) for t in trail_v]
    ranks = torch.full((max_depth, n, max_depth), _ABSENT, device=x.device)
    flat, hit = torch.cat(all_scores, dim=1), torch.cat(hits, dim=1)
    sizes = [part.shape[1] for part in all_scores]
    for depth in range(1, max_depth + 1):
        order = flat[:, : sum(sizes[:depth])].argsort(dim=1, descending=True, stable=True)
        place = order.argsort(dim=1)
        for level, (ranked, found) in enumerate(
            zip(place.split(sizes[:depth], dim=1), hit.split(sizes, dim=1), strict=False)
        ):
            # At most one candidate of a level continues the text.
            ranks[depth - 1, :, level] = ranked.masked_fill(~found, _ABSENT).amin(dim=1)
    return ranks


def _matches(ids: Tensor, tokens: Tensor, roots: Tensor, depth: int) -> Tensor:
    at = roots + depth
    inside = at < tokens.numel()
    wanted = tokens[at.clamp(max=tokens.numel() - 1)]
    return (ids == wanted[:, None]) & inside[:, None]


def walk(accepted: Tensor) -> tuple[int, int]:
    """(tokens, forwards) of decoding a text: each forward emits its accepted drafts and one more.

    accepted[i] belongs to the root at the text's token i; the prefill's token is not counted, and
    tokens past the text's end are not emitted.
    """
    counts = accepted.tolist()
    at, forwards = 0, 0
    while at < len(counts):
        at += counts[at] + 1
        forwards += 1
    return min(at, len(counts)), forwards
