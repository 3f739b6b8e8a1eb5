"""The launch table: which constants, warps and stages each kernel is compiled with.

Launchers take their tiles from the functions here and nowhere else; `variants` lists what they can
ask for, so that every one of them is compiled ahead of time (``bench/aot.py``) without a card.
Numbers depend on architecture, dtype, head dims and host integers, never on values in tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# CUDA architectures the table is compiled for, and the shared memory a block may have on each.
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}

POINTEES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
FLOAT8 = "fp8e4nv"

# All exponent bits of a number: what is at least this, sign apart, is not finite.
EXPONENTS = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


def check(
    name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    """Refuse what would be read out of bounds; None is an argument that was not given."""
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tensor.dim() != len(shape) or any(
        want is not None and size != want for size, want in zip(tensor.shape, shape, strict=True)
    ):
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


def check_float(name: str, tensor: Tensor) -> None:
    """Logits and the like: any dtype of `POINTEES`."""
    if tensor.dtype not in POINTEES:
        raise TypeError(
            f"{name}: expected float64, float32, float16 or bfloat16, got {tensor.dtype}"
        )


def check_scale(name: str, tensor: Tensor) -> None:
    """A float8 cache's scale: float32, one element."""
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: expected torch.float32, got {tensor.dtype}")
    if tensor.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {tuple(tensor.shape)}")


def check_same_device(first: Tensor, **tensors: Tensor | None) -> None:
    """A pointer to another device's memory would be an illegal access, not an error message."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name}: expected a tensor on {first.device}, got {tensor.device}")


def check_outputs(
    first: Tensor, outs: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]
) -> None:
    """Outputs are contiguous tensors of the given dtype and shape."""
    for name, (tensor, dtype, shape) in outs.items():
        check(name, tensor, dtype, shape)
        check_same_device(first, **{name: tensor})
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got {tensor.stride()}")


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Tiles:
    """What one launch adds to a kernel's arguments."""

    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 2
    # False: a product and the sum behind it are rounded one by one.
    fused: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """What is the compiler's, not the kernel's."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.fused else options | {"enable_fp_fusion": False}

    def keywords(self) -> dict[str, Any]:
        """As a launch takes them."""
        return self.constants | self.options


@dataclass(frozen=True)
class Variant:
    """One compilation: a kernel, its tiles, and the types of its arguments.

    ``pointers`` gives the element type of each pointer; ``longs`` names the int64 arguments,
    ``floats`` the float32 ones; other arguments are int32. ``aligned`` names what a call of usual
    shapes has divisible by 16, beside the pointers.
    """

    module: str
    kernel: str
    name: str
    tiles: Tiles
    pointers: dict[str, str]
    longs: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()
    # Arguments that are 1 in a call of usual shapes: Triton makes constants of those.
    ones: tuple[str, ...] = ()
    archs: tuple[int, ...] = (80, 90, 100, 120)
    expect: dict[str, Any] = field(default_factory=dict)


# expand_topk

SLICE = 4096  # logits one program reads: 10 rows of 128 k are 320 programs
MAX_TOP_K = 128  # each rank is a reduction over the slice; EAGLE trees take 4 to 10
MAX_CANDIDATES = 1 << 14  # of one row, in the merge


def expand_slices(vocab: int) -> int:
    """Programs that share a row; a function of the vocabulary alone, and so are a row's bits."""
    return -(-vocab // SLICE)


def expand_slice() -> Tiles:
    """The pass over the logits: 32 of them in each of 128 threads."""
    return Tiles({"BLOCK": SLICE}, num_warps=4)


def expand_merge(parents: int, slices: int, top_k: int) -> Tiles:
    """The merge of one request; a wide frontier is taken in groups of rows."""
    row = power_of_2(slices) * power_of_2(top_k)
    rows = min(power_of_2(parents), max(1, (8192 if top_k <= 16 else 4096) // row))
    candidates = power_of_2(parents * top_k)
    most = max(rows * row, candidates)
    return Tiles(
        {
            "ROWS": rows,
            "SLICES": power_of_2(slices),
            "WIDTH": power_of_2(top_k),
            "CANDIDATES": candidates,
        },
        num_warps=16 if most > 8192 else 8 if most > 2048 else 4,
    )


def _expand_variants() -> Iterator[Variant]:
    strides = ("logits_batch", "logits_parent")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        wide = dtype == torch.float64
        partial = "fp64" if wide else "fp32"
        pointers = {
            "logits": POINTEES[dtype],
            "beam_scores": "fp32",
            "peaks": partial,
            "sums": partial,
            "values": partial,
            "ids": "i32",
        }
        yield Variant(
            "expand",
            "expand_slice_kernel",
            POINTEES[dtype],
            Tiles(expand_slice().constants | {"WIDE": wide}, expand_slice().num_warps),
            pointers,
            longs=strides,
            aligned=("vocab", *strides),
            ones=("logits_token",),
            expect={"wide_loads": True},
        )
        if dtype in (torch.float16, torch.bfloat16):
            continue
        shapes = [(10, 32, 10), (1, 32, 10), (8, 12, 8), (64, 38, 64), (128, 63, 128)]
        for parents, slices, top_k in shapes if not wide else shapes[:1]:
            tiles = expand_merge(parents, slices, top_k)
            yield Variant(
                "expand",
                "expand_merge_kernel",
                f"{partial}-P{parents}-S{slices}-K{top_k}",
                Tiles(tiles.constants | {"MAPPED": True}, tiles.num_warps),
                {
                    "peaks": partial,
                    "sums": partial,
                    "values": partial,
                    "ids": "i32",
                    "beam_scores": "fp32",
                    "draft_to_target": "i64",
                    "candidate_tokens": "i64",
                    "candidate_scores": "fp32",
                    "beam": "i64",
                    "beam_tokens": "i64",
                    "next_beam_scores": "fp32",
                    "beam_rows": "i32",
                },
                ones=("map_stride",),
            )


# write_kv


def write_tiles(dim_k: int, dim_v: int) -> Tiles:
    """One head of one row per program."""
    return Tiles({"BLOCK": power_of_2(max(dim_k, dim_v))}, num_warps=4)


def _write_variants() -> Iterator[Variant]:
    integers = dict.fromkeys(("prefix_lens", "lengths", "page_table"), "i32")
    # The elements of rows and cache: copied ones are integers of their size.
    for rows, cache in (
        ("i16", "i16"),
        ("i32", "i32"),
        ("u8", "u8"),
        ("bf16", "u8"),
        ("fp32", "u8"),
    ):
        for paged in (False, True):
            rounds = rows != cache
            tiles = write_tiles(128, 128)
            flags = {"PAGED": paged, "HAS_LENGTHS": True, "DK": 128, "DV": 128}
            flags |= dict.fromkeys(("ROUND_K", "ROUND_V", "HAS_K_SCALE", "HAS_V_SCALE"), rounds)
            yield Variant(
                "cache",
                "write_kv_kernel",
                f"{rows}{'-float8' * rounds}-D128-{'paged' if paged else 'dense'}",
                Tiles(tiles.constants | flags, tiles.num_warps),
                dict.fromkeys(("k", "v"), rows)
                | dict.fromkeys(("k_cache", "v_cache"), cache)
                | dict.fromkeys(("k_scale", "v_scale"), "fp32")
                | integers,
                longs=("kc_page", "vc_page"),
                aligned=tuple(
                    f"{x}_{y}"
                    for x, names in (
                        ("kc", ("page", "slot", "head")),
                        ("vc", ("page", "slot", "head")),
                        ("k", ("batch", "row", "head")),
                        ("v", ("batch", "row", "head")),
                    )
                    for y in names
                ),
                ones=("prefix_batch", "lengths_batch", "table_entry"),
            )


# tree_attention

GROUP = 8  # chunks that a program may fold by itself


def table_arch(major: int, minor: int) -> int:
    """The row of the table for a card; those with 99 KiB of shared memory take sm_120's tiles."""
    if (major, minor) in ((8, 6), (8, 9)) or major >= 12:
        return 120
    return {8: 80, 9: 90}.get(major, 100)


def reads_float8(major: int, minor: int) -> bool:
    """Whether a card converts float8 e4m3 itself; for others a kernel reads the bytes."""
    return (major, minor) >= (8, 9)


def kv_chunk(kv_heads: int) -> int:
    """Keys per chunk: few enough that one request with a prefix of 2 k fills a card."""
    return min(max(32 * power_of_2(kv_heads), 128), 512)


def split_dim(dim: int) -> tuple[int, int]:
    """A head dim as two blocks: the largest power of two in it, and what covers the rest (or 0)."""
    low = power_of_2(dim + 1) // 2
    if low < 16:
        return 16, 0
    return low, power_of_2(max(dim - low, 16)) if dim > low else 0


def attention_tiles(
    arch: int, dtype: torch.dtype, dim: int, dim_v: int, float8: bool = False
) -> Tiles:
    """Tiles by card, dtype and head dims alone: the number of rows has no say in a row's bits."""
    low, high = split_dim(dim)
    block_v = max(power_of_2(dim_v), 16)
    width = low + high + block_v
    if dtype == torch.float32:
        # No matrix unit takes float32 as it is; small tiles keep the products in registers.
        block_m, block_n, stages = 16, 32 if width <= 128 else 16, 1
    elif width > 512:
        # The two accumulators alone take 64 registers of each thread at 16 rows.
        block_m, block_n, stages = 16, 16 if float8 else 32, 1 if float8 or arch == 80 else 2
    else:
        # Larger tiles spill: the running and the group's accumulator stay in registers. 64 rows
        # fill a warp group's instruction; without one (sm_80, sm_120) there is no such step.
        block_m = 64 if arch in (90, 100) and width <= 320 else 32
        block_n, stages = 32, 3 if arch == 120 or width > 256 else 4
    tiles = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "D_LOW": low,
        "D_HIGH": high,
        "BLOCK_DV": block_v,
    }
    for name, size in tiles.items():
        if size and (size < 16 or size & (size - 1)):
            raise ValueError(f"{name}: expected a power of two of at least 16, got {size}")
    return Tiles(tiles, 8, stages)


def combine_tiles(dim_v: int) -> Tiles:
    """One row per program."""
    tiles = {"GROUP": GROUP, "BLOCK_DV": max(power_of_2(dim_v), 16), "INDPTR_BLOCK": 64}
    return Tiles(tiles, 1 if dim_v <= 256 else 4)


def merge_tiles(dim: int) -> Tiles:
    """One row per program."""
    return Tiles({"BLOCK_D": power_of_2(max(dim, 1))}, 1 if dim <= 256 else 4)


# (head dim of K, of V), and the options each is compiled with.
HEAD_DIMS = ((64, 64), (128, 128), (80, 80), (96, 96), (256, 256), (192, 128), (576, 512))
PLAIN = dict.fromkeys(
    ("RAGGED", "OWN_LEN", "HAS_K_SCALE", "PAGED", "HAS_DEPTHS", "HAS_WINDOW", "HAS_SOFTCAP"), False
)
MASKED = PLAIN | {"HAS_MASK": True}
PAGED = MASKED | {"PAGED": True}
OPTIONS = {
    "dense": MASKED,
    "paged": PAGED,
    "causal": PLAIN | {"HAS_MASK": False},
    "window-softcap": PAGED | dict.fromkeys(("HAS_DEPTHS", "HAS_WINDOW", "HAS_SOFTCAP"), True),
    "ragged": PAGED | {"RAGGED": True, "OWN_LEN": True},
    "ragged-causal": PAGED | {"RAGGED": True, "OWN_LEN": True, "HAS_MASK": False},
    "float8": PAGED | {"HAS_K_SCALE": True},
    "float8-dense": MASKED | {"HAS_K_SCALE": True},
}


def _matrix(arch: int, dtype: torch.dtype, rows: int) -> str | None:
    """The matrix instruction of a card: a warp group's where the tile has its 64 rows."""
    if dtype == torch.float32:
        return None
    return {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch * (rows == 64), "mma.sync")


def _takes(dtype: torch.dtype, dim: int, option: str) -> bool:
    """Whether the table has an option beside a head dim: all for two of them, some for others."""
    if dtype == torch.bfloat16 and dim in (64, 128):
        return True
    if dtype == torch.bfloat16 and dim in (192, 576):
        return option in ("dense", "paged", "float8", "ragged")
    if option == "float8":
        return dtype == torch.float16 and dim == 128
    return option == "paged" and (dtype == torch.bfloat16 or dim in (64, 128))


def _attention_variants() -> Iterator[Variant]:
    integers = {
        **dict.fromkeys(("prefix_lens", "qo_indptr", "depths", "page_table"), "i32"),
        "tree_mask": "i64",
    }
    parts = dict.fromkeys(("part_acc", "part_m", "part_total"), "fp32")
    names = (
        (dtype, dims)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for dims in HEAD_DIMS
    )
    for dtype, (dim, dim_v) in names:
        element = POINTEES[dtype]
        for name, options in OPTIONS.items():
            if not _takes(dtype, dim, name):
                continue
            for arch in SHARED_LIMIT:
                float8 = name.startswith("float8")
                tiles = attention_tiles(arch, dtype, dim, dim_v, float8)
                # sm_80 and 8.6, which takes the tiles of sm_120, get bytes.
                stored = (FLOAT8, "u8") if float8 else (element,)
                for cache in stored:
                    if float8 and not (
                        cache == "u8" if arch == 80 else arch == 120 or cache != "u8"
                    ):
                        continue
                    yield Variant(
                        "attention",
                        "attend_kernel",
                        f"{element}-D{dim}-DV{dim_v}-{name}" + "-bytes" * (cache == "u8"),
                        Tiles(
                            tiles.constants
                            | options
                            | {"EXPONENT": EXPONENTS[dtype], "D": dim, "DV": dim_v},
                            tiles.num_warps,
                            tiles.num_stages,
                        ),
                        {"q": element, "k_scale": "fp32"}
                        | dict.fromkeys(("k_cache", "v_cache"), cache)
                        | integers
                        | parts,
                        floats=("scale", "cap"),
                        aligned=(
                            "page_size",
                            *("q_batch", "q_row", "q_head"),
                            *("kc_page", "kc_slot", "kc_head"),
                            *("vc_page", "vc_slot", "vc_head"),
                        ),
                        ones=(
                            *("prefix_batch", "mask_word", "depths_slot", "table_entry"),
                            "indptr_entry",
                        ),
                        archs=(arch,),
                        expect={
                            "matrix": _matrix(arch, dtype, tiles.constants["BLOCK_M"]),
                            # Half a kilobyte of float8 keys is 8 bytes a thread.
                            "wide_loads": not float8 or dim > 64,
                        },
                    )
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (64, 128, 512) if dtype == torch.bfloat16 else (64, 128):
            for ragged in (False, True) if dtype == torch.bfloat16 and dim == 128 else (False,):
                element = POINTEES[dtype]
                tiles = combine_tiles(dim)
                flags = dict.fromkeys(("HAS_MASK", "HAS_SINKS", "HAS_LSE", "HAS_V_SCALE"), True)
                flags |= dict.fromkeys(("RAGGED", "OWN_LEN"), ragged)
                yield Variant(
                    "attention",
                    "combine_kernel",
                    f"{element}-DV{dim}" + "-ragged" * ragged,
                    Tiles(tiles.constants | flags | {"DV": dim}, tiles.num_warps),
                    parts
                    | {"prefix_lens": "i32", "tree_mask": "i64", "qo_indptr": "i32"}
                    | {"sinks": "fp32", "v_scale": "fp32", "out": element, "lse": "fp32"},
                    aligned=("out_batch", "out_row", "out_head"),
                    ones=("prefix_batch", "mask_word", "sinks_head", "lse_head", "indptr_entry"),
                    expect={"wide_loads": dim >= 128},
                )
    for dtype in (torch.bfloat16, torch.float64):
        element = POINTEES[dtype]
        yield Variant(
            "attention",
            "merge_states_kernel",
            f"{element}-D128",
            Tiles(
                merge_tiles(128).constants | {"D": 128, "WIDE": dtype == torch.float64},
                merge_tiles(128).num_warps,
            ),
            dict.fromkeys(("out_a", "out_b", "out"), element)
            | dict.fromkeys(("lse_a", "lse_b", "lse"), "fp32"),
            aligned=tuple(f"{x}_{y}" for x in "abo" for y in ("batch", "row", "head")),
            ones=("a_dim", "b_dim", "o_dim", "la_head", "lb_head", "lo_head"),
        )


# process_logits, count_tokens, mark_tokens, token_logprobs


def edit_tiles() -> Tiles:
    """A slice of a row: 16 logits in each of 128 threads."""
    return Tiles({"BLOCK": 2048}, num_warps=4, fused=False)


def record_tiles() -> Tiles:
    """Tokens of a step are few, those of a prompt thousands."""
    return Tiles({"BLOCK": 256}, num_warps=4)


def logprob_tiles(dtype: torch.dtype) -> Tiles:
    """As for a draw: a row is passed over by one wide program."""
    return Tiles({"BLOCK": 2048 if dtype == torch.float64 else 4096}, num_warps=8)


def _logits_variants() -> Iterator[Variant]:
    rows = ("logits_batch", "logits_row")
    flags = (
        *("HAS_TREE", "HAS_NODES", "HAS_PROMPT", "HAS_COUNTS"),
        *("HAS_REPETITION", "HAS_FREQUENCY", "HAS_PRESENCE"),
    )
    edits = {
        **dict.fromkeys(("draft_tokens", "bias_tokens"), "i64"),
        **dict.fromkeys(("parents", "num_nodes", "prompt_mask", "output_counts"), "i32"),
        **dict.fromkeys(("repetitions", "frequencies", "presences", "bias_values"), "fp32"),
    }
    units = (
        *("logits_token", "draft_row", "parents_row", "nodes_batch", "prompt_word"),
        *("counts_token", "repetition_batch", "frequency_batch", "presence_batch"),
        *("bias_entry", "value_entry"),
    )
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        element, wide = POINTEES[dtype], {"WIDE": dtype == torch.float64}
        tiles = edit_tiles()
        constants = tiles.constants | dict.fromkeys(flags, True) | wide
        yield Variant(
            "logits",
            "process_logits_kernel",
            element,
            Tiles(constants, tiles.num_warps, fused=tiles.fused),
            {"logits": element} | edits,
            longs=rows,
            aligned=("vocab", *rows, "counts_batch"),
            ones=units,
            expect={"wide_loads": True, "separate": True},
        )
        tiles = logprob_tiles(dtype)
        yield Variant(
            "logits",
            "token_logprobs_kernel",
            element,
            Tiles(tiles.constants | wide, tiles.num_warps),
            {"logits": element, "slots": "i32", "tokens": "i64", "logprobs": "fp32"},
            longs=rows,
            aligned=("vocab", *rows),
            ones=("logits_token", "slots_entry", "tokens_entry"),
            expect={"wide_loads": True},
        )
    for mark in (False, True):
        tiles = record_tiles()
        yield Variant(
            "logits",
            "record_tokens_kernel",
            "mark" if mark else "count",
            Tiles(tiles.constants | {"MARK": mark}, tiles.num_warps),
            {"record": "i32", "tokens": "i64"},
            longs=("record_batch",),
            ones=("record_entry", "tokens_entry"),
        )


# sample_tokens, sample_and_verify


FILTERS = ("HAS_TEMPERATURE", "HAS_TOP_K", "HAS_TOP_P", "HAS_MIN_P", "HAS_MASK")


def draw_tiles(flags: Mapping[str, bool]) -> Tiles:
    """A row is passed over by one wide program, 512 threads, which leaves each 128 registers.

    Those hold 8 logits, and 4 beside the sums that look for the edge of top-k or top-p.
    """
    return Tiles({"BLOCK": 2048 if flags["HAS_TOP_K"] or flags["HAS_TOP_P"] else 4096}, 16)


def walk_tiles(flags: Mapping[str, bool], max_depth: int) -> Tiles:
    """As for a draw, with room for the path."""
    return Tiles(draw_tiles(flags).constants | {"DEPTHS": power_of_2(max_depth + 1)}, 16)


def _verify_variants() -> Iterator[Variant]:
    draws = {
        **dict.fromkeys(("position_ids", "seeds"), "i64"),
        **dict.fromkeys(("temperatures", "top_ps", "min_ps"), "fp32"),
        **dict.fromkeys(("top_ks", "allowed_mask"), "i32"),
    }
    links = {
        **dict.fromkeys(("draft_tokens", "emitted_tokens", "bonus_token"), "i64"),
        **dict.fromkeys(("first_child", "next_sibling", "num_nodes"), "i32"),
        **dict.fromkeys(("accept_index", "accept_length"), "i32"),
    }
    units = (
        *("logits_token", "position_row", "seeds_batch", "temperature_batch", "top_k_batch"),
        *("top_p_batch", "min_p_batch", "mask_word"),
    )
    for dtype in (torch.bfloat16, torch.float32):
        for count, name in ((0, "greedy"), (1, "temperature"), (5, "filters")):
            if dtype == torch.float32 and name != "filters":
                continue
            flags = {flag: i < count for i, flag in enumerate(FILTERS)}
            for fused in (False, True):
                tiles = walk_tiles(flags, 7) if fused else draw_tiles(flags)
                constants = tiles.constants | flags | ({"HAS_NODES": True} if fused else {})
                yield Variant(
                    "verify",
                    "sample_and_verify_kernel" if fused else "sample_tokens_kernel",
                    f"{POINTEES[dtype]}-{name}",
                    Tiles(constants, tiles.num_warps),
                    {"logits": POINTEES[dtype]} | draws | (links if fused else {"tokens": "i64"}),
                    longs=("logits_batch", "logits_row"),
                    aligned=("vocab", "logits_batch", "logits_row"),
                    ones=units + (("draft_row", "child_row", "sibling_row", "nodes_batch") * fused),
                    # Four 16-bit logits a thread are 8 bytes.
                    expect={"wide_loads": name != "filters" or dtype == torch.float32},
                )


def variants() -> list[Variant]:
    """Every variant of the table."""
    return [
        *_write_variants(),
        *_expand_variants(),
        *_attention_variants(),
        *_logits_variants(),
        *_verify_variants(),
    ]
