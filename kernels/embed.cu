// CUDA side of src/ops/embed.h. Twin: src/ops/cpu/embed.cpp; cases: src/bench/kernels/embed.cpp
// (weft bench kernels --filter embed).
//
// Nothing here multiplies: each operation is bounded by the bytes named below, and most are so small at STDiT3's sizes
// (latents of 51 frames 480p are 1.5 MB) that starting them is what they cost. n = elements, w = bytes of the rows' type.
//   patchify, unpatchify   n (4 + w): a strip of patches goes through shared memory, so that pixels and rows are both read
//                          and written in runs
//   position_embedding     4 n written; 1 double power and 4 sines for 4 values; a thread keeps its frequency
//   add_position           x read and written, p read once: a thread keeps its 16 bytes of p and walks over frames
//   timestep_embedding, rope_table, modulation_rows, add_rows: a few KB
//   gather_captions        n (4 + w), and n (w + 8) backward: a block a row, 16-byte accesses
// No operation takes scratch.
#include "ops/embed.h"

#include <algorithm>
#include <cmath>

#include "launch.cuh"

namespace weft::kernels {
namespace {

constexpr int threads = 256;

template <class T>
bool aligned(const T* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0;
}

// Patches ------------------------------------------------------------------------------------------------------------

// A strip is `tokens` patches beside each other of one frame and one row of patches.
struct Strips {
  int C, Tx, Hx, Wx;   // of x [B,C,Tx,Hx,Wx]
  int pt, ph, pw;      // of a patch
  int T, H, W;         // patches of a sample
  int tokens, across;  // patches of a strip, strips of a row of patches
  int row_size;        // elements of a patch
  bool aligned;        // the rows begin at 16 bytes
};

// Copies between x f32 and rows T; a row's elements are ordered (c,pt,ph,pw) or (pt,ph,pw,c). The strip in shared memory has
// its rows an odd number of words apart, so that lanes that walk over pixels and lanes that walk over a row both meet
// different banks.
template <class T, bool channels_first, bool to_rows>
__global__ void patch_kernel(Strips s, float* x, T* rows) {
  float* strip = shared_memory<float>();
  const int stride = s.row_size | 1;
  int at = static_cast<int>(blockIdx.x);
  const int w0 = at % s.across * s.tokens;
  at /= s.across;
  const int h = at % s.H;
  at /= s.H;
  const int t = at % s.T, b = at / s.T;
  const int tokens = min(s.tokens, s.W - w0), width = tokens * s.pw;
  const std::int64_t first_row = ((static_cast<std::int64_t>(b) * s.T + t) * s.H + h) * s.W + w0;
  T* row = rows + first_row * s.row_size;
  const int elements = tokens * s.row_size;

  constexpr int pack = Pack<T>::size;
  const bool packed = s.row_size % pack == 0 && s.aligned;
  if constexpr (!to_rows) {
    if (packed) {
      for (int i = threadIdx.x * pack; i < elements; i += blockDim.x * pack) {
        const Pack<T> in = load_pack(row + i);
        float* to = strip + i / s.row_size * stride + i % s.row_size;
#pragma unroll
        for (int j = 0; j < pack; ++j) to[j] = to_float(in.v[j]);
      }
    } else {
      for (int i = threadIdx.x; i < elements; i += blockDim.x)
        strip[i / s.row_size * stride + i % s.row_size] = to_float(row[i]);
    }
    __syncthreads();
  }
  // A warp takes lines of pixels: channel c, frame and line within the patch.
  const int lines = s.C * s.pt * s.ph;
  for (int line = threadIdx.x / 32; line < lines; line += blockDim.x / 32) {
    const int c = line / (s.pt * s.ph), inner = line % (s.pt * s.ph);
    const int frame = t * s.pt + inner / s.ph, y = h * s.ph + inner % s.ph;
    const bool inside = frame < s.Tx && y < s.Hx;
    float* pixels =
        x + (((static_cast<std::int64_t>(b) * s.C + c) * s.Tx + frame) * s.Hx + y) * s.Wx;
    for (int i = threadIdx.x % 32; i < width; i += 32) {
      const int token = i / s.pw, dx = i % s.pw, column = w0 * s.pw + i;
      float* element = strip + token * stride +
                       (channels_first ? line * s.pw + dx : (inner * s.pw + dx) * s.C + c);
      if constexpr (to_rows)
        *element = inside && column < s.Wx ? pixels[column] : 0.0f;
      else if (inside && column < s.Wx)
        pixels[column] = *element;
    }
  }
  if constexpr (to_rows) {
    __syncthreads();
    if (packed) {
      for (int i = threadIdx.x * pack; i < elements; i += blockDim.x * pack) {
        const float* from = strip + i / s.row_size * stride + i % s.row_size;
        Pack<T> out;
#pragma unroll
        for (int j = 0; j < pack; ++j) out.v[j] = from_float<T>(from[j]);
        store_pack(row + i, out);
      }
    } else {
      for (int i = threadIdx.x; i < elements; i += blockDim.x)
        row[i] = from_float<T>(strip[i / s.row_size * stride + i % s.row_size]);
    }
  }
}

template <bool channels_first, bool to_rows>
void move_patches(const Tensor& x, ops::PatchGeometry patch, const Tensor& rows) {
  Strips s{};
  s.C = static_cast<int>(x.dim(1));
  s.Tx = static_cast<int>(x.dim(2));
  s.Hx = static_cast<int>(x.dim(3));
  s.Wx = static_cast<int>(x.dim(4));
  s.pt = patch.pt;
  s.ph = patch.ph;
  s.pw = patch.pw;
  s.T = (s.Tx + s.pt - 1) / s.pt;
  s.H = (s.Hx + s.ph - 1) / s.ph;
  s.W = (s.Wx + s.pw - 1) / s.pw;
  s.row_size = s.C * s.pt * s.ph * s.pw;
  const int stride = s.row_size | 1;
  // 32 patches fill a warp's lines; wide rows get what 48 KiB hold.
  s.tokens = std::clamp(12 * 1024 / stride, 1, 32);
  s.across = (s.W + s.tokens - 1) / s.tokens;
  const std::int64_t strips = x.dim(0) * s.T * s.H * s.across;
  WEFT_ASSERT(rows.numel() == x.dim(0) * s.T * s.H * s.W * s.row_size && strips <= INT32_MAX);
  by_type(rows, [&]<class T>() {
    s.aligned = aligned(data<T>(rows));
    launch(patch_kernel<T, channels_first, to_rows>, dim3(static_cast<unsigned>(strips)),
           dim3(threads), static_cast<std::size_t>(s.tokens * stride) * sizeof(float), s,
           data<float>(x), data<T>(rows));
  });
}

// Positions ----------------------------------------------------------------------------------------------------------

constexpr int positions_a_thread = 16;

// Thread x is a frequency, which costs a power in double as on the CPU; the block's row is a run of positions.
__global__ void position_kernel(int positions, int W, int quarter, float divisor, float ratio_w,
                                float ratio_h, float* p) {
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= quarter) return;
  const float frequency =
      static_cast<float>(1.0 / pow(10000.0, static_cast<double>(k) / static_cast<double>(quarter)));
  const int first = static_cast<int>(blockIdx.y) * positions_a_thread;
  for (int at = first; at < min(first + positions_a_thread, positions); ++at) {
    float* row = p + static_cast<std::int64_t>(at) * 4 * quarter;
    const float gx = static_cast<float>(at % W) / divisor * ratio_w;
    const float gy = static_cast<float>(at / W) / divisor * ratio_h;
    row[k] = sinf(gx * frequency);
    row[quarter + k] = cosf(gx * frequency);
    row[2 * quarter + k] = sinf(gy * frequency);
    row[3 * quarter + k] = cosf(gy * frequency);
  }
}

constexpr int frames_a_thread = 4;

// x [frames, size] += p [size]; `pack` elements a thread.
template <class T, int pack>
__global__ void add_position_kernel(const float* p, T* x, std::int64_t size, std::int64_t frames) {
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
  if (i >= size) return;
  alignas(16) float shift[pack];
  if constexpr (pack == 1) {
    shift[0] = p[i];
  } else {
#pragma unroll
    for (int j = 0; j < pack; j += 4)
      *reinterpret_cast<Pack<float>*>(shift + j) = load_pack(p + i + j);
  }
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.y) * frames_a_thread;
  // All frames' loads first: they are what is waited for.
  Pack<T> v[frames_a_thread];
#pragma unroll
  for (int f = 0; f < frames_a_thread; ++f)
    if (first + f < frames) {
      const T* from = x + (first + f) * size + i;
      if constexpr (pack == 1)
        v[f].v[0] = *from;
      else
        v[f] = load_pack(from);
    }
#pragma unroll
  for (int f = 0; f < frames_a_thread; ++f)
    if (first + f < frames) {
#pragma unroll
      for (int j = 0; j < pack; ++j) v[f].v[j] = from_float<T>(to_float(v[f].v[j]) + shift[j]);
      T* to = x + (first + f) * size + i;
      if constexpr (pack == 1)
        *to = v[f].v[0];
      else
        store_pack(to, v[f]);
    }
}

// Tables -------------------------------------------------------------------------------------------------------------

// The frequency is the exponential rounded once to f32, as the host's is: at s ~ 1000 an ulp of it would show.
__global__ void timestep_kernel(const float* s, int half, float* e) {
  const int i = static_cast<int>(blockIdx.y);
  const int k = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= half) return;
  constexpr float minus_log_10000 = -9.21034037197618273607f;
  const float exponent = minus_log_10000 * static_cast<float>(k) / static_cast<float>(half);
  const float angle = s[i] * static_cast<float>(exp(static_cast<double>(exponent)));
  float* row = e + static_cast<std::int64_t>(i) * 2 * half;
  row[k] = cosf(angle);
  row[half + k] = sinf(angle);
}

__global__ void rope_kernel(const float* freqs, int half, int count, float2* rope) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const float angle = static_cast<float>(i / half) * freqs[i % half];
  rope[i] = make_float2(cosf(angle), sinf(angle));
}

// Thread i does row i of the scalars and frame i of the names.
__global__ void modulation_kernel(const float* timestep, const float* fps, const std::uint8_t* mask,
                                  int B, int G, int frames, float* times, float* rates,
                                  std::int32_t* rows, std::int32_t* sample_rows) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < G) {
    times[i] = i < B ? timestep[i] : 0.0f;
    rates[i] = fps[i % B];
  }
  if (i < frames) {
    const int b = i / (frames / B);
    rows[i] = mask == nullptr || mask[i] != 0 ? b : B + b;
    sample_rows[i] = b;
  }
}

// a, b and y may have any alignment: a few rows.
__global__ void add_rows_kernel(const float* a, const float* b, std::int64_t count, float* y) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) y[i] = a[i] + b[i];
}

// Captions -----------------------------------------------------------------------------------------------------------

// Block: one row; `pack` elements a thread and turn.
template <class T, int pack>
__global__ void gather_kernel(const float* y, const float* null_caption, const std::int32_t* index,
                              int C, T* rows) {
  const std::int32_t at = index[blockIdx.x];
  T* to = rows + static_cast<std::int64_t>(blockIdx.x) * C;
  const float* from = nullptr;
  if (at >= 0)
    from = y + static_cast<std::int64_t>(at) * C;
  else if (at != ops::padding_row)
    from = null_caption + static_cast<std::int64_t>(-1 - at) * C;
  for (int i = static_cast<int>(threadIdx.x) * pack; i < C;
       i += static_cast<int>(blockDim.x) * pack) {
    if constexpr (pack == 1) {
      to[i] = from_float<T>(from == nullptr ? 0.0f : from[i]);
    } else {
      Pack<T> out;
#pragma unroll
      for (int j = 0; j < pack; j += 4) {
        Pack<float> four{};
        if (from != nullptr) four = load_pack(from + i + j);
#pragma unroll
        for (int l = 0; l < 4; ++l) out.v[j + l] = from_float<T>(four.v[l]);
      }
      store_pack(to + i, out);
    }
  }
}

// A caption row is packed at most once, so no two blocks add to the same place.
template <class T, int pack>
__global__ void gather_backward_kernel(const T* drows, const std::int32_t* index, int C,
                                       float* dy) {
  const std::int32_t at = index[blockIdx.x];
  if (at < 0) return;
  const T* from = drows + static_cast<std::int64_t>(blockIdx.x) * C;
  float* to = dy + static_cast<std::int64_t>(at) * C;
  for (int i = static_cast<int>(threadIdx.x) * pack; i < C;
       i += static_cast<int>(blockDim.x) * pack) {
    if constexpr (pack == 1) {
      to[i] += to_float(from[i]);
    } else {
      const Pack<T> in = load_pack(from + i);
#pragma unroll
      for (int j = 0; j < pack; j += 4) {
        Pack<float> four = load_pack(to + i + j);
#pragma unroll
        for (int l = 0; l < 4; ++l) four.v[l] += to_float(in.v[j + l]);
        store_pack(to + i + j, four);
      }
    }
  }
}

// 16-byte accesses want whole packs in a row and aligned rows.
template <class T, class F>
void by_pack(bool whole, F&& f) {
  if (whole)
    f.template operator()<Pack<T>::size>();
  else
    f.template operator()<1>();
}

}  // namespace
}  // namespace weft::kernels

namespace weft::ops::cuda {

using namespace weft::kernels;  // NOLINT: the operations are thin wrappers of the kernels above

void patchify_forward(const Tensor& x, PatchGeometry patch, Tensor& rows) {
  move_patches<true, true>(x, patch, rows);
}
void patchify_backward(const Tensor& drows, PatchGeometry patch, Tensor& dx) {
  move_patches<true, false>(dx, patch, drows);
}
void unpatchify_forward(const Tensor& rows, PatchGeometry patch, Tensor& out) {
  move_patches<false, false>(out, patch, rows);
}
void unpatchify_backward(const Tensor& dout, PatchGeometry patch, Tensor& drows) {
  move_patches<false, true>(dout, patch, drows);
}

void position_embedding(int H, int W, double scale, Tensor& p) {
  const int quarter = static_cast<int>(p.dim(1) / 4);
  const double base = std::nearbyint(std::sqrt(static_cast<double>(H) * W));
  launch(position_kernel,
         dim3(blocks_for(quarter, threads), blocks_for(std::int64_t{H} * W, positions_a_thread)),
         dim3(threads), 0, H * W, W, quarter, static_cast<float>(scale),
         static_cast<float>(base / W), static_cast<float>(base / H), data<float>(p));
}

void add_position(const Tensor& p, Tensor& x) {
  const std::int64_t size = p.numel();
  if (size == 0) return;
  const std::int64_t frames = x.numel() / size;
  by_type(x, [&]<class T>() {
    by_pack<T>(size % Pack<T>::size == 0 && aligned(data<T>(x)) && aligned(data<float>(p)),
               [&]<int pack>() {
                 launch(add_position_kernel<T, pack>,
                        dim3(blocks_for(size, threads * pack), blocks_for(frames, frames_a_thread)),
                        dim3(threads), 0, data<float>(p), data<T>(x), size, frames);
               });
  });
}

void timestep_embedding(const Tensor& s, Tensor& e) {
  const int half = static_cast<int>(e.dim(1) / 2);
  launch(timestep_kernel, dim3(blocks_for(half, 128), static_cast<unsigned>(s.numel())), dim3(128),
         0, data<float>(s), half, data<float>(e));
}

void rope_table(const Tensor& freqs, Tensor& rope) {
  const int half = static_cast<int>(rope.dim(1)), count = static_cast<int>(rope.dim(0)) * half;
  launch(rope_kernel, dim3(blocks_for(count, 128)), dim3(128), 0, data<float>(freqs), half, count,
         reinterpret_cast<float2*>(data<float>(rope)));
}

void gather_captions(const Tensor& y, const Tensor& null_caption, const Tensor& index,
                     Tensor& rows) {
  const int C = static_cast<int>(rows.dim(-1));
  const float *captions = data_or_null<float>(y), *nothing = data_or_null<float>(null_caption);
  by_type(rows, [&]<class T>() {
    by_pack<T>(
        C % Pack<T>::size == 0 && aligned(captions) && aligned(nothing) && aligned(data<T>(rows)),
        [&]<int pack>() {
          launch(gather_kernel<T, pack>, dim3(static_cast<unsigned>(index.numel())), dim3(threads),
                 0, captions, nothing, data<std::int32_t>(index), C, data<T>(rows));
        });
  });
}

void gather_captions_backward(const Tensor& drows, const Tensor& index, Tensor& dy) {
  const int C = static_cast<int>(drows.dim(-1));
  by_type(drows, [&]<class T>() {
    by_pack<T>(C % Pack<T>::size == 0 && aligned(data<T>(drows)) && aligned(data<float>(dy)),
               [&]<int pack>() {
                 launch(gather_backward_kernel<T, pack>, dim3(static_cast<unsigned>(index.numel())),
                        dim3(threads), 0, data<T>(drows), data<std::int32_t>(index), C,
                        data<float>(dy));
               });
  });
}

void modulation_rows(const Tensor& timestep, const Tensor& fps, const Tensor& mask, Tensor& times,
                     Tensor& rates, Tensor& rows, Tensor& sample_rows) {
  const int G = static_cast<int>(times.numel()), frames = static_cast<int>(rows.numel());
  launch(modulation_kernel, dim3(blocks_for(std::max(G, frames), 128)), dim3(128), 0,
         data<float>(timestep), data<float>(fps), data_or_null<std::uint8_t>(mask),
         static_cast<int>(timestep.numel()), G, frames, data<float>(times), data<float>(rates),
         data<std::int32_t>(rows), data<std::int32_t>(sample_rows));
}

void add_rows(const Tensor& a, const Tensor& b, Tensor& y) {
  launch(add_rows_kernel, dim3(blocks_for(y.numel(), threads)), dim3(threads), 0, data<float>(a),
         data<float>(b), y.numel(), data<float>(y));
}

}  // namespace weft::ops::cuda
