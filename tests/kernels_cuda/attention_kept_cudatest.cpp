// Self attention whose backward gets the q and k that the forward normalised and rotated: the same
// bits as one that makes them again.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ops/attention.h"
#include "tensor/device.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

Tensor drawn(const Shape& shape, DType dtype, std::uint32_t state) {
  std::vector<float> v(static_cast<std::size_t>(shape.numel()));
  for (float& x : v) {
    state = state * 1664525u + 1013904223u;
    x = static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.0f;
  }
  Tensor t = Tensor::empty(shape, dtype);
  if (dtype == DType::f32) {
    t.set(std::span<const float>(v));
  } else {
    const std::vector<bf16> rounded(v.begin(), v.end());
    t.set(std::span<const bf16>(rounded));
  }
  return t;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to_host(), y = b.to_host();
  return x.bytes() == y.bytes() && std::memcmp(x.raw(), y.raw(), x.bytes()) == 0;
}

class KeptQueries : public testing::TestWithParam<DType> {};

TEST_P(KeptQueries, GiveTheSameBits) {
  if (!on_cuda()) use_gpu(0);
  const auto arena = Arena::reserve(std::size_t{64} << 20, DeviceKind::cuda);
  const ArenaScope scope(*arena);
  const std::int64_t T = 2, S = 150, H = 2, D = 72;
  const DType dtype = GetParam();
  const Shape shape{1, T, S, 3, H, D}, out_shape{1, T, S, H * D};
  const Tensor qkv = drawn(shape, dtype, 1), dout = drawn(out_shape, dtype, 2);
  for (const bool rotated : {false, true}) {
    const Tensor wq = drawn({D}, DType::f32, 3), wk = drawn({D}, DType::f32, 4);
    const Tensor rope = rotated ? drawn({S, D / 2, 2}, DType::f32, 5) : Tensor();
    std::vector<Tensor> results[2];
    for (const bool kept : {false, true}) {
      Tensor out = Tensor::empty(out_shape, dtype), lse = Tensor::empty({T, H, S}, DType::f32);
      Tensor dqkv = Tensor::empty(shape, dtype), dwq = drawn({D}, DType::f32, 6),
             dwk = drawn({D}, DType::f32, 7);
      ASSERT_TRUE(ops::keeps_qk(wq, rope, ops::Axis::space));
      Tensor qk = kept ? Tensor::empty(ops::qk_shape(shape), dtype) : Tensor();
      ops::self_attention_forward(qkv, wq, wk, rope, ops::Axis::space, out, lse, qk);
      if (kept) {
        // The backward reads q and k where they are kept: with zeros for k it has no gradient of q.
        Tensor zeros = Tensor::empty(ops::qk_shape(shape), dtype), d = Tensor::empty(shape, dtype);
        device_runtime().zero(zeros.raw(), zeros.bytes(), Stream::compute);
        Tensor a = drawn({D}, DType::f32, 6), b = drawn({D}, DType::f32, 7);
        ops::self_attention_backward(qkv, wq, wk, rope, ops::Axis::space, out, lse, dout, d, a, b,
                                     zeros);
        EXPECT_TRUE(same_bits(a, drawn({D}, DType::f32, 6)));
      }
      ops::self_attention_backward(qkv, wq, wk, rope, ops::Axis::space, out, lse, dout, dqkv, dwq,
                                   dwk, qk);
      results[kept] = {out, lse, dqkv, dwq, dwk};
    }
    for (std::size_t i = 0; i < results[0].size(); ++i)
      EXPECT_TRUE(same_bits(results[0][i], results[1][i])) << "result " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, KeptQueries, testing::Values(DType::f32, DType::bf16));

}  // namespace
}  // namespace weft
