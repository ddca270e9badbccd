// CPU side of ops/fp8.h: operands are rounded to e4m3 in bf16, and multiplied as bf16 is
// (matmul.cpp). Rounding reads an operand twice and writes it once, little beside the product.
#include "ops/fp8.h"

#include "core/error.h"
#include "ops/matmul.h"

WEFT_CPU_BEGIN
namespace {

// The largest finite magnitude. Magnitudes of bf16 are ordered as their bits are.
float largest_magnitude(const Tensor& x) {
  const bf16* const from = x.data<bf16>();
  const std::int64_t count = x.numel();
  unsigned largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest)
  for (std::int64_t i = 0; i < count; ++i) {
    const unsigned magnitude = from[i].bits & 0x7fffu;
    largest = std::max(largest, magnitude < 0x7f80u ? magnitude : 0u);
  }
  return std::bit_cast<float>(largest << 16);
}

Tensor rounded_to_e4m3(const Tensor& x) {
  WEFT_ASSERT(x.dtype() == DType::bf16);
  Tensor y = Tensor::empty(x.shape(), DType::bf16);
  if (planning()) return y;
  const float scale = e4m3_scale(largest_magnitude(x)), inverse = 1.0f / scale;
  const bf16* const from = x.data<bf16>();
  bf16* const to = y.data<bf16>();
  const std::int64_t count = x.numel();
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i)
    to[i] = bf16(from_e4m3(to_e4m3(static_cast<float>(from[i]) * scale)) * inverse);
  return y;
}

}  // namespace

void fp8_linear_forward(const Tensor& x, const Tensor& w, const Tensor& bias,
                        const Tensor& residual, Tensor& y) {
  if (x.numel() == 0) return;
  const Tensor a = rounded_to_e4m3(x), b = rounded_to_e4m3(w);
  if (!planning()) linear_forward(a, b, bias, residual, y);
}

void fp8_linear_backward_input(const Tensor& dy, const Tensor& w, Tensor& dx, bool accumulate) {
  if (dy.numel() == 0) return;
  const Tensor a = rounded_to_e4m3(dy), b = rounded_to_e4m3(w);
  if (!planning()) linear_backward_input(a, b, dx, accumulate);
}

WEFT_CPU_END
