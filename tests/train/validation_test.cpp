#include "train/validation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/philox.h"
#include "models/stdit3/task.h"
#include "models/video_vae/task.h"
#include "ops/random.h"

namespace weft {
namespace {

TEST(ValidationHistory, KeepsTheBestAndCountsSince) {
  ValidationHistory h;
  EXPECT_TRUE(h.add(10, 2.0));
  EXPECT_FALSE(h.add(20, 2.0)) << "as good is no better";
  EXPECT_FALSE(h.add(30, std::nan("")));
  EXPECT_EQ(h.since_best, 2);
  EXPECT_TRUE(h.add(40, 0.1));
  EXPECT_EQ(h.best_step, 40);
  EXPECT_EQ(h.since_best, 0);
  h.add(50, 0.3);
  const ValidationHistory again = ValidationHistory::from_text(h.to_text());
  EXPECT_EQ(again.best, 0.1);
  EXPECT_EQ(again.newest, 50);
  EXPECT_EQ(again.best_step, 40);
  EXPECT_EQ(again.since_best, 1);
  EXPECT_EQ(ValidationHistory::from_text("").newest, 0);
  EXPECT_TRUE(std::isinf(ValidationHistory::from_text(ValidationHistory().to_text()).best));
  EXPECT_THROW(ValidationHistory::from_text("newest one"), Error);
}

// Losses of other samples are not compared with those of before.
TEST(ValidationHistory, OtherSamplesBeginANewOne) {
  ValidationHistory h;
  EXPECT_FALSE(h.go_on_with("a")) << "there is nothing to drop";
  h.add(10, 1.0);
  h.add(20, 2.0);
  h = ValidationHistory::from_text(h.to_text());
  EXPECT_FALSE(h.go_on_with("a"));
  EXPECT_EQ(h.since_best, 1);
  EXPECT_TRUE(h.go_on_with("b"));
  EXPECT_EQ(h.since_best, 0);
  EXPECT_TRUE(h.add(30, 1.5)) << "worse than the best of the others";
  // A checkpoint of 0.2.0 names no samples, and goes on.
  h = ValidationHistory::from_text("newest 20 best_step 10 since_best 1 best 0x1p+0");
  EXPECT_FALSE(h.go_on_with("b"));
  EXPECT_EQ(h.best, 1.0);
}

TEST(ValidationHistory, WhatLossesMustHaveInCommon) {
  const auto identity = [](double share, const char* store, std::int64_t timesteps = 3) {
    Deck deck;
    deck.data.path = "synthetic:clips=20,frames=2,height=8,width=8" + std::string(store);
    deck.get<ValidationDeck>().share = share;
    deck.get<ValidationDeck>().timesteps = timesteps;
    return identity_of_losses(deck,
                              open_training_data(deck.data, {}, held_out_choice(deck)).held_out);
  };
  const std::string same = identity(0.25, "");
  EXPECT_EQ(same.size(), 32u);
  EXPECT_EQ(identity(0.25, ""), same);
  EXPECT_NE(identity(0.2, ""), same) << "fewer clips";
  EXPECT_NE(identity(0.25, ",seed=5"), same) << "as many of another store";
  EXPECT_NE(identity(0.25, "", 4), same) << "measured otherwise";
}

TEST(ValidationResult, IsALineOfJson) {
  ValidationResult r;
  r.total = {0.5, {{"mean_iou", 0.25}}};
  r.buckets = {{"b", 1.0}, {"a", 0.0}};
  r.items = 3;
  EXPECT_EQ(
      r.json(7, "0123"),
      R"({"step":7,"loss":0.5,"set":"0123","buckets":{"b":1.0,"a":0.0},"terms":{"mean_iou":0.25}})");
  EXPECT_EQ(r.text(), "loss 0.50000, mean_iou 0.25000 of 3 samples (b 1.00000, a 0.00000)");
}

Deck tiny_deck() {
  Deck deck;
  deck.run.seed = 11;
  auto& m = deck.get<Stdit3Deck>();
  m.in_channels = 3;
  m.hidden_size = 16;
  m.num_heads = 2;
  m.depth = 2;
  m.caption_channels = 8;
  m.model_max_length = 4;
  deck.get<ValidationDeck>().timesteps = 3;
  deck.get<ValidationDeck>().share = 0.5;
  return deck;
}

struct Measured {
  Deck deck;
  TrainingData data;
  std::unique_ptr<Stdit3Task> task;
  std::unique_ptr<ValidationSet> set;
  std::unique_ptr<Arena> arena = Arena::reserve(std::size_t{1} << 28);
  explicit Measured(Deck d) : deck(std::move(d)) {
    deck.data.path =
        "synthetic:clips=4,frames=2,height=8,width=8;clips=2,frames=1,height=8,width=12";
    data = open_training_data(deck.data, {}, held_out_choice(deck));
    task = std::make_unique<Stdit3Task>(deck);
    task->open(data.training->buckets());
    task->params().allocate(1 << 20, false, true);
    task->params().initialise(3);
    set = task->validation_set(data.held_out);
  }
  std::vector<double> figures(std::size_t item) {
    const ArenaScope scope(*arena);
    std::vector<double> f(set->figures());
    set->measure(item, f);
    return f;
  }
};

// The mean of the squared velocity's error at t = 250, 500, 750, written down in double: the noise
// from Philox's definition, the velocity from the model alone.
TEST(HeldOutLosses, OfStdit3AtFixedTimesteps) {
  Measured m(tiny_deck());
  const ClipSource& source = *m.data.held_out.clips;
  const Bucket& b = source.buckets()[0];
  const auto id = static_cast<std::uint64_t>(source.sample_id(0, 1));
  const std::vector<double> found = m.figures(1);
  ASSERT_EQ(found.size(), 3u);
  std::vector<std::byte> bytes(b.clip_bytes());
  source.read(0, 1, bytes);
  const std::int64_t n = 3 * 2 * 8 * 8, plane = 8 * 8;
  for (std::size_t k = 0; k < 3; ++k) {
    const double t = 250.0 * static_cast<double>(k + 1), s = t / 1000;
    const Philox noise(11, Purpose::held_out_noise, k, id);
    std::vector<float> x(n), target(n);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t c = i / (2 * plane), at = i % (2 * plane);  // of [C,T,H,W] and [T,H,W,C]
      const double x0 =
          std::to_integer<int>(bytes[static_cast<std::size_t>(at * 3 + c)]) / 127.5 - 1;
      const double eps = static_cast<double>(noise.normal(static_cast<std::uint32_t>(i)));
      x[i] = static_cast<float>(x0 + s * (eps - x0));
      target[i] = static_cast<float>(x0 - eps);
    }
    const ArenaScope scope(*m.arena);
    // The batch of a training has the captions and the size; noise and timestep are set here.
    LoadedBatch clip;
    clip.what.clips = {1};
    clip.what.samples = {source.sample_id(0, 1)};
    clip.info = {source.info(0, 1)};
    clip.bytes = bytes;
    Tensor u8 = Tensor::empty({static_cast<std::int64_t>(bytes.size())}, DType::u8);
    u8.set(std::span<const std::byte>(bytes));
    TrainingBatch batch = make_batch(m.deck, b, clip, u8, nullptr, m.task->latents());
    Stdit3Input in = batch.in;
    const auto tau = static_cast<float>(t);
    in.timestep.set(std::span<const float>(&tau, 1));
    in.x = Tensor::from_host(std::span<const float>(x), {1, 3, 2, 8, 8});
    Tape tape(Tape::Mode::infer);
    const Tensor v = m.task->model().forward(tape, in)->value.to_host();
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const double error = static_cast<double>(v.span<float>()[i]) - static_cast<double>(target[i]);
      sum += error * error;
    }
    EXPECT_NEAR(found[k], sum / static_cast<double>(n), 2e-6 * found[k]) << "t = " << t;
  }
}

// What is random in training only leaves the loss as it is.
TEST(HeldOutLosses, WithoutDropoutAndMasks) {
  Measured plain(tiny_deck());
  Deck random = tiny_deck();
  random.get<Stdit3Deck>().class_dropout_prob = 1;
  random.get<Stdit3Deck>().drop_path = 0.5;
  random.get<MaskDeck>().image_head = 1;
  Measured other(random);
  for (std::size_t item = 0; item < plain.set->items().size(); ++item)
    EXPECT_EQ(plain.figures(item), other.figures(item));
}

TEST(HeldOutLosses, PlannedToTheByte) {
  Measured m(tiny_deck());
  const std::size_t planned = m.set->plan(std::size_t{1} << 28);
  for (std::size_t item = 0; item < m.set->items().size(); ++item) m.figures(item);
  EXPECT_EQ(m.arena->peak(), planned);
  EXPECT_THROW(m.set->plan(planned / 2), Error);
}

TEST(HeldOutLosses, TheScoreIsTheMeanOverClipsAndTimesteps) {
  Measured m(tiny_deck());
  const std::vector<double> sums = {3.0, 6.0, 9.0};
  EXPECT_DOUBLE_EQ(m.set->score(sums, 2).loss, 3.0);
}

Deck tiny_vae() {
  Deck deck;
  auto& v = deck.get<VaeDeck>();
  v.spatial_channels = {8, 8};
  v.spatial_res_blocks = 1;
  v.spatial_groups = 2;
  v.filters = 8;
  v.num_res_blocks = 1;
  v.channel_multipliers = {1, 2};
  v.temporal_downsample = {true};
  v.num_groups = 2;
  v.micro_batch_size = 2;
  deck.get<VaeTrainDeck>().pixel_loss = true;
  deck.get<VaeTrainDeck>().latent_loss = true;
  deck.get<ValidationDeck>().share = 0.5;
  deck.data.path = "synthetic:clips=2,frames=5,height=16,width=16";
  return deck;
}

// Of the same frames and noise the terms are those that a training step reports.
TEST(HeldOutTerms, OfTheVaeAreTheTrainings) {
  const Deck deck = tiny_vae();
  VaeTask task(deck);
  task.params().allocate(1 << 20, false, true);
  task.params().initialise(3);
  const auto arena = Arena::reserve(std::size_t{1} << 30);
  const ArenaScope scope(*arena);
  const VaeLoss loss(deck, task.model(), nullptr, nullptr);
  const auto noise = [](const Shape& shape, std::uint64_t stream) {
    Tensor t = Tensor::empty(shape, DType::f32);
    ops::fill_normal(5, static_cast<int>(Purpose::noise), stream, 0, t);
    return t;
  };
  VaeSample in;
  in.frames = noise({1, 5, 16, 16, 3}, 0);
  const std::int64_t side = 16 / task.model().pixels_a_latent();
  in.spatial_noise = noise({1, 5, side, side, SpatialVae::latent_channels}, 1);
  in.temporal_noise = noise(
      {1, task.model().temporal().latent_frames(5), side, side, SpatialVae::latent_channels}, 2);
  const Tensor found = loss.measure(in).to_host();
  task.params().begin_step([](int) {});
  Tape tape;
  const Tensor wanted = loss(tape, in, 1).terms.to_host();
  for (const VaeLoss::Term t : {VaeLoss::pixel, VaeLoss::kl, VaeLoss::latent}) {
    const float w = wanted.span<float>()[t];
    EXPECT_GT(w, 0);
    EXPECT_NEAR(found.span<float>()[t], w, 1e-6 * static_cast<double>(w)) << VaeLoss::names()[t];
  }
}

TEST(HeldOutTerms, TheVaesScoreIsWhatItTrainsFor) {
  for (const bool latents : {false, true}) {
    Deck deck = tiny_vae();
    deck.get<VaeTrainDeck>().latent_loss = latents;
    const TrainingData data = open_training_data(deck.data, {}, held_out_choice(deck));
    VaeTask task(deck);
    task.open(data.training->buckets());
    task.params().allocate(1 << 20, false, true);
    task.params().initialise(3);
    const auto set = task.validation_set(data.held_out);
    ASSERT_EQ(set->items().size(), 1u);
    const auto arena = Arena::reserve(std::size_t{1} << 30);
    const std::size_t planned = set->plan(std::size_t{1} << 30);
    const ArenaScope scope(*arena);
    std::vector<double> f(set->figures()), again(f.size());
    set->measure(0, f);
    EXPECT_EQ(arena->peak(), planned);
    set->measure(0, again);
    EXPECT_EQ(f, again) << "fixed noise";
    const ValidationScore score = set->score(f, 1);
    ASSERT_EQ(score.terms.size(), 4u);
    EXPECT_DOUBLE_EQ(score.loss, f[VaeLoss::pixel] + f[VaeLoss::perceptual] + f[VaeLoss::kl] +
                                     (latents ? f[VaeLoss::latent] : 0));
  }
}

}  // namespace
}  // namespace weft
