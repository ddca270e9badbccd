#include "observe/metrics.h"

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace weft {
namespace {

void drop_lines_from(const std::filesystem::path& path, std::int64_t first_step) {
  std::ifstream in(path);
  if (!in) return;
  const std::filesystem::path kept = path.string() + ".tmp";
  std::ofstream out(kept, std::ios::trunc);
  for (std::string line; std::getline(in, line);) {
    const auto j = nlohmann::json::parse(line, nullptr, false);
    if (j.is_object() && j.contains("step") && j["step"].is_number_integer() &&
        j["step"].get<std::int64_t>() < first_step)
      out << line << '\n';
  }
  out.close();
  if (out) std::filesystem::rename(kept, path);
}

}  // namespace

MetricsWriter::MetricsWriter(const std::filesystem::path& run_dir, std::int64_t first_step) {
  const std::filesystem::path path = run_dir / "metrics.jsonl";
  drop_lines_from(path, first_step);
  out_.open(path, std::ios::app);
  WEFT_CHECK(out_.is_open(), Exit::usage, "check that run.dir can be written", "cannot open {}",
             path.string());
}

void MetricsWriter::write(const StepMetrics& m) {
  const nlohmann::ordered_json j{
      {"step", m.step},
      {"loss", m.loss},
      {"grad_norm", m.grad_norm},
      {"lr", m.lr},
      {"seconds", m.seconds},
      {"split",
       {{"data_wait", m.split.data_wait},
        {"compute", m.split.compute},
        {"comm_exposed", m.split.comm_exposed},
        {"optimizer", m.split.optimizer},
        {"checkpoint", m.split.checkpoint}}},
      {"memory", {{"resident_bytes", m.resident_bytes}, {"arena_peak_bytes", m.arena_peak_bytes}}},
      {"samples", m.samples},
  };
  out_ << j.dump() << '\n' << std::flush;
}

}  // namespace weft
