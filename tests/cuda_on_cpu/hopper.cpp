// mbarriers, bulk copies and products of a warpgroup. What CUDA leaves open is drawn: a bulk copy
// happens at any time between its issue and the moment that somebody could know of it, a group of
// products when it is committed or as late as the wait for it. Until then its accumulators hold NaN
// and its operands are not read, so that whoever touches either too early is found out. Additions
// to device memory happen in a random order, some of them when the kernel ends.
#include "hopper.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <vector>

#include "cudaTypedefs.h"
#include "cuda_bf16.h"
#include "emulated_ptx_sm90.h"
#include "faults.h"
#include "fibers.h"
#include "memory.h"
#include "random.h"

namespace emulation {
namespace {

// The 64 bits of an mbarrier, which are opaque in CUDA.
struct Barrier {
  std::uint32_t bytes;  // announced and not yet come
  std::uint16_t pending, count : 11, parity : 1, mark : 4;
};
static_assert(sizeof(Barrier) == 8);
constexpr unsigned barrier_mark = 9;

Barrier read(const std::uint64_t* p) {
  Barrier b;
  std::memcpy(&b, p, sizeof b);
  if (b.mark != barrier_mark) die("an mbarrier is used that nobody initialised");
  return b;
}
// Stores it, in its next phase if this one is over.
void write(std::uint64_t* p, Barrier b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.parity = !b.parity;
    b.pending = b.count;
    made_progress();
  }
  std::memcpy(p, &b, sizeof b);
}

struct BulkCopy {
  std::byte* to;
  const std::byte* from;  // null: a box
  CUtensorMap map;
  int at[4];
  std::uint32_t bytes;
  std::uint64_t* barrier;
};
std::vector<BulkCopy> copies;

std::byte* shared_byte(std::uint32_t address) {
  if (address >= shared_bytes())
    die("shared memory is used at byte %u of %zu", address, shared_bytes());
  return static_cast<std::byte*>(shared_base()) + address;
}
// Swizzle of 128 bytes: address bits 4-6 are exchanged for their difference to bits 7-9.
std::byte* swizzled_byte(std::uint32_t address) {
  return shared_byte(address ^ (address >> 7 & 7) << 4);
}
std::uint32_t shared_offset(const std::byte* p) {
  return static_cast<std::uint32_t>(p - static_cast<const std::byte*>(shared_base()));
}

void do_box(const BulkCopy& c) {
  const CUtensorMap& m = c.map;
  const std::uint32_t first = shared_offset(c.to), width = m.box[0] * 2;
  for (std::uint32_t row = 0; row < m.box[2]; ++row)
    for (std::uint32_t column = 0; column < m.box[0]; ++column) {
      const std::uint64_t at[4] = {
          static_cast<std::uint64_t>(c.at[0]) + column, static_cast<std::uint64_t>(c.at[1]),
          static_cast<std::uint64_t>(c.at[2]) + row, static_cast<std::uint64_t>(c.at[3])};
      std::uint16_t x = 0;  // outside of the tensor
      if (at[0] < m.size[0] && at[1] < m.size[1] && at[2] < m.size[2] && at[3] < m.size[3])
        std::memcpy(
            &x,
            m.base + at[0] * 2 + at[1] * m.stride[0] + at[2] * m.stride[1] + at[3] * m.stride[2],
            2);
      std::memcpy(swizzled_byte(first + row * width + column * 2), &x, 2);
    }
}

void do_copy(std::size_t i) {
  const BulkCopy c = copies[i];
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(i));
  if (c.from == nullptr)
    do_box(c);
  else
    std::memcpy(c.to, c.from, c.bytes);
  Barrier b = read(c.barrier);
  if (b.bytes < c.bytes)
    die("a bulk copy brings %u bytes, its mbarrier expects %u", c.bytes, b.bytes);
  b.bytes -= c.bytes;
  write(c.barrier, b);
  made_progress();
}

void start(const BulkCopy& c) {
  copies.push_back(c);
  if (random_below(4) == 0) do_copy(copies.size() - 1);
}

struct Addition {
  float* to;
  float x[4];
};
std::vector<Addition> additions;
constexpr std::size_t most_additions = 4096;

void do_some_addition() {
  std::swap(additions[random_below(additions.size())], additions.back());
  const Addition& a = additions.back();
  for (int i = 0; i < 4; ++i) a.to[i] += a.x[i];
  additions.pop_back();
}

struct StorePart {
  std::uint32_t row;  // its address
  const std::uint32_t* r;
};
void store_matrices(void* const* lanes, unsigned) {
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int lane = 0; lane < 32; ++lane) {
      const std::uint32_t row = static_cast<const StorePart*>(lanes[8 * matrix + lane / 4])->row;
      std::memcpy(shared_byte(row) + lane % 4 * 4,
                  &static_cast<const StorePart*>(lanes[lane])->r[matrix], 4);
    }
}

struct NamedBarrier {
  int arrived = 0, threads = 0;
  unsigned phase = 0;
};
NamedBarrier named[16];

struct Group {
  std::vector<Product> products;
  std::vector<std::vector<float>>
      accumulators;  // what a product found there, if it is the first on them
  bool done = false;
};
struct Products {
  std::deque<Group> groups;
  Group open;
  unsigned number = 0;
};
std::vector<Products> products(1024);
std::uint64_t choices = 0;  // of this block: which groups are done early

Products& mine() { return products[threadIdx.x]; }

float to_float(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// Element (i, k) of an operand in shared memory, k being summed over (PTX ISA, matrix descriptors
// and canonical layouts).
float element(std::uint64_t matrix, bool by_rows, std::uint32_t i, std::uint32_t k) {
  const auto field = [&](int bit) {
    return static_cast<std::uint32_t>(matrix >> bit & 0x3fff) << 4;
  };
  if (matrix >> 62 != 1 || (matrix >> 49 & 7) != 0)
    die("a matrix descriptor without 128-byte swizzle, or with a base offset");
  const std::uint32_t start = field(0), leading = field(16), stride = field(32);
  const std::uint32_t at =
      by_rows ? start + i / 64 * leading + i % 64 * 2 + k / 8 * stride + k % 8 * 128
              : start + i / 8 * stride + i % 8 * 128 + k * 2;
  std::uint16_t x;
  std::memcpy(&x, swizzled_byte(at), 2);
  return to_float(x);
}

// One warp's 16 rows of the 64.
void multiply(void* const* lanes, unsigned) {
  const auto lane = [&](unsigned i) -> const Product& {
    return *static_cast<const Product*>(lanes[i]);
  };
  const Product& p = lane(0);
  const unsigned n = static_cast<unsigned>(p.n), warp = threadIdx.x / 32 % 4;
  std::vector<float> a(16 * 16), b(n * 16);
  for (unsigned row = 0; row < 16; ++row)
    for (unsigned k = 0; k < 16; ++k)
      a[row * 16 + k] =
          p.a == nullptr
              ? element(p.a_matrix, p.a_by_rows, 16 * warp + row, k)
              : to_float(lane(row % 8 * 4 + k % 8 / 2).a[row / 8 + k / 8 * 2] >> k % 2 * 16 &
                         0xffff);
  for (unsigned column = 0; column < n; ++column)
    for (unsigned k = 0; k < 16; ++k)
      b[column * 16 + k] = element(p.b_matrix, p.b_by_rows, column, k);
  for (unsigned row = 0; row < 16; ++row)
    for (unsigned column = 0; column < n; ++column) {
      float& d = lane(row % 8 * 4 + column % 8 / 2).d[column / 8 * 4 + row / 8 * 2 + column % 2];
      float sum = p.accumulate ? d : 0.0f;
      for (unsigned k = 0; k < 16; ++k) sum += a[row * 16 + k] * b[column * 16 + k];
      d = sum;
    }
}

void finish(Group& g) {
  for (std::size_t i = 0; i < g.products.size(); ++i) {
    if (!g.accumulators[i].empty())
      std::memcpy(g.products[i].d, g.accumulators[i].data(),
                  g.accumulators[i].size() * sizeof(float));
    collective(~0u, "wgmma", multiply, &g.products[i]);
  }
  g.done = true;
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                const cuuint32_t* step, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 4 || reinterpret_cast<std::uintptr_t>(base) % 16 != 0 || box[0] * 2 > 128 ||
      box[0] % 8 != 0)
    return CUDA_ERROR_INVALID_VALUE;
  map->base = static_cast<std::byte*>(base);
  for (int i = 0; i < 4; ++i) {
    if (size[i] == 0 || size[i] > std::uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 ||
        step[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    map->size[i] = size[i];
    map->box[i] = box[i];
  }
  for (int i = 0; i < 3; ++i) {
    if (stride[i] % 16 != 0 || stride[i] >= std::uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    map->stride[i] = stride[i];
  }
  return CUDA_SUCCESS;
}

}  // namespace

void advance_bulk_copies() {
  if (!copies.empty() && random_below(4) == 0) do_copy(random_below(copies.size()));
}

void end_hopper_block() {
  if (!copies.empty()) die("a block ended with %zu bulk copies under way", copies.size());
  for (Products& p : products) {
    if (!p.groups.empty() || !p.open.products.empty())
      die("a thread ended with products under way");
    p.number = 0;
  }
  for (NamedBarrier& b : named) b = {};
  choices = random_bits();
  made_progress();
}

void end_hopper_kernel() {
  while (!additions.empty()) do_some_addition();
}

void mbarrier_init(std::uint64_t* barrier, int count) {
  Barrier b{};
  b.pending = static_cast<std::uint16_t>(count);
  b.count = static_cast<std::uint16_t>(count & 0x7ff);
  b.mark = barrier_mark;
  std::memcpy(barrier, &b, sizeof b);
}

void mbarrier_arrive(std::uint64_t* barrier, int bytes) {
  Barrier b = read(barrier);
  if (b.pending == 0) die("more threads arrive at an mbarrier than it counts");
  --b.pending;
  b.bytes += static_cast<std::uint32_t>(bytes);
  write(barrier, b);
}

void mbarrier_wait(const std::uint64_t* barrier, int parity) {
  while (read(barrier).parity == static_cast<unsigned>(parity)) yield("an mbarrier");
}

void copy_box(void* to, const CUtensorMap& map, std::uint64_t* barrier, const int (&at)[4]) {
  BulkCopy c{static_cast<std::byte*>(to),
             nullptr,
             map,
             {at[0], at[1], at[2], at[3]},
             map.box[0] * map.box[1] * map.box[2] * map.box[3] * 2,
             barrier};
  if (shared_offset(c.to) % 1024 != 0)
    die("a box with 128-byte swizzle goes to byte %u of shared memory", shared_offset(c.to));
  start(c);
}

void copy_bulk(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  if ((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from) |
       static_cast<std::uintptr_t>(bytes)) %
          16 !=
      0)
    die("a bulk copy that is not aligned to 16 bytes");
  start({static_cast<std::byte*>(to),
         static_cast<const std::byte*>(from),
         {},
         {},
         static_cast<std::uint32_t>(bytes),
         barrier});
}

void named_barrier(int id, int threads, bool wait) {
  NamedBarrier& b = named[id];
  if (b.arrived > 0 && b.threads != threads)
    die("barrier %d is used for %d and for %d threads at once", id, b.threads, threads);
  b.threads = threads;
  const unsigned phase = b.phase;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.phase;
    made_progress();
  }
  while (wait && b.phase == phase) yield("a named barrier");
}

void stmatrix(void* row, const std::uint32_t* r) {
  StorePart part{shared_offset(static_cast<const std::byte*>(row)), r};
  if (part.row % 16 != 0 || part.row + 16 > shared_bytes())
    die("a row of stmatrix goes to byte %u of %zu of shared memory", part.row, shared_bytes());
  collective(~0u, "stmatrix_x4", store_matrices, &part);
}

void add_four(float* to, const float (&x)[4]) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 || where_is(to, 16) != Where::device)
    die("an addition to %p, which is not 16 aligned bytes of device memory", to);
  additions.push_back({to, {x[0], x[1], x[2], x[3]}});
  if (additions.size() > most_additions || random_below(4) == 0) do_some_addition();
}

void wgmma_issue(const Product& product) {
  Products& p = mine();
  bool first = true;
  const auto look = [&](const Group& g) {
    if (!g.done)
      for (const Product& other : g.products) first &= other.d != product.d;
  };
  for (const Group& g : p.groups) look(g);
  look(p.open);
  p.open.products.push_back(product);
  p.open.accumulators.emplace_back();
  if (!first) return;
  p.open.accumulators.back().assign(product.d, product.d + product.n / 2);
  std::fill_n(product.d, product.n / 2, std::bit_cast<float>(0x7fa17fa1u));
}

void wgmma_commit() {
  Products& p = mine();
  p.groups.push_back(std::move(p.open));
  p.open = {};
  // The same choice for all lanes; groups are done in order.
  const unsigned bit = (threadIdx.x / 32 * 7 + p.number++) % 64;
  if (choices >> bit & 1)
    for (Group& g : p.groups)
      if (!g.done) finish(g);
}

void wgmma_wait(int pending) {
  Products& p = mine();
  if (!p.open.products.empty()) die("a wait for products that nobody committed");
  while (p.groups.size() > static_cast<std::size_t>(pending)) {
    if (!p.groups.front().done) finish(p.groups.front());
    p.groups.pop_front();
  }
}

}  // namespace emulation

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&emulation::encode) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
