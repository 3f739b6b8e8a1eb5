"""Training: data, features, losses, the tree estimate, and exact resume."""

import dataclasses
import gzip
import itertools
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from eagle2_kernels import EagleDecoder, TreeConfig
from eagle2_kernels.models.heads import Eagle3Head, EagleHead
from eagle2_kernels.training import TrainConfig, Trainer, train
from eagle2_kernels.training.data import (
    Conversation,
    FeatureCache,
    batches,
    draft_vocabulary,
    read_conversations,
    split,
    target_features,
)
from eagle2_kernels.training.evaluate import TreeShape, accept_length, accepted_at, walk
from eagle2_kernels.training.losses import LOSSES, own_head_loss, row_loss, shared_head_loss
from eagle2_kernels.training.plot import plot_log, read_log
from eagle2_kernels.training.trainer import loss_rows, ridge_start

transformers = pytest.importorskip("transformers")

DEEP = ("eagle3", "eagle3.1")
KINDS = ("eagle2", *DEEP)


def make_target(layers, **settings):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )
    return transformers.LlamaForCausalLM(config).eval()


def text_of(target):
    g = torch.Generator().manual_seed(1)
    found = []
    for i in range(24):
        prompt = torch.randint(3, 61, (1, 3 + i % 4), generator=g)
        out = target.generate(prompt, max_new_tokens=10 + i % 5, do_sample=False, pad_token_id=0)
        tokens = out[0].tolist()
        cut = prompt.shape[1]
        found.append(Conversation(tokens[:cut], tokens[cut:], greedy=i % 2 == 0))
    return found


@pytest.fixture(scope="module")
def target():
    return make_target(2)


@pytest.fixture(scope="module")
def conversations(target):
    return text_of(target)


@pytest.fixture(scope="module")
def by_kind(target, conversations):
    """kind -> a target it can be trained for, and that target's text."""
    # Sharp enough for a loss that is not the entropy of its logits from the start.
    deep = make_target(7, initializer_range=0.15)
    return {"eagle2": (target, conversations)} | dict.fromkeys(DEEP, (deep, text_of(deep)))


def settings(work, **changes):
    return TrainConfig(
        **{
            "work_dir": str(work),
            "draft_vocab_size": 32,
            "held_out": 3,
            "max_tokens": 0,
            "steps": 12,
            "batch_size": 4,
            "warmup_steps": 2,
            "learning_rate": 3e-3,
            "ridge_tokens": 100,
            "eval_every": 6,
            "tree": TreeShape(8, 2, 3),
            **changes,
        }
    )


def write(path, conversations):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as out:
        for c in conversations:
            row = {"prompt": c.prompt, "response": c.response, "greedy": c.greedy}
            out.write(json.dumps(row) + "\n")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_conversations_come_back_from_a_file(tmp_path, conversations, name):
    assert read_conversations(write(tmp_path / name, conversations)) == conversations


@pytest.mark.parametrize(
    "line", ["[1, 2]", '{"prompt": [1]}', '{"prompt": 3, "response": [1]}', "{"]
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": [1], "response": [2]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: expected an object"):
        read_conversations(path)


def test_split_is_greedy_first_and_disjoint(conversations):
    training, validation = split(conversations, 4, None, 0)
    assert all(c.greedy for c in validation)
    assert len(training) == 20
    assert not any(v in training for v in validation)
    assert split(conversations, 4, None, 0) == (training, validation)
    few, same = split(conversations, 4, 40, 0)
    assert same == validation and sum(map(len, few)) <= 40 and few == training[: len(few)]


def test_too_many_held_out_are_named(conversations):
    with pytest.raises(ValueError, match="held_out: expected fewer than the 24 conversations"):
        split(conversations, 24, None, 0)


def test_draft_vocabulary_is_the_most_frequent_ids():
    data = [Conversation([9], [5, 5, 5, 7, 7, 8]), Conversation([9], [8, 5, 8])]
    assert draft_vocabulary(data, 2) == [5, 8]
    assert draft_vocabulary(data, 3, always=[2]) == [2, 5, 8]
    assert draft_vocabulary(data, 99) == [5, 7, 8]


def test_every_epoch_has_every_conversation_once(conversations):
    first, second = ([*batches(conversations, 5, e, 0)] for e in (0, 1))
    for epoch in (first, second):
        assert sorted(i for g in epoch for i in g) == list(range(24))
    assert first != second
    assert first == [*batches(conversations, 5, 0, 0)]


def test_features_are_the_targets_last_normed_states(target, conversations, tmp_path):
    cache = FeatureCache(conversations, target, tmp_path)
    tokens, features = cache.batch([0, 5])
    with torch.no_grad():
        for row, i in enumerate((0, 5)):
            c = conversations[i]
            out = target.model(torch.tensor([c.tokens])).last_hidden_state[0]
            assert tokens[row, : len(c)].tolist() == c.tokens
            torch.testing.assert_close(features[row, : len(c)].float(), out, rtol=1e-2, atol=1e-2)
            # What the lm_head reads.
            logits = target(torch.tensor([c.tokens])).logits[0]
            torch.testing.assert_close(target.lm_head(out), logits)


def test_features_hold_the_tapped_layers(by_kind, tmp_path):
    target, text = by_kind["eagle3"]
    seen = {}
    hooks = [
        layer.register_forward_hook(lambda m, i, out, n=n: seen.update({n: out}))
        for n, layer in enumerate(target.model.layers)
    ]
    _, features = FeatureCache(text, target, tmp_path, taps=(1, 2, 3)).batch([0])
    with torch.no_grad():
        out = target.model(torch.tensor([text[0].tokens])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    expected = torch.cat([out, *(seen[n][0] for n in (1, 2, 3))], dim=-1)
    torch.testing.assert_close(features[0].float(), expected, rtol=1e-2, atol=1e-2)


def test_features_survive_a_restart(target, conversations, tmp_path):
    cache = FeatureCache(conversations, target, tmp_path)
    assert cache.fill([1, 2]) == len(conversations[1]) + len(conversations[2])
    before = cache.batch([1])[1]
    cache.flush()
    again = FeatureCache(conversations, target, tmp_path)
    assert again.fill([1, 2]) == 0
    assert torch.equal(again.batch([1])[1], before)


def test_features_of_a_file_that_was_cut_are_computed_anew(target, conversations, tmp_path):
    """A copy that broke off."""
    cache = FeatureCache(conversations, target, tmp_path)
    before = cache.batch([len(conversations) - 1])[1]
    cache.flush()
    file = tmp_path / "features.bin"
    os.truncate(file, file.stat().st_size - 2 * cache.width)
    again = FeatureCache(conversations, target, tmp_path)
    assert torch.equal(again.batch([len(conversations) - 1])[1], before)


def test_features_of_text_that_grew_are_kept(target, conversations, tmp_path):
    first = FeatureCache(conversations[:5], target, tmp_path)
    first.fill([0, 4])
    before = first.batch([4])[1]
    first.flush()
    grown = FeatureCache(conversations, target, tmp_path)
    assert grown.done.tolist() == [1, 0, 0, 0, 1] + [0] * (len(conversations) - 5)
    assert torch.equal(grown.batch([4])[1], before)
    want = target_features(target, torch.tensor([conversations[9].tokens])).bfloat16()
    assert torch.equal(grown.batch([9])[1], want)
    grown.flush()
    # Another first conversation, or fewer of them: not the text the file is of.
    other = [Conversation([*conversations[0].prompt, 7], [9]), *conversations[1:]]
    for text in (other, conversations[:5]):
        assert not FeatureCache(text, target, tmp_path).done.any()


def test_features_of_other_text_or_another_target_are_not_taken(target, conversations, tmp_path):
    shape = {len(c): c for c in conversations}
    fewer = list(shape.values())
    # The same lengths, then the same number of conversations.
    turned = [Conversation(c.prompt[::-1], c.response[::-1]) for c in fewer]
    longer = [Conversation([*c.prompt, 7], c.response) for c in fewer]
    other = make_target(2)
    torch.nn.init.normal_(other.model.layers[1].mlp.up_proj.weight)
    for text, model in ((fewer, target), (turned, target), (longer, target), (longer, other)):
        got = FeatureCache(text, model, tmp_path).batch([0])[1]
        want = target_features(model, torch.tensor([text[0].tokens])).bfloat16()
        assert torch.equal(got, want)


def test_loss_rows_predict_response_tokens_only():
    # Row i predicts token i + 2 from token i + 1; rooted in the response, target inside it.
    b, r = loss_rows([Conversation([1, 1, 1], [2, 3, 4]), Conversation([1], [2])])
    assert b.tolist() == [0, 0] and r.tolist() == [2, 3]


def losses_of(p, logits, loss):
    """`loss` of every row as its definition has it; autograd knows its gradient."""
    logq = torch.log_softmax(logits, -1)
    entropy, accept = -(p * logq).sum(-1), torch.minimum(p, logq.exp()).sum(-1)
    if loss == "kl":
        return entropy
    if loss == "lk_alpha":
        return -accept.log()
    w = (-3 * accept).exp().detach()
    return w * entropy + (1 - w) * (1 - accept)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_the_shared_heads_loss_and_its_gradient(chunk, loss):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 6, generator=g, requires_grad=True)
    features, weight = torch.randn(7, 6, generator=g), torch.randn(11, 6, generator=g)
    got = shared_head_loss(hidden, features, weight, loss, chunk)
    p = torch.softmax(features @ weight.T, -1)
    want = losses_of(p, hidden @ weight.T, loss).mean(-1)
    torch.testing.assert_close(got, want)
    scale = torch.tensor([1.0, 0.3])
    (got,) = torch.autograd.grad((got * scale).sum(), hidden)
    (want,) = torch.autograd.grad((want * scale).sum(), hidden)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("chunk", [3, 64])
def test_the_own_heads_loss_and_its_gradient(by_kind, chunk, loss):
    target, _ = by_kind["eagle3"]
    head = Eagle3Head.from_target(target, [5, 9, 60, 2])
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 32, generator=g, requires_grad=True)
    features, rows = torch.randn(7, 32, generator=g), torch.randn(4, 32, generator=g)
    got = own_head_loss(head, hidden, features, rows, loss, chunk)
    p = torch.softmax(features @ rows.T, -1)
    n = hidden / (hidden.square().mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt()
    logits = (n * head.norm.weight) @ head.lm_head.weight.T
    want = losses_of(p, logits, loss).mean(-1)
    torch.testing.assert_close(got, want)
    scale, wanted = torch.tensor([1.0, 0.3]), (hidden, head.norm.weight, head.lm_head.weight)
    got = torch.autograd.grad((got * scale).sum(), wanted)
    want = torch.autograd.grad((want * scale).sum(), wanted)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_finite_where_nothing_is_accepted_and_least_where_all_is(loss):
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    logits = torch.tensor([[-300.0, 300.0], [0.0, 0.0]])
    value, gradient = row_loss(p, torch.log_softmax(logits, -1), loss)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert torch.equal(gradient[1], torch.zeros(2))
    entropy = math.log(2)
    least = {"kl": entropy, "lk_alpha": 0.0, "lk_lambda": math.exp(-3) * entropy}
    assert value[1].item() == pytest.approx(least[loss])


def test_ridge_start_is_the_least_squares_solution(target, conversations, tmp_path):
    head = EagleHead.from_target(target)
    cache = FeatureCache(conversations, target, tmp_path)
    indices = list(range(len(conversations)))
    explained = ridge_start(head, cache, indices, 1e-9)
    xs, ys = [], []
    for i in indices:
        c = conversations[i]
        tokens, f = cache.batch([i])
        f = f.float()[0]
        e = head.embed(tokens[0])
        for row in range(len(c.prompt) - 1, len(c) - 2):
            xs.append(torch.cat((e[row + 1], f[row], torch.ones(1))))
            ys.append(f[row + 1])
    x, y = torch.stack(xs).double(), torch.stack(ys).double()
    best = torch.linalg.lstsq(x, y).solution
    with torch.no_grad():
        # With its output projections at zero the head is fc and nothing else.
        tokens, f = cache.batch([3])
        out = head.forward_train(tokens[:, 1:], f[:, :-1].float())[0]
        torch.testing.assert_close(out, head.inputs(tokens[:, 1:], f[:, :-1].float()))
        ours = x[:, :-1] @ head.fc.weight.double().T + head.fc.bias.double()
    torch.testing.assert_close(ours, x @ best, rtol=1e-3, atol=1e-3)
    variance = (y - y.mean(0)).square().sum()
    assert explained == pytest.approx(float(1 - (y - ours).square().sum() / variance), abs=1e-4)


def test_tree_estimate_equals_a_tree_grown_node_by_node(target, conversations):
    head = EagleHead.from_target(target, seed=2)
    shape = TreeShape(max_nodes=9, top_k=3, max_depth=3)
    c = conversations[1]
    text = c.tokens
    # A random head drafts no text of the target's: let its own trees write some of it.
    while len(text) < len(c) + 6:
        tokens = torch.tensor(text)
        features = target_features(target, tokens[None])[0]
        deepest = slow_tree(head, tokens, features, len(text) - 1, shape)[-1]
        text = text + list(deepest)
    tokens = torch.tensor(text)
    features = target_features(target, tokens[None])[0]
    first = len(c.prompt)
    got = accepted_at(head, tokens, features, first, shape).tolist()
    expected = [
        slow_accepted(head, tokens, features, root, shape) for root in range(first, len(text) - 1)
    ]
    assert got == expected
    assert max(got) >= 2 and min(got) == 0
    emitted, forwards = walk(torch.tensor(got))
    text = [Conversation(text[:first], text[first:])]
    assert accept_length(head, target, text, shape) == emitted / forwards


@torch.no_grad()
def slow_tree(head, tokens, features, root, shape):
    """EAGLE-2 tree at `root`: kept paths, best score first; every node recomputes its path."""
    k = shape.top_k

    def logp(path):
        text = torch.cat((tokens[1 : root + 1], torch.tensor(path, dtype=torch.int64)))
        fed = features[:root].clone()
        while True:
            # True features, then the head's own outputs: one row more each time.
            out = head.forward_train(text[None, : len(fed)], fed[None])[0][0]
            if len(fed) == len(text):
                break
            fed = torch.cat((fed, out[-1:]))
        return torch.log_softmax(head.logits(out[-1]).float(), -1)

    frontier, kept = [((), 0.0)], []
    for _ in range(shape.max_depth):
        level = []
        for path, score in frontier:
            best, ids = logp(list(path)).topk(k)
            level += [((*path, int(i)), score + float(s)) for s, i in zip(best, ids, strict=True)]
        kept += level
        frontier = sorted(level, key=lambda n: -n[1])[:k]
    kept = sorted(kept, key=lambda n: -n[1])[: shape.max_nodes - 1]
    return [path for path, _ in kept]


def slow_accepted(head, tokens, features, root, shape):
    paths = set(slow_tree(head, tokens, features, root, shape))
    wanted = tuple(tokens[root + 1 : root + 1 + shape.max_depth].tolist())
    return max((d for d in range(1, len(wanted) + 1) if wanted[:d] in paths), default=0)


@pytest.mark.parametrize(
    ("accepted", "tokens", "forwards"),
    [([0, 0, 0], 3, 3), ([2, 9, 9, 1, 0], 5, 2), ([9, 0], 2, 1), ([], 0, 0)],
    ids=["chain", "skips", "cut-at-the-end", "empty"],
)
def test_walk_counts_tokens_and_forwards(accepted, tokens, forwards):
    assert walk(torch.tensor(accepted)) == (tokens, forwards)


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(by_kind, tmp_path, kind):
    target, conversations = by_kind[kind]
    config = settings(tmp_path, kind=kind, steps=60, ridge_tokens=0, unroll=2, unroll_from=0)
    trainer = Trainer(config, target, conversations, eos_ids=[2])
    everything = list(range(len(trainer.training)))
    assert len(everything) == 24 - 3  # max_tokens 0 is all of it
    before = trainer.loss(everything).item()
    trainer.run()
    assert trainer.loss(everything).item() < before - 0.1
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    last = [r for r in rows if r["event"] == "validation"][-1]
    assert last["step"] == 60 and last["tokens_seen"] == trainer.tokens_seen
    assert 1 <= last["accept_length"] <= 4 and last["top1"] <= last["top4"]


@pytest.mark.parametrize(
    ("kind", "noise"),
    [("eagle2", 0.0), ("eagle2", 0.1), ("eagle3", 0.1)],
    ids=["no-noise", "noise", "eagle3"],
)
def test_resumed_run_equals_an_uninterrupted_one(by_kind, tmp_path, kind, noise):
    target, conversations = by_kind[kind]
    run = {"kind": kind, "feature_noise": noise}
    whole = Trainer(settings(tmp_path / "a", **run), target, conversations)
    whole.run()
    # 7 of 12 steps: in the second epoch, off every other boundary.
    first = settings(tmp_path / "b", **run, stop_after=7)
    Trainer(first, target, conversations).run()
    second = settings(tmp_path / "b", **run, resume=True)
    resumed = Trainer(second, target, conversations)
    assert resumed.step == 7
    resumed.run()
    assert resumed.step == whole.step == 12
    assert resumed.tokens_seen == whole.tokens_seen
    theirs = dict(resumed.head.named_parameters())
    for name, p in whole.head.named_parameters():
        assert torch.equal(p, theirs[name]), name


def test_a_run_cut_before_its_first_step_loses_no_patience(target, conversations, tmp_path):
    run = {"patience": 1, "eval_every": 2, "steps": 4}
    whole = Trainer(settings(tmp_path / "a", **run), target, conversations)
    whole.run()
    Trainer(settings(tmp_path / "b", **run, stop_after=0), target, conversations).run()
    resumed = Trainer(settings(tmp_path / "b", **run, resume=True), target, conversations)
    resumed.run()
    assert whole.step > 0
    assert (resumed.step, resumed.best, resumed.stale) == (whole.step, whole.best, whole.stale)


def test_an_older_run_is_judged_when_it_is_resumed(target, conversations, tmp_path):
    """Its checkpoint has no `best`, `stale` and `average`, its directory no best head."""
    target.save_pretrained(tmp_path / "target")
    config = settings(
        tmp_path / "work",
        data=str(write(tmp_path / "text.jsonl", conversations)),
        target=str(tmp_path / "target"),
        output=str(tmp_path / "head"),
        steps=3,
        stop_after=2,
    )
    assert train(config) is None and not (tmp_path / "head").exists()
    config = dataclasses.replace(config, steps=2, ema=0.9, weight_decay=0.25, resume=True)
    checkpoint = tmp_path / "work" / "checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True)
    older = {k: v for k, v in state.items() if k not in ("best", "stale", "average")}
    torch.save(older, checkpoint)
    shutil.rmtree(tmp_path / "work" / "best")
    with (tmp_path / "work" / "log.jsonl").open("a") as log:
        log.write('{"step": 2, "even')
    assert train(config) == tmp_path / "head"
    head = EagleHead.from_pretrained(tmp_path / "head", target=target)
    assert torch.equal(head.fc.weight.bfloat16(), state["head"]["fc.weight"].bfloat16())
    resumed = Trainer(config, target, conversations)
    assert [g["weight_decay"] for g in resumed.optimizer.param_groups] == [0.25, 0.0]


def test_texts_too_short_to_validate_ship_the_newest_head(target, conversations, tmp_path):
    short = [Conversation([5, 6, 7 + i], [8], greedy=True) for i in range(3)]
    rest = [Conversation(c.prompt, c.response) for c in conversations]
    trainer = Trainer(settings(tmp_path, patience=1), target, short + rest)
    assert all(len(c.response) == 1 for c in trainer.validation)
    trainer.run()
    assert trainer.step == 12
    best = EagleHead.from_pretrained(tmp_path / "best", target=target)
    assert torch.equal(best.fc.weight.bfloat16(), trainer.head.fc.weight.bfloat16())


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_warms_up_stays_and_decays(target, conversations, tmp_path, schedule):
    config = settings(tmp_path, steps=100, warmup_steps=10, decay_fraction=0.5, schedule=schedule)
    trainer = Trainer(config, target, conversations)
    rate = [trainer.rate(step) / config.learning_rate for step in range(101)]
    assert rate[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rate[10:51] == pytest.approx([1.0] * 41)
    # Half of the way down in the middle of the decay, both ways; a fiftieth at the end.
    assert rate[75] == pytest.approx(0.51 if schedule == "cosine" else 0.5)
    early = {"linear": 0.9, "cosine": 0.02 + 0.98 * (1 + math.cos(0.1 * math.pi)) / 2}
    assert rate[55] == pytest.approx(early[schedule])
    assert rate[100] == pytest.approx(0.02)


def test_the_moving_average_is_what_ships(target, conversations, tmp_path):
    trainer = Trainer(settings(tmp_path / "a", ema=0.5, steps=4), target, conversations)
    seen = []
    descend = trainer._descend

    def spy(groups):
        out = descend(groups)
        seen.append(trainer.head.fc.weight.detach().clone())
        return out

    trainer._descend = spy
    trainer.start()
    start = trainer.head.fc.weight.detach().clone()
    trainer.run()
    average = start
    for step, weight in enumerate(seen, 1):
        keep = min(0.5, (1 + step) / (10 + step))
        average = keep * average + (1 - keep) * weight
    torch.testing.assert_close(trainer.average["fc.weight"], average)
    shipped = trainer._shipped()
    assert torch.equal(shipped.fc.weight, trainer.average["fc.weight"])
    assert not torch.equal(shipped.fc.weight, trainer.head.fc.weight)
    # And survives an interruption.
    for more in ({"stop_after": 2}, {"resume": True}):
        again = Trainer(settings(tmp_path / "b", ema=0.5, steps=4, **more), target, conversations)
        again.run()
    for name, value in trainer.average.items():
        assert torch.equal(value, again.average[name]), name


def test_accumulated_batches_make_the_gradient_of_their_mean(target, conversations, tmp_path):
    whole = settings(tmp_path, accumulate=3, steps=2, ridge_tokens=0)
    trainer = Trainer(whole, target, conversations)
    groups = next(trainer._schedule())
    assert len(groups) == 3
    losses = [trainer.loss(group) for group in groups]
    wanted = torch.autograd.grad(sum(losses) / 3, trainer.head.fc.weight)[0]
    norm = torch.nn.utils.clip_grad_norm_
    seen = []

    def spy(parameters, limit):
        seen.append(trainer.head.fc.weight.grad.clone())
        return norm(parameters, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
        trainer.run()
    torch.testing.assert_close(seen[0], wanted)
    order = itertools.chain(*(batches(trainer.training, 4, epoch, 0) for epoch in (0, 1)))
    used = [trainer.training[i] for group in itertools.islice(order, 6) for i in group]
    assert trainer.step == 2 and trainer.tokens_seen == sum(map(len, used))


def test_early_stop_keeps_the_best_head(target, conversations, tmp_path, monkeypatch):
    figures = iter([1.0, 1.5, 1.4, 1.3, 9.0])
    monkeypatch.setattr(
        Trainer, "validate", lambda self: {"accept_length": next(figures), "top1": 0, "top4": 0}
    )
    config = settings(tmp_path, steps=100, eval_every=3, patience=2)
    trainer = Trainer(config, target, conversations)
    weights = {}
    judge = trainer._judge

    def spy(found):
        judge(found)
        weights[trainer.step] = trainer.head.fc.weight.detach().to(torch.bfloat16)

    trainer._judge = spy
    trainer.run()
    assert trainer.step == 9 and trainer.finished and trainer.best == 1.5
    best = EagleHead.from_pretrained(tmp_path / "best", target=target)
    assert torch.equal(best.fc.weight.to(torch.bfloat16), weights[3])
    assert not torch.equal(weights[3], weights[9])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "step"}, "schedule: expected linear or cosine, got 'step'"),
        ({"loss": "tv"}, "loss: expected kl or lk_alpha or lk_lambda, got 'tv'"),
        ({"ema": 1.0}, "ema: expected a decay"),
        ({"accumulate": 0}, "accumulate: expected at least 1, got 0"),
        ({"held_out": 0}, "held_out: expected at least 1, got 0"),
        ({"patience": -1}, "patience: expected 0 or more, got -1"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(target, conversations, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(settings(tmp_path, **options), target, conversations)


PROCESS = """
import sys
from eagle2_kernels.training import TrainConfig, train
work, data, target, accumulate = sys.argv[1:]
train(TrainConfig(data=data, target=target, work_dir=work, output=work + "/head", threads=1,
    draft_vocab_size=32, held_out=3, max_tokens=0, steps=3, batch_size=4, warmup_steps=1,
    learning_rate=3e-3, ridge_tokens=100, eval_every=3, accumulate=int(accumulate)))
"""


def test_two_processes_train_what_one_does_that_accumulates(target, conversations, tmp_path):
    target.save_pretrained(tmp_path / "target")
    data = write(tmp_path / "text.jsonl", conversations)
    (tmp_path / "run.py").write_text(PROCESS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    heads = []
    for command, count in (([sys.executable], 2), (launch, 1)):
        work = tmp_path / f"work{count}"
        arguments = [tmp_path / "run.py", work, data, tmp_path / "target", count]
        run = subprocess.run(
            [*command, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr[-3000:]
        log = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
        heads.append((EagleHead.from_pretrained(work / "head", target=target), log))
    (one, log), (two, other) = heads
    assert [(r["step"], r["event"]) for r in log] == [(r["step"], r["event"]) for r in other]
    assert log[-1]["tokens_seen"] == other[-1]["tokens_seen"]
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3, msg=name)
    # One process would go on with other batches.
    alone = settings(work, draft_vocab_size=32, resume=True)
    with pytest.raises(ValueError, match=r"processes \(2 -> 1\)"):
        Trainer(alone, target, conversations)


def test_the_curve_has_each_step_once(tmp_path):
    rows = [{"step": s, "event": "train", "loss": [4.0 - s], "tokens_seen": s} for s in (1, 2)]
    rows += [{"step": 2, "event": "validation", "accept_length": 1.5, "tokens_seen": 2}]
    rows += [{"step": 2, "event": "train", "loss": [1.9], "tokens_seen": 2}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    training, validation = read_log(tmp_path / "log.jsonl")
    assert [r["loss"] for r in training] == [[3.0], [1.9]] and len(validation) == 1
    assert plot_log(tmp_path / "log.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_used_work_directory_needs_resume(target, conversations, tmp_path):
    Trainer(settings(tmp_path, steps=1), target, conversations).run()
    with pytest.raises(FileExistsError, match="resume"):
        Trainer(settings(tmp_path), target, conversations)
    with pytest.raises(ValueError, match=r"batch_size \(4 -> 5\)"):
        Trainer(settings(tmp_path, resume=True, batch_size=5), target, conversations)
    with pytest.raises(ValueError, match="kind: expected eagle2 or eagle3 or"):
        Trainer(settings(tmp_path / "other", kind="eagle"), target, conversations)


@pytest.mark.parametrize("kind", KINDS)
def test_train_goes_from_files_to_a_head(by_kind, tmp_path, kind):
    target, conversations = by_kind[kind]
    target.save_pretrained(tmp_path / "target")
    config = settings(
        tmp_path / "work",
        data=str(write(tmp_path / "text.jsonl", conversations)),
        target=str(tmp_path / "target"),
        output=str(tmp_path / "head"),
        kind=kind,
        steps=3,
    )
    assert train(config) == tmp_path / "head"
    head = EagleHead.from_pretrained(tmp_path / "head", target=target)
    assert type(head) is (EagleHead if kind == "eagle2" else Eagle3Head)
    assert head.config.fc_norm == head.config.norm_output == (kind == "eagle3.1")
    assert 2 in head.draft_to_target


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_what_decoding_accepts(by_kind, tmp_path, kind):
    target, conversations = by_kind[kind]
    config = settings(tmp_path, kind=kind, steps=30, draft_vocab_size=0)
    head = Trainer(config, target, conversations).run().eval()
    decoder = EagleDecoder(target, head, config=TreeConfig(8, 2, 3))
    prompts = [c.prompt for c in conversations if c.greedy]
    got = decoder.generate(prompts, max_new_tokens=16, eos_token_ids=())
    texts = [Conversation(p, ids) for p, ids in zip(prompts, got.token_ids, strict=True)]
    assert got.stats.accept_length > 1.1
    estimate = accept_length(head, target, texts, TreeShape(8, 2, 3))
    assert estimate == pytest.approx(got.stats.accept_length)


def test_too_many_held_out_are_told_before_the_target_loads(tmp_path):
    data = tmp_path / "few.jsonl"
    data.write_text(json.dumps({"prompt": [1], "response": [2, 3]}) + "\n")
    with pytest.raises(ValueError, match="held_out: expected fewer than the 1 conversations"):
        train(TrainConfig(data=str(data), target=str(tmp_path / "none"), held_out=9))


def test_missing_data_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data: expected a \.jsonl"):
        train(TrainConfig(data=str(tmp_path / "none.jsonl")))
