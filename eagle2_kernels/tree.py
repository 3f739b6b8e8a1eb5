r"""`DraftTree`: the arrays of a flattened draft tree, and their invariants, stated once.

::

    slot          0          1      2      3      4
    token       root        the     a     cat    dog
    parent       -1          0      0      1      1            root
    depth         0          1      1      2      2           /    \
    first_child   1          3     -1     -1     -1        the      a
    next_sibling -1          2     -1      4     -1       /   \
    tree_mask  1....      11...  1.1..  11.1.  11..1    cat    dog
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class CandidatePath(NamedTuple):
    """One root-to-node path of a tree: what a plain decoder would have to emit to follow it."""

    slots: list[int]
    tokens: list[int]
    probability: float
    depth: int


class DraftTree(NamedTuple):
    """A batch of flattened draft trees; every tensor is [B, N] unless said.

    Slots are sorted by (depth, candidate index), so a parent's slot is smaller than its child's.
    Slots from ``num_nodes`` on are padding: token 0, parent -1, depth 0, position prefix_lens,
    score -inf, no links, an empty mask row.

    Attributes:
        draft_tokens: int64; slot 0 is the last committed token, whose KV is not in the cache yet.
        parents: int32; -1 at the root.
        depths: int32; 0 at the root.
        position_ids: int64; prefix_lens + depths.
        scores: float32; cumulative log-probability, 0 at the root.
        first_child: int32; -1 when there is none.
        next_sibling: int32; siblings in ascending slot order.
        tree_mask: int64 [B, N, ceil(N / 64)]; bit j of row i: slot j is i or an ancestor of i.
        num_nodes: int32 [B]; 0 marks an inactive request.
        prefix_ids: int64 [B, L] committed tokens before the root, where the maker knew them.
    """

    draft_tokens: Tensor
    parents: Tensor
    depths: Tensor
    position_ids: Tensor
    scores: Tensor
    first_child: Tensor
    next_sibling: Tensor
    tree_mask: Tensor
    num_nodes: Tensor
    prefix_ids: Tensor | None = None

    def paths(self, *, leaves_only: bool = True) -> list[list[CandidatePath]]:
        """Candidate paths of each request, best probability first (reads the tree to the host).

        Each path starts after the root. ``leaves_only=False`` lists the path of every drafted node.
        """
        result = []
        for r, count in enumerate(self.num_nodes.tolist()):
            parents, tokens = self.parents[r].tolist(), self.draft_tokens[r].tolist()
            scores = self.scores[r].tolist()
            inner = set(parents[1:count]) if leaves_only else set()
            paths = []
            for slot in range(1, count):
                if slot in inner:
                    continue
                slots = [slot]
                while parents[slots[-1]] > 0:
                    slots.append(parents[slots[-1]])
                slots.reverse()
                paths.append(
                    CandidatePath(
                        slots, [tokens[s] for s in slots], math.exp(scores[slot]), len(slots)
                    )
                )
            result.append(sorted(paths, key=lambda path: -path.probability))
        return result


def check_tree(tree: DraftTree, prefix_lens: Tensor | None = None) -> None:
    """Raise ValueError naming the first array of ``tree`` that breaks an invariant.

    Reads the tree back to the host; meant for ``validate=True`` and tests.
    """
    b, n = tree.draft_tokens.shape
    for name in ("parents", "depths", "position_ids", "scores", "first_child", "next_sibling"):
        shape = tuple(getattr(tree, name).shape)
        if shape != (b, n):
            raise ValueError(f"{name}: expected shape ({b}, {n}), got {shape}")
    words = (b, n, (n + 63) // 64)
    if tuple(tree.tree_mask.shape) != words:
        raise ValueError(f"tree_mask: expected shape {words}, got {tuple(tree.tree_mask.shape)}")
    for r in range(b):
        _check_request(tree, r, n, None if prefix_lens is None else int(prefix_lens[r]))


def _check_request(tree: DraftTree, r: int, n: int, prefix_len: int | None) -> None:
    count = int(tree.num_nodes[r])
    if not 0 <= count <= n:
        raise ValueError(f"num_nodes[{r}]: expected 0..{n}, got {count}")
    parents, depths = tree.parents[r].tolist(), tree.depths[r].tolist()
    tokens, positions = tree.draft_tokens[r].tolist(), tree.position_ids[r].tolist()
    first, sibling = tree.first_child[r].tolist(), tree.next_sibling[r].tolist()
    masks = [_row_bits(words) for words in tree.tree_mask[r].tolist()]
    children: dict[int, list[int]] = {s: [] for s in range(count)}
    start = prefix_len if prefix_len is not None else (positions[0] if n else 0)
    for s in range(n):
        at = f"[{r}, {s}]"
        if s >= count:
            expected = (0, -1, 0, -1, -1, 0, start)
            got = (tokens[s], parents[s], depths[s], first[s], sibling[s], masks[s], positions[s])
            if got != expected or tree.scores[r, s] != -math.inf:
                raise ValueError(f"padding slot {at}: expected {expected}, score -inf; got {got}")
            continue
        if s == 0:
            depth, mask = 0, 1
            if parents[0] != -1:
                raise ValueError(f"parents{at}: expected -1 at the root, got {parents[0]}")
        else:
            if not 0 <= parents[s] < s:
                raise ValueError(f"parents{at}: expected 0..{s - 1}, got {parents[s]}")
            depth, mask = depths[parents[s]] + 1, masks[parents[s]] | (1 << s)
            if depths[s] < depths[s - 1]:
                raise ValueError(f"depths{at}: expected slots sorted by depth, got {depths[s]}")
            children[parents[s]].append(s)
        if depths[s] != depth:
            raise ValueError(f"depths{at}: expected {depth}, got {depths[s]}")
        if positions[s] != start + depth:
            raise ValueError(f"position_ids{at}: expected {start + depth}, got {positions[s]}")
        if masks[s] != mask:
            raise ValueError(f"tree_mask{at}: expected {mask:#x}, got {masks[s]:#x}")
    for s, slots in children.items():
        if first[s] != (slots[0] if slots else -1):
            raise ValueError(f"first_child[{r}, {s}]: expected {slots[:1] or -1}, got {first[s]}")
        for i, child in enumerate(slots):
            following = slots[i + 1] if i + 1 < len(slots) else -1
            if sibling[child] != following:
                raise ValueError(
                    f"next_sibling[{r}, {child}]: expected {following}, got {sibling[child]}"
                )
        if len({tokens[c] for c in slots}) != len(slots):
            raise ValueError(f"draft_tokens[{r}]: children of slot {s} repeat a token")


def _row_bits(words: list[int]) -> int:
    """One mask row as a Python integer."""
    return sum((word & ((1 << 64) - 1)) << (64 * i) for i, word in enumerate(words))
