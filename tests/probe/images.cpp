#include <algorithm>
#include <array>

#include "core/error.h"
#include "data/images/image_source.h"
#include "data/step_plan.h"
#include "media/image_file.h"
#include "media/resize.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

Tensor u8_tensor(const std::vector<std::uint8_t>& values, const Shape& shape) {
  return Tensor::from_host(std::span<const std::uint8_t>(values), shape);
}

// What the network gets of u8 pixels [height, width, 3]: f32 [3, height, width]. ImageNet's mean
// and deviation are taken off the pixels of the view; what lies beyond it is 0.
void normalise(const std::uint8_t* rgb, ImageSize size, ImageSize view, float* out) {
  constexpr std::array<float, 3> mean = {0.485f, 0.456f, 0.406f},
                                 deviation = {0.229f, 0.224f, 0.225f};
  for (std::size_t c = 0; c < 3; ++c)
    for (std::int64_t y = 0; y < size.height; ++y)
      for (std::int64_t x = 0; x < size.width; ++x) {
        const std::uint8_t value = rgb[(y * size.width + x) * 3 + static_cast<std::int64_t>(c)];
        *out++ = y < view.height && x < view.width
                     ? (static_cast<float>(value) / 255.0f - mean[c]) / deviation[c]
                     : 0.0f;
      }
}

void resize_image(const ProbeInputs& inputs, ProbeOutputs& outputs) {
  for (int i = 0; inputs.has(fmt::format("image.{}", i)); ++i) {
    const std::string image = fmt::format("image.{}", i), label = fmt::format("label.{}", i);
    const auto& shape = inputs.shape(image);
    const std::vector<std::int64_t> size = inputs.i64(fmt::format("size.{}", i));
    WEFT_CHECK(shape.size() == 3 && shape[2] == 3 && shape[0] > 0 && shape[1] > 0 &&
                   size.size() == 2 && size[0] > 0 && size[1] > 0 &&
                   inputs.shape(label) == (std::vector<std::int64_t>{shape[0], shape[1]}),
               Exit::data, "image.I is [H,W,3], label.I [H,W], size.I the new width and height",
               "the inputs of image {} do not fit each other", i);
    const std::int64_t width = size[0], height = size[1];
    const std::vector<std::uint8_t> rgb = inputs.u8(image), labels = inputs.u8(label);
    std::vector<std::uint8_t> scaled(height * width * 3);
    pillow_resize({rgb.data(), shape[0], shape[1], shape[1] * 3}, height, width,
                  PillowFilter::bilinear, scaled.data(), width * 3);
    outputs.add(fmt::format("bilinear.{}", i), u8_tensor(scaled, {height, width, 3}));
    scaled.resize(height * width);
    nearest_resize(labels.data(), shape[0], shape[1], height, width, scaled.data());
    outputs.add(fmt::format("nearest.{}", i), u8_tensor(scaled, {height, width}));
  }
}

// The images of a probe, decoded.
class GivenImages : public LabelledImages {
 public:
  GivenImages(const ProbeInputs& inputs, const MediaDeck& limits) {
    for (int i = 0; inputs.has(fmt::format("png.image.{}", i)); ++i) {
      const std::string image = fmt::format("png.image.{}", i),
                        label = fmt::format("png.label.{}", i);
      const std::vector<std::uint8_t> image_png = inputs.u8(image), label_png = inputs.u8(label);
      ImageFile pixels = decode_image(std::as_bytes(std::span(image_png)), image, limits);
      ImageFile labels = decode_labels(std::as_bytes(std::span(label_png)), label, limits);
      WEFT_CHECK(pixels.height == labels.height && pixels.width == labels.width, Exit::data,
                 "give the labels of this image", "{} has another size than {}", label, image);
      images_.push_back(
          {{pixels.height, pixels.width}, std::move(pixels.values), std::move(labels.values)});
    }
    WEFT_CHECK(!images_.empty(), Exit::data, probe_hint, "the inputs have no png.image.0");
  }
  std::int64_t count() const override { return std::ssize(images_); }
  ImageSize size(std::int64_t i) const override { return at(i).size; }
  std::string name(std::int64_t i) const override { return fmt::format("image {}", i); }
  void read(std::int64_t i, LabelledImage& out) const override { out = at(i); }
  std::int64_t num_classes() const override { return 0; }
  const std::vector<std::string>& class_names() const override { return no_names_; }
  const LabelledImage& at(std::int64_t i) const { return images_.at(static_cast<std::size_t>(i)); }

 private:
  std::vector<LabelledImage> images_;
  std::vector<std::string> no_names_;
};

// One micro-batch as training makes it.
void segmentation_batch(const Deck& deck, const ProbeInputs& inputs, ProbeOutputs& outputs) {
  auto given = std::make_unique<GivenImages>(inputs, deck.media);
  const std::int64_t n = given->count();
  const std::vector<std::int64_t> side = inputs.i64("short_side"), flip = inputs.i64("flip");
  WEFT_CHECK(side.size() == 1 && side[0] > 0 && std::ssize(flip) == n, Exit::data,
             "short_side is [1], flip [images]", "short_side or flip has another shape");
  DataDeck data = deck.data;
  data.short_sides = side;
  MicroBatch batch;
  bool portrait = false;
  for (std::int64_t i = 0; i < n; ++i) {
    const ImageSize size = given->size(i), view = training_size(size, side[0], data.max_side);
    batch.clips.push_back(i);
    batch.views.push_back({view.height, view.width, flip[i] != 0});
    WEFT_CHECK(i == 0 || portrait == (size.height > size.width), Exit::data,
               "a micro-batch has images of one orientation",
               "the images are portrait and landscape");
    portrait = size.height > size.width;
  }
  const ImageSize size = micro_batch_size(batch.views, data.padding);
  batch.height = size.height;
  batch.width = size.width;
  const auto source = make_image_source(std::move(given), data);

  const std::int64_t rows = size.height / data.label_rate, columns = size.width / data.label_rate;
  std::vector<std::byte> clip(source->clip_bytes(batch));
  std::vector<float> image(n * 3 * size.height * size.width);
  std::vector<std::int64_t> labels;
  for (std::int64_t i = 0; i < n; ++i) {
    source->read_sample(batch, static_cast<std::size_t>(i), clip);
    const auto* pixels = reinterpret_cast<const std::uint8_t*>(clip.data());
    const ImageView& view = batch.views[i];
    normalise(pixels, size, {view.height, view.width},
              image.data() + i * 3 * size.height * size.width);
    const std::uint8_t* label = pixels + size.height * size.width * 3;
    for (std::int64_t k = 0; k < rows * columns; ++k) labels.push_back(label[k] - 1);
  }
  outputs.add("image",
              Tensor::from_host(std::span<const float>(image), {n, 3, size.height, size.width}));
  outputs.add("label",
              Tensor::from_host(std::span<const std::int64_t>(labels), {n, rows, columns}));
}

// One image at the sizes of an evaluation.
void segmentation_scales(const Deck& deck, const ProbeInputs& inputs, ProbeOutputs& outputs) {
  const GivenImages given(inputs, deck.media);
  const LabelledImage& image = given.at(0);
  const ImageSize size = image.size;
  std::vector<std::int64_t> sides = deck.data.short_sides;
  if (inputs.has("short_sides")) sides = inputs.i64("short_sides");
  for (std::size_t s = 0; s < sides.size(); ++s) {
    WEFT_CHECK(sides[s] > 0, Exit::data, "give sides in pixels", "a short side of {}", sides[s]);
    const ImageSize at = evaluation_size(size, sides[s], deck.data.max_side, deck.data.padding);
    std::vector<std::uint8_t> scaled(at.height * at.width * 3);
    pillow_resize({image.rgb.data(), size.height, size.width, size.width * 3}, at.height, at.width,
                  PillowFilter::bilinear, scaled.data(), at.width * 3);
    std::vector<float> out(scaled.size());
    normalise(scaled.data(), at, at, out.data());
    outputs.add(fmt::format("scale.{}", s),
                Tensor::from_host(std::span<const float>(out), {1, 3, at.height, at.width}));
  }
  std::vector<std::int64_t> labels;
  for (const std::uint8_t v : image.labels) labels.push_back(v - 1);
  outputs.add("label", Tensor::from_host(std::span<const std::int64_t>(labels),
                                         {1, size.height, size.width}));
  outputs.add("original", u8_tensor(image.rgb, {size.height, size.width, 3}));
}

}  // namespace

int probe_images(const Deck& deck, const ProbeRequest& request) {
  // On the CPU, wherever the rank's networks run.
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  if (request.what == "resize_image")
    resize_image(inputs, outputs);
  else if (request.what == "segmentation_batch")
    segmentation_batch(deck, inputs, outputs);
  else
    segmentation_scales(deck, inputs, outputs);
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
