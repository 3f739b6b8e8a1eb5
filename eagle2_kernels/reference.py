"""The oracle: every operator in plain PyTorch, written to be read beside the contract.

One function per row of the op table, with the same arguments. Loops over requests and rows are left
visible; the compiled kernels are tested against these functions, and ``EAGLE2_BACKEND=reference``
runs them in the kernels' place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEG_INF = float("-inf")


def _words(n: int) -> int:
    return (n + 63) // 64


def _finite(logits: Tensor) -> Tensor:
    """Float32 (float64 stays) with NaN as -inf and +inf as the largest finite value."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nan_to_num(x, nan=NEG_INF, posinf=torch.finfo(x.dtype).max, neginf=NEG_INF)


# a decoder layer between its products; rounded where transformers' own layers round


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Weight * (x / sqrt(mean(x^2) + eps)); the quotient in float32, rounded to x's dtype."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Residual += x, then x = rms_norm(residual)."""
    residual += x
    x.copy_(rms_norm(residual, weight, eps))


def silu_and_mul(x: Tensor) -> Tensor:
    """Silu(g) * u of x = [g; u], silu(g) = g / (1 + e^-g)."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


# expand


def expand_topk(
    logits: Tensor, beam_scores: Tensor, top_k: int, draft_to_target: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Score(p, id) = beam_scores[p] + log_softmax(logits[p])[id]; top-k per row, then of all."""
    b, p, v = logits.shape
    x = _finite(logits)
    k = min(top_k, v)
    # A stable descending sort of ids in ascending order is the order (logit, id).
    top, ids = (t[..., :k] for t in torch.sort(x, dim=-1, descending=True, stable=True))
    peak = x.amax(-1, keepdim=True)
    shifted = torch.where(x == NEG_INF, NEG_INF, x - peak)
    log_sum = shifted.exp().sum(-1, keepdim=True).log()
    scores = ((top - peak) - log_sum + beam_scores[..., None]).float()
    dead = (top == NEG_INF) | ~(beam_scores[..., None] > NEG_INF)
    scores = torch.where(dead | scores.isnan(), NEG_INF, scores)
    tokens = ids if draft_to_target is None else draft_to_target.long()[ids]
    tokens = torch.where(scores == NEG_INF, 0, tokens)

    candidate_tokens = tokens.new_zeros(b, p, top_k)
    candidate_scores = scores.new_full((b, p, top_k), NEG_INF)
    candidate_tokens[..., :k] = tokens
    candidate_scores[..., :k] = scores
    candidate_tokens = candidate_tokens.view(b, p * top_k)
    candidate_scores = candidate_scores.view(b, p * top_k)
    ranked, order = torch.sort(candidate_scores, dim=-1, descending=True, stable=True)
    beam = order[:, :top_k].contiguous()
    return (
        candidate_tokens,
        candidate_scores,
        beam,
        candidate_tokens.gather(1, beam),
        ranked[:, :top_k].contiguous(),
        (beam // top_k).int(),
    )


def level_offset(level: int, top_k: int) -> int:
    """Index of the first candidate of a draft level: 0, K, K + K^2, ..."""
    return 0 if level == 0 else top_k + (level - 1) * top_k * top_k


def extend_draft_tree(
    candidate_parents: Tensor, draft_mask: Tensor, beam: Tensor, level: int
) -> Tensor:
    """Parents of this level's candidates, and the mask words of the frontier they grow from."""
    if level == 0:
        candidate_parents[:, : beam.shape[1]] = -1
        return draft_mask.clone()
    b, k, _ = draft_mask.shape
    first, start = level_offset(level - 1, k), level_offset(level, k)
    next_mask = torch.zeros_like(draft_mask, memory_format=torch.contiguous_format)
    for r in range(b):
        for j in range(k):
            entry = int(beam[r, j])
            # -2 is no parent at all (-1 is the root): build_tree drops such candidates.
            known = 0 <= entry < start - first
            parent = first + entry if known else -2
            candidate_parents[r, start + j * k : start + (j + 1) * k] = parent
            slot = (level - 1) * k + j
            if known:
                next_mask[r, j] = draft_mask[r, entry // k]
            next_mask[r, j, slot // 64] |= _bit(slot % 64)
    return next_mask


def _bit(position: int) -> int:
    """2**position as a signed 64-bit value."""
    return (1 << position) - (1 << 64 if position == 63 else 0)


# flatten


def build_tree(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    max_nodes: int,
    limits: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Keep the best ``max_nodes - 1`` candidates by min(own score, parent's effective score)."""
    b, m = candidate_scores.shape
    device = root_tokens.device
    tokens = torch.zeros(b, max_nodes, dtype=torch.int64, device=device)
    parents = torch.full((b, max_nodes), -1, dtype=torch.int32, device=device)
    scores = torch.full((b, max_nodes), NEG_INF, dtype=torch.float32, device=device)
    num_nodes = torch.zeros(b, dtype=torch.int32, device=device)
    for r in range(b):
        slots, deepest = (max_nodes, m) if limits is None else limits[r].tolist()
        if slots <= 0:
            continue
        effective, depth = [], []
        own = candidate_scores[r].tolist()
        up = candidate_parents[r].tolist()
        for c in range(m):
            score = NEG_INF if math.isnan(own[c]) else own[c]
            if up[c] == -1:
                effective.append(score)
                depth.append(1)
            elif 0 <= up[c] < c:
                effective.append(min(score, effective[up[c]]))
                depth.append(depth[up[c]] + 1)
            else:
                effective.append(NEG_INF)
                depth.append(0)
        alive = [c for c in range(m) if effective[c] > NEG_INF and depth[c] <= deepest]
        best = sorted(alive, key=lambda c: (-effective[c], c))[: min(slots, max_nodes) - 1]
        kept = sorted(best, key=lambda c: (depth[c], c))
        slot_of = {-1: 0} | {c: s for s, c in enumerate(kept, start=1)}
        tokens[r, 0], scores[r, 0] = root_tokens[r], 0.0
        for s, c in enumerate(kept, start=1):
            tokens[r, s] = candidate_tokens[r, c]
            parents[r, s] = slot_of[up[c]]
            scores[r, s] = candidate_scores[r, c]
        num_nodes[r] = len(kept) + 1
    depths, positions, first_child, next_sibling, mask = flatten_tree(
        parents, num_nodes, prefix_lens
    )
    return (
        tokens,
        parents,
        depths,
        positions,
        scores,
        first_child,
        next_sibling,
        mask,
        num_nodes,
    )


def _best_prefixes(
    rows: list[list[float]], wanted: int, deepest: int
) -> list[tuple[float, int, int, int]]:
    """(-score, depth, rank, parent) of the best prefixes, in the order they are found.

    Taking a prefix opens its next sibling and its first child; of the open ones the next is the
    least tuple. ``parent`` is an index into the result, -1 the root.
    """
    taken: list[tuple[float, int, int, int]] = []
    opened = [(1, 0, -1)]
    frontier: list[tuple[float, int, int, int]] = []
    while len(taken) < wanted:
        for depth, rank, parent in opened:
            if depth > min(len(rows), deepest) or rank >= len(rows[depth - 1]):
                continue
            above = -taken[parent][0] if parent >= 0 else 0.0
            score = float(torch.tensor(above + rows[depth - 1][rank], dtype=torch.float32))
            if score > NEG_INF:
                frontier.append((-score, depth, rank, parent))
        if not frontier:
            break
        best = min(frontier)
        frontier.remove(best)
        taken.append(best)
        _, depth, rank, parent = best
        opened = [(depth, rank + 1, parent), (depth + 1, 0, len(taken) - 1)]
    return taken


def build_tree_from_marginals(
    root_tokens: Tensor,
    prefix_lens: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    max_nodes: int,
    limits: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The best ``max_nodes - 1`` prefixes by summed log-probability, found best-first."""
    b, levels, top_k = tokens.shape
    # An entry counts for no more than 0 and than those before it in its level: no prefix outranks
    # its parent or its previous sibling.
    counted = torch.where(log_probs.isnan(), NEG_INF, log_probs).clamp(max=0)
    if top_k:
        counted = counted.cummin(-1).values
    candidate_tokens = tokens.new_zeros(b, max_nodes)
    candidate_scores = log_probs.new_full((b, max_nodes), NEG_INF)
    candidate_parents = torch.full((b, max_nodes), -1, dtype=torch.int32, device=tokens.device)
    for r in range(b):
        slots, deepest = (max_nodes, levels) if limits is None else limits[r].tolist()
        found = _best_prefixes(counted[r].tolist(), min(slots, max_nodes) - 1, deepest)
        for i, (cost, depth, rank, parent) in enumerate(found):
            candidate_tokens[r, i] = tokens[r, depth - 1, rank]
            candidate_scores[r, i] = -cost
            candidate_parents[r, i] = parent
    return build_tree(
        root_tokens,
        prefix_lens,
        candidate_tokens,
        candidate_scores,
        candidate_parents,
        max_nodes,
        limits,
    )


def _ancestors(parents: list[int], count: int, slot: int) -> list[int] | None:
    """Slots from ``slot`` up to the root, or None when the walk does not reach slot 0."""
    walk: list[int] = []
    while 0 <= slot < count and len(walk) < count:
        walk.append(slot)
        if slot == 0:
            return walk if parents[0] == -1 else None
        slot = parents[slot]
    return None


def flatten_tree(
    parents: Tensor, num_nodes: Tensor, prefix_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Depths, positions, links and ancestor words; slot 0 with parent -1 is the only root."""
    b, n = parents.shape
    device = parents.device
    depths = torch.zeros(b, n, dtype=torch.int32, device=device)
    positions = prefix_lens.long()[:, None].repeat(1, n)
    first_child = torch.full((b, n), -1, dtype=torch.int32, device=device)
    next_sibling = torch.full((b, n), -1, dtype=torch.int32, device=device)
    mask = torch.zeros(b, n, _words(n), dtype=torch.int64, device=device)
    for r in range(b):
        row = parents[r].tolist()
        count = min(max(int(num_nodes[r]), 0), n)
        last_child: dict[int, int] = {}
        for slot in range(count):
            walk = _ancestors(row, count, slot)
            if walk is None:
                depths[r, slot] = -1
                continue
            depths[r, slot] = len(walk) - 1
            positions[r, slot] = prefix_lens[r] + len(walk) - 1
            for a in walk:
                mask[r, slot, a // 64] |= _bit(a % 64)
            if slot > 0:
                up = row[slot]
                if up in last_child:
                    next_sibling[r, last_child[up]] = slot
                else:
                    first_child[r, up] = slot
                last_child[up] = slot
    return depths, positions, first_child, next_sibling, mask


def retrieve_indices(parents: Tensor, num_nodes: Tensor, max_depth: int) -> Tensor:
    """One root-to-leaf row per leaf, ascending leaf slot, padded with -1, cut to max_depth + 1."""
    b, n = parents.shape
    out = torch.full((b, n, max_depth + 1), -1, dtype=torch.int64, device=parents.device)
    for r in range(b):
        row = parents[r].tolist()
        count = min(max(int(num_nodes[r]), 0), n)
        walks = [_ancestors(row, count, s) for s in range(count)]
        inner = {row[s] for s in range(1, count) if walks[s] is not None}
        leaves = [w for s, w in enumerate(walks) if w is not None and s not in inner]
        for i, walk in enumerate(leaves):
            path = walk[::-1][: max_depth + 1]
            out[r, i, : len(path)] = torch.tensor(path, device=parents.device)
    return out


def pack_tree_mask(mask: Tensor) -> Tensor:
    """Bit j % 64 of word j // 64 is mask[..., j]."""
    m = mask.shape[-1]
    padded = torch.nn.functional.pad(mask.to(torch.int64), (0, _words(m) * 64 - m))
    bits = padded.unflatten(-1, (_words(m), 64))
    weights = torch.tensor([_bit(j) for j in range(64)], device=mask.device)
    return (bits * weights).sum(-1)


def unpack_tree_mask(words: Tensor, num_keys: int) -> Tensor:
    """The inverse of `pack_tree_mask` for the first ``num_keys`` bits."""
    shifts = torch.arange(64, device=words.device)
    bits = (words[..., None] >> shifts) & 1
    return bits.flatten(-2)[..., :num_keys].bool()


# attention


def _cache_rows(cache: Tensor, page_table: Tensor | None, request: int, slots: Tensor) -> Tensor:
    """[len(slots), Hkv, D] of one request, from a dense or a paged cache."""
    if page_table is None:
        return cache[request, slots]
    size = cache.shape[1]
    return cache[page_table[request, slots // size].long(), slots % size]


def visible_keys(
    row: int,
    num_rows: int,
    prefix_len: int,
    tree_len: int,
    tree_mask: Tensor | None,
    depths: Tensor | None,
    window: int | None,
) -> Tensor:
    """Cache slots query ``row`` of one request sees, in ascending slot order.

    ``tree_mask`` is that request's [N, W] words or None; ``depths`` its [tree_len] depths or None.
    """
    slot = tree_len - num_rows + row
    if tree_len == 0:
        tree_slots = torch.empty(0, dtype=torch.int64)
    elif tree_mask is None:
        tree_slots = torch.arange(slot + 1)
    else:
        tree_slots = unpack_tree_mask(tree_mask[row], tree_len).cpu().nonzero()[:, 0]
        if tree_slots.numel() == 0:
            return tree_slots
    keys = torch.cat([torch.arange(prefix_len), prefix_len + tree_slots])
    if window is not None:
        depth = torch.arange(tree_len) if depths is None else depths.cpu().long()
        positions = torch.cat([torch.arange(prefix_len), prefix_len + depth[tree_slots]])
        keys = keys[prefix_len + depth[slot] - positions < window]
    return keys


def tree_attention_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None = None,
    *,
    tree_len: int | None = None,
    qo_indptr: Tensor | None = None,
    max_q: int | None = None,
    page_table: Tensor | None = None,
    depths: Tensor | None = None,
    max_prefix_len: int | None = None,
    sm_scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_chunk: int | None = None,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """softmax(softcap(q k^T * sm_scale)) v over the visible keys and the sink, row by row.

    With ``qo_indptr`` the rows of request b are q[qo_indptr[b] : qo_indptr[b + 1]]; rows behind the
    last request's see nothing.
    """
    if window is not None and tree_len == 0:
        raise ValueError("window: expected a tree (tree_len > 0) to take query positions from")
    hq, d = q.shape[-2:]
    hkv = k_cache.shape[2]
    scale = 1.0 / math.sqrt(d) if sm_scale is None else sm_scale
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    head = torch.arange(hq, device=q.device) // (hq // hkv)
    extra = q.new_zeros(hq, 0) if sinks is None else sinks[:, None]
    nothing = torch.logsumexp(extra.to(compute), dim=1)
    rows_of: list[int | slice] = list(range(len(prefix_lens)))
    if qo_indptr is not None:
        starts = qo_indptr.tolist()
        rows_of = [slice(starts[r], starts[r + 1]) for r in range(len(prefix_lens))]
        out[starts[-1] :] = 0
        if lse is not None:
            lse[starts[-1] :] = nothing.float()
    for r, rows in enumerate(rows_of):
        queries, outs = q[rows], out[rows]
        n = queries.shape[0]
        # The depths of slots that are the rows lie as the rows do.
        slot_depths = None if depths is None else depths[rows if depths.dim() == 1 else r]
        for i in range(n):
            keys = visible_keys(
                i,
                n,
                int(prefix_lens[r]),
                n if tree_len is None else tree_len,
                None if tree_mask is None else tree_mask[rows],
                slot_depths,
                window,
            ).to(q.device)
            k = _cache_rows(k_cache, page_table, r, keys).to(compute)[:, head]
            v = _cache_rows(v_cache, page_table, r, keys).to(compute)[:, head]
            k, v = (x if s is None else x * s for x, s in ((k, k_scale), (v, v_scale)))
            scores = torch.einsum("hd,khd->hk", queries[i].to(compute), k) * scale
            # A row that sees a non-finite key is non-finite, whatever tanh or exp make of it.
            scores = torch.where(scores.isfinite(), scores, torch.nan)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            row_lse = torch.logsumexp(torch.cat([scores, extra.to(compute)], dim=1), dim=1)
            weights = torch.exp(scores - row_lse[:, None])
            outs[i] = torch.einsum("hk,khd->hd", weights, v).to(out.dtype)
            if lse is not None:
                lse[rows][i] = row_lse.to(lse.dtype)


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """(e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b); an empty part changes nothing."""
    compute = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    peak = torch.maximum(lse_a, lse_b)
    safe = torch.where(peak == NEG_INF, 0, peak)
    weight_a, weight_b = (lse_a - safe).exp(), (lse_b - safe).exp()
    total = weight_a + weight_b
    share_a, share_b = (w.div(total).to(compute)[..., None] for w in (weight_a, weight_b))
    out = (out_a.to(compute) * share_a + out_b.to(compute) * share_b).to(out_a.dtype)
    lse = safe + total.log()
    # An empty part may hold anything.
    only_a, only_b = lse_b == NEG_INF, lse_a == NEG_INF
    out = torch.where(only_a[..., None], out_a, torch.where(only_b[..., None], out_b, out))
    lse = torch.where(only_a, lse_a, torch.where(only_b, lse_b, lse))
    return torch.where((only_a & only_b)[..., None], 0, out), lse


# cache


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_lens: Tensor,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Cache slot prefix_lens[b] + j <- row j of request b, for j < lengths[b]."""
    k, v = _as_stored(k, k_cache.dtype, k_scale), _as_stored(v, v_cache.dtype, v_scale)
    b, n = k.shape[:2]
    for r in range(b):
        count = n if lengths is None else min(max(int(lengths[r]), 0), n)
        for j in range(count):
            slot = int(prefix_lens[r]) + j
            where = _slot_address(k_cache, page_table, r, slot)
            if where is not None:
                k_cache[where] = k[r, j]
                v_cache[where] = v[r, j]


def rope_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    lengths: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Q and k, normed where there are weights, x cos + [-x2; x1] sin; k and v go to the cache."""
    heads, dim = k_cache.shape[2:]
    rows = qkv.unflatten(-1, (-1, dim))
    q, k, v = rows.split((rows.shape[2] - 2 * heads, heads, heads), dim=2)
    q = _rotate(q if q_weight is None else rms_norm(q, q_weight, eps), cos, sin)
    k = _rotate(k if k_weight is None else rms_norm(k, k_weight, eps), cos, sin)
    write_kv(k_cache, v_cache, k, v, prefix_lens, lengths, page_table)
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first elements of each head as pairs (i, i + half), turned; the others as they are."""
    width = cos.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = x * cos[:, :, None] + turned * sin[:, :, None]
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def _as_stored(rows: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Rows divided by the scale and rounded to float8, out of range to the largest value."""
    if rows.dtype == dtype:
        return rows
    wide = rows.float() if scale is None else rows.float() / scale
    most = torch.finfo(dtype).max
    return wide.clamp(-most, most).to(dtype)


def _slot_address(
    cache: Tensor, page_table: Tensor | None, request: int, slot: int
) -> tuple[int, int] | None:
    """Index of a request's slot, or None when it has no place in the cache."""
    if slot < 0:
        return None
    if page_table is None:
        return (request, slot) if slot < cache.shape[1] else None
    size = cache.shape[1]
    if slot // size >= page_table.shape[1]:
        return None
    page = int(page_table[request, slot // size])
    return (page, slot % size) if 0 <= page < cache.shape[0] else None


def compact_kv(
    kv_caches: list[Tensor],
    accept_index: Tensor,
    accept_length: Tensor,
    prefix_lens: Tensor,
    page_table: Tensor | None = None,
) -> None:
    """Cache slot prefix_lens[b] + i <- prefix_lens[b] + accept_index[b, i], read before written."""
    for cache in kv_caches:
        for r in range(accept_index.shape[0]):
            start = int(prefix_lens[r])
            moves = []
            for i in range(min(int(accept_length[r]) + 1, accept_index.shape[1])):
                source = int(accept_index[r, i])
                if source < 0:
                    break
                from_ = _slot_address(cache, page_table, r, start + source)
                to = _slot_address(cache, page_table, r, start + i)
                if from_ is not None and to is not None:
                    moves.append((to, cache[from_].clone()))
            for to, value in moves:
                cache[to] = value


# logits


def process_logits(
    logits: Tensor,
    draft_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    num_nodes: Tensor | None = None,
    *,
    prompt_mask: Tensor | None = None,
    output_counts: Tensor | None = None,
    repetition_penalty: Tensor | None = None,
    frequency_penalty: Tensor | None = None,
    presence_penalty: Tensor | None = None,
    bias_tokens: Tensor | None = None,
    bias_values: Tensor | None = None,
) -> None:
    """Logits[b, i] += bias, then repetition, frequency and presence penalty of the tokens so far.

    The tokens so far are the history, which the root is part of, and the path below the root down
    to node i. Rows that are no node, or are not under the root, stay as they are.
    """
    b, n, v = logits.shape
    if (draft_tokens is None) != (parents is None) or (parents is None and n > 1):
        raise ValueError("draft_tokens, parents: expected both, or neither and one row per request")
    if (bias_tokens is None) != (bias_values is None):
        raise ValueError("bias_tokens, bias_values: expected both or neither")
    penalties = (repetition_penalty, frequency_penalty, presence_penalty)
    if output_counts is None and any(p is not None for p in penalties):
        raise ValueError("output_counts: expected a tensor, because a penalty counts tokens")
    compute = torch.float64 if logits.dtype == torch.float64 else torch.float32
    for r in range(b):
        bias = torch.zeros(v, dtype=compute, device=logits.device)
        if bias_tokens is not None and bias_values is not None:
            pairs = zip(bias_tokens[r].tolist(), bias_values[r].to(compute), strict=True)
            for token, value in pairs:
                if 0 <= token < v:
                    bias[token] += value
        in_prompt = torch.zeros(v, dtype=torch.bool, device=logits.device)
        if prompt_mask is not None:
            in_prompt = allowed_tokens(prompt_mask[r], v)
        history = torch.zeros(v, dtype=torch.int64, device=logits.device)
        if output_counts is not None:
            history = output_counts[r].long().clamp(min=0)
        repetition, frequency, presence = (
            logits.new_tensor(off, dtype=compute) if p is None else p[r].to(compute)
            for p, off in zip(penalties, (1.0, 0.0, 0.0), strict=True)
        )
        count = n if num_nodes is None else min(max(int(num_nodes[r]), 0), n)
        up = [-1] * n if parents is None else parents[r].tolist()
        for i in range(count):
            walk = _ancestors(up, count, i)
            if walk is None:
                continue
            counts = history.clone()
            for slot in walk[:-1]:
                token = int(draft_tokens[r, slot])  # type: ignore[index]
                if 0 <= token < v:
                    counts[token] += 1
            x = logits[r, i].to(compute)
            y = x + bias
            repeated = torch.where(y > 0, y / repetition, y * repetition)
            y = torch.where(in_prompt | (counts > 0), repeated, y)
            y = torch.where(counts > 0, y - frequency * counts - presence, y)
            banned = (x == NEG_INF) | (bias == NEG_INF)
            logits[r, i] = torch.where(banned, NEG_INF, y).to(logits.dtype)


def count_tokens(counts: Tensor, tokens: Tensor) -> None:
    """Counts[b, tokens[b, t]] += 1; ids outside the vocabulary, such as padding -1, are none."""
    b, v = counts.shape
    for r in range(b):
        for token in tokens[r].tolist():
            if 0 <= token < v:
                counts[r, token] += 1


def mark_tokens(mask: Tensor, tokens: Tensor) -> None:
    """Set bit t % 32 of mask[b, t // 32] for each token t; ids the mask has no bit for are none."""
    b, words = mask.shape
    for r in range(b):
        for token in tokens[r].tolist():
            if 0 <= token < 32 * words:
                bit = 1 << token % 32
                mask[r, token // 32] |= bit - (1 << 32) if bit == 1 << 31 else bit


def token_logprobs(logits: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
    """log_softmax(logits[b, slots[b, t]])[tokens[b, t]]; 0 where there is no such slot."""
    b, n, v = logits.shape
    out = torch.zeros(slots.shape, dtype=torch.float32, device=logits.device)
    for r in range(b):
        for i, (slot, token) in enumerate(zip(slots[r].tolist(), tokens[r].tolist(), strict=True)):
            if not 0 <= slot < n:
                continue
            x = _finite(logits[r, slot])
            if not 0 <= token < v or x[token] == NEG_INF:
                out[r, i] = NEG_INF
            else:
                out[r, i] = (x[token] - x.max()) - (x - x.max()).exp().sum().log()
    return out


# sampling and verification

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF


def philox4x32(seed: int, position: int, blocks: Tensor) -> Tensor:
    """Philox4x32-10 words [len(blocks), 4] as int64: key = seed, counter = (position, block, 0)."""
    key = [seed & _LOW32, (seed >> 32) & _LOW32]
    zero = torch.zeros_like(blocks)
    c = [zero + (position & _LOW32), zero + ((position >> 32) & _LOW32), blocks & _LOW32, zero]
    for _ in range(10):
        # int64 products wrap modulo 2**64, which leaves both 32-bit halves right.
        first, second = (c[2 * i] * _PHILOX_MULTIPLIERS[i] for i in range(2))
        c = [
            ((second >> 32) & _LOW32) ^ c[1] ^ key[0],
            second & _LOW32,
            ((first >> 32) & _LOW32) ^ c[3] ^ key[1],
            first & _LOW32,
        ]
        key = [(k + step) & _LOW32 for k, step in zip(key, _PHILOX_KEY_STEPS, strict=True)]
    return torch.stack(c, dim=-1)


def _fma(a: Tensor | float, b: Tensor, c: Tensor | float) -> Tensor:
    """Float32 a * b + c rounded once: the float64 sum is rounded to odd before it is narrowed."""
    product = torch.as_tensor(a, dtype=torch.float32).double() * b.double()
    addend = torch.as_tensor(c, dtype=torch.float32).double().expand_as(product)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.contiguous().view(torch.int64)
    nudge = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & (bits % 2 == 0), bits + nudge, bits)
    return odd.view(torch.float64).float()


LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LOG2_LOW, LOG2_HIGH = -2.12194440e-4, 0.693359375


def _log(x: Tensor) -> Tensor:
    """Float32 natural log of positive normal x (Cephes' polynomial, each step one operation)."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < 0.70710678118654752440
    e = (exponent - low.int()).float()
    m = torch.where(low, mantissa + mantissa, mantissa) - 1.0
    square = m * m
    y = torch.full_like(m, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        y = _fma(y, m, coefficient)
    y = (y * m) * square
    y = _fma(LOG2_LOW, e, y)
    y = _fma(-0.5, square, y)
    return _fma(LOG2_HIGH, e, m + y)


EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
EXP_SMALLEST = -87.33654022216797


def _exp(x: Tensor) -> Tensor:
    """e^x for x <= 0: Cephes' polynomial, 0 below the smallest normal; libm's in float64."""
    if x.dtype == torch.float64:
        flat = [math.exp(value) for value in x.flatten().tolist()]
        return torch.tensor(flat, dtype=torch.float64, device=x.device).view_as(x)
    clamped = x.clamp(min=EXP_SMALLEST)
    shifter = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer
    n = _fma(1.44269504088896341, clamped, shifter) - shifter
    r = _fma(-LOG2_LOW, n, _fma(-LOG2_HIGH, n, clamped))
    y = torch.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        y = _fma(y, r, coefficient)
    y = _fma(y, r * r, r) + 1.0
    power = ((n.int() + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_SMALLEST, 0, y * power)


def _top_p_mass(mass: Tensor) -> Tensor:
    """Float64 multiples of 2**-33: up to 2**20 of them sum exactly, in any order."""
    return torch.round(mass.double() * 2.0**33) * 2.0**-33


def gumbel_from_words(words: Tensor) -> Tensor:
    """G = -log(-log1p(-v)), v = min((word + 0.5) * 2**-32, 1 - 2**-24), all in float32."""
    v = ((words.double() + 0.5) * 2.0**-32).float().clamp(max=1.0 - 2.0**-24)
    u = 1.0 - v
    lost = (1.0 - u) - v
    return -_log(-(_log(u) + lost / u))


def gumbel_noise(seed: int, position: int, vocab: int) -> Tensor:
    """Float32 [vocab]: the noise of one request at one position."""
    blocks = torch.arange((vocab + 3) // 4)
    return gumbel_from_words(philox4x32(seed, position, blocks).flatten()[:vocab])


def allowed_tokens(allowed_mask: Tensor, vocab: int) -> Tensor:
    """Bool [..., vocab] of int32 words: token t is bit t % 32 of word t // 32."""
    shifts = torch.arange(32, device=allowed_mask.device)
    return ((allowed_mask[..., None] >> shifts) & 1).flatten(-2)[..., :vocab].bool()


def kept_tokens(
    x: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What the filters keep of a row: ids by (logit, id), best first; scaled logits; bool kept."""
    ranked, order = torch.sort(x, descending=True, stable=True)
    # Taking the maximum away first keeps tiny temperatures from overflowing.
    divisor = torch.tensor(temperature, dtype=torch.float32).to(x.dtype)
    scaled = (ranked - ranked[0]) / divisor
    keep = ranked > NEG_INF
    if top_k > 0:
        keep &= torch.arange(len(ranked)) < top_k
    mass = torch.where(keep, _exp(torch.where(keep, scaled, 0)), 0)
    if top_p < 1:
        counted = _top_p_mass(mass)
        keep &= counted.cumsum(0) - counted < top_p * counted.sum()
        keep[0] = True
    if min_p > 0:
        keep &= mass >= min_p
        keep[0] = True
    return order, scaled, keep


def _sample_row(
    logits: Tensor,
    position: int,
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    allowed: Tensor | None,
) -> int:
    x = _finite(logits)
    if allowed is not None:
        x = torch.where(allowed, x, NEG_INF)
    if not bool((x > NEG_INF).any()):
        return 0 if allowed is None or not bool(allowed.any()) else int(allowed.int().argmax())
    if not temperature > 0:
        return int((x == x.max()).int().argmax())
    order, scaled, keep = kept_tokens(x, temperature, top_k, top_p, min_p)
    noise = gumbel_noise(seed, position, len(x)).to(x.dtype)
    perturbed = torch.where(keep, scaled + noise[order], NEG_INF)
    return int(order[perturbed == perturbed.max()].min())


def _row_filters(
    request: int,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[float, int, float, float]:
    return (
        0.0 if temperature is None else float(temperature[request]),
        0 if top_k is None else int(top_k[request]),
        1.0 if top_p is None else float(top_p[request]),
        0.0 if min_p is None else float(min_p[request]),
    )


def sample_tokens(
    logits: Tensor,
    position_ids: Tensor,
    seeds: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed_mask: Tensor | None = None,
) -> Tensor:
    """Argmax(filtered logits / temperature + G(seed, position, token)), lowest id on ties."""
    b, n, v = logits.shape
    tokens = torch.zeros(b, n, dtype=torch.int64, device=logits.device)
    for r in range(b):
        filters = _row_filters(r, temperature, top_k, top_p, min_p)
        for i in range(n):
            allowed = None if allowed_mask is None else allowed_tokens(allowed_mask[r, i], v)
            tokens[r, i] = _sample_row(
                logits[r, i], int(position_ids[r, i]), int(seeds[r]), *filters, allowed
            )
    return tokens


def verify_tree(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    max_depth: int,
    num_nodes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the root, step to the child whose token the target chose at this node, until none is."""
    b, n = target_tokens.shape
    device = target_tokens.device
    accept_index = torch.full((b, max_depth + 1), -1, dtype=torch.int32, device=device)
    accept_length = torch.full((b,), -1, dtype=torch.int32, device=device)
    bonus_token = torch.full((b,), -1, dtype=torch.int64, device=device)
    for r in range(b):
        if n == 0 or (num_nodes is not None and int(num_nodes[r]) <= 0):
            continue
        node, length = 0, 0
        accept_index[r, 0] = 0
        while length < max_depth:
            child, seen = int(first_child[r, node]), 0
            while 0 <= child < n and seen < n:
                if draft_tokens[r, child] == target_tokens[r, node]:
                    break
                child, seen = int(next_sibling[r, child]), seen + 1
            else:
                break
            node, length = child, length + 1
            accept_index[r, length] = node
        accept_length[r] = length
        bonus_token[r] = target_tokens[r, node]
    return accept_index, accept_length, bonus_token


def _mass_of(row: Tensor) -> Tensor:
    """Float64 probabilities with NaN and negative numbers as 0, +inf as the largest finite one."""
    return _finite(row).clamp(min=0).double()


def _draw(mass: Tensor, coin: float) -> int:
    """Lowest id whose cumulative mass exceeds coin * total; -1 when there is no mass at all.

    Whatever the coin is, NaN included, the id has a positive mass.
    """
    possible = mass > 0
    if not bool(possible.any()):
        return -1
    cumulative = mass.cumsum(0)
    above = possible & (cumulative > coin * cumulative[-1])
    return int(above.int().argmax()) if bool(above.any()) else int(possible.nonzero()[-1])


def verify_tree_coins(
    target_probs: Tensor,
    draft_tokens: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    num_nodes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Step to the first child whose cumulative probability exceeds the node's coin; at last, draw.

    What is left after the children of the last node are taken out is drawn from by the final coin.
    """
    b, n, v = target_probs.shape
    device = target_probs.device
    accept_index = torch.full((b, max_depth + 1), -1, dtype=torch.int32, device=device)
    accept_length = torch.full((b,), -1, dtype=torch.int32, device=device)
    bonus_token = torch.full((b,), -1, dtype=torch.int64, device=device)
    for r in range(b):
        if n == 0 or (num_nodes is not None and int(num_nodes[r]) <= 0):
            continue
        node, length = 0, 0
        accept_index[r, 0] = 0
        while True:
            rest = _mass_of(target_probs[r, node])
            child, seen = int(first_child[r, node]) if length < max_depth else -1, 0
            cumulative, accepted, possible = 0.0, -1, -1
            while 0 <= child < n and seen < n and accepted < 0:
                token = int(draft_tokens[r, child])
                # A repeated token has no mass left the second time.
                if 0 <= token < v and rest[token] > 0:
                    cumulative += float(rest[token])
                    rest[token] = 0
                    possible = child
                    if cumulative > float(coins[r, node]):
                        accepted = child
                child, seen = int(next_sibling[r, child]), seen + 1
            if accepted < 0:
                bonus = _draw(rest, float(final_coins[r]))
                # Children that leave nothing: only rounding kept the coin above their sum.
                if bonus >= 0 or possible < 0:
                    accept_length[r], bonus_token[r] = length, max(bonus, 0)
                    break
                accepted = possible
            node, length = accepted, length + 1
            accept_index[r, length] = node
    return accept_index, accept_length, bonus_token


def sample_and_verify(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sample_tokens`, then `verify_tree`; the tokens at the visited nodes come first."""
    targets = sample_tokens(
        logits,
        position_ids,
        seeds,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        allowed_mask=allowed_mask,
    )
    accept_index, accept_length, bonus_token = verify_tree(
        targets, draft_tokens, first_child, next_sibling, max_depth, num_nodes
    )
    visited = targets.gather(1, accept_index.long().clamp(min=0))
    emitted = torch.where(accept_index >= 0, visited, -1)
    return emitted, accept_index, accept_length, bonus_token


def pack_linear_weight(weight: Tensor) -> Tensor:
    """packed[p, i, c, j] = weight[32 p + c, 2 i + j], zeros past the weight's edges.

    [out, in] becomes [ceil(out / 32), ceil(in / 2), 32, 2].
    """
    out_features, in_features = weight.shape
    padded = torch.nn.functional.pad(weight, (0, in_features % 2, 0, -out_features % 32))
    panels, pairs = (out_features + 31) // 32, (in_features + 1) // 2
    return padded.reshape(panels, 32, pairs, 2).transpose(1, 2).contiguous()


def packed_linear(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None
) -> Tensor:
    """out[..., c] = sum over k of x[..., k] * weight[c, k], plus bias[c]; rounded once.

    Products and sums are of float32. NaN and infinities in x reach every column of their row, a
    weight's every row of its column.
    """
    panels, pairs = packed.shape[:2]
    weight = packed.transpose(1, 2).reshape(panels * 32, pairs * 2)
    weight = weight[:out_features, : x.shape[-1]].float()
    out = x.float() @ weight.T
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def decoder_layer(
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_lens: Tensor,
    qkv_packed: Tensor,
    o_packed: Tensor,
    post_norm_weight: Tensor,
    gate_up_packed: Tensor,
    down_packed: Tensor,
    num_heads: int,
    intermediate_size: int,
    norm_weight: Tensor | None = None,
    tree_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    attention_input: Tensor | None = None,
    qkv_bias: Tensor | None = None,
    o_bias: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    page_table: Tensor | None = None,
    tree_len: int | None = None,
    depths: Tensor | None = None,
    sm_scale: float | None = None,
    softcap: float = 0.0,
    window: int | None = None,
) -> None:
    """Hidden += attention(norm(hidden)), then hidden += mlp(norm(hidden)).

    The new keys lie where the attention looks for its last N of ``tree_len`` slots.
    """
    size, rows = hidden.shape[-1], hidden.shape[1]
    heads, dim = k_cache.shape[2:]
    tree_len = rows if tree_len is None else tree_len
    x = hidden if attention_input is None else attention_input
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    qkv = packed_linear(x, qkv_packed, (num_heads + 2 * heads) * dim, qkv_bias)
    first, norms = prefix_lens + (tree_len - rows), {"q_weight": q_weight, "k_weight": k_weight}
    q = rope_and_write_kv(
        qkv, cos, sin, k_cache, v_cache, first, lengths, page_table, **norms, eps=eps
    )
    attended = torch.empty_like(q)
    tree_attention_out(
        q,
        k_cache,
        v_cache,
        prefix_lens,
        tree_mask,
        tree_len=tree_len,
        page_table=page_table,
        depths=depths,
        sm_scale=sm_scale,
        softcap=softcap,
        window=window,
        out=attended,
    )
    x = packed_linear(attended.flatten(-2), o_packed, size, o_bias)
    fused_add_rms_norm(x, hidden, post_norm_weight, eps)
    gated = silu_and_mul(packed_linear(x, gate_up_packed, 2 * intermediate_size, gate_up_bias))
    hidden += packed_linear(gated, down_packed, size, down_bias)
