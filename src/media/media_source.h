// Which media is to be read, and how far who named it is trusted (docs/security.md).
#pragma once

#include <functional>
#include <string>

#include "config/deck.h"

namespace weft {

// Who named a medium. `deck`: a deck or the command line, which may also ask for FFmpeg's own
// sources ("lavfi:GRAPH"). `untrusted`: a prompt, a list, an address on the network, which may name
// a file and nothing else.
enum class MediaTrust { deck, untrusted };

struct MediaSource {
  std::string path;
  MediaTrust trust = MediaTrust::untrusted;
};

// Whether `path` asks for one of FFmpeg's own sources.
inline bool is_source_graph(const std::string& path) { return path.starts_with("lavfi:"); }

// What reading one medium may take. `stop`, where it is given, is asked now and then: true ends the
// reading.
struct MediaAccess {
  MediaDeck limits;
  std::function<bool()> stop;
};

// Takes a description such as "testsrc2=duration=2:rate=24:size=320x240,hue=s=0" apart and lets it
// pass if every filter of it is known to open no file, device or connection; the names are in the
// .cpp. Quotes and backslashes are refused, so that FFmpeg cannot read it otherwise. Throws
// Exit::data with the filter that is refused. FFmpeg itself is not called: some filters open files
// as soon as they are parsed.
void check_source_graph(const std::string& graph);

}  // namespace weft
