#include "models/sadtalker/face/landmarks.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/images.h"
#include "models/sadtalker/face/crop.h"
#include "models/sadtalker/options.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {
namespace {

constexpr std::int64_t hourglass_channels = 256;

// Above this the outline's map says that a pixel is on it.
constexpr float outline_threshold = 0.05f;

// Whether each pixel of maps [1,1,h,w,99] is on the outline.
std::vector<bool> outline_of(const Tensor& maps) {
  Tensor last = Tensor::empty({1, 1, maps.dim(2), maps.dim(3), 1}, maps.dtype());
  ops::take_channels(maps, Fan::maps - 1, last, false);
  last = ops::converted(last, DType::f32);
  std::vector<bool> on(last.numel(), false);
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
  values.reserve(h * w * channels);
  const float most = std::sqrt(2.0f);
  for (std::int64_t i = 0; i < h; ++i)
    for (std::int64_t j = 0; j < w; ++j) {
      const float row = static_cast<float>(i) / static_cast<float>(h - 1) * 2 - 1;
      const float column = static_cast<float>(j) / static_cast<float>(w - 1) * 2 - 1;
      values.insert(values.end(), {row, column, std::sqrt(row * row + column * column) / most});
      if (on.empty()) continue;
      const bool here = on[i * w + j];
      values.insert(values.end(), {here ? row : 0.0f, here ? column : 0.0f});
    }
  Tensor coordinates = Tensor::from_host(std::span<const float>(values), {1, 1, h, w, channels});
  if (x.dtype() != DType::f32) {
    Tensor rounded = Tensor::empty(coordinates.shape(), x.dtype());
    ops::convert(coordinates, rounded);
    coordinates = rounded;
  }
  return join_channels(x, coordinates);
}

}  // namespace

Fan::Fan(std::int64_t stacks) : net_(params_, "") {
  stem_ = net_.add("conv1.conv", "bn1", 3 + 3, 64, ops::Conv::strided(7, 2), true);
  entry_ = {add_block("conv2", 64, 128), add_block("conv3", 128, 128),
            add_block("conv4", 128, hourglass_channels)};
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
  constexpr std::int64_t width = hourglass_channels;
  Stack s;
  // The first sees no outline yet.
  const std::string m = fmt::format("m{}.", i);
  s.coordinates =
      net_.add(m + "coordconv.conv", "", width + (i == 0 ? 3 : 5), width, ops::Conv::same(1), true);
  for (int level = depth; level > 0; --level) {
    const auto block = [&](const char* name) {
      return add_block(fmt::format("{}{}_{}", m, name, level), width, width);
    };
    Level& l = s.levels[level - 1];
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
  const std::int64_t out = b.skip != nullptr ? b.skip->out.channels : x.dim(4);
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
  const Level& l = s.levels[level - 1];
  Tensor y = block(l.beside, x);
  Tensor low = block(l.before, halve(x));
  low = level > 1 ? hourglass(s, level - 1, low) : block(s.middle, low);
  ops::nearest_forward(block(l.after, low), 0, y, true);
  return y;
}

Tensor Fan::forward(const Tensor& image) const {
  Tensor x = convolve(*stem_, with_coordinates(image, {}), 0);
  x = halve(block(entry_[0], x));
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
  return names;
}

namespace {

constexpr std::int64_t map_size = heatmap_side * heatmap_side;

double sign(float v) { return v > 0 ? 1 : v < 0 ? -1 : 0; }

}  // namespace

Points98 decode_heatmaps(std::span<const float> maps, std::int64_t height, std::int64_t width) {
  WEFT_ASSERT(std::ssize(maps) == heatmap_points * map_size);
  check_finite(maps, "the landmark network");
  std::array<std::int64_t, heatmap_points> peaks{};
  bool last_row = false, first_row = false;
  for (std::size_t p = 0; p < peaks.size(); ++p) {
    const auto map = maps.subspan(p * map_size, map_size);
    peaks[p] = std::ranges::max_element(map) - map.begin();
    last_row |= peaks[p] + heatmap_side >= map_size;
    first_row |= peaks[p] - heatmap_side <= 0;
  }
  Points98 points;
  for (std::size_t p = 0; p < peaks.size(); ++p) {
    const auto value = [&](std::int64_t i) {
      return maps[p * map_size + static_cast<std::size_t>(i)];
    };
    const std::int64_t at = peaks[p];
    const float right = value(std::min(at + 1, map_size - 1)),
                left = value(at > 0 ? at - 1 : map_size - 1),
                below = value(last_row ? map_size - 1 : at + heatmap_side),
                above = value(first_row ? 0 : at - heatmap_side);
    points[p] = {(static_cast<double>(at % heatmap_side) + 0.25 * sign(right - left) + 0.5) *
                     (static_cast<double>(width) / heatmap_side),
                 (static_cast<double>(at / heatmap_side) + 0.25 * sign(below - above) + 0.5) *
                     (static_cast<double>(height) / heatmap_side)};
  }
  return points;
}

Landmarks to_68(const Points98& points) {
  // A point of the 98, or the mean of two.
  struct Source {
    std::size_t a, b;
  };
  static const std::vector<Source> sources = [] {
    std::vector<Source> all;
    const auto one = [&](std::size_t a) { all.push_back({a, a}); };
    for (std::size_t i = 0; i <= 32; i += 2) one(i);  // jaw
    one(33);                                          // brows
    for (const Source s : {Source{34, 41}, Source{35, 40}, Source{36, 39}, Source{37, 38},
                           Source{42, 50}, Source{43, 49}, Source{44, 48}, Source{45, 47}})
      all.push_back(s);
    one(46);
    for (std::size_t i = 51; i <= 59; ++i) one(i);                                        // nose
    for (const std::size_t i : {60, 61, 63, 64, 65, 67, 68, 69, 71, 72, 73, 75}) one(i);  // eyes
    for (std::size_t i = 76; i <= 95; ++i) one(i);                                        // mouth
    return all;
  }();
  Landmarks landmarks{};
  for (std::size_t i = 0; i < landmarks.size(); ++i) {
    const auto& [a, b] = sources[i];
    for (std::size_t c = 0; c < 2; ++c)
      landmarks[i][c] = static_cast<float>((points[a][c] + points[b][c]) / 2);
  }
  return landmarks;
}

LandmarkNet::LandmarkNet(const Deck& deck, const ModelSource& source)
    : dtype_(model_dtype(deck)), net_(deck.get<SadtalkerDeck>().fan_num_modules) {
  source.load(net_.params(), fan_weight_names(), dtype_ == DType::bf16);
  net_.fold();
}

Tensor LandmarkNet::run(const Tensor& picture) const {
  const ops::PixelScale scale{255.0f, {0, 0, 0}, {1, 1, 1}, true};
  return ops::converted(net_.forward(network_pixels(picture, scale, dtype_)), DType::f32);
}

std::vector<float> LandmarkNet::heatmaps(const ImageFile& picture) {
  WEFT_ASSERT(picture.height == side && picture.width == side);
  const Tensor maps = run(picture_tensor(picture)).to_host();
  const auto values = maps.span<float>();
  // Points first, and without the outline.
  std::vector<float> points(heatmap_points * map_size);
  for (std::size_t i = 0; i < static_cast<std::size_t>(map_size); ++i)
    for (std::size_t p = 0; p < static_cast<std::size_t>(heatmap_points); ++p)
      points[p * map_size + i] = values[i * Fan::maps + p];
  return points;
}

Landmarks LandmarkNet::landmarks(const ImageFile& face) {
  return to_68(
      decode_heatmaps(heatmaps(resize_bilinear(face, side, side)), face.height, face.width));
}

MemoryNeed LandmarkNet::plan(std::size_t capacity) {
  return memory_of(capacity, [&] { run(Tensor::empty({1, side, side, 3}, DType::u8)); });
}

double LandmarkNet::flops() {
  const OperationCount count;
  plan();
  return count.total();
}

FoundFace find_face(FaceDetector& detector, LandmarkNet& net, const ImageFile& picture,
                    ChannelOrder order, const std::string& name) {
  const std::vector<Face> faces = detector.detect(picture, order);
  WEFT_CHECK(
      !faces.empty(), Exit::data,
      "take a picture that shows one from the front, at least 60 pixels large, or give its 68 "
      "landmarks (animate.landmarks)",
      "no face was found in {}", name);
  const Face& face = faces.front();
  const PixelBox box = face_pixels(face, picture.height, picture.width);
  WEFT_CHECK(!box.empty(), Exit::data, "take another picture",
             "the face that was found in {} lies outside of it", name);
  FoundFace found{face, net.landmarks(cut_box(picture, box)), std::ssize(faces)};
  for (auto& [x, y] : found.landmarks) {
    x += static_cast<float>(box.x1);
    y += static_cast<float>(box.y1);
  }
  return found;
}

}  // namespace weft
