// The simulated machine: hosts and links for SimGrid, and collectives as flows between its nodes.
#pragma once

#include <simgrid/s4u.hpp>

#include <memory>
#include <vector>

#include "plan/simulation.h"

namespace weft::simulation {

// One simulation: an engine with the machine in it. One at a time in a process (SimGrid's engine is
// a singleton).
class Machine {
 public:
  Machine(const Network& network, int ranks);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  int ranks() const { return ranks_; }
  simgrid::s4u::Host* host_of(int rank) const {
    return nodes_[static_cast<std::size_t>(rank / network_.ranks_per_node)];
  }
  void run();  // until every actor has ended

  // For actors: blocks until all ranks have done `times` such operations, one after the other.
  void collective(Collective kind, double bytes, int times = 1) const;
  // For actors on host_of(rank): so much work of one core or device.
  void compute(double seconds) const;

 private:
  Network network_;
  int ranks_;
  std::unique_ptr<simgrid::s4u::Engine> engine_;
  std::vector<simgrid::s4u::Host*> nodes_;
};

// Blocks actors until it is opened; stays open. Actors run one at a time, so plain members are
// safe.
class Gate {
 public:
  void open();
  void wait();
  bool is_open() const { return open_; }

 private:
  bool open_ = false;
  int waiting_ = 0;
  simgrid::s4u::SemaphorePtr semaphore_;
};

// A gate that opens when all have arrived.
class Meeting {
 public:
  explicit Meeting(int expected) : missing_(expected) {}
  void arrive() {
    if (--missing_ == 0) gate_.open();
  }
  void wait() { gate_.wait(); }

 private:
  int missing_;
  Gate gate_;
};

}  // namespace weft::simulation
