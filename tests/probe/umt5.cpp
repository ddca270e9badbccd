#include <algorithm>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/t5/options.h"
#include "models/t5/t5.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {

int probe_umt5(const Deck& deck, const ProbeRequest& request) {
  WEFT_CHECK(!request.backward, Exit::usage, "leave --backward out",
             "the text encoder is not trained");
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  T5Deck config = deck.get<UmT5Deck>();
  if (deck.model.dtype == "bf16") config.dtype = "bf16";  // --dtype
  T5Encoder t5(config, 0, config.num_layers);
  t5.params().allocate_for_inference(config.dtype == "bf16");
  load_weights(request.weights, t5.params(), t5_weight_names(config));
  t5.pack_weights();
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);

  const ProbeInputs inputs(request.inputs);
  const Shape shape = inputs.shape("ids", 2);
  const std::int64_t B = shape[0], L = shape[1], C = config.d_model;
  const std::vector<std::int64_t> ids = inputs.i64("ids"), mask = inputs.i64("mask");
  WEFT_CHECK(mask.size() == ids.size(), Exit::data, "mask has the shape of ids",
             "input \"mask\" has {} elements, \"ids\" {}", mask.size(), ids.size());
  std::vector<std::int32_t> packed, offsets{0};
  PackedTokens tokens;
  for (std::int64_t b = 0; b < B; ++b) {
    std::int64_t valid = 0;
    while (valid < L && mask[b * L + valid] != 0) ++valid;
    for (std::int64_t l = 0; l < valid; ++l) {
      const std::int64_t id = ids[b * L + l];
      WEFT_CHECK(id >= 0 && id < config.vocab_size, Exit::data, "see t5.vocab_size",
                 "input \"ids\" has {}", id);
      packed.push_back(static_cast<std::int32_t>(id));
    }
    offsets.push_back(static_cast<std::int32_t>(packed.size()));
    tokens.longest = std::max(tokens.longest, valid);
  }
  tokens.ids = Tensor::from_host(std::span<const std::int32_t>(packed),
                                 {static_cast<std::int64_t>(packed.size())});
  tokens.offsets = Tensor::from_host(std::span<const std::int32_t>(offsets), {B + 1});
  Tensor encoded = t5.forward(tokens, Tensor());
  if (encoded.dtype() == DType::bf16) {
    Tensor wide = Tensor::empty(encoded.shape(), DType::f32);
    ops::convert(encoded, wide);
    encoded = wide;
  }
  std::vector<float> features(static_cast<std::size_t>(B * L * C));
  const Tensor host = encoded.to_host();
  const std::span<const float> values = host.span<float>();
  for (std::int64_t b = 0; b < B; ++b)
    std::copy(values.begin() + offsets[b] * C, values.begin() + offsets[b + 1] * C,
              features.begin() + b * L * C);
  ProbeOutputs outputs;
  outputs.add("features", features, {B, L, C});
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
