// The planning arena promises a training step's peak to the byte.
#include "models/stdit3/options.h"
#include "planned_step.h"

namespace weft::test {
namespace {

struct Step {
  const char* name;
  bool masked, dropped;
  double recompute;
  const char* dtype;
  std::int64_t width = 48;  // wide enough for absorbed cross attention
};

class Stdit3Memory : public testing::TestWithParam<Step> {};

TEST_P(Stdit3Memory, PlannedPeakIsTheRealPeak) {
  const Step s = GetParam();
  Stdit3Config deck = tiny_model();
  deck.hidden_size = s.width;
  deck.recompute = s.recompute;
  deck.dtype = s.dtype;
  const Batch batch{.B = 2, .T = 4, .H = 8, .W = 8, .masked = s.masked, .dropped = s.dropped};
  Model model(deck);
  const auto planning = Arena::planning(), real = Arena::reserve(std::size_t{1} << 28);
  const std::size_t planned = peak_of_step(*planning, model, batch);
  EXPECT_EQ(planned, peak_of_step(*real, model, batch));
  // Planning touches no parameter's gradient and no memory: a second plan says the same.
  const auto again = Arena::planning();
  EXPECT_EQ(peak_of_step(*again, model, batch), planned);
}

INSTANTIATE_TEST_SUITE_P(
    Steps, Stdit3Memory,
    testing::Values(Step{"plain", false, false, 0, "f32"}, Step{"masked", true, false, 0, "f32"},
                    Step{"drop_path", false, true, 0, "f32"},
                    Step{"recompute", false, false, 1, "f32"},
                    Step{"half_recompute_masked", true, true, 0.5, "f32"},
                    Step{"plain_attention", false, false, 0, "f32", 32},
                    Step{"plain_attention_masked_recompute", true, true, 1, "f32", 32},
                    Step{"bf16", false, false, 0, "bf16"},
                    Step{"bf16_masked_recompute", true, true, 1, "bf16"}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(Stdit3Planning, RecomputeLowersThePeakByMostOfTheBlocks) {
  Stdit3Config deck = tiny_model();
  deck.depth = 8;
  const Batch batch{.B = 2, .T = 4, .H = 16, .W = 16};
  std::size_t peaks[3];
  for (const int k : {0, 1, 2}) {
    deck.recompute = 0.5 * k;
    Model model(deck);
    const auto planning = Arena::planning();
    peaks[k] = peak_of_step(*planning, model, batch);
  }
  EXPECT_LT(peaks[1], 0.65 * static_cast<double>(peaks[0]));
  EXPECT_LT(peaks[2], 0.3 * static_cast<double>(peaks[0]));
}

}  // namespace
}  // namespace weft::test
