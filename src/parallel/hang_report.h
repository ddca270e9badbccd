// Describes a hang as seen by all ranks: its cause in one line, and a table with one line per rank.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace weft {

// A collective, described alike on every rank.
struct Collective {
  const char* kind = "";  // "all-reduce", "reduce-scatter", "all-gather", "all-to-all": a literal
  DType dtype = DType::f32;
  std::uint64_t bytes = 0;  // of the whole operation, the same on every rank
};

// A lock-free ring: the caller's thread issues, another may begin and complete, a third reads.
class FlightRecord {
 public:
  // Holds one step's collectives of a large model; older entries are overwritten.
  static constexpr std::size_t length = 256;

  // A copy that can be sent to another rank.
  struct Entry {
    std::uint64_t number = 0, bytes = 0;
    std::array<char, 16> kind{};
    DType dtype = DType::f32;

    bool same_as(const Entry& other) const {
      return kind == other.kind && dtype == other.dtype && bytes == other.bytes;
    }
    std::string describe() const;  // "all-reduce (f32, 64.000 MiB)"
  };

  // Numbers count from 1; 0 restarts the count.
  void issued(std::uint64_t number, const Collective& what);
  void begun(std::uint64_t number) { begun_.store(number); }
  void completed(std::uint64_t number) { completed_.store(number); }

  std::uint64_t last_issued() const { return issued_.load(); }
  std::uint64_t last_begun() const { return begun_.load(); }
  std::uint64_t last_completed() const { return completed_.load(); }
  // The entries still held, oldest first. Entries overwritten meanwhile are left out.
  std::vector<Entry> entries() const;

 private:
  struct Slot {
    std::atomic<std::uint64_t> number = 0;  // 0: being written
    std::atomic<std::uint64_t> bytes = 0;
    std::atomic<const char*> kind = "";
    std::atomic<DType> dtype = DType::f32;
  };
  std::array<Slot, length> slots_;
  std::atomic<std::uint64_t> issued_ = 0, begun_ = 0, completed_ = 0;
};

// One rank's progress, as its watchdog's thread reports it.
struct RankState {
  bool answers = false;
  bool stalled = false;   // in a step, and nothing moved for the timeout
  std::int64_t step = 0;  // from 0, where there is a phase; messages count from 1
  std::string phase;      // empty: in no step
  double phase_seconds = 0;
  std::uint64_t issued = 0, begun = 0, completed = 0;
  std::vector<FlightRecord::Entry> records;

  std::vector<char> to_bytes() const;
  static RankState from_bytes(std::span<const char> bytes);  // answers
};

struct RankName {
  int rank = 0;
  std::string host;
};

// "COMPLAINT; late: rank 3 on n14 (has not issued it)", then the table. If the ranks' records
// differ, that comes first. `complaint` comes from the rank that noticed the hang, without a full
// stop. States and names are in order of rank.
std::string hang_report(const std::string& complaint, std::span<const RankState> states,
                        std::span<const RankName> names);

}  // namespace weft
