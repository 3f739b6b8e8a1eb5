"""decoder_layer: the bits of its operators one after another, and refusals before anything."""

import math
import random

import pytest
import torch
from test_cache import LAYOUTS, equal, lens, make_cache

import eagle2_kernels as ek
from eagle2_kernels import reference

BF16 = torch.bfloat16


def normal(*shape, seed, scale=1.0, dtype=BF16):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def packed(out_features, in_features, seed):
    weight = normal(out_features, in_features, seed=seed, scale=in_features**-0.5)
    return ek.pack_linear_weight(weight)


def make_layer(size, heads, dim, inner, *, seed=0, width=None):
    """Weights of a layer with ``heads`` (Hq, Hkv), by keywords."""
    hq, hkv = heads
    return {
        "qkv_packed": packed((hq + 2 * hkv) * dim, width or size, seed + 1),
        "o_packed": packed(size, hq * dim, seed + 2),
        "post_norm_weight": normal(size, seed=seed + 3),
        "gate_up_packed": packed(2 * inner, size, seed + 4),
        "down_packed": packed(size, inner, seed + 5),
        "num_heads": hq,
        "intermediate_size": inner,
        "norm_weight": normal(size, seed=seed + 6),
    }


def make_rows(b, n, size, rotated, *, seed=0, dtype=BF16):
    angles = normal(b, n, rotated, seed=seed + 11, scale=10.0, dtype=torch.float32)
    tables = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    return {"hidden": normal(b, n, size, seed=seed + 10)} | tables


def random_tree(b, slots, n, chance):
    """Mask rows of the last ``n`` of so many slots, one of them padding at times; depths."""
    mask = torch.zeros(b, slots, slots, dtype=torch.bool)
    depths = torch.zeros(b, slots, dtype=torch.int32)
    for r in range(b):
        for j in range(slots):
            parent = chance.randrange(-1, j) if j else -1
            if parent >= 0:
                mask[r, j] = mask[r, parent]
                depths[r, j] = depths[r, parent] + 1
            mask[r, j, j] = True
    mask = mask[:, slots - n :]
    if chance.random() < 0.5:
        mask[-1, -1] = False
    return ek.pack_tree_mask(mask), depths


def random_call(seed):
    """Arguments by keywords, the storage behind the caches, and what to make of them again."""
    chance = random.Random(seed)
    b, n = chance.choice([1, 2, 3]), chance.choice([1, 2, 5, 9, 13, 30])
    hkv, dim = chance.choice([1, 2, 3]), chance.choice([8, 24, 64, 10])
    hq = hkv * chance.choice([1, 3, 4])
    size, inner = chance.choice([32, 45, 96]), chance.choice([17, 48, 130])
    slots = n + chance.choice([0, 0, 4])
    k_cache, v_cache, both, table = make_cache(
        *(chance.choice(LAYOUTS), b, 40 + slots, hkv, dim), BF16
    )
    rotated = chance.choice([dim, dim, 2 * (dim // 4)])
    tables = chance.choice([BF16, torch.float32])
    call = make_rows(b, n, size, rotated, seed=seed, dtype=tables)
    call |= {"k_cache": k_cache, "v_cache": v_cache, "page_table": table, "eps": 1e-3}
    call["prefix_lens"] = torch.tensor([chance.randrange(40) for _ in range(b)]).int()
    wide = None
    if chance.random() < 0.3:
        wide = size + 7
        call["attention_input"] = normal(b, n, wide + 5, seed=seed + 20)[..., 2 : wide + 2]
    call |= make_layer(size, (hq, hkv), dim, inner, seed=seed, width=wide)
    if wide or chance.random() < 0.3:
        call["norm_weight"] = None
    if slots > n:
        call["tree_len"] = slots
    if chance.random() < 0.7:
        call["tree_mask"], call["depths"] = random_tree(b, slots, n, chance)
        if chance.random() < 0.5:
            call["window"] = 3
    if chance.random() < 0.5:
        call["lengths"] = torch.tensor([chance.randrange(n + 1) for _ in range(b)]).int()
    if chance.random() < 0.5:
        sizes = {"qkv": (hq + 2 * hkv) * dim, "o": size, "gate_up": 2 * inner, "down": size}
        for i, (name, width) in enumerate(sizes.items()):
            call[f"{name}_bias"] = normal(width, seed=seed + 30 + i)
    if chance.random() < 0.5:
        call |= {f"{name}_weight": normal(dim, seed=seed + ord(name)) for name in "qk"}
    if chance.random() < 0.5:
        call |= {"softcap": 5.0, "sm_scale": 0.3}
    return call, both


def again(call, both):
    """The same call on copies of what it writes."""
    twin = both.clone()
    caches = {
        name: torch.as_strided(twin, x.shape, x.stride(), x.storage_offset())
        for name, x in call.items()
        if name in ("k_cache", "v_cache")
    }
    return call | caches | {"hidden": call["hidden"].clone()}, twin


def by_operators(
    hidden, cos, sin, k_cache, v_cache, prefix_lens, tree_mask=None, lengths=None, **layer
):
    """The same layer, an operator at a time."""
    given = layer.get
    _, n, size = hidden.shape
    hkv, dim = k_cache.shape[2:]
    heads, inner = layer["num_heads"], layer["intermediate_size"]
    eps, table, slots = given("eps", 1e-6), given("page_table"), given("tree_len", n)

    def product(x, name, columns):
        return ek.packed_linear(x, layer[f"{name}_packed"], columns, given(f"{name}_bias"))

    x = hidden if given("attention_input") is None else layer["attention_input"]
    if given("norm_weight") is not None:
        x = ek.rms_norm(x, layer["norm_weight"], eps)
    qkv = product(x, "qkv", (heads + 2 * hkv) * dim)
    norms = {"q_weight": given("q_weight"), "k_weight": given("k_weight"), "eps": eps}
    caches, first = (k_cache, v_cache), prefix_lens + (slots - n)
    q = ek.rope_and_write_kv(qkv, cos, sin, *caches, first, lengths, table, **norms)
    names = ("depths", "sm_scale", "softcap", "window")
    options = {name: layer[name] for name in names if name in layer}
    attended = ek.tree_attention(
        *(q, *caches, prefix_lens, tree_mask), tree_len=slots, page_table=table, **options
    )
    x = product(attended.flatten(2), "o", size)
    ek.fused_add_rms_norm(x, hidden, layer["post_norm_weight"], eps)
    hidden += product(ek.silu_and_mul(product(x, "gate_up", 2 * inner)), "down", size)


@pytest.mark.parametrize("seed", range(40))
def test_a_layer_is_its_operators_bit_for_bit(seed):
    call, both = random_call(seed)
    twin, other = again(call, both)
    assert ek.decoder_layer(**call) is None
    by_operators(**twin)
    assert equal(call["hidden"], twin["hidden"]) and equal(both, other)


@pytest.mark.parametrize("seed", range(40, 52))
def test_a_layer_is_near_the_oracle(seed):
    call, both = random_call(seed)
    twin, other = again(call, both)
    ek.decoder_layer(**call)
    reference.decoder_layer(**twin)
    for got, want in ((call["hidden"], twin["hidden"]), (both, other)):
        error = (got.double() - want.double()).abs()
        assert error.max() <= 2**-5 * want.double().abs().max()
        assert error.mean() <= 2**-8 * want.double().abs().mean()


def in_threads(run):
    """The result of a call with 1 thread and with more."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    return results


def test_many_rows_in_any_number_of_threads():
    """Rows enough for every part to be shared out, and for scratch that is not kept."""
    size, heads, dim, inner, n = 96, (4, 2), 64, 2000, 1500
    layer = make_layer(size, heads, dim, inner)
    rows = make_rows(1, n, size, dim)

    def run():
        k, v = (torch.zeros(1, n, 2, dim, dtype=BF16) for _ in "kv")
        hidden = rows["hidden"].clone()
        args = {"k_cache": k, "v_cache": v, "prefix_lens": lens(0)} | layer
        ek.decoder_layer(**rows | {"hidden": hidden}, **args)
        few = rows["hidden"][:, :2].clone()
        tables = {name: rows[name][:, :2] for name in ("cos", "sin")}
        ek.decoder_layer(few, **tables, **args)
        return hidden, few, k, v

    first, *others = in_threads(run)
    for other in others:
        assert all(map(equal, other, first))
    assert equal(first[1], first[0][:, :2])


def test_a_trees_rows_are_those_of_plain_decoding():
    """Each path token by token, in a cache of its own, by two layers."""
    size, heads, dim, inner = 64, (6, 2), 24, 80
    layers = [make_layer(size, heads, dim, inner, seed=s) for s in (0, 100)]
    parents = [-1, 0, 0, 1, 2, 3, 1]
    depth = [0, 1, 1, 2, 2, 3, 2]
    n, start = len(parents), 5
    by_depth = make_rows(1, 4, size, dim, seed=1)
    tables = {name: by_depth[name][:, depth] for name in ("cos", "sin")}
    hidden = normal(1, n, size, seed=2)
    paths = [[j] for j in range(n)]
    for j in range(1, n):
        paths[j] = [*paths[parents[j]], j]
    mask = torch.tensor([[[sum(1 << s for s in path)] for path in paths]])
    fresh = [[normal(1, 16, 2, dim, seed=s) for s in (20 + i, 30 + i)] for i in (0, 1)]
    got = hidden.clone()
    for layer, (k, v) in zip(layers, fresh, strict=True):
        args = {"k_cache": k.clone(), "v_cache": v.clone(), "prefix_lens": lens(start)}
        ek.decoder_layer(got, **tables, **args, **layer, tree_mask=mask)
    for path in paths:
        caches = [[x.clone() for x in pair] for pair in fresh]
        for i, j in enumerate(path):
            row = hidden[:, j : j + 1].clone()
            for layer, (k, v) in zip(layers, caches, strict=True):
                at = {name: table[:, j : j + 1] for name, table in tables.items()}
                args = {"k_cache": k, "v_cache": v, "prefix_lens": lens(start + i)}
                ek.decoder_layer(row, **at, **args, **layer)
        assert equal(row[0, 0], got[0, path[-1]])


def small_call(**change):
    rows = make_rows(2, 3, 32, 8)
    caches = {name: torch.zeros(2, 9, 2, 8, dtype=BF16) for name in ("k_cache", "v_cache")}
    call = rows | caches | {"prefix_lens": lens(0, 2)} | make_layer(32, (4, 2), 8, 20)
    return call | change


def test_a_hostile_row_touches_no_other():
    clean = small_call(tree_mask=torch.tensor([[[1], [2], [5]]] * 2))
    call = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in clean.items()}
    call["hidden"][0, 1], call["cos"][0, 1] = math.nan, math.inf
    ek.decoder_layer(**clean)
    ek.decoder_layer(**call)
    assert call["hidden"][0, 1].isnan().all()
    call["hidden"][0, 1] = clean["hidden"][0, 1]
    assert equal(call["hidden"], clean["hidden"])


def test_nothing_beside_hidden_is_written():
    call = small_call()
    room = torch.full((6, 3, 32), 7.0, dtype=BF16)
    room[2:4] = call["hidden"]
    ek.decoder_layer(**call | {"hidden": room[2:4]})
    assert (room[:2] == 7).all() and (room[4:] == 7).all()
    assert not equal(room[2:4], call["hidden"])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)], ids=str)
def test_no_rows(shape):
    b, n = shape
    call = small_call(**make_rows(b, n, 32, 8), prefix_lens=lens(0, 2)[:b])
    if b == 0:
        call |= {name: call[name][:0] for name in ("k_cache", "v_cache")}
    before = call["k_cache"].clone()
    ek.decoder_layer(**call)
    assert call["hidden"].shape == (b, n, 32) and equal(call["k_cache"], before)


def zeros(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)


WRONG = [
    ({"hidden": zeros(2, 3, 64)[..., :32]}, ValueError, "hidden: expected a contiguous"),
    ({"hidden": zeros(2, 3, 32).float()}, TypeError, "hidden: expected dtype bfloat16"),
    ({"hidden": zeros(6, 32)}, ValueError, "hidden: expected shape"),
    ({"cos": zeros(2, 2, 8)}, ValueError, "cos: expected shape"),
    ({"cos": zeros(2, 3, 7)}, ValueError, "cos: expected an even"),
    ({"sin": zeros(2, 3, 6)}, ValueError, "sin: expected shape"),
    ({"cos": zeros(2, 3, 8).double()}, TypeError, "cos: expected dtype"),
    ({"k_cache": zeros(1, 9, 2, 8)}, ValueError, "k_cache: expected shape"),
    ({"k_cache": zeros(2, 9, 0, 8)}, ValueError, "k_cache: expected at least one head"),
    ({"v_cache": zeros(2, 9, 2, 8).float()}, TypeError, "v_cache: expected dtype"),
    ({"v_cache": zeros(2, 9, 2, 9)}, ValueError, "v_cache: expected shape"),
    ({"v_cache": zeros(2, 1, 2, 8).expand(2, 9, 2, 8)}, ValueError, "v_cache: .*expanded"),
    ({"prefix_lens": lens(0)}, ValueError, "prefix_lens: expected shape"),
    ({"prefix_lens": lens(0, 2).long()}, TypeError, "prefix_lens: expected dtype"),
    ({"qkv_packed": zeros(3, 16, 32, 2)}, ValueError, "qkv_packed: expected shape"),
    ({"o_packed": zeros(1, 15, 32, 2)}, ValueError, "o_packed: expected shape"),
    ({"o_packed": zeros(1, 32, 32, 2)[:, ::2]}, ValueError, "o_packed: expected a contiguous"),
    ({"gate_up_packed": zeros(2, 16, 16, 4)}, ValueError, "gate_up_packed: expected shape"),
    ({"down_packed": zeros(1, 10, 32, 2).half()}, TypeError, "down_packed: expected dtype"),
    ({"post_norm_weight": zeros(31)}, ValueError, "post_norm_weight: expected shape"),
    ({"post_norm_weight": zeros(64)[::2]}, ValueError, "post_norm_weight: expected a cont"),
    ({"norm_weight": zeros(33)}, ValueError, "norm_weight: expected shape"),
    ({"num_heads": 0}, ValueError, "num_heads: expected at least 1"),
    ({"num_heads": 3}, ValueError, "num_heads: expected a multiple of the 2 KV heads"),
    ({"num_heads": 6}, ValueError, "qkv_packed: expected shape"),
    ({"intermediate_size": 0}, ValueError, "intermediate_size: expected at least 1"),
    ({"intermediate_size": 40}, ValueError, "gate_up_packed: expected shape"),
    ({"qkv_bias": zeros(63)}, ValueError, "qkv_bias: expected shape"),
    ({"o_bias": zeros(32).float()}, TypeError, "o_bias: expected dtype"),
    ({"gate_up_bias": zeros(80)[::2]}, ValueError, "gate_up_bias: expected a contiguous"),
    ({"down_bias": zeros(2, 32)}, ValueError, "down_bias: expected shape"),
    ({"q_weight": zeros(9)}, ValueError, "q_weight: expected shape"),
    ({"k_weight": zeros(8).float()}, TypeError, "k_weight: expected dtype"),
    ({"attention_input": zeros(2, 3, 32)}, ValueError, "norm_weight: expected None beside"),
    (
        {"attention_input": zeros(2, 2, 32), "norm_weight": None},
        ValueError,
        "attention_input: expected shape",
    ),
    (
        {"attention_input": zeros(2, 32, 3).mT, "norm_weight": None},
        ValueError,
        "attention_input: expected a contiguous last",
    ),
    (
        {"attention_input": zeros(2, 3, 34), "norm_weight": None},
        ValueError,
        "qkv_packed: expected shape",
    ),
    ({"lengths": lens(1)}, ValueError, "lengths: expected shape"),
    ({"tree_mask": torch.ones(2, 3, 2).long()}, ValueError, "tree_mask: expected shape"),
    ({"tree_len": 2}, ValueError, "tree_len: expected at least 3, got 2"),
    ({"tree_len": 70, "tree_mask": torch.ones(2, 3, 1).long()}, ValueError, "tree_mask: expected"),
    ({"window": 0}, ValueError, "window: expected"),
    ({"window": 3, "tree_mask": torch.ones(2, 3, 1).long()}, ValueError, "depths: expected"),
    ({"depths": lens(0, 1)}, ValueError, "depths: expected shape"),
    ({"softcap": -1.0}, ValueError, "softcap: expected"),
    ({"page_table": lens(1)}, ValueError, "page_table: expected shape"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_a_wrong_argument_is_named_and_nothing_written(change, error, message):
    call = small_call(**change)
    seen = {n: call[n].clone() for n in ("hidden", "k_cache", "v_cache")}
    with pytest.raises(error, match=f"^{message}"):
        ek.decoder_layer(**call)
    with pytest.raises(RuntimeError, match=r"^\w+: (expected|needed)"):
        torch.ops.eagle2_kernels.decoder_layer(**call)
    assert all(equal(call[name], before) for name, before in seen.items())


def test_values_are_checked_on_request():
    ek.decoder_layer(**small_call(), validate=True)
    for change, message in (
        ({"prefix_lens": lens(0, 7)}, "prefix_lens"),
        ({"lengths": lens(4, 0)}, "lengths"),
        ({"tree_mask": torch.tensor([[[1], [3], [8]]] * 2)}, "tree_mask"),
        ({"gate_up_packed": zeros(2, 16, 32, 2) + 1}, "gate_up_packed"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ek.decoder_layer(**small_call(**change), validate=True)
