// A checkpoint's manifest. Its own hash would refuse nearly every mutation: it is made anew for
// what stands before it.
#include "checkpoint/manifest.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  using namespace weft::checkpoint;
  std::string text(fuzz::text_of(data, size));
  fuzz::accepts([&] { manifest_from_text(text, "manifest"); });
  const auto tail = text.rfind(",\n \"manifest_hash\"");
  text = text.substr(0, tail);
  text += ",\n \"manifest_hash\": \"" + to_hex(hash128(text)) + "\"\n}\n";
  fuzz::accepts([&] {
    const Manifest m = manifest_from_text(text, "manifest");
    const Manifest again = manifest_from_text(to_text(m), "again");
    fuzz::require(again.state_hash == m.state_hash && again.info.step == m.info.step &&
                      again.shards.size() == m.shards.size(),
                  "the manifest has changed");
    for (std::size_t r = 0; r < m.shards.size(); ++r)
      tensors_in(m, static_cast<int>(r), 0, m.shards[r].bytes);
  });
  return 0;
}
