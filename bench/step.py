"""A step's tree building but the head, from logits to the flat tree, against a torch composition.

Per level extend_draft_tree and expand_topk, then build_tree; the composition does the same work:
log_softmax, topk, the parents' scores, the beam's mask, at the end the best candidates, their
parents, mask, depths and root-to-leaf rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import cases as table
import torch
from runner import Case

import eagle2_kernels as ek

OPS = ("grow_and_build",)
VOCABULARIES = (8192, 49152, 128256)


def ours(
    root: torch.Tensor, prefix_lens: torch.Tensor, levels: list[torch.Tensor], case: table.DraftCase
) -> ek.DraftTree:
    """The loop of `eagle2_kernels.models.draft` without its head."""
    k = case.top_k
    device = root.device
    parents = torch.empty(1, case.candidates, dtype=torch.int32, device=device)
    words = (k * case.max_depth + 63) // 64
    mask = torch.zeros(1, k, words, dtype=torch.int64, device=device)
    beam = torch.zeros(1, k, dtype=torch.int64, device=device)
    beam_scores = torch.zeros(1, 1, device=device)
    tokens, scores = [], []
    for level, logits in enumerate(levels):
        mask = ek.extend_draft_tree(parents, mask, beam, level)
        t, s, beam, _, beam_scores, _ = ek.expand_topk(logits, beam_scores, k)
        tokens.append(t)
        scores.append(s)
    return ek.build_tree(
        root, prefix_lens, torch.cat(tokens, 1), torch.cat(scores, 1), parents, case.max_nodes
    )


def composed(
    root: torch.Tensor, prefix_lens: torch.Tensor, levels: list[torch.Tensor], case: table.DraftCase
) -> dict[str, torch.Tensor]:
    """The same with torch's operators and Python, for one request."""
    k, n, device = case.top_k, case.max_nodes, root.device
    own = torch.eye(k, dtype=torch.bool, device=device)
    beam_scores, tokens = _best(levels[0][0], k)
    beam, mask, offset = torch.arange(k, device=device), own, 0
    all_scores, all_tokens = [beam_scores.flatten()], [tokens.flatten()]
    parents = [torch.full((k,), -1, device=device)]
    beam_scores = beam_scores[0]
    for logits in levels[1:]:
        parents.append((offset + beam).repeat_interleave(k))
        offset += len(all_scores[-1])
        best, tokens = _best(logits[0], k)
        scores = (best + beam_scores[:, None]).flatten()
        all_scores.append(scores)
        all_tokens.append(tokens.flatten())
        beam_scores, beam = scores.topk(k)
        mask = torch.cat((mask[beam // k], own), 1)
    kept = torch.cat(all_scores).topk(n - 1).indices.sort().values
    above = torch.cat(parents)[kept]
    up = torch.where(above < 0, 0, torch.searchsorted(kept, above) + 1).tolist()
    tree_mask = torch.eye(n, dtype=torch.bool)
    for slot, parent in enumerate(up, start=1):
        tree_mask[slot] |= tree_mask[parent]
    depths = tree_mask.sum(1) - 1
    depth_of = depths.tolist()
    leaves = sorted(set(range(n)) - set(up))
    paths = [[-1] * (max(depth_of) + 1) for _ in leaves]
    for path, leaf in zip(paths, leaves, strict=True):
        slot = leaf
        for depth in range(depth_of[leaf], 0, -1):
            path[depth] = slot
            slot = up[slot - 1]
        path[0] = 0
    return {
        "draft_tokens": torch.cat((root, torch.cat(all_tokens)[kept]))[None],
        "parents": torch.tensor([[-1, *up]], dtype=torch.int32, device=device),
        "position_ids": (prefix_lens + depths.to(device))[None],
        "tree_mask": tree_mask.to(device)[None],
        "retrieve_indices": torch.tensor([paths], device=device),
    }


def _best(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.log_softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """10/6/60 on three vocabularies; the floor is one read of the logits."""
    case = next(c for c in table.DRAFT_CASES if c.max_nodes == 60)
    root = torch.tensor([1], device=device)
    prefix_lens = torch.tensor([9], dtype=torch.int32, device=device)
    for vocab in VOCABULARIES[: 1 if quick else None]:
        g = torch.Generator().manual_seed(vocab)
        levels = [
            (torch.randn(1, 1 if level == 0 else case.top_k, vocab, generator=g) * 4).to(device)
            for level in range(case.max_depth)
        ]
        # Candidates of different levels do not tie here, so both choose alike.
        args = (root, prefix_lens, levels, case)
        expected = composed(*args)

        def check(name, got, expected=expected):
            if name != "ours":
                return
            for field in ("draft_tokens", "parents", "position_ids"):
                assert torch.equal(getattr(got, field), expected[field]), field
            seen = ek.unpack_tree_mask(got.tree_mask, case.max_nodes)
            assert torch.equal(seen, expected["tree_mask"])

        yield Case(
            "grow_and_build",
            f"{case.name}-V{vocab}",
            {
                "ours": lambda args=args: ours(*args),
                "torch composition": lambda args=args: composed(*args),
            },
            check,
            bytes=sum(x.nbytes for x in levels),
        )
