// Which media is to be read, and how far who named it is trusted (docs/security.md).
#pragma once

#include <functional>
#include <string>

#include "config/deck.h"

namespace weft {

// Who named a medium. `deck`: a deck or the command line, which may also ask for FFmpeg's own sources ("lavfi:GRAPH").
// `untrusted`: a prompt, a list, an address on the network, which may name a file and nothing else.
enum class MediaTrust { deck, untrusted };

struct MediaSource {
  std::string path;
  MediaTrust trust = MediaTrust::untrusted;
};

// Whether `path` asks for one of FFmpeg's own sources.
inline bool is_source_graph(const std::string& path) { return path.starts_with("lavfi:"); }

// What reading one medium may take. `stop`, where it is given, is asked now and then: true ends the reading.
struct MediaAccess {
  MediaDeck limits;
  std::function<bool()> stop;
};

}  // namespace weft
