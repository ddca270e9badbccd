#include "report/command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "report/report.h"

namespace weft {

int report(const std::vector<std::string>& inputs) {
  std::vector<report_page::Run> runs;
  std::vector<report_page::Scaling> scaling;
  for (const std::string& dir : inputs) {
    if (dir.ends_with(".json")) {
      scaling.push_back(report_page::load_scaling(dir));
      continue;
    }
    runs.push_back(report_page::load_run(dir));
    if (runs.back().broken_lines > 0)
      log::warn("{}/metrics.jsonl: {} lines cannot be read and are left out", dir,
                runs.back().broken_lines);
  }
  WEFT_CHECK(!runs.empty(), Exit::usage, "for example: weft report runs/demo",
             "weft report wants the directory of a run");
  const std::string page = report_page::make_page(runs, scaling);

  // Under another name first: whoever has the old page open never sees half of the new one.
  const std::filesystem::path path = runs.front().dir / "report.html";
  const std::filesystem::path draft = path.string() + ".tmp";
  ::unlink(draft.c_str());
  try {
    File file = File::create(draft, Exit::data);
    file.write(std::as_bytes(std::span(page)), 0);
    file.close();
    rename_file(draft, path, Exit::data);
  } catch (...) {
    ::unlink(draft.c_str());
    throw;
  }
  fmt::print("{}\n", path.string());
  return 0;
}

Command report_command() {
  const auto runs = std::make_shared<std::vector<std::string>>();
  Command c{"report", "write RUN/report.html: loss, time of every rank, memory, scaling, samples",
            [runs](const Deck&, MPI_Comm) { return report(*runs); }};
  c.first_rank_only = true;
  c.option("runs", *runs, "run directories, and .json files of weft bench scaling").required = true;
  return c;
}

}  // namespace weft
