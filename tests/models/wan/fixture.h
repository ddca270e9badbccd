// Small Wans and inputs for them.
#pragma once

#include "models/lora.h"
#include "models/wan/dit.h"
#include "models/wan/task.h"
#include "ops/pointwise.h"
#include "tests/nn/fixture.h"

namespace weft::test {

inline WanConfig tiny_wan() {
  WanConfig d;
  d.in_channels = 2;
  d.hidden_size =
      24;  // three heads of 8: two pairs of channels for time, one each for rows, columns
  d.num_heads = 3;
  d.depth = 2;
  d.ffn_dim = 20;
  d.text_dim = 10;
  d.text_len = 4;
  d.freq_dim = 16;
  return d;
}

struct WanBatch {
  std::int64_t T = 3, h = 4, w = 6;
  // Tokens of each sample's caption: all of text_len, some, none.
  std::vector<std::int64_t> captions = {4, 2, 0};
  std::int64_t B() const { return std::ssize(captions); }
};

inline WanInput make_wan_input(const Wan& model, const WanBatch& b) {
  const WanConfig& d = model.config();
  DenoiserInput in;
  const Shape shape{b.B(), model.channels(), b.T, b.h, b.w};
  in.x = to_tensor(random_values(shape.numel(), 901), shape);
  if (const std::int64_t c = model.condition_channels(); c > 0) {
    const Shape beside{b.B(), c, b.T, b.h, b.w};
    in.condition = to_tensor(random_values(beside.numel(), 903), beside);
  }
  if (model.takes_given_frames()) {  // the first frames of every other sample
    std::vector<std::uint8_t> mask;
    for (std::int64_t f = 0; f < b.B() * b.T; ++f) mask.push_back(f % (2 * b.T) != 0);
    in.x_mask = Tensor::from_host(std::span<const std::uint8_t>(mask), {b.B(), b.T});
  }
  Vec times;
  for (std::int64_t i = 0; i < b.B(); ++i)
    times.push_back(std::fmod(811.0 + 345.6 * static_cast<double>(i), 1000.0));
  in.timestep = to_tensor(times, {b.B()});
  CaptionBatch captions;
  captions.offsets.push_back(0);
  for (std::int64_t i = 0; i < b.B(); ++i) {
    for (std::int64_t l = 0; l < b.captions[i]; ++l)
      captions.index.push_back(static_cast<std::int32_t>(i * d.text_len + l));
    captions.offsets.push_back(static_cast<std::int32_t>(captions.index.size()));
  }
  in.captions = upload(captions, to_tensor(random_values(b.B() * d.text_len * d.text_dim, 902),
                                           {b.B(), d.text_len, d.text_dim}));
  return model.complete(in);
}

class WanModel {
 public:
  // `lora`: its parameters are the base of adapters, whose B is not 0 either.
  explicit WanModel(const WanConfig& config, const LoraDeck& lora = {}) : net(config) {
    if (lora.on()) {
      const std::vector<nn::Linear*> layers = net.linears();
      add_adapters(lora, net.params(), layers);
    }
    net.params().allocate(1 << 16, holds_bf16(config.dtype), true);
    randomise(net.params(), 4);
  }
  Vec operator()(const WanInput& in) {
    Tape tape(Tape::Mode::infer);
    return to_values(net.forward(tape, in)->value);
  }
  // The output, and the gradients of g . output by every trained parameter, by x and by y.
  struct Outcome {
    Vec out;
    std::vector<std::pair<std::string, Vec>> gradients;
  };
  Outcome run(const WanInput& in, const Vec& g) {
    Outcome o;
    ParameterTable& table = net.params();
    // What an earlier step left must not shine through.
    std::fill_n(table.grads().data<float>(), table.grads().numel(), 1e9f);
    table.begin_step([](int) {});
    table.set_counting(true);
    Tape tape;
    const Var x = make_var(in.x), y = make_var(in.captions.y);
    const Var out = net.forward(tape, in, {x, nullptr, y});
    o.out = to_values(out->value);
    out->grad = to_tensor(g, out->value.shape());
    tape.backward();
    table.finish_step();
    for (const auto& p : table.all())
      if (p->trainable) o.gradients.emplace_back(p->name, to_values(p->grad));
    o.gradients.emplace_back("x", to_values(x->grad));
    o.gradients.emplace_back("y", to_values(y->grad));
    return o;
  }

  Wan net;
};

// Peak of one training step in `arena`; the inputs' values exist only where there is memory.
inline std::size_t peak_of_wan_step(Arena& arena, WanModel& model, const WanBatch& batch) {
  const ArenaScope scope(arena);
  WanInput in;
  if (arena.is_planning()) {
    const auto real = Arena::reserve(std::size_t{1} << 26);
    const auto like = [](const Tensor& t) { return Tensor::empty(t.shape(), t.dtype()); };
    WanInput sizes;
    {
      const ArenaScope inner(*real);
      sizes = make_wan_input(model.net, batch);
    }
    in.x = like(sizes.x);
    in.timestep = like(sizes.timestep);
    in.captions = {like(sizes.captions.y), like(sizes.captions.index), like(sizes.captions.offsets),
                   sizes.captions.lengths};
    in.last_bias = like(sizes.last_bias);
    sizes = {};
  } else {
    in = make_wan_input(model.net, batch);
  }
  const Tensor x0 = std::exchange(in.x, {});
  Tensor eps = Tensor::empty(x0.shape(), DType::f32);
  if (!arena.is_planning()) ops::convert(x0, eps);
  model.net.params().begin_step([](int) {});
  const std::size_t before = arena.used();
  {
    Tape tape;
    const float half = 0.5f;
    const Tensor weight = Tensor::from_host(std::span<const float>(&half, 1), {1});
    wan_loss(tape, model.net, x0, eps, in, Tensor(), weight);
    tape.backward();
  }
  EXPECT_EQ(arena.used(), before);
  return arena.peak();
}

}  // namespace weft::test
