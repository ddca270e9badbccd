#include "jobs/generate/clip_codec.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "data/clip_source.h"
#include "data/synthetic.h"
#include "models/stdit3/options.h"
#include "models/video_vae/options.h"
#include "tensor/arena.h"

namespace weft {
namespace {

constexpr std::int64_t pixel_channels = 3;

}  // namespace

Deck with_scale_of_latents(const Deck& deck, MPI_Comm world) {
  const bool on_latents = deck.get<Stdit3Deck>().in_channels != pixel_channels;
  if (!on_latents || !deck.get<VaeDeck>().scale.empty() || deck.data.path.empty() ||
      is_synthetic(deck.data.path))
    return deck;
  constexpr int channels = TemporalVae::latent_channels;
  std::array<float, 2 * channels + 1> found{};  // whether, scale, shift
  if (log::rank() == 0) {
    const auto source = open_clip_source(deck.data, deck.media);
    const Bucket& first = source->buckets().front();
    if (first.scale.size() == channels && first.shift.size() == channels) {
      found[0] = 1;
      std::copy(first.scale.begin(), first.scale.end(), found.begin() + 1);
      std::copy(first.shift.begin(), first.shift.end(), found.begin() + 1 + channels);
    }
  }
  MPI_Bcast(found.data(), static_cast<int>(found.size()), MPI_FLOAT, 0, world);
  if (found[0] == 0) return deck;
  if (log::rank() == 0) log::info("vae       scale and shift of {}", deck.data.path);
  Deck filled = deck;
  filled.get<VaeDeck>().scale.assign(found.begin() + 1, found.begin() + 1 + channels);
  filled.get<VaeDeck>().shift.assign(found.begin() + 1 + channels, found.end());
  return filled;
}

ClipCodec::ClipCodec(const Deck& deck) {
  if (deck.get<Stdit3Deck>().in_channels == pixel_channels) return;
  WEFT_CHECK(deck.get<Stdit3Deck>().in_channels == TemporalVae::latent_channels, Exit::usage,
             "model.in_channels = 3 is a model that works on pixels",
             "model.in_channels = {}, the VAE's latents have {}",
             deck.get<Stdit3Deck>().in_channels, TemporalVae::latent_channels);
  WEFT_CHECK(!deck.get<VaeDeck>().scale.empty(), Exit::usage,
             "name the store that `weft encode` wrote as data.path, or set both keys as `weft "
             "inspect STORE` tells them",
             "vae.scale and vae.shift are empty: latents of the model cannot be decoded");
  own_ = std::make_unique<VideoVae>(deck.get<VaeDeck>());
  vae_ = own_.get();
}

void ClipCodec::open_weights(const Deck& deck, MPI_Comm world) {
  if (vae_ != nullptr)
    source_.emplace("vae.weights", deck.get<VaeDeck>().weights, "", deck.get<GenerateDeck>().ema,
                    world);
  if (source_) compare_scale(*source_, deck.get<VaeDeck>());
}

void ClipCodec::load_weights() {
  if (source_)
    source_->load(vae_->params(), vae_weight_names(), vae_->activation_dtype() == DType::bf16);
}

std::size_t ClipCodec::weight_bytes() const {
  return source_ ? vae_->params().inference_bytes(vae_->activation_dtype() == DType::bf16) : 0;
}

ClipCodec::Part ClipCodec::part_with(std::int64_t frames, std::int64_t first,
                                     std::int64_t last) const {
  if (vae_ != nullptr) return vae_->part_with(frames, first, last);
  WEFT_ASSERT(0 <= first && first < last && last <= frames);
  return {frames, first, last - first, first, last - first};
}

std::int64_t ClipCodec::chunk_pixels() const {
  return vae_ != nullptr ? vae_->config().micro_frame_size : 1;
}

std::int64_t ClipCodec::chunk_latents() const { return latent_frames(chunk_pixels()); }

// Counts only the convolutions of the VAE's 2D decoder: they are most of decoding.
double ClipCodec::decoding_flops(double height, double width) const {
  if (vae_ == nullptr) return 0;
  const VaeDeck& vae = vae_->config();
  double flops = 0, pixels = height * width;
  for (const std::int64_t c : vae.spatial_channels) {
    const auto channels = static_cast<double>(c);
    flops +=
        2 * 9 * channels * channels * pixels * 2 * static_cast<double>(vae.spatial_res_blocks + 1);
    pixels /= 4;
  }
  return flops;
}

Tensor ClipCodec::encode(const Part& part, std::int64_t height, std::int64_t width,
                         const VideoVae::FrameSource& source, const VideoVae::Noise& noise) const {
  if (vae_ != nullptr)
    return vae_->draw_latent(part, vae_->encode_moments(part, height, width, source, &noise),
                             &noise);
  // [T,H,W,3] -> [3,T,H,W]
  const std::int64_t frame = height * width, end = part.first_frame + part.frames;
  std::vector<float> latent(static_cast<std::size_t>(pixel_channels * part.frames * frame));
  for (std::int64_t first = part.first_frame; first < end; first += pixel_frames_) {
    const std::int64_t count = std::min(pixel_frames_, end - first);
    const Tensor frames = source(first, count).to_host();
    const float* from = frames.data<float>();
    for (std::int64_t c = 0; c < pixel_channels; ++c) {
      float* to = latent.data() + (c * part.frames + first - part.first_frame) * frame;
      for (std::int64_t i = 0; i < count * frame; ++i) to[i] = from[i * pixel_channels + c];
    }
  }
  return Tensor::from_host(std::span<const float>(latent),
                           {1, pixel_channels, part.frames, height, width});
}

void ClipCodec::decode(const Tensor& latent, std::int64_t frames,
                       const VideoVae::FrameSink& sink) const {
  if (vae_ != nullptr) return vae_->decode(latent, frames, sink);
  WEFT_ASSERT(latent.dim(1) == pixel_channels && latent.dim(2) == frames);
  const std::int64_t height = latent.dim(3), width = latent.dim(4), frame = height * width;
  const Tensor on_host = latent.to_host();
  const float* from = on_host.data<float>();
  std::vector<float> pixels;
  for (std::int64_t first = 0; first < frames; first += pixel_frames_) {
    const std::int64_t count = std::min(pixel_frames_, frames - first);
    pixels.resize(static_cast<std::size_t>(count * frame * pixel_channels));
    for (std::int64_t c = 0; c < pixel_channels; ++c)
      for (std::int64_t i = 0; i < count * frame; ++i)
        pixels[static_cast<std::size_t>(i * pixel_channels + c)] =
            from[(c * frames + first) * frame + i];
    sink(first,
         Tensor::from_host(std::span<const float>(pixels), {count, height, width, pixel_channels}));
  }
}

std::int64_t ClipCodec::frames_asked(std::int64_t frames) const {
  return vae_ != nullptr ? vae_->frames_asked(frames) : std::min(frames, pixel_frames_);
}

std::int64_t ClipCodec::frames_at_once(std::int64_t frames) const {
  if (vae_ == nullptr) return std::min(frames, pixel_frames_);
  const std::int64_t chunk = vae_->chunk_frames(frames);
  return vae_->micro_batch() > 0 ? std::min(chunk, vae_->micro_batch()) : chunk;
}

void ClipCodec::set_frames_at_once(std::int64_t frames) {
  if (vae_ != nullptr)
    vae_->set_micro_batch(frames);
  else
    pixel_frames_ = frames;
}

std::int64_t ClipCodec::fit_frames_at_once(std::int64_t frames, std::int64_t height,
                                           std::int64_t width, std::size_t capacity) const {
  // Frames of pixels take less memory than the sampling steps before them.
  return vae_ != nullptr ? vae_->fit_micro_batch(frames, height, width, capacity)
                         : frames_asked(frames);
}

std::size_t ClipCodec::plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::int64_t at_once) const {
  if (vae_ != nullptr) return vae_->plan_encode(frames, height, width, at_once).bytes;
  return plan_decode(frames, height, width, at_once);
}

std::size_t ClipCodec::plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::int64_t at_once) const {
  if (vae_ != nullptr) return vae_->plan_decode(frames, height, width, at_once).bytes;
  const auto arena = Arena::planning(this_device().kind);
  const ArenaScope scope(*arena);
  const Tensor latent = Tensor::empty({1, pixel_channels, frames, height, width}, DType::f32);
  const Tensor piece = Tensor::empty({at_once, height, width, pixel_channels}, DType::f32);
  return arena->peak();
}

}  // namespace weft
