// `weft probe WHAT`: a model, or a part of one, on given weights and inputs, for checks of a build
// or a device against the original models. Contract: docs/probe.md.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

struct ProbeRequest {
  std::string what;  // "forward", "loss", "sample" ...
  std::string deck;  // its file; empty: none is given
  std::string weights, inputs, outputs;
  bool backward = false;
};

// Collective.
int probe(const Deck& deck, const ProbeRequest& request, MPI_Comm world);
Command probe_command();

}  // namespace weft
