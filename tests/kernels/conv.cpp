// Cases of ops/conv.h (kernels/conv/ beside src/ops/cpu/conv/).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/conv.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

struct Size {
  Shape x;  // [N,T,H,W,Cin]
  std::int64_t out;
  ops::Conv conv;
  const char* name;

  Shape y() const { return conv.output(x, out); }
  Shape w() const {
    if (conv.kt == 1) return {out, x[4] / conv.groups, conv.kh, conv.kw};
    return {out, x[4] / conv.groups, conv.kt, conv.kh, conv.kw};
  }
  double terms() const { return static_cast<double>(w().numel() / out); }
  double flops() const { return 2.0 * static_cast<double>(y().numel()) * terms(); }
};

// Calls f(element of y, element of x, element of w) for every product of the convolution.
template <class F>
void each_product(const Size& s, F&& f) {
  const ops::Conv& k = s.conv;
  const Shape y = s.y();
  const std::int64_t up = k.upsample ? 2 : 1, I = s.x[4], O = s.out;
  const std::int64_t ins = I / k.groups, outs = O / k.groups;
  for (std::int64_t p = 0; p < y[0] * y[1] * y[2] * y[3]; ++p) {
    const std::int64_t n = p / (y[1] * y[2] * y[3]), to = p / (y[2] * y[3]) % y[1];
    const std::int64_t ho = p / y[3] % y[2], wo = p % y[3];
    for (int a = 0; a < k.kt; ++a)
      for (int b = 0; b < k.kh; ++b)
        for (int c = 0; c < k.kw; ++c) {
          const std::int64_t t = to * k.stride_t + a - k.front,
                             h = ho * k.stride + b * k.dilation - k.top,
                             w = wo * k.stride + c * k.dilation - k.left;
          if (t < 0 || t >= s.x[1] || h < 0 || h >= up * s.x[2] || w < 0 || w >= up * s.x[3])
            continue;
          const std::int64_t from = ((n * s.x[1] + t) * s.x[2] + h / up) * s.x[3] + w / up;
          for (std::int64_t o = 0; o < O; ++o)
            for (std::int64_t i = 0; i < ins; ++i)
              f(p * O + o, from * I + o / outs * ins + i,
                (((o * ins + i) * k.kt + a) * k.kh + b) * k.kw + c);
        }
  }
}

KernelCase make(const char* op, const Size& s, DType dtype, const std::string& variant,
                double values) {
  KernelCase c;
  c.op = op;
  c.shape = fmt::format("{} N{} T{} {}x{} C{}-{}{}", s.name, s.x[0], s.x[1], s.x[2], s.x[3], s.x[4],
                        s.out, variant);
  c.dtype = dtype;
  c.bytes = values * static_cast<double>(size_of(dtype));
  c.flops = s.flops();
  c.bound = Bound::tensor_cores;
  // f32: sums in another order. bf16: operands are the same, the result is rounded once more where
  // the library does not fuse what is added, and the weights of an upsampled convolution's phases
  // are sums, rounded.
  c.tolerance = dtype == DType::bf16 ? 1.0 / 64 : 2e-5;
  return c;
}

void add_forward(Cases& cases, const Size& s, DType dtype, bool bias, bool residual,
                 bool in_place) {
  const double x = static_cast<double>(s.x.numel()), y = static_cast<double>(s.y().numel());
  auto c = make("conv_forward", s, dtype,
                std::string(bias ? " bias" : "") + (residual ? " residual" : "") +
                    (in_place ? " in place" : ""),
                x + static_cast<double>(s.w().numel()) + y * (residual ? 2 : 1));
  c.inputs = {random_tensor(s.x, dtype, 1),
              random_tensor(s.w(), dtype, 2, 1.0f / std::sqrt(static_cast<float>(s.terms()))),
              bias ? random_tensor({s.out}, DType::f32, 3) : Tensor(),
              residual ? random_tensor(s.y(), dtype, 4) : Tensor()};
  c.run = [=](std::vector<Tensor>& in) {
    Tensor y_to = in_place ? in[3] : Tensor::empty(s.y(), dtype);
    ops::conv_forward(in[0], in[1], in[2], in[3], s.conv, y_to);
    return std::vector<Tensor>{y_to};
  };
  c.reference = [=](const std::vector<Values>& in) {
    Values to = residual ? in[3] : Values(s.y().numel());
    each_product(s, [&](std::int64_t out, std::int64_t from, std::int64_t at) {
      to[out] += in[0][from] * in[1][at];
    });
    for (std::size_t i = 0; bias && i < to.size(); ++i) to[i] += in[2][i % s.out];
    return std::vector<Values>{to};
  };
  cases.push_back(std::move(c));
}

void add_backward(Cases& cases, const Size& s, DType dtype, bool accumulate) {
  const double x = static_cast<double>(s.x.numel()), y = static_cast<double>(s.y().numel()),
               w = static_cast<double>(s.w().numel());
  const char* variant = accumulate ? " accumulate" : "";
  auto input = make("conv_backward_input", s, dtype, variant, x * (accumulate ? 2 : 1) + w + y);
  const float spread =
      1.0f / std::sqrt(static_cast<float>(s.w().numel() / (s.x[4] / s.conv.groups)));
  input.inputs = {random_tensor(s.y(), dtype, 1), random_tensor(s.w(), dtype, 2, spread),
                  accumulate ? random_tensor(s.x, dtype, 3) : Tensor()};
  input.run = [=](std::vector<Tensor>& in) {
    Tensor dx = accumulate ? in[2] : Tensor::empty(s.x, dtype);
    ops::conv_backward_input(in[0], in[1], s.conv, dx, accumulate);
    return std::vector<Tensor>{dx};
  };
  input.reference = [=](const std::vector<Values>& in) {
    Values dx = accumulate ? in[2] : Values(s.x.numel());
    each_product(s, [&](std::int64_t out, std::int64_t from, std::int64_t at) {
      dx[from] += in[0][out] * in[1][at];
    });
    return std::vector<Values>{dx};
  };
  cases.push_back(std::move(input));

  auto weight = make("conv_backward_weight", s, dtype, variant, x + y);
  weight.bytes += w * (accumulate ? 8 : 4);
  if (dtype == DType::f32) weight.tolerance = 1e-4;  // sums over all positions
  weight.inputs = {random_tensor(s.x, dtype, 1), random_tensor(s.y(), dtype, 2),
                   accumulate ? random_tensor(s.w(), DType::f32, 3) : Tensor(),
                   accumulate ? random_tensor({s.out}, DType::f32, 4) : Tensor()};
  weight.run = [=](std::vector<Tensor>& in) {
    Tensor dw = accumulate ? in[2] : Tensor::empty(s.w(), DType::f32);
    Tensor db = accumulate ? in[3] : Tensor::empty({s.out}, DType::f32);
    ops::conv_backward_weight(in[0], in[1], s.conv, dw, db, accumulate);
    return std::vector<Tensor>{dw, db};
  };
  weight.reference = [=](const std::vector<Values>& in) {
    Values dw = accumulate ? in[2] : Values(s.w().numel());
    each_product(s, [&](std::int64_t out, std::int64_t from, std::int64_t at) {
      dw[at] += in[0][from] * in[1][out];
    });
    return std::vector<Values>{
        dw, fp64::added(fp64::column_sums(in[1], s.out), accumulate ? in[3] : Values())};
  };
  cases.push_back(std::move(weight));
}

void add_resize_taps(Cases& cases, std::int64_t H, std::int64_t W, std::vector<std::int64_t> levels,
                     DType dtype) {
  std::int64_t columns = 0;
  for (const std::int64_t s : levels) columns += 9 * s * s;
  const Shape shape{H, W, columns};
  auto c = bandwidth_case("resize_taps", shape.str(), dtype, shape.numel(), {},
                          [=](std::vector<Tensor>&) {
                            Tensor a = Tensor::empty(shape, dtype);
                            std::int64_t first = 0;
                            for (const std::int64_t s : levels) {
                              ops::resize_taps(s, first, a);
                              first += 9 * s * s;
                            }
                            return std::vector<Tensor>{a};
                          });
  c.reference = [=](const std::vector<Values>&) {
    // What a cell weighs in a pixel falls off linearly with the distance of their centres, in
    // cells; pixels beyond the first and the last centre are those cells' own.
    const auto weight = [](std::int64_t p, std::int64_t size, std::int64_t s, std::int64_t cell) {
      if (p < 0 || p >= size) return 0.0;
      const double at =
          (static_cast<double>(p) + 0.5) * static_cast<double>(s) / static_cast<double>(size) - 0.5;
      const double inside = std::clamp(at, 0.0, static_cast<double>(s - 1));
      return std::max(0.0, 1 - std::abs(inside - static_cast<double>(cell)));
    };
    Values a;
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t w = 0; w < W; ++w)
        for (const std::int64_t s : levels)
          for (std::int64_t k = 0; k < 9 * s * s; ++k)
            a.push_back(weight(h + k % 9 / 3 - 1, H, s, k / 9 / s) *
                        weight(w + k % 3 - 1, W, s, k / 9 % s));
    return std::vector<Values>{a};
  };
  cases.push_back(std::move(c));
}

// The weights of some input channels in both orders, out and back.
void add_input_channels(Cases& cases, const Shape& w, std::int64_t first, std::int64_t count,
                        DType dtype) {
  const std::int64_t out = w[0], taps = w[2] * w[3], n = out * count * taps;
  const std::string shape = fmt::format("{} channels {}+{}", w.str(), first, count);
  // The element of w that element i of the part in either order is.
  const auto place = [=](std::int64_t i, bool taps_first) {
    return taps_first ? (i / count % out * w[1] + first + i % count) * taps + i / count / out
                      : (i / taps / count * w[1] + first + i / taps % count) * taps + i % taps;
  };
  const Shape plain{out, count, w[2], w[3]}, turned{taps, out, count};
  auto take = bandwidth_case(
      "take_input_channels", shape, dtype, 4 * n, {random_tensor(w, dtype, 1)},
      [=](std::vector<Tensor>& in) {
        std::vector<Tensor> parts{Tensor::empty(plain, dtype), Tensor::empty(turned, dtype)};
        for (Tensor& to : parts) ops::take_input_channels(in[0], first, to);
        return parts;
      });
  take.reference = [=](const std::vector<Values>& in) {
    std::vector<Values> parts(2);
    for (std::int64_t i = 0; i < n; ++i)
      for (const bool taps_first : {false, true})
        parts[taps_first].push_back(in[0][place(i, taps_first)]);
    return parts;
  };
  cases.push_back(std::move(take));
  if (dtype != DType::f32) return;
  auto give = bandwidth_case(
      "give_input_channels", shape, dtype, 5 * n,
      {random_tensor(w, dtype, 1), random_tensor(plain, dtype, 2), random_tensor(turned, dtype, 3)},
      [=](std::vector<Tensor>& in) {
        ops::give_input_channels(in[1], first, in[0], false);
        ops::give_input_channels(in[2], first, in[0], true);
        return std::vector<Tensor>{in[0]};
      });
  give.reference = [=](const std::vector<Values>& in) {
    Values dw = in[0];
    for (std::int64_t i = 0; i < n; ++i) dw[place(i, false)] = in[1][i];
    for (std::int64_t i = 0; i < n; ++i) dw[place(i, true)] += in[2][i];
    return std::vector<Values>{dw};
  };
  cases.push_back(std::move(give));
}

}  // namespace

void conv_cases(CaseSize size, Cases& cases) {
  using ops::Conv;
  if (size == CaseSize::real) {
    // The decoder's heaviest levels at 480p, a frame of each, and the temporal decoder's on a chunk
    // of latents; layers of segmentation networks.
    const Size sizes[] = {{{1, 1, 480, 856, 128}, 128, Conv::same(3), "same"},
                          {{1, 1, 240, 428, 256}, 256, Conv::same(3), "same"},
                          {{1, 4, 60, 107, 512}, 512, Conv::same(3), "same"},
                          {{1, 1, 240, 428, 256}, 256, Conv::up(), "up"},
                          {{1, 1, 480, 856, 128}, 128, Conv::down(), "down"},
                          {{1, 17, 60, 107, 128}, 128, Conv::causal(3), "causal"},
                          {{1, 5, 60, 107, 512}, 512, Conv::causal(3), "causal"},
                          {{2, 1, 64, 64, 512}, 512, Conv::strided(3, 1, 4), "dilated"},
                          {{2, 1, 128, 128, 256}, 512, Conv::strided(1, 2), "1x1 stride 2"},
                          {{2, 1, 128, 128, 144}, 144, Conv::strided(3, 1, 1, 144), "depthwise"}};
    // A renderer of talking heads: its volumes, their mask, and the last layers of its image.
    const Size volumes[] = {{{1, 16, 64, 64, 80}, 64, Conv::volume(3), "volume"},
                            {{1, 16, 64, 64, 112}, 112, Conv::volume(3), "volume"},
                            {{1, 16, 8, 8, 256}, 512, Conv::volume(3), "volume"},
                            {{1, 16, 4, 4, 512}, 1024, Conv::volume(3), "volume"},
                            {{1, 16, 2, 2, 1024}, 512, Conv::volume_up(), "volume up"},
                            {{1, 16, 32, 32, 128}, 32, Conv::volume_up(), "volume up"},
                            {{1, 16, 64, 64, 112}, 16, Conv::volume(7), "volume 7"},
                            {{1, 1, 64, 64, 1792}, 1, Conv::same(7), "narrow"},
                            {{1, 1, 256, 256, 64}, 3, Conv::same(3), "narrow"}};
    for (const Size& s : volumes) add_forward(cases, s, DType::f32, true, false, false);
    for (const Size& s : sizes) {
      add_forward(cases, s, DType::bf16, true, s.conv.stride == 1 && !s.conv.upsample, false);
      add_backward(cases, s, DType::bf16, false);
    }
    add_forward(cases, sizes[2], DType::f32, true, true, false);
    // The head of a segmentation network.
    add_resize_taps(cases, 64, 64, {1, 2, 3, 6}, DType::bf16);
    for (const DType dtype : {DType::bf16, DType::f32})
      add_input_channels(cases, {512, 4096, 3, 3}, 2048, 512, dtype);
    return;
  }
  // A kernel of one element; sizes kept, halved and doubled; the causal kernels with both strides;
  // 5 channels, for which the stand-in for cuDNN fuses nothing; an odd number, for which it falls
  // back; a 4x4 kernel; frames of one row.
  const Size sizes[] = {{{2, 3, 3, 2, 8}, 4, Conv::same(1), "same 1"},
                        {{1, 2, 5, 6, 8}, 12, Conv::same(3), "same"},
                        {{1, 1, 4, 3, 3}, 5, Conv::same(3), "same"},
                        {{1, 2, 6, 4, 4}, 8, Conv::down(), "down"},
                        {{2, 1, 3, 4, 8}, 8, Conv::up(), "up"},
                        {{1, 3, 9, 5, 3}, 16, Conv::up(), "up"},
                        {{2, 4, 3, 5, 4}, 6, Conv::causal(3), "causal"},
                        {{1, 5, 4, 1, 6}, 4, Conv::causal(3, 2), "causal half"},
                        {{1, 3, 2, 2, 4}, 8, Conv::causal(1), "causal 1"},
                        {{2, 3, 5, 4, 3}, 6, Conv::volume(3), "volume"},
                        {{1, 5, 4, 9, 4}, 3, Conv::volume(7), "volume 7"},
                        {{1, 1, 3, 3, 4}, 4, Conv::volume(7), "volume 7"},
                        {{2, 3, 3, 2, 4}, 5, Conv::volume_up(), "volume up"},
                        {{1, 1, 1, 3, 8}, 8, Conv::volume_up(), "volume up"},
                        {{1, 3, 9, 12, 18}, 9, Conv::volume(7), "volume 7 wide"},
                        {{2, 1, 11, 8, 16}, 8, Conv::same(5), "same 5"},
                        {{2, 2, 8, 17, 20}, 10, Conv::same(7), "same 7"},
                        {{2, 1, 5, 9, 20}, 1, Conv::same(7), "narrow"},
                        {{1, 2, 4, 7, 17}, 2, Conv::same(5), "narrow"},
                        {{1, 1, 6, 7, 70}, 3, Conv::same(3), "narrow"},
                        {{1, 3, 5, 4, 16}, 4, Conv::volume(3), "narrow volume"},
                        {{1, 1, 7, 6, 3}, 4, Conv{1, 4, 4, 1, 2, 0, 1, 1, 1, 1, false}, "4x4"},
                        {{1, 1, 7, 6, 4}, 8, Conv::strided(3, 1, 2), "dilated"},
                        {{1, 1, 6, 9, 32}, 16, Conv::strided(3, 1, 2), "dilated"},
                        {{2, 1, 6, 5, 4}, 8, Conv::strided(3, 2), "stride 2"},
                        {{1, 1, 6, 5, 8}, 4, Conv::strided(1, 2), "1x1 stride 2"},
                        {{1, 1, 5, 6, 8}, 12, Conv::strided(3, 1, 1, 4), "groups 4"},
                        {{1, 1, 6, 5, 8}, 8, Conv::strided(3, 2, 1, 8), "depthwise stride 2"},
                        {{1, 1, 7, 6, 8}, 8, Conv::strided(3, 1, 2, 8), "depthwise dilated"}};
  for (const Size& s : sizes)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      add_forward(cases, s, dtype, true, false, false);
      add_forward(cases, s, dtype, true, true, dtype == DType::f32);
      if (dtype == DType::bf16) add_forward(cases, s, dtype, false, true, false);
      // oneDNN adds up the gradient of a kernel of 7x7x7 in an order that depends on the threads;
      // nothing trains one.
      for (const bool accumulate : {false, true})
        if (s.conv.kt < 7) add_backward(cases, s, dtype, accumulate);
    }
  // A batch without a sample has gradients of zero.
  for (const ops::Conv& conv : {Conv::same(3), Conv::up(), Conv::strided(3, 2)}) {
    const Size none{{0, 1, 6, 5, 8}, 4, conv, "no samples"};
    add_forward(cases, none, DType::bf16, true, true, false);
    for (const bool accumulate : {false, true}) add_backward(cases, none, DType::bf16, accumulate);
  }
  // Large enough for Winograd's transforms on the CPU: of planes and volumes, with few weights and
  // with many.
  const Size large[] = {{{1, 1, 33, 30, 128}, 112, Conv::same(3), "same"},
                        {{1, 7, 16, 17, 72}, 36, Conv::volume(3), "volume"},
                        {{1, 1, 16, 14, 352}, 368, Conv::strided(3, 1, 2), "dilated"},
                        {{1, 8, 5, 5, 256}, 232, Conv::volume(3), "volume"}};
  for (const Size& s : large) add_forward(cases, s, DType::f32, true, true, true);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    add_resize_taps(cases, 7, 5, {1, 3, 6}, dtype);  // 6 cells for 5 pixels: fewer than before
    add_input_channels(cases, {5, 11, 3, 3}, 4, 6, dtype);
  }
}

}  // namespace weft
