#include "models/sadtalker/gfpgan/enhancer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "models/pixels.h"

namespace weft {
namespace {

// Faces as both networks take them: RGB in [-1, 1].
constexpr ops::PixelScale face_scale{255.0f, {0.5f, 0.5f, 0.5f}, {0.5f, 0.5f, 0.5f}};
Shape face_shape() { return {1, face_side, face_side, 3}; }

// Levels of values in [-1, 1], halves to even.
std::vector<std::uint8_t> to_bytes(const Tensor& face) {
  const Tensor host = face.to_host();
  const auto values = host.span<float>();
  check_finite(values, "gfpgan's restorer");
  std::vector<std::uint8_t> bytes(values.size());
  std::ranges::transform(values, bytes.begin(), [](float v) {
    const float level = std::nearbyint((std::clamp(v, -1.0f, 1.0f) + 1.0f) / 2.0f * 255.0f);
    return static_cast<std::uint8_t>(level);
  });
  return bytes;
}

}  // namespace

Enhancer::Enhancer(const Deck& deck, const ModelSource& gfpgan, const ModelSource& parsenet,
                   FaceDetector& detector, const EnhancerSize& size)
    : dtype_(model_dtype(deck)),
      detector_(detector),
      restorer_({.most_channels = size.restorer}),
      parse_net_(size.parser) {
  gfpgan.load(restorer_.params(), restorer_names(), dtype_ == DType::bf16);
  restorer_.prepare();
  parsenet.load(parse_net_.params(), parse_net_names(), dtype_ == DType::bf16);
  parse_net_.fold();
}

ImageFile Enhancer::enhance(const ImageFile& frame, int scale, std::uint64_t noise_key) {
  std::vector<FacePoints> faces;
  for (const Face& face : detector_.detect(frame, ChannelOrder::bgr)) faces.push_back(face.marks);
  return enhance(frame, faces, scale, noise_key);
}

ImageFile Enhancer::enhance(const ImageFile& frame, std::span<const FacePoints> faces, int scale,
                            std::uint64_t noise_key) {
  WEFT_ASSERT(scale == 1 || scale == 2);
  std::vector<FacePatch> patches;
  std::uint64_t number = 0;
  for (const FacePoints& points : faces) {
    const double across = static_cast<double>(points[0][0]) - points[1][0],
                 along = static_cast<double>(points[0][1]) - points[1][1];
    if (!(std::hypot(across, along) >= least_eye_distance)) continue;
    if (auto patch = restore(frame, points, scale, noise_key, number++))
      patches.push_back(std::move(*patch));
  }
  ++counts_.frames;
  counts_.restored += patches.empty() ? 0 : 1;
  ImageFile result = scale == 1 ? frame : doubled_frame(frame);
  paste(patches, result);
  return result;
}

std::optional<FacePatch> Enhancer::restore(const ImageFile& frame, const FacePoints& points,
                                           int scale, std::uint64_t noise_key, std::uint64_t face) {
  const std::optional<AffineMap> transform = face_transform(points);
  if (!transform) return std::nullopt;
  const std::vector<std::uint8_t> pixels = warp_face(frame, *transform);
  std::vector<std::uint8_t> restored;
  {
    const Tensor image = network_pixels(
        Tensor::from_host(std::span<const std::uint8_t>(pixels), face_shape()), face_scale, dtype_);
    restored = to_bytes(restorer_.run(image, restorer_.draw_noise(noise_key, face)));
  }
  std::vector<double> mask;
  {
    const Tensor image =
        network_pixels(Tensor::from_host(std::span<const std::uint8_t>(restored), face_shape()),
                       face_scale, dtype_);
    const Tensor classes = parse_net_.parse(image).to_host();
    mask = face_mask(classes.span<std::uint8_t>());
  }
  return make_patch(restored, mask, back_transform(*transform, scale), frame.height * scale,
                    frame.width * scale);
}

MemoryNeed Enhancer::plan(std::int64_t height, std::int64_t width, std::size_t capacity) {
  const MemoryNeed detection = detector_.plan(height, width, capacity);
  const MemoryNeed restoring = memory_of(capacity, [&] {
    // As restore() does, step by step.
    const auto image = [&] {
      return network_pixels(Tensor::empty(face_shape(), DType::u8), face_scale, dtype_);
    };
    restorer_.run(image(), restorer_.draw_noise(0, 0));
    parse_net_.parse(image());
    face_mask(std::vector<std::uint8_t>(std::size_t{face_side} * face_side));
  });
  return {std::max(detection.bytes, restoring.bytes), detection.fits && restoring.fits};
}

std::size_t Enhancer::host_bytes(std::int64_t height, std::int64_t width, int scale) {
  // The result, and a patch as large as the frame: three bytes and a mask in f64 a pixel. A face's
  // squares and masks are a few MiB.
  const auto pixels = static_cast<std::size_t>(height * width * scale * scale);
  return pixels * (3 + 3 + sizeof(double)) + (std::size_t{32} << 20);
}

double Enhancer::flops(std::int64_t faces) const {
  return static_cast<double>(faces) * (restorer_.flops() + parse_net_.flops(face_side, face_side));
}

}  // namespace weft
