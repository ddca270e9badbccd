#include "models/wan/task.h"

#include <utility>

#include "core/error.h"
#include "core/philox.h"
#include "models/lora.h"
#include "models/registry.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {
namespace {

CaptionShape caption_shape(const WanDeck& m) {
  return {m.text_dim, m.text_len, "model.text_dim and model.text_len", m.class_dropout_prob};
}

// A clip without a caption, or that drops it, has its padding's key alone.
Captions pack_padded(const ClipCaptions& captions, std::int64_t text_len, std::int64_t tokens,
                     Tensor& last_bias) {
  CaptionBatch packed;
  packed.offsets.push_back(0);
  for (std::size_t b = 0; b < captions.lengths.size(); ++b) {
    const std::int64_t rows = captions.dropped[b] ? 0 : captions.lengths[b];
    for (std::int64_t l = 0; l < rows; ++l)
      packed.index.push_back(
          static_cast<std::int32_t>(static_cast<std::int64_t>(b) * text_len + l));
    packed.offsets.push_back(static_cast<std::int32_t>(packed.index.size()));
  }
  const std::vector<float> bias = add_padding_keys(packed, text_len);
  last_bias = Tensor::from_host(std::span<const float>(bias), {std::ssize(bias)});
  return upload(packed, captions.y, tokens);
}

}  // namespace

double draw_sigma(const WanDiffusionDeck& d, std::uint64_t seed, std::uint64_t step,
                  std::uint64_t sample) {
  const double low = d.noise_range[0], high = d.noise_range[1];
  double sigma = 0;
  for (std::uint32_t again = 0; again < 1000; ++again) {
    const double u = draw_level(d.sample_method, d.loc, d.scale, seed, step, sample, again);
    sigma = d.shift * u / (1 + (d.shift - 1) * u);
    if (low <= sigma && (sigma < high || high == 1)) return sigma;
  }
  return low + (high - low) * sigma;
}

double sigma_weight(const WanDiffusionDeck& d, double sigma) {
  return d.weighting == "shift" ? 1 + d.shift * sigma : 1;
}

Tensor wan_loss(Tape& tape, Wan& model, const Tensor& x0, const Tensor& eps, WanInput in,
                const Tensor& factors, const Tensor& weight) {
  in.x = Tensor::empty(x0.shape(), DType::f32);
  ops::flow_interpolate(x0, eps, in.timestep, in.x_mask, in.x);
  const Var out = model.forward(tape, in);
  const std::int64_t B = x0.dim(0);
  Tensor loss = Tensor::empty({B}, DType::f32);
  // The operation's target is its first latent less the second: here noise less data.
  ops::velocity_loss_forward(out->value, eps, x0, in.x_mask, loss);
  if (tape.recording()) out->grad = Tensor::empty(out->value.shape(), DType::f32);
  if (!factors.defined()) {
    if (tape.recording())
      ops::velocity_loss_backward(out->value, eps, x0, in.x_mask, weight, out->grad);
    return loss;
  }
  for (std::int64_t b = 0; b < B; ++b) {
    const auto of = [b](const Tensor& t) { return t.slice(b, b + 1); };
    Tensor own = of(loss);
    ops::scaled_add(own, 1, of(factors), own, false);
    if (!tape.recording()) continue;
    Tensor factor = Tensor::empty({1}, DType::f32), grad = of(out->grad);
    ops::scaled_add(weight, 1, of(factors), factor, false);
    const Tensor mask = in.x_mask.defined() ? of(in.x_mask) : Tensor();
    ops::velocity_loss_backward(of(out->value), of(eps), of(x0), mask, factor, grad);
  }
  return loss;
}

WanTask::WanTask(const Deck& deck)
    : VideoTask(
          deck,
          ClipLatents(deck, deck.get<WanDeck>().in_channels, make_codec(deck), Posterior::mean),
          caption_shape(deck.get<WanDeck>()), deck.get<WanDeck>().patch_size),
      model_(wan_config(deck)) {
  if (!trains_adapters()) return;
  const std::vector<nn::Linear*> layers = model_.linears();
  add_adapters(lora_deck(deck), model_.params(), layers);
}

std::string WanTask::describe() const {
  const WanDeck& m = deck_.get<WanDeck>();
  const LoraDeck& lora = lora_deck(deck_);
  return fmt::format("{}: {} blocks, C = {}, {} heads, {}{}", deck_.model.name, m.depth,
                     m.hidden_size, m.num_heads, deck_.model.dtype,
                     lora.on() ? fmt::format(", LoRA of rank {}", lora.rank) : "");
}

// Splits what `weft encode` stored for a model that reads a picture beside the latent: returns the
// latents and their noise; in.condition gets the other channels.
NoisyClips WanTask::without_condition(const NoisyClips& all, WanInput& in) const {
  const Shape& s = all.x0.shape();
  const std::int64_t C = model_.channels();
  const auto channels = [&](const Tensor& from, std::int64_t first, std::int64_t end) {
    Tensor to = Tensor::empty({s[0], end - first, s[2], s[3], s[4]}, DType::f32);
    for (std::int64_t b = 0; b < s[0]; ++b) {
      Tensor one = to.slice(b, b + 1).view({end - first, s[2], s[3], s[4]});
      ops::convert(from.slice(b, b + 1).view({s[1], s[2], s[3], s[4]}).slice(first, end), one);
    }
    return to;
  };
  in.condition = channels(all.x0, C, s[1]);
  return {channels(all.x0, 0, C), channels(all.eps, 0, C)};
}

// The mask of a batch in which a share of the samples has its first frame given.
void WanTask::give_first_frames(const LoadedBatch& clips, const Tensor& x0, WanInput& in) const {
  const std::int64_t B = x0.dim(0), T = x0.dim(2);
  in.x_mask = Tensor::empty({B, T}, DType::u8);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(B * T), 1);
  if (!is_planned(clips)) {
    for (std::int64_t b = 0; b < B; ++b) {
      const Philox random(static_cast<std::uint64_t>(deck_.run.seed), Purpose::frame_mask,
                          static_cast<std::uint64_t>(clips.step),
                          static_cast<std::uint64_t>(clips.what.samples[b]));
      const bool given = random.uniform(0) < deck_.get<WanDiffusionDeck>().first_frame;
      mask[static_cast<std::size_t>(b * T)] = given ? 0 : 1;
    }
    in.x_mask.set(std::span<const std::uint8_t>(mask));
  }
  if (!model_.sequence_group().alone()) in.rows = model_.token_rows(x0, mask);
}

VideoTask::Flow WanTask::make_flow(const Bucket& bucket, const LoadedBatch& clips,
                                   const Tensor& bytes, double recompute, bool held_out) {
  const std::int64_t B = std::ssize(clips.what.clips);
  const WanDeck& m = deck_.get<WanDeck>();
  const WanDiffusionDeck& d = deck_.get<WanDiffusionDeck>();
  NoisyClips made = make_clips(deck_, bucket, clips, bytes, latents());
  WanInput in;
  if (model_.condition_channels() > 0) made = without_condition(made, in);
  in.recompute = recompute;
  in.timestep = Tensor::empty({B}, DType::f32);
  CaptionShape shape = captions();
  if (held_out) shape.drop = 0;
  in.captions = pack_padded(captions_of(deck_, shape, bucket, clips, features()), m.text_len,
                            count_tokens(made.x0, m.patch_size), in.last_bias);
  if (d.first_frame > 0 && made.x0.dim(2) > 1 && !held_out) give_first_frames(clips, made.x0, in);
  Tensor factors;
  if (d.weighting != "none" && !held_out) factors = Tensor::empty({B}, DType::f32);
  if (!is_planned(clips) && !held_out) {
    std::vector<float> timesteps, weights;
    for (const SampleId sample : clips.what.samples) {
      const double sigma =
          draw_sigma(d, static_cast<std::uint64_t>(deck_.run.seed),
                     static_cast<std::uint64_t>(clips.step), static_cast<std::uint64_t>(sample));
      timesteps.push_back(static_cast<float>(1000 * sigma));
      weights.push_back(static_cast<float>(sigma_weight(d, sigma)));
    }
    in.timestep.set(std::span<const float>(timesteps));
    if (factors.defined()) factors.set(std::span<const float>(weights));
  }
  Flow flow{made.x0, made.eps, in.timestep, fmt::format("captions {}", in.captions.index.numel()),
            nullptr};
  flow.loss = [this, made, in, factors](Tape& tape, const Tensor& weight) {
    return wan_loss(tape, model_, made.x0, made.eps, in, factors, weight);
  };
  return flow;
}

}  // namespace weft
