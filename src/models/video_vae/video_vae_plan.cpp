// How much of the arena coding a clip takes, from a dry run.
#include <algorithm>

#include "core/error.h"
#include "core/host.h"
#include "models/video_vae/video_vae.h"

namespace weft {
namespace {

// Sets the micro-batch size during its lifetime.
class ScopedMicroBatch {
 public:
  ScopedMicroBatch(VideoVae& vae, std::int64_t frames) : vae_(vae), before_(vae.micro_batch()) {
    vae_.set_micro_batch(frames);
  }
  ~ScopedMicroBatch() { vae_.set_micro_batch(before_); }
  ScopedMicroBatch(const ScopedMicroBatch&) = delete;
  ScopedMicroBatch& operator=(const ScopedMicroBatch&) = delete;

 private:
  VideoVae& vae_;
  std::int64_t before_;
};

}  // namespace

MemoryNeed VideoVae::plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                 std::int64_t micro_batch, std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  const ScopedMicroBatch at_once(*this, micro_batch);
  const Noise noise;
  encode_moments(
      frames, height, width,
      [&](std::int64_t, std::int64_t count) {
        return Tensor::empty({count, height, width, 3}, DType::f32);
      },
      &noise);
  return arena->need();
}

MemoryNeed VideoVae::plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                 std::int64_t micro_batch, std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  const ScopedMicroBatch at_once(*this, micro_batch);
  const std::int64_t side = pixels_a_latent();
  const Tensor latent = Tensor::empty(
      {1, TemporalVae::latent_channels, latent_frames(frames), height / side, width / side},
      DType::f32);
  decode(latent, frames, [](std::int64_t, const Tensor&) {});
  return arena->need();
}

std::int64_t VideoVae::largest_micro_batch(std::int64_t frames, std::int64_t height,
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

std::int64_t VideoVae::fit_micro_batch(std::int64_t frames, std::int64_t height, std::int64_t width,
                                       std::size_t capacity, bool decode_too) {
  const std::int64_t most = largest_micro_batch(frames, height, width, capacity, decode_too);
  if (most > 0) return most;
  std::size_t need = plan_encode(frames, height, width, 1).bytes;
  if (decode_too) need = std::max(need, plan_decode(frames, height, width, 1).bytes);
  throw Error(Exit::usage,
              fmt::format("the VAE needs {:.2f} GiB for a clip of {} frames of {}x{} even frame by "
                          "frame, a rank has {:.2f} GiB for it",
                          gib(need), frames, height, width, gib(capacity)),
              "make the clip smaller or give the rank more memory (fewer ranks a host, "
              "memory.arena_gib)",
              __FILE__, __LINE__);
}

}  // namespace weft
