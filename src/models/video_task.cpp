#include "models/video_task.h"

#include <numeric>
#include <utility>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "data/clip_store.h"
#include "models/lora.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "train/validation.h"

namespace weft {

VideoTask::VideoTask(const Deck& deck, ClipLatents latents, CaptionShape captions,
                     std::vector<std::int64_t> patch)
    : deck_(deck),
      latents_(std::move(latents)),
      captions_(std::move(captions)),
      patch_(std::move(patch)) {}

bool VideoTask::trains_adapters() const { return lora_deck(deck_).on(); }

void VideoTask::check(std::span<const Bucket> buckets) {
  for (const Bucket& b : buckets) {
    check_holds_clips(b);
    latents_.check(b);
    const Bucket seen = latents_.seen(b);
    model().check_sequence(seen.height, seen.width, group_ ? group_->size() : 1);
    check_text(b, buckets.front());
  }
}

void VideoTask::open(std::span<const Bucket> buckets) {
  WEFT_CHECK(deck_.data.text_features.empty() || deck_.get<ValidationDeck>().path.empty(),
             Exit::usage,
             "encode the text features into both stores (encode.text), or use validation.share",
             "data.text_features has captions of data.path alone, and validation.path names {}",
             deck_.get<ValidationDeck>().path);
  check(buckets);
  WEFT_CHECK(!trains_adapters() || !deck_.model.weights.empty(), Exit::usage,
             "name the weights that they adapt as model.weights",
             "lora.rank = {} trains adapters, and model.weights is empty", lora_deck(deck_).rank);
  if (log::rank() == 0 && !model().has_null_caption() && deck_.data.text_features.empty() &&
      buckets.front().text_channels == 0)
    log::warn(
        "{} has no captions: the model would be trained without text, although sampling always "
        "uses text; set encode.text = true to store features",
        deck_.data.path);
  latents_.load(buckets);
  if (deck_.data.text_features.empty()) return;
  features_ = std::make_unique<TextFeatures>(deck_.data.text_features, captions_);
  if (log::rank() != 0) return;
  DataDeck all = deck_.data;  // also the clips that are held out, or left out by data.keep
  all.keep.clear();
  all.prompt_prefixes.clear();  // features are those of captions as they are
  const std::vector<std::string> captions = captions_by_id(*open_clip_source(all, deck_.media));
  std::int64_t clips = 0;
  for (const Bucket& b : buckets) clips += b.clips;
  WEFT_CHECK(clips <= std::ssize(captions), Exit::data,
             "encode the captions into the stores (encode.text)",
             "data.text_features has captions of {} alone, and clips of another store are used",
             deck_.data.path);
  features_->check_captions(captions, all.all_paths());
}

// Text features that the store itself has.
void VideoTask::check_text(const Bucket& b, const Bucket& first) const {
  WEFT_CHECK((b.text_channels > 0) == (first.text_channels > 0), Exit::data,
             "encode the complete store either with encode.text or without it",
             "of {}, buckets {} and {}, only one has text features", deck_.data.path, first.name,
             b.name);
  if (b.text_channels == 0) return;
  WEFT_CHECK(deck_.data.text_features.empty(), Exit::usage, "leave out data.text_features",
             "{} has text features of its own, and data.text_features names {}", deck_.data.path,
             deck_.data.text_features);
  WEFT_CHECK(b.text_channels == captions_.channels && b.longest_text <= captions_.max_length,
             Exit::data, fmt::format("set {} to what the store was made with", captions_.keys),
             "bucket {} has captions of {} channels and up to {} tokens, the model takes {} and {}",
             b.name, b.text_channels, b.longest_text, captions_.channels, captions_.max_length);
}

std::string VideoTask::start_weights() {
  params().initialise(static_cast<std::uint64_t>(deck_.run.seed));
  if (deck_.model.weights.empty()) return "";
  if (!trains_adapters())
    return load_weights(deck_.model.weights, params(),
                        to_start_from(deck_.model, model().weight_names()));
  std::string read = load_base();
  for (const std::string& text : lora_deck(deck_).adapters) {
    const NamedAdapter from = find_adapter("model.adapters", text, world_);
    const Adapter adapter = by_model(from.read(true), params(), model().weight_names());
    check_base(adapter.path, adapter.facts, deck_.model.weights, adapters_.base_hash);
    start_from(lora_deck(deck_), params(), adapter, from.factor);
    read += fmt::format("; goes on from {}{}",
                        from.checkpoint ? "the moving average (EMA) of " : "", adapter.path);
  }
  return read;
}

// On every rank, which reads these files anyway: all must know that it is the right base.
std::string VideoTask::load_base() {
  WeightFiles files = WeightFiles::open(deck_.model.weights);
  check_weights(files, params(), model().weight_names());
  read_weights(files, params(), model().weight_names());
  const LoraDeck& lora = lora_deck(deck_);
  adapters_ = {lora.rank, lora.alpha, deck_.model.weights, hash_of_values(params())};
  return fmt::format("{}, xxh3 {}, {}: the base of the adapters", deck_.model.weights,
                     adapters_.base_hash, counted(std::ssize(files.tensors()), "tensor"));
}

std::string VideoTask::state() const { return trains_adapters() ? adapters_.to_json() : ""; }

void VideoTask::set_state(const std::string& text) {
  const std::optional<AdapterFacts> saved = AdapterFacts::from_json(text);
  if (!trains_adapters() || !saved) return;
  log::info("base      {}", load_base());
  check_base("in " + deck_.run.dir, *saved, deck_.model.weights, adapters_.base_hash);
  // It does not go on with what was learned: all at once the same values add more, or less.
  WEFT_CHECK(
      saved->alpha == adapters_.alpha, Exit::usage,
      fmt::format("set lora.alpha = {:.9g} again, or train in another run.dir; generate takes "
                  "adapters of any strength: generate.adapters = [\"RUN=0.5\"]",
                  saved->alpha),
      "lora.alpha = {:.9g} would multiply what the adapters in {} add by {:.4g}", adapters_.alpha,
      deck_.run.dir, adapters_.alpha / saved->alpha);
}

void VideoTask::share_clips(Communicator* group) {
  group_ = group;
  model().set_sequence_group(group);
}

// Forward, twice that for the backward (once where no weight gets a gradient), and what is
// recomputed.
double VideoTask::cost(const Bucket& bucket, double recompute) const {
  const Bucket b = latents_.seen(bucket);
  return model().flops(b.frames, b.height, b.width) * ((trains_adapters() ? 2 : 3) + recompute);
}

TrainingTask::ClipFacts VideoTask::facts(const Bucket& bucket) {
  const Bucket b = latents_.seen(bucket);
  const auto patches = [](std::int64_t size, std::int64_t p) { return (size + p - 1) / p; };
  ClipFacts facts;
  facts.unit = "tokens";
  facts.units =
      patches(b.frames, patch_[0]) * patches(b.height, patch_[1]) * patches(b.width, patch_[2]);
  // Captions of full length, in 16 bits.
  if (!deck_.data.text_features.empty())
    facts.bytes_beside = 2.0 * static_cast<double>(captions_.max_length * captions_.channels);
  if (latents_.encodes(bucket)) facts.other_weights = latents_.weight_bytes();
  return facts;
}

// A micro-batch reads every weight and adds to every gradient, however short its clips. In
// operations that take as long: on a CPU fitted to the times of four shapes (docs/parallel.md), on
// a GPU counted, not measured: 14 bytes a weight at 3.35 TB/s beside 374 TFLOP/s.
double VideoTask::cost_of_micro_batch() const {
  const double operations_a_weight = on_cuda() ? 1500 : 180;
  return operations_a_weight *
         static_cast<double>(const_cast<VideoTask*>(this)->params().trainable_elements());
}

TrainingWork VideoTask::prepare(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes,
                                double recompute, float weight) {
  const Flow flow = make_flow(bucket, clips, bytes, recompute, false);
  TrainingWork work;
  // Steps differ in their samples, and a recorded micro-batch is that of all of them.
  const Tensor weights = Tensor::from_host(std::span<const float>(&weight, 1), {1});
  work.key = fmt::format("{} at {} {}", flow.key, flow.x0.raw(), weights.raw());
  work.parts.push_back([flow, weights](Tape& tape) {
    return TrainingLoss{flow.loss(tape, weights), Tensor()};
  });
  return work;
}

std::unique_ptr<ValidationSet> VideoTask::validation_set(const HeldOut& data) {
  WEFT_CHECK(data.clips != nullptr, Exit::usage, "name a clip store in validation.path",
             "validation.path = {} holds no clips", deck_.get<ValidationDeck>().path);
  const std::int64_t timesteps = deck_.get<ValidationDeck>().timesteps;
  ClipMeasure measure;
  measure.figures = static_cast<std::size_t>(timesteps);
  measure.run = [this](const Bucket& bucket, const LoadedBatch& clip, const Tensor& bytes) {
    return held_out_losses(bucket, clip, bytes);
  };
  measure.cost = [this](const Bucket& bucket) { return cost(bucket, 0); };
  measure.score = [](std::span<const double> sums, std::int64_t clips) {
    const double all = std::accumulate(sums.begin(), sums.end(), 0.0);
    return ValidationScore{all / static_cast<double>(clips * std::ssize(sums)), {}};
  };
  return make_clip_validation(*data.clips, std::move(measure));
}

Tensor VideoTask::held_out_losses(const Bucket& bucket, const LoadedBatch& clip,
                                  const Tensor& bytes) {
  Flow flow = make_flow(bucket, clip, bytes, -1, true);
  const std::int64_t timesteps = deck_.get<ValidationDeck>().timesteps;
  const auto [low, high] = noise_range();
  Tensor losses = Tensor::empty({timesteps}, DType::f32);
  for (std::int64_t k = 0; k < timesteps; ++k) {
    const double place = 1000.0 * static_cast<double>(k + 1) / static_cast<double>(timesteps + 1);
    const auto t = static_cast<float>(1000.0 * low + (high - low) * place);
    flow.timestep.set(std::span<const float>(&t, 1));
    ops::fill_normal(static_cast<std::uint64_t>(deck_.run.seed),
                     static_cast<int>(Purpose::held_out_noise), static_cast<std::uint64_t>(k),
                     is_planned(clip) ? 0 : static_cast<std::uint64_t>(clip.what.samples.front()),
                     flow.eps);
    Tape tape(Tape::Mode::infer);
    Tensor loss = losses.slice(k, k + 1);
    ops::convert(flow.loss(tape, Tensor()), loss);
  }
  return losses;
}

}  // namespace weft
