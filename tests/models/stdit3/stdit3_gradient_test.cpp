// Every gradient of the whole model against differences of its forward, over the ways in which it
// can be configured.
#include <omp.h>

#include "fixture.h"
#include "models/stdit3/options.h"

namespace weft::test {
namespace {

struct Case {
  const char* name;
  Stdit3Config deck;
  Batch batch;
};

template <class F>
Case make(const char* name, F&& change) {
  Case c{name, tiny_model(), Batch{}};
  change(c.deck, c.batch);
  return c;
}

class Stdit3Gradient : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(Stdit3Gradient, MatchesDifferences) {
  omp_set_num_threads(1);  // thousands of tiny forwards: threads would only wait for each other
  const auto& [name, deck, batch] = GetParam();
  Model model(deck);
  const Stdit3Input in = make_input(deck, batch);
  const Vec g = random_values(model.outputs(in), 55);
  const std::size_t before = arena_->used();
  const auto inputs = model.backward(in, g);
  EXPECT_EQ(arena_->used(), before) << "something of the step stayed behind";
  const auto loss = [&] { return dot(model(in), g); };

  // Rounding of an f32 forward over the smallest gradients; a contribution left out shows at 0.1
  // and more.
  const double bound = 2e-2;
  const Vec out = model(in);
  const double rounding = 4e-5 * std::sqrt(dot(out, out));  // f32 over steps of about 0.01
  for (const auto& p : model.net.params().all()) {
    if (!p->trainable) {
      EXPECT_FALSE(p->grad.defined()) << p->name;
      continue;
    }
    const Vec gradient = to_values(p->grad);
    if (deck.skip_y_embedder && p->name.starts_with("y_embedder.")) {
      EXPECT_EQ(gradient, Vec(gradient.size(), 0.0)) << p->name << " has no part in the output";
      continue;
    }
    // A frame alone attends to itself whatever q and k are: what is left of their gradient is
    // rounding.
    if (batch.T == 1 && p->name.starts_with("temporal_blocks.") &&
        p->name.ends_with("_norm.weight"))
      continue;
    expect_slope(p->name, p->value, gradient, loss, bound, rounding);
  }
  expect_slope("x", in.x, inputs.x, loss, bound, rounding);
  expect_slope("y", in.captions.y, inputs.y, loss, bound, rounding);
}

INSTANTIATE_TEST_SUITE_P(
    Configurations, Stdit3Gradient,
    testing::Values(make("plain", [](Stdit3Config&, Batch&) {}),
                    make("masked", [](Stdit3Config&, Batch& b) { b.masked = true; }),
                    make("drop_path", [](Stdit3Config&, Batch& b) { b.dropped = true; }),
                    make("masked_drop_path_recompute",
                         [](Stdit3Config& d, Batch& b) {
                           b.masked = b.dropped = true;
                           d.recompute = 0.75;
                         }),
                    make("a_sample_without_caption",
                         [](Stdit3Config&, Batch& b) {
                           b.captions = {{}, {3, 0}, {}};
                         }),
                    make("no_qk_norm_no_sigma",
                         [](Stdit3Config& d, Batch&) { d.qk_norm = d.pred_sigma = false; }),
                    make("single_pixels",
                         [](Stdit3Config& d, Batch& b) {
                           d.patch_size = {1, 1, 1};
                           b.masked = true;
                         }),
                    make("patches_in_time",
                         [](Stdit3Config& d, Batch&) {
                           d.patch_size = {2, 2, 2};
                         }),
                    make("skip_y_embedder",
                         [](Stdit3Config& d, Batch& b) {
                           d.skip_y_embedder = true;
                           b.captions = {{0, 1, 2}, {2}, {1, 3}};
                         }),
                    make("only_train_temporal",
                         [](Stdit3Config& d, Batch& b) {
                           d.only_train_temporal = true;
                           b.masked = true;
                         }),
                    make("freeze_y_embedder",
                         [](Stdit3Config& d, Batch&) { d.freeze_y_embedder = true; }),
                    // Wide heads and short captions: cross attention with its projections absorbed.
                    make("absorbed",
                         [](Stdit3Config& d, Batch& b) {
                           d.hidden_size = 48;
                           d.depth = 1;
                           b.masked = true;
                         }),
                    make("absorbed_recompute_frozen",
                         [](Stdit3Config& d, Batch& b) {
                           d.hidden_size = 48;
                           d.depth = 1;
                           d.only_train_temporal = true;
                           d.recompute = 1;
                           b.dropped = true;
                         }),
                    make("one_frame", [](Stdit3Config&, Batch& b) { b.T = 1; })),
    [](const auto& one) { return std::string(one.param.name); });

// Freezing and recomputing decide what is kept, never what a gradient is.
TEST_F(OpTest, FrozenAndRecomputedModelsHaveTheSameGradients) {
  const Batch batch{.masked = true, .dropped = true};
  for (const std::int64_t width : {12, 48}) {  // 48: with absorbed cross attention
    Stdit3Config deck = tiny_model();
    deck.hidden_size = width;
    Model whole(deck);
    const Stdit3Input in = make_input(deck, batch);
    const Vec g = random_values(whole.outputs(in), 55);
    const auto inputs = whole.backward(in, g);
    const auto expect_equal = [&](const Stdit3Config& other, std::size_t frozen) {
      Model m(other);
      const auto other_inputs = m.backward(in, g);
      EXPECT_EQ(other_inputs.x, inputs.x);
      EXPECT_EQ(other_inputs.y, inputs.y);
      std::size_t missing = 0;
      for (const auto& p : m.net.params().all()) {
        const Parameter* twin = whole.net.params().find(p->name);
        if (p->trainable)
          EXPECT_TRUE(same_bits(p->grad, twin->grad)) << p->name;
        else
          missing += twin->trainable;
      }
      EXPECT_EQ(missing, frozen);
    };
    for (const double share : {0.2, 0.5, 1.0}) {
      deck.recompute = share;
      expect_equal(deck, 0);
    }
    deck.freeze_y_embedder = true;
    expect_equal(deck, 4);
    deck.freeze_y_embedder = false;
    deck.only_train_temporal = true;  // 19 outside the blocks, 17 a spatial block
    deck.recompute = 0;
    expect_equal(deck, 19 + 2 * 17);
  }
}

}  // namespace
}  // namespace weft::test
