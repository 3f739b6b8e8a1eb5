// compact_kv on CUDA: address.h run by one thread block per request, tensor and piece of a row. The
// tensors of all layers go into one launch: their pointers are part of its parameters, since a
// table copied from the host could not be captured in a graph.
#include <cuda_runtime.h>

#include <numeric>
#include <optional>
#include <vector>

#include "../address.h"
#include "common.cuh"

namespace eagle2 {
namespace {

// What tensors of one launch have in common; strides in bytes.
struct Geometry {
  int64_t blocks, slots;  // requests and positions of a dense cache, pages and their size
  int64_t block_stride, slot_stride, head_stride;
  int64_t heads, row;  // row: bytes of a head

  bool operator==(const Geometry&) const = default;
};

constexpr int kMostCaches = 480;

struct CompactArgs {
  const int32_t* accept_index;   // [B, width]
  const int32_t* accept_length;  // [B]
  const int32_t* prefix_lens;    // [B]
  const int32_t* page_table;     // [B, max_pages] or null
  int64_t table_stride, table_step, max_pages;
  int64_t width;
  Geometry cache;
  RowUnits row;       // all units of a position
  int32_t per_block;  // units to a block
  char* caches[kMostCaches];
};

static_assert(sizeof(CompactArgs) <= 4096, "kernel parameters of every card and toolkit");

// Each row that moves is read and written once. Shared memory: two pointers and the staged units of
// each row of the path. Blocks of requests that accepted no draft end at once.
//   bytes = tensors * (moves * (2 * heads * row + 8 with pages) + B * (4 * width + 8)),
//           moves = sum of accept_length
//   flops = 0
template <typename Unit>
__global__ void __launch_bounds__(256) compact_kv_kernel(const __grid_constant__ CompactArgs args) {
  __shared__ int32_t shared;
  const int32_t pieces = (args.row.count + args.per_block - 1) / args.per_block;
  const int64_t b = blockIdx.x / pieces, width = args.width;
  const int64_t length = clamp_index(int64_t{args.accept_length[b]} + 1, 0, width);
  if (length == 0) return;
  RowUnits units = args.row;
  units.first = static_cast<int32_t>(blockIdx.x % pieces) * args.per_block;
  units.count = min(args.per_block, args.row.count - units.first);
  char* const data = args.caches[blockIdx.y];
  const Geometry& cache = args.cache;
  const int32_t* table =
      args.page_table == nullptr ? nullptr : args.page_table + b * args.table_stride;
  const auto row_at = [&](int64_t position) -> char* {
    const CacheSlot place =
        cache_slot(position, b, table, args.table_step, args.max_pages, cache.slots, cache.blocks);
    if (place.block < 0) return nullptr;
    return data +
           cache_offset(place.block, cache.block_stride, place.slot, cache.slot_stride, 0, 0);
  };
  const auto copy = [](const char* from, char* to) {
    *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
  };
  char** from = reinterpret_cast<char**>(dynamic_shared());
  move_path(BlockTeam{},
            AcceptedPath{args.accept_index + b * width, 1, length, args.prefix_lens[b]}, units,
            row_at, copy,
            MoveScratch{from, from + width, &shared, reinterpret_cast<char*>(from + 2 * width)});
}

Geometry geometry_of(const Tensor& cache) {
  if (cache.dim() != 4) fail("kv_caches: expected 4 dimensions, got ", cache.dim());
  if (cache.size(3) > 1 && cache.stride(3) != 1) {
    fail("kv_caches: expected a contiguous last dimension, got stride ", cache.stride(3));
  }
  const auto bytes = static_cast<int64_t>(cache.element_size());
  return {cache.size(0),           cache.size(1), cache.stride(0) * bytes, cache.stride(1) * bytes,
          cache.stride(2) * bytes, cache.size(2), cache.size(3) * bytes};
}

// The tensors that one launch can serve.
struct Group {
  Geometry geometry;
  std::vector<char*> caches;
};

std::vector<Group> groups_of(const CudaArgs& cuda, const std::vector<Tensor>& kv_caches,
                             int64_t batch, bool paged) {
  std::vector<Group> groups;
  for (const Tensor& cache : kv_caches) {
    cuda.check_device(cache, "kv_caches");
    check_written(cache, "kv_caches");
    const Geometry geometry = geometry_of(cache);
    if (!paged && geometry.blocks != batch) {
      fail("kv_caches: expected one row per request (", batch, "), got ", geometry.blocks);
    }
    if (paged && geometry.slots < 1) {
      fail("kv_caches: expected a page size of at least 1, got ", geometry.slots);
    }
    if (geometry.heads * geometry.row == 0) continue;
    auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.geometry == geometry && g.caches.size() < kMostCaches;
    });
    if (group == groups.end()) group = groups.insert(groups.end(), Group{geometry, {}});
    group->caches.push_back(static_cast<char*>(cache.mutable_data_ptr()));
  }
  return groups;
}

// Bytes that can be moved at once: a power of two up to 16 that divides every address and length.
int32_t unit_bytes_of(const Group& group) {
  const Geometry& g = group.geometry;
  int64_t common = 16;
  for (const int64_t n : {g.block_stride, g.slot_stride, g.head_stride, g.row}) {
    common = std::gcd(common, n);
  }
  for (const char* cache : group.caches) {
    common = std::gcd(common, static_cast<int64_t>(reinterpret_cast<uintptr_t>(cache) % 16));
  }
  return static_cast<int32_t>(common);
}

using CompactKernel = void (*)(CompactArgs);

CompactKernel compact_kernel(int32_t unit_bytes) {
  switch (unit_bytes) {
    case 16:
      return &compact_kv_kernel<uint4>;
    case 8:
      return &compact_kv_kernel<uint64_t>;
    case 4:
      return &compact_kv_kernel<uint32_t>;
    case 2:
      return &compact_kv_kernel<uint16_t>;
    default:
      return &compact_kv_kernel<uint8_t>;
  }
}

// Units that a block moves per row: about one per thread, as many as can be staged at most.
int32_t units_per_block(int64_t width, int64_t row_units, int32_t unit_bytes) {
  const int64_t room = (kSharedBytes - 16 * width) / (width * unit_bytes);
  if (room < 1) {
    fail("accept_index: expected at most ", kSharedBytes / (16 + unit_bytes),
         " columns on CUDA, got ", width);
  }
  return static_cast<int32_t>(std::min({room, row_units, std::max<int64_t>(8, 256 / width)}));
}

void compact_kv(const std::vector<Tensor>& kv_caches, const Tensor& accept_index,
                const Tensor& accept_length, const Tensor& prefix_lens,
                const std::optional<Tensor>& page_table) {
  check_rank(accept_index, "accept_index", 2);
  const int64_t batch = accept_index.size(0), width = accept_index.size(1);
  const CudaArgs cuda(accept_index);
  CompactArgs args{};
  args.accept_index = cuda.input<int32_t, 2>(accept_index, "accept_index", {batch, width});
  args.accept_length = cuda.input<int32_t, 1>(accept_length, "accept_length", {batch});
  args.prefix_lens = cuda.input<int32_t, 1>(prefix_lens, "prefix_lens", {batch});
  args.width = width;
  if (page_table.has_value()) {
    const auto table = cuda.strided<int32_t, 2>(*page_table, "page_table", {batch, -1});
    args.page_table = table.data;
    args.table_stride = table.stride[0];
    args.table_step = table.stride[1];
    args.max_pages = table.size[1];
  }
  const bool paged = page_table.has_value();
  const std::vector<Group> groups = groups_of(cuda, kv_caches, batch, paged);
  if (batch == 0 || width == 0 || (paged && args.max_pages == 0)) return;

  const torch::stable::accelerator::DeviceGuard guard(cuda.device());
  for (const Group& group : groups) {
    const int32_t unit = unit_bytes_of(group);
    const int64_t per_head = group.geometry.row / unit, count = group.geometry.heads * per_head;
    if (count > INT32_MAX / 2) fail("kv_caches: expected shorter rows, got ", count, " units");
    args.cache = group.geometry;
    args.row = RowUnits{0, static_cast<int32_t>(count), static_cast<int32_t>(per_head), unit,
                        group.geometry.head_stride};
    args.per_block = units_per_block(width, count, unit);
    std::copy(group.caches.begin(), group.caches.end(), args.caches);
    const int64_t pieces = (count + args.per_block - 1) / args.per_block;
    if (batch * pieces > INT32_MAX) fail("kv_caches: expected fewer than 2^31 pieces of rows");
    const dim3 grid(static_cast<unsigned>(batch * pieces),
                    static_cast<unsigned>(group.caches.size()));
    const auto bytes = static_cast<size_t>(width * (16 + int64_t{args.per_block} * unit));
    compact_kernel(unit)<<<grid, 256, bytes, cuda.stream()>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

STABLE_TORCH_LIBRARY_IMPL(eagle2_kernels, CUDA, m) { m.impl("compact_kv", TORCH_BOX(&compact_kv)); }

}  // namespace
}  // namespace eagle2
