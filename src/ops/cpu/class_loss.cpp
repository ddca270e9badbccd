// CPU side of class_loss_* of ops/loss.h. Sums are made of fixed pieces, so that they do not depend
// on the thread count.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "core/error.h"
#include "ops/loss.h"

WEFT_CPU_BEGIN
namespace {
#include "ops/cpu/simd.h"

constexpr std::int64_t piece = 512;  // positions; of each there are 3 C sums

// The probabilities of a position's classes, and log(sum of exp(logit - greatest)).
struct Probabilities {
  std::vector<float> p;
  float top = 0;
  double log_sum = 0;

  explicit Probabilities(std::int64_t C) : p(static_cast<std::size_t>(C)) {}
  template <class T>
  void set(const T* x) {
    const std::int64_t C = std::ssize(p);
    vf most = splat(-std::numeric_limits<float>::infinity());
    for_vectors(C, [&](std::int64_t c, int n) {
      most = vmax(select_first(load_n(x + c, n), n, -std::numeric_limits<float>::infinity()), most);
    });
    top = hmax(most);
    vf total{};
    for_vectors(C, [&](std::int64_t c, int n) {
      const vf e = vexp(load_n(x + c, n) - top);
      store_n(p.data() + c, e, n);
      total += select_first(e, n, 0.0f);
    });
    const float sum = hsum(total);
    log_sum = std::log(static_cast<double>(sum));
    for (float& v : p) v /= sum;
  }
};

// Adds up rows [pieces, columns] in their order.
void add_rows(const std::vector<double>& rows, std::int64_t columns, double* to) {
  std::fill_n(to, columns, 0.0);
  for (std::size_t i = 0; i < rows.size(); ++i)
    to[i % static_cast<std::size_t>(columns)] += rows[i];
}

// -log of the probability of each labelled position's class into `nll`, 0 elsewhere; and what
// stats hold of all labelled positions.
template <class T>
void all_positions(const T* logits, const std::uint8_t* label, std::int64_t positions,
                   std::int64_t C, bool dice, float* nll, double* stats) {
  const std::int64_t pieces = (positions + piece - 1) / piece;
  const std::int64_t columns = 2 + (dice ? 3 * C : 0);
  std::vector<double> rows(static_cast<std::size_t>(pieces * columns));
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < pieces; ++i) {
    double* row = rows.data() + i * columns;  // right, labelled, areas, labels, overlaps
    Probabilities prob(C);
    for (std::int64_t p = i * piece; p < std::min(positions, (i + 1) * piece); ++p) {
      nll[p] = 0;
      if (label[p] == 0) continue;
      const T* x = logits + p * C;
      prob.set(x);
      const std::int64_t k = label[p] - 1;
      const float own = k < C ? static_cast<float>(x[k]) : std::nanf("");
      nll[p] = static_cast<float>(prob.log_sum + (static_cast<double>(prob.top) - own));
      bool first = own == prob.top;
      for (std::int64_t c = 0; c < k && first; ++c) first = static_cast<float>(x[c]) != prob.top;
      row[0] += first;
      row[1] += 1;
      if (!dice) continue;
      for (std::int64_t c = 0; c < C; ++c) row[2 + c] += prob.p[c];
      if (k >= C) continue;
      row[2 + C + k] += 1;
      row[2 + 2 * C + k] += prob.p[k];
    }
  }
  std::vector<double> sums(static_cast<std::size_t>(columns));
  add_rows(rows, columns, sums.data());
  stats[class_right] = sums[0], stats[class_labelled] = sums[1];
  std::fill_n(stats + class_sums, 3 * C, 0.0);
  std::copy(sums.begin() + 2, sums.end(), stats + class_sums);
}

void finish_dice(std::int64_t C, double* stats) {
  const double *area = stats + class_sums, *labels = area + C, *overlap = labels + C;
  double sum = 0, classes = 0;
  for (std::int64_t c = 0; c < C; ++c) {
    if (labels[c] == 0) continue;
    sum += 2 * overlap[c] / (area[c] + labels[c]);
    classes += 1;
  }
  stats[class_count] = classes;
  stats[class_dice] = classes > 0 ? 1 - sum / classes : 0;
}

// Greater for greater losses. A NaN is the hardest, so that it stays in the loss, where the trainer
// finds it.
std::uint32_t hardness(float nll) { return nll != nll ? ~0u : text_order(nll); }

// The hardness from which on positions are among the `wanted` hardest; 0 where no more than these
// are labelled.
std::uint32_t edge_of(const float* nll, const std::uint8_t* label, std::int64_t positions,
                      std::int64_t wanted) {
  std::vector<std::uint32_t> orders;
  for (std::int64_t p = 0; p < positions; ++p)
    if (label[p] > 0) orders.push_back(hardness(nll[p]));
  if (std::ssize(orders) <= wanted) return 0;
  if (wanted == 0) return ~0u;
  const auto edge = orders.begin() + (wanted - 1);
  std::nth_element(orders.begin(), edge, orders.end(), std::greater<>());
  return *edge;
}

double loss_of(const double* s, double dice) {
  return (s[class_weight] > 0 ? s[class_nll] / s[class_weight] : 0.0) + dice * s[class_dice];
}

}  // namespace

void class_loss_forward(const Tensor& logits, const Tensor& labels, const Tensor& class_weights,
                        const ClassLoss& loss, Tensor& weights, Tensor& stats) {
  const std::int64_t C = logits.dim(-1), positions = labels.numel();
  const std::uint8_t* label = labels.data<std::uint8_t>();
  const float* of_class = class_weights.data<float>();
  float* weight = weights.data<float>();  // at first the losses
  double* s = stats.data<double>();
  with_type(logits.dtype(), [&](auto type) {
    all_positions(logits.data<decltype(type)>(), label, positions, C, loss.dice != 0, weight, s);
  });
  finish_dice(C, s);
  const bool hard = loss.ohem_thresh > 0;
  const float least = hard ? -std::log(loss.ohem_thresh) : 0.0f;
  const std::uint32_t edge = hard ? edge_of(weight, label, positions, loss.ohem_min_kept) : 0;
  const std::int64_t pieces = (positions + piece - 1) / piece;
  std::vector<double> rows(static_cast<std::size_t>(2 * pieces));
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < pieces; ++i)
    for (std::int64_t p = i * piece; p < std::min(positions, (i + 1) * piece); ++p) {
      const float nll = weight[p];
      weight[p] = 0;
      if (label[p] == 0 || (hard && !(nll > least) && hardness(nll) < edge)) continue;
      weight[p] = label[p] <= C ? of_class[label[p] - 1] : 1.0f;
      rows[2 * i] += static_cast<double>(weight[p]) * nll;
      rows[2 * i + 1] += weight[p];
    }
  add_rows(rows, 2, s + class_nll);
}

void class_loss_backward(const Tensor& logits, const Tensor& labels, const ClassLoss& loss,
                         const Tensor& weights, const Tensor& stats, float weight,
                         Tensor& dlogits) {
  const std::int64_t C = logits.dim(-1), positions = labels.numel();
  const std::uint8_t* label = labels.data<std::uint8_t>();
  const float* of_position = weights.data<float>();
  const double* s = stats.data<double>();
  const double entropy = s[class_weight] > 0 ? weight / s[class_weight] : 0.0;
  // The slopes of Dice by a class's probability: at every position, and at those of the class.
  std::vector<float> everywhere(static_cast<std::size_t>(C)), own(static_cast<std::size_t>(C));
  const double *area = s + class_sums, *count = area + C, *overlap = count + C;
  for (std::int64_t c = 0; loss.dice != 0 && c < C; ++c) {
    if (count[c] == 0) continue;
    const double both = area[c] + count[c], f = 2.0 * weight * loss.dice / s[class_count];
    everywhere[c] = static_cast<float>(f * overlap[c] / (both * both));
    own[c] = static_cast<float>(-f / both);
  }
  with_type(logits.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* in = logits.data<T>();
    T* out = dlogits.data<T>();
#pragma omp parallel
    {
      Probabilities prob(C);
#pragma omp for schedule(static)
      for (std::int64_t p = 0; p < positions; ++p) {
        T* d = out + p * C;
        if (label[p] == 0) {
          std::fill_n(d, C, T(0.0f));
          continue;
        }
        prob.set(in + p * C);
        const std::int64_t k = label[p] - 1;
        const auto g = static_cast<float>(entropy * of_position[p]);
        const float at_label = k < C ? prob.p[k] * own[k] : 0.0f;
        vf total{};
        for_vectors(C, [&](std::int64_t c, int n) {
          total += select_first(load_n(prob.p.data() + c, n) * load_n(everywhere.data() + c, n), n,
                                0.0f);
        });
        const float mean = hsum(total) + at_label;  // of the slopes, by probability
        for_vectors(C, [&](std::int64_t c, int n) {
          store_n(d + c,
                  load_n(prob.p.data() + c, n) * (load_n(everywhere.data() + c, n) + (g - mean)),
                  n);
        });
        if (k < C) d[k] = T(prob.p[k] * (everywhere[k] + (g - mean)) + (at_label - g));
      }
    }
  });
}

void class_loss_summary(const Tensor& main, const Tensor& aux, float dice, float scale,
                        Tensor& losses, Tensor& terms) {
  const double* m = main.data<double>();
  const double n = static_cast<double>(losses.numel());
  const double of_main = loss_of(m, dice);
  const double of_aux = aux.defined() ? loss_of(aux.data<double>(), dice) : 0;
  for (float& loss : losses.span<float>()) loss = static_cast<float>(of_main + scale * of_aux);
  float* to = terms.data<float>();
  *to++ =
      static_cast<float>(n * (m[class_labelled] > 0 ? m[class_right] / m[class_labelled] : 0.0));
  *to++ = static_cast<float>(n * of_main);
  if (aux.defined()) *to++ = static_cast<float>(n * of_aux);
  if (dice != 0) *to = static_cast<float>(n * m[class_dice]);
}

WEFT_CPU_END
