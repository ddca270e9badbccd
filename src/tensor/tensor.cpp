#include "tensor/tensor.h"

#include <sys/mman.h>

#include <cstring>

#include "core/error.h"
#include "tensor/arena.h"

namespace weft {

Shape::Shape(std::span<const std::int64_t> dims) {
  WEFT_ASSERT(dims.size() <= max_rank);
  for (const std::int64_t d : dims) {
    WEFT_ASSERT(d >= 0);
    dims_[rank_++] = d;
  }
}

std::int64_t Shape::numel() const {
  std::int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n *= dims_[i];
  return n;
}

std::string Shape::str() const { return fmt::format("[{}]", fmt::join(dims(), ", ")); }

Tensor Tensor::empty(const Shape& shape, DType dtype) {
  Tensor t;
  t.shape_ = shape;
  t.dtype_ = dtype;
  Arena* arena = &Arena::current();
  t.device_ = arena->device();
  const std::size_t bytes = t.bytes();
  t.data_ = arena->allocate(bytes);
  t.storage_ = std::shared_ptr<void>(t.data_, [arena, bytes](void* p) { arena->free(p, bytes); });
  return t;
}

Tensor Tensor::persistent(const Shape& shape, DType dtype) {
  if (!on_cuda()) return host(shape, dtype);
  Tensor t;
  t.shape_ = shape;
  t.dtype_ = dtype;
  t.device_ = DeviceKind::cuda;
  t.data_ = device_runtime().allocate(t.bytes() + 1);
  t.storage_ = std::shared_ptr<void>(t.data_, [](void* p) { device_runtime().free(p); });
  return t;
}

Tensor Tensor::host(const Shape& shape, DType dtype) {
  Tensor t;
  t.shape_ = shape;
  t.dtype_ = dtype;
  // One more byte: mmap refuses an empty mapping, and tensors may be empty.
  const std::size_t bytes = t.bytes() + 1;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  WEFT_CHECK(p != MAP_FAILED, Exit::usage, "use more ranks or a smaller model",
             "no memory for {} bytes of model state", bytes);
  madvise(p, bytes, MADV_HUGEPAGE);
  t.data_ = p;
  t.storage_ = std::shared_ptr<void>(p, [bytes](void* q) { munmap(q, bytes); });
  return t;
}

Tensor Tensor::borrow(void* data, const Shape& shape, DType dtype, DeviceKind device) {
  Tensor t;
  t.data_ = data;
  t.device_ = device;
  t.shape_ = shape;
  t.dtype_ = dtype;
  return t;
}

void Tensor::set_bytes(const void* from, std::size_t size) {
  // In a dry run tensors have no memory.
  if (Arena::has_current() && Arena::current().is_planning()) return;
  WEFT_ASSERT(size == bytes());
  if (size == 0) return;
  if (device_ == DeviceKind::cpu)
    std::memcpy(data_, from, size);
  else
    device_runtime().upload(data_, from, size, Stream::compute);
}

Tensor Tensor::to_host() const {
  if (device_ == DeviceKind::cpu) return *this;
  Tensor t = host(shape_, dtype_);
  if (bytes() > 0) device_runtime().download(t.data_, data_, bytes());
  return t;
}

Tensor Tensor::to_device() const {
  if (device_ == this_device().kind || !defined()) return *this;
  Tensor t = empty(shape_, dtype_);
  t.set_bytes(data_, bytes());
  return t;
}

Tensor Tensor::view(const Shape& shape) const {
  WEFT_ASSERT(shape.numel() == numel());
  Tensor t = *this;
  t.shape_ = shape;
  return t;
}

Tensor Tensor::slice(std::int64_t begin, std::int64_t end) const {
  WEFT_ASSERT(shape_.rank() >= 1 && 0 <= begin && begin <= end && end <= dim(0));
  std::array<std::int64_t, Shape::max_rank> dims{};
  std::int64_t row = 1;
  for (int i = 1; i < shape_.rank(); ++i) row *= dims[i] = shape_[i];
  dims[0] = end - begin;
  Tensor t = *this;
  t.shape_ = Shape(std::span<const std::int64_t>(dims.data(), shape_.rank()));
  t.data_ = static_cast<std::byte*>(data_) + begin * row * size_of(dtype_);
  return t;
}

void Tensor::check_host() const {
  if (device_ == DeviceKind::cuda)
    throw Error(Exit::internal, fmt::format("tensor {} of a GPU read by the host", shape_.str()),
                "this is a bug in weft, please report it with the log", __FILE__, __LINE__);
}

void Tensor::check_dtype(DType wanted) const {
  if (wanted != dtype_)
    throw Error(Exit::internal,
                fmt::format("tensor {} holds {}, read as {}", shape_.str(), name_of(dtype_),
                            name_of(wanted)),
                "this is a bug in weft, please report it with the log", __FILE__, __LINE__);
}

}  // namespace weft
