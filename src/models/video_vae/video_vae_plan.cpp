// How much of the arena coding a clip takes, from a dry run.
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

}  // namespace weft
