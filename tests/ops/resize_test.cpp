#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/norm.h"
#include "ops/resize.h"
#include "reference.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

// Odd sizes: the last row and column belong to no rectangle.
TEST_F(OpTest, MaxPool) {
  const Shape in{1, 2, 5, 7, 20}, out{1, 2, 2, 3, 20};
  const Vec x = random_values(in.numel(), 6), g = random_values(out.numel(), 7);
  const auto pooled = [&](const Vec& v) {
    Vec y;
    for (int f = 0; f < 2; ++f)
      for (int r = 0; r < 2; ++r)
        for (int q = 0; q < 3; ++q)
          for (int c = 0; c < 20; ++c) {
            double best = -1e9;
            for (int k = 0; k < 4; ++k)
              best = std::max(best, v[((f * 5 + 2 * r + k / 2) * 7 + 2 * q + k % 2) * 20 + c]);
            y.push_back(best);
          }
    return y;
  };
  Tensor y = poisoned(out), dx = poisoned(in);
  ops::max_pool_forward(to_tensor(x, in), y);
  EXPECT_LT(relative_error(to_values(y), pooled(x)), 1e-6);
  ops::max_pool_backward(to_tensor(x, in), to_tensor(g, out), dx);
  expect_gradient([&](const Vec& v) { return dot(pooled(v), g); }, x, to_values(dx), 1e-5);
  // Among equals the first takes it all.
  ops::max_pool_backward(to_tensor(Vec(x.size(), 1.0), in), to_tensor(g, out), dx);
  EXPECT_EQ(to_values(dx)[0], to_values(to_tensor(g, out))[0]);
  EXPECT_EQ(to_values(dx)[20], 0);
}

}  // namespace

// What the cases of ops/resize.h and ops/norm.h do not show (tests/kernels/volume.cpp,
// spade.cpp).
namespace {

constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// Coordinates come from a network: nothing may be read by one that is no place.
TEST_F(OpTest, PlacesOutsideReadZero) {
  Tensor x = Tensor::empty({1, 2, 3, 4, 5}, DType::f32);
  for (float& v : x.span<float>()) v = 1.0f;
  const std::vector<float> places = {nan,    0.0f, 0.0f, 0.0f, nan,    0.0f,  //
                                     1e30f,  0.0f, 0.0f, 0.0f, -1e30f, 0.0f,  //
                                     0.0f,   0.0f, 2.1f, 0.0f, 0.0f,   INFINITY,
                                     -1.26f, 0.0f, 0.0f, 0.0f, 0.0f,   0.0f};
  const Tensor grid = Tensor::from_host(std::span<const float>(places), {1, 1, 1, 8, 3});
  Tensor y = Tensor::empty({1, 1, 1, 8, 5}, DType::f32);
  ops::volume_sample(x, grid, y);
  for (int i = 0; i < 7 * 5; ++i) EXPECT_EQ(y.data<float>()[i], 0.0f) << i;
  for (int i = 7 * 5; i < 8 * 5; ++i) EXPECT_FLOAT_EQ(y.data<float>()[i], 1.0f) << i;
}

// Sampling at the grid itself reads between the voxels, the corners half outside of three axes.
TEST_F(OpTest, TheGridIsNotTheIdentity) {
  EXPECT_EQ(ops::volume_coordinate(0, 16), -1.0f);
  EXPECT_EQ(ops::volume_coordinate(15, 16), 1.0f);
  Tensor x = Tensor::empty({1, 4, 4, 4, 1}, DType::f32);
  for (float& v : x.span<float>()) v = 8.0f;
  Tensor keypoint = Tensor::empty({1, 1, 3}, DType::f32);
  for (float& v : keypoint.span<float>()) v = 0.0f;
  Tensor y = Tensor::empty({1, 4, 4, 4, 4}, DType::f32);
  ops::motion_candidates(x, keypoint, keypoint, y);
  EXPECT_EQ(y.data<float>()[0], 0.0f);
  EXPECT_FLOAT_EQ(y.data<float>()[1], 1.0f);
  EXPECT_EQ(y.data<float>()[2], 0.0f);  // two heatmaps that are the same
  EXPECT_FLOAT_EQ(y.data<float>()[3], 1.0f);
  EXPECT_FLOAT_EQ(y.data<float>()[(21 * 2 + 1) * 2 + 1], 8.0f);
}

TEST_F(OpTest, MasksBelowTheThresholdAreDroppedAndTheOthersKept) {
  const std::vector<float> shares = {0.6f, 0.25f, 0.15f};
  std::vector<float> logits;
  for (const float s : shares) logits.push_back(std::log(s));
  const std::vector<float> source = {0.5f, 0.0f, 0.0f, 0.0f, 0.5f, 0.0f},
                           driving = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.5f};
  const Tensor x = Tensor::from_host(std::span<const float>(logits), {1, 1, 1, 1, 3});
  const Tensor from = Tensor::from_host(std::span<const float>(source), {1, 2, 3}),
               to = Tensor::from_host(std::span<const float>(driving), {1, 2, 3});
  Tensor mask = Tensor::empty({1, 1, 1, 1, 3}, DType::f32),
         field = Tensor::empty({1, 1, 1, 1, 3}, DType::f32);
  ops::motion_field(x, from, to, 0.2f, mask, field);
  for (int k = 0; k < 3; ++k) EXPECT_NEAR(mask.data<float>()[k], shares[k], 1e-6);
  // An axis of one voxel has it at -1.
  EXPECT_NEAR(field.data<float>()[0], -0.85 + 0.25 * 0.5, 1e-6);
  EXPECT_NEAR(field.data<float>()[1], -0.85, 1e-6);
  EXPECT_NEAR(field.data<float>()[2], -0.85, 1e-6);
}

TEST_F(OpTest, ExpectationOfOnePeakIsItsPlace) {
  Tensor logits = Tensor::empty({1, 5, 3, 9, 2}, DType::f32);
  for (float& v : logits.span<float>()) v = 0.0f;
  logits.data<float>()[((3 * 3 + 0) * 9 + 6) * 2] = 20.0f;
  Tensor keypoints = Tensor::empty({1, 2, 3}, DType::f32);
  ops::volume_expectation(logits, 0.1f, keypoints);
  const double wanted[] = {0.5, -1.0, 0.5, 0.0, 0.0, 0.0};
  for (int i = 0; i < 6; ++i) EXPECT_NEAR(keypoints.data<float>()[i], wanted[i], 1e-6) << i;
}

// A constant channel has no deviation: the norm leaves beta.
TEST_F(OpTest, ConstantChannelsAreNormalisedToBeta) {
  Tensor x = Tensor::empty({1, 1, 4, 4, 3}, DType::f32);
  for (float& v : x.span<float>()) v = 1234.5f;
  Tensor statistics = Tensor::empty({1, 2, 3}, DType::f32);
  ops::instance_statistics(x, statistics);
  for (int c = 0; c < 3; ++c) {
    EXPECT_EQ(statistics.data<float>()[c], 1234.5f);
    EXPECT_NEAR(statistics.data<float>()[3 + c], 1 / std::sqrt(1e-5), 0.01);
  }
  Tensor maps = Tensor::empty({1, 1, 8, 8, 6}, DType::f32),
         y = Tensor::empty({1, 1, 8, 8, 3}, DType::f32);
  for (float& v : maps.span<float>()) v = -2.0f;
  ops::spade(x, statistics, maps, true, 0.25f, y);
  for (const float v : y.span<float>()) EXPECT_EQ(v, -0.5f);
}

}  // namespace
}  // namespace weft::test
