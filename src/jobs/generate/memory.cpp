#include "jobs/generate/memory.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "core/error.h"
#include "core/log.h"
#include "jobs/generate/clip_maker.h"
#include "jobs/generate/options.h"
#include "models/flow_sampler.h"
#include "tensor/tensor.h"

namespace weft {

namespace {

// A 32nd stays free: shorter texts leave other holes between blocks than the planned ones.
std::size_t usable_bytes(std::size_t capacity) {
  return std::max<std::size_t>(1, capacity - capacity / 32);
}

bool steps_fit(const Deck& deck, const ClipParts& parts, const ClipItem& item, std::int64_t clips,
               std::size_t usable) {
  const MemoryNeed need = plan_sampling(deck, parts, item, clips, usable);
  return need.fits && need.bytes <= usable;
}

std::string name_of(const PixelSize& p) {
  return fmt::format("{} of {}x{}", counted(p.frames, "frame"), p.width, p.height);
}

}  // namespace

MemoryNeed plan_sampling(const Deck& deck, const ClipParts& parts, const ClipItem& item,
                         std::int64_t clips, std::size_t capacity) {
  Denoiser& model = *parts.denoiser;
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  SampleRequest request = make_request(deck, item, clips);
  request.z = Tensor::empty(latent_shape(model, item, clips), DType::f32);
  const std::int64_t rows = model.max_caption();
  if (parts.encodes_texts())
    request.y = Tensor::empty({clips, rows, model.caption_channels()}, DType::f32);
  request.captions = pack_captions({}, rows, clips, !parts.encodes_texts());
  request.edit.assign(static_cast<std::size_t>(clips * item.latent_frames), 1.0f);
  SamplerDeck sampler = deck.get<SamplerDeck>();
  // All steps need the same memory.
  sampler.steps = 1;
  flow_sample(model, sampler, deck.get<DiffusionDeck>(), request);
  return arena->need();
}

std::int64_t fit_batch(const Deck& deck, const ClipParts& parts, const ClipItem& item,
                       std::int64_t most, std::size_t capacity) {
  std::int64_t low = 1;
  while (low < most) {
    const std::int64_t middle = low + (most - low + 1) / 2;
    if (steps_fit(deck, parts, item, middle, usable_bytes(capacity)))
      low = middle;
    else
      most = middle - 1;
  }
  return low;
}

std::size_t bytes_of_waiting(const Denoiser& model, const ClipItem& item, std::int64_t clips) {
  return static_cast<std::size_t>((clips - 1) * latent_shape(model, item, 1).numel()) *
         sizeof(float);
}

void fit_batches(const Deck& deck, const GenerateJob& job, const std::vector<std::int64_t>& order,
                 const ClipParts& parts, std::size_t capacity, BatchLimits& limits,
                 MPI_Comm world) {
  std::vector<std::string> lowered;
  std::set<PixelSize> seen;
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[static_cast<std::size_t>(i)];
    std::int64_t& limit = limits.at(item.pixels);
    if (limit == 1 || !seen.insert(item.pixels).second) continue;
    parts.denoiser->check_sequence(item.latent_height, item.latent_width, deck.parallel.sp);
    std::int64_t fitting = fit_batch(deck, parts, item, limit, capacity);
    // Batches are handed out by number, so they must be the same on all ranks.
    MPI_Allreduce(MPI_IN_PLACE, &fitting, 1, MPI_INT64_T, MPI_MIN, world);
    if (fitting < limit)
      lowered.push_back(
          fmt::format("{} instead of {} clips of {}", fitting, limit, name_of(item.pixels)));
    limit = fitting;
  }
  if (!lowered.empty() && log::rank() == 0)
    log::warn("batches reduced to fit the memory: {}", fmt::join(lowered, ", "));
}

std::size_t fit_memory(const Deck& deck, const GenerateJob& job,
                       const std::vector<std::int64_t>& order, const BatchLimits& limits,
                       const ClipParts& parts, std::size_t capacity, bool decodes) {
  VideoCodec& codec = *parts.codec;
  std::set<PixelSize> seen;
  std::size_t planned = 0;
  constexpr std::int64_t any = std::numeric_limits<std::int64_t>::max();
  const std::size_t usable = usable_bytes(capacity);
  std::int64_t most = 0, fitting = any;
  std::map<PixelSize, std::size_t> waiting_of;
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[static_cast<std::size_t>(i)];
    const PixelSize& p = item.pixels;
    if (!seen.insert(p).second) continue;
    parts.denoiser->check_sequence(item.latent_height, item.latent_width, deck.parallel.sp);
    const std::size_t sampling = plan_sampling(deck, parts, item, 1).bytes;
    WEFT_CHECK(steps_fit(deck, parts, item, 1, usable), Exit::usage,
               "share its tokens over ranks (parallel.sp), ask for a smaller clip, or give the "
               "rank more memory (memory.arena_gib)",
               "a clip of {} needs {:.2f} GiB for its steps, this rank has {:.2f}", name_of(p),
               gib(sampling), gib(capacity));
    const std::int64_t clips = limits.at(p);
    planned =
        std::max(planned, clips == 1 ? sampling : plan_sampling(deck, parts, item, clips).bytes);
    if (!decodes) continue;
    most = std::max(most, codec.frames_asked(p.frames));
    const std::size_t waiting = bytes_of_waiting(*parts.denoiser, item, clips);
    waiting_of[p] = waiting;
    const std::int64_t frames =
        codec.fit_micro_batch(p.frames, p.height, p.width, capacity - waiting);
    if (frames < codec.frames_asked(p.frames)) fitting = std::min(fitting, frames);
  }
  if (seen.empty() || !decodes) return planned;
  if (fitting < most)
    log::warn("{} micro-batch reduced to {} frames (asked: {}) to fit {:.3f} GiB", codec.name(),
              fitting, most, gib(capacity));
  fitting = std::min(fitting, most);
  codec.set_micro_batch(fitting);
  for (const PixelSize& p : seen)
    planned = std::max(
        {planned, codec.plan_decode(p.frames, p.height, p.width, fitting).bytes + waiting_of[p],
         codec.plan_encode(p.frames, p.height, p.width, fitting).bytes});
  return planned;
}

FramePlan plan_frames(const Deck& deck, const GenerateJob& job,
                      const std::vector<std::int64_t>& order, const VideoCodec& codec) {
  FramePlan plan;
  std::size_t beside = 0;
  const std::int64_t side = codec.pixels_a_latent();
  for (const std::int64_t i : order) {
    const ClipItem& item = job.items[static_cast<std::size_t>(i)];
    const PixelSize& p = item.pixels;
    const auto frame =
        static_cast<std::size_t>(3 * side * item.latent_height * side * item.latent_width);
    plan.piece =
        std::max(plan.piece, static_cast<std::size_t>(codec.frames_at_once(p.frames)) * frame);
    if (!job.prompts[static_cast<std::size_t>(item.prompt)].references.empty())
      beside = std::max(
          beside, reference_bytes(codec.frames_at_once(std::numeric_limits<std::int32_t>::max()),
                                  p.height, p.width));
    for (std::int64_t loop = 0; loop + 1 < deck.get<GenerateDeck>().loop; ++loop) try {
        const VideoCodec::Part part = part_to_go_on_from(deck, job, codec, item, loop);
        beside = std::max(beside, static_cast<std::size_t>(part.frames) * frame * sizeof(float));
      } catch (const Error& e) {
        // A mask that does not fit: the clip itself will fail with this error.
        if (e.code() != Exit::data) throw;
      }
  }
  plan.bytes = ClipWriter::pieces * plan.piece + beside;
  return plan;
}

}  // namespace weft
