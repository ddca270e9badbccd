#include "models/face/detector.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/face/pixels.h"

namespace weft {
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
    : dtype_(deck.model.dtype == "bf16" ? DType::bf16 : DType::f32) {
  source.load(net_.params(), retina_face_weight_names(), dtype_ == DType::bf16);
  net_.fold();
}

std::array<RetinaFace::Level, RetinaFace::levels> FaceDetector::run(const Tensor& picture,
                                                                    ChannelOrder order) const {
  const ops::PixelScale scale{
      1.0f, {104.0f, 117.0f, 123.0f}, {1.0f, 1.0f, 1.0f}, order == ChannelOrder::bgr};
  auto all = net_.forward(network_pixels(picture, scale, dtype_));
  for (RetinaFace::Level& l : all)
    for (Tensor* t : {&l.classes, &l.boxes, &l.marks}) *t = in_f32(*t);
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
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  run(Tensor::empty({1, height, width, 3}, DType::u8), ChannelOrder::bgr);
  return arena->need();
}

std::size_t FaceDetector::host_bytes(std::int64_t height, std::int64_t width) {
  // Logits and scores, offsets, marks and priors, with copies of a level; the picture.
  return static_cast<std::size_t>(face_priors(height, width)) * 40 * sizeof(float) +
         static_cast<std::size_t>(3 * height * width);
}

double FaceDetector::flops(std::int64_t height, std::int64_t width) {
  const MultiplyAddCount count;
  plan(height, width);
  return 2 * count.total();
}

}  // namespace weft
