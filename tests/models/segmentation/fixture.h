// A network of segmentation with values in its table, and a step of it.
#pragma once

#include "models/segmentation/segmentation.h"
#include "nn/image_ops.h"
#include "tests/nn/fixture.h"

namespace weft::test {

inline SegmentationDeck pair_of(const std::string& encoder, const std::string& decoder,
                                std::int64_t classes = 7) {
  SegmentationDeck deck;
  deck.encoder = encoder;
  deck.decoder = decoder;
  deck.num_classes = classes;
  deck.dropout = 0;
  return deck;
}

struct Net {
  enum How { f32, bf16, zeros, laid_out };  // laid_out: without memory for gradients, for plans
  explicit Net(const SegmentationDeck& deck, How how = f32) : net(deck) {
    net.params().allocate(1 << 20, how == bf16, how != laid_out);
    if (how == zeros || how == laid_out) return;
    start();
    net.params().refresh_working();
  }
  // As initialise(), from numbers that are cheaper: these networks have up to 66 million.
  void start() {
    for (const auto& p : net.params().all()) {
      const std::span<float> values = p->value.span<float>();
      const bool normal = p->init.kind == Init::Kind::normal;
      const float half = p->init.a * (normal ? 1.7320508f : 1.0f);
      std::uint32_t state = static_cast<std::uint32_t>(std::hash<std::string>()(p->name));
      for (float& v : values) {
        state = 1664525u * state + 1013904223u;
        v = p->init.kind == Init::Kind::constant
                ? p->init.a
                : half * (static_cast<float>(state >> 8) * 0x1p-23f - 1);
      }
    }
  }
  Segmentation net;
  nn::BatchNormGroup group;
};

// Labels u8 of a batch: classes and some unlabelled.
inline Tensor some_labels(std::int64_t n, std::int64_t h, std::int64_t w, int classes) {
  Vec v(static_cast<std::size_t>(n * h * w));
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<double>(i * 7 % static_cast<std::size_t>(classes + 1));
  return to_tensor(v, {n, 1, h, w}, DType::u8);
}

struct StepResult {
  double loss = 0;
  std::size_t peak = 0;
};

// Forward and backward on N images of H x W in the current arena; loss = nll + 0.4 nll of the
// deep supervision.
inline StepResult run_step(Net& n, std::int64_t N, std::int64_t H, std::int64_t W,
                           std::int64_t recomputed = 0, DType dtype = DType::f32, int classes = 7) {
  Arena& arena = Arena::current();
  const Shape shape{N, 1, H, W, 3};
  const bool planning = arena.is_planning();
  const Tensor pixels = planning ? Tensor::empty(shape, dtype)
                                 : to_tensor(random_values(shape.numel(), 3), shape, dtype);
  const std::int64_t r = n.net.label_rate(), h = (H + r - 1) / r, w = (W + r - 1) / r;
  const Tensor labels =
      planning ? Tensor::empty({N, 1, h, w}, DType::u8) : some_labels(N, h, w, classes);
  n.net.params().begin_step([](int) {});
  const std::size_t before = arena.used();
  arena.reset_peak();
  StepResult result;
  {
    Tape tape;
    const nn::Context c{tape, n.net.params()};
    const auto logits =
        n.net.forward(c, make_var(pixels, false), n.group, {}, n.net.has_aux(), recomputed);
    const Tensor main = nn::nll(c, logits.main, labels, 1.0f);
    Tensor aux;
    if (logits.aux) aux = nn::nll(c, logits.aux, labels, 0.4f);
    if (!planning) {
      const auto mean = [](const Tensor& s) { return s.data<double>()[0] / s.data<double>()[1]; };
      result.loss = mean(main) + (aux.defined() ? 0.4 * mean(aux) : 0);
    }
    tape.backward();
  }
  EXPECT_EQ(arena.used(), before);
  result.peak = arena.peak() - before;
  return result;
}

}  // namespace weft::test
