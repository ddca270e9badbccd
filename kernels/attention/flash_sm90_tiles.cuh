// What the Hopper kernels of flash attention share: tensor maps, tiles in shared memory, the pieces
// of their products.
#pragma once

#include <cstring>

#include "attention/flash_sm90_order.cuh"
#include "ptx_sm90.cuh"

namespace weft::kernels {

// A tile in shared memory is [atoms][rows][64 columns]; columns beyond D are zeros that the bulk
// copy makes, so that D = 72 costs two atoms of space but only 80 columns of a product over D and
// 72 of a product onto D.
constexpr int tile_atoms(int columns) { return (columns + 63) / 64; }
constexpr int atom_bytes(int rows) { return rows * 128; }
// Registers that the warpgroups of a block share out (setmaxnreg), as a sum over one thread of
// each: what the block had when it began, a multiple of 8 a thread.
constexpr int registers_of_groups(int groups) { return groups * (65536 / (128 * groups) / 8 * 8); }
constexpr int tile_bytes(int columns, int rows) { return tile_atoms(columns) * atom_bytes(rows); }

// The map of rows of one operand as a tensor [sequences, rows, heads, D], copied in boxes of
// `box_rows` rows of one head, 64 columns at a time.
CUtensorMap make_tensor_map(const FlashRows<const __nv_bfloat16>& rows, const FlashShape& shape,
                            int count, int box_rows);

// The same of keys or values, which may be packed captions: then one sequence of all rows.
CUtensorMap make_key_map(const FlashRows<const __nv_bfloat16>& rows, const FlashShape& shape,
                         int box_rows);

#ifdef WEFT_SM90
namespace sm90 {

__device__ __forceinline__ std::uint32_t pack_two(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &two, sizeof bits);
  return bits;
}

// All atoms of a tile of `rows` rows.
template <int columns, int rows>
__device__ __forceinline__ void copy_tile(unsigned char* to, const CUtensorMap* map,
                                          std::uint64_t* barrier, int head, int row, int sequence) {
#pragma unroll
  for (int atom = 0; atom < tile_atoms(columns); ++atom)
    copy_box(to + atom * atom_bytes(rows), map, barrier, atom * 64, head, row, sequence);
}

// Zeros for the rows from `first` on: what lies behind a caption belongs to another one or to
// nobody, and 0 times NaN is NaN. Called by a whole warpgroup, whose products may read the tile
// afterwards; `barrier` is a named barrier of its own.
template <int columns, int rows>
__device__ __forceinline__ void clear_rows(unsigned char* tile, int first, int barrier) {
  const int thread = thread_here() % 128;
#pragma unroll
  for (int atom = 0; atom < tile_atoms(columns); ++atom)
    for (int piece = first * 8 + thread; piece < rows * 8; piece += 128)
      *reinterpret_cast<uint4*>(tile + atom * atom_bytes(rows) + piece * 16) =
          make_uint4(0, 0, 0, 0);
  async_proxy_fence();
  named_wait(barrier, 128);
}

// Where the 16 columns of step k of a product over columns begin, in a tile of `rows` rows from row
// `row` on.
template <int rows>
__device__ __forceinline__ const unsigned char* column_step(const unsigned char* tile, int row,
                                                            int k) {
  return tile + k / 4 * atom_bytes(rows) + row * 128 + k % 4 * 32;
}

// This warp's 16 rows of the warpgroup's 64 from `row` on as A operands of all steps over KD
// columns.
template <int KD, int rows>
__device__ __forceinline__ void load_operand(std::uint32_t (&a)[KD / 16][4],
                                             const unsigned char* tile, int row) {
  const int thread = thread_here() % 128, lane = thread % 32;
  const int r = row + thread / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < KD / 16; ++k) {
    const int piece = k % 4 * 2 + lane / 16;
    ldmatrix_x4(a[k], tile + k / 4 * atom_bytes(rows) + r * 128 + (piece ^ r % 8) * 16);
  }
}

// Accumulators of [64, n], two neighbouring products of 8 columns, as the A operands of n / 16
// steps.
template <int n>
__device__ __forceinline__ void pack_operand(std::uint32_t (&a)[n / 16][4],
                                             const float (&x)[n / 2]) {
#pragma unroll
  for (int k = 0; k < n / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = pack_two(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
}

// sum [64, ND] (+)= p [64, rows] x (rows of the tile, summed over).
template <int ND, int rows>
__device__ __forceinline__ void issue_weighted_rows(float (&sum)[ND / 2],
                                                    const std::uint32_t (&p)[rows / 16][4],
                                                    const unsigned char* tile, bool accumulate) {
#pragma unroll
  for (int k = 0; k < rows / 16; ++k)
    Wgmma<ND>::template from_registers<true>(sum, p[k], describe_columns<rows>(tile + k * 2048),
                                             accumulate || k > 0);
}

__device__ __forceinline__ void store_two(__nv_bfloat16* to, float low, float high) {
  *reinterpret_cast<std::uint32_t*>(to) = pack_two(low, high);
}
__device__ __forceinline__ void store_two(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}

// Rows group and group + 8 of this warp's 16, times their factor, to the rows from `first` on that
// are below n.
template <int ND, class T>
__device__ __forceinline__ void store_accumulators(const float (&x)[ND / 2], float factor0,
                                                   float factor1, T* to, std::int64_t row,
                                                   int first, int n, int D) {
  const int thread = thread_here() % 128, lane = thread % 32;
  const int i = first + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int t = 0; t < ND / 8; ++t) {
    const int c = t * 8 + lane % 4 * 2;
    if (c >= D) continue;
    if (i < n) store_two(to + i * row + c, x[4 * t] * factor0, x[4 * t + 1] * factor0);
    if (i + 8 < n)
      store_two(to + (i + 8) * row + c, x[4 * t + 2] * factor1, x[4 * t + 3] * factor1);
  }
}

// Bulk copies in flight, as a ring: use number `i` of it has stage i % stages and parity i / stages
// % 2. One register, for kernels that have none to spare.
template <int stages>
class Ring {
 public:
  __device__ __forceinline__ int stage() const { return use_ < stages ? use_ : use_ - stages; }
  __device__ __forceinline__ int parity() const { return use_ >= stages; }
  // The stage of `k` <= stages uses ago.
  __device__ __forceinline__ int before(int k) const { return (use_ + stages - k) % stages; }
  // What was made of it before is made again, rather than kept in registers that loops need.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(use_)); }
  __device__ __forceinline__ void advance() { use_ = use_ + 1 < 2 * stages ? use_ + 1 : 0; }

 private:
  int use_ = 0;
};

// Numbers of tiles on their way from the copying thread to the multiplying warps, in two slots of
// shared memory.
struct TileSlots {
  static_assert(tile_slot_bytes == 4 * sizeof(std::uint64_t) + 2 * sizeof(int));
  std::uint64_t* base;
  __device__ __forceinline__ std::uint64_t* full(int slot) const { return base + slot; }
  __device__ __forceinline__ std::uint64_t* empty(int slot) const { return base + 2 + slot; }
  __device__ __forceinline__ int* number(int slot) const {
    return reinterpret_cast<int*>(base + 4) + slot;
  }
  // By one thread, before the block works.
  __device__ __forceinline__ void init(int warps) const {
    for (int slot = 0; slot < 2; ++slot) {
      mbarrier_init(full(slot), 1);
      mbarrier_init(empty(slot), warps);
    }
  }
  // By every lane of a multiplying warp: the next number, which may be behind the list's end. The
  // shuffle tells the compiler that it is one number for the warp, which uniform registers take;
  // and behind it all lanes have read.
  __device__ __forceinline__ int take(int slot, int parity) const {
    mbarrier_wait(full(slot), parity);
    const int index = __shfl_sync(full_mask, *number(slot), 0);
    if (thread_here() % 32 == 0) mbarrier_arrive(empty(slot));
    return index;
  }
};

// Hands out a list's tiles to the launch's blocks in the order in which they come: the first by
// their number, the others by `taken`, a counter in device memory that is 0 between launches. So a
// block that begins late, because a collective had its multiprocessor, has fewer. Sums do not
// depend on it: a tile has all of its own.
class TileSource {
 public:
  __device__ __forceinline__ TileSource(const TileSlots& slots, int total, unsigned* taken)
      : slots_(slots), total_(total), taken_(taken) {}
  // By the copying thread: the next number, also told to the multiplying warps; -1 at the end.
  __device__ __forceinline__ int next() {
    int index = static_cast<int>(blockIdx.x);
    if (begun_) {
      const int others = static_cast<int>(atomicAdd(taken_, 1u));
      // Each block asks until there is none left: of all numbers together this is the last.
      if (others == total_ - 1) *taken_ = 0;
      index = static_cast<int>(gridDim.x) + others;
    }
    begun_ = true;
    mbarrier_wait(slots_.empty(turn_.stage()), turn_.parity() ^ 1);
    *slots_.number(turn_.stage()) = index;
    mbarrier_arrive(slots_.full(turn_.stage()));
    turn_.advance();
    return index < total_ ? index : -1;
  }

 private:
  TileSlots slots_;
  int total_;
  unsigned* taken_;
  Ring<2> turn_;
  bool begun_ = false;
};

}  // namespace sm90
#endif

}  // namespace weft::kernels
