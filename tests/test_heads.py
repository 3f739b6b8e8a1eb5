"""Draft heads: their formula, their vocabulary, the target they are bound to."""

import math

import pytest
import torch

from eagle2_kernels.models.draft import HeadDrafter, new_draft_cache, refeed
from eagle2_kernels.models.heads import Eagle3Head, EagleConfig, EagleHead

transformers = pytest.importorskip("transformers")


def tiny_target(seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **changes,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def deep_target():
    return tiny_target(num_hidden_layers=7)


def plain_head(head, tokens, feature_of, row):
    """g of one row, scalar loops over heads and keys, in float64 and without the module's code.

    feature_of[j] is the feature that row j was fed; keys are rows 0 .. row.
    """
    w = {k: v.double() for k, v in head.state_dict().items() if v.is_floating_point()}
    c = head.config
    group = c.num_attention_heads // c.num_key_value_heads

    def inputs(j):
        x = torch.cat((head.embed_weight[tokens[j]].double(), feature_of[j].double()))
        return w["fc.weight"] @ x + w.get("fc.bias", 0)

    def rotated(vector, position):
        half = c.head_dim // 2
        out = vector.clone()
        for j in range(half):
            angle = position * c.rope_theta ** (-2 * j / c.head_dim)
            a, b = vector[j], vector[j + half]
            out[j] = a * math.cos(angle) - b * math.sin(angle)
            out[j + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def heads_of(name, x):
        prefix = f"layers.0.self_attn.{name}_proj"
        y = w[prefix + ".weight"] @ x + w.get(prefix + ".bias", 0)
        return y.view(-1, c.head_dim)

    x = inputs(row)
    attn = []
    for h in range(c.num_attention_heads):
        q = rotated(heads_of("q", x)[h], row)
        scores, values = [], []
        for j in range(row + 1):
            xj = inputs(j)
            scores.append(q @ rotated(heads_of("k", xj)[h // group], j) / c.head_dim**0.5)
            values.append(heads_of("v", xj)[h // group])
        attn.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
    h = x + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(attn)
    n = h / (h.square().mean() + c.rms_norm_eps).sqrt()
    n = n * w["layers.0.post_attention_layernorm.weight"]
    gate = w["layers.0.mlp.gate_proj.weight"] @ n
    up = w["layers.0.mlp.up_proj.weight"] @ n
    return h + w["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def random_text(target, length=9, batch=1, seed=1, taps=1):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, target.config.vocab_size, (batch, length), generator=g)
    features = torch.randn(batch, length, taps * target.config.hidden_size, generator=g)
    return tokens, features


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "qkv-bias"])
def test_first_level_equals_a_plain_computation(bias):
    target = tiny_target(attention_bias=bias)
    head = EagleHead.from_target(target, seed=3)
    assert head.config.attention_bias is bias
    with torch.no_grad():
        for name, p in head.named_parameters():
            if name.endswith("bias"):
                p.normal_()
        tokens, features = random_text(target)
        out = head.forward_train(tokens, features)[0]
        for row in (0, 1, 8):
            expected = plain_head(head, tokens[0], features[0], row)
            torch.testing.assert_close(out[0, row].double(), expected, rtol=2e-5, atol=2e-5)


def test_recursive_levels_see_what_a_draft_sees(target):
    head = EagleHead.from_target(target, seed=4)
    tokens, features = random_text(target)
    with torch.no_grad():
        levels = head.forward_train(tokens, features, steps=3)
        row = 6
        for depth in (1, 2):
            # A draft of depth `depth` whose last row is `row`: true features up to row - depth,
            # then the head's own outputs, one after the other.
            fed = features[0].clone()
            for j in range(row - depth, row):
                fed[j + 1] = plain_head(head, tokens[0], fed, j)
            expected = plain_head(head, tokens[0], fed, row)
            torch.testing.assert_close(
                levels[depth][0, row].double(), expected, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("kind", [EagleHead, Eagle3Head])
@torch.no_grad()
def test_training_levels_equal_a_drafted_chain(deep_target, kind):
    """Level s of row i is what the decode loop computes s - 1 drafts behind true row i - s + 1."""
    head = kind.from_target(deep_target, seed=6)
    tokens, features = random_text(deep_target, taps=head.feature_size // 32)
    levels = head.forward_train(tokens, features, steps=4)
    for true in (1, 4):
        cache = new_draft_cache(head, 1, 9)
        count = torch.tensor([true], dtype=torch.int32)
        nothing, row = torch.zeros_like(count), torch.zeros(1, 1, dtype=torch.int32)
        hidden = refeed(head, cache, tokens[:, :true], features[:, :true], nothing, count)
        drafter = HeadDrafter(head, cache, count, hidden[:, -1:])
        torch.testing.assert_close(drafter.root()[0, 0], head.logits(levels[0][0, true - 1]))
        for step in range(3):
            mask = torch.tensor([[[2 ** (step + 1) - 1]]])
            at = true + step
            logits = drafter.level(tokens[:, at : at + 1].contiguous(), row, mask, step)
            expected = head.logits(levels[step + 1][0, at])
            torch.testing.assert_close(logits[0, 0], expected, rtol=1e-4, atol=1e-4)


def test_training_forward_ignores_padding_and_later_tokens(target):
    head = EagleHead.from_target(target)
    tokens, features = random_text(target)
    with torch.no_grad():
        whole = head.forward_train(tokens, features, steps=2)
        short = head.forward_train(tokens[:, :5], features[:, :5], steps=2)
    for a, b in zip(whole, short, strict=True):
        torch.testing.assert_close(a[:, :5], b, rtol=1e-5, atol=1e-5)


def test_primitives_make_up_the_training_forward(target):
    head = EagleHead.from_target(target)
    tokens, features = random_text(target, batch=2)
    with torch.no_grad():
        x = head.inputs(tokens, features)
        q, k, v = head.project_qkv(x, torch.arange(9))
        assert q.shape == (2, 9, 4, 8) and k.shape == v.shape == (2, 9, 2, 8)
        attn = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2).repeat_interleave(2, 1),
            v.transpose(1, 2).repeat_interleave(2, 1),
            is_causal=True,
        )
        out = head.finish(x, attn.transpose(1, 2))
        torch.testing.assert_close(out, head.forward_train(tokens, features)[0])


def test_steps_below_one_are_refused(target):
    head = EagleHead.from_target(target)
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        head.forward_train(*random_text(target), steps=0)


def test_rope_is_the_targets_rotation(target):
    head = EagleHead.from_target(target)
    positions = torch.tensor([[0, 1, 77]])
    cos, sin = target.model.rotary_emb(torch.zeros(1, 3, 8), positions)
    ours = head.rope(positions)
    torch.testing.assert_close(ours[0].squeeze(-2), cos)
    torch.testing.assert_close(ours[1].squeeze(-2), sin)


def test_casting_keeps_rotation_frequencies_in_float32(target):
    head = EagleHead.from_target(target)
    before = head.inv_freq.clone()
    head.to(torch.bfloat16)
    assert head.inv_freq.dtype == torch.float32
    assert torch.equal(head.inv_freq, before)


def test_draft_logits_are_rows_of_the_full_logits(target):
    ids = [90, 3, 17, 4, 5]
    head = EagleHead.from_target(target, ids)
    hidden = torch.randn(2, 3, 32)
    with torch.no_grad():
        full = target.lm_head(hidden)
        torch.testing.assert_close(head.logits(hidden), full[..., ids])
        torch.testing.assert_close(EagleHead.from_target(target).logits(hidden), full)
    assert head.draft_to_target.tolist() == ids
    assert head.lm_head_weight.is_contiguous()


def test_embedding_is_shared_with_the_target(target):
    head = EagleHead.from_target(target)
    weight = target.get_input_embeddings().weight
    assert head.embed_weight.data_ptr() == weight.data_ptr()
    assert not head.embed_weight.requires_grad


@pytest.mark.parametrize(
    ("vocab", "error", "match"),
    [
        (8, TypeError, "got a bare int"),
        ([4, 1, 1], ValueError, r"draft_vocab\[2\]: .* got 1, which draft_vocab\[1\] is too"),
        ([0, 97], ValueError, r"draft_vocab\[1\]: expected a value from 0 to 96, got 97"),
        ([], ValueError, r"draft_vocab: expected at least one target id, .* got shape \(0,\)"),
    ],
    ids=["count", "repeated", "out-of-range", "empty"],
)
def test_bad_draft_vocabularies_are_refused(target, vocab, error, match):
    with pytest.raises(error, match=match):
        EagleHead.from_target(target, vocab)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([5, 2, 5], r"draft_to_target\[2\]: .* got 5, which draft_to_target\[0\] is too"),
        ([5, -1, 60], r"draft_to_target\[1\]: expected a value from 0 to 96, got -1"),
        ([5, 2, 97], r"draft_to_target\[2\]: .* got 97"),
        ([[5], [2], [60]], r"in one dimension, got shape \(3, 1\)"),
    ],
    ids=["repeated", "negative", "past the vocabulary", "two dimensions"],
)
def test_a_head_is_not_made_with_a_bad_vocabulary_map(target, ids, match):
    good = EagleHead.from_target(target, [5, 2, 60])
    with pytest.raises(ValueError, match=match):
        EagleHead(good.config, torch.tensor(ids))
    with pytest.raises(TypeError, match="draft_to_target: expected integer target ids, got float"):
        EagleHead(good.config, torch.tensor(ids).float())


def test_binding_to_another_width_is_refused(target):
    head = EagleHead.from_target(target)
    with pytest.raises(ValueError, match=r"expected an embedding of \[97, 32\]"):
        head.bind(tiny_target(hidden_size=16))


def test_an_eagle3_head_reads_three_layers(deep_target):
    head = Eagle3Head.from_target(deep_target, [7, 3, 5])
    assert head.feature_size == 96 and head.fc.weight.shape == (32, 96)
    assert [head.taps(n) for n in (7, 30, 32)] == [(1, 2, 3), (1, 14, 26), (1, 15, 28)]
    assert EagleHead.from_target(deep_target).taps(7) is None
    # It starts from the target's rows, and goes its own way from there.
    rows = deep_target.lm_head.weight[[7, 3, 5]]
    assert torch.equal(head.lm_head.weight, rows)
    assert head.lm_head.weight.requires_grad
    assert "lm_head.weight" in head.state_dict()
    assert head.lm_head_weight is None


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_too_few_layers_are_refused_with_the_reason(layers):
    with pytest.raises(ValueError, match=rf"at least 7 layers .* below 7\), got {layers}"):
        Eagle3Head.from_target(tiny_target(num_hidden_layers=layers))


def test_own_parts_survive_binding(deep_target):
    head = Eagle3Head.from_target(deep_target)
    own = torch.randn(97, 32)
    head.embed_scale = 3.0
    head.set_embedding(own)
    with torch.no_grad():
        head.lm_head.weight.fill_(2.0)
    head.bind(deep_target)
    assert torch.equal(head.embed(torch.tensor([5, 96])), own[[5, 96]])
    assert torch.equal(head.lm_head.weight, torch.full((97, 32), 2.0))


def test_unbound_head_says_so(target):
    head = EagleHead(EagleConfig.from_target(target.config))
    with pytest.raises(RuntimeError, match=r"call head\.bind"):
        head.embed(torch.tensor([1]))
    with pytest.raises(RuntimeError, match=r"call head\.bind"):
        head.logits(torch.zeros(1, 32))
