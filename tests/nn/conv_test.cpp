// Gradients of the convolutional operations on the tape against differences of the same forward.

#include "nn/conv.h"
#include "fixture.h"
#include "ops/pointwise.h"

namespace weft::test {
namespace {

using ops::Conv;

class NnConvTest : public OpTest {
 protected:
  nn::ConvWeights add_conv(const std::string& name, const Shape& shape, bool bias = true) {
    nn::ConvWeights w;
    w.weight = &table_.add(name + ".weight", shape, Init{});
    if (bias) w.bias = &table_.add(name + ".bias", {shape[0]}, Init{});
    return w;
  }
  nn::NormWeights add_norm(const std::string& name, std::int64_t channels) {
    return {&table_.add(name + ".norm.weight", {channels}, Init{}),
            &table_.add(name + ".norm.bias", {channels}, Init{})};
  }

  using Function = std::function<Var(nn::Context, const Var&)>;
  // One forward and backward of `f` at `x`; then every parameter and x are held to their slopes.
  void check(const Function& f, const Tensor& x) {
    table_.allocate(1 << 16, false, true);
    randomise(table_, 3);
    std::fill_n(table_.grads().data<float>(), table_.grads().numel(), 7.0f);  // an earlier step's
    table_.begin_step([](int) {});
    Tape tape;
    const Var in = make_var(x);
    const Var out = f({tape, table_}, in);
    const Vec g = random_values(out->value.numel(), 77);
    out->grad = to_tensor(g, out->value.shape());
    tape.backward();
    table_.finish_step();
    const auto loss = [&] {
      Tape again(Tape::Mode::infer);
      return against(f({again, table_}, make_var(x))->value, g);
    };
    expect_parameter_slopes(table_, loss, 2e-3);
    ASSERT_EQ(in->grad.shape(), x.shape());
    expect_slope("x", x, to_values(in->grad), loss, 2e-3);
  }

  ParameterTable table_;
};

// A residual block with a shortcut, down and up again; x is used twice, and the residual is a value
// used elsewhere.
TEST_F(NnConvTest, ResidualBlockDownAndUp) {
  const nn::ConvWeights first = add_conv("first", {8, 4, 3, 3}),
                        second = add_conv("second", {8, 8, 3, 3}),
                        shortcut = add_conv("shortcut", {8, 4, 1, 1}),
                        down = add_conv("down", {8, 8, 3, 3}), up = add_conv("up", {8, 8, 3, 3});
  const nn::NormWeights norm1 = add_norm("1", 4), norm2 = add_norm("2", 8);
  check(
      [&](nn::Context c, const Var& x) {
        const Var h =
            nn::conv(c, nn::group_norm(c, x, norm1, 2, 1e-6f, true), first, Conv::same(3));
        const Var y = nn::conv(c, nn::group_norm(c, h, norm2, 4, 1e-6f, true), second,
                               Conv::same(3), nn::conv(c, x, shortcut, Conv::same(1)));
        return nn::conv(c, nn::conv(c, y, down, Conv::down()), up, Conv::up(), y);
      },
      to_tensor(random_values(2 * 4 * 6 * 4, 1), {2, 1, 4, 6, 4}));
}

TEST_F(NnConvTest, CausalWithDepthToTime) {
  const nn::ConvWeights half = add_conv("half", {6, 4, 3, 3, 3}),
                        grow = add_conv("grow", {8, 6, 3, 3, 3}, false);
  check(
      [&](nn::Context c, const Var& x) {
        const Var h = nn::conv(c, nn::channels_last(c, x), half, Conv::causal(3, 2));
        return nn::channels_first(c, nn::depth_to_time(c, nn::conv(c, h, grow, Conv::causal(3))));
      },
      to_tensor(random_values(4 * 4 * 3 * 5, 1), {1, 4, 4, 3, 5}));
}

TEST_F(NnConvTest, WideAttention) {
  const nn::ConvWeights qkv = add_conv("qkv", {24, 8, 1, 1});
  check(
      [&](nn::Context c, const Var& x) {
        return nn::wide_attention(c,
                                  nn::view(c, nn::conv(c, x, qkv, Conv::same(1)), {2, 12, 3, 8}));
      },
      to_tensor(random_values(2 * 12 * 8, 1), {2, 1, 3, 4, 8}));
}

// The backward meets the weight without its bias first.
TEST_F(NnConvTest, WeightUsedAlsoWithoutItsBias) {
  const nn::ConvWeights both = add_conv("both", {4, 4, 3, 3}), alone{both.weight, nullptr};
  check(
      [&](nn::Context c, const Var& x) {
        return nn::conv(c, nn::conv(c, x, both, Conv::same(3)), alone, Conv::same(3));
      },
      to_tensor(random_values(2 * 4 * 5 * 4, 1), {2, 1, 4, 5, 4}));
}

// Weights that do not learn get no gradient; the input's still comes through.
TEST_F(NnConvTest, FrozenWeights) {
  nn::ConvWeights w;
  w.weight = &table_.add("w.weight", {6, 4, 3, 3}, Init{}, false);
  w.bias = &table_.add("w.bias", {6}, Init{}, false);
  const nn::NormWeights norm{&table_.add("norm.weight", {6}, Init{}, false),
                             &table_.add("norm.bias", {6}, Init{}, false)};
  check(
      [&](nn::Context c, const Var& x) {
        return nn::group_norm(c, nn::conv(c, x, w, Conv::same(3)), norm, 3, 1e-6f, true);
      },
      to_tensor(random_values(2 * 4 * 5 * 4, 1), {2, 1, 4, 5, 4}));
  EXPECT_FALSE(w.weight->grad.defined());
}

}  // namespace

// The pyramid's convolution against the plain way: resize, join and convolve in fp64.
namespace pyramid {

constexpr std::int64_t N = 2, H = 7, W = 10, C = 6, out = 5;
const std::vector<Shape> level_shapes{
    {N, 1, 1, 1, 3}, {N, 1, 2, 2, 4}, {N, 1, 3, 3, 2}, {N, 1, 6, 6, 4}};
constexpr std::int64_t all_channels = C + 3 + 4 + 2 + 4;

// [N,s,s,channels] resized to H x W and put behind `first` channels of joined.
void resize_into(const Vec& x, std::int64_t s, std::int64_t channels, std::int64_t first,
                 Vec& joined) {
  const auto line = [&](std::int64_t p, std::int64_t size, std::int64_t& low, std::int64_t& high) {
    const double at = std::max(
        0.0,
        (static_cast<double>(p) + 0.5) * static_cast<double>(s) / static_cast<double>(size) - 0.5);
    low = static_cast<std::int64_t>(at), high = std::min(low + 1, s - 1);
    return at - static_cast<double>(low);
  };
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t w = 0; w < W; ++w)
        for (std::int64_t c = 0; c < channels; ++c) {
          std::int64_t top, bottom, left, right;
          const double a = line(h, H, top, bottom), b = line(w, W, left, right);
          const auto at = [&](std::int64_t i, std::int64_t j) {
            return x[((n * s + i) * s + j) * channels + c];
          };
          joined[((n * H + h) * W + w) * all_channels + first + c] =
              (1 - a) * ((1 - b) * at(top, left) + b * at(top, right)) +
              a * ((1 - b) * at(bottom, left) + b * at(bottom, right));
        }
}

Vec plain(const std::vector<Vec>& values, const Vec& weight) {
  Vec joined(static_cast<std::size_t>(N * H * W * all_channels));
  for (std::int64_t p = 0; p < N * H * W; ++p)
    for (std::int64_t c = 0; c < C; ++c) joined[p * all_channels + c] = values[0][p * C + c];
  std::int64_t first = C;
  for (std::size_t i = 0; i < level_shapes.size(); ++i) {
    resize_into(values[i + 1], level_shapes[i][2], level_shapes[i][4], first, joined);
    first += level_shapes[i][4];
  }
  Vec y(static_cast<std::size_t>(N * H * W * out));
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t w = 0; w < W; ++w)
        for (std::int64_t o = 0; o < out; ++o) {
          double& sum = y[((n * H + h) * W + w) * out + o];
          for (std::int64_t u = -1; u <= 1; ++u)
            for (std::int64_t v = -1; v <= 1; ++v) {
              if (h + u < 0 || h + u >= H || w + v < 0 || w + v >= W) continue;
              for (std::int64_t c = 0; c < all_channels; ++c)
                sum += joined[((n * H + h + u) * W + w + v) * all_channels + c] *
                       weight[(o * all_channels + c) * 9 + 3 * u + v + 4];
            }
        }
  return y;
}

class PyramidConvTest : public OpTest {
 protected:
  void make(bool trainable = true) {
    weights_.weight = &table_.add("joined.weight", {out, all_channels, 3, 3}, Init{}, trainable);
    table_.allocate(1 << 16, true, true);
    randomise(table_, 3);
  }
  std::vector<Tensor> inputs(DType dtype) {
    std::vector<Tensor> all{to_tensor(random_values(N * H * W * C, 1), {N, 1, H, W, C}, dtype)};
    for (const Shape& s : level_shapes)
      all.push_back(to_tensor(random_values(s.numel(), all.size() + 1), s, dtype));
    return all;
  }
  Var run(Tape& tape, const std::vector<Var>& in) {
    return nn::pyramid_conv({tape, table_}, in[0], {in.begin() + 1, in.end()}, weights_);
  }
  Tensor infer(const std::vector<Tensor>& in) {
    Tape tape(Tape::Mode::infer);
    return run(tape, vars(in))->value;
  }
  static std::vector<Var> vars(const std::vector<Tensor>& in) {
    std::vector<Var> all;
    for (const Tensor& t : in) all.push_back(make_var(t));
    return all;
  }
  static std::vector<Vec> values(const std::vector<Tensor>& in) {
    std::vector<Vec> all;
    for (const Tensor& t : in) all.push_back(to_values(t));
    return all;
  }

  ParameterTable table_;
  nn::ConvWeights weights_;
};

TEST_F(PyramidConvTest, ForwardIsThePlainWay) {
  make();
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::vector<Tensor> in = inputs(dtype);
    const Tensor& w = dtype == DType::bf16 ? weights_.weight->working : weights_.weight->value;
    // bf16: one rounding more of each sum, and those of A and Z.
    EXPECT_LT(relative_error(to_values(infer(in)), plain(values(in), to_values(w))),
              dtype == DType::f32 ? 3e-6 : 4 * tolerance(dtype));
  }
}

// Gradients of everything, twice: the second adds to what is there.
TEST_F(PyramidConvTest, BackwardIsItsSlope) {
  make();
  const std::vector<Tensor> in = inputs(DType::f32);
  const Vec g = random_values(N * H * W * out, 77);
  const auto loss = [&] { return against(infer(in), g); };
  std::fill_n(table_.grads().data<float>(), table_.grads().numel(), 7.0f);  // an earlier step's
  table_.begin_step([](int) {});
  const std::vector<Var> at = vars(in);
  Tape tape;
  const std::vector<Var> results{run(tape, at), run(tape, at)};
  for (const Var& y : results) y->grad = to_tensor(g, y->value.shape());
  tape.backward();
  table_.finish_step();
  const auto halved = [](const Tensor& t) {
    Vec v = to_values(t);
    for (double& x : v) x /= 2;
    return v;
  };
  expect_slope("weight", weights_.weight->value, halved(weights_.weight->grad), loss, 2e-3);
  for (std::size_t i = 0; i < in.size(); ++i)
    expect_slope("input " + std::to_string(i), in[i], halved(at[i]->grad), loss, 2e-3);
}

// bf16's gradients are those of f32 at the same values, but for rounding.
TEST_F(PyramidConvTest, BackwardInBf16) {
  make();
  const std::vector<Tensor> rounded = inputs(DType::bf16);
  const Vec g = random_values(N * H * W * out, 77);
  std::vector<std::vector<Vec>> gradients;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    std::vector<Tensor> in;
    for (const Tensor& t : rounded) in.push_back(to_tensor(to_values(t), t.shape(), dtype));
    table_.begin_step([](int) {});
    const std::vector<Var> at = vars(in);
    Tape tape;
    const Var y = run(tape, at);
    y->grad = to_tensor(g, y->value.shape(), dtype);
    tape.backward();
    table_.finish_step();
    gradients.push_back({to_values(weights_.weight->grad)});
    for (const Var& v : at) gradients.back().push_back(to_values(v->grad));
  }
  for (std::size_t i = 0; i < gradients[0].size(); ++i)
    EXPECT_LT(relative_error(gradients[0][i], gradients[1][i]), 8 * tolerance(DType::bf16)) << i;
}

// Weights that do not learn and levels without gradient are left alone.
TEST_F(PyramidConvTest, FrozenParts) {
  make(false);
  const std::vector<Tensor> in = inputs(DType::f32);
  const Vec g = random_values(N * H * W * out, 77);
  table_.begin_step([](int) {});
  const std::vector<Var> at = vars(in);
  at[2]->needs_grad = false;
  Tape tape;
  const Var y = run(tape, at);
  y->grad = to_tensor(g, y->value.shape());
  tape.backward();
  table_.finish_step();
  EXPECT_FALSE(weights_.weight->grad.defined());
  EXPECT_FALSE(at[2]->grad.defined());
  expect_slope(
      "x", in[0], to_values(at[0]->grad), [&] { return against(infer(in), g); }, 2e-3);
}

// A dry run takes the memory of the run.
TEST_F(PyramidConvTest, PlannedPeakIsReal) {
  make();
  const auto peak = [&](Arena& arena) {
    const ArenaScope scope(arena);
    std::vector<Var> at{make_var(Tensor::empty({N, 1, H, W, C}, DType::f32))};
    for (const Shape& s : level_shapes) at.push_back(make_var(Tensor::empty(s, DType::f32)));
    table_.begin_step([](int) {});
    Tape tape;
    const Var y = run(tape, at);
    y->grad = Tensor::empty(y->value.shape(), DType::f32);
    arena.reset_peak();
    tape.backward();
    table_.finish_step();
    return arena.peak();
  };
  const auto planning = Arena::planning();
  const auto real = Arena::reserve(std::size_t{1} << 28);
  EXPECT_EQ(peak(*planning), peak(*real));
}

}  // namespace pyramid

// Deformable convolution against torchvision's numbers, and its gradients against differences of
// its own forward. The operations themselves are held to fp64 formulas by tests/ops/cases_test.cpp.
namespace deform {

constexpr std::int64_t N = 2, H = 9, W = 8, C = 6, out = 5;

struct Geometry {
  int stride = 1, dilation = 1;
  // y, dx, doffsets and dweight times fixed numbers (validation/test_numbers.py).
  double y = 0, dx = 0, doffsets = 0, dweight = 0;
};

struct Layer {
  ParameterTable table;
  nn::ConvWeights weights;
  ops::Conv conv;
  Tensor x, offsets;

  explicit Layer(const Geometry& g, DType dtype = DType::f32, bool trainable = true)
      : conv(ops::Conv::strided(3, g.stride, g.dilation)) {
    weights.weight = &table.add("conv2.weight", {out, C, 3, 3}, Init{}, trainable);
    table.allocate(1 << 12, dtype == DType::bf16, true);
    const Vec w = rounded(pattern(weights.weight->shape.numel(), 3, 0.3), dtype);
    for (std::size_t i = 0; i < w.size(); ++i)
      weights.weight->value.data<float>()[i] = static_cast<float>(w[i]);
    table.refresh_working();
    const Shape in{N, 1, H, W, C}, to = conv.output(in, 27);
    x = to_tensor(pattern(in.numel(), 1), in, dtype);
    offsets = to_tensor(pattern(to.numel(), 2, 2.5), to, dtype);
  }
  // The same values in f32.
  void widen() {
    x = to_tensor(to_values(x), x.shape());
    offsets = to_tensor(to_values(offsets), offsets.shape());
  }
  Var run(Tape& tape, const Var& at_x, const Var& at_offsets) {
    return nn::deform_conv({tape, table}, at_x, at_offsets, weights, conv);
  }
  Tensor infer() {
    Tape tape(Tape::Mode::infer);
    return run(tape, make_var(x), make_var(offsets))->value;
  }
  // Forward and backward from pattern 4, as often as asked.
  void learn(const Var& at_x, const Var& at_offsets, int times = 1) {
    if (weights.weight->trainable)  // an earlier step's
      std::fill_n(table.grads().data<float>(), table.grads().numel(), 7.0f);
    table.begin_step([](int) {});
    Tape tape;
    std::vector<Var> results;
    for (int i = 0; i < times; ++i) results.push_back(run(tape, at_x, at_offsets));
    for (const Var& y : results)
      y->grad = to_tensor(pattern(y->value.numel(), 4), y->value.shape(), y->value.dtype());
    tape.backward();
    table.finish_step();
  }
};

double product(const Tensor& t, double k) { return dot(to_values(t), pattern(t.numel(), k)); }

class DeformConvTest : public OpTest {
 protected:
  // 7 pixels a band, which ends in the midst of rows, and a frame at a time in the backward.
  DeformConvTest() { nn::deform_scratch = 7 * 9 * 64 * 4; }
  ~DeformConvTest() override { nn::deform_scratch = usual_; }

  const std::int64_t usual_ = nn::deform_scratch;
};

TEST_F(DeformConvTest, NumbersOfTorchvision) {
  for (const Geometry& g :
       {Geometry{1, 1, 7.6084317856, 1.2827045361, -10.9859574110, 2.2165460407},
        {2, 1, 3.6515999956, 3.9834647591, 9.1350893247, -1.8257375330},
        {1, 2, -2.6912802193, -1.3652695951, 3.8549705514, -15.9119811011}}) {
    Layer layer(g);
    const Var x = make_var(layer.x), offsets = make_var(layer.offsets);
    layer.learn(x, offsets);
    EXPECT_NEAR(product(layer.infer(), 4), g.y, 1e-4);
    EXPECT_NEAR(product(x->grad, 5), g.dx, 1e-4);
    EXPECT_NEAR(product(offsets->grad, 6), g.doffsets, 1e-4);
    EXPECT_NEAR(product(layer.weights.weight->grad, 7), g.dweight, 1e-4);
  }
}

// Gradients of everything, twice: the second adds to what is there.
TEST_F(DeformConvTest, BackwardIsItsSlope) {
  Layer layer({2, 1});
  // Places far enough from the pixels' lines, where the slope jumps.
  const Vec steps = pattern(layer.offsets.numel(), 2, 2.0),
            shares = pattern(layer.offsets.numel(), 8, 0.25);
  for (std::size_t i = 0; i < steps.size(); ++i)
    layer.offsets.data<float>()[i] = static_cast<float>(std::round(steps[i]) + 0.5 + shares[i]);
  const Var x = make_var(layer.x), offsets = make_var(layer.offsets);
  layer.learn(x, offsets, 2);
  const auto halved = [](const Tensor& t) {
    Vec v = to_values(t);
    for (double& value : v) value /= 2;
    return v;
  };
  const auto loss = [&] { return product(layer.infer(), 4); };
  Tensor& weight = layer.weights.weight->value;
  expect_slope("weight", weight, halved(layer.weights.weight->grad), loss, 2e-3);
  expect_slope("x", layer.x, halved(x->grad), loss, 2e-3);
  expect_slope("offsets", layer.offsets, halved(offsets->grad), loss, 2e-3);
}

// What is done at a time changes the order of f32 sums of the weight's gradient alone; bf16's
// values are those of f32 at the same inputs, but for rounding.
TEST_F(DeformConvTest, BandsAndTypes) {
  const auto results = [&](Layer&& layer, std::int64_t scratch) {
    nn::deform_scratch = scratch;
    const Var x = make_var(layer.x), offsets = make_var(layer.offsets);
    layer.learn(x, offsets);
    return std::vector<Vec>{to_values(layer.infer()), to_values(x->grad), to_values(offsets->grad),
                            to_values(layer.weights.weight->grad)};
  };
  constexpr std::int64_t five = 5 * 9 * 64 * 4;
  const auto whole = results(Layer({}), usual_), bands = results(Layer({}), five);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(whole[i], bands[i]) << i;
  EXPECT_LT(relative_error(bands[3], whole[3]), 1e-6);
  Layer rounded_inputs({}, DType::bf16);
  rounded_inputs.widen();
  const auto narrow = results(Layer({}, DType::bf16), five),
             wide = results(std::move(rounded_inputs), usual_);
  for (std::size_t i = 0; i < narrow.size(); ++i)
    EXPECT_LT(relative_error(narrow[i], wide[i]), 2 * tolerance(DType::bf16)) << i;
}

// Offsets of 0 and logits of 0: half of the ordinary convolution.
TEST_F(DeformConvTest, WithoutOffsetsIsHalfAConvolution) {
  Layer layer({2, 1});
  std::fill_n(layer.offsets.data<float>(), layer.offsets.numel(), 0.0f);
  Tape tape(Tape::Mode::infer);
  const Var y = nn::conv({tape, layer.table}, make_var(layer.x), layer.weights, layer.conv);
  Vec half = to_values(y->value);
  for (double& v : half) v /= 2;
  EXPECT_LT(relative_error(to_values(layer.infer()), half), 1e-6);
}

TEST_F(DeformConvTest, FrozenParts) {
  Layer fixed({1, 1}, DType::f32, false), layer({1, 1});
  const Var x = make_var(fixed.x), offsets = make_var(fixed.offsets);
  fixed.learn(x, offsets);
  EXPECT_FALSE(fixed.weights.weight->grad.defined());
  for (const bool of_x : {false, true}) {
    const Var own_x = make_var(layer.x, of_x), own_offsets = make_var(layer.offsets, !of_x);
    layer.learn(own_x, own_offsets);
    EXPECT_EQ(own_x->grad.defined(), of_x);
    EXPECT_EQ(own_offsets->grad.defined(), !of_x);
    EXPECT_TRUE(of_x ? same_bits(own_x->grad, x->grad)
                     : same_bits(own_offsets->grad, offsets->grad));
  }
}

// A dry run takes the memory of the run.
TEST_F(DeformConvTest, PlannedPeakIsReal) {
  Layer layer({1, 1});
  const auto peak = [&](Arena& arena) {
    const ArenaScope scope(arena);
    const Var x = make_var(Tensor::empty(layer.x.shape(), DType::f32)),
              offsets = make_var(Tensor::empty(layer.offsets.shape(), DType::f32));
    if (!arena.is_planning()) {
      ops::fill_zero(x->value);
      ops::fill_zero(offsets->value);
    }
    layer.table.begin_step([](int) {});
    Tape tape;
    const Var y = layer.run(tape, x, offsets);
    y->grad = Tensor::empty(y->value.shape(), DType::f32);
    tape.backward();
    layer.table.finish_step();
    return arena.peak();
  };
  const auto planning = Arena::planning();
  const auto real = Arena::reserve(std::size_t{1} << 28);
  EXPECT_EQ(peak(*planning), peak(*real));
}

}  // namespace deform

// Tangents against differences of the values, and the gradients of both against differences of
// both.
namespace {

class DualTest : public OpTest {
 protected:
  DualTest() {
    const auto add = [&](const std::string& name, const Shape& shape) {
      return &table_.add(name, shape, Init{});
    };
    // Without a bias, which a norm would take out again.
    first_ = {add("first.weight", {6, 3, 4, 4}), nullptr};
    norm_ = {add("norm.weight", {6}), add("norm.bias", {6})};
    last_ = {add("last.weight", {2, 6, 3, 3}), add("last.bias", {2})};
    table_.allocate(1 << 16, false, true);
    randomise(table_, 3);
  }

  // Smooth: differences mean nothing across a kink.
  nn::Dual layers(Tape& tape, const Tensor& x, const Tensor& along) {
    const nn::Context c{tape, table_};
    ops::Conv half = ops::Conv::same(4);
    half.stride = 2;
    half.top = half.left = half.bottom = half.right = 1;
    in_ = {make_var(x), make_var(along)};
    const nn::Dual h = nn::batch_norm(c, nn::conv(c, in_, first_, half), norm_, 1e-5f);
    return nn::conv(c, h, last_, ops::Conv::same(3));
  }

  const Shape shape_{1, 2, 8, 6, 3};
  Tensor x_ = to_tensor(random_values(shape_.numel(), 1), shape_);
  Tensor along_ = to_tensor(random_values(shape_.numel(), 2), shape_);
  ParameterTable table_;
  nn::ConvWeights first_, last_;
  nn::NormWeights norm_;
  nn::Dual in_;
};

TEST_F(DualTest, TangentIsTheSlope) {
  Tape tape(Tape::Mode::infer);
  const nn::Dual y = layers(tape, x_, along_);
  const Vec g = random_values(y.value->value.numel(), 5), x = to_values(x_), v = to_values(along_);
  const double measured = slope([&](double step) {
    Vec moved = x;
    for (std::size_t i = 0; i < x.size(); ++i) moved[i] += step * v[i];
    return against(layers(tape, to_tensor(moved, shape_), along_).value->value, g);
  });
  EXPECT_NEAR(against(y.tangent->value, g) / measured, 1, 1e-3);
}

TEST_F(DualTest, GradientsOfValuesAndTangents) {
  table_.begin_step([](int) {});
  Tape tape;
  const nn::Dual y = layers(tape, x_, along_), in = in_;
  const Shape out = y.value->value.shape();
  const Vec g = random_values(out.numel(), 5, 0.3), gt = random_values(out.numel(), 6);
  y.value->grad = to_tensor(g, out);
  y.tangent->grad = to_tensor(gt, out);
  tape.backward();
  table_.finish_step();
  const auto loss = [&] {
    Tape again(Tape::Mode::infer);
    const nn::Dual z = layers(again, x_, along_);
    return against(z.value->value, g) + against(z.tangent->value, gt);
  };
  expect_parameter_slopes(table_, loss, 2e-3);
  expect_slope("x", x_, to_values(in.value->grad), loss, 2e-3);
  expect_slope("along", along_, to_values(in.tangent->grad), loss, 2e-3);
}

TEST_F(DualTest, TangentsPassWhereValuesDo) {
  const Vec x{-2, -1, 1, 2}, v{1, 2, 3, 4};
  Tape tape;
  const nn::Dual in{make_var(to_tensor(x, {4})), make_var(to_tensor(v, {4}))};
  const nn::Dual y = nn::leaky_relu({tape, table_}, in, 0.5f);
  EXPECT_EQ(to_values(y.value->value), (Vec{-1, -0.5, 1, 2}));
  EXPECT_EQ(to_values(y.tangent->value), (Vec{0.5, 1, 3, 4}));
  y.value->grad = to_tensor({1, 1, 1, 1}, {4});
  y.tangent->grad = to_tensor({4, 4, 4, 4}, {4});
  tape.backward();
  EXPECT_EQ(to_values(in.value->grad), (Vec{0.5, 0.5, 1, 1}));
  EXPECT_EQ(to_values(in.tangent->grad), (Vec{2, 2, 4, 4}));
}

}  // namespace
}  // namespace weft::test
