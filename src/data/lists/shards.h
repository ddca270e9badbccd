// WebDataset shards: uncompressed tar files in which members of one name without endings, one after
// the other, are a sample: a.mp4, a.txt, a.json.
#pragma once

#include <string>
#include <vector>

#include "data/lists/lists.h"

namespace weft {

// Adds the samples of a shard that have a video, or else a picture. Its caption is the text of .txt
// (.text, .caption), or `text` or `caption` of .json, which may have facts too. A member stays in
// the shard and is read from there; its name is a label and never opened. Links, devices and
// members of other kinds are left out; a WARN line counts links. Not trusted: captions and JSON of
// more than a MiB, two videos in a sample, and a shard that is cut off, compressed or no tar are
// Exit::data, naming shard and member.
void list_shard(const std::string& path, Described described, std::vector<MediaItem>& out);

}  // namespace weft
