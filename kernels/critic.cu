// CUDA side of ops/critic.h. CPU twin src/ops/cpu/critic.cpp, cases src/bench/kernels/vae_loss.cpp. Not yet run on a
// GPU. The penalty reads a gradient of frames twice and writes it once; the rest is a few numbers. A frame's norm is a block's:
// frames are few, but the backward through the discriminator before it takes a hundred times as long.
#include "ops/critic.h"

#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256, norm_threads = 1024;

__global__ void lecam_kernel(const float* mean, const float* other, float sign, float weight,
                             float* loss, float* slope) {
  const float d = fmaxf(0.0f, sign * (mean[0] - other[0]));
  loss[0] += weight * d * d;
  slope[0] = 2.0f * sign * d;
}

__global__ void running_average_kernel(const double* rows, std::int64_t width, std::int64_t first,
                                       std::int64_t ranks, float scale, float decay,
                                       float* average) {
  double sum = 0.0;
  for (std::int64_t r = 0; r < ranks; ++r) sum += rows[r * width + first + threadIdx.x];
  if (!(fabs(sum) < 1e300)) return;  // not finite
  float& a = average[threadIdx.x];
  a = decay * a + (1.0f - decay) * scale * static_cast<float>(sum);
}

template <class T>
__global__ void __launch_bounds__(norm_threads)
    frame_norms_kernel(const T* g, std::int64_t size, float* norms) {
  const T* const from = g + blockIdx.x * size;
  float sum = 0.0f;
  for (std::int64_t i = threadIdx.x; i < size; i += norm_threads) {
    const float v = to_float(from[i]);
    sum += v * v;
  }
  sum = block_sum(sum, shared_memory<float>());
  if (threadIdx.x == 0) norms[blockIdx.x] = sqrtf(sum);
}

__global__ void penalty_kernel(const float* norms, std::int64_t frames, float weight, float* loss) {
  double sum = 0.0;
  for (std::int64_t f = 0; f < frames; ++f) sum += (norms[f] - 1.0) * (norms[f] - 1.0);
  loss[0] += static_cast<float>(weight * sum / static_cast<double>(frames));
}

template <class T>
__global__ void penalty_backward_kernel(const T* g, const float* norms, std::int64_t size,
                                        float weight, T* dg, std::int64_t count) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i >= count) return;
  const float norm = norms[i / size];
  dg[i] = from_float<T>(norm > 0.0f ? weight * (norm - 1.0f) / norm * to_float(g[i]) : 0.0f);
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

void lecam(const Tensor& mean, const Tensor& other, float sign, float weight, Tensor& loss,
           Tensor& slope) {
  launch(lecam_kernel, dim3(1), dim3(1), 0, data<float>(mean), data<float>(other), sign, weight,
         data<float>(loss), data<float>(slope));
}

void running_average(const Tensor& rows, std::int64_t width, std::int64_t first, float scale,
                     float decay, Tensor& average) {
  launch(running_average_kernel, dim3(1), dim3(static_cast<unsigned>(average.numel())), 0,
         data<double>(rows), width, first, rows.numel() / width, scale, decay,
         data<float>(average));
}

void gradient_penalty_forward(const Tensor& g, float weight, Tensor& norms, Tensor& loss) {
  const std::int64_t F = g.dim(1);
  by_type(g, [&]<class T>() {
    launch(frame_norms_kernel<T>, dim3(static_cast<unsigned>(F)), dim3(norm_threads),
           32 * sizeof(float), data<T>(g), g.numel() / F, data<float>(norms));
  });
  launch(penalty_kernel, dim3(1), dim3(1), 0, data<float>(norms), F, weight, data<float>(loss));
}

void gradient_penalty_backward(const Tensor& g, const Tensor& norms, float weight, Tensor& dg) {
  const std::int64_t F = g.dim(1);
  by_type(g, [&]<class T>() {
    launch(penalty_backward_kernel<T>, dim3(blocks_for(g.numel(), threads)), dim3(threads), 0,
           data<T>(g), data<float>(norms), g.numel() / F, 2.0f * weight / static_cast<float>(F),
           data<T>(dg), g.numel());
  });
}

}  // namespace weft::ops::cuda
