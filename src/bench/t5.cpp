// `weft bench t5`: the layers of the T5 encoder, timed.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>

#include "bench/bench.h"
#include "core/clock.h"
#include "core/error.h"
#include "models/registry.h"
#include "models/t5/options.h"
#include "models/t5/t5.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"

namespace weft {

int bench_t5(const Deck& deck, const BenchT5Request& request) {
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), device.core_sharers);
  const T5Deck config = t5_deck(deck);
  T5Encoder t5(config, 0, config.num_layers);
  t5.params().allocate(1, config.dtype == "bf16", false);
  t5.params().initialise(static_cast<std::uint64_t>(deck.run.seed));
  t5.pack_weights();

  std::vector<std::int32_t> offsets{0};
  for (const std::int64_t n : request.lengths)
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(n));
  const std::int64_t tokens = offsets.back();
  const std::int64_t longest = *std::max_element(request.lengths.begin(), request.lengths.end());
  const auto arena = Arena::reserve(2 * t5.plan(tokens, longest) + (1 << 20));
  const ArenaScope scope(*arena);
  PackedTokens in;
  in.longest = longest;
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < tokens; ++i)
    ids.push_back(static_cast<std::int32_t>((i * 7919 + 3) % config.vocab_size));
  in.ids = Tensor::from_host(std::span<const std::int32_t>(ids), {tokens});
  in.offsets = Tensor::from_host(std::span<const std::int32_t>(offsets),
                                 {static_cast<std::int64_t>(offsets.size())});
  for (std::int64_t round = -request.warmup; round < request.rounds; ++round) {
    if (request.paced && round >= 0) {
      fmt::print("ready\n");
      std::fflush(stdout);
      std::string line;
      std::getline(std::cin, line);
    }
    const double start = now_seconds();
    t5.forward(in, Tensor()).to_host();
    if (round >= 0) fmt::print("{:.6f}\n", now_seconds() - start);
    std::fflush(stdout);
  }
  return 0;
}

Command bench_t5_command() {
  const auto r = std::make_shared<BenchT5Request>();
  Command c{"t5", "the layers of the T5 encoder",
            [r](const Deck& deck, MPI_Comm) { return bench_t5(deck, *r); }};
  c.first_rank_only = true;
  c.takes_deck();
  c.number("--lengths", r->lengths, 1, 1e6, "tokens of each caption").commas = true;
  c.number("--rounds", r->rounds, 1, 1e6, "timed passes");
  c.number("--warmup", r->warmup, 0, 1e6, "passes before them");
  c.option("--paced", r->paced, "before each, wait for a line on stdin");
  return c;
}

}  // namespace weft
