// The small passes around flash attention's backward. CPU twin:
// src/ops/cpu/attention/attention.cpp. Cases: tests/kernels/attention.cpp. Both are bound by
// bandwidth.
#include "attention/flash_common.cuh"

namespace weft::kernels {
namespace {

constexpr int delta_lanes = 16;  // to one row, 16 bytes each: up to 128 columns of bf16 at once

// Reads out and dout once, 2 * 2 D bytes a row in bf16, and writes 4. Rows of one token lie side by
// side over the heads, which is why heads are the fastest index.
template <class T>
__global__ void __launch_bounds__(256) flash_delta_kernel(FlashBackward<T> p) {
  constexpr int size = Pack<T>::size;
  const int lane = threadIdx.x % delta_lanes;
  // In 32 bits: a 64-bit division takes longer than memory takes to deliver a row.
  const unsigned row = blockIdx.x * (256 / delta_lanes) + threadIdx.x / delta_lanes;
  const unsigned heads = static_cast<unsigned>(p.shape.heads);
  const unsigned nq = static_cast<unsigned>(p.shape.nq);
  const unsigned rows = static_cast<unsigned>(p.shape.sequences) * nq * heads;
  const int D = p.shape.D;
  const unsigned token = row / heads;
  const int h = static_cast<int>(row - token * heads);
  const int s = static_cast<int>(token / nq), i = static_cast<int>(token % nq);
  float sum = 0.0f;
  if (row < rows) {
    const T* const o = p.out.at(s, h, p.shape.inner) + i * p.out.row;
    const T* const g = p.dout.at(s, h, p.shape.inner) + i * p.dout.row;
    for (int c = lane * size; c < D; c += delta_lanes * size) {
      if (D % size == 0) {
        const Pack<T> a = load_pack(o + c), b = load_pack(g + c);
        for (int e = 0; e < size; ++e) sum += to_float(a.v[e]) * to_float(b.v[e]);
      } else {
        for (int e = c; e < c + size && e < D; ++e) sum += to_float(o[e]) * to_float(g[e]);
      }
    }
  }
  for (int offset = delta_lanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(full_mask, sum, offset);
  if (lane == 0 && row < rows)
    p.delta[(static_cast<std::int64_t>(s) * p.shape.heads + h) * p.shape.nq + i] = sum;
}

// stats[s,h,i] = (lse / ln 2, sum over D of dout * out). Reads out and dout once, 4 D bytes a row,
// and writes 8. Heads are the fastest index: rows of one token lie side by side.
__global__ void __launch_bounds__(256)
    flash_row_stats_kernel(FlashBackward<__nv_bfloat16> p, int padded, float2* stats) {
  const int lane = threadIdx.x % delta_lanes, D = p.shape.D;
  // In 32 bits: a 64-bit division takes longer than memory takes to deliver a row.
  const unsigned row = blockIdx.x * (256 / delta_lanes) + threadIdx.x / delta_lanes;
  const unsigned heads = static_cast<unsigned>(p.shape.heads),
                 length = static_cast<unsigned>(padded);
  const unsigned token = row / heads;
  const int h = static_cast<int>(row - token * heads);
  const int s = static_cast<int>(token / length), i = static_cast<int>(token % length);
  const bool valid = s < p.shape.sequences && i < p.shape.nq;
  float sum = 0.0f;
  if (valid) {
    const __nv_bfloat16* const o = p.out.at(s, h, 1) + i * p.out.row;
    const __nv_bfloat16* const g = p.dout.at(s, h, 1) + i * p.dout.row;
    if (lane * 8 < D) {
      const Pack<__nv_bfloat16> a = load_pack(o + lane * 8), b = load_pack(g + lane * 8);
      for (int e = 0; e < 8; ++e) sum += to_float(a.v[e]) * to_float(b.v[e]);
    }
  }
  for (int offset = delta_lanes / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(full_mask, sum, offset);
  if (lane != 0 || s >= p.shape.sequences) return;
  const std::int64_t sequence_head = static_cast<std::int64_t>(s) * p.shape.heads + h;
  stats[sequence_head * padded + i] =
      valid ? make_float2(p.lse[sequence_head * p.shape.nq + i] * log2_e, sum)
            : make_float2(INFINITY, 0.0f);
}

// Two columns a thread: D is even. Reads 4 bytes an element and split, writes one element.
template <class T>
__global__ void __launch_bounds__(256) flash_merge_splits_kernel(FlashBackward<T> p) {
  const unsigned part = static_cast<unsigned>(p.shape.heads * p.shape.D), row_size = 2 * part;
  const unsigned size = row_size * static_cast<unsigned>(p.shape.nk);
  const unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * 2;
  if (i >= size) return;
  float2 sum = make_float2(0.0f, 0.0f);
  const unsigned row = i / row_size, column = i - row * row_size;
  if (row < static_cast<unsigned>(p.shape.key_offsets[p.shape.sequences]))
    for (int split = 0; split < p.splits; ++split) {
      const float2 x =
          *reinterpret_cast<const float2*>(p.partial + static_cast<std::int64_t>(split) * size + i);
      sum.x += x.x;
      sum.y += x.y;
    }
  T* const to = column < part ? p.dk.base + row * p.dk.row + column
                              : p.dv.base + row * p.dv.row + (column - part);
  to[0] = from_float<T>(sum.x);
  to[1] = from_float<T>(sum.y);
}

}  // namespace

template <class T>
void flash_delta(const FlashBackward<T>& p) {
  const std::int64_t rows =
      static_cast<std::int64_t>(p.shape.sequences) * p.shape.nq * p.shape.heads;
  WEFT_ASSERT(rows < std::int64_t{1} << 31);
  launch(flash_delta_kernel<T>, dim3(blocks_for(rows, 256 / delta_lanes)), dim3(256), 0, p);
}

void flash_row_stats(const FlashBackward<__nv_bfloat16>& p, int padded, float2* stats) {
  const std::int64_t rows = static_cast<std::int64_t>(p.shape.sequences) * p.shape.heads * padded;
  WEFT_ASSERT(rows < std::int64_t{1} << 31);
  launch(flash_row_stats_kernel, dim3(blocks_for(rows, 256 / delta_lanes)), dim3(256), 0, p, padded,
         stats);
}

template <class T>
void flash_merge_splits(const FlashBackward<T>& p) {
  const std::int64_t pairs = static_cast<std::int64_t>(p.shape.heads) * p.shape.D * p.shape.nk;
  WEFT_ASSERT(pairs < std::int64_t{1} << 30);
  launch(flash_merge_splits_kernel<T>, dim3(blocks_for(pairs, 256)), dim3(256), 0, p);
}

template void flash_delta(const FlashBackward<float>&);
template void flash_delta(const FlashBackward<__nv_bfloat16>&);
template void flash_merge_splits(const FlashBackward<float>&);
template void flash_merge_splits(const FlashBackward<__nv_bfloat16>&);

}  // namespace weft::kernels
