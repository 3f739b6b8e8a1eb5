"""TargetModel against the model's own forward: chunks, ragged batches, trees; what it refuses."""

import threading
import warnings

import pytest
import torch
from tiny_models import BASE, GEMMA, MODELS, MOE, randomized, tiny_head, tiny_model

from eagle2_kernels import EagleDecoder, TargetModel, TreeConfig, flatten_tree

transformers = pytest.importorskip("transformers")

# Norms of these models round to float32 whatever the dtype, and two orders of float64 sums may
# round there to neighbours.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def tokens(n, seed=0, vocab=61):
    return torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def own_forward(model, ids):
    """The model's own logits and features of one whole sequence, [T, V] and [T, H]."""
    implementation = model.config._attn_implementation
    if getattr(model.config, "attn_logit_softcapping", None):
        # sdpa leaves the softcap out; eager is what the model's authors mean
        model.set_attn_implementation("eager")
    out = model(ids[None], output_hidden_states=True, use_cache=False)
    model.set_attn_implementation(implementation)
    return out.logits[0], out.hidden_states[-1][0]


@torch.inference_mode()
def decode(target, ids, cuts, capacity=None):
    """Logits and features of one sequence fed in pieces that end at ``cuts``."""
    cache = target.new_cache(1, capacity or len(ids))
    features, start = [], 0
    for end in [*cuts, len(ids)]:
        features.append(
            target.forward(cache, ids[None, start:end], torch.arange(start, end)[None], lens(start))
        )
        start = end
    features = torch.cat(features, dim=1)[0]
    return target.logits(features), features


@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_a_sequence_equal_the_models_own_forward(name):
    model = tiny_model(name)
    ids = tokens(24)
    logits, features = decode(TargetModel(model), ids, (9, 10, 11))
    expected_logits, expected_features = own_forward(model, ids)
    torch.testing.assert_close(features, expected_features, **TOLERANCE)
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2"])
def test_every_node_of_a_tree_equals_its_own_path(name):
    model = tiny_model(name)
    target = TargetModel(model)
    # Siblings, a branch longer than the sliding windows, a late slot's leaf on an early branch.
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 3, 6, 7, 2, 5, 8]], dtype=torch.int32)
    prefix, nodes = tokens(11), tokens(parents.shape[1], seed=1)
    n = parents.shape[1]
    tree = flatten_tree(parents, lens(n), lens(len(prefix)))
    depths, positions, mask = tree[0], tree[1], tree[-1]
    cache = target.new_cache(1, len(prefix) + n)
    with torch.inference_mode():
        target.forward(cache, prefix[None], torch.arange(len(prefix))[None], lens(0))
        features = target.forward(
            cache,
            nodes[None],
            positions,
            lens(len(prefix)),
            tree_mask=mask,
            depths=depths,
            lengths=lens(n),
        )[0]
    for slot in range(n):
        path = [slot]
        while path[0] > 0:
            path.insert(0, int(parents[0, path[0]]))
        expected = own_forward(model, torch.cat([prefix, nodes[path]]))[1][-1]
        torch.testing.assert_close(features[slot], expected, **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_tapped_layers_are_the_models_hidden_states(name):
    """The outputs of layers, before any norm, from the forward that brings the features."""
    model = tiny_model(name)
    target = TargetModel(model)
    ids = tokens(13)[None]
    args = (ids, torch.arange(13)[None], lens(0))
    features, tapped = target.forward_tapped((1, 0), target.new_cache(1, 13), *args)
    assert torch.equal(features, target.forward(target.new_cache(1, 13), *args))
    last, first = tapped.chunk(2, dim=-1)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    expected = model(ids, output_hidden_states=True, use_cache=False).hidden_states[1]
    torch.testing.assert_close(first, expected, **TOLERANCE)
    # Of the last layer, transformers shows what its final norm makes of it.
    norms = ("norm", "final_layer_norm", "ln_f")
    norm = next(m for n in norms if (m := getattr(target._base, n, None)) is not None)
    torch.testing.assert_close(norm(last), features, **TOLERANCE)


def test_layers_that_are_not_there_cannot_be_tapped():
    target = TargetModel(tiny_model())
    args = (target.new_cache(1, 2), torch.tensor([[3, 4]]), torch.arange(2)[None], lens(0))
    with pytest.raises(ValueError, match=r"taps: expected layers in \[0, 2\), got \[2, -1\]"):
        target.forward_tapped((2, 0, -1), *args)
    # Nothing is left behind in the model by a forward that fails.
    with pytest.raises(IndexError):
        target.forward_tapped((0,), target.new_cache(1, 2), torch.tensor([[99]]), *args[2:])
    assert not any(block._forward_hooks for block in target._blocks)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_ragged_rows_equal_their_unpadded_runs(name):
    """Positions belong to each row: the longest row's must not be used for all."""
    model = tiny_model(name)
    target = TargetModel(model)
    rows = [tokens(n, seed=n) for n in (13, 1, 8)]
    padded = torch.zeros(3, 13, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    lengths = lens(13, 1, 8)
    positions = torch.minimum(torch.arange(13), lengths.long()[:, None] - 1)
    cache = target.new_cache(3, 16)
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    with torch.inference_mode():
        first = target.forward(cache, padded, positions, lens(0, 0, 0), lengths=lengths)
        more = torch.tensor([[5, 6], [7, 8], [9, 10]])
        second = target.forward(cache, more, lengths.long()[:, None] + torch.arange(2), lengths)
    for i, row in enumerate(rows):
        expected = own_forward(model, torch.cat([row, more[i]]))[1]
        got = torch.cat([first[i, : len(row)], second[i]])
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_padding_rows_store_nothing():
    target = TargetModel(tiny_model())
    cache = target.new_cache(2, 8)
    for tensor in cache.tensors:
        tensor.fill_(7.0)
    with torch.inference_mode():
        target.forward(
            cache,
            torch.full((2, 3), 5),
            torch.arange(3).repeat(2, 1),
            lens(2, 2),
            lengths=lens(1, 0),
        )
    for tensor in cache.tensors:
        changed = (tensor != 7.0).flatten(2).any(-1)
        assert changed.nonzero().tolist() == [[0, 2]]


def test_a_prompt_of_1800_tokens_in_chunks_beside_a_short_one():
    model = tiny_model("mistral", max_position_embeddings=2048, sliding_window=300)
    target = TargetModel(model)
    long, short = tokens(1800), tokens(700, seed=1)
    batch = torch.zeros(2, 1800, dtype=torch.int64)
    batch[0], batch[1, :700] = long, short
    totals = lens(1800, 700)
    cache = target.new_cache(2, 1802)
    kept = [[], []]
    with torch.inference_mode():
        for start in range(0, 1800, 512):
            end = min(start + 512, 1800)
            lengths = (totals - start).clamp(0, end - start)
            columns = torch.arange(start, end)
            features = target.forward(
                cache,
                batch[:, start:end],
                torch.minimum(columns, totals.long()[:, None] - 1),
                totals.clamp(max=start),
                lengths=lengths,
            )
            for row in range(2):
                kept[row].append(features[row, : int(lengths[row])])
    for row, ids in enumerate((long, short)):
        torch.testing.assert_close(torch.cat(kept[row]), own_forward(model, ids)[1], **TOLERANCE)


def test_the_models_own_attention_is_what_it_was():
    model = tiny_model()
    ids = tokens(6)
    before = own_forward(model, ids)[0]
    generated = model.generate(ids[None], max_new_tokens=4, do_sample=False)
    with warnings.catch_warnings():
        # no deprecated name of a cache argument, no complaint about a mask
        warnings.simplefilter("error")
        decode(TargetModel(model), ids, (3,))
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(own_forward(model, ids)[0], before)
    assert torch.equal(model.generate(ids[None], max_new_tokens=4, do_sample=False), generated)


def test_it_is_restored_when_a_forward_fails():
    model = tiny_model()
    target = TargetModel(model)
    with pytest.raises(Exception):  # noqa: B017
        target.forward(target.new_cache(1, 4), torch.full((1, 2), 5), None, "no tensor")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("tapped", [False, True])
def test_two_threads_take_turns(tapped):
    """The second would find the model's own attention put back by the first, and its hooks."""
    target = TargetModel(tiny_model(), fuse_layers=False)
    ids = {"first": tokens(4, seed=1)[None], "second": tokens(7, seed=2)[None]}

    def run(ids):
        width = ids.shape[1]
        args = target.new_cache(1, 16), ids, torch.arange(width)[None], lens(0)
        with torch.inference_mode():
            if tapped:
                return torch.cat(target.forward_tapped((0, 1), *args), dim=-1)
            return target.forward(*args)

    alone = {name: run(each) for name, each in ids.items()}
    got = {}
    second = threading.Thread(target=lambda: got.update(second=run(ids["second"])))
    entered, first_left = threading.Event(), threading.Event()

    def meet(module, inputs):
        if threading.current_thread() is second:
            entered.set()
            first_left.wait(5)
        elif not second.is_alive():
            second.start()
            entered.wait(0.3)

    handle = target.hf_model.model.layers[0].register_forward_pre_hook(meet)
    got["first"] = run(ids["first"])
    first_left.set()
    second.join()
    handle.remove()
    assert {name: torch.equal(got[name], alone[name]) for name in ids} == dict.fromkeys(ids, True)
    assert target.hf_model.config._attn_implementation == "sdpa"


def test_longrope_ends_where_its_factors_would_depend_on_other_rows():
    """Behind it a forward takes other factors for all its rows, by the deepest of them."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    length = {"original_max_position_embeddings": 20}
    model = tiny_model(dtype=torch.float32, rope_parameters=rope | factors | length)
    target = TargetModel(model)
    assert target.max_positions == 20
    decoder = EagleDecoder(target, tiny_head(model), config=TreeConfig(12, 3, 3))
    for seed in range(4):
        prompt = tokens(5, seed).tolist()
        asked = {"max_new_tokens": 40, "eos_token_ids": ()}
        tree, plain = decoder.generate(prompt, **asked), decoder.generate_plain(prompt, **asked)
        assert tree.token_ids == plain.token_ids and len(tree.token_ids) == 15


def test_what_the_target_tells_about_the_model():
    target = TargetModel(tiny_model("gemma3"))
    assert (target.hidden_size, target.vocab_size, target.num_layers) == (32, 61, 2)
    assert (target.max_positions, target.dtype) == (256, torch.float64)
    assert target.eos_token_ids() == [2]
    cache = target.new_cache(3, 10)
    assert len(cache.tensors) == 4
    assert cache.tensors[0].shape == (3, 10, 2, 16)
    assert cache.narrow(2).batch == 2


def refused():
    yield "mamba", "MambaConfig", "MambaForCausalLM", {}, "recurrent state"
    yield "jamba", "JambaConfig", "JambaForCausalLM", {"num_experts": 2}, "recurrent state"
    yield (
        "no interface",
        "BloomConfig",
        "BloomForCausalLM",
        {"n_layer": 2, "n_head": 4},
        "Interface",
    )
    yield (
        "other V head dim",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "first_k_dense_replace": 2,
        },
        "one head dim",
    )
    yield (
        "chunked attention",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
            "moe_layers": [],
        },
        "neither causal nor a sliding window",
    )
    yield (
        "bidirectional",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA | {"use_bidirectional_attention": True},
        "not causal",
    )
    yield "encoder-decoder", "T5Config", "T5ForConditionalGeneration", {}, "encoder-decoder"


@pytest.mark.parametrize(
    ("config_name", "model_name", "settings", "message"),
    [pytest.param(*case[1:], id=case[0]) for case in refused()],
)
def test_models_it_cannot_honour_are_refused(config_name, model_name, settings, message):
    model = getattr(transformers, model_name)(
        getattr(transformers, config_name)(**(BASE | settings))
    )
    with pytest.raises(ValueError, match=message):
        TargetModel(model.eval())


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="eval"):
        TargetModel(tiny_model().train())


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="causal LM"):
        TargetModel(torch.nn.Linear(2, 2))


def test_attention_outside_a_call_says_so():
    model = tiny_model()
    TargetModel(model)
    model.config._attn_implementation = "eagle2_slots"
    with pytest.raises(RuntimeError, match="inside TargetModel"):
        model(torch.tensor([[3, 4]]))


def test_attention_sinks():
    settings = {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    }
    config = transformers.GptOssConfig(**(BASE | settings))
    # experts of this model have no float64 kernel
    model = randomized(transformers.GptOssForCausalLM(config), 0).eval()
    target = TargetModel(model)
    assert [layer.window for layer in target._layers] == [4, None]
    ids = tokens(12)
    features = decode(target, ids, (5, 6))[1]
    torch.testing.assert_close(features, own_forward(model, ids)[1], rtol=1e-3, atol=1e-3)
    for layer in model.model.layers:
        layer.self_attn.sinks.data += 3
    changed = decode(target, ids, (5, 6))[1]
    assert not torch.allclose(changed, features, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(changed, own_forward(model, ids)[1], rtol=1e-3, atol=1e-3)


def test_mixture_of_experts():
    config = transformers.Qwen3MoeConfig(**(BASE | MOE | {"head_dim": 8}))
    model = randomized(transformers.Qwen3MoeForCausalLM(config), 0).eval()
    ids = tokens(12)
    logits, _ = decode(TargetModel(model), ids, (5, 6))
    torch.testing.assert_close(logits, own_forward(model, ids)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_probe_finds_what_it_promises(dtype):
    """From R rows on, a row of every linear layer has the same bits."""
    model = tiny_model(dtype=dtype)
    target = TargetModel(model)
    floor = target.row_invariant_rows()
    assert floor in (1, 2, 4, 8, None)
    assert target.row_invariant_rows() == floor
    if floor is None:
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            x = torch.randn(1, 32, module.in_features).to(dtype)
            full = module(x)
            for n in range(floor, 32):
                assert torch.equal(module(x[:, :n]), full[:, :n])
