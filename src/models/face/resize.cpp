// cv2.resize's arithmetic: weights of 11 bits, products of the second direction cut to 16.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/face/crop.h"

namespace weft {
namespace {

struct Tap {
  std::int64_t first = 0, second = 0;
  std::int32_t a = 0, b = 0;  // their weights, in 2048ths
};

// Beyond the picture the outermost pixel counts alone (`held`), or takes the place of the one that
// is missing, which is the same but for the rounding.
std::vector<Tap> taps(std::int64_t in, std::int64_t out, bool held) {
  const double scale = 1.0 / (static_cast<double>(out) / static_cast<double>(in));
  std::vector<Tap> all(static_cast<std::size_t>(out));
  for (std::int64_t i = 0; i < out; ++i) {
    const auto at = static_cast<float>((static_cast<double>(i) + 0.5) * scale - 0.5);
    auto first = static_cast<std::int64_t>(std::floor(at));
    float share = at - static_cast<float>(first);
    if (held && (first < 0 || first >= in - 1)) {
      first = std::clamp<std::int64_t>(first, 0, in - 1);
      share = 0;
    }
    all[static_cast<std::size_t>(i)] = {
        std::clamp<std::int64_t>(first, 0, in - 1), std::clamp<std::int64_t>(first + 1, 0, in - 1),
        static_cast<std::int32_t>(std::nearbyint((1 - share) * 2048)),
        static_cast<std::int32_t>(std::nearbyint(share * 2048))};
  }
  return all;
}

void halve(const ImageFile& in, ImageFile& out) {
  const std::int64_t stride = 3 * in.width;
  std::uint8_t* to = out.values.data();
  for (std::int64_t y = 0; y < out.height; ++y)
    for (std::int64_t x = 0; x < out.width; ++x)
      for (std::int64_t c = 0; c < 3; ++c) {
        const std::uint8_t* p = in.values.data() + 2 * y * stride + 6 * x + c;
        *to++ = static_cast<std::uint8_t>((p[0] + p[3] + p[stride] + p[stride + 3] + 2) >> 2);
      }
}

}  // namespace

ImageFile resize_bilinear(const ImageFile& in, std::int64_t height, std::int64_t width) {
  WEFT_ASSERT(in.height > 0 && in.width > 0 && height > 0 && width > 0);
  if (in.height == height && in.width == width) return in;
  ImageFile out{height, width, {}};
  out.values.resize(static_cast<std::size_t>(3 * height * width));
  if (in.height == 2 * height && in.width == 2 * width) {
    halve(in, out);
    return out;
  }
  const std::vector<Tap> columns = taps(in.width, width, true),
                         rows = taps(in.height, height, false);
  // Two rows of the picture at the wanted width, made once each as the rows go by.
  const auto length = static_cast<std::size_t>(3 * width);
  std::array<std::vector<std::int32_t>, 2> made = {std::vector<std::int32_t>(length),
                                                   std::vector<std::int32_t>(length)};
  std::array<std::int64_t, 2> made_of = {-1, -1};
  const auto row = [&](std::int64_t y, std::int64_t kept) -> const std::int32_t* {
    for (std::size_t k = 0; k < 2; ++k)
      if (made_of[k] == y) return made[k].data();
    const std::size_t k = made_of[0] == kept ? 1 : 0;
    made_of[k] = y;
    std::int32_t* to = made[k].data();
    const std::uint8_t* from = in.values.data() + 3 * y * in.width;
    for (const Tap& t : columns)
      for (std::int64_t c = 0; c < 3; ++c)
        *to++ = from[3 * t.first + c] * t.a + from[3 * t.second + c] * t.b;
    return made[k].data();
  };
  std::uint8_t* to = out.values.data();
  for (const Tap& t : rows) {
    const std::int32_t* upper = row(t.first, t.second);
    const std::int32_t* lower = row(t.second, t.first);
    for (std::size_t i = 0; i < length; ++i)
      *to++ = static_cast<std::uint8_t>(
          (((t.a * (upper[i] >> 4)) >> 16) + ((t.b * (lower[i] >> 4)) >> 16) + 2) >> 2);
  }
  return out;
}

}  // namespace weft
