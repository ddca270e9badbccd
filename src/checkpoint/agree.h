// How ranks agree on what happened, from any thread: nonblocking collectives, polled with short
// sleeps instead of spinning, so that the processor stays with the training.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"

namespace weft::checkpoint {

// A rank's result of a piece of work: success, or the first thing that went wrong.
struct Outcome {
  std::string error, hint;  // empty: fine
  Exit code = Exit::checkpoint;
  bool ok() const { return error.empty(); }
  void raise() const;  // throws Error unless fine
};

// Runs `work` and turns an exception into an Outcome that names this rank and host.
template <class F>
Outcome attempt(F&& work);
Outcome outcome_of(std::exception_ptr error);

// Collective. Every rank learns the outcome of the lowest rank that failed, of which Exit::stopped
// comes last, and how many did.
Outcome agree(MPI_Comm comm, const Outcome& mine);

// Collective. All ranks' bytes, one rank after another; empty except on rank 0.
std::vector<std::byte> collect(MPI_Comm comm, std::span<const std::byte> mine);

template <class F>
Outcome attempt(F&& work) {
  try {
    work();
    return {};
  } catch (...) {
    return outcome_of(std::current_exception());
  }
}

}  // namespace weft::checkpoint
