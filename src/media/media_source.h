// A media file to read, and whether the source of its name is trusted (docs/security.md).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "config/deck.h"

namespace weft {

// Who named a medium. `deck`: a deck or the command line, which may also use FFmpeg's own sources
// ("lavfi:GRAPH"). `untrusted`: a prompt, a list, or an address on the network, which may name only
// a file.
enum class MediaTrust { deck, untrusted };

struct MediaSource {
  std::string path;
  MediaTrust trust = MediaTrust::untrusted;
  // A member of an uncompressed archive: its name, for messages alone, and its bytes.
  std::string member = {};
  std::uint64_t begin = 0, bytes = 0;

  std::string name() const { return member.empty() ? path : path + "/" + member; }
};

// Whether `path` asks for one of FFmpeg's own sources.
inline bool is_source_graph(const std::string& path) { return path.starts_with("lavfi:"); }

// Limits on reading one medium. `stop`, if given, is polled: true ends the reading.
struct MediaAccess {
  MediaDeck limits;
  std::function<bool()> stop;
};

// Parses a description such as "testsrc2=duration=2:rate=24:size=320x240,hue=s=0" and accepts it if
// every filter in it is known to open no file, device or connection; the names are in the .cpp.
// Quotes and backslashes are refused, so that FFmpeg cannot parse it differently. Throws Exit::data
// with the refused filter. FFmpeg itself is not called: some filters open files as soon as they are
// parsed.
void check_source_graph(const std::string& graph);

// Downloads files from an address on the network.

// "http://...", "https://..." or "ftp://...".
bool is_address(const std::string& name);

// Copies the file at `address` into the new file `path`, through FFmpeg's protocols, of which a
// redirection may only lead to http and https; gives up after half a minute without a byte, or when
// access.limits are reached. The file must be media that VideoReader opens. Throws Exit::data with
// the reason, Exit::stopped when a stop was requested; leaves nothing behind then.
void download(const std::string& address, const std::string& path, const MediaAccess& access);

}  // namespace weft
