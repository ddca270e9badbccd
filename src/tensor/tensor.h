// A contiguous, row-major array of at most 6 dimensions. A Tensor is a handle: copies share the
// storage, which returns to its arena with the last handle. There are no strides; an operation
// that walks another axis takes the axis as an argument.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>

#include "tensor/device.h"
#include "tensor/dtype.h"

namespace weft {

class Shape {
 public:
  static constexpr int max_rank = 6;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const std::int64_t> dims);

  int rank() const { return rank_; }
  std::int64_t operator[](int axis) const { return dims_[axis < 0 ? axis + rank_ : axis]; }
  std::int64_t numel() const;
  bool operator==(const Shape&) const = default;
  std::string str() const;  // "[2, 3, 4]"
  std::span<const std::int64_t> dims() const { return {dims_.data(), std::size_t(rank_)}; }

 private:
  std::array<std::int64_t, max_rank> dims_{};
  int rank_ = 0;
};

class Tensor {
 public:
  Tensor() = default;

  // Uninitialised, from the current arena, on its device; returned to it with the last handle.
  static Tensor empty(const Shape& shape, DType dtype);
  // Zeroed, outside any arena, on this rank's device: weights, optimizer state and whatever
  // outlives a step.
  static Tensor persistent(const Shape& shape, DType dtype);
  // The same in host memory.
  static Tensor host(const Shape& shape, DType dtype);
  // Borrows memory that its owner keeps alive.
  static Tensor borrow(void* data, const Shape& shape, DType dtype,
                       DeviceKind device = DeviceKind::cpu);
  // Memory that ends with the last handle of `storage`.
  static Tensor adopt(std::shared_ptr<void> storage, const Shape& shape, DType dtype,
                      DeviceKind device);
  // A copy of host values in the current arena; nothing is copied while planning.
  template <class T>
  static Tensor from_host(std::span<const T> values, const Shape& shape) {
    Tensor t = empty(shape, dtype_of<T>::value);
    t.set(values);
    return t;
  }

  // Overwrites with host values; the source may be reused at once. Never waits for a GPU.
  template <class T>
  void set(std::span<const T> values) {
    check_dtype(dtype_of<T>::value);
    set_bytes(values.data(), values.size_bytes());
  }
  void set(std::span<const std::byte> bytes) { set_bytes(bytes.data(), bytes.size()); }
  // The values in host memory: this tensor itself on the CPU, a copy (waited for) from a GPU.
  Tensor to_host() const;
  // A copy on this rank's device in the current arena; this tensor itself if it is already there.
  Tensor to_device() const;

  bool defined() const { return data_ != nullptr; }
  const Shape& shape() const { return shape_; }
  std::int64_t dim(int axis) const { return shape_[axis]; }
  std::int64_t numel() const { return shape_.numel(); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype_); }
  DType dtype() const { return dtype_; }

  void* raw() const { return data_; }
  DeviceKind device() const { return device_; }
  // Typed access from the host; throws on a wrong T, or for GPU memory, as a bug.
  template <class T>
  T* data() const {
    check_dtype(dtype_of<T>::value);
    check_host();
    return static_cast<T*>(data_);
  }
  // Typed address for a kernel.
  template <class T>
  T* device_data() const {
    check_dtype(dtype_of<T>::value);
    return static_cast<T*>(data_);
  }
  template <class T>
  std::span<T> span() const {
    return {data<T>(), static_cast<std::size_t>(numel())};
  }

  // The same elements under another shape of equal size.
  Tensor view(const Shape& shape) const;
  // Elements [begin, end) of axis 0.
  Tensor slice(std::int64_t begin, std::int64_t end) const;
  void release() { *this = Tensor(); }

 private:
  void check_dtype(DType wanted) const;
  void check_host() const;
  void set_bytes(const void* from, std::size_t bytes);

  std::shared_ptr<void> storage_;
  void* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::f32;
  DeviceKind device_ = DeviceKind::cpu;
};

// The memory of a rank's step: one region, reserved once, from which tensors take blocks and to
// which they return them. Pages are touched once and reused ever after, so a run cannot grow (class
// Arena).

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
