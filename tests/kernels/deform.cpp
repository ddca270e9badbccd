// Cases of ops/conv.h (kernels/conv/deform.cu beside src/ops/cpu/conv/deform.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ops/conv.h"
#include "tests/kernels/cases.h"
#include "tests/kernels/fp64.h"

namespace weft {
namespace {

constexpr std::int64_t taps = ops::deform_taps, values = ops::deform_channels;

struct Size {
  Shape x;  // [N,T,H,W,C]
  ops::Conv conv;
  std::int64_t first, count;  // pixels of the result that are under way
  float spread;               // of the offsets, in pixels; 0: none
  const char* name;

  Shape result() const { return conv.output(x, values); }
};

// Calls f(tap, counted from the first, y, x, mask, element of the offsets of dy, of the mask, first
// pixel of the frame).
template <class F>
void each_tap(const Size& s, const Values& offsets, F&& f) {
  const Shape to = s.result();
  for (std::int64_t i = 0; i < s.count * taps; ++i) {
    const std::int64_t p = s.first + i / taps, tap = i % taps;
    const std::int64_t dy = p * values + 2 * tap, mask = p * values + 2 * taps + tap;
    const auto y = static_cast<double>(p / to[3] % to[2] * s.conv.stride - s.conv.top +
                                       tap / 3 * s.conv.dilation),
               x = static_cast<double>(p % to[3] * s.conv.stride - s.conv.left +
                                       tap % 3 * s.conv.dilation);
    f(i, y + offsets[dy], x + offsets[dy + 1], fp64::sigmoid(offsets[mask]), dy, mask,
      p / to[3] / to[2] * s.x[2] * s.x[3]);
  }
}

// Calls f(pixel, share, share's slope by y, by x) for the pixels of the frame that (y, x) lies
// between.
template <class F>
void each_neighbour(const Size& s, double y, double x, std::int64_t frame, F&& f) {
  if (y <= -1 || y >= static_cast<double>(s.x[2]) || x <= -1 || x >= static_cast<double>(s.x[3]))
    return;
  const auto row = static_cast<std::int64_t>(std::floor(y)),
             column = static_cast<std::int64_t>(std::floor(x));
  for (std::int64_t r = row; r <= row + 1; ++r)
    for (std::int64_t q = column; q <= column + 1; ++q) {
      if (r < 0 || r >= s.x[2] || q < 0 || q >= s.x[3]) continue;
      const double down = 1 - std::abs(y - static_cast<double>(r)),
                   across = 1 - std::abs(x - static_cast<double>(q));
      f(frame + r * s.x[3] + q, down * across, (r == row ? -1 : 1) * across,
        (q == column ? -1 : 1) * down);
    }
}

void add_size(Cases& cases, const Size& s, DType dtype) {
  const std::int64_t C = s.x[4], pixels = s.x.numel() / C;
  const Shape columns{s.count, taps, C};
  const std::string text = fmt::format("{} N{} T{} {}x{} C{} pixels {}+{}", s.name, s.x[0], s.x[1],
                                       s.x[2], s.x[3], C, s.first, s.count);
  const Tensor x = random_tensor(s.x, dtype, 1),
               offsets = random_tensor(s.result(), dtype, 2, s.spread),
               dcolumns = random_tensor(columns, dtype, 3),
               doffsets = random_tensor(s.result(), dtype, 4),
               dx = random_tensor(s.x, DType::f32, 5);
  // The part of x that is read, at the least: as much as there are pixels, of all.
  const std::int64_t part = std::min(s.x.numel(), s.count * s.conv.stride * s.conv.stride * C);
  cases.push_back(bandwidth_case("deform_columns", text, dtype,
                                 part + s.count * values + columns.numel(), {x, offsets},
                                 [=](std::vector<Tensor>& in) {
                                   Tensor to = Tensor::empty(columns, dtype);
                                   ops::deform_columns(in[0], in[1], s.conv, s.first, to);
                                   return std::vector<Tensor>{to};
                                 }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values to(columns.numel());
    each_tap(s, in[1],
             [&](std::int64_t i, double at_y, double at_x, double mask, std::int64_t, std::int64_t,
                 std::int64_t frame) {
               each_neighbour(s, at_y, at_x, frame,
                              [&](std::int64_t pixel, double share, double, double) {
                                for (std::int64_t c = 0; c < C; ++c)
                                  to[i * C + c] += share * mask * in[0][pixel * C + c];
                              });
             });
    return std::vector<Values>{to};
  };

  cases.push_back(bandwidth_case(
      "deform_backward_offsets", text, dtype, part + 2 * s.count * values + columns.numel(),
      {x, offsets, dcolumns, doffsets}, [=](std::vector<Tensor>& in) {
        ops::deform_backward_offsets(in[0], in[1], in[2], s.conv, s.first, in[3]);
        return std::vector<Tensor>{in[3]};
      }));
  cases.back().reference = [=](const std::vector<Values>& in) {
    Values to = in[3];
    each_tap(s, in[1],
             [&](std::int64_t i, double at_y, double at_x, double mask, std::int64_t dy,
                 std::int64_t logit, std::int64_t frame) {
               to[dy] = to[dy + 1] = to[logit] = 0;
               each_neighbour(s, at_y, at_x, frame,
                              [&](std::int64_t pixel, double share, double by_y, double by_x) {
                                double along = 0;
                                for (std::int64_t c = 0; c < C; ++c)
                                  along += in[2][i * C + c] * in[0][pixel * C + c];
                                to[dy] += along * mask * by_y;
                                to[dy + 1] += along * mask * by_x;
                                to[logit] += along * share * mask * (1 - mask);
                              });
             });
    return std::vector<Values>{to};
  };

  auto input =
      bandwidth_case("deform_backward_input", text, dtype, s.count * values + columns.numel(),
                     {offsets, dcolumns, dx}, [=](std::vector<Tensor>& in) {
                       ops::deform_backward_input(in[0], in[1], s.conv, s.first, in[2]);
                       return std::vector<Tensor>{in[2]};
                     });
  input.bytes += 8 * static_cast<double>(std::min(pixels * C, part));
  input.tolerance = 2e-5;  // f32 sums, of either type
  input.reference = [=](const std::vector<Values>& in) {
    Values to = in[2];
    each_tap(s, in[0],
             [&](std::int64_t i, double at_y, double at_x, double mask, std::int64_t, std::int64_t,
                 std::int64_t frame) {
               each_neighbour(s, at_y, at_x, frame,
                              [&](std::int64_t pixel, double share, double, double) {
                                for (std::int64_t c = 0; c < C; ++c)
                                  to[pixel * C + c] += share * mask * in[1][i * C + c];
                              });
             });
    return std::vector<Values>{to};
  };
  cases.push_back(std::move(input));
}

}  // namespace

void deform_cases(CaseSize size, Cases& cases) {
  using ops::Conv;
  if (size == CaseSize::real) {
    // layer2 to layer4 of a detector's ResNet-50 on pictures of 640x640: bands of 64 MiB of
    // columns, offsets of a trained network and of a new one.
    for (const float spread : {2.0f, 0.0f})
      for (const Size& s :
           {Size{{16, 1, 80, 80, 128}, Conv::strided(3, 1), 6400, 29127, spread, ""},
            Size{{16, 1, 40, 40, 256}, Conv::strided(3, 1), 0, 14563, spread, ""},
            Size{{16, 1, 20, 20, 512}, Conv::strided(3, 1), 0, 6400, spread, ""}})
        add_size(cases, s, DType::bf16);
    return;
  }
  // Offsets that leave the frame, none at all, and so wide ones that most places are outside;
  // pixels with hundreds of readers; several frames, bands in the midst of a frame; channels that
  // fill no vector; one pixel.
  const Size sizes[] = {
      {{2, 1, 5, 6, 8}, Conv::strided(3, 1), 7, 40, 1.5f, "same"},
      {{1, 2, 6, 5, 40}, Conv::strided(3, 1), 0, 60, 1.0f, "frames"},
      {{2, 1, 7, 6, 3}, Conv::strided(3, 2), 3, 20, 1.0f, "stride 2"},
      {{1, 1, 4, 5, 64}, Conv::strided(3, 1), 3, 12, 1.0f, "several accesses"},
      {{1, 1, 7, 5, 5}, Conv::strided(3, 1, 2), 0, 35, 0.7f, "dilated"},
      {{1, 1, 6, 6, 16}, Conv::strided(3, 1), 5, 30, 0.0f, "no offsets"},
      {{1, 1, 4, 4, 8}, Conv::strided(3, 1), 0, 16, 40.0f, "outside"},
      {{1, 1, 2, 2, 8}, Conv{1, 3, 3, 1, 1, 0, 7, 7, 7, 7, false}, 0, 196, 5.0f, "crowded"},
      {{1, 1, 1, 1, 1}, Conv::strided(3, 1), 0, 1, 0.5f, "one"}};
  for (const Size& s : sizes)
    for (const DType dtype : {DType::f32, DType::bf16}) add_size(cases, s, dtype);
}

}  // namespace weft
