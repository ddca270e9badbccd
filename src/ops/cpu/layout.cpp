// CPU side of ops/layout.h: each moves every element once.
#include "ops/layout.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// Calls f with a value of an integer type as wide as the elements.
template <class F>
void with_width(const Tensor& x, F&& f) {
  if (size_of(x.dtype()) == 2)
    f(std::uint16_t{});
  else
    f(std::uint32_t{});
}

// to [B,n,m] = from [B,m,n], in blocks that keep both sides' lines in the cache.
template <class T>
void exchange_axes(const T* from, std::int64_t B, std::int64_t m, std::int64_t n, T* to) {
  constexpr std::int64_t block = 32;
  const std::int64_t blocks = (n + block - 1) / block;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t k = 0; k < blocks; ++k)
      for (std::int64_t i0 = 0; i0 < m; i0 += block)
        for (std::int64_t j = k * block; j < std::min(n, (k + 1) * block); ++j)
          for (std::int64_t i = i0; i < std::min(m, i0 + block); ++i)
            to[(b * n + j) * m + i] = from[(b * m + i) * n + j];
}

// Calls f(pixel offset in x or -1 beyond its edge, row, element of the row) for every element of
// the patch rows of x [B,C,T',H',W']; `channels_first` orders a row (c,pt,ph,pw), else
// (pt,ph,pw,c).
template <class F>
void for_patches(const Tensor& x, PatchGeometry p, bool channels_first, F&& f) {
  const std::int64_t B = x.dim(0), C = x.dim(1), Tx = x.dim(2), Hx = x.dim(3), Wx = x.dim(4);
  const std::int64_t T = (Tx + p.pt - 1) / p.pt, H = (Hx + p.ph - 1) / p.ph,
                     Wn = (Wx + p.pw - 1) / p.pw;
  const std::int64_t row_size = C * p.pt * p.ph * p.pw;
#pragma omp parallel for schedule(static) collapse(2)
  for (std::int64_t bt = 0; bt < B * T; ++bt)
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t w = 0; w < Wn; ++w) {
        const std::int64_t b = bt / T, t = bt % T, row = ((bt * H) + h) * Wn + w;
        for (std::int64_t i = 0; i < row_size; ++i) {
          std::int64_t c, inner;
          if (channels_first) {
            c = i / (p.pt * p.ph * p.pw);
            inner = i % (p.pt * p.ph * p.pw);
          } else {
            c = i % C;
            inner = i / C;
          }
          const std::int64_t it = t * p.pt + inner / (p.ph * p.pw);
          const std::int64_t ih = h * p.ph + inner / p.pw % p.ph, iw = w * p.pw + inner % p.pw;
          const bool inside = it < Tx && ih < Hx && iw < Wx;
          f(inside ? (((b * C + c) * Tx + it) * Hx + ih) * Wx + iw : -1, row * row_size + i);
        }
      }
}

// Calls f(pixels of x's block in the order of its entries, null before the clip; channels of y),
// in parallel. x [B,T,H,W,C], y [B,T',h,w,G].
template <class X, class Y, class F>
void for_blocks(const Tensor& deep, const Tensor& wide, Blocks k, X* x, Y* y, F&& f) {
  const std::int64_t T = wide.dim(1), H = wide.dim(2), width = wide.dim(3), C = wide.dim(4);
  const std::int64_t t = deep.dim(1), h = deep.dim(2), w = deep.dim(3), G = deep.dim(4);
  WEFT_ASSERT(t * k.frames == T + k.front && h * k.side == H && w * k.side == width);
  WEFT_ASSERT(k.entries() <= 8 && C * k.entries() % G == 0);
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < deep.dim(0) * t * h; ++row)
    for (std::int64_t column = 0; column < w; ++column) {
      const std::int64_t b = row / (t * h), first = row / h % t * k.frames - k.front;
      X* pixels[8];
      for (int e = 0; e < k.entries(); ++e) {
        const int inner = e / k.side % k.side, last = e % k.side;
        const std::int64_t frame = first + e / (k.side * k.side);
        const std::int64_t at_row = row % h * k.side + (k.columns_first ? last : inner);
        const std::int64_t at = column * k.side + (k.columns_first ? inner : last);
        pixels[e] = frame < 0 ? nullptr : x + (((b * T + frame) * H + at_row) * width + at) * C;
      }
      f(pixels, y + (row * w + column) * G);
    }
}

}  // namespace

void to_channels_last(const Tensor& x, Tensor& y) {
  const std::int64_t B = x.dim(0), C = x.dim(1), P = x.numel() / (B * C);
  with_width(x, [&](auto type) {
    using T = decltype(type);
    exchange_axes(static_cast<const T*>(x.raw()), B, C, P, static_cast<T*>(y.raw()));
  });
}

void to_channels_first(const Tensor& x, Tensor& y) {
  const std::int64_t B = x.dim(0), C = x.dim(-1), P = x.numel() / (B * C);
  with_width(x, [&](auto type) {
    using T = decltype(type);
    exchange_axes(static_cast<const T*>(x.raw()), B, P, C, static_cast<T*>(y.raw()));
  });
}

void depth_to_time_forward(const Tensor& x, Tensor& y) {
  const std::int64_t frames = y.dim(0) * y.dim(1), P = x.dim(2) * x.dim(3), C = y.dim(-1);
  WEFT_ASSERT(y.dim(1) == 2 * x.dim(1) && x.dim(-1) == 2 * C);
  with_width(x, [&](auto type) {
    using E = decltype(type);
    const E* xs = static_cast<const E*>(x.raw());
    E* ys = static_cast<E*>(y.raw());
#pragma omp parallel for schedule(static)
    for (std::int64_t t = 0; t < frames; ++t) {
      const E* from = xs + t / 2 * P * 2 * C + t % 2;
      E* to = ys + t * P * C;
      for (std::int64_t i = 0; i < P * C; ++i) to[i] = from[2 * i];
    }
  });
}

void depth_to_time_backward(const Tensor& dy, Tensor& dx) {
  const std::int64_t frames = dy.dim(0) * dy.dim(1), P = dx.dim(2) * dx.dim(3), C = dy.dim(-1);
  WEFT_ASSERT(dy.dim(1) == 2 * dx.dim(1) && dx.dim(-1) == 2 * C);
  with_width(dy, [&](auto type) {
    using E = decltype(type);
    const E* from = static_cast<const E*>(dy.raw());
    E* to = static_cast<E*>(dx.raw());
#pragma omp parallel for schedule(static)
    for (std::int64_t t = 0; t < frames; ++t) {
      const E* in = from + t * P * C;
      E* out = to + t / 2 * P * 2 * C + t % 2;
      for (std::int64_t i = 0; i < P * C; ++i) out[2 * i] = in[i];
    }
  });
}

void space_to_depth(const Tensor& x, Blocks blocks, float scale, bool accumulate, Tensor& y) {
  const std::int64_t G = y.dim(4), n = x.dim(4) * blocks.entries() / G;
  with_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
    for_blocks(y, x, blocks, x.data<T>(), y.data<T>(), [&](const T* const* pixels, T* to) {
      int entry = 0;
      std::int64_t c = 0;
      for (std::int64_t g = 0; g < G; ++g) {
        float sum = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          if (pixels[entry] != nullptr) sum += static_cast<float>(pixels[entry][c]);
          if (++entry == blocks.entries()) entry = 0, ++c;
        }
        to[g] = T(scale * sum + (accumulate ? static_cast<float>(to[g]) : 0.0f));
      }
    });
  });
}

void depth_to_space(const Tensor& y, Blocks blocks, float scale, bool accumulate, Tensor& x) {
  const std::int64_t C = x.dim(4), K = blocks.entries(), n = C * K / y.dim(4);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    for_blocks(y, x, blocks, x.data<T>(), y.data<T>(), [&](T* const* pixels, const T* from) {
      for (std::int64_t entry = 0; entry < K; ++entry) {
        T* to = pixels[entry];
        if (to == nullptr) continue;
        for (std::int64_t c = 0; c < C; ++c)
          to[c] = T(scale * static_cast<float>(from[(c * K + entry) / n]) +
                    (accumulate ? static_cast<float>(to[c]) : 0.0f));
      }
    });
  });
}

void patchify_forward(const Tensor& x, PatchGeometry patch, Tensor& rows) {
  const float* in = x.data<float>();
  with_type(rows.dtype(), [&](auto type) {
    using T = decltype(type);
    T* out = rows.data<T>();
    for_patches(x, patch, true, [&](std::int64_t pixel, std::int64_t element) {
      out[element] = T(pixel < 0 ? 0.0f : in[pixel]);
    });
  });
}

void patchify_backward(const Tensor& drows, PatchGeometry patch, Tensor& dx) {
  float* out = dx.data<float>();
  with_type(drows.dtype(), [&](auto type) {
    const auto* in = drows.data<decltype(type)>();
    for_patches(dx, patch, true, [&](std::int64_t pixel, std::int64_t element) {
      if (pixel >= 0) out[pixel] = static_cast<float>(in[element]);
    });
  });
}

void unpatchify_forward(const Tensor& rows, PatchGeometry patch, Tensor& out) {
  float* to = out.data<float>();
  with_type(rows.dtype(), [&](auto type) {
    const auto* in = rows.data<decltype(type)>();
    for_patches(out, patch, false, [&](std::int64_t pixel, std::int64_t element) {
      if (pixel >= 0) to[pixel] = static_cast<float>(in[element]);
    });
  });
}

void unpatchify_backward(const Tensor& dout, PatchGeometry patch, Tensor& drows) {
  const float* in = dout.data<float>();
  with_type(drows.dtype(), [&](auto type) {
    using T = decltype(type);
    T* out = drows.data<T>();
    for_patches(dout, patch, false, [&](std::int64_t pixel, std::int64_t element) {
      out[element] = T(pixel < 0 ? 0.0f : in[pixel]);
    });
  });
}

void copy_tokens(const Tensor& x, TokenBlock k, Tensor& y) {
  const std::int64_t B = x.dim(0), width = x.dim(3) * static_cast<std::int64_t>(size_of(x.dtype()));
  const std::int64_t run = k.tokens * width;  // the tokens of a frame lie together on both sides
  const auto* from = static_cast<const std::byte*>(x.raw());
  auto* to = static_cast<std::byte*>(y.raw());
  const auto place = [width](const Tensor& t, std::int64_t b, std::int64_t frame,
                             std::int64_t token) {
    return ((b * t.dim(1) + frame) * t.dim(2) + token) * width;
  };
#pragma omp parallel for schedule(static) collapse(2) if (B * k.frames * run > (1 << 18))
  for (std::int64_t b = 0; b < B; ++b)
    for (std::int64_t t = 0; t < k.frames; ++t)
      std::memcpy(to + place(y, b, k.to_frame + t, k.to_token),
                  from + place(x, b, k.from_frame + t, k.from_token),
                  static_cast<std::size_t>(run));
}

void put_channels(const Tensor& x, std::int64_t first, Tensor& y) {
  const std::size_t width = size_of(x.dtype());
  const std::size_t run = static_cast<std::size_t>(x.dim(-1)) * width,
                    stride = static_cast<std::size_t>(y.dim(-1)) * width;
  const std::int64_t positions = x.numel() / x.dim(-1);
  const auto* from = static_cast<const std::byte*>(x.raw());
  std::byte* to = static_cast<std::byte*>(y.raw()) + static_cast<std::size_t>(first) * width;
#pragma omp parallel for schedule(static) if (x.numel() > 16384)
  for (std::int64_t p = 0; p < positions; ++p)
    std::memcpy(to + static_cast<std::size_t>(p) * stride, from + static_cast<std::size_t>(p) * run,
                run);
}

void take_channels(const Tensor& y, std::int64_t first, Tensor& x, bool accumulate) {
  const std::int64_t c = x.dim(-1), C = y.dim(-1), positions = x.numel() / c;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = y.data<T>() + first;
    T* out = x.data<T>();
#pragma omp parallel for schedule(static) if (x.numel() > 16384)
    for (std::int64_t p = 0; p < positions; ++p) {
      const T* from = in + p * C;
      T* to = out + p * c;
      if (accumulate)
        for_vectors(c, [&](std::int64_t i, int n) {
          store_n(to + i, load_n(to + i, n) + load_n(from + i, n), n);
        });
      else
        std::copy_n(from, c, to);
    }
  });
}

namespace {

// Four vectors of quadruples (4 values a channel) made one vector for each place in a quadruple,
// and back: two rounds of lanes of even and odd number.
void split_quadruples(vf (&v)[4]) {
  vi even, odd;
  for (int i = 0; i < W; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
  const vf e0 = __builtin_shuffle(v[0], v[1], even), e1 = __builtin_shuffle(v[2], v[3], even);
  const vf o0 = __builtin_shuffle(v[0], v[1], odd), o1 = __builtin_shuffle(v[2], v[3], odd);
  v[0] = __builtin_shuffle(e0, e1, even), v[2] = __builtin_shuffle(e0, e1, odd);
  v[1] = __builtin_shuffle(o0, o1, even), v[3] = __builtin_shuffle(o0, o1, odd);
}
void join_quadruples(vf (&v)[4]) {
  vi low, high;
  for (int i = 0; i < W; ++i) low[i] = i / 2 + i % 2 * W, high[i] = low[i] + W / 2;
  const vf e0 = __builtin_shuffle(v[0], v[2], low), e1 = __builtin_shuffle(v[0], v[2], high);
  const vf o0 = __builtin_shuffle(v[1], v[3], low), o1 = __builtin_shuffle(v[1], v[3], high);
  v[0] = __builtin_shuffle(e0, o0, low), v[1] = __builtin_shuffle(e0, o0, high);
  v[2] = __builtin_shuffle(e1, o1, low), v[3] = __builtin_shuffle(e1, o1, high);
}

// Calls f(the 4C values of a pixel of the small side, the four pixels of C values that they make),
// in parallel. `large` is [N,T,2H,2W,C].
template <class R, class Y, class F>
void for_squares(const Tensor& large, R* rows, Y* y, F&& f) {
  const std::int64_t h = large.dim(2) / 2, w = large.dim(3) / 2, C = large.dim(4);
#pragma omp parallel for schedule(static) if (large.numel() > 16384)
  for (std::int64_t r = 0; r < large.dim(0) * large.dim(1) * h; ++r)
    for (std::int64_t i = 0; i < w; ++i) {
      Y *upper = y + (4 * r * w + 2 * i) * C, *lower = upper + 2 * w * C;
      Y* const to[4] = {upper, upper + C, lower, lower + C};
      f(rows + (r * w + i) * 4 * C, to);
    }
}

}  // namespace

void spread_2x2_forward(const Tensor& rows, const Tensor& bias, Tensor& y) {
  const std::int64_t C = y.dim(4);
  WEFT_ASSERT(rows.dim(4) == 4 * C && rows.numel() == y.numel() && y.dim(2) == 2 * rows.dim(2));
  const float* b = bias.defined() ? bias.data<float>() : nullptr;
  with_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
    for_squares(y, rows.data<T>(), y.data<T>(), [&](const T* from, T* const(&to)[4]) {
      std::int64_t c = 0;
      for (; c + W <= C; c += W) {
        const vf add = b ? load(b + c) : vf{};
        vf v[4];
        for (int k = 0; k < 4; ++k) v[k] = load(from + 4 * c + k * W);
        split_quadruples(v);
        for (int k = 0; k < 4; ++k) store(to[k] + c, v[k] + add);
      }
      for (; c < C; ++c)
        for (int k = 0; k < 4; ++k)
          to[k][c] = T(static_cast<float>(from[4 * c + k]) + (b ? b[c] : 0.0f));
    });
  });
}

void spread_4x4(const Tensor& rows, Tensor& y) {
  const std::int64_t H = rows.dim(2), width = rows.dim(3), C = y.dim(4);
  WEFT_ASSERT(rows.dim(4) == 9 * C && y.dim(2) == 4 * H && y.dim(3) == 4 * width &&
              y.numel() * 9 == rows.numel() * 16 && y.dtype() == rows.dtype());
  with_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = rows.data<T>();
    T* to = y.data<T>();
    const std::int64_t lines = y.dim(0) * y.dim(1) * 4 * H;
#pragma omp parallel for schedule(static)
    for (std::int64_t line = 0; line < lines; ++line) {
      const std::int64_t row = line % 4;
      const T* first = from + line / 4 * width * 9 * C + (row + 1) / 2 * 3 * C;
      T* at = to + line * 4 * width * C;
      for (std::int64_t w = 0; w < width; ++w)
        for (std::int64_t j = 0; j < 4; ++j, at += C)
          std::copy_n(first + (w * 9 + (j + 1) / 2) * C, C, at);
    }
  });
}

void spread_2x2_backward(const Tensor& dy, Tensor& drows) {
  const std::int64_t C = dy.dim(4);
  WEFT_ASSERT(drows.dim(4) == 4 * C && drows.numel() == dy.numel() &&
              dy.dim(2) == 2 * drows.dim(2));
  with_type(dy.dtype(), [&](auto type) {
    using T = decltype(type);
    for_squares(dy, drows.data<T>(), dy.data<T>(), [&](T* to, const T* const(&from)[4]) {
      std::int64_t c = 0;
      for (; c + W <= C; c += W) {
        vf v[4];
        for (int k = 0; k < 4; ++k) v[k] = load(from[k] + c);
        join_quadruples(v);
        for (int k = 0; k < 4; ++k) store(to + 4 * c + k * W, v[k]);
      }
      for (; c < C; ++c)
        for (int k = 0; k < 4; ++k) to[4 * c + k] = from[k][c];
    });
  });
}

void frames_to_latent(const Tensor& frames, Tensor& x0) {
  const std::int64_t C = x0.dim(0), pixels = x0.numel() / C;
  const std::uint8_t* in = frames.data<std::uint8_t>();
  float* out = x0.data<float>();
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < pixels; ++i)
    for (std::int64_t c = 0; c < C; ++c)
      out[c * pixels + i] = static_cast<float>(in[i * C + c]) * (1.0f / 127.5f) - 1.0f;
}

void frames_to_pixels(const Tensor& frames, Tensor& pixels, Tensor& bad) {
  const std::int64_t count = bad.numel(), size = frames.numel() / count;
  for (std::int64_t t = 0; t < count; ++t) {
    const float* in = frames.data<float>() + t * size;
    std::uint8_t* out = pixels.data<std::uint8_t>() + t * size;
    std::int32_t wrong = 0;
#pragma omp parallel for simd schedule(static) reduction(+ : wrong)
    for (std::int64_t i = 0; i < size; ++i) {
      const bool finite = std::isfinite(in[i]);
      const float x = finite ? in[i] : -1.0f;
      const float unit = ((x < -1.0f ? -1.0f : x > 1.0f ? 1.0f : x) + 1.0f) / 2.0f;
      out[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(unit * 255.0f + 0.5f));
      wrong += finite ? 0 : 1;
    }
    bad.data<std::int32_t>()[t] += wrong;
  }
}

void normalise_images(const Tensor& images, const Tensor& sizes, PixelScale scale, Tensor& y) {
  const std::int64_t H = images.dim(1), width = images.dim(2);
  float value[3][256];
  for (int c = 0; c < 3; ++c)
    for (int b = 0; b < 256; ++b)
      value[c][b] = (static_cast<float>(b) / scale.divisor - scale.mean[c]) / scale.deviation[c];
  const int red = scale.reversed ? 2 : 0, blue = 2 - red;
  const std::int32_t* size = sizes.data<std::int32_t>();
  with_type(y.dtype(), [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for schedule(static)
    for (std::int64_t r = 0; r < images.dim(0) * H; ++r) {
      const std::uint8_t* from = images.data<std::uint8_t>() + r * width * 3;
      T* to = y.data<T>() + r * width * 3;
      const std::int64_t inside = r % H < size[r / H * 2] ? size[r / H * 2 + 1] : 0;
      for (std::int64_t i = 0; i < inside; ++i, from += 3, to += 3) {
        to[0] = T(value[0][from[red]]);
        to[1] = T(value[1][from[1]]);
        to[2] = T(value[2][from[blue]]);
      }
      std::fill_n(to, (width - inside) * 3, T(0.0f));
    }
  });
}

WEFT_CPU_END
