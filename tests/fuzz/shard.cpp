// A WebDataset shard: an item is a stretch of the file, and its name is only a label.
#include "data/lists/lists.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  const auto path = fuzz::put("shard.tar", fuzz::text_of(data, size));
  fuzz::accepts([&] {
    std::vector<MediaItem> items;
    list_shard(path.string(), Described::yes, items);
    for (const MediaItem& item : items) {
      fuzz::require(item.media.path == path && !item.media.member.empty() &&
                        item.media.trust == MediaTrust::untrusted,
                    "an item is not in its shard");
      fuzz::require(item.media.begin <= size && item.media.bytes <= size - item.media.begin,
                    "an item is longer than its shard");
    }
  });
  return 0;
}
