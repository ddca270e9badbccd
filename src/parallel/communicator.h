// Collectives between ranks, asynchronous: each call returns a ticket at once, and work goes on until the
// ticket is waited for. There is no barrier in here and none in the step loop.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/tensor.h"

namespace weft {

class Communicator {
 public:
  using Ticket = std::uint64_t;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sums `t` (f32 or f64, of the host or of this rank's GPU) over all ranks, in place, to the same bits on every rank.
  // On a GPU it takes what the compute stream has written so far. Tickets complete in order of issue; every rank
  // issues the same calls in the same order.
  virtual Ticket all_reduce_sum(Tensor t) = 0;
  // The same for a few doubles of the host, which must stay alive until the ticket is waited for.
  Ticket all_reduce_sum(std::span<double> values) {
    return all_reduce_sum(
        Tensor::borrow(values.data(), {static_cast<std::int64_t>(values.size())}, DType::f64));
  }
  // MPI: blocks the host until the operation is done; returns the seconds it blocked. NCCL: makes the compute stream
  // wait, not the host, and returns 0. Throws what check() throws.
  virtual double wait(Ticket ticket) = 0;
  // Seconds in operations, from the start of each (on NCCL: when its data was ready) to its end, as far as they are
  // known to be done: what there was to hide. Operations inside a DeviceGraph are not counted.
  virtual double busy_seconds() const = 0;

  // May all_reduce_sum and wait be recorded in a DeviceGraph? Every ticket must then be waited for before the
  // recording ends, and the graph be destroyed before the communicator; and all ranks must record together and
  // replay together, graphs of one and the same recording, which is why the trainer does not (train/step_graphs.h). True
  // for NCCL, and for one rank, where an all-reduce is nothing at all.
  virtual bool capturable() const = 0;
  // To be called by every rank once a step, behind the work that a DeviceGraph may have run: operations in a graph are
  // seen by nobody, so this is where the watch over hangs counts them, and where ranks that replay a graph and ranks that do
  // without one get the same count.
  virtual void replayed() {}
  // Throws if an operation failed (Exit::hardware) or took longer than the timeout (Exit::hang, naming the ranks that
  // are late). From then on every call throws the same. What hung on a GPU has been ended by then and its results are
  // worthless: call this after the host has waited for the GPU, before it believes what it reads.
  virtual void check() = 0;
  virtual std::string describe() const = 0;  // "NCCL 2.28.3", "MPI", "MPI, staged through the host"
};

// Seconds after which an operation that has begun counts as hanging: the environment's WEFT_COMM_TIMEOUT, else what is asked
// for, else (0) 600 on GPUs and 3600 on CPUs, where ranks may wait that much longer for each other's steps.
constexpr double default_comm_timeout = 0;

// NCCL where every rank has a GPU of its own and this program is linked with NCCL; otherwise MPI. Collective, and so are
// the next two; `world` is duplicated. MPI must provide MPI_THREAD_MULTIPLE.
std::unique_ptr<Communicator> make_communicator(MPI_Comm world,
                                                double timeout_seconds = default_comm_timeout);

// MPI side: host memory, and device memory by way of pinned host memory (several ranks on one GPU, or no NCCL). A progress
// thread sleeps between polls, so that compute keeps its cores.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm world,
                                                    double timeout_seconds = default_comm_timeout);

// NCCL side: device tensors only, one rank a GPU. Null in a program that is not linked with NCCL.
[[gnu::weak]] std::unique_ptr<Communicator> make_nccl_communicator(
    MPI_Comm world, double timeout_seconds = default_comm_timeout);

}  // namespace weft
