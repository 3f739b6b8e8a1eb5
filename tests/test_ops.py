"""Every row of the op table: schema, oracle, fake and compiled kernel agree and obey PyTorch."""

import inspect
import re
import subprocess
import sys

import pytest
import torch
from growth import i32

import eagle2_kernels
from eagle2_kernels import _checks, _library, ops
from eagle2_kernels.ops import NAMESPACE, OPS

NAMES = [op.name for op in OPS]
BY_NAME = {op.name: op for op in OPS}
# What some tests run from elsewhere must import the installation, not a checkout in the way.
PYTHON = [sys.executable, "-P", "-c"]


def example(name: str) -> tuple[tuple, dict]:
    """Arguments of a small call, without outputs."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    def packed_weight(*shape):
        return ops.reference.pack_linear_weight(rand(*shape).bfloat16() * 0.005)

    parents = i32([[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 0]])
    counts, prefix = i32([5, 4]), i32([3, 0])
    draft = torch.tensor([[0, 1, 2, 3, 4], [0, 5, 6, 7, 8]])
    child, sibling = i32([[1, 3, -1, -1, -1]] * 2), i32([[-1, 2, -1, 4, -1]] * 2)
    positions, seeds = torch.arange(10).view(2, 5), torch.tensor([1, 2])
    filters = {
        "temperature": torch.tensor([1.0, 0.0]),
        "top_k": i32([4, 0]),
        "top_p": torch.tensor([0.9, 1.0]),
        "min_p": torch.tensor([0.0, 0.1]),
        "allowed_mask": torch.full((2, 5, 1), -2, dtype=torch.int32),
    }
    mask = torch.tensor([[[0b1], [0b11], [0b101], [0b1011], [0b10011]]] * 2)
    keys, values = rand(2, 12, 2, 8), rand(2, 12, 2, 8)
    return {
        "expand_topk": ((rand(2, 3, 11), rand(2, 3), 4, torch.arange(11) * 2), {}),
        "extend_draft_tree": (
            (i32([[0] * 6] * 2), torch.zeros(2, 2, 1).long(), torch.tensor([[1, 0]] * 2), 1),
            {},
        ),
        "build_tree": (
            (torch.tensor([7, 8]), prefix, draft, rand(2, 5), parents, 4, i32([[4, 2], [3, 9]])),
            {},
        ),
        "build_tree_from_marginals": (
            (
                torch.tensor([7, 8]),
                prefix,
                torch.arange(24).view(2, 3, 4),
                rand(2, 3, 4).log_softmax(-1).sort(-1, descending=True).values,
                6,
                i32([[4, 2], [9, 9]]),
            ),
            {},
        ),
        "flatten_tree": ((parents, counts, prefix), {}),
        "retrieve_indices": ((parents, counts, 2), {}),
        "pack_tree_mask": ((rand(3, 70) > 0,), {}),
        "unpack_tree_mask": ((torch.tensor([[3, 5]]), 70), {}),
        "tree_attention_out": (
            (rand(2, 5, 4, 8), keys, values, i32([3, 0]), mask),
            {"out": torch.empty(2, 5, 4, 8), "lse": torch.empty(2, 5, 4)},
        ),
        "merge_attention_states": (
            (rand(2, 5, 4, 8), rand(2, 5, 4), rand(2, 5, 4, 8), rand(2, 5, 4)),
            {},
        ),
        "process_logits": (
            (rand(2, 5, 9), draft, parents, counts),
            {
                "prompt_mask": i32([[3], [5]]),
                "output_counts": i32([[0, 2] + [0] * 7] * 2),
                "repetition_penalty": torch.tensor([1.5, 1.0]),
                "frequency_penalty": torch.tensor([0.0, 0.5]),
                "presence_penalty": torch.tensor([0.25, 0.0]),
                "bias_tokens": torch.tensor([[4, -1], [2, 3]]),
                "bias_values": torch.tensor([[1.0, 2.0], [-1.0, float("-inf")]]),
            },
        ),
        "count_tokens": ((i32([[0] * 9] * 2), draft), {}),
        "mark_tokens": ((i32([[0]] * 2), draft), {}),
        "token_logprobs": ((rand(2, 5, 9), i32([[0, 3], [4, -1]]), draft[:, :2]), {}),
        "sample_tokens": ((rand(2, 5, 9), positions, seeds), filters),
        "verify_tree": ((draft, draft, child, sibling, 2, counts), {}),
        "sample_and_verify": (
            (rand(2, 5, 9), positions, seeds, draft, child, sibling, 2, counts),
            filters,
        ),
        "verify_tree_coins": (
            (
                rand(2, 5, 9).mul(3).softmax(-1),
                draft,
                child,
                sibling,
                rand(2, 5).sigmoid(),
                rand(2).sigmoid(),
                2,
                counts,
            ),
            {},
        ),
        "compact_kv": (([keys, values], i32([[0, 2], [0, -1]]), i32([1, 0]), prefix), {}),
        "pack_linear_weight": ((rand(35, 7).bfloat16(),), {}),
        "packed_linear": (
            (
                rand(2, 3, 7).bfloat16(),
                ops.reference.pack_linear_weight(rand(35, 7).bfloat16()),
                35,
                rand(35).bfloat16(),
            ),
            {},
        ),
        "write_kv": ((keys, values, rand(2, 5, 2, 8), rand(2, 5, 2, 8), prefix, counts), {}),
        "rope_and_write_kv": (
            (rand(2, 5, 64), rand(2, 5, 6), rand(2, 5, 6), keys, values, prefix, counts),
            {"q_weight": rand(8), "k_weight": rand(8), "eps": 0.1},
        ),
        "rms_norm": ((rand(2, 5, 9), rand(9), 0.1), {}),
        "fused_add_rms_norm": ((rand(2, 5, 9), rand(2, 5, 9), rand(9), 0.1), {}),
        "silu_and_mul": ((rand(2, 5, 18),), {}),
        "decoder_layer": (
            (
                rand(2, 5, 12).bfloat16(),
                *(rand(2, 5, 6).bfloat16(), rand(2, 5, 6).bfloat16()),
                *(keys.bfloat16(), values.bfloat16(), prefix),
                *(packed_weight(80, 12), packed_weight(12, 48), rand(12).bfloat16()),
                *(packed_weight(18, 12), packed_weight(12, 9), 6, 9, rand(12).bfloat16()),
                *(mask, counts),
            ),
            {
                "qkv_bias": rand(80).bfloat16(),
                "q_weight": rand(8).bfloat16(),
                "k_weight": rand(8).bfloat16(),
                "eps": 0.1,
                "depths": i32([[0, 1, 1, 2, 2]] * 2),
                "sm_scale": 0.3,
                "softcap": 4.0,
                "window": 3,
            },
        ),
    }[name]


def overload(name):
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def as_tuple(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result or ())


def with_outs(name):
    """Arguments of the ``_out`` twin: outputs shaped as the op returns them, poisoned."""
    args, kwargs = example(name)
    results = as_tuple(overload(name)(*example(name)[0], **kwargs))
    outs = {k: torch.full_like(r, 77) for k, r in zip(BY_NAME[name].outs, results, strict=True)}
    return args, kwargs | outs


def same(a, b):
    if not a.is_floating_point():
        return torch.equal(a, b)
    rtol = max(1e-5, torch.finfo(a.dtype).eps)
    return torch.allclose(a, b, rtol=rtol, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    args, kwargs = example(name)
    torch.library.opcheck(overload(name), args, kwargs)


@pytest.mark.parametrize("name", [n for n in NAMES if BY_NAME[n].outs])
def test_opcheck_of_the_out_twin(name):
    args, kwargs = with_outs(name)
    torch.library.opcheck(overload(f"{name}_out"), args, kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_each_op_has_an_oracle_a_fake_and_a_compiled_kernel(name):
    op = BY_NAME[name]
    assert op.summary
    for each in (name, f"{name}_out") if op.outs else (name,):
        registered = torch._C._dispatch_dump(f"{NAMESPACE}::{each}").splitlines()
        by_key = {line.split(":")[0]: line for line in registered}
        assert ".cpp:" in by_key["CPU"], "a Python function serves the CPU"
        assert "Meta" in by_key
        for key in ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "AutogradCPU"):
            assert key not in by_key


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_agrees_with_the_oracle(name):
    args, kwargs = example(name)
    twin, twin_kwargs = example(name)
    got = as_tuple(overload(name)(*args, **kwargs))
    want = as_tuple(BY_NAME[name].reference(*twin, **twin_kwargs))
    assert len(got) == len(want)
    flat = [*got, *torch.utils._pytree.tree_leaves((args, kwargs))]
    other = [*want, *torch.utils._pytree.tree_leaves((twin, twin_kwargs))]
    for a, b in zip(flat, other, strict=True):
        assert same(a, b) if isinstance(a, torch.Tensor) else a == b


def in_dtype(name, dtype):
    """The example by keywords, with what the row calls free in ``dtype``."""
    args, kwargs = example(name)
    names = [argument.name for argument in overload(name)._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    for each in BY_NAME[name].floats + BY_NAME[name].moves:
        values[each] = torch.utils._pytree.tree_map(lambda t: t.to(dtype), values[each])
    return values


def as_bytes(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [x.reshape(-1).view(torch.uint8) for x in leaves if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("dtype", _checks.FLOATS, ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if BY_NAME[n].floats])
def test_the_dtypes_of_a_row_work(name, dtype):
    values, twin = in_dtype(name, dtype), in_dtype(name, dtype)
    got = [*as_tuple(overload(name)(**values)), *torch.utils._pytree.tree_leaves(values)]
    want = [*as_tuple(BY_NAME[name].reference(**twin)), *torch.utils._pytree.tree_leaves(twin)]
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)
    for a, b in zip(got, want, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("name", [n for n in NAMES if BY_NAME[n].floats])
def test_other_dtypes_are_refused(name, dtype):
    with pytest.raises((RuntimeError, TypeError)):
        overload(name)(**in_dtype(name, dtype))


@pytest.mark.parametrize(
    "dtype",
    [*_checks.FLOATS, torch.float8_e4m3fn, torch.uint8, torch.int16, torch.complex64],
    ids=str,
)
@pytest.mark.parametrize("name", [n for n in NAMES if BY_NAME[n].moves])
def test_what_only_moves_takes_any_dtype(name, dtype):
    values, twin = in_dtype(name, dtype), in_dtype(name, dtype)
    overload(name)(**values)
    BY_NAME[name].reference(**twin)
    assert all(map(torch.equal, as_bytes(values), as_bytes(twin)))


@pytest.mark.parametrize("name", NAMES)
def test_no_op_returns_an_argument(name):
    for each in (name, f"{name}_out") if BY_NAME[name].outs else (name,):
        schema = overload(each)._schema
        assert all(r.alias_info is None for r in schema.returns)
        assert not each.endswith("_out") or not schema.returns


@pytest.mark.parametrize("name", NAMES)
def test_integers_are_symbolic(name):
    """A plain int specialises: a graph for every length of a sequence."""
    assert "int " not in BY_NAME[name].schema.replace("SymInt ", "")
    assert "int? " not in BY_NAME[name].schema.replace("SymInt? ", "")


USE_REFERENCE = """
import torch, eagle2_kernels
from eagle2_kernels import _checks, _library, ops
dump = torch._C._dispatch_dump("eagle2_kernels::flatten_tree")
assert ".cpp:" not in dump.split("CPU:")[1].splitlines()[0], dump
parents = torch.tensor([[-1, 0, 1]], dtype=torch.int32)
n = torch.tensor([3], dtype=torch.int32)
depths, *_ = eagle2_kernels.flatten_tree(parents, n, n)
out = [torch.empty_like(t) for t in torch.ops.eagle2_kernels.flatten_tree(parents, n, n)]
row = next(op for op in ops.OPS if op.name == "flatten_tree")
torch.ops.eagle2_kernels.flatten_tree_out(parents, n, n, **dict(zip(row.outs, out)))
assert depths.tolist() == out[0].tolist() == [[0, 1, 2]]
print(ops.backend())
"""


@pytest.mark.parametrize(("value", "expected"), [("reference", "reference"), ("fast", "")])
def test_the_oracle_runs_on_request_only(value, expected, monkeypatch):
    monkeypatch.setenv("EAGLE2_BACKEND", value)
    run = subprocess.run([*PYTHON, USE_REFERENCE], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == expected, run.stderr[-3000:]
    if not expected:
        assert "EAGLE2_BACKEND: expected 'compiled' or 'reference', got 'fast'" in run.stderr


def test_an_empty_backend_is_none(monkeypatch):
    monkeypatch.setenv("EAGLE2_BACKEND", "")
    assert ops.backend() == "compiled"


def test_validation_by_environment(monkeypatch):
    code = """
import torch, eagle2_kernels
bad = torch.tensor([[-1, 5]], dtype=torch.int32)
n = torch.tensor([2], dtype=torch.int32)
try:
    eagle2_kernels.flatten_tree(bad, n, n)
    print("passed")
except ValueError:
    print("refused")
"""
    for value, expected in (("0", "passed"), ("1", "refused")):
        monkeypatch.setenv("EAGLE2_VALIDATE", value)
        run = subprocess.run([*PYTHON, code], capture_output=True, text=True, check=False)
        assert run.stdout.strip() == expected, run.stderr[-3000:]


@pytest.mark.parametrize("name", [name.removesuffix("_out") for name in NAMES])
def test_every_wrapper_validates_on_request(name):
    validate = inspect.signature(getattr(eagle2_kernels, name)).parameters["validate"]
    assert validate.default is False and validate.kind is validate.KEYWORD_ONLY


def wrapper_example(name):
    """The public wrapper of a row, and its arguments by keyword."""
    args, kwargs = example(name)
    names = [argument.name for argument in overload(name)._schema.arguments]
    wrapper = getattr(eagle2_kernels, name.removesuffix("_out"))
    return wrapper, dict(zip(names, args, strict=False)) | kwargs


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_or_number_is_named(name):
    wrapper, values = wrapper_example(name)
    for argument, value in values.items():
        for strange in (object(), "1") + ((2**80,) if isinstance(value, int) else ()):
            with pytest.raises((TypeError, ValueError), match=rf"^{argument}(\[0\])?: expected"):
                wrapper(**(values | {argument: strange}))


def tensors(name):
    return {k: v for k, v in wrapper_example(name)[1].items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("name", [name for name in NAMES if len(tensors(name)) > 1])
def test_a_meta_tensor_among_others_is_refused(name):
    """PyTorch runs the fake kernel then: outputs that nobody wrote, or nothing done in place."""
    wrapper, values = wrapper_example(name)
    for argument, value in tensors(name).items():
        mixed = values | {argument: value.to("meta")}
        with pytest.raises(RuntimeError, match="expected tensors on one device, got cpu and meta"):
            overload(name)(**mixed)
        with pytest.raises(ValueError, match="expected a tensor on (cpu|meta), got one on"):
            wrapper(**mixed)


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_requires_grad_is_named(name):
    for argument, value in tensors(name).items():
        if not value.is_floating_point():
            continue
        wrapper, values = wrapper_example(name)
        values[argument].requires_grad_()
        with pytest.raises(ValueError, match=f"^{argument}: .* does not require grad"):
            wrapper(**values)
        with torch.no_grad():
            wrapper(**values)


def test_outputs_too_large_for_any_memory_are_named():
    parents, counts = i32([[-1, 0]]), i32([2])
    call = torch.ops.eagle2_kernels.retrieve_indices
    with pytest.raises(RuntimeError, match=r"output of shape \[1, 2, 1099511627777\]"):
        call(parents, counts, 2**40)
    for max_depth in (2**40, 2**63 - 1, 2**63):
        with pytest.raises(ValueError, match="^max_depth: expected 0 to 2147483646, got"):
            eagle2_kernels.retrieve_indices(parents, counts, max_depth)


@pytest.mark.parametrize("name", ops.CUDA_CPP)
def test_a_cuda_tensor_on_a_cpu_build_says_how_to_rebuild(name):
    library = _library.status()["_C_cuda"]
    if library.loaded:
        pytest.skip("built with CUDA")
    # A CUDA tensor needs a card: the CUDA entry itself is called, with CPU tensors.
    args, kwargs = example(name)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=re.escape(library.reason)) as raised:
        overload(name).redispatch(keys, *args, **kwargs)
    if torch.version.cuda:
        assert "rebuild: EAGLE2_CUDA=1 pip install" in str(raised.value)


def test_a_device_without_kernels_says_so():
    for op in OPS:
        if op.triton is None and not ops.has_kernel(op.name, "CUDA"):
            pytest.fail(f"{op.name}: nothing is registered for CUDA, not even an error")


def test_what_is_for_cpus_only_refuses_a_cuda_tensor():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for op in OPS:
        for name in (op.name, f"{op.name}_out") if op.outs else (op.name,):
            if op.cpu_only:
                assert op.triton is None and op.name not in ops.CUDA_CPP
                args, kwargs = with_outs(op.name) if name != op.name else example(op.name)
                with pytest.raises(RuntimeError, match=f"{name}: expected CPU tensors, got CUDA"):
                    overload(name).redispatch(keys, *args, **kwargs)


def test_meta_tensors_get_shapes():
    logits = torch.empty(2, 3, 100, device="meta")
    tokens, *_, rows = overload("expand_topk")(logits, torch.empty(2, 3, device="meta"), 4)
    assert tokens.shape == (2, 12) and rows.dtype == torch.int32


def test_no_requests_and_no_slots():
    none, no_ints = torch.empty(2, 0, dtype=torch.int64), torch.empty(2, 0, dtype=torch.int32)
    tokens, *_ = eagle2_kernels.expand_topk(torch.empty(0, 3, 5), torch.empty(0, 3), 2)
    assert tokens.shape == (0, 6)
    zero = i32([0, 0])
    *_, mask = eagle2_kernels.flatten_tree(no_ints, zero, zero)
    assert mask.shape == (2, 0, 0)
    assert eagle2_kernels.retrieve_indices(no_ints, zero, 3).shape == (2, 0, 4)
    logits = torch.empty(2, 0, 5)
    assert eagle2_kernels.sample_tokens(logits, none, 1, temperature=1.0).shape == (2, 0)
    emitted, index, length, bonus = eagle2_kernels.sample_and_verify(
        logits, none, 1, none, no_ints, no_ints, 3
    )
    assert (emitted == -1).all() and (index == -1).all()
    assert length.tolist() == [-1, -1] and bonus.tolist() == [-1, -1]
