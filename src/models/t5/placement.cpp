#include "models/t5/placement.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/host.h"
#include "models/t5/options.h"
#include "models/t5/t5.h"

namespace weft {
namespace {

// Layers that fit into `bytes`.
std::int64_t room(std::size_t bytes, std::size_t taken, std::size_t layer) {
  return bytes <= taken ? 0 : static_cast<std::int64_t>((bytes - taken) / layer);
}

// The bytes missing when the ranks cannot hold all layers, or none can hold the embedding.
std::size_t lacking(std::span<const std::size_t> memory, std::size_t with_embedding,
                    std::size_t layer, std::int64_t layers_short) {
  std::size_t most = 0;
  for (const std::size_t m : memory) most = std::max(most, m);
  const std::size_t first = with_embedding + layer;
  return std::max(most < first ? first - most : 0,
                  layer * static_cast<std::size_t>(std::max<std::int64_t>(0, layers_short)));
}

}  // namespace

T5Placement place_t5(const T5Deck& config, std::span<const std::size_t> memory, std::size_t work) {
  const T5Encoder::Sizes size = T5Encoder::sizes(config);
  const std::size_t each = size.every_part + work, with_embedding = each + size.embedding;
  const auto ranks = static_cast<int>(memory.size());
  T5Placement placement;
  placement.even = (config.num_layers + ranks - 1) / ranks;

  std::vector<std::int64_t> rooms(memory.size());
  int first = ranks;
  for (int r = ranks - 1; r >= 0; --r) {
    const std::size_t m = memory[static_cast<std::size_t>(r)];
    rooms[static_cast<std::size_t>(r)] = room(m, each, size.layer);
    if (room(m, with_embedding, size.layer) > 0) first = r;
  }
  std::int64_t most = 0, all = 0;
  if (first < ranks)
    rooms[static_cast<std::size_t>(first)] =
        room(memory[static_cast<std::size_t>(first)], with_embedding, size.layer);
  for (const std::int64_t r : rooms) most = std::max(most, r), all += r;
  if (first == ranks || all < config.num_layers) {
    placement.missing = lacking(memory, with_embedding, size.layer, config.num_layers - all);
    return placement;
  }

  // The lowest limit of layers a rank at which all layers find a place; the ranks then get theirs
  // in order.
  const auto held = [&](std::int64_t limit) {
    std::int64_t n = 0;
    for (const std::int64_t r : rooms) n += std::min(r, limit);
    return n;
  };
  std::int64_t limit = 1;
  while (held(limit) < config.num_layers) ++limit;
  std::int64_t spare = held(limit) - config.num_layers, at = 0;
  const auto give = [&](int rank) {
    std::int64_t n = std::min(rooms[static_cast<std::size_t>(rank)], limit);
    // Takes surplus room from ranks at the limit, which would be the slowest. The first part keeps
    // at least one layer.
    if (n == limit && spare > 0 && (limit > 1 || rank != first)) --n, --spare;
    if (n == 0) return;
    const std::size_t bytes =
        size.every_part + (at == 0 ? size.embedding : 0) + static_cast<std::size_t>(n) * size.layer;
    placement.parts.push_back({rank, at, at + n, bytes});
    at += n;
  };
  give(first);
  for (int r = 0; r < ranks; ++r)
    if (r != first) give(r);
  return placement;
}

std::string describe(const T5Placement& placement) {
  std::string text;
  for (const T5Part& p : placement.parts)
    text += fmt::format("{}{} to {} on rank {} ({:.2f} GiB)", text.empty() ? "" : ", ", p.first,
                        p.last - 1, p.rank, gib(p.weights));
  return text;
}

}  // namespace weft
