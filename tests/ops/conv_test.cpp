#include "ops/conv.h"
#include "ops/layout.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

#include "reference.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/rounding.h"

namespace weft::test {
namespace {

using ops::Conv;

// What the operations are compiled for: x86-64 has two sides, of which one runs. Sizes choose the
// same algorithms on both.
#ifdef __x86_64__
namespace side = ops::cpu_v3;
namespace other_side = ops::cpu_v4;
#else
namespace side = ops::cpu_generic;
namespace other_side = ops::cpu_generic;
#endif

struct Case {
  Shape x;  // [N,T,H,W,Cin]
  std::int64_t out;
  Conv conv;
  DType dtype = DType::f32;
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

// The peaks of memory inside the forward and both backwards, written and added.
std::vector<std::size_t> peaks_of(const Case& c, Arena& arena) {
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
}

// What the operations take inside themselves is part of the plan.
TEST_P(ConvTest, PlannedPeakIsReal) {
  const Case c = GetParam();
  const auto planning = Arena::planning();
  const std::vector<std::size_t> planned = peaks_of(c, *planning);
  EXPECT_EQ(planned, peaks_of(c, *arena_));
  // Products of rows take nothing.
  const bool is_product = c.conv.kt * c.conv.kh * c.conv.kw * c.conv.stride * c.conv.groups == 1;
  EXPECT_EQ(*std::max_element(planned.begin(), planned.end()) > 0, !is_product);
}

// Sizes that no tile divides, more zeros in front than a kernel is long (clips of few frames),
// channels of conv_in and conv_out, one pixel; then channels wide enough for whole vectors. Shapes
// large enough for Winograd's transforms are in tests/kernels/conv.cpp, and below.
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
        Case{{2, 1, 18, 21, 64}, 64, Conv::same(3)}, Case{{1, 1, 7, 13, 72}, 80, Conv::same(3)},
        Case{{1, 1, 9, 7, 64}, 64, Conv::up()}, Case{{1, 3, 7, 6, 64}, 64, Conv::causal(3)},
        Case{{1, 3, 5, 4, 72}, 40, Conv::volume_up()}, Case{{1, 3, 9, 8, 20}, 24, Conv::volume(5)},
        Case{{1, 1, 5, 6, 32}, 48, Conv{3, 3, 3, 1, 1, 5, 1, 1, 1, 1, false}},
        Case{{1, 4, 6, 5, 32}, 20, Conv::causal(3, 2)}, Case{{1, 1, 12, 10, 64}, 64, Conv::down()},
        Case{{2, 1, 13, 10, 64}, 48, Conv::strided(3, 1, 2)},
        Case{{1, 1, 14, 19, 40}, 36, Conv::strided(3, 1, 4)},
        Case{{1, 1, 3, 2, 32}, 32, Conv::strided(3, 1, 4)},
        Case{{2, 1, 11, 14, 64}, 72, Conv::strided(3, 2)},
        Case{{2, 1, 11, 14, 64}, 72, Conv::strided(1, 2)},
        Case{{2, 1, 12, 20, 3}, 64, Conv::strided(3, 2)},
        Case{{1, 1, 9, 10, 64}, 64, Conv::strided(3, 1, 1, 32)},
        Case{{2, 1, 12, 9, 96}, 96, Conv::strided(3, 1, 1, 96)},
        Case{{1, 1, 70, 5, 24}, 24, Conv::strided(3, 1, 1, 24)},
        Case{{2, 1, 12, 9, 40}, 40, Conv::strided(3, 2, 1, 40)},
        Case{{1, 1, 11, 9, 48}, 48, Conv::strided(3, 1, 2, 48)}));

// So many weights that they are transformed for a group of outputs at a time: of one pixel, whose
// result is a product with each of the nine matrices.
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

// Convolutions large enough for Winograd's transforms, by what computes their forward and their
// gradient of the input.
const Case of_planes{{1, 1, 33, 30, 128}, 112, Conv::same(3)};
const Case of_wide_planes{{1, 1, 15, 14, 352}, 368, Conv::same(3)};
const Case of_frame_pairs{{1, 7, 16, 17, 72}, 36, Conv::volume(3)};
const Case of_channel_groups{{1, 8, 5, 5, 256}, 232, Conv::volume(3)};

// The geometry of a convolution, and that of its gradient of the input.
std::vector<side::Geometry> both_geometries(const Case& c) {
  const auto g = side::geometry(c.x, c.conv.output(c.x, c.out), c.conv);
  return {g, side::flipped_geometry(g).value()};
}

TEST_F(OpTest, PlannedPeakOfWinogradIsReal) {
  for (const auto& g : both_geometries(of_planes)) {
    EXPECT_EQ(side::algorithm_of(g), side::Algorithm::winograd);
    EXPECT_FALSE(side::wide_fits(g));
  }
  for (const auto& g : both_geometries(of_wide_planes)) EXPECT_TRUE(side::wide_fits(g));
  for (const Case& c : {of_frame_pairs, of_channel_groups})
    for (const auto& g : both_geometries(c))
      EXPECT_EQ(side::algorithm_of(g), side::Algorithm::winograd_volume);

  const int threads = omp_get_max_threads();
  for (const Case& c : {of_planes, of_wide_planes, of_frame_pairs, of_channel_groups})
    for (const int n : {1, 3}) {  // some buffers are one a thread
      omp_set_num_threads(n);
      const auto planning = Arena::planning();
      const std::vector<std::size_t> planned = peaks_of(c, *planning);
      EXPECT_EQ(planned, peaks_of(c, *arena_)) << c.x.str() << ", " << n << " threads";
      EXPECT_GT(*std::ranges::min_element(planned), 0u);
    }
  omp_set_num_threads(threads);
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

// Wide planes are computed by groups of output channels in batches of up to 8192 pixels, and with
// all weights transformed first in larger ones: sums have the same order both ways, or a sample's
// bits would depend on its batch. Here one side's ways beside each other.
template <class Geometry>
void expect_same_both_ways(Geometry (*geometry)(const Shape&, const Shape&, const Conv&),
                           bool (*wide_fits)(const Geometry&), const auto& all_weights_first,
                           const auto& by_groups) {
  // More channels than a block of the depth has, frames, dilation, sizes that no tile divides.
  const Case cases[] = {{{2, 1, 13, 10, 128}, 112, Conv::same(3)},
                        {{1, 2, 17, 14, 200}, 50, Conv::same(3)},
                        {{1, 1, 16, 13, 300}, 72, Conv::strided(3, 1, 2)},
                        {{3, 1, 5, 6, 36}, 8, Conv::same(3)}};
  for (const Case& c : cases) {
    const Shape ys = c.conv.output(c.x, c.out);
    const Geometry g = geometry(c.x, ys, c.conv);
    ASSERT_FALSE(wide_fits(g));  // winograd_forward would take the other way
    const Tensor x = random_tensor(c.x, DType::f32, 1),
                 bias = random_tensor({c.out}, DType::f32, 2),
                 w = random_tensor(weight_shape(c), DType::f32, 3);
    for (const bool add : {false, true}) {
      Tensor one = random_tensor(ys, DType::f32, 4), other = random_tensor(ys, DType::f32, 4);
      all_weights_first(g, x.data<float>(), w.data<float>(), bias.data<float>(), add,
                        one.data<float>());
      by_groups(g, x.data<float>(), w.data<float>(), bias.data<float>(), add, other.data<float>());
      EXPECT_TRUE(same_bits(one, other)) << c.x.str() << ", add " << add;
    }
  }
}

TEST_F(OpTest, ConvOfWidePlanesIsTheSameBothWays) {
  expect_same_both_ways(side::geometry, side::wide_fits, side::winograd_forward,
                        side::wide_forward);
  if (ops::cpu_is_v4())
    expect_same_both_ways(other_side::geometry, other_side::wide_fits, other_side::winograd_forward,
                          other_side::wide_forward);
}

// The same across that border itself, in a frame that has its inputs transformed in two bands.
TEST_F(OpTest, ConvOfASampleDoesNotDependOnALargeBatch) {
  const Shape shape{2, 1, 78, 78, 344}, one{1, 1, 78, 78, 344};
  const Conv conv = Conv::same(3);
  ASSERT_FALSE(side::wide_fits(side::geometry(shape, shape, conv)));
  ASSERT_TRUE(side::wide_fits(side::geometry(one, one, conv)));
  const Tensor x = random_tensor(shape, DType::f32, 1),
               w = random_tensor({344, 344, 3, 3}, DType::f32, 2);
  Tensor together = Tensor::empty(shape, DType::f32), alone = poisoned(one);
  ops::conv_forward(x, w, Tensor(), Tensor(), conv, together);
  ops::conv_forward(x.slice(1, 2), w, Tensor(), Tensor(), conv, alone);
  EXPECT_TRUE(same_bits(alone, together.slice(1, 2)));
}

// What is added to is added once, and last: to the bit, where our own transforms compute it.
TEST_F(OpTest, WinogradAddsOnce) {
  for (const Case& c : {of_planes, of_wide_planes, of_frame_pairs, of_channel_groups}) {
    const Shape ys = c.conv.output(c.x, c.out), ws = weight_shape(c);
    const Tensor x = random_tensor(c.x, DType::f32, 1), w = random_tensor(ws, DType::f32, 2),
                 dy = random_tensor(ys, DType::f32, 3),
                 bias = random_tensor({c.out}, DType::f32, 4);
    Tensor none;
    // of(to, accumulate) computes into `to`; `extra`, a row of values, is added before what is
    // there.
    const auto check = [&](const char* what, const Shape& shape, const float* extra, auto of) {
      const Tensor there = random_tensor(shape, DType::f32, 5);
      Tensor plain = poisoned(shape), added = random_tensor(shape, DType::f32, 5);
      of(plain, false), of(added, true);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < shape.numel(); ++i) {
        float wanted = plain.data<float>()[i];
        if (extra != nullptr) wanted += extra[i % c.out];
        wanted += there.data<float>()[i];
        wrong += added.data<float>()[i] != wanted ? 1 : 0;
      }
      EXPECT_EQ(wrong, 0) << what << " of " << c.x.str();
    };
    check("forward", ys, bias.data<float>(), [&](Tensor& y, bool add) {
      ops::conv_forward(x, w, add ? bias : none, add ? y : none, c.conv, y);
    });
    check("gradient of x", c.x, nullptr,
          [&](Tensor& dx, bool add) { ops::conv_backward_input(dy, w, c.conv, dx, add); });
    check("gradient of w", ws, nullptr,
          [&](Tensor& dw, bool add) { ops::conv_backward_weight(x, dy, c.conv, dw, none, add); });
  }
}

// Sets how many values a pass over a batch has, until its end.
struct ValuesPerPass {
  explicit ValuesPerPass(std::int64_t values) { set(values); }
  ~ValuesPerPass() { set(before); }
  void set(std::int64_t values) { side::values_per_pass = other_side::values_per_pass = values; }
  std::int64_t before = side::values_per_pass;
};

// Large batches are computed in several passes, here of two samples, two and one. No sample's bits
// depend on that; sums over the batch are those of the passes, one after the other.
TEST_F(OpTest, ConvInPassesIsTheSame) {
  const Case cases[] = {{{5, 1, 9, 7, 40}, 36, Conv::same(3), DType::bf16},
                        {{5, 1, 9, 7, 40}, 36, Conv::strided(3, 2), DType::bf16},
                        {{5, 2, 6, 5, 8}, 12, Conv::strided(3, 1, 1, 4), DType::bf16},
                        {{5, 3, 9, 8, 16}, 9, Conv::volume(5), DType::bf16},
                        {{5, 1, 33, 30, 128}, 112, Conv::same(3), DType::bf16},
                        {{5, 1, 4, 5, 12}, 16, Conv::up(), DType::bf16},
                        {{5, 1, 4, 5, 12}, 16, Conv::up(), DType::f32},
                        {{5, 2, 3, 4, 16}, 12, Conv::volume_up(), DType::f32},
                        // Too small for passes until it is enlarged.
                        {{5, 1, 4, 5, 24}, 4, Conv::up(), DType::bf16}};
  constexpr std::int64_t samples = 5, pass = 2;
  for (const Case& c : cases) {
    const Shape ys = c.conv.output(c.x, c.out), ws = weight_shape(c);
    const Tensor x = random_tensor(c.x, c.dtype, 1), w = random_tensor(ws, c.dtype, 2, 0.1f),
                 dy = random_tensor(ys, c.dtype, 3), bias = random_tensor({c.out}, DType::f32, 4);
    struct Results {
      Tensor y, dx, dw, db;
      std::size_t peak;
    };
    const auto run = [&](std::int64_t values) {
      const ValuesPerPass limit(values);
      Results r{random_tensor(ys, c.dtype, 5), random_tensor(c.x, c.dtype, 6), poisoned(ws),
                poisoned({c.out}), 0};
      arena_->reset_peak();
      const std::size_t used = arena_->used();
      ops::conv_forward(x, w, bias, r.y, c.conv, r.y);
      ops::conv_backward_input(dy, w, c.conv, r.dx, true);
      r.peak = arena_->peak() - used;
      ops::conv_backward_weight(x, dy, c.conv, r.dw, r.db, false);
      return r;
    };
    const std::int64_t channels = c.conv.upsample ? std::max(c.x[4], c.out) : 0;
    const std::int64_t largest = std::max({c.x.numel(), ys.numel(), ys.numel() / c.out * channels});
    const Results whole = run(std::numeric_limits<std::int64_t>::max());
    const Results passes = run(pass * largest / samples);
    EXPECT_LT(passes.peak, whole.peak) << c.x.str() << ": in one pass";
    EXPECT_TRUE(same_bits(passes.y, whole.y)) << c.x.str();
    EXPECT_TRUE(same_bits(passes.dx, whole.dx)) << c.x.str();
    EXPECT_LT(relative_error(to_values(passes.dw), to_values(whole.dw)), 3e-6) << c.x.str();
    EXPECT_LT(relative_error(to_values(passes.db), to_values(whole.db)), 3e-6) << c.x.str();
    Tensor by_hand = poisoned(ws), none;
    for (std::int64_t n = 0; n < samples; n += pass) {
      const std::int64_t end = std::min(n + pass, samples);
      ops::conv_backward_weight(x.slice(n, end), dy.slice(n, end), c.conv, by_hand, none, n > 0);
    }
    EXPECT_TRUE(same_bits(passes.dw, by_hand)) << c.x.str();
    // The plan knows of the passes.
    const ValuesPerPass limit(pass * largest / samples);
    const auto planning = Arena::planning();
    EXPECT_EQ(peaks_of(c, *planning), peaks_of(c, *arena_)) << c.x.str();
  }
}

// A batch without a sample: nothing to compute, and gradients of zero.
TEST_F(OpTest, ConvOfNoSamples) {
  const Case cases[] = {{{0, 1, 40, 40, 128}, 128, Conv::same(3)},
                        {{0, 3, 16, 17, 72}, 72, Conv::volume(3)},
                        {{0, 1, 6, 5, 4}, 6, Conv::up()},
                        {{0, 1, 6, 5, 4}, 6, Conv::same(1)},
                        {{0, 1, 6, 5, 4}, 4, Conv::strided(3, 1, 1, 4)},
                        {{0, 1, 6, 5, 40}, 8, Conv::strided(3, 2), DType::bf16}};
  for (const Case& c : cases) {
    const Shape ys = c.conv.output(c.x, c.out), ws = weight_shape(c);
    Tensor x = poisoned(c.x, c.dtype), y = poisoned(ys, c.dtype), dw = poisoned(ws),
           db = poisoned({c.out});
    const Tensor w = random_tensor(ws, c.dtype, 1), bias = random_tensor({c.out}, DType::f32, 2);
    ops::conv_forward(x, w, bias, Tensor(), c.conv, y);
    ops::conv_backward_input(y, w, c.conv, x, false);
    ops::conv_backward_weight(x, y, c.conv, dw, db, false);
    EXPECT_EQ(to_values(dw), Vec(static_cast<std::size_t>(ws.numel()))) << c.x.str();
    EXPECT_EQ(to_values(db), Vec(static_cast<std::size_t>(c.out))) << c.x.str();
    Tensor there = random_tensor(ws, DType::f32, 3), none;
    const Tensor before = random_tensor(ws, DType::f32, 3);
    ops::conv_backward_weight(x, y, c.conv, there, none, true);
    EXPECT_TRUE(same_bits(there, before)) << c.x.str();
    const auto planning = Arena::planning();
    for (const std::size_t peak : peaks_of(c, *planning)) EXPECT_EQ(peak, 0u) << c.x.str();
  }
}

// A sample's result is the same in a batch and alone, whatever computes it.
TEST_F(OpTest, ConvOfASampleDoesNotDependOnTheBatch) {
  const Case cases[] = {{{2, 1, 33, 30, 128}, 112, Conv::same(3)},
                        {{2, 7, 16, 17, 72}, 36, Conv::volume(3)},
                        {{2, 8, 5, 5, 256}, 232, Conv::volume(3)},
                        {{2, 1, 15, 14, 352}, 368, Conv::same(3)},
                        {{2, 2, 33, 34, 36}, 3, Conv::volume(3)},
                        {{2, 3, 9, 12, 18}, 9, Conv::volume(7)},
                        {{2, 1, 9, 7, 70}, 3, Conv::same(3)},
                        {{2, 3, 5, 6, 72}, 30, Conv::volume_up()},
                        {{2, 1, 25, 19, 150}, 70, Conv::down()},
                        {{2, 1, 24, 30, 3}, 64, Conv::strided(3, 2)},
                        {{2, 1, 9, 10, 64}, 64, Conv::strided(3, 1, 1, 16)}};
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

// Against fp64, no algorithm rounds much worse than a plain sum: a ReLU's input near zero would
// change its sign.
TEST_F(OpTest, ConvRoundsNotMuchWorseThanAPlainSum) {
  const RoundingShape shapes[] = {
      {"winograd", {1, 1, 33, 30, 128}, 112, Conv::same(3)},
      {"dilated", {1, 1, 32, 30, 128}, 128, Conv::strided(3, 1, 2)},
      {"pairs of frames", {1, 7, 16, 17, 72}, 72, Conv::volume(3)},
      {"groups of outputs", {1, 8, 5, 5, 256}, 256, Conv::volume(3)},
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
  std::set<std::string> algorithms;
  for (const RoundingShape& s : shapes)
    for (const RoundingCase& c : measure_rounding(s, 3e6))
      for (const RoundingRow& r : c.rows) {
        if (r.taken) algorithms.insert(r.algorithm);
        // What is there for its rounding has to be better.
        const double bound = r.algorithm == "blocked" ? 0.75 : rounding_bound;
        EXPECT_LE(r.error.largest, bound * c.plain.largest)
            << c.shape << ", " << c.pass << ", " << r.algorithm << " of " << r.side;
      }
  EXPECT_EQ(algorithms, (std::set<std::string>{"blocked", "depthwise", "fourier", "oneDNN",
                                               "product", "winograd", "winograd_volume"}));
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
