#include "jobs/probe/probe_sadtalker.h"

#include "core/error.h"

namespace weft {

int probe_sadtalker(const Deck&, const ProbeRequest& request) {
  throw Error(Exit::usage, request.what, "not written yet", __FILE__, __LINE__);
}

}  // namespace weft
