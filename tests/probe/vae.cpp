#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "nn/conv.h"
#include "ops/layout.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

constexpr std::int64_t C = TemporalVae::latent_channels;

// One run of a probe; inputs and outputs are [B,C,T,H,W].
class Run {
 public:
  Run(const ProbeRequest& request, ParameterTable& params, DType dtype)
      : inputs_(request.inputs),
        params_(params),
        dtype_(dtype),
        backward_(request.backward),
        tape_(backward_ ? Tape::Mode::record : Tape::Mode::infer) {
    params_.begin_step([](int) {});
  }

  nn::Context context() { return {tape_, params_}; }

  // The input x, and the same channels last.
  Var read_x(std::int64_t channels) {
    const auto& s = inputs_.shape("x");
    WEFT_CHECK(s.size() == 5 && s[1] == channels, Exit::data,
               fmt::format("x is [B, {}, T, H, W]", channels), "input \"x\" has {} dimensions{}",
               s.size(), s.size() > 1 ? fmt::format(" and {} channels", s[1]) : "");
    x_ = make_var(activations("x", Shape(std::span<const std::int64_t>(s))));
    return nn::channels_last(context(), x_);
  }
  // Noise of a posterior with these moments [B,t,h,w,2C], channels last.
  Tensor read_noise(const std::string& name, const Var& moments) {
    const Shape& s = moments->value.shape();
    Tensor eps = Tensor::empty({s[0], s[1], s[2], s[3], C}, DType::f32);
    ops::to_channels_last(inputs_.f32(name, {s[0], C, s[1], s[2], s[3]}), eps);
    return eps;
  }
  // Adds an output; `cotangent` names the input with its gradient, if it has one.
  void add(const std::string& name, const Var& channels_last, const std::string& cotangent = "") {
    const Var out = nn::channels_first(context(), channels_last);
    outputs_.add(name, out->value);
    if (backward_ && !cotangent.empty()) out->grad = activations(cotangent, out->value.shape());
  }
  void finish(const std::string& path) {
    if (backward_) {
      tape_.backward();
      params_.finish_step();
      outputs_.add("grad.x", x_->grad);
      outputs_.add_gradients(params_);
    }
    outputs_.write(path);
  }

 private:
  Tensor activations(const std::string& name, const Shape& shape) {
    const Tensor values = inputs_.f32(name, shape);
    if (dtype_ == DType::f32) return values;
    Tensor t = Tensor::empty(shape, dtype_);
    ops::convert(values, t);
    return t;
  }

  ProbeInputs inputs_;
  ParameterTable& params_;
  DType dtype_;
  bool backward_;
  Tape tape_;
  ProbeOutputs outputs_;
  Var x_;
};

// Moments, latent and reconstruction of latents of the 2D VAE [B,T,h,w,4]; returns the last.
Var through_temporal(Run& run, const TemporalVae& vae, const Var& x) {
  const nn::Context c = run.context();
  const Var moments = nn::clamp_log_variance(c, vae.encode(c, x));
  run.add("moments", moments, "cotangent_moments");
  const Var z = nn::posterior_draw(c, moments, run.read_noise("noise", moments), Tensor());
  run.add("latent", z);
  return vae.decode(c, z, x->value.dim(1));
}

}  // namespace

int probe_vae(const Deck& given, const ProbeRequest& request) {
  Deck deck = given;
  const bool whole = deck.model.name == "vae";
  // --dtype sets model.dtype: it is the same option for all probes.
  if (deck.model.dtype == "bf16") deck.get<VaeDeck>().dtype = "bf16";
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);

  std::unique_ptr<VideoVae> video;
  ParameterTable alone;
  std::unique_ptr<TemporalVae> temporal;
  if (whole)
    video = std::make_unique<VideoVae>(deck.get<VaeDeck>());
  else
    temporal = std::make_unique<TemporalVae>(deck.get<VaeDeck>(), alone, "");
  ParameterTable& params = whole ? video->params() : alone;
  const DType dtype = deck.get<VaeDeck>().dtype == "bf16" ? DType::bf16 : DType::f32;
  params.allocate(1 << 22, dtype == DType::bf16, request.backward);
  load_weights(request.weights, params, vae_weight_names());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  Run run(request, params, dtype);
  const nn::Context c = run.context();

  if (whole) {
    const Var x = run.read_x(3);
    const Var moments = nn::clamp_log_variance(c, video->spatial().encode(c, x));
    run.add("moments_2d", moments, "cotangent_moments_2d");
    const Var z =
        nn::posterior_draw(c, moments, run.read_noise("noise_2d", moments), video->scaled_2d());
    run.add("latent_2d", z);
    Var again = through_temporal(run, video->temporal(), z);
    run.add("reconstruction_2d", again);
    again = nn::channel_affine(c, again, video->unscaled_2d());
    run.add("reconstruction", video->spatial().decode(c, again), "cotangent");
  } else {
    const Var x = run.read_x(C);
    run.add("reconstruction", through_temporal(run, *temporal, x), "cotangent");
  }
  run.finish(request.outputs);
  return 0;
}

}  // namespace weft
