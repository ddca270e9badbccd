// Votes, reductions, matrix products and asynchronous copies: what a warp or a thread does beyond
// plain C++.
#include <cstring>

#include "async_copy.h"
#include "emulated_ptx.h"
#include "fibers.h"
#include "random.h"

namespace {

struct Vote {
  unsigned value, result;
};

template <class T, class F>
T reduce(unsigned mask, const char* what, T value, F) {
  struct Part {
    T value, result;
  } part{value, value};
  emulation::collective(
      mask, what,
      [](void* const* lanes, unsigned of) {
        bool first = true;
        T total{};
        for (int i = 0; i < 32; ++i)
          if (of >> i & 1) {
            const T v = static_cast<Part*>(lanes[i])->value;
            total = first ? v : F{}(total, v);
            first = false;
          }
        for (int i = 0; i < 32; ++i)
          if (of >> i & 1) static_cast<Part*>(lanes[i])->result = total;
      },
      &part);
  return part.result;
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

}  // namespace

unsigned __ballot_sync(unsigned mask, int predicate) {
  Vote vote{predicate != 0, 0};
  emulation::collective(
      mask, "a vote",
      [](void* const* lanes, unsigned of) {
        unsigned all = 0;
        for (int i = 0; i < 32; ++i)
          if (of >> i & 1) all |= static_cast<Vote*>(lanes[i])->value << i;
        for (int i = 0; i < 32; ++i)
          if (of >> i & 1) static_cast<Vote*>(lanes[i])->result = all;
      },
      &vote);
  return vote.result;
}

unsigned __match_any_sync(unsigned mask, unsigned value) {
  Vote vote{value, 0};
  emulation::collective(
      mask, "__match_any_sync",
      [](void* const* lanes, unsigned of) {
        for (int i = 0; i < 32; ++i) {
          if ((of >> i & 1) == 0) continue;
          auto* mine = static_cast<Vote*>(lanes[i]);
          for (int j = 0; j < 32; ++j)
            if ((of >> j & 1) && static_cast<Vote*>(lanes[j])->value == mine->value)
              mine->result |= 1u << j;
        }
      },
      &vote);
  return vote.result;
}

unsigned __reduce_add_sync(unsigned m, unsigned v) {
  return reduce(m, "__reduce_add_sync", v, Add{});
}
unsigned __reduce_max_sync(unsigned m, unsigned v) {
  return reduce(m, "__reduce_max_sync", v, Max{});
}
unsigned __reduce_min_sync(unsigned m, unsigned v) {
  return reduce(m, "__reduce_min_sync", v, Min{});
}
int __reduce_add_sync(unsigned m, int v) { return reduce(m, "__reduce_add_sync", v, Add{}); }
int __reduce_max_sync(unsigned m, int v) { return reduce(m, "__reduce_max_sync", v, Max{}); }
int __reduce_min_sync(unsigned m, int v) { return reduce(m, "__reduce_min_sync", v, Min{}); }

unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(both >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign, spread
    result |= byte << (8 * i);
  }
  return result;
}

namespace emulation {
namespace {

float low(std::uint32_t pair) { return from_bf16(static_cast<std::uint16_t>(pair)); }
float high(std::uint32_t pair) { return from_bf16(static_cast<std::uint16_t>(pair >> 16)); }

struct MmaPart {
  float* d;
  const std::uint32_t *a, *b;
};

void multiply(void* const* lanes, unsigned) {
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto* part = static_cast<const MmaPart*>(lanes[l]);
    const int group = l / 4, pair = l % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = group + i % 2 * 8, column = 2 * pair + i / 2 * 8;
      a[row][column] = low(part->a[i]);
      a[row][column + 1] = high(part->a[i]);
    }
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * pair + i * 8;
      b[row][group] = low(part->b[i]);
      b[row + 1][group] = high(part->b[i]);
    }
  }
  for (int l = 0; l < 32; ++l) {
    float* d = static_cast<const MmaPart*>(lanes[l])->d;
    const int group = l / 4, pair = l % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = group + i / 2 * 8, column = 2 * pair + i % 2;
      float sum = d[i];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      d[i] = sum;
    }
  }
}

struct LoadPart {
  std::uint32_t* r;
  const std::uint16_t* row;
};

template <int matrices, bool transposed>
void load(void* const* lanes, unsigned) {
  for (int m = 0; m < matrices; ++m) {
    std::uint16_t tile[8][8];
    for (int row = 0; row < 8; ++row)
      std::memcpy(tile[row], static_cast<const LoadPart*>(lanes[8 * m + row])->row, 16);
    for (int l = 0; l < 32; ++l) {
      const int row = l / 4, column = 2 * (l % 4);
      const std::uint32_t first = transposed ? tile[column][row] : tile[row][column];
      const std::uint32_t second = transposed ? tile[column + 1][row] : tile[row][column + 1];
      static_cast<const LoadPart*>(lanes[l])->r[m] = first | second << 16;
    }
  }
}

// Is [p, p + bytes) in the block's shared memory, and aligned?
void check_shared(const void* p, std::size_t bytes, std::size_t alignment, const char* what) {
  const auto offset =
      static_cast<const std::byte*>(p) - static_cast<const std::byte*>(shared_base());
  if (offset < 0 || static_cast<std::size_t>(offset) + bytes > (shared_bytes() + 15) / 16 * 16)
    die("%s at %p is not in the block's shared memory (byte %td of %zu)", what, p, offset,
        shared_bytes());
  if (static_cast<std::size_t>(offset) % alignment != 0)
    die("%s at byte %td of shared memory, not a multiple of %zu", what, offset, alignment);
}

void perform(const AsyncCopies::Copy& copy) {
  const auto bytes = static_cast<std::size_t>(copy.bytes);
  if (copy.from == nullptr)
    std::memset(copy.to, 0, bytes);
  else
    std::memcpy(copy.to, copy.from, bytes);
}

}  // namespace

void mma_16x8x16(float* d, const std::uint32_t* a, const std::uint32_t* b) {
  MmaPart part{d, a, b};
  collective(0xffffffffu, "mma_16x8x16", multiply, &part);
}

void ldmatrix(std::uint32_t* r, const void* row, int matrices, bool transposed) {
  // Of two matrices, the rows of lanes 16 .. 31 are not looked at.
  if (matrices == 4 || lane() < 16) check_shared(row, 16, 16, "a row of ldmatrix");
  LoadPart part{r, static_cast<const std::uint16_t*>(row)};
  const Combine combine = matrices == 4 ? (transposed ? load<4, true> : load<4, false>)
                                        : (transposed ? load<2, true> : load<2, false>);
  collective(0xffffffffu, matrices == 4 ? "ldmatrix_x4" : "ldmatrix_x2", combine, &part);
}

void cp_async(void* shared, const void* global, int bytes, bool valid) {
  check_shared(shared, static_cast<std::size_t>(bytes), static_cast<std::size_t>(bytes),
               "cp.async");
  if (valid && reinterpret_cast<std::uintptr_t>(global) % static_cast<std::uintptr_t>(bytes) != 0)
    die("cp.async from %p, which is not a multiple of %d", global, bytes);
  AsyncCopies& mine = async_copies();
  const AsyncCopies::Copy copy{shared, valid ? global : nullptr, bytes};
  ++mine.open;
  // The hardware may copy at once or as late as the wait: either shows another fault.
  if (random_below(2) == 0) {
    perform(copy);
    mine.copies.push_back({nullptr, nullptr, 0});
  } else {
    mine.copies.push_back(copy);
  }
}

void cp_async_commit() {
  AsyncCopies& mine = async_copies();
  mine.groups.push_back(mine.open);
  mine.open = 0;
}

void cp_async_wait(int pending) {
  AsyncCopies& mine = async_copies();
  if (static_cast<std::size_t>(pending) >= mine.groups.size()) return;
  const std::size_t finish = mine.groups.size() - static_cast<std::size_t>(pending);
  std::size_t count = 0;
  for (std::size_t g = 0; g < finish; ++g) count += mine.groups[g];
  for (std::size_t i = 0; i < count; ++i)
    if (mine.copies[i].to != nullptr) perform(mine.copies[i]);
  mine.copies.erase(mine.copies.begin(), mine.copies.begin() + static_cast<std::ptrdiff_t>(count));
  mine.groups.erase(mine.groups.begin(), mine.groups.begin() + static_cast<std::ptrdiff_t>(finish));
}

}  // namespace emulation
