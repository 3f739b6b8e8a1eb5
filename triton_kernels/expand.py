"""expand_topk: one level of the draft tree, from the head's logits to the next frontier.

Two launches. The first reads the logits once, a slice of a row per program, and leaves the slice's
maximum, its sum of exponentials and its k best. The second merges the slices of all rows of a
request, maps the vocabulary, adds the parent's score and picks the beam.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


@triton.jit
def expand_slice_kernel(
    logits,
    beam_scores,
    peaks,
    sums,
    values,
    ids,
    parents,
    vocab,
    top_k,
    logits_batch,
    logits_parent,
    logits_token,
    beam_batch,
    beam_parent,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slice of one row of logits.

    Program (slice, row).

    bytes = rows * (vocab * element + slices * (8 + 8 * top_k) + 4), each logit once;
            slices = ceil(vocab / BLOCK)
    flops = rows * vocab * (4 + 2 * top_k), the comparisons in registers
    """
    slice_ = tl.program_id(0)
    row = tl.program_id(1)
    request = (row // parents).to(tl.int64)
    parent = (row % parents).to(tl.int64)
    column = tl.arange(0, BLOCK)
    token = slice_ * BLOCK + column
    # A dead parent's logits are not read.
    score = tl.load(beam_scores + request * beam_batch + parent * beam_parent)
    count = tl.where(score > float("-inf"), vocab, 0)
    source = logits + request * logits_batch + parent * logits_parent
    x = tl.load(
        source + token.to(tl.int64) * logits_token,
        mask=token < count,
        other=float("-inf"),
    )
    if WIDE:
        x = x.to(tl.float64)
        largest = 1.7976931348623157e308
    else:
        x = x.to(tl.float32)
        largest = 3.4028234663852886e38
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == float("inf"), largest, x)
    peak = tl.max(x, axis=0)
    safe = tl.where(peak > float("-inf"), peak, 0.0)
    at = row.to(tl.int64) * tl.num_programs(0) + slice_
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.exp(x - safe), axis=0))
    # Equal logits: the one further left has the lower id.
    for rank in range(top_k):
        best, place = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + at * top_k + rank, best)
        tl.store(ids + at * top_k + rank, slice_ * BLOCK + place)
        x = tl.where(column == place, float("-inf"), x)


@triton.jit
def expand_merge_kernel(
    peaks,
    sums,
    values,
    ids,
    beam_scores,
    draft_to_target,
    candidate_tokens,
    candidate_scores,
    beam,
    beam_tokens,
    next_beam_scores,
    beam_rows,
    parents,
    slices,
    top_k,
    beam_batch,
    beam_parent,
    map_stride,
    MAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The slices of one request, and its beam.

    One program per request. Slices are merged in ascending order of tokens, and places in that
    order break ties, so the order is (logit, id).

    bytes = rows * slices * (8 + 8 * top_k) + rows * top_k * (12 + 8 with a vocabulary map)
            + requests * top_k * 28; rows = requests * parents
    flops = rows * slices * power_of_2(top_k) * top_k + requests * power_of_2(parents * top_k)
            * top_k, comparisons
    """
    request = tl.program_id(0).to(tl.int64)
    first_row = request * parents
    slice_ = tl.arange(0, SLICES)
    place = tl.arange(0, SLICES * WIDTH)
    rank = tl.arange(0, WIDTH)
    for group in range(0, parents, ROWS):
        parent = group + tl.arange(0, ROWS)
        known = parent < parents
        row = first_row + parent
        score = tl.load(
            beam_scores + request * beam_batch + parent.to(tl.int64) * beam_parent,
            mask=known,
            other=float("-inf"),
        )
        alive = known & (score > float("-inf"))
        at = row[:, None] * slices + slice_[None, :]
        there = alive[:, None] & (slice_ < slices)[None, :]
        peak = tl.load(peaks + at, mask=there, other=float("-inf"))
        share = tl.load(sums + at, mask=there, other=0.0)
        top = tl.max(peak, axis=1)
        safe = tl.where(top > float("-inf"), top, 0.0)
        log_total = tl.log(tl.sum(share * tl.exp(peak - safe[:, None]), axis=1))

        source = place // WIDTH * top_k + place % WIDTH
        there = (place // WIDTH < slices) & (place % WIDTH < top_k)
        offset = row[:, None] * slices * top_k + source[None, :]
        x = tl.load(values + offset, mask=alive[:, None] & there[None, :], other=float("-inf"))
        best = tl.full((ROWS, WIDTH), float("-inf"), x.dtype)
        chosen = tl.zeros((ROWS, WIDTH), tl.int32)
        for k in range(top_k):
            value, where = tl.max(
                x, axis=1, return_indices=True, return_indices_tie_break_left=True
            )
            best = tl.where((rank == k)[None, :], value[:, None], best)
            chosen = tl.where((rank == k)[None, :], where[:, None], chosen)
            x = tl.where(place[None, :] == where[:, None], float("-inf"), x)
        result = (((best - safe[:, None]) - log_total[:, None]) + score[:, None]).to(tl.float32)
        live = (best > float("-inf")) & (result > float("-inf"))
        offset = row[:, None] * slices * top_k + chosen // WIDTH * top_k + chosen % WIDTH
        token = tl.load(ids + offset, mask=live, other=0).to(tl.int64)
        if MAPPED:
            token = tl.load(draft_to_target + token * map_stride, mask=live, other=0)
        target = row[:, None] * top_k + rank[None, :]
        kept = known[:, None] & (rank < top_k)[None, :]
        tl.store(candidate_scores + target, tl.where(live, result, float("-inf")), mask=kept)
        tl.store(candidate_tokens + target, tl.where(live, token, 0), mask=kept)

    # The beam reads what other threads of this program have just written.
    tl.debug_barrier()
    candidate = tl.arange(0, CANDIDATES)
    first = first_row * top_k
    there = candidate < parents * top_k
    score = tl.load(candidate_scores + first + candidate, mask=there, other=0.0)
    # Integers that order as the scores do, so that a taken one can rank below -inf.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    taken = -2147483648
    key = tl.where(there, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), taken)
    for k in range(top_k):
        _, entry = tl.max(key, axis=0, return_indices=True, return_indices_tie_break_left=True)
        target = request * top_k + k
        tl.store(beam + target, entry.to(tl.int64))
        tl.store(beam_rows + target, entry // top_k)
        tl.store(beam_tokens + target, tl.load(candidate_tokens + first + entry))
        tl.store(next_beam_scores + target, tl.load(candidate_scores + first + entry))
        key = tl.where(candidate == entry, taken, key)


def expand_topk_out(
    logits: Tensor,
    beam_scores: Tensor,
    top_k: int,
    draft_to_target: Tensor | None = None,
    *,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    beam: Tensor,
    beam_tokens: Tensor,
    next_beam_scores: Tensor,
    beam_rows: Tensor,
) -> None:
    """Score(p, id) = beam_scores[p] + log_softmax(logits[p])[id]; top-k per row, then of all."""
    batch, parents, vocab = logits.shape
    launch.check_float("logits", logits)
    launch.check_same_device(logits, beam_scores=beam_scores, draft_to_target=draft_to_target)
    launch.check("beam_scores", beam_scores, torch.float32, (batch, parents))
    launch.check("draft_to_target", draft_to_target, torch.int64, (vocab,))
    if parents < 1 or vocab < 1:
        raise ValueError(f"logits: expected P and V of at least 1, got {tuple(logits.shape)}")
    slices = launch.expand_slices(vocab)
    if not 1 <= top_k <= launch.MAX_TOP_K:
        raise ValueError(f"top_k: expected 1 to {launch.MAX_TOP_K} on CUDA, got {top_k}")
    if launch.power_of_2(slices) * launch.power_of_2(top_k) > launch.MAX_CANDIDATES:
        raise ValueError(f"logits: a vocabulary of {vocab} with top_k {top_k} has no CUDA kernel")
    if launch.power_of_2(parents * top_k) > launch.MAX_CANDIDATES:
        raise ValueError(f"logits: {parents} parents with top_k {top_k} have no CUDA kernel")
    outs = {
        "candidate_tokens": (candidate_tokens, torch.int64, (batch, parents * top_k)),
        "candidate_scores": (candidate_scores, torch.float32, (batch, parents * top_k)),
        "beam": (beam, torch.int64, (batch, top_k)),
        "beam_tokens": (beam_tokens, torch.int64, (batch, top_k)),
        "next_beam_scores": (next_beam_scores, torch.float32, (batch, top_k)),
        "beam_rows": (beam_rows, torch.int32, (batch, top_k)),
    }
    launch.check_outputs(logits, outs)
    if batch == 0:
        return
    wide = logits.dtype == torch.float64
    rows, partial = batch * parents, torch.float64 if wide else torch.float32
    peaks = logits.new_empty((rows, slices), dtype=partial)
    sums = torch.empty_like(peaks)
    values = logits.new_empty((rows, slices, top_k), dtype=partial)
    ids = logits.new_empty((rows, slices, top_k), dtype=torch.int32)
    with torch.cuda.device_of(logits):
        expand_slice_kernel[(slices, rows)](
            logits,
            beam_scores,
            peaks,
            sums,
            values,
            ids,
            parents,
            vocab,
            top_k,
            *logits.stride(),
            *beam_scores.stride(),
            WIDE=wide,
            **launch.expand_slice().keywords(),
        )
        expand_merge_kernel[(batch,)](
            peaks,
            sums,
            values,
            ids,
            beam_scores,
            # A tensor stands in for a pointer the kernel does not read.
            beam_scores if draft_to_target is None else draft_to_target,
            *(tensor for tensor, _, _ in outs.values()),
            parents,
            slices,
            top_k,
            *beam_scores.stride(),
            0 if draft_to_target is None else draft_to_target.stride(0),
            MAPPED=draft_to_target is not None,
            **launch.expand_merge(parents, slices, top_k).keywords(),
        )
