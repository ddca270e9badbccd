#include "models/stdit3/rectified_flow.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/philox.h"
#include "models/pixels.h"
#include "models/stdit3/options.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"

namespace weft {
namespace {

using testing::HasSubstr;

class ClipLatentsTest : public testing::Test {
 protected:
  ClipLatentsTest() : arena_(Arena::reserve(std::size_t{1} << 30)), scope_(*arena_) {
    deck_.run.seed = 11;
    deck_.get<Stdit3Deck>().in_channels = 4;
    deck_.get<Stdit3Deck>().caption_channels = 3;
    deck_.get<Stdit3Deck>().model_max_length = 5;
    deck_.get<Stdit3Deck>().class_dropout_prob = 0;
    deck_.get<VaeDeck>().spatial_channels = {8, 8, 8, 8};
    deck_.get<VaeDeck>().spatial_res_blocks = 1;
    deck_.get<VaeDeck>().spatial_groups = 4;
    deck_.get<VaeDeck>().filters = 8;
    deck_.get<VaeDeck>().num_res_blocks = 1;
    deck_.get<VaeDeck>().channel_multipliers = {1, 1, 1, 1};
    deck_.get<VaeDeck>().num_groups = 4;
    weights_ = std::filesystem::temp_directory_path() /
               ("weft_clip_latents_" + std::to_string(getpid()) + ".safetensors");
  }
  ~ClipLatentsTest() override { std::filesystem::remove(weights_); }

  static Bucket moments_bucket(DType dtype) {
    Bucket b;
    b.name = "moments";
    b.frames = 2;
    b.height = 3;
    b.width = 5;
    b.channels = 8;
    b.dtype = dtype;
    b.clips = 2;
    b.pixel_frames = 5;
    b.pixel_height = 24;
    b.pixel_width = 40;
    b.moments = true;
    b.scale = {3.85f, 2.32f, 2.33f, 3.06f};
    b.shift = {-0.10f, 0.34f, 0.27f, 0.98f};
    return b;
  }
  static Bucket pixels_bucket() {
    Bucket b;
    b.name = "pixels";
    b.frames = 5;
    b.height = 24;
    b.width = 40;
    b.clips = 2;
    return b;
  }
  // A clip's bytes on the device.
  template <class T>
  static Tensor bytes_of(const std::vector<T>& values) {
    Tensor t = Tensor::empty({static_cast<std::int64_t>(values.size() * sizeof(T))}, DType::u8);
    t.set(std::as_bytes(std::span(values)));
    return t;
  }
  static std::vector<float> numbers(std::size_t n, std::uint64_t seed) {
    const Philox random(seed, Purpose::init, 0, 0);
    std::vector<float> v(n);
    for (std::size_t i = 0; i < n; ++i) v[i] = random.normal(static_cast<std::uint32_t>(i));
    return v;
  }

  Deck deck_;
  std::filesystem::path weights_;
  std::unique_ptr<Arena> arena_;
  ArenaScope scope_;
};

TEST_F(ClipLatentsTest, MomentsAreDrawnByTheFormula) {
  const ClipLatents latents = stdit3_latents(deck_);
  for (const DType dtype : {DType::f32, DType::f16}) {
    const Bucket b = moments_bucket(dtype);
    latents.check(b);
    EXPECT_EQ(latents.seen(b).channels, 4);
    const std::size_t half = 4 * 2 * 3 * 5;
    std::vector<float> stored = numbers(2 * half, 1);
    std::vector<f16> small;
    for (float& v : stored)
      if (dtype == DType::f16) v = static_cast<float>(small.emplace_back(v));
    const Tensor clip = dtype == DType::f16 ? bytes_of(small) : bytes_of(stored);
    Tensor x0 = Tensor::empty({4, 2, 3, 5}, DType::f32),
           again = Tensor::empty({4, 2, 3, 5}, DType::f32);
    latents.make(b, clip, 7, 3, x0);
    const Philox random(11, Purpose::latent, 7, 3);
    for (std::size_t i = 0; i < half; ++i) {
      const std::size_t c = i / 30;
      const double z = stored[i] + std::exp(0.5 * stored[half + i]) *
                                       random.normal(static_cast<std::uint32_t>(i));
      const double want = (z - static_cast<double>(b.shift[c])) / static_cast<double>(b.scale[c]);
      ASSERT_NEAR(x0.to_host().data<float>()[i], want, 2e-6 * (1 + std::abs(want)));
    }
    // Anew each step, but the same in the same one.
    latents.make(b, clip, 7, 3, again);
    EXPECT_EQ(again.to_host().data<float>()[5], x0.to_host().data<float>()[5]);
    latents.make(b, clip, 8, 3, again);
    EXPECT_NE(again.to_host().data<float>()[5], x0.to_host().data<float>()[5]);
  }
}

TEST_F(ClipLatentsTest, HalfLatentsAreWidened) {
  const ClipLatents latents = stdit3_latents(deck_);
  Bucket b = moments_bucket(DType::f16);
  b.moments = false;
  b.channels = 4;
  std::vector<f16> stored;
  for (const float v : numbers(4 * 2 * 3 * 5, 2)) stored.emplace_back(v);
  Tensor x0 = Tensor::empty({4, 2, 3, 5}, DType::f32);
  latents.make(b, bytes_of(stored), 0, 0, x0);
  for (std::size_t i = 0; i < stored.size(); ++i)
    ASSERT_EQ(x0.to_host().data<float>()[i], static_cast<float>(stored[i]));
}

// The same from stored moments and from pixels; and the plan knows what the VAE takes.
TEST_F(ClipLatentsTest, EncodingOnTheWayGivesWhatStoredMomentsGive) {
  VideoVae vae(deck_.get<VaeDeck>());
  vae.params().allocate(1 << 20, false, false);
  vae.params().initialise(5);
  save_weights(weights_, vae.params());
  deck_.get<VaeDeck>().weights = weights_.string();
  const Bucket pixels = pixels_bucket();
  std::vector<std::uint8_t> clip(pixels.clip_bytes());
  for (std::size_t i = 0; i < clip.size(); ++i) clip[i] = static_cast<std::uint8_t>(i * i / 7);
  const Tensor bytes = bytes_of(clip);

  ClipLatents latents = stdit3_latents(deck_);
  latents.check(pixels);
  const Bucket seen = latents.seen(pixels);
  EXPECT_EQ(seen.channels, 4);
  EXPECT_EQ(seen.frames, 2);
  EXPECT_EQ(seen.height, 3);
  EXPECT_EQ(seen.width, 5);
  latents.load(std::span(&pixels, 1));
  Tensor on_the_way = Tensor::empty({4, 2, 3, 5}, DType::f32);
  const std::size_t before = arena_->used();
  arena_->reset_peak();
  latents.make(pixels, bytes, 7, 3, on_the_way);
  EXPECT_EQ(arena_->used(), before);
  const std::size_t took = arena_->peak() - before;
  {
    const auto planning = Arena::planning();
    const ArenaScope scope(*planning);
    Tensor x0 = Tensor::empty({4, 2, 3, 5}, DType::f32);
    const std::size_t held = planning->used();
    latents.make(pixels, Tensor(), 7, 3, x0);
    EXPECT_EQ(planning->peak() - held, took);
  }

  const VideoVae::Noise noise{11, 3};
  const Tensor moments = vae.encode_moments(
      5, 24, 40,
      [&](std::int64_t first, std::int64_t n) { return pixel_frames(bytes, first, n, 24, 40); },
      &noise);
  const Tensor host = moments.to_host();
  const std::vector<float> stored(host.span<float>().begin(), host.span<float>().end());
  Tensor from_store = Tensor::empty({4, 2, 3, 5}, DType::f32);
  latents.make(moments_bucket(DType::f32), bytes_of(stored), 7, 3, from_store);
  for (std::int64_t i = 0; i < from_store.numel(); ++i)
    ASSERT_NEAR(from_store.to_host().data<float>()[i], on_the_way.to_host().data<float>()[i], 1e-6);
}

// A model that wants means gets them, of stored moments and from pixels: no step changes them.
TEST_F(ClipLatentsTest, MeansInPlaceOfDraws) {
  VideoVae vae(deck_.get<VaeDeck>());
  vae.params().allocate(1 << 20, false, false);
  vae.params().initialise(5);
  save_weights(weights_, vae.params());
  deck_.get<VaeDeck>().weights = weights_.string();
  ClipLatents latents(deck_, 4, std::make_unique<VideoVae>(deck_.get<VaeDeck>()), Posterior::mean);
  const Bucket moments = moments_bucket(DType::f32), pixels = pixels_bucket();
  latents.load(std::span(&pixels, 1));
  const std::vector<float> stored = numbers(2 * 4 * 2 * 3 * 5, 1);
  Tensor x0 = Tensor::empty({4, 2, 3, 5}, DType::f32);
  latents.make(moments, bytes_of(stored), 7, 3, x0);
  for (std::size_t i = 0; i < 4 * 2 * 3 * 5; ++i)
    ASSERT_NEAR(x0.data<float>()[i], (stored[i] - moments.shift[i / 30]) / moments.scale[i / 30],
                1e-6);

  std::vector<std::uint8_t> clip(pixels.clip_bytes());
  for (std::size_t i = 0; i < clip.size(); ++i) clip[i] = static_cast<std::uint8_t>(i * i / 7);
  const Tensor bytes = bytes_of(clip);
  latents.make(pixels, bytes, 7, 3, x0);
  const Tensor mean = vae.encode(
      vae.whole(5), 24, 40,
      [&](std::int64_t first, std::int64_t n) { return pixel_frames(bytes, first, n, 24, 40); },
      nullptr);
  for (std::int64_t i = 0; i < x0.numel(); ++i)
    ASSERT_EQ(x0.data<float>()[i], mean.data<float>()[i]);
}

TEST_F(ClipLatentsTest, WhatDoesNotFitIsRefused) {
  const auto refused = [&](const Bucket& b, const char* hint) {
    try {
      stdit3_latents(deck_).check(b);
      FAIL() << "accepted; expected: " << hint;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      EXPECT_THAT(e.hint(), HasSubstr(hint));
    }
  };
  refused(pixels_bucket(), "weft encode");
  deck_.get<Stdit3Deck>().in_channels = 3;
  refused(moments_bucket(DType::f32), "latents' channels");
  deck_.get<Stdit3Deck>().in_channels = 5;
  refused(pixels_bucket(), "in_channels = 3");
}

// Captions that come with the clips: their rows, and the null caption where there is none.
TEST_F(ClipLatentsTest, CaptionsOfTheStore) {
  Bucket b = moments_bucket(DType::f32);
  b.text_channels = 3;
  b.longest_text = 2;
  const ClipLatents latents = stdit3_latents(deck_);
  LoadedBatch clips;
  clips.what.clips = {0, 1};
  clips.what.samples = {0, 1};
  clips.info.resize(2);
  clips.text = {{1, 2, 3, 4, 5, 6}, {}};
  const Tensor bytes = bytes_of(std::vector<float>(2 * 8 * 2 * 3 * 5));
  const TrainingBatch batch = make_batch(deck_, b, clips, bytes, nullptr, latents);
  const auto offsets = batch.in.captions.offsets.to_host(),
             index = batch.in.captions.index.to_host();
  const std::vector<std::int32_t> got_offsets(offsets.span<std::int32_t>().begin(),
                                              offsets.span<std::int32_t>().end());
  const std::vector<std::int32_t> got_index(index.span<std::int32_t>().begin(),
                                            index.span<std::int32_t>().end());
  EXPECT_EQ(got_offsets, (std::vector<std::int32_t>{0, 2, 7}));
  EXPECT_EQ(got_index, (std::vector<std::int32_t>{0, 1, -1, -2, -3, -4, -5}));
  const Tensor y = batch.in.captions.y.to_host();
  EXPECT_EQ(y.data<float>()[4], 5.0f);
}

}  // namespace
}  // namespace weft
