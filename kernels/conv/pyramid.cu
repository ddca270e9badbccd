// CUDA side of ops/conv.h. CPU twin src/ops/cpu/conv/pyramid.cpp, cases
// tests/kernels/conv.cpp.
//
// Bound by memory, and small: a matrix of 48 x 64 pixels and 456 columns is 2.8 MB in bf16, the
// weights of 512 of 4096 input channels 4.7 MB, beside a convolution of milliseconds. A thread an
// element; neighbours write neighbours.
#include "ops/conv.h"

#include "core/error.h"
#include "launch.cuh"

namespace weft::ops::cuda {
namespace {

using namespace kernels;

// What `cell` of a line of `cells` weighs in pixel `p` of `size`.
__device__ __forceinline__ float line_weight(std::int64_t p, std::int64_t size, std::int64_t cells,
                                             std::int64_t cell) {
  if (p < 0 || p >= size) return 0.0f;
  const float scale = static_cast<float>(cells) / static_cast<float>(size);
  const float at = fmaxf(0.0f, (static_cast<float>(p) + 0.5f) * scale - 0.5f);
  const std::int64_t low = min(static_cast<std::int64_t>(at), cells - 1);
  const float share = at - static_cast<float>(low);
  return (cell == low ? 1.0f - share : 0.0f) + (cell == min(low + 1, cells - 1) ? share : 0.0f);
}

template <class T>
__global__ void resize_taps_kernel(T* a, std::int64_t H, std::int64_t W, std::int64_t K,
                                   std::int64_t s, std::int64_t first) {
  const std::int64_t i = thread_index(), columns = 9 * s * s;
  if (i >= H * W * columns) return;
  const std::int64_t column = i % columns, pixel = i / columns, cell = column / 9;
  const std::int64_t u = column % 9 / 3, v = column % 3;
  a[pixel * K + first + column] = from_float<T>(line_weight(pixel / W + u - 1, H, s, cell / s) *
                                                line_weight(pixel % W + v - 1, W, s, cell % s));
}

// The chosen channels of weights [out,in,taps], and in which order they stand apart from the rest.
struct Chosen {
  std::int64_t out, in, taps, first, count;
  bool taps_first;
};
// The element of the weights that element i of [out,count,taps] or [taps,out,count] is.
__device__ __forceinline__ std::int64_t place_of(std::int64_t i, const Chosen& s) {
  const std::int64_t c = s.taps_first ? i % s.count : i / s.taps % s.count,
                     o = s.taps_first ? i / s.count % s.out : i / s.taps / s.count,
                     tap = s.taps_first ? i / s.count / s.out : i % s.taps;
  return (o * s.in + s.first + c) * s.taps + tap;
}

template <class T>
__global__ void take_kernel(const T* w, T* to, Chosen s) {
  const std::int64_t i = thread_index();
  if (i < s.out * s.count * s.taps) to[i] = w[place_of(i, s)];
}

__global__ void give_kernel(const float* from, float* dw, Chosen s, bool accumulate) {
  const std::int64_t i = thread_index();
  if (i >= s.out * s.count * s.taps) return;
  const std::int64_t at = place_of(i, s);
  dw[at] = accumulate ? dw[at] + from[i] : from[i];
}

Chosen chosen(const Tensor& weights, std::int64_t first, const Tensor& apart) {
  const bool taps_first = apart.shape().rank() == 3;
  return {weights.dim(0),
          weights.dim(1),
          weights.dim(2) * weights.dim(3),
          first,
          apart.dim(taps_first ? 2 : 1),
          taps_first};
}

}  // namespace

void resize_taps(std::int64_t s, std::int64_t first, Tensor& a) {
  const std::int64_t H = a.dim(0), W = a.dim(1), K = a.dim(2);
  WEFT_ASSERT(s > 0 && first >= 0 && first + 9 * s * s <= K);
  by_type(a, [&]<class T>() {
    launch_threads(resize_taps_kernel<T>, H * W * 9 * s * s, data<T>(a), H, W, K, s, first);
  });
}

void take_input_channels(const Tensor& w, std::int64_t first, Tensor& to) {
  by_type(w, [&]<class T>() {
    launch_threads(take_kernel<T>, to.numel(), data<T>(w), data<T>(to), chosen(w, first, to));
  });
}

void give_input_channels(const Tensor& from, std::int64_t first, Tensor& dw, bool accumulate) {
  launch_threads(give_kernel, from.numel(), data<float>(from), data<float>(dw),
                 chosen(dw, first, from), accumulate);
}

}  // namespace weft::ops::cuda
