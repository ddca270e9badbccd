// How many micro-batches of the real stages run as recorded graphs: the decks' own buckets, batch
// sizes and division over 128 ranks, with graphs that hold one small kernel.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "config/deck.h"
#include "core/philox.h"
#include "data/clip_source.h"
#include "data/step_plan.h"
#include "jobs/jobs.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"
#include "nn/parameters.h"
#include "ops/pointwise.h"
#include "tensor/device.h"
#include "tensor/tensor.h"
#include "train/step_work.h"

namespace weft {
namespace {

class StageDecks : public testing::TestWithParam<const char*> {};

TEST_P(StageDecks, NineOfTenMicroBatchesAreReplayed) {
  constexpr int ranks = 128, steps = 1000;
  register_deck_tables();
  if (!on_cuda()) use_gpu(0);
  const auto arena = Arena::reserve(1 << 20, DeviceKind::cuda);
  const ArenaScope scope(*arena);
  Tensor scratch = Tensor::empty({64}, DType::f32);
  const Deck deck = load_deck(std::string(WEFT_INPUTS) + "/" + GetParam(), {});
  const auto& patch = deck.get<Stdit3Deck>().patch_size;
  const auto source = open_clip_source(deck.data);
  const auto buckets = source->buckets();
  const auto planner =
      source->plan_steps(batch_sizes(deck.train, buckets), deck.train.micro_batches, 42);
  const auto tokens = [&](const Bucket& b) {
    const auto up = [](std::int64_t n, std::int64_t d) { return (n + d - 1) / d; };
    return up(b.frames, patch[0]) * up(b.height, patch[1]) * up(b.width, patch[2]);
  };
  // T5 tokens of a caption: half have more than 110, one in 40 the 300 that are kept.
  const auto caption = [](std::int64_t sample) {
    const Philox random(7, Purpose::synthetic, 0, static_cast<std::uint64_t>(sample));
    const double u = std::max(1e-12, static_cast<double>(random.uniform(0)));
    const double normal = std::sqrt(-2.0 * std::log(u)) *
                          std::cos(6.283185307179586 * static_cast<double>(random.uniform(1)));
    return static_cast<std::size_t>(std::clamp(110.0 * std::exp(0.5 * normal), 10.0, 300.0));
  };

  StepGraphs graphs(true);
  ParameterTable table;
  for (int step = 0; step < steps; ++step) {
    const std::vector<MicroBatch> plan = planner->plan(step);
    std::vector<double> costs;
    for (const MicroBatch& m : plan)
      costs.push_back(static_cast<double>(tokens(buckets[m.bucket])) *
                      static_cast<double>(m.clips.size()));
    const std::vector<int> owner = owners(costs, ranks, SyncMode::per_step);
    std::vector<const MicroBatch*> mine;
    for (std::size_t i = 0; i < plan.size(); ++i)
      if (owner[i] == 0) mine.push_back(&plan[i]);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const MicroBatch& m = *mine[i];
      std::size_t rows = 0;
      for (const SampleId sample : m.samples) rows += caption(sample);
      const std::int64_t clips = std::ssize(m.clips);
      // As Trainer::run_micro_batch() and Stdit3Task::prepare() make it; new weights are on their
      // way in a step's first.
      const std::string key =
          fmt::format("bucket {} clips {} first {} last {} arriving {} captions {}", m.bucket,
                      clips, i == 0, i + 1 == mine.size(), i == 0 && step > 0,
                      padded_caption_rows(rows, clips, clips * tokens(buckets[m.bucket])));
      graphs.run(key, table, [&] { ops::fill_zero(scratch); });
    }
  }
  const double share = static_cast<double>(graphs.replays()) / static_cast<double>(graphs.runs());
  RecordProperty("share", std::to_string(share));
  fmt::print("{}: {} of {} micro-batches replayed ({:.1f} %), {} graphs\n", GetParam(),
             graphs.replays(), graphs.runs(), 100 * share, graphs.recorded());
  EXPECT_GE(share, 0.9);
}

INSTANTIATE_TEST_SUITE_P(Stages, StageDecks,
                         testing::Values("stage1.toml", "stage2.toml", "stage3.toml"));

}  // namespace
}  // namespace weft
