// CUDA side of ops/layout.h. CPU twin: src/ops/cpu/layout.cpp; cases: tests/kernels/layout.cpp.
//
// Bound by memory, every element read and written once.
//   channels first, last   pixels (3 channels) and latents (4): a thread takes a position, so that
//                          each channel's plane is read in whole lines, and the lines of the other
//                          side are whole once its neighbours have written
//   depth to time          pairs of channels that lie side by side
//   space to depth         an element a thread of the side that is written, lines whole there
//   patchify, unpatchify   n (4 + w) bytes for n elements of w bytes in the rows: a strip of
//                          patches goes through shared memory, so that pixels and rows are both
//                          read and written in runs
//   copy_tokens            4 bytes an element of bf16
//   put, take channels     4 bytes an element of bf16: resize.cu's copies to the nearest pixel
//   frames_to_latent       15 a pixel, one a thread
//   frames_to_pixels       5 a value
//   normalise_images       15 a pixel in f32, one a thread
#include "ops/layout.h"

#include <algorithm>
#include <cfloat>

#include "divide.cuh"
#include "ops/resize.h"
#include "vector.cuh"

namespace weft::kernels {
namespace {

// One [C,P] a sample on the one side, [P,C] on the other.
template <class T, bool to_last>
__global__ void channels_kernel(const T* x, T* y, std::int64_t C, std::int64_t P,
                                std::int64_t count) {
  const std::int64_t i = thread_index();
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
    launch_items(channels_kernel<T, to_last>, count, static_cast<const T*>(x.raw()),
                 static_cast<T*>(y.raw()), C, P);
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

// [frames,P,2C], where even channels are of the first frame of two and odd ones of the second, and
// [2 frames,P,C]: V pairs of channels a thread. C and `frame` = P C in accesses of V.
template <class T, int V, bool forward>
__global__ void __launch_bounds__(threads)
    depth_to_time_kernel(const T* from, T* to, Divisor frame, std::int64_t frame_size,
                         std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  // The order within a frame is the same on both sides.
  const std::int64_t first = i + frame.divide(static_cast<unsigned>(i)) * frame_size;
  float pairs[2 * V], even[V], odd[V];
  if constexpr (forward) {
    unpack(load_vec<2 * V>(from, i), pairs);
#pragma unroll
    for (int e = 0; e < V; ++e) even[e] = pairs[2 * e], odd[e] = pairs[2 * e + 1];
    store_vec<V>(to, first, pack<T, V>(even));
    store_vec<V>(to, first + frame_size, pack<T, V>(odd));
  } else {
    unpack(load_vec<V>(from, first), even);
    unpack(load_vec<V>(from, first + frame_size), odd);
#pragma unroll
    for (int e = 0; e < V; ++e) pairs[2 * e] = even[e], pairs[2 * e + 1] = odd[e];
    store_vec<2 * V>(to, i, pack<T, 2 * V>(pairs));
  }
}

// `deep` [B,T,H,W,2C] has the many channels.
template <bool forward>
void depth_to_time(const Tensor& deep, const Tensor& from, Tensor& to) {
  if (deep.numel() == 0) return;
  const std::int64_t frame = deep.dim(2) * deep.dim(3) * deep.dim(4) / 2;
  by_access(
      frame,
      [&]<class T, int V>() {
        const std::int64_t count = deep.numel() / (2 * V);
        WEFT_ASSERT(count < std::int64_t{1} << 31);
        launch_items(depth_to_time_kernel<T, V, forward>, count, data<T>(from), data<T>(to),
                     Divisor(frame / V), frame / V);
      },
      from, to);
}

// A frame of the deep side [h,w,G] and the frames of the wide one [.,h side,w side,C] that it
// stands for. Entry e of a block is offset[e] elements behind its first pixel; bit e of `missing`:
// it lies before the clip.
struct BlockMap {
  std::int64_t offset[8];
  std::int64_t first, row, column;  // of the wide side: the frame's, and from block to block
  unsigned missing;
  Divisor entries, group, h, w, G, C;
  unsigned n;  // entries a channel of the deep side stands for
  float scale;
  bool accumulate;
};

template <class T>
__global__ void __launch_bounds__(threads)
    space_to_depth_kernel(const T* x, BlockMap map, T* y, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned g = static_cast<unsigned>(i), column = map.G.split(g);
  const unsigned row = map.w.split(column);
  const std::int64_t first = map.first + row * map.row + column * map.column;
  unsigned entry = g * map.n, c = map.entries.split(entry);
  float sum = 0;
  for (unsigned k = 0; k < map.n; ++k) {
    float value[1] = {0};
    if ((map.missing >> entry & 1) == 0)
      unpack(load_vec<1>(x, first + map.offset[entry] + c), value);
    sum += value[0];
    if (++entry == map.entries.divisor()) entry = 0, ++c;
  }
  float result[1] = {0};
  if (map.accumulate) unpack(load_vec<1>(y, i), result);
  result[0] += map.scale * sum;
  store_vec<1>(y, i, pack<T, 1>(result));
}

template <class T>
__global__ void __launch_bounds__(threads)
    depth_to_space_kernel(const T* y, BlockMap map, T* x, std::int64_t count) {
  const std::int64_t i = thread_index();
  if (i >= count) return;
  unsigned c = static_cast<unsigned>(i), column = map.C.split(c), row = map.w.split(column);
  const unsigned entry = map.h.split(row);
  if (map.missing >> entry & 1) return;
  const std::int64_t at = map.first + row * map.row + column * map.column + map.offset[entry] + c;
  const unsigned g = map.group.divide(c * map.entries.divisor() + entry);
  float value[1], result[1] = {0};
  unpack(load_vec<1>(
             y, (static_cast<std::int64_t>(row) * map.w.divisor() + column) * map.G.divisor() + g),
         value);
  if (map.accumulate) unpack(load_vec<1>(x, at), result);
  result[0] += map.scale * value[0];
  store_vec<1>(x, at, pack<T, 1>(result));
}

// Calls run(map, the deep side's frame) for each frame of `deep`.
template <class F>
void for_blocks(const Tensor& deep, const Tensor& wide, ops::Blocks k, float scale, bool accumulate,
                F&& run) {
  const std::int64_t T = wide.dim(1), H = wide.dim(2), W = wide.dim(3), C = wide.dim(4);
  const std::int64_t t = deep.dim(1), h = deep.dim(2), w = deep.dim(3), G = deep.dim(4);
  WEFT_ASSERT(t * k.frames == T + k.front && h * k.side == H && w * k.side == W);
  WEFT_ASSERT(k.entries() <= 8 && C * k.entries() % G == 0 && deep.dtype() == wide.dtype());
  const std::int64_t n = C * k.entries() / G;
  BlockMap map{
      {},         0,          k.side * W * C, k.side * C, 0,          Divisor(k.entries()),
      Divisor(n), Divisor(h), Divisor(w),     Divisor(G), Divisor(C), static_cast<unsigned>(n),
      scale,      accumulate};
  for (int e = 0; e < k.entries(); ++e) {
    const int inner = e / k.side % k.side, last = e % k.side;
    map.offset[e] = ((e / (k.side * k.side) * H + (k.columns_first ? last : inner)) * W +
                     (k.columns_first ? inner : last)) *
                    C;
  }
  for (std::int64_t frame = 0; frame < deep.dim(0) * t; ++frame) {
    const std::int64_t first = frame % t * k.frames - k.front;
    map.first = (frame / t * T + first) * H * W * C;
    map.missing = 0;
    for (int e = 0; e < k.entries(); ++e)
      if (first + e / (k.side * k.side) < 0) map.missing |= 1u << e;
    run(map, frame);
  }
}

// A strip is `tokens` patches beside each other of one frame and one row of patches.
struct Strips {
  int C, Tx, Hx, Wx;   // of x [B,C,Tx,Hx,Wx]
  int pt, ph, pw;      // of a patch
  int T, H, W;         // patches of a sample
  int tokens, across;  // patches of a strip, strips of a row of patches
  int row_size;        // elements of a patch
};

// Copies between x f32 and rows T; a row's elements are ordered (c,pt,ph,pw) or (pt,ph,pw,c). The
// strip in shared memory has its rows an odd number of words apart, so that lanes that walk over
// pixels and lanes that walk over a row both meet different banks.
template <class T, int V, bool channels_first, bool to_rows>
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

  // V elements of a row, in order, and where they are in the strip.
  const auto in_strip = [&](int i) {
    return strip + i * V / s.row_size * stride + i * V % s.row_size;
  };
  if constexpr (!to_rows) {
    for (int i = threadIdx.x; i < elements / V; i += blockDim.x) {
      float v[V];
      unpack(load_vec<V>(static_cast<const T*>(row), i), v);
#pragma unroll
      for (int e = 0; e < V; ++e) in_strip(i)[e] = v[e];
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
    for (int i = threadIdx.x; i < elements / V; i += blockDim.x) {
      float v[V];
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] = in_strip(i)[e];
      store_vec<V>(row, i, pack<T, V>(v));
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
  by_access(
      s.row_size,
      [&]<class T, int V>() {
        launch(patch_kernel<T, V, channels_first, to_rows>, dim3(static_cast<unsigned>(strips)),
               dim3(threads), static_cast<std::size_t>(s.tokens * stride) * sizeof(float), s,
               data<float>(x), data<T>(rows));
      },
      rows);
}

__device__ __forceinline__ float level(std::uint32_t byte) {
  return static_cast<float>(byte & 0xffu) * (1.0f / 127.5f) - 1.0f;
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
    const Vec<float, pack> x = load_vec<pack>(from + i, 0);
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
__global__ void planes_kernel(const std::uint8_t* frames, std::int64_t pixels, int C, float* x0) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pixels) return;
  for (int c = 0; c < C; ++c) x0[c * pixels + i] = level(frames[i * C + c]);
}

template <class T>
__global__ void normalise_kernel(const std::uint8_t* images, const int* sizes,
                                 ops::PixelScale scale, int H, int W, T* y, std::int64_t pixels) {
  const std::int64_t i = thread_index();
  if (i >= pixels) return;
  const std::int64_t n = i / W / H;
  const bool inside = i / W % H < sizes[2 * n] && i % W < sizes[2 * n + 1];
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const auto byte = static_cast<float>(images[3 * i + (scale.reversed ? 2 - c : c)]);
    const float v = (byte / scale.divisor - scale.mean[c]) / scale.deviation[c];
    y[3 * i + c] = from_float<T>(inside ? v : 0.0f);
  }
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

void space_to_depth(const Tensor& x, Blocks blocks, float scale, bool accumulate, Tensor& y) {
  if (y.numel() == 0) return;
  by_type(y, [&]<class T>() {
    const std::int64_t count = y.numel() / (y.dim(0) * y.dim(1));
    for_blocks(y, x, blocks, scale, accumulate, [&](const BlockMap& map, std::int64_t frame) {
      launch_items(space_to_depth_kernel<T>, dividend(count), data<T>(x), map,
                   data<T>(y) + frame * count);
    });
  });
}
void depth_to_space(const Tensor& y, Blocks blocks, float scale, bool accumulate, Tensor& x) {
  if (y.numel() == 0) return;
  by_type(y, [&]<class T>() {
    const std::int64_t size = y.numel() / (y.dim(0) * y.dim(1));
    const std::int64_t count = blocks.entries() * y.dim(2) * y.dim(3) * x.dim(4);
    for_blocks(y, x, blocks, scale, accumulate, [&](const BlockMap& map, std::int64_t frame) {
      launch_items(depth_to_space_kernel<T>, dividend(count), data<T>(y) + frame * size, map,
                   data<T>(x));
    });
  });
}

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

// The runtime's own copy of a rectangle, one a sample: a frame's tokens are a row of it.
void copy_tokens(const Tensor& x, TokenBlock k, Tensor& y) {
  const std::size_t width = static_cast<std::size_t>(x.dim(3)) * size_of(x.dtype());
  const std::size_t run = static_cast<std::size_t>(k.tokens) * width;
  if (run == 0 || k.frames == 0) return;
  const auto place = [width](const Tensor& t, std::int64_t b, std::int64_t frame,
                             std::int64_t token) {
    return static_cast<std::byte*>(t.raw()) +
           static_cast<std::size_t>((b * t.dim(1) + frame) * t.dim(2) + token) * width;
  };
  const auto pitch = [width](const Tensor& t) {
    return static_cast<std::size_t>(t.dim(2)) * width;
  };
  for (std::int64_t b = 0; b < x.dim(0); ++b)
    CUDA_CHECK(cudaMemcpy2DAsync(place(y, b, k.to_frame, k.to_token), pitch(y),
                                 place(x, b, k.from_frame, k.from_token), pitch(x), run,
                                 static_cast<std::size_t>(k.frames), cudaMemcpyDeviceToDevice,
                                 cuda_stream(Stream::compute)));
}

// Rows of channels as frames of one pixel.
static Tensor pixels_of(const Tensor& t) {
  return t.view({t.numel() / t.dim(-1), 1, 1, 1, t.dim(-1)});
}
void put_channels(const Tensor& x, std::int64_t first, Tensor& y) {
  Tensor to = pixels_of(y);
  nearest_forward(pixels_of(x), first, to, false);
}
void take_channels(const Tensor& y, std::int64_t first, Tensor& x, bool accumulate) {
  Tensor to = pixels_of(x);
  nearest_backward(pixels_of(y), first, to, accumulate);
}

void frames_to_latent(const Tensor& frames, Tensor& x0) {
  const std::int64_t C = x0.dim(0), pixels = x0.numel() / C;
  launch_threads(planes_kernel, pixels, data<std::uint8_t>(frames), pixels, static_cast<int>(C),
                 data<float>(x0));
}

void frames_to_pixels(const Tensor& frames, Tensor& pixels, Tensor& bad) {
  const std::int64_t count = bad.numel();
  const int size = static_cast<int>(frames.numel() / count);
  const int pieces = (size + values_a_block - 1) / values_a_block;
  by_width<4>(
      size,
      [&]<int pack>() {
        launch(pixels_kernel<pack>, dim3(static_cast<unsigned>(count * pieces)), dim3(threads), 0,
               data<float>(frames), size, pieces, data<std::uint8_t>(pixels), data<int>(bad));
      },
      frames, pixels);
}

void normalise_images(const Tensor& images, const Tensor& sizes, PixelScale scale, Tensor& y) {
  const std::int64_t pixels = images.numel() / 3;
  by_type(y, [&]<class T>() {
    launch_items(normalise_kernel<T>, pixels, data<std::uint8_t>(images), data<std::int32_t>(sizes),
                 scale, static_cast<int>(images.dim(1)), static_cast<int>(images.dim(2)),
                 data<T>(y));
  });
}

}  // namespace weft::ops::cuda
