// Cases of ops/loss.h (kernels/text_loss.cu beside src/ops/cpu/text_loss.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/loss.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

using ops::TextPixel;

// The loss and all that it is made of, in fp64, from logits p and t, flags and thresholds.
struct Loss {
  Values stats = Values(ops::text_stats);
  std::vector<bool> chosen;

  explicit Loss(const std::vector<Values>& in) : chosen(in[0].size()) {
    const std::size_t count = in[0].size();
    std::vector<std::size_t> others;
    double entropy = 0, distance = 0, text = 0, thresholds = 0, overlap = 0, binary = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const int flags = static_cast<int>(in[2][i]);
      if (flags & TextPixel::threshold) {
        const double d = std::abs(fp64::sigmoid(in[1][i]) - (0.3 + 0.4 * in[3][i] / 255));
        distance += d < 1e-6 ? 0.5 * d * d / 1e-6 : d - 0.5e-6;
        thresholds += 1;
      }
      if (!(flags & TextPixel::counts)) continue;
      const double b = fp64::sigmoid(50 * (fp64::sigmoid(in[0][i]) - fp64::sigmoid(in[1][i])));
      binary += b;
      if (flags & TextPixel::text)
        entropy -= std::log(fp64::sigmoid(in[0][i])), overlap += b, text += 1;
      else
        others.push_back(i);
    }
    // Of equal logits the first one comes first.
    std::stable_sort(others.begin(), others.end(),
                     [&](std::size_t a, std::size_t b) { return in[0][a] > in[0][b]; });
    others.resize(std::min(others.size(), static_cast<std::size_t>(3 * text)));
    for (const std::size_t i : others) {
      entropy -= std::log(1 - fp64::sigmoid(in[0][i]));
      chosen[i] = true;
    }
    const auto negatives = static_cast<double>(others.size());
    stats[ops::text_probability] = entropy / (text + negatives + 1e-6);
    stats[ops::text_threshold] = distance / (thresholds + 1e-6);
    stats[ops::text_binary] = 1 - 2 * overlap / (binary + text + 1e-6);
    stats[ops::text_total] = 5 * stats[ops::text_probability] + 10 * stats[ops::text_threshold] +
                             stats[ops::text_binary];
    stats[ops::text_positives] = text, stats[ops::text_negatives] = negatives;
    stats[ops::text_thresholds] = thresholds;
    stats[ops::text_overlap] = overlap, stats[ops::text_area] = binary + text;
    stats[ops::text_edge] = others.empty() ? 0 : in[0][others.back()];
    stats[ops::text_edge_pixel] = others.empty() ? -1 : static_cast<double>(others.back());
  }
};

// The loss's parts apart: the tolerance is a share of an output's greatest value.
template <class T, class Part>
std::vector<T> parts(Part&& part) {
  return {part(0, 1), part(1, 2), part(2, 3), part(3, 4), part(4, 7), part(7, 9), part(9, 11)};
}

// `text`: share of the pixels that have some. Logits are multiples of 1/8 where `coarse`: many are
// equal then.
void add_size(Cases& cases, std::int64_t N, std::int64_t side, double text, bool coarse,
              DType dtype) {
  const Shape maps{N, 1, side, side, 1}, pixels{N, side, side};
  const std::int64_t count = pixels.numel();
  const auto logits = [&](std::uint64_t seed) {
    const Tensor t = random_tensor(maps, dtype, seed, 2.0f);
    for (std::int64_t i = 0; coarse && i < count; ++i) {
      if (dtype == DType::f32)
        t.data<float>()[i] = std::round(8 * t.data<float>()[i]) / 8;
      else
        t.data<bf16>()[i] = bf16(std::round(8 * static_cast<float>(t.data<bf16>()[i])) / 8);
    }
    return t;
  };
  const Tensor flags = Tensor::host(pixels, DType::u8),
               thresholds = Tensor::host(pixels, DType::u8);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto mixed = static_cast<std::uint32_t>(i * 2654435761u) >> 8;
    const bool has_text = (mixed & 0xffff) < text * 0x10000, ignored = mixed % 11 == 3;
    flags.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(
        (has_text ? TextPixel::text : 0) | (ignored ? 0 : TextPixel::counts) |
        (mixed % 5 == 1 ? TextPixel::threshold : 0));
    thresholds.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(mixed >> 4);
  }
  const std::string shape =
      fmt::format("N{} {}x{} text {}{}", N, side, side, text, coarse ? " coarse" : "");
  const std::vector<Tensor> inputs{logits(1), logits(2), flags, thresholds};
  const auto width = static_cast<std::int64_t>(size_of(dtype));

  auto forward =
      bandwidth_case("text_loss_forward", shape, dtype, 0, inputs, [](std::vector<Tensor>& in) {
        Tensor stats = Tensor::empty({ops::text_stats}, DType::f64);
        ops::text_loss_forward(in[0], in[1], in[2], in[3], stats);
        return parts<Tensor>([&](std::int64_t a, std::int64_t b) { return stats.slice(a, b); });
      });
  forward.bytes = static_cast<double>(count * (2 * width + 2));
  forward.tolerance = 2e-6;
  forward.reference = [](const std::vector<Values>& in) {
    const Loss loss(in);
    return parts<Values>([&](std::int64_t a, std::int64_t b) {
      return Values(loss.stats.begin() + a, loss.stats.begin() + b);
    });
  };
  cases.push_back(std::move(forward));

  auto backward =
      bandwidth_case("text_loss_backward", shape, dtype, 0, inputs, [=](std::vector<Tensor>& in) {
        Tensor stats = Tensor::empty({ops::text_stats}, DType::f64);
        ops::text_loss_forward(in[0], in[1], in[2], in[3], stats);
        Tensor dp = Tensor::empty(maps, dtype), dt = Tensor::empty(maps, dtype);
        ops::text_loss_backward(in[0], in[1], in[2], in[3], stats, 0.4f, dp, dt);
        return std::vector<Tensor>{dp, dt};
      });
  backward.bytes = static_cast<double>(count * (6 * width + 4));  // with the forward
  backward.reference = [](const std::vector<Values>& in) {
    const Loss loss(in);
    const double compared =
        loss.stats[ops::text_positives] + loss.stats[ops::text_negatives] + 1e-6;
    const double area = loss.stats[ops::text_area] + 1e-6;
    Values dp(in[0].size()), dt(in[0].size());
    for (std::size_t i = 0; i < dp.size(); ++i) {
      const int own = static_cast<int>(in[2][i]);
      const double p = fp64::sigmoid(in[0][i]), t = fp64::sigmoid(in[1][i]);
      if (own & TextPixel::threshold) {
        const double d = (t - (0.3 + 0.4 * in[3][i] / 255)) / 1e-6;
        dt[i] =
            10 * std::clamp(d, -1.0, 1.0) / (loss.stats[ops::text_thresholds] + 1e-6) * t * (1 - t);
      }
      if (own & TextPixel::counts) {
        const double has_text = own & TextPixel::text ? 1 : 0;
        if (has_text > 0 || loss.chosen[i]) dp[i] = 5 * (p - has_text) / compared;
        const double b = fp64::sigmoid(50 * (p - t));
        const double slope =
            50 * b * (1 - b) * (2 * loss.stats[ops::text_overlap] / area - 2 * has_text) / area;
        dp[i] += slope * p * (1 - p), dt[i] -= slope * t * (1 - t);
      }
      dp[i] *= 0.4f, dt[i] *= 0.4f;
    }
    return std::vector<Values>{dp, dt};
  };
  cases.push_back(std::move(backward));
}

void add_summary(Cases& cases) {
  const Tensor stats = Tensor::host({ops::text_stats}, DType::f64);
  for (int k = 0; k < ops::text_stats; ++k) stats.data<double>()[k] = 0.3 + 0.11 * k;
  constexpr std::int64_t n = 3;
  cases.push_back(bandwidth_case("text_summary", "", DType::f32, 2 * n + 8, {stats},
                                 [](std::vector<Tensor>& in) {
                                   Tensor losses = Tensor::empty({n}, DType::f32);
                                   Tensor terms = Tensor::empty({3}, DType::f32);
                                   ops::text_summary(in[0], losses, terms);
                                   return std::vector<Tensor>{losses, terms};
                                 }));
  cases.back().reference = [](const std::vector<Values>& in) {
    return std::vector<Values>{Values(n, in[0][0]), {n * in[0][1], n * in[0][2], n * in[0][3]}};
  };
}

}  // namespace

void text_loss_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    for (const DType dtype : {DType::bf16, DType::f32})
      add_size(cases, 16, 640, 0.04, false, dtype);
    return;
  }
  // Fewer pixels than a block of threads and several blocks' chunks; text that leaves a choice, and
  // so much that all others are taken; equal logits at the edge; none, and nothing but text.
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool coarse : {false, true}) {
      add_size(cases, 1, 7, 0.15, coarse, dtype);
      add_size(cases, 2, 53, 0.05, coarse, dtype);
      add_size(cases, 1, 60, 0.6, coarse, dtype);
    }
  add_size(cases, 1, 9, 0, false, DType::f32);
  add_size(cases, 1, 9, 1, false, DType::f32);
  add_summary(cases);
}

}  // namespace weft
