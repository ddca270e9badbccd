// Collectives between ranks, asynchronous: each call returns a ticket at once, and work goes on until the
// ticket is waited for. There is no barrier in here and none in the step loop.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <span>

#include "core/tensor.h"

namespace weft {

class Communicator {
 public:
  using Ticket = std::uint64_t;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sums `t` (f32) over all ranks, in place, to the same bits on every rank. Tickets complete in order of issue;
  // every rank issues the same calls in the same order.
  virtual Ticket all_reduce_sum(Tensor t) = 0;
  // The same for a few doubles, which must stay alive until the ticket is waited for.
  virtual Ticket all_reduce_sum(std::span<double> values) = 0;
  // Blocks until the operation is done; returns the seconds it blocked.
  virtual double wait(Ticket ticket) = 0;
  // Seconds of `ticket` from its start to its end, once waited for: what there was to hide.
  virtual double busy_seconds() const = 0;
};

// MPI side: host memory, and a progress thread that sleeps between polls, so that compute keeps its cores.
// MPI must provide MPI_THREAD_MULTIPLE. `world` is duplicated.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world);

}  // namespace weft
