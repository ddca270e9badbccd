#include "media/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <type_traits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "core/error.h"
#include "media/yuv_rgb.h"

namespace weft {

std::vector<CoverResize::Tap> CoverResize::taps(std::int64_t in, std::int64_t scaled,
                                                std::int64_t out) {
  std::vector<Tap> list(out);
  const float ratio = static_cast<float>(in) / static_cast<float>(scaled);
  const std::int64_t first = (scaled - out) / 2;
  for (std::int64_t i = 0; i < out; ++i) {
    // Half-pixel centres; beyond the first centre the edge sample repeats.
    const float at = std::max(0.0f, (static_cast<float>(first + i) + 0.5f) * ratio - 0.5f);
    const auto low = std::min(static_cast<std::int64_t>(at), in - 1);
    Tap& tap = list[i];
    tap.low = static_cast<std::int32_t>(low);
    tap.high = static_cast<std::int32_t>(std::min(low + 1, in - 1));
    tap.weight = at - static_cast<float>(low);
  }
  return list;
}

void CoverResize::prepare(const VideoFrame& frame, std::int64_t height, std::int64_t width) {
  const double fh = static_cast<double>(height) / static_cast<double>(frame.height);
  const double fw = static_cast<double>(width) / static_cast<double>(frame.width);
  // nearbyint rounds halves to even, as Python's round does.
  const std::int64_t scaled_height =
      fh > fw ? height
              : std::max(height, static_cast<std::int64_t>(
                                     std::nearbyint(static_cast<double>(frame.height) * fw)));
  const std::int64_t scaled_width =
      fh > fw ? std::max(width, static_cast<std::int64_t>(
                                    std::nearbyint(static_cast<double>(frame.width) * fh)))
              : width;
  rows_ = taps(frame.height, scaled_height, height);
  columns_ = taps(frame.width, scaled_width, width);
  for (Tap& t : columns_) {  // in bytes, ready to use as offsets
    t.low *= 3;
    t.high *= 3;
  }
  low_.clear(), high_.clear(), weights_.clear();
  for (const Tap& t : columns_) {
    if (t.high + 4 > frame.width * 3) break;
    low_.push_back(t.low);
    high_.push_back(t.high);
    weights_.push_back(t.weight);
  }
  in_height_ = frame.height;
  in_width_ = frame.width;
}

namespace {

#ifdef __x86_64__

// AVX2, which weft needs on x86 anyway. Other processors take the plain forms of this file.
#define WEFT_AVX2 __attribute__((target("avx2")))

// One channel of 8 pixels, blended as cover() does it: the same operations in the same order, and
// none of them fused.
WEFT_AVX2 inline __m256i blend(const __m256i (&pixels)[4], int shift, __m256 column, __m256 row) {
  __m256 v[4];
  for (int i = 0; i < 4; ++i)
    v[i] = _mm256_cvtepi32_ps(
        _mm256_and_si256(_mm256_srli_epi32(pixels[i], shift), _mm256_set1_epi32(255)));
  const __m256 u = _mm256_add_ps(v[0], _mm256_mul_ps(_mm256_sub_ps(v[1], v[0]), column));
  const __m256 l = _mm256_add_ps(v[2], _mm256_mul_ps(_mm256_sub_ps(v[3], v[2]), column));
  const __m256 out = _mm256_add_ps(u, _mm256_mul_ps(_mm256_sub_ps(l, u), row));
  return _mm256_cvttps_epi32(_mm256_add_ps(out, _mm256_set1_ps(0.5f)));
}

// As many pixels of a row as go by eights, of `count`; returns how many.
WEFT_AVX2 std::int64_t cover_eights(const std::uint8_t* upper, const std::uint8_t* lower,
                                    const std::int32_t* low, const std::int32_t* high,
                                    const float* weights, float weight, std::int64_t count,
                                    std::uint8_t* out) {
  const __m256i packed = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
  const __m256 row = _mm256_set1_ps(weight);
  std::int64_t x = 0;
  for (; x + 8 <= count; x += 8, out += 24) {
    const __m256i from = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + x));
    const __m256i to = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + x));
    const auto load = [](const std::uint8_t* p) { return reinterpret_cast<const int*>(p); };
    const __m256i pixels[4] = {
        _mm256_i32gather_epi32(load(upper), from, 1), _mm256_i32gather_epi32(load(upper), to, 1),
        _mm256_i32gather_epi32(load(lower), from, 1), _mm256_i32gather_epi32(load(lower), to, 1)};
    const __m256 column = _mm256_loadu_ps(weights + x);
    const __m256i r = blend(pixels, 0, column, row), g = blend(pixels, 8, column, row),
                  b = blend(pixels, 16, column, row);
    const __m256i rgb = _mm256_shuffle_epi8(
        _mm256_or_si256(_mm256_or_si256(r, _mm256_slli_epi32(g, 8)), _mm256_slli_epi32(b, 16)),
        packed);
    // 12 bytes in each half; the second store covers the first one's last four.
    const __m128i second = _mm256_extracti128_si256(rgb, 1);
    const std::int32_t end = _mm_extract_epi32(second, 2);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(rgb));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 12), second);
    std::memcpy(out + 20, &end, 4);
  }
  return x;
}

#else

std::int64_t cover_eights(const std::uint8_t*, const std::uint8_t*, const std::int32_t*,
                          const std::int32_t*, const float*, float, std::int64_t, std::uint8_t*) {
  return 0;  // cover() itself does all of them
}

#endif

}  // namespace

// Row y as RGB. Valid until the second next one is asked for: two that are blended are neighbours.
const std::uint8_t* CoverResize::row_of(const VideoFrame& frame, std::int64_t y) {
  if (frame.yuv == nullptr) return frame.rgb + y * frame.stride;
  std::vector<std::uint8_t>& row = converted_[y % 2];
  if (converted_row_[y % 2] == y) return row.data();
  converted_row_[y % 2] = y;
  row.resize(static_cast<std::size_t>(3 * frame.width));
  frame.yuv->row(y, row.data());
  return row.data();
}

template <class T>
void CoverResize::cover(const VideoFrame& frame, std::int64_t height, std::int64_t width, T* out) {
  converted_row_[0] = converted_row_[1] = -1;
  // Footage that already has the bucket's size passes through unchanged.
  if (frame.height == height && frame.width == width) {
    for (std::int64_t y = 0; y < height; ++y)
      std::copy_n(row_of(frame, y), width * 3, out + y * width * 3);
    return;
  }
  if (frame.height != in_height_ || frame.width != in_width_ ||
      rows_.size() != static_cast<std::size_t>(height) ||
      columns_.size() != static_cast<std::size_t>(width))
    prepare(frame, height, width);
  constexpr float half = std::is_integral_v<T> ? 0.5f : 0.0f;  // to round
  for (const Tap& row : rows_) {
    const std::uint8_t* upper = row_of(frame, row.low);
    const std::uint8_t* lower = row_of(frame, row.high);
    std::int64_t x = 0;
    if constexpr (std::is_same_v<T, std::uint8_t>) {
      x = cover_eights(upper, lower, low_.data(), high_.data(), weights_.data(), row.weight,
                       std::ssize(low_), out);
      out += 3 * x;
    }
    for (; x < width; ++x) {
      const Tap& column = columns_[x];
      for (int c = 0; c < 3; ++c) {
        const float ul = upper[column.low + c], ur = upper[column.high + c];
        const float ll = lower[column.low + c], lr = lower[column.high + c];
        const float u = ul + (ur - ul) * column.weight;
        const float l = ll + (lr - ll) * column.weight;
        *out++ = static_cast<T>(u + (l - u) * row.weight + half);
      }
    }
  }
}

void CoverResize::operator()(const VideoFrame& frame, std::int64_t height, std::int64_t width,
                             std::uint8_t* out) {
  cover(frame, height, width, out);
}

void CoverResize::operator()(const VideoFrame& frame, std::int64_t height, std::int64_t width,
                             float* out) {
  cover(frame, height, width, out);
}

namespace {

// Rounds as Python's round: halves to even.
std::int64_t rounded(double x) { return static_cast<std::int64_t>(std::nearbyint(x)); }

}  // namespace

std::vector<std::uint8_t> cover_bicubic(const VideoFrame& frame, std::int64_t height,
                                        std::int64_t width) {
  WEFT_ASSERT(frame.height > 0 && frame.width > 0 && height > 0 && width > 0);
  const double rh = static_cast<double>(height) / static_cast<double>(frame.height);
  const double rw = static_cast<double>(width) / static_cast<double>(frame.width);
  const bool high = rh > rw;
  const std::int64_t h =
      high ? height : std::max(height, rounded(static_cast<double>(frame.height) * rw));
  const std::int64_t w =
      high ? std::max(width, rounded(static_cast<double>(frame.width) * rh)) : width;

  std::vector<std::uint8_t> scaled(h * w * 3);
  pillow_resize({frame.rgb, frame.height, frame.width, frame.stride}, h, w, PillowFilter::bicubic,
                scaled.data(), w * 3);

  const std::int64_t top = rounded(static_cast<double>(h - height) / 2);
  const std::int64_t left = rounded(static_cast<double>(w - width) / 2);
  std::vector<std::uint8_t> out(height * width * 3);
  for (std::int64_t y = 0; y < height; ++y)
    std::copy_n(scaled.data() + ((top + y) * w + left) * 3, width * 3, out.data() + y * width * 3);
  return out;
}

// Two passes over integers. A 22-bit weight does not fit the 16-bit products that are fast in AVX2:
// it is cut into w = 2^11 * high + low, the two sums are exact, and so is their combination. Sums
// wrap around at 2^32 in both forms, and the whole sum never leaves 32 bits.

namespace {

constexpr int weight_bits = 22, low_bits = 11;
// Weights are kept in fours, filled up with zeros.
constexpr std::int64_t group = 4;

double triangle(double x) { return std::max(0.0, 1.0 - std::abs(x)); }

double cubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

double sinc(double x) {
  if (x == 0) return 1;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}
double lanczos(double x) { return -3 <= x && x < 3 ? sinc(x) * sinc(x / 3) : 0; }

// Which samples make an output sample: `taps` of them from first[i] on, a multiple of 4; those
// behind the last sample have weight 0.
struct Weights {
  std::int64_t taps = 0;
  std::vector<std::int32_t> first;
  std::vector<std::int16_t> high, low;  // [out, taps]
};

// An axis of `in` samples becomes one of `out`, of which `count` from `begin` on are wanted.
struct Axis {
  std::int64_t in, out, begin, count;
  bool scales() const { return in != out; }
};

Weights make_weights(const Axis& axis, PillowFilter filter) {
  const std::int64_t in = axis.in, out = axis.count;
  const double scale = static_cast<double>(in) / static_cast<double>(axis.out);
  const double widened = std::max(scale, 1.0), inverse = 1.0 / widened;
  const double reach = filter == PillowFilter::bilinear  ? 1.0
                       : filter == PillowFilter::bicubic ? 2.0
                                                         : 3.0;
  const double support = reach * widened;
  double (*const kernel)(double) = filter == PillowFilter::bilinear  ? triangle
                                   : filter == PillowFilter::bicubic ? cubic
                                                                     : lanczos;
  Weights all;
  const auto widest = static_cast<std::int64_t>(std::ceil(support)) * 2 + 1;
  all.taps = (widest + group - 1) / group * group;
  all.first.resize(out);
  all.high.resize(out * all.taps);
  all.low.resize(all.high.size());
  std::vector<double> w(widest);
  std::int64_t most = 1;
  for (std::int64_t i = 0; i < out; ++i) {
    const double center = (static_cast<double>(axis.begin + i) + 0.5) * scale;
    const auto first = std::max<std::int64_t>(0, static_cast<std::int64_t>(center - support + 0.5));
    const auto end = std::min(in, static_cast<std::int64_t>(center + support + 0.5));
    most = std::max(most, end - first);
    double sum = 0;
    for (std::int64_t x = first; x < end; ++x)
      sum += w[x - first] = kernel((static_cast<double>(x) - center + 0.5) * inverse);
    all.first[i] = static_cast<std::int32_t>(first);
    for (std::int64_t k = 0; k < end - first; ++k) {
      double v = w[k];
      if (sum != 0) v /= sum;
      v *= static_cast<double>(1 << weight_bits);
      const auto whole = static_cast<std::int32_t>(v < 0 ? v - 0.5 : v + 0.5);
      const auto at = static_cast<std::size_t>(i * all.taps + k);
      all.high[at] = static_cast<std::int16_t>(whole >> low_bits);
      all.low[at] = static_cast<std::int16_t>(whole & ((1 << low_bits) - 1));
    }
  }
  // Mostly fewer are used than there could be.
  const std::int64_t used = (most + group - 1) / group * group;
  if (used < all.taps) {
    for (auto* list : {&all.high, &all.low}) {
      for (std::int64_t i = 0; i < out; ++i)
        std::copy_n(list->begin() + i * all.taps, used, list->begin() + i * used);
      list->resize(static_cast<std::size_t>(out * used));
    }
    all.taps = used;
  }
  return all;
}

// Starts at half a unit, so that the shift rounds to nearest.
constexpr std::int32_t half_unit = 1 << (weight_bits - 1);
std::uint8_t level(std::int32_t sum) {
  return static_cast<std::uint8_t>(std::clamp(sum >> weight_bits, 0, 255));
}
std::int32_t whole_weight(std::int16_t high, std::int16_t low) {
  return high * (1 << low_bits) + low;
}

// One row of bytes out of `count` rows that are `stride` bytes apart; a piece of the row at a time.
void across_plain(const std::uint8_t* rows, std::int64_t stride, const std::int16_t* high,
                  const std::int16_t* low, std::int64_t count, std::int64_t bytes,
                  std::uint8_t* to) {
  constexpr std::int64_t piece = 64;
  for (std::int64_t first = 0; first < bytes; first += piece) {
    const std::int64_t n = std::min(piece, bytes - first);
    std::int32_t sums[piece];
    std::fill_n(sums, n, half_unit);
    for (std::int64_t k = 0; k < count; ++k) {
      const std::uint8_t* row = rows + k * stride + first;
      const std::int32_t weight = whole_weight(high[k], low[k]);
      for (std::int64_t x = 0; x < n; ++x) sums[x] += row[x] * weight;
    }
    for (std::int64_t x = 0; x < n; ++x) to[first + x] = level(sums[x]);
  }
}

#ifdef __x86_64__

WEFT_AVX2 inline __m256i combine(__m256i high, __m256i low) {
  const __m256i half = _mm256_set1_epi32(half_unit);
  return _mm256_srai_epi32(
      _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(high, low_bits), low), half),
      weight_bits);
}

// Two rows at once, one in each half of the vectors: a 16-byte load has the 4 pixels of a group of
// weights, which a shuffle puts side by side in pairs, channel by channel.
WEFT_AVX2 void along_rows(const std::uint8_t* upper, const std::uint8_t* lower,
                          const Weights& weights, std::int64_t out, std::uint8_t* to_upper,
                          std::uint8_t* to_lower) {
  const __m256i first_pair = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
  const __m256i second_pair = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1));
  const std::int16_t* high = weights.high.data();
  const std::int16_t* low = weights.low.data();
  for (std::int64_t i = 0; i < out; ++i) {
    const std::int64_t at = std::int64_t{weights.first[i]} * 3;
    __m256i h = _mm256_setzero_si256(), l = _mm256_setzero_si256();
    for (std::int64_t k = 0; k < weights.taps; k += group, high += group, low += group) {
      const __m256i pixels = _mm256_inserti128_si256(
          _mm256_castsi128_si256(
              _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper + at + 3 * k))),
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(lower + at + 3 * k)), 1);
      const __m256i a = _mm256_shuffle_epi8(pixels, first_pair);
      const __m256i b = _mm256_shuffle_epi8(pixels, second_pair);
      std::int32_t w[4];
      std::memcpy(w, high, 8);
      std::memcpy(w + 2, low, 8);
      h = _mm256_add_epi32(h, _mm256_add_epi32(_mm256_madd_epi16(a, _mm256_set1_epi32(w[0])),
                                               _mm256_madd_epi16(b, _mm256_set1_epi32(w[1]))));
      l = _mm256_add_epi32(l, _mm256_add_epi32(_mm256_madd_epi16(a, _mm256_set1_epi32(w[2])),
                                               _mm256_madd_epi16(b, _mm256_set1_epi32(w[3]))));
    }
    __m256i sum = combine(h, l);
    sum = _mm256_packs_epi32(sum, sum);
    sum = _mm256_packus_epi16(sum, sum);
    const std::int32_t above = _mm256_extract_epi32(sum, 0), below = _mm256_extract_epi32(sum, 4);
    // The fourth byte is the next pixel's first, written after it; a row's last has none.
    const std::size_t bytes = i + 1 < out ? 4 : 3;
    if (bytes == 4) {
      std::memcpy(to_upper + 3 * i, &above, 4);
      std::memcpy(to_lower + 3 * i, &below, 4);
    } else {
      std::memcpy(to_upper + 3 * i, &above, 3);
      std::memcpy(to_lower + 3 * i, &below, 3);
    }
  }
}

constexpr std::int64_t block = 32;

// A block of bytes of a row. The partner of an odd last row is the row itself, with weight 0.
WEFT_AVX2 inline void across_block(const std::uint8_t* rows, std::int64_t stride,
                                   const std::int16_t* high, const std::int16_t* low,
                                   std::int64_t count, std::uint8_t* to) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i h[4] = {zero, zero, zero, zero}, l[4] = {zero, zero, zero, zero};
  for (std::int64_t k = 0; k < count; k += 2, rows += 2 * stride) {
    std::int32_t wh = 0, wl = 0;
    std::memcpy(&wh, high + k, 4);
    std::memcpy(&wl, low + k, 4);
    const __m256i vh = _mm256_set1_epi32(wh), vl = _mm256_set1_epi32(wl);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows));
    const __m256i b =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + (k + 1 < count ? stride : 0)));
    const __m256i even = _mm256_unpacklo_epi8(a, b), odd = _mm256_unpackhi_epi8(a, b);
    const __m256i pairs[4] = {_mm256_unpacklo_epi8(even, zero), _mm256_unpackhi_epi8(even, zero),
                              _mm256_unpacklo_epi8(odd, zero), _mm256_unpackhi_epi8(odd, zero)};
    for (int i = 0; i < 4; ++i) {
      h[i] = _mm256_add_epi32(h[i], _mm256_madd_epi16(pairs[i], vh));
      l[i] = _mm256_add_epi32(l[i], _mm256_madd_epi16(pairs[i], vl));
    }
  }
  const __m256i first = _mm256_packs_epi32(combine(h[0], l[0]), combine(h[1], l[1]));
  const __m256i second = _mm256_packs_epi32(combine(h[2], l[2]), combine(h[3], l[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_packus_epi16(first, second));
}

WEFT_AVX2 void across_rows(const std::uint8_t* rows, std::int64_t stride, const std::int16_t* high,
                           const std::int16_t* low, std::int64_t count, std::int64_t bytes,
                           std::uint8_t* to) {
  if (bytes < block) return across_plain(rows, stride, high, low, count, bytes, to);
  for (std::int64_t x = 0; x + block <= bytes; x += block)
    across_block(rows + x, stride, high, low, count, to + x);
  // The last block overlaps the one before it.
  if (bytes % block != 0) {
    const std::int64_t x = bytes - block;
    across_block(rows + x, stride, high, low, count, to + x);
  }
}

#else

void along_rows(const std::uint8_t* upper, const std::uint8_t* lower, const Weights& weights,
                std::int64_t out, std::uint8_t* to_upper, std::uint8_t* to_lower) {
  for (std::int64_t i = 0; i < out; ++i) {
    const std::int64_t at = std::int64_t{weights.first[i]} * 3;
    std::int32_t above[3] = {half_unit, half_unit, half_unit},
                 below[3] = {half_unit, half_unit, half_unit};
    for (std::int64_t k = 0; k < weights.taps; ++k) {
      const std::int64_t tap = i * weights.taps + k;
      const std::int32_t weight = whole_weight(weights.high[tap], weights.low[tap]);
      for (int c = 0; c < 3; ++c) {
        above[c] += upper[at + 3 * k + c] * weight;
        below[c] += lower[at + 3 * k + c] * weight;
      }
    }
    for (int c = 0; c < 3; ++c) {
      to_upper[3 * i + c] = level(above[c]);
      to_lower[3 * i + c] = level(below[c]);
    }
  }
}

void across_rows(const std::uint8_t* rows, std::int64_t stride, const std::int16_t* high,
                 const std::int16_t* low, std::int64_t count, std::int64_t bytes,
                 std::uint8_t* to) {
  across_plain(rows, stride, high, low, count, bytes, to);
}

#endif

// The rows as they are to rows of the axis' wanted columns; rows of `to` are `to_stride` bytes
// apart.
void resize_rows(const RgbView& in, const Axis& columns, PillowFilter filter, std::uint8_t* to,
                 std::int64_t to_stride) {
  const Weights weights = make_weights(columns, filter);
  // Copies of the rows with room behind them, for loads that go beyond their last pixel.
  const auto room = static_cast<std::size_t>(in.width * 3 + 3 * weights.taps + 16);
  std::vector<std::uint8_t> copies(2 * room);
  for (std::int64_t y = 0; y < in.height; y += 2) {
    const bool two = y + 1 < in.height;
    std::memcpy(copies.data(), in.rgb + y * in.stride, static_cast<std::size_t>(in.width * 3));
    if (two)
      std::memcpy(copies.data() + room, in.rgb + (y + 1) * in.stride,
                  static_cast<std::size_t>(in.width * 3));
    std::uint8_t* const upper = to + y * to_stride;
    along_rows(copies.data(), copies.data() + (two ? room : 0), weights, columns.count, upper,
               two ? upper + to_stride : upper);
  }
}

// The rows that `weights` wants of the axis, from rows [axis.in] of `in`, of which in.rgb has those
// from `begin` on.
void resize_columns(const RgbView& in, std::int64_t begin, const Axis& rows, const Weights& weights,
                    std::uint8_t* to, std::int64_t to_stride) {
  for (std::int64_t y = 0; y < rows.count; ++y) {
    const std::int64_t first = weights.first[y];
    const std::int16_t* high = weights.high.data() + y * weights.taps;
    const std::int16_t* low = weights.low.data() + y * weights.taps;
    // Rows of weight 0 may not exist.
    std::int64_t count = std::min(weights.taps, rows.in - first);
    while (count > 1 && high[count - 1] == 0 && low[count - 1] == 0) --count;
    across_rows(in.rgb + (first - begin) * in.stride, in.stride, high, low, count, in.width * 3,
                to + y * to_stride);
  }
}

}  // namespace

void pillow_resize(const RgbView& in, std::int64_t height, std::int64_t width, PillowFilter filter,
                   std::uint8_t* out, std::int64_t out_stride) {
  pillow_resize_window(in, height, width, filter, {0, 0, height, width}, out, out_stride);
}

void pillow_resize_window(const RgbView& in, std::int64_t height, std::int64_t width,
                          PillowFilter filter, const PixelWindow& window, std::uint8_t* out,
                          std::int64_t out_stride) {
  WEFT_ASSERT(in.height > 0 && in.width > 0);
  WEFT_ASSERT(window.top >= 0 && window.height > 0 && window.top + window.height <= height);
  WEFT_ASSERT(window.left >= 0 && window.width > 0 && window.left + window.width <= width);
  const Axis rows = {in.height, height, window.top, window.height},
             columns = {in.width, width, window.left, window.width};
  // The rows of `in` that make the window's: all that the passes look at.
  Weights weights;
  std::int64_t begin = rows.begin, end = rows.begin + rows.count;
  if (rows.scales()) {
    weights = make_weights(rows, filter);
    begin = weights.first.front();
    end = std::min<std::int64_t>(rows.in, weights.first.back() + weights.taps);
  }
  RgbView from = {in.rgb + begin * in.stride, end - begin, in.width, in.stride};
  std::vector<std::uint8_t> between;
  if (!columns.scales()) {
    from.rgb += window.left * 3;
    from.width = window.width;
  } else if (!rows.scales()) {
    return resize_rows(from, columns, filter, out, out_stride);
  } else {
    between.resize(from.height * window.width * 3);
    resize_rows(from, columns, filter, between.data(), window.width * 3);
    from = {between.data(), from.height, window.width, window.width * 3};
  }
  if (rows.scales()) return resize_columns(from, begin, rows, weights, out, out_stride);
  for (std::int64_t y = 0; y < window.height; ++y)
    std::memcpy(out + y * out_stride, from.rgb + y * from.stride,
                static_cast<std::size_t>(window.width * 3));
}

void bicubic_resize(const RgbView& in, std::int64_t height, std::int64_t width, float* out) {
  // The four samples around output sample i of `to`, and their weights.
  struct Taps {
    std::int64_t at[4];
    float weight[4];
  };
  const auto taps = [](std::int64_t from, std::int64_t to) {
    constexpr double a = -0.75;
    std::vector<Taps> all(static_cast<std::size_t>(to));
    for (std::int64_t i = 0; i < to; ++i) {
      const double source =
          (static_cast<double>(i) + 0.5) * static_cast<double>(from) / static_cast<double>(to) -
          0.5;
      const double low = std::floor(source), t = source - low;
      for (int k = 0; k < 4; ++k) {
        const double x = std::abs(t - (k - 1));
        const double weight = x <= 1 ? ((a + 2) * x - (a + 3)) * x * x + 1
                                     : ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
        Taps& of = all[static_cast<std::size_t>(i)];
        of.at[k] = std::clamp<std::int64_t>(static_cast<std::int64_t>(low) + k - 1, 0, from - 1);
        of.weight[k] = static_cast<float>(weight);
      }
    }
    return all;
  };
  const std::vector<Taps> columns = taps(in.width, width), rows = taps(in.height, height);
  std::vector<float> wide(static_cast<std::size_t>(in.height * width * 3));
  for (std::int64_t y = 0; y < in.height; ++y)
    for (std::int64_t x = 0; x < width * 3; ++x) {
      const Taps& of = columns[static_cast<std::size_t>(x / 3)];
      float sum = 0;
      for (int k = 0; k < 4; ++k)
        sum += of.weight[k] *
               (static_cast<float>(in.rgb[y * in.stride + of.at[k] * 3 + x % 3]) / 127.5f - 1);
      wide[static_cast<std::size_t>(y * width * 3 + x)] = sum;
    }
  for (std::int64_t y = 0; y < height; ++y) {
    const Taps& of = rows[static_cast<std::size_t>(y)];
    for (std::int64_t x = 0; x < width * 3; ++x) {
      float sum = 0;
      for (int k = 0; k < 4; ++k)
        sum += of.weight[k] * wide[static_cast<std::size_t>(of.at[k] * width * 3 + x)];
      out[y * width * 3 + x] = sum;
    }
  }
}

std::vector<std::int32_t> nearest_samples(std::int64_t in, std::int64_t out) {
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  std::vector<std::int32_t> samples(out);
  double at = scale * 0.5;
  for (std::int32_t& s : samples) {
    s = static_cast<std::int32_t>(std::min<std::int64_t>(static_cast<std::int64_t>(at), in - 1));
    at += scale;
  }
  return samples;
}

void nearest_resize(const std::uint8_t* in, std::int64_t in_height, std::int64_t in_width,
                    std::int64_t height, std::int64_t width, std::uint8_t* out) {
  WEFT_ASSERT(in_height > 0 && in_width > 0 && height > 0 && width > 0);
  const auto rows = nearest_samples(in_height, height), columns = nearest_samples(in_width, width);
  for (const std::int32_t y : rows) {
    const std::uint8_t* row = in + y * in_width;
    for (const std::int32_t x : columns) *out++ = row[x];
  }
}

}  // namespace weft
