#include "models/segmentation/predictor.h"

#include <algorithm>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "media/resize.h"
#include "models/pixels.h"
#include "models/segmentation/segmentation.h"
#include "ops/loss.h"

namespace weft {

SegmentationSource::SegmentationSource(const Deck& deck, bool ema, MPI_Comm world)
    : pair_(deck.get<SegmentationDeck>()), bf16_(deck.model.dtype == "bf16") {
  if (pair_.weights_encoder.empty() && pair_.weights_decoder.empty()) {
    source_.emplace("model.weights", deck.model.weights, deck.run.dir, ema, world);
    identity_ = source_->identity();
    return;
  }
  WEFT_CHECK(deck.model.weights.empty(), Exit::usage, "set one of them to \"\"",
             "model.weights = \"{}\" and model.weights_{} name weights twice", deck.model.weights,
             pair_.weights_encoder.empty() ? "decoder" : "encoder");
  WEFT_CHECK(!pair_.weights_encoder.empty() && !pair_.weights_decoder.empty(), Exit::usage,
             "name the files of both, which were released together",
             "model.weights_{} is empty, and model.weights_{} is not",
             pair_.weights_encoder.empty() ? "encoder" : "decoder",
             pair_.weights_encoder.empty() ? "decoder" : "encoder");
  WEFT_CHECK(!ema, Exit::usage, "set ema = false, or model.weights to a run",
             "model.weights_encoder and model.weights_decoder name files, which have no moving "
             "average of the weights");
  identity_ = folder_identity(pair_.weights_encoder) + folder_identity(pair_.weights_decoder);
}

std::string SegmentationSource::describe() const {
  return source_ ? source_->describe() : pair_.weights_encoder + " + " + pair_.weights_decoder;
}

void SegmentationSource::check_classes(const std::vector<std::string>& names,
                                       const std::string& data) const {
  if (source_)
    check_class_names(source_->notes().classes, source_->describe(),
                      fmt::format("{}", fmt::join(names, "\n")), data);
}

void SegmentationSource::load(ParameterTable& table) const {
  if (source_) {
    source_->load(table, segmentation_weight_names(), bf16_);
    return;
  }
  table.allocate_for_inference(bf16_);
  load_segmentation("", pair_, table);
}

std::string describe_prediction(const Deck& deck) {
  const SegmentationDeck& m = deck.get<SegmentationDeck>();
  return fmt::format("model {} {} {} {} {}\nshort sides {}\nmax side {}\npadding {}\n", m.encoder,
                     m.decoder, m.num_classes, m.preprocessing, deck.model.dtype,
                     fmt::join(deck.data.short_sides, " "), deck.data.max_side, deck.data.padding);
}

Predictor::Predictor(const Deck& deck)
    : Predictor(deck, nullptr, std::make_unique<Segmentation>(deck.get<SegmentationDeck>())) {}

Predictor::Predictor(const Deck& deck, Segmentation* model, std::unique_ptr<Segmentation> own)
    : deck_(deck),
      own_(std::move(own)),
      model_(model != nullptr ? *model : *own_),
      classes_(deck.get<SegmentationDeck>().num_classes) {
  norm_.use_running = true;
  WEFT_CHECK(deck.data.padding % model_.stride() == 0, Exit::usage,
             fmt::format("set data.padding = {}", model_.stride()),
             "data.padding = {}, and {} takes sides that are multiples of {}", deck.data.padding,
             deck.get<SegmentationDeck>().encoder, model_.stride());
  WEFT_CHECK(!deck.data.short_sides.empty() && deck.data.short_sides.size() <= ops::most_scales,
             Exit::usage, "name the short sides in pixels, such as [300, 375, 450, 525, 600]",
             "data.short_sides has {} sides: 1 to {} scales can be taken",
             deck.data.short_sides.size(), ops::most_scales);
}

std::vector<ImageSize> Predictor::sizes(ImageSize size) const {
  std::vector<ImageSize> all;
  for (const std::int64_t side : deck_.data.short_sides)
    all.push_back(evaluation_size(size, side, deck_.data.max_side, deck_.data.padding));
  return all;
}

std::vector<ScaledPicture> Predictor::scaled(std::span<const std::uint8_t> rgb,
                                             ImageSize size) const {
  const RgbView picture{rgb.data(), size.height, size.width, 3 * size.width};
  std::vector<ScaledPicture> scales;
  for (const ImageSize& s : sizes(size)) {
    ScaledPicture& scale = scales.emplace_back();
    scale.size = s;
    scale.rgb.resize(s.height * s.width * 3);
    pillow_resize(picture, s.height, s.width, PillowFilter::bilinear, scale.rgb.data(),
                  3 * s.width);
  }
  return scales;
}

Predictor::Tensors Predictor::run(const std::vector<ScaledPicture>& scales, ImageSize size,
                                  std::span<const std::uint8_t> labels, bool labelled) {
  const ops::PixelScale scale = pixel_scale(deck_.get<SegmentationDeck>());
  std::vector<Tensor> logits;
  for (const ScaledPicture& picture : scales) {
    Tensor image =
        network_pixels(Tensor::from_host(std::span<const std::uint8_t>(picture.rgb),
                                         {1, picture.size.height, picture.size.width, 3}),
                       scale, model_dtype(deck_));
    Tape tape(Tape::Mode::infer);
    const Var x = make_var(std::move(image), false);
    logits.push_back(model_.forward({tape, model_.params()}, x, norm_, {}, false).main->value);
  }
  const std::vector<std::int64_t> zeros(3 * classes_);
  Tensors t{Tensor::empty({size.height, size.width}, DType::u8),
            Tensor::from_host(std::span<const std::int64_t>(zeros), {3, classes_})};
  Tensor label, scores;
  if (labelled) label = Tensor::from_host(labels, {size.height, size.width});
  ops::predict_classes(t.classes, logits, label, t.counts, scores);
  return t;
}

Prediction Predictor::predict(const std::vector<ScaledPicture>& scales, ImageSize size,
                              std::span<const std::uint8_t> labels) {
  const double begin = now_seconds();
  const Tensors t = run(scales, size, labels, !labels.empty());
  Prediction p;
  const Tensor classes = t.classes.to_host();
  p.classes.assign(classes.span<std::uint8_t>().begin(), classes.span<std::uint8_t>().end());
  if (!labels.empty()) {
    const Tensor counts = t.counts.to_host();
    p.counts.assign(counts.span<std::int64_t>().begin(), counts.span<std::int64_t>().end());
  }
  p.seconds = now_seconds() - begin;
  return p;
}

double Predictor::cost(ImageSize size) const {
  double sum = 0;
  for (const ImageSize& s : sizes(size)) sum += model_.flops(s.height, s.width);
  // Resizing logits and taking their softmax, some ten operations each.
  return sum + 10.0 * static_cast<double>(size.height * size.width * classes_) *
                   static_cast<double>(deck_.data.short_sides.size());
}

MemoryNeed Predictor::plan(ImageSize size, bool labelled, std::size_t capacity) {
  std::vector<ScaledPicture> scales;
  for (const ImageSize& s : sizes(size)) scales.push_back({s, {}});
  return memory_of(capacity, [&] { run(scales, size, {}, labelled); });
}

void Predictor::check_memory(ImageSize size, bool labelled, std::size_t capacity) {
  if (std::ranges::find(known_, size) != known_.end()) return;
  WEFT_CHECK(plan(size, labelled, capacity).fits, Exit::data,
             "set a smaller data.max_side or data.short_sides, or give the rank more memory "
             "(memory.arena_gib)",
             "a picture of {}x{} needs {:.2f} GiB, this rank has {:.2f}", size.height, size.width,
             gib(plan(size, labelled).bytes), gib(capacity));
  known_.push_back(size);
}

}  // namespace weft
