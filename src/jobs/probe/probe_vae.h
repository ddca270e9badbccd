// `weft probe forward` for model.name "vae_temporal", the temporal VAE alone, and "vae", both of
// them: one chunk, with the noise of the posteriors given. Contract: docs/probe.md.
#pragma once

#include "jobs/probe/probe.h"

namespace weft {

int probe_vae(const Deck& deck, const ProbeRequest& request);

}  // namespace weft
