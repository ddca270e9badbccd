#include "models/t5/placement.h"

#include <fmt/format.h>
#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "models/t5/options.h"
#include "models/t5/t5.h"
#include "tensor/tensor.h"
#include "train/memory_plan.h"

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
    const std::size_t m = memory[r];
    rooms[r] = room(m, each, size.layer);
    if (room(m, with_embedding, size.layer) > 0) first = r;
  }
  std::int64_t most = 0, all = 0;
  if (first < ranks) rooms[first] = room(memory[first], with_embedding, size.layer);
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
    std::int64_t n = std::min(rooms[rank], limit);
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

namespace {

std::vector<std::size_t> memory_limits(const T5Deck& config, MPI_Comm world) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  const std::vector<double>& asked = config.memory_gib;
  const auto n = static_cast<std::size_t>(ranks), r = static_cast<std::size_t>(rank);
  WEFT_CHECK(asked.size() <= 1 || asked.size() == n, Exit::usage,
             "give one value for all ranks, one for each, or none",
             "t5.memory_gib has {} values for {} ranks", asked.size(), ranks);
  const unsigned long long mine =
      asked.empty()
          ? free_memory(world)
          : static_cast<unsigned long long>(bytes_of_gib(asked[asked.size() == 1 ? 0 : r]));
  // All ranks place the layers by the same numbers, so they need no further agreement.
  std::vector<unsigned long long> all(n);
  MPI_Allgather(&mine, 1, MPI_UNSIGNED_LONG_LONG, all.data(), 1, MPI_UNSIGNED_LONG_LONG, world);
  return {all.begin(), all.end()};
}

}  // namespace

std::size_t t5_arena_bytes(const T5Deck& config, std::int64_t tokens, std::int64_t longest) {
  // The first part starts from ids, the others from activations: either may need more.
  std::size_t most = T5Encoder(config, 0, config.num_layers).plan(tokens, longest);
  if (config.num_layers > 1)
    most = std::max(most, T5Encoder(config, 1, config.num_layers).plan(tokens, longest));
  // Later, shorter batches leave holes of other sizes: a 32nd more makes room for them.
  return most + most / 32 + 64 * Arena::alignment;
}

std::vector<TextBatch> batch_captions(const std::vector<std::int64_t>& tokens,
                                      std::int64_t captions) {
  std::vector<std::size_t> order(tokens.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return tokens[a] > tokens[b]; });
  std::vector<TextBatch> batches;
  for (const std::size_t i : order) {
    if (batches.empty() || static_cast<std::int64_t>(batches.back().texts.size()) == captions)
      batches.push_back({{}, 0, tokens[i]});
    batches.back().texts.push_back(i);
    batches.back().tokens += tokens[i];
  }
  return batches;
}

T5Job plan_t5(const T5Deck& config, const std::vector<std::int64_t>& tokens, MPI_Comm world) {
  T5Job job;
  job.limits = memory_limits(config, world);
  const std::size_t row =
      static_cast<std::size_t>(config.d_model) * (config.dtype == "bf16" ? 2 : 4);
  // Halves the micro-batch until the encoder fits. The first batch takes the most memory.
  std::int64_t captions = config.micro_batch;
  for (;; captions = (captions + 1) / 2) {
    job.batches = batch_captions(tokens, captions);
    job.captions = captions;
    job.arena = t5_arena_bytes(config, job.batches.front().tokens, job.batches.front().longest);
    // Three streams of two buffers each: in, out, and on rank 0 the results.
    job.messages =
        on_cuda() ? 0 : 3 * 2 * static_cast<std::size_t>(job.batches.front().tokens) * row;
    job.placement = place_t5(config, job.limits, job.arena + job.messages);
    if (!job.placement.parts.empty() || captions == 1) break;
  }
  const T5Placement& p = job.placement;
  WEFT_CHECK(
      !p.parts.empty(), Exit::usage,
      "use more ranks, raise t5.memory_gib, set t5.dtype = \"bf16\" or shorten t5.max_length",
      "the text encoder does not fit into the {:.3g} GiB that {} ranks have for it: {:.3g} GiB are "
      "missing (each rank needs {:.3g} GiB in addition to weights)",
      gib(std::accumulate(job.limits.begin(), job.limits.end(), std::size_t{0})), job.limits.size(),
      gib(p.missing), gib(job.arena + job.messages));
  if (captions < config.micro_batch && log::rank() == 0)
    log::warn("text encoder: room for micro-batches of {}, not of t5.micro_batch = {}",
              counted(captions, "caption"), config.micro_batch);
  const auto most = std::max_element(
      p.parts.begin(), p.parts.end(),
      [](const auto& a, const auto& b) { return a.last - a.first < b.last - b.first; });
  if (most->last - most->first > p.even && log::rank() == 0)
    log::warn("text encoder: some ranks lack memory, rank {} has {} instead of {}", most->rank,
              counted(most->last - most->first, "layer"), p.even);
  log::info("text      {} in {}; layers {}", counted(std::ssize(tokens), "caption"),
            counted(std::ssize(job.batches), "micro-batch", "micro-batches"), describe(p));
  return job;
}

}  // namespace weft
