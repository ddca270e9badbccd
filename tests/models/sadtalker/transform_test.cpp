// Keypoints in a head's pose, against the matrices written out.
#include "models/sadtalker/render/transform.h"

#include <gmock/gmock.h>

#include <cmath>

namespace weft::test {
namespace {

using Matrix = std::array<std::array<double, 3>, 3>;

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c{};
  for (std::size_t i = 0; i < 3; ++i)
    for (std::size_t j = 0; j < 3; ++j)
      for (std::size_t k = 0; k < 3; ++k) c[i][j] += a[i][k] * b[k][j];
  return c;
}

Matrix rotation(double yaw, double pitch, double roll) {
  const double x = pitch / 180 * 3.14, y = yaw / 180 * 3.14, z = roll / 180 * 3.14;
  const Matrix Rx = {{{1, 0, 0}, {0, std::cos(x), -std::sin(x)}, {0, std::sin(x), std::cos(x)}}};
  const Matrix Ry = {{{std::cos(y), 0, std::sin(y)}, {0, 1, 0}, {-std::sin(y), 0, std::cos(y)}}};
  const Matrix Rz = {{{std::cos(z), -std::sin(z), 0}, {std::sin(z), std::cos(z), 0}, {0, 0, 1}}};
  return product(product(Rx, Ry), Rz);
}

TEST(ExpectedDegrees, WeighBinsOfThreeDegrees) {
  std::vector<float> logits(66, -200);
  logits[0] = 0;
  EXPECT_NEAR(expected_degrees(logits), -99, 1e-12);
  logits[65] = 0;
  EXPECT_NEAR(expected_degrees(logits), (-99 + 96) / 2.0, 1e-12);
  // Great logits do not overflow.
  logits.assign(66, 3e38f);
  EXPECT_NEAR(expected_degrees(logits), 32.5 * 3 - 99, 1e-12);
}

TEST(HeadRotation, IsTheProductOfThree) {
  for (const auto& [yaw, pitch, roll] :
       {std::array<double, 3>{30, 0, 0}, {0, -20, 0}, {0, 0, 50}, {35, -12, 77}}) {
    const auto R = head_rotation(yaw, pitch, roll);
    const Matrix wanted = rotation(yaw, pitch, roll);
    for (std::size_t i = 0; i < 9; ++i) EXPECT_NEAR(R[i], wanted[i / 3][i % 3], 1e-14);
  }
}

TEST(MovedKeypoints, TurnShiftAndExpress) {
  HeadMotion m;
  m.yaw = 21, m.pitch = -8, m.roll = 3;
  m.t = {5, 0.25, 7};
  m.expression = {0.1, 0.2, 0.3, -0.1, -0.2, -0.3};
  const std::vector<float> canonical = {0.5f, -0.25f, 0.75f, -0.5f, 0.125f, 0.0f};
  const std::vector<float> moved = moved_keypoints(canonical, m);
  const Matrix R = rotation(21, -8, 3);
  for (std::size_t k = 0; k < 2; ++k)
    for (std::size_t i = 0; i < 3; ++i) {
      // Of t only y counts.
      double wanted = m.expression[3 * k + i] + (i == 1 ? 0.25 : 0);
      for (std::size_t j = 0; j < 3; ++j) wanted += R[i][j] * canonical[3 * k + j];
      EXPECT_NEAR(moved[3 * k + i], wanted, 1e-6);
    }
}

}  // namespace
}  // namespace weft::test
