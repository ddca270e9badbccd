// Times one layer of the VAE at a time, on request of compare_vae_ops.py: reads "INDEX" lines on standard input, runs that case
// once and writes its seconds. Without input it lists the cases. Threads by OMP_NUM_THREADS.
//   ninja -C build vae_ops_rate
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "core/version.h"
#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/norm.h"
#include "tensor/arena.h"

using namespace weft;

namespace {

struct Case {
  std::string name;
  std::function<void()> run;
};

Tensor filled(const Shape& shape, float scale = 1.0f) {
  Tensor t = Tensor::empty(shape, DType::f32);
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    state = state * 1664525u + 1013904223u;
    t.data<float>()[i] = scale * (static_cast<float>(state >> 8) / 8388608.0f - 1.0f);
  }
  return t;
}

// Forward, and the gradients of input, weights and bias, of a convolution.
void add_conv(std::vector<Case>& cases, const std::string& name, const Shape& x, std::int64_t out,
              ops::Conv conv) {
  const Shape w = conv.kt == 1 ? Shape{out, x[4], conv.kh, conv.kw}
                               : Shape{out, x[4], conv.kt, conv.kh, conv.kw};
  const Tensor tx = filled(x), tw = filled(w, 0.02f), bias = filled({out});
  Tensor y = filled(conv.output(x, out));
  cases.push_back(
      {name + " forward", [=]() mutable { ops::conv_forward(tx, tw, bias, Tensor(), conv, y); }});
  Tensor dx = filled(x), dw = filled(w), dbias = filled({out});
  cases.push_back({name + " backward", [=]() mutable {
                     ops::conv_backward_weight(tx, y, conv, dw, dbias, false);
                     ops::conv_backward_input(y, tw, conv, dx, false);
                   }});
}

std::vector<Case> all_cases() {
  using ops::Conv;
  std::vector<Case> c;
  add_conv(c, "3x3 128 at 256x256", {1, 1, 256, 256, 128}, 128, Conv::same(3));
  add_conv(c, "3x3 256 at 128x128", {1, 1, 128, 128, 256}, 256, Conv::same(3));
  add_conv(c, "3x3 512 at 64x64", {1, 1, 64, 64, 512}, 512, Conv::same(3));
  add_conv(c, "3x3 512 at 32x32, 4 frames", {4, 1, 32, 32, 512}, 512, Conv::same(3));
  add_conv(c, "up 256 to 256x256", {1, 1, 128, 128, 256}, 256, Conv::up());
  add_conv(c, "down 128 to 128x128", {1, 1, 256, 256, 128}, 128, Conv::down());
  add_conv(c, "conv_in 3-128 at 256x256", {1, 1, 256, 256, 3}, 128, Conv::same(3));
  add_conv(c, "conv_out 128-3 at 256x256", {1, 1, 256, 256, 128}, 3, Conv::same(3));
  add_conv(c, "1x1 256-128 at 256x256", {1, 1, 256, 256, 256}, 128, Conv::same(1));
  add_conv(c, "causal 256 at 10x32x32", {1, 10, 32, 32, 256}, 256, Conv::causal(3));
  const Shape frames{1, 256, 256, 128};
  const Tensor x = filled(frames), gamma = filled({128}), beta = filled({128});
  Tensor y = filled(frames), stats = filled({1, 32, 2}), dx = filled(frames);
  c.push_back({"GroupNorm+SiLU 128 at 256x256 forward", [=]() mutable {
                 ops::group_norm_forward(x, gamma, beta, 32, 1e-6f, true, y, stats);
               }});
  Tensor dgamma = filled({128}), dbeta = filled({128});
  c.push_back({"GroupNorm+SiLU 128 at 256x256 backward", [=]() mutable {
                 ops::group_norm_backward(x, gamma, beta, stats, 32, true, y, dx, false, dgamma,
                                          dbeta);
               }});
  const Tensor qkv = filled({4, 1024, 3, 512});
  Tensor out = filled({4, 1024, 512}), lse = filled({4, 1024}), dqkv = filled({4, 1024, 3, 512});
  c.push_back({"attention 512 at 32x32, 4 frames forward",
               [=]() mutable { ops::wide_attention_forward(qkv, out, lse); }});
  c.push_back({"attention 512 at 32x32, 4 frames backward",
               [=]() mutable { ops::wide_attention_backward(qkv, out, lse, out, dqkv); }});
  return c;
}

}  // namespace

int main() {
  const auto arena = Arena::reserve(std::size_t{8} << 30);
  const ArenaScope scope(*arena);
  const std::vector<Case> cases = all_cases();
  for (const Case& c : cases) fmt::print("{}\n", c.name);
  fmt::print("{}\n", version_line());
  std::fflush(stdout);
  for (std::size_t k; std::cin >> k;) {
    const auto start = std::chrono::steady_clock::now();
    cases.at(k).run();
    fmt::print("{:.6f}\n",
               std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }
}
