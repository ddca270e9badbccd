#include "doctor/doctor.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <set>

#include "config/deck.h"
#include "core/error.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "ops/ways.h"
#include "parallel/rank_device.h"
#include "tensor/device.h"

namespace weft {

namespace {

const char* word(Finding::Level level) {
  return level == Finding::Level::ok ? "OK" : level == Finding::Level::warn ? "WARN" : "FAIL";
}

// "0-3,8": ranks_text without its first word.
std::string set_text(const std::vector<int>& numbers) {
  if (numbers.empty()) return "?";
  const std::string text = ranks_text(numbers);
  return text.substr(text.find(' ') + 1);
}

// A table whose columns are as wide as what is in them.
void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) line += fmt::format("{:<{}}  ", row[c], widths[c]);
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  }
  fmt::print("\n");
}

void print_placement(const std::vector<RankFacts>& ranks) {
  std::vector<std::vector<std::string>> rows = {
      {"rank", "host", "local", "cores", "threads", "NUMA", "free GiB", "device"}};
  const bool gpus =
      std::any_of(ranks.begin(), ranks.end(), [](const auto& r) { return !r.gpu.empty(); });
  if (gpus) rows[0].insert(rows[0].end(), {"GPU", "PCI bus", "its NUMA"});
  for (const RankFacts& r : ranks) {
    rows.push_back({std::to_string(r.rank), r.host, std::to_string(r.host_rank), set_text(r.cores),
                    std::to_string(r.threads), r.numa.empty() ? "0" : set_text(r.numa),
                    fmt::format("{:.1f}", r.available_gib), r.device});
    if (!gpus) continue;
    const auto at = std::find_if(r.host_gpus.begin(), r.host_gpus.end(),
                                 [&](const GpuFacts& g) { return g.uuid == r.gpu; });
    const bool known = at != r.host_gpus.end();
    rows.back().insert(rows.back().end(),
                       {r.gpu, known ? at->bus : "?",
                        known && at->numa_node >= 0 ? std::to_string(at->numa_node) : "-"});
  }
  print_table(rows);
}

void print_measured(const std::vector<RankFacts>& ranks) {
  std::set<std::string> names;
  for (const RankFacts& r : ranks)
    for (const auto& [name, value] : r.measured)
      if (name.rfind("all-reduce", 0) != 0) names.insert(name);
  std::vector<std::vector<std::string>> rows(1);
  rows[0].push_back("rank");
  rows[0].insert(rows[0].end(), names.begin(), names.end());
  for (const RankFacts& r : ranks) {
    rows.push_back({std::to_string(r.rank)});
    for (const std::string& name : names) {
      const auto at = r.measured.find(name);
      rows.back().push_back(at == r.measured.end() ? "-" : fmt::format("{:.3g}", at->second));
    }
  }
  print_table(rows);
  const RankFacts& first = ranks.front();
  const auto small = first.measured.find("all-reduce 8 B us");
  const auto large = first.measured.find("all-reduce 64 MiB GB/s");
  if (small != first.measured.end() && large != first.measured.end()) {
    const auto n = static_cast<double>(ranks.size());
    fmt::print("all-reduce  {} ranks, {}: 8 B in {:.1f} us, 64 MiB at {:.2f} GB/s (bus {:.2f})\n",
               ranks.size(), first.communicator, small->second, large->second,
               large->second * 2 * (n - 1) / n);
  } else {
    fmt::print("all-reduce  {}\n", ranks.size() == 1 ? "one rank alone" : "not measured");
  }
  if (!first.file.empty()) fmt::print("files       {}, {}\n", first.file, first.file_system);
}

// Variables and versions once, with the ranks where they are not the same everywhere.
void print_grouped(const char* title, const std::vector<RankFacts>& ranks,
                   std::map<std::string, std::string> RankFacts::*member) {
  std::set<std::string> names;
  for (const RankFacts& r : ranks)
    for (const auto& [name, value] : r.*member) {
      // The launcher sets these for each process: they differ rightly, and tell nothing here.
      if (name.rfind("OMPI_MCA_orte", 0) != 0 && name.rfind("OMPI_MCA_ess", 0) != 0 &&
          name.rfind("OMPI_MCA_pmix", 0) != 0 && name.rfind("OMPI_MCA_initial", 0) != 0 &&
          name.rfind("OMPI_MCA_shmem_RUNTIME", 0) != 0 && name.rfind("OMPI_COMM", 0) != 0 &&
          name.rfind("PMI", 0) != 0)
        names.insert(name);
    }
  for (const std::string& name : names) {
    const Groups groups = group_by(ranks, [&](const RankFacts& r) {
      const auto at = (r.*member).find(name);
      return at == (r.*member).end() ? std::string("-") : at->second;
    });
    std::string text;
    for (std::size_t i = 0; i < std::min<std::size_t>(4, groups.size()); ++i)
      text += groups.size() == 1 ? groups[i].first
                                 : fmt::format("{}{} ({})", i == 0 ? "" : ", ", groups[i].first,
                                               ranks_text(groups[i].second));
    if (groups.size() > 4) text += fmt::format(", and {} other values", groups.size() - 4);
    fmt::print("{:<12}{} {}\n", title, name, text);
    title = "";
  }
}

// The ways that no GPU has run, and which of them the deck tries.
void print_ways(const std::vector<std::string>& tried) {
  const char* title = "untested";
  for (const kernels::UntestedWay& way : kernels::untested_ways) {
    const bool on = std::ranges::find(tried, way.name) != tried.end();
    fmt::print("{:<12}{:<14} {} ({})\n", title, way.name, way.what,
               on ? "tried: device.try" : "off: device.try");
    title = "";
  }
}

// The report for people, to stdout: tables of every rank, then one line a finding.
void print_report(const std::vector<RankFacts>& ranks, const std::vector<Finding>& findings,
                  const std::vector<std::string>& tried) {
  std::set<std::string> hosts;
  for (const RankFacts& r : ranks) hosts.insert(r.host);
  fmt::print("weft doctor: {} on {}\n\n", counted(std::ssize(ranks), "rank"),
             counted(std::ssize(hosts), "host"));
  print_placement(ranks);
  print_measured(ranks);
  const Groups cpus =
      group_by(ranks, [](const RankFacts& r) { return r.cpu + ", " + r.instructions; });
  for (const auto& [cpu, who] : cpus)
    fmt::print("{:<12}{}{}\n", "processor", cpu,
               cpus.size() == 1 ? "" : fmt::format(" ({})", ranks_text(who)));
  print_grouped("versions", ranks, &RankFacts::versions);
  print_grouped("environment", ranks, &RankFacts::environment);
  if (on_cuda()) print_ways(tried);
  fmt::print("\n");
  int warnings = 0, failures = 0;
  for (const Finding& f : findings) {
    fmt::print("{:<5} {}{}\n", word(f.level), f.what, f.todo.empty() ? "" : ". DO: " + f.todo);
    warnings += f.level == Finding::Level::warn ? 1 : 0;
    failures += f.level == Finding::Level::fail ? 1 : 0;
  }
  const Exit code = verdict(findings);
  fmt::print("\nverdict: {} ({} failed, {}), exit status {}\n",
             code == Exit::done       ? "fit"
             : code == Exit::hardware ? "not fit: hardware or wrong results"
                                      : "not fit until this is mended",
             failures, counted(warnings, "warning"), static_cast<int>(code));
}

// The same for machines.
nlohmann::json report_json(const std::vector<RankFacts>& ranks,
                           const std::vector<Finding>& findings) {
  nlohmann::json j;
  j["version"] = version_line();
  j["exit"] = static_cast<int>(verdict(findings));
  j["ranks"] = ranks;
  j["findings"] = nlohmann::json::array();
  for (const Finding& f : findings)
    j["findings"].push_back({{"level", word(f.level)},
                             {"what", f.what},
                             {"do", f.todo},
                             {"exit", static_cast<int>(f.code)}});
  return j;
}

// Runs one part of the examination. What it throws is a fact about this rank, and the others go on:
// a doctor that ends at the first fault finds only that one.
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
  facts.threads = set_threads(static_cast<int>(deck.run.threads), facts.core_sharers);
  bool device = examine(facts, "device", [&] {
    const RankDevice chosen = choose_device(deck.device.kind, deck.device.share, world);
    facts.shares_gpu = chosen.shared;
  });
  const VisibleGpus visible = visible_gpus();
  facts.no_gpu = visible.why;
  if (on_cuda()) {
    const auto index = static_cast<std::size_t>(this_device().index);
    facts.gpu = index < visible.uuids.size() ? visible.uuids[index] : "?";
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
  device = together("operations", [&] { check_operations(facts); }) && device;
  device = together("device copies", [&] { measure_device_copies(facts); }) && device;
  together("files", [&] { measure_files(deck.data.all_paths().front(), facts); });
  // Skipped if any rank's device failed: that rank would leave the others waiting.
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
    print_report(ranks, findings, deck.device.tried);
    code = static_cast<int>(verdict(findings));
    if (!request.json.empty()) {
      std::ofstream out(request.json, std::ios::trunc);
      out << dump_json(report_json(ranks, findings), 1) << "\n";
      out.close();
      written = out ? 1 : 0;
    }
  }
  // Every rank ends with the same status, whichever of them the launcher reports.
  int agreed[2] = {code, written};
  MPI_Bcast(agreed, 2, MPI_INT, 0, world);
  WEFT_CHECK(agreed[1] == 1, Exit::data, "name a file that can be written", "cannot write {}",
             request.json);
  return agreed[0];
}

Command doctor_command() {
  const auto r = std::make_shared<DoctorRequest>();
  Command c{"doctor", "check machine, ranks and devices; report problems and what to do",
            [r](const Deck&, MPI_Comm world) { return doctor(*r, world); }};
  // The command reads the deck itself, as it is optional here.
  c.path("deck", r->deck, "input deck (TOML); its data path is read");
  c.option("overrides", r->overrides, "section.key=value");
  c.path("--json", r->json, "JSON file for all findings");
  return c;
}

}  // namespace weft
