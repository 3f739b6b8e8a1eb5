"""sample_tokens and sample_and_verify: draws from the target's logits, and the walk they decide.

A draw is the work of one program, which passes over its row: once for the best logit, then, where a
filter asks for it, some times to find the filter's edge, and once more for the noise. The walk asks
for draws at the nodes it visits and at no other. Sums that decide what top-p keeps are taken in
integers, so their order does not matter; the noise and the exponential are the operations of
csrc/tree.h, fused multiply-adds explicit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


@triton.jit
def _fma(a, b, c):
    return tl.fma(a, b, tl.zeros_like(a) + c)


@triton.jit
def _log_poly(x):
    # Natural logarithm of positive normal x.
    bits = x.to(tl.int32, bitcast=True)
    fraction = bits & 0x007FFFFF
    low = (fraction < 0x003504F3).to(tl.int32)
    e = ((bits >> 23) - 126 - low).to(tl.float32)
    m = (fraction | (0x3F000000 + (low << 23))).to(tl.float32, bitcast=True) - 1.0
    square = m * m
    y = tl.zeros_like(m) + 7.0376836292e-2
    y = _fma(y, m, -1.1514610310e-1)
    y = _fma(y, m, 1.1676998740e-1)
    y = _fma(y, m, -1.2420140846e-1)
    y = _fma(y, m, 1.4249322787e-1)
    y = _fma(y, m, -1.6668057665e-1)
    y = _fma(y, m, 2.0000714765e-1)
    y = _fma(y, m, -2.4999993993e-1)
    y = _fma(y, m, 3.3333331174e-1)
    y = (y * m) * square
    y = tl.fma(tl.zeros_like(e) - 2.12194440e-4, e, y)
    y = tl.fma(tl.zeros_like(e) - 0.5, square, y)
    return tl.fma(tl.zeros_like(e) + 0.693359375, e, m + y)


@triton.jit
def _exp_poly(x):
    # e^x for x <= 0; 0 below the smallest normal result, -inf included.
    shifted = _fma(x, tl.zeros_like(x) + 1.44269504088896341, 12582912.0)
    n = shifted - 12582912.0
    r = tl.fma(n, tl.zeros_like(x) - 0.693359375, x)
    r = tl.fma(n, tl.zeros_like(x) + 2.12194440e-4, r)
    y = tl.zeros_like(x) + 1.9875691500e-4
    y = _fma(y, r, 1.3981999507e-3)
    y = _fma(y, r, 8.3334519073e-3)
    y = _fma(y, r, 4.1665795894e-2)
    y = _fma(y, r, 1.6666665459e-1)
    y = _fma(y, r, 5.0000001201e-1)
    y = tl.fma(y, r * r, r) + 1.0
    exponent = (shifted.to(tl.int32, bitcast=True) - 0x4B400000 + 127) << 23
    tiny = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x42AEAC4F
    return tl.where(tiny, 0.0, y * exponent.to(tl.float32, bitcast=True))


@triton.jit
def _philox(seed, position, block):
    # Philox4x32-10 of key `seed` and counter (position low, position high, block, 0).
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = block.to(tl.uint32)
    zero = c2 & 0
    c0 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero
    first, second = zero + 0xD2511F53, zero + 0xCD9E8D57
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(first, c0), first * c0
        high2, low2 = tl.umulhi(second, c2), second * c2
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0 += (zero + 0x9E3779B9).to(tl.uint32)
        key1 += (zero + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _gumbel(word):
    # G = -log(-log1p(-v)), v = min((word + 0.5) * 2^-32, 1 - 2^-24); (2 word + 1) * 2^-33 is
    # rounded as (word + 0.5) * 2^-32 is.
    v = (word.to(tl.int64) * 2 + 1).to(tl.float32) * 1.1641532182693481e-10
    v = tl.minimum(v, 0.99999994039535522)
    u = 1.0 - v
    lost = (1.0 - u) - v
    return -_log_poly(-(_log_poly(u) + tl.div_rn(lost, u)))


@triton.jit
def _noise(seed, position, first, BLOCK: tl.constexpr):
    # Noise of tokens [first, first + BLOCK), four to a Philox block.
    block = first // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = _philox(seed, position, block)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return _gumbel(tl.reshape(words, (BLOCK,)))


@triton.jit
def _logits(row, mask_row, first, vocab, token_stride, word_stride, HAS_MASK, BLOCK: tl.constexpr):
    # Tokens [first, first + BLOCK) with NaN and what is banned as -inf, +inf as the largest float.
    token = first + tl.arange(0, BLOCK)
    there = token < vocab
    x = tl.load(row + token.to(tl.int64) * token_stride, mask=there, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == float("inf"), 3.4028234663852886e38, x)
    if HAS_MASK:
        word = tl.load(mask_row + (token // 32).to(tl.int64) * word_stride, mask=there, other=0)
        there = there & (((word >> (token % 32)) & 1) != 0)
        x = tl.where(there, x, float("-inf"))
    return token, x, there


@triton.jit
def _key(x):
    # An integer in [0, 2^32) that orders as the float does; both zeros map to one value.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _weight(x, key, token, peak, temperature, key_floor, id_limit, MASS: tl.constexpr):
    # What an element counts: 1 for top-k; its probability in units of 2^-33 (times the row's sum)
    # for top-p, rounded half to even, if top-k left it.
    if MASS:
        mass = _exp_poly(tl.div_rn(x - peak, tl.zeros_like(x) + temperature)) * 8589934592.0
        small = (mass + 8388608.0) - 8388608.0
        weight = tl.where(mass < 8388608.0, small, mass).to(tl.int64)
        kept = (key > key_floor) | ((key == key_floor) & (token <= id_limit))
    else:
        weight = tl.full(x.shape, 1, tl.int64)
        kept = x == x
    return tl.where(kept & (x > float("-inf")), weight, 0)


@triton.jit
def _edge(
    row,
    mask_row,
    vocab,
    token_stride,
    word_stride,
    peak,
    temperature,
    key_floor,
    id_limit,
    share,
    HAS_MASK: tl.constexpr,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The last element, in the order (logit, id), of the shortest leading run whose weights reach
    # `share` (a count; for MASS a part of the whole): its key and id. Two bits of the key a pass.
    if MASS:
        whole = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, vocab, BLOCK):
            token, x, _ = _logits(
                row, mask_row, first, vocab, token_stride, word_stride, HAS_MASK, BLOCK
            )
            whole += _weight(x, _key(x), token, peak, temperature, key_floor, id_limit, MASS)
        limit = tl.sum(whole, axis=0).to(tl.float64) * share.to(tl.float64)
        wanted = limit.to(tl.int64)
        wanted += tl.where(wanted.to(tl.float64) < limit, 1, 0)
        wanted = tl.maximum(wanted, 1)
    else:
        wanted = share.to(tl.int64)
    edge = wanted * 0
    step = edge + 1073741824
    while step > 0:
        one, two = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
        three = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, vocab, BLOCK):
            token, x, _ = _logits(
                row, mask_row, first, vocab, token_stride, word_stride, HAS_MASK, BLOCK
            )
            key = _key(x)
            weight = _weight(x, key, token, peak, temperature, key_floor, id_limit, MASS)
            one += tl.where(key >= edge + step, weight, 0)
            two += tl.where(key >= edge + 2 * step, weight, 0)
            three += tl.where(key >= edge + 3 * step, weight, 0)
        reached = tl.where(tl.sum(one, axis=0) >= wanted, 1, 0)
        reached += tl.where(tl.sum(two, axis=0) >= wanted, 1, 0)
        reached += tl.where(tl.sum(three, axis=0) >= wanted, 1, 0)
        edge += reached * step
        step = step // 4
    # Equal logits at the edge: as many of the lowest ids as are still wanted.
    above = tl.zeros((BLOCK,), tl.int64)
    each = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, vocab, BLOCK):
        token, x, _ = _logits(
            row, mask_row, first, vocab, token_stride, word_stride, HAS_MASK, BLOCK
        )
        key = _key(x)
        weight = _weight(x, key, token, peak, temperature, key_floor, id_limit, MASS)
        above += tl.where(key > edge, weight, 0)
        each = tl.maximum(each, tl.where(key == edge, weight, 0))
    unit = tl.maximum(tl.max(each, axis=0), 1)
    ties = (wanted - tl.sum(above, axis=0) + unit - 1) // unit
    last = edge * 0 - 1
    seen = edge * 0
    for first in range(0, vocab, BLOCK):
        token, x, _ = _logits(
            row, mask_row, first, vocab, token_stride, word_stride, HAS_MASK, BLOCK
        )
        equal = ((_key(x) == edge) & (x > float("-inf"))).to(tl.int64)
        if tl.sum(equal, axis=0) > 0:
            rank = seen + tl.cumsum(equal, axis=0)
            inside = (equal > 0) & (rank <= ties)
            last = tl.maximum(last, tl.max(tl.where(inside, token, -1), axis=0).to(tl.int64))
            seen += tl.sum(equal, axis=0)
    return edge, last


@triton.jit
def _draw(
    logits,
    position_ids,
    seeds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    allowed_mask,
    request,
    node,
    vocab,
    logits_batch,
    logits_row,
    logits_token,
    position_batch,
    position_row,
    seeds_batch,
    temperature_batch,
    top_k_batch,
    top_p_batch,
    min_p_batch,
    mask_batch,
    mask_row,
    mask_word,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The token drawn (or the best one) at one node.
    row = logits + request * logits_batch + node * logits_row
    words = allowed_mask + request * mask_batch + node * mask_row
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), 2147483647, tl.int32)
    allowed_id = tl.full((BLOCK,), 2147483647, tl.int32)
    for first in range(0, vocab, BLOCK):
        token, x, there = _logits(
            row, words, first, vocab, logits_token, mask_word, HAS_MASK, BLOCK
        )
        better = x > best
        best_id = tl.where(better, token, best_id)
        best = tl.where(better, x, best)
        if HAS_MASK:
            allowed_id = tl.minimum(allowed_id, tl.where(there, token, 2147483647))
    peak = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == peak, best_id, 2147483647), axis=0)
    if HAS_MASK:
        chosen = tl.minimum(
            chosen, tl.where(peak > float("-inf"), chosen, tl.min(allowed_id, axis=0))
        )
    # Nothing finite and nothing allowed.
    chosen = tl.where(chosen == 2147483647, 0, chosen)

    if HAS_TEMPERATURE:
        temperature = tl.load(temperatures + request * temperature_batch)
        hot = tl.where(temperature > 0, 1, 0) * tl.where(peak > float("-inf"), 1, 0)
        if hot > 0:
            key_floor = chosen.to(tl.int64) * 0
            id_limit = key_floor + 2147483647
            if HAS_TOP_K:
                top_k = tl.load(top_ks + request * top_k_batch).to(tl.int64)
                if (top_k > 0) & (top_k < vocab):
                    key_floor, id_limit = _edge(
                        row, words, vocab, logits_token, mask_word, peak, temperature,
                        key_floor, id_limit, top_k, HAS_MASK, False, BLOCK,
                    )  # fmt: skip
            if HAS_TOP_P:
                top_p = tl.load(top_ps + request * top_p_batch)
                if top_p < 1:
                    key_floor, id_limit = _edge(
                        row, words, vocab, logits_token, mask_word, peak, temperature,
                        key_floor, id_limit, top_p, HAS_MASK, True, BLOCK,
                    )  # fmt: skip
            min_p = 0.0
            if HAS_MIN_P:
                min_p = tl.load(min_ps + request * min_p_batch)
            seed = tl.load(seeds + request * seeds_batch)
            position = tl.load(position_ids + request * position_batch + node * position_row)
            top = chosen
            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            best_id = tl.full((BLOCK,), 2147483647, tl.int32)
            for first in range(0, vocab, BLOCK):
                token, x, _ = _logits(
                    row, words, first, vocab, logits_token, mask_word, HAS_MASK, BLOCK
                )
                key = _key(x)
                kept = (key > key_floor) | ((key == key_floor) & (token <= id_limit))
                kept = kept & (x > float("-inf"))
                # An infinite temperature makes NaN of no kept logit: those are finite.
                scaled = tl.div_rn(x - peak, tl.zeros_like(x) + temperature)
                if HAS_MIN_P:
                    kept = kept & ((_exp_poly(scaled) >= min_p) | (token == top))
                # Blocks the filters emptied need no noise.
                if tl.max(kept.to(tl.int32), axis=0) > 0:
                    x = tl.where(kept, scaled + _noise(seed, position, first, BLOCK), float("-inf"))
                    better = x > best
                    best_id = tl.where(better, token, best_id)
                    best = tl.where(better, x, best)
            peak = tl.max(best, axis=0)
            drawn = tl.min(tl.where(best == peak, best_id, 2147483647), axis=0)
            chosen = tl.where(drawn == 2147483647, top, drawn)
    return chosen.to(tl.int64)


@triton.jit
def sample_tokens_kernel(
    logits,
    position_ids,
    seeds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    allowed_mask,
    tokens,
    num_rows,
    vocab,
    logits_batch,
    logits_row,
    logits_token,
    position_batch,
    position_row,
    seeds_batch,
    temperature_batch,
    top_k_batch,
    top_p_batch,
    min_p_batch,
    mask_batch,
    mask_row,
    mask_word,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One draw: one program per row.

    bytes = rows * (vocab * element * passes + 8); of the passes the first comes from memory, the
            others from the second-level cache: 1 when greedy, 2 with a temperature, 18 more for
            top-k and 19 more for top-p; vocab / 8 a pass with a mask
    flops = rows * vocab * (2 * passes + 60 for the noise, with a temperature)
    """
    request = (tl.program_id(0) // num_rows).to(tl.int64)
    node = (tl.program_id(0) % num_rows).to(tl.int64)
    token = _draw(
        logits, position_ids, seeds, temperatures, top_ks, top_ps, min_ps, allowed_mask,
        request, node, vocab, logits_batch, logits_row, logits_token, position_batch, position_row,
        seeds_batch, temperature_batch, top_k_batch, top_p_batch, min_p_batch,
        mask_batch, mask_row, mask_word,
        HAS_TEMPERATURE, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, HAS_MASK, BLOCK,
    )  # fmt: skip
    tl.store(tokens + request * num_rows + node, token)


@triton.jit
def sample_and_verify_kernel(
    logits,
    position_ids,
    seeds,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    allowed_mask,
    draft_tokens,
    first_child,
    next_sibling,
    num_nodes,
    emitted_tokens,
    accept_index,
    accept_length,
    bonus_token,
    num_rows,
    vocab,
    max_depth,
    logits_batch,
    logits_row,
    logits_token,
    position_batch,
    position_row,
    seeds_batch,
    temperature_batch,
    top_k_batch,
    top_p_batch,
    min_p_batch,
    mask_batch,
    mask_row,
    mask_word,
    draft_batch,
    draft_row,
    child_batch,
    child_row,
    sibling_batch,
    sibling_row,
    nodes_batch,
    HAS_NODES: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    HAS_MASK: tl.constexpr,
    DEPTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request's walk: from the root, a draw at each node it comes to.

    bytes = visited * (what sample_tokens_kernel has for a row) + requests * (12 * (max_depth + 1)
            + 12), visited = accept_length + 1 for each request
    flops = visited * (what sample_tokens_kernel has for a row)
    """
    request = tl.program_id(0).to(tl.int64)
    slots = num_rows + request * 0
    if HAS_NODES:
        slots = tl.where(tl.load(num_nodes + request * nodes_batch) > 0, slots, 0)
    width = max_depth + 1
    node = request * 0
    length = request * 0 - 1
    token = request * 0 - 1
    walking = tl.where(slots > 0, 1, 0)
    while walking > 0:
        length += 1
        token = _draw(
            logits, position_ids, seeds, temperatures, top_ks, top_ps, min_ps, allowed_mask,
            request, node, vocab, logits_batch, logits_row, logits_token,
            position_batch, position_row,
            seeds_batch, temperature_batch, top_k_batch, top_p_batch, min_p_batch,
            mask_batch, mask_row, mask_word,
            HAS_TEMPERATURE, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P, HAS_MASK, BLOCK,
        )  # fmt: skip
        tl.store(accept_index + request * width + length, node.to(tl.int32))
        tl.store(emitted_tokens + request * width + length, token)
        walking = tl.where(length < max_depth, 1, 0)
        if walking > 0:
            child = tl.load(first_child + request * child_batch + node * child_row).to(tl.int64)
            looked = request * 0
            known = tl.where((child >= 0) & (child < slots), 1, 0)
            draft = tl.load(
                draft_tokens + request * draft_batch + child * draft_row, mask=known > 0, other=-1
            )
            searching = known * tl.where(draft != token, 1, 0)
            # Bounded, whatever the links hold.
            while searching > 0:
                child = tl.load(next_sibling + request * sibling_batch + child * sibling_row).to(
                    tl.int64
                )
                looked += 1
                known = tl.where((child >= 0) & (child < slots) & (looked < slots), 1, 0)
                draft = tl.load(
                    draft_tokens + request * draft_batch + child * draft_row,
                    mask=known > 0,
                    other=-1,
                )
                searching = known * tl.where(draft != token, 1, 0)
            walking = known
            node = tl.where(known > 0, child, node)
    depth = tl.arange(0, DEPTHS)
    rest = (depth > length) & (depth < width)
    tl.store(accept_index + request * width + depth, tl.full((DEPTHS,), -1, tl.int32), mask=rest)
    tl.store(emitted_tokens + request * width + depth, tl.full((DEPTHS,), -1, tl.int64), mask=rest)
    tl.store(accept_length + request, length.to(tl.int32))
    tl.store(bonus_token + request, token)


def _arguments(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    allowed_mask: Tensor | None,
) -> tuple[list[Tensor], list[int], dict[str, bool]]:
    """Pointers, strides and flags of the draws, checked."""
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"logits: expected float32, float16 or bfloat16 on CUDA, got {logits.dtype}"
        )
    launch.check("logits", logits, logits.dtype, (None,) * 3)
    batch, rows, vocab = logits.shape
    if vocab < 1:
        raise ValueError("logits: expected a vocabulary of at least 1, got 0")
    launch.check("position_ids", position_ids, torch.int64, (batch, rows))
    launch.check("seeds", seeds, torch.int64, (batch,))
    filters = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, tensor in filters.items():
        launch.check(name, tensor, torch.float32, (batch,))
    if top_k is not None:
        if top_k.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"top_k: expected int32 or int64, got {top_k.dtype}")
        launch.check("top_k", top_k, top_k.dtype, (batch,))
    launch.check("allowed_mask", allowed_mask, torch.int32, (batch, rows, -(-vocab // 32)))
    launch.check_same_device(
        logits,
        position_ids=position_ids,
        seeds=seeds,
        top_k=top_k,
        allowed_mask=allowed_mask,
        **filters,
    )
    optional = (temperature, top_k, top_p, min_p)
    # A tensor stands in for a pointer the kernel does not read.
    pointers = [
        logits,
        position_ids,
        seeds,
        *(seeds if tensor is None else tensor for tensor in optional),
        seeds if allowed_mask is None else allowed_mask,
    ]
    strides = [
        *logits.stride(),
        *position_ids.stride(),
        *seeds.stride(),
        *(0 if tensor is None else tensor.stride(0) for tensor in optional),
        *((0, 0, 0) if allowed_mask is None else allowed_mask.stride()),
    ]
    flags = {
        "HAS_TEMPERATURE": temperature is not None,
        "HAS_TOP_K": top_k is not None,
        "HAS_TOP_P": top_p is not None,
        "HAS_MIN_P": min_p is not None,
        "HAS_MASK": allowed_mask is not None,
    }
    return pointers, strides, flags


def sample_tokens_out(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    tokens: Tensor,
) -> None:
    """Argmax(filtered logits / temperature + G(seed, position, token)), lowest id on ties."""
    pointers, strides, flags = _arguments(
        logits, position_ids, seeds, temperature, top_k, top_p, min_p, allowed_mask
    )
    batch, rows, vocab = logits.shape
    launch.check_outputs(logits, {"tokens": (tokens, torch.int64, (batch, rows))})
    if batch * rows == 0:
        return
    with torch.cuda.device_of(logits):
        sample_tokens_kernel[(batch * rows,)](
            *pointers, tokens, rows, vocab, *strides, **flags, **launch.draw_tiles(flags).keywords()
        )


def sample_and_verify_out(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    max_depth: int,
    num_nodes: Tensor | None = None,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    emitted_tokens: Tensor,
    accept_index: Tensor,
    accept_length: Tensor,
    bonus_token: Tensor,
) -> None:
    """`sample_tokens` at the visited nodes only, fused with `verify_tree`."""
    pointers, strides, flags = _arguments(
        logits, position_ids, seeds, temperature, top_k, top_p, min_p, allowed_mask
    )
    batch, rows, vocab = logits.shape
    launch.check("draft_tokens", draft_tokens, torch.int64, (batch, rows))
    launch.check("first_child", first_child, torch.int32, (batch, rows))
    launch.check("next_sibling", next_sibling, torch.int32, (batch, rows))
    launch.check("num_nodes", num_nodes, torch.int32, (batch,))
    launch.check_same_device(
        logits,
        draft_tokens=draft_tokens,
        first_child=first_child,
        next_sibling=next_sibling,
        num_nodes=num_nodes,
    )
    if max_depth < 0:
        raise ValueError(f"max_depth: expected 0 or more, got {max_depth}")
    outs = {
        "emitted_tokens": (emitted_tokens, torch.int64, (batch, max_depth + 1)),
        "accept_index": (accept_index, torch.int32, (batch, max_depth + 1)),
        "accept_length": (accept_length, torch.int32, (batch,)),
        "bonus_token": (bonus_token, torch.int64, (batch,)),
    }
    launch.check_outputs(logits, outs)
    if batch == 0:
        return
    with torch.cuda.device_of(logits):
        sample_and_verify_kernel[(batch,)](
            *pointers,
            draft_tokens,
            first_child,
            next_sibling,
            seeds if num_nodes is None else num_nodes,
            *(tensor for tensor, _, _ in outs.values()),
            rows,
            vocab,
            max_depth,
            *strides,
            *draft_tokens.stride(),
            *first_child.stride(),
            *next_sibling.stride(),
            0 if num_nodes is None else num_nodes.stride(0),
            HAS_NODES=num_nodes is not None,
            **flags,
            **launch.walk_tiles(flags, max_depth).keywords(),
        )
