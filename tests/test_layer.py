"""A layer's operators between its products: values, roundings, bits, hostile rows, refusals."""

import math

import pytest
import torch
from test_cache import LAYOUTS, equal, lens, make_cache

import eagle2_kernels as ek
from eagle2_kernels import _checks, reference

DTYPES = dict(zip(("float32", "float64", "float16", "bfloat16"), _checks.FLOATS, strict=True))
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
WIDTHS = [1, 2, 3, 15, 16, 17, 31, 33, 64, 575, 576]


def rand(*shape, seed=0, dtype=torch.float32, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * scale).to(dtype)


def tolerance(dtype, roundings=2):
    """Relative: some last places of the dtype. Float64 rows pass through float32."""
    return roundings * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def assert_near(got, want, dtype, roundings=2):
    assert got.dtype == want.dtype and got.shape == want.shape
    rtol = tolerance(dtype, roundings)
    torch.testing.assert_close(got, want, rtol=rtol, atol=0, equal_nan=True)


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equals_the_oracle(dtype, width):
    x, residual = (rand(3, 5, width, seed=s, dtype=dtype, scale=3.0) for s in (1, 2))
    weight = rand(width, seed=3, dtype=dtype)
    assert_near(ek.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3), dtype, 4)
    mine, theirs = (x.clone(), residual.clone()), (x.clone(), residual.clone())
    assert ek.fused_add_rms_norm(*mine, weight, 1e-3) is None
    reference.fused_add_rms_norm(*theirs, weight, 1e-3)
    # the sum is one rounding, whoever adds
    assert torch.equal(mine[1], theirs[1])
    assert_near(mine[0], theirs[0], dtype, 4)


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul_equals_the_oracle(dtype, width):
    x = rand(3, 5, 2 * width, dtype=dtype, scale=5.0)
    assert_near(ek.silu_and_mul(x), reference.silu_and_mul(x), dtype, 4)


def test_low_precision_rounds_where_transformers_rounds():
    """Bit for bit in nearly every element: only the norm's sum has an order of its own."""
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = rand(64, 576, dtype=dtype, scale=4.0), rand(576, seed=1, dtype=dtype)
        gate = rand(64, 2048, seed=2, dtype=dtype, scale=4.0)
        pairs = [
            (ek.rms_norm(x, weight), reference.rms_norm(x, weight)),
            (ek.silu_and_mul(gate), reference.silu_and_mul(gate)),
        ]
        for got, want in pairs:
            assert (got != want).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_of_every_sixteen_bit_number_equals_the_oracle(dtype):
    """In float64: within one last place, but where e^-x passes float32, as it does in torch."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    got = ek.silu_and_mul(torch.cat([x, torch.ones_like(x)]))
    exact = (x.double() / (1 + (-x.double()).exp())).to(dtype)
    finite = exact.isfinite()
    assert torch.equal(got.isnan(), exact.isnan())
    assert torch.equal(got[~finite & ~exact.isnan()], exact[~finite & ~exact.isnan()])
    # neighbours of one sign differ by 1 as integers
    steps = (got.view(torch.int16).int() - exact.view(torch.int16).int())[finite].abs()
    held = x[finite] > -88
    assert steps[held].max() <= 1 and (steps[held] > 0).float().mean() < 2e-3
    assert got[finite][~held].abs().max() <= 1e-35


def test_silu_of_float32_equals_the_oracle_over_its_whole_range():
    x = torch.cat([torch.linspace(-87, 120, 200_001), torch.linspace(-1e-3, 1e-3, 2001)])
    got = ek.silu_and_mul(torch.cat([x, torch.ones_like(x)])).double()
    want = x.double() / (1 + (-x.double()).exp())
    assert ((got - want).abs() <= 4e-7 * want.abs()).all()
    far = torch.tensor([-89.0, -200.0, -3e38, -math.inf, math.inf, 3e38, math.nan, -0.0])
    want = torch.nn.functional.silu(far)
    got = ek.silu_and_mul(torch.cat([far, torch.ones_like(far)]))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-35, equal_nan=True)


@dtypes
def test_a_hostile_row_equals_the_oracle_and_touches_no_other(dtype):
    most = torch.finfo(dtype).max
    bad = [math.nan, math.inf, -math.inf, most, -most, torch.finfo(dtype).tiny / 2, 0.0]
    x = rand(len(bad) + 1, 40, dtype=dtype)
    for i, value in enumerate(bad):
        x[i, 3:7] = value
    weight = rand(40, seed=1, dtype=dtype)
    clean = x[-1:].clone()
    for got, want in (
        (ek.rms_norm(x, weight), reference.rms_norm(x, weight)),
        (ek.silu_and_mul(x), reference.silu_and_mul(x)),
    ):
        assert_near(got, want, dtype, 4)
    assert torch.equal(ek.rms_norm(x, weight)[-1:], ek.rms_norm(clean, weight))
    mine, theirs = (x.clone(), x.flip(1).contiguous()), (x.clone(), x.flip(1).contiguous())
    ek.fused_add_rms_norm(*mine, weight)
    reference.fused_add_rms_norm(*theirs, weight)
    for got, want in zip(mine, theirs, strict=True):
        assert_near(got, want, dtype, 4)


def in_threads(call):
    """The result of a call with 1 thread and with more."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(threads)
    return results


@dtypes
def test_a_rows_bits_depend_neither_on_other_rows_nor_on_threads(dtype):
    # enough rows to be shared out
    x, weight = rand(300, 256, dtype=dtype), rand(256, seed=1, dtype=dtype)
    residual = rand(300, 256, seed=2, dtype=dtype)

    def everything(rows):
        normed, summed = x[rows].clone(), residual[rows].clone()
        ek.fused_add_rms_norm(normed, summed, weight)
        return ek.rms_norm(x[rows], weight), normed, summed, ek.silu_and_mul(x[rows])

    want, *others = in_threads(lambda: everything(slice(None)))
    for other in others:
        assert all(map(equal, other, want))
    for rows in (slice(0, 1), slice(299, 300), slice(7, 40)):
        assert all(equal(got, all_[rows]) for got, all_ in zip(everything(rows), want, strict=True))


@dtypes
def test_rows_may_lie_anywhere(dtype):
    """Columns of a wider product, dimensions in another order; the output of a twin too."""
    wide, weight = rand(4, 3, 100, dtype=dtype), rand(48, seed=1, dtype=dtype)
    for x in (wide[..., 5:53], wide.transpose(0, 1)[..., :48], wide[::2, :, 52:], wide[:, :0, :48]):
        solid = x.contiguous()
        want = ek.rms_norm(solid, weight)
        assert equal(ek.rms_norm(x, weight), want)
        assert equal(ek.silu_and_mul(x), ek.silu_and_mul(solid))
        room = torch.full((*x.shape[:-1], 60), 7.0, dtype=dtype)
        torch.ops.eagle2_kernels.rms_norm_out(x, weight, out=room[..., 6:54])
        assert equal(room[..., 6:54].contiguous(), want)
        assert (room[..., :6] == 7).all() and (room[..., 54:] == 7).all()
        here, there = x.clone(), solid.flip(-1).contiguous()
        both = wide.clone(), solid.flip(-1).contiguous()
        view = torch.as_strided(both[0], x.shape, x.stride(), x.storage_offset())
        ek.fused_add_rms_norm(here, there, weight)
        ek.fused_add_rms_norm(view, both[1], weight)
        assert equal(view.contiguous(), here.contiguous()) and equal(both[1], there)
        # nothing beside the view was written
        view.copy_(x)
        assert equal(both[0], wide)


# rope_and_write_kv


def rope_inputs(dtype, table_dtype, b=2, n=5, heads=(6, 2), dim=32, rotated=32):
    qkv = rand(b, n, (heads[0] + 2 * heads[1]) * dim, dtype=dtype)
    angles = rand(b, n, rotated, seed=4, scale=10.0)
    return qkv, angles.cos().to(table_dtype), angles.sin().to(table_dtype)


@dtypes
@pytest.mark.parametrize("wide", [False, True], ids=["own", "float32"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("dim", "rotated"), [(32, 32), (80, 80), (24, 10), (6, 2), (5, 4)])
def test_rope_equals_the_oracle(dtype, wide, normed, dim, rotated):
    table = torch.float32 if wide else dtype
    inputs = rope_inputs(dtype, table, dim=dim, rotated=rotated)
    norms = {"q_weight": rand(dim, seed=5, dtype=dtype), "k_weight": rand(dim, seed=6, dtype=dtype)}
    options = norms | {"eps": 0.01} if normed else {}
    results = []
    for call in (ek.rope_and_write_kv, reference.rope_and_write_kv):
        k, v = (rand(2, 9, 2, dim, seed=7, dtype=dtype) for _ in "kv")
        results.append((call(*inputs, k, v, lens(3, 6), lens(5, 2), **options), k, v))
    for got, want in zip(*results, strict=True):
        if normed:
            atol = 8 * tolerance(dtype)
            torch.testing.assert_close(got, want, rtol=0, atol=atol)
        else:
            # products and sums are rounded at the same points
            assert equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_stores_what_write_kv_stores(layout):
    """Every layout, lengths past both ends, a cache that is too short; and nothing else."""
    b, n, heads, dim = 3, 6, 2, 24
    qkv, cos, sin = rope_inputs(torch.float32, torch.float32, b, n, (4, heads), dim, dim)
    k_cache, v_cache, both, table = make_cache(layout, b, 20, heads, dim, torch.float32)
    prefix, lengths = lens(0, 7, 17), lens(6, -2, 9)
    want = both.clone()
    caches = [
        torch.as_strided(want, x.shape, x.stride(), x.storage_offset()) for x in (k_cache, v_cache)
    ]
    expected = reference.rope_and_write_kv(qkv, cos, sin, *caches, prefix, lengths, table)
    strided = torch.cat([qkv, qkv], dim=-1)[..., : qkv.shape[-1]]
    tables = (torch.cat([t, t], dim=-1)[..., :dim] for t in (cos, sin))
    got = ek.rope_and_write_kv(strided, *tables, k_cache, v_cache, prefix, lengths, table)
    assert equal(both, want) and equal(got, expected)


@dtypes
def test_rope_of_a_row_depends_neither_on_other_rows_nor_on_threads(dtype):
    b, n, dim = 2, 150, 64
    qkv, cos, sin = rope_inputs(dtype, dtype, b, n, (3, 1), dim, dim)
    weights = {
        "q_weight": rand(dim, seed=5, dtype=dtype),
        "k_weight": rand(dim, seed=6, dtype=dtype),
    }

    def run(rows):
        k, v = (torch.zeros(b, 2 * n, 1, dim, dtype=dtype) for _ in "kv")
        first = lens(rows.start, rows.start)
        part = qkv[:, rows], cos[:, rows], sin[:, rows]
        q = ek.rope_and_write_kv(*part, k, v, first, **weights)
        return q, k[:, rows], v[:, rows]

    want, *others = in_threads(lambda: run(slice(0, n)))
    for other in others:
        assert all(map(equal, other, want))
    for rows in (slice(0, 1), slice(149, 150), slice(60, 91)):
        assert all(equal(a, z[:, rows]) for a, z in zip(run(rows), want, strict=True))


def test_rope_of_a_hostile_row_touches_no_other():
    qkv, cos, sin = rope_inputs(torch.bfloat16, torch.bfloat16)
    k, v = (torch.zeros(2, 9, 2, 32, dtype=torch.bfloat16) for _ in "kv")
    clean = ek.rope_and_write_kv(qkv, cos, sin, k, v, lens(0, 0)), k.clone(), v.clone()
    qkv[0, 2], cos[0, 2] = math.nan, math.inf
    q = ek.rope_and_write_kv(qkv, cos, sin, k, v, lens(0, 0))
    for got, want in zip((q, k, v), clean, strict=True):
        assert got[0, 2].isnan().all()
        got[0, 2] = want[0, 2]
        assert equal(got, want)


def call(**change):
    qkv, cos, sin = rope_inputs(torch.float32, torch.float32)
    k, v = (torch.zeros(2, 9, 2, 32) for _ in "kv")
    given = {"qkv": qkv, "cos": cos, "sin": sin, "k_cache": k, "v_cache": v}
    return ek.rope_and_write_kv(**(given | {"prefix_lens": lens(0, 0)} | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qkv": torch.zeros(2, 5, 319)}, ValueError, r"qkv: expected \(Hq \+ 2 \* 2\) \* 32"),
        ({"qkv": torch.zeros(2, 5, 128)}, ValueError, r"qkv: expected .* got 128"),
        ({"qkv": torch.zeros(2, 320, 5).mT}, ValueError, "qkv: expected a contiguous last"),
        ({"cos": torch.zeros(2, 4, 32)}, ValueError, "cos: expected shape"),
        ({"cos": torch.zeros(2, 5, 31)}, ValueError, "cos: expected an even last dimension"),
        ({"cos": torch.zeros(2, 5, 34)}, ValueError, "cos: expected an even .* got 34"),
        ({"sin": torch.zeros(2, 5, 30)}, ValueError, "sin: expected shape"),
        ({"sin": torch.zeros(2, 5, 32).double()}, TypeError, "sin: expected dtype float32"),
        ({"cos": torch.zeros(2, 5, 32).half()}, TypeError, "cos: expected dtype"),
        ({"v_cache": torch.zeros(2, 9, 2, 16)}, ValueError, "v: expected shape"),
        ({"k_cache": torch.zeros(2, 9, 2, 32).half()}, TypeError, "k: expected dtype float16"),
        ({"k_cache": torch.zeros(1, 9, 2, 32).expand(2, -1, -1, -1)}, ValueError, "k_cache: .*exp"),
        ({"k_weight": torch.zeros(31)}, ValueError, "k_weight: expected shape"),
        ({"q_weight": torch.zeros(64)[::2]}, ValueError, "q_weight: expected a contiguous"),
        ({"lengths": lens(1)}, ValueError, "lengths: expected shape"),
        ({"page_table": lens(1)}, ValueError, "page_table: expected shape"),
    ],
)
def test_wrong_arguments_of_rope_are_named(change, error, message):
    call()
    with pytest.raises(error, match=f"^{message}"):
        call(**change)


def test_wrong_rows_are_named():
    x, weight = torch.zeros(2, 8), torch.ones(8)
    expanded = torch.zeros(1, 8).expand(2, 8)
    for error, message, run in (
        (ValueError, r"weight: expected shape \[H\] = \(8\)", lambda: ek.rms_norm(x, weight[:7])),
        (ValueError, "weight: expected a contig", lambda: ek.rms_norm(x, torch.ones(16)[::2])),
        (ValueError, "x: expected a contiguous last", lambda: ek.rms_norm(x.T, torch.ones(2))),
        (ValueError, "x: expected a tensor", lambda: ek.rms_norm(torch.tensor(1.0), weight)),
        (TypeError, "eps: expected a number", lambda: ek.rms_norm(x, weight, "1")),
        (TypeError, "weight: expected dtype", lambda: ek.rms_norm(x, weight.half())),
        (ValueError, "residual: exp", lambda: ek.fused_add_rms_norm(x, x[:1], weight)),
        (ValueError, "x: .*expanded", lambda: ek.fused_add_rms_norm(expanded, x, weight)),
        (ValueError, "residual: .*expanded", lambda: ek.fused_add_rms_norm(x, expanded, weight)),
        (ValueError, "x: expected an even last", lambda: ek.silu_and_mul(x[:, :7])),
        (ValueError, "x: expected a contiguous last", lambda: ek.silu_and_mul(x.T)),
    ):
        with pytest.raises(error, match=f"^{message}"):
            run()
