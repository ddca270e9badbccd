#include "models/face/fan.h"

#include <algorithm>
#include <cmath>

#include "models/face/pixels.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {
namespace {

constexpr std::int64_t width = 256;  // channels of the hourglasses

// Above this the outline's map says that a pixel is on it.
constexpr float outline_threshold = 0.05f;

Tensor with_channels(const Tensor& x, const Tensor& more) {
  Tensor y =
      Tensor::empty({x.dim(0), x.dim(1), x.dim(2), x.dim(3), x.dim(4) + more.dim(4)}, x.dtype());
  ops::put_channels(x, 0, y);
  ops::put_channels(more, x.dim(4), y);
  return y;
}

Tensor half_size(const Tensor& x) {
  Tensor y = Tensor::empty({x.dim(0), x.dim(1), x.dim(2) / 2, x.dim(3) / 2, x.dim(4)}, x.dtype());
  ops::average_pool_2x2_forward(x, y);
  return y;
}

// Whether each pixel of maps [1,1,h,w,99] is on the outline.
std::vector<bool> outline_of(const Tensor& maps) {
  Tensor last = Tensor::empty({1, 1, maps.dim(2), maps.dim(3), 1}, maps.dtype());
  ops::take_channels(maps, Fan::maps - 1, last, false);
  last = in_f32(last);
  std::vector<bool> on(static_cast<std::size_t>(last.numel()), false);
  if (Arena::current().is_planning()) return on;
  const Tensor host = last.to_host();
  const auto values = host.span<float>();
  std::transform(values.begin(), values.end(), on.begin(),
                 [](float v) { return v > outline_threshold; });
  return on;
}

// x, and behind its channels row and column from -1 to 1 and the distance from the middle, 1 in the
// corners; with the maps of the hourglass before also row and column on the outline, 0 elsewhere.
Tensor with_coordinates(const Tensor& x, const Tensor& maps) {
  const std::int64_t h = x.dim(2), w = x.dim(3);
  const std::vector<bool> on = maps.defined() ? outline_of(maps) : std::vector<bool>();
  const std::int64_t channels = maps.defined() ? 5 : 3;
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(h * w * channels));
  const float most = std::sqrt(2.0f);
  for (std::int64_t i = 0; i < h; ++i)
    for (std::int64_t j = 0; j < w; ++j) {
      const float row = static_cast<float>(i) / static_cast<float>(h - 1) * 2 - 1;
      const float column = static_cast<float>(j) / static_cast<float>(w - 1) * 2 - 1;
      values.insert(values.end(), {row, column, std::sqrt(row * row + column * column) / most});
      if (on.empty()) continue;
      const bool here = on[static_cast<std::size_t>(i * w + j)];
      values.insert(values.end(), {here ? row : 0.0f, here ? column : 0.0f});
    }
  Tensor coordinates = Tensor::from_host(std::span<const float>(values), {1, 1, h, w, channels});
  if (x.dtype() != DType::f32) {
    Tensor rounded = Tensor::empty(coordinates.shape(), x.dtype());
    ops::convert(coordinates, rounded);
    coordinates = rounded;
  }
  return with_channels(x, coordinates);
}

}  // namespace

Fan::Fan(std::int64_t stacks) : net_(params_, "") {
  stem_ = net_.add("conv1.conv", "bn1", 3 + 3, 64, ops::Conv::strided(7, 2), true);
  entry_ = {add_block("conv2", 64, 128), add_block("conv3", 128, 128),
            add_block("conv4", 128, width)};
  for (std::int64_t i = 0; i < stacks; ++i) stacks_.push_back(add_stack(i, i + 1 == stacks));
}

Fan::Block Fan::add_block(const std::string& name, std::int64_t in, std::int64_t out) {
  const std::array<std::int64_t, 4> widths = {in, out / 2, out / 4, out / 4};
  Block b;
  for (std::size_t i = 0; i < b.convs.size(); ++i) {
    b.norms[i] = net_.add_norm(fmt::format("{}.bn{}", name, i + 1), widths[i]);
    b.convs[i] = net_.add(fmt::format("{}.conv{}", name, i + 1), "", widths[i], widths[i + 1],
                          ops::Conv::same(3));
  }
  if (in != out) {
    b.skip_norm = net_.add_norm(name + ".downsample.0", in);
    b.skip = net_.add(name + ".downsample.2", "", in, out, ops::Conv::same(1));
  }
  return b;
}

Fan::Stack Fan::add_stack(std::int64_t i, bool last) {
  const auto conv = [&](const char* name, std::int64_t in, std::int64_t out, const char* norm) {
    return net_.add(fmt::format("{}{}", name, i), *norm == '\0' ? "" : fmt::format("{}{}", norm, i),
                    in, out, ops::Conv::same(1), true);
  };
  Stack s;
  // The first sees no outline yet.
  const std::string m = fmt::format("m{}.", i);
  s.coordinates =
      net_.add(m + "coordconv.conv", "", width + (i == 0 ? 3 : 5), width, ops::Conv::same(1), true);
  for (int level = depth; level > 0; --level) {
    const auto block = [&](const char* name) {
      return add_block(fmt::format("{}{}_{}", m, name, level), width, width);
    };
    Level& l = s.levels[static_cast<std::size_t>(level - 1)];
    l = {block("b1"), block("b2"), block("b3")};
    if (level == 1) s.middle = block("b2_plus");
  }
  s.top = add_block(fmt::format("top_m_{}", i), width, width);
  s.last = conv("conv_last", width, width, "bn_end");
  s.maps = conv("l", width, maps, "");
  if (!last) {
    s.features_back = conv("bl", width, width, "");
    s.maps_back = conv("al", maps, width, "");
  }
  return s;
}

Tensor Fan::block(const Block& b, const Tensor& x) {
  const std::int64_t out = b.skip != nullptr ? b.skip->out : x.dim(4);
  Tensor y = Tensor::empty({x.dim(0), x.dim(1), x.dim(2), x.dim(3), out}, x.dtype());
  Tensor part = x;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < b.convs.size(); ++i) {
    Tensor active = Tensor::empty(part.shape(), part.dtype());
    normalise(*b.norms[i], part, true, active);
    part = convolve(*b.convs[i], active);
    ops::put_channels(part, first, y);
    first += part.dim(4);
  }
  if (b.skip == nullptr) {
    ops::add_inplace(x, y);
    return y;
  }
  Tensor active = Tensor::empty(x.shape(), x.dtype());
  normalise(*b.skip_norm, x, true, active);
  return convolve(*b.skip, active, 1, y);
}

Tensor Fan::hourglass(const Stack& s, int level, const Tensor& x) {
  const Level& l = s.levels[static_cast<std::size_t>(level - 1)];
  Tensor y = block(l.beside, x);
  Tensor low = block(l.before, half_size(x));
  low = level > 1 ? hourglass(s, level - 1, low) : block(s.middle, low);
  ops::nearest_forward(block(l.after, low), 0, y, true);
  return y;
}

Tensor Fan::forward(const Tensor& image) const {
  Tensor x = convolve(*stem_, with_coordinates(image, {}), 0);
  x = half_size(block(entry_[0], x));
  x = block(entry_[2], block(entry_[1], x));
  Tensor found;
  for (const Stack& s : stacks_) {
    Tensor y = convolve(*s.coordinates, with_coordinates(x, found));
    y = convolve(*s.last, block(s.top, hourglass(s, depth, y)), 0);
    found = convolve(*s.maps, y);
    if (s.features_back == nullptr) break;
    x = convolve(*s.features_back, y, 1, x);
    x = convolve(*s.maps_back, found, 1, x);
  }
  return found;
}

WeightNames fan_weight_names() {
  WeightNames names;
  names.section = "sadtalker";
  names.spare = counts_batches;
  return names;
}

}  // namespace weft
