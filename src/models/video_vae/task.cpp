#include "models/video_vae/task.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "models/pixels.h"
#include "models/video_vae/options.h"
#include "ops/optimizer.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "train/metrics/step_report.h"
#include "train/validation.h"

namespace weft {
namespace {

const std::string discriminator_prefix = "discriminator.";

}  // namespace

VaeTask::VaeTask(const Deck& deck)
    : deck_(deck), vae_(deck.get<VaeDeck>(), deck.get<VaeTrainDeck>().freeze_spatial) {
  const VaeTrainDeck& v = deck.get<VaeTrainDeck>();
  WEFT_CHECK(v.pixel_loss || v.latent_loss, Exit::usage,
             "set vae_train.pixel_loss (stage 3) or vae_train.latent_loss (stages 1 and 2)",
             "a VAE that trains neither for pixels nor for latents learns nothing");
  WEFT_CHECK(deck.model.weights.empty(), Exit::usage, "name the file in vae.weights",
             "model.weights = \"{}\" is for STDiT3, and model.name is \"vae\"", deck.model.weights);
  WEFT_CHECK(v.discriminator != "none" || (v.lecam_weight == 0 && v.gradient_penalty_weight == 0),
             Exit::usage, "set vae_train.discriminator = \"patchgan\"",
             "vae_train.lecam_weight and gradient_penalty_weight belong to a discriminator, and "
             "there is none");
  if (v.discriminator != "none") gan_.emplace(vae_.params(), discriminator_prefix);
  loss_ = std::make_unique<VaeLoss>(deck, vae_, nullptr, gan_ ? &*gan_ : nullptr);
}

std::string VaeTask::describe() const {
  const VaeDeck& v = deck_.get<VaeDeck>();
  return fmt::format(
      "vae: 2D C = {}{}, temporal C = {} x [{}], {}{}", fmt::join(v.spatial_channels, " "),
      deck_.get<VaeTrainDeck>().freeze_spatial ? " (frozen)" : "", v.filters,
      fmt::join(v.channel_multipliers, " "), v.dtype, gan_ ? ", PatchGAN discriminator" : "");
}

std::vector<TrainDeck> VaeTask::optimizers() const {
  std::vector<TrainDeck> all{deck_.train};
  if (!gan_) return all;
  all.push_back(deck_.train);
  all.back().lr = deck_.get<VaeTrainDeck>().discriminator_lr;
  return all;
}

void VaeTask::check(std::span<const Bucket> buckets) {
  const VaeTrainDeck& v = deck_.get<VaeTrainDeck>();
  const bool pixels = v.pixel_loss || gan_;
  const bool perceptual = pixels && v.perceptual_weight > 0 && !v.lpips_weights.empty();
  const std::int64_t cut = vae_.pixels_a_latent();
  // LPIPS halves frames four times, so it needs 16 pixels.
  const std::int64_t least = gan_ ? PatchGan::least_size : perceptual ? 16 : cut;
  for (const Bucket& b : buckets) {
    check_holds_clips(b);
    WEFT_CHECK(b.dtype == DType::u8 && b.channels == 3, Exit::usage,
               "a VAE trains on pixels: name a clip store of footage in data.path",
               "bucket {} holds latents", b.name);
    WEFT_CHECK(b.height % cut == 0 && b.width % cut == 0, Exit::usage,
               fmt::format("cut clips to a multiple of {} (ingest.height, ingest.width)", cut),
               "bucket {} has frames of {}x{} pixels, a latent stands for {}x{}", b.name, b.height,
               b.width, cut, cut);
    WEFT_CHECK(b.height >= least && b.width >= least, Exit::usage,
               fmt::format("use clips of at least {0}x{0} pixels", least),
               "bucket {} has frames of {}x{} pixels, too small for {}", b.name, b.height, b.width,
               gan_ ? "the discriminator" : "LPIPS");
  }
  if (perceptual) lpips_.emplace(bf16());
  loss_ =
      std::make_unique<VaeLoss>(deck_, vae_, lpips_ ? &*lpips_ : nullptr, gan_ ? &*gan_ : nullptr);
}

void VaeTask::open(std::span<const Bucket> buckets) {
  check(buckets);
  const VaeTrainDeck& v = deck_.get<VaeTrainDeck>();
  if (lpips_)
    lpips_->load(v.lpips_weights);
  else if ((v.pixel_loss || gan_) && v.perceptual_weight > 0 && log::rank() == 0)
    log::warn("vae_train.lpips_weights names no file: the VAE trains without LPIPS");
}

std::string VaeTask::start_weights() {
  params().initialise(static_cast<std::uint64_t>(deck_.run.seed));
  if (deck_.get<VaeDeck>().weights.empty()) return "";
  WeightFiles files = WeightFiles::open(deck_.get<VaeDeck>().weights);
  const WeightNames names = to_start_from(deck_.model, vae_weight_names());
  const bool whole = std::any_of(files.tensors().begin(), files.tensors().end(), [](const auto& t) {
    return t.name.find("temporal_vae.") != t.name.npos;
  });
  // What the files must hold: a table of names and shapes, without memory.
  ParameterTable wanted;
  const SpatialVae spatial(deck_.get<VaeDeck>(), wanted, "spatial_vae.module.");
  if (whole) const TemporalVae temporal(deck_.get<VaeDeck>(), wanted, "temporal_vae.");
  check_weights(files, wanted, names);
  read_weights(files, params(), names,
               [&](const Parameter& p) { return wanted.find(p.name) == nullptr; });
  return weft::describe(files, true) +
         (whole ? "" : ": the 2D VAE alone; the temporal one starts at random");
}

void VaeTask::share_clips(Communicator* group) {
  WEFT_CHECK(group == nullptr, Exit::usage, "set parallel.sp = 1",
             "the VAE's clips cannot be shared by ranks (parallel.sp = {})", deck_.parallel.sp);
}

// Groups of frames that the 2D encoder records; none if it is not trained.
std::int64_t VaeTask::blocks(const Bucket& bucket) const {
  return deck_.get<VaeTrainDeck>().freeze_spatial ? 0 : loss_->groups(bucket.frames);
}

// In pixels: all other factors are the same for every bucket.
double VaeTask::cost(const Bucket& bucket, double recompute) const {
  return static_cast<double>(bucket.frames * bucket.height * bucket.width) * (3 + recompute);
}

// LPIPS's network is not part of params().
TrainingTask::ClipFacts VaeTask::facts(const Bucket& b) {
  const std::int64_t side = vae_.pixels_a_latent();
  ClipFacts facts;
  facts.unit = "latents";
  facts.units = vae_.temporal().latent_frames(b.frames) * (b.height / side) * (b.width / side);
  if (lpips_) facts.other_weights = lpips_->weight_bytes();
  return facts;
}

std::int64_t VaeTask::frames_drawn(std::int64_t frames, std::int64_t step, SampleId sample) const {
  const VaeTrainDeck& v = deck_.get<VaeTrainDeck>();
  const Philox random(static_cast<std::uint64_t>(deck_.run.seed), Purpose::clip_length,
                      static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(sample));
  if (static_cast<double>(random.uniform(0)) < v.image_share) return 1;
  return v.random_length ? 1 + random.below(1, static_cast<std::uint32_t>(frames)) : frames;
}

double VaeTask::share(const Bucket& bucket, const MicroBatch& clips, std::int64_t step) const {
  std::int64_t frames = 0;
  for (const SampleId s : clips.samples) frames += frames_drawn(bucket.frames, step, s);
  return static_cast<double>(frames) /
         static_cast<double>(bucket.frames * std::ssize(clips.samples));
}

// While planning, the longest clip there can be.
VaeSample VaeTask::make_sample(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                               std::int64_t index) {
  const bool planning = clips.what.samples.empty();
  const SampleId id = planning ? 0 : clips.what.samples[index];
  const std::int64_t T = planning ? bucket.frames : frames_drawn(bucket.frames, clips.step, id);
  const auto clip_bytes = static_cast<std::int64_t>(bucket.clip_bytes());
  const auto step = static_cast<std::uint64_t>(clips.step);
  VaeSample s = sample_of(
      bucket, planning ? Tensor() : bytes.slice(index * clip_bytes, (index + 1) * clip_bytes), T,
      {Purpose::spatial_posterior, Purpose::posterior, step, step, id});
  const std::int64_t start = deck_.get<VaeTrainDeck>().discriminator_start;
  s.adversarial = gan_ && (planning ? deck_.train.steps > start : clips.step >= start);
  return s;
}

VaeSample VaeTask::sample_of(const Bucket& bucket, const Tensor& bytes, std::int64_t T,
                             const NoiseOf& of) {
  const std::int64_t H = bucket.height, W = bucket.width, cut = vae_.pixels_a_latent();
  VaeSample s;
  s.frames = pixel_frames(bytes, 0, T, H, W).view({1, T, H, W, 3});
  if (bf16()) {
    Tensor rounded = Tensor::empty(s.frames.shape(), DType::bf16);
    ops::convert(s.frames, rounded);
    s.frames = rounded;
  }
  const auto noise = [&](Purpose purpose, std::uint64_t step, std::int64_t frames) {
    Tensor eps =
        Tensor::empty({1, frames, H / cut, W / cut, SpatialVae::latent_channels}, DType::f32);
    ops::fill_normal(static_cast<std::uint64_t>(deck_.run.seed), static_cast<int>(purpose), step,
                     static_cast<std::uint64_t>(of.sample), eps);
    return eps;
  };
  s.spatial_noise = noise(of.spatial, of.spatial_step, T);
  s.temporal_noise = noise(of.temporal, of.temporal_step, vae_.temporal().latent_frames(T));
  return s;
}

std::unique_ptr<ValidationSet> VaeTask::validation_set(const HeldOut& data) {
  WEFT_CHECK(data.clips != nullptr, Exit::usage, "name a clip store in validation.path",
             "validation.path = {} holds no clips", deck_.get<ValidationDeck>().path);
  const VaeTrainDeck& v = deck_.get<VaeTrainDeck>();
  ClipMeasure measure;
  measure.figures = VaeLoss::terms;
  measure.run = [this](const Bucket& bucket, const LoadedBatch& clip, const Tensor& bytes) {
    const SampleId sample = clip.what.samples.empty() ? 0 : clip.what.samples.front();
    return loss_->measure(
        sample_of(bucket, bytes, bucket.frames,
                  {Purpose::held_out_noise, Purpose::held_out_noise, 0, 1, sample}));
  };
  measure.cost = [this](const Bucket& bucket) { return cost(bucket, 0); };
  measure.score = [&v](std::span<const double> sums, std::int64_t clips) {
    const auto mean = [&](VaeLoss::Term t) { return sums[t] / static_cast<double>(clips); };
    ValidationScore score;
    const std::vector<std::string> names = VaeLoss::names();
    for (const VaeLoss::Term t :
         {VaeLoss::pixel, VaeLoss::perceptual, VaeLoss::kl, VaeLoss::latent}) {
      score.terms.emplace_back(names[t], mean(t));
      if (t == VaeLoss::latent ? v.latent_loss : v.pixel_loss) score.loss += mean(t);
    }
    return score;
  };
  return make_clip_validation(*data.clips, std::move(measure));
}

TrainingWork VaeTask::prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                              double recompute, float weight) {
  TrainingWork work;
  for (std::int64_t i = 0; i < std::ssize(clips.what.clips); ++i) {
    VaeSample sample = make_sample(bucket, clips, bytes, i);
    sample.recompute = recompute;
    work.parts.push_back(
        [this, sample, weight](Tape& tape) { return (*loss_)(tape, sample, weight); });
  }
  return work;
}

void VaeTask::end_step(const StepReport& report, std::int64_t step, std::int64_t clips) {
  if (!gan_ || deck_.get<VaeTrainDeck>().lecam_weight == 0 ||
      step < deck_.get<VaeTrainDeck>().discriminator_start)
    return;
  constexpr int first = StepReport::terms + static_cast<int>(VaeLoss::logit_real);
  static_assert(int{VaeLoss::terms} <= StepReport::host_slots - StepReport::terms);
  ops::running_average(report.rows(), report.width(), first, 1.0f / static_cast<float>(clips),
                       DiscriminatorLoss::decay, loss_->discriminator_loss()->averages());
}

std::string VaeTask::state() const {
  if (!gan_ || deck_.get<VaeTrainDeck>().lecam_weight == 0) return {};
  const Tensor averages = loss_->discriminator_loss()->averages().to_host();
  // Hexadecimal floats, so that set_state() restores every bit.
  return fmt::format("lecam {:a} {:a}", averages.data<float>()[0], averages.data<float>()[1]);
}

void VaeTask::set_state(const std::string& text) {
  std::array<float, 2> averages{};
  WEFT_CHECK(std::sscanf(text.c_str(), "lecam %a %a", &averages[0], &averages[1]) == 2,
             Exit::checkpoint, "this is a bug in weft, please report it with the log",
             "the checkpoint's state of the task reads \"{}\"", text);
  if (gan_) loss_->discriminator_loss()->averages().set(std::span<const float>(averages));
}

}  // namespace weft
