// The benchmarks of `weft bench`: the options, output and checks of each.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "config/command.h"
#include "ops/dispatch.h"
#include "ops/rates.h"
#include "tensor/dtype.h"

namespace weft {

struct DeviceRates {
  double f32_products = 0, bf16_products = 0;  // FLOP/s
  double copies = 0;                           // B/s, read and written
};
DeviceRates device_rates();  // in an arena of its own

// A table of where the time went: of each operation (`shapes`: and shapes of its tensors) calls,
// time, share of `seconds`, rates, and its share of the limit: the least time that `rates` allow,
// summed over its calls. Calls and times are divided by `steps`; `seconds` are those of a step. The
// last line is "profile: " and the totals as JSON: seconds, operations (their seconds), limit (the
// least seconds), and the rates.
std::string profile_table(const ops::Profile& profile, const DeviceRates& rates, int steps,
                          double seconds, bool shapes = false);

// A folder of this rank below TMPDIR, for the run.dir of trainings; gone when the bench ends.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder() { clear(); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  void clear();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// `weft bench comm`: all-reduce over all ranks, checked and timed for each size.
struct BenchCommRequest {
  std::string device = "auto";
  bool share = false;
  double largest_mib = 256;
  std::string json;
};

// Collective. Prints time, algorithm and bus bandwidth (2 (n-1)/n of it, as nccl-tests counts)
// and wrong elements of sums whose results are known exactly, and processor time of this rank a
// byte; with bf16 on the wire, and by MPI_Allreduce on the host, interleaved. Exit::hardware if
// any is wrong.
int bench_comm(const BenchCommRequest& request, MPI_Comm world);
Command bench_comm_command();

// `weft bench read STORE`: how fast prefetch delivers clips, against plain reads of the same
// bytes.
//
// Delivers every clip of `store` through the prefetcher (hashes verified) and reads the same
// bytes with plain pread in as many threads; interleaved, medians. Prints a table (or JSON) to
// stdout: GB/s of both, their ratio, and `wrong`, the clips whose bytes differ between the two.
// The first pass of each side warms the page cache and is not counted. `readers` = 0: one for
// each core, up to 4. Returns 0, or 70 when bytes differ. Throws Exit::data when the store is
// unusable.
int bench_read(const std::string& store, int readers, bool json);
Command bench_read_command();

// `weft bench scaling`: the same training on 1, 2, ... ranks within one job, checked and timed.
struct BenchScalingRequest {
  std::vector<int> ranks;  // rank counts; empty: 1, 2, 4, ... and all
  std::string mode =
      "weak";  // weak: train.micro_batches a rank; strong: train.micro_batches over all ranks
  std::string mix = "mixed";  // mixed: the deck's buckets; uniform: the largest of them alone
  int steps = 6, rounds = 3;  // timed steps a round at the greatest rank count
  int warmup = 3;             // and before: memory is touched, caches fill
  bool no_overlap = false;    // measure also parallel.overlap = false
  bool paced = false;  // wait for a line on stdin before each round: others are measured in turn
  std::string json, plot;  // files, "" = not wanted
};

// Collective. Checks first that all rank counts compute the same (losses and weights of a few
// steps on the same samples agree within what reordered sums explain; Exit::hardware if not),
// then times them in turn, round by round. Every rank count trains on the same samples in a round
// (weak: fewer ranks take more steps). Ranks that a count leaves out sleep.
int bench_scaling(const Deck& deck, const BenchScalingRequest& request, MPI_Comm world);
Command bench_scaling_command();

// `weft bench step`: the time of a training step (forward, backward, update) of any model, on one
// micro-batch. Weights are those that a training begins with.
struct BenchStepRequest {
  // The micro-batch: of synthetic latents (clips x latent frames x height x width) with captions
  // of so many tokens (0: as many as the model takes); or of STDiT3, from a file
  // (bench/step_inputs.h); or the costliest of the deck's data.
  std::string shape;
  std::int64_t captions = 0;
  std::string inputs;
  std::string weights;  // safetensors, "" = none
  std::string outputs;  // weights after all steps, "" = not wanted
  std::string json;     // results, "" = stdout table only
  std::string ways;     // table of measured choices, read and written; "" = not wanted
  int steps = 4, warmup = 2;
  bool profile = false;  // also time every operation
  bool untuned = false;  // matrix products by the library's first proposals
  // Seconds for which the step's own products run alone, after the steps: the ceiling. 0: it is a
  // large product's rate.
  double ceiling = 0;
};

// Prints the median step, and operations a second (of a dry run: recomputation is not counted), and
// their share of the ceiling. On a GPU a small step of a denoiser is first checked against the CPU
// side; matrix products then run by algorithms that are measured before the first step, as in
// training, which parallel.deterministic and `untuned` turn off.
int bench_step(const Deck& deck, const BenchStepRequest& request);
Command bench_step_command();

}  // namespace weft
