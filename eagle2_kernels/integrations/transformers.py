"""``model.generate`` of transformers, decoded with EAGLE-2 trees.

One argument swaps the decoding loop; everything around it is transformers' own::

    from eagle2_kernels.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, draft=decoder, max_new_tokens=128)

``draft`` is an `EagleDecoder` made of this model, or a head to make one of for this call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
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

from ..decode import EagleDecoder, SamplingParams, TreeConfig

# Model arguments that say nothing this loop would have to honour.
_HARMLESS = frozenset(
    {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"}
)
_CACHES = ("cache", "past_key_values")
# What may follow what: bias, then penalty, then bans (-inf stays -inf), then the filters.
_RANK: dict[type, int] = {
    SequenceBiasLogitsProcessor: 0,
    RepetitionPenaltyLogitsProcessor: 1,
    NoBadWordsLogitsProcessor: 2,
    SuppressTokensLogitsProcessor: 2,
    TemperatureLogitsWarper: 3,
    TopKLogitsWarper: 4,
    TopPLogitsWarper: 5,
    MinPLogitsWarper: 6,
}


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
    a streamer. Sampling draws its seed from torch's global generator, so ``torch.manual_seed`` and
    the arguments fix the tokens, but they are others than transformers' own sampling draws.

    Stopping criteria are asked about one request at a time, after every token, without scores.

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
        ``GenerateDecoderOnlyOutput`` that holds them.

    Raises:
        TypeError: ``draft`` is none of these.
        ValueError: an argument, setting or processor that this loop cannot honour; its name is in
            the message.

    Source: ``custom_generate`` of ``transformers.GenerationMixin.generate``.
    """
    _check_mode(generation_config)
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

    rows = input_ids.tolist()
    new: list[list[int]] = [[] for _ in rows]
    ends = [0] * len(rows)
    for pieces in decoder.stream(
        prompts,
        max_new_tokens=limit,
        sampling=sampling,
        eos_token_ids=sorted(eos),
        config=tree,
        token_ids=True,
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
    pad = getattr(generation_config, "_pad_token_tensor", None)
    out = input_ids.new_full((len(rows), longest), 0 if pad is None else int(pad))
    for r, tokens in enumerate(new):
        kept = tokens[: ends[r] if eos else longest]
        out[r, : len(kept)] = torch.tensor(kept, dtype=out.dtype)
    sequences = torch.cat([input_ids, out], 1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _check_mode(config: Any) -> None:
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"generation_config: expected greedy decoding or sampling, got {mode}")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None) and config.return_dict_in_generate:
            raise ValueError(f"{name}: expected False, this loop keeps none")


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
        elif do_sample:
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
