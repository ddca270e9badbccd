// The lines of finished items, gathered and part, with a zero byte between them: gathering once
// more changes nothing.
#include "fuzz.h"
#include "jobs/engine/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto parts = fuzz::pieces_of(fuzz::text_of(data, size), 2);
  fuzz::put("generated.jsonl", parts[0]);
  fuzz::put("generated.rank0.jsonl", parts[1]);
  fuzz::accepts([&] {
    const auto once = Manifest::gather(fuzz::scratch(), "generated");
    const auto twice = Manifest::gather(fuzz::scratch(), "generated");
    fuzz::require(once.size() == twice.size(), "items were lost");
    for (const auto& [name, line] : once) {
      const ManifestLine& again = twice.at(name);
      fuzz::require(line.key == again.key && line.text == again.text, "a line has changed");
      fuzz::require(line.parsed().at("name") == name, "a line of another item");
      is_finished(once, name, line.key, fuzz::scratch());
    }
  });
  return 0;
}
