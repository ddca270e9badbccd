#include "tensor/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/host.h"

namespace weft {
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
             "the arena of {:.2f} GiB is full: {:.2f} GiB used, {:.3f} GiB more asked for",
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
