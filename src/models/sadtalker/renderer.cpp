#include "models/sadtalker/renderer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "models/pixels.h"
#include "models/sadtalker/coefficients.h"
#include "models/sadtalker/generator.h"
#include "models/sadtalker/keypoints.h"
#include "tensor/device.h"

namespace weft {
namespace {

// Whole numbers, halves to even, of f32 [N, values of a frame].
std::vector<std::uint8_t> to_bytes(const Tensor& pictures, std::int64_t first) {
  const Tensor host = pictures.to_host();
  const auto values = host.span<float>();
  std::vector<std::uint8_t> bytes(values.size());
  const std::size_t frame = values.size() / static_cast<std::size_t>(host.dim(0));
  for (std::size_t i = 0; i < values.size(); ++i) {
    WEFT_CHECK(std::isfinite(values[i]), Exit::data,
               "check the weights; in bf16, try model.dtype = \"f32\"",
               "frame {} has a pixel that is {}", first + static_cast<std::int64_t>(i / frame),
               values[i]);
    bytes[i] = static_cast<std::uint8_t>(std::nearbyint(255.0f * values[i]));
  }
  return bytes;
}

}  // namespace

Renderer::Renderer(const Deck& deck, const ModelSource& sadtalker, const ModelSource& mapping)
    : deck_(deck.get<SadtalkerDeck>()),
      dtype_(model_dtype(deck)),
      keypoints_(deck_),
      mapping_(deck_),
      generator_(deck_) {
  sadtalker.load(keypoints_.params(), sadtalker_weight_names({"kp_extractor."}), false);
  keypoints_.fold();
  sadtalker.load(generator_.params(), sadtalker_weight_names({"generator."}),
                 dtype_ == DType::bf16);
  generator_.fold();
  mapping.load(mapping_.params(), mapping_weight_names(), false);
  mapping_.fold();
}

std::int64_t Renderer::stride() const { return std::lcm(keypoints_.stride(), generator_.stride()); }

void Renderer::check_size(std::int64_t height, std::int64_t width) const {
  WEFT_CHECK(height > 0 && width > 0 && height % stride() == 0 && width % stride() == 0,
             Exit::usage,
             fmt::format("choose a size that is a multiple of {} pixels, such as {}", stride(),
                         (width / stride() + 1) * stride()),
             "faces of {}x{} pixels: both sides must be multiples of {}", width, height, stride());
}

Renderer::Source Renderer::prepare(const ImageFile& picture,
                                   std::span<const float> coefficients) const {
  check_size(picture.height, picture.width);
  WEFT_CHECK(std::ssize(coefficients) == deck_.coefficients(), Exit::data,
             "sadtalker.preprocess decides how many there are: 73 for full and extfull, else 70",
             "the picture has {} coefficients, the mapping network takes {}", coefficients.size(),
             deck_.coefficients());
  const Tensor pixels = Tensor::from_host(std::span<const std::uint8_t>(picture.values),
                                          {1, picture.height, picture.width, 3});
  Source s;
  const Tensor found = keypoints_.forward(network_pixels(pixels, unit_scale, DType::f32));
  if (ops::planning()) {
    s.canonical.resize(3 * deck_.num_kp);
  } else {
    const Tensor host = found.to_host();
    const auto values = host.span<float>();
    s.canonical.assign(values.begin(), values.end());
  }
  std::vector<float> window;
  for (std::int64_t i = 0; i < MappingNet::window; ++i)
    window.insert(window.end(), coefficients.begin(), coefficients.end());
  const HeadMotion motion = mapping_.forward(Tensor::from_host(
      std::span<const float>(window), {1, MappingNet::window, deck_.coefficients()}))[0];
  s.keypoints = Tensor::from_host(std::span<const float>(moved_keypoints(s.canonical, motion)),
                                  {1, deck_.num_kp, 3});
  s.features = generator_.encode(network_pixels(pixels, unit_scale, dtype_));
  return s;
}

Tensor Renderer::keypoints(const Source& source, const DrivingRows& rows, std::int64_t first,
                           std::int64_t count) const {
  const std::vector<float> windows = driving_windows(rows, first, count);
  std::vector<HeadMotion> motions = mapping_.forward(Tensor::from_host(
      std::span<const float>(windows), {count, MappingNet::window, rows.columns}));
  std::vector<float> moved;
  for (std::size_t i = 0; i < motions.size(); ++i) {
    const std::size_t frame = static_cast<std::size_t>(first) + i;
    HeadMotion& m = motions[i];
    if (!rows.yaw.empty()) m.yaw = rows.yaw[frame];
    if (!rows.pitch.empty()) m.pitch = rows.pitch[frame];
    if (!rows.roll.empty()) m.roll = rows.roll[frame];
    const std::vector<float> points = moved_keypoints(source.canonical, m);
    moved.insert(moved.end(), points.begin(), points.end());
  }
  return Tensor::from_host(std::span<const float>(moved), {count, deck_.num_kp, 3});
}

Tensor Renderer::pictures(const Source& source, const Tensor& keypoints) const {
  return generator_.render(source.features, source.keypoints, keypoints).picture;
}

std::vector<std::uint8_t> Renderer::render(const Source& source, const DrivingRows& rows,
                                           std::int64_t first, std::int64_t count) const {
  const Tensor points = keypoints(source, rows, first, count);
  // On the CPU one by one: there the number of frames may change the order of a product's sums, and
  // is no help.
  const std::int64_t together = points.device() == DeviceKind::cpu ? 1 : count;
  std::vector<std::uint8_t> bytes;
  for (std::int64_t i = 0; i < count; i += together) {
    const Tensor some = pictures(source, points.slice(i, i + together));
    if (ops::planning()) continue;
    const std::vector<std::uint8_t> more = to_bytes(some, first + i);
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  return bytes;
}

MemoryNeed Renderer::plan(std::int64_t height, std::int64_t width, std::int64_t batch,
                          std::size_t capacity) const {
  check_size(height, width);
  const std::vector<float> row(deck_.coefficients());
  DrivingRows rows;
  rows.frames = batch;
  rows.columns = deck_.coefficients();
  rows.values.resize(batch * rows.columns);
  return memory_of(capacity, [&] { render(prepare({height, width, {}}, row), rows, 0, batch); });
}

Renderer::Cost Renderer::flops(std::int64_t height, std::int64_t width) const {
  Cost cost;
  double both = 0;
  const auto arena = Arena::planning();
  const ArenaScope scope(*arena);
  const std::vector<float> row(deck_.coefficients());
  {
    const OperationCount count;
    const Source source = prepare({height, width, {}}, row);
    cost.source = count.total();
    const DrivingRows rows{1, deck_.coefficients(), row, {}, {}, {}};
    render(source, rows, 0, 1);
    both = count.total();
  }
  cost.frame = both - cost.source;
  return cost;
}

}  // namespace weft
