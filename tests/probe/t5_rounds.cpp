// The layers of the T5 encoder on random weights, timed; validation/compare_t5.py compares them
// with PyTorch's.
#include <algorithm>
#include <cstdio>
#include <iostream>

#include "core/clock.h"
#include "models/registry.h"
#include "models/t5/t5.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"

namespace weft {

int probe_t5_rounds(const Deck& deck, const ProbeRequest& request) {
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), device.core_sharers);
  const T5Deck config = t5_deck(deck);
  T5Encoder t5(config, 0, config.num_layers);
  t5.params().allocate(1, config.dtype == "bf16", false);
  t5.params().initialise(static_cast<std::uint64_t>(deck.run.seed));
  t5.pack_weights();

  const ProbeInputs inputs(request.inputs);
  const std::vector<std::int64_t> lengths = inputs.i64("lengths");
  std::vector<std::int32_t> ids, offsets{0};
  for (const std::int64_t n : lengths) {
    for (std::int64_t i = 0; i < n; ++i)
      ids.push_back(static_cast<std::int32_t>((ids.size() * 7919 + 3) % config.vocab_size));
    offsets.push_back(static_cast<std::int32_t>(ids.size()));
  }
  const auto tokens = static_cast<std::int64_t>(ids.size());
  const std::int64_t longest = std::ranges::max(lengths);
  const auto arena = Arena::reserve(2 * t5.plan(tokens, longest) + (1 << 20));
  const ArenaScope scope(*arena);
  PackedTokens in;
  in.longest = longest;
  in.ids = Tensor::from_host(std::span<const std::int32_t>(ids), {tokens});
  in.offsets = Tensor::from_host(std::span<const std::int32_t>(offsets),
                                 {static_cast<std::int64_t>(offsets.size())});
  std::vector<float> seconds;
  // The first is not counted; before each other one a line on stdin, if there is any to come.
  for (std::int64_t round = 0; round <= inputs.i64("rounds").at(0); ++round) {
    if (round > 0) {
      fmt::print("ready\n");
      std::fflush(stdout);
      std::string line;
      std::getline(std::cin, line);
    }
    const double start = now_seconds();
    t5.forward(in, Tensor()).to_host();
    if (round == 0) continue;
    seconds.push_back(static_cast<float>(now_seconds() - start));
    fmt::print("{:.6f}\n", seconds.back());
    std::fflush(stdout);
  }
  ProbeOutputs outputs;
  outputs.add("seconds", seconds, {static_cast<std::int64_t>(seconds.size())});
  outputs.write(request.outputs);
  return 0;
}

}  // namespace weft
