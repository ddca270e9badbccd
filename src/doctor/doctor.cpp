#include "doctor/doctor.h"

#include <fstream>
#include <functional>

#include "config/deck.h"
#include "core/error.h"
#include "doctor/facts.h"
#include "doctor/judge.h"
#include "doctor/measure.h"
#include "doctor/print.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"

namespace weft {
namespace {

// Runs one part of the examination. What it throws is a fact about this rank, and the others go on: a doctor that ends
// at the first fault finds only that one.
bool examine(RankFacts& facts, const char* stage, const std::function<void()>& part) {
  try {
    part();
    return true;
  } catch (const Error& e) {
    facts.faults.push_back({static_cast<int>(e.code()), stage, e.what(), e.hint()});
  } catch (const std::exception& e) {
    facts.faults.push_back({static_cast<int>(Exit::internal), stage, e.what(),
                            "this is a bug in weft, please report it with the log"});
  }
  return false;
}

bool on_all(bool mine, MPI_Comm world) {
  int all = mine ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, world);
  return all == 1;
}

}  // namespace

int doctor(const DoctorRequest& request, MPI_Comm world) {
  // 1. What the job would be.
  Deck deck;
  if (!request.deck.empty()) deck = load_deck(request.deck, request.overrides);

  // 2. Where every rank is, and the device that it would take.
  RankFacts facts = rank_facts(world);
  facts.threads = set_threads(static_cast<int>(deck.run.threads), facts.host_ranks);
  bool device = examine(facts, "device", [&] {
    const RankDevice chosen = choose_device(deck.device.kind, deck.device.share, world);
    facts.shares_gpu = chosen.shared;
  });
  const std::vector<std::string> visible = visible_gpus(&facts.no_gpu);
  if (on_cuda()) {
    const auto index = static_cast<std::size_t>(this_device().index);
    facts.gpu = index < visible.size() ? visible[index] : "?";
    facts.device = device_runtime().describe();
  } else {
    facts.device = "CPU";
    if (facts.no_gpu.empty()) facts.no_gpu = fmt::format("device.kind = \"{}\"", deck.device.kind);
  }

  // 3. What it can do, all ranks at once, as in a job.
  const auto together = [&](const char* stage, const std::function<void()>& part) {
    MPI_Barrier(world);
    return examine(facts, stage, part);
  };
  together("memory", [&] { measure_memory(facts); });
  device = together("matrix product", [&] { measure_products(facts); }) && device;
  device = together("device copies", [&] { measure_device_copies(facts); }) && device;
  together("files", [&] { measure_files(deck.data.path, facts); });
  // A rank whose device does not work would leave the others waiting.
  int size = 1;
  MPI_Comm_size(world, &size);
  if (on_all(device, world) && size > 1)
    together("all-reduce", [&] {
      const auto comm = make_communicator(world, 60);
      measure_all_reduce(*comm, facts);
    });

  // 4. Who is on which GPU, now that every rank holds its own.
  MPI_Barrier(world);
  std::string why;
  facts.host_gpus = inventory_gpus(why);
  if (!on_cuda() && facts.host_gpus.empty() && !why.empty()) facts.no_gpu = why;
  MPI_Barrier(world);

  // 5. The verdict, of all ranks together.
  const std::vector<RankFacts> ranks = gather_facts(facts, world);
  int code = 0, written = 1;
  if (facts.rank == 0) {
    const std::vector<Finding> findings = judge(ranks);
    print_report(ranks, findings);
    code = static_cast<int>(verdict(findings));
    if (!request.json.empty()) {
      std::ofstream out(request.json, std::ios::trunc);
      out << report_json(ranks, findings).dump(1) << "\n";
      out.close();
      written = out ? 1 : 0;
    }
  }
  int agreed[2] = {code, written};
  MPI_Bcast(agreed, 2, MPI_INT, 0, world);
  WEFT_CHECK(agreed[1] == 1, Exit::data, "name a file that can be written", "cannot write {}",
             request.json);
  return agreed[0];
}

Command doctor_command() {
  const auto r = std::make_shared<DoctorRequest>();
  Command c{"doctor", "examine machine, ranks and devices; say what is wrong and what to do",
            [r](const Deck&, MPI_Comm world) { return doctor(*r, world); }};
  // Read by the command itself: a deck that cannot be read is one more finding.
  c.option("deck", r->deck, "input deck (TOML); its data path is read");
  c.option("overrides", r->overrides, "section.key=value");
  c.option("--json", r->json, "file for everything that was found");
  return c;
}

}  // namespace weft
