// The trace of all ranks as one file, with their clocks aligned.
#pragma once

#include <mpi.h>

#include <filesystem>
#include <functional>

#include "core/clock.h"

namespace weft {

// This rank's clock (now_seconds()) against rank 0's, from the fastest of many round trips. Two measurements, at the
// start and at the end of what is traced, also correct the drift between the clocks, as a straight line.
class ClockOffset {
 public:
  // Collective: rank 0 plays ping-pong with one rank after another, well under a millisecond each.
  explicit ClockOffset(MPI_Comm world, std::function<double()> clock = now_seconds);
  ~ClockOffset();
  ClockOffset(const ClockOffset&) = delete;
  ClockOffset& operator=(const ClockOffset&) = delete;

  // Collective: the second point of the line, or a newer one instead of it.
  void measure_again();

  // A moment of this rank on rank 0's clock, both in seconds.
  double on_rank_0(double local) const;
  // Seconds by which on_rank_0() may be wrong at the moments of the measurements: half the worse round trip.
  double error() const;

  // Two clocks read at one moment, as well as that can be known: rank 0's is ahead by `ahead`, give or take `error`.
  struct Reading {
    double local = 0, ahead = 0, error = 0;  // seconds
  };

 private:
  Reading measure() const;

  std::function<double()> clock_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  Reading first_, last_;
};

// Collective: writes RUN/trace.json with the spans of core/trace.h of all ranks, whole or not at all. Rank 0 holds one
// rank's spans at a time; of many ranks each gives its latest only, so that viewers can open the file. A file that
// cannot be written is one WARN: no run ends for its trace. Without `clock` the offsets are measured now alone.
void write_trace(const std::filesystem::path& run_dir, MPI_Comm world,
                 ClockOffset* clock = nullptr);

}  // namespace weft
