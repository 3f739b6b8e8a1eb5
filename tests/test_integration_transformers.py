"""Any model's attention under its name, and model.generate(custom_generate=...): the tokens, the
outputs and the arguments of transformers."""

import dataclasses

import pytest
import torch
import transformers
from tiny_models import BASE, MODELS, copycat_decoder, randomized, tiny_head, tiny_model
from tokenizers import Tokenizer, models
from tokenizers import decoders as decoders_of_text
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from eagle2_kernels import EagleDecoder, SamplingParams, TreeConfig
from eagle2_kernels.integrations import transformers as adapter
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
        {"renormalize_logits": True},
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


ALL_OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def assert_same(got, want, name):
    """Equal but for the rounding of other forwards, in types and shapes too."""
    assert type(got) is type(want), name
    if isinstance(want, tuple):
        assert len(got) == len(want), name
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{name}[{i}]")
    elif isinstance(want, DynamicCache):
        for i, (a, b) in enumerate(zip(got.layers, want.layers, strict=True)):
            assert_same(a.keys, b.keys, f"{name}.keys[{i}]")
            assert_same(a.values, b.values, f"{name}.values[{i}]")
        assert got.get_seq_length() == want.get_seq_length()
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, name
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("arguments", [{}, {"use_cache": False}], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_outputs_are_those_of_transformers(name, arguments):
    # Only eager attention gives weights, and in float64 its masks overflow to NaN.
    model = tiny_model(name, dtype=torch.float32)
    model.set_attn_implementation("eager")
    decoder = EagleDecoder(model, tiny_head(model))
    arguments = ALL_OUTPUTS | arguments
    for ids, extra in (
        (PROMPT, {"bad_words_ids": [[7], [8]], "repetition_penalty": 1.2}),
        (PADDED, {"attention_mask": MASK, "pad_token_id": 60, "max_new_tokens": 9}),
    ):
        # Two of three rows end early, and are padded.
        eos = 2
        if ids is PADDED:
            plain = model.generate(
                ids, max_new_tokens=9, do_sample=False, eos_token_id=None, attention_mask=MASK
            )
            eos = [int(plain[0, 7]), int(plain[1, 9])]
        plain, ours = both(decoder, ids, eos_token_id=eos, **arguments, **extra)
        assert type(ours) is type(plain) and ours.keys() == plain.keys()
        for field in dataclasses.fields(plain):
            assert_same(getattr(ours, field.name), getattr(plain, field.name), field.name)


def test_logits_are_those_that_the_tokens_were_drawn_from(decoders):
    decoder = decoders[1]
    arguments = {"return_dict_in_generate": True, "output_scores": True, "use_cache": False}
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 5}):
        torch.manual_seed(3)
        ours = decoder.target.hf_model.generate(
            PROMPT,
            max_new_tokens=12,
            custom_generate=generate,
            draft=decoder,
            **arguments,
            **sampling,
        )
        assert len(ours.scores) == ours.sequences.shape[1] - 4
        for token, scores in zip(ours.sequences[0, 4:], ours.scores, strict=True):
            # top-k left five, and the token is one of them
            assert torch.isfinite(scores[0, token])
            assert int(torch.isfinite(scores).sum()) == (5 if sampling["do_sample"] else 61)
        if not sampling["do_sample"]:
            assert ours.sequences[0, 4:].tolist() == [int(s.argmax()) for s in ours.scores]


def test_a_dict_without_more_holds_sequences_and_cache(decoders):
    plain, ours = both(decoders[0], return_dict_in_generate=True)
    assert ours.keys() == plain.keys() and torch.equal(ours.sequences, plain.sequences)


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
        ({"num_beams": 2}, "num_beams: expected none"),
        ({"min_new_tokens": 3}, "min_new_tokens: expected none"),
        ({"min_length": 9}, "min_length: expected none"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size: expected none"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p: expected none"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens: expected none"),
        ({"bad_words_ids": [[7, 8]]}, "NoBadWords.* of several tokens in a row"),
        (
            {"return_dict_in_generate": True, "output_attentions": True},
            "output_attentions: expected a model with attn_implementation='eager'.*'sdpa'",
        ),
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


# Fields of GenerationConfig that change nothing here, as they change nothing in transformers'
# greedy decoding or sampling: a value that another mode would read.
INERT = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "max_matching_ngram_size": 3,
    "assistant_lookbehind": 4,
    "target_lookbehind": 4,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "x",
    "disable_compile": True,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "transformers_version": "5.0.0",
    "decoder_start_token_id": 3,
    "bos_token_id": 3,
}
# Those whose effect another test of this file compares with transformers' own.
COMPARED = frozenset(
    {"max_length", "max_new_tokens", "do_sample", "use_cache", "temperature", "top_k", "top_p"}
    | {"min_p", "repetition_penalty", "bad_words_ids", "renormalize_logits", "suppress_tokens"}
    | {"sequence_bias", "num_return_sequences", "output_attentions", "output_hidden_states"}
    | {"output_scores", "output_logits", "return_dict_in_generate", "pad_token_id"}
    | {"eos_token_id", "max_time", "stop_strings", "cache_implementation", "max_cache_len"}
    # transformers' own work, before it calls us
    | {"token_healing", "cache_config"}
)


@pytest.mark.parametrize("name", [n for n in vars(GenerationConfig()) if not n.startswith("_")])
def test_every_setting_is_honoured_or_refused_by_its_name(decoders, name):
    if name in COMPARED:
        return
    config = GenerationConfig(do_sample=False, num_beams=1)
    setattr(config, name, INERT.get(name, 7))
    if name in INERT:
        adapter._check_config(config, decoders[0].target.hf_model, None)
        return
    with pytest.raises(ValueError, match=f"^{name}: expected none.* got 7"):
        adapter._check_config(config, decoders[0].target.hf_model, None)


def test_max_time_and_stop_strings_are_asked_after_every_token(decoders):
    decoder = decoders[0]
    ours = decoder.target.hf_model.generate(
        PROMPT, max_new_tokens=30, max_time=0.0, custom_generate=generate, draft=decoder
    )
    assert ours.shape[1] == 5

    letters = Tokenizer(models.BPE({chr(65 + i): i for i in range(61)}, []))
    letters.decoder = decoders_of_text.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters)
    free = both(decoder, eos_token_id=None)[0]
    stop = chr(65 + int(free[0, 9]))
    criteria = StoppingCriteriaList([transformers.StopStringCriteria(tokenizer, [stop])])
    plain, ours = both(decoder, eos_token_id=None, stopping_criteria=criteria)
    assert torch.equal(plain, ours) and ours.shape[1] <= 10


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_cache_returned_is_of_the_kind_asked_for_and_full(decoders, kind):
    plain, ours = both(
        decoders[1], cache_implementation=kind, return_dict_in_generate=True, eos_token_id=None
    )
    (name,) = plain.keys() - {"sequences"}
    assert type(ours[name]) is type(plain[name])
    assert ours[name].get_seq_length() == plain[name].get_seq_length() == 23


def test_a_draft_of_another_model_is_refused(decoders):
    model = decoders[0].target.hf_model
    with pytest.raises(ValueError, match="draft: expected a decoder of this model"):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=generate, draft=decoders[1])
    with pytest.raises(TypeError, match="draft: expected an EagleDecoder or a head, got NoneType"):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=generate)


# attn_implementation="eagle2_tree"

SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 4}


def attended(model, inputs, attention):
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model(**inputs)


def assert_same_forward(model, inputs, field="logits", tolerance=1e-9):
    """The same numbers as transformers' own attention, at the rows that are no padding.

    That is SDPA, or eager attention where SDPA cannot, which is in float32 whatever the model.
    """
    theirs = "sdpa" if tolerance < 1e-6 else "eager"
    want, got = (attended(model, inputs, name)[field] for name in (theirs, "eagle2_tree"))
    mask = inputs.get("attention_mask")
    rows = (
        torch.ones(want.shape[:2]) if mask is None or mask.dim() != 2 else mask[:, -want.shape[1] :]
    )
    torch.testing.assert_close(got[rows.bool()], want[rows.bool()], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_attention_of_any_model_is_its_eager_attention(name):
    capped = name == "gemma2"
    model = tiny_model(name, dtype=torch.float32 if capped else torch.float64)
    tolerance = 1e-4 if capped else 1e-9
    assert_same_forward(model, {"input_ids": torch.randint(61, (2, 11))}, tolerance=tolerance)
    ids, mask = torch.randint(61, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = mask[1, :1] = 0
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids}
    assert_same_forward(model, inputs, tolerance=tolerance)


def test_attention_with_sinks_and_experts():
    config = transformers.GptOssConfig(**(BASE | SINKS))
    # experts of this model have no float64 kernel
    model = randomized(transformers.GptOssForCausalLM(config), 0).eval()
    assert_same_forward(model, {"input_ids": torch.randint(61, (2, 9))}, tolerance=1e-4)


def test_attention_in_both_directions_and_across():
    settings = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    bert = transformers.BertConfig(
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, **settings
    )
    model = randomized(transformers.BertModel(bert), 0).double().eval()
    ids, mask = torch.randint(61, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert_same_forward(model, inputs, "last_hidden_state")
    bart = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = randomized(transformers.BartForConditionalGeneration(bart), 0).double().eval()
    # more queries than keys, and padding among the keys
    inputs |= {"decoder_input_ids": torch.randint(61, (2, 14))}
    want, got = (attended(model, inputs, name).logits for name in ("sdpa", "eagle2_tree"))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seen", [[[1, 1, 1, 0, 0]], [[1, 1, 1, 0, 1], [1, 1, 1, 0, 0]]])
def test_a_row_may_see_no_more_than_all_rows_see(seen):
    mask = torch.tensor(seen, dtype=torch.bool)[None, None]
    q, kv = torch.randn(1, 4, len(seen), 8), torch.randn(2, 1, 2, 5, 8)
    want = torch.nn.functional.scaled_dot_product_attention(q, *kv, mask, enable_gqa=True)
    got, _ = adapter.attention_forward(torch.nn.Module(), q, *kv, mask)
    torch.testing.assert_close(got, want.transpose(1, 2))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mask", [MASK, torch.ones_like(MASK)], ids=["padded", "whole"])
def test_generate_of_transformers_runs_on_it(name, kind, mask):
    model = tiny_model(name)
    arguments = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "cache_implementation": kind,
        "disable_compile": True,
    }
    want = model.generate(PADDED, **arguments)
    model.set_attn_implementation("eagle2_tree")
    assert torch.equal(model.generate(PADDED, **arguments), want)


def tree_mask(prefix, parents):
    """bool [N, prefix + N]: each node sees the prefix, itself and its ancestors."""
    n = len(parents)
    mask = torch.zeros(n, prefix + n, dtype=torch.bool)
    mask[:, :prefix] = True
    for row in range(n):
        node = row
        while node >= 0:
            mask[row, prefix + node] = True
            node = parents[node]
    return mask


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_callers_tree_gives_each_node_what_its_path_gives(kind):
    model, parents = tiny_model(), [-1, 0, 0, 1, 1, 2]
    prompt, nodes = torch.randint(61, (1, 7)), torch.randint(61, (1, 6))
    mask = tree_mask(7, parents)
    depths = mask[:, 7:].sum(-1) - 1
    given = mask[None, None]
    if kind == "float":
        lowest = torch.finfo(torch.float64).min
        given = torch.zeros(given.shape, dtype=torch.float64).masked_fill(~given, lowest)
    model.set_attn_implementation("eagle2_tree")
    with torch.no_grad():
        cache = model(prompt, use_cache=True)
        (past,) = (v for k, v in cache.items() if k in ("cache", "past_key_values"))
        name = next(k for k in ("cache", "past_key_values") if k in cache)
        got = model(
            nodes, attention_mask=given, position_ids=7 + depths[None], **{name: past}
        ).logits
    for node in range(6):
        path = mask[node, 7:].nonzero()[:, 0]
        ids = torch.cat([prompt, nodes[:, path]], 1)
        want = attended(model, {"input_ids": ids}, "sdpa").logits[0, -1]
        torch.testing.assert_close(got[0, node], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_attentions": True}, "output_attentions: expected False"),
        ({"dropout": 0.1}, "dropout: expected none"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "position_bias: expected none"),
        ({"attention_mask": torch.zeros(1, 2, 3, 3)}, r"attention_mask: expected shape \[1, 1, 3"),
        ({"attention_mask": torch.zeros(1, 1, 3, 2)}, r"attention_mask: expected shape \[1, 1, 3"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "attention_mask: .*got a bias"),
        ({"attention_mask": torch.ones(1, 1, 3, 3).int()}, "attention_mask: .*got a bias"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_attention_cannot_honour_is_refused(change, message):
    arguments = {"attention_mask": None} | change
    q, kv = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=message):
        adapter.attention_forward(torch.nn.Module(), q, kv, kv, **arguments)
    if "attention_mask" in change:
        return
    with pytest.raises(ValueError, match="require grad"):
        adapter.attention_forward(torch.nn.Module(), q.requires_grad_(), kv, kv, None)
