// The rows that frames are rendered from: camera lists, and windows of 27 rows.
#include <gmock/gmock.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "core/error.h"
#include "core/philox.h"
#include "models/sadtalker/generator.h"
#include "models/sadtalker/keypoints.h"
#include "models/sadtalker/renderer.h"
#include "ops/resize.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

std::vector<double> camera(std::vector<std::int64_t> list, std::int64_t frames) {
  return camera_degrees(list, frames);
}

TEST(CameraDegrees, EndAStepBeforeTheLastValue) {
  EXPECT_THAT(camera({0, 30}, 5), ElementsAre(0, 7.5, 15, 22.5, 22.5));
}
TEST(CameraDegrees, PassThroughAllValuesAtOneSpeed) {
  // 40 degrees in four steps.
  EXPECT_THAT(camera({0, 20, 0}, 5), ElementsAre(0, 10, 20, 10, 10));
  EXPECT_THAT(camera({-10, 0, -30}, 5), ElementsAre(-10, 0, -10, -20, -20));
}
TEST(CameraDegrees, TurnAtAValueEvenBetweenFrames) {
  // 30 degrees in four steps of 7.5: 0, 7.5 of the first pair, then 10, 2.5, -5 of the second.
  EXPECT_THAT(camera({0, 10, -10}, 5), ElementsAre(0, 7.5, 10, 2.5, -5));
}
TEST(CameraDegrees, HoldStill) {
  EXPECT_THAT(camera({}, 4), IsEmpty());
  EXPECT_THAT(camera({15}, 3), ElementsAre(15, 15, 15));
  EXPECT_THAT(camera({15, 15}, 3), ElementsAre(15, 15, 15));
  EXPECT_THAT(camera({15, 40}, 1), ElementsAre(15));
  // The pause between equal neighbours takes no time.
  EXPECT_THAT(camera({0, 0, 30}, 5), ElementsAre(0, 7.5, 15, 22.5, 22.5));
}

// Rows whose values say which they are: column + 1000 row.
std::vector<float> numbered(std::int64_t rows, std::int64_t columns, float start = 0) {
  std::vector<float> v;
  for (std::int64_t t = 0; t < rows; ++t)
    for (std::int64_t c = 0; c < columns; ++c)
      v.push_back(start + static_cast<float>(c + 1000 * t));
  return v;
}

TEST(DrivingWindows, RepeatTheEnds) {
  const DrivingRows rows = driving_rows({}, numbered(20, 70), numbered(1, 70));
  const std::vector<float> all = driving_windows(rows, 0, 20);
  ASSERT_EQ(all.size(), 20u * 27 * 70);
  for (std::int64_t t = 0; t < 20; ++t)
    for (std::int64_t i = 0; i < 27; ++i) {
      const std::int64_t row = std::clamp<std::int64_t>(t - 13 + i, 0, 19);
      EXPECT_EQ(all[(t * 27 + i) * 70 + 5], static_cast<float>(5 + 1000 * row));
    }
  const std::vector<float> some = driving_windows(rows, 7, 2);
  EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin() + 7 * 27 * 70));
}

TEST(DrivingRows, ScaleTheExpressionAlone) {
  SadtalkerDeck deck;
  deck.expression_scale = 2;
  const DrivingRows rows = driving_rows(deck, numbered(3, 70), numbered(1, 70, 7));
  EXPECT_EQ(rows.values[70 + 63], 2 * 1063.0f);
  EXPECT_EQ(rows.values[70 + 64], 1064.0f);
}

TEST(DrivingRows, TakeTheSourcesPlace) {
  SadtalkerDeck deck;
  deck.preprocess = "full";
  const std::vector<float> source = numbered(1, 73, 0.5f);
  const DrivingRows moving = driving_rows(deck, numbered(2, 70), source);
  ASSERT_EQ(moving.columns, 73);
  EXPECT_EQ(moving.values[73 + 69], 1069.0f);
  EXPECT_EQ(moving.values[73 + 72], 72.5f);
  deck.still = true;
  const DrivingRows still = driving_rows(deck, numbered(2, 70), source);
  EXPECT_EQ(still.values[73 + 63], 1063.0f);
  EXPECT_EQ(still.values[73 + 64], 64.5f);
  EXPECT_EQ(still.values[73 + 72], 72.5f);
}

TEST(DrivingRows, RefuseWhatDoesNotFit) {
  SadtalkerDeck deck;
  EXPECT_THROW(driving_rows(deck, numbered(1, 69), numbered(1, 70)), Error);
  EXPECT_THROW(driving_rows(deck, {}, numbered(1, 70)), Error);
  EXPECT_THROW(driving_rows(deck, numbered(1, 70), numbered(1, 73)), Error);
  std::vector<float> broken = numbered(2, 70);
  broken[75] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(driving_rows(deck, broken, numbered(1, 70)), Error);
}

// Keypoints in a head's pose, against the matrices written out.

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

// Convolutions of maps seen at four times their size, against the same with that map written out.

class QuadrupleTest : public OpTest {};

TEST_F(QuadrupleTest, IsTheConvolutionOfTheLargeMap) {
  ParameterTable table;
  ConvNet net(table, "");
  const ConvLayer* conv = net.add("conv", "", 6, 5, ops::Conv::same(3), true);
  Quadruple quadruple(conv);
  table.allocate_for_inference(false);
  table.initialise(3);
  net.fold();
  quadruple.fold();
  const Tensor x = to_tensor(random_values(2 * 3 * 4 * 6, 1), {2, 1, 3, 4, 6});
  Tensor large = Tensor::empty({2, 1, 12, 16, 6}, DType::f32);
  ops::nearest_forward(x, 0, large, false);
  const Tensor wanted = convolve(*conv, large, 0.2f), got = quadruple.forward(x, 0.2f);
  ASSERT_EQ(got.shape(), wanted.shape());
  for (std::int64_t i = 0; i < got.numel(); ++i)
    ASSERT_NEAR(got.data<float>()[i], wanted.data<float>()[i], 1e-5) << i;
}

// The face renderer on small networks, but for the decoder, whose sizes are fixed.

using testing::HasSubstr;

SadtalkerDeck small_networks() {
  SadtalkerDeck d;
  d.num_kp = 4;
  d.kp_block_expansion = 4, d.kp_max_features = 16, d.kp_num_blocks = 2;
  d.kp_reshape_channel = 64, d.kp_reshape_depth = 4;
  d.gen_max_features = 64, d.gen_reshape_channel = 16, d.gen_reshape_depth = 4;
  d.gen_num_resblocks = 1;
  d.motion_block_expansion = 8, d.motion_max_features = 32, d.motion_num_blocks = 2;
  d.motion_compress = 2;
  d.mapping_descriptor_nc = 16;
  return d;
}

ImageFile noise(std::int64_t height, std::int64_t width) {
  ImageFile picture{height, width, {}};
  const Philox random(1, Purpose::noise, 0, 0);
  for (std::int64_t i = 0; i < height * width * 3; ++i)
    picture.values.push_back(
        static_cast<std::uint8_t>(256 * random.uniform(static_cast<std::uint32_t>(i))));
  return picture;
}

std::vector<float> coefficients(std::int64_t rows) {
  std::vector<float> values(70 * rows);
  const Philox random(2, Purpose::noise, 0, 0);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = random.normal(static_cast<std::uint32_t>(i));
  return values;
}

class RendererTest : public testing::Test {
 protected:
  static Deck deck() {
    Deck d;
    d.get<SadtalkerDeck>() = small_networks();
    return d;
  }
  // One for all tests: its decoder has 57 million weights to draw.
  static void SetUpTestSuite() {
    static const Deck the_deck = deck();
    const ModelSource source("weights", "random:5", "", false, MPI_COMM_SELF);
    renderer_.emplace(the_deck, source, source);
  }
  static void TearDownTestSuite() { renderer_.reset(); }

  static std::optional<Renderer> renderer_;
};
std::optional<Renderer> RendererTest::renderer_;

TEST_F(RendererTest, AFrameDoesNotDependOnItsBatch) {
  const auto arena = Arena::reserve(std::size_t{1} << 31);
  const ArenaScope scope(*arena);
  const std::vector<float> rows = coefficients(5), own = coefficients(1);
  const Renderer::Source source = renderer_->prepare(noise(32, 48), own);
  const DrivingRows driving = driving_rows(small_networks(), rows, own);
  const std::vector<std::uint8_t> all = renderer_->render(source, driving, 0, 3);
  ASSERT_EQ(all.size(), 3u * 32 * 48 * 3);
  const std::vector<std::uint8_t> alone = renderer_->render(source, driving, 2, 1);
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.end() - 32 * 48 * 3));
  // Neither all alike nor all at the ends of the range.
  EXPECT_FALSE(std::equal(alone.begin(), alone.end(), all.begin()));
  EXPECT_GT(std::ranges::count_if(alone, [](int v) { return v > 4 && v < 251; }),
            std::ssize(alone) / 4);
}

TEST_F(RendererTest, TheCameraTakesThePredictionsPlace) {
  const auto arena = Arena::reserve(std::size_t{1} << 31);
  const ArenaScope scope(*arena);
  const std::vector<float> own = coefficients(1), rows = coefficients(3);
  const Renderer::Source source = renderer_->prepare(noise(32, 32), own);
  SadtalkerDeck d = small_networks();
  const DrivingRows predicted = driving_rows(d, rows, own);
  d.input_yaw = {40};
  const DrivingRows turned = driving_rows(d, rows, own);
  const Tensor a = renderer_->keypoints(source, predicted, 0, 3),
               b = renderer_->keypoints(source, turned, 0, 3);
  double difference = 0;
  for (std::size_t i = 0; i < a.span<float>().size(); ++i)
    difference = std::max<double>(difference, std::abs(a.span<float>()[i] - b.span<float>()[i]));
  EXPECT_GT(difference, 1e-3);
}

TEST_F(RendererTest, ThePlanIsWhatARunTakes) {
  for (const std::int64_t batch : {1, 3}) {
    const MemoryNeed need = renderer_->plan(32, 48, batch);
    const auto arena = Arena::reserve(std::size_t{1} << 31);
    const ArenaScope scope(*arena);
    const std::vector<float> own = coefficients(1);
    const Renderer::Source source = renderer_->prepare(noise(32, 48), own);
    const DrivingRows rows = driving_rows(small_networks(), coefficients(batch), own);
    renderer_->render(source, rows, 0, batch);
    EXPECT_EQ(need.bytes, arena->peak());
    EXPECT_FALSE(renderer_->plan(32, 48, batch, need.bytes / 2).fits);
  }
}

TEST_F(RendererTest, CostsGrowWithTheFrame) {
  const Renderer::Cost small = renderer_->flops(32, 32), tall = renderer_->flops(64, 32);
  EXPECT_GT(small.source, 0);
  // The mapping network alone does not grow.
  EXPECT_NEAR(tall.frame / small.frame, 2, 0.01);
  // The decoder has 445 billion multiply-adds at 256 x 256; the last block does with 25 less.
  EXPECT_GT(small.frame, 2 * 415e9 / 64);
  EXPECT_LT(small.frame, 2 * 440e9 / 64);
}

TEST_F(RendererTest, SizesThatDoNotDivide) {
  EXPECT_EQ(renderer_->stride(), 16);
  try {
    renderer_->plan(40, 32, 1);
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_THAT(e.what(), HasSubstr("32x40"));
  }
}

TEST(FaceGenerator, RefusesContradictions) {
  SadtalkerDeck d = small_networks();
  d.gen_max_features = 65;
  EXPECT_THROW(FaceGenerator{d}, Error);
  d = small_networks();
  d.gen_num_down_blocks = 3;
  EXPECT_THROW(FaceGenerator{d}, Error);
  d = small_networks();
  d.kp_scale_factor = 0.3;
  EXPECT_THROW(KeypointNet{d}, Error);
}

}  // namespace
}  // namespace weft::test
