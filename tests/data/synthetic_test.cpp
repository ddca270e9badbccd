#include "data/synthetic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/error.h"

namespace weft {
namespace {

using testing::HasSubstr;

std::vector<std::byte> read(const ClipSource& source, int bucket, std::int64_t index) {
  std::vector<std::byte> out(source.buckets()[bucket].clip_bytes());
  source.read(bucket, index, out);
  return out;
}

TEST(Synthetic, Defaults) {
  const auto source = open_clip_source("synthetic:", true);
  ASSERT_EQ(source->buckets().size(), 1u);
  const Bucket& b = source->buckets()[0];
  EXPECT_EQ(b.clips, 64);
  EXPECT_EQ(b.clip_bytes(), 5u * 32 * 32 * 3);
  EXPECT_EQ(b.dtype, DType::u8);
  EXPECT_EQ(source->info(0, 3).fps, 24);
  EXPECT_THAT(source->info(0, 3).text, HasSubstr("disc"));
}

TEST(Synthetic, DeterministicAndAllDifferent) {
  const auto a = make_synthetic_source("clips=8,frames=3,height=20,width=36");
  const auto b = make_synthetic_source("clips=8,frames=3,height=20,width=36");
  const auto c = make_synthetic_source("clips=8,frames=3,height=20,width=36,seed=1");
  for (std::int64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(read(*a, 0, i), read(*b, 0, i));
    EXPECT_NE(read(*a, 0, i), read(*c, 0, i));
    EXPECT_NE(read(*a, 0, i), read(*a, 0, (i + 1) % 8));
  }
}

// Something is there to be learnt: neighbouring frames differ, but not much.
TEST(Synthetic, ShapesMoveSmoothly) {
  const auto source = make_synthetic_source("clips=4,frames=16,height=48,width=64");
  for (std::int64_t i = 0; i < 4; ++i) {
    const auto clip = read(*source, 0, i);
    const std::size_t frame = 48 * 64 * 3;
    double step = 0, whole = 0;
    for (std::size_t k = 0; k < frame; ++k) {
      const auto at = [&](std::size_t t) { return std::to_integer<int>(clip[t * frame + k]); };
      step += std::abs(at(1) - at(0));
      whole += std::abs(at(15) - at(0));
    }
    EXPECT_GT(step / frame, 0.05);
    EXPECT_LT(step, whole);
  }
}

TEST(Synthetic, Captions) {
  const auto source = make_synthetic_source("clips=2,latent=1,tokens=3,text_channels=5");
  EXPECT_EQ(source->buckets()[0].text_channels, 5);
  EXPECT_EQ(source->buckets()[0].longest_text, 3);
  EXPECT_EQ(source->text_tokens(0, 1), 3);
  EXPECT_EQ(source->read_text(0, 1).size(), 15u);
  EXPECT_EQ(source->read_text(0, 1), source->read_text(0, 1));
  EXPECT_NE(source->read_text(0, 0), source->read_text(0, 1));
  EXPECT_NE(source->content_id(), make_synthetic_source("clips=2,latent=1")->content_id());
  EXPECT_THROW(make_synthetic_source("tokens=3"), Error);
}

TEST(Synthetic, SeveralBucketsAndLatents) {
  const auto source = make_synthetic_source(
      "clips=2,frames=5,height=8,width=8;clips=3,frames=7,height=4,width=6,latent=1");
  ASSERT_EQ(source->buckets().size(), 2u);
  const Bucket& b = source->buckets()[1];
  EXPECT_EQ(b.dtype, DType::f32);
  EXPECT_EQ(b.channels, 4);
  EXPECT_EQ(b.pixel_frames, 22);  // 17 + 5 frames pack into 5 + 2
  EXPECT_EQ(b.pixel_height, 32);
  EXPECT_EQ(b.pixel_width, 48);
  const auto clip = read(*source, 1, 2);
  for (std::size_t i = 0; i < clip.size(); i += 4) {
    float v;
    std::memcpy(&v, clip.data() + i, 4);
    ASSERT_GE(v, -1.001f);
    ASSERT_LE(v, 1.001f);
  }
  // Sample ids run on over buckets, so that equal shapes do not repeat clips.
  const auto twice = make_synthetic_source("clips=2;clips=2");
  EXPECT_NE(read(*twice, 0, 0), read(*twice, 1, 0));
}

TEST(Synthetic, NamedBucketsOverSeveralLines) {
  const auto source =
      make_synthetic_source("\n name=256-1-0.57, clips=2;\n name=256-51-0.57,clips=3 ;\n");
  ASSERT_EQ(source->buckets().size(), 2u);
  EXPECT_EQ(source->buckets()[0].name, "256-1-0.57");
  EXPECT_EQ(source->buckets()[1].name, "256-51-0.57");
  EXPECT_EQ(source->buckets()[1].clips, 3);
}

TEST(Synthetic, Images) {
  const auto source = make_synthetic_source("clips=2,frames=1");
  EXPECT_EQ(source->info(0, 0).fps, 120);
}

void expect_refused(const std::string& spec, const std::string& what, const std::string& hint) {
  try {
    make_synthetic_source(spec);
    FAIL() << spec << " was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_THAT(e.what(), HasSubstr(what));
    EXPECT_THAT(e.hint(), HasSubstr(hint));
  }
}

TEST(Synthetic, BadSpecs) {
  expect_refused("clip=4", "clip", "clips");
  expect_refused("frames=x", "whole number", "synthetic:");
  expect_refused("frames=0", "frames = 0", "1 to");
  expect_refused("frames", "key=value", "synthetic:");
  expect_refused("name=a/b", "a/b", "letters");
  expect_refused("name=", "name", "letters");
  expect_refused("channels=5", "channels = 5", "latent=1");
}

}  // namespace
}  // namespace weft
