// data.stage for a training: copies on every node (data/stage.h).
#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/agree.h"
#include "checkpoint/manifest.h"
#include "core/clock.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "core/mpi.h"
#include "data/stage.h"
#include "data/store_file.h"
#include "jobs/jobs.h"
#include "parallel/mpi_collectives.h"
#include "train/stop.h"
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

// Whether RUN/latest has all steps, as rank 0 sees it: then no clip will be read.
bool has_all_steps(const Deck& deck, MPI_Comm world) {
  int all = 0;
  if (log::rank() == 0 && deck.run.resume) {
    const std::string latest = checkpoint::read_latest(deck.run.dir).value_or("");
    all = checkpoint::step_of(latest).value_or(-1) >= deck.train.steps ? 1 : 0;
  }
  MPI_Bcast(&all, 1, MPI_INT, 0, world);
  return all != 0;
}

// Collective: `copy`, if there is one, in a thread of its own. A signal to any rank makes `stop`
// true on all of them.
checkpoint::Outcome run_until_signal(const std::function<void()>& copy, std::atomic<bool>& stop,
                                     MPI_Comm world) {
  checkpoint::Outcome mine;
  std::atomic<bool> copies = copy != nullptr;
  std::thread worker;
  if (copies)
    worker = std::thread([&] {
      mine = checkpoint::attempt(copy);
      copies = false;
    });
  for (std::array<int, 2> any = {1, 0}; any[0] != 0;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::array<int, 2> here = {copies ? 1 : 0, stop_signal() != 0 ? 1 : 0};
    MPI_Allreduce(here.data(), any.data(), 2, MPI_INT, MPI_MAX, world);
    if (any[1] != 0) stop = true;
  }
  if (worker.joinable()) worker.join();
  return checkpoint::agree(world, mine);
}

// Collective over the node: what its first rank has staged, on all of its ranks.
void share_copies(MPI_Comm node, const std::vector<std::string>& stores, const Staged& staged) {
  std::map<std::string, std::string> copies = staged.copies;  // empty elsewhere
  for (const std::string& store : stores) broadcast_sized(copies[store], node);
  read_copies_of_stores(std::move(copies));
}

// Collective: throws on all ranks where the copies of nodes differ.
void check_nodes_agree(MPI_Comm world, const std::vector<std::string>& stores,
                       const Staged& staged) {
  for (const std::string& store : stores) {
    const auto found = staged.copies.find(store);  // on the first rank of each node
    const std::string mine = found != staged.copies.end() ? host_name() + '\n' + found->second : "";
    std::vector<std::pair<std::string, std::string>> copies;
    for (const std::string& text : texts_of_ranks(mine, world)) {
      const std::size_t end = text.find('\n');
      if (end != std::string::npos) copies.emplace_back(text.substr(0, end), text.substr(end + 1));
    }
    check_same_copies(store, copies);
  }
}

// For job scripts: this start ended before training began, so that it could not make any progress.
void leave_note(const std::filesystem::path& run_dir) {
  try {
    std::filesystem::create_directories(run_dir);
    replace_file(run_dir / "stopped_while_staging", "", Exit::checkpoint, Durable::no);
  } catch (const std::exception& e) {
    log::warn("a job script will not queue this job again: {}", e.what());
  }
}

}  // namespace

bool stage_data(const Deck& deck, MPI_Comm world) {
  const std::string& stage = deck.get<StageDeck>().stage;
  if (stage.empty()) return true;
  const std::vector<std::string> stores = stores_of(deck);
  if (stores.empty()) {
    log::info("stage     nothing to copy: data.path = {} is no store", deck.data.path);
    return true;
  }
  if (has_all_steps(deck, world)) {
    log::info("stage     nothing to copy: {} has all {} steps", deck.run.dir, deck.train.steps);
    return true;
  }
  const double start = now_seconds();
  MPI_Comm node = split_by_host(world);
  int node_rank = 0;
  MPI_Comm_rank(node, &node_rank);
  Staged staged;
  std::atomic<bool> stop = false;
  std::function<void()> copy;
  if (node_rank == 0)
    copy = [&] { staged = stage_stores(stores, stage, [&] { return stop.load(); }); };
  const checkpoint::Outcome outcome = run_until_signal(copy, stop, world);
  const double seconds = now_seconds() - start;
  if (outcome.ok()) share_copies(node, stores, staged);
  MPI_Comm_free(&node);
  if (outcome.code == Exit::stopped) {
    if (log::rank() == 0) leave_note(deck.run.dir);
    log::info("stage     {}: run the same command to resume", outcome.error);
    return false;
  }
  outcome.raise();
  check_nodes_agree(world, stores, staged);

  // Nodes, and of these the ones on which something was copied.
  std::array<int, 2> mine = {node_rank == 0 ? 1 : 0, staged.bytes_copied > 0 ? 1 : 0}, all{};
  MPI_Allreduce(mine.data(), all.data(), 2, MPI_INT, MPI_SUM, world);
  const auto [nodes, copied] = all;
  const double gigabytes = 1e-9 * static_cast<double>(staged.bytes);
  log::info(
      "stage     {}, {:.3f} GB, in {} of {}: copied on {}, there already on {}; {:.1f} s, "
      "{:.2f} GB/s a node",
      counted(std::ssize(stores), "store"), gigabytes, staged.folder, counted(nodes, "node"),
      copied, nodes - copied, seconds, gigabytes / std::max(seconds, 1e-3));
  return true;
}

}  // namespace weft
