#include <algorithm>
#include <string>
#include <vector>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "models/flow_sampler.h"
#include "models/pixels.h"
#include "models/registry.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

// The rows of each context that count: the first of `lens`.
CaptionBatch rows_of(const ProbeInputs& inputs, const std::string& lens, const Shape& context) {
  const std::vector<std::int64_t> lengths = inputs.i64(lens);
  const std::int64_t B = context[0], L = context[1];
  WEFT_CHECK(std::ssize(lengths) == B, Exit::data, probe_hint, "input \"{}\" has {} elements", lens,
             lengths.size());
  std::vector<std::int64_t> mask(static_cast<std::size_t>(B * L));
  for (std::int64_t b = 0; b < B; ++b) {
    WEFT_CHECK(lengths[b] >= 0 && lengths[b] <= L, Exit::data, probe_hint, "input \"{}\" has {}",
               lens, lengths[b]);
    std::fill_n(mask.begin() + b * L, lengths[b], 1);
  }
  return pack_captions(mask, L, B, false);
}

}  // namespace

int probe_wan_sample(const Deck& deck, const ProbeRequest& request) {
  WEFT_CHECK(!request.backward, Exit::usage, "leave --backward out", "sampling has no gradients");
  choose_device(deck.device.kind, true, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), 1);
  const std::unique_ptr<Denoiser> made = make_denoiser(deck);
  Denoiser& model = *made;
  model.params().allocate_for_inference(model.bf16());
  load_weights(request.weights, model.params(), model.weight_names());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  SampleRequest s;
  s.z = inputs.f32("x", inputs.shape("x", 5));
  const Shape context = inputs.shape("context", 3), negative = inputs.shape("negative_context", 3);
  s.y = inputs.f32("context", context);
  s.captions = rows_of(inputs, "context_lens", context);
  s.negative_y = inputs.f32("negative_context", negative);
  s.negative = rows_of(inputs, "negative_context_lens", negative);
  if (inputs.has("y")) s.condition = inputs.f32("y", inputs.shape("y", 5));
  if (inputs.has("first_frame")) {
    const Tensor given = inputs.f32("first_frame", inputs.shape("first_frame", 5));
    const std::int64_t T = s.z.dim(2);
    for (std::int64_t b = 0; b < s.z.dim(0); ++b) {
      Tensor clip = s.z.slice(b, b + 1);
      copy_frames(given.slice(b, b + 1), 0, 1, clip, 0);
    }
    for (std::int64_t f = 0; f < s.z.dim(0) * T; ++f) s.edit.push_back(f % T == 0 ? 0.0f : 1.0f);
  }
  s.fps.assign(static_cast<std::size_t>(s.z.dim(0)), 16.0f);
  ProbeOutputs outputs;
  outputs.add("samples", flow_sample(model, model.sampler(deck), deck.get<DiffusionDeck>(), s));
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
