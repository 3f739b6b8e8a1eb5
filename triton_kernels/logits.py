"""process_logits, the history it counts, and token_logprobs.

Bias and penalties are one pass over the rows in which a logit is read and written only where its
token is biased, in the request's history or on the row's own path. Products and sums are rounded
one by one, as the oracle rounds them: no multiplication is fused with the subtraction behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


@triton.jit
def process_logits_kernel(
    logits,
    draft_tokens,
    parents,
    num_nodes,
    prompt_mask,
    output_counts,
    repetitions,
    frequencies,
    presences,
    bias_tokens,
    bias_values,
    num_rows,
    vocab,
    num_biases,
    logits_batch,
    logits_row,
    logits_token,
    draft_batch,
    draft_row,
    parents_batch,
    parents_row,
    nodes_batch,
    prompt_batch,
    prompt_word,
    counts_batch,
    counts_token,
    repetition_batch,
    frequency_batch,
    presence_batch,
    bias_batch,
    bias_entry,
    value_batch,
    value_entry,
    HAS_TREE: tl.constexpr,
    HAS_NODES: tl.constexpr,
    HAS_PROMPT: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_REPETITION: tl.constexpr,
    HAS_FREQUENCY: tl.constexpr,
    HAS_PRESENCE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bias and penalties of one slice of one row, in place.

    Program (slice, row). A row that is no node of the tree is left alone.

    bytes = rows * vocab * (4 + 1/8) where a penalty is on (counts and prompt bits, from the
            second-level cache after a request's first row), and 2 * element for each logit that
            changes: those of the history, the path and the bias list
    flops = rows * vocab comparisons, and 5 for each logit that changes
    """
    request = (tl.program_id(1) // num_rows).to(tl.int64)
    slot = tl.program_id(1) % num_rows
    first = tl.program_id(0) * BLOCK
    token = first + tl.arange(0, BLOCK)
    there = token < vocab
    number = tl.float64 if WIDE else tl.float32
    repetition = tl.full((BLOCK,), 1.0, number)
    frequency, presence = tl.full((BLOCK,), 0.0, number), tl.full((BLOCK,), 0.0, number)
    counted = 0
    if HAS_REPETITION:
        factor = tl.load(repetitions + request * repetition_batch)
        counted = tl.where(factor != 1.0, 1, counted)
        repetition = repetition * factor.to(number)
    if HAS_FREQUENCY:
        factor = tl.load(frequencies + request * frequency_batch)
        counted = tl.where(factor != 0.0, 1, counted)
        frequency += factor.to(number)
    if HAS_PRESENCE:
        factor = tl.load(presences + request * presence_batch)
        counted = tl.where(factor != 0.0, 1, counted)
        presence += factor.to(number)

    slots = num_rows
    if HAS_NODES:
        slots = tl.minimum(tl.load(num_nodes + request * nodes_batch), slots)
    alive = tl.where(slot < slots, 1, 0)
    count = tl.zeros((BLOCK,), tl.int32)
    if HAS_TREE:
        # Up to the root, a step per slot at most, whatever the parents hold.
        row_parents = parents + request * parents_batch
        row_tokens = draft_tokens + request * draft_batch
        alive = alive * tl.where(tl.load(row_parents) == -1, 1, 0)
        at, steps = slot, slot * 0
        walking = alive * tl.where(at > 0, 1, 0)
        while walking > 0:
            count += (token == tl.load(row_tokens + at.to(tl.int64) * draft_row)).to(tl.int32)
            parent = tl.load(row_parents + at.to(tl.int64) * parents_row)
            steps += 1
            alive = tl.where((parent >= 0) & (parent < slots) & (steps < slots), 1, 0)
            at = tl.where(alive > 0, parent, 0)
            walking = tl.where(at > 0, 1, 0)
    used = there & (alive > 0)
    look = used & (counted > 0)
    count = tl.where(look, count, 0)
    if HAS_COUNTS:
        source = output_counts + request * counts_batch + token.to(tl.int64) * counts_token
        count += tl.maximum(tl.load(source, mask=look, other=0), 0)
    seen = count > 0
    if HAS_PROMPT:
        source = prompt_mask + request * prompt_batch + (token // 32).to(tl.int64) * prompt_word
        seen = seen | (((tl.load(source, mask=look, other=0) >> (token % 32)) & 1) != 0)
    bias = tl.zeros((BLOCK,), number)
    biased = seen
    for entry in range(num_biases):
        place = (tl.full((), 0, tl.int32) + entry).to(tl.int64)
        id_ = tl.load(bias_tokens + request * bias_batch + place * bias_entry)
        if (id_ >= first) & (id_ < first + BLOCK):
            value = tl.load(bias_values + request * value_batch + place * value_entry)
            bias = tl.where(token == id_, bias + value.to(number), bias)
            biased = biased | (token == id_)

    touched = used & biased
    target = logits + request * logits_batch + slot.to(tl.int64) * logits_row
    target += token.to(tl.int64) * logits_token
    x = tl.load(target, mask=touched, other=0.0).to(number)
    y = x + bias
    if WIDE:
        smaller = y / repetition
    else:
        smaller = tl.div_rn(y, repetition)
    y = tl.where(seen, tl.where(y > 0, smaller, y * repetition), y)
    y = tl.where(count > 0, (y - frequency * count.to(number)) - presence, y)
    # Banned stays banned, whatever it meets.
    banned = (x == float("-inf")) | (bias == float("-inf"))
    y = tl.where(banned, float("-inf"), y)
    tl.store(target, y.to(logits.dtype.element_ty), mask=touched)


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
    """Logits[b, i] += bias, then penalties of the history and of the node's own path."""
    batch, rows, vocab = _check_logits(logits)
    if (draft_tokens is None) != (parents is None) or (parents is None and rows > 1):
        raise ValueError("draft_tokens, parents: expected both, or neither and one row per request")
    if (bias_tokens is None) != (bias_values is None):
        raise ValueError("bias_tokens, bias_values: expected both or neither")
    penalties = {
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    if output_counts is None and any(x is not None for x in penalties.values()):
        raise ValueError("output_counts: expected a tensor, because a penalty counts tokens")
    launch.check("draft_tokens", draft_tokens, torch.int64, (batch, rows))
    launch.check("parents", parents, torch.int32, (batch, rows))
    launch.check("num_nodes", num_nodes, torch.int32, (batch,))
    launch.check("prompt_mask", prompt_mask, torch.int32, (batch, -(-vocab // 32)))
    launch.check("output_counts", output_counts, torch.int32, (batch, vocab))
    for name, penalty in penalties.items():
        launch.check(name, penalty, torch.float32, (batch,))
    launch.check("bias_tokens", bias_tokens, torch.int64, (batch, None))
    biases = 0 if bias_tokens is None else bias_tokens.shape[1]
    launch.check("bias_values", bias_values, torch.float32, (batch, biases))
    launch.check_same_device(
        logits,
        draft_tokens=draft_tokens,
        parents=parents,
        num_nodes=num_nodes,
        prompt_mask=prompt_mask,
        output_counts=output_counts,
        **penalties,
        bias_tokens=bias_tokens,
        bias_values=bias_values,
    )
    asked = biases > 0 or any(x is not None for x in penalties.values())
    if batch * rows == 0 or not asked:
        return
    tensors = (
        *(draft_tokens, parents, num_nodes, prompt_mask, output_counts),
        *penalties.values(),
        *(bias_tokens, bias_values),
    )
    tiles = launch.edit_tiles()
    slices = -(-vocab // tiles.constants["BLOCK"])
    with torch.cuda.device_of(logits):
        process_logits_kernel[(slices, batch * rows)](
            logits,
            # A tensor stands in for a pointer the kernel does not read.
            *(logits if tensor is None else tensor for tensor in tensors),
            rows,
            vocab,
            biases,
            *logits.stride(),
            *_strides(draft_tokens, 2),
            *_strides(parents, 2),
            *_strides(num_nodes, 1),
            *_strides(prompt_mask, 2),
            *_strides(output_counts, 2),
            *(stride for x in penalties.values() for stride in _strides(x, 1)),
            *_strides(bias_tokens, 2),
            *_strides(bias_values, 2),
            HAS_TREE=parents is not None,
            HAS_NODES=num_nodes is not None,
            HAS_PROMPT=prompt_mask is not None,
            HAS_COUNTS=output_counts is not None,
            HAS_REPETITION=repetition_penalty is not None,
            HAS_FREQUENCY=frequency_penalty is not None,
            HAS_PRESENCE=presence_penalty is not None,
            WIDE=logits.dtype == torch.float64,
            **tiles.keywords(),
        )


def _check_logits(logits: Tensor) -> tuple[int, int, int]:
    launch.check_float("logits", logits)
    launch.check("logits", logits, logits.dtype, (None,) * 3)
    batch, rows, vocab = logits.shape
    if vocab < 1:
        raise ValueError("logits: expected a vocabulary of at least 1, got 0")
    return batch, rows, vocab


def _strides(tensor: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if tensor is None else tensor.stride()


@triton.jit
def record_tokens_kernel(
    record,
    tokens,
    num_tokens,
    limit,
    record_batch,
    record_entry,
    tokens_batch,
    tokens_entry,
    MARK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts tokens, or sets their bits: atomically, for a token may come twice.

    Program (block of tokens, request).

    bytes = requests * tokens * (8 + 8)
    flops = 0
    """
    request = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tokens + request * tokens_batch + place.to(tl.int64) * tokens_entry
    token = tl.load(source, mask=place < num_tokens, other=-1)
    known = (token >= 0) & (token < limit)
    target = record + request * record_batch
    if MARK:
        bit = tl.full((BLOCK,), 1, tl.int32) << (token % 32).to(tl.int32)
        word = (token // 32).to(tl.int64)
        tl.atomic_or(target + word * record_entry, bit, mask=known, sem="relaxed")
    else:
        one = tl.full((BLOCK,), 1, tl.int32)
        place = token.to(tl.int64)
        tl.atomic_add(target + place * record_entry, one, mask=known, sem="relaxed")


def _record(name: str, record: Tensor, tokens: Tensor, bits: int) -> None:
    launch.check(name, record, torch.int32, (None, None))
    batch, width = record.shape
    launch.check("tokens", tokens, torch.int64, (batch, None))
    launch.check_same_device(record, tokens=tokens)
    if tokens.numel() == 0:
        return
    tiles = launch.record_tiles()
    blocks = -(-tokens.shape[1] // tiles.constants["BLOCK"])
    with torch.cuda.device_of(record):
        record_tokens_kernel[(blocks, batch)](
            record,
            tokens,
            tokens.shape[1],
            bits * width,
            *record.stride(),
            *tokens.stride(),
            MARK=bits > 1,
            **tiles.keywords(),
        )


def count_tokens(counts: Tensor, tokens: Tensor) -> None:
    """Counts[b, tokens[b, t]] += 1; ids outside the vocabulary, such as padding -1, are none."""
    _record("counts", counts, tokens, 1)


def mark_tokens(mask: Tensor, tokens: Tensor) -> None:
    """Set bit t % 32 of mask[b, t // 32] for each token t; ids the mask has no bit for are none."""
    _record("mask", mask, tokens, 32)


@triton.jit
def _finite(x, WIDE: tl.constexpr):
    # NaN as -inf, +inf as the largest finite number.
    if WIDE:
        x = x.to(tl.float64)
        largest = 1.7976931348623157e308
    else:
        x = x.to(tl.float32)
        largest = 3.4028234663852886e38
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == float("inf"), largest, x)


@triton.jit
def token_logprobs_kernel(
    logits,
    slots,
    tokens,
    logprobs,
    width,
    num_rows,
    vocab,
    logits_batch,
    logits_row,
    logits_token,
    slots_batch,
    slots_entry,
    tokens_batch,
    tokens_entry,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The log-probability of one token at one row: one program per entry of the result.

    bytes = entries * (vocab * element, once from memory and once from the second-level cache, + 16)
    flops = entries * vocab * 3
    """
    request = (tl.program_id(0) // width).to(tl.int64)
    entry = (tl.program_id(0) % width).to(tl.int64)
    slot = tl.load(slots + request * slots_batch + entry * slots_entry)
    chosen = tl.load(tokens + request * tokens_batch + entry * tokens_entry)
    at_row = (slot >= 0) & (slot < num_rows)
    in_vocab = (chosen >= 0) & (chosen < vocab)
    row = logits + request * logits_batch + slot.to(tl.int64) * logits_row
    own = row + chosen.to(tl.int64) * logits_token
    own = tl.load(own, mask=at_row & in_vocab, other=float("-inf"))
    own = _finite(own, WIDE)
    # Rows whose result is known are not read.
    count = tl.where(own > float("-inf"), vocab, 0)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), own.dtype)
    for first in range(0, count, BLOCK):
        token = first + lane
        x = tl.load(
            row + token.to(tl.int64) * logits_token, mask=token < vocab, other=float("-inf")
        )
        best = tl.maximum(best, _finite(x, WIDE))
    peak = tl.max(best, axis=0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    sums = tl.zeros((BLOCK,), own.dtype)
    for first in range(0, count, BLOCK):
        token = first + lane
        x = tl.load(
            row + token.to(tl.int64) * logits_token, mask=token < vocab, other=float("-inf")
        )
        sums += tl.exp(_finite(x, WIDE) - peak)
    total = tl.sum(sums, axis=0)
    result = ((own - peak) - tl.log(tl.where(total > 0, total, 1.0))).to(tl.float32)
    result = tl.where(own > float("-inf"), result, float("-inf"))
    tl.store(logprobs + tl.program_id(0).to(tl.int64), tl.where(at_row, result, 0.0))


def token_logprobs_out(logits: Tensor, slots: Tensor, tokens: Tensor, *, logprobs: Tensor) -> None:
    """log_softmax(logits[b, slots[b, t]])[tokens[b, t]]; 0 where there is no such slot."""
    batch, rows, vocab = _check_logits(logits)
    launch.check("slots", slots, torch.int32, (batch, None))
    width = slots.shape[1]
    launch.check("tokens", tokens, torch.int64, (batch, width))
    launch.check_same_device(logits, slots=slots, tokens=tokens)
    launch.check_outputs(logits, {"logprobs": (logprobs, torch.float32, (batch, width))})
    if batch * width == 0:
        return
    with torch.cuda.device_of(logits):
        token_logprobs_kernel[(batch * width,)](
            logits,
            slots,
            tokens,
            logprobs,
            width,
            rows,
            vocab,
            *logits.stride(),
            *slots.stride(),
            *tokens.stride(),
            WIDE=logits.dtype == torch.float64,
            **launch.logprob_tiles(logits.dtype).keywords(),
        )
