#include "tensor/tensor.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/host.h"

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
  // What a plan lays out may be more than this host has: it is never touched.
  const int reserve = Arena::has_current() && Arena::current().is_planning() ? MAP_NORESERVE : 0;
  void* p =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | reserve, -1, 0);
  WEFT_CHECK(p != MAP_FAILED, Exit::memory, "use more ranks or a smaller model",
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

Tensor Tensor::adopt(std::shared_ptr<void> storage, const Shape& shape, DType dtype,
                     DeviceKind device) {
  Tensor t = borrow(storage.get(), shape, dtype, device);
  t.storage_ = std::move(storage);
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

namespace {

thread_local Arena* current_arena = nullptr;

// A planning arena hands out addresses that nothing may access; a non-null base keeps them
// non-null.
std::byte* const planning_base = reinterpret_cast<std::byte*>(std::size_t{1} << 20);
constexpr std::size_t planning_capacity = std::size_t{1} << 46;

std::size_t round_up(std::size_t bytes) {
  return bytes == 0 ? Arena::alignment
                    : (bytes + Arena::alignment - 1) / Arena::alignment * Arena::alignment;
}

}  // namespace

ArenaWatch arena_watch;

std::size_t Arena::block_bytes(std::size_t bytes) const {
  const bool watched = device_ == DeviceKind::cuda && arena_watch.bytes != nullptr;
  return round_up(watched ? arena_watch.bytes(bytes) : bytes);
}

Arena::Arena(std::byte* base, std::size_t capacity, bool planning, DeviceKind device)
    : base_(base), capacity_(capacity), planning_(planning), device_(device) {
  free_by_offset_[0] = capacity;
  free_by_size_.insert({capacity, 0});
}

std::unique_ptr<Arena> Arena::reserve(std::size_t capacity, DeviceKind device) {
  capacity = round_up(capacity);
  if (device == DeviceKind::cuda)
    return std::unique_ptr<Arena>(
        new Arena(static_cast<std::byte*>(device_runtime().allocate(capacity, false)), capacity,
                  false, device));
  void* p = mmap(nullptr, capacity, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  WEFT_CHECK(p != MAP_FAILED, Exit::usage, "lower memory.arena_gib",
             "cannot reserve an arena of {:.1f} GiB: {}", gib(capacity), std::strerror(errno));
  // Huge pages save page faults and TLB misses; kernels without them refuse, which does no harm.
  madvise(p, capacity, MADV_HUGEPAGE);
  return std::unique_ptr<Arena>(new Arena(static_cast<std::byte*>(p), capacity, false, device));
}

std::unique_ptr<Arena> Arena::planning(DeviceKind device, std::size_t capacity) {
  return std::unique_ptr<Arena>(new Arena(
      planning_base, capacity == 0 ? planning_capacity : round_up(capacity), true, device));
}

Arena::~Arena() {
  if (planning_) return;
  if (device_ == DeviceKind::cuda)
    device_runtime().free(base_);
  else
    munmap(base_, capacity_);
}

void* Arena::allocate(std::size_t bytes) {
  const std::size_t need = block_bytes(bytes);
  auto it = free_by_size_.lower_bound({need, 0});
  if (it == free_by_size_.end() && planning_) {
    // The dry run continues past its capacity, since the caller also wants to know the peak.
    fits_ = false;
    add_free(capacity_, planning_capacity);
    capacity_ += planning_capacity;
    it = free_by_size_.lower_bound({need, 0});
  }
  WEFT_CHECK(it != free_by_size_.end(), Exit::usage,
             "lower the batch size or the clip size, raise model.recompute, or raise "
             "memory.arena_gib if the machine has more",
             "the arena of {:.2f} GiB is full: {:.2f} GiB used, {:.3f} GiB more requested",
             gib(capacity_), gib(used_), gib(need));
  const auto [size, offset] = *it;
  free_by_size_.erase(it);
  free_by_offset_.erase(offset);
  if (size > need) {
    free_by_offset_[offset + need] = size - need;
    free_by_size_.insert({size - need, offset + need});
  }
  used_ += need;
  if (used_ > peak_) peak_ = used_;
  if (device_ == DeviceKind::cuda && !planning_ && arena_watch.block != nullptr)
    arena_watch.block(base_ + offset, bytes, true);
  return base_ + offset;
}

void Arena::free(void* p, std::size_t bytes) {
  if (device_ == DeviceKind::cuda && !planning_ && arena_watch.block != nullptr)
    arena_watch.block(p, bytes, false);
  const std::size_t size = block_bytes(bytes);
  const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(p) - base_);
  WEFT_ASSERT(offset + size <= capacity_ && used_ >= size);
  used_ -= size;
  add_free(offset, size);
}

void Arena::add_free(std::size_t offset, std::size_t size) {
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.end() && next->first == offset + size) {
    size += next->second;
    free_by_size_.erase({next->second, next->first});
    next = free_by_offset_.erase(next);
  }
  if (next != free_by_offset_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      free_by_size_.erase({before->second, before->first});
      free_by_offset_.erase(before);
    }
  }
  free_by_offset_[offset] = size;
  free_by_size_.insert({size, offset});
}

Arena& Arena::current() {
  WEFT_ASSERT(current_arena != nullptr);
  return *current_arena;
}

bool Arena::has_current() { return current_arena != nullptr; }

ArenaScope::ArenaScope(Arena& arena) : previous_(current_arena) { current_arena = &arena; }
ArenaScope::~ArenaScope() { current_arena = previous_; }

}  // namespace weft
