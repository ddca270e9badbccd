#include "train/gpu_ways.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/mpi.h"
#include "ops/ways.h"

namespace weft {

std::string choose_ways(const Deck& deck, const ClipSource& source,
                        std::span<const std::int64_t> batch_sizes,
                        std::span<const StepMemory> memory, MPI_Comm world,
                        const std::function<void()>& try_each_bucket) {
  // A weak symbol: null in a build without CUDA.
  if (&kernels::set_ways == nullptr) return "";
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  const bool first_rank = rank == 0;
  if (first_rank && deck.model.dtype == "fp8" &&
      (deck.parallel.deterministic || !std::ranges::count(deck.device.tried, "fp8")))
    log::warn(
        "model.dtype = \"fp8\": products run in bf16, on operands rounded to e4m3, and are slower "
        "than with bf16: the library's e4m3 products are untested. device.try = [\"fp8\"] lets "
        "them compete (not with parallel.deterministic); by count they are worth it from 3,072 "
        "channels on");
  if (deck.parallel.deterministic) {
    kernels::set_ways({.tried = deck.device.tried});
    return "the first of each, not measured (parallel.deterministic)";
  }
  const std::filesystem::path file = std::filesystem::path(deck.run.dir) / "matmul.txt";
  std::string table;
  if (first_rank && std::filesystem::exists(file))
    table = read_whole(file, 64 << 20, Exit::usage, "delete it: products are measured again");
  const std::string before = table;
  const auto set = [&](bool measure) {
    broadcast_sized(table, world);
    kernels::set_ways({.tried = deck.device.tried, .table = table, .measure = measure});
  };
  set(first_rank);
  // An entry of the table that is no choice: a micro-batch of each bucket has been measured on this
  // GPU, with these shapes. A new value of device.try counts only without a table.
  std::string shapes = fmt::format("{} {}", deck.model.dtype, deck.parallel.sp);
  for (std::size_t b = 0; b < memory.size(); ++b)
    shapes += fmt::format("; {} {} {} {}", source.buckets()[b].name, batch_sizes[b],
                          memory[b].recompute, memory[b].kept);
  std::string measured = fmt::format("{}\tmicro-batches {}\tmeasured\t0\n",
                                     kernels::ways_identity(), to_hex(hash128(shapes)));
  broadcast_sized(measured, world);
  if (table.find(measured) == table.npos) try_each_bucket();
  const std::string taken = kernels::ways_taken();
  if (first_rank) table = kernels::ways_table();
  if (table.find(measured) == table.npos) table += measured;
  set(false);
  if (first_rank && table != before) replace_file(file, table, Exit::checkpoint, Durable::no);
  return fmt::format("the fastest by measurement; untested ones: {}",
                     taken.empty() ? "none tried" : taken);
}

}  // namespace weft
