// What the flash attention kernels share: where rows lie, which rows a block owns, and the entry
// points of each variant. CPU twin: src/ops/cpu/attention/attention.cpp. Cases:
// tests/kernels/attention.cpp.
//
// A problem is `sequences` x `heads` independent attentions. Row i of sequence s, head h lies at
//   base + (s / inner) * outer + (s % inner) * step + i * row + h * head        (in elements)
// which reads [B,T,S,3,H,D] along S (inner 1) or along T (inner S), [B,N,H,D] and packed captions
// [sum L,2,H,D] alike.
#pragma once

#include <cmath>

#include "launch.cuh"
#include "math.cuh"
#include "ptx.cuh"

namespace weft::kernels {

template <class T>
struct FlashRows {
  T* base = nullptr;
  std::int64_t outer = 0, step = 0;  // between sequences
  std::int64_t row = 0;              // between rows of one sequence
  int head = 0;                      // between heads

  __device__ __forceinline__ T* at(int s, int h, int inner) const {
    T* const of_head = base + static_cast<std::int64_t>(h) * head;
    return inner == 1 ? of_head + s * outer : of_head + s / inner * outer + s % inner * step;
  }
};

struct FlashShape {
  int sequences = 0, heads = 0, D = 0;
  int nq = 0, nk = 0;  // rows of a sequence; with key_offsets, nk is the number of all packed rows
  int inner = 1;
  // i32 [sequences + 1] on the device: sequence s has the keys [key_offsets[s], key_offsets[s+1]).
  // Null: nk keys each.
  const std::int32_t* key_offsets = nullptr;
  float scale = 1.0f;  // of the scores: 1 / sqrt(D)
  // f32 [sequences] on the device: added to the scaled score of each sequence's last key. Null:
  // nothing. Only the tiles for D up to 128 look at it.
  const float* last_bias = nullptr;

  __device__ __forceinline__ int first_key(int s) const { return key_offsets ? key_offsets[s] : 0; }
  __device__ __forceinline__ int keys(int s) const {
    return key_offsets ? key_offsets[s + 1] - key_offsets[s] : nk;
  }
  // What the last key's product of q and k gets.
  __device__ __forceinline__ float bias(int s) const {
    return last_bias ? last_bias[s] / scale : 0.0f;
  }
  // The D that the instance must hold.
  int tile_size() const { return last_bias ? 128 : D; }
};

template <class T>
struct FlashForward {
  FlashShape shape;
  FlashRows<const T> q, k, v;
  FlashRows<T> out;
  float* lse = nullptr;  // [sequences, heads, nq], natural logarithm; 0 for a sequence without keys
};

template <class T>
struct FlashBackward {
  FlashShape shape;
  FlashRows<const T> q, k, v, out, dout;
  const float* lse = nullptr;
  float* delta = nullptr;  // [sequences, heads, nq] scratch: rowsum(dout * out)
  FlashRows<T> dq, dk, dv;
  // With key_offsets, dk and dv go here in f32, [splits, nk, 2, heads, D], queries being shared out
  // over `splits` blocks; flash_merge_splits() makes dk and dv of them.
  float* partial = nullptr;
  int splits = 1;
};

// delta[s,h,i] = sum over D of dout * out. Reads 2 and writes 2/D tensors.
template <class T>
void flash_delta(const FlashBackward<T>& p);
// For the Hopper kernels: stats [sequences, heads, padded] of (lse / ln 2, delta), and of
// (infinity, 0) from nq on. Reads 2 tensors.
void flash_row_stats(const FlashBackward<__nv_bfloat16>& p, int padded, float2* stats);
// p.dk and p.dv [nk, heads, D], heads side by side = sums of p.partial over the splits in their
// order; rows after the last sequence's are zeroed.
template <class T>
void flash_merge_splits(const FlashBackward<T>& p);

// f32 on the ordinary cores (flash_f32.cu); D even, at most 128.
void flash_f32_forward(const FlashForward<float>& p);
void flash_f32_backward(const FlashBackward<float>& p);
// bf16 with mma.sync (flash_sm80.cu, flash_sm80_backward.cu); D even, at most 128.
void flash_sm80_forward(const FlashForward<__nv_bfloat16>& p);
void flash_sm80_backward(const FlashBackward<__nv_bfloat16>& p);

__host__ __device__ constexpr int blocks_of(int n, int size) { return (n + size - 1) / size; }

// Row `i` of dk of one head in p.partial; dv follows heads * D later.
template <class T>
__device__ __forceinline__ float* partial_row(const FlashBackward<T>& p, int split, std::int64_t i,
                                              int h) {
  const std::int64_t part = static_cast<std::int64_t>(p.shape.heads) * p.shape.D;
  return p.partial + (split * static_cast<std::int64_t>(p.shape.nk) + i) * 2 * part +
         static_cast<std::int64_t>(h) * p.shape.D;
}

// The rows that a block of the key side (dk, dv) owns.
struct KeyTile {
  int s, h, first, split;
};

// Blocks of `keys` rows: for packed captions, as many as could be needed; those beyond get s = -1.
inline unsigned key_tiles(const FlashShape& shape, int keys) {
  if (shape.key_offsets) return blocks_for(shape.nk, keys) + static_cast<unsigned>(shape.sequences);
  return blocks_for(shape.nk, keys) * static_cast<unsigned>(shape.sequences);
}
// Sets s and first: the sequence of tile number `tile` of packed keys, and its place there. The
// tiles of sequence s begin at number offset / keys + s, which leaves enough for its rows.
__device__ __forceinline__ void find_packed_tile(const FlashShape& shape, int keys, int tile,
                                                 KeyTile& t) {
  int low = 0, high = shape.sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (shape.key_offsets[middle] / keys + middle <= tile)
      low = middle;
    else
      high = middle;
  }
  t.first = (tile - shape.key_offsets[low] / keys - low) * keys;
  t.s = t.first < shape.keys(low) ? low : -1;
}
__device__ __forceinline__ KeyTile find_key_tile(const FlashShape& shape, int keys, unsigned tiles,
                                                 unsigned block) {
  KeyTile t;
  const int tile = static_cast<int>(block % tiles);
  t.h = static_cast<int>(block / tiles % shape.heads);
  t.split = static_cast<int>(block / tiles / shape.heads);
  if (shape.key_offsets) {
    find_packed_tile(shape, keys, tile, t);
    return t;
  }
  const int each = blocks_of(shape.nk, keys);
  t.s = tile / each;
  t.first = tile % each * keys;
  return t;
}

// Rows [first, first + ROWS) of D elements into shared memory [ROWS][PITCH], CHUNKS 16-byte pieces
// a row; zeros beyond `n` rows and beyond D. Asynchronous where D fills whole pieces:
// cp_async_commit() and a wait are the caller's.
template <int ROWS, int CHUNKS, int PITCH, int THREADS, class T>
__device__ __forceinline__ void load_rows(T* to, const T* from, std::int64_t row, int first, int n,
                                          int D) {
  constexpr int size = Pack<T>::size;
  if (D % size == 0) {
    // Unrolled further, the addresses of all pieces stay in registers that the accumulators need.
#pragma unroll 2
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
      const int r = i / CHUNKS, c = i % CHUNKS * size;
      const bool valid = first + r < n && c < D;
      cp_async_16(to + r * PITCH + c, valid ? from + (first + r) * row + c : from, valid);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int r = i / CHUNKS, c = i % CHUNKS * size;
    Pack<T> x;
    for (int e = 0; e < size; ++e)
      x.v[e] = first + r < n && c + e < D ? from[(first + r) * row + c + e] : from_float<T>(0.0f);
    store_pack(to + r * PITCH + c, x);
  }
}

// The kernels for Hopper (sm_90a): wgmma, bulk tensor copies, warps that only copy.
// Whether these kernels take a problem: a device of compute capability 9.0, D a multiple of 8 from
// 64 on, rows along S, a bias of last keys only of packed ones. The environment variable
// WEFT_ATTENTION=sm80 refuses all.
bool flash_sm90_takes(const FlashShape& shape);

void flash_sm90_forward(const FlashForward<__nv_bfloat16>& p);
void flash_sm90_backward(const FlashBackward<__nv_bfloat16>& p);
// The same of keys that are not packed, with fewer products and dq added in no fixed order. False,
// and nothing done, where its scratch does not fit.
bool flash_sm90_five(const FlashBackward<__nv_bfloat16>& p);

}  // namespace weft::kernels
