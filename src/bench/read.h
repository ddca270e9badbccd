// `weft bench read STORE`: how fast prefetch delivers clips, against plain reads of the same bytes.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

// Delivers every clip of `store` through the prefetcher (hashes verified) and reads the same bytes
// with plain pread in as many threads; interleaved, medians. Prints a table (or JSON) to stdout:
// GB/s of both, their ratio, and `wrong`, the clips whose bytes differ between the two. The first
// pass of each side warms the page cache and is not counted. `readers` = 0: one for each core, up
// to 4. Returns 0, or 70 when bytes differ. Throws Exit::data when the store is unusable.
int bench_read(const std::string& store, int readers, bool json);
Command bench_read_command();

}  // namespace weft
