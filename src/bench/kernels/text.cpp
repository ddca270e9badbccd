// Cases of ops/text.h (kernels/text.cu and relative_attention.cu beside src/ops/cpu/text.cpp and relative_attention.cpp).
#include <fmt/format.h>

#include <numeric>

#include "bench/kernels/cases.h"
#include "ops/attention.h"
#include "ops/embed.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

KernelCase make(const char* op, const std::string& shape, DType dtype, double values) {
  KernelCase c;
  c.op = op;
  c.shape = shape;
  c.dtype = dtype;
  c.bytes = values * static_cast<double>(size_of(dtype));
  c.tolerance = dtype == DType::bf16 ? 1.0 / 128 : 1e-5;
  return c;
}

void add_rows(std::vector<KernelCase>& cases, std::int64_t M, std::int64_t C, DType dtype) {
  const std::string text = fmt::format("M{} C{}", M, C);
  const Shape rows{M, C};
  const double elements = static_cast<double>(M * C);
  auto norm = make("rms_norm_forward", text, dtype, 2 * elements);
  norm.inputs = {random_tensor(rows, dtype, 1, 3.0f, 1.0f),
                 random_tensor({C}, DType::f32, 2, 0.5f, 1.0f)};
  norm.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(rows, dtype);
    ops::rms_norm_forward(in[0], in[1], 1e-6f, y);
    return std::vector<Tensor>{y};
  };
  auto gelu = make("gated_gelu_forward", text, dtype, 3 * elements);
  gelu.inputs = {random_tensor({2, M, C}, dtype, 3, 2.0f)};
  gelu.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(rows, dtype);
    ops::gated_gelu_forward(in[0], y);
    return std::vector<Tensor>{y};
  };
  auto embedding = make("embedding_forward", text, dtype, 2 * elements);
  const std::int64_t vocabulary = 97;
  Tensor ids = Tensor::host({M}, DType::i32);
  for (std::int64_t i = 0; i < M; ++i)
    ids.data<std::int32_t>()[i] = static_cast<std::int32_t>(i * 31 % vocabulary);
  embedding.tolerance = 0;
  embedding.inputs = {ids, random_tensor({vocabulary, C}, dtype, 4)};
  embedding.run = [=](std::vector<Tensor>& in) {
    Tensor y = Tensor::empty(rows, dtype);
    ops::embedding_forward(in[0], in[1], y);
    return std::vector<Tensor>{y};
  };
  for (KernelCase* c : {&norm, &gelu, &embedding}) cases.push_back(std::move(*c));
}

void add_attention(std::vector<KernelCase>& cases, const std::vector<std::int32_t>& lengths,
                   std::int64_t H, std::int64_t D, DType dtype) {
  Tensor offsets = Tensor::host({static_cast<std::int64_t>(lengths.size()) + 1}, DType::i32);
  offsets.data<std::int32_t>()[0] = 0;
  std::partial_sum(lengths.begin(), lengths.end(), offsets.data<std::int32_t>() + 1);
  const std::int64_t M = offsets.data<std::int32_t>()[lengths.size()];
  std::int64_t longest = 0;
  double pairs = 0;
  for (const std::int32_t n : lengths) {
    longest = std::max<std::int64_t>(longest, n);
    pairs += static_cast<double>(n) * n;
  }
  auto c = make("relative_attention_forward",
                fmt::format("{} captions to {} H{} D{}", lengths.size(), longest, H, D), dtype,
                static_cast<double>(4 * M * H * D));
  c.flops = 4 * pairs * static_cast<double>(H * D);
  c.bound = Bound::tensor_cores;
  // bf16: probabilities are rounded before the product with v.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 64 : 2e-5;
  c.inputs = {random_tensor({3, M, H, D}, dtype, 1, 0.4f), random_tensor({32, H}, DType::f32, 2),
              offsets};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor out = Tensor::empty({M, H * D}, dtype);
    ops::relative_attention_forward(in[0], in[1], in[2], longest, out);
    return std::vector<Tensor>{out};
  };
  cases.push_back(std::move(c));
}

}  // namespace

std::vector<KernelCase> text_cases(CaseSize size) {
  std::vector<KernelCase> cases;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    if (size == CaseSize::real) {
      // T5-XXL: 32 captions of 300 rows; the norm's width and the gate's.
      add_rows(cases, 9600, 4096, dtype);
      add_rows(cases, 9600, 10240, dtype);
      add_attention(cases, std::vector<std::int32_t>(32, 300), 64, 64, dtype);
      continue;
    }
    add_rows(cases, 3, 8, dtype);
    add_rows(cases, 5, 37, dtype);
    add_rows(cases, 2, 2056, dtype);
    // Captions of one row; distances beyond the last bucket's; several tiles; heads for the tensor cores and others.
    add_attention(cases, {1, 7, 70}, 2, 32, dtype);
    add_attention(cases, {110, 3}, 1, 64, dtype);
    add_attention(cases, {5, 9}, 2, 12, dtype);
    add_attention(cases, {66}, 1, 128, dtype);
  }
  return cases;
}

}  // namespace weft
