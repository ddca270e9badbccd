// Cases of ops/layout.h (kernels/layout.cu beside src/ops/cpu/layout.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/philox.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

using Tensors = std::vector<Tensor>;

// Copies, and one rounding that may fall the other way.
double tolerance(DType t) { return t == DType::f32 ? 1e-6 : 1.0 / 256; }

double width(DType t) { return static_cast<double>(size_of(t)); }

void add_layouts(Cases& cases, const Shape& x, DType dtype) {
  const std::int64_t B = x[0], C = x[1], T = x[2], H = x[3], W = x[4];
  const Shape last{B, T, H, W, C};
  const auto layout = [&](const char* op, const Shape& from, const Shape& to, auto call) {
    KernelCase c;
    c.op = op;
    c.shape = fmt::format("B{} C{} T{} {}x{}", B, C, T, H, W);
    c.dtype = dtype;
    c.bytes = static_cast<double>((from.numel() + to.numel()) *
                                  static_cast<std::int64_t>(size_of(dtype)));
    c.tolerance = 0;
    c.inputs = {random_tensor(from, dtype, 1)};
    c.run = [=](std::vector<Tensor>& in) {
      Tensor y = Tensor::empty(to, dtype);
      call(in[0], y);
      return std::vector<Tensor>{y};
    };
    cases.push_back(std::move(c));
  };
  layout("to_channels_last", x, last,
         [](const Tensor& a, Tensor& b) { ops::to_channels_last(a, b); });
  layout("to_channels_first", last, x,
         [](const Tensor& a, Tensor& b) { ops::to_channels_first(a, b); });
  const Shape deep{B, T, H, W, 2 * C}, shallow{B, 2 * T, H, W, C};
  layout("depth_to_time_forward", deep, shallow,
         [](const Tensor& a, Tensor& b) { ops::depth_to_time_forward(a, b); });
  layout("depth_to_time_backward", shallow, deep,
         [](const Tensor& a, Tensor& b) { ops::depth_to_time_backward(a, b); });
}

// Patches of x [B,C,T,H,W], both ways and both orders of a row's elements.
void add_patches(Cases& cases, const Shape& x, ops::PatchGeometry p, DType dtype) {
  const auto patches = [](std::int64_t size, int patch) { return (size + patch - 1) / patch; };
  const Shape rows{x[0], patches(x[2], p.pt), patches(x[3], p.ph) * patches(x[4], p.pw),
                   x[1] * p.pt * p.ph * p.pw};
  const std::string shape = fmt::format("x {} patch {}x{}x{}", x.str(), p.pt, p.ph, p.pw);
  const double bytes =
      4.0 * static_cast<double>(x.numel()) + width(dtype) * static_cast<double>(rows.numel());
  const auto to_rows = [&](const char* op, const auto& call) {
    KernelCase c = make_case(op, shape, dtype, bytes, tolerance(dtype));
    c.inputs = {random_tensor(x, DType::f32, 1)};
    c.run = [=](Tensors& in) {
      Tensor out = Tensor::empty(rows, dtype);
      call(in[0], p, out);
      return Tensors{out};
    };
    cases.push_back(std::move(c));
  };
  const auto to_pixels = [&](const char* op, const auto& call) {
    KernelCase c = make_case(op, shape, dtype, bytes, tolerance(dtype));
    c.inputs = {random_tensor(rows, dtype, 2)};
    c.run = [=](Tensors& in) {
      Tensor out = Tensor::empty(x, DType::f32);
      call(in[0], p, out);
      return Tensors{out};
    };
    cases.push_back(std::move(c));
  };
  to_rows("patchify_forward", ops::patchify_forward);
  to_pixels("patchify_backward", ops::patchify_backward);
  to_pixels("unpatchify_forward", ops::unpatchify_forward);
  to_rows("unpatchify_backward", ops::unpatchify_backward);
}

// A block of x [B,T,S,C] that lands at another place of y [B,T',S',C]; the rest of y must stay.
void add_copy(Cases& cases, const Shape& from, const Shape& to, ops::TokenBlock block,
              DType dtype) {
  KernelCase c;
  c.op = "copy_tokens";
  c.shape = fmt::format("T{} S{} of {} to {}", block.frames, block.tokens, from.str(), to.str());
  c.dtype = dtype;
  c.bytes = 2.0 * static_cast<double>(size_of(dtype)) *
            static_cast<double>(from[0] * block.frames * block.tokens * from[3]);
  c.tolerance = 0;
  c.inputs = {random_tensor(from, dtype, 1), random_tensor(to, dtype, 2)};
  c.run = [=](std::vector<Tensor>& in) {
    ops::copy_tokens(in[0], block, in[1]);
    return std::vector<Tensor>{in[1]};
  };
  cases.push_back(std::move(c));
}

// Channels [first, first + c) of y [positions,C].
void add_channels(Cases& cases, std::int64_t positions, std::int64_t c, std::int64_t first,
                  std::int64_t C, DType dtype) {
  const std::string shape =
      fmt::format("{} positions, channels {} + {} of {}", positions, first, c, C);
  const double bytes = 2 * width(dtype) * static_cast<double>(positions * c);
  const Tensor x = random_tensor({positions, c}, dtype, 1),
               y = random_tensor({positions, C}, dtype, 2);
  // f(element of x, element of y)
  const auto each = [=](auto f) {
    for (std::int64_t p = 0; p < positions; ++p)
      for (std::int64_t k = 0; k < c; ++k) f(p * c + k, p * C + first + k);
  };
  KernelCase put = make_case("put_channels", shape, dtype, bytes, 0);
  put.inputs = {x, y};
  put.run = [=](Tensors& in) {
    ops::put_channels(in[0], first, in[1]);
    return Tensors{in[1]};
  };
  put.reference = [=](const std::vector<Values>& in) {
    Values to = in[1];
    each([&](std::int64_t i, std::int64_t j) { to[j] = in[0][i]; });
    return std::vector<Values>{to};
  };
  cases.push_back(std::move(put));
  for (const bool accumulate : {false, true}) {
    KernelCase take = make_case("take_channels", shape + (accumulate ? " accumulate" : ""), dtype,
                                bytes * (accumulate ? 1.5 : 1), tolerance(dtype));
    take.inputs = {y, x};
    take.run = [=](Tensors& in) {
      ops::take_channels(in[0], first, in[1], accumulate);
      return Tensors{in[1]};
    };
    take.reference = [=](const std::vector<Values>& in) {
      Values to(in[1].size());
      each([&](std::int64_t i, std::int64_t j) { to[i] = in[0][j]; });
      return std::vector<Values>{fp64::added(to, accumulate ? in[1] : Values())};
    };
    cases.push_back(std::move(take));
  }
}

void add_frames(Cases& cases, std::int64_t T, std::int64_t H, std::int64_t W, std::int64_t C,
                std::int64_t offset) {
  KernelCase c =
      make_case("frames_to_latent",
                fmt::format("T{} {}x{} C{}{}", T, H, W, C, offset == 0 ? "" : " misaligned"),
                DType::u8, 5.0 * static_cast<double>(T * H * W * C), 1e-6);
  const std::int64_t n = T * H * W * C;
  Tensor frames = Tensor::host({n + offset}, DType::u8);
  const Philox random(1, Purpose::synthetic, 0, 0);
  for (std::int64_t i = 0; i < n + offset; ++i)
    frames.data<std::uint8_t>()[i] =
        static_cast<std::uint8_t>(random.u32(static_cast<std::uint32_t>(i)));
  c.inputs = {frames};
  c.run = [=](Tensors& in) {
    Tensor x0 = Tensor::empty({C, T, H, W}, DType::f32);
    ops::frames_to_latent(in[0].slice(offset, n + offset).view({T, H, W, C}), x0);
    return Tensors{x0};
  };
  cases.push_back(std::move(c));
}

// Values on both sides of [-1,1], at its ends and not finite, `offset` floats into their tensor.
void add_pixels(Cases& cases, std::int64_t T, std::int64_t H, std::int64_t W, std::int64_t offset) {
  KernelCase c = make_case("frames_to_pixels",
                           fmt::format("T{} {}x{}{}", T, H, W, offset == 0 ? "" : " misaligned"),
                           DType::f32, 5.0 * static_cast<double>(T * H * W * 3), 0);
  const std::int64_t n = T * H * W * 3;
  Tensor frames = random_tensor({n + offset}, DType::f32, 11);
  float* x = frames.data<float>() + offset;
  x[0] = -1.0f, x[n / 2] = 1.0f, x[n - 1] = INFINITY;
  if (n > 100) x[50] = -INFINITY, x[99] = NAN;
  c.inputs = {frames};
  c.run = [=](Tensors& in) {
    Tensor pixels = Tensor::empty({T, H, W, 3}, DType::u8), bad = Tensor::empty({T}, DType::i32);
    ops::fill_zero(bad);
    ops::frames_to_pixels(in[0].slice(offset, n + offset).view({T, H, W, 3}), pixels, bad);
    return Tensors{pixels, bad};
  };
  cases.push_back(std::move(c));
}

// f32 to the last bit: what a network was trained on.
void add_images(Cases& cases, const Shape& images, std::vector<std::int32_t> sizes,
                ops::PixelScale scale, DType dtype) {
  const std::int64_t H = images[1], W = images[2];
  KernelCase c = make_case("normalise_images",
                           fmt::format("{}{}", images.str(), scale.reversed ? " reversed" : ""),
                           dtype, (1 + width(dtype)) * static_cast<double>(images.numel()),
                           dtype == DType::f32 ? 0 : 1.0 / 256);
  const Tensor bytes = Tensor::host(images, DType::u8),
               valid = Tensor::host({images[0], 2}, DType::i32);
  for (std::int64_t i = 0; i < images.numel(); ++i)
    bytes.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 89 + i / 256);
  std::copy(sizes.begin(), sizes.end(), valid.data<std::int32_t>());
  c.inputs = {bytes, valid};
  c.run = [=](Tensors& in) {
    Tensor y = Tensor::empty({images[0], 1, H, W, 3}, dtype);
    ops::normalise_images(in[0], in[1], scale, y);
    return Tensors{y};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values y(images.numel());
    for (std::int64_t i = 0; i < images.numel(); ++i) {
      const std::int64_t k = i % 3, p = i / 3, n = p / W / H;
      if (p / W % H >= sizes[2 * n] || p % W >= sizes[2 * n + 1]) continue;
      const float byte = static_cast<float>(in[0][3 * p + (scale.reversed ? 2 - k : k)]);
      const float unit = byte / scale.divisor, centred = unit - scale.mean[k];
      y[i] = centred / scale.deviation[k];
    }
    return std::vector<Values>{y};
  };
  cases.push_back(std::move(c));
}
// Of ImageNet; and 0 to 255, blue first.
constexpr ops::PixelScale rgb{255, {0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}},
    bgr{1, {102.9801f, 115.9465f, 122.7717f}, {1, 1, 1}, true};

// Rows [N,T,H,W,4C] to pixels, and back.
void add_spread(Cases& cases, const Shape& rows, bool bias, DType dtype) {
  const std::int64_t H = rows[2], W = rows[3], C = rows[4] / 4;
  const Shape y{rows[0], rows[1], 2 * H, 2 * W, C};
  // f(element of the rows, element of y)
  const auto each = [=](auto f) {
    for (std::int64_t i = 0; i < rows.numel(); ++i) {
      const std::int64_t column = i % 2, row = i / 2 % 2, c = i / 4 % C, p = i / 4 / C;
      const std::int64_t w = p % W, h = p / W % H, frame = p / W / H;
      f(i, ((frame * 2 * H + 2 * h + row) * 2 * W + 2 * w + column) * C + c);
    }
  };
  const double bytes = 2 * static_cast<double>(rows.numel()) * width(dtype);
  KernelCase forward = make_case("spread_2x2_forward", rows.str() + (bias ? " bias" : ""), dtype,
                                 bytes, tolerance(dtype));
  forward.inputs = {random_tensor(rows, dtype, 1),
                    bias ? random_tensor({C}, DType::f32, 2) : Tensor()};
  forward.run = [=](Tensors& in) {
    Tensor to = Tensor::empty(y, dtype);
    ops::spread_2x2_forward(in[0], in[1], to);
    return Tensors{to};
  };
  forward.reference = [=](const std::vector<Values>& in) {
    Values to(in[0].size());
    each([&](std::int64_t i, std::int64_t o) { to[o] = in[0][i] + (bias ? in[1][o % C] : 0.0); });
    return std::vector<Values>{to};
  };
  cases.push_back(std::move(forward));
  if (bias) return;
  KernelCase backward = make_case("spread_2x2_backward", rows.str(), dtype, bytes, 0);
  backward.inputs = {random_tensor(y, dtype, 3)};
  backward.run = [=](Tensors& in) {
    Tensor drows = Tensor::empty(rows, dtype);
    ops::spread_2x2_backward(in[0], drows);
    return Tensors{drows};
  };
  backward.reference = [=](const std::vector<Values>& in) {
    Values drows(in[0].size());
    each([&](std::int64_t i, std::int64_t o) { drows[i] = in[0][o]; });
    return std::vector<Values>{drows};
  };
  cases.push_back(std::move(backward));
}

// Blocks of x [B,T,H,W,C] to G channels and back, each onto what is there or not.
void add_blocks(Cases& cases, const Shape& x, ops::Blocks k, std::int64_t G, bool accumulate,
                DType dtype) {
  const std::int64_t T = x[1], H = x[2], W = x[3], C = x[4], K = k.entries(), n = C * K / G;
  const Shape y{x[0], (T + k.front) / k.frames, H / k.side, W / k.side, G};
  // f(element of y, element of x) for each entry of each block that is not before the clip.
  const auto each = [=](auto f) {
    for (std::int64_t o = 0; o < y.numel(); ++o)
      for (std::int64_t e = o % G * n; e < (o % G + 1) * n; ++e) {
        const std::int64_t p = o / G, w = p % y[3], h = p / y[3] % y[2], t = p / y[3] / y[2] % y[1],
                           b = p / y[3] / y[2] / y[1];
        const std::int64_t c = e / K, dt = e % K / (k.side * k.side);
        std::int64_t dy = e / k.side % k.side, dx = e % k.side;
        if (k.columns_first) std::swap(dy, dx);
        const std::int64_t frame = t * k.frames + dt - k.front;
        if (frame < 0) continue;
        f(o, (((b * T + frame) * H + h * k.side + dy) * W + w * k.side + dx) * C + c);
      }
  };
  const std::string shape =
      fmt::format("x {} to {}, {}x{}x{}{}{}{}", x.str(), G, k.frames, k.side, k.side,
                  k.front > 0 ? " front" : "", k.columns_first ? " columns first" : "",
                  accumulate ? " added" : "");
  const double bytes = static_cast<double>(x.numel() + y.numel()) * width(dtype);
  constexpr float scale = 0.75f;
  const auto add = [&](const char* op, const Shape& from, const Shape& to, bool to_deep) {
    KernelCase c = make_case(op, shape, dtype, bytes, 2 * tolerance(dtype));
    c.inputs = {random_tensor(from, dtype, 1), random_tensor(to, dtype, 2)};
    c.run = [=](Tensors& in) {
      if (to_deep)
        ops::space_to_depth(in[0], k, scale, accumulate, in[1]);
      else
        ops::depth_to_space(in[0], k, scale, accumulate, in[1]);
      return Tensors{in[1]};
    };
    c.reference = [=](const std::vector<Values>& in) {
      Values out = accumulate ? in[1] : Values(in[1].size());
      each([&](std::int64_t o, std::int64_t i) {
        if (to_deep)
          out[o] += scale * in[0][i];
        else
          out[i] += scale * in[0][o];
      });
      return std::vector<Values>{out};
    };
    cases.push_back(std::move(c));
  };
  add("space_to_depth", x, y, true);
  add("depth_to_space", y, x, false);
}

// Rows [N,T,H,W,9C] to squares of 4x4.
void add_spread_4x4(Cases& cases, const Shape& rows, DType dtype) {
  const std::int64_t H = rows[2], W = rows[3], C = rows[4] / 9;
  const Shape y{rows[0], rows[1], 4 * H, 4 * W, C};
  KernelCase c = make_case("spread_4x4", rows.str(), dtype,
                           static_cast<double>(rows.numel() + y.numel()) * width(dtype), 0);
  c.inputs = {random_tensor(rows, dtype, 1)};
  c.run = [=](Tensors& in) {
    Tensor to = Tensor::empty(y, dtype);
    ops::spread_4x4(in[0], to);
    return Tensors{to};
  };
  c.reference = [=](const std::vector<Values>& in) {
    constexpr std::int64_t place[] = {0, 1, 1, 2};
    Values to;
    for (std::int64_t f = 0; f < y[0] * y[1]; ++f)
      for (std::int64_t i = 0; i < y[2]; ++i)
        for (std::int64_t j = 0; j < y[3]; ++j)
          for (std::int64_t k = 0; k < C; ++k) {
            const std::int64_t pixel = (f * H + i / 4) * W + j / 4;
            to.push_back(in[0][(pixel * 9 + 3 * place[i % 4] + place[j % 4]) * C + k]);
          }
    return std::vector<Values>{to};
  };
  cases.push_back(std::move(c));
}

}  // namespace

void layout_cases(CaseSize size, Cases& cases) {
  if (size == CaseSize::real) {
    add_layouts(cases, {1, 3, 8, 480, 856}, DType::bf16);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_patches(cases, {2, 4, 15, 60, 106}, {1, 2, 2}, dtype);
      add_patches(cases, {8, 4, 4, 32, 32}, {1, 2, 2}, dtype);
    }
    // What one of 8 ranks sends to another between the blocks, two samples.
    add_copy(cases, {2, 2, 1590, 1152}, {2, 2, 199, 1152}, {2, 199, 0, 398, 0, 0}, DType::bf16);
    // The last feature map of a dilated ResNet-50 and a level of its pyramid.
    add_channels(cases, 2 * 64 * 64, 2048, 0, 4096, DType::bf16);
    add_images(cases, {2, 512, 688, 3}, {512, 688, 500, 640}, rgb, DType::bf16);
    // The head of DBNet at 1024x1024.
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const bool bias : {false, true}) {
        if (bias) {  // VAE 2.2, a chunk of 704x1280: around its encoder's and decoder's levels
          add_blocks(cases, {1, 4, 176, 320, 160}, {2, 2}, 320, true, dtype);
          add_blocks(cases, {1, 4, 352, 640, 256}, {1, 2}, 512, true, dtype);
        }
        add_spread(cases, {1, 1, 256, 256, 256}, bias, dtype);
        add_spread(cases, {1, 1, 512, 512, 4}, bias, dtype);
      }
    // A norm of the face renderer's last block at 256x256.
    for (const DType dtype : {DType::f32, DType::bf16})
      add_spread_4x4(cases, {1, 1, 64, 64, 9 * 128}, dtype);
    add_frames(cases, 51, 480, 848, 3, 0);
    add_pixels(cases, 4, 720, 1280, 0);
    return;
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_layouts(cases, {2, 3, 2, 3, 5}, dtype);
    add_layouts(cases, {1, 3, 3, 4, 6}, dtype);  // a frame of whole accesses
    add_patches(cases, {2, 4, 3, 6, 10}, {1, 2, 2}, dtype);
    add_patches(cases, {1, 3, 5, 7, 75}, {2, 2, 2}, dtype);  // edges on every axis, two strips
    add_patches(cases, {1, 1, 1, 1, 1}, {1, 2, 2}, dtype);
    add_patches(cases, {1, 5, 2, 3, 4}, {1, 1, 3}, dtype);  // rows of 15 elements
    add_copy(cases, {2, 5, 7, 3}, {2, 3, 11, 3}, {2, 4, 1, 3, 1, 6}, dtype);
    add_copy(cases, {1, 1, 9, 5}, {1, 1, 9, 5}, {1, 9, 0, 0, 0, 0}, dtype);
    add_copy(cases, {3, 2, 4, 8}, {3, 4, 4, 8}, {2, 0, 0, 1, 2, 1}, dtype);  // nothing to copy
    add_channels(cases, 10, 7, 3, 12, dtype);
    add_channels(cases, 6, 24, 16, 40, dtype);
    for (const ops::PixelScale& scale : {rgb, bgr})
      add_images(cases, {3, 17, 20, 3}, {17, 20, 11, 9, 0, 0}, scale, dtype);
    for (const bool bias : {false, true}) {
      add_spread(cases, {2, 1, 3, 5, 4 * 24}, bias, dtype);
      add_spread(cases, {1, 2, 2, 3, 4 * 37}, bias, dtype);  // a rest behind whole accesses
      add_spread(cases, {1, 1, 7, 9, 4}, bias, dtype);       // one channel
    }
    for (const bool added : {false, true}) {
      add_blocks(cases, {1, 3, 4, 6, 8}, {2, 2, 1}, 16, added, dtype);
      add_blocks(cases, {2, 4, 2, 2, 6}, {2, 2}, 6, added, dtype);
      add_blocks(cases, {1, 2, 6, 4, 3}, {1, 2, 0, true}, 12, added, dtype);
      add_blocks(cases, {1, 2, 3, 5, 7}, {1, 1}, 7, added, dtype);
    }
    add_spread_4x4(cases, {2, 1, 3, 5, 9 * 16}, dtype);
    add_spread_4x4(cases, {1, 2, 1, 2, 9 * 7}, dtype);  // a value an access
  }
  add_frames(cases, 1, 1, 1, 3, 0);
  add_frames(cases, 3, 20, 36, 3, 0);  // whole packs, a part of a block at the end
  add_frames(cases, 2, 19, 29, 3, 0);  // planes that are not aligned
  add_frames(cases, 2, 8, 8, 3, 5);
  add_frames(cases, 2, 8, 9, 4, 0);
  add_pixels(cases, 1, 1, 1, 0);
  add_pixels(cases, 3, 20, 36, 0);
  add_pixels(cases, 2, 19, 29, 0);  // frames of 1653: one value an access
  add_pixels(cases, 2, 40, 52, 1);  // more than a block a frame
}

}  // namespace weft
