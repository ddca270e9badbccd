// CUDA side of ops/conv.h's layouts: channels first and last, depth to time. CPU twin src/ops/cpu/layout.cpp, cases
// src/bench/kernels/conv.cpp.
//
// Bound by memory, every element read and written once. Channels first and last happen to pixels (3 channels) and latents
// (4): a thread takes a position, so that each channel's plane is read in whole lines, and the lines of the other side are
// whole once its neighbours have written theirs. Depth to time gathers pairs of channels that lie side by side.
#include "ops/conv.h"

#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

// One [C,P] a sample on the one side, [P,C] on the other.
template <class T, bool to_last>
__global__ void channels_kernel(const T* x, T* y, std::int64_t C, std::int64_t P,
                                std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t b = i / P, p = i % P;
  for (std::int64_t c = 0; c < C; ++c) {
    const std::int64_t first = (b * C + c) * P + p, last = i * C + c;
    if constexpr (to_last)
      y[last] = x[first];
    else
      y[first] = x[last];
  }
}

template <bool to_last>
void move_channels(const Tensor& x, std::int64_t C, std::int64_t P, Tensor& y) {
  const std::int64_t count = x.numel() / C;
  const auto run = [&]<class T>() {
    launch(channels_kernel<T, to_last>, dim3(blocks_for(count, threads)), dim3(threads), 0,
           static_cast<const T*>(x.raw()), static_cast<T*>(y.raw()), C, P, count);
  };
  if (size_of(x.dtype()) == 4)
    run.template operator()<std::uint32_t>();
  else if (size_of(x.dtype()) == 2)
    run.template operator()<std::uint16_t>();
  else {
    WEFT_ASSERT(size_of(x.dtype()) == 1);
    run.template operator()<std::uint8_t>();
  }
}

// [frames,P,2C] and [2 frames,P,C]; an element of the first a thread.
template <class T, bool forward>
__global__ void depth_to_time_kernel(const T* from, T* to, std::int64_t P, std::int64_t C,
                                     std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t channel = i % (2 * C), p = i / (2 * C) % P, t = i / (2 * C) / P;
  const std::int64_t at = ((2 * t + channel % 2) * P + p) * C + channel / 2;
  if constexpr (forward)
    to[at] = from[i];
  else
    to[i] = from[at];
}

// `deep` [B,T,H,W,2C] has the many channels.
template <bool forward>
void depth_to_time(const Tensor& deep, const Tensor& from, Tensor& to) {
  by_type(deep, [&]<class T>() {
    launch(depth_to_time_kernel<T, forward>, dim3(blocks_for(deep.numel(), threads)), dim3(threads),
           0, data<T>(from), data<T>(to), deep.dim(2) * deep.dim(3), deep.dim(4) / 2, deep.numel());
  });
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void to_channels_last(const Tensor& x, Tensor& y) {
  if (x.numel() == 0) return;
  move_channels<true>(x, x.dim(1), x.numel() / x.dim(0) / x.dim(1), y);
}
void to_channels_first(const Tensor& x, Tensor& y) {
  if (x.numel() == 0) return;
  const std::int64_t C = x.dim(4);
  move_channels<false>(x, C, x.numel() / x.dim(0) / C, y);
}

void depth_to_time_forward(const Tensor& x, Tensor& y) { depth_to_time<true>(x, x, y); }
void depth_to_time_backward(const Tensor& dy, Tensor& dx) { depth_to_time<false>(dx, dy, dx); }

}  // namespace weft::ops::cuda
