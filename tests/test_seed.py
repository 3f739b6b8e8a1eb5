"""The seed's two functions, called as the seed wrote them."""

import inspect

import pytest
import torch
from tiny_models import tiny_head, tiny_model

from eagle2_kernels import (
    DraftTree,
    EagleDecoder,
    SamplingParams,
    TreeConfig,
    eagle2_generate_tree,
    verify_with_target,
)
from eagle2_kernels.tree import check_tree

pytest.importorskip("transformers")

PROMPT = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture(scope="module")
def target_model():
    return tiny_model()


def last_hidden(model, token_ids):
    with torch.no_grad():
        return model(token_ids, output_hidden_states=True).hidden_states[-1]


def features_of(model, token_ids, kind):
    """What a head of this kind reads: the last hidden state, or the outputs of layers 1, 2, 3."""
    if kind == "EagleHead":
        return last_hidden(model, token_ids)
    with torch.no_grad():
        return torch.cat(model(token_ids, output_hidden_states=True).hidden_states[2:5], dim=-1)


def plain_draft(hidden_states, token_ids):
    """A plain callable: its logits hang on the last token, its hidden state on nothing."""
    weights = torch.linspace(-3, 3, 61 * 61, dtype=torch.float64).sin() * 4
    table = weights.reshape(61, 61)
    return table[token_ids[:, -1:]], hidden_states[:, -1:]


def oracle_of(model):
    """The target itself, sharpened, as draft model: its own next token is its one guess."""

    def draft(hidden_states, token_ids):
        out = model(token_ids, output_hidden_states=True)
        return out.logits[:, -1:] * 20, out.hidden_states[-1][:, -1:]

    return draft


def greedy(model, token_ids, count):
    out = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return out[0, token_ids.shape[1] :].tolist()


def test_names_arguments_and_defaults_are_the_seeds():
    parameters = inspect.signature(eagle2_generate_tree).parameters
    assert list(parameters) == [
        "draft_model",
        "hidden_states",
        "token_ids",
        "max_nodes",
        "top_k",
        "max_depth",
    ]
    assert [parameters[n].default for n in ("max_nodes", "top_k", "max_depth")] == [8, 4, 4]
    assert list(inspect.signature(verify_with_target).parameters)[:2] == ["target_model", "tree"]


def test_the_calls_as_written(target_model):
    hidden_states = last_hidden(target_model, PROMPT)[:, :-1]
    tree = eagle2_generate_tree(plain_draft, hidden_states, PROMPT)
    assert isinstance(tree, DraftTree)
    assert int(tree.num_nodes) == 8
    assert int(tree.depths.max()) <= 4
    check_tree(tree, torch.tensor([4]))
    assert torch.equal(tree.prefix_ids, PROMPT[:, :-1])
    assert int(tree.draft_tokens[0, 0]) == 7

    paths = tree.paths()[0]
    assert all(len(path.tokens) == path.depth for path in paths)
    assert [p.probability for p in paths] == sorted((p.probability for p in paths), reverse=True)

    result = verify_with_target(target_model, tree)
    assert result.tokens[0] == greedy(target_model, PROMPT, len(result.tokens[0]))
    assert 0 <= result.acceptance_rate[0] <= 1


def test_a_path_is_as_probable_as_its_tokens(target_model):
    tree = eagle2_generate_tree(plain_draft, last_hidden(target_model, PROMPT)[:, :-1], PROMPT, 20)
    for path in tree.paths(leaves_only=False)[0]:
        probability, last = 1.0, 7
        for token in path.tokens:
            logits, _ = plain_draft(torch.zeros(1, 1, 1), torch.tensor([[last]]))
            probability *= float(torch.softmax(logits[0, 0], -1)[token])
            last = token
        assert path.probability == pytest.approx(probability, rel=1e-4)


def test_the_kept_nodes_are_the_most_probable(target_model):
    """Against a search of the whole tree that top_k branches span."""
    hidden_states = last_hidden(target_model, PROMPT)[:, :-1]
    tree = eagle2_generate_tree(plain_draft, hidden_states, PROMPT, max_nodes=10, top_k=4)
    every = []

    def expand(path, probability):
        last = path[-1] if path else 7
        logits, _ = plain_draft(torch.zeros(1, 1, 1), torch.tensor([[last]]))
        top = torch.softmax(logits[0, 0], -1).topk(4)
        for p, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            every.append((probability * p, (*path, token)))
            if len(path) < 2:
                expand([*path, token], probability * p)

    expand([], 1.0)
    best = {path for _, path in sorted(every, reverse=True)[:9]}
    kept = {tuple(p.tokens) for p in tree.paths(leaves_only=False)[0]}
    assert max(len(p) for p in kept) <= 3, "the search above stops at depth 3"
    assert kept == best


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_an_oracle_is_accepted_to_full_depth(target_model, depth):
    hidden_states = last_hidden(target_model, PROMPT)[:, :-1]
    tree = eagle2_generate_tree(
        oracle_of(target_model), hidden_states, PROMPT, max_nodes=60, max_depth=depth
    )
    result = verify_with_target(target_model, tree)
    assert len(result.tokens[0]) == depth + 1
    assert result.acceptance_rate == [1.0]
    assert result.tokens[0] == greedy(target_model, PROMPT, depth + 1)


# A head takes its shape from Llama's configuration names, which GPT-2 does not have.
@pytest.mark.parametrize(
    ("name", "draft"),
    [(n, d) for n in ("llama", "qwen3", "mistral", "gemma3") for d in ("callable", "head")]
    + [("gpt2", "callable")],
)
def test_repeating_both_is_greedy_decoding(name, draft):
    model = tiny_model(name)
    draft_model = tiny_head(model) if draft == "head" else plain_draft
    token_ids = PROMPT
    hidden_states = last_hidden(model, token_ids)[:, :-1]
    emitted = []
    while len(emitted) < 12:
        tree = eagle2_generate_tree(draft_model, hidden_states, token_ids)
        result = verify_with_target(model, tree)
        emitted += result.tokens[0]
        token_ids = torch.cat([token_ids, torch.tensor(result.tokens)], dim=1)
        hidden_states = result.hidden_states[0][None]
        assert hidden_states.shape[1] == token_ids.shape[1] - 1
        torch.testing.assert_close(
            hidden_states, last_hidden(model, token_ids)[:, :-1], rtol=1e-4, atol=1e-4
        )
    assert emitted == greedy(model, PROMPT, len(emitted))


def test_an_eagle3_head_reads_the_tapped_layers():
    model = tiny_model(num_hidden_layers=7)
    head, token_ids = tiny_head(model, kind="Eagle3Head"), PROMPT
    taps = head.taps(7)
    hidden_states = features_of(model, token_ids, "Eagle3Head")[:, :-1]
    emitted = []
    while len(emitted) < 8:
        tree = eagle2_generate_tree(head, hidden_states, token_ids)
        result = verify_with_target(model, tree, taps=taps)
        emitted += result.tokens[0]
        token_ids = torch.cat([token_ids, torch.tensor(result.tokens)], dim=1)
        hidden_states = result.hidden_states[0][None]
        expected = features_of(model, token_ids, "Eagle3Head")[:, :-1]
        torch.testing.assert_close(hidden_states, expected, rtol=1e-4, atol=1e-4)
    assert emitted == greedy(model, PROMPT, len(emitted))
    with pytest.raises(ValueError, match="expected the head's width 96, got 32"):
        eagle2_generate_tree(head, last_hidden(model, token_ids)[:, :-1], token_ids)


def test_the_model_is_left_as_it_was(target_model):
    tree = eagle2_generate_tree(plain_draft, last_hidden(target_model, PROMPT)[:, :-1], PROMPT)
    before = target_model.config._attn_implementation
    verify_with_target(target_model, tree)
    assert target_model.config._attn_implementation == before == "sdpa"


def test_a_batch_is_its_requests(target_model):
    prompts = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
    hidden_states = last_hidden(target_model, prompts)[:, :-1]
    together = eagle2_generate_tree(plain_draft, hidden_states, prompts)
    result = verify_with_target(target_model, together)
    for r in range(2):
        one = eagle2_generate_tree(plain_draft, hidden_states[r : r + 1], prompts[r : r + 1])
        for got, expected in zip(one[:-1], together[:-1], strict=True):
            assert torch.equal(got[0], expected[r])
        assert verify_with_target(target_model, one).tokens[0] == result.tokens[r]


@pytest.mark.parametrize("kind", ["EagleHead", "Eagle3Head"])
def test_a_head_and_the_decoder_draw_the_same_tree(kind):
    target_model = tiny_model(num_hidden_layers=7)
    head = tiny_head(target_model, kind=kind)
    config = TreeConfig(12, 4, 4)
    step = EagleDecoder(target_model, head).draft_step(PROMPT[0].tolist(), config=config)
    root = step.tree.draft_tokens[:, :1]
    token_ids = torch.cat([PROMPT, root], dim=1)
    features = features_of(target_model, PROMPT, kind)
    tree = eagle2_generate_tree(head, features, token_ids, 12, 4, 4)
    for name in ("draft_tokens", "parents", "depths", "position_ids", "tree_mask"):
        assert torch.equal(getattr(tree, name), getattr(step.tree, name)), name
    torch.testing.assert_close(tree.scores, step.tree.scores, rtol=1e-5, atol=1e-5)
    assert verify_with_target(target_model, tree).tokens[0] == step.emitted


def test_sampling_emits_what_plain_decoding_would(target_model):
    head = tiny_head(target_model)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    plain = EagleDecoder(target_model, head).generate_plain(
        PROMPT[0].tolist(), max_new_tokens=12, sampling=sampling, eos_token_ids=()
    )
    token_ids = PROMPT
    hidden_states = last_hidden(target_model, token_ids)[:, :-1]
    emitted = []
    while len(emitted) < 12:
        tree = eagle2_generate_tree(head, hidden_states, token_ids)
        result = verify_with_target(target_model, tree, sampling=sampling)
        emitted += result.tokens[0]
        token_ids = torch.cat([token_ids, torch.tensor(result.tokens)], dim=1)
        hidden_states = result.hidden_states[0][None]
    assert emitted[:12] == plain.token_ids


def test_a_tree_of_the_root_alone(target_model):
    hidden_states = last_hidden(target_model, PROMPT)[:, :-1]
    tree = eagle2_generate_tree(plain_draft, hidden_states, PROMPT, max_nodes=1)
    assert tree.paths() == [[]]
    result = verify_with_target(target_model, tree)
    assert result.tokens[0] == greedy(target_model, PROMPT, 1)
    assert result.acceptance_rate == [0.0]


def test_an_inactive_request_gets_nothing(target_model):
    prompts = PROMPT.repeat(2, 1)
    tree = eagle2_generate_tree(plain_draft, last_hidden(target_model, prompts)[:, :-1], prompts)
    padding = DraftTree(
        torch.zeros_like(tree.draft_tokens),
        torch.full_like(tree.parents, -1),
        torch.zeros_like(tree.depths),
        torch.full_like(tree.position_ids, 4),
        torch.full_like(tree.scores, -torch.inf),
        torch.full_like(tree.first_child, -1),
        torch.full_like(tree.next_sibling, -1),
        torch.zeros_like(tree.tree_mask),
        torch.zeros_like(tree.num_nodes),
    )
    fields = [torch.cat([a[:1], b[1:]]) for a, b in zip(tree[:-1], padding[:-1], strict=True)]
    result = verify_with_target(target_model, DraftTree(*fields, prefix_ids=tree.prefix_ids))
    assert result.tokens[1] == []
    assert result.tokens[0] == verify_with_target(target_model, tree).tokens[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_nodes": 0}, "max_nodes"),
        ({"top_k": 0}, "top_k"),
        ({"max_depth": 0}, "max_depth"),
        ({"token_ids": torch.tensor([3, 4])}, "token_ids"),
        ({"token_ids": torch.tensor([[3]])}, "token_ids"),
        ({"hidden_states": torch.zeros(1, 5, 32)}, "hidden_states"),
        ({"hidden_states": torch.zeros(4, 32)}, "hidden_states"),
    ],
)
def test_arguments_that_do_not_fit(changes, message):
    arguments = {
        "draft_model": plain_draft,
        "hidden_states": torch.zeros(1, 4, 32, dtype=torch.float64),
        "token_ids": PROMPT,
    }
    with pytest.raises(ValueError, match=message):
        eagle2_generate_tree(**(arguments | changes))


def test_a_draft_model_that_loses_rows():
    with pytest.raises(ValueError, match="draft_model"):
        eagle2_generate_tree(
            lambda hidden, tokens: (torch.zeros(3, 61), hidden), torch.zeros(1, 4, 8), PROMPT
        )


def test_widths_that_do_not_fit_are_named(target_model):
    def other_width(hidden, tokens):
        return torch.zeros(len(tokens), 61), torch.zeros(len(tokens), 7)

    with pytest.raises(ValueError, match="draft_model: expected hidden_states of the width .*7"):
        eagle2_generate_tree(other_width, torch.zeros(1, 4, 8), PROMPT)
    with pytest.raises(ValueError, match="hidden_states: expected the head's width 32, got 8"):
        eagle2_generate_tree(tiny_head(target_model), torch.zeros(1, 4, 8), PROMPT)


def test_a_tree_without_its_prefix(target_model):
    tree = eagle2_generate_tree(plain_draft, last_hidden(target_model, PROMPT)[:, :-1], PROMPT)
    with pytest.raises(ValueError, match="prefix_ids"):
        verify_with_target(target_model, tree._replace(prefix_ids=None))


def test_small_vocabularies_and_flat_outputs():
    """[R, V] and [R, H] are welcome too; top_k beyond the vocabulary just ends the branch."""
    tree = eagle2_generate_tree(
        lambda hidden, tokens: (torch.zeros(len(tokens), 2), hidden[:, -1]),
        torch.zeros(1, 4, 8),
        PROMPT,
        max_nodes=20,
        max_depth=2,
    )
    assert int(tree.num_nodes) == 1 + 2 + 4
    assert set(tree.draft_tokens[0, 1:7].tolist()) == {0, 1}
