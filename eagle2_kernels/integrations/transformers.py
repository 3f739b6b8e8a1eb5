"""Transformers: tree attention for any model, and ``model.generate`` decoded with EAGLE-2 trees.

Importing this file registers our attention under a name, and any model of transformers takes it,
for its own forwards and its own ``generate``, under any mask of zeros and ones::

    import eagle2_kernels.integrations.transformers

    model.set_attn_implementation("eagle2_tree")

One argument swaps the decoding loop; everything around it is transformers' own::

    from eagle2_kernels.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, draft=decoder, max_new_tokens=128)

``draft`` is an `EagleDecoder` made of this model, or a head to make one of for this call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    EosTokenCriteria,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..attention import tree_attention
from ..decode import EagleDecoder, SamplingParams, TreeConfig
from ..flatten import pack_tree_mask
from ..models.packed import one_at_a_time

ATTENTION = "eagle2_tree"
"""The ``attn_implementation`` that importing this file registers."""

# Arguments of attention functions that change nothing of what one computes.
_IDLE = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_hidden_states", "return_dict"}
    | {"output_router_logits", "num_items_in_batch", "logits_to_keep"}
)
# Model arguments that say nothing this loop would have to honour.
_HARMLESS = frozenset(
    {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"}
    | {"output_attentions", "output_hidden_states"}
)
_CACHES = ("cache", "past_key_values")

# Fields of GenerationConfig, all of them: those that this loop, or transformers before and after
# it, does what they say of;
_HONOURED = frozenset(
    {"max_length", "max_new_tokens", "max_time", "stop_strings", "do_sample", "use_cache"}
    | {"cache_implementation", "cache_config", "max_cache_len", "temperature", "top_k", "top_p"}
    | {"min_p", "repetition_penalty", "bad_words_ids", "renormalize_logits", "suppress_tokens"}
    | {"sequence_bias", "token_healing", "num_return_sequences", "output_attentions"}
    | {"output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"}
    | {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "disable_compile"}
)
# those that belong to other modes and say nothing of greedy decoding or sampling;
_OTHER_MODES = frozenset(
    {"early_stopping", "length_penalty", "low_memory"}
    | {"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
    | {"max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"}
    | {"assistant_ensemble_weight", "speculation_type"}
    | {"transformers_version"}
)
# those that only sampling reads;
_OF_SAMPLING = frozenset({"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"})
# and, of the rest, the values that are as good as none. Any other value is refused.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "typical_p": 1.0,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
}

# What may follow what: bias, then penalty, then bans (-inf stays -inf), then the filters. A
# log-softmax behind them all changes no token.
_RANK: dict[type, int] = {
    SequenceBiasLogitsProcessor: 0,
    RepetitionPenaltyLogitsProcessor: 1,
    NoBadWordsLogitsProcessor: 2,
    SuppressTokensLogitsProcessor: 2,
    TemperatureLogitsWarper: 3,
    TopKLogitsWarper: 4,
    TopPLogitsWarper: 5,
    MinPLogitsWarper: 6,
    LogitNormalization: 7,
}


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(scaling * q k^T, under the mask) v through `tree_attention`; transformers calls it.

    ::

        mask [B, 1, N, S]   1 1 . 1 . .      -> prefix 2, seen by every row
                            1 1 . 1 1 .         tree of S - 2 slots, one word of bits per row
                            1 1 . 1 . 1

    Args:
        module: the attention module; its ``is_causal`` counts where the argument is None.
        query: [B, Hq, N, D].
        key: [B, Hkv, S, D], K and V of all tokens so far.
        value: [B, Hkv, S, Dv].
        attention_mask: [1 or B, 1, N, S]: bool, or numbers that are 0 where a key is seen and no
            more than half the dtype's lowest where not. None: a causal chain over the last N keys,
            or every key where the module is not causal.
        scaling: 1 / sqrt(D) by default.
        dropout: 0; the operator has none.
        softcap: c in c * tanh(logit / c).
        sliding_window: honoured in the mask where there is one.
        s_aux: [Hq], the sinks.
        is_causal: see ``module``.
        **kwargs: what the model passes on; nothing that attention would have to honour.

    Returns:
        [B, N, Hq, Dv], and None for the weights, which are never formed.

    Raises:
        ValueError: a mask of another shape or kind, dropout, tensors that require grad in grad
            mode, or an argument that cannot be honoured; its name is in the message.

    Source: ``AttentionInterface`` of transformers; ``eager_attention_forward`` of its models.
    """
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"output_attentions: expected False, {ATTENTION} never forms the weights; load the "
            "model with attn_implementation='eager'"
        )
    strange = sorted(
        name
        for name, given in kwargs.items()
        if name not in _IDLE and given is not None and given is not False
    )
    if dropout:
        strange.append("dropout")
    if strange:
        raise ValueError(f"{', '.join(strange)}: expected none, {ATTENTION} does not honour it")
    q, k, v = (_rows(x) for x in (query, key, value))
    (b, n), s = q.shape[:2], k.shape[1]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"sm_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if attention_mask is not None:
        seen = _seen(attention_mask, (b, n, s))
        # The operator wants as many slots as rows behind the prefix; where there are fewer keys
        # than rows, no row sees those past the keys.
        prefix = min(_common_prefix(seen), max(s - n, 0))
        # Nor may a row see the prefix alone: without a bit of its own it would count as padding.
        if prefix and not bool(seen[..., prefix:].any(-1).all()):
            prefix -= 1
        tree_mask = pack_tree_mask(seen[..., prefix:])
        options["tree_len"] = max(s - prefix, n)
        tree_mask = torch.nn.functional.pad(
            tree_mask, (0, (options["tree_len"] + 63) // 64 - tree_mask.shape[-1])
        )
    elif causal:
        if s < n:
            raise ValueError(f"attention_mask: expected one, with {n} queries and {s} keys")
        prefix, tree_mask = s - n, None
        options["window"] = sliding_window
    elif sliding_window is not None:
        raise ValueError("attention_mask: expected one with sliding_window in both directions")
    else:
        prefix, tree_mask, options["tree_len"] = s, None, 0
    prefix_lens = torch.full((b,), prefix, dtype=torch.int32, device=q.device)
    return tree_attention(q, k, v, prefix_lens, tree_mask, **options), None  # type: ignore[return-value]


def _rows(x: Tensor) -> Tensor:
    """[B, H, N, D] to [B, N, H, D], copied only where the last dimension is not contiguous."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _seen(mask: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The mask as bool [B, N, S]."""
    b, n, s = shape
    if (
        mask.dim() != 4
        or mask.shape[0] not in (1, b)
        or mask.shape[1] != 1
        or mask.shape[2] != n
        or mask.shape[3] < s
    ):
        raise ValueError(
            f"attention_mask: expected shape [{b}, 1, {n}, {s}], one mask for all heads, got "
            f"{tuple(mask.shape)}"
        )
    # As transformers' own functions do: a mask may be longer than the keys.
    mask = mask[:, 0, :, :s]
    if mask.dtype != torch.bool:
        seen = mask == 0
        hidden = mask <= torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else ~seen
        if not bool((seen | hidden).all()) or not mask.is_floating_point():
            raise ValueError(
                f"attention_mask: expected a mask, bool or 0 and {mask.dtype}'s lowest, got a bias"
            )
        mask = seen
    return mask.expand(b, n, s)


def _common_prefix(seen: Tensor) -> int:
    """How many keys from the first on every row sees; on a GPU, where asking would wait, 0."""
    if not seen.is_cpu:
        return 0
    every = seen.flatten(0, 1).all(0)
    return int(every.long().cumprod(0).sum())


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for `attention_forward`: None where a causal chain over the last keys will do.

    Arguments are those of transformers' ``sdpa_mask``, which makes the others: bool
    [batch_size, 1, q_length, kv_length]. Source: ``AttentionMaskInterface`` of transformers.
    """
    if (
        allow_is_causal_skip
        and isinstance(q_offset, int)
        and q_offset + q_length == kv_offset + kv_length
        and (local_size is None or kv_length < local_size)
        and _all_real(attention_mask, kv_offset + kv_length)
    ):
        return None
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )


def _all_real(mask: Tensor | None, length: int) -> bool:
    """Whether the padding mask [B, length or more] hides nothing; False where asking costs."""
    if mask is None:
        return True
    if torch.compiler.is_compiling() or mask.shape[-1] < length:
        return False
    return bool(mask.all())


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, attention_mask)


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    draft: Any = None,
    tree: TreeConfig | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Greedy decoding or sampling with the tokens of the model's own distribution, tree by tree.

    To be given to ``model.generate(..., custom_generate=generate, draft=...)``, which prepares the
    arguments. Honoured are: ``max_length`` / ``max_new_tokens``, several EOS ids, left-padded
    batches, ``num_return_sequences`` (each with a seed of its own), temperature, top-k, top-p,
    min-p, repetition penalty, biased, suppressed and bad single tokens, any stopping criterion, and
    a streamer. Any other setting is refused by its name. Sampling draws its seed from torch's
    global generator, so ``torch.manual_seed`` and the arguments fix the tokens, but they are others
    than transformers' own sampling draws.

    Stopping criteria are asked about one request at a time, after every token, without scores.
    Stop strings go in as a ``StopStringCriteria``: transformers loses the ``tokenizer`` argument
    that ``stop_strings`` needs on its way to a ``custom_generate``, and says so.

    ``return_dict_in_generate`` gives what transformers gives. The logits are those that the tokens
    were drawn from; hidden states, attentions, the cache, and the logits of rows that have ended
    come from two more forwards at the end, of the prompts and of the new tokens. With
    ``use_cache=False`` there are none, or one per token where hidden states, attentions or such
    logits are asked for.

    Args:
        model: a causal LM.
        input_ids: [B, L], padded on the left.
        logits_processor: what can be expressed per token and in transformers' order; see above.
        stopping_criteria: a ``StoppingCriteriaList`` with a largest length in it.
        generation_config: a ``GenerationConfig`` for greedy decoding or sampling.
        draft: an `EagleDecoder` of ``model``, or a head (`EagleHead`, `Eagle3Head`). A decoder
            keeps its caches from call to call, a head is set up again at every call.
        tree: shape of the draft trees; the decoder's by default.
        streamer: gets each token; transformers passes it on or not, it is found either way.
        **model_kwargs: what transformers prepared for the model's forward.

    Returns:
        What transformers returns: sequences int64 [B, L + new], padded behind an EOS, or a
        ``GenerateDecoderOnlyOutput`` with those, and with scores and logits (float32 [B, V] per
        new token), hidden states and attentions (per new token a tuple over layers) and the cache
        where asked for.

    Raises:
        TypeError: ``draft`` is none of these.
        ValueError: an argument, setting or processor that this loop cannot honour, or an output
            that this model cannot give; its name is in the message.

    Source: ``custom_generate`` of ``transformers.GenerationMixin.generate``.
    """
    caches = [model_kwargs[name] for name in _CACHES if model_kwargs.get(name) is not None]
    _check_config(generation_config, model, *caches[:1] or [None])
    for name, value in model_kwargs.items():
        if name in _CACHES:
            if value is not None and value.get_seq_length() > 0:
                raise ValueError(f"{name}: expected no cache or an empty one; prompts run anew")
        elif name not in _HARMLESS and value is not None:
            raise ValueError(f"{name}: expected none, this loop does not pass it to the model")
    decoder = _decoder(model, draft)
    sampling = _sampling(logits_processor or [], bool(generation_config.do_sample))
    eos, limit, others = _criteria(stopping_criteria or [], input_ids.shape[1])
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    streamer = _callers_streamer() if streamer is None else streamer
    as_dict = bool(generation_config.return_dict_in_generate)
    keep = as_dict and bool(generation_config.output_scores or generation_config.output_logits)

    rows = input_ids.tolist()
    new: list[list[int]] = [[] for _ in rows]
    kept: list[list[Tensor]] = [[] for _ in rows]
    ends = [0] * len(rows)
    for pieces in decoder.stream(
        prompts,
        max_new_tokens=limit,
        sampling=sampling,
        eos_token_ids=sorted(eos),
        config=tree,
        token_ids=True,
        logits=kept if keep else None,
    ):
        for r, piece in enumerate(pieces):
            for token in piece:
                new[r].append(token)
                if ends[r]:
                    continue
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
                ids = torch.tensor([rows[r] + new[r]], device=input_ids.device) if others else None
                if (
                    token in eos
                    or len(new[r]) >= limit
                    or any(bool(torch.as_tensor(stop(ids, None)).all()) for stop in others)
                ):
                    ends[r] = len(new[r])
        # Without an EOS id transformers lets every request run on until the last has stopped.
        if all(ends) and (eos or all(len(tokens) >= max(ends) for tokens in new)):
            break
    if streamer is not None:
        streamer.end()
    ends = [end or len(tokens) for end, tokens in zip(ends, new, strict=True)]
    longest = max(ends)
    if not eos:
        ends = [longest] * len(rows)
    pad = getattr(generation_config, "_pad_token_tensor", None)
    out = input_ids.new_full((len(rows), longest), 0 if pad is None else int(pad))
    for r, tokens in enumerate(new):
        out[r, : ends[r]] = torch.tensor(tokens[: ends[r]], dtype=out.dtype)
    sequences = torch.cat([input_ids, out], 1)
    if not as_dict:
        return sequences
    logits = [torch.cat(pieces)[:end] for pieces, end in zip(kept, ends, strict=True) if keep]
    return _as_dict(
        model, sequences, longest, logits, generation_config, logits_processor, model_kwargs
    )


def _as_dict(
    model: Any,
    sequences: Tensor,
    new: int,
    kept: list[Tensor],
    config: Any,
    processors: Any,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput:
    """The sequences [B, L + new] and what else was asked for; ``kept`` are logits [<= new, V]."""
    cache_name, cache = next(
        ((name, model_kwargs[name]) for name in _CACHES if model_kwargs.get(name) is not None),
        ("", None),
    )
    result: dict[str, Any] = {"sequences": sequences}
    steps: list[_Step] = []
    if (
        cache is not None
        or config.output_hidden_states
        or config.output_attentions
        or any(len(rows) < new for rows in kept)
    ):
        steps = _replay(model, sequences, new, config, cache_name, model_kwargs)
    if kept:
        whole = all(len(rows) == new for rows in kept)
        logits = torch.stack(kept, 1) if whole else torch.stack([step.logits for step in steps])
        logits = logits.to(sequences.device, torch.float32)
        for r, rows in enumerate(kept):
            logits[: len(rows), r] = rows.to(logits)
        if config.output_logits:
            result["logits"] = tuple(logits)
        if config.output_scores:
            first = sequences.shape[1] - new
            process = LogitsProcessorList(processors or [])
            result["scores"] = tuple(
                process(sequences[:, : first + t], row.clone()) for t, row in enumerate(logits)
            )
    for name in ("hidden_states", "attentions"):
        if getattr(config, f"output_{name}"):
            result[name] = tuple(getattr(step, name) for step in steps)
    if cache is not None:
        result[cache_name] = cache
    return GenerateDecoderOnlyOutput(**result)


class _Step(NamedTuple):
    """What one of transformers' forwards would have given: logits [B, V], and per layer."""

    logits: Tensor
    hidden_states: tuple[Tensor, ...]
    attentions: tuple[Tensor, ...]


@torch.no_grad()
def _replay(
    model: Any,
    sequences: Tensor,
    new: int,
    config: Any,
    cache_name: str,
    model_kwargs: dict[str, Any],
) -> list[_Step]:
    """The finished sequences through the model's own forward, as the steps that made each token.

    With a cache, which this fills, two forwards: the prompt, then the new tokens but the last.
    Without one each step is a forward over all tokens so far, as in transformers.
    """
    first = sequences.shape[1] - new
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None:
        following = positions[..., -1:] + torch.arange(1, new, device=positions.device)
        positions = torch.cat([positions, following], -1)
    cached = {cache_name: model_kwargs[cache_name]} if cache_name else {}
    asked = {
        name: True
        for name in ("output_hidden_states", "output_attentions")
        if getattr(config, name)
    }

    def forward(start: int, stop: int) -> Any:
        inputs = {"input_ids": sequences[:, start:stop]}
        if mask is not None:
            inputs["attention_mask"] = torch.nn.functional.pad(mask, (0, stop - first), value=1)
        if positions is not None:
            inputs["position_ids"] = positions[..., start:stop]
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        return model(**inputs, **cached, **asked, use_cache=bool(cached), return_dict=True)

    with one_at_a_time(model):
        if not cached:
            whole = [forward(0, first + t) for t in range(new)]
        else:
            whole = [forward(0, first)]
            if new > 1:
                rest = forward(first, first + new - 1)
    steps = [
        _Step(o.logits[:, -1], tuple(o.hidden_states or ()), tuple(o.attentions or ()))
        for o in whole
    ]
    for row in range(new - len(steps)):
        weights = []
        for i, layer in enumerate(rest.attentions or ()):
            # A step's keys: those up to its own that the layer's cache would still hold.
            stop = layer.shape[-1] - (new - 2 - row)
            window = getattr(model_kwargs[cache_name].layers[i], "sliding_window", None)
            start = max(stop - window, 0) if window else 0
            weights.append(layer[:, :, row : row + 1, start:stop])
        hidden = tuple(layer[:, row : row + 1] for layer in rest.hidden_states or ())
        steps.append(_Step(rest.logits[:, row], hidden, tuple(weights)))
    return steps


def _check_config(config: Any, model: Any, cache: Any) -> None:
    """Refuse by its name every setting that this loop cannot honour."""
    # Backwards, because transformers derives min_length from min_new_tokens.
    for name in reversed(vars(type(config)())):
        value = getattr(config, name, None)
        if name.startswith("_") or name in _HONOURED or name in _OTHER_MODES:
            continue
        if value is None or value is False or value == _NEUTRAL.get(name, 0):
            continue
        if name in _OF_SAMPLING and not config.do_sample:
            continue
        raise ValueError(f"{name}: expected none, this loop cannot honour it; got {value!r}")
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"generation_config: expected greedy decoding or sampling, got {mode}")
    if config.output_attentions and config.return_dict_in_generate:
        found = model.config.get_text_config()._attn_implementation
        if found != "eager":
            raise ValueError(
                "output_attentions: expected a model with attn_implementation='eager', which alone "
                f"forms them, got {found!r}"
            )
        if cache is not None and type(cache) is not DynamicCache:
            raise ValueError(
                "cache_implementation: expected a DynamicCache with output_attentions, got "
                f"{type(cache).__name__}"
            )


def _decoder(model: Any, draft: Any) -> EagleDecoder:
    """The draft as a decoder of this model."""
    from ..models.heads import Eagle3Head, EagleHead

    if isinstance(draft, (EagleHead, Eagle3Head)):
        return EagleDecoder(model, draft)
    if not isinstance(draft, EagleDecoder):
        raise TypeError(f"draft: expected an EagleDecoder or a head, got {type(draft).__name__}")
    if draft.target.hf_model is not model:
        raise ValueError("draft: expected a decoder of this model, got one of another")
    return draft


def _sampling(processors: Iterable[Any], do_sample: bool) -> SamplingParams:
    """The parameters that do what the list does."""
    settings: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    bias: dict[int, float] = {}
    before = -1
    for processor in processors:
        kind = type(processor)
        rank = _RANK.get(kind)
        if rank is None:
            raise ValueError(
                f"logits_processor: {kind.__name__} cannot be applied to every node of a tree here"
            )
        if rank < before or (rank == before and rank not in (0, 2)):
            raise ValueError(
                f"logits_processor: expected {kind.__name__} once and in transformers' order"
            )
        before = rank
        if kind in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
            for sequence, value in processor.sequence_bias.items():
                if len(sequence) != 1:
                    raise ValueError(
                        f"logits_processor: {kind.__name__} of several tokens in a row, "
                        f"{tuple(sequence)}, cannot be applied here"
                    )
                bias[int(sequence[0])] = bias.get(int(sequence[0]), 0.0) + float(value)
        elif kind is SuppressTokensLogitsProcessor:
            bias |= dict.fromkeys(processor.suppress_tokens.tolist(), -math.inf)
        elif kind is RepetitionPenaltyLogitsProcessor:
            if getattr(processor, "prompt_ignore_length", None) is not None:
                raise ValueError("logits_processor: prompt_ignore_length cannot be honoured here")
            settings["repetition_penalty"] = float(processor.penalty)
        elif do_sample and kind is not LogitNormalization:
            # What a filter always keeps, it keeps here: one token.
            if kind is not TemperatureLogitsWarper and (
                processor.filter_value != -math.inf
                or (kind is not TopKLogitsWarper and processor.min_tokens_to_keep != 1)
            ):
                raise ValueError(
                    f"logits_processor: expected {kind.__name__} with filter_value -inf and "
                    "min_tokens_to_keep 1"
                )
            name = {3: "temperature", 4: "top_k", 5: "top_p", 6: "min_p"}[rank]
            settings[name] = getattr(processor, name)
    return SamplingParams(**settings, logit_bias=bias or None)


def _criteria(criteria: Iterable[Any], prompt_len: int) -> tuple[set[int], int, list[Any]]:
    """EOS ids, most new tokens, and the criteria that must be asked."""
    eos: set[int] = set()
    lengths, others = [], []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos |= set(torch.as_tensor(criterion.eos_token_id).reshape(-1).tolist())
        elif type(criterion) is MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        else:
            others.append(criterion)
    if not lengths or min(lengths) <= prompt_len:
        raise ValueError(
            f"stopping_criteria: expected a max_length above the prompts' {prompt_len}, got "
            f"{min(lengths, default=None)}"
        )
    return eos, min(lengths) - prompt_len, others


def _prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Each row without the padding on its left."""
    if mask is None:
        return input_ids.tolist()
    mask = mask.bool()
    if mask.shape != input_ids.shape or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError("attention_mask: expected padding on the left of input_ids only")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def _callers_streamer() -> Any:
    """The streamer that ``model.generate`` was given.

    It does not pass one to a ``custom_generate`` function, having fed it the prompt already: left
    alone it would wait for an end that never comes.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get("streamer") if frame.f_code.co_name == "generate" else None
