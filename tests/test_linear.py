"""packed_linear: the oracle's values, and bits that are a row's own."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

import eagle2_kernels as ek
from eagle2_kernels import reference

BF16 = torch.bfloat16
INF, NAN = math.inf, math.nan
MOST = torch.finfo(BF16).max

# (out, in): odd, smaller and larger than a panel of 32, past a staged chunk of 1024
SIZES = [(1, 1), (3, 2), (31, 33), (32, 64), (33, 7), (70, 577), (96, 1024), (100, 1025), (5, 2049)]
ROWS = [1, 2, 3, 4, 5, 8, 9, 12, 13, 14, 15, 28, 29, 43, 70]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(sum(shape) * 31 + seed)
    return torch.randn(*shape, generator=generator)


def layer(out_features, in_features):
    """Weight and bias."""
    weight = normal(out_features, in_features) / math.sqrt(in_features)
    return weight.to(BF16), normal(out_features, seed=1).to(BF16)


def assert_close(got, x, weight, bias=None):
    """Error at most twice torch's own in bfloat16, against float64."""
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch_error = (linear(x, weight, bias).double() - exact).abs().max()
    # half a unit in the last place, should torch happen to have been lucky
    slack = exact.abs().max() * 2**-9
    assert got.dtype == BF16 and got.shape == exact.shape
    assert (got.double() - exact).abs().max() <= 2 * torch_error + slack


@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_packing_matches_oracle(out_features, in_features):
    weight, _ = layer(out_features, in_features)
    want = reference.pack_linear_weight(weight)
    assert torch.equal(ek.pack_linear_weight(weight), want)
    # any strides
    assert torch.equal(ek.pack_linear_weight(weight.T.contiguous().T), want)
    wide = torch.stack([weight, weight + 1], -1)
    assert torch.equal(ek.pack_linear_weight(wide[..., 0]), want)
    packed = torch.full_like(want, NAN)
    torch.ops.eagle2_kernels.pack_linear_weight_out(weight, packed=packed)
    assert torch.equal(packed, want)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_product_matches_oracle(out_features, in_features, biased):
    weight, bias = layer(out_features, in_features)
    bias = bias if biased else None
    packed = ek.pack_linear_weight(weight)
    x = normal(max(ROWS), in_features).to(BF16)
    whole = ek.packed_linear(x, packed, out_features, bias)
    assert_close(whole, x, weight, bias)
    torch.testing.assert_close(
        whole, reference.packed_linear(x, packed, out_features, bias), rtol=2**-6, atol=2**-9
    )
    # a row's bits are its own, in a call of any number of rows
    for n in ROWS:
        assert torch.equal(ek.packed_linear(x[:n], packed, out_features, bias), whole[:n]), n
        assert torch.equal(ek.packed_linear(x[-n:], packed, out_features, bias), whole[-n:]), n
    # the twin writes every element, and nothing else
    out = torch.full_like(whole, NAN)
    torch.ops.eagle2_kernels.packed_linear_out(x, packed, out_features, bias, out=out)
    assert torch.equal(out, whole)


def test_many_rows_match_oracle():
    """Several groups of rows, panels met once for each."""
    weight, bias = layer(200, 1100)
    packed = ek.pack_linear_weight(weight)
    x = normal(700, 1100).to(BF16)
    whole = ek.packed_linear(x, packed, 200, bias)
    assert_close(whole, x, weight, bias)
    for r in (0, 1, 13, 349, 350, 699):
        assert torch.equal(ek.packed_linear(x[r : r + 1], packed, 200, bias)[0], whole[r])


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
def test_bits_do_not_depend_on_threads(threads):
    """More threads than panels too: halves of panels, groups of rows."""
    before = torch.get_num_threads()
    cases = []
    for out_features, in_features, rows in [(70, 577, 1), (200, 1100, 9), (40, 900, 333)]:
        weight, bias = layer(out_features, in_features)
        x = normal(rows, in_features).to(BF16)
        args = (x, ek.pack_linear_weight(weight), out_features, bias)
        cases.append((args, torch.cat([ek.packed_linear(r[None], *args[1:]) for r in x])))
    try:
        torch.set_num_threads(threads)
        for args, want in cases:
            assert torch.equal(ek.packed_linear(*args), want)
    finally:
        torch.set_num_threads(before)


def test_leading_dimensions_and_strides():
    weight, bias = layer(45, 24)
    packed = ek.pack_linear_weight(weight)
    merged = normal(3, 4, 5, 60).to(BF16)
    view = merged[..., 7:31]
    want = ek.packed_linear(view.contiguous(), packed, 45, bias)
    assert want.shape == (3, 4, 5, 45) and want.is_contiguous()
    flat = ek.packed_linear(view.reshape(60, 24), packed, 45, bias)
    assert torch.equal(flat, want.view(60, 45))
    assert torch.equal(ek.packed_linear(view, packed, 45, bias), want)
    for order in ((1, 0, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3)):
        got = ek.packed_linear(view.permute(order), packed, 45, bias)
        assert torch.equal(got, want.permute(order))
    assert torch.equal(ek.packed_linear(view[::2, :, 1::2], packed, 45, bias), want[::2, :, 1::2])
    assert torch.equal(ek.packed_linear(view[2, 1, 3], packed, 45, bias), want[2, 1, 3])
    # one row seen many times; one input, whose stride means nothing
    row = view[0, 0, :1].expand(9, 24)
    assert torch.equal(ek.packed_linear(row, packed, 45, bias), want[0, 0, :1].expand(9, 45))
    one = ek.pack_linear_weight(weight[:, :1])
    x = merged[..., ::60]
    assert torch.equal(ek.packed_linear(x, one, 45), ek.packed_linear(x.contiguous(), one, 45))


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (0, 3, 24)], ids=str)
def test_no_rows(shape):
    packed = ek.pack_linear_weight(layer(45, 24)[0])
    assert ek.packed_linear(torch.empty(shape, dtype=BF16), packed, 45).shape == (*shape[:-1], 45)


def test_no_inputs_and_no_outputs():
    none = ek.pack_linear_weight(torch.empty(0, 24, dtype=BF16))
    assert none.shape == (0, 12, 32, 2)
    assert ek.packed_linear(torch.zeros(2, 24, dtype=BF16), none, 0).shape == (2, 0)
    empty = ek.pack_linear_weight(torch.empty(45, 0, dtype=BF16))
    bias = normal(45).to(BF16)
    assert empty.shape == (2, 0, 32, 2)
    out = ek.packed_linear(torch.empty(3, 0, dtype=BF16), empty, 45, bias)
    assert torch.equal(out, bias.expand(3, 45))
    assert not ek.packed_linear(torch.empty(3, 0, dtype=BF16), empty, 45).any()


@pytest.mark.parametrize("in_features", [1, 7, 64, 1025])
@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
def test_non_finite_values_reach_what_they_should(value, in_features):
    """Row 3 of x, rows 20 and 40 of the weight: at the last k, where the padding begins, and at the
    first of the next panel."""
    weight, bias = layer(45, in_features)
    x = normal(17, in_features).to(BF16)
    clean = ek.packed_linear(x, ek.pack_linear_weight(weight), 45, bias)
    x[3, -1], weight[20, -1], weight[40, 0] = value, value, value
    packed = ek.pack_linear_weight(weight)
    got = ek.packed_linear(x, packed, 45, bias)
    want = reference.packed_linear(x, packed, 45, bias)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-9, equal_nan=True)
    touched = torch.zeros(17, 45, dtype=torch.bool)
    touched[3], touched[:, 20], touched[:, 40] = True, True, True
    assert not got[touched].isfinite().any()
    assert torch.equal(got[~touched], clean[~touched])


@pytest.mark.parametrize(
    ("terms", "want"),
    [
        ((1, 2**-8), 1),
        ((1, 3 * 2**-8), 1 + 2**-6),
        ((1, 2**-8, 2**-16), 1 + 2**-7),
        ((-1, -(2**-8)), -1),
        ((MOST, 2.0**118), MOST),
        ((MOST, 2.0**119), INF),
        ((-MOST, -MOST), -INF),
        ((1, -1), 0),
    ],
    ids=str,
)
def test_sums_are_of_float32_and_rounded_once_ties_to_even(terms, want):
    x = torch.tensor([terms], dtype=BF16)
    packed = ek.pack_linear_weight(torch.ones(33, len(terms), dtype=BF16))
    assert (ek.packed_linear(x, packed, 33) == want).all()
    # the bias belongs to the sum that is rounded
    x, bias = x[:, :-1], x[0, -1:].expand(33).contiguous()
    packed = ek.pack_linear_weight(torch.ones(33, len(terms) - 1, dtype=BF16))
    assert (ek.packed_linear(x, packed, 33, bias) == want).all()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the advice is Linux's")
def test_large_packed_weights_ask_for_huge_pages():
    """Alone, or as a part of memory that is large."""
    memory = torch.empty(8 << 20, dtype=BF16)
    part = memory[4096 : 4096 + 64 * 32].view(2, 16, 32, 2)
    torch.ops.eagle2_kernels.pack_linear_weight_out(layer(64, 32)[0], packed=part)
    whole = ek.pack_linear_weight(torch.zeros(4096, 1024, dtype=BF16))
    for packed in (memory, whole):
        assert "hg" in mapping_flags(packed.data_ptr() + packed.nbytes // 2)


def mapping_flags(address):
    """What Linux notes of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()
    return []


BAD = [
    (lambda a: a | {"x": a["x"].float()}, TypeError, "x: expected dtype bfloat16, got float32"),
    (lambda a: a | {"packed": a["packed"].half()}, TypeError, "packed: expected dtype bfloat16"),
    (lambda a: a | {"bias": a["bias"].float()}, TypeError, "bias: expected dtype bfloat16"),
    (lambda a: a | {"x": a["x"][0, 0]}, ValueError, r"x: expected shape \[..., in\], got \(\)"),
    (lambda a: a | {"x": a["x"][:, :-2]}, ValueError, "packed: expected shape .*, 11, 32, 2"),
    (lambda a: a | {"x": a["x"].T.contiguous().T}, ValueError, "x: expected a contiguous last"),
    (lambda a: a | {"packed": a["packed"][:1]}, ValueError, "packed: expected shape"),
    (lambda a: a | {"packed": a["packed"].flatten(2)}, ValueError, "packed: expected shape"),
    (lambda a: a | {"packed": a["packed"].mT.contiguous().mT}, ValueError,
     "packed: expected a contiguous tensor"),
    (lambda a: a | {"out_features": 32}, ValueError, "packed: expected shape"),
    (lambda a: a | {"out_features": 65}, ValueError, "packed: expected shape"),
    (lambda a: a | {"out_features": -1}, ValueError, "out_features: expected at least 0, got -1"),
    (lambda a: a | {"out_features": 45.0}, TypeError, "out_features: expected an int"),
    (lambda a: a | {"out_features": 46}, ValueError, "bias: expected shape .* = .46"),
    (lambda a: a | {"bias": a["bias"][:-1]}, ValueError, "bias: expected shape"),
    (lambda a: a | {"bias": torch.stack([a["bias"]] * 2, 1)[:, 0]}, ValueError,
     "bias: expected a contiguous tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_wrong_arguments_are_named(change, error, words):
    weight, bias = layer(45, 24)
    arguments = {
        "x": normal(3, 24).to(BF16),
        "packed": ek.pack_linear_weight(weight),
        "out_features": 45,
        "bias": bias,
    }
    ek.packed_linear(**arguments)
    with pytest.raises(error, match=words):
        ek.packed_linear(**change(arguments))


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        (torch.zeros(3, 4), TypeError, "weight: expected dtype bfloat16, got float32"),
        (torch.zeros(3, dtype=BF16), ValueError, r"weight: expected shape \[out, in\]"),
        (None, TypeError, "weight: expected a bfloat16 tensor"),
        (torch.zeros(3, 4, dtype=BF16, requires_grad=True), ValueError, "weight: .*grad"),
    ],
)
def test_weights_that_cannot_be_packed_are_named(weight, error, words):
    with pytest.raises(error, match=words):
        ek.pack_linear_weight(weight)


def test_an_output_that_does_not_fit_is_refused():
    weight, _ = layer(45, 24)
    packed, x = ek.pack_linear_weight(weight), torch.zeros(3, 24, dtype=BF16)
    call = torch.ops.eagle2_kernels.packed_linear_out
    for out, words in [
        (torch.zeros(3, 44, dtype=BF16), "out: expected size 45 in dimension 1, got 44"),
        (torch.zeros(45, dtype=BF16), "out: expected 2 dimensions, got 1"),
        (torch.zeros(3, 45), "out: expected dtype BFloat16, got Float"),
        (torch.zeros(3, 90, dtype=BF16)[:, ::2], "out: expected a contiguous tensor"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            call(x, packed, 45, out=out)


def test_padding_is_checked_on_request():
    packed = ek.pack_linear_weight(layer(45, 23)[0])
    x = torch.zeros(3, 23, dtype=BF16)
    ek.packed_linear(x, packed, 45, validate=True)
    for wrong in (44, 33):
        with pytest.raises(ValueError, match=f"packed: expected zeros past {wrong} outputs"):
            ek.packed_linear(x, packed, wrong, validate=True)
    full = ek.pack_linear_weight(layer(45, 24)[0])
    with pytest.raises(ValueError, match="packed: expected zeros past 45 outputs and 23 inputs"):
        ek.packed_linear(x, full, 45, validate=True)


def test_a_tensor_on_another_device_is_refused():
    """Of a card that is not here, but whose tensors PyTorch's fakes may stand for."""
    with FakeTensorMode():
        weight = torch.zeros(3, 4, dtype=BF16, device="cuda")
        packed = torch.zeros(1, 2, 32, 2, dtype=BF16, device="cuda")
        with pytest.raises(ValueError, match="weight: expected a CPU tensor, got one on cuda"):
            ek.pack_linear_weight(weight)
        with pytest.raises(ValueError, match=r"x: .* torch\.nn\.functional\.linear is right"):
            ek.packed_linear(weight, packed, 3)
