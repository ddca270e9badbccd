#include "models/segmentation/task.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "data/images/labelled_images.h"
#include "models/segmentation/classes.h"
#include "models/segmentation/predictor.h"
#include "nn/exchange.h"
#include "nn/image_ops.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "train/data_parallel.h"
#include "train/validation.h"

namespace weft {

SegmentationTask::SegmentationTask(const Deck& deck)
    : ImageTask(deck),
      train_(deck.get<SegmentationTrainDeck>()),
      model_(deck.get<SegmentationDeck>()) {
  norm_.use_running = train_.fix_bn;
  norm_.momentum = static_cast<float>(train_.bn_momentum);
  class_weights_.assign(train_.class_weight.begin(), train_.class_weight.end());
  if (class_weights_.empty()) class_weights_.assign(deck.get<SegmentationDeck>().num_classes, 1.0f);
}

std::string SegmentationTask::describe() const {
  const SegmentationDeck& m = deck_.get<SegmentationDeck>();
  std::string loss;
  if (!train_.class_weight.empty()) loss += ", weighted classes";
  if (train_.class_weight_by != "none") loss += ", classes weighted by " + train_.class_weight_by;
  if (train_.dice_weight > 0) loss += fmt::format(", Dice {}", train_.dice_weight);
  if (train_.ohem_thresh > 0) loss += fmt::format(", OHEM {}", train_.ohem_thresh);
  return fmt::format("segmentation: {} + {}, {} classes, {}, batch norm {}{}", m.encoder, m.decoder,
                     m.num_classes, deck_.model.dtype,
                     train_.fix_bn    ? "fixed"
                     : norm_.size > 1 ? fmt::format("over {} ranks", norm_.size)
                                      : "by rank",
                     loss);
}

std::vector<std::string> SegmentationTask::terms() const {
  std::vector<std::string> names = {"accuracy", "main_loss"};
  if (model_.has_aux()) names.push_back("aux_loss");
  if (train_.dice_weight > 0) names.push_back("dice_loss");
  return names;
}

// Groups: batch norm and biases of encoder and decoder, then their convolutions
// (docs/models/segmentation.md, Training).
std::vector<TrainDeck> SegmentationTask::optimizers() const {
  const TrainDeck own = optimizer_of(deck_.train, "sgd", 0.9, 1e-4, 0);
  std::vector<TrainDeck> all(4, own);
  for (const std::size_t group : {0, 1}) all[group].weight_decay = 0;
  for (const std::size_t group : {0, 2}) all[group].lr = train_.lr_encoder;
  for (const std::size_t group : {1, 3}) all[group].lr = train_.lr_decoder;
  return all;
}

void SegmentationTask::check(std::span<const Bucket> buckets) {
  const std::int64_t rate = model_.label_rate(), stride = model_.stride();
  const std::int64_t classes = deck_.get<SegmentationDeck>().num_classes;
  WEFT_CHECK(train_.class_weight.empty() || std::ssize(train_.class_weight) == classes, Exit::usage,
             "give a weight for each class, in the order of the classes",
             "train.class_weight has {} weights, and model.num_classes = {}",
             train_.class_weight.size(), classes);
  for (const Bucket& b : buckets) {
    WEFT_CHECK(b.label_rate > 0 && !b.holds_text(), Exit::usage,
               "name a store of labelled images in data.path (weft ingest with ingest.images), or "
               "shapes:",
               "{} holds {}, and segmentation trains on labelled images", deck_.data.path,
               b.holds_text() ? "pictures with text" : "clips");
    WEFT_CHECK(b.label_rate == rate, Exit::usage, fmt::format("set data.label_rate = {}", rate),
               "data.label_rate = {}, and {} with {} gives a prediction for each {} pixels",
               b.label_rate, deck_.get<SegmentationDeck>().encoder,
               deck_.get<SegmentationDeck>().decoder, rate);
    WEFT_CHECK(b.label_classes <= deck_.get<SegmentationDeck>().num_classes, Exit::usage,
               fmt::format("set model.num_classes = {}", b.label_classes),
               "{} has labels of {} classes, and model.num_classes = {}", deck_.data.path,
               b.label_classes, deck_.get<SegmentationDeck>().num_classes);
    WEFT_CHECK(deck_.data.pad_label < deck_.get<SegmentationDeck>().num_classes, Exit::usage,
               "set data.pad_label to a class, or -1 to leave the padding out of the loss",
               "data.pad_label = {}, and model.num_classes = {}", deck_.data.pad_label,
               deck_.get<SegmentationDeck>().num_classes);
    WEFT_CHECK(b.height % stride == 0 && b.width % stride == 0, Exit::usage,
               fmt::format("set data.padding = {}", stride),
               "data.padding = {}, and {} takes sides that are multiples of {}", deck_.data.padding,
               deck_.get<SegmentationDeck>().encoder, stride);
  }
}

void SegmentationTask::open(std::span<const Bucket> buckets) {
  ImageTask::open(buckets);
  // Ordinary batch norm after 3 / momentum steps still keeps 5 % of the running statistics from
  // before the run; ranks that share theirs keep nothing.
  const double momentum = norm_.momentum >= 0 ? train_.bn_momentum : 0.001;
  const double kept = std::pow(1 - momentum, static_cast<double>(deck_.train.steps));
  if (kept > 0.05 && !train_.fix_bn && norm_.size == 1 && log::rank() == 0)
    log::warn(
        "batch norm's momentum is {}: after {}, {:.0f} % of its running statistics, which "
        "evaluation uses, are still those from before the training; {}, or train.fix_bn = true to "
        "keep those of pretrained weights",
        momentum, counted(deck_.train.steps, "step"), 100 * kept,
        momentum < 0.1 ? "set train.bn_momentum = 0.1" : "train longer");
  if (train_.class_weight_by == "none") return;
  const std::int64_t classes = deck_.get<SegmentationDeck>().num_classes;
  const auto images = open_labelled_images(deck_.data.path, false);
  class_weights_ = frequency_weights(*images, classes, train_.class_weight_by);
  if (log::rank() != 0) return;
  const std::vector<std::string> names = class_names(deck_, images->class_names());
  constexpr std::int64_t most = 20;
  std::string list;
  for (std::int64_t c = 0; c < std::min(classes, most); ++c)
    list += fmt::format("{}{} {:.3g}", c > 0 ? ", " : "", names[c], class_weights_[c]);
  log::info("class weights by {}: {}{}", train_.class_weight_by, printable(list, 2000),
            classes > most ? ", ..." : "");
}

Tensor SegmentationTask::class_weights() const {
  return Tensor::from_host(std::span<const float>(class_weights_), {std::ssize(class_weights_)});
}

std::string SegmentationTask::load_start() {
  return load_segmentation(deck_.model.weights, deck_.get<SegmentationDeck>(), params(),
                           &deck_.model);
}

std::int64_t SegmentationTask::together(int ranks) const {
  if (train_.fix_bn || !train_.sync_bn) return 1;
  return train_.bn_ranks > 0 ? std::min<std::int64_t>(train_.bn_ranks, ranks) : ranks;
}

void SegmentationTask::join_ranks(MPI_Comm world, Communicator* whole) {
  int size = 1;
  MPI_Comm_size(world, &size);
  if (train_.fix_bn || size == 1) return;
  const std::int64_t sharing = together(size);
  WEFT_CHECK(!train_.sync_bn || train_.bn_ranks == 0 || size % train_.bn_ranks == 0, Exit::usage,
             "set train.bn_ranks to a divisor of the number of ranks, or 0 for all",
             "{} ranks cannot form groups of train.bn_ranks = {}", size, train_.bn_ranks);
  ranks_ = nn::make_sequence_group(world, sharing, default_comm_timeout, whole);
  norm_.ranks = ranks_.get();
  norm_.size = static_cast<int>(sharing);
  if (sharing < size) ImageTask::join_ranks(world, whole);
}

double SegmentationTask::share(const Bucket& bucket, const MicroBatch& clips, std::int64_t) const {
  if (clips.views.empty()) return 1;
  return static_cast<double>(clips.height * clips.width) /
         static_cast<double>(bucket.height * bucket.width);
}

Tensor SegmentationTask::dropout(const LoadedBatch& clips, std::int64_t channels,
                                 std::uint32_t stream) const {
  const double p = deck_.get<SegmentationDeck>().dropout;
  if (p <= 0 || channels == 0 || train_.fix_bn) return {};
  const auto N = static_cast<std::int64_t>(clips.what.clips.size());
  Tensor keep = Tensor::empty({N, channels}, DType::f32);
  if (clips.what.samples.empty()) return keep;
  std::vector<float> values;
  for (const SampleId sample : clips.what.samples) {
    const Philox random(static_cast<std::uint64_t>(deck_.run.seed), Purpose::channel_dropout,
                        static_cast<std::uint64_t>(clips.step), static_cast<std::uint64_t>(sample));
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto element = stream * (1u << 16) + static_cast<std::uint32_t>(c);
      const bool dropped = static_cast<double>(random.uniform(element)) < p;
      values.push_back(dropped ? 0.0f : static_cast<float>(1 / (1 - p)));
    }
  }
  keep.set(std::span<const float>(values));
  return keep;
}

// On the host, since a store need not know its classes; labels are few beside the pixels.
void SegmentationTask::check_labels(const Bucket& bucket, const LoadedBatch& clips) const {
  const MicroBatch& what = clips.what;
  if (what.views.empty()) return;
  const std::size_t each = bucket.clip_bytes(what.height, what.width);
  const auto pixels = static_cast<std::size_t>(what.height * what.width * 3);
  for (std::size_t i = 0; i < what.views.size(); ++i) {
    const auto labels = clips.bytes.subspan(i * each + pixels, each - pixels);
    const auto most = std::to_integer<std::int64_t>(*std::ranges::max_element(labels));
    WEFT_CHECK(
        most <= deck_.get<SegmentationDeck>().num_classes, Exit::data,
        "set model.num_classes to the classes of the data, or ingest it with "
        "ingest.num_classes, which finds such labels",
        "{} has a label of class {}, and model.num_classes = {} (classes are counted from 0)",
        clips.info[i].source, most - 1, deck_.get<SegmentationDeck>().num_classes);
  }
}

TrainingWork SegmentationTask::prepare(const Bucket& bucket, const LoadedBatch& clips,
                                       const Tensor& bytes, double recompute, float weight) {
  check_labels(bucket, clips);
  const Batch batch = unpack(bucket, clips, bytes, pixel_scale(deck_.get<SegmentationDeck>()), 1,
                             bucket.label_rate);
  const Segmentation::Dropout drop{dropout(clips, model_.dropout_channels(), 0),
                                   dropout(clips, model_.aux_dropout_channels(), 1)};
  TrainingWork work;
  work.parts.push_back(
      [this, batch, drop, recompute, weight, of_class = class_weights()](Tape& tape) {
        return loss(tape, batch.images, batch.maps[0], drop, recompute, weight, of_class);
      });
  return work;
}

TrainingLoss SegmentationTask::loss(Tape& tape, const Tensor& images, const Tensor& labels,
                                    const Segmentation::Dropout& drop, double recompute,
                                    float weight, const Tensor& class_weights) {
  const nn::Context c{tape, params()};
  const std::int64_t N = labels.dim(0);
  const auto logits = model_.forward(c, make_var(images, false), norm_, drop, true,
                                     recomputed_blocks(recompute, model_.blocks()));
  // The loss is a mean over the micro-batch; each image counts it as its own.
  const float each = weight * static_cast<float>(N);
  const auto scale = static_cast<float>(train_.deep_sup_scale);
  const ops::ClassLoss own{static_cast<float>(train_.dice_weight),
                           static_cast<float>(train_.ohem_thresh), train_.ohem_min_kept * N};
  const auto loss_of = [&](const Var& x, float factor) {
    return nn::class_loss(c, x, labels, class_weights, own, factor);
  };
  const Tensor main = loss_of(logits.main, each);
  const Tensor aux = logits.aux ? loss_of(logits.aux, each * scale) : Tensor();
  TrainingLoss loss{Tensor::empty({N}, DType::f32),
                    Tensor::empty({std::ssize(terms())}, DType::f32)};
  ops::class_loss_summary(main, aux, own.dice, scale, loss.clips, loss.terms);
  return loss;
}

std::string SegmentationTask::state() const {
  return norm_.size > 1 ? "batch_norm shared" : "batch_norm own";
}

// tmp = iter * running with iter = 1 / momentum, where it saturates
// (docs/models/segmentation.md, Batch norm).
void SegmentationTask::set_state(const std::string& text) {
  if (norm_.size == 1 || !text.ends_with("own")) return;
  const bool hrnet = deck_.get<SegmentationDeck>().encoder == "hrnetv2";
  for (const auto& p : params().all()) {
    if (!p->name.ends_with("._running_iter")) continue;
    const std::string layer = p->name.substr(0, p->name.size() - std::strlen("_running_iter"));
    const float own = hrnet && layer.starts_with("encoder.") ? 0.1f : 0.001f;
    const float iter = 1 / std::max(1e-6f, norm_.momentum >= 0 ? norm_.momentum : own);
    p->set(0, std::span<const float>(&iter, 1));
    for (const char* name : {"running_mean", "running_var"})
      ops::scaled_add(params().find(layer + name)->value, iter, Tensor(),
                      params().find(layer + "_tmp_" + name)->value, false);
  }
}

// Validation of a segmentation in training: the model that is trained, as `weft evaluate` runs it.
namespace {

// Figures of an image: [3, classes] pixels predicted rightly, predicted, labelled.
class SegmentationValidation : public ValidationSet {
 public:
  SegmentationValidation(const Deck& deck, Segmentation& model, const LabelledImages& images)
      : predictor_(deck, model), images_(images) {
    static constexpr const char* names[] = {"landscape", "portrait"};
    for (std::int64_t i = 0; i < images.count(); ++i)
      items_.push_back({names[orientation_of(images.size(i))], predictor_.cost(images.size(i))});
  }

  std::size_t figures() const override {
    return static_cast<std::size_t>(3 * predictor_.num_classes());
  }

  void measure(std::size_t item, std::span<double> figures) override {
    const auto i = static_cast<std::int64_t>(item);
    LabelledImage image;
    images_.read(i, image);
    check_classes(i, image);
    const Prediction p =
        predictor_.predict(predictor_.scaled(image.rgb, image.size), image.size, image.labels);
    std::ranges::transform(p.counts, figures.begin(),
                           [](std::int64_t n) { return static_cast<double>(n); });
  }

  std::size_t plan(std::size_t capacity) override {
    std::size_t most = 0;
    std::vector<ImageSize> known;
    for (std::int64_t i = 0; i < images_.count(); ++i) {
      const ImageSize size = images_.size(i);
      if (std::ranges::find(known, size) != known.end()) continue;
      known.push_back(size);
      const MemoryNeed need = predictor_.plan(size, true, capacity);
      check_validation_fits(need, capacity,
                            fmt::format("{}, of {}x{},", images_.name(i), size.height, size.width));
      most = std::max(most, need.bytes);
    }
    return most;
  }

  ValidationScore score(std::span<const double> sums, std::int64_t) const override {
    const auto classes = static_cast<std::size_t>(predictor_.num_classes());
    double iou = 0, right = 0, pixels = 0;
    for (std::size_t c = 0; c < classes; ++c) {
      const double joined = sums[classes + c] + sums[2 * classes + c] - sums[c];
      iou += sums[c] / (joined + 1e-10);
      right += sums[c];
      pixels += sums[2 * classes + c];
    }
    iou /= static_cast<double>(classes);
    return {1 - iou, {{"mean_iou", iou}, {"accuracy", pixels > 0 ? right / pixels : 0}}};
  }

 private:
  void check_classes(std::int64_t i, const LabelledImage& image) const {
    const std::int64_t most = predictor_.num_classes();
    const std::uint8_t greatest =
        image.labels.empty() ? std::uint8_t{0} : *std::ranges::max_element(image.labels);
    WEFT_CHECK(greatest <= most, Exit::data,
               "set model.num_classes to what the data has, or hold out other images",
               "{} has pixels of class {}, and the model knows 0 to {}", images_.name(i),
               greatest - 1, most - 1);
  }

  Predictor predictor_;
  const LabelledImages& images_;
};

}  // namespace

std::unique_ptr<ValidationSet> SegmentationTask::validation_set(const HeldOut& data) {
  WEFT_CHECK(data.images != nullptr, Exit::usage,
             "name a store of labelled images in validation.path, or shapes:",
             "validation.path = {} holds no labelled images", deck_.get<ValidationDeck>().path);
  return std::make_unique<SegmentationValidation>(deck_, model_, *data.images);
}

}  // namespace weft
