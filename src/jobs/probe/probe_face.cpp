#include "jobs/probe/probe_face.h"

#include "core/error.h"

namespace weft {

int probe_face(const Deck&, const ProbeRequest& request) {
  throw Error(Exit::usage, request.what, "not written yet", __FILE__, __LINE__);
}

int probe_geometry(const Deck&, const ProbeRequest& request) {
  throw Error(Exit::usage, request.what, "not written yet", __FILE__, __LINE__);
}

}  // namespace weft
