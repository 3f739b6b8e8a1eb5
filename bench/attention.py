"""tree_attention against what PyTorch offers with a mask, and against itself in other caches.

Peers: SDPA with `enable_gqa`; SDPA with the query heads of a group folded into the rows; compiled
FlexAttention; and Hugging Face's path, KV heads repeated for SDPA.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import torch
import torch._inductor.config
from runner import Case
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import eagle2_kernels as ek

OPS = ("tree_attention",)
PAGE = 16

# (query heads, KV heads, head dim), prefix, nodes
SHAPES = [
    ((9, 3, 64), 256, 1),
    ((9, 3, 64), 256, 16),
    ((9, 3, 64), 512, 16),
    ((9, 3, 64), 512, 64),
    ((9, 3, 64), 2048, 32),
    ((9, 3, 64), 8192, 1),
    ((9, 3, 64), 8192, 64),
    ((32, 8, 128), 512, 16),
    ((32, 8, 128), 512, 64),
    ((32, 8, 128), 2048, 1),
    ((32, 8, 128), 2048, 32),
    ((32, 8, 128), 2048, 64),
    ((32, 8, 128), 8192, 1),
    ((32, 8, 128), 8192, 16),
    ((32, 8, 128), 8192, 64),
]
# of them, those that FlexAttention is compiled for (many seconds each)
FLEX = [
    ((9, 3, 64), 512, 16),
    ((9, 3, 64), 2048, 32),
    ((32, 8, 128), 2048, 32),
    ((32, 8, 128), 8192, 1),
]
# plain decoding beside a mere read of the same caches, both from memory
COLD = [((9, 3, 64), 8192, 1), ((32, 8, 128), 8192, 1)]
# and those also run from shuffled pages and from float8 caches
OTHER_CACHES = [
    ((9, 3, 64), 2048, 32),
    ((32, 8, 128), 2048, 32),
    ((32, 8, 128), 8192, 1),
    ((32, 8, 128), 8192, 64),
]


def random_tree(nodes: int, prefix_lens: Tensor) -> Tensor:
    """Mask words of a tree whose nodes hang under one of the eight nodes before them."""
    r = random.Random(nodes)
    parents = [-1] + [r.randrange(max(0, i - 8), i) for i in range(1, nodes)]
    rows = prefix_lens.new_tensor([parents])
    count = prefix_lens.new_tensor([nodes])
    return ek.flatten_tree(rows, count, prefix_lens)[-1]


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = 2 * len(FLEX)
    # Compiling processes start beside what is timed next: our times doubled.
    torch._inductor.config.compile_threads = 1
    return torch.compile(flex_attention, dynamic=False)


def peers(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's ways; ``seen`` [N, keys]. Masks and views are made before the clock starts."""
    (_, nodes, heads, dim), (keys, kv_heads) = q.shape, k.shape[1:3]
    group = heads // kv_heads
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    mask = seen[None, None]
    folded_mask = seen[None, None, None].expand(1, 1, group, nodes, keys).flatten(2, 3)
    blocks = create_block_mask(
        lambda b, h, i, j: seen[i, j], None, None, nodes, keys, device=q.device.type
    )

    def grouped() -> Tensor:
        return sdpa(qt, kt, vt, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def folded() -> Tensor:
        rows = qt.reshape(1, kv_heads, group * nodes, dim)
        out = sdpa(rows, kt, vt, attn_mask=folded_mask)
        return out.view(1, heads, nodes, dim).transpose(1, 2)

    def flex() -> Tensor:
        return compiled_flex()(qt, kt, vt, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    def repeated() -> Tensor:
        wide = (
            x[:, :, None].expand(-1, -1, group, -1, -1).reshape(1, heads, keys, dim)
            for x in (kt, vt)
        )
        return sdpa(qt, *wide, attn_mask=mask).transpose(1, 2)

    return {
        "SDPA enable_gqa": grouped,
        "SDPA group folded": folded,
        "FlexAttention compiled": flex,
        "Hugging Face, KV repeated": repeated,
    }


def shuffled_pages(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The pages of a dense cache in random order, and the table that finds them."""
    pages = -(-cache.shape[1] // PAGE)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(cache.device)
    pool = cache.new_zeros(pages * PAGE, *cache.shape[2:])
    pool[: cache.shape[1]] = cache[0]
    pool = pool.view(pages, PAGE, *cache.shape[2:])[order.argsort()].contiguous()
    return pool, order[None].int()


def evict(device: torch.device) -> Callable[[], Tensor]:
    """Writes to more memory than the CPU's caches hold."""
    other = torch.zeros(32 << 20, device=device)
    return lambda: other.add_(1)


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
            seen = torch.ones(nodes, keys, dtype=torch.bool, device=device)
            seen[:, prefix:] = ek.unpack_tree_mask(words, nodes)[0]
            tolerance = 4 * torch.finfo(dtype).eps

            def ours(q=q, k=k, v=v, prefix_lens=prefix_lens, words=words):
                return ek.tree_attention(q, k, v, prefix_lens, words)

            def check(name, got, q=q, caches=(k, v), seen=seen, tolerance=tolerance):
                rows = (x.double().transpose(1, 2) for x in (q, *caches))
                exact = sdpa(*rows, attn_mask=seen, enable_gqa=True).transpose(1, 2)
                torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)

            shape = f"Hq/Hkv/D {heads}/{kv_heads}/{dim}, prefix {prefix}, {nodes} nodes"
            work = {
                "bytes": k.nbytes + v.nbytes + 2 * q.nbytes,
                "flops": 4 * dim * heads * int(seen.sum()),
                "dtype": dtype,
            }
            providers = {"ours": ours} | peers(q, k, v, seen)
            if quick or ((heads, kv_heads, dim), prefix, nodes) not in FLEX:
                del providers["FlexAttention compiled"]
            yield Case("tree_attention", shape, providers, check, **work)
            if not quick and ((heads, kv_heads, dim), prefix, nodes) in COLD:
                words_of = [x.flatten().view(torch.float32) for x in (k, v)]

                def read(words_of=words_of):
                    return [x.sum() for x in words_of]

                def check_ours(name, got, check=check):
                    if name == "ours":
                        check(name, got)

                both = {"ours": ours, "K and V summed": read}
                cold = f"{shape}, cold"
                yield Case("tree_attention", cold, both, check_ours, **work, before=evict(device))
            if quick or ((heads, kv_heads, dim), prefix, nodes) not in OTHER_CACHES:
                continue
            (k_pool, table), (v_pool, _) = shuffled_pages(k), shuffled_pages(v)

            def paged(q=q, k=k_pool, v=v_pool, lens=prefix_lens, words=words, table=table):
                return ek.tree_attention(q, k, v, lens, words, page_table=table)

            other = {"ours": paged, "ours, dense": ours}
            yield Case("tree_attention", f"{shape}, pages of {PAGE} shuffled", other, check, **work)
            if dtype != torch.bfloat16:
                continue
            k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k, v))
            wide = tuple(x.to(dtype) for x in (k8, v8))

            def float8(q=q, k=k8, v=v8, prefix_lens=prefix_lens, words=words):
                return ek.tree_attention(q, k, v, prefix_lens, words)

            def bfloat16(q=q, k=wide[0], v=wide[1], prefix_lens=prefix_lens, words=words):
                return ek.tree_attention(q, k, v, prefix_lens, words)

            def check8(name, got, check=check, wide=wide):
                check(name, got, caches=wide)

            other = {"ours": float8, "ours, bfloat16 caches": bfloat16}
            work["bytes"] = k8.nbytes + v8.nbytes + 2 * q.nbytes
            yield Case("tree_attention", f"{shape}, float8 caches", other, check8, **work)
