#include "media/similarity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/philox.h"

namespace weft {
namespace {

std::vector<std::uint8_t> noise(std::size_t count, std::uint64_t stream) {
  const Philox random(3, Purpose::synthetic, 0, stream);
  std::vector<std::uint8_t> v(count);
  for (std::size_t i = 0; i < count; ++i)
    v[i] = static_cast<std::uint8_t>(random.below(static_cast<std::uint32_t>(i), 256));
  return v;
}

// The formula window by window, as the paper has it.
double ssim_by_windows(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b,
                       std::int64_t H, std::int64_t W) {
  double total = 0, windows = 0;
  for (std::int64_t c = 0; c < 3; ++c)
    for (std::int64_t y = 0; y + 7 <= H; ++y)
      for (std::int64_t x = 0; x + 7 <= W; ++x, ++windows) {
        double ma = 0, mb = 0, va = 0, vb = 0, vab = 0;
        const auto each = [&](const auto& f) {
          for (std::int64_t i = 0; i < 49; ++i) {
            const auto at = static_cast<std::size_t>(((y + i / 7) * W + x + i % 7) * 3 + c);
            f(double(a[at]), double(b[at]));
          }
        };
        each([&](double p, double q) { ma += p / 49, mb += q / 49; });
        each([&](double p, double q) {
          va += (p - ma) * (p - ma) / 48;
          vb += (q - mb) * (q - mb) / 48;
          vab += (p - ma) * (q - mb) / 48;
        });
        const double c1 = 2.55 * 2.55, c2 = 7.65 * 7.65;
        total += (2 * ma * mb + c1) * (2 * vab + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2));
      }
  return total / windows;
}

TEST(Quality, Psnr) {
  const auto a = noise(8 * 9 * 3, 1);
  auto b = a;
  EXPECT_TRUE(std::isinf(psnr(a.data(), b.data(), 8, 9)));
  for (std::size_t i = 0; i < b.size(); ++i)
    b[i] = static_cast<std::uint8_t>(a[i] > 127 ? a[i] - 5 : a[i] + 5);
  EXPECT_NEAR(psnr(a.data(), b.data(), 8, 9), 10 * std::log10(255.0 * 255.0 / 25.0), 1e-12);
}

TEST(Quality, Ssim) {
  constexpr std::int64_t H = 19, W = 13;
  const auto a = noise(H * W * 3, 1);
  EXPECT_NEAR(ssim(a.data(), a.data(), H, W), 1.0, 1e-12);
  auto b = noise(H * W * 3, 2);
  EXPECT_NEAR(ssim(a.data(), b.data(), H, W), ssim_by_windows(a, b, H, W), 1e-12);
  for (std::size_t i = 0; i < b.size(); ++i)
    b[i] = static_cast<std::uint8_t>((3 * a[i] + b[i]) / 4);
  const double near = ssim(a.data(), b.data(), H, W);
  EXPECT_NEAR(near, ssim_by_windows(a, b, H, W), 1e-12);
  EXPECT_GT(near, 0.8);
  EXPECT_THROW(ssim(a.data(), b.data(), 6, W), Error);
}

// ---- Changes from frame to frame ----

std::vector<std::uint8_t> flat(int level) {
  return std::vector<std::uint8_t>(2 * 3 * 3, static_cast<std::uint8_t>(level));
}

FrameChanges changes_of(const std::vector<int>& levels) {
  FrameChanges c;
  for (const int level : levels) c.add(flat(level));
  return c;
}

TEST(FrameChanges, StillsHaveNone) {
  EXPECT_FALSE(changes_of({7}).has_motion());
  EXPECT_FALSE(changes_of({7, 9}).has_flicker());
  const FrameChanges still = changes_of({7, 7, 7, 7});
  EXPECT_EQ(still.motion(), 0);
  EXPECT_EQ(still.flicker(), 0);
  EXPECT_EQ(still.frames(), 4);
}

TEST(FrameChanges, AFadeMovesWithoutFlicker) {
  const FrameChanges fade = changes_of({10, 14, 18, 22});
  EXPECT_EQ(fade.motion(), 4);
  EXPECT_EQ(fade.flicker(), 0);
}

TEST(FrameChanges, UpAndDownFlickers) {
  const FrameChanges alternating = changes_of({10, 16, 10, 16, 10});
  EXPECT_EQ(alternating.motion(), 6);
  EXPECT_EQ(alternating.flicker(), 6);
  EXPECT_EQ(changes_of({0, 0, 255}).flicker(), 127.5);
}

TEST(FrameChanges, MeansOverValues) {
  FrameChanges c;
  std::vector<std::uint8_t> frame = flat(0);
  c.add(frame);
  frame[5] = 180;  // one of 18 values
  c.add(frame);
  EXPECT_EQ(c.motion(), 10);
  EXPECT_THROW(c.add(std::vector<std::uint8_t>(3)), Error);
}

}  // namespace
}  // namespace weft
