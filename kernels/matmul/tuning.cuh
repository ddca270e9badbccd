// Choice between ways of computing the same thing, by measurement, kept in a file (tuning.cu).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace weft::kernels {

// Which of `options` to take for the work that `key` names (no tabs). Ways differ in the order of
// their sums and in what they round, so a run repeats its bits only if it repeats its choices:
// without a table (set_matmul_tuning) this is always option 0; with one it is the table's entry,
// and work that has none yet is measured once, unless a capture is under way, and entered.
// `run(option)` enqueues the work once, into outputs that are not needed, and returns false where
// the option cannot run.
int choose(const std::string& key, int options, const std::function<bool(int)>& run);

// False where a product of so many multiplications takes option 0 unmeasured: without a table, or
// where it is too small for a choice to matter.
bool is_measured(std::int64_t multiplications);

// True where choose() would have to measure: callers then prepare outputs to spoil.
bool must_measure(const std::string& key);

// Counts the calls of set_matmul_tuning: what was chosen under an earlier table is to be chosen
// again.
int table_generation();

// True while the compute stream records a graph instead of running.
bool compute_is_capturing();

// Device memory to spoil while measuring, outside the arena: once a shape, before the steady state.
class Spoil {
 public:
  explicit Spoil(std::size_t bytes);
  ~Spoil();
  Spoil(const Spoil&) = delete;
  Spoil& operator=(const Spoil&) = delete;
  void* get() const { return p_; }  // null where 0 bytes were asked for

  // False, with a warning, where the GPU has not that much left: then the first option is taken.
  static bool fits(std::size_t bytes);

 private:
  void* p_;
};

}  // namespace weft::kernels
