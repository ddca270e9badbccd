// Files that lie at an address on the network.
#pragma once

#include <string>

namespace weft {

// "http://...", "https://..." or "ftp://...".
bool is_address(const std::string& name);

// Copies what lies at `address` into the new file `path`, through FFmpeg's protocols; gives up after half a minute without
// a byte. Throws Exit::data with FFmpeg's reason; nothing is left then.
void download(const std::string& address, const std::string& path);

}  // namespace weft
