// Attention while collectives may run: with fewer blocks, the same bits. As 9.0 (Hopper), whose
// kernels' blocks stay; on other devices the grid is that of the work.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "attention/flash_sm90_order.cuh"
#include "ops/attention.h"
#include "tensor/device.h"
#include "tensor/device_cuda.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

struct Margin {
  explicit Margin(int n) { set_multiprocessor_margin(n); }
  ~Margin() { set_multiprocessor_margin(0); }
};

TEST(MultiprocessorMargin, LeavesHalfOfTheDeviceAtLeast) {
  if (!on_cuda()) use_gpu(0);
  const int all = cuda_properties().multiProcessorCount;
  EXPECT_EQ(compute_multiprocessors(), all);
  for (const int n : {1, 16}) {
    const Margin margin(n);
    EXPECT_EQ(compute_multiprocessors(), all - n);
  }
  const Margin margin(all);
  EXPECT_EQ(compute_multiprocessors(), (all + 1) / 2);
}

Tensor drawn(const Shape& shape, std::uint32_t state) {
  std::vector<bf16> v(static_cast<std::size_t>(shape.numel()));
  for (bf16& x : v) {
    state = state * 1664525u + 1013904223u;
    x = bf16(static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.0f);
  }
  Tensor t = Tensor::empty(shape, DType::bf16);
  t.set(std::span<const bf16>(v));
  return t;
}

std::vector<std::byte> bytes_of(const Tensor& t) {
  const Tensor h = t.to_host();
  const auto* p = static_cast<const std::byte*>(h.raw());
  return {p, p + h.bytes()};
}

// More tiles than multiprocessors, so that blocks take several and the grids differ.
TEST(MultiprocessorMargin, AttentionHasTheSameBits) {
  if (!on_cuda()) use_gpu(0);
  const std::int64_t B = 30, N = 150, H = 4, D = 72;
  ASSERT_GT(B * H, cuda_properties().multiProcessorCount);
  const auto arena = Arena::reserve(std::size_t{64} << 20);
  const ArenaScope scope(*arena);
  const Shape shape{B, N, H * D};
  const Tensor q = drawn(shape, 1), k = drawn(shape, 2), v = drawn(shape, 3),
               dout = drawn(shape, 4);
  const auto results = [&](int margin) {
    const Margin set(margin);
    Tensor out = Tensor::empty(shape, DType::bf16), lse = Tensor::empty({B, H, N}, DType::f32);
    Tensor dq = Tensor::empty(shape, DType::bf16), dk = Tensor::empty(shape, DType::bf16),
           dv = Tensor::empty(shape, DType::bf16);
    ops::attention_forward(q, k, v, Tensor(), Tensor(), static_cast<int>(H), out, lse);
    ops::attention_backward(q, k, v, Tensor(), Tensor(), static_cast<int>(H), out, lse, dout, dq,
                            dk, dv);
    std::vector<std::vector<std::byte>> all;
    for (const Tensor* t : {&out, &lse, &dq, &dk, &dv}) all.push_back(bytes_of(*t));
    return all;
  };
  const auto whole = results(0);
  EXPECT_EQ(results(16), whole);
  EXPECT_EQ(results(cuda_properties().multiProcessorCount), whole);
}

// What decides the order of sums does not go by it.
TEST(MultiprocessorMargin, LeavesTheSplitsOfPackedKeys) {
  if (!on_cuda()) use_gpu(0);
  kernels::FlashShape shape;
  shape.heads = 1;
  shape.nq = 1 << 20;
  const int whole = kernels::backward_splits(shape);
  const Margin margin(16);
  EXPECT_EQ(kernels::backward_splits(shape), whole);
}

}  // namespace
}  // namespace weft
