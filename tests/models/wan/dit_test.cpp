// Wan: names and counts, its forward against a restatement in f64, gradients, loss and memory.
#include "models/wan/dit.h"

#include <gmock/gmock.h>
#include <omp.h>

#include <cmath>
#include <map>

#include "core/error.h"
#include "fixture.h"
#include "ops/pointwise.h"
#include "tensor/tensor.h"

namespace weft::test {
namespace {

using testing::HasSubstr;

TEST(WanShape, CountsOfTheReleasedModels) {
  const Wan small{WanConfig{}};  // nothing is allocated
  EXPECT_EQ(small.params().total_elements(), 1'418'996'800);
  EXPECT_EQ(small.params().all().size(), 825u);
  WanConfig d;
  d.hidden_size = 5120;
  d.depth = d.num_heads = 40;
  d.ffn_dim = 13824;
  const Wan large{d};
  EXPECT_EQ(large.params().total_elements(), 14'288'491'584);
  EXPECT_EQ(large.params().all().size(), 1095u);
  d.variant = "i2v", d.in_channels = 36, d.out_channels = 16;
  EXPECT_EQ(Wan(d).params().total_elements(), 14'288'901'184);
  WanConfig ti2v;
  ti2v.variant = "ti2v", ti2v.in_channels = 48;
  ti2v.hidden_size = 3072, ti2v.num_heads = 24, ti2v.ffn_dim = 14336;
  EXPECT_EQ(Wan(ti2v).params().total_elements(), 4'999'787'712);
  EXPECT_NEAR(Wan(ti2v).flops(31, 44, 80) / 516e12, 1, 0.01);
  for (const auto& [name, shape] :
       std::map<std::string, Shape>{{"patch_embedding.weight", {5120, 16, 1, 2, 2}},
                                    {"text_embedding.0.weight", {5120, 4096}},
                                    {"time_embedding.0.weight", {5120, 256}},
                                    {"time_projection.1.bias", {6 * 5120}},
                                    {"blocks.39.modulation", {1, 6, 5120}},
                                    {"blocks.0.self_attn.norm_k.weight", {5120}},
                                    {"blocks.7.cross_attn.o.bias", {5120}},
                                    {"blocks.0.norm3.bias", {5120}},
                                    {"blocks.0.ffn.2.weight", {5120, 13824}},
                                    {"head.modulation", {1, 2, 5120}},
                                    {"head.head.weight", {64, 5120}}}) {
    const Parameter* p = large.params().find(name);
    ASSERT_NE(p, nullptr) << name;
    EXPECT_EQ(p->shape, shape) << name << " " << p->shape.str();
  }
  // 81 frames of 480x832: what docs/models/wan.md and the paper's cost say, keys of the text aside.
  EXPECT_NEAR(small.flops(21, 60, 104) / 283e12, 1, 0.01);
  EXPECT_NEAR(large.flops(21, 60, 104) / 1.68e15, 1, 0.01);
}

// ---- A restatement in f64, token by token, from docs/models/wan.md

class Restated {
 public:
  Restated(const WanModel& m) : d_(m.net.config()) {
    for (const auto& p : m.net.params().all()) w_[p->name] = to_values(p->value);
  }
  // y [out] = W x + b.
  Vec linear(const std::string& name, const Vec& x) const {
    const Vec &w = w_.at(name + ".weight"), &b = w_.at(name + ".bias");
    Vec y = b;
    for (std::size_t o = 0; o < b.size(); ++o)
      for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
    return y;
  }
  static Vec gelu(Vec v) {
    for (double& z : v)
      z = 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    return v;
  }
  static Vec silu(Vec v) {
    for (double& z : v) z /= 1 + std::exp(-z);
    return v;
  }
  static Vec layer_norm(const Vec& x) {
    double mean = 0, var = 0;
    for (const double v : x) mean += v / static_cast<double>(x.size());
    for (const double v : x) var += (v - mean) * (v - mean) / static_cast<double>(x.size());
    Vec y;
    for (const double v : x) y.push_back((v - mean) / std::sqrt(var + 1e-6));
    return y;
  }
  Vec rms(const std::string& name, const Vec& x) const {
    double squares = 0;
    for (const double v : x) squares += v * v / static_cast<double>(x.size());
    Vec y;
    for (std::size_t i = 0; i < x.size(); ++i)
      y.push_back(w_.at(name)[i] * x[i] / std::sqrt(squares + 1e-6));
    return y;
  }
  // Of a token at (t, row, column), head by head.
  Vec rotate(Vec x, std::array<std::int64_t, 3> at) const {
    const std::int64_t D = d_.hidden_size / d_.num_heads, side = D / 6;
    const std::array<std::int64_t, 3> pairs = {D / 2 - 2 * side, side, side};
    for (std::int64_t h = 0; h < d_.num_heads; ++h) {
      std::int64_t channel = h * D;
      for (std::size_t axis = 0; axis < 3; ++axis)
        for (std::int64_t i = 0; i < pairs[axis]; ++i, channel += 2) {
          const double a =
              static_cast<double>(at[axis]) *
              std::pow(10000, -static_cast<double>(i) / static_cast<double>(pairs[axis]));
          const double x0 = x[channel], x1 = x[channel + 1];
          x[channel] = x0 * std::cos(a) - x1 * std::sin(a);
          x[channel + 1] = x0 * std::sin(a) + x1 * std::cos(a);
        }
    }
    return x;
  }
  std::vector<Vec> attend(const std::vector<Vec>& q, const std::vector<Vec>& k,
                          const std::vector<Vec>& v) const {
    const std::int64_t D = d_.hidden_size / d_.num_heads;
    std::vector<Vec> out(q.size(), Vec(d_.hidden_size, 0.0));
    for (std::size_t n = 0; n < q.size(); ++n)
      for (std::int64_t h = 0; h < d_.num_heads; ++h) {
        Vec p;
        double total = 0;
        for (const Vec& key : k) {
          double score = 0;
          for (std::int64_t c = h * D; c < (h + 1) * D; ++c) score += q[n][c] * key[c];
          total += p.emplace_back(std::exp(score / std::sqrt(static_cast<double>(D))));
        }
        for (std::size_t j = 0; j < k.size(); ++j)
          for (std::int64_t c = h * D; c < (h + 1) * D; ++c) out[n][c] += p[j] / total * v[j][c];
      }
    return out;
  }
  // Sample b of the input, all text_len rows of its caption spelt out: [C,T,h,w].
  Vec operator()(const WanInput& in, const Vec& context, std::int64_t length,
                 std::int64_t b) const {
    const std::int64_t C = d_.hidden_size, T = in.x.dim(2), h = in.x.dim(3), w = in.x.dim(4);
    const std::int64_t rows = h / 2, columns = w / 2;
    const Vec x = to_values(in.x);
    const auto at = [&](std::int64_t c, std::int64_t t, std::int64_t i, std::int64_t j) {
      return static_cast<std::size_t>((((b * d_.in_channels + c) * T + t) * h + i) * w + j);
    };
    std::vector<Vec> tokens;
    std::vector<std::array<std::int64_t, 3>> places;
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < columns; ++j) {
          Vec patch;
          for (std::int64_t c = 0; c < d_.in_channels; ++c)
            for (const std::int64_t k : {0, 1, 2, 3})
              patch.push_back(x[at(c, t, 2 * i + k / 2, 2 * j + k % 2)]);
          tokens.push_back(linear("patch_embedding", patch));
          places.push_back({t, i, j});
        }
    const double tau = to_values(in.timestep)[b];
    Vec waves(d_.freq_dim);
    for (std::int64_t k = 0; k < d_.freq_dim / 2; ++k) {
      const double a =
          tau * std::pow(10000, -2.0 * static_cast<double>(k) / static_cast<double>(d_.freq_dim));
      waves[k] = std::cos(a);
      waves[k + d_.freq_dim / 2] = std::sin(a);
    }
    const Vec e = linear("time_embedding.2", silu(linear("time_embedding.0", waves)));
    const Vec e0 = linear("time_projection.1", silu(e));
    std::vector<Vec> text;
    for (std::int64_t l = 0; l < d_.text_len; ++l) {
      Vec row(d_.text_dim, 0.0);
      if (l < length)
        std::copy_n(context.begin() + (b * d_.text_len + l) * d_.text_dim, d_.text_dim,
                    row.begin());
      text.push_back(linear("text_embedding.2", gelu(linear("text_embedding.0", row))));
    }
    for (std::int64_t i = 0; i < d_.depth; ++i) {
      const std::string name = fmt::format("blocks.{}.", i);
      const auto m = [&](std::int64_t row, std::int64_t c) {
        return w_.at(name + "modulation")[row * C + c] + e0[row * C + c];
      };
      const auto modulated = [&](const Vec& token, std::int64_t first) {
        Vec u = layer_norm(token);
        for (std::int64_t c = 0; c < C; ++c) u[c] = u[c] * (1 + m(first + 1, c)) + m(first, c);
        return u;
      };
      std::vector<Vec> q, k, v;
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        const Vec u = modulated(tokens[n], 0);
        const std::string a = name + "self_attn.";
        q.push_back(rotate(rms(a + "norm_q.weight", linear(a + "q", u)), places[n]));
        k.push_back(rotate(rms(a + "norm_k.weight", linear(a + "k", u)), places[n]));
        v.push_back(linear(a + "v", u));
      }
      const std::vector<Vec> self = attend(q, k, v);
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        const Vec o = linear(name + "self_attn.o", self[n]);
        for (std::int64_t c = 0; c < C; ++c) tokens[n][c] += m(2, c) * o[c];
      }
      q.clear(), k.clear(), v.clear();
      const std::string a = name + "cross_attn.";
      for (const Vec& token : tokens) {
        Vec u = layer_norm(token);
        for (std::int64_t c = 0; c < C; ++c)
          u[c] = u[c] * w_.at(name + "norm3.weight")[c] + w_.at(name + "norm3.bias")[c];
        q.push_back(rms(a + "norm_q.weight", linear(a + "q", u)));
      }
      for (const Vec& row : text) {
        k.push_back(rms(a + "norm_k.weight", linear(a + "k", row)));
        v.push_back(linear(a + "v", row));
      }
      const std::vector<Vec> cross = attend(q, k, v);
      for (std::size_t n = 0; n < tokens.size(); ++n) {
        const Vec o = linear(a + "o", cross[n]);
        for (std::int64_t c = 0; c < C; ++c) tokens[n][c] += o[c];
        const Vec f = linear(name + "ffn.2", gelu(linear(name + "ffn.0", modulated(tokens[n], 3))));
        for (std::int64_t c = 0; c < C; ++c) tokens[n][c] += m(5, c) * f[c];
      }
    }
    Vec out(d_.in_channels * T * h * w);
    for (std::size_t n = 0; n < tokens.size(); ++n) {
      Vec u = layer_norm(tokens[n]);
      const Vec& m = w_.at("head.modulation");
      for (std::int64_t c = 0; c < C; ++c) u[c] = u[c] * (1 + m[C + c] + e[c]) + m[c] + e[c];
      const Vec o = linear("head.head", u);
      for (std::int64_t k = 0; k < 4; ++k)
        for (std::int64_t c = 0; c < d_.in_channels; ++c)
          out[at(c, places[n][0], 2 * places[n][1] + k / 2, 2 * places[n][2] + k % 2) -
              at(0, 0, 0, 0)] = o[k * d_.in_channels + c];
    }
    return out;
  }

 private:
  WanConfig d_;
  std::map<std::string, Vec> w_;
};

// All parameters' gradients, one behind the other.
Vec of_parameters(const WanModel::Outcome& o) {
  Vec all;
  for (const auto& [name, gradient] : o.gradients)
    if (name != "x" && name != "y") all.insert(all.end(), gradient.begin(), gradient.end());
  return all;
}

class WanTest : public testing::Test {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_F(WanTest, ForwardIsTheRestatement) {
  WanModel model(tiny_wan());
  const WanBatch batch;
  const WanInput in = make_wan_input(model.net, batch);
  // The padding's key counts as often as there are rows of padding; a full caption has none.
  const auto offsets = in.captions.offsets.span<std::int32_t>();
  EXPECT_THAT(std::vector<std::int32_t>(offsets.begin(), offsets.end()),
              testing::ElementsAre(0, 4, 7, 8));
  EXPECT_LT(relative_error(to_values(in.last_bias), {0, std::log(2.0), std::log(4.0)}), 1e-7);
  const Vec out = model(in), context = to_values(in.captions.y);
  const Restated restated(model);
  const std::size_t clip = out.size() / static_cast<std::size_t>(batch.B());
  for (std::int64_t b = 0; b < batch.B(); ++b) {
    const Vec got(out.begin() + b * static_cast<std::int64_t>(clip),
                  out.begin() + (b + 1) * static_cast<std::int64_t>(clip));
    EXPECT_LT(relative_error(got, restated(in, context, batch.captions[b], b)), 2e-5) << b;
  }
  // The role's velocity has the other sign.
  const Vec v = to_values(model.net.velocity([&] {
    DenoiserInput plain = in;
    CaptionBatch captions{{0, 1, 2, 3, 4, 5}, {0, 4, 6, 6}};
    plain.captions = upload(captions, in.captions.y);
    return plain;
  }()));
  for (std::size_t i = 0; i < v.size(); ++i) ASSERT_EQ(v[i], -out[i]);
}

TEST_F(WanTest, CaptionsThatAreTooLongAreRefused) {
  CaptionBatch captions{{0, 1, 2}, {0, 3}};
  try {
    add_padding_keys(captions, 2);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::data);
    EXPECT_THAT(e.what(), HasSubstr("a caption has 3 tokens, model.text_len is 2"));
  }
}

TEST_F(WanTest, LatentsThatCannotBeSharedAreRefused) {
  const Wan model(tiny_wan());
  const auto refused = [&](std::int64_t h, std::int64_t w, std::int64_t ranks) {
    try {
      model.check_sequence(h, w, ranks);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::usage);
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused(4, 6, 3), "");
  EXPECT_EQ(refused(4, 6, 4), "");  // more ranks than heads
  EXPECT_THAT(refused(2, 4, 3), HasSubstr("has 2 tokens a frame"));
  EXPECT_THAT(refused(5, 6, 1), HasSubstr("5x6 does not divide into patches of 2x2"));
}

// ---- Gradients

struct WanCase {
  const char* name;
  WanConfig config = tiny_wan();
  LoraDeck lora = {};
};

class WanGradient : public testing::TestWithParam<WanCase> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(WanGradient, MatchesDifferences) {
  omp_set_num_threads(1);  // thousands of tiny forwards: threads would only wait for each other
  const WanCase& c = GetParam();
  WanModel model(c.config, c.lora);
  const WanInput in = make_wan_input(model.net, {.T = 2, .h = 4, .w = 4});
  const Vec g = random_values(in.x.numel(), 55);
  const std::size_t before = arena_->used();
  const WanModel::Outcome o = model.run(in, g);
  EXPECT_EQ(arena_->used(), before) << "something of the step stayed behind";
  const auto loss = [&] { return dot(model(in), g); };
  const double rounding = 4e-5 * std::sqrt(dot(o.out, o.out));  // f32 over steps of about 0.01
  for (const auto& [name, gradient] : o.gradients) {
    const Tensor& values = name == "x"   ? in.x
                           : name == "y" ? in.captions.y
                                         : model.net.params().find(name)->value;
    expect_slope(name, values, gradient, loss, 2e-2, rounding);
  }
}

LoraDeck wan_adapters() {
  LoraDeck lora = WanLoraDeck();
  lora.rank = 2;
  lora.targets.push_back("*.ffn.*");
  lora.targets.push_back("time_projection.1");
  return lora;
}
WanConfig with_recompute(double share) {
  WanConfig d = tiny_wan();
  d.recompute = share;
  return d;
}

WanConfig of_variant(const char* variant) {
  WanConfig d = tiny_wan();
  d.variant = variant;
  if (d.variant == "i2v") d.in_channels = 8, d.out_channels = 2;
  return d;
}

INSTANTIATE_TEST_SUITE_P(Configurations, WanGradient,
                         testing::Values(WanCase{"plain"}, WanCase{"i2v", of_variant("i2v")},
                                         WanCase{"ti2v", of_variant("ti2v")},
                                         WanCase{"half_recomputed", with_recompute(0.5)},
                                         WanCase{"lora", tiny_wan(), wan_adapters()}),
                         [](const auto& one) { return std::string(one.param.name); });

// Recomputing decides what is kept, never what a gradient is.
TEST_F(WanTest, RecomputedModelsHaveTheSameBits) {
  WanModel whole(tiny_wan()), again(with_recompute(1));
  const WanInput in = make_wan_input(whole.net, {});
  const Vec g = random_values(in.x.numel(), 55);
  const WanModel::Outcome a = whole.run(in, g), b = again.run(in, g);
  EXPECT_EQ(a.out, b.out);
  EXPECT_EQ(a.gradients, b.gradients);
}

TEST_F(WanTest, Bf16IsCloseToF32) {
  WanConfig config = tiny_wan();
  config.hidden_size = 96;
  WanModel exact(config);
  config.dtype = "bf16";
  WanModel rounded_model(config);
  const WanInput in = make_wan_input(exact.net, {});
  const Vec g = random_values(in.x.numel(), 5);
  const WanModel::Outcome a = exact.run(in, g), b = rounded_model.run(in, g);
  EXPECT_LT(relative_error(b.out, a.out), 8 * 0x1p-8);
  EXPECT_GT(relative_error(b.out, a.out), 1e-5) << "bf16 was not used";
  EXPECT_LT(relative_error(of_parameters(b), of_parameters(a)), 16 * 0x1p-8);
}

TEST_F(WanTest, Fp8IsCloseToBf16) {
  WanConfig config = tiny_wan();
  config.hidden_size = 96;
  config.dtype = "bf16";
  WanModel exact(config);
  config.dtype = "fp8";
  WanModel rounded_model(config);
  const WanInput in = make_wan_input(exact.net, {});
  const Vec g = random_values(in.x.numel(), 5);
  const WanModel::Outcome a = exact.run(in, g), b = rounded_model.run(in, g);
  EXPECT_LT(relative_error(b.out, a.out), 0.1);
  EXPECT_GT(relative_error(b.out, a.out), 0.003) << "fp8 was not used";
  const Vec left = of_parameters(a), right = of_parameters(b);
  EXPECT_GT(dot(left, right) / std::sqrt(dot(left, left) * dot(right, right)), 0.99);
}

// ---- Loss

TEST_F(WanTest, LossAndItsWeights) {
  WanModel model(tiny_wan());
  WanInput in = make_wan_input(model.net, {});
  const Tensor x0 = in.x;
  const Tensor eps = to_tensor(random_values(x0.numel(), 77), x0.shape());
  const Tensor factors = to_tensor({1.5, 2, 0.5}, {3});
  // The prediction at x = (1 - sigma) x0 + sigma eps, by the model itself.
  const Vec data = to_values(x0), noise = to_values(eps), times = to_values(in.timestep);
  const std::size_t clip = data.size() / 3;
  Vec mixed;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const double sigma = times[i / clip] / 1000;
    mixed.push_back((1 - sigma) * data[i] + sigma * noise[i]);
  }
  WanInput at = in;
  at.x = to_tensor(mixed, x0.shape());
  const Vec v = model(at);
  Vec wanted(3, 0.0), g(v.size());
  for (std::size_t i = 0; i < v.size(); ++i) {
    const double off = v[i] - (noise[i] - data[i]);
    wanted[i / clip] += off * off / static_cast<double>(clip);
    g[i] = 0.25 * to_values(factors)[i / clip] * 2 * off / static_cast<double>(clip);
  }
  const auto loss_of = [&](const Tensor& weights_of_samples) {
    const float weight = 0.25f;
    model.net.params().begin_step([](int) {});
    Tape tape;
    const Vec loss =
        to_values(wan_loss(tape, model.net, x0, eps, in, weights_of_samples,
                           Tensor::from_host(std::span<const float>(&weight, 1), {1})));
    tape.backward();
    model.net.params().finish_step();
    return loss;
  };
  EXPECT_LT(relative_error(loss_of(Tensor()), wanted), 1e-5);
  const Vec weighted = loss_of(factors);
  Vec gradient;
  for (const auto& p : model.net.params().all()) {
    const Vec of_one = to_values(p->grad);
    gradient.insert(gradient.end(), of_one.begin(), of_one.end());
  }
  for (std::size_t b = 0; b < 3; ++b)
    EXPECT_NEAR(weighted[b], wanted[b] * to_values(factors)[b], 1e-5 * weighted[b]);
  EXPECT_LT(relative_error(gradient, of_parameters(model.run(at, g))), 1e-5);
}

TEST(WanSigma, ShiftAndDistributions) {
  WanDiffusionDeck d;
  double mean = 0;
  constexpr int draws = 20000;
  for (int i = 0; i < draws; ++i) {
    const double sigma = draw_sigma(d, 3, 7, static_cast<std::uint64_t>(i));
    ASSERT_GE(sigma, 0);
    ASSERT_LE(sigma, 1);
    mean += sigma / draws;
  }
  // The integral of 3 u / (1 + 2 u).
  EXPECT_NEAR(mean, 1.5 * (1 - std::log(3.0) / 2), 0.01);
  EXPECT_EQ(draw_sigma(d, 3, 7, 1), draw_sigma(d, 3, 7, 1));
  EXPECT_NE(draw_sigma(d, 3, 7, 1), draw_sigma(d, 3, 8, 1));
  EXPECT_EQ(sigma_weight(d, 0.5), 1);
  d.weighting = "shift";
  EXPECT_EQ(sigma_weight(d, 0.5), 2.5);
  d.shift = 1;
  d.sample_method = "logit-normal";
  d.loc = 40;
  EXPECT_GT(draw_sigma(d, 3, 7, 1), 0.999999);
}

// ---- Memory

TEST(WanMemory, PlannedPeakIsTheRealPeak) {
  std::size_t kept = 0;
  for (const char* dtype : {"f32", "bf16", "fp8"})
    for (const double share : {0.0, 0.5, 1.0}) {
      WanConfig config = with_recompute(share);
      config.dtype = dtype;
      config.depth = 4;
      WanModel model(config);
      const WanBatch batch{.T = 3, .h = 8, .w = 8, .captions = {3, 4}};
      const auto planning = Arena::planning(), real = Arena::reserve(std::size_t{1} << 28);
      const std::size_t planned = peak_of_wan_step(*planning, model, batch);
      EXPECT_EQ(planned, peak_of_wan_step(*real, model, batch)) << dtype << " " << share;
      if (share == 0) kept = planned;
      if (share == 1) {
        EXPECT_LT(planned, kept * 6 / 10) << dtype;
      }
    }
}

}  // namespace
}  // namespace weft::test
