"""The loop: a tree changes how fast tokens come, never which; everything ends where it should."""

import random
from dataclasses import replace

import pytest
import torch
from tiny_models import copycat_decoder, tiny_head, tiny_model

import eagle2_kernels as ek
from eagle2_kernels import EagleDecoder, SamplingParams, TreeConfig
from eagle2_kernels.generation import TextStream
from eagle2_kernels.models.heads import Eagle3Head, EagleConfig
from eagle2_kernels.step import TreeStep

pytest.importorskip("transformers")

TREES = [
    TreeConfig(16, 4, 4),
    TreeConfig(1, 2, 2),
    TreeConfig(2, 1, 1),
    TreeConfig(5, 1, 6),
    TreeConfig(8, 4, 1),
    TreeConfig(33, 8, 5),
    TreeConfig(65, 8, 9),
    TreeConfig(16, 4, 6, stop_below=0.3),
]
PROMPTS = [[3, 4, 5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 12, 13, 14]]


def ids_of(config):
    return f"{config.max_nodes}n{config.top_k}k{config.max_depth}d"


@pytest.fixture(scope="module")
def decoder():
    """An untrained head that knows every token: few drafts are right, all are legal."""
    model = tiny_model()
    return EagleDecoder(model, tiny_head(model))


@pytest.fixture(scope="module")
def copycat():
    """A decoder whose drafts are often right."""
    return copycat_decoder()


@pytest.fixture(scope="module")
def decoder3():
    """An untrained EAGLE-3 head."""
    model = tiny_model(num_hidden_layers=7)
    return EagleDecoder(model, tiny_head(model, kind="Eagle3Head"))


@pytest.fixture(scope="module")
def copycat3():
    """`copycat` with an EAGLE-3 head: each row attends to itself alone and passes its embedding on.

    Queries and keys are one large constant, which the rotation makes alike only where they meet;
    the residual is off, so nothing of earlier rows is left.
    """
    model = tiny_model(tie_word_embeddings=False, num_hidden_layers=7)
    size = model.config.hidden_size
    config = replace(
        Eagle3Head._shape_for(model.config, None),
        num_key_value_heads=4,
        attention_bias=True,
        norm_before_residual=True,
    )
    head = Eagle3Head(config, dtype=torch.float64)
    head.reset_parameters()
    layer, eye = head.layers[0], torch.eye(size)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        head.lm_head.weight.copy_(model.lm_head.weight)
        layer.hidden_norm.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.zero_()
            projection.bias.fill_(40.0)
        layer.self_attn.v_proj.weight.copy_(torch.cat((eye, 0 * eye), dim=1))
        layer.self_attn.o_proj.weight.copy_(eye)
    return EagleDecoder(model, head.bind(model).eval())


class Letters:
    """A tokenizer whose token i is one character; 2 is special, 50 .. 53 are parts of one '€'."""

    PARTS = ("\xe2", "\x82", "\xac")

    def __call__(self, text):
        return {"input_ids": [ord(c) - 64 for c in text]}

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        data = b""
        for i in ids:
            if i == 2 and skip_special_tokens:
                continue
            data += bytes([(0xE2, 0x82, 0xAC)[i - 50]]) if 50 <= i < 53 else chr(64 + i).encode()
        return data.decode(errors="replace")


# Lossless


@pytest.mark.parametrize(
    ("which", "config"),
    [(which, config) for which in ("decoder", "copycat") for config in TREES]
    + [(which, config) for which in ("decoder3", "copycat3") for config in TREES[::3]],
    ids=lambda value: value if isinstance(value, str) else ids_of(value),
)
def test_greedy_equals_plain_and_hugging_face(which, config, request):
    decoder = request.getfixturevalue(which)
    got = decoder.generate(PROMPTS, max_new_tokens=30, config=config, eos_token_ids=())
    plain = decoder.generate_plain(PROMPTS, max_new_tokens=30, eos_token_ids=())
    assert got.token_ids == plain.token_ids
    model = decoder.target.hf_model
    for prompt, tokens in zip(PROMPTS, got.token_ids, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            # Token 0 is the padding id, which transformers would leave out of the prompt.
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
        )
        assert out[0, len(prompt) :].tolist() == tokens


def test_random_models_trees_prompts_and_stops():
    rng = random.Random(0)
    for trial in range(12):
        name = rng.choice(["llama", "qwen3", "mistral", "gemma3"])
        model = tiny_model(name, seed=trial)
        vocab = rng.sample(range(61), 40) if trial % 2 else None
        kind = "EagleHead"
        if trial % 3 == 0:
            name, kind = ("qwen3", "llama")[trial % 2], "Eagle3Head"
            model = tiny_model(name, seed=trial, num_hidden_layers=7)
        decoder = EagleDecoder(model, tiny_head(model, vocab, seed=trial, kind=kind))
        prompts = [
            [rng.randrange(61) for _ in range(rng.randrange(1, 24))]
            for _ in range(rng.randrange(1, 4))
        ]
        settings = {
            "max_new_tokens": rng.randrange(1, 25),
            "eos_token_ids": rng.sample(range(61), rng.randrange(0, 4)),
            "sampling": SamplingParams(
                temperature=rng.choice([0.0, 1.2]),
                top_p=0.95,
                seed=rng.randrange(2**40),
                repetition_penalty=rng.choice([1.0, 1.25, 0.8]),
                frequency_penalty=rng.choice([0.0, 0.3]),
                presence_penalty=rng.choice([0.0, -0.7, 1.1]),
                logit_bias=rng.choice([None, {3: 2.0, 4: float("-inf")}]),
            ),
        }
        config = TreeConfig(rng.randrange(1, 40), rng.randrange(1, 9), rng.randrange(1, 7))
        tree = decoder.generate(prompts, config=config, **settings)
        plain = decoder.generate_plain(prompts, **settings)
        assert tree.token_ids == plain.token_ids, (trial, name, config, settings)
        assert [g.finish_reason for g in tree] == [g.finish_reason for g in plain]


@pytest.mark.parametrize("config", TREES, ids=ids_of)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02, seed=2**63 + 5),
        SamplingParams(temperature=1.5, min_p=0.1, seed=-3),
    ],
    ids=["pure", "filtered", "min_p"],
)
def test_sampled_equals_plain_with_the_same_seed(decoder, copycat, config, sampling):
    for d in (decoder, copycat):
        tree = d.generate(PROMPTS, max_new_tokens=16, sampling=sampling, config=config)
        plain = d.generate_plain(PROMPTS, max_new_tokens=16, sampling=sampling)
        assert tree.token_ids == plain.token_ids
        assert tree.stats.seeds == plain.stats.seeds


# Values that float32 holds exactly, so that float64 arithmetic on them is the same everywhere.
PENALTIES = {
    "repetition": {"repetition_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.75},
    "presence": {"presence_penalty": 1.25},
    "bias": {"logit_bias": {4: 3.5, 7: 2.5, 11: float("-inf")}},
    "all": {
        "repetition_penalty": 0.75,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.25,
        "logit_bias": {5: 2.5, 8: float("-inf")},
    },
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("which", ["decoder", "copycat"])
def test_penalties_greedy_equal_plain_and_hugging_face(which, name, request):
    """transformers' own processors in its own order, and OpenAI's formula for the other two."""
    transformers = pytest.importorskip("transformers")
    decoder, penalties = request.getfixturevalue(which), PENALTIES[name]
    settings = {"max_new_tokens": 30, "eos_token_ids": ()}
    sampling = SamplingParams(**penalties)
    plain = decoder.generate_plain(PROMPTS, sampling=sampling, **settings)
    assert plain.token_ids != decoder.generate_plain(PROMPTS, **settings).token_ids
    for config in TREES[:4]:
        got = decoder.generate(PROMPTS, sampling=sampling, config=config, **settings)
        assert got.token_ids == plain.token_ids

    class OpenAI(transformers.LogitsProcessor):
        def __init__(self, prompt_length):
            self.prompt_length = prompt_length

        def __call__(self, ids, scores):
            counts = torch.bincount(ids[0, self.prompt_length :], minlength=scores.shape[-1])
            frequency = sampling.frequency_penalty * counts
            return scores - frequency - sampling.presence_penalty * (counts > 0)

    bias = [[[token], value] for token, value in penalties.get("logit_bias", {}).items()]
    for prompt, tokens in zip(PROMPTS, plain.token_ids, strict=True):
        ids = torch.tensor([prompt])
        out = decoder.target.hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=None,
            sequence_bias=bias or None,
            repetition_penalty=sampling.repetition_penalty,
            logits_processor=transformers.LogitsProcessorList([OpenAI(len(prompt))]),
        )
        assert out[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_sampled_equal_plain(decoder, copycat, name):
    sampling = SamplingParams(0.9, 20, 0.95, 0.01, seed=5, **PENALTIES[name])
    accepted = 0
    for d in (decoder, copycat):
        plain = d.generate_plain(PROMPTS, max_new_tokens=20, sampling=sampling)
        for config in TREES[:2] + TREES[5:]:
            tree = d.generate(PROMPTS, max_new_tokens=20, sampling=sampling, config=config)
            assert tree.token_ids == plain.token_ids
            accepted += sum(tree.stats.accept_histogram[1:])
        # Request i has seed + i and its own history, whatever else is in the batch.
        for i, prompt in enumerate(PROMPTS):
            alone = SamplingParams(0.9, 20, 0.95, 0.01, seed=5 + i, **PENALTIES[name])
            one = d.generate(prompt, max_new_tokens=20, sampling=alone)
            assert one.token_ids == plain[i].token_ids
            streamed = d.stream(prompt, max_new_tokens=20, sampling=alone)
            assert [t for step in streamed for t in step] == one.token_ids
    assert accepted > 10


def test_banned_tokens_never_appear(copycat):
    """The tokens it would emit are banned, then those it emits instead, and so on."""
    banned = {}
    for temperature in (0.0, 1.0):
        for seed in range(4):
            sampling = SamplingParams(
                temperature,
                seed=seed,
                repetition_penalty=0.5,
                presence_penalty=-2.0,
                logit_bias=banned,
            )
            tree, plain = (
                run(PROMPTS, max_new_tokens=20, sampling=sampling, eos_token_ids=())
                for run in (copycat.generate, copycat.generate_plain)
            )
            assert tree.token_ids == plain.token_ids
            seen = {token for row in tree.token_ids for token in row}
            assert not seen & banned.keys()
            banned = dict(list({**banned, **dict.fromkeys(seen, float("-inf"))}.items())[:55])


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_the_emitted_tokens(copycat, temperature):
    penalties = {"repetition_penalty": 1.5, "logit_bias": {5: 2.5, 8: float("-inf")}}
    for kind in (True, "raw", "processed"):
        sampling = SamplingParams(temperature, seed=3, logprobs=kind, **penalties)
        tree, plain = (
            run(PROMPTS, max_new_tokens=16, sampling=sampling, keep_logits=True)
            for run in (copycat.generate, copycat.generate_plain)
        )
        assert tree.stats.accept_length > 1
        for prompt, a, b in zip(PROMPTS, tree, plain, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            want = []
            for i, token in enumerate(a.token_ids):
                row = a.logits[i].clone()
                if kind == "processed":
                    row[5] += 2.5
                    row[8] = float("-inf")
                    for seen in {*prompt, *a.token_ids[:i]}:
                        row[seen] = row[seen] / 1.5 if row[seen] > 0 else row[seen] * 1.5
                want.append(float(torch.log_softmax(row, -1)[token]))
            assert a.logprobs == pytest.approx(want, abs=1e-5)


def test_logprobs_end_where_the_tokens_do(copycat):
    token, index = inner_token(copycat, PROMPTS[0])
    settings = {"max_new_tokens": 24, "eos_token_ids": [token]}
    prompts = [PROMPTS[0], PROMPTS[1]]
    got = copycat.generate(prompts, sampling=SamplingParams(logprobs=True), **settings)
    assert len(got[0].logprobs) == len(got[0].token_ids) == index + 1
    assert len(got[1].logprobs) == len(got[1].token_ids)
    assert copycat.generate(prompts, **settings)[0].logprobs is None


def test_logprobs_need_a_place(decoder):
    for call in (decoder.stream, decoder.draft_step):
        with pytest.raises(ValueError, match="logprobs: .* use generate"):
            call([3], sampling=SamplingParams(logprobs=True))


def test_sampling_follows_the_targets_distribution(decoder):
    """The first token of many seeds, against the softmax of the logits behind it."""
    count = 2000
    first = decoder.generate_plain([3, 4, 5], max_new_tokens=1, keep_logits=True)
    expected = torch.softmax(first.logits[0], -1)
    sampled = decoder.generate(
        [[3, 4, 5]] * count, max_new_tokens=1, sampling=SamplingParams(temperature=1.0, seed=0)
    )
    seen = torch.bincount(torch.tensor(sampled.token_ids).flatten(), minlength=61) / count
    assert float((seen - expected).abs().sum()) / 2 < 0.06


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact_ties_go_to_the_lowest_id(dtype):
    """Field failure: at a tie of the two best logits tree and plain went different ways."""
    model = tiny_model(dtype=dtype, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[30:60] = model.lm_head.weight[:30]
    decoder = EagleDecoder(model, tiny_head(model))
    settings = {"max_new_tokens": 20, "eos_token_ids": ()}
    tree = decoder.generate(PROMPTS, **settings)
    assert all(token < 30 or token == 60 for row in tree.token_ids for token in row)
    if dtype == torch.float64:
        assert tree.token_ids == decoder.generate_plain(PROMPTS, **settings).token_ids


def test_padded_rows_change_nothing_in_float64(decoder):
    plain = decoder.generate_plain(PROMPTS, max_new_tokens=12)
    for rows in (2, 8, 70):
        padded = decoder.generate_plain(PROMPTS, max_new_tokens=12, pad_rows=rows)
        assert padded.token_ids == plain.token_ids


def test_a_batch_equals_single_runs(decoder, copycat, copycat3):
    sampling = SamplingParams(temperature=1.0, seed=11)
    for d in (decoder, copycat, copycat3):
        together = d.generate(PROMPTS, max_new_tokens=20, sampling=sampling)
        for i, prompt in enumerate(PROMPTS):
            alone = d.generate(
                prompt, max_new_tokens=20, sampling=SamplingParams(temperature=1.0, seed=11 + i)
            )
            assert alone.token_ids == together[i].token_ids
            assert alone.stats.accept_histogram == together[i].stats.accept_histogram


def test_a_prompt_longer_than_a_prefill_chunk(monkeypatch):
    monkeypatch.setattr("eagle2_kernels.decode._PREFILL_ROWS", 7)
    model = tiny_model("mistral")
    decoder = EagleDecoder(model, tiny_head(model))
    settings = {
        "prompts": [list(range(3, 3 + n)) for n in (7, 8, 30, 1, 14)],
        "max_new_tokens": 10,
        "sampling": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logprobs=True),
    }
    chunked = decoder.generate(**settings)
    monkeypatch.undo()
    whole = decoder.generate(**settings)
    assert chunked.token_ids == whole.token_ids
    assert chunked.stats.accept_histogram == whole.stats.accept_histogram
    for a, b in zip(chunked, whole, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)


def test_kept_logits_are_those_behind_the_tokens(copycat):
    tree = copycat.generate(PROMPTS, max_new_tokens=12, keep_logits=True)
    plain = copycat.generate_plain(PROMPTS, max_new_tokens=12, keep_logits=True)
    for a, b in zip(tree, plain, strict=True):
        assert a.logits.shape == (len(a.token_ids), 61)
        assert a.logits.argmax(-1).tolist() == a.token_ids
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-5, atol=1e-5)


# Where a request ends


def plain_tokens(decoder, prompt, count=24):
    return decoder.generate_plain(prompt, max_new_tokens=count, eos_token_ids=()).token_ids


def steps(decoder, prompt, **settings):
    """Tokens of every step of a stream without a tokenizer."""
    return list(decoder.stream(prompt, **settings))


def inner_token(decoder, prompt):
    """A token that first appears inside a step of several tokens, and its index in the output."""
    seen = []
    for step in steps(decoder, prompt, max_new_tokens=24, eos_token_ids=()):
        for i, token in enumerate(step[:-1]):
            if token not in seen and token not in step[:i]:
                return token, len(seen) + i
        seen += step
    raise AssertionError("no step with several new tokens")


@pytest.mark.parametrize("which", ["copycat", "copycat3"])
def test_the_copycat_accepts(which, request):
    """The tests of cuts inside accepted paths need paths."""
    copycat = request.getfixturevalue(which)
    assert copycat.generate(PROMPTS[0], max_new_tokens=24, eos_token_ids=()).stats.accept_length > 2


def test_eos_inside_an_accepted_path_cuts_there(copycat):
    """Field failure: accepted [a, EOS, b, c], only the last token was checked."""
    token, index = inner_token(copycat, PROMPTS[0])
    got = copycat.generate(PROMPTS[0], max_new_tokens=24, eos_token_ids=[60, token])
    assert got.token_ids == plain_tokens(copycat, PROMPTS[0])[: index + 1]
    assert got.finish_reason == "eos"
    # The discarded tokens count nowhere.
    assert got.stats.new_tokens == index + 1
    histogram = got.stats.accept_histogram
    assert sum((i + 1) * n for i, n in enumerate(histogram)) == index


def test_the_cap_and_a_stop_in_one_step(copycat):
    """Field failure: [10, 11, STOP, 20, 21] with cap 5 reported LENGTH and leaked 20, 21."""
    token, index = inner_token(copycat, PROMPTS[0])
    got = copycat.generate(PROMPTS[0], max_new_tokens=index + 3, eos_token_ids=[token])
    assert got.finish_reason == "eos"
    assert got.token_ids[-1] == token
    capped = copycat.generate(PROMPTS[0], max_new_tokens=index + 1, eos_token_ids=[token])
    assert capped.token_ids == got.token_ids
    assert capped.finish_reason == "eos"


@pytest.mark.parametrize("cap", range(1, 12))
def test_every_cap_is_exact(copycat, cap):
    """Field failure: ids overshot max_new_tokens, or left out the last bonus token."""
    for config in (TreeConfig(16, 4, 4), TreeConfig(5, 1, 6)):
        got = copycat.generate(PROMPTS[0], max_new_tokens=cap, eos_token_ids=(), config=config)
        assert got.token_ids == plain_tokens(copycat, PROMPTS[0])[:cap]
        assert got.finish_reason == "length"


def test_the_models_own_eos_is_the_default(decoder):
    model = decoder.target.hf_model
    token = plain_tokens(decoder, PROMPTS[0])[5]
    first = plain_tokens(decoder, PROMPTS[0]).index(token)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [60, token]
    try:
        got = decoder.generate(PROMPTS[0], max_new_tokens=24)
    finally:
        model.generation_config.eos_token_id = before
    assert len(got.token_ids) == first + 1
    assert got.finish_reason == "eos"


def test_the_end_of_the_position_table():
    """Field failure: prompt + max_new + tree went past the table. The tree shrinks near the end."""
    for name in ("llama", "gpt2"):
        model = tiny_model(name, max_position_embeddings=32)
        decoder = EagleDecoder(model, _any_head(model))
        for length in (1, 20, 31):
            prompt = [3 + i for i in range(length)]
            got = decoder.generate(prompt, max_new_tokens=100, eos_token_ids=())
            plain = decoder.generate_plain(prompt, max_new_tokens=100, eos_token_ids=())
            assert got.token_ids == plain.token_ids
            assert len(got.token_ids) == 32 - length
            assert got.finish_reason == plain.finish_reason == "positions"
        with pytest.raises(ValueError, match="position"):
            decoder.generate([3] * 32)


def _any_head(model):
    """A head of its own shape: `from_target` wants Llama's names in the configuration."""
    from eagle2_kernels.models.heads import EagleHead

    config = EagleConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=61,
    )
    head = EagleHead(config, dtype=torch.float64)
    head.reset_parameters()
    return head.bind(model).eval()


def test_finished_rows_stand_still(copycat):
    """One request ends at its first token, the other goes on; nothing of the first one changes."""
    stops = plain_tokens(copycat, PROMPTS[1])[:1]
    prompts = [PROMPTS[1], PROMPTS[0]]
    got = copycat.generate(prompts, max_new_tokens=24, eos_token_ids=stops)
    assert got[0].token_ids == stops
    assert got[0].stats.target_forwards == 0
    assert got[0].stats.accept_length == 0
    alone = copycat.generate(PROMPTS[0], max_new_tokens=24, eos_token_ids=stops)
    assert got[1].token_ids == alone.token_ids
    assert got[1].stats.accept_histogram == alone.stats.accept_histogram


def test_accept_length_counts_emitted_tokens(copycat):
    """Field failure: drafted or discarded tokens were counted."""
    got = copycat.generate(PROMPTS[0], max_new_tokens=20, eos_token_ids=())
    stats = got.stats
    assert stats.new_tokens == len(got.token_ids) == 20
    assert stats.accept_length == pytest.approx(19 / stats.target_forwards)
    assert sum(stats.accept_histogram) == stats.target_forwards
    assert sum((i + 1) * n for i, n in enumerate(stats.accept_histogram)) == 19
    assert set(stats.seconds) == {"prefill", "draft", "verify", "total"}
    assert len(stats.seeds) == 1
    plain = copycat.generate_plain(PROMPTS[0], max_new_tokens=20, eos_token_ids=())
    assert (plain.stats.target_forwards, plain.stats.accept_length) == (19, 1.0)


def test_statistics_of_a_batch(copycat):
    got = copycat.generate(PROMPTS, max_new_tokens=20, eos_token_ids=())
    forwards = [g.stats.target_forwards for g in got]
    assert got.stats.target_forwards == max(forwards)
    assert got.stats.new_tokens == 60
    assert got.stats.accept_length == pytest.approx(57 / sum(forwards))


# Text


@pytest.fixture(scope="module")
def speaker(copycat):
    return EagleDecoder(copycat.target, copycat.head, tokenizer=Letters())


def test_text_in_text_out(speaker, copycat):
    got = speaker.generate("CDE", max_new_tokens=10, eos_token_ids=())
    assert (
        got.token_ids == copycat.generate([3, 4, 5], max_new_tokens=10, eos_token_ids=()).token_ids
    )
    assert got.text == Letters().decode(got.token_ids)
    many = speaker.generate(["CDE", "K"], max_new_tokens=10, eos_token_ids=())
    assert many.text[0] == got.text
    assert copycat.generate([3], max_new_tokens=2).text == ""


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_stop_strings_cut_before_themselves(speaker, size, at):
    text = speaker.generate("CDE", max_new_tokens=20, eos_token_ids=()).text
    if "\ufffd" in text[at : at + size]:
        pytest.skip("the text has no whole character there")
    stop = text[at : at + size]
    cut = text.index(stop)
    for run in (speaker.generate, speaker.generate_plain):
        got = run("CDE", max_new_tokens=20, eos_token_ids=(), stop=["~~", stop])
        assert got.text == text[:cut]
        assert got.finish_reason == "stop"
        # The token that completed the stop string is the last one.
        assert Letters().decode(got.token_ids).endswith(stop)
        assert Letters().decode(got.token_ids[:-1]).find(stop) == -1


def test_a_streams_pieces_are_the_text(speaker):
    settings = {"max_new_tokens": 20, "eos_token_ids": ()}
    whole = speaker.generate("CDE", **settings).text
    pieces = list(speaker.stream("CDE", **settings))
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    assert "".join(speaker.stream("CDE", plain=True, **settings)) == whole
    stop = whole[7:10]
    stopped = speaker.generate("CDE", stop=stop, **settings).text
    assert "".join(speaker.stream("CDE", stop=stop, **settings)) == stopped
    both = list(speaker.stream(["CDE", "K"], **settings))
    assert "".join(p[0] for p in both) == whole
    assert "".join(p[1] for p in both) == speaker.generate("K", **settings).text


def test_a_stream_of_token_ids_needs_no_text(speaker):
    pieces = list(speaker.stream([[3, 4], [5]], max_new_tokens=12, token_ids=True))
    whole = speaker.generate([[3, 4], [5]], max_new_tokens=12)
    assert [[t for p in pieces for t in p[r]] for r in (0, 1)] == whole.token_ids
    with pytest.raises(ValueError, match="token_ids: expected no stop strings"):
        speaker.stream([3], stop="x", token_ids=True)


def test_a_stream_can_be_left(speaker):
    settings = {"max_new_tokens": 20, "eos_token_ids": ()}
    stream = speaker.stream("CDE", **settings)
    next(stream)
    # Another call while the stream is open has caches of its own.
    expected = speaker.generate("K", **settings).text
    rest = "".join(stream)
    assert speaker.generate("CDE", **settings).text.endswith(rest)
    other = speaker.stream("CDE", **settings)
    next(other)
    other.close()
    assert speaker.generate("K", **settings).text == expected


def test_no_half_characters():
    stream = TextStream(Letters())
    assert [stream.push([t]) for t in (3, 50, 51, 52, 4)] == ["C", "", "", "€", "D"]
    assert stream.push([50]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_text_held_back_at_the_end_is_not_lost():
    stream = TextStream(Letters())
    assert stream.push([50, 3]) == "\ufffdC"


def test_a_beginning_of_a_stop_string_waits(speaker):
    whole = speaker.generate("CDE", max_new_tokens=20, eos_token_ids=()).text
    # The stop string begins like the text and then differs: nothing may be lost.
    stop = whole[3:6] + "~"
    pieces = list(speaker.stream("CDE", max_new_tokens=20, eos_token_ids=(), stop=stop))
    assert "".join(pieces) == whole


# Loading


def test_a_head_narrower_than_its_target_with_layers_of_its_choice():
    model = tiny_model(num_hidden_layers=4)
    config = replace(
        EagleConfig.from_target(model.config, 40),
        hidden_size=16,
        fc_bias=False,
        own_lm_head=True,
        target_hidden_size=32,
        aux_layers=(3, 0),
    )
    head = Eagle3Head(config, torch.randperm(61)[:40], dtype=torch.float64)
    head.reset_parameters()
    with pytest.raises(ValueError, match=r"expected an embedding of \[61, 16\], got \[61, 32\]"):
        EagleDecoder(model, head)
    head.set_embedding(torch.randn(61, 16))
    decoder = EagleDecoder(model, head)
    got = decoder.generate(PROMPTS, max_new_tokens=16, eos_token_ids=())
    plain = decoder.generate_plain(PROMPTS, max_new_tokens=16, eos_token_ids=())
    assert got.token_ids == plain.token_ids


@pytest.mark.parametrize("which", ["decoder", "copycat3"])
def test_both_models_from_directories(which, request, tmp_path):
    decoder = request.getfixturevalue(which)
    model = decoder.target.hf_model
    model.save_pretrained(tmp_path / "target")
    decoder.head.save(tmp_path / "draft")
    loaded = EagleDecoder.from_pretrained(
        tmp_path / "target", tmp_path / "draft", dtype=torch.float64, config=TreeConfig(8, 2, 3)
    )
    assert loaded.tokenizer is None
    assert loaded.target.dtype == loaded.head.fc.weight.dtype == torch.float64
    assert type(loaded.head) is type(decoder.head)
    expected = decoder.generate_plain(PROMPTS, max_new_tokens=12).token_ids
    assert loaded.generate(PROMPTS, max_new_tokens=12).token_ids == expected


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty"),  # 0 in float32
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"presence_penalty": 1e39}, "presence_penalty"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logprobs": "top"}, "logprobs"),
    ],
)
def test_sampling_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
    ],
)
def test_settings_that_are_no_numbers_are_named(name):
    value = {3: "1"} if name == "logit_bias" else "1"
    with pytest.raises(TypeError, match=f"{name}: expected a number.* got '1'"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["max_nodes", "top_k", "max_depth"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_tree_shapes_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        TreeConfig(**{name: value})


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "prompts"),
        ([[]], {}, r"prompts\[0\]"),
        ([[3], []], {}, r"prompts\[1\]"),
        ([3, 61], {}, r"\[0, 61\)"),
        ([3, -1], {}, r"\[0, 61\)"),
        ("text", {}, "tokenizer"),
        (None, {}, "prompts"),
        ([{"role": "user", "content": "hi"}], {}, r"prompts\[0\]: .*chat template"),
        ({"input_ids": [3]}, {}, 'prompts: .*take its "input_ids"'),
        ([3], {"stop": "x"}, "tokenizer"),
        ([3], {"stop": [""]}, "stop"),
        ([3], {"stop": 5}, "stop"),
        ([3], {"eos_token_ids": 2}, "eos_token_ids"),
        ([3], {"eos_token_ids": [2.5]}, "eos_token_ids"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens"),
        ([3], {"sampling": SamplingParams(logit_bias={61: 1.0})}, r"logit_bias: .*\[0, 61\)"),
        (
            [3],
            {"sampling": SamplingParams(logit_bias=dict.fromkeys(range(61), float("-inf")))},
            "logit_bias: expected a token that is not banned",
        ),
    ],
)
def test_calls_that_make_no_sense(decoder, prompts, settings, message):
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompts, **settings)


@pytest.mark.parametrize("name", ["config", "sampling"])
def test_settings_of_the_wrong_type_are_named(decoder, name):
    for call in (decoder.generate, decoder.stream, decoder.draft_step):
        with pytest.raises(TypeError, match=f"{name}: expected .*, got dict"):
            call([3], **{name: {"temperature": 1.0}})


def test_end_ids_may_be_a_tensor_and_top_k_any_size(decoder):
    first = decoder.generate([3], max_new_tokens=1, eos_token_ids=()).token_ids
    got = decoder.generate([3], max_new_tokens=9, eos_token_ids=torch.tensor(first))
    assert got.token_ids == first and got.finish_reason == "eos"
    all_tokens = SamplingParams(temperature=1.0, seed=1)
    many = SamplingParams(temperature=1.0, seed=1, top_k=2**40)
    results = [decoder.generate([3], max_new_tokens=9, sampling=s) for s in (all_tokens, many)]
    assert results[0].token_ids == results[1].token_ids


@pytest.mark.parametrize("name", ["num_beams", "repetition_penalty", "logits_processor"])
def test_what_generate_does_not_know_is_no_argument(decoder, name):
    with pytest.raises(TypeError, match=name):
        decoder.generate([3], **{name: 2})


def test_a_head_of_another_target_is_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="hidden_size"):
        EagleDecoder(model, tiny_head(tiny_model(hidden_size=16)))
    with pytest.raises(ValueError, match="vocab_size"):
        EagleDecoder(model, tiny_head(tiny_model(vocab_size=50)))


def test_tensors_are_prompts_too(decoder):
    expected = decoder.generate([3, 4], max_new_tokens=4).token_ids
    assert decoder.generate(torch.tensor([3, 4]), max_new_tokens=4).token_ids == expected
    assert decoder.generate(torch.tensor([[3, 4]]), max_new_tokens=4).token_ids == [expected]


def test_a_seed_is_drawn_and_reported(decoder):
    first = decoder.generate([3], max_new_tokens=6, sampling=SamplingParams(temperature=1.0))
    again = decoder.generate(
        [3],
        max_new_tokens=6,
        sampling=SamplingParams(temperature=1.0, seed=first.stats.seeds[0]),
    )
    assert again.token_ids == first.token_ids


def test_nothing_asks_for_gradients_or_changes_threads(decoder):
    threads = torch.get_num_threads()
    decoder.generate([3], max_new_tokens=3)
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert all(p.grad is None for p in decoder.target.hf_model.parameters())


# The draft


def naive_level(head, features, tokens, path, hidden_of):
    """The head's outputs along one path, by dense attention over prefix pairs and path.

    features [L, F] and tokens [L] are the true pairs; ``path`` the drafted tokens after the root.
    ``hidden_of`` caches outputs by path.
    """
    rows = [head.inputs(tokens, head.fuse(features))]
    positions = [torch.arange(len(tokens))]
    for depth in range(len(path)):
        parent = hidden_of[tuple(path[:depth])]
        rows.append(head.inputs(torch.tensor([path[depth]]), parent[None]))
        positions.append(torch.tensor([len(tokens) + depth]))
    x, where = torch.cat(rows), torch.cat(positions)
    q, k, v = head.project_qkv(x, where)
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    attn = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    return head.finish(x, attn)[-1]


@pytest.mark.parametrize("kind", ["EagleHead", "Eagle3Head"])
@pytest.mark.parametrize("config", [TreeConfig(16, 3, 4), TreeConfig(40, 5, 5)], ids=ids_of)
def test_draft_levels_equal_a_naive_recomputation(config, kind, monkeypatch):
    """Every kept node's probability, after several steps of re-feeding true features."""
    model = tiny_model(num_hidden_layers=7)
    head = tiny_head(model, [*range(0, 61, 2), 3, 11], kind=kind)
    decoder = EagleDecoder(model, head, config=config)
    prompt = PROMPTS[2]
    tokens = plain_tokens(decoder, prompt, 8)
    text = prompt + tokens
    trees = []

    verify = TreeStep.verify

    def spy(step, state, tree):
        trees.append((tree, state.prefix_lens.clone()))
        return verify(step, state, tree)

    monkeypatch.setattr(TreeStep, "verify", spy)
    decoder.generate(prompt, max_new_tokens=9, eos_token_ids=())
    assert len(trees) > 2
    head = decoder.head
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        # hidden_states[i + 1] is the output of layer i, the last one behind the final norm.
        read = [-1] if kind == "EagleHead" else [2, 3, 4]
        features = torch.cat([states[i][0] for i in read], dim=-1)
        for tree, prefix_lens in trees:
            length = int(prefix_lens[0])
            pairs = features[:length], torch.tensor(text[1 : length + 1])
            hidden_of, checked = {}, 0
            for slot in range(int(tree.num_nodes[0])):
                path, up = [], slot
                while up > 0:
                    path.insert(0, int(tree.draft_tokens[0, up]))
                    up = int(tree.parents[0, up])
                hidden_of[tuple(path)] = naive_level(head, *pairs, path, hidden_of)
                if path:
                    score = 0.0
                    for depth, token in enumerate(path):
                        logits = head.logits(hidden_of[tuple(path[:depth])])
                        draft_id = (head.draft_to_target == token).nonzero()[0, 0]
                        score += float(torch.log_softmax(logits, -1)[draft_id])
                    # norms are float32 in any dtype, and ours add in another order
                    assert score == pytest.approx(float(tree.scores[0, slot]), abs=1e-4)
                    checked += 1
            assert checked >= min(config.max_nodes, int(tree.num_nodes[0])) - 1


def test_a_draft_step_shows_all_candidates(copycat):
    config = TreeConfig(10, 4, 4)
    step = copycat.draft_step(PROMPTS[0], config=config)
    assert len(step.candidates) == config.num_candidates
    kept = [c for c in step.candidates if c.slot > 0]
    assert sorted(c.slot for c in kept) == list(range(1, int(step.tree.num_nodes[0])))
    for candidate in kept:
        slot = candidate.slot
        assert int(step.tree.draft_tokens[0, slot]) == candidate.token
        assert int(step.tree.depths[0, slot]) == candidate.level + 1
        parent = 0 if candidate.parent < 0 else step.candidates[candidate.parent].slot
        assert int(step.tree.parents[0, slot]) == parent
    tokens = plain_tokens(copycat, PROMPTS[0])
    assert int(step.tree.draft_tokens[0, 0]) == tokens[0]
    assert step.emitted == tokens[1 : 1 + len(step.accepted)]
    assert step.prompt == PROMPTS[0]


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9])
def test_a_level_is_drafted_while_its_frontier_is_likely_enough(copycat, threshold):
    depths = set()
    for prompt in PROMPTS:
        whole = copycat.draft_step(prompt, config=TreeConfig(9, 3, 5))
        step = copycat.draft_step(prompt, config=TreeConfig(9, 3, 5, stop_below=threshold))
        best = [
            max(c.probability for c in whole.candidates if c.level == level) for level in range(5)
        ]
        depth = next((i + 1 for i, p in enumerate(best) if p < threshold), 5)
        kept = [c._replace(slot=0) for c in whole.candidates if c.level < depth]
        assert [c._replace(slot=0) for c in step.candidates] == kept
        assert step.tree.depths.max() <= depth
        depths.add(depth)
    assert min(depths) < 5


# What a step costs


def test_all_steps_have_the_same_shapes(copycat, monkeypatch):
    """Down to the last one, where fewer tokens are wanted than a tree is deep."""
    shapes = []
    forward = type(copycat.target).forward

    def spy(self, cache, token_ids, position_ids, prefix_lens, **kwargs):
        tensors = (t for t in kwargs.values() if t is not None)
        shapes.append((token_ids.shape, position_ids.shape, *(t.shape for t in tensors)))
        return forward(self, cache, token_ids, position_ids, prefix_lens, **kwargs)

    monkeypatch.setattr(type(copycat.target), "forward", spy)
    copycat.generate(PROMPTS, max_new_tokens=20, eos_token_ids=())
    assert len(shapes) > 3
    assert len(set(shapes[1:])) == 1


def test_caches_are_reused_and_grow_only_between_calls(copycat):
    decoder = EagleDecoder(copycat.target, copycat.head)
    decoder.generate(PROMPTS[0], max_new_tokens=8)
    first = decoder._idle
    decoder.generate(PROMPTS[1], max_new_tokens=8)
    assert decoder._idle is first
    decoder.generate(PROMPTS, max_new_tokens=8)
    assert decoder._idle.target.batch == 3
    assert decoder.generate(PROMPTS[0], max_new_tokens=8).token_ids == plain_tokens(
        decoder, PROMPTS[0], 8
    )
    # Room for the longest sequence and a whole tree past it.
    decoder.generate(PROMPTS[0], max_new_tokens=240, config=TreeConfig(65, 8, 9))
    assert decoder._idle.target.capacity >= len(PROMPTS[0]) + 240 + 65


def test_stale_cache_contents_do_not_matter(copycat):
    expected = copycat.generate(PROMPTS, max_new_tokens=20).token_ids
    cache, draft_cache = copycat._idle.target, copycat._idle.draft
    with torch.inference_mode():
        for tensor in (*cache.tensors, draft_cache.k, draft_cache.v):
            tensor.fill_(float("nan"))
    assert copycat.generate(PROMPTS, max_new_tokens=20).token_ids == expected


def test_public_names():
    assert ek.EagleDecoder is EagleDecoder
    assert ek.TreeConfig is TreeConfig
    assert ek.SamplingParams is SamplingParams


def test_models_converted_between_calls_get_new_caches():
    decoder = copycat_decoder(0.5)
    tokens = decoder.generate([5, 6, 7], max_new_tokens=6).token_ids
    decoder.target.hf_model.float()
    decoder.head.float()
    assert decoder.generate([5, 6, 7], max_new_tokens=6).token_ids == tokens
