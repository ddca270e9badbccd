// Device memory: each allocation ends at pages that nobody may touch, is marked in what is left
// around it and filled with 0xff, which is NaN in every floating-point type. The fill is a private
// mapping of a file of 0xff, so that only pages that are written take memory.
#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "emulation.h"
#include "faults.h"
#include "streams.h"

namespace emulation {
namespace {

constexpr std::size_t page = 4096, guard = 1u << 20, grain = 256;
constexpr unsigned char poison_byte = 0xff, mark_byte = 0xc5;

struct Allocation {
  std::byte* pages;  // the readable ones
  std::size_t page_bytes;
  std::size_t bytes;  // asked for
  Where where;
  bool freed;
};

std::map<std::byte*, Allocation> allocations;    // by the address handed out
std::map<std::byte*, std::size_t> arena_blocks;  // live, as of the work that has run
std::size_t in_use = 0;
int open_count = 0;
cudaStream_t arena_stream = nullptr;

bool strict() {
  static const bool value = [] {
    const char* text = std::getenv("WEFT_EMULATION_STRICT");
    return text != nullptr && std::strcmp(text, "0") != 0;
  }();
  return value;
}

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

void map_poison(std::byte* at, std::size_t bytes) {
  constexpr std::size_t chunk = 16u << 20;  // each process writes as much
  static const int file = [] {
    const int f = memfd_create("poison", MFD_CLOEXEC);
    const std::vector<unsigned char> ones(1u << 20, poison_byte);
    for (std::size_t done = 0; f >= 0 && done < chunk; done += ones.size())
      if (write(f, ones.data(), ones.size()) != static_cast<ssize_t>(ones.size())) return -1;
    return f;
  }();
  if (file < 0) die("cannot make a file of poison");
  for (std::size_t done = 0; done < bytes; done += chunk)
    if (mmap(at + done, std::min(chunk, bytes - done), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, 0) == MAP_FAILED)
      die("cannot map %zu bytes of poison", bytes);
}

void protect(const Allocation& a, int access) {
  if (a.where == Where::device && !a.freed) mprotect(a.pages, a.page_bytes, access);
}

void open_memory() {
  if (open_count++ == 0 && strict())
    for (const auto& [p, a] : allocations) protect(a, PROT_READ | PROT_WRITE);
}
void close_memory() {
  if (--open_count == 0 && strict())
    for (const auto& [p, a] : allocations) protect(a, PROT_NONE);
}

cudaError_t allocate(void** p, std::size_t bytes, Where where) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (where == Where::device && device_bytes_in_use() + bytes > device_bytes_in_total())
    return fail(cudaErrorMemoryAllocation);
  const std::size_t rounded = round_up(bytes, grain), page_bytes = round_up(rounded, page);
  void* region = mmap(nullptr, page_bytes + 2 * guard, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  auto* const pages = static_cast<std::byte*>(region) + guard;
  map_poison(pages, page_bytes);
  std::byte* const start = pages + page_bytes - rounded;
  std::memset(pages, mark_byte, static_cast<std::size_t>(start - pages));
  std::memset(start + bytes, mark_byte, rounded - bytes);
  const Allocation a{pages, page_bytes, bytes, where, false};
  allocations[start] = a;
  if (where == Where::device) in_use += rounded;
  if (strict() && open_count == 0) protect(a, PROT_NONE);
  *p = start;
  return cudaSuccess;
}

// The first byte of [from, to) that is not the mark, or null.
const std::byte* damaged(const std::byte* from, const std::byte* to) {
  const auto* at = std::find_if(from, to, [](std::byte b) { return b != std::byte{mark_byte}; });
  return at == to ? nullptr : at;
}

void check(const std::byte* start, const Allocation& a) {
  if (a.freed) return;
  const char* kind = a.where == Where::device ? "device" : "pinned";
  if (const auto* at = damaged(a.pages, start))
    die("a write %td bytes before the start of the %zu bytes of %s memory at %p; last kernels: %s",
        start - at, a.bytes, kind, static_cast<const void*>(start), last_kernels().c_str());
  if (const auto* at = damaged(start + a.bytes, start + round_up(a.bytes, grain)))
    die("a write past the end, at byte %td of the %zu bytes of %s memory at %p; last kernels: %s",
        at - start, a.bytes, kind, static_cast<const void*>(start), last_kernels().c_str());
}

void check_block(const std::byte* p, std::size_t bytes) {
  if (const auto* at = damaged(p + bytes, p + arena_block_bytes(bytes)))
    die("a write past the end, at byte %td of the arena's block of %zu bytes at %p; last kernels: "
        "%s",
        at - p, bytes, static_cast<const void*>(p), last_kernels().c_str());
}

cudaError_t release(void* p, Where where, const char* call) {
  if (p == nullptr) return cudaSuccess;
  if (forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  auto* const start = static_cast<std::byte*>(p);
  const auto found = allocations.find(start);
  if (found == allocations.end() || found->second.where != where || found->second.freed)
    return fail(cudaErrorInvalidValue);
  // CUDA waits for the device before it frees.
  cudaDeviceSynchronize();
  if (gpu_is_lost()) return after_waiting(call);
  Allocation& a = found->second;
  const OpenMemory open;
  check(start, a);
  if (where == Where::device) in_use -= round_up(a.bytes, grain);
  arena_blocks.erase(arena_blocks.lower_bound(start), arena_blocks.lower_bound(start + a.bytes));
  // The addresses are never used again, so that a late access shows.
  a.freed = true;
  mmap(a.pages, a.page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
  return cudaSuccess;
}

}  // namespace

OpenMemory::OpenMemory() { open_memory(); }
OpenMemory::~OpenMemory() { close_memory(); }

HostAccess::HostAccess() {
  const Device device;
  open_memory();
}
HostAccess::~HostAccess() {
  const Device device;
  close_memory();
}

Where where_is(const void* address, std::size_t bytes) {
  const auto* p = static_cast<const std::byte*>(address);
  auto next = allocations.upper_bound(const_cast<std::byte*>(p));
  if (next == allocations.begin()) return Where::elsewhere;
  const auto& [start, a] = *std::prev(next);
  if (p >= start + a.bytes) return Where::elsewhere;
  if (a.freed) die("%p lies in memory that has been freed", address);
  if (p + bytes > start + a.bytes)
    die("%zu bytes from %p run past the end of the %zu bytes at %p", bytes, address, a.bytes,
        static_cast<const void*>(start));
  return a.where;
}

std::string describe_device_address(const void* address) {
  const auto* p = static_cast<const std::byte*>(address);
  for (const auto& [start, a] : allocations) {
    if (p < a.pages - guard || p >= a.pages + a.page_bytes + guard) continue;
    char text[200];
    const char* kind = a.where == Where::device ? "device" : "pinned";
    if (p >= start + a.bytes)
      std::snprintf(text, sizeof text, "%td bytes past the end of the %zu bytes of %s memory at %p",
                    p - start - static_cast<std::ptrdiff_t>(a.bytes), a.bytes, kind,
                    static_cast<const void*>(start));
    else if (p < start)
      std::snprintf(text, sizeof text, "%td bytes before the %zu bytes of %s memory at %p",
                    start - p, a.bytes, kind, static_cast<const void*>(start));
    else
      std::snprintf(text, sizeof text, "byte %td of the %zu bytes of %s memory at %p%s", p - start,
                    a.bytes, kind, static_cast<const void*>(start),
                    a.freed ? ", which has been freed" : "");
    return text;
  }
  return "";
}

namespace {
bool charges() {
  static const bool yes = [] {
    const char* value = std::getenv("WEFT_EMULATION_OVERHEAD");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return yes;
}
}  // namespace

// The context comes with whatever needs one first.
std::size_t device_bytes_in_use() { return in_use + (charges() ? context_bytes : 0); }

bool charge(std::size_t bytes) {
  if (!charges()) return true;
  if (device_bytes_in_use() + bytes > device_bytes_in_total()) return false;
  in_use += bytes;
  return true;
}
void give_back(std::size_t bytes) {
  if (charges()) in_use -= bytes;
}

std::size_t device_bytes_in_total() {
  const char* gib = std::getenv("WEFT_EMULATION_MEMORY_GIB");
  return static_cast<std::size_t>((gib == nullptr ? 8.0 : std::atof(gib)) * (1u << 30));
}

void check_all_marks() {
  const OpenMemory open;
  for (const auto& [start, a] : allocations) check(start, a);
  for (const auto& [p, bytes] : arena_blocks) check_block(p, bytes);
}
void check_marks() {
  const Device device;
  check_all_marks();
}

void poison(void* p, std::size_t bytes) {
  const Device device;
  const OpenMemory open;
  std::memset(p, poison_byte, bytes);
}

std::size_t arena_block_bytes(std::size_t bytes) {
  return round_up(std::max<std::size_t>(bytes, 1), grain) + grain;
}

void set_arena_stream(cudaStream_t stream) {
  const Device device;
  arena_stream = stream;
}

void arena_block(void* address, std::size_t bytes, bool allocated) {
  const Device device;
  auto* const p = static_cast<std::byte*>(address);
  if (where_is(p, arena_block_bytes(bytes)) != Where::device)
    die("an arena's block of %zu bytes at %p is not device memory", bytes, address);
  const auto run = [p, bytes, allocated] {
    if (allocated) {
      std::memset(p + bytes, mark_byte, arena_block_bytes(bytes) - bytes);
      arena_blocks[p] = bytes;
      return;
    }
    // A graph that is run again gives back what an earlier run gave back.
    const auto found = arena_blocks.find(p);
    if (found != arena_blocks.end() && found->second == bytes) {
      check_block(p, bytes);
      arena_blocks.erase(found);
    }
    std::memset(p, poison_byte, arena_block_bytes(bytes));
  };
  const cudaStream_t stream = arena_stream != nullptr ? arena_stream : first_stream();
  if (stream == nullptr) {
    const OpenMemory open;
    run();
  } else {
    enqueue(stream, simple("an arena's block", run));
  }
}

}  // namespace emulation

using emulation::Device;
using emulation::fail;
using emulation::Where;

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  BEGIN_CALL(__func__);
  emulation::catch_faults();
  if (emulation::forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  return emulation::allocate(p, bytes, Where::device);
}
cudaError_t cudaFree(void* p) {
  BEGIN_CALL(__func__);
  return emulation::release(p, Where::device, __func__);
}
cudaError_t cudaHostAlloc(void** p, std::size_t bytes, unsigned) {
  BEGIN_CALL(__func__);
  if (emulation::forbidden_by_capture()) return fail(cudaErrorStreamCaptureUnsupported);
  return emulation::allocate(p, bytes, Where::pinned);
}
cudaError_t cudaMallocHost(void** p, std::size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaFreeHost(void* p) {
  BEGIN_CALL(__func__);
  return emulation::release(p, Where::pinned, __func__);
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  BEGIN_CALL(__func__);
  *total = emulation::device_bytes_in_total();
  *free = *total - emulation::device_bytes_in_use();
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  BEGIN_CALL(__func__);
  const Where w = emulation::where_is(p, 0);
  a->type = w == Where::device   ? cudaMemoryTypeDevice
            : w == Where::pinned ? cudaMemoryTypeHost
                                 : cudaMemoryTypeUnregistered;
  a->device = 0;
  a->devicePointer = w == Where::device ? const_cast<void*>(p) : nullptr;
  a->hostPointer = w == Where::device ? nullptr : const_cast<void*>(p);
  return cudaSuccess;
}
