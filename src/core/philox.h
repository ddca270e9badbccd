// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
// Randomness is a function of (seed, purpose, step, sample, element): nothing to save, the same on
// every device and at every rank count. The words are the same bits on a GPU; normal() differs
// there by the rounding of log, sin and cos in f32.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define WEFT_HOST_DEVICE __host__ __device__
#else
#define WEFT_HOST_DEVICE
#endif

namespace weft {

// What a random number is for: keeps the streams of one sample apart.
enum class Purpose : std::uint32_t {
  init = 1,
  sample_order,
  timestep,
  noise,
  frame_mask,
  caption_drop,
  drop_path,
  crop,
  synthetic,
  sampler,
  posterior,
  latent,             // drawn from moments while training
  spatial_posterior,  // of a VAE in training; the temporal one has `posterior`
  clip_length,
  channel_dropout,
  image_view,  // at which size, and whether flipped, an image is trained on
  head_pose,   // of a face that speaks
  blink,       // of its eyes
  held_out,    // which samples [validation] keeps from training
  held_out_noise,
};

WEFT_HOST_DEVICE inline std::array<std::uint32_t, 4> philox4x32(
    std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(p1),
        static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// A stream of random numbers keyed by (seed, purpose, step, sample); element indexes into it.
// Key words: seed. Counter words: element / 4 (32 bit), purpose and the step's low 24 bits, and the
// sample id's 64 bits with the step's high bits folded in, so distinct uses never share a block.
class Philox {
 public:
  WEFT_HOST_DEVICE Philox(std::uint64_t seed, Purpose purpose, std::uint64_t step,
                          std::uint64_t sample)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)},
        c1_((static_cast<std::uint32_t>(purpose) << 24) |
            static_cast<std::uint32_t>(step & 0xffffff)),
        c2_(static_cast<std::uint32_t>(sample)),
        c3_(static_cast<std::uint32_t>(sample >> 32) ^ static_cast<std::uint32_t>(step >> 24)) {}

  WEFT_HOST_DEVICE std::array<std::uint32_t, 4> block(std::uint32_t index) const {
    return philox4x32({index, c1_, c2_, c3_}, key_);
  }
  WEFT_HOST_DEVICE std::uint32_t u32(std::uint32_t element) const {
    return block(element / 4)[element % 4];
  }

  // Uniform in [0, 1), 24 bits.
  WEFT_HOST_DEVICE float uniform(std::uint32_t element) const { return to_unit(u32(element)); }

  // Standard normal by Box-Muller; elements 2i and 2i+1 come from one pair of uniforms.
  WEFT_HOST_DEVICE float normal(std::uint32_t element) const {
    const auto b = block(element / 4);
    const int pair = (element % 4) / 2 * 2;
    return gauss(b[pair], b[pair + 1], element % 2 != 0);
  }

  // Uniform integer in [0, n), n >= 1, without modulo bias worth noticing (64-bit product).
  WEFT_HOST_DEVICE std::uint32_t below(std::uint32_t element, std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{u32(element)} * n) >> 32);
  }

  WEFT_HOST_DEVICE static float to_unit(std::uint32_t u) {
    return static_cast<float>(u >> 8) * 0x1p-24f;
  }
  WEFT_HOST_DEVICE static float gauss(std::uint32_t a, std::uint32_t b, bool second) {
    const float u = (static_cast<float>(a >> 8) + 0.5f) * 0x1p-24f;  // in (0, 1)
    const float radius = std::sqrt(-2.0f * std::log(u));
    const float angle = 6.28318530717958647692f * to_unit(b);
    return radius * (second ? std::sin(angle) : std::cos(angle));
  }

 private:
  std::array<std::uint32_t, 2> key_;
  std::uint32_t c1_, c2_, c3_;
};

}  // namespace weft
