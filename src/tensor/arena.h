// The memory of a rank's step: one region, reserved once, from which tensors take blocks and to
// which they return them. Pages are touched once and reused ever after, so a run cannot grow.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>

#include "tensor/device.h"

namespace weft {

// What a dry run took from a planning arena.
struct MemoryNeed {
  std::size_t bytes = 0;  // at the peak
  bool fits = true;       // into the arena's capacity, holes between blocks included
};

class Arena {
 public:
  static constexpr std::size_t alignment = 256;

  // Reserves `capacity` bytes: of address space on the CPU, where pages become resident when first
  // written; of device memory on a GPU.
  static std::unique_ptr<Arena> reserve(std::size_t capacity, DeviceKind device);
  static std::unique_ptr<Arena> reserve(std::size_t capacity) {
    return reserve(capacity, this_device().kind);
  }
  // An arena without memory: every operation on its tensors is skipped, and only sizes are tracked.
  // Running a step through it gives the step's exact peak, also for a kind of device that this host
  // lacks. With a capacity (0: unlimited) need().fits tells whether a real arena of that size would
  // suffice: holes between blocks count too.
  static std::unique_ptr<Arena> planning(DeviceKind device, std::size_t capacity = 0);
  static std::unique_ptr<Arena> planning() { return planning(this_device().kind); }

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Best fit, lower address first, so that the same sequence of calls gives the same addresses.
  // Throws Exit::usage when the arena is full; a planning one records it and continues.
  void* allocate(std::size_t bytes);
  void free(void* p, std::size_t bytes);

  bool is_planning() const { return planning_; }
  DeviceKind device() const { return device_; }
  std::size_t used() const { return used_; }
  std::size_t peak() const { return peak_; }
  MemoryNeed need() const { return {peak_, fits_}; }
  std::size_t capacity() const { return capacity_; }
  void reset_peak() { peak_ = used_; }

  // The arena from which this thread's tensors come. Set by ArenaScope.
  static Arena& current();
  static bool has_current();

 private:
  friend class ArenaScope;
  Arena(std::byte* base, std::size_t capacity, bool planning, DeviceKind device);

  std::size_t block_bytes(std::size_t bytes) const;
  // Adds [offset, offset + size) to the free blocks, merged with its neighbours.
  void add_free(std::size_t offset, std::size_t size);

  std::byte* base_;
  std::size_t capacity_;
  bool planning_;
  bool fits_ = true;
  DeviceKind device_;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  std::map<std::size_t, std::size_t> free_by_offset_;           // offset -> bytes
  std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // (bytes, offset)
};

// Called for every block of a GPU's arena; set by programs that check memory use
// (tests/cuda_on_cpu). `bytes` returns the size that a block of that size should take.
struct ArenaWatch {
  void (*block)(void* p, std::size_t bytes, bool allocated) = nullptr;
  std::size_t (*bytes)(std::size_t bytes) = nullptr;
};
extern ArenaWatch arena_watch;

// Makes `arena` the current one of this thread for the scope's life.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena);
  ~ArenaScope();
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena* previous_;
};

}  // namespace weft
