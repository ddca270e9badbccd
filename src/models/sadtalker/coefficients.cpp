#include "models/sadtalker/coefficients.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "models/images.h"
#include "models/resnet/conv_net.h"
#include "ops/pointwise.h"
#include "ops/resize.h"

namespace weft {
namespace {

bool begins_with_any(const std::string& name, const std::vector<std::string>& prefixes) {
  return std::ranges::any_of(prefixes, [&](const auto& p) { return name.starts_with(p); });
}

}  // namespace

WeightNames sadtalker_weight_names(std::vector<std::string> prefixes,
                                   std::vector<std::string> unused) {
  WeightNames names;
  names.section = "sadtalker";
  names.spare = [prefixes = std::move(prefixes),
                 unused = std::move(unused)](const std::string& name) {
    return !begins_with_any(name, prefixes) || begins_with_any(name, unused);
  };
  return names;
}

WeightNames mapping_weight_names() {
  const std::string prefix = "mapping.";
  WeightNames names = sadtalker_weight_names({prefix});
  names.others = [prefix](const std::string& name) {
    return std::vector<std::string>{name.substr(prefix.size())};
  };
  return names;
}

namespace {

constexpr const char* prefix = "face_3drecon.";
// identity, expression, texture, angle, light, translation along x and y, and along z.
constexpr std::array<std::int64_t, 7> parts = {80, 64, 80, 3, 27, 2, 1};

}  // namespace

FaceCoefficients::FaceCoefficients(const Deck& deck, const ModelSource& source)
    : dtype_(model_dtype(deck)),
      net_(params_, std::string(prefix) + "backbone."),
      backbone_(net_, {.stem = {64}}) {
  net_.prefix = prefix;
  for (std::size_t i = 0; i < parts.size(); ++i)
    heads_[i] =
        net_.add(fmt::format("final_layers.{}", i), "", 2048, parts[i], ops::Conv::same(1), true);
  source.load(params_, sadtalker_weight_names({prefix}), dtype_ == DType::bf16);
  net_.fold();
}

std::vector<Tensor> FaceCoefficients::run(const Tensor& picture) const {
  const Tensor map = backbone_.forward(network_pixels(picture, unit_scale, dtype_))[3];
  Tensor mean = Tensor::empty({1, 1, 1, 1, map.dim(4)}, map.dtype());
  ops::adaptive_pool_forward(map, mean);
  std::vector<Tensor> all;
  for (const ConvLayer* head : heads_)
    all.push_back(ops::converted(convolve(*head, mean), DType::f32));
  return all;
}

std::vector<float> FaceCoefficients::coefficients(const ImageFile& aligned) {
  WEFT_ASSERT(aligned.height == aligned_side && aligned.width == aligned_side);
  std::vector<float> all;
  for (const Tensor& part : run(picture_tensor(aligned))) {
    const Tensor host = part.to_host();
    all.insert(all.end(), host.span<float>().begin(), host.span<float>().end());
  }
  check_finite(all, "the face model's network");
  return all;
}

FaceRow FaceCoefficients::row(const ImageFile& picture, const Landmarks& landmarks,
                              const std::string& name) {
  const AlignedFace aligned = align_face(picture, landmarks, name);
  return face_row_of(coefficients(aligned.image), aligned.trans);
}

MemoryNeed FaceCoefficients::plan(std::size_t capacity) {
  return memory_of(capacity, [&] {
    run(Tensor::empty({1, aligned_side, aligned_side, 3}, DType::u8));
  });
}

double FaceCoefficients::flops() {
  const OperationCount count_operations;
  plan();
  return count_operations.total();
}

FaceRow face_row_of(std::span<const float> all, const std::array<double, 5>& trans) {
  WEFT_ASSERT(std::ssize(all) == FaceCoefficients::count);
  FaceRow row{};
  auto to = row.begin();
  for (const auto& [first, count] : {std::pair{80, 64}, std::pair{224, 3}, std::pair{254, 3}})
    to = std::copy_n(all.begin() + first, count, to);
  // Scale, tx and ty; the picture's size is not kept.
  std::transform(trans.begin() + 2, trans.end(), to,
                 [](double v) { return static_cast<float>(v); });
  return row;
}

FaceRow ReferenceRows::next(const ImageFile& frame) {
  const std::string name = fmt::format("frame {} of {}", frame_++, name_);
  if (!cut_) {
    SourceFace first = find_source_face(finder_, frame, mode_, side, name);
    cut_ = first.cut;
    return coefficients_.row(first, name);
  }
  const ImageFile crop = cut_face(frame, *cut_, side);
  const FoundFace found =
      find_face(*finder_.detector, *finder_.landmarks, crop, ChannelOrder::bgr, name);
  return coefficients_.row(crop, found.landmarks, name);
}

}  // namespace weft
