"""tree_attention against SDPA with a boolean mask, with and without repeated KV heads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from runner import Case
from torch.nn.functional import scaled_dot_product_attention as sdpa

import eagle2_kernels as ek

OPS = ("tree_attention",)

# (query heads, KV heads, head dim), prefix, nodes
SHAPES = [
    ((9, 3, 64), 256, 1),
    ((9, 3, 64), 256, 16),
    ((9, 3, 64), 256, 32),
    ((9, 3, 64), 2048, 32),
    ((32, 8, 128), 2048, 1),
    ((32, 8, 128), 2048, 32),
    ((32, 8, 128), 2048, 64),
]


def random_tree(nodes: int, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Mask words of a tree whose nodes hang under one of the eight nodes before them."""
    r = random.Random(nodes)
    parents = [-1] + [r.randrange(max(0, i - 8), i) for i in range(1, nodes)]
    rows = prefix_lens.new_tensor([parents])
    count = prefix_lens.new_tensor([nodes])
    return ek.flatten_tree(rows, count, prefix_lens)[-1]


def cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """One request. K and V are read once; a visible (query, key) pair costs 4 D operations."""
    for dtype in (torch.bfloat16, torch.float32):
        for (heads, kv_heads, dim), prefix, nodes in SHAPES[: 2 if quick else None]:
            g = torch.Generator().manual_seed(prefix + nodes)
            keys = prefix + nodes
            q = torch.randn(1, nodes, heads, dim, generator=g).to(device, dtype)
            k, v = (
                torch.randn(1, keys, kv_heads, dim, generator=g).to(device, dtype) for _ in range(2)
            )
            prefix_lens = torch.tensor([prefix], dtype=torch.int32, device=device)
            words = random_tree(nodes, prefix_lens)
            seen = torch.ones(1, 1, nodes, keys, dtype=torch.bool, device=device)
            seen[0, 0, :, prefix:] = ek.unpack_tree_mask(words, nodes)[0]
            qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
            group = heads // kv_heads

            def repeated(qt=qt, kt=kt, vt=vt, seen=seen, group=group):
                wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (kt, vt))
                return sdpa(qt, wide_k, wide_v, attn_mask=seen).transpose(1, 2)

            def grouped(qt=qt, kt=kt, vt=vt, seen=seen):
                return sdpa(qt, kt, vt, attn_mask=seen, enable_gqa=True).transpose(1, 2)

            def ours(q=q, k=k, v=v, prefix_lens=prefix_lens, words=words):
                return ek.tree_attention(q, k, v, prefix_lens, words)

            exact = sdpa(
                qt.double(), kt.double(), vt.double(), attn_mask=seen, enable_gqa=True
            ).transpose(1, 2)
            tolerance = 4 * torch.finfo(dtype).eps

            def check(name, got, exact=exact, tolerance=tolerance):
                torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)

            yield Case(
                "tree_attention",
                f"Hq/Hkv/D {heads}/{kv_heads}/{dim}, prefix {prefix}, {nodes} nodes",
                {"ours": ours, "SDPA enable_gqa": grouped, "SDPA repeated KV": repeated},
                check,
                bytes=k.nbytes + v.nbytes + 2 * q.nbytes,
                flops=4 * dim * heads * int(seen.sum()),
                dtype=dtype,
            )
