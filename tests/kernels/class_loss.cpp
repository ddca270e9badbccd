// Cases of ops/loss.h (kernels/class_loss.cu beside src/ops/cpu/class_loss.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "ops/loss.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

using ops::ClassLoss;

// The loss and its slopes in fp64 from logits, labels and weights of classes, written from the
// formulas of docs/models/segmentation.md.
struct Restated {
  Values stats, weights, slopes;

  Restated(const std::vector<Values>& in, std::int64_t C, const ClassLoss& loss) {
    const Values &logits = in[0], &labels = in[1], &of_class = in[2];
    const auto positions = std::ssize(labels);
    Values probability(logits.size()), losses;
    stats.assign(static_cast<std::size_t>(ops::class_sums + 3 * C), 0);
    weights.assign(labels.size(), 0);
    slopes.assign(logits.size(), 0);
    double* sums = stats.data() + ops::class_sums;
    for (std::int64_t p = 0; p < positions; ++p) {
      if (labels[p] == 0) continue;
      const double *x = logits.data() + p * C, top = *std::max_element(x, x + C);
      double sum = 0;
      for (std::int64_t c = 0; c < C; ++c) sum += std::exp(x[c] - top);
      const auto k = static_cast<std::int64_t>(labels[p]) - 1;
      for (std::int64_t c = 0; c < C; ++c) {
        probability[p * C + c] = std::exp(x[c] - top) / sum;
        if (loss.dice != 0) sums[c] += probability[p * C + c];
      }
      stats[ops::class_labelled] += 1;
      stats[ops::class_right] += std::max_element(x, x + C) - x == k;
      losses.push_back(-std::log(probability[p * C + k]));
      if (loss.dice == 0) continue;
      sums[C + k] += 1;
      sums[2 * C + k] += probability[p * C + k];
    }
    // Those of a probability below the threshold, and the hardest min_kept.
    std::sort(losses.begin(), losses.end(), std::greater<>());
    double least = -1;
    if (loss.ohem_thresh > 0) {
      least = -std::log(static_cast<double>(loss.ohem_thresh));
      const std::int64_t kept = std::min<std::int64_t>(loss.ohem_min_kept, std::ssize(losses));
      if (kept > 0) least = std::min(least, losses[kept - 1] - 1e-9);
    }
    for (std::int64_t p = 0; p < positions; ++p) {
      if (labels[p] == 0) continue;
      const auto k = static_cast<std::int64_t>(labels[p]) - 1;
      const double nll = -std::log(probability[p * C + k]);
      if (nll <= least) continue;
      weights[p] = of_class[k];
      stats[ops::class_nll] += of_class[k] * nll;
      stats[ops::class_weight] += of_class[k];
    }
    double dice = 0;
    for (std::int64_t c = 0; c < C; ++c) {
      if (sums[C + c] == 0) continue;
      stats[ops::class_count] += 1;
      dice += 2 * sums[2 * C + c] / (sums[c] + sums[C + c]);
    }
    const double n = stats[ops::class_count];
    stats[ops::class_dice] = n > 0 ? 1 - dice / n : 0;
    for (std::int64_t p = 0; p < positions; ++p) {
      if (labels[p] == 0) continue;
      const auto k = static_cast<std::int64_t>(labels[p]) - 1;
      const double entropy =
          stats[ops::class_weight] > 0 ? weights[p] / stats[ops::class_weight] : 0;
      // By the softmax's derivative, from the slope of the loss by each probability.
      Values slope(static_cast<std::size_t>(C));
      double mean = 0;
      for (std::int64_t c = 0; c < C; ++c) {
        const double both = sums[c] + sums[C + c];
        if (sums[C + c] > 0)
          slope[c] = loss.dice / n * (2 * sums[2 * C + c] / (both * both) - (c == k) * 2 / both);
        if (c == k) slope[c] -= entropy / probability[p * C + k];
        mean += probability[p * C + c] * slope[c];
      }
      for (std::int64_t c = 0; c < C; ++c)
        slopes[p * C + c] = probability[p * C + c] * (slope[c] - mean);
    }
  }
};

// Parts apart: the tolerance is a share of an output's greatest value.
template <class T, class Part>
std::vector<T> parts(std::int64_t C, Part&& part) {
  return {part(0, 2), part(2, 4), part(4, 5), part(5, 6), part(6, 6 + 3 * C)};
}
static_assert(ops::class_sums == 6);

// `labelled`: every how many positions one is not, 0: none is. The logits of the first two
// positions are all equal.
void add_size(Cases& cases, const Shape& x, const ClassLoss& loss, int labelled, DType dtype) {
  const std::int64_t C = x[4], positions = x.numel() / C;
  const Tensor logits = random_tensor(x, dtype, 1, 3.0f);
  std::fill_n(static_cast<std::byte*>(logits.raw()),
              static_cast<std::size_t>(2 * C) * size_of(dtype), std::byte{0});
  const Tensor labels = Tensor::host({x[0], x[1], x[2], x[3]}, DType::u8),
               weights = Tensor::host({C}, DType::f32);
  // The last class occurs nowhere, the first one weighs nothing.
  for (std::int64_t p = 0; p < positions; ++p)
    labels.data<std::uint8_t>()[p] = static_cast<std::uint8_t>(
        labelled == 0 || p % labelled == labelled - 1 ? 0 : 1 + (7 * p + p / 3) % (C - 1));
  for (std::int64_t c = 0; c < C; ++c) weights.data<float>()[c] = 0.25f * static_cast<float>(c % 5);
  const std::string shape = fmt::format("{} dice {} ohem {} {} labelled {}", x.str(), loss.dice,
                                        loss.ohem_thresh, loss.ohem_min_kept, labelled);
  const auto forward = [=](std::vector<Tensor>& in, Tensor& of_position) {
    Tensor stats = Tensor::empty({ops::class_sums + 3 * C}, DType::f64);
    ops::class_loss_forward(in[0], in[1], in[2], loss, of_position, stats);
    return stats;
  };
  cases.push_back(bandwidth_case("class_loss_forward", shape, dtype, x.numel(),
                                 {logits, labels, weights}, [=](std::vector<Tensor>& in) {
                                   Tensor of_position = Tensor::empty(labels.shape(), DType::f32);
                                   const Tensor stats = forward(in, of_position);
                                   auto all = parts<Tensor>(C, [&](std::int64_t a, std::int64_t b) {
                                     return stats.slice(a, b);
                                   });
                                   all.push_back(of_position);
                                   return all;
                                 }));
  cases.back().tolerance = 2e-6;
  cases.back().reference = [=](const std::vector<Values>& in) {
    const Restated r(in, C, loss);
    auto all = parts<Values>(C, [&](std::int64_t a, std::int64_t b) {
      return Values(r.stats.begin() + a, r.stats.begin() + b);
    });
    all.push_back(r.weights);
    return all;
  };
  cases.push_back(bandwidth_case("class_loss_backward", shape, dtype, 3 * x.numel(),
                                 {logits, labels, weights}, [=](std::vector<Tensor>& in) {
                                   Tensor of_position = Tensor::empty(labels.shape(), DType::f32);
                                   const Tensor stats = forward(in, of_position);
                                   Tensor d = Tensor::empty(x, dtype);
                                   ops::class_loss_backward(in[0], in[1], loss, of_position, stats,
                                                            0.4f, d);
                                   return std::vector<Tensor>{d};
                                 }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    return std::vector<Values>{
        fp64::map(Restated(in, C, loss).slopes, [](double d) { return 0.4f * d; })};
  };
}

void add_summary(Cases& cases, bool with_aux, float dice, double weight) {
  const auto stats_of = [&](double first) {
    const Tensor t = Tensor::host({ops::class_sums + 6}, DType::f64);
    for (std::int64_t k = 0; k < t.numel(); ++k)
      t.data<double>()[k] = first + 0.5 * static_cast<double>(k);
    t.data<double>()[ops::class_weight] = weight;
    if (weight == 0) t.data<double>()[ops::class_labelled] = 0;
    return t;
  };
  constexpr std::int64_t n = 4;
  const std::int64_t terms_count = 2 + (with_aux ? 1 : 0) + (dice != 0 ? 1 : 0);
  cases.push_back(bandwidth_case("class_loss_summary",
                                 fmt::format("aux {} dice {} weight {}", with_aux, dice, weight),
                                 DType::f32, 24, {stats_of(3), with_aux ? stats_of(1) : Tensor()},
                                 [=](std::vector<Tensor>& in) {
                                   Tensor losses = Tensor::empty({n}, DType::f32);
                                   Tensor terms = Tensor::empty({terms_count}, DType::f32);
                                   ops::class_loss_summary(in[0], in[1], dice, 0.4f, losses, terms);
                                   return std::vector<Tensor>{losses, terms};
                                 }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    const auto loss = [&](const Values& s) {
      return (weight > 0 ? s[ops::class_nll] / weight : 0) + dice * s[ops::class_dice];
    };
    const double of_aux = with_aux ? loss(in[1]) : 0;
    Values terms = {weight > 0 ? n * in[0][ops::class_right] / in[0][ops::class_labelled] : 0,
                    n * loss(in[0])};
    if (with_aux) terms.push_back(n * of_aux);
    if (dice != 0) terms.push_back(n * in[0][ops::class_dice]);
    return std::vector<Values>{Values(n, loss(in[0]) + 0.4f * of_aux), terms};
  };
}

}  // namespace

void class_loss_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    for (const DType dtype : {DType::f32, DType::bf16})
      add_size(cases, {2, 1, 64, 64, 150}, {1, 0.7f, 2000}, 5, dtype);
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // Weights alone; hard positions by their probability, and by their number; fewer than those
    // that are wanted; with Dice; classes beside a warp's 32; several pieces of positions.
    add_size(cases, {1, 1, 5, 7, 7}, {0, 0, 0}, 5, dtype);
    add_size(cases, {2, 1, 9, 11, 150}, {0, 0, 0}, 5, dtype);
    add_size(cases, {1, 1, 5, 7, 7}, {0, 0.7f, 0}, 5, dtype);
    add_size(cases, {1, 1, 9, 11, 5}, {0, 1e-4f, 13}, 4, dtype);
    add_size(cases, {1, 1, 5, 7, 7}, {0.5f, 0.1f, 1000}, 5, dtype);
    add_size(cases, {2, 1, 29, 31, 150}, {1, 0.5f, 40}, 5, dtype);
  }
  add_size(cases, {1, 1, 3, 5, 3}, {1, 0.5f, 2}, 0, DType::f32);
  add_summary(cases, true, 0.5f, 8);
  add_summary(cases, true, 0, 8);
  add_summary(cases, false, 2, 0);
}

}  // namespace weft
