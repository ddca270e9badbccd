#include "ops/conv.h"
#include "ops/layout.h"

#include <algorithm>
#include <set>

#include "reference.h"
#include "tests/kernels/rounding.h"

namespace weft::test {
namespace {

using ops::Conv;

struct Case {
  Shape x;  // [N,T,H,W,Cin]
  std::int64_t out;
  Conv conv;
  DType dtype = DType::f32;
  bool differences = true;  // small enough for finite differences
};

Shape weight_shape(const Case& c) {
  const std::int64_t ins = c.x[4] / c.conv.groups;
  if (c.conv.kt == 1) return {c.out, ins, c.conv.kh, c.conv.kw};
  return {c.out, ins, c.conv.kt, c.conv.kh, c.conv.kw};
}

// Calls f(index into y, into x, into w) for every product that the convolution is made of.
template <class F>
void for_products(const Case& c, F&& f) {
  const Conv& v = c.conv;
  const Shape y = v.output(c.x, c.out);
  const std::int64_t up = v.upsample ? 2 : 1, Ci = c.x[4];
  const std::int64_t ins = Ci / v.groups, outs = c.out / v.groups;
  for (std::int64_t n = 0; n < y[0]; ++n)
    for (std::int64_t t = 0; t < y[1]; ++t)
      for (std::int64_t h = 0; h < y[2]; ++h)
        for (std::int64_t w = 0; w < y[3]; ++w)
          for (int a = 0; a < v.kt; ++a)
            for (int b = 0; b < v.kh; ++b)
              for (int d = 0; d < v.kw; ++d) {
                const std::int64_t ts = t * v.stride_t + a - v.front,
                                   hs = h * v.stride + b * v.dilation - v.top,
                                   ws = w * v.stride + d * v.dilation - v.left;
                if (ts < 0 || hs < 0 || ws < 0 || ts >= c.x[1] || hs >= up * c.x[2] ||
                    ws >= up * c.x[3])
                  continue;
                const std::int64_t xi =
                    (((n * c.x[1] + ts) * c.x[2] + hs / up) * c.x[3] + ws / up) * Ci;
                const std::int64_t yi = (((n * y[1] + t) * y[2] + h) * y[3] + w) * c.out;
                const std::int64_t taps = v.kt * v.kh * v.kw, tap = (a * v.kh + b) * v.kw + d;
                for (std::int64_t o = 0; o < c.out; ++o)
                  for (std::int64_t i = 0; i < ins; ++i)
                    f(static_cast<std::size_t>(yi + o),
                      static_cast<std::size_t>(xi + o / outs * ins + i),
                      static_cast<std::size_t>((o * ins + i) * taps + tap));
              }
}

Vec convolve(const Case& c, const Vec& x, const Vec& w, const Vec& bias, const Vec& residual) {
  Vec y = residual;
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += bias[i % static_cast<std::size_t>(c.out)];
  for_products(c, [&](std::size_t o, std::size_t i, std::size_t k) { y[o] += x[i] * w[k]; });
  return y;
}

class ConvTest : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 30);
  ArenaScope scope_{*arena_};
};

TEST_P(ConvTest, ForwardAndBackward) {
  const Case c = GetParam();
  const Shape ys = c.conv.output(c.x, c.out), ws = weight_shape(c);
  const double spread = 1 / std::sqrt(static_cast<double>(ws.numel() / c.out));
  const Vec x = rounded(random_values(c.x.numel(), 1), c.dtype);
  const Vec w = rounded(random_values(ws.numel(), 2, spread), c.dtype);
  const Vec bias = random_values(c.out, 3), zero(static_cast<std::size_t>(ys.numel()));
  const Vec residual = rounded(random_values(ys.numel(), 4), c.dtype);
  const Vec g = rounded(random_values(ys.numel(), 5), c.dtype);
  const Tensor tx = to_tensor(x, c.x, c.dtype), tw = to_tensor(w, ws, c.dtype);
  const Tensor tb = to_tensor(bias, {c.out}), tg = to_tensor(g, ys, c.dtype);
  // Winograd's transforms cost some of f32's last bits (src/ops/cpu/conv/winograd.cpp).
  const double bound = c.dtype == DType::f32 ? 3e-6 : tolerance(c.dtype);

  Tensor y = poisoned(ys, c.dtype);
  ops::conv_forward(tx, tw, Tensor(), Tensor(), c.conv, y);
  EXPECT_LT(
      relative_error(to_values(y), convolve(c, x, w, Vec(static_cast<std::size_t>(c.out)), zero)),
      bound);
  const Vec all = convolve(c, x, w, bias, residual);
  y = poisoned(ys, c.dtype);
  ops::conv_forward(tx, tw, tb, to_tensor(residual, ys, c.dtype), c.conv, y);
  EXPECT_LT(relative_error(to_values(y), all), bound);
  y = to_tensor(residual, ys, c.dtype);  // the residual in place
  ops::conv_forward(tx, tw, tb, y, c.conv, y);
  EXPECT_LT(relative_error(to_values(y), all), bound);

  Vec dx(x.size()), dw(w.size()), db(bias.size());
  for_products(c, [&](std::size_t o, std::size_t i, std::size_t k) {
    dx[i] += g[o] * w[k];
    dw[k] += g[o] * x[i];
  });
  for (std::size_t i = 0; i < g.size(); ++i) db[i % db.size()] += g[i];
  Tensor tdx = poisoned(c.x, c.dtype), tdw = poisoned(ws), tdb = poisoned({c.out});
  ops::conv_backward_input(tg, tw, c.conv, tdx, false);
  ops::conv_backward_weight(tx, tg, c.conv, tdw, tdb, false);
  EXPECT_LT(relative_error(to_values(tdx), dx), bound);
  EXPECT_LT(relative_error(to_values(tdw), dw), 3e-6);
  EXPECT_LT(relative_error(to_values(tdb), db), 3e-6);
  if (c.differences) {
    const auto f = [&](const Vec& at) { return dot(convolve(c, at, w, bias, zero), g); };
    expect_gradient(f, x, to_values(tdx), 4 * bound);
    const auto of_w = [&](const Vec& at) { return dot(convolve(c, x, at, bias, zero), g); };
    expect_gradient(of_w, w, to_values(tdw), 1e-5);
  }

  // Accumulation adds to what is there; a bias may be absent.
  const Vec there = rounded(random_values(c.x.numel(), 6), c.dtype);
  tdx = to_tensor(there, c.x, c.dtype);
  ops::conv_backward_input(tg, tw, c.conv, tdx, true);
  for (std::size_t i = 0; i < dx.size(); ++i) dx[i] += there[i];
  EXPECT_LT(relative_error(to_values(tdx), dx), bound);
  Tensor none;
  ops::conv_backward_weight(tx, tg, c.conv, tdw, none, true);
  ops::conv_backward_weight(tx, tg, c.conv, tdw, tdb, true);
  for (double& v : dw) v *= 3;
  for (double& v : db) v *= 2;
  EXPECT_LT(relative_error(to_values(tdw), dw), 3e-6);
  EXPECT_LT(relative_error(to_values(tdb), db), 3e-6);
}

// What the operations take inside themselves is part of the plan.
TEST_P(ConvTest, PlannedPeakIsReal) {
  const Case c = GetParam();
  const auto peak = [&](Arena& arena) {
    const ArenaScope scope(arena);
    const Shape ys = c.conv.output(c.x, c.out), ws = weight_shape(c);
    Tensor x = Tensor::empty(c.x, c.dtype), y = Tensor::empty(ys, c.dtype);
    const Tensor w = Tensor::empty(ws, c.dtype), bias = Tensor::empty({c.out}, DType::f32);
    Tensor dw = Tensor::empty(ws, DType::f32), none;
    std::vector<std::size_t> peaks;
    const auto note = [&] {
      peaks.push_back(arena.peak() - arena.used());
      arena.reset_peak();
    };
    arena.reset_peak();
    ops::conv_forward(x, w, bias, y, c.conv, y);
    note();
    for (const bool accumulate : {false, true}) {
      ops::conv_backward_input(y, w, c.conv, x, accumulate);
      note();
      ops::conv_backward_weight(x, y, c.conv, dw, none, accumulate);
      note();
    }
    return peaks;
  };
  const auto planning = Arena::planning();
  const std::vector<std::size_t> planned = peak(*planning);
  EXPECT_EQ(planned, peak(*arena_));
  // Products of rows take nothing.
  const bool is_product = c.conv.kt * c.conv.kh * c.conv.kw * c.conv.stride * c.conv.groups == 1;
  EXPECT_EQ(*std::max_element(planned.begin(), planned.end()) > 0, !is_product);
}

// Sizes that no tile divides, more zeros in front than a kernel is long (clips of few frames),
// channels of conv_in and conv_out, one pixel; then channels wide enough for every fast path.
INSTANTIATE_TEST_SUITE_P(
    Small, ConvTest,
    testing::Values(
        Case{{2, 1, 6, 5, 3}, 8, Conv::same(3)}, Case{{1, 2, 4, 7, 6}, 4, Conv::same(1)},
        Case{{1, 1, 1, 1, 5}, 3, Conv::same(3)}, Case{{2, 1, 7, 6, 4}, 9, Conv::down()},
        Case{{1, 2, 3, 5, 4}, 6, Conv::up()}, Case{{2, 3, 4, 5, 4}, 6, Conv::causal(3)},
        Case{{1, 4, 5, 3, 4}, 5, Conv::causal(3, 2)}, Case{{1, 2, 3, 4, 4}, 8, Conv::causal(1)},
        Case{{1, 1, 3, 4, 4}, 6, Conv{3, 3, 3, 1, 1, 5, 1, 1, 1, 1, false}},
        Case{{2, 3, 4, 5, 3}, 4, Conv::volume(3)}, Case{{1, 1, 3, 5, 4}, 3, Conv::volume(3)},
        Case{{1, 2, 3, 4, 4}, 6, Conv{3, 3, 3, 2, 1, 1, 1, 1, 1, 1, false, 1, 1, 1}},
        Case{{2, 3, 2, 3, 4}, 6, Conv::volume_up()},
        Case{{1, 2, 3, 2, 3}, 4, Conv{3, 3, 3, 1, 1, 2, 1, 1, 1, 1, true}},
        Case{{1, 1, 4, 5, 18}, 2, Conv::same(5)}, Case{{1, 2, 3, 4, 16}, 3, Conv::volume(3)},
        Case{{1, 1, 9, 8, 5}, 7, Conv{1, 4, 4, 1, 2, 0, 1, 1, 1, 1, false}},
        Case{{2, 1, 9, 8, 4}, 6, Conv::strided(3, 1, 2)},
        Case{{1, 1, 3, 5, 4}, 4, Conv::strided(3, 1, 4)},
        Case{{1, 1, 7, 6, 4}, 6, Conv::strided(3, 2)},
        Case{{2, 1, 7, 6, 4}, 6, Conv::strided(1, 2)},
        Case{{1, 1, 6, 7, 8}, 12, Conv::strided(3, 1, 1, 4)},
        Case{{1, 1, 9, 6, 6}, 6, Conv::strided(3, 2, 2, 6)},
        Case{{2, 1, 5, 6, 18}, 18, Conv::strided(3, 1, 1, 18)},
        Case{{1, 1, 5, 6, 5}, 10, Conv::strided(1, 1, 1, 5)},
        Case{{2, 1, 6, 5, 8}, 8, Conv::same(3), DType::bf16},
        Case{{2, 1, 9, 7, 8}, 8, Conv::strided(3, 1, 2, 2), DType::bf16},
        Case{{2, 1, 7, 7, 8}, 8, Conv::strided(3, 2, 1, 8), DType::bf16},
        Case{{2, 1, 7, 5, 8}, 6, Conv::strided(1, 2), DType::bf16},
        Case{{1, 3, 3, 5, 4}, 6, Conv::causal(3), DType::bf16},
        Case{{1, 2, 3, 5, 4}, 6, Conv::up(), DType::bf16}));
INSTANTIATE_TEST_SUITE_P(
    Wide, ConvTest,
    testing::Values(
        Case{{2, 1, 18, 21, 64}, 64, Conv::same(3), DType::f32, false},
        Case{{1, 1, 7, 13, 72}, 80, Conv::same(3), DType::f32, false},
        Case{{1, 1, 9, 7, 64}, 64, Conv::up(), DType::f32, false},
        Case{{1, 3, 7, 6, 64}, 64, Conv::causal(3), DType::f32, false},
        Case{{1, 3, 5, 4, 72}, 40, Conv::volume_up(), DType::f32, false},
        Case{{1, 3, 9, 8, 20}, 24, Conv::volume(5), DType::f32, false},
        Case{{1, 1, 5, 6, 32}, 48, Conv{3, 3, 3, 1, 1, 5, 1, 1, 1, 1, false}, DType::f32, false},
        Case{{1, 4, 6, 5, 32}, 20, Conv::causal(3, 2), DType::f32, false},
        Case{{1, 1, 12, 10, 64}, 64, Conv::down(), DType::f32, false},
        Case{{2, 1, 13, 10, 64}, 48, Conv::strided(3, 1, 2), DType::f32, false},
        Case{{1, 1, 14, 19, 40}, 36, Conv::strided(3, 1, 4), DType::f32, false},
        Case{{1, 1, 3, 2, 32}, 32, Conv::strided(3, 1, 4), DType::f32, false},
        Case{{2, 1, 11, 14, 64}, 72, Conv::strided(3, 2), DType::f32, false},
        Case{{2, 1, 11, 14, 64}, 72, Conv::strided(1, 2), DType::f32, false},
        Case{{2, 1, 12, 20, 3}, 64, Conv::strided(3, 2), DType::f32, false},
        Case{{2, 1, 5, 4, 96}, 320, Conv::same(3), DType::f32, false},
        Case{{2, 1, 9, 7, 128}, 240, Conv::strided(3, 2), DType::f32, false},
        Case{{1, 1, 9, 10, 64}, 64, Conv::strided(3, 1, 1, 32), DType::f32, false},
        Case{{2, 1, 12, 9, 96}, 96, Conv::strided(3, 1, 1, 96), DType::f32, false},
        Case{{1, 1, 70, 5, 24}, 24, Conv::strided(3, 1, 1, 24), DType::f32, false},
        Case{{2, 1, 12, 9, 40}, 40, Conv::strided(3, 2, 1, 40), DType::f32, false},
        Case{{1, 1, 11, 9, 48}, 48, Conv::strided(3, 1, 2, 48), DType::f32, false}));

// So many weights that, transformed, they go past the caches: of one pixel, whose result is a
// product with each of the nine matrices.
TEST_F(OpTest, ConvOfOnePixelByManyWeights) {
  constexpr std::int64_t side = 15, ins = 464, outs = 520, at = 6;
  const Vec pixel = random_values(ins, 1), weights = random_values(outs * ins * 9, 2);
  Vec image(side * side * ins);
  std::ranges::copy(pixel, image.begin() + (at * side + at) * ins);
  const Tensor x = to_tensor(image, {1, 1, side, side, ins}),
               w = to_tensor(weights, {outs, ins, 3, 3});
  Tensor y = poisoned({1, 1, side, side, outs});
  ops::conv_forward(x, w, Tensor(), Tensor(), Conv::same(3), y);
  Vec wanted(side * side * outs);
  for (std::int64_t o = 0; o < outs; ++o)
    for (std::int64_t k = 0; k < 9; ++k) {
      double& sum = wanted[((at + 1 - k / 3) * side + at + 1 - k % 3) * outs + o];
      for (std::int64_t i = 0; i < ins; ++i) sum += pixel[i] * weights[(o * ins + i) * 9 + k];
    }
  EXPECT_LT(relative_error(to_values(y), wanted), 3e-6);
}

// A sample's result is the same in a batch and alone, whichever way it is computed.
TEST_F(OpTest, ConvOfASampleDoesNotDependOnTheBatch) {
  const Case cases[] = {
      {{2, 1, 33, 30, 128}, 112, Conv::same(3)}, {{2, 7, 16, 17, 72}, 36, Conv::volume(3)},
      {{2, 8, 5, 5, 256}, 232, Conv::volume(3)}, {{2, 1, 15, 14, 352}, 368, Conv::same(3)},
      {{2, 2, 33, 34, 36}, 3, Conv::volume(3)},  {{2, 3, 9, 12, 18}, 9, Conv::volume(7)},
      {{2, 1, 9, 7, 70}, 3, Conv::same(3)},      {{2, 3, 5, 6, 72}, 30, Conv::volume_up()},
      {{2, 1, 25, 19, 150}, 70, Conv::down()}};
  for (const Case& c : cases) {
    const Shape ys = c.conv.output(c.x, c.out), ws = weight_shape(c);
    const Tensor x = to_tensor(random_values(c.x.numel(), 1), c.x, c.dtype);
    const Tensor w = to_tensor(random_values(ws.numel(), 2), ws, c.dtype);
    const Tensor bias = to_tensor(random_values(c.out, 3), {c.out});
    Tensor together = poisoned(ys, c.dtype), alone = poisoned(ys, c.dtype);
    ops::conv_forward(x, w, bias, Tensor(), c.conv, together);
    for (std::int64_t n = 0; n < c.x[0]; ++n) {
      Tensor one = alone.slice(n, n + 1);
      ops::conv_forward(x.slice(n, n + 1), w, bias, Tensor(), c.conv, one);
    }
    EXPECT_EQ(to_values(together), to_values(alone)) << c.x.str();
  }
}

// Against fp64, no way rounds much worse than a plain sum: a ReLU's input near zero would tip.
TEST_F(OpTest, ConvRoundsNotMuchWorseThanAPlainSum) {
  const RoundingShape shapes[] = {
      {"winograd", {1, 1, 33, 30, 128}, 112, Conv::same(3)},
      {"dilated", {1, 1, 32, 30, 128}, 128, Conv::strided(3, 1, 2)},
      {"pairs of frames", {1, 7, 16, 17, 72}, 72, Conv::volume(3)},
      {"panels of weights", {1, 8, 5, 5, 256}, 256, Conv::volume(3)},
      {"fourier", {1, 3, 9, 12, 18}, 16, Conv::volume(7)},
      {"depthwise", {2, 1, 12, 9, 40}, 40, Conv::strided(3, 1, 1, 40)},
      {"depthwise of stride 2", {2, 1, 12, 9, 40}, 40, Conv::strided(3, 2, 1, 40)},
      {"product", {1, 1, 20, 20, 256}, 64, Conv::same(1)},
      {"small", {3, 1, 6, 4, 64}, 64, Conv::same(3)},
      {"small dilated", {3, 1, 12, 10, 64}, 64, Conv::strided(3, 1, 4)},
      {"stride 2", {2, 1, 21, 18, 64}, 32, Conv::strided(3, 2)},
      {"groups", {2, 1, 9, 10, 64}, 64, Conv::strided(3, 1, 1, 16)},
      {"stem", {1, 1, 24, 30, 3}, 64, Conv::strided(3, 2)},
  };
  std::set<std::string> ways;
  for (const RoundingShape& s : shapes)
    for (const RoundingCase& c : measure_rounding(s, 3e6))
      for (const RoundingRow& r : c.rows) {
        if (r.taken) ways.insert(r.way);
        // What is there for its rounding has to be better.
        const double bound = r.way == "blocked" ? 0.75 : rounding_bound;
        EXPECT_LE(r.error.largest, bound * c.plain.largest)
            << c.shape << ", " << c.pass << ", " << r.way << " of " << r.side;
      }
  EXPECT_EQ(ways, (std::set<std::string>{"blocked", "depthwise", "fourier", "oneDNN", "product",
                                         "winograd", "winograd_volume"}));
}

TEST_F(OpTest, ConvOutputShapes) {
  EXPECT_EQ(Conv::volume(7).output({2, 16, 5, 6, 8}, 4), (Shape{2, 16, 5, 6, 4}));
  EXPECT_EQ(Conv::volume_up().output({2, 16, 5, 6, 8}, 4), (Shape{2, 16, 10, 12, 4}));
  EXPECT_EQ(Conv::down().output({2, 1, 53, 106, 8}, 16), (Shape{2, 1, 26, 53, 16}));
  EXPECT_EQ(Conv::up().output({2, 1, 5, 6, 8}, 4), (Shape{2, 1, 10, 12, 4}));
  EXPECT_EQ(Conv::causal(3).output({1, 17, 5, 6, 8}, 4), (Shape{1, 17, 5, 6, 4}));
  EXPECT_EQ(Conv::causal(3, 2).output({1, 20, 5, 6, 8}, 4), (Shape{1, 10, 5, 6, 4}));
  EXPECT_EQ(Conv::strided(3, 2).output({1, 1, 9, 8, 8}, 4), (Shape{1, 1, 5, 4, 4}));
  EXPECT_EQ(Conv::strided(3, 1, 4).output({1, 1, 3, 8, 8}, 4), (Shape{1, 1, 3, 8, 4}));
  EXPECT_EQ(Conv::strided(1, 2).output({1, 1, 9, 8, 8}, 4), (Shape{1, 1, 5, 4, 4}));
  EXPECT_THROW(Conv::down().output({1, 1, 1, 1, 8}, 4), std::exception);
}

}  // namespace
}  // namespace weft::test
