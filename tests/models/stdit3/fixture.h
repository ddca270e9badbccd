// Small STDiT3s and inputs for them.
#pragma once

#include "models/lora.h"
#include "models/stdit3/options.h"
#include "models/stdit3/stdit3.h"
#include "tests/nn/fixture.h"

namespace weft::test {

inline Stdit3Config tiny_model() {
  Stdit3Config d;
  d.in_channels = 2;
  d.hidden_size = 12;
  d.num_heads = 2;
  d.depth = 2;
  d.mlp_ratio = 2.0;
  d.caption_channels = 10;
  d.model_max_length = 4;
  d.input_sq_size = 32;
  return d;
}

inline std::vector<std::vector<std::int32_t>> ragged_captions() {
  return {{0, 1, 2}, {-1, -2}, {1}};
}

// Height and width are odd, so that every patch size above 1 has something to pad.
struct Batch {
  std::int64_t B = 3, T = 3, H = 3, W = 5;
  bool masked = false, dropped = false;
  // Caption rows of each sample: -1 rows are the null caption's.
  std::vector<std::vector<std::int32_t>> captions = ragged_captions();
};

inline Stdit3Input make_input(const Stdit3Config& d, const Batch& b) {
  Stdit3Input in;
  const Shape shape{b.B, d.in_channels, b.T, b.H, b.W};
  in.x = to_tensor(random_values(shape.numel(), 901), shape);
  Vec times, rates;
  for (std::int64_t i = 0; i < b.B; ++i) {
    times.push_back(std::fmod(811.0 + 345.6 * static_cast<double>(i), 1000.0));
    rates.push_back(12.0 + 6.0 * static_cast<double>(i));
  }
  in.timestep = to_tensor(times, {b.B});
  in.fps = to_tensor(rates, {b.B});
  in.height = 24;
  in.width = 40;
  in.captions.y = to_tensor(random_values(b.B * d.model_max_length * d.caption_channels, 902),
                            {b.B, d.model_max_length, d.caption_channels});
  Vec index, offsets{0};
  for (std::int64_t i = 0; i < b.B; ++i) {
    for (const std::int32_t row : b.captions[i])
      index.push_back(row < 0 ? row : static_cast<double>(i * d.model_max_length + row));
    offsets.push_back(static_cast<double>(index.size()));
    in.captions.lengths.push_back(std::int64_t(b.captions[i].size()));
  }
  in.captions.index = to_tensor(index, {std::int64_t(index.size())}, DType::i32);
  in.captions.offsets = to_tensor(offsets, {b.B + 1}, DType::i32);
  if (b.masked) {
    // Sample 0 mixes, sample 1 is generated whole, sample 2 is all clean.
    Vec mask;
    for (std::int64_t i = 0; i < b.B * b.T; ++i)
      mask.push_back(i / b.T == 1 || (i / b.T == 0 && i % b.T != 1));
    in.x_mask = to_tensor(mask, {b.B, b.T}, DType::u8);
  }
  if (b.dropped) {
    Vec keep;
    for (std::int64_t i = 0; i < 4 * d.depth * b.B; ++i) keep.push_back(i % 5 == 2 ? 0.0 : 1.25);
    in.drop_path = to_tensor(keep, {d.depth, 2, 2, b.B});
  }
  return in;
}

class Model {
 public:
  // `lora`: its parameters are the base of adapters, whose B is not 0 either.
  explicit Model(const Stdit3Config& deck, std::uint64_t seed = 4, const LoraDeck& lora = {})
      : net(deck) {
    if (lora.on()) {
      const std::vector<nn::Linear*> layers = net.linears();
      add_adapters(lora, net.params(), layers);
    }
    net.params().allocate(1 << 16, holds_bf16(deck.dtype), true);
    randomise(net.params(), seed);
  }
  Vec operator()(const Stdit3Input& in) {
    Tape tape(Tape::Mode::infer);
    return to_values(net.forward(tape, in)->value);
  }
  // Gradients of g . output, in the parameters; those of the inputs are returned.
  struct InputGradients {
    Vec x, y;
  };
  InputGradients backward(const Stdit3Input& in, const Vec& g) {
    net.params().begin_step([](int) {});
    Tape tape;
    const Var x = make_var(in.x), y = make_var(in.captions.y);
    const Var out = net.forward(tape, in, x, y);
    out->grad = to_tensor(g, out->value.shape());
    tape.backward();
    net.params().finish_step();
    return {to_values(x->grad), to_values(y->grad)};
  }
  std::int64_t outputs(const Stdit3Input& in) const {
    return in.x.numel() / net.config().in_channels * net.out_channels();
  }

  Stdit3 net;
};

}  // namespace weft::test
