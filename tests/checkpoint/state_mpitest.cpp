// Weights of a checkpoint in tables that are only run, whatever the run trained.
#include "checkpoint/checkpoint.h"

#include <gmock/gmock.h>

#include <cstring>

#include "fixture.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"

namespace weft {
namespace {

class StateTest : public CheckpointTest {
 protected:
  StateTest() {
    deck_.model.name = "vae";
    deck_.get<VaeDeck>().spatial_channels = {8, 8};
    deck_.get<VaeDeck>().spatial_res_blocks = 1;
    deck_.get<VaeDeck>().spatial_groups = 4;
    deck_.get<VaeDeck>().filters = 8;
    deck_.get<VaeDeck>().num_res_blocks = 1;
    deck_.get<VaeDeck>().channel_multipliers = {1, 2};
    deck_.get<VaeDeck>().temporal_downsample = {true};
    deck_.get<VaeDeck>().num_groups = 4;
  }

  // The checkpoint of a VAE's run, whose EMA is twice its weights; `trained` keeps them.
  Checkpoint run_of(bool freeze_spatial, VideoVae& trained) {
    deck_.get<VaeTrainDeck>().freeze_spatial = freeze_spatial;
    ParameterTable& table = trained.params();
    table.allocate(1 << 16, false, true);
    table.initialise(5);
    const OptimizerState state(table, true, rank, ranks);
    for (int b = 0; b < std::ssize(table.buckets()); ++b) {
      Tensor average = state.ema(b);
      for (float& v : average.span<float>()) v *= 2;
    }
    CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
    const auto arrays = flat_arrays(table, state, rank, ranks);
    writer.save(describe_state(deck_, table, 3), arrays);
    EXPECT_TRUE(writer.wait());
    return *Checkpoint::newest(run, MPI_COMM_WORLD);
  }

  // Every value of `got`, in each format it has, against what was trained times `factor` (1 of what
  // was not).
  static void expect_weights(const ParameterTable& got, const ParameterTable& trained,
                             float factor) {
    ASSERT_EQ(got.all().size(), trained.all().size());
    for (const auto& p : trained.all()) {
      const Parameter& g = *got.find(p->name);
      ASSERT_TRUE(g.value.defined() || g.working.defined());
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < p->shape.numel(); ++i) {
        const float want = p->value.data<float>()[i] * (p->trainable ? factor : 1.0f);
        if (g.value.defined()) wrong += g.value.data<float>()[i] != want;
        if (g.working.defined()) wrong += g.working.data<bf16>()[i].bits != bf16(want).bits;
      }
      EXPECT_EQ(wrong, 0) << p->name;
    }
  }

  Deck deck_;
};

TEST_F(StateTest, WhatWasNotTrainedIsFoundByAnyTable) {
  for (const bool freeze : {true, false}) {
    VideoVae trained(deck_.get<VaeDeck>(), freeze);
    const Checkpoint checkpoint = run_of(freeze, trained);
    EXPECT_EQ(checkpoint.arrays().at("fixed") > 0, freeze);
    for (const bool table_freezes : {false, true})
      for (const bool bf16_model : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} {}", freeze, table_freezes, bf16_model));
        VideoVae only_run(deck_.get<VaeDeck>(), table_freezes),
            whole(deck_.get<VaeDeck>(), table_freezes);
        only_run.params().allocate_for_inference(bf16_model);
        whole.params().allocate(1 << 18, bf16_model, false);
        for (ParameterTable* table : {&only_run.params(), &whole.params()}) {
          restore_state(checkpoint, *table);
          expect_weights(*table, trained.params(), 1);
          restore_ema(checkpoint, *table);
          expect_weights(*table, trained.params(), 2);
        }
        EXPECT_FALSE(only_run.params().values().defined());
        const Parameter& kernel =
            *only_run.params().find("spatial_vae.module.encoder.conv_in.weight");
        EXPECT_EQ(kernel.value.defined(), !bf16_model) << "an f32 copy that no one reads";
      }
    on_root([&] { fs::remove_all(run); });
  }
}

TEST_F(StateTest, TensorsThatTheModelLacksAreNamed) {
  VideoVae trained(deck_.get<VaeDeck>());
  ParameterTable& table = trained.params();
  table.add("discriminator.w", {4}, {});
  const Checkpoint checkpoint = run_of(false, trained);
  VideoVae smaller(deck_.get<VaeDeck>());
  smaller.params().allocate(1 << 18, false, true);
  OptimizerState state(smaller.params(), true, rank, ranks, true, {0.5});
  const std::vector<std::function<void()>> reads = {
      [&] { restore_state(checkpoint, smaller.params()); },
      [&] { restore_ema(checkpoint, smaller.params()); },
      [&] { restore_state(checkpoint, smaller.params(), state); }};
  for (const auto& read : reads) try {
      read();
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      EXPECT_THAT(e.what(), testing::HasSubstr("lacks 1: \"discriminator.w\""));
    }
  restore_state(checkpoint, smaller.params(), trained.weight_names().spare);
  on_root([&] { fs::remove_all(run); });
}

// Averages i = 0, 1, 2 are the weights times 2, 3, 4.
TEST_F(StateTest, AveragesOfSeveralDecays) {
  deck_.train.ema_decay = {0.99, 0.9999, 0.5};
  VideoVae trained(deck_.get<VaeDeck>());
  ParameterTable& table = trained.params();
  table.allocate(1 << 16, false, true);
  table.initialise(5);
  const OptimizerState state(table, true, rank, ranks, true, deck_.train.ema_decay);
  for (int b = 0; b < std::ssize(table.buckets()); ++b)
    for (int i = 0; i < 3; ++i) {
      Tensor average = state.ema(b, i);
      for (float& v : average.span<float>()) v *= static_cast<float>(2 + i);
    }
  CheckpointWriter writer(run, MPI_COMM_WORLD, 2);
  writer.save(describe_state(deck_, table, 3), flat_arrays(table, state, rank, ranks));
  ASSERT_TRUE(writer.wait());
  const Checkpoint checkpoint = *Checkpoint::newest(run, MPI_COMM_WORLD);
  EXPECT_TRUE(checkpoint.arrays().contains("ema_0.9999"));

  // Weights alone: by decay, or the first.
  VideoVae only_run(deck_.get<VaeDeck>());
  only_run.params().allocate_for_inference(false);
  restore_ema(checkpoint, only_run.params());
  expect_weights(only_run.params(), table, 2);
  for (int i = 0; i < 3; ++i) {
    restore_ema(checkpoint, only_run.params(), deck_.train.ema_decay[static_cast<std::size_t>(i)]);
    expect_weights(only_run.params(), table, static_cast<float>(2 + i));
  }
  try {
    restore_ema(checkpoint, only_run.params(), 0.9);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_THAT(e.what(), testing::HasSubstr("decay 0.9"));
    EXPECT_THAT(e.hint(), testing::HasSubstr("0.99, 0.9999, 0.5"));
  }

  // A run that goes on with other decays, in another order; one of them is new.
  VideoVae next(deck_.get<VaeDeck>());
  next.params().allocate(1 << 16, false, true);
  OptimizerState resumed(next.params(), true, rank, ranks, true, {0.5, 0.7, 0.9999});
  restore_state(checkpoint, next.params(), resumed);
  const float factors[] = {4, 2, 3};
  for (int b = 0; b < std::ssize(table.buckets()); ++b)
    for (int i = 0; i < 3; ++i) {
      const Tensor got = resumed.ema(b, i), master = resumed.master(b);
      std::int64_t wrong = 0;
      for (std::int64_t k = 0; k < got.numel(); ++k)
        wrong += got.data<float>()[k] != factors[i] * master.data<float>()[k];
      EXPECT_EQ(wrong, 0) << "bucket " << b << ", average " << i;
    }
}

TEST_F(StateTest, AnotherModelIsRefusedByName) {
  VideoVae trained(deck_.get<VaeDeck>(), true);
  const Checkpoint checkpoint = run_of(true, trained);
  const auto refusal_of = [&](auto&& change) -> std::string {
    VaeDeck other = deck_.get<VaeDeck>();
    change(other);
    VideoVae vae(other);
    vae.params().allocate_for_inference(false);
    try {
      restore_state(checkpoint, vae.params());
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::checkpoint);
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(refusal_of([](VaeDeck& d) { d.num_res_blocks = 2; }),
              testing::HasSubstr("has no tensor"));
  EXPECT_THAT(refusal_of([](VaeDeck& d) {
                d.spatial_channels = {8, 16};
              }),
              testing::HasSubstr("has no tensor spatial_vae.module."));
  EXPECT_THAT(refusal_of([](VaeDeck& d) { d.filters = 16; }),
              testing::AllOf(testing::HasSubstr("temporal_vae."), testing::HasSubstr("has shape")));
  EXPECT_EQ(refusal_of([](VaeDeck&) {}), "");
}

}  // namespace
}  // namespace weft
