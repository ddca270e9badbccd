// What coding a clip takes of the arena, known before it is done.
#include <algorithm>

#include "core/error.h"
#include "models/video_vae/video_vae.h"

namespace weft {
namespace {

double gib(std::size_t bytes) { return static_cast<double>(bytes) / (1ull << 30); }

// A micro-batch size for the scope's life.
class MicroBatch {
 public:
  MicroBatch(VideoVae& vae, std::int64_t frames) : vae_(vae), before_(vae.micro_batch()) {
    vae_.set_micro_batch(frames);
  }
  ~MicroBatch() { vae_.set_micro_batch(before_); }
  MicroBatch(const MicroBatch&) = delete;
  MicroBatch& operator=(const MicroBatch&) = delete;

 private:
  VideoVae& vae_;
  std::int64_t before_;
};

}  // namespace

std::size_t VideoVae::plan_encode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                  std::int64_t micro_batch, std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  const MicroBatch at_once(*this, micro_batch);
  const Noise noise;
  encode_moments(
      frames, height, width,
      [&](std::int64_t, std::int64_t count) {
        return Tensor::empty({count, height, width, 3}, DType::f32);
      },
      &noise);
  return arena->peak();
}

std::size_t VideoVae::plan_decode(std::int64_t frames, std::int64_t height, std::int64_t width,
                                  std::int64_t micro_batch, std::size_t capacity) {
  const auto arena = Arena::planning(this_device().kind, capacity);
  const ArenaScope scope(*arena);
  const MicroBatch at_once(*this, micro_batch);
  const std::int64_t side = pixels_a_latent();
  const Tensor latent = Tensor::empty(
      {1, TemporalVae::latent_channels, latent_frames(frames), height / side, width / side},
      DType::f32);
  decode(latent, frames, [](std::int64_t, const Tensor&) {});
  return arena->peak();
}

std::int64_t VideoVae::fit_micro_batch(std::int64_t frames, std::int64_t height, std::int64_t width,
                                       std::size_t capacity, bool decode_too) {
  // 0 would be an arena without end.
  const std::size_t usable = std::max<std::size_t>(1, capacity - capacity / 32);
  // Two chunks are as long as any clip to the arena; only the latent grows, and that is counted.
  const auto fits = [&](std::int64_t n) {
    try {
      plan_encode(frames, height, width, n, usable);
      if (decode_too) plan_decode(frames, height, width, n, usable);
      return true;
    } catch (const Error& e) {
      if (e.code() != Exit::usage) throw;
      return false;
    }
  };
  std::int64_t most = chunk_frames(frames);
  if (config_.micro_batch_size > 0) most = std::min(most, config_.micro_batch_size);
  std::int64_t low = 0;
  while (low < most) {
    const std::int64_t middle = low + (most - low + 1) / 2;
    if (fits(middle))
      low = middle;
    else
      most = middle - 1;
  }
  if (low == 0) {
    std::size_t need = plan_encode(frames, height, width, 1);
    if (decode_too) need = std::max(need, plan_decode(frames, height, width, 1));
    throw Error(Exit::usage,
                fmt::format("the VAE needs {:.2f} GiB for a clip of {} frames of {}x{} even frame "
                            "by frame, a rank has {:.2f} GiB for it",
                            gib(need), frames, height, width, gib(capacity)),
                "make the clip smaller or give the rank more memory (fewer ranks a host, "
                "memory.arena_gib)",
                __FILE__, __LINE__);
  }
  return low;
}

}  // namespace weft
