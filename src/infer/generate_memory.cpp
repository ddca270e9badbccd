#include "infer/generate_memory.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>

#include "core/arena.h"
#include "core/error.h"
#include "core/log.h"
#include "infer/clip_maker.h"

namespace weft {

std::size_t plan_sampling(const Deck& deck, Stdit3& model, const ClipItem& item,
                          std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  SampleRequest request = make_request(deck, item);
  request.z = Tensor::empty(latent_shape(deck, item), DType::f32);
  const std::int64_t rows = deck.model.model_max_length;
  if (!deck.t5.weights.empty())
    request.y = Tensor::empty({1, rows, deck.model.caption_channels}, DType::f32);
  request.captions = pack_captions({}, rows, 1, deck.t5.weights.empty());
  request.edit.assign(static_cast<std::size_t>(item.latent_frames), 1.0f);
  SamplerDeck sampler = deck.sampler;
  sampler.steps = 1;
  flow_sample(model, sampler, deck.diffusion, request);
  return arena->peak();
}

std::size_t fit_memory(const Deck& deck, const GenerateJob& job,
                       const std::vector<std::int64_t>& order, Stdit3& model, VideoVae& vae,
                       std::size_t capacity, bool decodes) {
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> seen;
  std::size_t planned = 0;
  constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
  // Frames at once that are asked for: at most a chunk's, or a shorter clip's.
  const auto wanted = [&](std::int64_t frames) {
    const std::int64_t chunk = deck.vae.micro_frame_size, asked = deck.vae.micro_batch_size;
    return std::min({frames, chunk > 0 ? chunk : any, asked > 0 ? asked : any});
  };
  // Whether the layout fits too: holes between blocks count, and shorter texts leave others than those planned with.
  const std::size_t usable = std::max<std::size_t>(1, capacity - capacity / 32);
  const auto fits = [&](const ClipItem& item, std::size_t bytes) {
    try {
      plan_sampling(deck, model, item, bytes);
      return true;
    } catch (const Error& e) {
      if (e.code() != Exit::usage) throw;
      return false;
    }
  };
  std::int64_t most = 0, fitting = any;
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[static_cast<std::size_t>(i)];
    const PixelSize& p = item.pixels;
    if (!seen.emplace(p.frames, p.height, p.width).second) continue;
    model.check_sequence(item.latent_height, item.latent_width, deck.parallel.sp);
    const std::size_t sampling = plan_sampling(deck, model, item);
    WEFT_CHECK(sampling <= usable && fits(item, usable), Exit::usage,
               "share its tokens over ranks (parallel.sp), ask for a smaller clip, or give the "
               "rank more memory (memory.arena_gib)",
               "a clip of {}x{}x{} needs {:.2f} GiB for its steps, this rank has {:.2f}", p.frames,
               p.height, p.width, static_cast<double>(sampling) / (1ull << 30),
               static_cast<double>(capacity) / (1ull << 30));
    planned = std::max(planned, sampling);
    if (!decodes) continue;
    most = std::max(most, wanted(p.frames));
    const std::int64_t frames = vae.fit_micro_batch(p.frames, p.height, p.width, capacity);
    if (frames < wanted(p.frames)) fitting = std::min(fitting, frames);
  }
  if (seen.empty() || !decodes) return planned;
  if (fitting < most)
    log::warn("{:.3f} GiB are there: the VAE takes {} frames at once instead of {}",
              static_cast<double>(capacity) / (1ull << 30), fitting, most);
  fitting = std::min(fitting, most);
  vae.set_micro_batch(fitting);
  for (const auto& [frames, height, width] : seen)
    planned = std::max({planned, vae.plan_decode(frames, height, width, fitting),
                        vae.plan_encode(frames, height, width, fitting)});
  return planned;
}

FramePlan plan_frames(const Deck& deck, const GenerateJob& job,
                      const std::vector<std::int64_t>& order, const VideoVae& vae) {
  FramePlan plan;
  std::size_t beside = 0;
  const std::int64_t side = vae.pixels_a_latent();
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[static_cast<std::size_t>(i)];
    const PixelSize& p = item.pixels;
    const auto frame =
        static_cast<std::size_t>(3 * side * item.latent_height * side * item.latent_width);
    const auto at_once = [&](std::int64_t frames) {
      const std::int64_t chunk = vae.chunk_frames(frames);
      return vae.micro_batch() > 0 ? std::min(chunk, vae.micro_batch()) : chunk;
    };
    plan.piece = std::max(plan.piece, static_cast<std::size_t>(at_once(p.frames)) * frame);
    if (!job.prompts[static_cast<std::size_t>(item.prompt)].references.empty())
      beside = std::max(beside, reference_bytes(at_once(std::numeric_limits<std::int32_t>::max()),
                                                p.height, p.width));
    for (std::int64_t loop = 0; loop + 1 < deck.generate.loop; ++loop) try {
        const VideoVae::Part part = part_to_go_on_from(deck, job, vae, item, loop);
        beside = std::max(beside, static_cast<std::size_t>(part.frames) * frame * sizeof(float));
      } catch (const Error&) {  // a mask that does not fit: the clip will fail, and say so
      }
  }
  plan.bytes = ClipWriter::pieces * plan.piece + beside;
  return plan;
}

}  // namespace weft
