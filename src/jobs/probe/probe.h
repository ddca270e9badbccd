// `weft probe WHAT`: one forward, loss or sample on given weights and inputs, for checks of a build
// or a device against the original models. Contract: docs/probe.md.
#pragma once

#include <string>

#include "config/command.h"

namespace weft {

struct ProbeRequest {
  std::string what;  // "forward", "loss" or "sample"
  std::string weights, inputs, outputs;
  bool backward = false;
};

int probe(Deck deck, const ProbeRequest& request);
Command probe_command();

}  // namespace weft
