#include "jobs/stage.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/agree.h"
#include "core/clock.h"
#include "core/log.h"
#include "data/stage.h"
#include "data/store_file.h"
#include "train/validation.h"

namespace weft {
namespace {

// What training reads again and again.
std::vector<std::string> stores_of(const Deck& deck) {
  std::vector<std::string> stores;
  const auto add = [&](const std::string& path) {
    if (is_store_path(path) && std::ranges::find(stores, path) == stores.end())
      stores.push_back(path);
  };
  const std::vector<std::string> paths = deck.data.all_paths();
  for (std::size_t i = 0; i < paths.size(); ++i)
    if (deck.data.weights.empty() || deck.data.weights.at(i) > 0) add(paths[i]);
  const ValidationDeck& validation = deck.get<ValidationDeck>();
  if (validation.every > 0 && !validation.path.empty()) add(validation.path);
  return stores;
}

// The ranks of this rank's node.
MPI_Comm split_by_node(MPI_Comm world) {
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  // For tests, as in parallel/mpi_collectives.cpp: treats so many ranks as those of one host.
  if (const char* text = std::getenv("WEFT_COMM_NODE_RANKS")) {
    MPI_Comm whole = node;
    MPI_Comm_split(whole, rank / std::max(1, std::atoi(text)), rank, &node);
    MPI_Comm_free(&whole);
  }
  return node;
}

// Collective over the node: what its first rank has staged, on all of its ranks.
void share_copies(MPI_Comm node, const Staged& staged) {
  std::string text;
  for (const auto& [path, copy] : staged.copies) text += path + '\0' + copy + '\0';
  checkpoint::share_text(node, text);
  std::map<std::string, std::string> copies;
  for (std::size_t at = 0; at < text.size();) {
    const std::string path = text.c_str() + at;
    at += path.size() + 1;
    const std::string copy = text.c_str() + at;
    at += copy.size() + 1;
    copies[path] = copy;
  }
  read_copies_of_stores(std::move(copies));
}

}  // namespace

void stage_data(const Deck& deck, MPI_Comm world) {
  const std::string& stage = deck.get<StageDeck>().stage;
  if (stage.empty()) return;
  const std::vector<std::string> stores = stores_of(deck);
  if (stores.empty()) {
    log::info("stage     nothing to copy: data.path = {} is no store", deck.data.path);
    return;
  }
  const double start = now_seconds();
  MPI_Comm node = split_by_node(world);
  int place = 0;
  MPI_Comm_rank(node, &place);
  Staged staged;
  // The other ranks sleep in agree() meanwhile.
  const checkpoint::Outcome outcome = checkpoint::agree(world, checkpoint::attempt([&] {
                                                          if (place == 0)
                                                            staged = stage_stores(stores, stage);
                                                        }));
  const double seconds = now_seconds() - start;
  if (outcome.ok()) share_copies(node, staged);
  MPI_Comm_free(&node);
  outcome.raise();

  // Nodes, and of these the ones on which something was copied.
  std::array<int, 2> mine = {place == 0 ? 1 : 0, staged.copied > 0 ? 1 : 0}, all{};
  MPI_Allreduce(mine.data(), all.data(), 2, MPI_INT, MPI_SUM, world);
  const auto [nodes, copied] = all;
  const double gigabytes = 1e-9 * static_cast<double>(staged.bytes);
  log::info(
      "stage     {}, {:.3f} GB, in {} of {}: copied on {}, there already on {}; {:.1f} s, "
      "{:.2f} GB/s a node",
      counted(std::ssize(stores), "store"), gigabytes, staged.folder, counted(nodes, "node"),
      copied, nodes - copied, seconds, gigabytes / std::max(seconds, 1e-3));
}

}  // namespace weft
