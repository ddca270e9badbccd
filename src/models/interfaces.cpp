#include "models/interfaces.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/host.h"
#include "models/flow_sampler.h"

namespace weft {

const SamplerDeck& Denoiser::sampler(const Deck& deck) const { return deck.get<SamplerDeck>(); }

void Denoiser::check_sequence(std::int64_t h, std::int64_t w, std::int64_t ranks) const {
  const std::int64_t side = side_multiple();
  WEFT_CHECK(h % side == 0 && w % side == 0, Exit::usage,
             fmt::format("take clips whose latents have sides in multiples of {}", side),
             "{} takes no latents of {}x{}", name(), h, w);
  WEFT_CHECK(ranks == 1, Exit::usage, "set parallel.sp = 1",
             "parallel.sp = {}, but ranks cannot share a clip of this model", ranks);
}

Tensor VideoCodec::encode_moments(const Part&, std::int64_t, std::int64_t, const FrameSource&,
                                  const Noise*) {
  throw Error(Exit::usage, "this model's codec has no posterior: there are no moments to store",
              "set encode.latents = \"sampled\"", __FILE__, __LINE__);
}

ModelSize size_of(const ParameterTable& table) {
  return {std::ssize(table.all()), table.total_elements()};
}

std::string VideoCodec::describe(const Normalisation& n) const {
  return fmt::format("shift=[{:.4g}] scale=[{:.4g}]", fmt::join(n.shift, ","),
                     fmt::join(n.scale, ","));
}

MemoryNeed VideoCodec::dry_run(std::int64_t micro_batch, std::size_t capacity,
                               const std::function<void()>& work) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  const std::int64_t before = std::exchange(at_once_, micro_batch);
  work();
  at_once_ = before;
  return arena->need();
}

MemoryNeed VideoCodec::plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::int64_t micro_batch, std::size_t capacity) {
  return dry_run(micro_batch, capacity, [&] {
    const Noise noise;
    encode(
        whole(frames), height, width,
        [&](std::int64_t, std::int64_t count) {
          return Tensor::empty({count, height, width, 3}, DType::f32);
        },
        &noise);
  });
}

MemoryNeed VideoCodec::plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                   std::int64_t micro_batch, std::size_t capacity) {
  return dry_run(micro_batch, capacity, [&] {
    const std::int64_t side = pixels_a_latent();
    decode(Tensor::empty({1, channels(), latent_frames(frames), height / side, width / side},
                         DType::f32),
           coded_frames(frames), [](std::int64_t, const Tensor&) {});
  });
}

std::int64_t VideoCodec::largest_micro_batch(std::int64_t frames, std::int64_t height,
                                             std::int64_t width, std::size_t capacity,
                                             bool decode_too) {
  // At least 1: 0 would mean an unlimited arena.
  const std::size_t usable = std::max<std::size_t>(1, capacity - capacity / 32);
  // From two chunks on, the need grows only by the latent, which is counted.
  const auto fits = [&](std::int64_t n) {
    return plan_encode(frames, height, width, n, usable).fits &&
           (!decode_too || plan_decode(frames, height, width, n, usable).fits);
  };
  std::int64_t low = 0, most = frames_asked(frames);
  while (low < most) {
    const std::int64_t middle = low + (most - low + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      most = middle - 1;
  }
  return low;
}

std::int64_t VideoCodec::fit_micro_batch(std::int64_t frames, std::int64_t height,
                                         std::int64_t width, std::size_t capacity,
                                         bool decode_too) {
  const std::int64_t most = largest_micro_batch(frames, height, width, capacity, decode_too);
  if (most > 0) return most;
  std::size_t need = plan_encode(frames, height, width, 1).bytes;
  if (decode_too) need = std::max(need, plan_decode(frames, height, width, 1).bytes);
  throw Error(Exit::usage,
              fmt::format("the {} needs {:.2f} GiB for a clip of {} frames of {}x{} even frame by "
                          "frame, a rank has {:.2f} GiB for it",
                          name(), gib(need), frames, height, width, gib(capacity)),
              "make the clip smaller or give the rank more memory (fewer ranks a host, "
              "memory.arena_gib)",
              __FILE__, __LINE__);
}

}  // namespace weft
