"""Editing the target's logits before a token is drawn, and the log-probabilities of those drawn.

Bias and penalties change what plain decoding emits, so a tree must apply them at every node, to the
tokens that plain decoding would have emitted on the way to it: the history and the node's own path.
Then `sample_and_verify` on the edited logits emits what plain decoding emits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks, ops

_ops = getattr(torch.ops, ops.NAMESPACE)
_process_logits = _ops.process_logits.default
_count_tokens = _ops.count_tokens.default
_mark_tokens = _ops.mark_tokens.default
_token_logprobs = _ops.token_logprobs.default

SMALLEST = 2.0**-149
"""The smallest repetition penalty: smaller ones are 0 in float32, and divide by it."""


def process_logits(
    logits: Tensor,
    draft_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    num_nodes: Tensor | None = None,
    *,
    prompt_mask: Tensor | None = None,
    output_counts: Tensor | None = None,
    repetition_penalty: Tensor | float | None = None,
    frequency_penalty: Tensor | float | None = None,
    presence_penalty: Tensor | float | None = None,
    bias_tokens: Tensor | None = None,
    bias_values: Tensor | None = None,
    validate: bool = False,
) -> None:
    r"""Logit bias and penalties, in place, with each node's own path counted.

    ::

        x += bias[token]
        x = x / repetition if x > 0 else x * repetition     where token is in the prompt or c > 0
        x -= frequency * c + presence                       where c > 0

        c = output_counts[token] + occurrences of token from the root's child down to this node

               0 "a"
              /      \           The history ends with the root: "a" is in output_counts (in
          1 "b"     2 "c"        prompt_mask when the prompt ends with it) and is not counted again.
            |                    What follows slot 3 counts "b" twice and no "c"; what follows slot
          3 "b"                  2 counts "c".

    The steps come in the order in which transformers and vLLM apply them, before temperature and
    the filters of `sample_tokens`. A logit of -inf stays -inf, and a bias of -inf makes it so even
    of NaN: a banned token is never drawn while another is left. Otherwise NaN and infinities follow
    float arithmetic. Each element is computed in float32 (float64 for float64 logits) and rounded
    to the logits' dtype once; float16 and bfloat16 may round a small penalty away, so convert such
    logits to float32 first, as engines do. Only logits of tokens in the history, on the path or in
    the bias list are touched. Rows of padding slots, of inactive requests and of slots that are not
    under the root stay as they are.

    Between steps keep the history up to date with `mark_tokens(prompt_mask, prompt)` once and
    `count_tokens(output_counts, emitted_tokens)` after every step.

    Args:
        logits: [B, N, V] float32, float64, float16 or bfloat16, any strides; written.
        draft_tokens: [B, N] int64, the token in each slot; ids outside the vocabulary count for
            nothing. None with ``parents``: plain decoding, N is 1.
        parents: [B, N] int32, the parent slot, -1 at the root (slot 0).
        num_nodes: [B] int32; slots from here on are padding. None: all are nodes.
        prompt_mask: [B, ceil(V / 32)] int32, bit t % 32 of word t // 32 is set when token t is in
            the prompt; None: no prompt token counts. Only the repetition penalty looks at it.
        output_counts: [B, V] int32, how often each token was generated so far; needed with a
            penalty. Values below 0 count as 0.
        repetition_penalty: scalar or [B] float32 above 0. 1: off.
        frequency_penalty: scalar or [B] float32. 0: off.
        presence_penalty: scalar or [B] float32. 0: off.
        bias_tokens: [B, M] int64, the biased ids of each request; ids outside the vocabulary, such
            as -1, are padding. Values of a repeated id add up.
        bias_values: [B, M] float32, what is added; -inf bans the token.
        validate: check values too (reads them back to the host).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, is missing beside another, or the
            logits require grad in grad mode.

    The bias is a short list per request because that is what a request brings (OpenAI's API takes a
    map of ids; vLLM keeps id and value tensors). A dense bias [B, V], as SGLang and TensorRT-LLM
    keep, is ``logits += bias[:, None]`` before the call; a large ban list is `sample_tokens`'
    ``allowed_mask``. Counts and prompt bits are vLLM's layout.

    Source: repetition penalty CTRL, arXiv 1909.05858, with transformers' rule for negative logits;
    frequency and presence penalty OpenAI's API reference; order of vLLM's v1 Sampler
    (docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler) and of transformers'
    `GenerationMixin._get_logits_processor`.
    """
    _checks.refuse_grad(
        logits=logits,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        bias_values=bias_values,
    )
    _checks.call(
        _call_process_logits,
        _check_process_logits,
        validate,
        logits,
        draft_tokens,
        parents,
        num_nodes,
        prompt_mask,
        output_counts,
        _per_request("repetition_penalty", logits, repetition_penalty, 1.0),
        _per_request("frequency_penalty", logits, frequency_penalty, 0.0),
        _per_request("presence_penalty", logits, presence_penalty, 0.0),
        bias_tokens,
        bias_values,
    )


_OPTIONS = (
    "prompt_mask",
    "output_counts",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "bias_tokens",
    "bias_values",
)


def _call_process_logits(logits, draft_tokens, parents, num_nodes, *options):
    # The dispatcher takes half a microsecond for each keyword.
    given = {n: x for n, x in zip(_OPTIONS, options, strict=True) if x is not None}
    return _process_logits(logits, draft_tokens, parents, num_nodes, **given)


def _per_request(
    name: str, logits: Tensor, value: Tensor | float | None, off: float
) -> Tensor | None:
    """A host number as a [B] tensor; None where it switches the penalty off."""
    if not isinstance(value, (int, float)) or not isinstance(logits, Tensor):
        return value  # type: ignore[return-value]
    largest = torch.finfo(torch.float32).max
    low = SMALLEST if name == "repetition_penalty" else -largest
    if not low <= value <= largest:
        raise ValueError(f"{name}: expected a float32 value from {low} to {largest}, got {value}")
    if value == off:
        return None
    return torch.full(logits.shape[:1], float(value), dtype=torch.float32, device=logits.device)


def _check_process_logits(
    logits: Tensor,
    draft_tokens: Tensor | None,
    parents: Tensor | None,
    num_nodes: Tensor | None,
    prompt_mask: Tensor | None,
    output_counts: Tensor | None,
    repetition_penalty: Tensor | None,
    frequency_penalty: Tensor | None,
    presence_penalty: Tensor | None,
    bias_tokens: Tensor | None,
    bias_values: Tensor | None,
    *,
    values: bool,
) -> None:
    _checks.tensor("logits", logits, _checks.FLOATS, (None, None, None), "[B, N, V]")
    _checks.written(logits=logits)
    b, n, v = logits.shape
    if v < 1:
        raise ValueError(f"logits: expected V of at least 1, got shape {tuple(logits.shape)}")
    _check_together("draft_tokens", draft_tokens, "parents", parents)
    _check_together("bias_tokens", bias_tokens, "bias_values", bias_values)
    if draft_tokens is not None:
        _checks.tensor("draft_tokens", draft_tokens, torch.int64, (b, n), "[B, N]")
        _checks.tensor("parents", parents, torch.int32, (b, n), "[B, N]")
    elif n > 1:
        raise ValueError(
            f"parents: expected the parents of {n} nodes, or one row of logits per request, "
            "got None"
        )
    if num_nodes is not None:
        _checks.tensor("num_nodes", num_nodes, torch.int32, (b,), "[B]")
    if prompt_mask is not None:
        layout = "[B, ceil(V / 32)]"
        _checks.tensor("prompt_mask", prompt_mask, torch.int32, (b, (v + 31) // 32), layout)
    if output_counts is not None:
        _checks.tensor("output_counts", output_counts, torch.int32, (b, v), "[B, V]")
    penalties = {
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    for name, penalty in penalties.items():
        if penalty is None:
            continue
        _checks.tensor(name, penalty, torch.float32, (b,), "[B]")
        if output_counts is None:
            raise ValueError(f"output_counts: expected a tensor, because {name} counts tokens")
    if bias_tokens is not None:
        _checks.tensor("bias_tokens", bias_tokens, torch.int64, (b, None), "[B, M]")
        m = bias_tokens.shape[1]
        _checks.tensor("bias_values", bias_values, torch.float32, (b, m), "[B, M]")
    _checks.same_device(
        logits=logits,
        draft_tokens=draft_tokens,
        parents=parents,
        num_nodes=num_nodes,
        prompt_mask=prompt_mask,
        output_counts=output_counts,
        **penalties,
        bias_tokens=bias_tokens,
        bias_values=bias_values,
    )
    if not values:
        return
    counts = torch.full((b,), n, dtype=torch.int32) if num_nodes is None else num_nodes
    if parents is not None:
        _checks.parents(parents, counts.to(parents.device), values=True)
    if output_counts is not None:
        _checks.values_in("output_counts", output_counts, 0, 2**31 - 1)
    largest = torch.finfo(torch.float32).max
    for name, penalty in penalties.items():
        if penalty is not None:
            low = SMALLEST if name == "repetition_penalty" else -largest
            _checks.values_in(name, penalty, low, largest)
    if bias_tokens is not None and bias_values is not None:
        _checks.values_in("bias_tokens", bias_tokens, -1, v - 1)
        _checks.values_in("bias_values", bias_values, -math.inf, largest)


def _check_together(name: str, value: object, other_name: str, other: object) -> None:
    if value is None and other is not None:
        raise ValueError(f"{name}: expected a tensor beside {other_name}, got None")
    if other is None and value is not None:
        raise ValueError(f"{other_name}: expected a tensor beside {name}, got None")


def count_tokens(counts: Tensor, tokens: Tensor, *, validate: bool = False) -> None:
    """``counts[b, tokens[b, t]] += 1``: the output counts of `process_logits` after a step.

    The ``emitted_tokens`` of `sample_and_verify` are taken as they are: every accepted token and
    the bonus counts, the padding -1 does not.

    Args:
        counts: [B, V] int32, any strides; written.
        tokens: [B, T] int64; ids outside [0, V) count for nothing.
        validate: refuse ids other than -1 outside [0, V) (reads them back to the host).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.
    """
    _checks.call(_count_tokens, _check_count_tokens, validate, counts, tokens)


def _check_count_tokens(counts: Tensor, tokens: Tensor, *, values: bool) -> None:
    _checks.tensor("counts", counts, torch.int32, (None, None), "[B, V]")
    _check_tokens("counts", counts, tokens, counts.shape[1], values=values)


def mark_tokens(mask: Tensor, tokens: Tensor, *, validate: bool = False) -> None:
    """Set bit t % 32 of ``mask[b, t // 32]`` for each token t: the prompt mask of `process_logits`.

    Call it for the prompt, whole or chunk by chunk; padding is -1. The layout is that of
    `sample_tokens`' ``allowed_mask``.

    Args:
        mask: [B, ceil(V / 32)] int32, any strides; written.
        tokens: [B, T] int64; ids the mask has no bit for are skipped.
        validate: refuse ids other than -1 that the mask has no bit for (reads them back to the
            host).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.
    """
    _checks.call(_mark_tokens, _check_mark_tokens, validate, mask, tokens)


def _check_mark_tokens(mask: Tensor, tokens: Tensor, *, values: bool) -> None:
    _checks.tensor("mask", mask, torch.int32, (None, None), "[B, ceil(V / 32)]")
    _check_tokens("mask", mask, tokens, 32 * mask.shape[1], values=values)


def _check_tokens(name: str, written: Tensor, tokens: Tensor, limit: int, *, values: bool) -> None:
    _checks.written(**{name: written})
    _checks.tensor("tokens", tokens, torch.int64, (written.shape[0], None), "[B, T]")
    _checks.same_device(**{name: written}, tokens=tokens)
    if values:
        _checks.values_in("tokens", tokens, -1, limit - 1)


def token_logprobs(
    logits: Tensor, slots: Tensor, tokens: Tensor, *, validate: bool = False
) -> Tensor:
    """``log_softmax(logits[b, slots[b, t]])[tokens[b, t]]``, at the given rows only.

    With the ``accept_index`` and ``emitted_tokens`` of `sample_and_verify` these are the
    log-probabilities of the emitted tokens, 0 behind the last one, so that their sum is that of
    the whole step. They belong to the distribution the logits stand for: the model's own when they
    are the target's (what vLLM reports by default, raw_logprobs), the edited one after
    `process_logits`. Temperature and filters of the draw are not in them.

    NaN logits count as -inf, +inf as the largest finite value, as in `sample_tokens`.

    Args:
        logits: [B, N, V] float32, float64, float16 or bfloat16, any strides.
        slots: [B, T] int32; outside [0, N), such as padding -1: the result is 0.
        tokens: [B, T] int64; outside [0, V) the result is -inf.
        validate: refuse slots outside [-1, N), and tokens outside [0, V) at a slot (reads them
            back to the host).

    Returns:
        float32 [B, T].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or requires grad in grad mode.
    """
    _checks.refuse_grad(logits=logits)
    return _checks.call(_token_logprobs, _check_token_logprobs, validate, logits, slots, tokens)


def _check_token_logprobs(logits: Tensor, slots: Tensor, tokens: Tensor, *, values: bool) -> None:
    _checks.tensor("logits", logits, _checks.FLOATS, (None, None, None), "[B, N, V]")
    b, n, v = logits.shape
    if v < 1:
        raise ValueError(f"logits: expected V of at least 1, got shape {tuple(logits.shape)}")
    _checks.tensor("slots", slots, torch.int32, (b, None), "[B, T]")
    _checks.tensor("tokens", tokens, torch.int64, (b, slots.shape[1]), "[B, T]")
    _checks.same_device(logits=logits, slots=slots, tokens=tokens)
    if values:
        _checks.values_in("slots", slots, -1, n - 1)
        _checks.values_in("tokens", torch.where(slots < 0, 0, tokens), 0, v - 1)
