// The index of weights in shards: shards lie beside it.
#include "checkpoint/weight_files.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto path = fuzz::put("a.safetensors.index.json", fuzz::text_of(data, size));
  fuzz::accepts([&] {
    for (const auto& [tensor, shard] : detail::read_weight_index(path))
      fuzz::require(
          !shard.empty() && shard != "." && shard != ".." && shard.find('/') == shard.npos,
          "a shard elsewhere");
  });
  return 0;
}
