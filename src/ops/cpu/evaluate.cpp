// CPU side of ops/loss.h. A row of pixels at a time: for every scale the two rows of logits
// that it lies between are blended once, which leaves the blend along the row.
//
// Between two neighbouring logits that is a line, so its exponentials are a geometric series: one
// exponential for the first pixel, one for the ratio, then a product a pixel. Series are cut after
// `run` pixels, which bounds the rounding that piles up. exp(logit - the greatest logit of the
// neighbours) cannot overflow; where the logits of a cell are so far apart that the least could be
// lost and come back, every pixel is taken on its own.
#include "ops/loss.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "core/error.h"
#include "ops/resize.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr int run = 8;     // pixels of a series
constexpr int block = 32;  // pixels of a row under way at a time: their scores stay in the cache
constexpr float spread = 80.0f;  // between the logits of a cell: exp(-spread) is a normal number

// Pixels of a row, from `first` on, whose places between two columns are evenly spaced.
struct Series {
  int first, count;
  BilinearTap tap;  // of its first pixel
  float step;       // of the share, a pixel
};

// One scale's logits on their way to the image.
struct Scale {
  Tensor logits;
  std::vector<BilinearTap> rows;
  std::vector<std::vector<Series>> blocks;  // of a row

  Scale(const Tensor& x, std::int64_t H, std::int64_t width) : logits(x) {
    const auto tap = [](std::int64_t i, std::int64_t in, std::int64_t out) {
      return bilinear_tap(static_cast<int>(i), bilinear_ratio(in, out), static_cast<int>(in));
    };
    for (std::int64_t r = 0; r < H; ++r) rows.push_back(tap(r, x.dim(2), H));
    for (int q = 0; q < static_cast<int>(width); ++q) {
      const BilinearTap here = tap(q, x.dim(3), width);
      if (q % block == 0) blocks.emplace_back();
      std::vector<Series>& all = blocks.back();
      if (q % block > 0 && all.back().count < run && all.back().tap.first == here.first) {
        Series& s = all.back();
        const float step = (here.share - s.tap.share) / static_cast<float>(s.count);
        // Pixels in front of the first column all lie at 0: there the spacing changes.
        if (s.count == 1 || std::abs(step - s.step) < 1e-4f) {
          s.step = step;
          ++s.count;
          continue;
        }
      }
      all.push_back({q, 1, here, 0.0f});
    }
  }
  std::int64_t width() const { return logits.dim(3); }
};

// A blended row of w columns: logits [w, Cp], the last of them repeated up to the vector's end, and
// each column's greatest and least.
struct Row {
  float *logits, *greatest, *least;
};

template <class T>
void blend(const T* upper, const T* lower, float share, std::int64_t w, std::int64_t C, Row to) {
  const std::int64_t Cp = (C + W - 1) / W * W;
  for (std::int64_t j = 0; j < w; ++j) {
    float* row = to.logits + j * Cp;
    vf greatest = splat(-std::numeric_limits<float>::infinity()), least = -greatest;
    for_vectors(C, [&](std::int64_t c, int n) {
      const vf a = load_n(upper + j * C + c, n), b = load_n(lower + j * C + c, n);
      vf v = a + share * (b - a);
      if (n < W) v = select_first(v, n, v[0]);
      store(row + c, v);
      greatest = vmax(v, greatest), least = vmin(v, least);
    });
    to.greatest[j] = hmax(greatest), to.least[j] = -hmax(-least);
  }
}

// Adds `share` times the softmax of n pixels to scores [n, Cp]: logits a + (position + k step) (b -
// a) at pixel k, of which none is above `top`. series [vectors, n] is memory for the exponentials.
template <int n>
void add_softmax(const float* a, const float* b, float position, float step, float top,
                 std::int64_t C, float share, vf* series, float* scores) {
  const std::int64_t Cp = (C + W - 1) / W * W;
  vf sums[n] = {};
  vf* e = series;
  for (std::int64_t c = 0; c < Cp; c += W, e += n) {
    const vf from = load(a + c), slope = load(b + c) - from;
    vf x = vexp(from + position * slope - top);
    if (c + W > C) x = select_first(x, static_cast<int>(C - c), 0.0f);
    const vf ratio = n > 1 ? vexp(step * slope) : vf{};
    for (int k = 0; k < n; ++k) {
      e[k] = x;
      sums[k] += x;
      if (k + 1 < n) x *= ratio;
    }
  }
  float factor[n];
  for (int k = 0; k < n; ++k) factor[k] = share / hsum(sums[k]);
  e = series;
  for (std::int64_t c = 0; c < Cp; c += W, e += n)
    for (int k = 0; k < n; ++k) {
      float* to = scores + k * Cp + c;
      store(to, load(to) + factor[k] * e[k]);
    }
}

using AddSoftmax = void (*)(const float*, const float*, float, float, float, std::int64_t, float,
                            vf*, float*);
constexpr AddSoftmax add_series[run + 1] = {nullptr,        add_softmax<1>, add_softmax<2>,
                                            add_softmax<3>, add_softmax<4>, add_softmax<5>,
                                            add_softmax<6>, add_softmax<7>, add_softmax<8>};

// The greatest of the C logits at one pixel.
float greatest_at(const float* a, const float* b, float position, std::int64_t C) {
  vf most = splat(-std::numeric_limits<float>::infinity());
  for (std::int64_t c = 0; c < C; c += W)  // the repeated ones change nothing
    most = vmax(load(a + c) + position * (load(b + c) - load(a + c)), most);
  return hmax(most);
}

// Adds a scale's softmax, times `share`, to the scores [.., Cp] of a block of pixels.
void add_scale(const std::vector<Series>& all, const Row& row, std::int64_t C, float share,
               vf* series, float* scores) {
  const std::int64_t Cp = (C + W - 1) / W * W;
  for (const Series& s : all) {
    const auto [i, j, position] = s.tap;
    const float *a = row.logits + i * Cp, *b = row.logits + j * Cp;
    const float top = std::max(row.greatest[i], row.greatest[j]);
    if (top - std::min(row.least[i], row.least[j]) < spread)
      add_series[s.count](a, b, position, s.step, top, C, share, series, scores);
    else
      for (int k = 0; k < s.count; ++k) {
        const float at = position + static_cast<float>(k) * s.step;
        add_softmax<1>(a, b, at, 0.0f, greatest_at(a, b, at, C), C, share, series, scores + k * Cp);
      }
    scores += s.count * Cp;
  }
}

// The logits themselves, whose order is that of their softmax.
void put_logits(const std::vector<Series>& all, const Row& row, std::int64_t C, float* scores) {
  const std::int64_t Cp = (C + W - 1) / W * W;
  for (const Series& s : all)
    for (int k = 0; k < s.count; ++k, scores += Cp) {
      const float *a = row.logits + s.tap.first * Cp, *b = row.logits + s.tap.second * Cp;
      const float at = s.tap.share + static_cast<float>(k) * s.step;
      for (std::int64_t c = 0; c < Cp; c += W)
        store(scores + c, load(a + c) + at * (load(b + c) - load(a + c)));
    }
}

// The first of the greatest of C scores.
int first_greatest(const float* scores, std::int64_t C) {
  vf most = load(scores);
  const std::int64_t Cp = (C + W - 1) / W * W;
  for (std::int64_t c = W; c < Cp; c += W) most = vmax(load(scores + c), most);
  const float top = hmax(most);
  for (std::int64_t c = 0; c < Cp; c += W) {
#if defined(__AVX512F__)
    const unsigned at =
        _mm512_cmp_ps_mask((__m512)load(scores + c), (__m512)splat(top), _CMP_EQ_OQ);
#elif defined(__AVX2__)
    const auto at = static_cast<unsigned>(_mm256_movemask_ps(
        _mm256_cmp_ps((__m256)load(scores + c), (__m256)splat(top), _CMP_EQ_OQ)));
#else
    unsigned at = 0;
    for (unsigned i = 0; i < W; ++i) at |= static_cast<unsigned>(scores[c + i] == top) << i;
#endif
    if (at != 0) return static_cast<int>(c) + __builtin_ctz(at);
  }
  return 0;  // NaN alone
}

}  // namespace

void predict_classes(Tensor& prediction, std::span<const Tensor> logits, const Tensor& labels,
                     Tensor& counts, Tensor& scores) {
  const std::int64_t H = prediction.dim(0), width = prediction.dim(1), C = counts.dim(1);
  const std::int64_t Cp = (C + W - 1) / W * W;
  WEFT_ASSERT(!logits.empty() && logits.size() <= most_scales && C <= 255);
  std::vector<Scale> scales;
  std::int64_t columns = 0;  // of all scales
  for (const Tensor& x : logits) {
    WEFT_ASSERT(x.shape().rank() == 5 && x.dim(4) == C && x.dtype() == logits[0].dtype());
    scales.emplace_back(x, H, width);
    columns += x.dim(3);
  }
  const bool alone = scales.size() == 1 && !scores.defined();
  const float share = 1.0f / static_cast<float>(scales.size());
  const std::uint8_t* label = labels.defined() ? labels.data<std::uint8_t>() : nullptr;
  std::uint8_t* to = prediction.data<std::uint8_t>();
  std::int64_t* total = counts.data<std::int64_t>();
#pragma omp parallel
  {
    struct Memory;
    float* memory =
        scratch<Memory>(static_cast<std::size_t>((block + run) * Cp + columns * (Cp + 2)));
    float* block_scores = memory;
    vf* series = reinterpret_cast<vf*>(memory + block * Cp);
    std::vector<Row> rows;
    float* next = memory + (block + run) * Cp;
    for (const Scale& s : scales) {
      rows.push_back({next, nullptr, nullptr});
      next += s.width() * Cp;
    }
    for (std::size_t k = 0; k < scales.size(); ++k) {
      rows[k].greatest = next;
      rows[k].least = next + scales[k].width();
      next += 2 * scales[k].width();
    }
    std::vector<std::int64_t> own(3 * C);
#pragma omp for schedule(static)
    for (std::int64_t r = 0; r < H; ++r) {
      for (std::size_t k = 0; k < scales.size(); ++k)
        with_type(logits[0].dtype(), [&](auto type) {
          const Scale& s = scales[k];
          const auto* x = s.logits.template data<decltype(type)>();
          const std::int64_t size = s.width() * C;
          blend(x + s.rows[r].first * size, x + s.rows[r].second * size, s.rows[r].share, s.width(),
                C, rows[k]);
        });
      for (std::int64_t q = 0; q < width; q += block) {
        const int n = static_cast<int>(std::min<std::int64_t>(block, width - q));
        if (alone) {
          put_logits(scales[0].blocks[q / block], rows[0], C, block_scores);
        } else {
          std::fill_n(block_scores, n * Cp, 0.0f);
          for (std::size_t k = 0; k < scales.size(); ++k)
            add_scale(scales[k].blocks[q / block], rows[k], C, share, series, block_scores);
        }
        const std::int64_t first = r * width + q;
        if (scores.defined())
          for (std::int64_t c = 0; c < C; ++c)
            for (int i = 0; i < n; ++i)
              scores.data<float>()[c * H * width + first + i] = block_scores[i * Cp + c];
        for (int i = 0; i < n; ++i) {
          const int best = first_greatest(block_scores + i * Cp, C);
          to[first + i] = static_cast<std::uint8_t>(best);
          if (label == nullptr || label[first + i] == 0 || label[first + i] > C) continue;
          const int known = label[first + i] - 1;
          own[known] += best == known;
          own[C + best] += 1;
          own[2 * C + known] += 1;
        }
      }
    }
#pragma omp critical(predict_classes_counts)
    for (std::int64_t i = 0; i < 3 * C; ++i) total[i] += own[i];
  }
}

void count_above(const Tensor& x, float threshold, Tensor& counts) {
  const std::int64_t N = counts.numel(), size = x.numel() / N;
  WEFT_ASSERT(x.dim(0) == N && size < std::int64_t{1} << 31);
  with_type(x.dtype(), [&](auto type) {
    using T = decltype(type);
    for (std::int64_t i = 0; i < N; ++i) {
      const T* in = x.data<T>() + i * size;
      std::int32_t count = 0;
      constexpr std::int64_t block = 1 << 16;
#pragma omp parallel for schedule(static) reduction(+ : count) if (size > block)
      for (std::int64_t b = 0; b < size; b += block) {
        vi above{};
        for_vectors(std::min(block, size - b), [&](std::int64_t k, int n) {
          const vi yes = load_n(in + b + k, n) > threshold;
          above -= n == W ? yes : (vi)select_first((vf)yes, n, 0.0f);
        });
        for (int l = 0; l < W; ++l) count += above[l];
      }
      counts.data<std::int32_t>()[i] = count;
    }
  });
}

WEFT_CPU_END
