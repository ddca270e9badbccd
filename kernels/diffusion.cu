// CUDA side of ops/diffusion.h. CPU twin: src/ops/cpu/diffusion.cpp; cases:
// src/bench/kernels/diffusion.cpp.
//
// Each operation reads and writes every value once, in 16-byte accesses where a frame is a multiple
// of 4 values. Bytes for n elements of x0 [B,C,T,H,W] and n' = n Co / C of the model's output:
//   flow_interpolate        12 n (8 n in frames with mask 0), 3 operations an element
//   velocity_loss_forward   12 n; f64 sums, a block's share each, then one block a sample adds them
//                           in order
//   velocity_loss_backward  12 n + 4 n'
//   guided_euler_step       16 n
// Scratch: velocity_loss_forward takes 8 bytes for each 4096 values of a frame, at least 8 a frame
// and channel.
#include "ops/diffusion.h"

#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

template <class... P>
bool aligned(const P*... p) {
  return ((reinterpret_cast<std::uintptr_t>(p) % 16 == 0) && ...);
}

// The frames of a tensor [B,C,T,H,W], and the share of one that a block takes: `pieces` blocks a
// frame.
struct Frames {
  int C, T;
  int size;    // H*W
  int pieces;  // blocks a frame
  int piece;   // elements a block, a multiple of 4

  Frames(const Tensor& x, int elements_a_thread)
      : C(static_cast<int>(x.dim(1))),
        T(static_cast<int>(x.dim(2))),
        size(static_cast<int>(x.dim(3) * x.dim(4))),
        pieces((size + threads * elements_a_thread - 1) / (threads * elements_a_thread)),
        piece(threads * elements_a_thread) {}
  dim3 grid(const Tensor& x) const {
    const std::int64_t blocks = x.dim(0) * C * T * pieces;
    WEFT_ASSERT(blocks <= INT32_MAX);
    return dim3(static_cast<unsigned>(blocks));
  }
};

// Where the block is.
struct Place {
  int b, c, t;
  int begin, end;      // its elements of the frame
  std::int64_t first;  // of the frame, in the tensor
};

__device__ __forceinline__ Place place(const Frames& f) {
  Place p;
  const int frame = static_cast<int>(blockIdx.x) / f.pieces;
  p.begin = static_cast<int>(blockIdx.x) % f.pieces * f.piece;
  p.end = min(p.begin + f.piece, f.size);
  p.t = frame % f.T;
  p.c = frame / f.T % f.C;
  p.b = frame / (f.T * f.C);
  p.first = static_cast<std::int64_t>(frame) * f.size;
  return p;
}

__device__ __forceinline__ bool shown(const std::uint8_t* mask, int b, int t, int T) {
  return mask == nullptr || mask[static_cast<std::int64_t>(b) * T + t] != 0;
}

// Frames of sample b with mask 1. To be called by whole warps.
__device__ __forceinline__ int shown_frames(const std::uint8_t* mask, int b, int T) {
  if (mask == nullptr) return T;
  int n = 0;
  for (int first = 0; first < T; first += 32) {
    const int t = first + static_cast<int>(threadIdx.x % 32);
    n += __popc(__ballot_sync(full_mask, t < T && shown(mask, b, min(t, T - 1), T)));
  }
  return n;
}

// `pack` floats, 4 or 1, in one access.
template <int pack>
struct Floats {
  float v[pack];
};
template <int pack>
__device__ __forceinline__ Floats<pack> load(const float* p) {
  Floats<pack> x;
  if constexpr (pack == 4) {
    const float4 q = *reinterpret_cast<const float4*>(p);
    x.v[0] = q.x, x.v[1] = q.y, x.v[2] = q.z, x.v[3] = q.w;
  } else {
    x.v[0] = *p;
  }
  return x;
}
template <int pack>
__device__ __forceinline__ void store(float* p, const Floats<pack>& x) {
  if constexpr (pack == 4)
    *reinterpret_cast<float4*>(p) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  else
    *p = x.v[0];
}

// Calls f.operator()<4>() where frames of `size` floats and all tensors allow 16-byte accesses,
// otherwise <1>.
template <class F, class... P>
void by_pack(int size, F&& f, const P*... p) {
  if (size % 4 == 0 && aligned(p...))
    f.template operator()<4>();
  else
    f.template operator()<1>();
}

// xs may be x0: each element is read before it is written, by the same thread.
template <int pack>
__global__ void interpolate_kernel(Frames frames, const float* x0, const float* eps,
                                   const float* tau, const std::uint8_t* mask, float* xs) {
  const Place p = place(frames);
  const bool noisy = shown(mask, p.b, p.t, frames.T);
  const float s = noisy ? tau[p.b] / 1000.0f : 0.0f;
#pragma unroll 2
  for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
    Floats<pack> x = load<pack>(x0 + p.first + i);
    if (noisy) {
      const Floats<pack> e = load<pack>(eps + p.first + i);
#pragma unroll
      for (int j = 0; j < pack; ++j) x.v[j] = (1.0f - s) * x.v[j] + s * e.v[j];
    }
    store<pack>(xs + p.first + i, x);
  }
}

constexpr int loss_elements_a_thread = 16;

// Sum over the block in an order that depends on nothing; thread 0 has it. `scratch`: one double a
// thread.
__device__ __forceinline__ double block_sum(double x, double* scratch) {
  scratch[threadIdx.x] = x;
  __syncthreads();
  for (int half = threads / 2; half > 0; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
    __syncthreads();
  }
  return scratch[0];
}

// First stage: sums[block] of the squares of the block's elements; 0 in frames with mask 0.
template <int pack>
__global__ void loss_kernel(Frames frames, int Co, const float* out, const float* x0,
                            const float* eps, const std::uint8_t* mask, double* sums) {
  const Place p = place(frames);
  double sum = 0;
  if (shown(mask, p.b, p.t, frames.T)) {
    const float* v =
        out + ((static_cast<std::int64_t>(p.b) * Co + p.c) * frames.T + p.t) * frames.size;
#pragma unroll 4
    for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
      const Floats<pack> a = load<pack>(v + i), x = load<pack>(x0 + p.first + i),
                         e = load<pack>(eps + p.first + i);
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        const double d = static_cast<double>(a.v[j]) - static_cast<double>(x.v[j] - e.v[j]);
        sum += d * d;
      }
    }
  }
  sum = block_sum(sum, shared_memory<double>());
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Second stage: block b adds the `count` sums of sample b.
__global__ void loss_finish_kernel(const double* sums, int count, const std::uint8_t* mask, int T,
                                   std::int64_t frame_elements, float* loss) {
  const int b = static_cast<int>(blockIdx.x), frames = shown_frames(mask, b, T);
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads)
    sum += sums[static_cast<std::int64_t>(b) * count + i];
  sum = block_sum(sum, shared_memory<double>());
  if (threadIdx.x == 0)
    loss[b] =
        frames == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(frames * frame_elements));
}

template <int pack>
__global__ void loss_backward_kernel(Frames frames, int C, const float* out, const float* x0,
                                     const float* eps, const std::uint8_t* mask,
                                     const float* weight, float* dout) {
  const Place p = place(frames);
  const bool counts = p.c < C && shown(mask, p.b, p.t, frames.T);
  const int n = shown_frames(mask, p.b, frames.T);
  const float factor =
      counts ? 2.0f * *weight / static_cast<float>(std::int64_t{n} * C * frames.size) : 0.0f;
  const std::int64_t from =
      ((static_cast<std::int64_t>(p.b) * C + p.c) * frames.T + p.t) * frames.size;
#pragma unroll 2
  for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
    Floats<pack> d{};
    if (counts) {
      const Floats<pack> v = load<pack>(out + p.first + i), x = load<pack>(x0 + from + i),
                         e = load<pack>(eps + from + i);
#pragma unroll
      for (int j = 0; j < pack; ++j) d.v[j] = factor * (v.v[j] - (x.v[j] - e.v[j]));
    }
    store<pack>(dout + p.first + i, d);
  }
}

template <int pack>
__global__ void euler_kernel(Frames frames, int B, int Co, const float* out, float guidance,
                             const float* dt, const std::uint8_t* act, float* z) {
  const Place p = place(frames);
  if (!shown(act, p.b, p.t, frames.T)) return;
  const std::int64_t sample = static_cast<std::int64_t>(Co) * frames.T * frames.size;
  const float* conditional =
      out + p.b * sample + (static_cast<std::int64_t>(p.c) * frames.T + p.t) * frames.size;
  const float* unconditional = conditional + B * sample;
  const float step = dt[p.b];
#pragma unroll 2
  for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
    const Floats<pack> vc = load<pack>(conditional + i), vu = load<pack>(unconditional + i);
    Floats<pack> x = load<pack>(z + p.first + i);
#pragma unroll
    for (int j = 0; j < pack; ++j) x.v[j] += (vu.v[j] + guidance * (vc.v[j] - vu.v[j])) * step;
    store<pack>(z + p.first + i, x);
  }
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace kernels;  // NOLINT: the operations are written in the kernels' words

namespace {
constexpr std::size_t sum_scratch = threads * sizeof(double);
}

void flow_interpolate(const Tensor& x0, const Tensor& eps, const Tensor& tau, const Tensor& mask,
                      Tensor& xs) {
  const Frames f(x0, 8);
  const float *x = data<float>(x0), *e = data<float>(eps);
  float* to = data<float>(xs);
  by_pack(
      f.size,
      [&]<int pack>() {
        launch(interpolate_kernel<pack>, f.grid(x0), dim3(threads), 0, f, x, e, data<float>(tau),
               data_or_null<std::uint8_t>(mask), to);
      },
      x, e, to);
}

void velocity_loss_forward(const Tensor& out, const Tensor& x0, const Tensor& eps,
                           const Tensor& mask, Tensor& loss) {
  const Frames f(x0, loss_elements_a_thread);
  const dim3 grid = f.grid(x0);
  const float *v = data<float>(out), *x = data<float>(x0), *e = data<float>(eps);
  const std::uint8_t* m = data_or_null<std::uint8_t>(mask);
  const Tensor sums = Tensor::empty({static_cast<std::int64_t>(grid.x)}, DType::f64);
  by_pack(
      f.size,
      [&]<int pack>() {
        launch(loss_kernel<pack>, grid, dim3(threads), sum_scratch, f, static_cast<int>(out.dim(1)),
               v, x, e, m, data<double>(sums));
      },
      v, x, e);
  launch(loss_finish_kernel, dim3(static_cast<unsigned>(x0.dim(0))), dim3(threads), sum_scratch,
         data<double>(sums), f.C * f.T * f.pieces, m, f.T, std::int64_t{f.C} * f.size,
         data<float>(loss));
}

void velocity_loss_backward(const Tensor& out, const Tensor& x0, const Tensor& eps,
                            const Tensor& mask, const Tensor& weight, Tensor& dout) {
  const Frames f(dout, 8);
  const float *v = data<float>(out), *x = data<float>(x0), *e = data<float>(eps);
  float* d = data<float>(dout);
  by_pack(
      f.size,
      [&]<int pack>() {
        launch(loss_backward_kernel<pack>, f.grid(dout), dim3(threads), 0, f,
               static_cast<int>(x0.dim(1)), v, x, e, data_or_null<std::uint8_t>(mask),
               data<float>(weight), d);
      },
      v, x, e, d);
}

void guided_euler_step(const Tensor& out, float guidance, const Tensor& dt, const Tensor& act,
                       Tensor& z) {
  const Frames f(z, 8);
  const float* v = data<float>(out);
  float* to = data<float>(z);
  by_pack(
      f.size,
      [&]<int pack>() {
        launch(euler_kernel<pack>, f.grid(z), dim3(threads), 0, f, static_cast<int>(z.dim(0)),
               static_cast<int>(out.dim(1)), v, guidance, data<float>(dt),
               data_or_null<std::uint8_t>(act), to);
      },
      v, to);
}

}  // namespace weft::ops::cuda
