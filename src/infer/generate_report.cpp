#include "infer/generate_report.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <type_traits>

#include "core/log.h"

namespace weft {
namespace {

constexpr double mib = 1ull << 20;

static_assert(std::is_trivially_copyable_v<GenerateShare>);

// Every rank's lines, on rank 0.
std::vector<std::string> gather_lines(const std::vector<std::string>& mine, MPI_Comm world) {
  std::string text;
  for (std::string line : mine) {
    std::replace(line.begin(), line.end(), '\n', ' ');
    text += line + "\n";
  }
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  const int bytes = static_cast<int>(text.size());
  std::vector<int> sizes(static_cast<std::size_t>(ranks)), offsets(sizes.size() + 1);
  MPI_Gather(&bytes, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, world);
  for (std::size_t r = 0; r < sizes.size(); ++r) offsets[r + 1] = offsets[r] + sizes[r];
  std::string all(static_cast<std::size_t>(rank == 0 ? offsets.back() : 0), ' ');
  MPI_Gatherv(text.data(), bytes, MPI_CHAR, all.data(), sizes.data(), offsets.data(), MPI_CHAR, 0,
              world);
  if (rank != 0) return mine;
  std::vector<std::string> lines;
  std::istringstream in(all);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

GenerateReport gather_report(const GenerateShare& mine, const std::vector<std::string>& failures,
                             MPI_Comm world) {
  GenerateReport report;
  int ranks = 1;
  MPI_Comm_size(world, &ranks);
  report.ranks.resize(static_cast<std::size_t>(ranks));
  MPI_Allgather(&mine, sizeof mine, MPI_BYTE, report.ranks.data(), sizeof mine, MPI_BYTE, world);
  report.failures = gather_lines(failures, world);
  return report;
}

std::vector<double> GenerateReport::busy_shares() const {
  double last = 0;
  for (const GenerateShare& r : ranks) last = std::max(last, r.last_end);
  std::vector<double> shares;
  for (const GenerateShare& r : ranks) shares.push_back(last > 0 ? r.busy / last : 0);
  return shares;
}

std::int64_t GenerateReport::made() const {
  std::int64_t clips = 0;
  for (const GenerateShare& r : ranks) clips += r.clips;
  return clips;
}

void GenerateReport::print() const {
  if (made() > 0 || !failures.empty()) {
    log::info(
        "rank  clips  busy%  encode s  sample s  decode s  write s  arena MiB peak/planned/there  "
        "frames at once");
    const std::vector<double> shares = busy_shares();
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const GenerateShare& s = ranks[r];
      log::info(
          "{:4}  {:5}  {:5.1f}  {:8.1f}  {:8.1f}  {:8.1f}  {:7.1f}  {:8.1f}/{:.1f}/{:.0f}  {}", r,
          s.clips, 100 * shares[r], s.encode, s.sample, s.decode, s.write, s.arena_peak / mib,
          s.arena_planned / mib, s.arena_capacity / mib, static_cast<std::int64_t>(s.micro_batch));
    }
  }
  log::info("stages    text {:.1f} s, weights {:.1f} s, clips {:.1f} s", stages.text, stages.load,
            stages.clips);
  log::info("clips     {} made, {} finished before, {} failed, of {}", made(), finished_before,
            failures.size(), wanted);
  for (const std::string& failure : failures) log::info("failed    {}", failure);
  for (const std::string& warning : log::warnings()) log::info("warned    {}", warning);
}

void GenerateReport::write(const std::filesystem::path& directory) const {
  nlohmann::ordered_json j = {
      {"wanted", wanted},
      {"made", made()},
      {"finished_before", finished_before},
      {"failures", failures},
      {"ranks_a_clip", ranks_a_clip},
      {"share_out", share_out},
      {"seconds", {{"text", stages.text}, {"load", stages.load}, {"clips", stages.clips}}}};
  if (!text_taken.empty())
    j["text"] = {{"bytes_planned", text_planned}, {"bytes_taken", text_taken}};
  const std::vector<double> shares = busy_shares();
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const GenerateShare& s = ranks[r];
    j["ranks"].push_back({{"clips", s.clips},
                          {"failed", s.failed},
                          {"busy_share", shares[r]},
                          {"busy", s.busy},
                          {"last_end", s.last_end},
                          {"encode", s.encode},
                          {"sample", s.sample},
                          {"decode", s.decode},
                          {"write", s.write},
                          {"write_wait", s.write_wait},
                          {"weights_bytes", s.weights},
                          {"arena_planned_bytes", s.arena_planned},
                          {"arena_peak_bytes", s.arena_peak},
                          {"arena_capacity_bytes", s.arena_capacity},
                          {"resident_bytes", s.resident},
                          {"micro_batch", s.micro_batch}});
  }
  std::ofstream out(directory / "generate_report.json");
  out << j.dump(2) << "\n";
  out.close();
  if (!out) log::warn("cannot write {}", (directory / "generate_report.json").string());
}

}  // namespace weft
