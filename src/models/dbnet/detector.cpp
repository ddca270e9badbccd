#include "models/dbnet/detector.h"

#include <algorithm>
#include <cmath>
#include <opencv2/imgproc.hpp>

#include "core/error.h"
#include "data/text_images/opencv.h"
#include "models/images.h"
#include "nn/image_ops.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "tensor/device.h"

namespace weft {
namespace {

// The longer side cut to whole pixels as int(side * long / short) of Python.
std::int64_t scaled(std::int64_t length, std::int64_t shorter, std::int64_t side) {
  return static_cast<std::int64_t>(static_cast<double>(side * length) /
                                   static_cast<double>(shorter));
}

// Halves to even, as Python's round.
std::int64_t middle(std::int64_t length, std::int64_t side) {
  return static_cast<std::int64_t>(std::nearbyint(static_cast<double>(length - side) / 2));
}

}  // namespace

std::vector<std::uint8_t> detector_frame(const RgbView& picture, std::int64_t side) {
  WEFT_ASSERT(picture.height > 0 && picture.width > 0 && side > 0);
  const std::int64_t shorter = std::min(picture.height, picture.width);
  const std::int64_t height = scaled(picture.height, shorter, side),
                     width = scaled(picture.width, shorter, side);
  std::vector<std::uint8_t> out(side * side * 3);
  pillow_resize_window(picture, height, width, PillowFilter::bilinear,
                       {middle(height, side), middle(width, side), side, side}, out.data(),
                       side * 3);
  return out;
}

ViewSize view_size(ImageSize picture, std::int64_t short_side, std::int64_t long_side) {
  const auto height = static_cast<double>(picture.height);
  const auto width = static_cast<double>(picture.width);
  double scale = 1;
  if (short_side > 0)
    scale = std::min(static_cast<double>(short_side) / std::min(height, width),
                     static_cast<double>(long_side) / std::max(height, width));
  const auto scaled = [&](double n) {
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(n * scale + 0.5));
  };
  ViewSize size;
  size.scaled = {scaled(height), scaled(width)};
  size.padded = {rounded_up(size.scaled.height, Dbnet::stride),
                 rounded_up(size.scaled.width, Dbnet::stride)};
  return size;
}

std::vector<std::uint8_t> detector_view(const RgbView& picture, const ViewSize& size) {
  const auto sides = [](ImageSize s) {
    return cv::Size(static_cast<int>(s.width), static_cast<int>(s.height));
  };
  const ops::PixelScale scale = dbnet_pixel_scale();
  std::vector<std::uint8_t> rgb(size.padded.height * size.padded.width * 3);
  with_opencv([&] {
    // OpenCV has no view of values that do not change.
    const cv::Mat from(sides({picture.height, picture.width}), CV_8UC3,
                       const_cast<std::uint8_t*>(picture.rgb),
                       static_cast<std::size_t>(picture.stride));
    cv::Mat to(sides(size.padded), CV_8UC3, rgb.data());
    to.setTo(cv::Scalar(scale.mean[0], scale.mean[1], scale.mean[2]));
    cv::Mat corner = to(cv::Rect(cv::Point(0, 0), sides(size.scaled)));
    if (from.size() == corner.size())
      from.copyTo(corner);
    else
      cv::resize(from, corner, corner.size(), 0, 0, cv::INTER_LINEAR);
  });
  return rgb;
}

DetectorSource::DetectorSource(const Deck& deck, const std::string& key, const std::string& weights,
                               bool ema, MPI_Comm world)
    : source_(key, weights, deck.run.dir, ema, world) {
  const std::string& wish = deck.get<DbnetDeck>().deformable;
  const auto files = source_.files();
  deformable_ = wish == "on" || (wish == "auto" && files && has_offsets(*files));
}

Detector::Detector(const Deck& deck, const DetectorSource& source)
    : deck_(deck),
      own_(std::make_unique<Dbnet>(deck.get<DbnetDeck>(), source.deformable())),
      model_(*own_) {
  source.model().load(model_.params(), {}, deck.model.dtype == "bf16");
  model_.scale_conv2(static_cast<float>(deck.get<DbnetDeck>().conv2_gain));
}

Tensor Detector::run(const Tensor& pictures) {
  const std::int64_t N = pictures.dim(0), H = pictures.dim(1), W = pictures.dim(2);
  WEFT_ASSERT(H % Dbnet::stride == 0 && W % Dbnet::stride == 0);
  Var x = make_var(network_pixels(pictures, dbnet_pixel_scale(), model_dtype(deck_)), false);
  Tape tape(Tape::Mode::infer);
  const nn::Context c{tape, model_.params()};
  nn::BatchNormGroup norm;
  norm.use_running = true;
  const Var logits = model_.forward(c, std::exchange(x, nullptr), norm, false).probability;
  Tensor probability = ops::converted(logits->value, DType::f32);
  ops::sigmoid_forward(probability, probability);
  return probability.view({N, H, W});
}

std::vector<std::vector<float>> Detector::detect(std::span<const std::uint8_t> pictures,
                                                 std::int64_t count, std::int64_t height,
                                                 std::int64_t width) {
  const std::int64_t together = at_once(count);
  const auto bytes = static_cast<std::size_t>(together * height * width * 3);
  std::vector<std::vector<float>> all;
  for (std::int64_t i = 0; i < count; i += together) {
    const Tensor some =
        Tensor::from_host(pictures.subspan(static_cast<std::size_t>(i / together) * bytes, bytes),
                          {together, height, width, 3});
    for (std::vector<float>& map : maps_of(run(some))) all.push_back(std::move(map));
  }
  return all;
}

// On the CPU one by one: there the number of pictures changes the order of the products' sums, and
// a file's result must not depend on which others it happens to be with.
std::int64_t Detector::at_once(std::int64_t count) { return on_cuda() ? count : 1; }

std::vector<std::vector<float>> Detector::maps_of(const Tensor& probability) const {
  const std::int64_t count = probability.dim(0);
  Tensor counts = Tensor::empty({count}, DType::i32);
  ops::count_above(probability, static_cast<float>(deck_.get<PostprocessDeck>().mask_threshold),
                   counts);
  const Tensor text = counts.to_host();
  std::vector<std::vector<float>> maps(count);
  for (std::int64_t i = 0; i < count; ++i) {
    if (text.span<std::int32_t>()[i] == 0) continue;
    const Tensor map = probability.slice(i, i + 1).to_host();
    const auto values = map.span<float>();
    maps[i].assign(values.begin(), values.end());
  }
  return maps;
}

MemoryNeed Detector::plan(std::int64_t count, std::int64_t height, std::int64_t width,
                          std::size_t capacity) {
  return memory_of(capacity, [&] {
    run(Tensor::empty({at_once(count), height, width, 3}, DType::u8));
  });
}

double Detector::flops(std::int64_t height, std::int64_t width) const {
  return model_.flops(height, width);
}

}  // namespace weft
