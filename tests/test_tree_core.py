"""csrc/tree.h and csrc/address.h themselves, bound by pybind11: no torch between test and code."""

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_core import compile_native

from eagle2_kernels import reference

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "data" / "gumbel_noise.json").read_text())
GUARD = 77
# One member as on the CPU, three threads, a warp and a block of fibers in shuffled order.
TEAMS = [1, 3, 32, 256]
EXAMPLES = {1: 150, 3: 40, 32: 25, 256: 12}


class Guarded:
    """Output arrays with guard elements behind them."""

    def __init__(self):
        self.arrays = []

    def array(self, size, dtype):
        array = np.full(size + 8, GUARD, dtype)
        self.arrays.append((array, size))
        return array

    def values(self):
        for array, size in self.arrays:
            assert (array[size:] == GUARD).all(), "written past the end"
        return [array[:size] for array, size in self.arrays]


def as_numpy(tensors):
    return [t[0].numpy().reshape(-1) for t in tensors]


def assert_arrays_equal(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = (x.view(np.int64) if x.dtype == np.uint64 else x for x in (a, b))
        assert np.array_equal(a, b), i


def flatten(core, parents, count, prefix, team):
    n, out = len(parents), Guarded()
    arrays = [
        out.array(n, np.int32),
        out.array(n, np.int64),
        out.array(n, np.int32),
        out.array(n, np.int32),
        out.array(n * ((n + 63) // 64), np.uint64),
    ]
    core.flatten(np.array(parents, np.int32), n, count, prefix, *arrays, team)
    return out.values()


@pytest.mark.parametrize("team", TEAMS)
def test_flatten_on_any_parents(core, team):
    @settings(max_examples=EXAMPLES[team], deadline=None, derandomize=True)
    @given(st.lists(st.integers(-3, 80), min_size=1, max_size=80), st.integers(-2, 90))
    def check(parents, count):
        parents = [-1, *(p % len(parents) if p >= 0 else p for p in parents[1:])]
        got = flatten(core, parents, count, 5, team)
        tensors = reference.flatten_tree(
            torch.tensor([parents]).int(), torch.tensor([count]), torch.tensor([5])
        )
        assert_arrays_equal(got, as_numpy(tensors))

    check()


@pytest.mark.parametrize("team", TEAMS)
def test_build_on_any_candidates(core, team):
    scores = st.sampled_from([0.0, -0.0, -1.0, -2.0, -2.5, math.nan, -math.inf, math.inf])

    @settings(max_examples=EXAMPLES[team], deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
        own = data.draw(st.lists(scores, min_size=1, max_size=60))
        m = len(own)
        parents = [
            data.draw(st.one_of(st.integers(-1, c), st.integers(-4, m + 4))) for c in range(m)
        ]
        n = data.draw(st.integers(1, 70))
        slots, depth = data.draw(st.tuples(st.integers(-1, 80), st.integers(-1, 9)))
        got = build(core, list(range(m)), own, parents, n, slots, depth, team)
        tensors = reference.build_tree(
            torch.tensor([3]),
            torch.tensor([8]),
            torch.arange(m)[None],
            torch.tensor([own]),
            torch.tensor([parents]).int(),
            n,
            torch.tensor([[slots, depth]]),
        )
        assert_arrays_equal(got, [t[0].numpy().reshape(-1) for t in tensors])

    check()


def build(core, tokens, scores, parents, n, slots, depth, team):
    out = Guarded()
    dtypes = (np.int64, np.int32, np.int32, np.int64, np.float32, np.int32, np.int32)
    arrays = [out.array(n, dtype) for dtype in dtypes]
    arrays += [out.array(n * ((n + 63) // 64), np.uint64), out.array(1, np.int32)]
    core.build(
        np.array(tokens, np.int64),
        np.array(scores, np.float32),
        np.array(parents, np.int32),
        3,
        8,
        n,
        slots,
        depth,
        *arrays,
        team,
    )
    return out.values()


@pytest.mark.parametrize("team", TEAMS[1:])
def test_a_team_builds_what_one_builds_at_size(core, team):
    generator = np.random.default_rng(0)
    m, n = 3000, 300
    parents = [int(generator.integers(-1, c)) if c else -1 for c in range(m)]
    scores = -generator.integers(0, 40, m).astype(np.float32)
    args = (np.arange(m), scores, parents, n, n, m)
    assert_arrays_equal(build(core, *args, team), build(core, *args, 1))


def test_no_phase_of_a_team_lacks_a_sync(tmp_path):
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    flags = ["-fsanitize=thread", "-g", "-pthread"]
    have = subprocess.run(
        ["c++", *flags, str(probe), "-o", str(tmp_path / "probe")], capture_output=True, check=False
    )
    if have.returncode or subprocess.run([tmp_path / "probe"], capture_output=True).returncode:
        pytest.skip("this compiler has no working ThreadSanitizer")
    compile_native("team_race.cpp", tmp_path / "race", *flags)
    run = subprocess.run([tmp_path / "race"], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "WARNING" not in run.stderr, run.stdout + run.stderr[:4000]


def test_depths_of_all_parent_arrays_of_four_slots(core):
    for code in range(6**4):
        parents = [code // 6**i % 6 - 1 for i in range(4)]
        for n in range(5):
            for slot in range(n):
                walk = reference._ancestors(parents, n, slot)
                want = -1 if walk is None else len(walk) - 1
                assert core.depth_of(np.array(parents, np.int32), n, slot) == want


@pytest.mark.parametrize("team", TEAMS)
def test_marginals_build_the_same_tree_for_any_team(core, team):
    generator = np.random.default_rng(5)
    for n in (1, 2, 33, 64, 65):
        log_probs = -np.sort(generator.integers(0, 5, (4, 6)), axis=1).astype(np.float32)
        tokens = np.arange(24)
        out = Guarded()
        dtypes = (np.int64, np.int32, np.int32, np.int64, np.float32, np.int32, np.int32)
        arrays = [out.array(n, dtype) for dtype in dtypes]
        arrays += [out.array(n * ((n + 63) // 64), np.uint64), out.array(1, np.int32)]
        core.build_from_marginals(
            tokens, log_probs.reshape(-1), 4, 6, 3, 8, n, n - n // 9, 3, *arrays, team
        )
        want = reference.build_tree_from_marginals(
            torch.tensor([3]),
            torch.tensor([8]),
            torch.from_numpy(tokens).view(1, 4, 6),
            torch.from_numpy(log_probs)[None],
            n,
            torch.tensor([[n - n // 9, 3]]),
        )
        assert_arrays_equal(out.values(), as_numpy(want))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("team", TEAMS)
def test_leaf_paths_stay_inside_their_rows(core, width, team):
    generator = np.random.default_rng(width)
    for size in [12] * EXAMPLES[team] + [300] * 5:
        n = int(generator.integers(1, size))
        parents = [-1, *(int(generator.integers(-1, n + 1)) for _ in range(n - 1))]
        count = int(generator.integers(-1, n + 2))
        out = Guarded()
        rows = out.array(n * width, np.int64)
        found = core.leaf_paths(np.array(parents, np.int32), count, width, rows, team)
        want = reference.retrieve_indices(
            torch.tensor([parents]).int(), torch.tensor([count]), width - 1
        )
        assert_arrays_equal(out.values(), as_numpy([want]))
        assert found == int((want[0, :, 0] >= 0).sum())


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("team", TEAMS)
def test_extending_touches_its_own_level_only(core, level, team):
    k, words = 3, 1
    end = k + level * k * k
    beam = np.array([0, 2, 1] if level <= 1 else [8, 0, 4], np.int64)
    mask = np.array([1 << 60, 2 << 60, 4 << 60], np.uint64)
    parents = np.full(end + 5, GUARD, np.int32)
    next_mask = np.full(k * words + 4, GUARD, np.uint64)
    core.extend(level, k, beam, mask, parents, next_mask, team)
    assert (parents[end:] == GUARD).all() and (next_mask[k * words :] == GUARD).all()
    if level == 0:
        assert parents[:end].tolist() == [-1] * k
        assert next_mask[:k].tolist() == mask.tolist()
        return
    start = end - k * k
    assert (parents[:start] == GUARD).all()
    above = 0 if level == 1 else start - k * k
    assert parents[start:end].tolist() == [above + int(e) for e in beam for _ in range(k)]
    for j in range(k):
        inherited = int(mask[beam[j] // k])
        assert int(next_mask[j]) == inherited | 1 << ((level - 1) * k + j)


@pytest.mark.parametrize("team", TEAMS)
def test_extending_many_levels_equals_the_oracle(core, team):
    generator = np.random.default_rng(team)
    k, levels = 5, 5
    words = (levels * k + 63) // 64 + 1
    parents = np.full(k + (levels - 1) * k * k, GUARD, np.int32)
    want_parents = torch.from_numpy(parents.copy())[None]
    mask = np.zeros(k * words, np.uint64)
    for level in range(levels):
        beam = generator.integers(-1, (k if level <= 1 else k * k) + 1, k)
        following = np.full(k * words, GUARD, np.uint64)
        core.extend(level, k, beam, mask, parents, following, team)
        before = torch.from_numpy(mask.view(np.int64)).view(1, k, words)
        want = reference.extend_draft_tree(
            want_parents, before, torch.from_numpy(beam)[None], level
        )
        assert_arrays_equal([following, parents], as_numpy([want, want_parents]))
        mask = following


@pytest.mark.parametrize("width", [1, 31, 63, 64, 65, 130])
@pytest.mark.parametrize("team", TEAMS)
def test_masks_go_to_words_and_back(core, width, team):
    generator = np.random.default_rng(width)
    for step in (1, 3):
        mask = generator.integers(0, 3, (width, step)).astype(np.uint8)
        out = Guarded()
        words = out.array((width + 63) // 64, np.uint64)
        core.pack(mask.reshape(-1), step, width, words, team)
        (packed,) = out.values()
        want = reference.pack_tree_mask(torch.from_numpy(mask[:, 0] != 0)[None])
        assert_arrays_equal([packed], as_numpy([want]))
        spread = np.full((len(packed), step), GUARD, np.uint64)
        spread[:, 0] = packed
        row = np.ones(width + 3, bool)
        core.unpack(spread.reshape(-1), step, width, row, team)
        assert row[:width].tolist() == (mask[:, 0] != 0).tolist() and row[width:].all()


@pytest.mark.parametrize("team", TEAMS)
def test_rows_move_as_if_read_before_written(core, team):
    generator = np.random.default_rng(team)
    for round_ in range(EXAMPLES[team]):
        slots, heads, per_head, unit = 12, 3, 2, 4
        cache = torch.from_numpy(generator.integers(0, 255, (1, slots, heads, 8), np.uint8))
        start, width = int(generator.integers(0, 6)), int(generator.integers(1, 9))
        index = generator.permutation(9)[:width].astype(np.int32)
        if round_ % 3 == 0:
            index[generator.integers(0, width)] = generator.integers(-1, 13)
        accepted = int(generator.integers(-1, width + 1))
        moved = cache.clone().numpy()
        order = np.arange(slots)
        for first in range(0, heads * per_head, 2):
            core.move_path(
                moved, order, heads, per_head, unit, index, min(accepted + 1, width), start,
                first, 2, team,
            )  # fmt: skip
        reference.compact_kv(
            [cache],
            torch.from_numpy(index)[None],
            torch.tensor([accepted]),
            torch.tensor([start]),
        )
        assert np.array_equal(moved, cache.numpy())


def random_links(generator, n, wild):
    """Tokens and links of a random tree, or of no tree at all."""
    parents = [-1, *(int(generator.integers(0, i)) for i in range(1, n))]
    _, _, child, sibling, _ = reference.flatten_tree(
        torch.tensor([parents]).int(), torch.tensor([n]), torch.tensor([0])
    )
    child, sibling = child[0].numpy(), sibling[0].numpy()
    if wild:
        child, sibling = (
            np.where(generator.random(n) < 0.3, generator.integers(-3, n + 3, n), x)
            for x in (child, sibling)
        )
    return child.astype(np.int32), sibling.astype(np.int32)


@pytest.mark.parametrize("team", TEAMS)
def test_a_team_accepts_the_path_of_the_oracle(core, team):
    generator = np.random.default_rng(team)
    for round_ in range(2 * EXAMPLES[team]):
        n, depth = int(generator.integers(1, 40)), int(generator.integers(0, 7))
        child, sibling = random_links(generator, n, round_ % 3 == 0)
        target, draft = generator.integers(0, 3, (2, n))
        got = core.accept(target, draft, child, sibling, depth, team)
        index, length, bonus = reference.verify_tree(
            *(torch.from_numpy(x)[None] for x in (target, draft, child, sibling)), depth
        )
        assert got == (int(length[0]), index[0].tolist(), int(bonus[0]))
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int32)
    got = core.accept(nothing[0], nothing[0], nothing[1], nothing[1], 2, team)
    assert got == (-1, [-1, -1, -1], -1)


@pytest.mark.parametrize("vocab", [3, 33, 2500])
@pytest.mark.parametrize("team", TEAMS)
def test_a_team_walks_by_coins_as_the_oracle(core, vocab, team):
    generator = np.random.default_rng(team + vocab)
    coins_to_try = np.array([0.0, 0.25, 0.5, 1.0, math.nan, -1.0, 2.0])
    for round_ in range(EXAMPLES[team] if vocab < 1000 else 8):
        n, depth = int(generator.integers(1, 14)), int(generator.integers(0, 5))
        child, sibling = random_links(generator, n, round_ % 3 == 0)
        draft = generator.integers(-1, min(vocab, 5) + 1, n)
        rows = generator.choice([0.0, 0.125, 0.25, math.nan, -1.0, math.inf], (n, vocab))
        if round_ % 2:
            rows = generator.random((n, vocab)) * (generator.random((n, vocab)) < 0.3)
            rows[:, :5] *= vocab / 8
        # The children of some slots leave nothing.
        rows[generator.random(n) < 0.3, 5:] = 0
        coins = generator.random(n + 1)
        coins = np.where(
            generator.random(n + 1) < 0.4, generator.choice(coins_to_try, n + 1), coins
        )
        got = core.accept_coins(
            rows.reshape(-1), coins[:n], coins[n], draft, child, sibling, depth, team
        )
        index, length, bonus = reference.verify_tree_coins(
            *(torch.from_numpy(x)[None] for x in (rows, draft, child, sibling, coins[:n])),
            torch.tensor([coins[n]]),
            depth,
        )
        assert got == (int(length[0]), index[0].tolist(), int(bonus[0]))


def test_what_a_probability_counts_for(core):
    values = [0.0, -0.0, 0.25, 1e-45, -1.0, -math.inf, math.inf, math.nan]
    want = reference._mass_of(torch.tensor(values)).tolist()
    assert [core.mass_of(v) for v in values] == want


def test_the_drawn_token_does_not_depend_on_the_team(core):
    generator = np.random.default_rng(9)
    vocab, none = 70_000, np.array([-1], np.int32)
    row = (generator.random(vocab) ** 20).astype(np.float32).astype(np.float64)
    draws = [
        [
            core.accept_coins(row, np.zeros(1), coin, np.array([0]), none, none, 0, team)
            for coin in np.linspace(0, 1, 40)
        ]
        for team in TEAMS
    ]
    assert all(d == draws[0] for d in draws) and len({bonus for _, _, bonus in draws[0]}) > 30


def test_the_walk_asks_each_visited_slot_once(core):
    child, sibling = np.array([1, 3, -1, -1], np.int32), np.array([-1, 2, -1, -1], np.int32)
    draft, target = np.array([0, 5, 6, 7]), np.array([5, 7, 9, 8])
    asked, accepted, index, emitted = core.walk(target, draft, child, sibling, 3)
    assert asked == [0, 1, 3] and accepted == 2
    assert index == [0, 1, 3, -1] and emitted == [5, 7, 8, -1]


def test_walks_over_looping_links_end(core):
    loop = np.array([1, 0], np.int32)
    draft = np.array([4, 4])
    _, accepted, index, _ = core.walk(np.array([4, 4]), draft, loop, loop, 5)
    assert accepted == 5 and index == [0, 1, 0, 1, 0, 1]
    _, accepted, _, _ = core.walk(np.array([9, 9]), draft, loop, loop, 5)
    assert accepted == 0


@pytest.mark.parametrize(
    ("slots", "words"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 1), (63, 1), (64, 1), (65, 2)]
)
def test_mask_words(core, slots, words):
    assert core.mask_words(slots) == words


def test_rank_keys_order_as_scores_then_index(core):
    scores = [math.inf, 3e38, 1.0, 1e-45, 0.0, -1e-45, -1.0, -3e38, -math.inf]
    keys = [core.rank_key(s, c) for s in scores for c in (0, 1, 2**31 - 1)]
    assert keys == sorted(keys, reverse=True) and len(set(keys)) == len(keys)
    assert core.rank_key(-0.0, 3) == core.rank_key(0.0, 3)


def test_golden_words_and_noise_of_the_core(core):
    for seed, position, token, word, bits in GOLDEN["rows"]:
        seed %= 2**64
        assert core.philox(seed, position, token // 4)[token % 4] == word
        noise = np.float32(core.gumbel_noise(seed, position, token))
        assert int(noise.view(np.int32)) == bits
    words = np.array([w for w, _ in GOLDEN["edge_words"]], np.uint32)
    assert core.gumbel(words).view(np.int32).tolist() == [b for _, b in GOLDEN["edge_words"]]


def test_noise_of_many_words_has_the_oracles_bits(core):
    words = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    # Small words are the large noise, which decides draws: take them on purpose.
    words[:50_000] >>= np.random.default_rng(2).integers(0, 32, 50_000, dtype=np.uint32)
    # And those that round to 1.
    words[-2:] = 2**32 - 128, 2**32 - 1
    want = reference.gumbel_from_words(torch.from_numpy(words.astype(np.int64))).numpy()
    assert np.array_equal(core.gumbel(words).view(np.int32), want.view(np.int32))
    v = np.minimum((words.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    v = np.minimum(v.astype(np.float32), np.float32(1 - 2.0**-24)).astype(np.float64)
    exact = -np.log(-np.log1p(-v))
    assert np.abs(want - exact).max() < 3e-6


def test_logarithm_is_right_to_the_last_bits(core):
    bits = np.random.default_rng(3).integers(0x00800000, 0x7F800000, 100_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.float32([1.0, 0.5, 2.0, 2.0**-126])])
    exact = np.log(x.astype(np.float64))
    error = np.abs(core.log_poly(x) - exact) / np.maximum(np.abs(exact), 2.0**-24)
    assert error.max() < 4e-7


def test_exponential_is_right_to_the_last_bits_and_the_oracles(core):
    x = -np.abs(np.random.default_rng(4).normal(0, 30, 100_000)).astype(np.float32)
    x = np.maximum(x, np.float32(-87.0))
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(core.exp_poly(x) - exact) / exact).max() < 3e-7
    edges = np.float32([0.0, -0.0, -88.0, -1e30, -math.inf])
    assert core.exp_poly(edges).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    smallest = np.nextafter(np.float32(reference.EXP_SMALLEST), np.float32([0, -100]))
    x = np.concatenate([x, -(2.0 ** np.float32(np.arange(-140, 8))), edges, smallest])
    x = np.append(x, np.float32(reference.EXP_SMALLEST)).astype(np.float32)
    want = reference._exp(torch.from_numpy(x)).numpy()
    assert np.array_equal(core.exp_poly(x).view(np.int32), want.view(np.int32))


def test_addresses_past_thirty_two_bits(core):
    assert core.cache_offset(319, 7_864_320, 0, 512, 0, 64) == 2_508_718_080
    assert core.cache_offset(70_000, 100_000, 3, 512, 2, 64) == 7_000_001_664


@pytest.mark.parametrize(
    ("position", "where"),
    [
        (0, [70_000, 0]),
        (15, [70_000, 15]),
        (16, [2, 0]),
        (33, [-1, 1]),
        (48, [-1, 0]),
        (-1, [-1, 0]),
    ],
)
def test_cache_slots_of_a_paged_request(core, position, where):
    table = np.array([70_000, 2, -1], np.int32)
    assert core.cache_slot(position, 5, table, 16, 80_000) == where


def test_cache_slots_of_a_dense_request(core):
    assert core.cache_slot(9, 5, None, 10, 6) == [5, 9]
    assert core.cache_slot(10, 5, None, 10, 6)[0] == -1
    assert core.cache_slot(-1, 5, None, 10, 6)[0] == -1
