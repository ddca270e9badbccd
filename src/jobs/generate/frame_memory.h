// Counts the pixels in host memory: what a rank holds of clips outside its arena.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace weft {

// Of this process. Thread-safe.
class FrameMemory {
 public:
  static void take(std::size_t bytes) {
    const std::size_t now = now_ += bytes;
    for (std::size_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
  }
  static void give(std::size_t bytes) { now_ -= bytes; }
  static std::size_t now() { return now_; }
  static std::size_t peak() { return peak_; }  // bytes, the most since the last reset
  static void reset_peak() { peak_ = now_.load(); }

 private:
  static inline std::atomic<std::size_t> now_ = 0, peak_ = 0;
};

// A vector whose memory is counted there.
template <class T>
struct FrameAllocator {
  using value_type = T;
  FrameAllocator() = default;
  template <class U>
  explicit FrameAllocator(const FrameAllocator<U>&) {}
  T* allocate(std::size_t n) {
    T* p = std::allocator<T>().allocate(n);
    FrameMemory::take(n * sizeof(T));
    return p;
  }
  void deallocate(T* p, std::size_t n) {
    FrameMemory::give(n * sizeof(T));
    std::allocator<T>().deallocate(p, n);
  }
  bool operator==(const FrameAllocator&) const = default;
};
template <class T>
using FrameVector = std::vector<T, FrameAllocator<T>>;

}  // namespace weft
