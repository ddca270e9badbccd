#include "infer/clip_maker.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "core/arena.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "core/philox.h"
#include "diffusion/rectified_flow.h"
#include "models/pixels.h"
#include "ops/loss.h"
#include "ops/pointwise.h"

namespace weft {
namespace {

// Latent frames of a reference into z [1,C,T,h,w].
void copy_frames(const LatentReference& reference, const Placement& p, Tensor& z,
                 const std::string& name) {
  const std::int64_t channels = z.dim(1), frame = z.dim(3) * z.dim(4);
  WEFT_CHECK(
      static_cast<std::int64_t>(reference.values.size()) == channels * reference.frames * frame,
      Exit::internal, "this is a bug in weft, please report it with the log",
      "{}: a reference of {} values for frames of {}", name, reference.values.size(), frame);
  const Tensor from = Tensor::from_host(std::span<const float>(reference.values),
                                        {static_cast<std::int64_t>(reference.values.size())});
  const Tensor to = z.view({z.numel()});
  for (std::int64_t c = 0; c < channels; ++c) {
    const std::int64_t first = c * reference.frames + p.from, target = c * z.dim(2) + p.to;
    Tensor part = to.slice(target * frame, (target + p.length) * frame);
    ops::convert(from.slice(first * frame, (first + p.length) * frame), part);
  }
}

}  // namespace

SampleRequest make_request(const Deck& deck, const ClipItem& item) {
  SampleRequest r;
  r.fps = {item.pixels.frames == 1 ? 120.0f : static_cast<float>(deck.generate.fps)};
  r.size.height = static_cast<double>(item.pixels.height);
  r.size.width = static_cast<double>(item.pixels.width);
  r.size.num_frames = item.pixels.frames;
  return r;
}

Shape latent_shape(const Deck& deck, const ClipItem& item) {
  return {1, deck.model.in_channels, item.latent_frames, item.latent_height, item.latent_width};
}

ClipMaker::ClipMaker(const Deck& deck, const GenerateJob& job, Stdit3& model, VideoVae& vae,
                     const PromptFeatures& features, MPI_Comm group)
    : deck_(deck), job_(job), model_(model), vae_(vae), features_(features), group_(group) {
  if (group_ == MPI_COMM_NULL) return;
  MPI_Comm_rank(group_, &rank_);
  MPI_Comm_size(group_, &ranks_);
}

void ClipMaker::share_text() {
  if (ranks_ == 1) return;
  std::int64_t sizes[2] = {text_.tokens, static_cast<std::int64_t>(text_.values.size())};
  MPI_Bcast(sizes, 2, MPI_INT64_T, 0, group_);
  text_.tokens = sizes[0];
  text_.values.resize(static_cast<std::size_t>(sizes[1]));
  MPI_Bcast(text_.values.data(), static_cast<int>(sizes[1]), MPI_FLOAT, 0, group_);
}

void ClipMaker::share_reference(LatentReference& reference) {
  if (ranks_ == 1) return;
  std::int64_t sizes[2] = {reference.frames, static_cast<std::int64_t>(reference.values.size())};
  MPI_Bcast(sizes, 2, MPI_INT64_T, 0, group_);
  reference.frames = sizes[0];
  reference.values.resize(static_cast<std::size_t>(sizes[1]));
  MPI_Bcast(reference.values.data(), static_cast<int>(sizes[1]), MPI_FLOAT, 0, group_);
}

bool ClipMaker::prepare(const ClipItem& item, std::int64_t loop,
                        const std::vector<float>& last_frames) {
  const Prompt& prompt = job_.prompts[static_cast<std::size_t>(item.prompt)];
  const std::size_t before = references_.size();
  const bool again = loop > 0 && job_.loops.condition_latents > 0;
  references_.resize(before + (loop == 0 ? prompt.references.size() : again ? 1 : 0));
  std::exception_ptr failure;
  if (first()) try {
      if (!features_.null_captions())
        text_ = features_.read(item.texts[static_cast<std::size_t>(loop)]);
      const double begin = now_seconds();
      for (std::size_t i = before; i < references_.size(); ++i) {
        // A draw of its own for every reference of every clip.
        const VideoVae::Noise noise{
            static_cast<std::uint64_t>(deck_.run.seed),
            item.noise_id(job_.prompts) + (static_cast<std::uint64_t>(i + 1) << 48)};
        const std::int64_t side = vae_.pixels_a_latent();
        references_[i] =
            loop == 0 ? encode_reference(prompt.references[i], item.pixels.height,
                                         item.pixels.width, vae_, noise)
                      : encode_frames(last_frames, item.pixels.frames, item.latent_height * side,
                                      item.latent_width * side, vae_, noise);
      }
      times_.encode += now_seconds() - begin;
    } catch (...) {
      failure = std::current_exception();
    }
  int good = failure ? 0 : 1;
  if (ranks_ > 1) MPI_Bcast(&good, 1, MPI_INT, 0, group_);
  if (failure) std::rethrow_exception(failure);
  if (good == 0) return false;
  share_text();
  for (std::size_t i = before; i < references_.size(); ++i) share_reference(references_[i]);
  if (again)
    masks_.push_back({loop, static_cast<std::int64_t>(before), -job_.loops.condition_latents, 0,
                      job_.loops.condition_latents, deck_.generate.condition_frame_edit});
  return true;
}

Tensor ClipMaker::sample(const ClipItem& item, std::int64_t loop) {
  const double begin = now_seconds();
  const auto seed = static_cast<std::uint64_t>(deck_.run.seed);
  const std::uint64_t id = item.noise_id(job_.prompts);
  SampleRequest request = make_request(deck_, item);
  request.z = Tensor::empty(latent_shape(deck_, item), DType::f32);
  ops::fill_normal(seed, static_cast<int>(Purpose::sampler), static_cast<std::uint64_t>(loop), id,
                   request.z);
  std::vector<std::int64_t> lengths;
  for (const LatentReference& r : references_) lengths.push_back(r.frames);
  const auto placements =
      place_references(masks_, loop, item.latent_frames, lengths, deck_.generate.align, item.name);
  for (const Placement& p : placements)
    copy_frames(references_[static_cast<std::size_t>(p.reference)], p, request.z, item.name);
  // Without references a mask of ones would change nothing but the time.
  if (!placements.empty()) request.edit = edit_ratios(placements, item.latent_frames);
  request.fresh_noise = [&](int step, Tensor& noise) {
    ops::fill_normal(seed, static_cast<int>(Purpose::noise),
                     static_cast<std::uint64_t>(loop * deck_.sampler.steps + step), id, noise);
  };
  if (features_.null_captions()) {
    request.captions = pack_captions({}, deck_.model.model_max_length, 1, true);
  } else {
    request.y = Tensor::from_host(std::span<const float>(text_.values),
                                  {1, text_.tokens, deck_.model.caption_channels});
    request.captions = pack_captions({}, text_.tokens, 1, false);
  }
  double told = begin;
  request.progress = [&](int step, int steps) {
    if (step < steps && now_seconds() - told < 10) return;
    if (step == steps && told == begin) return;  // short ones need no line
    told = now_seconds();
    log::info("sample    {}: loop {}, step {}/{}, {:.0f} s", item.name, loop, step, steps,
              told - begin);
  };
  const Tensor z = flow_sample(model_, deck_.sampler, deck_.diffusion, request);
  const Tensor on_host = z.to_host();  // waits, and the clock is right
  times_.sample += now_seconds() - begin;
  if (first())
    for (const float v : on_host.span<float>())
      WEFT_CHECK(std::isfinite(v), Exit::non_finite,
                 "check the weights, and try model.dtype = \"f32\"",
                 "the latent of loop {} is not finite", loop);
  return z;
}

void ClipMaker::decode(const ClipItem& item, std::int64_t loop, const Tensor& z, ClipPixels& clip,
                       std::vector<float>& last_frames) {
  const double begin = now_seconds();
  const bool goes_on = loop + 1 < deck_.generate.loop && job_.loops.condition_latents > 0;
  const std::int64_t dropped = loop > 0 ? job_.loops.condition_frames : 0;
  last_frames.clear();
  if (deck_.generate.tensors) {
    const Tensor on_host = z.to_host();
    const auto values = on_host.span<float>();
    clip.tensors.latents.emplace_back(values.begin(), values.end());
    clip.tensors.latent_shape = {z.dim(1), z.dim(2), z.dim(3), z.dim(4)};
  }
  vae_.decode(z, item.pixels.frames, [&](std::int64_t number, const Tensor& on_device) {
    const Tensor frames = on_device.to_host();
    clip.height = frames.dim(1);
    clip.width = frames.dim(2);
    const auto values = frames.span<float>();
    if (goes_on && last_frames.empty())
      last_frames.reserve(
          static_cast<std::size_t>(item.pixels.frames * frames.numel() / frames.dim(0)));
    if (goes_on) last_frames.insert(last_frames.end(), values.begin(), values.end());
    const std::int64_t count = frames.dim(0), size = clip.height * clip.width * 3;
    const std::int64_t skip = std::clamp<std::int64_t>(dropped - number, 0, count);
    clip.frames += count - skip;
    if (deck_.generate.tensors)
      clip.tensors.frames.insert(clip.tensors.frames.end(), values.begin() + skip * size,
                                 values.end());
    const std::span<const float> kept = values.subspan(static_cast<std::size_t>(skip * size));
    const std::size_t at = clip.rgb.size();
    if (at == 0)
      clip.rgb.reserve(static_cast<std::size_t>(job_.total_frames(item, deck_.generate) * size));
    clip.rgb.resize(at + kept.size());
    const std::int64_t bad = round_to_pixels(kept, std::span(clip.rgb).subspan(at));
    WEFT_CHECK(bad < 0, Exit::non_finite, "check the VAE's weights, and try vae.dtype = \"f32\"",
               "frame {} of loop {} is not finite", number + skip + bad / size, loop);
  });
  times_.decode += now_seconds() - begin;
}

ClipPixels ClipMaker::make(const ClipItem& item) {
  ClipPixels clip;
  std::vector<float> last_frames;  // of the loop before, as decoded
  references_.clear();
  masks_ = item.masks;
  std::exception_ptr failure;
  for (std::int64_t loop = 0; loop < deck_.generate.loop; ++loop) {
    if (failure) {  // the others of the group wait for word of what the loop begins with
      int good = 0;
      if (ranks_ > 1) MPI_Bcast(&good, 1, MPI_INT, 0, group_);
      break;
    }
    if (!prepare(item, loop, last_frames)) return {};
    last_frames =
        std::vector<float>();  // a whole clip of floats: not while the next one is sampled
    const Tensor z = [&]() -> Tensor {
      try {
        return sample(item, loop);
      } catch (const Error& e) {
        if (e.code() != Exit::non_finite) throw;  // that all of the group have alike
        failure = std::current_exception();
        return {};
      }
    }();
    if (!first() || failure) continue;
    try {
      decode(item, loop, z, clip, last_frames);
    } catch (const Error&) {
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  return clip;
}

}  // namespace weft
