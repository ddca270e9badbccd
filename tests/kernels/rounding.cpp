#include "tests/kernels/rounding.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

#include "core/philox.h"
#include "tests/kernels/cases.h"

namespace weft {
namespace {

enum class Pass { forward, backward_input, backward_weight };

struct Data {
  Tensor x, w, dy;
};

Shape weight_shape(const RoundingShape& s) {
  const std::int64_t ins = s.x[4] / s.conv.groups;
  if (s.conv.kt == 1) return {s.out, ins, s.conv.kh, s.conv.kw};
  return {s.out, ins, s.conv.kt, s.conv.kh, s.conv.kw};
}

Data draw(const RoundingShape& s) {
  const Shape w = weight_shape(s);
  const double fan_in = static_cast<double>(w.numel() / s.out);
  Data d{random_tensor(s.x, DType::f32, 1),
         random_tensor(w, DType::f32, 2, static_cast<float>(std::sqrt(2 / fan_in))),
         random_tensor(s.conv.output(s.x, s.out), DType::f32, 3)};
  float* x = d.x.data<float>();
  for (std::int64_t i = 0; i < d.x.numel(); ++i) x[i] = std::max(x[i], 0.0f);
  return d;
}

// Sums of a pass in fp64 and in plain f32, for a choice of the result's elements.
struct Sums {
  std::vector<std::int64_t> places;  // in the result
  std::vector<double> exact;
  std::vector<float> plain;
  std::int64_t terms = 0;
};

// Adds a row of products to both.
void add_products(float factor, const float* row, std::int64_t n, double* exact, float* plain) {
  for (std::int64_t i = 0; i < n; ++i) {
    exact[i] += static_cast<double>(factor) * static_cast<double>(row[i]);
    plain[i] = std::fma(factor, row[i], plain[i]);
  }
}

struct Tap {
  std::int64_t t, h, w;  // of the kernel
};
Tap tap_of(const ops::Conv& c, std::int64_t k) {
  return {k / (c.kh * c.kw), k / c.kw % c.kh, k % c.kw};
}

// A pixel of [N,T,H,W,*] from its index, and back; -1 outside.
struct Pixel {
  std::int64_t n, t, h, w;
};
Pixel pixel_of(const Shape& s, std::int64_t i) {
  return {i / (s[1] * s[2] * s[3]), i / (s[2] * s[3]) % s[1], i / s[3] % s[2], i % s[3]};
}
std::int64_t index_of(const Shape& s, const Pixel& p) {
  if (p.t < 0 || p.t >= s[1] || p.h < 0 || p.h >= s[2] || p.w < 0 || p.w >= s[3]) return -1;
  return ((p.n * s[1] + p.t) * s[2] + p.h) * s[3] + p.w;
}

// The input pixel under a tap of output pixel p.
std::int64_t under(const RoundingShape& s, const Pixel& p, const Tap& k) {
  const ops::Conv& c = s.conv;
  return index_of(s.x,
                  {p.n, p.t * c.stride_t + k.t - c.front, p.h * c.stride + k.h * c.dilation - c.top,
                   p.w * c.stride + k.w * c.dilation - c.left});
}
// The output pixel whose tap lies on input pixel p.
std::int64_t above(const RoundingShape& s, const Shape& y, const Pixel& p, const Tap& k) {
  const ops::Conv& c = s.conv;
  const std::int64_t t = p.t + c.front - k.t, h = p.h + c.top - k.h * c.dilation,
                     w = p.w + c.left - k.w * c.dilation;
  if (t < 0 || h < 0 || w < 0 || t % c.stride_t != 0 || h % c.stride != 0 || w % c.stride != 0)
    return -1;
  return index_of(y, {p.n, t / c.stride_t, h / c.stride, w / c.stride});
}

// Both kinds of sums at random pixels: of the output from inputs, or of the input from gradients.
Sums pixel_sums(const RoundingShape& s, const Data& d, bool forward, double products) {
  const Shape y = s.conv.output(s.x, s.out), &to = forward ? y : s.x;
  const std::int64_t groups = s.conv.groups, taps = s.conv.kt * s.conv.kh * s.conv.kw;
  const std::int64_t from_channels = (forward ? s.x[4] : s.out) / groups,
                     to_channels = to[4] / groups, ins = s.x[4] / groups;
  Sums sums;
  sums.terms = taps * from_channels;
  // Weights as [groups][taps][from][to].
  std::vector<float> weights(static_cast<std::size_t>(d.w.numel()));
  const float* w = d.w.data<float>();
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t k = 0; k < taps; ++k)
      for (std::int64_t a = 0; a < from_channels; ++a)
        for (std::int64_t b = 0; b < to_channels; ++b) {
          const std::int64_t o = forward ? b : a, i = forward ? a : b;
          weights[static_cast<std::size_t>(((g * taps + k) * from_channels + a) * to_channels +
                                           b)] =
              w[((g * (s.out / groups) + o) * ins + i) * taps + k];
        }
  const float* from = forward ? d.x.data<float>() : d.dy.data<float>();
  const std::int64_t pixels = to.numel() / to[4];
  const auto count = static_cast<std::int64_t>(std::clamp(
      products / static_cast<double>(sums.terms * to[4]), 1.0, static_cast<double>(pixels)));
  const Philox random(5, Purpose::noise, 0, 0);
  for (std::int64_t q = 0; q < count; ++q) {
    // One of every `pixels / count` pixels.
    const std::int64_t first = q * pixels / count, beyond = (q + 1) * pixels / count;
    const std::int64_t place =
        first + random.block(static_cast<std::uint32_t>(q))[0] % (beyond - first);
    const Pixel p = pixel_of(to, place);
    const std::size_t at = sums.exact.size();
    sums.exact.resize(at + static_cast<std::size_t>(to[4]));
    sums.plain.resize(sums.exact.size());
    for (std::int64_t b = 0; b < to[4]; ++b) sums.places.push_back(place * to[4] + b);
    for (std::int64_t g = 0; g < groups; ++g)
      for (std::int64_t k = 0; k < taps; ++k) {
        const Tap tap = tap_of(s.conv, k);
        const std::int64_t other = forward ? under(s, p, tap) : above(s, y, p, tap);
        if (other < 0) continue;
        const float* values = from + (other * groups + g) * from_channels;
        for (std::int64_t a = 0; a < from_channels; ++a)
          add_products(values[a],
                       weights.data() + ((g * taps + k) * from_channels + a) * to_channels,
                       to_channels, sums.exact.data() + at + g * to_channels,
                       sums.plain.data() + at + g * to_channels);
      }
  }
  return sums;
}

// Both kinds of sums over all pixels, for some of the input channels.
Sums weight_sums(const RoundingShape& s, const Data& d, double products) {
  const Shape y = s.conv.output(s.x, s.out);
  const std::int64_t groups = s.conv.groups, taps = s.conv.kt * s.conv.kh * s.conv.kw;
  const std::int64_t ins = s.x[4] / groups, outs = s.out / groups, pixels = y.numel() / y[4];
  const auto count = static_cast<std::int64_t>(std::clamp(
      products / static_cast<double>(pixels * taps * outs), 1.0, static_cast<double>(s.x[4])));
  Sums sums;
  sums.terms = pixels;
  sums.exact.resize(static_cast<std::size_t>(count * taps * outs));
  sums.plain.resize(sums.exact.size());
  const float *x = d.x.data<float>(), *dy = d.dy.data<float>();
  for (std::int64_t q = 0; q < count; ++q) {
    const std::int64_t channel = q * s.x[4] / count, g = channel / ins;
    for (std::int64_t k = 0; k < taps; ++k)
      for (std::int64_t o = 0; o < outs; ++o)
        sums.places.push_back(((g * outs + o) * ins + channel % ins) * taps + k);
    for (std::int64_t p = 0; p < pixels; ++p)
      for (std::int64_t k = 0; k < taps; ++k) {
        const std::int64_t from = under(s, pixel_of(y, p), tap_of(s.conv, k));
        if (from < 0) continue;
        add_products(x[from * s.x[4] + channel], dy + p * s.out + g * outs, outs,
                     sums.exact.data() + (q * taps + k) * outs,
                     sums.plain.data() + (q * taps + k) * outs);
      }
  }
  return sums;
}

template <class At>
RoundingError error_of(const Sums& sums, At&& at) {
  double largest = 0, squares = 0, result = 0;
  for (std::size_t i = 0; i < sums.exact.size(); ++i) {
    const double off = std::abs(static_cast<double>(at(i)) - sums.exact[i]);
    if (!(off <= largest)) largest = off;  // a NaN stays
    squares += off * off;
    result += sums.exact[i] * sums.exact[i];
  }
  const auto n = static_cast<double>(sums.exact.size());
  const double scale = std::sqrt(result / n);
  return {largest / scale, std::sqrt(squares / n) / scale};
}

struct Side {
  const char* name;
  std::string (*algorithm)(const RoundingShape&, Pass);
  void (*take)(const RoundingShape&, Pass, const Data&, Tensor&);
  void (*library)(const RoundingShape&, Pass, const Data&, Tensor&);
};

// The algorithms of all sides that run here.
#ifdef __x86_64__
namespace side_v3 {
using namespace ops::cpu_v3;
#include "tests/kernels/rounding_side.h"
}  // namespace side_v3
namespace side_v4 {
using namespace ops::cpu_v4;
#include "tests/kernels/rounding_side.h"
}  // namespace side_v4

std::vector<Side> sides() {
  std::vector<Side> all{{"v3", side_v3::algorithm, side_v3::take, side_v3::library}};
  if (ops::cpu_is_v4()) all.push_back({"v4", side_v4::algorithm, side_v4::take, side_v4::library});
  return all;
}
#else
namespace side_generic {
using namespace ops::cpu_generic;
#include "tests/kernels/rounding_side.h"
}  // namespace side_generic

std::vector<Side> sides() {
  return {{"generic", side_generic::algorithm, side_generic::take, side_generic::library}};
}
#endif

void add_rows(const Side& side, const RoundingShape& s, Pass pass, const Data& d, const Sums& sums,
              std::vector<RoundingRow>& rows) {
  Tensor to = Tensor::host(pass == Pass::forward          ? s.conv.output(s.x, s.out)
                           : pass == Pass::backward_input ? s.x
                                                          : weight_shape(s),
                           DType::f32);
  const auto add = [&](std::string algorithm, bool taken, auto run) {
    run(s, pass, d, to);
    const float* values = to.data<float>();
    const RoundingError error =
        error_of(sums, [&](std::size_t i) { return values[sums.places[i]]; });
    const double begin = omp_get_wtime();
    run(s, pass, d, to);
    rows.push_back({std::move(algorithm), side.name, taken, error, omp_get_wtime() - begin});
  };
  const std::string algorithm = side.algorithm(s, pass);
  add(algorithm, true, side.take);
  // oneDNN's own backward is another than a forward with turned weights.
  if (algorithm != "product" && (algorithm != "oneDNN" || pass == Pass::backward_input))
    add("oneDNN", false, side.library);
}

}  // namespace

std::vector<RoundingCase> measure_rounding(const RoundingShape& s, double products) {
  const Data d = draw(s);
  std::vector<RoundingCase> cases;
  for (const Pass pass : {Pass::forward, Pass::backward_input, Pass::backward_weight}) {
    const Sums sums = pass == Pass::backward_weight
                          ? weight_sums(s, d, products)
                          : pixel_sums(s, d, pass == Pass::forward, products);
    RoundingCase c;
    c.shape = s.name;
    c.pass = pass == Pass::forward          ? "forward"
             : pass == Pass::backward_input ? "input gradient"
                                            : "weight gradient";
    c.terms = sums.terms;
    c.plain = error_of(sums, [&](std::size_t i) { return sums.plain[i]; });
    for (const Side& side : sides()) add_rows(side, s, pass, d, sums, c.rows);
    cases.push_back(std::move(c));
  }
  return cases;
}

std::vector<RoundingShape> rounding_shapes() {
  using ops::Conv;
  return {
      // Segmentation: the stem, ResNet-50 dilated on two images of 304x400, its head.
      {"ResNet stem", {2, 1, 304, 400, 3}, 64, Conv::strided(3, 2)},
      {"ResNet stem", {2, 1, 152, 200, 64}, 128, Conv::same(3)},
      {"ResNet layer1", {2, 1, 76, 100, 64}, 64, Conv::same(3)},
      {"ResNet layer1 1x1", {2, 1, 76, 100, 256}, 64, Conv::same(1)},
      {"ResNet layer2", {2, 1, 76, 100, 128}, 128, Conv::strided(3, 2)},
      {"ResNet layer2", {2, 1, 38, 50, 128}, 128, Conv::same(3)},
      {"ResNet layer3 dilated 2", {2, 1, 38, 50, 256}, 256, Conv::strided(3, 1, 2)},
      {"ResNet layer4 dilated 4", {2, 1, 38, 50, 512}, 512, Conv::strided(3, 1, 4)},
      {"ResNet layer4 1x1", {2, 1, 38, 50, 2048}, 512, Conv::same(1)},
      {"PPM head", {2, 1, 38, 50, 4096}, 512, Conv::same(3)},
      // ResNet-18 on images of 48x32.
      {"small ResNet layer1", {3, 1, 12, 8, 64}, 64, Conv::same(3)},
      {"small ResNet layer3", {3, 1, 6, 4, 256}, 256, Conv::strided(3, 1, 2)},
      {"small ResNet layer4", {3, 1, 6, 4, 512}, 512, Conv::strided(3, 1, 4)},
      {"small ResNet layer4 1x1", {3, 1, 6, 4, 256}, 512, Conv::same(1)},
      {"ResNeXt groups 32", {2, 1, 38, 50, 512}, 512, Conv::strided(3, 1, 1, 32)},
      {"MobileNet depthwise", {2, 1, 76, 100, 144}, 144, Conv::strided(3, 1, 1, 144)},
      {"MobileNet depthwise", {2, 1, 76, 100, 144}, 144, Conv::strided(3, 2, 1, 144)},
      {"HRNet", {2, 1, 76, 100, 48}, 48, Conv::same(3)},
      {"HRNet", {2, 1, 38, 50, 96}, 96, Conv::same(3)},
      {"HRNet", {2, 1, 19, 25, 192}, 192, Conv::same(3)},
      {"HRNet", {2, 1, 10, 13, 384}, 384, Conv::same(3)},
      {"DBNet neck", {1, 1, 160, 160, 256}, 64, Conv::same(3)},
      {"DBNet 7x7 stem", {1, 1, 320, 320, 3}, 64, Conv::strided(7, 2)},
      // Open-Sora's and Wan's VAE, their discriminator, LPIPS.
      {"VAE", {2, 1, 128, 128, 128}, 128, Conv::same(3)},
      {"VAE", {2, 1, 64, 64, 256}, 256, Conv::same(3)},
      {"VAE", {2, 1, 32, 32, 512}, 512, Conv::same(3)},
      {"VAE down", {2, 1, 128, 128, 128}, 128, Conv::down()},
      {"VAE conv_out", {2, 1, 128, 128, 128}, 3, Conv::same(3)},
      {"temporal VAE", {1, 17, 16, 16, 128}, 128, Conv::causal(3)},
      {"temporal VAE", {1, 5, 16, 16, 512}, 512, Conv::causal(3)},
      {"Wan VAE", {1, 9, 64, 64, 96}, 96, Conv::causal(3)},
      {"Wan VAE", {1, 5, 32, 32, 384}, 384, Conv::causal(3)},
      {"Wan VAE time", {1, 5, 32, 32, 192}, 384, {3, 1, 1, 1, 1, 2}},
      {"PatchGAN", {2, 1, 64, 64, 64}, 128, {1, 4, 4, 1, 2, 0, 1, 1, 1, 1}},
      {"LPIPS", {1, 1, 128, 128, 64}, 64, Conv::same(3)},
      {"LPIPS", {1, 1, 32, 32, 256}, 512, Conv::same(3)},
      // SadTalker.
      {"SadTalker 3D", {1, 16, 32, 32, 64}, 128, Conv::volume(3)},
      {"SadTalker 3D", {1, 16, 4, 4, 512}, 1024, Conv::volume(3)},
      {"SadTalker mask", {1, 16, 32, 32, 112}, 16, Conv::volume(7)},
      {"SadTalker 7x7", {1, 1, 128, 128, 3}, 64, Conv::same(7)},
      {"SPADE", {1, 1, 64, 64, 512}, 512, Conv::same(3)},
      // Products: an MLP of STDiT3-XL/2, T5's.
      {"MLP 1", {1, 1, 1, 2560, 1152}, 4608, Conv::same(1)},
      {"MLP 2", {1, 1, 1, 2560, 4608}, 1152, Conv::same(1)},
  };
}

}  // namespace weft
