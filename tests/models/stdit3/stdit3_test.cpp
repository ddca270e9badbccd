// STDiT3: names, shapes and initial values, its forward, gradients, and the memory of a step.
#include "models/stdit3/stdit3.h"

#include <omp.h>
#include <map>

#include "core/error.h"
#include "fixture.h"
#include "models/stdit3/options.h"
#include "planned_step.h"

namespace weft::test {
namespace {

// The state dictionary of a release, from the table of docs/models/stdit3.md, Parameters.
std::map<std::string, Shape> released(std::int64_t C, std::int64_t depth, std::int64_t D) {
  std::map<std::string, Shape> s;
  const auto linear = [&](const std::string& name, std::int64_t out, std::int64_t in) {
    s[name + ".weight"] = {out, in};
    s[name + ".bias"] = {out};
  };
  s["rope.freqs"] = {D / 2};
  s["x_embedder.proj.weight"] = {C, 4, 1, 2, 2};
  s["x_embedder.proj.bias"] = {C};
  for (const std::string name : {"t_embedder", "fps_embedder"}) {
    linear(name + ".mlp.0", C, 256);
    linear(name + ".mlp.2", C, C);
  }
  linear("t_block.1", 6 * C, C);
  s["y_embedder.y_embedding"] = {300, 4096};
  linear("y_embedder.y_proj.fc1", C, 4096);
  linear("y_embedder.y_proj.fc2", C, C);
  for (const std::string kind : {"spatial", "temporal"})
    for (std::int64_t i = 0; i < depth; ++i) {
      const std::string b = kind + "_blocks." + std::to_string(i);
      s[b + ".scale_shift_table"] = {6, C};
      linear(b + ".attn.qkv", 3 * C, C);
      s[b + ".attn.q_norm.weight"] = {D};
      s[b + ".attn.k_norm.weight"] = {D};
      linear(b + ".attn.proj", C, C);
      linear(b + ".cross_attn.q_linear", C, C);
      linear(b + ".cross_attn.kv_linear", 2 * C, C);
      linear(b + ".cross_attn.proj", C, C);
      linear(b + ".mlp.fc1", 4 * C, C);
      linear(b + ".mlp.fc2", C, 4 * C);
    }
  s["final_layer.scale_shift_table"] = {2, C};
  linear("final_layer.linear", 32, C);
  return s;
}

TEST(Stdit3Names, XlIsTheReleasedStateDictionary) {
  Stdit3 model{Stdit3Config{}};  // nothing is allocated
  const auto expected = released(1152, 28, 72);
  ASSERT_EQ(expected.size(), 973u);
  EXPECT_EQ(model.params().all().size(), 973u);
  for (const auto& [name, shape] : expected) {
    const Parameter* p = model.params().find(name);
    ASSERT_NE(p, nullptr) << name;
    EXPECT_EQ(p->shape, shape) << name << " " << p->shape.str();
    EXPECT_EQ(p->trainable, name != "rope.freqs" && name != "y_embedder.y_embedding") << name;
  }
  EXPECT_EQ(model.params().total_elements() - 300 * 4096, 1207643972);
  EXPECT_EQ(model.params().trainable_elements(), 1207643972 - 36);
}

TEST(Stdit3Names, OtherConfigurations) {
  Stdit3Config frozen;
  frozen.freeze_y_embedder = true;
  EXPECT_EQ(Stdit3(frozen).params().trainable_elements(), 1201595936);
  Stdit3Config temporal;
  temporal.only_train_temporal = true;
  EXPECT_EQ(Stdit3(temporal).params().trainable_elements(), 28 * 21255696);
  Stdit3Config larger;
  larger.hidden_size = 1872;
  larger.num_heads = 26;
  Stdit3 model(larger);
  for (const auto& [name, shape] : released(1872, 28, 72)) {
    const Parameter* p = model.params().find(name);
    ASSERT_NE(p, nullptr) << name;
    EXPECT_EQ(p->shape, shape) << name;
  }
  Stdit3Config plain;
  plain.qk_norm = plain.pred_sigma = false;
  Stdit3 without(plain);
  EXPECT_EQ(without.params().all().size(), 973u - 2 * 56);
  EXPECT_EQ(without.params().find("final_layer.linear.weight")->shape, (Shape{16, 1152}));
  EXPECT_EQ(without.out_channels(), 4);
}

TEST(Stdit3Names, OperationsOfTheReleasedModel) {
  const Stdit3 model{Stdit3Config{}};
  // docs/models/stdit3.md, Operations, TFLOP at 120 caption rows.
  EXPECT_NEAR(model.forward_flops(15, 405, 120) * 1e-12, 13.2, 0.1);
  EXPECT_NEAR(model.forward_flops(30, 920, 120) * 1e-12, 61.7, 0.2);
  EXPECT_NEAR(model.forward_flops(15, 3600, 120) * 1e-12, 139.3, 0.4);
}

class Stdit3Test : public OpTest {};

// docs/models/stdit3.md, Initialisation.
TEST_F(Stdit3Test, Initialisation) {
  Stdit3Config deck = tiny_model();
  deck.hidden_size = 64;
  deck.caption_channels = 96;
  deck.model_max_length = 30;
  Stdit3 model(deck);
  model.params().allocate(1 << 16, false, false);
  model.params().initialise(11);
  for (const auto& p : model.params().all()) {
    const Vec v = to_values(p->value);
    const auto n = static_cast<double>(v.size());
    double largest = 0;
    for (const double x : v) largest = std::max(largest, std::abs(x));
    const double variance = dot(v, v) / n;
    const std::string& name = p->name;
    const bool temporal = name.starts_with("temporal_blocks.");
    const auto ends = [&](const char* what) { return name.ends_with(what); };
    if (name == "rope.freqs") {
      for (std::size_t i = 0; i < v.size(); ++i)
        EXPECT_FLOAT_EQ(v[i], std::pow(10000.0, -static_cast<double>(i) / n));
    } else if (ends("norm.weight")) {
      EXPECT_EQ(v, Vec(v.size(), 1.0)) << name;
    } else if (name.starts_with("x_embedder")) {
      const double half = 1 / std::sqrt(2.0 * 4);  // in_channels * patch
      EXPECT_LE(largest, half) << name;
      EXPECT_NEAR(variance, half * half / 3, 5 * half * half / 3 * std::sqrt(0.8 / n)) << name;
    } else if (ends(".bias") || name == "fps_embedder.mlp.2.weight" ||
               (temporal && (ends(".attn.proj.weight") || ends("cross_attn.proj.weight") ||
                             ends(".mlp.fc2.weight")))) {
      EXPECT_EQ(v, Vec(v.size(), 0.0)) << name;
    } else if (ends("scale_shift_table") || name == "fps_embedder.mlp.0.weight" ||
               ends("y_embedding")) {
      const double sigma = ends("y_embedding")         ? 1 / std::sqrt(96.0)
                           : ends("scale_shift_table") ? 1 / std::sqrt(64.0)
                                                       : 0.02;
      EXPECT_NEAR(variance, sigma * sigma, 5 * sigma * sigma * std::sqrt(2 / n)) << name;
      EXPECT_GT(largest, 1.8 * sigma) << name << " is not normal";
    } else {  // Xavier: uniform of half width sqrt(6 / (in + out))
      const double half = std::sqrt(6.0 / static_cast<double>(p->shape[0] + p->shape[1]));
      EXPECT_LE(largest, half) << name;
      EXPECT_GT(largest, 0.99 * half) << name;
      EXPECT_NEAR(variance, half * half / 3, 5 * half * half / 3 * std::sqrt(0.8 / n)) << name;
    }
  }
}

TEST_F(Stdit3Test, TemporalBlocksStartAsIdentityAndFpsUnseen) {
  const Stdit3Config deck = tiny_model();
  Model model(deck);
  ParameterTable& params = model.net.params();
  params.initialise(8);
  Stdit3Input in = make_input(deck, {.masked = true});
  const Vec start = model(in);
  const auto others = random_values(20000, 71);
  for (const auto& p : params.all()) {
    if (!p->name.starts_with("temporal_blocks.") || p->name.ends_with(".bias") ||
        dot(to_values(p->value), to_values(p->value)) == 0)
      continue;
    for (std::int64_t i = 0; i < p->value.numel(); ++i)
      p->value.data<float>()[i] += static_cast<float>(others[i]);
  }
  EXPECT_EQ(model(in), start) << "a temporal block does something";
  for (float& f : in.fps.span<float>()) f *= 2;
  EXPECT_EQ(model(in), start) << "the fps embedding is not zero";
  params.find("temporal_blocks.1.mlp.fc2.weight")->value.data<float>()[3] = 0.5f;
  EXPECT_NE(model(in), start) << "the temporal blocks are not run at all";
}

TEST_F(Stdit3Test, ASampleAloneIsTheSampleInItsBatch) {
  for (const bool masked : {false, true}) {
    Stdit3Config deck = tiny_model();
    if (masked) deck.hidden_size = 48;  // short captions absorbed
    Model model(deck);
    const Batch batch{.masked = masked, .dropped = true};
    const Stdit3Input in = make_input(deck, batch);
    const Vec all = model(in);
    const auto n = all.size() / 3;
    for (std::int64_t b = 0; b < batch.B; ++b) {
      Stdit3Input one = in;
      one.x = in.x.slice(b, b + 1);
      one.timestep = in.timestep.slice(b, b + 1);
      one.fps = in.fps.slice(b, b + 1);
      if (masked) one.x_mask = in.x_mask.slice(b, b + 1);
      Vec keep;
      for (std::int64_t site = 0; site < 4 * deck.depth; ++site)
        keep.push_back(in.drop_path.data<float>()[site * batch.B + b]);
      one.drop_path = to_tensor(keep, {deck.depth, 2, 2, 1});
      const std::int32_t* offsets = in.captions.offsets.data<std::int32_t>();
      one.captions.lengths = {in.captions.lengths[b]};
      one.captions.index = in.captions.index.slice(offsets[b], offsets[b + 1]);
      one.captions.offsets =
          to_tensor({0, static_cast<double>(offsets[b + 1] - offsets[b])}, {2}, DType::i32);
      const Vec alone = model(one);
      const auto first = all.begin() + b * static_cast<std::int64_t>(n);
      EXPECT_LT(relative_error(alone, Vec(first, first + static_cast<std::int64_t>(n))), 3e-6);
    }
  }
}

TEST_F(Stdit3Test, TheFrameMaskChangesItsSampleOnly) {
  const Stdit3Config deck = tiny_model();
  Model model(deck);
  Stdit3Input in = make_input(deck, {});
  const Vec plain = model(in);
  const auto sample = [](const Vec& v, int b) {
    const auto n = static_cast<std::int64_t>(v.size()) / 3;
    return Vec(v.begin() + b * n, v.begin() + (b + 1) * n);
  };
  in.x_mask = to_tensor(Vec(9, 1.0), {3, 3}, DType::u8);
  EXPECT_LT(relative_error(model(in), plain), 3e-6) << "a mask of ones is no mask";
  in.x_mask = to_tensor({1, 1, 1, 0, 1, 1, 1, 1, 1}, {3, 3}, DType::u8);
  const Vec clean = model(in);
  for (const int b : {0, 2}) EXPECT_LT(relative_error(sample(clean, b), sample(plain, b)), 3e-6);
  EXPECT_GT(relative_error(sample(clean, 1), sample(plain, 1)), 0.05);
  // At t = 0 the clean frame's modulation is the others'; only the second norm of the final layer
  // tells them apart.
  in.timestep.data<float>()[1] = 0;
  const Vec zero = sample(model(in), 1);
  in.x_mask.release();
  const Vec zero_plain = sample(model(in), 1);
  const std::size_t frame = 15;
  double inside = 0, outside = 0;
  for (std::size_t i = 0; i < zero.size(); ++i)
    (i / frame % 3 == 0 ? inside : outside) += std::abs(zero[i] - zero_plain[i]);
  EXPECT_GT(inside, 1);
  EXPECT_LT(outside, 1e-3);
}

// A dropped branch is a branch whose last layer is zero, for its sample alone.
TEST_F(Stdit3Test, DropPathDropsTheBranchItNames) {
  const Stdit3Config deck = tiny_model();
  Model model(deck);
  Stdit3Input in = make_input(deck, {});
  const Vec plain = model(in);
  const auto n = static_cast<std::int64_t>(plain.size()) / 3;
  const auto sample = [n](const Vec& v, std::int64_t b) {
    return Vec(v.begin() + b * n, v.begin() + (b + 1) * n);
  };
  for (std::int64_t site = 0; site < 4 * deck.depth; ++site) {
    const std::int64_t b = site % 3;
    Vec keep(static_cast<std::size_t>(12 * deck.depth), 1.0);
    keep[3 * site + b] = 0;
    in.drop_path = to_tensor(keep, {deck.depth, 2, 2, 3});
    const Vec dropped = model(in);
    in.drop_path.release();
    const std::string last = (site / 2 % 2 == 0 ? "spatial" : "temporal") +
                             std::string("_blocks.") + std::to_string(site / 4) +
                             (site % 2 == 0 ? ".attn.proj" : ".mlp.fc2");
    std::vector<std::pair<Tensor, std::vector<float>>> saved;
    for (const char* part : {".weight", ".bias"}) {
      const Tensor& t = model.net.params().find(last + part)->value;
      saved.emplace_back(t, floats(t));
      std::fill_n(t.data<float>(), t.numel(), 0.0f);
    }
    const Vec zeroed = model(in);
    for (auto& [t, values] : saved) std::copy(values.begin(), values.end(), t.data<float>());
    for (std::int64_t other = 0; other < 3; ++other)
      EXPECT_EQ(sample(dropped, other), sample(other == b ? zeroed : plain, other)) << last;
    EXPECT_NE(sample(dropped, b), sample(plain, b)) << last;
  }
}

TEST_F(Stdit3Test, TheNullCaptionIsTheTablesEmbedding) {
  const Stdit3Config deck = tiny_model();
  Model model(deck);
  Stdit3Input in = make_input(deck, {.captions = {{-1, -2, -3}, {-1, -2}, {-1}}});
  const Vec expected = model(in);
  in.captions.y.release();
  EXPECT_EQ(model(in), expected) << "features that nobody refers to were read";
  // The same rows handed in as features.
  Stdit3Input given = make_input(deck, {.captions = {{0, 1, 2}, {0, 1}, {0}}});
  const Tensor& null = model.net.params().find("y_embedder.y_embedding")->value;
  for (std::int64_t b = 0; b < 3; ++b)
    std::copy_n(null.data<float>(), null.numel(),
                given.captions.y.data<float>() + b * null.numel());
  EXPECT_EQ(model(given), expected);
}

TEST_F(Stdit3Test, Bf16IsCloseToF32) {
  Stdit3Config deck = tiny_model();
  deck.hidden_size = 64;
  Model exact(deck);
  deck.dtype = "bf16";
  Model rounded_model(deck);
  const Stdit3Input in = make_input(deck, {.masked = true, .dropped = true});
  EXPECT_LT(relative_error(rounded_model(in), exact(in)), 8 * 0x1p-8);
  const Vec g = random_values(exact.outputs(in), 5);
  const auto inputs = exact.backward(in, g), low = rounded_model.backward(in, g);
  EXPECT_LT(relative_error(low.x, inputs.x), 16 * 0x1p-8);
  // Gradients of captions cancel over the tokens, and are added up over the blocks in bf16.
  EXPECT_LT(relative_error(low.y, inputs.y), 32 * 0x1p-8);
  EXPECT_LT(relative_error(to_values(rounded_model.net.params().grads()),
                           to_values(exact.net.params().grads())),
            16 * 0x1p-8);
  EXPECT_GT(relative_error(low.x, inputs.x), 1e-5) << "bf16 was not used";
}

// Operands of 4 bits of mantissa, so 2 to 3 % off each, in all products of the blocks.
TEST_F(Stdit3Test, Fp8IsCloseToBf16) {
  Stdit3Config deck = tiny_model();
  deck.hidden_size = 64;
  deck.dtype = "bf16";
  Model exact(deck);
  deck.dtype = "fp8";
  Model rounded_model(deck);
  deck.recompute = 1;
  Model again(deck);
  const Stdit3Input in = make_input(deck, {.masked = true, .dropped = true});
  const Vec out = rounded_model(in);
  EXPECT_LT(relative_error(out, exact(in)), 0.1);
  EXPECT_GT(relative_error(out, exact(in)), 0.003) << "fp8 was not used";
  EXPECT_EQ(again(in), out);
  const Vec g = random_values(exact.outputs(in), 5);
  exact.backward(in, g), rounded_model.backward(in, g), again.backward(in, g);
  const auto gradients = [](Model& m) { return to_values(m.net.params().grads()); };
  const Vec a = gradients(exact), b = gradients(rounded_model);
  EXPECT_GT(dot(a, b) / std::sqrt(dot(a, a) * dot(b, b)), 0.99);
  EXPECT_EQ(gradients(again), b) << "recomputing changes bits";
}

// ---- Gradients

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

// ---- Memory

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
    testing::Values(
        Step{"plain", false, false, 0, "f32"}, Step{"masked", true, false, 0, "f32"},
        Step{"drop_path", false, true, 0, "f32"}, Step{"recompute", false, false, 1, "f32"},
        Step{"half_recompute_masked", true, true, 0.5, "f32"},
        Step{"plain_attention", false, false, 0, "f32", 32},
        Step{"plain_attention_masked_recompute", true, true, 1, "f32", 32},
        Step{"bf16", false, false, 0, "bf16"}, Step{"bf16_masked_recompute", true, true, 1, "bf16"},
        Step{"fp8", false, false, 0, "fp8"}, Step{"fp8_masked_recompute", true, true, 1, "fp8"}),
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
