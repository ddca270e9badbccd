// What a step computed and measured, from the device to the host and from every rank to every
// other.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/parts.h"
#include "data/step_plan.h"
#include "parallel/communicator.h"
#include "tensor/tensor.h"
#include "train/metrics/metrics.h"

namespace weft {

// Copies a step's results to the host without blocking; pinned memory on a GPU.
class HostCopy {
 public:
  explicit HostCopy(std::int64_t count);  // f64 values

  // Copies `t`, f64 [count]: at once on the CPU, behind the compute stream's work on a GPU. The
  // memory is used again two calls later, for a step is evaluated after the next one is issued.
  std::span<const double> fetch(const Tensor& t);

 private:
  std::size_t count_;
  std::unique_ptr<double, void (*)(double*)> memory_;
  bool second_ = false;
};

// The report of every rank to every other, once a step: one small all-gather. From it come the
// loss, the decisions that all ranks take alike, and the table of who was slow.
class StepReport {
 public:
  // A rank's row. The first slots are written by the device, the others by the host.
  enum Slot {
    loss,          // sum over this rank's clips
    squares,       // of its own gradients, before they are summed over ranks
    working_low,   // checksum of the weights in bf16, halves (ops/optimizer.h)
    working_high,  //
    values_low,    // and of those in f32
    values_high,   //
    terms,         // what the loss is made of (train/task.h), sums over this rank's clips
    host_slots = terms + 12,  // from here on:
    requests = host_slots,    // bits of train/stop.h, `saving` among them
    busy,       // seconds of compute and of waiting for clips; on GPUs of the step before the last
    data_wait,  // the latter alone, of the same step
    samples,    // a checksum of the sample ids that it trained on
    used_slots  // from here on, the loss of each of several stores, sums over this rank's clips
  };

  // `groups` of parameters have norms of their own. `stores`: 0 where there are not several.
  StepReport(Communicator& comm, int groups, int stores = 0);
  int width() const { return width_; }  // slots a rank

  // A slot of this rank's row, on the device: f64 [1]; a checksum f64 [2].
  Tensor slot(Slot s) const { return row_.slice(s, s + 1); }
  Tensor store_slot(int store) const {
    return row_.slice(used_slots + store, used_slots + store + 1);
  }
  Tensor checksum(Slot low) const { return row_.slice(low, low + 2); }
  void clear();  // the device's slots become 0
  // Sends this rank's row. Returns the ticket.
  Communicator::Ticket send(unsigned requests, double busy, double data_wait, double samples);

  const Tensor& rows() const { return rows_; }  // f64 [ranks * width()], once sent and awaited
  // f64 [groups] beside the rows: the gradient's squared norms.
  Tensor& norm() { return norm_; }
  // Brings all rows and the norm to the host, as HostCopy does.
  struct Rows {
    std::span<const double> values;        // [ranks, width]
    const double* squared_norm = nullptr;  // [groups]
    int width = 1;
    double at(int rank, int slot) const { return values[rank * width + slot]; }
    double sum(int slot) const;  // in order of ranks
    double store_sum(int store) const { return sum(used_slots + store); }
    int ranks() const { return static_cast<int>(values.size()) / width; }
  };
  Rows fetch();

 private:
  Communicator& comm_;
  int stores_, width_;
  Tensor rows_, row_, norm_;
  HostCopy host_rows_, host_norm_;
};

// The mean loss of the clips of each of several stores in a step: sums on the device, by masks of
// whose clips a micro-batch holds, into slots of the step's report.
class StoreLosses {
 public:
  // With fewer than two stores it does nothing.
  StoreLosses(const ClipSource& source, std::span<const std::int64_t> batch_sizes);

  // Before a micro-batch is run, outside of what is recorded: its masks to the device.
  void begin(const MicroBatch& clips);
  // Each clip's loss f32 [n], of the next n clips of the micro-batch, to the store's slot.
  void add(const Tensor& losses, StepReport& report);

 private:
  const ClipSource& source_;
  std::int64_t stores_, most_;  // most_: clips of a micro-batch
  Tensor masks_, masked_;       // f32 [stores * most], [most]
  std::int64_t done_ = 0;       // clips of this micro-batch
};

// Fills the losses of metrics that have their stores' names and counts.
void sum_up_stores(const StepReport::Rows& rows, StepMetrics& metrics);

}  // namespace weft
