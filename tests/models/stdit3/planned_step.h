// One training step of a small model, run or only planned.
#pragma once

#include "fixture.h"
#include "models/stdit3/options.h"
#include "models/stdit3/rectified_flow.h"

namespace weft::test {

// Peak of one training step in `arena`; the inputs' values exist only where there is memory.
inline std::size_t peak_of_step(Arena& arena, Model& model, const Batch& batch) {
  const ArenaScope scope(arena);
  const Stdit3Config& deck = model.net.config();
  Stdit3Input in;
  Tensor x0, eps;
  if (arena.is_planning()) {
    const auto real = Arena::reserve(std::size_t{1} << 28);
    const auto like = [](const Tensor& t) {
      return t.defined() ? Tensor::empty(t.shape(), t.dtype()) : Tensor();
    };
    Stdit3Input sizes;
    {
      const ArenaScope inner(*real);
      sizes = make_input(deck, batch);
    }
    x0 = like(sizes.x);
    eps = like(sizes.x);
    in.timestep = like(sizes.timestep);
    in.fps = like(sizes.fps);
    in.captions = {like(sizes.captions.y), like(sizes.captions.index), like(sizes.captions.offsets),
                   sizes.captions.lengths};
    in.x_mask = like(sizes.x_mask);
    in.drop_path = like(sizes.drop_path);
    in.height = sizes.height;
    in.width = sizes.width;
    sizes = {};
  } else {
    in = make_input(deck, batch);
    x0 = in.x;
    eps = to_tensor(random_values(x0.numel(), 6), x0.shape());
  }
  model.net.params().begin_step([](int) {});
  const std::size_t before = arena.used();
  {
    Tape tape;
    const float half = 0.5f;
    const Tensor weight = Tensor::from_host(std::span<const float>(&half, 1), {1});
    const Tensor loss = flow_loss(tape, model.net, x0, eps, in, weight);
    tape.backward();
  }
  EXPECT_EQ(arena.used(), before);
  return arena.peak();
}

}  // namespace weft::test
