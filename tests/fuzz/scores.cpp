// A table of scores that is joined with the items of an ingest, CSV and JSON lines.
#include <cmath>

#include "data/lists/lists.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  for (const char* name : {"scores.csv", "scores.jsonl"}) {
    const auto path = fuzz::put(name, fuzz::text_of(data, size));
    fuzz::accepts([&] {
      std::vector<MediaItem> items(2);
      items[0].media.path = "a.mp4";
      items[1].media.path = (fuzz::scratch() / "b.mp4").string();
      fuzz::require(join_scores(path.string(), {}, items) <= items.size(), "too many joined");
      for (const MediaItem& item : items)
        for (const double value : item.facts.values)
          fuzz::require(std::isnan(value) || std::isfinite(value), "a score is no number");
    });
  }
  return 0;
}
