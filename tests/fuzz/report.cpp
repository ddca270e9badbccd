// What weft report and weft status read of a run: metrics.jsonl, run.json, deck.toml, scaling.json,
// the manifest of its samples and status.json with zero bytes between them. No text of theirs
// becomes markup. And what a restart does to the metrics.
#include "report/report.h"

#include "core/progress.h"
#include "fuzz.h"
#include "report/tensorboard.h"
#include "train/metrics/metrics.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto parts = fuzz::pieces_of(fuzz::text_of(data, size), 6);
  fuzz::put("metrics.jsonl", parts[0]);
  fuzz::put("run.json", parts[1]);
  fuzz::put("deck.toml", parts[2]);
  if (parts[3].empty())
    std::filesystem::remove(fuzz::scratch() / "scaling.json");
  else
    fuzz::put("scaling.json", parts[3]);
  std::filesystem::create_directories(fuzz::scratch() / "generated");
  fuzz::put("generated/generated.jsonl", parts[4]);
  read_status(fuzz::put("status.json", parts[5]));
  fuzz::accepts([&] {
    const report_page::Run run = report_page::load_run(fuzz::scratch());
    const std::string page = report_page::make_page({&run, 1});
    fuzz::require(page.find("<b0>") == page.npos, "text of a run became markup");
    report_page::event_file(run);
  });
  fuzz::accepts([&] { MetricsWriter(fuzz::scratch(), 5); });
  return 0;
}
