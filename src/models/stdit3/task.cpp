#include "models/stdit3/task.h"

#include <numeric>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "models/stdit3/options.h"
#include "ops/pointwise.h"
#include "ops/random.h"
#include "train/validation.h"

namespace weft {

Stdit3Task::Stdit3Task(const Deck& deck)
    : deck_(deck), held_out_deck_(deck), model_(stdit3_config(deck)), latents_(deck) {
  held_out_deck_.get<MaskDeck>() = {};
  held_out_deck_.get<Stdit3Deck>().class_dropout_prob = 0;
  held_out_deck_.get<Stdit3Deck>().drop_path = 0;
  WEFT_CHECK(deck.model.name == "stdit3", Exit::usage,
             "weft plan predicts the training of a VAE, weft plan --job encode its use",
             "model.name = \"{}\": this job is for stdit3 alone", deck.model.name);
  WEFT_CHECK(!masks_wanted(deck.get<MaskDeck>()) || deck.get<Stdit3Deck>().patch_size[0] == 1,
             Exit::usage, "use a patch_size of one frame, or no [mask]",
             "frame masks choose single frames, model.patch_size takes {} together",
             deck.get<Stdit3Deck>().patch_size[0]);
  WEFT_CHECK(!deck.get<Stdit3Deck>().skip_y_embedder, Exit::usage,
             "set model.skip_y_embedder = false",
             "model.skip_y_embedder = true needs captions that are already projected; training has "
             "none (weft_probe takes them)");
  if (!trains_adapters()) return;
  WEFT_CHECK(!deck.get<Stdit3Deck>().only_train_temporal, Exit::usage,
             "leave it out; lora.targets = [\"temporal_blocks.*\"] chooses these layers",
             "model.only_train_temporal = true with lora.rank = {}", deck.get<LoraDeck>().rank);
  const std::vector<nn::Linear*> layers = model_.linears();
  add_adapters(deck.get<LoraDeck>(), model_.params(), layers);
}

std::string Stdit3Task::describe() const {
  const Stdit3Deck& m = deck_.get<Stdit3Deck>();
  const LoraDeck& lora = deck_.get<LoraDeck>();
  return fmt::format("{}: {} pairs, C = {}, {} heads, {}{}", deck_.model.name, m.depth,
                     m.hidden_size, m.num_heads, deck_.model.dtype,
                     lora.on() ? fmt::format(", LoRA of rank {}", lora.rank) : "");
}

void Stdit3Task::check(std::span<const Bucket> buckets) {
  for (const Bucket& b : buckets) {
    check_holds_clips(b);
    latents_.check(b);
    const Bucket seen = latents_.seen(b);
    model_.check_sequence(seen.height, seen.width, group_ ? group_->size() : 1);
    check_text(b, buckets.front());
  }
}

void Stdit3Task::open(std::span<const Bucket> buckets) {
  WEFT_CHECK(deck_.data.text_features.empty() || deck_.get<ValidationDeck>().path.empty(),
             Exit::usage,
             "encode the text features into both stores (encode.text), or use validation.share",
             "data.text_features has captions of data.path alone, and validation.path names {}",
             deck_.get<ValidationDeck>().path);
  check(buckets);
  WEFT_CHECK(!trains_adapters() || !deck_.model.weights.empty(), Exit::usage,
             "name the weights that they adapt as model.weights",
             "lora.rank = {} trains adapters, and model.weights is empty",
             deck_.get<LoraDeck>().rank);
  latents_.load(buckets);
  std::int64_t clips = 0;
  for (const Bucket& b : buckets) clips += b.clips;
  if (!deck_.data.text_features.empty())
    features_ = std::make_unique<TextFeatures>(deck_.data.text_features, clips,
                                               deck_.get<Stdit3Deck>().caption_channels,
                                               deck_.get<Stdit3Deck>().model_max_length);
}

// Text features that the store itself has.
void Stdit3Task::check_text(const Bucket& b, const Bucket& first) const {
  const Stdit3Deck& m = deck_.get<Stdit3Deck>();
  WEFT_CHECK((b.text_channels > 0) == (first.text_channels > 0), Exit::data,
             "encode the complete store either with encode.text or without it",
             "of {}, buckets {} and {}, only one has text features", deck_.data.path, first.name,
             b.name);
  if (b.text_channels == 0) return;
  WEFT_CHECK(deck_.data.text_features.empty(), Exit::usage, "leave out data.text_features",
             "{} has text features of its own, and data.text_features names {}", deck_.data.path,
             deck_.data.text_features);
  WEFT_CHECK(
      b.text_channels == m.caption_channels && b.longest_text <= m.model_max_length, Exit::data,
      "set model.caption_channels and model.model_max_length to what the store was made with",
      "bucket {} has captions of {} channels and up to {} tokens, the model takes {} and {}",
      b.name, b.text_channels, b.longest_text, m.caption_channels, m.model_max_length);
}

std::string Stdit3Task::start_weights() {
  params().initialise(static_cast<std::uint64_t>(deck_.run.seed));
  if (deck_.model.weights.empty()) return "";
  return trains_adapters()
             ? load_base()
             : load_weights(deck_.model.weights, params(), to_start_from(deck_.model));
}

// On every rank, which reads these files anyway: all must know that it is the right base.
std::string Stdit3Task::load_base() {
  const WeightFiles files = WeightFiles::open(deck_.model.weights);
  check_weights(files, params(), {});
  read_weights(files, params(), {});
  const LoraDeck& lora = deck_.get<LoraDeck>();
  adapters_ = {lora.rank, lora.alpha, deck_.model.weights, hash_of(files)};
  return fmt::format("{}, xxh3 {}, {}: the base of the adapters", deck_.model.weights,
                     adapters_.base_hash, counted(std::ssize(files.tensors()), "tensor"));
}

std::string Stdit3Task::state() const { return trains_adapters() ? adapters_.to_json() : ""; }

void Stdit3Task::set_state(const std::string& text) {
  const std::optional<AdapterFacts> saved = AdapterFacts::from_json(text);
  if (!trains_adapters() || !saved) return;
  log::info("base      {}", load_base());
  WEFT_CHECK(saved->base_hash == adapters_.base_hash, Exit::data,
             fmt::format("name the weights with xxh3 {}, which were {} then; or train adapters of "
                         "these in another run.dir",
                         saved->base_hash, saved->base),
             "model.weights = {} (xxh3 {}) is not the base that the adapters in {} belong to",
             deck_.model.weights, adapters_.base_hash, deck_.run.dir);
}

void Stdit3Task::share_clips(Communicator* group) {
  group_ = group;
  model_.set_sequence_group(group);
}

// Forward, twice that for the backward (once where no weight gets a gradient), and what is
// recomputed.
double Stdit3Task::cost(const Bucket& bucket, double recompute) const {
  const Bucket b = latents_.seen(bucket);
  return model_.flops(b.frames, b.height, b.width) * ((trains_adapters() ? 2 : 3) + recompute);
}

TrainingTask::ClipFacts Stdit3Task::facts(const Bucket& bucket) {
  const Bucket b = latents_.seen(bucket);
  const Stdit3Deck& m = deck_.get<Stdit3Deck>();
  const auto patches = [](std::int64_t size, std::int64_t p) { return (size + p - 1) / p; };
  const auto& p = m.patch_size;
  ClipFacts facts;
  facts.unit = "tokens";
  facts.units = patches(b.frames, p[0]) * patches(b.height, p[1]) * patches(b.width, p[2]);
  // Captions of full length, in 16 bits.
  if (!deck_.data.text_features.empty())
    facts.bytes_beside = 2.0 * static_cast<double>(m.model_max_length * m.caption_channels);
  if (latents_.encodes(bucket)) facts.other_weights = latents_.weight_bytes();
  return facts;
}

// A micro-batch reads every weight and adds to every gradient, however short its clips. In
// operations that take as long: on a CPU fitted to the times of four shapes (docs/parallel.md), on
// a GPU counted, not measured: 14 bytes a weight at 3.35 TB/s beside 374 TFLOP/s.
double Stdit3Task::cost_of_micro_batch() const {
  const double operations_a_weight = on_cuda() ? 1500 : 180;
  return operations_a_weight * static_cast<double>(model_.params().trainable_elements());
}

TrainingWork Stdit3Task::prepare(const Bucket& bucket, const LoadedBatch& clips,
                                 const Tensor& bytes, double recompute, float weight) {
  TrainingBatch batch = make_batch(deck_, bucket, clips, bytes, features_.get(), latents_);
  batch.in.recompute = recompute;
  TrainingWork work;
  // Steps differ in their samples, and a recorded micro-batch is that of all of them.
  const Tensor weights = Tensor::from_host(std::span<const float>(&weight, 1), {1});
  work.key = fmt::format("captions {} at {} {}", batch.in.captions.index.numel(), batch.x0.raw(),
                         weights.raw());
  work.parts.push_back([this, batch, weights](Tape& tape) {
    return TrainingLoss{flow_loss(tape, model_, batch.x0, batch.eps, batch.in, weights), Tensor()};
  });
  return work;
}

std::unique_ptr<ValidationSet> Stdit3Task::validation_set(const HeldOut& data) {
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

Tensor Stdit3Task::held_out_losses(const Bucket& bucket, const LoadedBatch& clip,
                                   const Tensor& bytes) {
  const bool planning = clip.what.samples.empty();
  TrainingBatch batch = make_batch(held_out_deck_, bucket, clip, bytes, features_.get(), latents_);
  const std::int64_t timesteps = deck_.get<ValidationDeck>().timesteps;
  Tensor losses = Tensor::empty({timesteps}, DType::f32);
  for (std::int64_t k = 0; k < timesteps; ++k) {
    const auto t = static_cast<float>(1000.0 * static_cast<double>(k + 1) /
                                      static_cast<double>(timesteps + 1));
    batch.in.timestep.set(std::span<const float>(&t, 1));
    ops::fill_normal(static_cast<std::uint64_t>(deck_.run.seed),
                     static_cast<int>(Purpose::held_out_noise), static_cast<std::uint64_t>(k),
                     planning ? 0 : static_cast<std::uint64_t>(clip.what.samples.front()),
                     batch.eps);
    Tape tape(Tape::Mode::infer);
    Tensor loss = losses.slice(k, k + 1);
    ops::convert(flow_loss(tape, model_, batch.x0, batch.eps, batch.in, Tensor()), loss);
  }
  return losses;
}

}  // namespace weft
