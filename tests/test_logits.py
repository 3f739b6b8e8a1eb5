"""process_logits, the history it counts, and token_logprobs: each node as plain decoding has it."""

import math
import random
from collections import Counter

import pytest
import torch
from growth import i32, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle2_kernels as e2
from eagle2_kernels import _checks, reference

NEG_INF, NAN, INF = float("-inf"), float("nan"), float("inf")
OPS = torch.ops.eagle2_kernels
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BANS = {3: NEG_INF}
# Values that float32 holds exactly, so that float64 arithmetic on them is the same everywhere.
PENALTIES = {
    "off": {},
    "repetition": {"repetition": 1.25},
    "reward": {"repetition": 0.75},
    "frequency": {"frequency": 0.375},
    "presence": {"presence": 0.5},
    "bias": {"bias": {0: 1.5, 4: -0.75}},
    "ban": {"bias": BANS},
    "all": {"repetition": 1.5, "frequency": 0.25, "presence": -0.5, "bias": {1: 0.5} | BANS},
}


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def same(a, b):
    """Equal number by number, NaN to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0, INF, NEG_INF), b.nan_to_num(0, INF, NEG_INF)
    )


def edited(row, prompt, output, repetition=1.0, frequency=0.0, presence=0.0, bias=None):
    """One row of float64 logits as plain decoding edits it, number by number."""
    counts, bias = Counter(output), bias or {}
    result = []
    for token, x in enumerate(row.tolist()):
        y = x + bias.get(token, 0.0)
        if token in prompt or counts[token]:
            y = y / repetition if y > 0 else y * repetition
        if counts[token]:
            y = y - frequency * counts[token] - presence
        result.append(NEG_INF if bias.get(token) == NEG_INF else y)
    return torch.tensor(result, dtype=torch.float64)


def history(prompts, outputs, vocab, **penalties):
    """`process_logits`' keyword arguments for a batch whose penalties are those of one request."""
    b = len(prompts)
    mask, counts = i32([[0] * ((vocab + 31) // 32)] * b), i32([[0] * vocab] * b)
    for rows, tokens, record in (
        (mask, prompts, e2.mark_tokens),
        (counts, outputs, e2.count_tokens),
    ):
        longest = max(map(len, tokens))
        record(rows, torch.tensor([[*t, *[-1] * (longest - len(t))] for t in tokens]).long())
    bias = penalties.pop("bias", None)
    kwargs = {f"{name}_penalty": torch.full((b,), value) for name, value in penalties.items()}
    if kwargs:
        kwargs |= {"prompt_mask": mask, "output_counts": counts}
    if bias:
        kwargs["bias_tokens"] = torch.tensor(list(bias)).repeat(b, 1)
        kwargs["bias_values"] = torch.tensor(list(bias.values())).repeat(b, 1)
    return kwargs


def random_tree(n, vocab, rng, tokens=None):
    """(parents, draft tokens) of one request; siblings differ when the vocabulary allows it."""
    parents, draft = [-1], [rng.randrange(vocab)]
    taken = {}
    for slot in range(1, n):
        parent = rng.randrange(slot)
        free = [t for t in tokens or range(vocab) if t not in taken.setdefault(parent, set())]
        parents.append(parent)
        draft.append(rng.choice(free) if free else vocab + slot)
        taken[parent].add(draft[slot])
    return parents, draft


def path_of(parents, draft, slot):
    """Draft tokens below the root, down to ``slot``."""
    path = []
    while slot > 0:
        path.insert(0, draft[slot])
        slot = parents[slot]
    return path


# what plain decoding makes of a row


@pytest.mark.parametrize("name", PENALTIES)
def test_the_plain_definition_is_that_of_transformers(name):
    """`edited`, against the processors of transformers in the order its `generate` gives them."""
    processors = pytest.importorskip("transformers").generation.logits_process
    settings = dict(PENALTIES[name])
    settings.pop("frequency", None), settings.pop("presence", None)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 12, generator=generator, dtype=torch.float64) * 3
    prompt, output = [5, 5, 2], [7, 0, 7]
    scores = rows.clone()
    ids = torch.tensor([prompt + output]).expand(20, -1)
    if "bias" in settings:
        bias = [[[token], value] for token, value in settings["bias"].items()]
        scores = processors.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if "repetition" in settings:
        scores = processors.RepetitionPenaltyLogitsProcessor(settings["repetition"])(ids, scores)
    want = torch.stack([edited(row, prompt, output, **settings) for row in rows])
    assert torch.equal(scores, want)


@pytest.mark.parametrize("name", PENALTIES)
def test_every_node_is_what_plain_decoding_has_there(name):
    """Random trees, batches and ragged prompts, exact in float64."""
    rng = random.Random(name)
    for n in (1, 2, 7, 33):
        for vocab in (5, 31, 32, 40):
            b = rng.randrange(1, 4)
            prompts, outputs = (
                [[rng.randrange(vocab) for _ in range(rng.randrange(1, 6))] for _ in range(b)]
                for _ in range(2)
            )
            # Few different tokens, so that paths repeat themselves and their siblings.
            trees = [random_tree(n, vocab, rng, range(min(vocab, 5))) for _ in range(b)]
            logits = torch.randn(b, n, vocab, dtype=torch.float64) * 3
            got = logits.clone()
            e2.process_logits(
                got,
                torch.tensor([draft for _, draft in trees]),
                i32([parents for parents, _ in trees]),
                i32([n] * b),
                **history(prompts, outputs, vocab, **PENALTIES[name]),
            )
            for r, (parents, draft) in enumerate(trees):
                for i in range(n):
                    output = outputs[r] + path_of(parents, draft, i)
                    want = edited(logits[r, i], prompts[r], output, **PENALTIES[name])
                    assert torch.equal(got[r, i], want), (n, vocab, r, i)


def test_each_request_has_its_own_penalties():
    logits = torch.full((2, 1, 4), 2.0)
    e2.process_logits(
        logits,
        output_counts=i32([[1, 2, 0, 0]] * 2),
        repetition_penalty=torch.tensor([2.0, 1.0]),
        frequency_penalty=torch.tensor([0.0, 0.5]),
        presence_penalty=torch.tensor([0.0, 0.25]),
        bias_tokens=torch.tensor([[3, -1], [2, 3]]),
        bias_values=torch.tensor([[1.0, 9.0], [-1.0, NEG_INF]]),
    )
    assert logits[:, 0].tolist() == [[1, 1, 2, 3], [1.25, 0.75, 1, NEG_INF]]


def test_penalties_count_the_nodes_own_path_and_not_its_siblings():
    """Field failure: penalties counted over siblings instead of the node's path."""
    # root -> 1, 2; 1 -> 1; each node's logits for the tokens 0..3.
    draft, parents = torch.tensor([[0, 1, 2, 1]]), i32([[-1, 0, 0, 1]])
    logits = torch.zeros(1, 4, 4)
    e2.process_logits(logits, draft, parents, output_counts=i32([[0] * 4]), frequency_penalty=1.0)
    assert logits[0].tolist() == [[0, 0, 0, 0], [0, -1, 0, 0], [0, 0, -1, 0], [0, -2, 0, 0]]


def test_the_root_is_in_the_history_and_not_counted_twice():
    """Field failure: the last sampled token was in the counts and counted again as a tree slot."""
    logits = torch.zeros(1, 2, 4)
    counts = i32([[0, 0, 1, 0]])
    e2.process_logits(
        logits, torch.tensor([[2, 2]]), i32([[-1, 0]]), output_counts=counts, frequency_penalty=1.0
    )
    assert logits[0].tolist() == [[0, 0, -1, 0], [0, 0, -2, 0]]


def test_the_prompt_counts_for_the_repetition_penalty_alone():
    mask, counts = i32([[0b0110]]), i32([[0, 0, 3, 1]])
    logits = torch.tensor([[[8.0, 8.0, 8.0, -8.0]]])
    e2.process_logits(
        logits,
        prompt_mask=mask,
        output_counts=counts,
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    # Once for a token, however often it came; a negative logit is multiplied.
    assert logits[0, 0].tolist() == [8, 4, 3, -17]


@pytest.mark.parametrize(
    ("logit", "bias", "want"),
    [
        (NEG_INF, 5.0, NEG_INF),
        (NEG_INF, INF, NEG_INF),
        (INF, NEG_INF, NEG_INF),
        (NAN, NEG_INF, NEG_INF),
        (NAN, 1.0, NAN),
        (INF, -1.0, INF),
        (0.0, 0.0, -1.0),
    ],
)
def test_banned_stays_banned(logit, bias, want):
    logits = torch.tensor([[[logit]]])
    e2.process_logits(
        logits,
        output_counts=i32([[1]]),
        repetition_penalty=0.5,
        presence_penalty=1.0,
        bias_tokens=torch.tensor([[0]]),
        bias_values=torch.tensor([[bias]]),
    )
    torch.testing.assert_close(logits[0, 0], torch.tensor([want]), equal_nan=True)


# against the oracle


def processor_case(rng, dtype, hostile):
    b, n, vocab = rng.randrange(0, 4), rng.randrange(0, 12), rng.choice([1, 3, 31, 32, 33, 64, 95])
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def ints(*shape, low=-1, high=vocab + 1):
        return torch.randint(low, high, shape, generator=generator)

    logits = (torch.randn(b, n, vocab, generator=generator) * 5).to(dtype)
    parents = ints(b, n, low=-2, high=n + 2).int()
    for r in range(b):
        if not hostile or rng.random() < 0.5:
            parents[r] = random_parents(n, generator)
    if hostile:
        odd = torch.tensor([NAN, INF, NEG_INF, 0.0, -0.0], dtype=dtype)
        where = torch.rand(logits.shape, generator=generator) < 0.2
        logits = torch.where(where, odd[ints(*logits.shape, low=0, high=5)], logits)
    kwargs = {
        "prompt_mask": ints(b, (vocab + 31) // 32, low=-(2**31), high=2**31).int(),
        "output_counts": ints(b, vocab, low=-2, high=3).int(),
        "repetition_penalty": torch.rand(b, generator=generator) + 0.5,
        "frequency_penalty": torch.randn(b, generator=generator),
        "presence_penalty": torch.randn(b, generator=generator),
        "bias_tokens": ints(b, 5),
        "bias_values": torch.tensor([1.0, -2.5, NEG_INF, 0.1, 0.0]).repeat(b, 1),
    }
    for name, off in (("repetition_penalty", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
        if rng.random() < 0.3:
            del kwargs[name]
        elif b and rng.random() < 0.5:
            kwargs[name][rng.randrange(b)] = off
    for name in ("prompt_mask", "bias"):
        if rng.random() < 0.2:
            kwargs = {k: v for k, v in kwargs.items() if not k.startswith(name)}
    counts = None if rng.random() < 0.2 else ints(b, low=-1, high=n + 2).int()
    return (logits, ints(b, n), parents, counts), kwargs


@pytest.mark.parametrize("hostile", [False, True], ids=["clean", "hostile"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_the_kernel_gives_the_oracles_numbers(dtype, hostile):
    rng = random.Random(hostile)
    for trial in range(60):
        (logits, *tree), kwargs = processor_case(rng, dtype, hostile)
        got, want = logits.clone(), logits.clone()
        e2.process_logits(got, *tree, **kwargs)
        reference.process_logits(want, *tree, **kwargs)
        assert same(got, want), trial


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_strided_logits_are_edited_where_they_lie(dtype):
    rng, done = random.Random(3), 0
    while done < 10:
        (logits, *tree), kwargs = processor_case(rng, dtype, False)
        b, n, vocab = logits.shape
        if not logits.numel():
            continue
        done += 1
        want = logits.clone()
        e2.process_logits(want, *tree, **kwargs)
        store = torch.full((vocab, 2 * n, b, 3), 7.0, dtype=dtype)
        view = store[:, ::2, :, 1].permute(2, 1, 0)
        view.copy_(logits)
        spread = {k: torch.stack([v, v], -1)[..., 0] for k, v in kwargs.items()}
        tree = [None if t is None else torch.stack([t, t], -1)[..., 0] for t in tree]
        e2.process_logits(view, *tree, **spread)
        assert torch.equal(view, want)
        view.fill_(7.0)
        assert (store == 7).all()


def test_bits_do_not_depend_on_threads_and_rows_not_on_each_other():
    rng = random.Random(4)
    trees = [random_tree(40, 300, rng, range(9)) for _ in range(3)]
    draft, parents = (torch.tensor([t[i] for t in trees]) for i in (1, 0))
    kwargs = history([[5, 6]] * 3, [[1, 2, 2]] * 3, 300, **PENALTIES["all"])
    logits = torch.randn(3, 40, 300)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(logits.clone())
            e2.process_logits(results[-1], draft, parents.int(), **kwargs)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    alone = logits[1:2].clone()
    e2.process_logits(
        alone, draft[1:2], parents[1:2].int(), **{k: v[:1] for k, v in kwargs.items()}
    )
    assert torch.equal(alone, results[0][1:2])


# what is emitted


def context_logits(prefix, vocab):
    """A target: float64 logits that depend on all tokens so far."""
    key = 17
    for token in prefix:
        key = (key * 1_000_003 + token + 1) % (2**62)
    generator = torch.Generator().manual_seed(key)
    return torch.randn(vocab, generator=generator, dtype=torch.float64) * 1.5


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05}],
    ids=["greedy", "sampled", "filtered"],
)
@pytest.mark.parametrize("name", PENALTIES)
def test_tree_decoding_emits_what_plain_decoding_emits(name, filters):
    """Two requests of different lengths over random trees, against one-by-one decoding with
    `edited`: filters and penalties hold at each node.
    """
    vocab, seeds, length = 7, torch.tensor([123, 9]), 20
    prompts = [[0, 3, 5], [2]]
    rng = random.Random(name)

    def plain_decoding(**penalties):
        outputs = [[], []]
        for seed, prompt, output in zip(seeds, prompts, outputs, strict=True):
            while len(output) < length:
                row = edited(context_logits(prompt + output, vocab), prompt, output, **penalties)
                at = torch.tensor([[len(prompt + output) - 1]])
                output.append(int(e2.sample_tokens(row[None, None], at, seed[None], **filters)))
        return outputs

    plain = plain_decoding(**PENALTIES[name])
    assert name == "off" or plain != plain_decoding()
    for n in (1, 6, 14):
        kwargs = history(prompts, [[], []], vocab, **PENALTIES[name])
        outputs, steps = [[], []], 0
        # The first token follows the prompt, whose last token is the root.
        roots = [prompt[-1] for prompt in prompts]
        while min(map(len, outputs)) < length:
            trees = [random_tree(n, vocab, rng) for _ in prompts]
            for (_, draft), root in zip(trees, roots, strict=True):
                draft[0] = root
            parents = i32([t[0] for t in trees])
            draft = torch.tensor([t[1] for t in trees])
            counts = i32([n, n])
            prefix = i32([len(p + o) - 1 for p, o in zip(prompts, outputs, strict=True)])
            _, positions, child, sibling, _ = e2.flatten_tree(parents, counts, prefix)
            logits = torch.stack(
                [
                    torch.stack([context_logits(p + o + path_of(*t, i), vocab) for i in range(n)])
                    for p, o, t in zip(prompts, outputs, trees, strict=True)
                ]
            )
            e2.process_logits(logits, draft, parents, counts, **kwargs)
            emitted, *_ = e2.sample_and_verify(
                logits, positions, seeds, draft, child, sibling, n, counts, **filters
            )
            if "output_counts" in kwargs:
                e2.count_tokens(kwargs["output_counts"], emitted)
            for output, row in zip(outputs, emitted.tolist(), strict=True):
                output += [token for token in row if token >= 0]
            roots = [output[-1] for output in outputs]
            steps += 1
        assert [output[:length] for output in outputs] == plain
        assert n == 1 or steps < length


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_banned_token_never_appears(dtype):
    """10 000 draws at nodes of random trees, from rows with NaN and infinities too."""
    rng, b, n, vocab, drawn = random.Random(5), 4, 25, 9, 0
    while drawn < 10_000:
        generator = torch.Generator().manual_seed(drawn)
        logits = (torch.randn(b, n, vocab, generator=generator) * 4).to(dtype)
        odd = torch.tensor([NAN, INF, NEG_INF, 3.0], dtype=dtype)
        where = torch.rand(b, n, vocab, generator=generator) < 0.1
        logits = torch.where(
            where, odd[torch.randint(4, (b, n, vocab), generator=generator)], logits
        )
        bans = torch.tensor([rng.sample(range(vocab), 3) for _ in range(b)])
        # A row without a finite logit yields its lowest id, banned or not: one is left.
        for r in range(b):
            logits[r, :, next(t for t in range(vocab) if t not in bans[r].tolist())] = 0.5
        trees = [random_tree(n, vocab, rng) for _ in range(b)]
        e2.process_logits(
            logits,
            torch.tensor([draft for _, draft in trees]),
            i32([parents for parents, _ in trees]),
            output_counts=torch.randint(0, 3, (b, vocab), generator=generator).int(),
            repetition_penalty=rng.uniform(0.5, 2),
            frequency_penalty=rng.uniform(-2, 2),
            presence_penalty=rng.uniform(-2, 2),
            bias_tokens=bans,
            bias_values=torch.full(bans.shape, NEG_INF),
        )
        tokens = e2.sample_tokens(
            logits,
            torch.arange(n).expand(b, n),
            drawn,
            temperature=rng.choice([0.0, 0.7, 5.0]),
            top_p=rng.choice([1.0, 0.9]),
        )
        assert not (tokens[..., None] == bans[:, None]).any()
        drawn += b * n


# the history


def test_counts_grow_by_every_emitted_token():
    """Field failure: a step of several tokens was counted by its last one alone."""
    counts = i32([[0, 2, 0, 0], [0, 0, 0, 0]])
    e2.count_tokens(counts, torch.tensor([[1, 3, 3, -1], [0, -1, -1, -1]]))
    assert counts.tolist() == [[0, 3, 0, 2], [1, 0, 0, 0]]


@given(
    st.lists(st.lists(st.integers(-2, 70), min_size=3, max_size=3), max_size=4),
    st.sampled_from([1, 31, 32, 33, 64]),
)
@settings(max_examples=60, deadline=None)
def test_counting_and_marking_against_the_oracle(rows, vocab):
    tokens = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    # Written through a view whose neighbours must stay.
    counts = torch.full((len(rows), vocab, 2), -3, dtype=torch.int32)
    words = (vocab + 31) // 32
    mask = torch.randint(-(2**31), 2**31, (len(rows), words, 2)).int()
    want_counts, want_mask = counts.clone(), mask.clone()
    e2.count_tokens(counts[..., 0], tokens)
    reference.count_tokens(want_counts[..., 0], tokens)
    assert torch.equal(counts, want_counts)
    e2.mark_tokens(mask[..., 1], tokens)
    reference.mark_tokens(want_mask[..., 1], tokens)
    assert torch.equal(mask, want_mask)


def test_a_marked_mask_allows_its_tokens():
    """The prompt mask has the layout of sample_tokens' allowed_mask, bit 31 included."""
    mask = i32([[0, 0], [0, 0]])
    e2.mark_tokens(mask, torch.tensor([[0, 31, -1], [32, 63, 5]]))
    assert reference.allowed_tokens(mask, 64).nonzero().tolist() == [
        [0, 0],
        [0, 31],
        [1, 5],
        [1, 32],
        [1, 63],
    ]


# log-probabilities


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("vocab", [1, 15, 1025, 5000])
def test_log_probabilities_are_those_of_log_softmax(dtype, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(3, 4, vocab, generator=generator) * 6).to(dtype)
    slots = torch.randint(0, 4, (3, 5), generator=generator).int()
    tokens = torch.randint(0, vocab, (3, 5), generator=generator)
    rows = torch.arange(3)[:, None]
    exact = torch.log_softmax(logits.double(), -1)[rows, slots.long(), tokens]
    torch_own = torch.log_softmax(logits.float(), -1)[rows, slots.long(), tokens]
    for run in (e2.token_logprobs, reference.token_logprobs):
        got = run(logits, slots, tokens)
        assert got.dtype == torch.float32
        error = (got.double() - exact).abs().max()
        assert error <= 2 * (torch_own.double() - exact).abs().max() + 4e-6
    strided = logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    got, again = (e2.token_logprobs(x, slots, tokens) for x in (logits, strided))
    assert torch.equal(got, again)


def test_log_probabilities_of_odd_rows():
    logits = torch.tensor([[[0.0, NAN, NEG_INF], [INF, 0.0, INF], [NAN, NEG_INF, NAN]]])
    slots = i32([[0, 0, 0, 1, 1, 2, -1, 3, 0, 0]])
    tokens = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0, -1, 3]])
    want = [0, NEG_INF, NEG_INF, -math.log(2), -torch.finfo(torch.float32).max]
    want += [NEG_INF, 0, 0, NEG_INF, NEG_INF]
    for run in (e2.token_logprobs, reference.token_logprobs):
        torch.testing.assert_close(run(logits, slots, tokens), torch.tensor([want]))


def test_a_steps_log_probabilities_add_up():
    """accept_index and emitted_tokens are taken as they are; padding adds nothing."""
    logits = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    draft, child = torch.tensor([[0, 1, 2]] * 2), i32([[1, 2, -1]] * 2)
    draft[0, 1] = logits[0, 0].argmax()
    emitted, slots, accepted, _ = e2.sample_and_verify(
        logits, torch.arange(3).expand(2, -1), 0, draft, child, torch.full_like(child, -1), 2
    )
    total = e2.token_logprobs(logits, slots, emitted).sum(-1)
    for r in range(2):
        want = sum(
            float(torch.log_softmax(logits[r, slots[r, i]], -1)[emitted[r, i]])
            for i in range(int(accepted[r]) + 1)
        )
        assert float(total[r]) == pytest.approx(want, abs=1e-5)


# the contract around them

TREE = {
    "logits": torch.zeros(2, 3, 40),
    "draft_tokens": torch.tensor([[0, 1, 2]] * 2),
    "parents": i32([[-1, 0, 0]] * 2),
    "num_nodes": i32([3, 2]),
}
COUNTS = {"output_counts": i32([[0] * 40] * 2)}
BIAS = {"bias_tokens": torch.zeros(2, 1).long(), "bias_values": torch.zeros(2, 1)}
LOGPROBS = {
    "logits": torch.zeros(2, 3, 40),
    "slots": i32([[0, 2], [1, -1]]),
    "tokens": torch.zeros(2, 2).long(),
}
COUNT = {"counts": i32([[0] * 4] * 2), "tokens": torch.zeros(2, 3).long()}
MARK = {"mask": i32([[0]] * 2), "tokens": torch.zeros(2, 3).long()}


@pytest.mark.parametrize(
    ("function", "base", "change", "error", "message"),
    [
        ("process_logits", TREE, {"logits": [[1.0]]}, TypeError, "logits: .*got list"),
        ("process_logits", TREE, {"logits": i32([[[1]]])}, TypeError, "logits: expected dtype"),
        ("process_logits", TREE, {"logits": torch.zeros(2, 3)}, ValueError, r"\[B, N, V\]"),
        ("process_logits", TREE, {"logits": torch.zeros(2, 3, 0)}, ValueError, "at least 1"),
        (
            "process_logits",
            TREE,
            {"logits": torch.zeros(2, 1, 40).expand(2, 3, 40)},
            ValueError,
            "logits: expected a tensor to write to",
        ),
        ("process_logits", TREE, {"parents": None}, ValueError, "parents: expected a tensor"),
        ("process_logits", TREE, {"draft_tokens": None}, ValueError, "draft_tokens: expected a"),
        (
            "process_logits",
            TREE,
            {"draft_tokens": None, "parents": None},
            ValueError,
            "parents: expected the parents of 3 nodes",
        ),
        ("process_logits", TREE, {"parents": torch.zeros(2, 3).long()}, TypeError, "parents: .*32"),
        ("process_logits", TREE, {"draft_tokens": i32([[0] * 3] * 2)}, TypeError, "draft_tokens"),
        ("process_logits", TREE, {"num_nodes": i32([1])}, ValueError, r"num_nodes: .*\(2\)"),
        (
            "process_logits",
            TREE,
            {"repetition_penalty": 0.0},
            ValueError,
            "expected a float32 value from 1.4",
        ),
        ("process_logits", TREE, {"repetition_penalty": NAN}, ValueError, "got nan"),
        ("process_logits", TREE, {"presence_penalty": INF}, ValueError, "presence_penalty: .*inf"),
        ("process_logits", TREE, {"frequency_penalty": "1"}, TypeError, "frequency_penalty: .*str"),
        (
            "process_logits",
            TREE,
            {"repetition_penalty": 1.5},
            ValueError,
            "output_counts: expected a tensor, because repetition_penalty",
        ),
        (
            "process_logits",
            TREE | COUNTS,
            {"presence_penalty": torch.ones(3)},
            ValueError,
            r"presence_penalty: .*\(2\)",
        ),
        (
            "process_logits",
            TREE | COUNTS,
            {"presence_penalty": torch.ones(2).double()},
            TypeError,
            "presence_penalty: .*float32",
        ),
        ("process_logits", TREE, {"output_counts": i32([[0] * 39] * 2)}, ValueError, "40"),
        (
            "process_logits",
            TREE,
            {"prompt_mask": i32([[0]] * 2)},
            ValueError,
            r"prompt_mask: .*\(2, 2\)",
        ),
        ("process_logits", TREE | BIAS, {"bias_values": None}, ValueError, "bias_values: .*beside"),
        ("process_logits", TREE | BIAS, {"bias_tokens": None}, ValueError, "bias_tokens: .*beside"),
        ("process_logits", TREE | BIAS, {"bias_values": torch.ones(2, 2)}, ValueError, "bias_val"),
        ("token_logprobs", LOGPROBS, {"slots": LOGPROBS["slots"].long()}, TypeError, "slots: .*32"),
        ("token_logprobs", LOGPROBS, {"slots": i32([0, 1])}, ValueError, r"slots: .*\[B, T\]"),
        ("token_logprobs", LOGPROBS, {"tokens": torch.zeros(2, 3).long()}, ValueError, "tokens"),
        ("token_logprobs", LOGPROBS, {"logits": torch.zeros(1, 3, 40)}, ValueError, r"slots: .*1"),
        ("token_logprobs", LOGPROBS, {"logits": torch.zeros(2, 3, 0)}, ValueError, "at least 1"),
        ("count_tokens", COUNT, {"counts": COUNT["tokens"]}, TypeError, "counts: .*int32"),
        ("count_tokens", COUNT, {"tokens": i32([[0]] * 2)}, TypeError, "tokens: .*int64"),
        ("count_tokens", COUNT, {"tokens": torch.zeros(1, 3).long()}, ValueError, "tokens: .*2"),
        (
            "count_tokens",
            COUNT,
            {"counts": i32([[0] * 4]).expand(2, 4)},
            ValueError,
            "counts: expected a tensor to write to",
        ),
        ("mark_tokens", MARK, {"mask": i32([0])}, ValueError, r"mask: .*\[B, ceil"),
        ("mark_tokens", MARK, {"tokens": [[0]]}, TypeError, "tokens: .*got list"),
    ],
)
def test_wrong_arguments_are_named(function, base, change, error, message):
    with pytest.raises(error, match=message):
        getattr(e2, function)(**(base | change))


@pytest.mark.parametrize(
    ("function", "base", "change", "message"),
    [
        ("process_logits", TREE, {"parents": i32([[-1, 2, 1]] * 2)}, r"parents\[0, 1\]: .*cycle"),
        ("process_logits", TREE, {"parents": i32([[-1, 0, 3]] * 2)}, r"parents\[0, 2\]: .*got 3"),
        ("process_logits", TREE, {"num_nodes": i32([3, 4])}, r"num_nodes\[1\]: .*got 4"),
        ("process_logits", TREE, {"output_counts": i32([[-1] * 40] * 2)}, r"output_counts\[0, 0\]"),
        (
            "process_logits",
            TREE | COUNTS,
            {"repetition_penalty": torch.tensor([1.0, 0.0])},
            r"repetition_penalty\[1\]: .*got 0",
        ),
        (
            "process_logits",
            TREE | COUNTS,
            {"frequency_penalty": torch.tensor([NAN, 0.0])},
            r"frequency_penalty\[0\]: .*got nan",
        ),
        (
            "process_logits",
            TREE | BIAS,
            {"bias_tokens": torch.tensor([[0], [40]])},
            r"bias_tokens\[1, 0\]: .*got 40",
        ),
        (
            "process_logits",
            TREE | BIAS,
            {"bias_values": torch.tensor([[INF], [0.0]])},
            r"bias_values\[0, 0\]: .*got inf",
        ),
        ("token_logprobs", LOGPROBS, {"slots": i32([[0, 3], [0, 0]])}, r"slots\[0, 1\]: .*got 3"),
        (
            "token_logprobs",
            LOGPROBS,
            {"tokens": torch.tensor([[0, -1], [0, -1]])},
            r"tokens\[0, 1\]: .*got -1",
        ),
        ("count_tokens", COUNT, {"tokens": torch.tensor([[0, -1, 4]] * 2)}, r"tokens\[0, 2\]"),
        ("mark_tokens", MARK, {"tokens": torch.tensor([[0, -2, 4]] * 2)}, r"tokens\[0, 1\]"),
    ],
)
def test_validation_names_the_bad_value(function, base, change, message, monkeypatch):
    def call(arguments, **more):
        # Written arguments are cloned: the table is shared.
        clones = {k: v.clone() if torch.is_tensor(v) else v for k, v in arguments.items()}
        getattr(e2, function)(**clones, **more)

    call(base, validate=True)
    call(base | change)
    with pytest.raises(ValueError, match=message):
        call(base | change, validate=True)
    monkeypatch.setattr(_checks, "VALIDATE", True)
    with pytest.raises(ValueError, match=message):
        call(base | change)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1e-46),  # 0 in float32
        ("repetition_penalty", 1e39),
        ("frequency_penalty", 1e39),
        ("presence_penalty", -1e39),
    ],
)
def test_numbers_that_float32_does_not_have_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected a float32 value from"):
        e2.process_logits(**TREE, output_counts=i32([[0] * 40] * 2), **{name: value})


def test_logits_that_require_grad_are_refused():
    logits = torch.zeros(2, 3, 40, requires_grad=True)
    with pytest.raises(ValueError, match="logits: .*does not require grad"):
        e2.process_logits(**(TREE | {"logits": logits}))
    with pytest.raises(ValueError, match="logits: .*does not require grad"):
        e2.token_logprobs(**(LOGPROBS | {"logits": logits}))


def test_nothing_to_do_is_nothing_done():
    before = torch.randn(2, 3, 40)
    for kwargs in (
        {},
        {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0},
    ):
        logits = before.clone()
        e2.process_logits(**(TREE | {"logits": logits}), **kwargs)
        assert torch.equal(logits, before)
    e2.process_logits(torch.empty(0, 1, 5), output_counts=i32([]).view(0, 5), presence_penalty=1.0)
    none = torch.empty(0, 2, dtype=torch.int64)
    assert e2.token_logprobs(torch.empty(0, 2, 5), none.int(), none).shape == (0, 2)
