// Attention with a single head of hundreds of channels (ops/attention.h). CPU twin
// src/ops/cpu/attention/wide.cpp, cases tests/kernels/attention.cpp.
//
// The head is too wide for the registers of a flash kernel: a row of 512 f32 for each of 64 queries
// is a multiprocessor's whole register file. So the scores pass through memory, a tile of queries
// against all keys at a time, between products of cuBLASLt's. Operations: forward 4 P^2 C, backward
// 14 P^2 C with the scores made again (a frame of 14,400 positions, 720p: 0.4 and 1.5 TFLOP); the
// tiles of scores move 8 (backward 18) P^2 bytes in bf16, 128 and more operations a byte at C =
// 512: the tensor cores and the memory take about as long. q, k, v are read where they lie, by rows
// of 3 C.
//
// Scratch: tiles of 32 MiB of f32 scores, one (backward two) and one of the operands' type;
// backward of bf16 also 2 P C of f32 for the sums of dk and dv over the tiles, which are added in
// order: no atomics.
#include <algorithm>

#include "matmul/product.cuh"
#include "ops/attention.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

#ifdef WEFT_CUDA_ON_CPU
constexpr std::int64_t tile_elements = 512;  // so that small cases have several
#else
constexpr std::int64_t tile_elements = 8 << 20;
#endif

// A row of scores a block: p = softmax(scale s), which may be s itself where the types agree, and
// the row's lse. P in accesses of V. A thread loads some accesses before it stores the first: the
// compiler cannot, for all that it knows p is s.
template <class T, int V>
__global__ void __launch_bounds__(threads)
    softmax_kernel(const float* s, T* p, int P, float scale, float* lse) {
  float* const scratch = shared_memory<float>();
  const float* const from = s + static_cast<std::int64_t>(blockIdx.x) * P * V;
  T* const to = p + static_cast<std::int64_t>(blockIdx.x) * P * V;
  float top = -INFINITY;
#pragma unroll 4
  for (int i = threadIdx.x; i < P; i += threads) {
    const Vec<float, V> x = load_vec<V>(from, i);
#pragma unroll
    for (int e = 0; e < V; ++e) top = fmaxf(top, x.v[e]);
  }
  // The block's maximum, computed as block_sum() does.
  top = warp_max(top);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = top;
  __syncthreads();
  top = warp_max(static_cast<int>(threadIdx.x % 32) < threads / 32 ? scratch[threadIdx.x % 32]
                                                                   : -INFINITY);
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < P; i += threads) {
    const Vec<float, V> x = load_vec<V>(from, i);
#pragma unroll
    for (int e = 0; e < V; ++e) sum += expf((x.v[e] - top) * scale);
  }
  sum = block_sum(sum, scratch);
  const float inverse = 1.0f / sum;
  constexpr int flight = 4;
  for (int first = threadIdx.x; first < P; first += flight * threads) {
    Vec<float, V> x[flight];
#pragma unroll
    for (int k = 0; k < flight; ++k) x[k] = load_vec<V>(from, min(first + k * threads, P - 1));
#pragma unroll
    for (int k = 0; k < flight; ++k) {
      float y[V];
#pragma unroll
      for (int e = 0; e < V; ++e) y[e] = expf((x[k].v[e] - top) * scale) * inverse;
      if (first + k * threads < P) store_vec<V>(to, first + k * threads, pack<T, V>(y));
    }
  }
  if (threadIdx.x == 0) lse[blockIdx.x] = top * scale + logf(sum);
}

// delta[row] = sum of out dout over the row.
template <class T>
__global__ void __launch_bounds__(threads)
    delta_kernel(const T* out, const T* dout, std::int64_t C, float* delta) {
  float* const scratch = shared_memory<float>();
  float sum = 0.0f;
  for (std::int64_t i = threadIdx.x; i < C; i += threads)
    sum += to_float(out[blockIdx.x * C + i]) * to_float(dout[blockIdx.x * C + i]);
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) delta[blockIdx.x] = sum;
}

// The access of a thread where blocks x are rows and blocks y go along the P accesses of a row;
// negative beyond its end.
__device__ __forceinline__ std::int64_t access_of(int P) {
  const int i = static_cast<int>(blockIdx.y * threads + threadIdx.x);
  return i < P ? static_cast<std::int64_t>(blockIdx.x) * P + i : -1;
}

// p = exp(scale s - lse). P in accesses of V.
template <class T, int V>
__global__ void __launch_bounds__(threads)
    probabilities_kernel(const float* s, T* p, int P, float scale, const float* lse) {
  const std::int64_t i = access_of(P);
  if (i < 0) return;
  float x[V];
  unpack(load_vec<V>(s, i), x);
  const float of_row = lse[blockIdx.x];
#pragma unroll
  for (int e = 0; e < V; ++e) x[e] = expf(x[e] * scale - of_row);
  store_vec<V>(p, i, pack<T, V>(x));
}

// ds = p (dp - delta) scale, in the place of dp's tile or of p's. P in accesses of V.
template <class T, int V>
__global__ void __launch_bounds__(threads)
    score_gradient_kernel(const float* s, const float* dp, T* ds, int P, float scale,
                          const float* lse, const float* delta) {
  const std::int64_t i = access_of(P);
  if (i < 0) return;
  float x[V], d[V];
  unpack(load_vec<V>(s, i), x);
  unpack(load_vec<V>(dp, i), d);
  const float of_row = lse[blockIdx.x], mean = delta[blockIdx.x];
#pragma unroll
  for (int e = 0; e < V; ++e) x[e] = expf(x[e] * scale - of_row) * (d[e] - mean) * scale;
  store_vec<V>(ds, i, pack<T, V>(x));
}

// Rows of C from f32 sums into every `row`-th element on of `to`; both in accesses of V.
template <class T, int V>
__global__ void __launch_bounds__(threads)
    store_rows_kernel(const float* from, T* to, int C, std::int64_t row) {
  const std::int64_t i = access_of(C);
  if (i < 0) return;
  float x[V];
  unpack(load_vec<V>(from, i), x);
  store_vec<V>(to, blockIdx.x * row + (i - static_cast<std::int64_t>(blockIdx.x) * C),
               pack<T, V>(x));
}

struct Matrix {
  const void* data;
  std::int64_t row;  // elements from row to row
  bool transposed = false;
};

// d [rows,columns] (+)= a b.
void multiply(std::int64_t rows, std::int64_t columns, std::int64_t inner, const Matrix& a,
              const Matrix& b, DType in, void* d, DType out, std::int64_t d_row, bool add = false) {
  Product p{rows, columns, inner, a.transposed, b.transposed, in, out, Epilogue::none, add};
  p.a_row = a.row;
  p.b_row = b.row;
  p.d_row = d_row;
  const Operands at{a.data, b.data, add ? d : nullptr, d, nullptr, nullptr};
  if (!product_lt(p, at)) product_plain(p, at);
}

// Calls f.operator()<V>() with 4 where rows of `length` elements can move by four, else 1.
template <class F>
void by_fours(std::int64_t length, F&& f) {
  if (length % 4 == 0)
    f.template operator()<4>();
  else
    f.template operator()<1>();
}

// A block row for each of `rows`, as many blocks along it as `accesses` need.
dim3 row_blocks(std::int64_t rows, std::int64_t accesses) {
  return dim3(static_cast<unsigned>(rows), blocks_for(accesses, threads));
}

std::int64_t tile_rows(std::int64_t P) { return std::clamp<std::int64_t>(tile_elements / P, 1, P); }

// One frame: q, k, v are columns [0,C), [C,2C), [2C,3C) of rows of 3 C.
template <class T>
struct Frame {
  std::int64_t P, C;
  DType type;
  float scale;
  const T* qkv;

  Matrix part(int which, std::int64_t first = 0, bool transposed = false) const {
    return {qkv + first * 3 * C + which * C, 3 * C, transposed};
  }
};

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void wide_attention_forward(const Tensor& qkv, Tensor& out, Tensor& lse) {
  const std::int64_t N = qkv.dim(0), P = qkv.dim(1), C = qkv.dim(3), rows = tile_rows(P);
  if (qkv.numel() == 0) return;
  const DType type = qkv.dtype();
  const Tensor scores = Tensor::empty({rows, P}, DType::f32);
  const Tensor rounded = type == DType::f32 ? scores : Tensor::empty({rows, P}, type);
  by_type(qkv, [&]<class T>() {
    for (std::int64_t n = 0; n < N; ++n) {
      const Frame<T> f{P, C, type, 1.0f / std::sqrt(static_cast<float>(C)),
                       data<T>(qkv) + n * P * 3 * C};
      for (std::int64_t first = 0; first < P; first += rows) {
        const std::int64_t m = std::min(rows, P - first);
        multiply(m, P, C, f.part(0, first), f.part(1, 0, true), type, scores.raw(), DType::f32, P);
        by_fours(P, [&]<int V>() {
          launch(softmax_kernel<T, V>, dim3(static_cast<unsigned>(m)), dim3(threads),
                 32 * sizeof(float), data<float>(scores), data<T>(rounded), P / V, f.scale,
                 data<float>(lse) + n * P + first);
        });
        multiply(m, C, P, {rounded.raw(), P}, f.part(2), type, data<T>(out) + (n * P + first) * C,
                 type, C);
      }
    }
  });
}

void wide_attention_backward(const Tensor& qkv, const Tensor& out, const Tensor& lse,
                             const Tensor& dout, Tensor& dqkv) {
  const std::int64_t N = qkv.dim(0), P = qkv.dim(1), C = qkv.dim(3), rows = tile_rows(P);
  if (qkv.numel() == 0) return;
  const DType type = qkv.dtype();
  const bool exact = type == DType::f32;
  const Tensor scores = Tensor::empty({rows, P}, DType::f32),
               dp = Tensor::empty({rows, P}, DType::f32);
  const Tensor rounded = Tensor::empty({rows, P}, type);
  const Tensor delta = Tensor::empty({P}, DType::f32);
  const Tensor sums = exact ? Tensor() : Tensor::empty({2, P, C}, DType::f32);
  by_type(qkv, [&]<class T>() {
    for (std::int64_t n = 0; n < N; ++n) {
      const Frame<T> f{P, C, type, 1.0f / std::sqrt(static_cast<float>(C)),
                       data<T>(qkv) + n * P * 3 * C};
      const T* const gradient = data<T>(dout) + n * P * C;
      T* const to = data<T>(dqkv) + n * P * 3 * C;
      float* const row_lse = data<float>(lse) + n * P;
      // Where dk (0) and dv (1) are summed: directly in place, or aside in f32.
      const auto place = [&](int which) {
        return exact ? static_cast<void*>(to + (1 + which) * C)
                     : static_cast<void*>(data<float>(sums) + which * P * C);
      };
      const std::int64_t place_row = exact ? 3 * C : C;
      launch(delta_kernel<T>, dim3(static_cast<unsigned>(P)), dim3(threads), 32 * sizeof(float),
             data<T>(out) + n * P * C, gradient, C, data<float>(delta));
      for (std::int64_t first = 0; first < P; first += rows) {
        const std::int64_t m = std::min(rows, P - first);
        const bool add = first > 0;
        multiply(m, P, C, f.part(0, first), f.part(1, 0, true), type, scores.raw(), DType::f32, P);
        by_fours(P, [&]<int V>() {
          launch(probabilities_kernel<T, V>, row_blocks(m, P / V), dim3(threads), 0,
                 data<float>(scores), data<T>(rounded), P / V, f.scale, row_lse + first);
        });
        const Matrix some{gradient + first * C, C};
        multiply(P, C, m, {rounded.raw(), P, true}, some, type, place(1), DType::f32, place_row,
                 add);
        multiply(m, P, C, some, f.part(2, 0, true), type, dp.raw(), DType::f32, P);
        by_fours(P, [&]<int V>() {
          launch(score_gradient_kernel<T, V>, row_blocks(m, P / V), dim3(threads), 0,
                 data<float>(scores), data<float>(dp), data<T>(rounded), P / V, f.scale,
                 row_lse + first, data<float>(delta) + first);
        });
        multiply(m, C, P, {rounded.raw(), P}, f.part(1), type, to + first * 3 * C, type, 3 * C);
        multiply(P, C, m, {rounded.raw(), P, true}, f.part(0, first), type, place(0), DType::f32,
                 place_row, add);
      }
      if (!exact)
        for (int which = 0; which < 2; ++which)
          by_fours(C, [&]<int V>() {
            launch(store_rows_kernel<T, V>, row_blocks(P, C / V), dim3(threads), 0,
                   data<float>(sums) + which * P * C, to + (1 + which) * C, C / V, 3 * C / V);
          });
    }
  });
}

}  // namespace weft::ops::cuda
