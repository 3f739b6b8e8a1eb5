"""The mutants: one-line faults of the kinds that field_failures.json lists, and who must see them.

A mutant is (file, old text, new text, slugs). The old text stands in its file exactly once; when it
no longer does, the code has moved and the mutant must follow. It is killed by the field-failure
tests of its slugs, which run first, or by the `tests` named here. `objects` names the C++ sources
to compile again.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """``tests`` are pytest ids below tests/, separated by blanks, as are ``slugs``.

    ``quick`` puts it into the subset CI runs, ``hangs`` says that running on without end is how it
    shows, ``needs`` names a module without which it cannot be tried. ``isa`` is the EAGLE2_CPU_ISA
    the tests run with: the level whose object is compiled again.
    """

    file: str
    old: str
    new: str
    slugs: str
    tests: str = ""
    objects: str = ""
    quick: bool = False
    hangs: bool = False
    needs: str = ""
    isa: str = ""

    @property
    def name(self) -> str:
        """File and change, on one line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old} -> {new or 'nothing'}"

    @property
    def installed(self) -> str:
        """Where an installation has the file; csrc is not installed."""
        top = "eagle2_kernels/" if self.file.startswith("triton_kernels/") else ""
        return top + self.file

    @property
    def cost(self) -> int:
        """A rough order: what is compiled takes longer."""
        return 10 * ("attention" in self.objects) + len(self.objects.split())

    def stale(self, root: Path) -> str:
        """Why the mutant cannot be planted, or nothing."""
        count = (root / self.file).read_text().count(self.old)
        if count == 1 and self.old != self.new:
            return ""
        return f"{self.name}: expected its old text once, found it {count} times"

    def missing(self) -> str:
        """The module it needs, where that is not installed, or the level this CPU lacks."""
        if self.isa in ("avx512_bf16", "amx_model") and " avx512_bf16 " not in cpu_flags():
            return self.isa
        return self.needs if self.needs and importlib.util.find_spec(self.needs) is None else ""


@functools.cache
def cpu_flags() -> str:
    """The flags of /proc/cpuinfo, each between blanks."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((f" {x.partition(':')[2]} " for x in lines if x.startswith("flags")), "")


@functools.cache
def tests_by_name() -> dict[str, str]:
    """Test function -> pytest id, of the field-failure tests."""
    return {
        node.name: f"tests/field_failures/{path.name}::{node.name}"
        for path in sorted((TESTS / "field_failures").glob("test_*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def tests_of(slug: str) -> list[str]:
    """Ids of the tests whose name begins with a slug."""
    return [i for name, i in tests_by_name().items() if name.startswith(f"test_{slug}")]


def killers(mutant: Mutant) -> list[str]:
    """The tests to run against a mutant, the slugs' own first."""
    own = [test for slug in mutant.slugs.split() for test in tests_of(slug)]
    return own + [f"tests/{test}" for test in mutant.tests.split()]


KERNEL = [f"csrc/cpu/attention_{x}.h" for x in ("vectors", "products", "views", "kernel")]
TILES = "csrc/cpu/attention_tile_products.h"
ATTENTION = "csrc/cpu/attention.cpp"
TREE = "csrc/tree.h"
EXPAND = "csrc/cpu/expand.cpp"
SWEEP = "csrc/cpu/sweep_kernel.h"
VERIFY = "csrc/cpu/verify.cpp"
CACHE = "csrc/cpu/cache.cpp"
LOGITS = "csrc/cpu/logits.cpp"
LINEAR = "csrc/cpu/linear.cpp"
ORACLE = "eagle2_kernels/reference.py"
DECODE = "eagle2_kernels/decode.py"
STEP = "eagle2_kernels/step.py"
GRAPHS = "eagle2_kernels/graphs.py"
REQUESTS = "eagle2_kernels/generation.py"
TARGET = "eagle2_kernels/models/target.py"
DRAFT = "eagle2_kernels/models/draft.py"
PACKED = "eagle2_kernels/models/packed.py"
COMPILED = "eagle2_kernels/models/compiled.py"
FUSED = "eagle2_kernels/models/fused.py"


def kernel_file(old: str) -> str:
    """The part of the attention kernel that holds ``old``."""
    root = TESTS.parent
    return next((f for f in KERNEL if old in (root / f).read_text()), KERNEL[-1])


def kernel(old: str, new: str, slugs: str, **more) -> Mutant:
    """A mutant of the attention kernel, at the level that compiles fastest."""
    more = {"objects": "attention_portable", "isa": "portable"} | more
    return Mutant(kernel_file(old), old, new, slugs, **more)


def pairs(old: str, new: str, slugs: str, **more) -> Mutant:
    """A mutant of the attention kernel where it multiplies pairs of bfloat16."""
    return kernel(old, new, slugs, objects="attention_avx512_bf16", isa="avx512_bf16", **more)


def units(old: str, new: str, **more) -> Mutant:
    """A mutant of the attention kernel where the matrix unit's model multiplies 32 keys at once."""
    return kernel(old, new, "", objects="attention_amx_model", isa="amx_model", **more)


def triton(module: str, old: str, new: str, test: str, slugs: str = "", **more) -> Mutant:
    """A mutant of a Triton kernel, killed by a test of test_triton.py."""
    tests = f"test_triton.py::test_{test}"
    return Mutant(f"triton_kernels/{module}.py", old, new, slugs, tests, needs="triton", **more)


def tree(old: str, new: str, slugs: str, objects: str = "flatten", **more) -> Mutant:
    """A mutant of csrc/tree.h, in the sources that hold what it changes."""
    return Mutant(TREE, old, new, slugs, objects=objects, **more)


def oracle(old: str, new: str, slugs: str, **more) -> Mutant:
    """A mutant of reference.py; all of them are quick."""
    return Mutant(ORACLE, old, new, slugs, quick=True, **more)


ATTENTION_MUTANTS = [
    kernel(
        "if (see.path_count == 0) see.end = 0;",
        "",
        "row_that_sees_nothing",
    ),
    kernel(
        "const bool empty = total == 0;",
        "const bool empty = false;",
        "row_that_sees_nothing",
    ),
    kernel(
        "nothing ? -std::numeric_limits<float>::infinity()",
        "nothing ? 0.0f",
        "empty_part_in_a_merge row_that_sees_nothing",
    ),
    kernel(
        "*std::min_element(end, end + rows)",
        "*std::max_element(end, end + rows)",
        "poison_in_an_invisible_slot tree_call_then_causal_call",
        tests="test_attention.py::test_invisible_slots_do_not_touch_the_result",
    ),
    kernel(
        "odd = odd + x * A(0);",
        "",
        "poison_in_an_invisible_slot",
        tests="test_attention.py::test_a_row_that_sees_poison_shows_it_and_no_other_does",
    ),
    kernel(
        "x = x + x * A(0);",
        "",
        "poison_in_an_invisible_slot",
        tests="test_attention.py::test_a_row_that_sees_poison_shows_it_and_no_other_does",
    ),
    kernel(
        "to[j] = from[path[j] < 0 ? ~path[j] : path[j]];",
        "to[j] = from[j];",
        "",
        tests="test_attention.py::test_matches_oracle",
    ),
    kernel(
        "if (slots - first < 64) *bits &= (uint64_t{1} << (slots - first)) - 1;",
        "",
        "mask_of_the_wrong_length",
        tests="test_attention.py::test_hostile_values_stay_inside_the_cache",
    ),
    kernel(
        "const bool chain = p.mask == nullptr &&",
        "const bool chain = true &&",
        "two_branches_under_the_diagonal",
    ),
    kernel(
        "if (own - request.depths[list[i] * p.depths_stride[1]] >= p.window) list[i] = ~list[i];",
        "if (own - request.depths[list[i] * p.depths_stride[1]] > p.window) list[i] = ~list[i];",
        "window_per_node_by_position",
    ),
    kernel(
        "const int64_t own = request.depths[slot * p.depths_stride[1]];",
        "const int64_t own = slot;",
        "window_per_node_by_position",
        quick=True,
    ),
    kernel(
        "(kv_head * group + r % group) * p.q_stride[2]",
        "(kv_head + r % group * p.kv_heads) * p.q_stride[2]",
        "gqa_head_groups",
    ),
    kernel(
        "stride[1], head, stride[2]",
        "stride[1], head, p.k_dim",
        "strided_kv_views",
    ),
    kernel(
        "std::clamp<int64_t>(p.prefix_lens[index * p.prefix_stride], 0, p.capacity)",
        "std::clamp<int64_t>(p.prefix_lens[0], 0, p.capacity)",
        "ragged_batch_has_its_own_positions",
    ),
    kernel(
        "if (peak > *row_peak) {",
        "if (peak < *row_peak) {",
        "",
        tests="test_attention.py::test_chunks_whose_logits_lie_far_apart",
    ),
    kernel(
        "for (int64_t j = length; j % L != 0; ++j) path_k[j] = zero;",
        "",
        "odd_sizes",
        tests="test_attention.py::test_matches_oracle",
    ),
    Mutant(
        ATTENTION,
        'check_shape(mask, "tree_mask", {p.batch, p.nodes, words});',
        'check_shape(mask, "tree_mask", {p.batch, p.nodes, -1});',
        "mask_of_the_wrong_length",
        objects="attention",
    ),
    Mutant(
        "csrc/cpu/common.h",
        "if (size >= 0 && view.size[dim] != size) {",
        "if (size >= 0 && view.size[dim] < size) {",
        "mask_of_the_wrong_length",
        objects="attention",
    ),
    Mutant(
        ATTENTION,
        "const auto& only = no_y ? a : b;",
        "const auto& only = no_x ? a : b;",
        "empty_part_in_a_merge",
        objects="attention",
    ),
    Mutant(
        "csrc/address.h",
        "return block * block_stride + slot * slot_stride",
        "return static_cast<int32_t>(block * block_stride) + slot * slot_stride",
        "offsets_past_32_bits_and_page_ids_past_16",
        quick=True,
    ),
    Mutant(
        "csrc/address.h",
        "+ slot * slot_stride +",
        "+ static_cast<int32_t>(slot) * static_cast<int32_t>(slot_stride) +",
        "offsets_past_32_bits_and_page_ids_past_16",
        quick=True,
    ),
    Mutant(
        "csrc/address.h",
        "const int64_t page = table[entry * table_stride];",
        "const int64_t page = static_cast<uint16_t>(table[entry * table_stride]);",
        "offsets_past_32_bits_and_page_ids_past_16",
        quick=True,
    ),
    Mutant(
        "csrc/address.h",
        "position - entry * page_size}",
        "position & (page_size - 1)}",
        "odd_sizes",
        objects="attention_portable",
        isa="portable",
    ),
    Mutant(
        "csrc/address.h",
        "const int64_t source = path.index[i * path.stride];",
        "const int64_t source = i;",
        "slot_is_not_position_after_second_sibling",
        objects="cache",
        quick=True,
    ),
    Mutant(
        "csrc/address.h",
        "  team.sync();\n  each([&](int32_t i, int64_t offset, char* staged) { copy(staged,",
        "  each([&](int32_t i, int64_t offset, char* staged) { copy(staged,",
        "green_interpreter_is_not_a_green_gpu",
        tests="test_tree_core.py::test_rows_move_as_if_read_before_written",
    ),
    Mutant(
        "csrc/address.h",
        "path.index[length * path.stride] >= 0) ++length;",
        "path.index[length * path.stride] >= -1) ++length;",
        "nan_draft_scores",
        tests="test_tree_core.py::test_rows_move_as_if_read_before_written",
    ),
    Mutant(
        "csrc/cpu/cache_rows.h",
        "place.slot, cache_.stride[1], 0, 0)",
        "place.slot, cache_.size[2] * cache_.row, 0, 0)",
        "strided_kv_views",
        objects="cache",
    ),
    Mutant(
        CACHE,
        "if (counts.data != nullptr && j >= counts(b)) continue;",
        "if (counts.data != nullptr && j > counts(b)) continue;",
        "poison_in_an_invisible_slot",
        tests="test_cache.py::test_write_puts_rows_behind_the_prefix_and_nothing_else",
        objects="cache",
    ),
    oracle(
        "        if tree_slots.numel() == 0:\n            return tree_slots",
        "",
        "row_that_sees_nothing",
    ),
    oracle(
        "torch.arange(hq, device=q.device) // (hq // hkv)",
        "torch.arange(hq, device=q.device) % hkv",
        "gqa_head_groups",
    ),
    oracle(
        "tree_slots = torch.arange(slot + 1)",
        "tree_slots = torch.arange(tree_len)",
        "tree_call_then_causal_call",
    ),
    oracle(
        "keys = keys[prefix_len + depth[slot] - positions < window]",
        "keys = keys[prefix_len + depth[slot] - positions <= window]",
        "window_per_node_by_position",
    ),
    oracle(
        "keys = keys[prefix_len + depth[slot] - positions < window]",
        "keys = keys[prefix_len + slot - positions < window]",
        "window_per_node_by_position",
    ),
    oracle(
        "return torch.where((only_a & only_b)[..., None], 0, out), lse",
        "return out, lse",
        "empty_part_in_a_merge",
    ),
    oracle(
        "moves.append((to, cache[from_].clone()))",
        "moves.append((to, cache[from_]))",
        "slot_is_not_position_after_second_sibling",
        tests="test_cache.py::test_compaction_reads_every_source_before_it_writes",
    ),
    oracle(
        "positions[r, slot] = prefix_lens[r] + len(walk) - 1",
        "positions[r, slot] = prefix_lens.max() + len(walk) - 1",
        "ragged_batch_has_its_own_positions",
    ),
    pairs(
        "keys[j] = row == nullptr ? zero : row;",
        "keys[j] = row == nullptr ? v_rows[0] : row;",
        "",
        tests="test_attention.py::test_poison_outside_the_window_of_a_path",
    ),
    pairs(
        "keys[j] = begin[r] <= key && key < end[r] ? v_rows[key] : zero;",
        "keys[j] = v_rows[key];",
        "poison_in_an_invisible_slot",
        tests="test_attention.py::test_invisible_slots_do_not_touch_the_result",
        quick=True,
    ),
    pairs(
        "if (end[r] % Unit != 0 && !added) add_unit(r, end[r] / Unit);",
        "if (end[r] % Unit != 0 && added) add_unit(r, end[r] / Unit);",
        "",
        tests="test_attention.py::test_node_equals_plain_decoding",
    ),
    pairs(
        "if (j >= path_begin[r]) return path[j] < 0 ? nullptr : v_slots[path[j]];",
        "if (j >= path_begin[r]) return v_slots[path[j] < 0 ? ~path[j] : path[j]];",
        "",
        tests="test_attention.py::test_poison_outside_the_window_of_a_path",
    ),
    pairs(
        "if constexpr (Pack == 2) x = x * scale;",
        "",
        "",
        tests="test_attention.py::test_matches_oracle",
    ),
    kernel(
        "const int64_t part_end = p.chunks * (part + 1) / p.parts;",
        "const int64_t part_end = p.chunks * part / p.parts + 1;",
        "",
        tests="test_attention.py::test_keys_shared_by_tasks_give_the_same_bits",
    ),
    kernel(
        "if (part[1] != 0) merge_part<A>(part[0],",
        "if (c != 1) merge_part<A>(part[0],",
        "",
        tests="test_attention.py::test_keys_shared_by_tasks_give_the_same_bits",
    ),
    Mutant(
        "csrc/cpu/isa.cpp",
        "if (level.isa <= best.isa && unit) return level;",
        "return level.isa <= best.isa && unit ? level : best;",
        "",
        tests="test_isa.py::test_a_level_is_what_was_asked_for_or_an_error",
        objects="isa",
        quick=True,
    ),
    Mutant(
        "csrc/cpu/isa.cpp",
        "const bool unit = level.matrix != Matrix::kAmx || best.matrix == Matrix::kAmx;",
        "const bool unit = true;",
        "",
        tests="test_isa.py::test_a_level_is_what_was_asked_for_or_an_error",
        objects="isa",
    ),
    # The matrix unit: 32 keys are one product.
    units(
        "keys[j] = begin[r] <= key && key < end[r] ? v_rows[key] : zero;",
        "keys[j] = key < end[r] ? v_rows[key] : zero;",
        tests="test_attention.py::test_invisible_slots_do_not_touch_the_result",
    ),
    units(
        "!(path && begin[r] / Unit == path_begin[r] / Unit)",
        "true",
        tests="test_attention.py::test_node_equals_plain_decoding",
    ),
    units(
        "const bool added = begin[r] % Unit != 0 && begin[r] / Unit == end[r] / Unit;",
        "const bool added = false;",
        tests="test_attention.py::test_matches_oracle"
        " test_attention.py::test_invisible_slots_do_not_touch_the_result",
    ),
    units(
        "unit_from[r] = from / kWhole * kWhole;",
        "unit_from[r] = whole_from;",
        tests="test_attention.py::test_node_equals_plain_decoding",
    ),
    Mutant(
        TILES,
        "a + 16 * a_pitch + i",
        "a + i",
        "",
        tests="test_attention.py::test_matches_oracle",
        objects="attention_amx_model",
        isa="amx_model",
        quick=True,
    ),
    Mutant(
        "csrc/cpu/tiles.h",
        "even[n] = flushed(std::fma(low, b_low, even[n]));",
        "odd[n] = flushed(std::fma(low, b_low, odd[n]));",
        "",
        tests="test_isa.py::test_the_model_of_the_matrix_unit",
    ),
    # What the oracle and the rules must see beyond the field's reports.
    kernel(
        "const U32 subnormal = (U32)(magnitude < 8);",
        "const U32 subnormal = (U32)(magnitude < 7);",
        "",
        tests="test_attention.py::test_every_float8_value_is_read_exactly",
    ),
    kernel(
        "if constexpr (kFloat8<C>) return load(p) * scale;",
        "if constexpr (kFloat8<C>) return load(p);",
        "",
        tests="test_attention.py::test_a_float8_cache_is_the_float32_cache_of_its_values",
    ),
    kernel(
        "if (p.tree_len < 0) request.depths += request.first_row * p.depths_stride[1];",
        "",
        "",
        tests="test_attention.py::test_varlen_rows_are_the_dense_rows",
    ),
    kernel(
        "for (int64_t d = 0; d < p.v_dim; ++d) to[d]",
        "for (int64_t d = 0; d < std::min(p.k_dim, p.v_dim); ++d) to[d]",
        "",
        tests="test_attention.py::test_matches_oracle",
    ),
    Mutant(
        ATTENTION,
        "p.padding_rows = total - indptr(p.batch);",
        "p.padding_rows = 0;",
        "",
        tests="test_attention.py::test_varlen_rows_are_the_dense_rows",
        objects="attention",
    ),
    Mutant(
        ATTENTION,
        "if (stop - start > most) {",
        "if (stop - start > max_q) {",
        "",
        tests="test_attention.py::test_wrong_arguments_of_varlen_are_named",
        objects="attention",
    ),
    Mutant(
        CACHE,
        "static_cast<float>(source[d]) / scale",
        "static_cast<float>(source[d]) * scale",
        "",
        tests="test_cache.py::test_write_rounds_to_float8",
        objects="cache",
    ),
]

CHOOSING_MUTANTS = [
    Mutant(
        "csrc/cpu/rows.h",
        "(a.value == b.value && a.id < b.id)",
        "(a.value == b.value && a.id > b.id)",
        "ties_take_the_lowest_index",
        objects="expand",
        quick=True,
    ),
    Mutant(
        EXPAND,
        "(best < 0 || scores[at] > best_score)",
        "(best < 0 || scores[at] >= best_score)",
        "",
        tests="test_expand.py::test_equal_scores_across_parents_go_to_the_lower_index",
        objects="expand",
    ),
    Mutant(
        "csrc/cpu/rows.cpp",
        "return bits_float(magnitude > 0x7f800000u ? 0xff800000u : finite);",
        "return bits_float(finite);",
        "",
        tests="test_verify.py::test_hopeless_rows_yield_an_id_in_range",
        objects="rows",
    ),
    Mutant(
        "csrc/cpu/rows.cpp",
        "const uint32_t finite = bits == 0x7f800000u ? 0x7f7fffffu : bits;",
        "const uint32_t finite = bits;",
        "nan_draft_scores",
        objects="rows",
    ),
    Mutant(
        EXPAND,
        "((candidate.value - peak) - log_total) + beam_score",
        "(candidate.value - peak) - log_total",
        "log_probabilities_are_added",
        objects="expand",
        quick=True,
    ),
    Mutant(
        SWEEP,
        "while (found < k) {",
        "while (found < 1) {",
        "",
        tests="test_expand.py::test_equals_the_oracle",
        objects="sweep_portable",
        isa="portable",
        quick=True,
    ),
    *(
        Mutant(
            SWEEP,
            old,
            new,
            "",
            tests="test_expand.py::test_a_hostile_row_equals_the_oracle",
            objects="sweep_portable",
            isa="portable",
        )
        for old, new in (
            ("if (!(top <= kReach)) return false;", "if (!(top <= 1e6f)) return false;"),
            ("if (!(top * kLog2E >= -kReach)) top = largest(x, count);", ""),
            ("(!state.skipped || state.exponent - kFall >= -kReach)", "true"),
            ("if (sum != sum && !state->hostile) {", "if (false) {"),
            ("= std::ldexp(state->total, state->exponent - exponent)", "+= 0 * exponent"),
            ("if (!(low > shared)) return 0;", "if (!(low > 0)) return 0;"),
            ("rank - kZeroRank - 1.0f /", "rank - kZeroRank + 1.0f /"),
        )
    ),
    Mutant(
        SWEEP,
        "if (*part < mixed_parts) bits = in_order(bits);",
        "",
        "",
        tests="test_expand.py::test_equals_the_oracle",
        objects="sweep_portable",
        isa="portable",
        quick=True,
    ),
    Mutant(
        EXPAND,
        "/ static_cast<double>(kernel.term(top.best(), state))",
        "* std::ldexp(std::exp(-static_cast<double>(top.best())), state.exponent)",
        "",
        tests="test_expand.py::test_a_certain_token_scores_exactly_zero",
        objects="expand",
    ),
    tree(
        "s.effective[0][i] = known && score == score ? score : minus_infinity();",
        "s.effective[0][i] = known ? score : minus_infinity();",
        "nan_draft_scores",
    ),
    tree(
        "const bool known = parent >= -1 && parent < i;",
        "const bool known = parent >= -1 && parent <= i;",
        "nan_draft_scores",
        hangs=True,
    ),
    tree(
        "const bool known = parent >= -1 && parent < i;",
        "const bool known = parent >= -1;",
        "parent_lookup_past_its_row nan_draft_scores",
        hangs=True,
    ),
    tree(
        "effective = above < effective ? above : effective;",
        "effective = above > effective ? above : effective;",
        "child_without_its_parent",
        quick=True,
    ),
    tree(
        "effective = above < effective ? above : effective;",
        "effective = above < 0.5f * effective ? above : effective;",
        "child_without_its_parent",
    ),
    tree(
        "(0xffffffffu - static_cast<uint32_t>(candidate))",
        "static_cast<uint32_t>(candidate)",
        "ties_take_the_lowest_index child_without_its_parent",
    ),
    tree(
        "value == 0.0f ? 0.0f : value",
        "value",
        "ties_take_the_lowest_index",
        tests="test_flatten.py::test_both_zeros_tie",
    ),
    tree(
        "(slots + kWordBits - 1) / kWordBits",
        "(slots + kWordBits - 2) / kWordBits",
        "word_boundaries_of_packed_masks",
    ),
    tree(
        "parent = from < 0 ? 0 : 1 + find_key(kept, keep, above);",
        "parent = from < 0 ? 0 : find_key(kept, keep, above);",
        "child_without_its_parent degenerate_trees",
    ),
    tree(
        "if (parent < 0 || parent >= n || depth + 1 >= n) return -1;",
        "if (parent < 0 || parent >= n) return -1;",
        "nan_draft_scores",
        hangs=True,
    ),
    tree(
        "if (parent < 0 || parent >= n || depth + 1 >= n) return -1;",
        "if (parent < 0 || parent >= n || depth + 2 >= n) return -1;",
        "degenerate_trees word_boundaries_of_packed_masks",
        tests="test_flatten.py::test_parents_in_any_slot_order",
    ),
    tree(
        "if (parent < 0 || parent >= n || depth + 1 >= n) return -1;",
        "if (parent < 0 || parent > n || depth + 1 >= n) return -1;",
        "parent_lookup_past_its_row",
    ),
    tree(
        "if (parent >= 0 && parent < n) team.add(&children[parent], 1);",
        "if (parent >= 0 && parent < capacity) team.add(&children[parent], 0);",
        "nan_draft_scores",
        tests="test_flatten.py::test_leaf_paths_of_a_small_tree",
    ),
    tree(
        "for (int32_t i = team.rank(); i < capacity; i += team.size()) children[i] = 0;",
        "",
        "degenerate_trees",
    ),
    tree(
        "now[rank] + (rank >= gap ? now[rank - gap] : 0);",
        "now[rank] + (rank > gap ? now[rank - gap] : 0);",
        "word_boundaries_of_packed_masks",
        objects="",
        tests="test_tree_core.py::test_leaf_paths_stay_inside_their_rows",
    ),
    tree(
        "    team.sync();\n  }\n  *total",
        "  }\n  *total",
        "green_interpreter_is_not_a_green_gpu",
        objects="",
        tests="test_tree_core.py::test_leaf_paths_stay_inside_their_rows",
    ),
    tree(
        "{ return tree.depths[slot] > 0; }",
        "{ return tree.depths[slot] != 0; }",
        "nan_draft_scores",
    ),
    tree(
        "next_sibling[i] = first_child[tree.parents[i]];",
        "next_sibling[i] = -1;",
        "word_boundaries_of_packed_masks degenerate_trees",
    ),
    tree(
        "return level <= 0 ? 0 : top_k + (level - 1) * top_k * top_k;",
        "return level <= 0 ? 0 : level * top_k * top_k;",
        "parent_lookup_past_its_row degenerate_trees",
        objects="expand",
    ),
    tree(
        "const bool known = beam[j] >= 0 && beam[j] < candidates;",
        "const bool known = beam[j] >= 0 && beam[j] <= candidates;",
        "parent_lookup_past_its_row",
        objects="expand",
    ),
    tree(
        "const bool own = w == slot / kWordBits;",
        "const bool own = w == 0;",
        "word_boundaries_of_packed_masks",
        objects="expand",
    ),
    tree(
        "return effective > minus_infinity() && depth <= depth_limit;",
        "return depth <= depth_limit;",
        "nan_draft_scores",
    ),
    tree(
        "if (a.depth != b.depth) return a.depth < b.depth;",
        "if (a.depth != b.depth) return a.depth > b.depth;",
        "ties_take_the_lowest_index",
        tests="test_flatten.py::test_marginals_with_equal_scores_go_by_depth_then_rank_then_parent",
    ),
    tree(
        "if (a.rank != b.rank) return a.rank < b.rank;",
        "if (a.rank != b.rank) return a.rank > b.rank;",
        "ties_take_the_lowest_index",
        tests="test_flatten.py::test_marginals_with_equal_scores_go_by_depth_then_rank_then_parent",
    ),
    tree(
        "(own < bound ? own : bound)",
        "own",
        "child_without_its_parent",
        tests="test_flatten.py::test_hostile_marginals_equal_the_oracle",
    ),
    tree(
        "if (child + 1 < left && comes_before",
        "if (child + 2 < left && comes_before",
        "ties_take_the_lowest_index",
        tests="test_flatten.py::test_marginals_give_the_best_of_all_prefixes",
    ),
    tree(
        "take_best_prefixes(m, room - 1, depth_limit, s);",
        "take_best_prefixes(m, max_nodes - 1, depth_limit, s);",
        "degenerate_trees",
        tests="test_flatten.py::test_hostile_marginals_equal_the_oracle",
    ),
    oracle(
        "counted = counted.cummin(-1).values",
        "pass",
        "child_without_its_parent",
        tests="test_flatten.py::test_hostile_marginals_equal_the_oracle",
    ),
    oracle(
        "opened = [(depth, rank + 1, parent), (depth + 1, 0, len(taken) - 1)]",
        "opened = [(depth, rank + 1, parent)]",
        "degenerate_trees",
        tests="test_flatten.py::test_marginals_of_any_size_equal_the_oracle",
    ),
    tree(
        "const float log_prob = own == own ? (own < bound ? own : bound) : minus_infinity();",
        "const float log_prob = own < bound ? own : bound;",
        "nan_draft_scores",
    ),
    oracle(
        "torch.sort(x, dim=-1, descending=True, stable=True))",
        "torch.sort(x.flip(-1), dim=-1, descending=True, stable=True))",
        "ties_take_the_lowest_index",
    ),
    oracle(
        "x = logits if logits.dtype == torch.float64 else logits.float()",
        "return logits if logits.dtype == torch.float64 else logits.float()",
        "nan_draft_scores",
    ),
    oracle(
        "effective.append(min(score, effective[up[c]]))",
        "effective.append(score)",
        "child_without_its_parent",
    ),
    oracle(
        "best = sorted(alive, key=lambda c: (-effective[c], c))",
        "best = sorted(alive, key=lambda c: -effective[c], reverse=False)[::-1]",
        "ties_take_the_lowest_index",
    ),
    oracle(
        "            elif 0 <= up[c] < c:",
        "            elif 0 <= up[c] < len(effective) + 1:",
        "nan_draft_scores",
    ),
    oracle(
        "scores = ((top - peak) - log_sum + beam_scores[..., None]).float()",
        "scores = ((top - peak - log_sum).exp() * beam_scores[..., None].exp()).log().float()",
        "log_probabilities_are_added",
    ),
    oracle(
        "while 0 <= slot < count and len(walk) < count:",
        "while 0 <= slot < count:",
        "nan_draft_scores",
        hangs=True,
    ),
    oracle(
        "return 0 if level == 0 else top_k + (level - 1) * top_k * top_k",
        "return level * top_k * top_k",
        "parent_lookup_past_its_row",
    ),
    oracle(
        "known = 0 <= entry < start - first",
        "known = 0 <= entry",
        "parent_lookup_past_its_row",
    ),
    oracle(
        "return (1 << position) - (1 << 64 if position == 63 else 0)",
        "return (1 << position) if position < 63 else 0",
        "word_boundaries_of_packed_masks",
    ),
    Mutant(
        DRAFT,
        "count = top_k + (max_depth - 1) * top_k**2",
        "count = max_depth * top_k**2",
        "degenerate_trees",
        tests="test_seed.py::test_the_kept_nodes_are_the_most_probable",
    ),
    Mutant(
        "triton_kernels/cache.py",
        "row = (tl.program_id(0) % num_rows).to(tl.int64)",
        "row = tl.program_id(0) % num_rows",
        "green_interpreter_is_not_a_green_gpu",
        quick=True,
    ),
    Mutant(
        "triton_kernels/cache.py",
        "slot = tl.load(prefix_lens + request * prefix_batch).to(tl.int64) + row",
        "slot = tl.load(prefix_lens + request * prefix_batch) + tl.program_id(0) % num_rows",
        "green_interpreter_is_not_a_green_gpu",
        quick=True,
    ),
    Mutant(
        "triton_kernels/cache.py",
        "stored = (row < count) & (slot >= 0)",
        "stored = (row <= count) & (slot >= 0)",
        "poison_in_an_invisible_slot",
        tests="test_triton.py::test_write_kv_stores_only_the_rows_asked_for",
        needs="triton",
    ),
    Mutant(
        "triton_kernels/cache.py",
        "target_v = v_cache + page * vc_page + slot * vc_slot + head * vc_head + column",
        "target_v = v_cache + page * kc_page + slot * kc_slot + head * DV + column",
        "strided_kv_views",
        tests="test_triton.py::test_write_kv_stores_only_the_rows_asked_for",
        needs="triton",
    ),
    triton("cache", "+ index * table_entry", "+ index", "write_kv_stores_only_the_rows_asked_for"),
    triton(
        "cache",
        "x = tl.where(x > 448.0, 448.0, x)",
        "x = tl.where(x > 480.0, 448.0, x)",
        "write_kv_rounds_to_float8_as_the_cpu_does",
    ),
    triton(
        "cache",
        "+ ((size >> 20) & 1)) >> 20",
        "+ 1) >> 20",
        "write_kv_rounds_to_float8_as_the_cpu_does",
    ),
    triton(
        "attention",
        'x = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)',
        "x = number",
        "every_float8_number_is_read_as_it_is",
    ),
    triton(
        "attention",
        "result *= tl.load(v_scale)",
        "result *= 1.0",
        "every_float8_number_is_read_as_it_is",
    ),
    triton(
        "attention",
        "scale *= tl.load(k_scale)",
        "scale *= 1.0",
        "ragged_rows_equal_the_oracles_and_their_own_calls",
    ),
    triton(
        "attention",
        "depths_first = first_row * depths_slot",
        "depths_first = request * depths_batch",
        "ragged_rows_equal_the_oracles_and_their_own_calls",
    ),
    triton(
        "attention",
        "mask_first = first_row * mask_row",
        "mask_first = request * mask_row",
        "ragged_rows_of_a_longer_tree_and_of_the_prefix_alone",
    ),
    triton(
        "attention",
        "tl.minimum(end - first, most)",
        "end - first",
        "rows_past_the_hosts_bound_are_padding",
    ),
    triton("logits", "count += (token == ", "count = (token == ", "edited_logits_are_the_oracles"),
    triton(
        "logits",
        "alive = alive * tl.where(tl.load(row_parents) == -1, 1, 0)",
        "alive = alive * 1",
        "parents_that_loop_or_leave_the_tree_leave_their_rows_alone",
    ),
    triton("logits", ' | (bias == float("-inf"))', "", "edited_logits_are_the_oracles"),
    triton(
        "logits",
        "known = (token >= 0) & (token < limit)",
        "known = (token >= 0) & (token <= limit)",
        "tokens_are_counted_and_marked_as_by_the_oracle",
    ),
    triton(
        "logits", "sums += tl.exp", "sums = tl.exp", "log_probabilities_are_those_of_log_softmax"
    ),
]

VERIFICATION_MUTANTS = [
    tree(
        "return cumulative > threshold;",
        "return cumulative >= threshold;",
        "coins_at_zero_and_one",
        objects="verify",
        quick=True,
    ),
    tree(
        "if (!(p > 0) || is_carried(",
        "if (is_carried(",
        "coins_at_zero_and_one",
        objects="verify",
    ),
    tree(
        "cumulative += p;",
        "cumulative = p;",
        "coins_at_zero_and_one children_are_top_k_not_sampled",
        objects="verify",
    ),
    tree(
        "const double sum = s.shared[0], threshold = coin * sum;",
        "const double sum = s.shared[0], threshold = coin;",
        "children_are_top_k_not_sampled residual_mass_zero",
        objects="verify",
    ),
    tree(
        "if (!(sum > 0)) return -1;",
        "if (!(sum > 0)) return vocab - 1;",
        "residual_mass_zero",
        objects="verify",
    ),
    tree(
        "    last = i;\n    *before = cumulative;",
        "    *before = cumulative;\n    if (cumulative + sum > threshold) last = i;",
        "coins_at_zero_and_one",
        objects="verify",
    ),
    tree(
        "    if (!(sum > 0)) continue;\n",
        "",
        "coins_at_zero_and_one",
        objects="verify",
    ),
    tree(
        "const double threshold = coin * sum;",
        "const double threshold = coin;",
        "children_are_top_k_not_sampled",
        objects="verify",
        tests="test_tree_core.py::test_the_drawn_token_does_not_depend_on_the_team",
    ),
    tree(
        "double before = s.shared[1];",
        "double before = 0;",
        "children_are_top_k_not_sampled",
        objects="verify",
        tests="test_tree_core.py::test_a_team_walks_by_coins_as_the_oracle",
    ),
    tree(
        "if (child < 0) {\n      const int64_t token = draw(slot, leaf ? -1 : first_child[slot]);",
        "if (child < 0) {\n      const int64_t token = draw(slot, first_child[slot]);",
        "degenerate_trees",
        objects="",
        tests="test_tree_core.py::test_a_team_walks_by_coins_as_the_oracle",
    ),
    tree(
        "*bonus = target_tokens[slot];",
        "*bonus = target_tokens[0];",
        "degenerate_trees",
        objects="",
        tests="test_tree_core.py::test_a_team_accepts_the_path_of_the_oracle",
    ),
    Mutant(
        VERIFY,
        "if (token >= 0 && token < vocab()) row[token] = 0;",
        "if (token < 0) row[0] = 0;",
        "children_are_top_k_not_sampled",
        objects="verify",
    ),
    oracle(
        "if cumulative > float(coins[r, node]):",
        "if cumulative >= float(coins[r, node]):",
        "coins_at_zero_and_one",
    ),
    oracle(
        "                    rest[token] = 0\n",
        "",
        "coins_at_zero_and_one residual_mass_zero",
    ),
    oracle(
        "above = possible & (cumulative > coin * cumulative[-1])",
        "above = cumulative >= coin * cumulative[-1]",
        "coins_at_zero_and_one",
    ),
    tree(
        "const uint32_t bits = float_bits(scaled), largest = 0x3f7fffffu;",
        "const uint32_t bits = float_bits(scaled), largest = 0x3f800000u;",
        "residual_mass_zero",
        tests="test_tree_core.py::test_noise_of_many_words_has_the_oracles_bits",
    ),
    tree(
        "uint32_t c0 = static_cast<uint32_t>(position),",
        "uint32_t c0 = 0,",
        "draft_and_verification_noise_apart",
        objects="rows",
    ),
    tree(
        "uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);",
        "uint32_t key0 = static_cast<uint32_t>(seed), key1 = 0;",
        "draft_and_verification_noise_apart",
        objects="rows",
    ),
    tree(
        "place < slots && child >= 0",
        "place < 1 && child >= 0",
        "children_are_top_k_not_sampled slot_is_not_position_after_second_sibling",
        objects="verify",
        quick=True,
    ),
    tree(
        "place < slots && child >= 0",
        "child >= 0",
        "nan_draft_scores",
        objects="verify",
        hangs=True,
    ),
    tree(
        "child < slots; ++place",
        "child <= slots; ++place",
        "nan_draft_scores",
        objects="verify",
    ),
    tree(
        "    token = target(slot);\n    accept_index",
        "    token = draft_tokens[slot];\n    accept_index",
        "children_are_top_k_not_sampled draft_and_verification_noise_apart",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "static_cast<uint64_t>(positions_.row(b)[n])};",
        "static_cast<uint64_t>(positions_.row(b)[0])};",
        "children_are_top_k_not_sampled",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "const Noise noise{static_cast<uint64_t>(seeds_[b]),",
        "const Noise noise{static_cast<uint64_t>(seeds_[0]),",
        "children_are_top_k_not_sampled",
        objects="verify",
        quick=True,
    ),
    Mutant(
        VERIFY,
        "if (best.id < 0) return lowest_allowed(b, n);",
        "if (best.id < 0) return vocab();",
        "nan_target_row",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "if (!allowed_) return 0;",
        "return 0;",
        "nan_target_row",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "return allowed_->row(b) + n * allowed_->size(2);",
        "return allowed_->row(b);",
        "nan_target_row",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "if (allowed_) clear_banned(allowed_row(b, n), first, count, chunk);",
        "if (allowed_ && n == 0) clear_banned(allowed_row(b, n), first, count, chunk);",
        "filters_at_every_node",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "if (f.top_p < 1) cut_top_p(kept, best.value, temperature, f.top_p);",
        "if (false) cut_top_p(kept, best.value, temperature, f.top_p);",
        "filters_at_every_node",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "(kept == 0 || sum < top_p * total)",
        "(kept == 0 || sum <= top_p * total)",
        "filters_at_every_node",
        tests="test_verify.py::test_top_p_counts_the_mass_that_top_k_left"
        " test_verify.py::test_top_p_takes_a_candidate_only_while_the_mass_before_it_is_below_p",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "(kept == 0 || sum < top_p * total)",
        "(kept == 0 || sum < top_p)",
        "filters_at_every_node",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "if (!kept.empty() && !(sum < limit)) break;",
        "if (!kept.empty() && sum > limit) break;",
        "filters_at_every_node",
        tests="test_verify.py::test_top_p_takes_a_candidate_only_while_the_mass_before_it_is_below_p",
        objects="verify",
    ),
    Mutant(
        "csrc/cpu/rows.cpp",
        "out[i] = bits_float(float_bits(mass) < step ? rounded : float_bits(mass));",
        "out[i] = bits_float(rounded < step ? float_bits(mass) : float_bits(mass));",
        "",
        tests="test_verify_laws.py::test_top_p_sums_small_masses_exactly",
        objects="rows",
    ),
    Mutant(
        "csrc/cpu/rows.cpp",
        "out[i] = (std::exp(x[i]) + kShift) - kShift;",
        "out[i] = std::exp(x[i]);",
        "",
        tests="test_verify_laws.py::test_top_p_sums_small_masses_exactly",
        objects="rows",
    ),
    tree(
        "is_carried(first, next_sibling, draft_tokens, place, token)",
        "false",
        "",
        tests="test_verify_laws.py::test_a_repeated_sibling_counts_once",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "if (min_p > 0 && r.id != best.id && !passes_min_p(scaled, min_p)) continue;",
        "",
        "filters_at_every_node",
        tests="test_verify.py::test_sampling_equals_the_oracle",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "return mass >= static_cast<T>(min_p);",
        "return mass > static_cast<T>(min_p);",
        "filters_at_every_node",
        tests="test_verify.py::test_min_p_keeps_what_just_reaches_it",
        objects="verify",
    ),
    Mutant(
        VERIFY,
        "(!counts || (*counts)[b] > 0)",
        "(!counts || (*counts)[b] >= 0)",
        "eos_inside_the_accepted_path",
        tests="test_verify.py::test_inactive_requests_are_marked",
        objects="verify",
    ),
    oracle(
        "v = ((words.double() + 0.5) * 2.0**-32).float().clamp(max=1.0 - 2.0**-24)",
        "v = ((words.double() + 0.5) * 2.0**-32).float()",
        "residual_mass_zero",
    ),
    oracle(
        "return 0 if allowed is None or not bool(allowed.any()) else int(allowed.int().argmax())",
        "return len(x)",
        "nan_target_row",
    ),
    oracle(
        "x = torch.where(allowed, x, NEG_INF)",
        "x = torch.where(allowed, x, torch.finfo(x.dtype).min)",
        "nan_target_row",
    ),
    oracle(
        "mass = torch.where(keep, _exp(torch.where(keep, scaled, 0)), 0)",
        "mass = _exp(scaled)",
        "filters_at_every_node",
    ),
    oracle(
        "keep &= counted.cumsum(0) - counted < top_p * counted.sum()",
        "keep &= counted.cumsum(0) - counted < top_p",
        "filters_at_every_node",
    ),
    oracle(
        "noise = gumbel_noise(seed, position, len(x)).to(x.dtype)",
        "noise = gumbel_noise(seed, 0, len(x)).to(x.dtype)",
        "filters_at_every_node",
    ),
    oracle(
        "perturbed = torch.where(keep, scaled + noise[order], NEG_INF)",
        "perturbed = torch.where(keep, scaled + noise, NEG_INF)",
        "filters_at_every_node",
    ),
    oracle(
        "scaled = (ranked - ranked[0]) / divisor",
        "scaled = ranked - ranked[0]",
        "filters_at_every_node",
    ),
    Mutant(
        DECODE,
        '("vocab_size", target.vocab_size, head.config.vocab_size),',
        "",
        "vocabularies_that_differ",
        quick=True,
    ),
    Mutant(
        EXPAND,
        "args.draft_to_target->row(0)[candidate.id] : candidate.id",
        "candidate.id : candidate.id",
        "vocabularies_that_differ",
        objects="expand",
    ),
    oracle(
        "            for slot in walk[:-1]:",
        "            for slot in range(1, count):",
        "filters_at_every_node",
    ),
    oracle(
        "            for slot in walk[:-1]:",
        "            for slot in walk:",
        "filters_at_every_node",
    ),
    Mutant(
        LOGITS,
        "    at = parents[at];",
        "    at = at > 1 ? at - 1 : 0;",
        "filters_at_every_node",
        objects="logits",
    ),
    Mutant(
        LOGITS,
        "y = y > 0 ? y / repetition : y * repetition;",
        "y = y / repetition;",
        "filters_at_every_node",
        objects="logits",
    ),
    Mutant(
        LOGITS,
        "if (x == -INFINITY || t.bias == -INFINITY) return -INFINITY;",
        "",
        "filters_at_every_node",
        tests="test_logits.py::test_banned_stays_banned",
        objects="logits",
    ),
    Mutant(
        STEP,
        "processed = process(logits, state.processors, tree)",
        "processed = logits",
        "filters_at_every_node",
        quick=True,
    ),
    Mutant(
        STEP,
        "count_emitted(state.processors, emitted)",
        "count_emitted(state.processors, emitted[:, :1])",
        "filters_at_every_node",
        quick=True,
    ),
    Mutant(
        STEP,
        "            tree.num_nodes,\n            **state.filters,",
        "            tree.num_nodes,",
        "filters_at_every_node",
        quick=True,
    ),
]

LOOP_MUTANTS = [
    Mutant(
        REQUESTS,
        "            if self.finish_reason:\n                break",
        "",
        "eos_inside_the_accepted_path stop_before_the_cap",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "if self.finish_reason or not tokens:",
        "if not tokens:",
        "eos_inside_the_accepted_path",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "self.finish_reason = self._ending(token)",
        "self.finish_reason = self._ending(tokens[-1])",
        "eos_inside_the_accepted_path stop_before_the_cap",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "        if token in self.eos:\n"
        '            reason = "eos"\n'
        "        elif len(self.tokens) >= self.wanted:\n"
        '            reason = "positions" if self.short else "length"\n',
        "        if len(self.tokens) >= self.wanted:\n"
        '            reason = "positions" if self.short else "length"\n'
        "        elif token in self.eos:\n"
        '            reason = "eos"\n',
        "stop_before_the_cap",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "elif len(self.tokens) >= self.wanted:",
        "elif len(self.tokens) > self.wanted:",
        "exact_number_of_tokens",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "self.histogram[len(kept) - 1] += 1",
        "self.histogram[-1] += 1",
        "accept_length_counts_emitted_tokens",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "        kept = self.tokens[before:]\n        if forward:",
        "        kept = tokens\n        if forward:",
        "accept_length_counts_emitted_tokens",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "emitted = sum((i + 1) * n for i, n in enumerate(total))",
        "emitted = sum(i * n for i, n in enumerate(total))",
        "accept_length_counts_emitted_tokens",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "room = min(room, max_positions - len(prompt))",
        "room = min(room, max_positions - len(prompt) + 1)",
        "end_of_the_position_table",
        quick=True,
    ),
    Mutant(
        STEP,
        "deepest = state.ends - state.prefix_lens - 2",
        "deepest = state.ends",
        "end_of_the_position_table",
        quick=True,
    ),
    Mutant(
        STEP,
        "deepest = state.ends - state.prefix_lens - 2",
        "deepest = state.ends - state.prefix_lens - 1",
        "end_of_the_position_table",
        quick=True,
    ),
    Mutant(
        REQUESTS,
        "return [(first + i + 2**63) % 2**64 - 2**63 for i in range(count)]",
        "return [(first + 2**63) % 2**64 - 2**63 for i in range(count)]",
        "draft_and_verification_noise_apart",
        tests="test_decode.py::test_a_batch_equals_single_runs",
    ),
    Mutant(
        DECODE,
        "batch.take([[t for t in row if t >= 0] for row in verified.emitted.tolist()])",
        "batch.take([[t for t in row if t >= 0][:4] for row in verified.emitted.tolist()])",
        "exact_number_of_tokens",
        quick=True,
    ),
    Mutant(
        STEP,
        "state.prefix_lens = state.prefix_lens + taken",
        "state.prefix_lens = state.prefix_lens + accept_length",
        "slot_is_not_position_after_second_sibling",
        quick=True,
    ),
    Mutant(
        STEP,
        "compact_kv(state.cache.tensors, accept_index, accept_length, state.prefix_lens)",
        "",
        "slot_is_not_position_after_second_sibling",
        quick=True,
    ),
    Mutant(
        STEP,
        "compact_kv(state.cache.tensors, accept_index, accept_length, state.prefix_lens)",
        "compact_kv(state.cache.tensors[:2], accept_index, accept_length, state.prefix_lens)",
        "slot_is_not_position_after_second_sibling",
    ),
    Mutant(
        STEP,
        "            tree_mask=tree.tree_mask,\n            depths=tree.depths,\n"
        "            lengths=tree.num_nodes,",
        "            lengths=tree.num_nodes,",
        "two_branches_under_the_diagonal slot_is_not_position_after_second_sibling",
    ),
    Mutant(
        STEP,
        "kept = take_rows(logits, path) if self.keep_logits else None",
        "kept = logits if self.keep_logits else None",
        "eos_inside_the_accepted_path",
        tests="test_decode.py::test_kept_logits_are_those_behind_the_tokens",
    ),
    Mutant(
        DECODE,
        "request.logits.append(logits[i, :count].clone())",
        "request.logits.append(logits[i].clone())",
        "eos_inside_the_accepted_path",
        quick=True,
    ),
    Mutant(
        STEP,
        "        before = state.prefix_lens - lengths\n        hidden = refeed",
        "        before = state.prefix_lens - 1\n        hidden = refeed",
        "slot_is_not_position_after_second_sibling",
        tests="test_decode.py::test_draft_levels_equal_a_naive_recomputation",
    ),
    Mutant(
        TARGET,
        "input_ids=token_ids, position_ids=position_ids, use_cache=False, eagle2=call",
        "input_ids=token_ids, position_ids=position_ids, use_cache=True, eagle2=call",
        "transformers_caches_are_not_touched",
        quick=True,
    ),
    Mutant(
        TARGET,
        "window=layer.window,\n            sinks=s_aux,",
        "window=None,\n            sinks=s_aux,",
        "transformers_caches_are_not_touched",
        quick=True,
    ),
    Mutant(
        DRAFT,
        "positions = (prefix_lens.long() + level)[:, None]",
        "positions = (prefix_lens.long() + level + 1)[:, None]",
        "slot_is_not_position_after_second_sibling",
        tests="test_decode.py::test_draft_levels_equal_a_naive_recomputation",
    ),
    Mutant(
        FUSED,
        "self.prefix_lens + (self.tree_len - rows)",
        "self.prefix_lens + (self.tree_len - rows) // rows",
        "slot_is_not_position_after_second_sibling",
        tests="test_decode.py::test_draft_levels_equal_a_naive_recomputation",
    ),
    Mutant(
        "eagle2_kernels/compare.py",
        "return self.margin <= 2 * self.logit_error",
        "return self.margin < self.logit_error",
        "ties_in_low_precision",
        tests="test_cli.py::test_a_difference_is_judged_by_its_margin",
        quick=True,
    ),
    oracle(
        "return int((x == x.max()).int().argmax())",
        "return len(x) - 1 - int((x == x.max()).flip(0).int().argmax())",
        "ties_take_the_lowest_index",
    ),
]

GRAPH_MUTANTS = [
    Mutant(
        STEP,
        "torch.where((lengths > 0)[:, None, None], last, state.root_hidden)",
        "last",
        "",
        tests="test_graphs.py::test_a_later_call_replays_from_its_first_step",
        quick=True,
    ),
    Mutant(
        STEP,
        "        if list(alive) == self._sent:\n            return\n",
        "        if self._sent:\n            return\n",
        "",
        tests="test_graphs.py::test_a_request_that_ended_stands_still",
    ),
    Mutant(
        STEP,
        "self.alive.copy_(values, non_blocking=True)",
        "self.alive = values",
        "",
        tests="test_graphs.py::test_a_request_that_ended_stands_still",
        quick=True,
    ),
    Mutant(
        GRAPHS,
        "            if value is not buffer:\n                buffer.copy_(value)\n",
        '            if value is not buffer and name != "prefix_lens":\n'
        "                buffer.copy_(value)\n",
        "",
        tests="test_graphs.py::test_replayed_steps_emit_what_eager_steps_emit",
        quick=True,
    ),
    Mutant(
        GRAPHS,
        "            self._buffers.pending[2].zero_()\n",
        "            pass\n",
        "",
        tests="test_graphs.py::test_a_later_call_replays_from_its_first_step",
        quick=True,
    ),
    Mutant(
        GRAPHS,
        "        state.set_tensors(buffers)\n",
        "",
        "",
        tests="test_graphs.py::test_a_request_that_ended_stands_still",
    ),
    Mutant(
        GRAPHS,
        "    return step, shapes\n",
        "    return shapes\n",
        "",
        tests="test_graphs.py::test_each_bucket_has_a_graph",
        quick=True,
    ),
    Mutant(
        GRAPHS,
        "    return step, shapes\n",
        "    return step\n",
        "",
        tests="test_graphs.py::test_each_bucket_has_a_graph",
    ),
    Mutant(
        GRAPHS,
        "            self._graphs.clear()\n            self._weights = weights\n",
        "            self._weights = weights\n",
        "",
        tests="test_graphs.py::test_graphs_go_with_the_caches_and_weights_they_were_captured_over",
    ),
    Mutant(
        GRAPHS,
        "        with NoWaits():\n            return self._body()\n",
        "        return self._body()\n",
        "",
        tests="test_graphs.py::test_models_that_wait_for_the_device_are_refused_with_the_line",
    ),
]

ADAPTERS = "eagle2_kernels/integrations/"
ADAPTER_MUTANTS = [
    Mutant(
        ADAPTERS + "sglang/tree.py",
        "broken = (depths < 0) | (depths > max_depth)",
        "broken = depths < 0",
        "nan_draft_scores",
        tests="test_integration_sglang.py::test_a_chain_deeper_than_the_steps_is_walked_that_far",
    ),
    Mutant(
        ADAPTERS + "sglang/tree.py",
        "needed = (n + 7) // 8",
        "needed = n // 8",
        "word_boundaries_of_packed_masks",
        tests="test_integration_sglang.py::test_bitpacked_items_too_small_are_refused",
    ),
    Mutant(
        ADAPTERS + "sglang/verify.py",
        "torch.minimum(coins, before)",
        "torch.zeros_like(coins)",
        "coins_at_zero_and_one",
        tests="test_integration_sglang.py::test_thresholds_accept_by_the_engines_rule",
    ),
    Mutant(
        ADAPTERS + "tensorrt_llm.py",
        ".view(torch.int32)[..., :needed]",
        ".view(torch.int32)[..., -needed:]",
        "word_boundaries_of_packed_masks",
        tests="test_integrations.py::test_tensorrt_llm_tensors",
    ),
    Mutant(
        ADAPTERS + "vllm/__init__.py",
        "entry.is_overridden() and entry.get_path() != path",
        "False",
        "vocabularies_that_differ",
        tests="test_integration_vllm.py::test_a_strangers_backend_stays",
    ),
    Mutant(
        ADAPTERS + "flex_attention.py",
        "torch.where(slot < 0, slot, depths[request, at])",
        "slot",
        "window_per_node_by_position",
        tests="test_integrations.py::test_flex_attention_gives_what_tree_attention_gives",
    ),
    Mutant(
        ADAPTERS + "transformers.py",
        "max(s - n, 0))",
        "s)",
        "mask_of_the_wrong_length",
        tests="test_integration_transformers.py::test_generate_of_transformers_runs_on_it",
    ),
    Mutant(
        ADAPTERS + "transformers.py",
        "return bool(mask.all())",
        "return True",
        "ragged_batch_has_its_own_positions",
        tests="test_integration_transformers.py::test_attention_of_any_model_is_its_eager_attention",
    ),
    Mutant(
        ADAPTERS + "transformers.py",
        "layer.shape[-1] - (new - 2 - row)",
        "layer.shape[-1] - (new - 1 - row)",
        "exact_number_of_tokens",
        tests="test_integration_transformers.py::test_outputs_are_those_of_transformers",
    ),
    Mutant(
        ADAPTERS + "transformers.py",
        "process(sequences[:, : first + t], row.clone())",
        "process(sequences[:, :first], row.clone())",
        "exact_number_of_tokens",
        tests="test_integration_transformers.py::test_outputs_are_those_of_transformers",
    ),
    Mutant(
        ADAPTERS + "transformers.py",
        "if not eos:",
        "if False:",
        "exact_number_of_tokens",
        tests="test_integration_transformers.py::test_stopping_criteria_are_asked_after_every_token",
    ),
]

TRAINING_MUTANTS = [
    Mutant(
        DRAFT,
        "scores.max().exp() < stop_below",
        "scores.min().exp() < stop_below",
        "",
        tests="test_decode.py::test_a_level_is_drafted_while_its_frontier_is_likely_enough",
    ),
    Mutant(
        "eagle2_kernels/training/evaluate.py",
        "(ranks[max_depth - 1] < max_nodes - 1)",
        "(ranks[max_depth - 1] <= max_nodes - 1)",
        "",
        tests="test_tune.py::test_accept_lengths_are_those_of_decoding",
    ),
    Mutant(
        "eagle2_kernels/training/trainer.py",
        "(loss / c.accumulate).backward()",
        "loss.backward()",
        "",
        tests="test_trainer.py::test_accumulated_batches_make_the_gradient_of_their_mean",
    ),
    Mutant(
        "eagle2_kernels/training/trainer.py",
        "first = self.rank * c.accumulate",
        "first = 0",
        "",
        tests="test_trainer.py::test_two_processes_train_what_one_does_that_accumulates",
    ),
    Mutant(
        "eagle2_kernels/training/trainer.py",
        "self.average[name].lerp_(p, 1 - keep)",
        "self.average[name].lerp_(p, keep)",
        "",
        tests="test_trainer.py::test_the_moving_average_is_what_ships",
    ),
    Mutant(
        "eagle2_kernels/training/trainer.py",
        'self.average.update(state.get("average") or {})',
        "",
        "",
        tests="test_trainer.py::test_the_moving_average_is_what_ships",
    ),
    Mutant(
        "eagle2_kernels/training/losses.py",
        "below - (q * below).sum(-1, keepdim=True)",
        "below",
        "",
        tests="test_trainer.py::test_the_shared_heads_loss_and_its_gradient",
    ),
    Mutant(
        "eagle2_kernels/training/losses.py",
        "gain.mul_(1 - w[:, None])",
        "gain",
        "",
        tests="test_trainer.py::test_the_own_heads_loss_and_its_gradient",
    ),
    Mutant(
        "eagle2_kernels/training/data.py",
        "kept if key.read_text() == self._owner(kept) else 0",
        "kept",
        "",
        tests="test_trainer.py::test_features_of_text_that_grew_are_kept",
    ),
    Mutant(
        "eagle2_kernels/training/generate.py",
        "seed=self.config.seed + indices[0])",
        "seed=self.config.seed)",
        "",
        tests="test_training_text.py::test_batches_and_interruptions_change_nothing",
    ),
    Mutant(
        "eagle2_kernels/evaluation.py",
        "row.after_first = max(len(tokens) - 1, 0)",
        "row.after_first = len(tokens)",
        "",
        tests="test_evaluation.py::test_rows_are_what_the_calls_report",
    ),
    Mutant(
        "eagle2_kernels/tune.py",
        "rows.sort(key=lambda row: -row.tokens_per_second)",
        "rows.sort(key=lambda row: row.seconds)",
        "",
        tests="test_tune.py::test_the_best_is_the_fastest_row",
    ),
    Mutant(
        "eagle2_kernels/tune.py",
        "share = (depth - 1) / (last - 1)",
        "share = depth / last",
        "",
        tests="test_tune.py::test_a_step_costs_verification_and_draft",
    ),
]

FORWARD_MUTANTS = [
    Mutant(
        "csrc/cpu/linear_kernel.h",
        "{x[in_features - 1], 0}",
        "{x[in_features - 1], x[in_features - 1]}",
        "",
        tests="test_linear.py::test_non_finite_values_reach_what_they_should",
        objects="linear_avx512_bf16",
        isa="avx512_bf16",
    ),
    Mutant(
        "csrc/cpu/linear_kernel.h",
        "(0x7fffu + ((bits >> 16) & 1u))",
        "0x8000u",
        "",
        tests="test_linear.py::test_sums_are_of_float32_and_rounded_once_ties_to_even",
        objects="linear_portable",
        isa="portable",
    ),
    Mutant(
        "csrc/cpu/linear_tiles.h",
        "if (count - i < kDepth) {",
        "if (count < i) {",
        "",
        tests="test_linear.py::test_non_finite_values_reach_what_they_should",
        objects="linear_amx_model",
        isa="amx_model",
    ),
    Mutant(
        LINEAR,
        "rows.dims > 0 && rows.stride[rows.dims - 1] == size * stride",
        "rows.dims > 0",
        "",
        tests="test_linear.py::test_leading_dimensions_and_strides",
        objects="linear",
    ),
    Mutant(
        LINEAR,
        "c < columns ? w[0] : 0",
        "c < columns ? w[0] : 1",
        "",
        tests="test_linear.py::test_packing_matches_oracle",
        objects="linear",
    ),
    Mutant(
        PACKED,
        "if input is not self._x or i in self._taken:",
        "if input is not self._x:",
        "",
        tests="test_packed.py::test_siblings_are_one_product_with_their_own_values",
    ),
    Mutant(
        PACKED,
        "and m.in_features == first.in_features",
        "and m.in_features > 0",
        "",
        tests="test_packed.py::test_siblings_that_differ_are_packed_one_by_one",
    ),
    Mutant(
        COMPILED,
        "p.multiply if p.is_current() else p.plain",
        "p.multiply",
        "",
        tests="test_compiled.py::test_changed_weights_are_read",
    ),
    Mutant(
        COMPILED,
        "key = graph.module.code, ",
        'key = "", ',
        "",
        tests="test_compiled.py::test_layers_of_other_code_or_constants_do_not_share",
    ),
    Mutant(
        COMPILED,
        "if pair == [x, y]",
        "if pair[0] == x",
        "",
        tests="test_compiled.py::test_inputs_are_told_by_two_sizes",
        quick=True,
    ),
]

LAYER_MUTANTS = [
    Mutant(
        FUSED,
        "and all(map(is_, now, self._values))",
        "and True",
        "",
        tests="test_fused.py::test_changes_afterwards_are_seen",
    ),
    Mutant(
        FUSED,
        'own["_forward_hooks"] or own["_forward_pre_hooks"] for own in self._hooked',
        "{} for own in self._hooked",
        "",
        tests="test_fused.py::test_changes_afterwards_are_seen",
        quick=True,
    ),
    Mutant(
        FUSED,
        "return [c.forward for c in self._classes] == self._code and all(",
        "return all(",
        "",
        tests="test_fused.py::test_a_class_patched_afterwards_is_seen",
    ),
    Mutant(
        TARGET,
        "            _first_lengths(self.config),\n",
        "            (),\n",
        "",
        tests="test_target.py::test_longrope_ends_where_its_factors_would_depend_on_other_rows",
    ),
    Mutant(
        FUSED,
        'depths} if "window" in options',
        'None} if "window" in options',
        "",
        tests="test_fused.py::test_a_forward_is_the_modules",
    ),
    Mutant(
        FUSED,
        "features.clone(memory_format=torch.contiguous_format)",
        "features",
        "",
        tests="test_fused.py::test_a_heads_layer_is_the_modules",
    ),
    Mutant(
        FUSED,
        "tapped[i - 1] = residual.clone()",
        "tapped[i - 1] = residual",
        "",
        tests="test_fused.py::test_taps_are_the_outputs_of_layers",
    ),
    Mutant(
        "csrc/cpu/layer_kernel.h",
        "    return (F32)(nearest_bits(x) & 0xffff0000u);",
        "    return (F32)((U32)x & 0xffff0000u);",
        "",
        tests="test_layer.py::test_low_precision_rounds_where_transformers_rounds",
        objects="layer_portable",
        isa="portable",
    ),
    Mutant(
        "csrc/cpu/rope.h",
        "if (key != nullptr) store(head, weights_[1], key + h * to_[0].stride[2]);",
        "if (key != nullptr) store(head, weights_[0], key + h * to_[0].stride[2]);",
        "",
        tests="test_layer.py::test_rope_equals_the_oracle",
        objects="cache",
    ),
    Mutant(
        "csrc/cpu/decoder_layer.cpp",
        "v_cache, prefix_lens, slots - nodes,",
        "v_cache, prefix_lens, 0,",
        "",
        tests="test_decoder_layer.py::test_a_layer_is_its_operators_bit_for_bit",
        objects="decoder_layer",
    ),
    Mutant(
        "csrc/cpu/scratch.h",
        "using CallArena = ArenaOf<struct Call>;",
        "using CallArena = Arena;",
        "",
        tests="test_decoder_layer.py::test_a_layer_is_its_operators_bit_for_bit",
        objects="decoder_layer",
    ),
    Mutant(
        FUSED,
        'options = options | {"depths": depths}',
        'options = options | {"depths": None}',
        "",
        tests="test_fused.py::test_whole_layers_are_their_operators_bit_for_bit",
    ),
    Mutant(
        FUSED,
        'options["attention_input"] = x',
        'options["attention_input"] = x.clone().fill_(1)',
        "",
        tests="test_fused.py::test_a_heads_whole_layer_is_its_operators_bit_for_bit",
    ),
]

MUTANTS = (
    ATTENTION_MUTANTS
    + CHOOSING_MUTANTS
    + VERIFICATION_MUTANTS
    + LOOP_MUTANTS
    + GRAPH_MUTANTS
    + ADAPTER_MUTANTS
    + TRAINING_MUTANTS
    + FORWARD_MUTANTS
    + LAYER_MUTANTS
)
