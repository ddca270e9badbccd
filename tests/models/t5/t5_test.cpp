// The encoders of T5 and umT5 against docs/models/t5.md, Forward, in f64, in one piece and in
// parts. validation/check_t5.py holds it to transformers.
#include "models/t5/t5.h"
#include "models/t5/options.h"

#include "ops/attention.h"
#include "ops/dispatch.h"
#include "tests/ops/reference.h"

namespace weft::test {
namespace {

T5Deck small_t5() {
  T5Deck d;
  d.d_model = 40;
  d.d_kv = 8;
  d.num_heads = 6;  // inner width 48: not d_model
  d.d_ff = 72;
  d.num_layers = 3;
  d.vocab_size = 50;
  return d;
}

const std::vector<std::vector<int>> captions = {{5, 17, 1}, {3, 4, 49, 8, 9, 2, 30, 1}, {1}};

class T5Test : public OpTest {
 protected:
  static PackedTokens packed() {
    Vec ids, offsets{0};
    PackedTokens in;
    for (const auto& c : captions) {
      ids.insert(ids.end(), c.begin(), c.end());
      offsets.push_back(static_cast<double>(ids.size()));
      in.longest = std::max(in.longest, std::int64_t(c.size()));
    }
    in.ids = to_tensor(ids, {std::int64_t(ids.size())}, DType::i32);
    in.offsets = to_tensor(offsets, {std::int64_t(offsets.size())}, DType::i32);
    return in;
  }
  static void start(T5Encoder& t5, bool bf16) {
    t5.params().allocate(1, bf16, false);
    t5.params().initialise(3);
    if (bf16) t5.params().refresh_working();
  }
};

// y [rows,out] = x [rows,in] w [out,in]^T.
Vec product(const Vec& x, const Vec& w, std::int64_t in) {
  const auto rows = std::int64_t(x.size()) / in, out = std::int64_t(w.size()) / in;
  Vec y(static_cast<std::size_t>(rows * out));
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t o = 0; o < out; ++o)
      for (std::int64_t i = 0; i < in; ++i) y[r * out + o] += x[r * in + i] * w[o * in + i];
  return y;
}

Vec rms_norm(const Vec& x, const Vec& w) {
  const std::size_t C = w.size();
  Vec y(x);
  for (std::size_t r = 0; r < x.size() / C; ++r) {
    double squares = 0;
    for (std::size_t i = 0; i < C; ++i) squares += x[r * C + i] * x[r * C + i] / double(C);
    for (std::size_t i = 0; i < C; ++i) y[r * C + i] *= w[i] / std::sqrt(squares + 1e-6);
  }
  return y;
}

// One caption through all layers.
Vec encode(const T5Deck& d, const ParameterTable& table, const std::vector<int>& ids) {
  const auto value = [&](const std::string& name) { return to_values(table.find(name)->value); };
  const std::int64_t C = d.d_model, D = d.d_kv, inner = d.num_heads * D,
                     n = std::int64_t(ids.size());
  const Vec embedding = value("shared.weight");
  Vec h;
  for (const int id : ids)
    h.insert(h.end(), embedding.begin() + id * C, embedding.begin() + (id + 1) * C);
  for (std::int64_t layer = 0; layer < d.num_layers; ++layer) {
    const std::string block = "encoder.block." + std::to_string(layer) + ".layer.";
    const auto weight = [&](const std::string& rest) { return value(block + rest + ".weight"); };
    const Vec bias = value(t5_bias_name(d.umt5 ? layer : 0));
    const Vec a = rms_norm(h, weight("0.layer_norm"));
    const Vec q = product(a, weight("0.SelfAttention.q"), C);
    const Vec k = product(a, weight("0.SelfAttention.k"), C);
    const Vec v = product(a, weight("0.SelfAttention.v"), C);
    Vec o(q.size());
    for (std::int64_t head = 0; head < d.num_heads; ++head)
      for (std::int64_t i = 0; i < n; ++i) {
        Vec p(static_cast<std::size_t>(n));
        double sum = 0;
        for (std::int64_t j = 0; j < n; ++j) {
          p[j] = bias[ops::relative_bucket(static_cast<int>(j - i)) * d.num_heads + head];
          for (std::int64_t c = head * D; c < (head + 1) * D; ++c)
            p[j] += q[i * inner + c] * k[j * inner + c];
          sum += p[j] = std::exp(p[j]);
        }
        for (std::int64_t j = 0; j < n; ++j)
          for (std::int64_t c = head * D; c < (head + 1) * D; ++c)
            o[i * inner + c] += p[j] / sum * v[j * inner + c];
      }
    const Vec attended = product(o, weight("0.SelfAttention.o"), inner);
    for (std::size_t i = 0; i < h.size(); ++i) h[i] += attended[i];
    const Vec f = rms_norm(h, weight("1.layer_norm"));
    Vec g = product(f, weight("1.DenseReluDense.wi_0"), C);
    const Vec u = product(f, weight("1.DenseReluDense.wi_1"), C);
    for (std::size_t i = 0; i < g.size(); ++i)
      g[i] *=
          0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g[i] + 0.044715 * std::pow(g[i], 3)))) * u[i];
    const Vec m = product(g, weight("1.DenseReluDense.wo"), d.d_ff);
    for (std::size_t i = 0; i < h.size(); ++i) h[i] += m[i];
  }
  return rms_norm(h, value("encoder.final_layer_norm.weight"));
}

TEST_F(T5Test, MatchesTheFormulasCaptionByCaption) {
  for (const bool umt5 : {false, true}) {
    T5Deck d = small_t5();
    d.umt5 = umt5;
    T5Encoder t5(d, 0, d.num_layers);
    start(t5, false);
    Vec wanted;
    for (const auto& c : captions) {
      const Vec one = encode(d, t5.params(), c);
      wanted.insert(wanted.end(), one.begin(), one.end());
    }
    EXPECT_LT(relative_error(to_values(t5.forward(packed(), Tensor())), wanted), 1e-5) << umt5;
    t5.pack_weights();
    EXPECT_LT(relative_error(to_values(t5.forward(packed(), Tensor())), wanted), 1e-5) << umt5;
  }
}

TEST_F(T5Test, PartsOfTheLayersGiveTheSameBits) {
  const T5Deck d = small_t5();
  T5Encoder whole(d, 0, d.num_layers);
  start(whole, false);
  const Vec wanted = to_values(whole.forward(packed(), Tensor()));
  for (const std::int64_t cut :
       {0, 1, 3}) {  // the embedding alone, and the final norm alone, among them
    T5Encoder front(d, 0, cut), back(d, cut, d.num_layers);
    start(front, false);
    start(back, false);
    EXPECT_EQ(front.params().find("encoder.final_layer_norm.weight") != nullptr, cut == 3);
    const Tensor between = front.forward(packed(), Tensor());
    if (cut == 3) continue;  // nothing is left behind the norm
    EXPECT_EQ(to_values(back.forward(packed(), between)), wanted) << cut;
  }
}

TEST_F(T5Test, Bf16StaysNearF32) {
  T5Deck d = small_t5();
  T5Encoder exact(d, 0, d.num_layers);
  start(exact, false);
  d.dtype = "bf16";
  T5Encoder low(d, 0, d.num_layers);
  start(low, true);
  const Vec wanted = to_values(exact.forward(packed(), Tensor()));
  // A handful of roundings a layer, of 2^-9 each.
  EXPECT_LT(relative_error(to_values(low.forward(packed(), Tensor())), wanted), 0x1p-9 * 10);
}

TEST_F(T5Test, PlansWhatItTakesAndCountsItsWeights) {
  const T5Deck d = small_t5();
  T5Encoder t5(d, 1, d.num_layers);
  const std::size_t planned = t5.plan(12, 8);
  start(t5, false);
  t5.pack_weights();
  EXPECT_EQ(t5.plan(12, 8), planned);
  const auto arena = Arena::reserve(planned);
  const ArenaScope scope(*arena);
  {
    const PackedTokens in = packed();
    const Tensor h = Tensor::empty({12, d.d_model}, DType::f32);
    for (float& x : h.span<float>()) x = 1;
    t5.forward(in, h);
  }
  // The plan allows for as many captions as tokens, and for holes between blocks.
  EXPECT_GE(planned, arena->peak());
  EXPECT_LE(planned, arena->peak() * 3 / 2);
  const auto bytes = [](const T5Deck& deck, std::size_t layers, bool embedding) {
    const T5Encoder::Sizes s = T5Encoder::sizes(deck);
    return layers * s.layer + s.every_part + (embedding ? s.embedding : 0);
  };
  T5Deck umt5 = d;
  umt5.umt5 = true;
  for (const T5Deck& deck : {d, umt5})
    EXPECT_EQ(
        bytes(deck, 2, false),
        static_cast<std::size_t>(T5Encoder(deck, 1, d.num_layers).params().total_elements()) * 4);
  // docs/models/t5.md, Shape, umT5: all of XXL.
  EXPECT_EQ(bytes(T5Deck{}, 24, true), 4762310656u * 4);
  EXPECT_EQ(bytes(UmT5Deck{}, 24, true), 5680910336u * 4);
}

}  // namespace
}  // namespace weft::test
