#include "media/yuv_rgb.h"

#include <algorithm>
#include <cstddef>

#ifdef __x86_64__
#include <immintrin.h>
#endif

extern "C" {
#include <libavutil/frame.h>
#include <libswscale/swscale.h>
}

#include "core/error.h"

namespace weft {
namespace {

#ifdef __x86_64__
#define WEFT_AVX2 __attribute__((target("avx2")))
#else
#define WEFT_AVX2
#endif

constexpr std::int64_t pixels_at_once = 32;  // of a row

bool is_full_range(const AVFrame& frame) {
  if (frame.color_range != AVCOL_RANGE_UNSPECIFIED) return frame.color_range == AVCOL_RANGE_JPEG;
  return frame.format == AV_PIX_FMT_YUVJ420P;
}

YuvMatrix matrix_of(const AVFrame& frame) {
  // libswscale keeps the four chroma factors of limited range as multiples of 2^-16.
  const int space = frame.colorspace == AVCOL_SPC_UNSPECIFIED ? SWS_CS_DEFAULT : frame.colorspace;
  const int* of_chroma = sws_getCoefficients(space);
  const bool full = is_full_range(frame);
  const auto rounded = [](std::int64_t x) { return static_cast<std::int16_t>((x + 4) >> 3); };
  const auto chroma = [&](std::int64_t x) { return rounded(full ? x * 224 / 255 : x); };
  return {rounded(full ? 1 << 16 : (1 << 16) * 255 / 219),
          chroma(of_chroma[0]),
          chroma(of_chroma[1]),
          chroma(-of_chroma[2]),
          chroma(-of_chroma[3]),
          static_cast<std::int16_t>(full ? 0 : 16)};
}

// Twice the chroma between two rows: 0 to 510, with one more value at each end, which repeats the
// edge.
WEFT_AVX2 void between_rows(const std::uint8_t* upper, const std::uint8_t* lower,
                            std::int64_t count, std::int16_t* out) {
  std::int64_t k = 0;
#ifdef __x86_64__
  for (; k + 16 <= count; k += 16) {
    const __m256i a =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(upper + k)));
    const __m256i b =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lower + k)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 1 + k), _mm256_add_epi16(a, b));
  }
#endif
  for (; k < count; ++k) out[1 + k] = static_cast<std::int16_t>(upper[k] + lower[k]);
  out[0] = out[1];
  out[1 + count] = out[count];
}

#ifdef __x86_64__

// Eight times the chroma at 32 pixels, without its 128: pixels 0 to 7 and 16 to 23, and the others,
// which is how the instructions below want them.
struct Chroma {
  __m256i low, high;
};
WEFT_AVX2 inline Chroma along_row(const std::int16_t* at) {  // at[1] is under the first two pixels
  const __m256i here = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 1));
  const __m256i left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  const __m256i right = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 2));
  const __m256i three =
      _mm256_sub_epi16(_mm256_add_epi16(here, _mm256_slli_epi16(here, 1)), _mm256_set1_epi16(1024));
  const __m256i even = _mm256_add_epi16(three, left), odd = _mm256_add_epi16(three, right);
  return {_mm256_unpacklo_epi16(even, odd), _mm256_unpackhi_epi16(even, odd)};
}

WEFT_AVX2 inline __m256i pair(std::int16_t first, std::int16_t second) {
  return _mm256_set1_epi32(static_cast<std::uint16_t>(first) |
                           (static_cast<std::uint32_t>(static_cast<std::uint16_t>(second)) << 16));
}

// 2^16 times a value to 0 ... 255. libswscale's sums have 6 more bits and wrap around at 2^31:
// colours far outside of RGB come out dark, here as there.
WEFT_AVX2 inline __m256i to_level(__m256i sum) {
  const __m256i rounded = _mm256_add_epi32(sum, _mm256_set1_epi32(1 << 15));
  return _mm256_srai_epi32(_mm256_slli_epi32(rounded, 6), 22);
}

WEFT_AVX2 inline __m256i spread(__m256i v, __m128i places) {
  return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(places));
}

// Three vectors of 32 bytes to 32 times three.
WEFT_AVX2 inline void store_rgb(__m256i r, __m256i g, __m256i b, std::uint8_t* to) {
  constexpr char no = -1;
  const __m256i first = _mm256_or_si256(
      _mm256_or_si256(
          spread(r, _mm_setr_epi8(0, no, no, 1, no, no, 2, no, no, 3, no, no, 4, no, no, 5)),
          spread(g, _mm_setr_epi8(no, 0, no, no, 1, no, no, 2, no, no, 3, no, no, 4, no, no))),
      spread(b, _mm_setr_epi8(no, no, 0, no, no, 1, no, no, 2, no, no, 3, no, no, 4, no)));
  const __m256i second = _mm256_or_si256(
      _mm256_or_si256(
          spread(r, _mm_setr_epi8(no, no, 6, no, no, 7, no, no, 8, no, no, 9, no, no, 10, no)),
          spread(g, _mm_setr_epi8(5, no, no, 6, no, no, 7, no, no, 8, no, no, 9, no, no, 10))),
      spread(b, _mm_setr_epi8(no, 5, no, no, 6, no, no, 7, no, no, 8, no, no, 9, no, no)));
  const __m256i third = _mm256_or_si256(
      _mm256_or_si256(
          spread(r, _mm_setr_epi8(no, 11, no, no, 12, no, no, 13, no, no, 14, no, no, 15, no, no)),
          spread(g, _mm_setr_epi8(no, no, 11, no, no, 12, no, no, 13, no, no, 14, no, no, 15, no))),
      spread(b, _mm_setr_epi8(10, no, no, 11, no, no, 12, no, no, 13, no, no, 14, no, no, 15)));
  auto* out = reinterpret_cast<__m256i*>(to);
  _mm256_storeu_si256(out, _mm256_permute2x128_si256(first, second, 0x20));
  _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(third, first, 0x30));
  _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(second, third, 0x31));
}

// 32 pixels. A pair of 16-bit factors and one instruction make luma and one chroma of a value.
WEFT_AVX2 inline void convert_block(const std::uint8_t* luma, const std::int16_t* u,
                                    const std::int16_t* v, const YuvMatrix& m, std::uint8_t* to) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i black = _mm256_set1_epi16(static_cast<std::int16_t>(8 * m.black));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(luma));
  const Chroma us = along_row(u), vs = along_row(v);
  const __m256i red = pair(m.luma, m.red), blue = pair(m.luma, m.blue),
                green = pair(m.luma, m.green_u), green_v = pair(0, m.green_v);
  __m256i r[2], g[2], b[2];
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = half == 0 ? _mm256_unpacklo_epi8(y, zero) : _mm256_unpackhi_epi8(y, zero);
    const __m256i ys = _mm256_sub_epi16(_mm256_slli_epi16(bytes, 3), black);
    const __m256i uh = half == 0 ? us.low : us.high, vh = half == 0 ? vs.low : vs.high;
    const __m256i yu[2] = {_mm256_unpacklo_epi16(ys, uh), _mm256_unpackhi_epi16(ys, uh)};
    const __m256i yv[2] = {_mm256_unpacklo_epi16(ys, vh), _mm256_unpackhi_epi16(ys, vh)};
    __m256i rs[2], gs[2], bs[2];
    for (int i = 0; i < 2; ++i) {
      rs[i] = to_level(_mm256_madd_epi16(yv[i], red));
      gs[i] = to_level(
          _mm256_add_epi32(_mm256_madd_epi16(yu[i], green), _mm256_madd_epi16(yv[i], green_v)));
      bs[i] = to_level(_mm256_madd_epi16(yu[i], blue));
    }
    r[half] = _mm256_packs_epi32(rs[0], rs[1]);
    g[half] = _mm256_packs_epi32(gs[0], gs[1]);
    b[half] = _mm256_packs_epi32(bs[0], bs[1]);
  }
  store_rgb(_mm256_packus_epi16(r[0], r[1]), _mm256_packus_epi16(g[0], g[1]),
            _mm256_packus_epi16(b[0], b[1]), to);
}

WEFT_AVX2 void convert_row(const std::uint8_t* luma, const std::int16_t* u, const std::int16_t* v,
                           std::int64_t width, const YuvMatrix& m, std::uint8_t* to) {
  for (std::int64_t x = 0; x + pixels_at_once <= width; x += pixels_at_once)
    convert_block(luma + x, u + x / 2, v + x / 2, m, to + 3 * x);
  if (width % pixels_at_once != 0) {  // the last block overlaps the one before it
    const std::int64_t x = width - pixels_at_once;
    convert_block(luma + x, u + x / 2, v + x / 2, m, to + 3 * x);
  }
}

#else

// The same pixel by pixel.
std::uint8_t to_level(std::uint32_t sum) {
  const auto rounded = static_cast<std::int32_t>((sum + (1u << 15)) << 6);
  return static_cast<std::uint8_t>(std::clamp(rounded >> 22, 0, 255));
}

void convert_row(const std::uint8_t* luma, const std::int16_t* u, const std::int16_t* v,
                 std::int64_t width, const YuvMatrix& m, std::uint8_t* to) {
  for (std::int64_t x = 0; x < width; ++x) {
    // at[1] is under pixels 2 k and 2 k + 1; the nearer neighbour counts too.
    const auto chroma = [&](const std::int16_t* at) {
      return 3 * at[1] - 1024 + at[x % 2 == 0 ? 0 : 2];
    };
    const int y = 8 * (luma[x] - m.black), cu = chroma(u + x / 2), cv = chroma(v + x / 2);
    const auto sum = [&](int a, int b) { return static_cast<std::uint32_t>(y * m.luma + a + b); };
    to[3 * x] = to_level(sum(cv * m.red, 0));
    to[3 * x + 1] = to_level(sum(cu * m.green_u, cv * m.green_v));
    to[3 * x + 2] = to_level(sum(cu * m.blue, 0));
  }
}

#endif

}  // namespace

bool is_plain_yuv(const AVFrame& frame) {
  const bool limited = frame.format == AV_PIX_FMT_YUV420P,
             full = frame.format == AV_PIX_FMT_YUVJ420P;
  if (!limited && !(full && frame.color_range != AVCOL_RANGE_MPEG)) return false;
  if (frame.width % 2 != 0 || frame.height % 2 != 0) return false;
  if (frame.width < pixels_at_once || frame.height < pixels_at_once) return false;
  switch (frame.colorspace) {
    case AVCOL_SPC_UNSPECIFIED:
    case AVCOL_SPC_BT709:
    case AVCOL_SPC_BT470BG:
    case AVCOL_SPC_SMPTE170M:
    case AVCOL_SPC_SMPTE240M:
    case AVCOL_SPC_BT2020_NCL:
      return true;
    default:
      return false;
  }
}

void YuvRows::set(const AVFrame& frame) {
  WEFT_ASSERT(is_plain_yuv(frame));
  frame_ = &frame;
  matrix_ = matrix_of(frame);
  u_.resize(static_cast<std::size_t>(frame.width / 2 + 2));
  v_.resize(u_.size());
}

void YuvRows::row(std::int64_t y, std::uint8_t* out) {
  // The last row is one with two rows of chroma, too.
  const bool two = y % 2 == 0 || y == frame_->height - 1;
  const std::int64_t lower = y / 2, upper = two ? std::max<std::int64_t>(lower - 1, 0) : lower;
  const auto at = [&](int plane, std::int64_t row) {
    return frame_->data[plane] + row * frame_->linesize[plane];
  };
  between_rows(at(1, upper), at(1, lower), frame_->width / 2, u_.data());
  between_rows(at(2, upper), at(2, lower), frame_->width / 2, v_.data());
  convert_row(at(0, y), u_.data(), v_.data(), frame_->width, matrix_, out);
}

}  // namespace weft
