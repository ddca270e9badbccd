#include "ops/attention.h"

#include <omp.h>

#include "reference.h"

namespace weft::test {
namespace {

// The bucket by the original's formula (docs/models/t5.md, Position bias).
int bucket(int distance) {
  const int n = std::abs(distance), offset = distance > 0 ? 16 : 0;
  if (n < 8) return offset + n;
  const double log = std::log(static_cast<float>(n) / 8.0f);
  return offset + std::min(15, 8 + static_cast<int>(log / std::log(16.0) * 8));
}

TEST(RelativeBucket, FollowsTheFormulaAtEveryDistance) {
  for (int d = -400; d <= 400; ++d) EXPECT_EQ(ops::relative_bucket(d), bucket(d)) << d;
  EXPECT_EQ(ops::relative_bucket(91), 31);
  EXPECT_EQ(ops::relative_bucket(-90), 14);
}

struct Case {
  std::vector<std::int64_t> lengths;  // of the captions, in tokens
  std::int64_t H, D;
  DType dtype;
};

class RelativeAttention : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Arena> arena_ = Arena::reserve(std::size_t{1} << 28);
  ArenaScope scope_{*arena_};
};

// softmax(q k^T + bias[bucket(key - query)]) v of every caption by itself, in f64.
Vec reference(const Case& c, const Vec& qkv, const Vec& bias) {
  const std::int64_t C = c.H * c.D, rows = static_cast<std::int64_t>(qkv.size()) / (3 * C);
  Vec out(static_cast<std::size_t>(rows * C));
  std::int64_t first = 0;
  for (const std::int64_t n : c.lengths) {
    for (std::int64_t h = 0; h < c.H; ++h)
      for (std::int64_t i = 0; i < n; ++i) {
        const auto row = [&](int part, std::int64_t t) {
          return qkv.data() + (part * rows + first + t) * C + h * c.D;
        };
        Vec p(static_cast<std::size_t>(n));
        double max = -1e300, sum = 0;
        for (std::int64_t j = 0; j < n; ++j) {
          p[j] = bias[bucket(static_cast<int>(j - i)) * c.H + h];
          for (std::int64_t d = 0; d < c.D; ++d) p[j] += row(0, i)[d] * row(1, j)[d];
          max = std::max(max, p[j]);
        }
        for (double& v : p) sum += v = std::exp(v - max);
        for (std::int64_t j = 0; j < n; ++j)
          for (std::int64_t d = 0; d < c.D; ++d)
            out[(first + i) * C + h * c.D + d] += p[j] / sum * row(2, j)[d];
      }
    first += n;
  }
  return out;
}

TEST_P(RelativeAttention, MatchesTheFormula) {
  const Case c = GetParam();
  Vec offsets{0};
  std::int64_t longest = 0;
  for (const std::int64_t n : c.lengths) {
    offsets.push_back(offsets.back() + static_cast<double>(n));
    longest = std::max(longest, n);
  }
  const auto rows = static_cast<std::int64_t>(offsets.back());
  // Scores are not scaled: small values keep the softmax from being decided by one key.
  const Vec qkv = rounded(random_values(3 * rows * c.H * c.D, 1, 0.5), c.dtype);
  const Vec bias = random_values(32 * c.H, 2);
  const Tensor tqkv = to_tensor(qkv, {3, rows, c.H, c.D}, c.dtype),
               tbias = to_tensor(bias, {32, c.H});
  const Tensor toffsets =
      to_tensor(offsets, {static_cast<std::int64_t>(offsets.size())}, DType::i32);
  const Vec wanted = reference(c, qkv, bias);
  Tensor out = poisoned({rows, c.H * c.D}, c.dtype);
  ops::relative_attention_forward(tqkv, tbias, toffsets, longest, out);
  EXPECT_LT(relative_error(to_values(out), wanted), tolerance(c.dtype, 1e4));

  // A bound above the longest caption changes no bit, nor does the number of threads.
  Tensor again = poisoned(out.shape(), c.dtype);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  ops::relative_attention_forward(tqkv, tbias, toffsets, longest + 9, again);
  omp_set_num_threads(threads);
  EXPECT_EQ(to_values(again), to_values(out));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RelativeAttention,
    testing::Values(Case{{1}, 2, 64, DType::f32}, Case{{5, 1, 17, 2}, 6, 64, DType::f32},
                    Case{{130, 33}, 2, 64, DType::f32}, Case{{7, 20}, 3, 20, DType::f32},
                    Case{{9, 0, 40}, 2, 8, DType::f32}, Case{{11, 100}, 2, 64, DType::bf16},
                    Case{{12, 3}, 2, 20, DType::bf16}));

}  // namespace
}  // namespace weft::test
