// Attention of more tiles than multiprocessors, of which Hopper's kernels take one after the other
// (as 9.0; on other devices the grid is that of the work).
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ops/attention.h"
#include "tensor/device.h"
#include "tensor/device_cuda.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

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

// Whichever block has a tile, and in every launch anew.
TEST(AttentionTiles, AreAllDoneWhicheverBlockTakesThem) {
  if (!on_cuda()) use_gpu(0);
  const std::int64_t B = 30, N = 150, H = 4, D = 72;
  ASSERT_GT(B * H, cuda_properties().multiProcessorCount);
  const auto arena = Arena::reserve(std::size_t{64} << 20);
  const ArenaScope scope(*arena);
  const Shape shape{B, N, H * D};
  const Tensor q = drawn(shape, 1), k = drawn(shape, 2), v = drawn(shape, 3),
               dout = drawn(shape, 4);
  // Of the sequences from `first` on.
  const auto results = [&](std::int64_t first, std::int64_t count) {
    const auto some = [&](const Tensor& t) { return t.slice(first, first + count); };
    const Shape part{count, N, H * D};
    Tensor out = Tensor::empty(part, DType::bf16), lse = Tensor::empty({count, H, N}, DType::f32);
    Tensor dq = Tensor::empty(part, DType::bf16), dk = Tensor::empty(part, DType::bf16),
           dv = Tensor::empty(part, DType::bf16);
    ops::attention_forward(some(q), some(k), some(v), Tensor(), Tensor(), static_cast<int>(H), out,
                           lse);
    ops::attention_backward(some(q), some(k), some(v), Tensor(), Tensor(), static_cast<int>(H), out,
                            lse, some(dout), dq, dk, dv);
    std::vector<std::vector<std::byte>> all;
    for (const Tensor* t : {&out, &lse, &dq, &dk, &dv}) all.push_back(bytes_of(*t));
    return all;
  };
  const auto whole = results(0, B);
  EXPECT_EQ(results(0, B), whole);
  std::vector<std::vector<std::byte>> in_parts(whole.size());
  for (std::int64_t first = 0; first < B; first += 10) {
    const auto part = results(first, 10);  // a block for each tile
    for (std::size_t i = 0; i < part.size(); ++i)
      in_parts[i].insert(in_parts[i].end(), part[i].begin(), part[i].end());
  }
  EXPECT_EQ(in_parts, whole);
}

}  // namespace
}  // namespace weft
