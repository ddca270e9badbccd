#include "models/sadtalker/render/quadruple.h"

#include <algorithm>
#include <span>
#include <vector>

#include "core/error.h"
#include "ops/layout.h"

namespace weft {
namespace {

// Which of the small map's three pixels - before, here, behind - tap k of the 3x3 falls on, for
// place p of the square: its first, its inner two, its last.
constexpr int pixel_of(int p, int k) {
  if (p == 0 && k == 0) return 0;
  return p == 2 && k == 2 ? 2 : 1;
}

}  // namespace

void Quadruple::fold() {
  WEFT_ASSERT(conv_->weight.defined() && conv_->bias.defined());
  const std::int64_t out = conv_->out, pairs = conv_->out * conv_->in;
  const Tensor host = conv_->weight.to_host(), bias = conv_->bias.to_host();
  const bool low = host.dtype() == DType::bf16;
  std::vector<float> sums(static_cast<std::size_t>(9 * pairs * 9));
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < 9 * pairs; ++i) {
    const int row = static_cast<int>(i / pairs) / 3, column = static_cast<int>(i / pairs) % 3;
    const std::int64_t from = i % pairs * 9;
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) {
        const std::int64_t at = from + a * 3 + b;
        sums[static_cast<std::size_t>(i * 9 + pixel_of(row, a) * 3 + pixel_of(column, b))] +=
            low ? static_cast<float>(host.data<bf16>()[at]) : host.data<float>()[at];
      }
  }
  nine_.geometry = ops::Conv::same(3);
  nine_.in = conv_->in;
  nine_.out = 9 * out;
  nine_.weight = Tensor::persistent({9 * out, conv_->in, 3, 3}, host.dtype());
  if (low) {
    std::vector<bf16> rounded(sums.size());
    std::ranges::transform(sums, rounded.begin(), [](float v) { return bf16(v); });
    nine_.weight.set(std::span<const bf16>(rounded));
  } else {
    nine_.weight.set(std::span<const float>(sums));
  }
  std::vector<float> biases;
  for (int k = 0; k < 9; ++k)
    biases.insert(biases.end(), bias.data<float>(), bias.data<float>() + out);
  nine_.bias = Tensor::persistent({9 * out}, DType::f32);
  nine_.bias.set(std::span<const float>(biases));
}

Tensor Quadruple::forward(const Tensor& x, float slope) const {
  const Tensor rows = convolve(nine_, x, slope);
  Tensor y = Tensor::empty({x.dim(0), x.dim(1), 4 * x.dim(2), 4 * x.dim(3), conv_->out}, x.dtype());
  ops::spread_4x4(rows, y);
  return y;
}

}  // namespace weft
