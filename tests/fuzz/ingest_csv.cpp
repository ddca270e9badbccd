// A list of footage (.csv): what it names is a file and not trusted.
#include "data/lists/lists.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto path = fuzz::put("list.csv", fuzz::text_of(data, size));
  fuzz::accepts([&] {
    for (const MediaItem& input : list_media({path.string()}, "ingest.inputs", {}, Described::yes))
      fuzz::require(input.media.trust == MediaTrust::untrusted, "a list is trusted");
  });
  return 0;
}
