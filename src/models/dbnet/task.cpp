#include "models/dbnet/task.h"

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "data/text_images/text_source.h"
#include "models/dbnet/weights.h"
#include "nn/exchange.h"
#include "nn/image_ops.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/text_loss.h"
#include "tensor/device.h"
#include "train/data_parallel.h"

namespace weft {
namespace {

// What the data says and what the loss reads.
static_assert(text_bit == ops::TextPixel::text && counts_bit == ops::TextPixel::counts &&
              threshold_bit == ops::TextPixel::threshold);

// Bytes on their device; waits for nothing.
void copy_bytes(const Tensor& from, Tensor& to) {
  if (from.device() == DeviceKind::cuda)
    device_runtime().copy(to.raw(), from.raw(), from.bytes(), Stream::compute);
  else
    std::memcpy(to.raw(), from.raw(), from.bytes());
}

// What a micro-batch trains on.
struct Batch {
  Tensor images;             // f32 or bf16 [N,1,H,W,3], normalised
  Tensor flags, thresholds;  // u8 [N,H,W]
};

// `bytes` holds pixels, flags and thresholds of one picture after the other. While planning it is
// undefined.
Batch unpack(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes, DType dtype) {
  const auto N = static_cast<std::int64_t>(clips.what.clips.size());
  const std::int64_t H = bucket.height, W = bucket.width;
  Batch b;
  b.images = Tensor::empty({N, 1, H, W, 3}, dtype);
  b.flags = Tensor::empty({N, H, W}, DType::u8);
  b.thresholds = Tensor::empty({N, H, W}, DType::u8);
  const std::int32_t whole[] = {static_cast<std::int32_t>(H), static_cast<std::int32_t>(W)};
  const Tensor valid = Tensor::from_host(std::span<const std::int32_t>(whole), {1, 2});
  if (!bytes.defined()) return b;
  const std::int64_t pixels = H * W, stride = static_cast<std::int64_t>(bucket.clip_bytes());
  for (std::int64_t i = 0; i < N; ++i) {
    const std::int64_t rgb = i * stride, flags = rgb + 3 * pixels, thresholds = flags + pixels;
    Tensor image = b.images.slice(i, i + 1), flag = b.flags.slice(i, i + 1);
    Tensor threshold = b.thresholds.slice(i, i + 1);
    ops::normalise_images(bytes.slice(rgb, flags).view({1, H, W, 3}), valid, dbnet_pixel_scale(),
                          image);
    copy_bytes(bytes.slice(flags, thresholds), flag);
    copy_bytes(bytes.slice(thresholds, thresholds + pixels), threshold);
  }
  return b;
}

}  // namespace

DbnetTask::DbnetTask(const Deck& deck)
    : deck_(deck), model_(deck.get<DbnetDeck>(), deck.get<DbnetDeck>().deformable == "on") {
  const double gain = deck.get<DbnetDeck>().conv2_gain;
  WEFT_CHECK(gain == 1, Exit::usage,
             "leave it 1 to train, and set it for weft score if the count shall be Open-Sora's",
             "model.conv2_gain = {}: it imitates convolutions that a released network lost when it "
             "is scored, and a training would learn it away",
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
  return {static_cast<std::size_t>(model_.params().groups()), own};
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

std::string DbnetTask::start_weights() {
  params().initialise(static_cast<std::uint64_t>(deck_.run.seed));
  return load_dbnet(deck_.model.weights, deck_.get<DbnetDeck>(), params());
}

void DbnetTask::share_clips(Communicator* group) {
  WEFT_CHECK(group == nullptr, Exit::usage, "set parallel.sp = 1",
             "images cannot be shared by ranks (parallel.sp = {})", deck_.parallel.sp);
}

void DbnetTask::join_ranks(MPI_Comm world) {
  int size = 1;
  MPI_Comm_size(world, &size);
  if (size > 1) all_ = make_communicator(world);
}

double DbnetTask::cost(const Bucket& bucket, double recompute) const {
  return model_.flops(bucket.height, bucket.width, true) * (3 + recompute);
}

TrainingWork DbnetTask::prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                                double recompute, float weight) {
  const Batch batch = unpack(bucket, clips, bytes, bf16() ? DType::bf16 : DType::f32);
  TrainingWork work;
  work.key = fmt::format("pictures at {} {} {} weight {}", batch.images.raw(), batch.flags.raw(),
                         batch.thresholds.raw(), weight);
  work.parts.push_back([this, batch, recompute, weight](Tape& tape) {
    return loss(tape, batch.images, batch.flags, batch.thresholds, recompute, weight);
  });
  return work;
}

TrainingLoss DbnetTask::loss(Tape& tape, const Tensor& images, const Tensor& flags,
                             const Tensor& thresholds, double recompute, float weight) {
  const nn::Context c{tape, params()};
  const std::int64_t N = images.dim(0);
  const auto recomputed =
      static_cast<std::int64_t>(std::ceil(recompute * static_cast<double>(model_.blocks()) - 1e-9));
  const Dbnet::Maps maps = model_.forward(c, make_var(images, false), norm_, true, recomputed);
  // The loss is a mean over the micro-batch; each picture counts it as its own.
  const Tensor stats = nn::text_loss(c, maps.probability, maps.threshold, flags, thresholds,
                                     weight * static_cast<float>(N));
  TrainingLoss loss{Tensor::empty({N}, DType::f32), Tensor::empty({3}, DType::f32)};
  ops::text_summary(stats, loss.clips, loss.terms);
  return loss;
}

void DbnetTask::end_step(const StepReport&, std::int64_t, std::int64_t) {
  if (!all_) return;
  Tensor& running = params().fixed();
  all_->wait(all_->all_reduce_sum(running));
  ops::scaled_add(running, 1.0f / static_cast<float>(all_->size()), Tensor(), running, false);
}

}  // namespace weft
