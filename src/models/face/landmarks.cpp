#include "models/face/landmarks.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/face/crop.h"
#include "models/face/pixels.h"
#include "models/sadtalker/options.h"

namespace weft {
namespace {

constexpr std::int64_t map_size = heatmap_side * heatmap_side;

double sign(float v) { return v > 0 ? 1 : v < 0 ? -1 : 0; }

}  // namespace

Points98 decode_heatmaps(std::span<const float> maps, std::int64_t height, std::int64_t width) {
  WEFT_ASSERT(std::ssize(maps) == heatmap_points * map_size);
  WEFT_CHECK(std::ranges::all_of(maps, [](float v) { return std::isfinite(v); }), Exit::data,
             "are these the landmarks' weights, and undamaged?",
             "the landmarks' network gave a value that is not finite");
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
    : dtype_(deck.model.dtype == "bf16" ? DType::bf16 : DType::f32),
      net_(deck.get<SadtalkerDeck>().fan_num_modules) {
  source.load(net_.params(), fan_weight_names(), dtype_ == DType::bf16);
  net_.fold();
}

Tensor LandmarkNet::run(const Tensor& picture) const {
  const ops::PixelScale scale{255.0f, {0, 0, 0}, {1, 1, 1}, true};
  return in_f32(net_.forward(network_pixels(picture, scale, dtype_)));
}

std::vector<float> LandmarkNet::heatmaps(const ImageFile& picture) {
  WEFT_ASSERT(picture.height == side && picture.width == side);
  const Tensor maps = run(picture_tensor(picture)).to_host();
  const auto values = maps.span<float>();
  // Points first, and without the outline.
  std::vector<float> points(static_cast<std::size_t>(heatmap_points * map_size));
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
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  run(Tensor::empty({1, side, side, 3}, DType::u8));
  return arena->need();
}

double LandmarkNet::flops() {
  const MultiplyAddCount count;
  plan();
  return 2 * count.total();
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
