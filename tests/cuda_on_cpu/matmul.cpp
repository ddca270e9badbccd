// cuBLASLt's arithmetic: operands become dense f32, oneDNN multiplies, the epilogue is applied
// element by element by its documented meaning, and everything is rounded once where it is stored.
#include "matmul.h"

#include <dnnl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <vector>

#include "cuda_bf16.h"

namespace emulation {

float from_e4m3(std::uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return byte < 128 ? magnitude : -magnitude;
}

std::uint8_t to_e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  static const auto finite = [] {  // ascending
    std::array<double, 127> all{};
    for (std::uint8_t i = 0; i < 127; ++i) all[i] = from_e4m3(i);
    return all;
  }();
  const double magnitude = std::fabs(x);
  auto byte = static_cast<std::size_t>(
      std::min(std::lower_bound(finite.begin(), finite.end(), magnitude), finite.end() - 1) -
      finite.begin());
  if (byte > 0) {
    const double above = finite[byte] - magnitude, below = magnitude - finite[byte - 1];
    if (below < above || (below == above && byte % 2 == 1)) --byte;
  }
  return static_cast<std::uint8_t>(byte | (std::signbit(x) ? 128 : 0));
}

namespace {

// An element of any order and type.
struct View {
  void* data;
  cudaDataType_t type;
  std::size_t row_stride, column_stride;

  View(const void* p, const MatrixLayout& l)
      : data(const_cast<void*>(p)),
        type(l.type),
        row_stride(l.order == CUBLASLT_ORDER_COL ? 1 : static_cast<std::size_t>(l.ld)),
        column_stride(l.order == CUBLASLT_ORDER_COL ? static_cast<std::size_t>(l.ld) : 1) {}
  View(void* p, cudaDataType_t t, std::size_t ld)
      : data(p), type(t), row_stride(1), column_stride(ld) {}

  float get(std::size_t row, std::size_t column) const {
    const std::size_t i = row * row_stride + column * column_stride;
    if (type == CUDA_R_8F_E4M3) return from_e4m3(static_cast<const std::uint8_t*>(data)[i]);
    return type == CUDA_R_16BF ? from_bf16(static_cast<const std::uint16_t*>(data)[i])
                               : static_cast<const float*>(data)[i];
  }
  void set(std::size_t row, std::size_t column, float x) const {
    const std::size_t i = row * row_stride + column * column_stride;
    if (type == CUDA_R_16BF)
      static_cast<std::uint16_t*>(data)[i] = to_bf16(x);
    else
      static_cast<float*>(data)[i] = x;
  }
};

// op(matrix) as dense columns.
std::vector<float> dense(View v, bool transposed, std::size_t rows, std::size_t columns,
                         bool rounds) {
  if (transposed) std::swap(v.row_stride, v.column_stride);
  std::vector<float> out(rows * columns);
  for (std::size_t j = 0; j < columns; ++j)
    for (std::size_t i = 0; i < rows; ++i)
      out[j * rows + i] = rounds ? tf32(v.get(i, j)) : v.get(i, j);
  return out;
}

constexpr float k0 = 0.7978845608028654f, k1 = 0.044715f;  // the tanh form, which is the library's
float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(k0 * (x + k1 * x * x * x))); }
float gelu_slope(float x) {
  const float t = std::tanh(k0 * (x + k1 * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * k0 * (1.0f + 3.0f * k1 * x * x);
}

// A fault of the library in what weft does not take without having checked it.
bool wrong_sums() {
  static const char* const kind = std::getenv("WEFT_EMULATION_MATMUL");
  return kind != nullptr && std::string_view(kind) == "wrong_sums";
}

}  // namespace

void multiply(const Product& p, const void* a, const void* b, const void* c, void* d) {
  const std::size_t m = p.d.rows, n = p.d.columns, k = p.transposed_a ? p.a.rows : p.a.columns;
  const std::vector<float> left = dense(View(a, p.a), p.transposed_a, m, k, p.rounds_inputs);
  const std::vector<float> right = dense(View(b, p.b), p.transposed_b, k, n, p.rounds_inputs);
  std::vector<float> product(m * n);
  const auto at = [](std::size_t x) { return static_cast<dnnl_dim_t>(x); };
  const auto scale = [](const void* s) {
    return s == nullptr ? 1.0f : *static_cast<const float*>(s);
  };
  const float alpha = p.alpha * scale(p.a_scale) * scale(p.b_scale);
  // oneDNN counts in rows: its row-major B^T A^T is the column-major A B.
  dnnl_sgemm('N', 'N', at(n), at(m), at(k), alpha, right.data(), at(k), left.data(), at(m), 0.0f,
             product.data(), at(m));

  const View out(d, p.d), in(c, p.c), vector(p.vector, p.bias_type, 0),
      aux(p.aux, p.d.type, static_cast<std::size_t>(p.aux_ld));
  const bool bias = (p.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0;
  const bool forward = (p.epilogue & CUBLASLT_EPILOGUE_GELU) != 0;
  const bool backward = (p.epilogue & ~16) == CUBLASLT_EPILOGUE_DGELU;
  std::vector<float> sums(p.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD ? m : 0);
  for (std::size_t j = 0; j < n; ++j)
    for (std::size_t i = 0; i < m; ++i) {
      float x = product[j * m + i];
      if (p.beta != 0) x += p.beta * in.get(i, j);
      if (bias) x += vector.get(i, 0);
      if (forward) {
        if (has_aux(p.epilogue)) aux.set(i, j, x);
        x = gelu(x);
      } else if (backward) {
        x *= gelu_slope(aux.get(i, j));
        if (!sums.empty()) sums[i] += x;
      }
      out.set(i, j, x);
    }
  for (std::size_t i = 0; i < sums.size(); ++i)
    vector.set(i, 0, sums[i] * (wrong_sums() ? 1.01f : 1.0f));
  if (p.epilogue == CUBLASLT_EPILOGUE_BGRADA)
    for (std::size_t i = 0; i < m; ++i) {
      float sum = 0;
      for (std::size_t l = 0; l < k; ++l) sum += left[l * m + i];
      vector.set(i, 0, sum);
    }
  if (p.epilogue == CUBLASLT_EPILOGUE_BGRADB)
    for (std::size_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::size_t l = 0; l < k; ++l) sum += right[j * k + l];
      vector.set(j, 0, sum);
    }
}

}  // namespace emulation
