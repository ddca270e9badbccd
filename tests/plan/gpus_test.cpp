// The GPUs of `weft plan --gpu`: scaled rates by hand, and the H100's against steps measured on
// one.
#include "plan/step_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "models/stdit3/task.h"

namespace weft {
namespace {

using testing::HasSubstr;

TEST(Gpus, OthersAreScaledByPublishedPeaks) {
  const Rates h100 = rates_of(find_gpu("h100"), false), h200 = rates_of(find_gpu("h200"), false),
              a100 = rates_of(find_gpu("a100"), false), a100_f32 = rates_of(find_gpu("a100"), true);
  // As many operations in bf16, memory 4.8 to 3.35 times as fast.
  EXPECT_DOUBLE_EQ(h200.products, h100.products);
  EXPECT_DOUBLE_EQ(h200.attention_backward, h100.attention_backward);
  EXPECT_NEAR(h200.bandwidth, 4.012e12, 1e9);
  EXPECT_EQ(h200.gaps, h100.gaps);
  // 312 to 989 TFLOP/s, 2.039 to 3.35 TB/s; in f32 19.5 to 67 TFLOP/s.
  EXPECT_NEAR(a100.products, 183.9e12, 0.1e12);
  EXPECT_NEAR(a100.attention_forward / h100.attention_forward, 0.31547, 1e-5);
  EXPECT_NEAR(a100.convolutions / h100.convolutions, 0.31547, 1e-5);
  EXPECT_NEAR(a100.bandwidth, 1.704e12, 1e9);
  EXPECT_NEAR(a100_f32.products, 14.76e12, 0.01e12);
  EXPECT_THAT(h100.origin, HasSubstr("measured on one of them"));
  for (const Rates& r : {h200, a100, a100_f32})
    EXPECT_THAT(r.origin, HasSubstr("scaled, not measured"));

  Machine machine;
  set_gpu(machine, find_gpu("a100"));
  EXPECT_NEAR(machine.link_bandwidth, 246.7e9, 0.1e9);  // NVLink of 300 to 450 GB/s
  EXPECT_NEAR(machine.host_copy_bandwidth, 27.6e9, 1);  // PCIe 4 to 5
  EXPECT_EQ(find_gpu("h100").memory_gb, 85);
  EXPECT_EQ(find_gpu("h200").memory_gb, 149);
}

TEST(Gpus, UnknownNamesSuggestTheNearest) {
  const auto refusal = [](const std::string& name) -> std::string {
    try {
      find_gpu(name);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      return std::string(e.what()) + " | " + e.hint();
    }
    return "";
  };
  EXPECT_THAT(refusal("h10"), HasSubstr("--gpu h10: unknown GPU | did you mean h100?"));
  EXPECT_THAT(refusal("A10O"), HasSubstr("did you mean a100?"));
  EXPECT_THAT(refusal("mi300x"), HasSubstr("known are h100, h200, a100"));
}

// Steps of STDiT3-XL/2 that an H100 took (validation/results/h100.md), the optimizer's included.
// The rates are those of the first; attention over sequences of 4 and 256 tokens reaches less.
TEST(Gpus, StepsOfTheH100) {
  Deck deck;
  deck.model.dtype = "bf16";
  deck.get<Stdit3Deck>().freeze_y_embedder = true;
  Stdit3Task task(deck);
  task.share_clips(nullptr);
  task.params().allocate(1 << 22, true, true);
  const Rates rates = rates_of(find_gpu("h100"), false);
  const double update = static_cast<double>(task.params().trainable_elements()) *
                        optimizer_bytes_an_element / rates.bandwidth;
  struct Row {
    std::int64_t clips, T, H, W;
    double seconds, within;
  };
  for (const Row& r : {Row{1, 15, 60, 106, 0.4185, 0.03}, Row{16, 4, 32, 32, 0.2863, 0.12},
                       Row{16, 1, 64, 64, 0.2907, 0.06}}) {
    Bucket b;
    b.clips = r.clips;
    b.channels = 4;
    b.dtype = DType::f32;
    b.frames = r.T, b.height = r.H, b.width = r.W;
    b.pixel_frames = 51, b.pixel_height = 8 * r.H, b.pixel_width = 8 * r.W;
    const MicroBatchCost c = dry_run_cost(task, b, r.clips, 0, DeviceKind::cuda, rates, 370e9);
    EXPECT_NEAR((c.seconds() + update) / r.seconds, 1, r.within) << r.T << "x" << r.H << "x" << r.W;
  }
}

}  // namespace
}  // namespace weft
