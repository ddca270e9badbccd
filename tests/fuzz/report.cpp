// What weft report reads of a run: metrics.jsonl, run.json, deck.toml and scaling.json with zero
// bytes between them. No text of theirs becomes markup. And what a restart does to the metrics.
#include "report/report.h"

#include "fuzz.h"
#include "train/metrics/metrics.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto parts = fuzz::pieces_of(fuzz::text_of(data, size), 4);
  fuzz::put("metrics.jsonl", parts[0]);
  fuzz::put("run.json", parts[1]);
  fuzz::put("deck.toml", parts[2]);
  if (parts[3].empty())
    std::filesystem::remove(fuzz::scratch() / "scaling.json");
  else
    fuzz::put("scaling.json", parts[3]);
  fuzz::accepts([&] {
    const report_page::Run run = report_page::load_run(fuzz::scratch());
    const std::string page = report_page::make_page({&run, 1});
    fuzz::require(page.find("<b0>") == page.npos, "text of a run became markup");
  });
  fuzz::accepts([&] { MetricsWriter(fuzz::scratch(), 5); });
  return 0;
}
