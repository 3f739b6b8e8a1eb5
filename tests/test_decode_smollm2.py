"""The demo's own model: what identical means in float32 and bfloat16.

Matrix products of one row may round differently from those of a tree. So plain decoding is padded
to the tree's row count, or to the smallest one from which this machine's linear layers give a row
the same bits; then attention by rows in path order leaves nothing that could differ.
"""

import random

import pytest
import torch

from eagle2_kernels import EagleDecoder, EagleHead, SamplingParams, TreeConfig
from eagle2_kernels.generation import TextStream, decode_text

pytest.importorskip("transformers")
from eagle2_kernels import demo

NEW_TOKENS = 24
QUESTION = "Write one paragraph about why the sea is salty."


@pytest.fixture(scope="module")
def tokenizer():
    try:
        return demo.load_tokenizer()
    except demo.DemoUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prompt(tokenizer):
    chat = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


def load(dtype, tokenizer):
    target = demo.load_target(dtype)
    if (demo.demo_head_dir() / "config.json").is_file():
        head = EagleHead.from_pretrained(demo.demo_head_dir(), target=target)
    else:
        head = EagleHead.from_target(target, list(range(8192)))
    return EagleDecoder(target, head.eval(), tokenizer)


@pytest.fixture(scope="module")
def bf16(tokenizer):
    return load(torch.bfloat16, tokenizer)


@pytest.fixture(scope="module")
def float32(tokenizer):
    return load(torch.float32, tokenizer)


@pytest.fixture(scope="module")
def bf16_plain(bf16, prompt):
    """Plain decoding in forwards of the probe's row count (one row where it found none)."""
    rows = bf16.target.row_invariant_rows() or 1
    return bf16.generate_plain(prompt, pad_rows=rows, max_new_tokens=NEW_TOKENS, keep_logits=True)


def assert_divergence_is_legal(plain, tree):
    """The first difference lies where the two best logits are closer than the forwards' error."""
    for i, (a, b) in enumerate(zip(plain.token_ids, tree.token_ids, strict=False)):
        if a != b:
            one, many = plain.logits[i].float(), tree.logits[i].float()
            best = one.topk(2).values
            assert float(best[0] - best[1]) <= 2 * float((one - many).abs().max())
            return
    assert plain.token_ids == tree.token_ids


@pytest.mark.parametrize(
    "config", [TreeConfig(16, 4, 4), TreeConfig(32, 8, 6)], ids=["16 nodes", "32 nodes"]
)
def test_bf16_trees_give_plain_decodings_bits(bf16, bf16_plain, prompt, config, record_property):
    rows = bf16.target.row_invariant_rows()
    record_property("row_invariant_rows", rows)
    tree = bf16.generate(prompt, config=config, max_new_tokens=NEW_TOKENS, keep_logits=True)
    if rows is None:
        assert_divergence_is_legal(bf16_plain, tree)
        return
    assert tree.token_ids == bf16_plain.token_ids
    assert torch.equal(tree.logits, bf16_plain.logits)


def test_bf16_sampled_trees_give_plain_decodings_bits(bf16, prompt):
    rows = bf16.target.row_invariant_rows()
    if rows is None:
        pytest.skip("linear layers of this machine round by row count")
    settings = {
        "max_new_tokens": NEW_TOKENS,
        "keep_logits": True,
        "sampling": SamplingParams(
            temperature=0.8,
            top_p=0.95,
            seed=1,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            logprobs="processed",
        ),
    }
    tree = bf16.generate(prompt, config=TreeConfig(32, 8, 6), **settings)
    plain = bf16.generate_plain(prompt, pad_rows=rows, **settings)
    assert tree.token_ids == plain.token_ids
    assert torch.equal(tree.logits, plain.logits)
    assert tree.logprobs == plain.logprobs


def test_bf16_divergence_from_one_row_decoding_is_legal(bf16, prompt):
    settings = {"max_new_tokens": NEW_TOKENS, "keep_logits": True}
    plain = bf16.generate_plain(prompt, **settings)
    assert_divergence_is_legal(plain, bf16.generate(prompt, **settings))


def test_float32_tree_equals_plain_with_as_many_rows(float32, prompt):
    decoder = float32
    config = TreeConfig(16, 4, 4)
    settings = {"max_new_tokens": NEW_TOKENS, "keep_logits": True}
    rows = decoder.target.row_invariant_rows()
    tree = decoder.generate(prompt, config=config, **settings)
    plain = decoder.generate_plain(prompt, pad_rows=rows or config.max_nodes, **settings)
    assert tree.token_ids == plain.token_ids
    torch.testing.assert_close(tree.logits, plain.logits, rtol=1e-3, atol=1e-3)
    if rows is not None:
        assert torch.equal(tree.logits, plain.logits)


def test_plain_is_what_hugging_face_generates(float32, prompt):
    decoder = float32
    plain = decoder.generate_plain(prompt, max_new_tokens=NEW_TOKENS, keep_logits=True)
    ids = torch.tensor([prompt])
    out = decoder.target.hf_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert out[0, len(prompt) :].tolist() == plain.token_ids


def test_pieces_of_text_join_to_the_text(tokenizer):
    """Characters of several tokens, broken bytes, words with a space before them."""
    rng = random.Random(0)
    for trial in range(60):
        if trial % 2:
            ids = [rng.randrange(20, 300 if trial % 3 else 49152) for _ in range(20)]
        else:
            text = "".join(rng.choice("aé世🙂 \n日 ñ👩‍👧ß") for _ in range(20))
            ids = tokenizer(text)["input_ids"]
        stream = TextStream(tokenizer)
        pieces = [stream.push([i]) for i in ids]
        assert "".join(pieces) + stream.flush() == decode_text(tokenizer, ids)


def test_streamed_text_is_the_text(bf16, prompt):
    whole = bf16.generate(prompt, max_new_tokens=12).text
    assert "".join(bf16.stream(prompt, max_new_tokens=12)) == whole
    assert len(whole) > 20
