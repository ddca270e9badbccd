// The face renderer on small networks, but for the decoder, whose sizes are fixed.
#include "models/sadtalker/render/renderer.h"

#include <gmock/gmock.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/philox.h"

namespace weft::test {
namespace {

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
  std::vector<float> values(static_cast<std::size_t>(70 * rows));
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
