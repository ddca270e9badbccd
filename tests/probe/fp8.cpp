#include "ops/fp8.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {

int probe_fp8_linear(const Deck& deck, const ProbeRequest& request) {
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  const std::int64_t m = inputs.shape("x").at(0), k = inputs.shape("x").at(1),
                     n = inputs.shape("w").at(0);
  const auto in_bf16 = [&](const char* name, const Shape& shape) {
    Tensor t = Tensor::empty(shape, DType::bf16);
    ops::convert(inputs.f32(name, shape), t);
    return t;
  };
  const Tensor x = in_bf16("x", {m, k}), w = in_bf16("w", {n, k}), dy = in_bf16("dy", {m, n});
  Tensor y = Tensor::empty({m, n}, DType::bf16), dx = Tensor::empty({m, k}, DType::bf16);
  ops::fp8_linear_forward(x, w, inputs.f32("bias", {n}), Tensor(), y);
  ops::fp8_linear_backward_input(dy, w, dx, false);
  ProbeOutputs outputs;
  outputs.add("y", y);
  outputs.add("dx", dx);
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
