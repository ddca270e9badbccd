// Operations of single calls in an arena without memory, against counts by hand.
#include "train/step_cost.h"

#include <gtest/gtest.h>

#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/fp8.h"
#include "ops/layout.h"
#include "ops/matmul.h"

namespace weft {
namespace {

using ops::Conv;

class OpTimesTest : public testing::Test {
 protected:
  static Tensor tensor(const Shape& shape) { return Tensor::empty(shape, DType::f32); }

  // Compute at other rates each, and memory that nothing waits for.
  Rates rates_{1e3, 1e4, 1e5, 1e30, 0.5, "round figures", 1e6};
  std::unique_ptr<Arena> arena_ = Arena::planning();
  ArenaScope scope_{*arena_};
  Tensor none_;
};

// FLOPs of what `call` does, the rate that they are to run at, and the share of them that are the
// model's.
template <class Call>
void expect_flops(const Rates& rates, double flops, double rate, const Call& call,
                  double counted = 1) {
  OpTimes times(rates);
  call();
  EXPECT_NEAR(times.flops(), counted * flops, 1e-9 * flops);
  EXPECT_NEAR(times.seconds(), 1.5 * flops / rate, 1e-9 * flops / rate);
}

TEST_F(OpTimesTest, Convolutions) {
  // 48 positions, 9 places of a kernel, 3 channels to 5.
  const double plain = 2.0 * 48 * 9 * 3 * 5;
  Tensor x = tensor({1, 2, 4, 6, 3}), w = tensor({5, 3, 3, 3}), y = tensor({1, 2, 4, 6, 5});
  Tensor bias = tensor({5});
  const double rate = rates_.convolutions;
  expect_flops(rates_, plain, rate,
               [&] { ops::conv_forward(x, w, bias, none_, Conv::same(3), y); });
  expect_flops(rates_, plain, rate,
               [&] { ops::conv_backward_input(y, w, Conv::same(3), x, false); });
  expect_flops(rates_, plain, rate,
               [&] { ops::conv_backward_weight(x, y, Conv::same(3), w, bias, false); });
  // Of stride 2: a quarter of the positions.
  Tensor less = tensor({1, 2, 2, 3, 5});
  expect_flops(rates_, plain / 4, rate,
               [&] { ops::conv_forward(x, w, bias, none_, Conv::down(), less); });
}

TEST_F(OpTimesTest, UpsampledConvolutions) {
  // 192 positions; of the 3 x 3 places under each, 2 x 2 see different pixels.
  const double up = 2.0 * 192 * 4 * 3 * 5;
  Tensor x = tensor({1, 2, 4, 6, 3}), w = tensor({5, 3, 3, 3}), y = tensor({1, 2, 8, 12, 5});
  Tensor bias = tensor({5});
  const double rate = rates_.convolutions;
  expect_flops(rates_, up, rate, [&] { ops::conv_forward(x, w, bias, none_, Conv::up(), y); });
  expect_flops(rates_, up, rate, [&] { ops::conv_backward_input(y, w, Conv::up(), x, false); });
  expect_flops(rates_, up, rate,
               [&] { ops::conv_backward_weight(x, y, Conv::up(), w, bias, false); });
}

TEST_F(OpTimesTest, LinearLayers) {
  const double product = 2.0 * 7 * 3 * 5;
  Tensor x = tensor({7, 3}), w = tensor({5, 3}), bias = tensor({5}), y = tensor({7, 5});
  const double rate = rates_.products;
  expect_flops(rates_, product, rate, [&] { ops::linear_forward(x, w, bias, none_, y); });
  expect_flops(rates_, product, rate, [&] { ops::linear_backward_input(y, w, x, false); });
  expect_flops(rates_, product, rate, [&] { ops::linear_backward_weight(y, x, w, bias, false); });
}

// Rounding is memory's work; a product in e4m3 has the rate of others where it has none of its own.
TEST_F(OpTimesTest, LinearLayersInFp8) {
  const double product = 2.0 * 7 * 3 * 5;
  Tensor x = Tensor::empty({7, 3}, DType::bf16), w = Tensor::empty({5, 3}, DType::bf16);
  Tensor y = Tensor::empty({7, 5}, DType::bf16);
  const auto both = [&](const Rates& rates, double rate) {
    expect_flops(rates, product, rate, [&] { ops::fp8_linear_forward(x, w, none_, none_, y); });
    expect_flops(rates, product, rate, [&] { ops::fp8_linear_backward_input(y, w, x, false); });
  };
  both(rates_, rates_.products);
  Rates measured = rates_;
  measured.fp8_products = 2e3;
  both(measured, 2e3);
  measured.bandwidth = 1e2;
  OpTimes times(measured);
  ops::fp8_linear_forward(x, w, none_, none_, y);
  // 36 elements, 5 bytes each; then 71 elements of the product's own.
  EXPECT_NEAR(times.seconds(), 1.5 * (36 * 5 + 71 * 2) / 1e2, 1e-9);
}

TEST_F(OpTimesTest, LinearLayersWithAnActivation) {
  const double product = 2.0 * 7 * 3 * 5;
  Tensor x = tensor({7, 3}), w = tensor({5, 3}), bias = tensor({5}), z = tensor({7, 5});
  const double rate = rates_.products;
  expect_flops(rates_, product, rate, [&] { ops::linear_gelu_forward(x, w, bias, z, z); });
  Tensor next = tensor({5, 3}), dy = tensor({7, 5}), dz = tensor({7, 3});
  expect_flops(rates_, product, rate,
               [&] { ops::linear_gelu_backward_input(dy, next, dz, dz, dz, bias, false); });
}

// Two products forward; five backward, of which one repeats the scores.
TEST_F(OpTimesTest, Attention) {
  const double forward = rates_.attention_forward, backward = rates_.attention_backward;
  {
    // 2 frames, 6 x 6 pairs of positions, 4 channels.
    const double product = 2.0 * 2 * 36 * 4;
    Tensor qkv = tensor({2, 6, 3, 4}), out = tensor({2, 6, 4}), lse = tensor({2, 6});
    expect_flops(rates_, 2 * product, forward, [&] { ops::wide_attention_forward(qkv, out, lse); });
    expect_flops(
        rates_, 5 * product, backward,
        [&] { ops::wide_attention_backward(qkv, out, lse, out, qkv); }, 0.8);
  }
  {
    // 2 clips of 3 frames of 5 tokens, 2 heads of 4 channels.
    Tensor qkv = tensor({2, 3, 5, 3, 2, 4}), out = tensor({2, 3, 5, 8}), none;
    for (const auto axis : {ops::Axis::space, ops::Axis::time}) {
      const std::int64_t length = axis == ops::Axis::space ? 5 : 3;
      const double product = 2.0 * 2 * 15 * static_cast<double>(length) * 8;
      Tensor lse = tensor({30 / length, 2, length});
      expect_flops(rates_, 2 * product, forward, [&] {
        ops::self_attention_forward(qkv, none, none, none, axis, out, lse, none_);
      });
      expect_flops(
          rates_, 5 * product, backward,
          [&] {
            ops::self_attention_backward(qkv, none, none, none, axis, out, lse, out, qkv, none_,
                                         none_, none);
          },
          0.8);
    }
  }
  {
    // 2 clips of 6 tokens, which see 3 and 4 rows of captions.
    const double product = 2.0 * 6 * 7 * 8;
    Tensor q = tensor({2, 6, 8}), kv = tensor({7, 16}), offsets = tensor({3}),
           out = tensor({2, 6, 8});
    Tensor lse = tensor({24});
    expect_flops(rates_, 2 * product, forward,
                 [&] { ops::cross_attention_forward(q, kv, offsets, 2, out, lse); });
    expect_flops(
        rates_, 5 * product, backward,
        [&] { ops::cross_attention_backward(q, kv, offsets, 2, out, lse, out, q, kv); }, 0.8);
    // The same keys, and those of the clip itself.
    Tensor k = tensor({7, 8}), none;
    expect_flops(rates_, 2 * product, forward,
                 [&] { ops::attention_forward(q, k, k, offsets, none, 2, out, lse); });
    expect_flops(
        rates_, 5 * product * 12 / 7, backward,
        [&] { ops::attention_backward(q, q, q, none, none, 2, out, lse, out, q, q, q); }, 0.8);
  }
}

TEST_F(OpTimesTest, WhatMemoryBounds) {
  rates_.bandwidth = 10;
  Tensor x = tensor({1, 4, 2, 3, 2}), y = tensor({1, 2, 3, 2, 4});
  OpTimes times(rates_);
  ops::to_channels_last(x, y);
  EXPECT_EQ(times.flops(), 0);
  EXPECT_DOUBLE_EQ(times.seconds(), 1.5 * 2 * 48 * 4 / 10);
  EXPECT_EQ(arena_->used(), 2 * Arena::alignment);
}

}  // namespace
}  // namespace weft
