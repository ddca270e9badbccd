// CUDA side of src/ops/loss.h. Twin: src/ops/cpu/loss.cpp; cases: src/bench/kernels/loss.cpp
// (weft bench kernels --filter loss).
//
// Each operation reads and writes every value once, in 16-byte accesses where a frame is a multiple of 4 values. Bytes for n
// elements of x0 [B,C,T,H,W] and n' = n Co / C of the model's output:
//   flow_interpolate        12 n (8 n in frames with mask 0), 3 operations an element
//   velocity_loss_forward   12 n; f64 sums, a block's share each, then one block a sample adds them in order
//   velocity_loss_backward  12 n + 4 n'
//   add_sum                 4 a sample
//   fill_normal             4 n written; some 60 instructions an element (10 rounds of Philox and Box-Muller for 4), which is
//                           more than the writing
//   frames_to_latent        15 a pixel; bytes come through shared memory, so that both sides move 16 bytes a lane
//   frames_to_pixels        5 a value
//   guided_euler_step       16 n
// Scratch: velocity_loss_forward takes 8 bytes for each 4096 values of a frame, at least 8 a frame and channel.
#include "ops/loss.h"

#include <cfloat>

#include "core/philox.h"
#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

template <class... P>
bool aligned(const P*... p) {
  return ((reinterpret_cast<std::uintptr_t>(p) % 16 == 0) && ...);
}

// The frames of a tensor [B,C,T,H,W], and the share of one that a block takes: `pieces` blocks a frame.
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

// Calls f.operator()<4>() where frames of `size` floats and all tensors allow 16-byte accesses, otherwise <1>.
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

// Sum over the block in an order that depends on nothing; thread 0 has it. `scratch`: one double a thread.
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
                                     const float* eps, const std::uint8_t* mask, float weight,
                                     float* dout) {
  const Place p = place(frames);
  const bool counts = p.c < C && shown(mask, p.b, p.t, frames.T);
  const int n = shown_frames(mask, p.b, frames.T);
  const float factor =
      counts ? 2.0f * weight / static_cast<float>(std::int64_t{n} * C * frames.size) : 0.0f;
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

// One block: it fetches side by side, one thread adds in order, as on the CPU.
__global__ void add_sum_kernel(const float* x, std::int64_t count, double* total) {
  float* values = shared_memory<float>();
  double sum = threadIdx.x == 0 ? *total : 0.0;
  for (std::int64_t first = 0; first < count; first += threads) {
    if (first + threadIdx.x < count) values[threadIdx.x] = x[first + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < min(count - first, std::int64_t{threads}); ++i)
        sum += static_cast<double>(values[i]);
    __syncthreads();
  }
  if (threadIdx.x == 0) *total = sum;
}

// A thread makes one block of Philox, 4 values.
__global__ void normal_kernel(Philox random, std::int64_t count, bool packed, float* eps) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (4 * i >= count) return;
  const auto u = random.block(static_cast<std::uint32_t>(i));
  float z[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) z[j] = Philox::gauss(u[j / 2 * 2], u[j / 2 * 2 + 1], j % 2 != 0);
  if (packed && 4 * i + 4 <= count) {
    *reinterpret_cast<float4*>(eps + 4 * i) = make_float4(z[0], z[1], z[2], z[3]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * i + j < count) eps[4 * i + j] = z[j];
  }
}

__device__ __forceinline__ float level(std::uint32_t byte) {
  return static_cast<float>(byte & 0xffu) * (1.0f / 127.5f) - 1.0f;
}

constexpr int pixels_a_block = 4 * threads;

// Pixels of 3 bytes; `frames` begins at 16 bytes, as do the planes of x0 where `packed`. A thread reads its 4 pixels as 3
// words from shared memory: neighbours are 3 words apart, an odd number, so all banks differ.
__global__ void rgb_kernel(const std::uint8_t* frames, std::int64_t pixels, bool packed,
                           float* x0) {
  std::uint32_t* words = shared_memory<std::uint32_t>();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * pixels_a_block;
  const int here = static_cast<int>(min(pixels - first, std::int64_t{pixels_a_block}));
  const std::uint8_t* from = frames + 3 * first;
  const int whole = 3 * here / 16;  // 16 bytes each
  for (int i = static_cast<int>(threadIdx.x); i < whole; i += threads)
    reinterpret_cast<uint4*>(words)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (int i = 16 * whole + static_cast<int>(threadIdx.x); i < 3 * here; i += threads)
    reinterpret_cast<std::uint8_t*>(words)[i] = from[i];
  __syncthreads();
  const int p = 4 * static_cast<int>(threadIdx.x);
  if (p + 4 <= here) {
    const std::uint32_t a = words[3 * threadIdx.x], b = words[3 * threadIdx.x + 1],
                        c = words[3 * threadIdx.x + 2];
    // Bytes in memory order: r g b r | g b r g | b r g b.
    const float4 plane[3] = {
        make_float4(level(a), level(a >> 24), level(b >> 16), level(c >> 8)),
        make_float4(level(a >> 8), level(b), level(b >> 24), level(c >> 16)),
        make_float4(level(a >> 16), level(b >> 8), level(c), level(c >> 24)),
    };
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      float* to = x0 + k * pixels + first + p;
      if (packed) {
        *reinterpret_cast<float4*>(to) = plane[k];
      } else {
        to[0] = plane[k].x;
        to[1] = plane[k].y;
        to[2] = plane[k].z;
        to[3] = plane[k].w;
      }
    }
  } else {
    for (int i = p; i < here; ++i)
      for (int k = 0; k < 3; ++k)
        x0[k * pixels + first + i] = level(reinterpret_cast<std::uint8_t*>(words)[3 * i + k]);
  }
}

constexpr int values_a_block = threads * 16;

// Values of a frame to 256 levels; a block has a piece of one frame.
template <int pack>
__global__ void pixels_kernel(const float* frames, int size, int pieces, std::uint8_t* pixels,
                              int* bad) {
  const int frame = static_cast<int>(blockIdx.x) / pieces;
  const int begin = static_cast<int>(blockIdx.x) % pieces * values_a_block;
  const int end = min(begin + values_a_block, size);
  const float* from = frames + static_cast<std::int64_t>(frame) * size;
  std::uint8_t* to = pixels + static_cast<std::int64_t>(frame) * size;
  int wrong = 0;
  for (int i = begin + pack * static_cast<int>(threadIdx.x); i < end; i += pack * threads) {
    const Floats<pack> x = load<pack>(from + i);
    std::uint32_t levels = 0;
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      const bool finite = fabsf(x.v[j]) <= FLT_MAX;
      const float unit = (fminf(fmaxf(finite ? x.v[j] : -1.0f, -1.0f), 1.0f) + 1.0f) / 2.0f;
      levels |= static_cast<std::uint32_t>(unit * 255.0f + 0.5f) << (8 * j);
      wrong += finite ? 0 : 1;
    }
    if constexpr (pack == 4)
      *reinterpret_cast<std::uint32_t*>(to + i) = levels;
    else
      to[i] = static_cast<std::uint8_t>(levels);
  }
  if (wrong > 0) atomicAdd(bad + frame, wrong);
}

// Any number of channels and any alignment.
__global__ void channels_kernel(const std::uint8_t* frames, std::int64_t pixels, int C, float* x0) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pixels) return;
  for (int c = 0; c < C; ++c) x0[c * pixels + i] = level(frames[i * C + c]);
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

using namespace weft::kernels;  // NOLINT: the operations are thin wrappers of the kernels above

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
                            const Tensor& mask, float weight, Tensor& dout) {
  const Frames f(dout, 8);
  const float *v = data<float>(out), *x = data<float>(x0), *e = data<float>(eps);
  float* d = data<float>(dout);
  by_pack(
      f.size,
      [&]<int pack>() {
        launch(loss_backward_kernel<pack>, f.grid(dout), dim3(threads), 0, f,
               static_cast<int>(x0.dim(1)), v, x, e, data_or_null<std::uint8_t>(mask), weight, d);
      },
      v, x, e, d);
}

void add_sum(const Tensor& x, Tensor& total) {
  launch(add_sum_kernel, dim3(1), dim3(threads), threads * sizeof(float), data<float>(x), x.numel(),
         data<double>(total));
}

void fill_normal(std::uint64_t seed, int purpose, std::uint64_t step, std::uint64_t sample,
                 Tensor& eps) {
  launch(normal_kernel, dim3(blocks_for(eps.numel(), 4 * threads)), dim3(threads), 0,
         Philox(seed, static_cast<Purpose>(purpose), step, sample), eps.numel(),
         aligned(data<float>(eps)), data<float>(eps));
}

void frames_to_latent(const Tensor& frames, Tensor& x0) {
  const std::int64_t C = x0.dim(0), pixels = x0.numel() / C;
  const std::uint8_t* from = data<std::uint8_t>(frames);
  float* to = data<float>(x0);
  if (C == 3 && aligned(from))
    launch(rgb_kernel, dim3(blocks_for(pixels, pixels_a_block)), dim3(threads),
           std::size_t{3} * pixels_a_block, from, pixels, pixels % 4 == 0 && aligned(to), to);
  else
    launch(channels_kernel, dim3(blocks_for(pixels, threads)), dim3(threads), 0, from, pixels,
           static_cast<int>(C), to);
}

void frames_to_pixels(const Tensor& frames, Tensor& pixels, Tensor& bad) {
  const std::int64_t count = bad.numel();
  const int size = static_cast<int>(frames.numel() / count);
  const int pieces = (size + values_a_block - 1) / values_a_block;
  const float* from = data<float>(frames);
  std::uint8_t* to = data<std::uint8_t>(pixels);
  by_pack(
      size,
      [&]<int pack>() {
        launch(pixels_kernel<pack>, dim3(static_cast<unsigned>(count * pieces)), dim3(threads), 0,
               from, size, pieces, to, data<int>(bad));
      },
      from, to);
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
