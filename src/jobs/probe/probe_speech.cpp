#include "jobs/probe/probe_speech.h"

#include "core/error.h"

namespace weft {

int probe_speech(const Deck&, const ProbeRequest& request) {
  throw Error(Exit::usage, request.what, "not written yet", __FILE__, __LINE__);
}

int probe_mel(const Deck&, const ProbeRequest& request) {
  throw Error(Exit::usage, request.what, "not written yet", __FILE__, __LINE__);
}

}  // namespace weft
