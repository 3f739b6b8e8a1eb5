"""model.generate(custom_generate=...): the tokens and the arguments of transformers."""

import pytest
import torch
from tiny_models import copycat_decoder, tiny_head, tiny_model
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from eagle2_kernels import EagleDecoder, SamplingParams, TreeConfig
from eagle2_kernels.integrations.transformers import generate

PROMPT = torch.tensor([[5, 9, 11, 7]])
PADDED = torch.tensor([[0, 0, 5, 9], [3, 8, 30, 41], [0, 17, 17, 4]])
MASK = (PADDED != 0).long()


@pytest.fixture(scope="module")
def decoders():
    """Drafts that are rarely right, and drafts that are often right."""
    model = tiny_model()
    return EagleDecoder(model, tiny_head(model)), copycat_decoder(0.3)


def both(decoder, ids=PROMPT, **kwargs):
    """(transformers' own, ours) for the same arguments."""
    model = decoder.target.hf_model
    kwargs = {"max_new_tokens": 20, "do_sample": False} | kwargs
    plain = model.generate(ids, **kwargs)
    return plain, model.generate(ids, **kwargs, custom_generate=generate, draft=decoder)


@pytest.mark.parametrize("which", [0, 1], ids=["poor drafts", "good drafts"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"eos_token_id": None},
        {"eos_token_id": [40, 2, 13]},
        {"repetition_penalty": 1.7},
        {"suppress_tokens": [5, 9, 33]},
        {"bad_words_ids": [[7], [8]], "repetition_penalty": 0.8},
        {"sequence_bias": [[[4], 6.0], [[9], -3.0]], "repetition_penalty": 1.3},
        {"max_new_tokens": 1},
        {"max_length": 9, "max_new_tokens": None},
    ],
    ids=lambda arguments: ", ".join(arguments) or "default",
)
def test_greedy_gives_the_same_sequences(decoders, which, arguments):
    decoder = decoders[which]
    for ids, extra in ((PROMPT, {}), (PADDED, {"attention_mask": MASK})):
        if "repetition_penalty" in arguments and ids is PADDED:
            continue  # what padding counts for differs between versions of transformers
        plain, ours = both(decoder, ids, **arguments, **extra)
        assert ours.dtype == plain.dtype and ours.tolist() == plain.tolist()


def test_a_request_ends_at_any_of_several_eos_ids_and_is_padded(decoders):
    decoder = decoders[1]
    free = both(decoder, PADDED, attention_mask=MASK, eos_token_id=None)[0]
    eos = [int(free[0, 6]), int(free[1, 12])]
    plain, ours = both(decoder, PADDED, attention_mask=MASK, eos_token_id=eos, pad_token_id=60)
    assert ours.tolist() == plain.tolist()
    assert (ours == 60).any()


class AfterToken(StoppingCriteria):
    """Stops a request behind its ``count``-th token of a set, looking at new tokens only."""

    def __init__(self, tokens, count):
        self.tokens, self.count = torch.tensor(sorted(tokens)), count

    def __call__(self, input_ids, scores, **kwargs):
        found = torch.isin(input_ids[:, 4:], self.tokens).sum(-1)
        return found >= self.count


@pytest.mark.parametrize("eos", [2, None], ids=["eos", "no eos"])
def test_stopping_criteria_are_asked_after_every_token(decoders, eos):
    criteria = StoppingCriteriaList([AfterToken(range(0, 61, 2), 3)])
    for decoder in decoders:
        arguments = {"eos_token_id": eos, "pad_token_id": 60, "attention_mask": MASK}
        plain, ours = both(decoder, PADDED, stopping_criteria=criteria, **arguments)
        assert ours.tolist() == plain.tolist()
        assert plain.shape[1] < 24


def test_sampling_draws_what_the_decoder_draws(decoders):
    decoder = decoders[1]
    model = decoder.target.hf_model
    sampling = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.01}
    torch.manual_seed(5)
    got = model.generate(
        PADDED,
        attention_mask=MASK,
        do_sample=True,
        max_new_tokens=15,
        eos_token_id=None,
        num_return_sequences=3,
        custom_generate=generate,
        draft=decoder,
        **sampling,
    )
    torch.manual_seed(5)
    prompts = [row[keep.bool()].tolist() for row, keep in zip(PADDED, MASK, strict=True)]
    want = decoder.generate_plain(
        [prompt for prompt in prompts for _ in range(3)],
        max_new_tokens=15,
        eos_token_ids=(),
        sampling=SamplingParams(**sampling),
    )
    assert got[:, 4:].tolist() == want.token_ids
    assert len({tuple(row) for row in got[:3].tolist()}) == 3


class Tokens:
    """A streamer that writes down what it gets."""

    def __init__(self):
        self.got, self.ended = [], 0

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.ended += 1


def test_a_streamer_gets_every_token_and_the_end(decoders):
    model, streamer = decoders[1].target.hf_model, Tokens()
    ids = model.generate(
        PROMPT,
        max_new_tokens=12,
        do_sample=False,
        streamer=streamer,
        custom_generate=generate,
        draft=decoders[1],
    )
    assert streamer.got == [PROMPT.tolist(), *([t] for t in ids[0, 4:].tolist())]
    assert streamer.ended == 1


def test_results_come_as_a_dict_where_asked(decoders):
    plain, ours = both(decoders[0], return_dict_in_generate=True)
    assert type(ours) is type(plain) and torch.equal(ours.sequences, plain.sequences)


def test_a_decoder_with_a_tokenizer_will_do(decoders):
    made = EagleDecoder(decoders[0].target, decoders[0].head, tokenizer=object())
    plain, ours = both(made)
    assert torch.equal(plain, ours)


def test_a_head_alone_will_do_and_so_will_another_tree():
    model = tiny_model()
    plain = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    tree = TreeConfig(max_nodes=5, top_k=2, max_depth=2)
    ours = model.generate(
        PROMPT,
        max_new_tokens=8,
        do_sample=False,
        custom_generate=generate,
        draft=tiny_head(model),
        tree=tree,
    )
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "generation_config: expected greedy decoding or sampling"),
        ({"min_new_tokens": 3}, "logits_processor: Min.*Length.* cannot be applied"),
        ({"no_repeat_ngram_size": 2}, "logits_processor: NoRepeatNGram"),
        ({"bad_words_ids": [[7, 8]]}, "NoBadWords.* of several tokens in a row"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores: expected False"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "attention_mask: expected padding on"),
        (
            {
                "do_sample": True,
                "logits_processor": LogitsProcessorList(
                    [TopKLogitsWarper(3), TemperatureLogitsWarper(0.5)]
                ),
            },
            "expected TemperatureLogitsWarper once and in transformers' order",
        ),
        (
            {"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(9, 2)])},
            "MinLengthLogitsProcessor cannot be applied",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_refused(decoders, arguments, message):
    model = decoders[0].target.hf_model
    with pytest.raises(ValueError, match=message):
        model.generate(
            PROMPT, max_new_tokens=4, custom_generate=generate, draft=decoders[0], **arguments
        )


def test_a_draft_of_another_model_is_refused(decoders):
    model = decoders[0].target.hf_model
    with pytest.raises(ValueError, match="draft: expected a decoder of this model"):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=generate, draft=decoders[1])
    with pytest.raises(TypeError, match="draft: expected an EagleDecoder or a head, got NoneType"):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=generate)
