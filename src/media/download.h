// Downloads files from an address on the network.
#pragma once

#include <string>

#include "media/media_source.h"

namespace weft {

// "http://...", "https://..." or "ftp://...".
bool is_address(const std::string& name);

// Copies the file at `address` into the new file `path`, through FFmpeg's protocols, of which a
// redirection may only lead to http and https; gives up after half a minute without a byte, or when
// access.limits are reached. The file must be media that VideoReader opens. Throws Exit::data with
// the reason, Exit::stopped when a stop was requested; leaves nothing behind then.
void download(const std::string& address, const std::string& path, const MediaAccess& access);

}  // namespace weft
