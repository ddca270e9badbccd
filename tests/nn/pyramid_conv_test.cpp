// The pyramid's convolution against the plain way: resize, join and convolve in fp64.
#include "nn/conv.h"

#include "fixture.h"

namespace weft::test {
namespace {

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
            return x[static_cast<std::size_t>(((n * s + i) * s + j) * channels + c)];
          };
          joined[static_cast<std::size_t>(((n * H + h) * W + w) * all_channels + first + c)] =
              (1 - a) * ((1 - b) * at(top, left) + b * at(top, right)) +
              a * ((1 - b) * at(bottom, left) + b * at(bottom, right));
        }
}

Vec plain(const std::vector<Vec>& values, const Vec& weight) {
  Vec joined(static_cast<std::size_t>(N * H * W * all_channels));
  for (std::int64_t p = 0; p < N * H * W; ++p)
    for (std::int64_t c = 0; c < C; ++c)
      joined[static_cast<std::size_t>(p * all_channels + c)] =
          values[0][static_cast<std::size_t>(p * C + c)];
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
          double& sum = y[static_cast<std::size_t>(((n * H + h) * W + w) * out + o)];
          for (std::int64_t u = -1; u <= 1; ++u)
            for (std::int64_t v = -1; v <= 1; ++v) {
              if (h + u < 0 || h + u >= H || w + v < 0 || w + v >= W) continue;
              for (std::int64_t c = 0; c < all_channels; ++c)
                sum += joined[static_cast<std::size_t>(
                           ((n * H + h + u) * W + w + v) * all_channels + c)] *
                       weight[static_cast<std::size_t>((o * all_channels + c) * 9 + 3 * u + v + 4)];
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

}  // namespace
}  // namespace weft::test
