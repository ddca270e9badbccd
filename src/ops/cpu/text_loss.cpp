// CPU side of ops/loss.h. The chosen pixels without text are found by radix selection on the
// bits of their logits: no copy, no sort. Sums are made of fixed blocks, so that they do not depend
// on the thread count; counts are whole numbers.
#include "ops/loss.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/error.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t block = 8192;

template <class T>
struct Batch {
  const T *probability, *threshold;
  const std::uint8_t *flags, *thresholds;
  std::int64_t count;

  Batch(const Tensor& p, const Tensor& t, const Tensor& f, const Tensor& q)
      : probability(p.data<T>()),
        threshold(t.data<T>()),
        flags(f.data<std::uint8_t>()),
        thresholds(q.data<std::uint8_t>()),
        count(p.numel()) {
    WEFT_ASSERT(t.numel() == count && f.numel() == count && q.numel() == count);
  }
  std::int64_t blocks() const { return (count + block - 1) / block; }
  std::int64_t end(std::int64_t b) const { return std::min(count, (b + 1) * block); }
  float logit(std::int64_t i) const { return static_cast<float>(probability[i]); }
  // A pixel without text that counts.
  bool negative(std::int64_t i) const {
    return (flags[i] & (TextPixel::text | TextPixel::counts)) == TextPixel::counts;
  }
  float wanted(std::int64_t i) const {
    return TextPixel::least_threshold + TextPixel::threshold_span / 255.0f * thresholds[i];
  }
};

// P, T and B of n pixels from `i` on.
struct Maps {
  vf p, t, b;
  template <class T>
  Maps(const Batch<T>& in, std::int64_t i, int n)
      : p(vsigmoid(load_n(in.probability + i, n))),
        t(vsigmoid(load_n(in.threshold + i, n))),
        b(vsigmoid(TextLoss::steepness * (p - t))) {}
};

// log(1 + e^x).
float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }

// The sums of a block or of all: losses of text's pixels, |T - threshold|, B where there is text,
// B; then how many pixels have text, have none, count for the threshold.
enum Sum {
  sum_text,
  sum_threshold,
  sum_overlap,
  sum_binary,
  of_text,
  of_others,
  of_threshold,
  all_sums
};
using Sums = std::array<double, all_sums>;

// Adds up the results of part(b) for blocks b in order.
template <class Part>
auto sum_blocks(std::int64_t blocks, Part&& part) {
  using Value = decltype(part(std::int64_t{}));
  std::vector<Value> parts(blocks);
#pragma omp parallel for schedule(static)
  for (std::int64_t b = 0; b < blocks; ++b) parts[b] = part(b);
  Value total{};
  for (const Value& p : parts)
    for (std::size_t k = 0; k < total.size(); ++k) total[k] += p[k];
  return total;
}

template <class T>
Sums plain_sums(const Batch<T>& in) {
  return sum_blocks(in.blocks(), [&](std::int64_t b) {
    Sums s{};
    for_vectors(in.end(b) - b * block, [&](std::int64_t offset, int n) {
      const std::int64_t first = b * block + offset;
      const Maps m(in, first, n);
      for (int k = 0; k < n; ++k) {
        const std::int64_t i = first + k;
        if (in.flags[i] & TextPixel::threshold) {
          const float d = std::abs(m.t[k] - in.wanted(i));
          s[sum_threshold] +=
              d < TextLoss::smooth ? 0.5f * d * d / TextLoss::smooth : d - 0.5f * TextLoss::smooth;
          s[of_threshold] += 1;
        }
        if (!(in.flags[i] & TextPixel::counts)) continue;
        s[sum_binary] += m.b[k];
        if (in.flags[i] & TextPixel::text) {
          s[sum_text] += softplus(-in.logit(i));
          s[sum_overlap] += m.b[k];
          s[of_text] += 1;
        } else {
          s[of_others] += 1;
        }
      }
    });
    return s;
  });
}

// The `wanted` pixels without text of the greatest logits: the least of those logits, in
// text_order, and how many of the pixels that have it are among them, the first ones.
struct Edge {
  std::uint32_t order = 0;
  std::int64_t ties = 0;
};
template <class T>
Edge find_edge(const Batch<T>& in, std::int64_t wanted) {
  constexpr int most_bits = 11;
  using Bins = std::array<std::int64_t, 1 << most_bits>;
  Edge edge{0, wanted};
  std::uint32_t known = 0;  // the bits of `order` that are
  for (const int shift : {21, 10, 0}) {
    const std::uint32_t bits = (shift == 0 ? 1u << 10 : 1u << most_bits) - 1;
    Bins bins{};
#pragma omp parallel
    {
      Bins own{};
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < in.count; ++i) {
        if (!in.negative(i)) continue;
        const std::uint32_t order = text_order(in.logit(i));
        if ((order & known) == edge.order) ++own[order >> shift & bits];
      }
#pragma omp critical(text_loss_bins)
      for (std::size_t k = 0; k < bins.size(); ++k) bins[k] += own[k];
    }
    std::uint32_t bin = bits;
    for (; bin > 0 && bins[bin] < edge.ties; --bin) edge.ties -= bins[bin];
    edge.order |= bin << shift;
    known |= bits << shift;
  }
  return edge;
}

// The pixel at which `ties` pixels without text have had the edge's logit.
template <class T>
std::int64_t edge_pixel(const Batch<T>& in, Edge edge) {
  for (std::int64_t i = 0; i < in.count; ++i)
    if (in.negative(i) && text_order(in.logit(i)) == edge.order && --edge.ties == 0) return i;
  return in.count - 1;
}

float logit_of(std::uint32_t order) {
  return std::bit_cast<float>(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

template <class T>
void forward(const Batch<T>& in, double* stats) {
  const Sums s = plain_sums(in);
  const double chosen = std::min(s[of_others], TextLoss::negatives * s[of_text]);
  double probability = s[sum_text];
  stats[text_edge] = 0, stats[text_edge_pixel] = -1;
  if (chosen > 0) {
    const Edge edge = find_edge(in, static_cast<std::int64_t>(chosen));
    const float logit = logit_of(edge.order);
    probability += static_cast<double>(edge.ties) * softplus(logit);
    probability += sum_blocks(in.blocks(), [&](std::int64_t b) {
      std::array<double, 1> sum{};
      for (std::int64_t i = b * block; i < in.end(b); ++i)
        if (in.negative(i) && text_order(in.logit(i)) > edge.order) sum[0] += softplus(in.logit(i));
      return sum;
    })[0];
    stats[text_edge] = logit, stats[text_edge_pixel] = static_cast<double>(edge_pixel(in, edge));
  }
  stats[text_positives] = s[of_text], stats[text_negatives] = chosen;
  stats[text_thresholds] = s[of_threshold];
  stats[text_overlap] = s[sum_overlap], stats[text_area] = s[sum_binary] + s[of_text];
  stats[text_probability] = probability / (s[of_text] + chosen + TextLoss::least);
  stats[text_threshold] = s[sum_threshold] / (s[of_threshold] + TextLoss::least);
  stats[text_binary] = 1 - 2 * s[sum_overlap] / (stats[text_area] + TextLoss::least);
  stats[text_total] = TextLoss::probability * stats[text_probability] +
                      TextLoss::threshold * stats[text_threshold] +
                      TextLoss::binary * stats[text_binary];
}

template <class T>
void backward(const Batch<T>& in, const double* stats, double weight, T* dp, T* dt) {
  const double pixels = stats[text_positives] + stats[text_negatives] + TextLoss::least;
  const double area = stats[text_area] + TextLoss::least;
  // Slopes of the loss by P's cross entropy, by |T - threshold|, and by B where there is text and
  // where there is none.
  const auto entropy = static_cast<float>(weight * TextLoss::probability / pixels),
             distance = static_cast<float>(weight * TextLoss::threshold /
                                           (stats[text_thresholds] + TextLoss::least)),
             elsewhere = static_cast<float>(weight * TextLoss::binary * 2 * stats[text_overlap] /
                                            (area * area)),
             on_text = elsewhere - static_cast<float>(weight * TextLoss::binary * 2 / area);
  const std::uint32_t edge = text_order(static_cast<float>(stats[text_edge]));
  const bool any = stats[text_negatives] > 0;
  const auto last = static_cast<std::int64_t>(stats[text_edge_pixel]);
#pragma omp parallel for schedule(static) if (in.count > block)
  for (std::int64_t b = 0; b < in.blocks(); ++b)
    for_vectors(in.end(b) - b * block, [&](std::int64_t offset, int n) {
      const std::int64_t first = b * block + offset;
      const Maps m(in, first, n);
      vf by_logit{}, by_threshold{}, by_binary{};
      for (int k = 0; k < n; ++k) {
        const std::int64_t i = first + k;
        if (in.flags[i] & TextPixel::threshold) {
          const float d = m.t[k] - in.wanted(i);
          by_threshold[k] = distance * std::clamp(d / TextLoss::smooth, -1.0f, 1.0f);
        }
        if (!(in.flags[i] & TextPixel::counts)) continue;
        const bool text = in.flags[i] & TextPixel::text;
        by_binary[k] = text ? on_text : elsewhere;
        const std::uint32_t order = text_order(in.logit(i));
        if (text)
          by_logit[k] = entropy * (m.p[k] - 1.0f);
        else if (any && (order > edge || (order == edge && i <= last)))
          by_logit[k] = entropy * m.p[k];
      }
      const vf slope = TextLoss::steepness * by_binary * m.b * (1.0f - m.b);
      store_n(dp + first, by_logit + slope * m.p * (1.0f - m.p), n);
      store_n(dt + first, (by_threshold - slope) * m.t * (1.0f - m.t), n);
    });
}

}  // namespace

void text_loss_forward(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                       const Tensor& thresholds, Tensor& stats) {
  with_type(probability.dtype(), [&](auto type) {
    forward(Batch<decltype(type)>(probability, threshold, flags, thresholds), stats.data<double>());
  });
}

void text_loss_backward(const Tensor& probability, const Tensor& threshold, const Tensor& flags,
                        const Tensor& thresholds, const Tensor& stats, float weight,
                        Tensor& dprobability, Tensor& dthreshold) {
  with_type(probability.dtype(), [&](auto type) {
    using T = decltype(type);
    backward(Batch<T>(probability, threshold, flags, thresholds), stats.data<double>(), weight,
             dprobability.data<T>(), dthreshold.data<T>());
  });
}

void text_summary(const Tensor& stats, Tensor& losses, Tensor& terms) {
  const double* s = stats.data<double>();
  const auto n = static_cast<double>(losses.numel());
  for (float& loss : losses.span<float>()) loss = static_cast<float>(s[text_total]);
  for (int k = 0; k < 3; ++k)
    terms.data<float>()[k] = static_cast<float>(n * s[text_probability + k]);
}

WEFT_CPU_END
