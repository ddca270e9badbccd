// Pasting against the blending equation as it is written down, solved directly, and what holds for
// any blending: `weft_probe sadtalker_paste` compares with OpenCV's results.
#include "models/sadtalker/face/paste.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/philox.h"

namespace weft {
namespace {

// Noise on a slope: neither flat nor without edges.
ImageFile picture_of(std::int64_t height, std::int64_t width, std::uint64_t seed) {
  const Philox random(seed, Purpose::init, 0, 0);
  ImageFile picture{height, width, {}};
  for (std::int64_t i = 0; i < height * width * 3; ++i) {
    const double slope =
        40.0 + 120.0 * static_cast<double>(i % (width * 3)) / static_cast<double>(width * 3);
    const double value =
        slope + 25.0 * static_cast<double>(random.normal(static_cast<std::uint32_t>(i)));
    picture.values.push_back(static_cast<std::uint8_t>(std::clamp(value, 0.0, 255.0)));
  }
  return picture;
}

// The blended values of the box, in f64, by conjugate gradients: no transform, and no split of the
// unknown.
std::vector<double> blended(const ImageFile& picture, const ImageFile& patch, const PixelBox& box) {
  const std::int64_t w = box.width() - 2, h = box.height() - 2;
  const ImageFile ground = cut_box(picture, box);
  std::vector<double> result(ground.values.begin(), ground.values.end());
  for (std::int64_t c = 0; c < 3; ++c) {
    const auto at = [&](const ImageFile& image, std::int64_t y, std::int64_t x) {
      return static_cast<double>(image.values[((y + 1) * image.width + x + 1) * 3 + c]);
    };
    const auto gradient = [&](std::int64_t y, std::int64_t x, std::int64_t dy, std::int64_t dx) {
      const bool inside = y >= 3 && y < h - 3 && x >= 3 && x < w - 3;
      const ImageFile& image = inside ? patch : ground;
      return at(image, y + dy, x + dx) - at(image, y, x);
    };
    const std::int64_t n = w - 2, m = h - 2;
    const auto size = static_cast<std::size_t>(n * m);
    std::vector<double> b(size), u(size, 0.0);
    const auto minus_laplace = [&](const std::vector<double>& v) {
      std::vector<double> to(size);
      for (std::int64_t y = 0; y < m; ++y)
        for (std::int64_t x = 0; x < n; ++x) {
          double sum = 4 * v[y * n + x];
          if (x > 0) sum -= v[y * n + x - 1];
          if (x + 1 < n) sum -= v[y * n + x + 1];
          if (y > 0) sum -= v[(y - 1) * n + x];
          if (y + 1 < m) sum -= v[(y + 1) * n + x];
          to[y * n + x] = sum;
        }
      return to;
    };
    for (std::int64_t y = 1; y <= m; ++y)
      for (std::int64_t x = 1; x <= n; ++x) {
        double value = gradient(y, x - 1, 0, 1) - gradient(y, x, 0, 1) + gradient(y - 1, x, 1, 0) -
                       gradient(y, x, 1, 0);
        if (x == 1) value += at(ground, y, 0);
        if (x == n) value += at(ground, y, n + 1);
        if (y == 1) value += at(ground, 0, x);
        if (y == m) value += at(ground, m + 1, x);
        b[(y - 1) * n + x - 1] = value;
      }
    const auto dot = [&](const std::vector<double>& p, const std::vector<double>& q) {
      double sum = 0;
      for (std::size_t i = 0; i < size; ++i) sum += p[i] * q[i];
      return sum;
    };
    std::vector<double> r = b, p = b;
    for (double squares = dot(r, r); squares > 1e-18;) {
      const std::vector<double> q = minus_laplace(p);
      const double step = squares / dot(p, q);
      for (std::size_t i = 0; i < size; ++i) u[i] += step * p[i], r[i] -= step * q[i];
      const double next = dot(r, r);
      for (std::size_t i = 0; i < size; ++i) p[i] = r[i] + next / squares * p[i];
      squares = next;
    }
    for (std::int64_t y = 0; y < m; ++y)
      for (std::int64_t x = 0; x < n; ++x)
        result[((y + 2) * box.width() + x + 2) * 3 + c] = u[y * n + x];
  }
  return result;
}

TEST(Pasting, SolvesTheBlendingEquation) {
  const ImageFile picture = picture_of(70, 90, 1);
  // Odd and even sides, prime numbers, the least side, the whole picture, a wide and a high box.
  for (const PixelBox& box : {PixelBox{20, 10, 61, 52},
                              {3, 2, 12, 11},
                              {0, 0, 90, 70},
                              {7, 30, 88, 40},
                              {40, 1, 50, 69},
                              {15, 20, 30, 36}}) {
    const ImageFile frame = picture_of(box.height(), box.width(), 2);
    const std::vector<double> wanted = blended(picture, frame, box);
    const ImageFile pasted = Pasting(picture, box).paste(frame);
    const ImageFile inside = cut_box(pasted, box);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double value = std::clamp(wanted[i], 0.0, 255.0);
      // Truncated; next to a whole number noise decides.
      EXPECT_GE(inside.values[i], std::floor(value - 2e-3)) << i;
      EXPECT_LE(inside.values[i], std::floor(value + 2e-3)) << i;
    }
    ImageFile outside = pasted;  // all but the box is the picture's
    for (std::int64_t y = box.y1; y < box.y2; ++y)
      std::copy_n(picture.values.begin() + (y * picture.width + box.x1) * 3, box.width() * 3,
                  outside.values.begin() + (y * picture.width + box.x1) * 3);
    EXPECT_EQ(outside.values, picture.values);
  }
}

TEST(Pasting, ThePicturesOwnFaceChangesNothing) {
  const ImageFile picture = picture_of(48, 64, 3);
  const PixelBox box{11, 5, 50, 40};
  const ImageFile same = Pasting(picture, box).paste(cut_box(picture, box));
  EXPECT_EQ(same.values, picture.values);
}

TEST(Pasting, BrightnessComesFromThePicture) {
  const ImageFile picture = picture_of(48, 64, 4);
  const PixelBox box{11, 5, 50, 40};
  ImageFile frame = cut_box(picture, box);
  for (std::uint8_t& v : frame.values) v = static_cast<std::uint8_t>(v / 2 + 20);
  ImageFile brighter = frame;
  for (std::uint8_t& v : brighter.values) v = static_cast<std::uint8_t>(v + 60);
  const Pasting pasting(picture, box);
  const ImageFile a = pasting.paste(frame), b = pasting.paste(brighter);
  for (std::size_t i = 0; i < a.values.size(); ++i) EXPECT_NEAR(a.values[i], b.values[i], 1);
  EXPECT_NE(a.values, picture.values);
}

TEST(Pasting, FramesOfAnySizeAreResized) {
  const ImageFile picture = picture_of(60, 60, 5);
  const Pasting pasting(picture, {10, 12, 50, 43});
  const ImageFile frame = picture_of(64, 32, 6);
  const ImageFile resized = pasting.resized(frame);
  EXPECT_EQ(resized.height, 31);
  EXPECT_EQ(resized.width, 40);
  EXPECT_EQ(pasting.paste(frame).values, pasting.paste(resized).values);
}

TEST(Pasting, BoxesThatCannotBeUsed) {
  const ImageFile picture = picture_of(40, 50, 7);
  const auto fault = [&](const PixelBox& box) {
    try {
      const Pasting pasting(picture, box);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_FALSE(e.hint().empty());
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(fault({0, 0, 50, 40}), "");
  EXPECT_EQ(fault({41, 31, 50, 40}), "");
  for (const PixelBox& box : {PixelBox{-1, 0, 20, 20},
                              {0, -5, 20, 20},
                              {30, 10, 51, 30},
                              {10, 10, 30, 41},
                              {20, 10, 20, 30},
                              {30, 10, 20, 30}})
    EXPECT_NE(fault(box).find("of a picture of 50x40"), std::string::npos) << fault(box);
  for (const PixelBox& box : {PixelBox{10, 10, 18, 30}, {10, 10, 30, 18}})
    EXPECT_NE(fault(box).find("too small"), std::string::npos) << fault(box);
}

TEST(SineTransform, IsItsDefinitionAndItsInverse) {
  for (const std::int64_t n : {1, 2, 3, 5, 16, 31, 32, 33, 66, 100}) {
    const SineTransform transform(n);
    constexpr std::int64_t rows = 2 * SineTransform::rows_at_once;
    const Philox random(8, Purpose::init, 0, static_cast<std::uint64_t>(n));
    std::vector<float> x(rows * n), y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = random.normal(static_cast<std::uint32_t>(i));
    transform.run(x.data(), rows, y.data());
    std::vector<bool> seen(n + 1);
    for (std::int64_t k = 0; k < n; ++k)
      seen.at(static_cast<std::size_t>(transform.number(k))) = true;
    EXPECT_EQ(std::count(seen.begin() + 1, seen.end(), true), n);
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t i = 0; i < n; ++i) {
        double sum = 0;
        for (std::int64_t k = 0; k < n; ++k)
          sum += static_cast<double>(x[r * n + k]) *
                 std::sin(M_PI * static_cast<double>(transform.number(k) * (i + 1)) /
                          static_cast<double>(n + 1));
        EXPECT_NEAR(y[r * n + i], sum, 1e-5 * std::sqrt(static_cast<double>(n)) + 1e-5) << n;
      }
    // Back, its coefficients in their order.
    std::vector<float> ordered(y.size()), back(y.size());
    for (std::int64_t i = 0; i < rows * n; ++i)
      ordered[i] = y[i / n * n + transform.number(i % n) - 1];
    transform.run(ordered.data(), rows, back.data());
    for (std::int64_t i = 0; i < rows * n; ++i)
      EXPECT_NEAR(back[i / n * n + transform.number(i % n) - 1] * 2.0 / static_cast<double>(n + 1),
                  x[i], 1e-4);
  }
}

}  // namespace
}  // namespace weft
