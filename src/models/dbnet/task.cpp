#include "models/dbnet/task.h"

#include "core/error.h"
#include "data/text_images/text_images.h"
#include "nn/image_ops.h"
#include "ops/loss.h"
#include "train/data_parallel.h"

namespace weft {
namespace {

// What the data says and what the loss reads.
static_assert(text_bit == ops::TextPixel::text && counts_bit == ops::TextPixel::counts &&
              threshold_bit == ops::TextPixel::threshold);

}  // namespace

DbnetTask::DbnetTask(const Deck& deck)
    : ImageTask(deck), model_(deck.get<DbnetDeck>(), deck.get<DbnetDeck>().deformable == "on") {
  const double gain = deck.get<DbnetDeck>().conv2_gain;
  WEFT_CHECK(
      gain == 1, Exit::usage,
      "set it to 1 to train; set it for weft score to count as Open-Sora does",
      "model.conv2_gain = {}: it imitates what scoring with Open-Sora loses of a released network, "
      "and training would undo it",
      gain);
}

std::string DbnetTask::describe() const {
  const DbnetDeck& m = deck_.get<DbnetDeck>();
  return fmt::format("text detection: {} + {}{}, {}, batch norm by rank", m.backbone,
                     m.asf ? "DBNet++" : "DBNet",
                     m.deformable == "on" ? ", deformable convolutions" : "", deck_.model.dtype);
}

std::vector<std::string> DbnetTask::terms() const {
  return {"probability_loss", "threshold_loss", "binary_loss"};
}

// The original decays every parameter, norms and biases too.
std::vector<TrainDeck> DbnetTask::optimizers() const {
  TrainDeck own = optimizer_of(deck_.train, "sgd", 0.9, 1e-4, 0);
  own.lr = deck_.get<DbnetTrainDeck>().lr_detector;
  return {own};
}

void DbnetTask::check(std::span<const Bucket> buckets) {
  for (const Bucket& b : buckets) {
    WEFT_CHECK(b.holds_text(), Exit::usage,
               "name a list of pictures with polygons in data.path, or text:",
               "{} holds no pictures with text regions, and a text detector trains on them",
               deck_.data.path);
    WEFT_CHECK(b.height % Dbnet::stride == 0 && b.width % Dbnet::stride == 0, Exit::usage,
               fmt::format("set data.crop to a multiple of {}", Dbnet::stride),
               "pictures of {}x{}, and the network takes sides that are multiples of {}", b.height,
               b.width, Dbnet::stride);
  }
}

std::string DbnetTask::load_start() {
  return load_dbnet(deck_.model, deck_.get<DbnetDeck>(), params());
}

TrainingWork DbnetTask::prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                                double recompute, float weight) {
  const Batch batch = unpack(bucket, clips, bytes, dbnet_pixel_scale(), 2, 1);
  const Tensor flags = batch.maps[0], thresholds = batch.maps[1];
  TrainingWork work;
  work.key = fmt::format("pictures at {} {} {} weight {}", batch.images.raw(), flags.raw(),
                         thresholds.raw(), weight);
  work.parts.push_back([=, this, images = batch.images](Tape& tape) {
    return loss(tape, images, flags, thresholds, recompute, weight);
  });
  return work;
}

TrainingLoss DbnetTask::loss(Tape& tape, const Tensor& images, const Tensor& flags,
                             const Tensor& thresholds, double recompute, float weight) {
  const nn::Context c{tape, params()};
  const std::int64_t N = images.dim(0);
  const Dbnet::Maps maps = model_.forward(c, make_var(images, false), norm_, true,
                                          recomputed_blocks(recompute, model_.blocks()));
  // The loss is a mean over the micro-batch; each picture counts it as its own.
  const Tensor stats = nn::text_loss(c, maps.probability, maps.threshold, flags, thresholds,
                                     weight * static_cast<float>(N));
  TrainingLoss loss{Tensor::empty({N}, DType::f32), Tensor::empty({3}, DType::f32)};
  ops::text_summary(stats, loss.clips, loss.terms);
  return loss;
}

}  // namespace weft
