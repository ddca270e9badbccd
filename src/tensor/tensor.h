// A contiguous, row-major array of at most 6 dimensions. A Tensor is a handle: copies share the
// storage, which returns to its arena with the last handle. There are no strides; an operation
// that walks another axis takes the axis as an argument.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
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

}  // namespace weft
