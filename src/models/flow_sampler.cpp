#include "models/flow_sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "models/solver.h"
#include "models/step_cache.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "ops/random.h"

namespace weft {

double timestep_transform(double tau, const ClipSize& size, double scale) {
  const double u = tau / 1000.0;
  const double space = std::sqrt(size.height * size.width / (512.0 * 512.0));
  // Integer division first, as in the original: 17 pixel frames are 5 latent frames. Clips of 2 to
  // 16 frames, which have none by that, count as one.
  const std::int64_t frames = std::max<std::int64_t>(size.num_frames / 17 * 5, 1);
  const double ratio = space * std::sqrt(static_cast<double>(frames)) * scale;
  return 1000.0 * ratio * u / (1.0 + (ratio - 1.0) * u);
}

CaptionBatch pack_captions(std::span<const std::int64_t> mask, std::int64_t length,
                           std::int64_t batch, bool null_caption) {
  const std::int64_t rows =
      static_cast<std::int64_t>(mask.size()) / std::max<std::int64_t>(length, 1);
  CaptionBatch packed;
  packed.offsets.push_back(0);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t l = 0; l < length; ++l)
      if (mask.empty() || mask[b % rows * length + l] != 0)
        packed.index.push_back(static_cast<std::int32_t>(null_caption ? -1 - l : b * length + l));
    packed.offsets.push_back(static_cast<std::int32_t>(packed.index.size()));
  }
  return packed;
}

std::size_t padded_caption_rows(std::size_t rows, std::int64_t clips, std::int64_t tokens) {
  const auto hidden = static_cast<std::size_t>(std::min(tokens / 32, 256 * clips));
  const std::size_t step =
      std::max({std::size_t{64}, std::bit_floor(rows) / 8, std::bit_floor(hidden)});
  return (rows + step - 1) / step * step;
}

Captions upload(const CaptionBatch& batch, const Tensor& y, std::int64_t tokens) {
  Captions c;
  c.y = y;
  std::vector<std::int32_t> index = batch.index;
  if (Arena::current().device() == DeviceKind::cuda)
    index.resize(padded_caption_rows(index.size(), std::ssize(batch.offsets) - 1, tokens),
                 ops::padding_row);
  c.index = Tensor::from_host(std::span<const std::int32_t>(index),
                              {static_cast<std::int64_t>(index.size())});
  c.offsets = Tensor::from_host(std::span<const std::int32_t>(batch.offsets),
                                {static_cast<std::int64_t>(batch.offsets.size())});
  for (std::size_t b = 1; b < batch.offsets.size(); ++b)
    c.lengths.push_back(batch.offsets[b] - batch.offsets[b - 1]);
  return c;
}

bool is_active(float edit, double tau) {
  return edit >= 1.0f || edit * 1000.0f >= static_cast<float>(tau);
}

namespace {

// Null captions with the same token counts.
CaptionBatch null_captions(const CaptionBatch& captions) {
  CaptionBatch null{{}, captions.offsets};
  for (std::size_t b = 1; b < captions.offsets.size(); ++b)
    for (std::int32_t l = 0; l < captions.offsets[b] - captions.offsets[b - 1]; ++l)
      null.index.push_back(-1 - l);
  return null;
}

// The guided batch where there is a null caption: the captions, and null captions behind them.
CaptionBatch with_null_captions(const CaptionBatch& captions) {
  CaptionBatch both = captions;
  const CaptionBatch null = null_captions(captions);
  both.index.insert(both.index.end(), null.index.begin(), null.index.end());
  for (std::size_t b = 1; b < null.offsets.size(); ++b)
    both.offsets.push_back(captions.offsets.back() + null.offsets[b]);
  return both;
}

// Rows of `batch`, packed from texts of `length` rows, as those of texts of `longest` behind
// `before` others.
void append_captions(const CaptionBatch& batch, std::int64_t length, std::int64_t longest,
                     std::int64_t before, CaptionBatch& both) {
  for (const std::int32_t row : batch.index)
    both.index.push_back(
        static_cast<std::int32_t>((before + row / length) * longest + row % length));
  const std::int32_t first = both.offsets.back();
  for (std::size_t b = 1; b < batch.offsets.size(); ++b)
    both.offsets.push_back(first + batch.offsets[b]);
}

// The guided batch with negative captions: texts of both, padded to the longest, in one tensor.
Captions with_negative_captions(const SampleRequest& request) {
  const Tensor &y = request.y, &negative = request.negative_y;
  WEFT_ASSERT(y.defined() && negative.defined());
  const std::int64_t texts = y.dim(0), longest = std::max(y.dim(1), negative.dim(1));
  Tensor all = Tensor::empty({texts + negative.dim(0), longest, y.dim(2)}, DType::f32);
  ops::fill_zero(all);
  const auto copy = [&](const Tensor& from, std::int64_t first) {
    for (std::int64_t t = 0; t < from.dim(0); ++t) {
      Tensor to =
          all.slice(first + t, first + t + 1).view({longest, y.dim(2)}).slice(0, from.dim(1));
      ops::convert(from.slice(t, t + 1).view({from.dim(1), y.dim(2)}), to);
    }
  };
  copy(y, 0);
  copy(negative, texts);
  CaptionBatch both;
  both.offsets.push_back(0);
  append_captions(request.captions, y.dim(1), longest, 0, both);
  append_captions(request.negative, negative.dim(1), longest, texts, both);
  return upload(both, all);
}

// Which frames of z [B,C,T,h,w] are denoised: those to generate always; a clean one joins once tau
// has fallen to its edit ratio, noised to the level of that moment.
class EditedFrames {
 public:
  explicit EditedFrames(const SampleRequest& request)
      : request_(request),
        frames_(request.z.dim(2)),
        active_(Tensor::empty({request.z.dim(0), frames_}, DType::u8)),
        joining_(Tensor::empty(active_.shape(), DType::u8)),
        sigma_(Tensor::empty({request.z.dim(0)}, DType::f32)),
        noise_(Tensor::empty(request.z.shape(), DType::f32)) {
    // Frames to generate start as noise, so they never join.
    for (const float edit : request.edit) seen_.push_back(edit == 1.0f);
  }

  // u8 [B,T], of the step that has begun.
  const Tensor& active() const { return active_; }

  // `tau` gives a sample's timestep; `mask` u8 [B or 2B,T] gets the frames of each half. Whether
  // some have joined.
  bool begin_step(std::int64_t step, const std::function<double(std::int64_t b)>& tau, Tensor& z,
                  Tensor& mask) {
    std::vector<std::uint8_t> joins(seen_.size()), active(seen_.size());
    bool any = false;
    for (std::size_t f = 0; f < seen_.size(); ++f) {
      active[f] = is_active(request_.edit[f], tau(static_cast<std::int64_t>(f) / frames_));
      joins[f] = active[f] && !seen_[f];
      any = any || joins[f];
      seen_[f] = active[f];
    }
    if (any) {
      std::vector<float> taus;
      for (std::int64_t b = 0; b < z.dim(0); ++b) taus.push_back(static_cast<float>(tau(b)));
      request_.fresh_noise(static_cast<int>(step), noise_);
      joining_.set(std::span<const std::uint8_t>(joins));
      sigma_.set(std::span<const float>(taus));
      ops::flow_interpolate(z, noise_, sigma_, joining_, z);
    }
    active_.set(std::span<const std::uint8_t>(active));
    for (std::int64_t b = 0; b < mask.dim(0); b += z.dim(0)) {
      Tensor half = mask.slice(b, b + z.dim(0));
      half.set(std::span<const std::uint8_t>(active));
    }
    return any;
  }

 private:
  const SampleRequest& request_;
  std::int64_t frames_;
  Tensor active_, joining_, sigma_, noise_;
  std::vector<bool> seen_;  // [B*T], denoised in the step before
};

// Velocities of both halves, of which this rank has made one.
Tensor both_branches(const Tensor& made, const SampleRequest& request) {
  const std::int64_t B = made.dim(0);
  Tensor both =
      Tensor::empty({2 * B, made.dim(1), made.dim(2), made.dim(3), made.dim(4)}, DType::f32);
  Tensor own = both.slice(request.branch * B, (request.branch + 1) * B);
  ops::convert(made, own);
  if (request.branches != nullptr) request.branches->wait(request.branches->all_gather(both));
  return both;
}

}  // namespace

void check_branches(const SamplerDeck& sampler) {
  WEFT_CHECK(
      sampler.guided() && !sampler.caches(), Exit::usage,
      "set generate.cfg_ranks = 1, or guide (sampler.cfg_scale other than 1) without a cache",
      "generate.cfg_ranks = 2 with sampler.cfg_scale = {} and sampler.cache = \"{}\"",
      fmt::join(sampler.cfg_scale, ", "), sampler.cache);
}

void check_edit(const SamplerDeck& sampler, double edit, const std::string& where) {
  WEFT_CHECK(sampler.solver == "euler" || edit == 0 || edit == 1, Exit::usage,
             "set sampler.solver = \"euler\", or an edit ratio of 0 or 1",
             "{}: an edit ratio of {} with sampler.solver = \"{}\"", where, edit, sampler.solver);
}

Tensor flow_sample(Denoiser& model, const SamplerDeck& sampler, const DiffusionDeck& diffusion,
                   const SampleRequest& request) {
  Tensor z = request.z;
  const std::int64_t B = z.dim(0), K = sampler.count();
  const bool shared = request.branch >= 0;
  const std::int64_t halves = sampler.guided() && !shared ? 2 : 1, both = halves * B;
  std::vector<SamplerTimes> times;
  for (std::int64_t b = 0; b < B; ++b)
    times.push_back(
        sampler_times(sampler, diffusion, request.sizes.empty() ? request.size : request.sizes[b]));
  const auto tau = [&](std::int64_t i, std::int64_t b) {
    return i == K ? 0.0 : times[b].timestep[i];
  };
  for (const float edit : request.edit) check_edit(sampler, edit, "frames");
  WEFT_ASSERT(request.edit.empty() || model.takes_given_frames());

  // 1. What all steps share: both halves of the guided batch, with the captions and without.
  DenoiserInput in;
  const bool null = request.negative.offsets.empty();
  WEFT_ASSERT(!sampler.guided() || !null || model.has_null_caption());
  if (shared && request.branch == 1) {
    in.captions = null ? upload(null_captions(request.captions), request.y)
                       : upload(request.negative, request.negative_y);
  } else if (halves == 1) {
    in.captions = upload(request.captions, request.y);
  } else if (null) {
    in.captions = upload(with_null_captions(request.captions), request.y);
  } else {
    in.captions = with_negative_captions(request);
  }
  in.height = request.size.height;
  in.width = request.size.width;
  std::vector<float> fps = request.fps;
  if (halves == 2) fps.insert(fps.end(), request.fps.begin(), request.fps.end());
  in.fps = Tensor::from_host(std::span<const float>(fps), {both});
  in.timestep = Tensor::empty({both}, DType::f32);
  in.x = Tensor::empty({both, z.dim(1), z.dim(2), z.dim(3), z.dim(4)}, DType::f32);
  // Writes `from` to each half of `to`.
  const auto to_halves = [&](const Tensor& from, Tensor& to) {
    for (std::int64_t h = 0; h < halves; ++h) {
      Tensor half = to.slice(h * B, (h + 1) * B);
      ops::convert(from, half);
    }
  };
  if (request.condition.defined()) {
    const Shape& s = request.condition.shape();
    in.condition = Tensor::empty({both, s[1], s[2], s[3], s[4]}, DType::f32);
    to_halves(request.condition, in.condition);
  }
  Tensor dt = Tensor::empty({B}, DType::f32);
  std::optional<EditedFrames> edited;
  if (!request.edit.empty()) {
    edited.emplace(request);
    in.x_mask = Tensor::empty({both, z.dim(2)}, DType::u8);
  }
  // Euler steps alone add the velocity as it comes out of the model.
  std::optional<StepCache> cache;
  if (sampler.caches()) cache.emplace(sampler, model, z, request.agree);
  std::optional<Solver> solver;
  Tensor velocity, ones;
  if (cache || sampler.solver != "euler") {
    solver.emplace(sampler.solver, times, z);
    velocity = Tensor::empty(z.shape(), DType::f32);
    ones = Tensor::from_host(std::span<const float>(std::vector<float>(B, 1.0f)), {B});
  }

  // 2. The steps.
  for (std::int64_t i = 0; i < K; ++i) {
    std::vector<float> taus, steps;
    for (std::int64_t b = 0; b < both; ++b) taus.push_back(static_cast<float>(tau(i, b % B)));
    for (std::int64_t b = 0; b < B; ++b)
      steps.push_back(static_cast<float>((tau(i, b) - tau(i + 1, b)) / 1000.0));
    bool joined = false;
    if (edited)
      joined = edited->begin_step(
          i, [&](std::int64_t b) { return tau(i, b); }, z, in.x_mask);
    to_halves(z, in.x);
    const bool high_noise = sampler.high_noise(i, tau(i, 0));
    const bool other = i > 0 && high_noise != in.high_noise;
    in.high_noise = high_noise;
    if (request.expert) request.expert(in.high_noise);
    in.timestep.set(std::span<const float>(taus));
    dt.set(std::span<const float>(steps));
    const Tensor active = edited ? edited->active() : Tensor();
    const auto guidance = static_cast<float>(sampler.guidance(in.high_noise));
    if (cache) {
      cache->velocity(in, joined || other, velocity);
    } else {
      const Tensor made = model.velocity(in), out = shared ? both_branches(made, request) : made;
      if (solver)
        guided_velocity(out, guidance, ones, velocity);
      else
        ops::guided_euler_step(out, guidance, dt, active, z);
    }
    if (solver) solver->step(i, velocity, active, z);
    if (request.progress) request.progress(static_cast<int>(i) + 1, static_cast<int>(K));
  }
  if (request.skipped != nullptr) *request.skipped += cache ? cache->skipped() : 0;
  return z;
}

}  // namespace weft
