#include "models/face/anchors.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace weft {
namespace {

constexpr std::array<std::array<std::int64_t, 2>, 3> prior_sides = {
    {{16, 32}, {64, 128}, {256, 512}}};
// What offsets of the centre and of the size count in.
constexpr float centre_unit = 0.1f, size_unit = 0.2f;

std::int64_t features(std::int64_t length, std::int64_t stride) {
  return (length + stride - 1) / stride;
}

std::array<float, 4> decode_box(const float* prior, const float* offset, float width,
                                float height) {
  const float w = prior[2] * std::exp(offset[2] * size_unit),
              h = prior[3] * std::exp(offset[3] * size_unit);
  const float x = prior[0] + offset[0] * centre_unit * prior[2] - w / 2,
              y = prior[1] + offset[1] * centre_unit * prior[3] - h / 2;
  return {x * width, y * height, (x + w) * width, (y + h) * height};
}

float area(const std::array<float, 4>& b) { return (b[2] - b[0]) * (b[3] - b[1]); }

}  // namespace

PixelBox face_pixels(const Face& face, std::int64_t height, std::int64_t width) {
  const auto corner = [](float v, std::int64_t most) {
    return static_cast<std::int64_t>(std::clamp(v, 0.0f, static_cast<float>(most)));
  };
  return {corner(face.box[0], width), corner(face.box[1], height), corner(face.box[2], width),
          corner(face.box[3], height)};
}

std::int64_t face_priors(std::int64_t height, std::int64_t width) {
  std::int64_t count = 0;
  for (const std::int64_t s : face_strides) count += 2 * features(height, s) * features(width, s);
  return count;
}

std::vector<float> make_face_priors(std::int64_t height, std::int64_t width) {
  const auto H = static_cast<double>(height), W = static_cast<double>(width);
  std::vector<float> priors;
  priors.reserve(static_cast<std::size_t>(4 * face_priors(height, width)));
  for (std::size_t l = 0; l < face_strides.size(); ++l) {
    const auto stride = static_cast<double>(face_strides[l]);
    for (std::int64_t i = 0; i < features(height, face_strides[l]); ++i)
      for (std::int64_t j = 0; j < features(width, face_strides[l]); ++j)
        for (const std::int64_t side : prior_sides[l])
          for (const double v : {(static_cast<double>(j) + 0.5) * stride / W,
                                 (static_cast<double>(i) + 0.5) * stride / H,
                                 static_cast<double>(side) / W, static_cast<double>(side) / H})
            priors.push_back(static_cast<float>(v));
  }
  return priors;
}

std::vector<float> decode_face_boxes(const FaceScores& s) {
  std::vector<float> boxes;
  boxes.reserve(s.offsets.size());
  for (std::size_t i = 0; i < s.offsets.size(); i += 4)
    for (const float v : decode_box(s.priors.data() + i, s.offsets.data() + i,
                                    static_cast<float>(s.width), static_cast<float>(s.height)))
      boxes.push_back(v);
  return boxes;
}

std::vector<Face> pick_faces(const FaceScores& s, float least, double overlap) {
  const std::size_t count = s.probability.size() / 2;
  WEFT_ASSERT(s.priors.size() == 4 * count && s.offsets.size() == 4 * count &&
              s.marks.size() == 10 * count);
  for (const auto* values : {&s.probability, &s.offsets, &s.marks})
    WEFT_CHECK(std::ranges::all_of(*values, [](float v) { return std::isfinite(v); }), Exit::data,
               "are these the detector's weights, and undamaged?",
               "the face detector gave a value that is not finite");
  std::vector<std::size_t> order;
  for (std::size_t i = count; i-- > 0;)
    if (s.probability[2 * i + 1] > least) order.push_back(i);
  std::ranges::stable_sort(order, std::ranges::greater{},
                           [&](std::size_t i) { return s.probability[2 * i + 1]; });
  const auto width = static_cast<float>(s.width), height = static_cast<float>(s.height);
  std::vector<Face> faces;
  for (const std::size_t i : order) {
    const float* prior = s.priors.data() + 4 * i;
    Face f{
        decode_box(prior, s.offsets.data() + 4 * i, width, height), s.probability[2 * i + 1], {}};
    for (std::size_t m = 0; m < f.marks.size(); ++m) {
      const float* offset = s.marks.data() + 10 * i + 2 * m;
      f.marks[m] = {(prior[0] + offset[0] * centre_unit * prior[2]) * width,
                    (prior[1] + offset[1] * centre_unit * prior[3]) * height};
    }
    WEFT_CHECK(std::ranges::all_of(f.box, [](float v) { return std::isfinite(v); }), Exit::data,
               "are these the detector's weights, and undamaged?",
               "the face detector gave a face without bounds");
    faces.push_back(f);
  }
  std::vector<Face> kept;
  for (const std::size_t i : suppress_overlaps(faces, overlap)) kept.push_back(faces[i]);
  return kept;
}

float intersection_over_union(const std::array<float, 4>& a, const std::array<float, 4>& b) {
  const float w = std::max(0.0f, std::min(a[2], b[2]) - std::max(a[0], b[0])),
              h = std::max(0.0f, std::min(a[3], b[3]) - std::max(a[1], b[1]));
  return w * h / (area(a) + area(b) - w * h);
}

std::vector<std::size_t> suppress_overlaps(std::span<const Face> faces, double overlap) {
  std::vector<bool> gone(faces.size(), false);
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < faces.size(); ++i) {
    if (gone[i]) continue;
    kept.push_back(i);
    for (std::size_t j = i + 1; j < faces.size(); ++j)
      if (intersection_over_union(faces[i].box, faces[j].box) > overlap) gone[j] = true;
  }
  return kept;
}

}  // namespace weft
