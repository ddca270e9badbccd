// CUDA side of ops/random.h. CPU twin: src/ops/cpu/diffusion.cpp; cases:
// tests/kernels/diffusion.cpp.
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
#include "ops/random.h"

#include "vector.cuh"

namespace weft::kernels {
namespace {

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

// The piece of a frame that the block has.
struct FramePiece {
  int b, c, t;
  int begin, end;      // its elements of the frame
  std::int64_t first;  // of the frame, in the tensor
};

__device__ __forceinline__ FramePiece frame_piece(const Frames& f) {
  FramePiece p;
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

// xs may be x0: each element is read before it is written, by the same thread.
template <int pack>
__global__ void interpolate_kernel(Frames frames, const float* x0, const float* eps,
                                   const float* tau, const std::uint8_t* mask, float* xs) {
  const FramePiece p = frame_piece(frames);
  const bool noisy = shown(mask, p.b, p.t, frames.T);
  const float s = noisy ? tau[p.b] / 1000.0f : 0.0f;
#pragma unroll 2
  for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
    Vec<float, pack> x = load_vec<pack>(x0 + p.first + i, 0);
    if (noisy) {
      const Vec<float, pack> e = load_vec<pack>(eps + p.first + i, 0);
#pragma unroll
      for (int j = 0; j < pack; ++j) x.v[j] = (1.0f - s) * x.v[j] + s * e.v[j];
    }
    store_vec<pack>(xs + p.first + i, 0, x);
  }
}

constexpr int loss_elements_a_thread = 16;

// Sum over the block in an order that depends on nothing; thread 0 has it. `scratch`: one double a
// thread.
__device__ __forceinline__ double ordered_block_sum(double x, double* scratch) {
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
  const FramePiece p = frame_piece(frames);
  double sum = 0;
  if (shown(mask, p.b, p.t, frames.T)) {
    const float* v =
        out + ((static_cast<std::int64_t>(p.b) * Co + p.c) * frames.T + p.t) * frames.size;
#pragma unroll 4
    for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
      const Vec<float, pack> a = load_vec<pack>(v + i, 0), x = load_vec<pack>(x0 + p.first + i, 0),
                             e = load_vec<pack>(eps + p.first + i, 0);
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        const double d = static_cast<double>(a.v[j]) - static_cast<double>(x.v[j] - e.v[j]);
        sum += d * d;
      }
    }
  }
  sum = ordered_block_sum(sum, shared_memory<double>());
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Second stage: block b adds the `count` sums of sample b.
__global__ void loss_finish_kernel(const double* sums, int count, const std::uint8_t* mask, int T,
                                   std::int64_t frame_elements, float* loss) {
  const int b = static_cast<int>(blockIdx.x), frames = shown_frames(mask, b, T);
  double sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += threads)
    sum += sums[static_cast<std::int64_t>(b) * count + i];
  sum = ordered_block_sum(sum, shared_memory<double>());
  if (threadIdx.x == 0)
    loss[b] =
        frames == 0 ? 0.0f : static_cast<float>(sum / static_cast<double>(frames * frame_elements));
}

template <int pack>
__global__ void loss_backward_kernel(Frames frames, int C, const float* out, const float* x0,
                                     const float* eps, const std::uint8_t* mask,
                                     const float* weight, float* dout) {
  const FramePiece p = frame_piece(frames);
  const bool counts = p.c < C && shown(mask, p.b, p.t, frames.T);
  const int n = shown_frames(mask, p.b, frames.T);
  const float factor =
      counts ? 2.0f * *weight / static_cast<float>(std::int64_t{n} * C * frames.size) : 0.0f;
  const std::int64_t from =
      ((static_cast<std::int64_t>(p.b) * C + p.c) * frames.T + p.t) * frames.size;
#pragma unroll 2
  for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
    Vec<float, pack> d{};
    if (counts) {
      const Vec<float, pack> v = load_vec<pack>(out + p.first + i, 0),
                             x = load_vec<pack>(x0 + from + i, 0),
                             e = load_vec<pack>(eps + from + i, 0);
#pragma unroll
      for (int j = 0; j < pack; ++j) d.v[j] = factor * (v.v[j] - (x.v[j] - e.v[j]));
    }
    store_vec<pack>(dout + p.first + i, 0, d);
  }
}

template <int pack>
__global__ void euler_kernel(Frames frames, int half, int Co, const float* out, float guidance,
                             const float* dt, const std::uint8_t* act, float* z) {
  const FramePiece p = frame_piece(frames);
  if (!shown(act, p.b, p.t, frames.T)) return;
  const std::int64_t sample = static_cast<std::int64_t>(Co) * frames.T * frames.size;
  const float* conditional =
      out + p.b * sample + (static_cast<std::int64_t>(p.c) * frames.T + p.t) * frames.size;
  const float* unconditional = conditional + half * sample;
  const float step = dt[p.b];
#pragma unroll 2
  for (int i = p.begin + static_cast<int>(threadIdx.x) * pack; i < p.end; i += threads * pack) {
    const Vec<float, pack> vc = load_vec<pack>(conditional + i, 0),
                           vu = load_vec<pack>(unconditional + i, 0);
    Vec<float, pack> x = load_vec<pack>(z + p.first + i, 0);
#pragma unroll
    for (int j = 0; j < pack; ++j) x.v[j] += (vu.v[j] + guidance * (vc.v[j] - vu.v[j])) * step;
    store_vec<pack>(z + p.first + i, 0, x);
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
  by_width<4>(
      f.size,
      [&]<int pack>() {
        launch(interpolate_kernel<pack>, f.grid(x0), dim3(threads), 0, f, data<float>(x0),
               data<float>(eps), data<float>(tau), data_or_null<std::uint8_t>(mask),
               data<float>(xs));
      },
      x0, eps, xs);
}

void velocity_loss_forward(const Tensor& out, const Tensor& x0, const Tensor& eps,
                           const Tensor& mask, Tensor& loss) {
  const Frames f(x0, loss_elements_a_thread);
  const dim3 grid = f.grid(x0);
  const std::uint8_t* m = data_or_null<std::uint8_t>(mask);
  const Tensor sums = Tensor::empty({static_cast<std::int64_t>(grid.x)}, DType::f64);
  by_width<4>(
      f.size,
      [&]<int pack>() {
        launch(loss_kernel<pack>, grid, dim3(threads), sum_scratch, f, static_cast<int>(out.dim(1)),
               data<float>(out), data<float>(x0), data<float>(eps), m, data<double>(sums));
      },
      out, x0, eps);
  launch(loss_finish_kernel, dim3(static_cast<unsigned>(x0.dim(0))), dim3(threads), sum_scratch,
         data<double>(sums), f.C * f.T * f.pieces, m, f.T, std::int64_t{f.C} * f.size,
         data<float>(loss));
}

void velocity_loss_backward(const Tensor& out, const Tensor& x0, const Tensor& eps,
                            const Tensor& mask, const Tensor& weight, Tensor& dout) {
  const Frames f(dout, 8);
  by_width<4>(
      f.size,
      [&]<int pack>() {
        launch(loss_backward_kernel<pack>, f.grid(dout), dim3(threads), 0, f,
               static_cast<int>(x0.dim(1)), data<float>(out), data<float>(x0), data<float>(eps),
               data_or_null<std::uint8_t>(mask), data<float>(weight), data<float>(dout));
      },
      out, x0, eps, dout);
}

void guided_euler_step(const Tensor& out, float guidance, const Tensor& dt, const Tensor& act,
                       Tensor& z) {
  const Frames f(z, 8);
  by_width<4>(
      f.size,
      [&]<int pack>() {
        launch(euler_kernel<pack>, f.grid(z), dim3(threads), 0, f,
               static_cast<int>(out.dim(0) - z.dim(0)), static_cast<int>(out.dim(1)),
               data<float>(out), guidance, data<float>(dt), data_or_null<std::uint8_t>(act),
               data<float>(z));
      },
      out, z);
}

}  // namespace weft::ops::cuda
