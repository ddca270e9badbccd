// The sampler of rectified flow (docs/models/stdit3.md, Rectified flow; opensora/schedulers/rf at
// v1.2.0), for any denoiser: times, guidance, frames that are given. What a step is, is its
// solver's (models/solver.h). tau in [0,1000], s = tau/1000; s = 1 is pure noise, s = 0 is data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "config/deck_table.h"
#include "models/interfaces.h"

namespace weft {

// Timesteps of rectified flow (docs/models/stdit3.md, Timestep transform).
struct DiffusionDeck {
  std::int64_t num_timesteps = 1000;
  std::string sample_method = "logit-normal";
  double loc = 0.0;
  double scale = 1.0;
  bool use_discrete_timesteps = false;
  bool use_timestep_transform = true;
  double transform_scale = 1.0;
};
// Steps from noise to clip (docs/generate.md, Solvers, Step cache).
struct SamplerDeck {
  std::string solver = "euler";
  std::int64_t steps = 30;
  std::vector<double> timesteps;          // before the shift, in place of `steps`
  std::vector<double> cfg_scale = {7.0};  // of two: below `boundary`, and from it on
  double boundary = 0;                    // share of 1000 from which on noise is high; 0: none
  std::int64_t boundary_step = 0;         // or: so many steps first
  bool use_timestep_transform = true;
  double shift = 0;
  std::string cache = "none";
  double cache_threshold = 0;

  bool caches() const { return cache != "none" && cache_threshold > 0; }
  std::int64_t count() const { return timesteps.empty() ? steps : std::ssize(timesteps); }
  // Whether step i, at `timestep`, is of high noise, and its guidance.
  bool high_noise(std::int64_t i, double timestep) const {
    return boundary_step > 0 ? i < boundary_step : boundary > 0 && timestep >= 1000 * boundary;
  }
  double guidance(bool high) const { return high ? cfg_scale.back() : cfg_scale.front(); }
  // Without guidance only the captions' own half is computed. A step cache needs both.
  bool guided() const {
    return caches() || std::ranges::any_of(cfg_scale, [](double g) { return g != 1; });
  }
};
DeckTable diffusion_table();

void sampler_rows(Rows& r, SamplerDeck& d);
// Of a model with an expert for each end of the noise, which says so by T::has_experts.
void expert_rows(Rows& r, SamplerDeck& d);
void check_sampler(const SamplerDeck& d, const DeckDemand& demand);
// The table [sampler]; T has a model's own defaults.
template <class T = SamplerDeck>
DeckTable sampler_table() {
  return deck_table<T>(
      "sampler",
      [](Rows& r, T& d) {
        sampler_rows(r, d);
        if constexpr (requires { T::has_experts; }) expert_rows(r, d);
      },
      [](const T& d, const DeckDemand& demand) { check_sampler(d, demand); });
}

// The size of a clip for the resolution/length transform, in pixels and pixel frames.
struct ClipSize {
  double height = 0, width = 0;
  std::int64_t num_frames = 1;
};

// Moves tau towards noise for large and long clips (Timestep transform). The original's latent
// length floor(num_frames/17)*5 is 0 for 2 to 16 frames, which sends every tau to 0 and 1000 to
// NaN: here it is at least 1.
double timestep_transform(double tau, const ClipSize& size, double scale);

// Captions of a batch on the host.
struct CaptionBatch {
  std::vector<std::int32_t> index;    // as Captions.index
  std::vector<std::int32_t> offsets;  // B+1
};
// Rows of `mask` i64 [Bm, L] that are not 0, tiled to `batch` samples; an empty mask takes all
// `length` rows.
CaptionBatch pack_captions(std::span<const std::int64_t> mask, std::int64_t length,
                           std::int64_t batch, bool null_caption);
// Rows that the captions of `clips` clips with `tokens` tokens in all get on a GPU: few counts, so
// that recorded steps fit most batches and few shapes of products are measured. Padding is at most
// an eighth of the rows, or 64, or, where that is more, 256 a clip and a 32nd of the tokens, beside
// which it costs nothing.
std::size_t padded_caption_rows(std::size_t rows, std::int64_t clips, std::int64_t tokens);
// To this rank's device; on a GPU with padding (ops::padding_row) for that many tokens.
Captions upload(const CaptionBatch& batch, const Tensor& y, std::int64_t tokens = 0);

struct SampleRequest {
  Tensor z;  // f32 [B,C,T,H,W]: starting noise, and clean frames where `edit` is below 1
  Tensor y;  // f32 [B, L, caption_channels] or undefined (null caption)
  CaptionBatch captions;
  // What guidance steers away from, packed likewise, with lengths of its own: negative_y f32 [1 or
  // B, L, caption_channels]. No offsets: the null caption, as long as each sample's own.
  Tensor negative_y;
  CaptionBatch negative;
  Tensor condition;  // f32 [B,c,T,H,W] or undefined, as DenoiserInput's
  // Guidance on two ranks: this one makes the velocity of the captions (0) or of what guidance
  // steers away from (1), and `branches`, of the two in this order, brings it to the other. A dry
  // run has none. -1: this rank makes both.
  int branch = -1;
  Communicator* branches = nullptr;
  std::vector<float> fps;       // [B]
  ClipSize size;                // the position embedding's, and every sample's unless:
  std::vector<ClipSize> sizes;  // [B] or empty: sizes for the timestep transform
  std::vector<float>
      edit;  // [B*T] or empty: 1 generate, 0 keep, between: keep until tau <= 1000 edit (Sampling)
  // Fresh noise of sample b for step i, like z; called only for frames that start to be edited
  // late, which Euler steps alone can do (check_edit).
  std::function<void(int step, Tensor& noise)> fresh_noise;
  std::function<void(int step, int steps)> progress;
  // Called before each step with the expert that makes it.
  std::function<void(bool high_noise)> expert;
  // For a step cache: the first rank's number on all ranks that sample together; empty: alone.
  std::function<double(double)> agree;
  std::int64_t* skipped = nullptr;  // gets how many steps it skipped
};

// Whether a frame of that edit ratio is denoised at tau. In f32, as the original compares: 0.7 then
// reaches 700, which 1000 times the f32 nearest to 0.7 does not. Frames to generate (1) always are,
// also where rounding puts the first tau above 1000.
bool is_active(float edit, double tau);

// Exit::usage where there are no two halves that two ranks could make.
void check_branches(const SamplerDeck& sampler);

// Exit::usage for frames that join late, with edit ratios between 0 and 1, unless steps are
// Euler's: the others go on from what they knew of a frame in the steps before. `where` begins the
// message.
void check_edit(const SamplerDeck& sampler, double edit, const std::string& where);

// Steps with classifier-free guidance from noise to data (Sampling). Returns z, denoised in place.
Tensor flow_sample(Denoiser& model, const SamplerDeck& sampler, const DiffusionDeck& diffusion,
                   const SampleRequest& request);

}  // namespace weft
