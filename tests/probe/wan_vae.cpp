#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/wan/vae.h"
#include "nn/conv.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {

// Clips whole, encoder and decoder behind one another; activations are [B,C,T,H,W] in the files.
int probe_wan_vae(const Deck& given, const ProbeRequest& request) {
  Deck deck = given;
  // --dtype sets model.dtype: it is the same option for all probes.
  if (deck.model.dtype == "bf16") deck.get<WanVaeDeck>().dtype = "bf16";
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  WanVae vae(deck.get<WanVaeDeck>());
  ParameterTable& params = vae.params();
  params.allocate(1 << 22, vae.bf16(), request.backward);
  load_weights(request.weights, params, vae.weight_names());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);

  const ProbeInputs inputs(request.inputs);
  const auto activations = [&](const std::string& name, const Shape& shape) {
    const Tensor values = inputs.f32(name, shape);
    if (!vae.bf16()) return values;
    Tensor t = Tensor::empty(shape, DType::bf16);
    ops::convert(values, t);
    return t;
  };
  const auto& s = inputs.shape("x");
  WEFT_CHECK(s.size() == 5 && s[1] == 3, Exit::data, "x is [B, 3, T, H, W]",
             "input \"x\" has {} dimensions", s.size());

  ProbeOutputs outputs;
  params.begin_step([](int) {});
  Tape tape(request.backward ? Tape::Mode::record : Tape::Mode::infer);
  const nn::Context c{tape, params};
  const Var x = make_var(activations("x", Shape(std::span<const std::int64_t>(s))));
  Var out;
  {
    const Var moments = vae.networks().encode(c, nn::channels_last(c, x));
    outputs.add("moments", nn::channels_first(c, moments)->value);
    const Var latent = nn::posterior_draw(c, moments, Tensor(), vae.normalised());
    outputs.add("latent", nn::channels_first(c, latent)->value);
    const Var z = nn::channel_affine(c, latent, vae.denormalised());
    out = nn::channels_first(c, vae.networks().decode(c, z));
  }
  outputs.add("reconstruction", out->value);
  if (request.backward) {
    out->grad = activations("cotangent", out->value.shape());
    tape.backward();
    params.finish_step();
    outputs.add("grad.x", x->grad);
    outputs.add_gradients(params);
  }
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
