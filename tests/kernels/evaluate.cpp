// Cases of ops/loss.h (kernels/evaluate.cu beside src/ops/cpu/evaluate.cpp).
#include "ops/loss.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/pointwise.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

struct Evaluation {
  std::int64_t H, W, C;
  std::vector<std::pair<std::int64_t, std::int64_t>> scales;  // heights and widths of the logits
  bool labels = true, scores = true;
  float deviation = 3.0f;  // of the logits; large: where exponentials leave f32's range
};

// The blend of x [h,w,C] at a pixel of [H,W], for all channels.
Values blended(const Values& x, std::int64_t h, std::int64_t w, const Evaluation& e, std::int64_t r,
               std::int64_t q) {
  const auto place = [](std::int64_t to, std::int64_t in, std::int64_t out) {
    return std::max(
        (static_cast<double>(to) + 0.5) * static_cast<double>(in) / static_cast<double>(out) - 0.5,
        0.0);
  };
  const double y = place(r, h, e.H), z = place(q, w, e.W);
  const auto i = static_cast<std::int64_t>(y), j = static_cast<std::int64_t>(z);
  const double a = y - static_cast<double>(i), b = z - static_cast<double>(j);
  Values v(e.C);
  for (std::int64_t c = 0; c < e.C; ++c) {
    const auto at = [&](std::int64_t row, std::int64_t column) {
      return x[(std::min(row, h - 1) * w + std::min(column, w - 1)) * e.C + c];
    };
    v[c] = (1 - a) * ((1 - b) * at(i, j) + b * at(i, j + 1)) +
           a * ((1 - b) * at(i + 1, j) + b * at(i + 1, j + 1));
  }
  return v;
}

std::vector<Values> evaluated(const Evaluation& e, const std::vector<Values>& in) {
  Values prediction, counts = in[1], scores(e.scores ? e.C * e.H * e.W : 0);
  for (std::int64_t p = 0; p < e.H * e.W; ++p) {
    Values mean(e.C);
    for (std::size_t s = 0; s < e.scales.size(); ++s) {
      Values x = blended(in[2 + s], e.scales[s].first, e.scales[s].second, e, p / e.W, p % e.W);
      const double top = *std::max_element(x.begin(), x.end());
      double sum = 0;
      for (double& v : x) sum += v = std::exp(v - top);
      for (std::int64_t c = 0; c < e.C; ++c)
        mean[c] += x[c] / sum / static_cast<double>(e.scales.size());
    }
    const std::int64_t best = std::max_element(mean.begin(), mean.end()) - mean.begin();
    prediction.push_back(static_cast<double>(best));
    for (std::int64_t c = 0; c < e.C && e.scores; ++c) scores[c * e.H * e.W + p] = mean[c];
    const std::int64_t known = in[0].empty() ? -1 : static_cast<std::int64_t>(in[0][p]) - 1;
    if (known < 0) continue;
    counts[known] += best == known;
    counts[e.C + best] += 1;
    counts[2 * e.C + known] += 1;
  }
  std::vector<Values> out{prediction, counts};
  if (e.scores) out.push_back(scores);
  return out;
}

void add_evaluation(Cases& cases, const Evaluation& e, DType dtype) {
  std::string text = fmt::format("{}x{} C{} of", e.H, e.W, e.C);
  Tensor labels, counts = Tensor::host({3, e.C}, DType::i64);
  for (std::int64_t i = 0; i < 3 * e.C; ++i) counts.data<std::int64_t>()[i] = i % 7;
  if (e.labels) {
    labels = Tensor::host({e.H, e.W}, DType::u8);
    for (std::int64_t p = 0; p < e.H * e.W; ++p)
      labels.data<std::uint8_t>()[p] = static_cast<std::uint8_t>((p / 3 * 7 + p / 11) % (e.C + 1));
  }
  std::vector<Tensor> inputs{labels, counts};
  double moved = static_cast<double>(e.H * e.W) * (e.labels ? 2 : 1) +
                 (e.scores ? 4.0 * static_cast<double>(e.C * e.H * e.W) : 0);
  for (const auto& [h, w] : e.scales) {
    text += fmt::format(" {}x{}", h, w);
    const Tensor x = random_tensor({1, 1, h, w, e.C}, dtype, 3 + inputs.size(), e.deviation);
    // The last class is the first one's equal and never wins.
    const std::size_t size = size_of(dtype), last = static_cast<std::size_t>(e.C - 1) * size;
    auto* bytes = static_cast<std::byte*>(x.raw());
    for (std::int64_t p = 0; p < h * w; ++p, bytes += last + size)
      std::copy_n(bytes, size, bytes + last);
    moved += static_cast<double>(x.bytes());
    inputs.push_back(x);
  }
  if (!e.labels) text += " no labels";
  if (!e.scores) text += " classes alone";
  if (e.deviation > 10) text += " extreme";
  KernelCase c = make_case("predict_classes", text, dtype, moved, 2e-5);
  c.inputs = std::move(inputs);
  c.run = [=](std::vector<Tensor>& in) {
    Tensor prediction = Tensor::empty({e.H, e.W}, DType::u8), scores;
    if (e.scores) scores = Tensor::empty({e.C, e.H, e.W}, DType::f32);
    ops::predict_classes(prediction, std::span(in).subspan(2), in[0], in[1], scores);
    std::vector<Tensor> out{prediction, in[1]};
    if (e.scores) out.push_back(scores);
    return out;
  };
  c.reference = [=](const std::vector<Values>& in) { return evaluated(e, in); };
  cases.push_back(std::move(c));
}

void add_count(Cases& cases, const Shape& x, float threshold, DType dtype) {
  Tensor values = random_tensor(x, dtype, 1);
  // Values at the threshold itself do not count.
  if (dtype == DType::f32)
    for (std::int64_t i = 0; i < x.numel(); i += 5) values.data<float>()[i] = threshold;
  KernelCase c = make_case("count_above", fmt::format("{} above {}", x.str(), threshold), dtype,
                           static_cast<double>(values.bytes()), 0);
  c.inputs = {values};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor counts = Tensor::empty({x[0]}, DType::i32);
    ops::count_above(in[0], threshold, counts);
    return std::vector<Tensor>{counts};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values counts(x[0]);
    for (std::int64_t i = 0; i < x.numel(); ++i)
      counts[i / (x.numel() / x[0])] += in[0][i] > static_cast<double>(threshold) ? 1 : 0;
    return std::vector<Values>{counts};
  };
  cases.push_back(std::move(c));
}

}  // namespace

void evaluate_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    // An image of ADE20K at five scales, and at one; 150 classes.
    add_evaluation(
        cases, {512, 683, 150, {{38, 50}, {47, 63}, {57, 75}, {66, 88}, {75, 100}}, true, false},
        DType::f32);
    add_evaluation(cases, {512, 683, 150, {{57, 75}}, true, false}, DType::f32);
    add_count(cases, {8, 1, 1024, 1024, 1}, 0.3f, DType::f32);
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_evaluation(cases, {37, 45, 150, {{5, 6}, {9, 4}}}, dtype);
    add_evaluation(cases, {12, 70, 5, {{2, 3}, {12, 70}, {20, 80}}}, dtype);  // up, same, down
    add_evaluation(cases, {9, 33, 16, {{3, 3}, {1, 1}}, false, false}, dtype);
    add_evaluation(cases, {9, 35, 21, {{3, 4}}, true, false}, dtype);
    // One scale: two that are sure of different classes would tie.
    add_evaluation(cases, {9, 35, 255, {{3, 4}}, true, true, 200.0f}, dtype);
    add_count(cases, {3, 1, 7, 11, 1}, 0.3f, dtype);
    add_count(cases, {2, 1, 90, 400, 2}, -0.5f, dtype);  // more than a round and than a CPU's block
    add_count(cases, {5, 1, 1, 1, 1}, 0.0f, dtype);
    add_count(cases, {1, 1, 64, 64, 1}, 100.0f, dtype);  // none
  }
}

}  // namespace weft
