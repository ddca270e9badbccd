#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/philox.h"

namespace weft {
namespace {

float rounded(float f) { return static_cast<float>(bf16(f)); }

TEST(Bf16, RoundsToNearestWithTiesToEven) {
  EXPECT_EQ(rounded(1.0f), 1.0f);
  // Neighbours of 1 are 2^-7 apart above it.
  EXPECT_EQ(rounded(1.0f + 0x1p-8f), 1.0f) << "tie, 1 is even";
  EXPECT_EQ(rounded(1.0f + 0x1p-8f + 0x1p-20f), 1.0f + 0x1p-7f) << "just above the tie";
  EXPECT_EQ(rounded(1.0f + 3 * 0x1p-8f), 1.0f + 2 * 0x1p-7f) << "tie, up to the even one";
  EXPECT_EQ(rounded(-1.0f - 3 * 0x1p-8f), -1.0f - 2 * 0x1p-7f);
}

TEST(Bf16, KeepsSpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(rounded(inf), inf);
  EXPECT_EQ(rounded(-inf), -inf);
  EXPECT_TRUE(std::isnan(rounded(std::numeric_limits<float>::quiet_NaN())));
  // A NaN whose payload sits in the dropped half must not become infinity.
  EXPECT_TRUE(std::isnan(rounded(std::bit_cast<float>(0x7f800001u))));
  EXPECT_EQ(rounded(std::numeric_limits<float>::max()), inf) << "rounds up past the largest";
  EXPECT_TRUE(std::signbit(rounded(-0.0f)));
  EXPECT_EQ(rounded(0x1p-133f), 0x1p-133f) << "subnormals are kept";
}

TEST(Bf16, EveryValueSurvivesAndErrorsStayWithinHalfASpacing) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    bf16 b;
    b.bits = static_cast<std::uint16_t>(bits);
    const float f = static_cast<float>(b);
    if (!std::isnan(f)) {
      ASSERT_EQ(bf16(f).bits, bits);
    }
  }
  const Philox p(1, Purpose::noise, 0, 0);
  for (std::uint32_t i = 0; i < 10000; ++i) {
    const float f = p.normal(i);
    ASSERT_LE(std::abs(rounded(f) - f), std::abs(f) * 0x1p-8f);
  }
}

TEST(F16, RoundsToNearestEven) {
  const auto rounded = [](float f) { return static_cast<float>(f16(f)); };
  EXPECT_EQ(f16(1.0f).bits, 0x3c00);
  EXPECT_EQ(f16(-2.0f).bits, 0xc000);
  EXPECT_EQ(rounded(1 + 0x1p-11f), 1.0f) << "a tie goes to even";
  EXPECT_EQ(rounded(1 + 3 * 0x1p-11f), 1 + 0x1p-9f);
  EXPECT_EQ(rounded(65519.0f), 65504.0f) << "the largest";
  EXPECT_EQ(f16(65520.0f).bits, 0x7c00) << "what is too large is infinite";
  EXPECT_EQ(f16(-INFINITY).bits, 0xfc00);
  EXPECT_TRUE(std::isnan(rounded(NAN)));
  EXPECT_EQ(rounded(3 * 0x1p-25f), 0x1p-23f) << "subnormals: a tie goes to even";
  EXPECT_EQ(rounded(0x1p-25f), 0.0f);
  EXPECT_EQ(rounded(0x1.ff8p-15f + 0x1p-26f), 0x1.ff8p-15f);
}

TEST(F16, EveryValueSurvivesAndErrorsStayWithinHalfASpacing) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    f16 h;
    h.bits = static_cast<std::uint16_t>(bits);
    const float f = static_cast<float>(h);
    if (!std::isnan(f)) {
      ASSERT_EQ(f16(f).bits, bits);
    }
  }
  const Philox p(1, Purpose::noise, 0, 0);
  for (std::uint32_t i = 0; i < 10000; ++i) {
    const float f = p.normal(i);
    ASSERT_LE(std::abs(static_cast<float>(f16(f)) - f), std::max(std::abs(f) * 0x1p-11f, 0x1p-25f));
  }
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::f32), 4u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_EQ(size_of(DType::i64), 8u);
  EXPECT_EQ(size_of(DType::boolean), 1u);
  EXPECT_EQ(name_of(DType::boolean), "bool");
  EXPECT_EQ(name_of(dtype_of<bf16>::value), "bf16");
}

}  // namespace
}  // namespace weft
