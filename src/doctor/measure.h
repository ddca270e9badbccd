// What the doctor measures on every rank. Each part fills measured and wrong of `facts`; all ranks
// do the same part at the same time, as they will in a job.
#pragma once

#include "config/deck.h"
#include "doctor/facts.h"
#include "parallel/communicator.h"

namespace weft {

// "memory copy GB/s": all threads of the rank, bytes read and written both counted.
void measure_memory(RankFacts& facts);

// "product f32 TFLOP/s" and, where the device has it, "product bf16 TFLOP/s": y = x w^T + b of
// small whole numbers whose sums are exact in any order, so `wrong` counts every element that is
// not the known one, to the bit.
void measure_products(RankFacts& facts);

// Fills `operations`: on a GPU a few operations of each kind compared with the CPU side, on a CPU a
// matrix product with a plain loop. Convolutions are left out where cuDNN is not there.
void check_operations(RankFacts& facts);

// "host to device GB/s", "device to host GB/s", "device copy GB/s" (read and written counted) by
// events, and in `wrong` "device memory" the words that came back changed. Only on a GPU.
void measure_device_copies(RankFacts& facts);

// "file read GB/s" of the clip store at `path`, or of a temporary file in the working directory
// where `path` is not a file; then also "file write GB/s". The kernel is asked to forget the pages
// first. Throws Exit::data.
void measure_files(const std::string& path, RankFacts& facts);

// "all-reduce 64 MiB GB/s" and "all-reduce 8 B us", over all ranks; `wrong` as above. Collective.
void measure_all_reduce(Communicator& comm, RankFacts& facts);

}  // namespace weft
