// The machine that a plan is made for: nodes of ranks with fast links inside and network cards
// between them. Figures are what one direction carries, in bytes a second, and seconds.
#pragma once

#include <string>

#include "tensor/device.h"

namespace weft {

inline double gb(double bytes) { return bytes / 1e9; }

struct Machine {
  std::string name;  // as given: "8x400", "1x200", "local"
  DeviceKind device = DeviceKind::cuda;

  int ranks_a_node = 8;
  // Inside a node: the bus bandwidth of a ring over all its ranks (nccl-tests' busbw), i.e. what
  // each rank sends meanwhile.
  double link_bandwidth = 370e9;
  double link_latency = 3e-6;  // of one message between ranks of a node
  // How much faster all-gathers are than reduce-scatters, which also add.
  double gather_factor = 1;

  // Between nodes: cards of a node, each with its peak and the share of it that collectives reach.
  int cards_a_node = 8;
  double card_bandwidth = 50e9;
  double card_share = 0.92;
  double card_latency = 6e-6;

  double memory_bytes = 0;  // of a rank's device
  double memory_bandwidth = 4.3e12;
  double storage_bandwidth = 10e9;    // of the file system, all ranks together
  double host_copy_bandwidth = 50e9;  // a rank's state to host memory, for checkpoints

  // What a node sends through all its cards.
  double node_bandwidth() const { return cards_a_node * card_bandwidth * card_share; }
};

inline constexpr const char* default_fabric = "8x400";

// The described machine with the fabric "8x400", "1x200" or any other CARDSxGBITS a node; H200
// nodes of 8 with NVLink (docs/plan.md, Machine constants). `memory_gb` in 1e9 bytes. Exit::usage
// for a fabric that is none of these, naming the nearest.
Machine described_machine(const std::string& fabric, double memory_gb);

}  // namespace weft
