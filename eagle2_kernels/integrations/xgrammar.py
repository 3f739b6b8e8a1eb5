"""Grammar masks of XGrammar for every node of a tree.

XGrammar walks a draft tree over its links, trying each node's token on the grammar, and writes the
tokens that may follow each node to the bitmask row of its slot. These rows are the
``allowed_mask`` of `eagle2_kernels.sample_tokens` and `eagle2_kernels.sample_and_verify`::

    matcher has accepted all committed tokens, the root's among them
    allowed = fill_bitmask(tree, [matcher], vocab_size)      # int32 [B, N, ceil(vocab_size / 32)]
    sample_and_verify(logits, ..., allowed_mask=allowed.to(logits.device))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..tree import DraftTree
from ._layouts import rebuild


class TreeLinks(NamedTuple):
    """Trees as XGrammar's traversal reads them: int64 on the CPU, one row per request.

    Attributes:
        retrieve_next_token: [B, N], first child, -1 for none.
        retrieve_next_sibling: [B, N], -1 for none.
        draft_tokens: [B, N]; the root's token is not tried.
    """

    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    draft_tokens: Tensor


def to_xgrammar(tree: DraftTree) -> TreeLinks:
    """The links and tokens of a tree, contiguous int64 on the CPU (reads the tree back).

    Source: ``GrammarMatcher.traverse_draft_tree`` of XGrammar.
    """
    fields = (tree.first_child, tree.next_sibling, tree.draft_tokens)
    return TreeLinks(*(field.to("cpu", torch.int64).contiguous() for field in fields))


def from_xgrammar(
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    draft_tokens: Tensor,
    prefix_lens: Tensor,
    num_nodes: Tensor | None = None,
) -> DraftTree:
    """The `DraftTree` of links.

    Args:
        retrieve_next_token: [B, N] int64, first child, -1 for none.
        retrieve_next_sibling: [B, N] int64, -1 for none.
        draft_tokens: [B, N] int64.
        prefix_lens: [B] int, tokens in the cache; the root's position.
        num_nodes: [B] int, slots in use; None goes by the last slot that the root reaches.

    Returns:
        `DraftTree` with the slots as they are; scores are NaN, which links do not keep.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, or the links are no tree: out of range, or
            leading to a slot twice.
    """
    _checks.tensor("draft_tokens", draft_tokens, torch.int64, (None, None), "[B, N]")
    b, n = draft_tokens.shape
    for name, links in (
        ("retrieve_next_token", retrieve_next_token),
        ("retrieve_next_sibling", retrieve_next_sibling),
    ):
        _checks.tensor(name, links, torch.int64, (b, n), "[B, N]")
    parents, counts = [], []
    rows = zip(retrieve_next_token.tolist(), retrieve_next_sibling.tolist(), strict=True)
    for r, (first, sibling) in enumerate(rows):
        row = [-1] * n
        reached = [0] if n else []
        for node in reached:
            child = first[node]
            while child != -1:
                if not 0 < child < n or row[child] != -1:
                    raise ValueError(
                        f"retrieve_next_token[{r}], retrieve_next_sibling[{r}]: expected each of "
                        f"the slots 1 to {n - 1} to be linked once, got slot {child}"
                        + (" again" if 0 < child < n else "")
                    )
                row[child] = node
                reached.append(child)
                child = sibling[child]
        parents.append(row)
        counts.append(max(reached, default=-1) + 1)
    device = draft_tokens.device
    return rebuild(
        draft_tokens,
        torch.tensor(parents, dtype=torch.int32, device=device).view(b, n),
        torch.tensor(counts, dtype=torch.int32, device=device) if num_nodes is None else num_nodes,
        prefix_lens,
    )


def fill_bitmask(
    tree: DraftTree,
    matchers: Sequence[Any],
    vocab_size: int,
    bitmask: Tensor | None = None,
) -> Tensor:
    """The tokens that each request's grammar allows after each node of its tree.

    Row r * N + s of the bitmask belongs to slot s of request r. Slots that the grammar does not
    reach have no allowed token (their own token is not allowed after their parent, so no verifier
    gets there; ``validate=True`` refuses such rows all the same); requests without a grammar, and
    slots behind a tree, have all.

    Args:
        tree: of N slots.
        matchers: per request an ``xgrammar.GrammarMatcher`` that has accepted every committed
            token, the root's included, and has N rollback steps; None for no grammar. Its state
            does not change.
        vocab_size: V.
        bitmask: int32 [B * N, ceil(V / 32)] on the CPU, contiguous, to write to; None makes one.

    Returns:
        int32 [B, N, ceil(V / 32)], a view of the bitmask: the ``allowed_mask`` of
        `eagle2_kernels.sample_and_verify`.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, or ``matchers`` the wrong length.
    """
    b, n = tree.draft_tokens.shape
    if len(matchers) != b:
        raise ValueError(f"matchers: expected {b}, one per request, got {len(matchers)}")
    _checks.integer("vocab_size", vocab_size, 1)
    words = (vocab_size + 31) // 32
    if bitmask is None:
        bitmask = torch.empty(b * n, words, dtype=torch.int32)
    _checks.tensor("bitmask", bitmask, torch.int32, (b * n, words), "[B * N, ceil(V / 32)]")
    if bitmask.device.type != "cpu" or not bitmask.is_contiguous():
        raise ValueError("bitmask: expected a contiguous tensor on the CPU")
    bitmask.fill_(-1)
    links = to_xgrammar(tree)
    live = torch.arange(n) < tree.num_nodes.cpu()[:, None]
    for r, matcher in enumerate(matchers):
        if matcher is None or not bool(live[r].any()):
            continue
        rows = bitmask[r * n : (r + 1) * n]
        rows[live[r]] = 0
        _traverse(
            matcher,
            links.retrieve_next_token[r],
            links.retrieve_next_sibling[r],
            links.draft_tokens[r],
            rows,
        )
    return bitmask.view(b, n, words)


def _traverse(
    matcher: Any, next_token: Tensor, sibling: Tensor, tokens: Tensor, rows: Tensor
) -> None:
    if hasattr(matcher, "traverse_draft_tree"):
        matcher.traverse_draft_tree(next_token, sibling, tokens, rows)
        return
    from xgrammar.testing import _traverse_draft_tree  # where it lived before 0.2

    _traverse_draft_tree(next_token, sibling, tokens, matcher, rows)
