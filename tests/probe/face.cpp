#include "core/error.h"
#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/face/crop.h"
#include "models/sadtalker/face/detector.h"
#include "models/sadtalker/face/landmarks.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

// Pixels [H,W,3]; of that size, where it is given.
ImageFile picture_of(const ProbeInputs& inputs, const std::string& name, std::int64_t side = 0) {
  const auto& s = inputs.shape(name);
  WEFT_CHECK(s.size() == 3 && s[2] == 3 && s[0] > 0 && s[1] > 0 && s[0] <= 65535 && s[1] <= 65535 &&
                 (side == 0 || (s[0] == side && s[1] == side)),
             Exit::data, probe_hint, "input \"{}\" is {}", name,
             Shape(std::span<const std::int64_t>(s)).str());
  return {s[0], s[1], inputs.u8(name)};
}

// Values of an input of `rank` dimensions, the first of any size.
std::vector<float> rows_of(const ProbeInputs& inputs, const std::string& name,
                           std::initializer_list<std::int64_t> row) {
  const auto& s = inputs.shape(name);
  std::vector<std::int64_t> wanted = {s.empty() ? 0 : s[0]};
  wanted.insert(wanted.end(), row);
  const Tensor t = inputs.f32(name, Shape(std::span<const std::int64_t>(wanted))).to_host();
  return {t.span<float>().begin(), t.span<float>().end()};
}

// Width and height of each row.
std::vector<std::array<std::int64_t, 2>> sizes_of(const ProbeInputs& inputs,
                                                  const std::string& name, std::size_t count) {
  const std::vector<std::int64_t> values = inputs.i64(name);
  WEFT_CHECK(values.size() == 2 * count, Exit::data, probe_hint,
             "input \"{}\" has {} numbers, wanted {}", name, values.size(), 2 * count);
  std::vector<std::array<std::int64_t, 2>> sizes;
  for (std::size_t i = 0; i < count; ++i) {
    sizes.push_back({values[2 * i], values[2 * i + 1]});
    for (const std::int64_t v : sizes.back())
      WEFT_CHECK(v > 0 && v <= 65535, Exit::data, probe_hint, "input \"{}\" has a side of {}", name,
                 v);
  }
  return sizes;
}

std::vector<Landmarks> landmarks_of_rows(const std::vector<float>& values) {
  std::vector<Landmarks> all;
  for (std::size_t i = 0; i < values.size(); i += 136)
    all.push_back(landmarks_of(std::span(values).subspan(i, 136)));
  return all;
}

template <class Points>
void append_points(const Points& points, std::vector<float>& to) {
  for (const auto& point : points)
    for (const auto v : point) to.push_back(static_cast<float>(v));
}

void probe_detect(const Deck& deck, const ModelSource& source, const ProbeInputs& inputs,
                  ProbeOutputs& outputs) {
  FaceDetector detector(deck, source);
  const FaceScores s = detector.scores(picture_of(inputs, "image"), ChannelOrder::rgb);
  const std::int64_t P = face_priors(s.height, s.width);
  outputs.add("loc", s.offsets, {1, P, 4});
  outputs.add("conf", s.probability, {1, P, 2});
  outputs.add("landms", s.marks, {1, P, 10});
  outputs.add("priors", s.priors, {P, 4});
  outputs.add("boxes", decode_face_boxes(s), {P, 4});
  std::vector<float> rows;
  for (const Face& f : pick_faces(s, FaceDetector::least_score, FaceDetector::overlap)) {
    rows.insert(rows.end(), f.box.begin(), f.box.end());
    rows.push_back(f.score);
    append_points(f.marks, rows);
  }
  outputs.add("detections", rows, {std::ssize(rows) / 15, 15});
}

void probe_fan(const Deck& deck, const ModelSource& source, const ProbeInputs& inputs,
               ProbeOutputs& outputs) {
  LandmarkNet net(deck, source);
  const ImageFile picture = picture_of(inputs, "image", LandmarkNet::side);
  const std::vector<float> maps = net.heatmaps(picture);
  const Points98 points = decode_heatmaps(maps, picture.height, picture.width);
  std::vector<float> all, some;
  append_points(points, all);
  append_points(to_68(points), some);
  outputs.add("heatmaps", maps, {1, heatmap_points, heatmap_side, heatmap_side});
  outputs.add("points98", all, {heatmap_points, 2});
  outputs.add("points68", some, {68, 2});
}

void probe_recon(const Deck& deck, const ModelSource& source, const ProbeInputs& inputs,
                 ProbeOutputs& outputs) {
  FaceCoefficients network(deck, source);
  outputs.add("coefficients", network.coefficients(picture_of(inputs, "image", aligned_side)),
              {1, FaceCoefficients::count});
}

void probe_crop(const ProbeInputs& inputs, ProbeOutputs& outputs) {
  const auto landmarks = landmarks_of_rows(rows_of(inputs, "landmarks", {68, 2}));
  const auto sizes = sizes_of(inputs, "size", landmarks.size());
  std::vector<std::int64_t> resized, crop, whole;
  std::vector<float> quad;
  for (std::size_t i = 0; i < landmarks.size(); ++i) {
    const FaceQuad q = face_quad(landmarks[i], sizes[i][1], sizes[i][0], fmt::format("case {}", i));
    resized.insert(resized.end(), {q.width, q.height});
    crop.insert(crop.end(), {q.outer.x1, q.outer.y1, q.outer.x2, q.outer.y2});
    for (const double v : q.inner) {
      whole.push_back(static_cast<std::int64_t>(v));
      quad.push_back(static_cast<float>(v));
    }
  }
  const std::int64_t n = std::ssize(landmarks);
  outputs.add("resized", resized, {n, 2});
  outputs.add("crop", crop, {n, 4});
  outputs.add("quad_int", whole, {n, 4});
  outputs.add("quad", quad, {n, 4});
}

void probe_align(const ProbeInputs& inputs, ProbeOutputs& outputs) {
  const ImageFile picture = picture_of(inputs, "image");
  const auto landmarks = landmarks_of_rows(rows_of(inputs, "landmarks", {68, 2}));
  MeanFace face = mean_face;
  if (inputs.has("mean_face")) {
    const Tensor given = inputs.f32("mean_face", {5, 3}).to_host();
    for (std::size_t i = 0; i < 15; ++i)
      face[i / 3][i % 3] = static_cast<double>(given.span<float>()[i]);
  }
  std::vector<float> trans, points;
  std::vector<std::uint8_t> crops;
  for (std::size_t i = 0; i < landmarks.size(); ++i) {
    const AlignedFace a = align_face(picture, landmarks[i], fmt::format("case {}", i), face);
    for (const double v : a.trans) trans.push_back(static_cast<float>(v));
    append_points(a.landmarks, points);
    crops.insert(crops.end(), a.image.values.begin(), a.image.values.end());
  }
  const std::int64_t n = std::ssize(landmarks);
  outputs.add("trans_params", trans, {n, 5});
  outputs.add("landmarks_aligned", points, {n, 68, 2});
  outputs.add("crop", crops, {n, aligned_side, aligned_side, 3});
}

void probe_landmarks(const ProbeInputs& inputs, ProbeOutputs& outputs) {
  const std::vector<float> maps =
      rows_of(inputs, "heatmaps", {heatmap_points, heatmap_side, heatmap_side});
  constexpr std::size_t each = heatmap_points * heatmap_side * heatmap_side;
  const std::size_t count = maps.size() / each;
  const auto sizes = sizes_of(inputs, "size", count);
  std::vector<float> all, some;
  for (std::size_t i = 0; i < count; ++i) {
    const Points98 points =
        decode_heatmaps(std::span(maps).subspan(i * each, each), sizes[i][1], sizes[i][0]);
    append_points(points, all);
    append_points(to_68(points), some);
  }
  const auto n = static_cast<std::int64_t>(count);
  outputs.add("points98", all, {n, heatmap_points, 2});
  outputs.add("points68", some, {n, 68, 2});
}

void probe_resize(const ProbeInputs& inputs, ProbeOutputs& outputs) {
  int count = 0;
  for (;; ++count) {
    const std::string name = fmt::format("image{}", count);
    if (!inputs.has(name)) break;
    const auto size = sizes_of(inputs, fmt::format("size{}", count), 1).front();
    const ImageFile out = resize_bilinear(picture_of(inputs, name), size[1], size[0]);
    outputs.add(fmt::format("resized{}", count), out.values, {out.height, out.width, 3});
  }
  WEFT_CHECK(count > 0, Exit::data, probe_hint, "the inputs have no image0");
}

}  // namespace

int probe_face(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const ModelSource source("--weights", request.weights, "", false, MPI_COMM_SELF);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  const auto run = request.what == "sadtalker_detect" ? probe_detect
                   : request.what == "sadtalker_fan"  ? probe_fan
                                                      : probe_recon;
  run(deck, source, inputs, outputs);
  outputs.write(request.outputs);
  return 0;
}

int probe_geometry(const Deck& deck, const ProbeRequest& request) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  const auto run = request.what == "sadtalker_crop"        ? probe_crop
                   : request.what == "sadtalker_align"     ? probe_align
                   : request.what == "sadtalker_landmarks" ? probe_landmarks
                                                           : probe_resize;
  run(inputs, outputs);
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
