// CPU side of ops/conv.h. All channels of a pixel are read at the same place: the place is
// found once, and the channels are vectors.
#include "ops/conv.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

// x [frames,H,W,C] and the result [frames,h,w,.].
struct Frames {
  std::int64_t H, W, C, h, w;
  Conv conv;

  Frames(const Shape& x, const Tensor& offsets, Conv k)
      : H(x[2]), W(x[3]), C(x[4]), h(offsets.dim(2)), w(offsets.dim(3)), conv(k) {
    WEFT_ASSERT(k.kt == 1 && k.kh == 3 && k.kw == 3 && k.groups == 1 && !k.upsample);
    WEFT_ASSERT(offsets.dim(4) == deform_channels &&
                k.output(x, C) == Shape({x[0], x[1], h, w, C}));
  }
};

// What a tap reads: pixels of x (-1: outside of the frame) with their shares of the value.
struct Reading {
  DeformPlace at;
  float mask;
  std::int64_t pixel[4];  // upper left and right, lower left and right
  float share[4];

  template <class T>
  Reading(const Frames& g, const T* offsets, std::int64_t p, int tap) {
    const T* own = offsets + p * deform_channels;
    const std::int64_t frame = p / (g.h * g.w);
    const auto y = static_cast<int>(p / g.w % g.h * g.conv.stride - g.conv.top +
                                    tap / 3 * g.conv.dilation),
               x = static_cast<int>(p % g.w * g.conv.stride - g.conv.left +
                                    tap % 3 * g.conv.dilation);
    at = deform_place(static_cast<float>(y) + static_cast<float>(own[2 * tap]),
                      static_cast<float>(x) + static_cast<float>(own[2 * tap + 1]),
                      static_cast<int>(g.H), static_cast<int>(g.W));
    mask = 1.0f / (1.0f + std::exp(-static_cast<float>(own[2 * deform_taps + tap])));
    for (int k = 0; k < 4; ++k) {
      const std::int64_t row = at.row + k / 2, column = at.column + k % 2;
      const bool counts = at.inside && row >= 0 && row < g.H && column >= 0 && column < g.W;
      pixel[k] = counts ? (frame * g.H + row) * g.W + column : -1;
      share[k] = (k / 2 ? at.below : 1.0f - at.below) * (k % 2 ? at.right : 1.0f - at.right);
    }
  }
  // f(pixel, share times mask) for each pixel that adds something.
  template <class F>
  void each(F&& f) const {
    for (int k = 0; k < 4; ++k)
      if (pixel[k] >= 0 && share[k] != 0.0f) f(pixel[k], share[k] * mask);
  }
};

}  // namespace

void deform_columns(const Tensor& x, const Tensor& offsets, Conv conv, std::int64_t first,
                    Tensor& columns) {
  const Frames g(x.shape(), offsets, conv);
  const std::int64_t count = columns.dim(0), C = g.C;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *from = x.data<T>(), *o = offsets.data<T>();
    T* to = columns.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count * deform_taps; ++i) {
      const Reading r(g, o, first + i / deform_taps, static_cast<int>(i % deform_taps));
      const T* pixels[4];
      float factors[4];
      int n = 0;
      r.each([&](std::int64_t pixel, float factor) {
        pixels[n] = from + pixel * C, factors[n++] = factor;
      });
      for_vectors(C, [&](std::int64_t c, int lanes) {
        vf sum{};
        for (int k = 0; k < n; ++k) sum += factors[k] * load_n(pixels[k] + c, lanes);
        store_n(to + i * C + c, sum, lanes);
      });
    }
  });
}

void deform_backward_offsets(const Tensor& x, const Tensor& offsets, const Tensor& dcolumns,
                             Conv conv, std::int64_t first, Tensor& doffsets) {
  const Frames g(x.shape(), offsets, conv);
  const std::int64_t count = dcolumns.dim(0), C = g.C;
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *from = x.data<T>(), *o = offsets.data<T>(), *d = dcolumns.data<T>();
    T* to = doffsets.data<T>();
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count * deform_taps; ++i) {
      const std::int64_t p = first + i / deform_taps;
      const int tap = static_cast<int>(i % deform_taps);
      const Reading r(g, o, p, tap);
      float along[4] = {};  // the columns' gradient times each of the four pixels
      for (int k = 0; k < 4; ++k) {
        if (r.pixel[k] < 0) continue;
        vf sum{};
        for_vectors(C, [&](std::int64_t c, int n) {
          sum += load_n(d + i * C + c, n) * load_n(from + r.pixel[k] * C + c, n);
        });
        along[k] = hsum(sum);
      }
      const auto [row, column, below, right, inside] = r.at;
      float value = 0.0f;
      for (int k = 0; k < 4; ++k) value += r.share[k] * along[k];
      T* own = to + p * deform_channels;
      own[2 * tap] =
          T(r.mask * ((1.0f - right) * (along[2] - along[0]) + right * (along[3] - along[1])));
      own[2 * tap + 1] =
          T(r.mask * ((1.0f - below) * (along[1] - along[0]) + below * (along[3] - along[2])));
      own[2 * deform_taps + tap] = T(value * r.mask * (1.0f - r.mask));
    }
  });
}

// A thread has some channels of a frame: no two add to the same value, and the order of a value's
// terms is that of the pixels.
void deform_backward_input(const Tensor& offsets, const Tensor& dcolumns, Conv conv,
                           std::int64_t first, Tensor& dx) {
  constexpr std::int64_t slice = 32;
  const Frames g(dx.shape(), offsets, conv);
  if (planning() || dcolumns.numel() == 0) return;
  const std::int64_t C = g.C, area = g.h * g.w, end = first + dcolumns.dim(0);
  const std::int64_t slices = (C + slice - 1) / slice;
  float* to = dx.data<float>();
  with_type(offsets.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *o = offsets.data<T>(), *d = dcolumns.data<T>();
#pragma omp parallel for schedule(static) collapse(2)
    for (std::int64_t frame = first / area; frame <= (end - 1) / area; ++frame)
      for (std::int64_t s = 0; s < slices; ++s) {
        const std::int64_t c0 = s * slice, width = std::min(slice, C - c0);
        for (std::int64_t p = std::max(first, frame * area); p < std::min(end, (frame + 1) * area);
             ++p)
          for (int tap = 0; tap < deform_taps; ++tap) {
            const T* own = d + ((p - first) * deform_taps + tap) * C + c0;
            Reading(g, o, p, tap).each([&](std::int64_t pixel, float factor) {
              float* sums = to + pixel * C + c0;
              for_vectors(width, [&](std::int64_t c, int n) {
                store_n(sums + c, load_n(sums + c, n) + factor * load_n(own + c, n), n);
              });
            });
          }
      }
  });
}

WEFT_CPU_END
