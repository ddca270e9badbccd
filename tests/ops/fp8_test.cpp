// The format and its scales (ops/fp8.h). The products are cases of tests/kernels/fp8.cpp.
#include "ops/fp8.h"

#include <cmath>
#include <limits>

#include "reference.h"

namespace weft::test {
namespace {

using ops::e4m3_scale;
using ops::from_e4m3;
using ops::to_e4m3;

constexpr float inf = std::numeric_limits<float>::infinity();

// OCP's FP8 formats: bias 7, no infinities, NaN where all bits are set.
TEST(E4m3, ValuesOfAllBytes) {
  for (int byte = 0; byte < 256; ++byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    const float value = from_e4m3(static_cast<std::uint8_t>(byte));
    if ((byte & 127) == 127)
      EXPECT_TRUE(std::isnan(value)) << byte;
    else
      EXPECT_EQ(value, byte < 128 ? magnitude : -magnitude) << byte;
  }
  EXPECT_EQ(from_e4m3(0x7e), 448);
  EXPECT_EQ(from_e4m3(0x38), 1);
  EXPECT_EQ(from_e4m3(0x01), 0x1p-9f);
}

TEST(E4m3, RoundsToTheNearestAndTiesToEven) {
  for (int byte = 0; byte < 127; ++byte) {
    const float value = from_e4m3(static_cast<std::uint8_t>(byte));
    EXPECT_EQ(to_e4m3(value), byte);
    EXPECT_EQ(to_e4m3(-value), byte | 128);
    if (byte == 126) break;
    const float next = from_e4m3(static_cast<std::uint8_t>(byte + 1)), middle = (value + next) / 2;
    EXPECT_EQ(to_e4m3(middle), byte % 2 == 0 ? byte : byte + 1) << middle;
    EXPECT_EQ(to_e4m3(std::nextafter(middle, 0.0f)), byte) << middle;
    EXPECT_EQ(to_e4m3(std::nextafter(middle, inf)), byte + 1) << middle;
    EXPECT_EQ(to_e4m3(-std::nextafter(middle, inf)), (byte + 1) | 128) << middle;
  }
}

TEST(E4m3, SaturatesAndKeepsWhatIsNotFinite) {
  for (const float x : {449.0f, 464.0f, 465.0f, 1e30f, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(to_e4m3(x), 0x7e) << x;
    EXPECT_EQ(to_e4m3(-x), 0xfe) << x;
  }
  for (const float x : {inf, -inf, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_EQ(to_e4m3(x), 0x7f) << x;
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(E4m3, ScalesAreTheGreatestPowersOfTwoThatFit) {
  for (const float largest : {448.0f, 449.0f, 447.0f, 1.0f, 1.75f, std::nextafter(1.75f, 2.0f),
                              3e-3f, 1e30f, std::numeric_limits<float>::max(), 1e-30f}) {
    const float scale = e4m3_scale(largest);
    EXPECT_EQ(std::exp2(std::floor(std::log2(scale))), scale) << largest;
    EXPECT_LE(static_cast<double>(largest) * scale, 448.0) << largest;
    EXPECT_GT(2 * static_cast<double>(largest) * scale, 448.0) << largest;
  }
  EXPECT_EQ(e4m3_scale(448), 1);
  // Small magnitudes and zeros: no subnormal number comes of it.
  for (const float largest : {0.0f, std::numeric_limits<float>::denorm_min(), 0x1p-120f}) {
    EXPECT_EQ(e4m3_scale(largest), 0x1p117f) << largest;
    EXPECT_EQ(0x1p-9f / e4m3_scale(largest), std::numeric_limits<float>::min());
  }
}

// A number of bf16 has 8 bits of mantissa: all that rounding leaves, whatever the scale.
TEST(E4m3, RoundedValuesAreBf16) {
  for (int power = -120; power <= 117; ++power)
    for (int byte = 0; byte < 127; ++byte) {
      const float x = std::ldexp(from_e4m3(static_cast<std::uint8_t>(byte)), -power);
      EXPECT_EQ(static_cast<float>(bf16(x)), x);
    }
}

}  // namespace
}  // namespace weft::test
