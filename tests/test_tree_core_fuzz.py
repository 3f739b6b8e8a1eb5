"""csrc/tree.h on drawn input, against statements in plain Python; free of torch.

`make sanitize` runs this file with the core built for AddressSanitizer and UBSan: every array has
exactly the size the contract names, so that a read or a write past it is seen.
``EAGLE2_FUZZ_SECONDS`` makes each test go on with fresh seeds for that long.
"""

import itertools
import math
import os
import time

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("EAGLE2_FUZZ_SECONDS", "0"))
TEAMS = [1, 3]
WILD = [-(2**31), -(2**31) + 1, -2, -1, 0, 1, 2**31 - 2, 2**31 - 1]
NEG_INF = -math.inf


def fuzz(check, strategy, examples=50):
    """``check`` on values of ``strategy``: one round of fixed draws, more while there is time."""
    end = time.monotonic() + SECONDS
    for number in itertools.count():
        round_ = settings(max_examples=examples, deadline=None, database=None)(
            seed(number)(given(strategy)(check))
        )
        round_()
        if time.monotonic() >= end:
            break


def words_of(n):
    return (n + 63) // 64


def structure(parents, in_tree, prefix):
    """(depths, position ids, first child, next sibling, mask words) of slots by their parents.

    ``in_tree``: slots in use; a slot whose walk does not end at slot 0 is left out with depth -1.
    """
    n = len(parents)
    depths, positions = [0] * n, [prefix] * n
    child, sibling, masks = [-1] * n, [-1] * n, [0] * n
    for slot in range(in_tree):
        walk, at = [slot], slot
        while at != 0 and len(walk) <= in_tree and 0 <= parents[at] < in_tree:
            at = parents[at]
            walk.append(at)
        if at != 0 or parents[0] != -1:
            depths[slot] = -1
            continue
        depths[slot] = len(walk) - 1
        positions[slot] = prefix + depths[slot]
        masks[slot] = sum(1 << a for a in walk)
        if slot > 0:
            older = [s for s in range(1, slot) if parents[s] == parents[slot] and depths[s] > 0]
            if older:
                sibling[older[-1]] = slot
            else:
                child[parents[slot]] = slot
    split = [m >> 64 * w & (2**64 - 1) for m in masks for w in range(words_of(n))]
    return depths, positions, child, sibling, split


def tree_arrays(n):
    dtypes = (np.int64, np.int32, np.int32, np.int64, np.float32, np.int32, np.int32)
    arrays = [np.full(n, 77, dtype) for dtype in dtypes]
    return [*arrays, np.full(n * words_of(n), 77, np.uint64), np.full(1, 77, np.int32)]


def assert_tree(got, kept, root, prefix, active):
    """``kept``: (token, score, parent's place in kept or -1) in slot order after the root."""
    tokens, parents, depths, positions, scores, child, sibling, mask, count = got
    n = len(tokens)
    used = len(kept) + 1 if active else 0
    padding = n - used
    top = [-1] if active else []
    want = [*top, *(p + 1 for _, _, p in kept), *[-1] * padding]
    assert count[0] == used
    assert parents.tolist() == want
    assert tokens.tolist() == [root] * active + [t for t, _, _ in kept] + [0] * padding
    assert scores.tolist() == [0.0] * active + [s for _, s, _ in kept] + [NEG_INF] * padding
    links = structure(want, used, prefix)
    for a, b in zip((depths, positions, child, sibling, mask), links, strict=True):
        assert a.tolist() == b


parent_lists = st.lists(
    st.one_of(st.integers(-2, 70), st.sampled_from(WILD)), min_size=1, max_size=70
)


def near(parents):
    """Most parents are slots, some are the first number that is none."""
    return [p % (len(parents) + 1) if 0 <= p < 100 else p for p in parents]


@pytest.mark.parametrize("team", TEAMS)
def test_flatten(core, team):
    def check(case):
        parents, count, prefix, rooted = case
        parents = near(parents)
        if rooted:
            parents[0] = -1
        n = len(parents)
        dtypes = (np.int32, np.int64, np.int32, np.int32)
        got = [np.full(n, 77, dtype) for dtype in dtypes]
        got.append(np.full(n * words_of(n), 77, np.uint64))
        core.flatten(np.array(parents, np.int32), n, count, prefix, *got, team)
        for a, b in zip(got, structure(parents, min(max(count, 0), n), prefix), strict=True):
            assert a.tolist() == b

    counts = st.one_of(st.integers(-1, 75), st.sampled_from(WILD))
    prefixes = st.sampled_from([0, 5, -(2**31), 2**31 - 1])
    fuzz(check, st.tuples(parent_lists, counts, prefixes, st.booleans()), 100 if team == 1 else 20)


@pytest.mark.parametrize("team", TEAMS)
def test_build(core, team):
    scores = st.sampled_from([0.0, -0.0, -0.5, -1.0, -2.0, math.nan, NEG_INF, math.inf, 3e38])

    def check(case):
        candidates, n, slots, deepest = case
        own = [s for s, _ in candidates]
        parents = [p % (i + 2) if 0 <= p < 80 else p for i, (_, p) in enumerate(candidates)]
        m = len(own)
        got = tree_arrays(n)
        core.build(
            np.arange(m), np.array(own, np.float32), np.array(parents, np.int32),
            9, 8, n, slots, deepest, *got, team,
        )  # fmt: skip
        effective, depth = [], []
        for i, parent in enumerate(parents):
            score = NEG_INF if math.isnan(own[i]) else own[i]
            known = -1 <= parent < i
            above = math.inf if parent < 0 else effective[parent] if known else NEG_INF
            effective.append(min(score, above) if known else NEG_INF)
            depth.append(1 + (depth[parent] if known and parent >= 0 else 0))
        alive = [i for i in range(m) if effective[i] > NEG_INF and depth[i] <= deepest]
        best = sorted(alive, key=lambda i: (-effective[i], i))[: max(min(slots, n) - 1, 0)]
        kept = sorted(best, key=lambda i: (depth[i], i))
        place = {c: i for i, c in enumerate(kept)} | {-1: -1}
        rows = [(c, float(np.float32(own[c])), place[parents[c]]) for c in kept]
        assert_tree(got, rows, 9, 8, slots > 0)

    limit = st.one_of(st.integers(-1, 80), st.sampled_from([-(2**63), 2**63 - 1]))
    parent = st.one_of(st.integers(-1, 90), st.sampled_from(WILD))
    fuzz(
        check,
        st.tuples(
            st.lists(st.tuples(scores, parent), max_size=70), st.integers(1, 70), limit, limit
        ),
        100 if team == 1 else 20,
    )


@pytest.mark.parametrize("team", TEAMS)
def test_build_from_marginals(core, team):
    entry = st.sampled_from([0.0, -0.25, -1.0, -3.0, 0.5, math.nan, NEG_INF, math.inf, -3e38])

    def check(case):
        levels, n, slots, deepest = case
        k = max(map(len, levels), default=0)
        rows = [level + [NEG_INF] * (k - len(level)) for level in levels]
        tokens = np.arange(len(rows) * k)
        got = tree_arrays(n)
        core.build_from_marginals(
            tokens, np.array(rows, np.float32).reshape(-1), len(rows), k,
            9, 8, n, slots, deepest, *got, team,
        )  # fmt: skip
        counted = []
        for row in rows:
            bound, level = 0.0, []
            for value in row:
                bound = NEG_INF if math.isnan(value) else min(value, bound)
                level.append(np.float32(bound))
            counted.append(level)
        room, taken, opened, frontier = max(min(slots, n) - 1, 0), [], [(1, 0, -1)], []
        while len(taken) < room:
            for d, rank, parent in opened:
                if d <= min(len(rows), deepest) and rank < k:
                    with np.errstate(over="ignore"):
                        above = np.float32(-taken[parent][0] if parent >= 0 else 0)
                        score = float(np.float32(above + counted[d - 1][rank]))
                    if score > NEG_INF:
                        frontier.append((-score, d, rank, parent))
            if not frontier:
                break
            frontier.sort()
            taken.append(frontier.pop(0))
            _, d, rank, parent = taken[-1]
            opened = [(d, rank + 1, parent), (d + 1, 0, len(taken) - 1)]
        order = sorted(range(len(taken)), key=lambda i: (taken[i][1], i))
        place = {i: at for at, i in enumerate(order)} | {-1: -1}
        kept = [
            (int(tokens[(taken[i][1] - 1) * k + taken[i][2]]), -taken[i][0], place[taken[i][3]])
            for i in order
        ]
        assert_tree(got, kept, 9, 8, slots > 0)

    # Ties matter where the tree is cut short among them.
    tied = st.lists(st.sampled_from([-1.0, 0.0]), min_size=1, max_size=5)
    falling = tied.map(lambda row: sorted(row, reverse=True))
    levels = st.lists(st.lists(entry, max_size=5) | falling, max_size=5) | st.lists(falling)
    limit = st.one_of(st.integers(-1, 80), st.sampled_from([-(2**63), 2**63 - 1]))
    fuzz(
        check,
        st.tuples(levels, st.integers(1, 9) | st.integers(1, 70), limit, limit),
        100 if team == 1 else 20,
    )


@pytest.mark.parametrize("team", TEAMS)
def test_leaf_paths(core, team):
    def check(case):
        parents, count, width = case
        parents = [-1, *near(parents)[1:]]
        n = len(parents)
        used = min(max(count, 0), n)
        rows = np.full(n * width, 77, np.int64)
        found = core.leaf_paths(np.array(parents, np.int32), count, width, rows, team)
        depths = structure(parents, used, 0)[0]
        inner = {parents[s] for s in range(1, used) if depths[s] > 0}
        want = []
        for leaf in range(used):
            if depths[leaf] < 0 or leaf in inner:
                continue
            path = [leaf]
            while path[-1] != 0:
                path.append(parents[path[-1]])
            path = path[::-1][:width]
            want.append(path + [-1] * (width - len(path)))
        assert found == len(want)
        assert rows.reshape(n, width).tolist() == want + [[-1] * width] * (n - len(want))

    counts = st.one_of(st.integers(-1, 75), st.sampled_from(WILD))
    fuzz(check, st.tuples(parent_lists, counts, st.integers(1, 6)), 50 if team == 1 else 20)


@pytest.mark.parametrize("team", TEAMS)
def test_extend(core, team):
    beams = st.one_of(st.integers(-1, 30), st.sampled_from([-(2**63), 2**63 - 1, 2**32]))

    def check(case):
        beam, level, spare, bits = case
        k = len(beam)
        words = words_of(level * k) + spare
        end = k + level * k * k
        start, above = end - k * k, 0 if level == 1 else end - 2 * k * k
        mask = np.array([(bits * (i + 1)) % 2**64 for i in range(k * words)], np.uint64)
        parents = np.full(end, 77, np.int32)
        following = np.full(k * words, 77, np.uint64)
        core.extend(level, k, np.array(beam), mask, parents, following, team)
        assert (parents[:start] == 77).all()
        for j, entry in enumerate(beam):
            known = 0 <= entry < start - above
            hung = parents[start + j * k : start + (j + 1) * k].tolist()
            assert hung == [above + entry if known else -2] * k
            slot = (level - 1) * k + j
            for w in range(words):
                inherited = int(mask[entry // k * words + w]) if known else 0
                own = 1 << slot % 64 if w == slot // 64 else 0
                assert int(following[j * words + w]) == inherited | own

    fuzz(
        check,
        st.tuples(
            st.lists(beams, min_size=1, max_size=9),
            st.integers(1, 9),
            st.integers(0, 2),
            st.integers(0, 2**64 - 1),
        ),
    )


@pytest.mark.parametrize("team", TEAMS)
def test_walk(core, team):
    slots = st.one_of(st.integers(-1, 12), st.sampled_from(WILD))
    node = st.tuples(st.integers(0, 2), st.integers(0, 2), slots, slots)

    def check(case):
        nodes, max_depth = case
        target, draft, child, sibling = (list(column) for column in zip(*nodes, strict=True))
        n = len(nodes)
        asked, accepted, index, emitted = core.walk(
            np.array(target), np.array(draft), np.array(child, np.int32),
            np.array(sibling, np.int32), max_depth,
        )  # fmt: skip
        path = [0]
        while len(path) <= max_depth:
            at, seen = child[path[-1]], []
            while 0 <= at < n and len(seen) < n and draft[at] != target[path[-1]]:
                seen.append(at)
                at = sibling[at]
            if not 0 <= at < n or len(seen) >= n:
                break
            path.append(at)
        assert accepted == len(path) - 1 and asked == path
        assert index == path + [-1] * (max_depth + 1 - len(path))
        assert emitted[: len(path)] == [target[s] for s in path]
        together = core.accept(
            np.array(target), np.array(draft), np.array(child, np.int32),
            np.array(sibling, np.int32), max_depth, team,
        )  # fmt: skip
        assert together == (accepted, index, target[path[-1]])

    fuzz(
        check,
        st.tuples(st.lists(node, min_size=1, max_size=10), st.integers(0, 8)),
        50 if team == 1 else 20,
    )


@pytest.mark.parametrize("team", TEAMS)
def test_walk_by_coins(core, team):
    slots = st.one_of(st.integers(-1, 12), st.sampled_from(WILD))
    tokens = st.one_of(st.integers(-1, 3), st.sampled_from([-(2**63), 2**63 - 1]))
    mass = st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, -1.0])
    coins = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, math.nan, -1.0])
    row = st.lists(mass, min_size=3, max_size=3)

    def check(case):
        nodes, max_depth = case
        rows, coin, draft, child, sibling = (list(column) for column in zip(*nodes, strict=True))
        n = len(nodes)
        asked, accepted, index, bonus = core.walk_coins(
            np.array(rows).reshape(-1), np.array(coin), np.array(draft),
            np.array(child, np.int32), np.array(sibling, np.int32), max_depth,
        )  # fmt: skip
        path = [0]
        while True:
            node, at = path[-1], child[path[-1]] if len(path) <= max_depth else -1
            rest = [p if p > 0 else 0.0 for p in rows[node]]
            total, step, last = 0.0, None, None
            for _ in range(n):
                if step is not None or not 0 <= at < n:
                    break
                if draft[at] in range(3) and rest[draft[at]]:
                    total, last = total + rest[draft[at]], at
                    rest[draft[at]] = 0.0
                    step = at if total > coin[node] else None
                at = sibling[at]
            if step is None:
                step = last if not any(rest) else None
            if step is None:
                break
            path.append(step)
        assert accepted == len(path) - 1 and asked == path
        assert index == path + [-1] * (max_depth + 1 - len(path))
        assert bonus == next((t for t in range(3) if rest[t]), 0)
        # Coin 0 draws the lowest token that is left.
        together = core.accept_coins(
            np.array(rows).reshape(-1), np.array(coin), 0.0, np.array(draft),
            np.array(child, np.int32), np.array(sibling, np.int32), max_depth, team,
        )  # fmt: skip
        assert together == (accepted, index, bonus)

    fuzz(
        check,
        st.tuples(
            st.lists(st.tuples(row, coins, tokens, slots, slots), min_size=1, max_size=10),
            st.integers(0, 8),
        ),
        100 if team == 1 else 20,
    )


@pytest.mark.parametrize("team", TEAMS)
def test_masks(core, team):
    def check(case):
        bits, step = case
        width = len(bits)
        spread = np.full(width * step, 9, np.uint8)
        spread[::step] = bits
        words = np.full(words_of(width), 77, np.uint64)
        core.pack(spread[: (width - 1) * step + 1], step, width, words, team)
        number = sum(1 << j for j, bit in enumerate(bits) if bit)
        assert [int(w) for w in words] == [
            number >> 64 * w & (2**64 - 1) for w in range(words_of(width))
        ]
        row = np.full(width, True)
        core.unpack(words, 1, width, row, team)
        assert row.tolist() == [bit != 0 for bit in bits]

    byte = st.sampled_from([0, 1, 2, 255])
    cases = st.tuples(st.lists(byte, min_size=1, max_size=140), st.integers(1, 3))
    fuzz(check, cases, 50 if team == 1 else 20)


@pytest.mark.parametrize("team", TEAMS)
def test_moves(core, team):
    def check(case):
        places, index, length, start, heads, first, count = case
        per_head, unit = 2, 3
        first, count = min(first, heads * 2 - 1), min(count, heads * 2 - min(first, heads * 2 - 1))
        size = heads * per_head * unit
        before = np.arange(len(places) * size) % 251
        cache = before.astype(np.uint8)
        length = min(length, len(index))
        core.move_path(
            cache, places, heads, per_head, unit, np.array(index, np.int32), length, start,
            first, count, team,
        )  # fmt: skip
        want = before.copy().reshape(len(places), size)
        for i, source in enumerate(index[: max(length, 0)]):
            if source < 0:
                break
            if start + source in places and start + i in places:
                to, from_ = places.index(start + i), places.index(start + source)
                units = slice(first * unit, (first + count) * unit)
                want[to, units] = before.reshape(len(places), size)[from_, units]
        assert cache.tolist() == want.reshape(-1).tolist()

    fuzz(
        check,
        st.tuples(
            st.lists(st.integers(-2, 12), unique=True, min_size=1, max_size=12),
            st.lists(st.one_of(st.integers(-1, 9), st.sampled_from(WILD)), max_size=9),
            st.integers(-1, 9),
            st.sampled_from([0, 1, 3, -(2**31), 2**31 - 1]),
            st.integers(1, 3),
            st.integers(0, 5),
            st.integers(1, 6),
        ),
        100 if team == 1 else 20,
    )


def test_addresses(core):
    def check(case):
        position, request, table, size, blocks = case
        pages = None if table is None else np.array(table, np.int32)
        block, slot = core.cache_slot(position, request, pages, size, blocks)
        if table is None:
            assert block == (request if 0 <= position < size else -1)
            assert block < 0 or slot == position
        else:
            entry = position // size
            page = table[entry] if 0 <= entry < len(table) else -1
            assert block == (page if 0 <= page < blocks else -1)
            assert block < 0 or slot == position % size

    positions = st.one_of(st.integers(-3, 200), st.sampled_from([-(2**63), 2**63 - 1, 2**40]))
    pages = st.one_of(st.integers(-1, 9), st.sampled_from(WILD))
    tables = st.none() | st.lists(pages, max_size=6)
    fuzz(
        check,
        st.tuples(positions, st.integers(0, 3), tables, st.integers(1, 40), st.integers(0, 8)),
    )


def test_numbers(core):
    """Noise and its polynomials on any bits: no undefined conversion or shift, results in range."""

    def check(case):
        bits, key, position, token = case
        x = np.array(bits, np.uint32)
        assert np.isfinite(core.gumbel(x)).all()
        floats = x.view(np.float32)
        core.log_poly(floats)
        below = core.exp_poly(-np.abs(floats[~np.isnan(floats)]))
        assert ((below >= 0) & (below <= 1)).all()
        assert math.isfinite(core.gumbel_noise(key, position, token))
        for value in floats:
            assert 0 <= core.rank_key(float(value), token % 2**31) < 2**64

    word = st.integers(0, 2**32 - 1)
    wide = st.integers(0, 2**64 - 1)
    fuzz(check, st.tuples(st.lists(word, min_size=1, max_size=50), wide, wide, word))
