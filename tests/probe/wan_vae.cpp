#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/wan/picture.h"
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

namespace {

// [condition] of a deck: a picture for a clip of at most so many pixels.
struct ConditionDeck {
  std::string variant = "i2v";
  std::int64_t max_area = 480 * 832, num_frames = 81;
};
void condition_rows(Rows& r, ConditionDeck& d) {
  r.text("variant", d.variant, "How the picture is given.", {"i2v", "ti2v"});
  r.number("max_area", d.max_area, 1, many, "Pixels of a frame.");
  r.number("num_frames", d.num_frames, 1, 100000, "Frames of the clip.");
}

}  // namespace

std::vector<DeckTable> condition_probe_tables() {
  return {deck_table("condition", condition_rows)};
}

int probe_wan_condition(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const ConditionDeck& c = deck.get<ConditionDeck>();
  WanVae vae(deck.get<WanVaeDeck>());
  vae.params().allocate_for_inference(vae.bf16());
  load_weights(request.weights, vae.params(), vae.weight_names());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  const auto& s = inputs.shape("picture", 3);
  const std::vector<std::uint8_t> rgb = inputs.u8("picture");
  const RgbView picture{rgb.data(), s[0], s[1], s[1] * 3};
  const std::int64_t side = vae.pixels_a_latent();
  ProbeOutputs outputs;
  PictureFit fit;
  if (c.variant == "i2v") {
    fit = stretched_fit(s[1], s[0], c.max_area, side, 2);
    const Tensor pixels = stretched(picture, fit);
    Tensor planes = Tensor::empty({1, 3, 1, fit.height, fit.width}, DType::f32);
    ops::to_channels_first(pixels.view({1, 1, fit.height, fit.width, 3}), planes);
    outputs.add("resized", planes.view({3, fit.height, fit.width}));
    const Tensor y = picture_condition(vae, pixels, c.num_frames);
    outputs.add("y", y.view({y.dim(1), y.dim(2), y.dim(3), y.dim(4)}));
  } else {
    fit = covering_fit(s[1], s[0], c.max_area, 2 * side);
    std::vector<std::uint8_t> bytes;
    const Tensor pixels = covering(picture, fit, &bytes);
    outputs.add("resized", bytes, {fit.height, fit.width, 3});
    const Tensor z = vae.encode(
        vae.whole(1), fit.height, fit.width, [&](std::int64_t, std::int64_t) { return pixels; },
        nullptr);
    outputs.add("latent", z.view({z.dim(1), z.dim(2), z.dim(3), z.dim(4)}));
  }
  outputs.add("size", std::vector<std::int64_t>{fit.width, fit.height}, {2});
  outputs.write(request.outputs);
  return 0;
}

int probe_picture_size(const Deck& deck, const ProbeRequest& request) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  const std::vector<std::int64_t> pictures = inputs.i64("picture"), areas = inputs.i64("max_area");
  std::vector<std::int64_t> i2v, ti2v, scaled, crop;
  for (std::size_t i = 0; i < areas.size(); ++i) {
    const PictureFit a = stretched_fit(pictures[2 * i], pictures[2 * i + 1], areas[i], 8, 2);
    const PictureFit b = covering_fit(pictures[2 * i], pictures[2 * i + 1], areas[i], 32);
    i2v.insert(i2v.end(), {a.width, a.height});
    ti2v.insert(ti2v.end(), {b.width, b.height});
    scaled.insert(scaled.end(), {b.scaled_width, b.scaled_height});
    crop.insert(crop.end(), {b.left, b.top});
  }
  ProbeOutputs outputs;
  const Shape shape{std::ssize(areas), 2};
  outputs.add("i2v", i2v, shape);
  outputs.add("ti2v", ti2v, shape);
  outputs.add("ti2v_resized", scaled, shape);
  outputs.add("ti2v_crop", crop, shape);
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
