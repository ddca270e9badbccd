#include "models/sadtalker/face/detector.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "models/images.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

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
  priors.reserve(4 * face_priors(height, width));
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
    check_finite(*values, "the face detector");
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
    check_finite(f.box, "the face detector");  // exp of an offset may overflow
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

namespace {

constexpr std::int64_t pyramid_width = 256;  // channels of the pyramid

}  // namespace

RetinaFace::RetinaFace() : net_(params_, "body."), body_(net_, {.stem = {64}}) {
  net_.prefix = "fpn.";
  for (std::size_t i = 0; i < levels; ++i) {
    const std::string name = fmt::format("output{}", i + 1);
    lateral_[i] = net_.add(name + ".0", name + ".1", std::int64_t{512} << i, pyramid_width,
                           ops::Conv::same(1));
  }
  for (std::size_t i = 0; i < merge_.size(); ++i) {
    const std::string name = fmt::format("merge{}", i + 1);
    merge_[i] =
        net_.add(name + ".0", name + ".1", pyramid_width, pyramid_width, ops::Conv::same(3));
  }
  net_.prefix.clear();
  for (std::size_t i = 0; i < levels; ++i) context_[i] = add_context(fmt::format("ssh{}.", i + 1));
  const auto head = [&](const char* name, std::size_t i, std::int64_t out) {
    return net_.add(fmt::format("{}.{}.conv1x1", name, i), "", pyramid_width, out,
                    ops::Conv::same(1), true);
  };
  // Two priors: a logit each of face and no face, 4 offsets of the box, x and y of five marks.
  for (std::size_t i = 0; i < levels; ++i)
    heads_[i] = {head("ClassHead", i, 2 * 2), head("BboxHead", i, 2 * 4),
                 head("LandmarkHead", i, 2 * 10)};
}

RetinaFace::Context RetinaFace::add_context(const std::string& name) {
  const auto conv = [&](const char* part, std::int64_t in, std::int64_t out) {
    return net_.add(name + part + ".0", name + part + ".1", in, out, ops::Conv::same(3));
  };
  return {conv("conv3X3", pyramid_width, 128), conv("conv5X5_1", pyramid_width, 64),
          conv("conv5X5_2", 64, 64), conv("conv7X7_2", 64, 64), conv("conv7x7_3", 64, 64)};
}

Tensor RetinaFace::context(const Context& c, const Tensor& x) {
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  ops::put_channels(convolve(*c.one, x, 0), 0, y);
  const Tensor first = convolve(*c.first, x, 0);
  ops::put_channels(convolve(*c.two, first, 0), 128, y);
  ops::put_channels(convolve(*c.three, convolve(*c.second, first, 0), 0), 192, y);
  return y;
}

std::array<RetinaFace::Level, RetinaFace::levels> RetinaFace::forward(const Tensor& image) const {
  std::array<Tensor, levels> maps;
  {
    std::vector<Tensor> body = body_.forward(image);
    body[0].release();
    for (std::size_t i = 0; i < levels; ++i) {
      maps[i] = convolve(*lateral_[i], body[i + 1], 0);
      body[i + 1].release();
    }
  }
  // From the coarsest level down, each to the size of the next.
  for (std::size_t i = merge_.size(); i-- > 0;) {
    ops::nearest_forward(maps[i + 1], 0, maps[i], true);
    maps[i] = convolve(*merge_[i], maps[i], 0);
  }
  std::array<Level, levels> all;
  for (std::size_t i = 0; i < levels; ++i) {
    const Tensor y = context(context_[i], maps[i]);
    maps[i].release();
    all[i] = {convolve(*heads_[i].classes, y), convolve(*heads_[i].boxes, y),
              convolve(*heads_[i].marks, y)};
  }
  return all;
}

namespace {

// The softmax of two logits, as PyTorch computes it.
void append_softmax(std::span<const float> logits, std::vector<float>& to) {
  for (std::size_t i = 0; i + 1 < logits.size(); i += 2) {
    const float greatest = std::max(logits[i], logits[i + 1]);
    const float a = std::exp(logits[i] - greatest), b = std::exp(logits[i + 1] - greatest);
    to.push_back(a / (a + b));
    to.push_back(b / (a + b));
  }
}

void append(std::span<const float> values, std::vector<float>& to) {
  to.insert(to.end(), values.begin(), values.end());
}

}  // namespace

FaceDetector::FaceDetector(const Deck& deck, const ModelSource& source)
    : dtype_(model_dtype(deck)) {
  source.load(net_.params(), {}, dtype_ == DType::bf16);
  net_.fold();
}

std::array<RetinaFace::Level, RetinaFace::levels> FaceDetector::run(const Tensor& picture,
                                                                    ChannelOrder order) const {
  const ops::PixelScale scale{
      1.0f, {104.0f, 117.0f, 123.0f}, {1.0f, 1.0f, 1.0f}, order == ChannelOrder::bgr};
  auto all = net_.forward(network_pixels(picture, scale, dtype_));
  for (RetinaFace::Level& l : all)
    for (Tensor* t : {&l.classes, &l.boxes, &l.marks}) *t = ops::converted(*t, DType::f32);
  return all;
}

FaceScores FaceDetector::scores(const ImageFile& picture, ChannelOrder order) {
  const std::int64_t H = picture.height, W = picture.width;
  const Arena& arena = Arena::current();
  const std::size_t left = std::max<std::size_t>(arena.capacity() - arena.used(), 1);
  const MemoryNeed need = plan(H, W, left);
  WEFT_CHECK(need.fits, Exit::usage,
             "make the picture smaller, raise memory.arena_gib, or set model.dtype = \"bf16\"",
             "finding faces in a picture of {}x{} pixels takes {} MiB, and {} MiB are left", H, W,
             need.bytes >> 20, left >> 20);
  FaceScores s;
  s.height = H;
  s.width = W;
  for (const RetinaFace::Level& l : run(picture_tensor(picture), order)) {
    append_softmax(l.classes.to_host().span<float>(), s.probability);
    append(l.boxes.to_host().span<float>(), s.offsets);
    append(l.marks.to_host().span<float>(), s.marks);
  }
  s.priors = make_face_priors(H, W);
  return s;
}

std::vector<Face> FaceDetector::detect(const ImageFile& picture, ChannelOrder order) {
  return pick_faces(scores(picture, order), least_score, overlap);
}

MemoryNeed FaceDetector::plan(std::int64_t height, std::int64_t width, std::size_t capacity) {
  return memory_of(capacity, [&] {
    run(Tensor::empty({1, height, width, 3}, DType::u8), ChannelOrder::bgr);
  });
}

std::size_t FaceDetector::host_bytes(std::int64_t height, std::int64_t width) {
  // Logits and scores, offsets, marks and priors, with copies of a level; the picture.
  return static_cast<std::size_t>(face_priors(height, width)) * 40 * sizeof(float) +
         static_cast<std::size_t>(3 * height * width);
}

double FaceDetector::flops(std::int64_t height, std::int64_t width) {
  const OperationCount count;
  plan(height, width);
  return count.total();
}

}  // namespace weft
