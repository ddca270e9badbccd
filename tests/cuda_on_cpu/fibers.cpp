// Threads as fibers. Which one goes on is chosen so that a missing barrier shows: each warp runs as
// far ahead of the others as barriers let it, in an order of warps drawn anew at each barrier, and
// its lanes in an order drawn for each block. Nothing is ever switched in between barriers and warp
// functions.
#include "fibers.h"

#include <sys/mman.h>

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <cstring>
#include <numeric>
#include <vector>

#include "async_copy.h"
#include "faults.h"
#include "hopper.h"
#include "random.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr std::size_t page = 4096, stack_bytes = 64 * 1024, most_threads = 1024;
constexpr std::size_t shared_limit = 228 * 1024;
constexpr std::uint32_t shared_poison = 0x7fa17fa1;  // a signalling NaN, in f32 and in bf16
constexpr std::uint32_t shared_mark = 0xbadc0de5;

// Where a thread is that does not run and is not ready.
enum class State { unknown, at_barrier, in_warp_function, ended };

struct Warp;

struct Thread {
  fcontext_t context = nullptr;
  uint3 index{};
  State state = State::unknown;
  Warp* in = nullptr;
  int warp = 0, lane = 0;
  const char* function = "";  // the warp function it waits in
  unsigned function_mask = 0;
  AsyncCopies copies;
};

// A warp function on its way. Lanes that diverged may be in different ones.
struct Pending {
  unsigned arrived = 0;
  Combine combine = nullptr;
  const char* what = "";
  void* lanes[32] = {};
};

struct Warp {
  unsigned exists = 0, ended = 0;
  unsigned ready = 0;  // by position in `order`
  std::uint8_t order[32] = {}, position[32] = {};
  unsigned masks[8] = {};  // 0: the place is vacant
  Pending pending[8];
};

struct Block {
  const Kernel* kernel = nullptr;
  Thread threads[most_threads];
  Warp warps[most_threads / 32];
  std::vector<int> warp_order;
  int count = 0, warp_count = 0, at_barrier = 0, ended = 0, votes = 0, result = 0;
  Vote vote = Vote::none;
  Thread* running = nullptr;
  fcontext_t main = nullptr;
  std::byte *stacks = nullptr, *shared_end = nullptr, *shared = nullptr;
};

Block block;
int idle_turns = 0;  // of threads that wait in yield(), since anything happened

// Memory that faults from `p` + bytes on.
std::byte* map_guarded(std::size_t bytes) {
  void* p = mmap(nullptr, bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED ||
      mprotect(static_cast<std::byte*>(p) + page, bytes, PROT_READ | PROT_WRITE) != 0)
    die("no memory for stacks and shared memory");
  return static_cast<std::byte*>(p) + page;
}

void map_once() {
  if (block.stacks != nullptr) return;
  block.shared_end = map_guarded(shared_limit) + shared_limit;
  block.stacks = map_guarded(most_threads * (stack_bytes + page)) - page;
  for (std::size_t i = 0; i < most_threads; ++i)
    mprotect(block.stacks + i * (stack_bytes + page), page, PROT_NONE);
}

std::byte* stack_top(std::size_t i) { return block.stacks + (i + 1) * (stack_bytes + page); }
// Where a stack begins. Lanes use the same few lines of their stacks, which must not all fall into
// one set of the cache.
std::byte* stack_start(std::size_t i) { return stack_top(i) - i % 32 * 128; }

[[noreturn]] void die_of_deadlock();

Thread* next_ready() {
  // The running thread's warp first, then by order.
  const auto take = [](Warp& w, int number) -> Thread* {
    const int lane = w.order[std::countr_zero(w.ready)];
    w.ready &= w.ready - 1;
    return &block.threads[number * 32 + lane];
  };
  if (block.running != nullptr) {
    Warp& mine = *block.running->in;
    if (mine.ready != 0) return take(mine, block.running->warp);
  }
  for (const int number : block.warp_order) {
    Warp& w = block.warps[number];
    if (w.ready != 0) return take(w, number);
  }
  return nullptr;
}

void arrive(const transfer_t& from) {
  if (from.data != nullptr) *static_cast<fcontext_t*>(from.data) = from.fctx;
}

// Goes on with another thread; returns when the running one is chosen again.
void switch_away() {
  Thread* self = block.running;
  Thread* next = next_ready();
  if (next == nullptr) die_of_deadlock();
  if (next == self) return;
  block.running = next;
  threadIdx = next->index;
  arrive(jump_fcontext(next->context, &self->context));
}

void thread_main(transfer_t from) {
  arrive(from);
  block.kernel->body();
  Thread* self = block.running;
  self->state = State::ended;
  self->copies.clear();
  self->in->ended |= 1u << self->lane;
  ++block.ended;
  Thread* next = next_ready();
  if (next == nullptr && block.ended < block.count) die_of_deadlock();
  block.running = next;
  if (next != nullptr) {
    threadIdx = next->index;
    jump_fcontext(next->context, nullptr);
  }
  jump_fcontext(block.main, nullptr);
}

std::string text(const uint3& i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

void die_of_deadlock() {
  std::string what;
  const auto list = [&](State state, const char* meaning) {
    int n = 0;
    for (int i = 0; i < block.count; ++i) {
      const Thread& t = block.threads[i];
      if (t.state != state) continue;
      if (n++ == 0) what += std::string(what.empty() ? "" : "; ") + meaning;
      if (n > 4) continue;
      what += " " + text(t.index);
      if (state == State::in_warp_function) {
        char mask[40];
        std::snprintf(mask, sizeof mask, " in %.20s %08x", t.function, t.function_mask);
        what += mask;
      }
    }
    if (n > 4) what += " and " + std::to_string(n - 4) + " more";
  };
  list(State::at_barrier, "waiting at __syncthreads:");
  list(State::in_warp_function, "waiting for lanes of their mask:");
  list(State::ended, "ended:");
  block.running = nullptr;
  die("not all threads reach the same barrier or warp function: %s", what.c_str());
}

void release_barrier() {
  block.at_barrier = 0;
  block.result = block.vote == Vote::all   ? block.votes == block.count
                 : block.vote == Vote::any ? block.votes != 0
                                           : block.votes;
  block.votes = 0;
  shuffle_order(block.warp_order.data(), block.warp_count);
  for (int i = 0; i < block.warp_count; ++i) block.warps[i].ready = block.warps[i].exists;
}

void prepare_warps() {
  for (int i = 0; i < block.warp_count; ++i) {
    Warp& w = block.warps[i];
    const int lanes = std::min(32, block.count - 32 * i);
    w.exists = lanes == 32 ? ~0u : (1u << lanes) - 1;
    w.ended = 0;
    for (int l = 0; l < 32; ++l) w.order[l] = static_cast<std::uint8_t>(l);
    // Sometimes the plain order: what only works in a shuffled one is a fault as well.
    if (random_below(8) != 0) shuffle_order(w.order, lanes);
    for (int l = 0; l < 32; ++l) w.position[w.order[l]] = static_cast<std::uint8_t>(l);
    w.ready = w.exists;
    std::fill(std::begin(w.masks), std::end(w.masks), 0u);
  }
  block.warp_order.resize(block.warp_count);
  std::iota(block.warp_order.begin(), block.warp_order.end(), 0);
  shuffle_order(block.warp_order.data(), block.warp_count);
}

void run_block() {
  const std::size_t bytes = block.kernel->shared;
  std::byte* const marks = block.shared + (bytes + 15) / 16 * 16;
  std::fill(reinterpret_cast<std::uint32_t*>(block.shared), reinterpret_cast<std::uint32_t*>(marks),
            shared_poison);
  std::fill(reinterpret_cast<std::uint32_t*>(marks),
            reinterpret_cast<std::uint32_t*>(block.shared_end), shared_mark);
  block.at_barrier = block.ended = block.votes = 0;
  block.running = nullptr;
  prepare_warps();
  for (int i = 0; i < block.count; ++i) {
    Thread& t = block.threads[i];
    t.state = State::unknown;
    t.context =
        make_fcontext(stack_start(static_cast<std::size_t>(i)), stack_bytes - page, thread_main);
  }
  block.running = next_ready();
  threadIdx = block.running->index;
  jump_fcontext(block.running->context, &block.main);
  for (auto* p = reinterpret_cast<std::uint32_t*>(marks);
       p < reinterpret_cast<std::uint32_t*>(block.shared_end); ++p)
    if (*p != shared_mark)
      die("a block wrote past the end of its %zu bytes of shared memory, at byte %zd", bytes,
          reinterpret_cast<std::byte*>(p) - block.shared);
  end_hopper_block();
}

}  // namespace

void run_kernel(const Kernel& kernel) {
  map_once();
  block.kernel = &kernel;
  block.count = static_cast<int>(kernel.block.x * kernel.block.y * kernel.block.z);
  block.warp_count = (block.count + 31) / 32;
  block.shared = block.shared_end - (kernel.shared + 1023) / 1024 * 1024;
  blockDim = kernel.block;
  gridDim = kernel.grid;
  for (int i = 0; i < block.count; ++i) {
    Thread& t = block.threads[i];
    const unsigned n = static_cast<unsigned>(i);
    t.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
    t.warp = i / 32;
    t.in = &block.warps[t.warp];
    t.lane = i % 32;
  }
  const std::uint64_t blocks = std::uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  for (Permutation order(blocks); order.more();) {
    const std::uint64_t b = order.next();
    blockIdx = {static_cast<unsigned>(b % gridDim.x),
                static_cast<unsigned>(b / gridDim.x % gridDim.y),
                static_cast<unsigned>(b / gridDim.x / gridDim.y)};
    run_block();
  }
  end_hopper_kernel();
  block.kernel = nullptr;
}

void collective(unsigned mask, const char* what, Combine combine, void* lane_data) {
  Thread& self = *block.running;
  Warp& w = *self.in;
  const unsigned me = 1u << self.lane;
  if ((mask & me) == 0) die("%s by lane %d, which its mask %08x leaves out", what, self.lane, mask);
  if ((mask & ~w.exists) != 0)
    die("%s with mask %08x names lanes that the block does not have", what, mask);
  if ((mask & w.ended) != 0)
    die("%s with mask %08x names lanes %08x that have ended", what, mask, mask & w.ended);
  int place = -1, vacant = -1;
  for (int i = 0; i < 8 && place < 0; ++i) {
    if (w.masks[i] == mask) place = i;
    if (w.masks[i] == 0 && vacant < 0) vacant = i;
  }
  const bool first = place < 0;
  if (first) {
    if (vacant < 0) die("more than 8 different masks at once in one warp");
    place = vacant;
    w.masks[place] = mask;
  }
  Pending* const slot = &w.pending[place];
  if (first) {
    *slot = {0, combine, what, {}};
  } else if (slot->combine != combine) {
    die("lane %d is in %s while others of mask %08x are in %s", self.lane, what, mask, slot->what);
  }
  slot->arrived |= me;
  slot->lanes[self.lane] = lane_data;
  if (slot->arrived != mask) {
    self.state = State::in_warp_function;
    self.function = what;
    self.function_mask = mask;
    switch_away();
    return;
  }
  combine(slot->lanes, mask);
  w.masks[place] = 0;
  if (mask == ~0u) {
    w.ready = ~(1u << w.position[self.lane]);
  } else {
    for (unsigned rest = mask & ~me; rest != 0; rest &= rest - 1)
      w.ready |= 1u << w.position[std::countr_zero(rest)];
  }
}

int barrier(Vote vote, int predicate) {
  Thread& self = *block.running;
  if (block.at_barrier > 0 && block.vote != vote)
    die("threads are at different kinds of __syncthreads at once");
  block.vote = vote;
  block.votes += predicate != 0;
  self.state = State::at_barrier;
  ++block.at_barrier;
  if (block.at_barrier == block.count) {
    release_barrier();
    block.running = nullptr;  // the last to come is not the first to go on
  }
  Thread* next = next_ready();
  if (next == nullptr) die_of_deadlock();
  block.running = next;
  if (next != &self) {
    threadIdx = next->index;
    arrive(jump_fcontext(next->context, &self.context));
  }
  return block.result;
}

void made_progress() { idle_turns = 0; }

void yield(const char* what) {
  advance_bulk_copies();
  if (++idle_turns > 1000 * block.count) die("every thread waits for ever, this one for %s", what);
  Thread* self = block.running;
  self->in->ready |= 1u << self->in->position[self->lane];
  Warp* warps[most_threads / 32];
  std::uint64_t n = 0;
  for (int i = 0; i < block.warp_count; ++i)
    if (block.warps[i].ready != 0) warps[n++] = &block.warps[i];
  Warp& w = *warps[random_below(n)];
  unsigned candidates = w.ready;
  for (std::uint64_t skip = random_below(static_cast<std::uint64_t>(std::popcount(w.ready)));
       skip > 0; --skip)
    candidates &= candidates - 1;
  const int position = std::countr_zero(candidates);
  w.ready &= ~(1u << position);
  Thread* next = &block.threads[(&w - block.warps) * 32 + w.order[position]];
  if (next == self) return;
  block.running = next;
  threadIdx = next->index;
  arrive(jump_fcontext(next->context, &self->context));
}

unsigned lane() { return static_cast<unsigned>(block.running->lane); }
unsigned live_lanes() {
  const Warp& w = *block.running->in;
  return w.exists & ~w.ended;
}
void* shared_base() { return block.shared; }
std::size_t shared_bytes() { return block.kernel->shared; }
AsyncCopies& async_copies() { return block.running->copies; }
const void* running_kernel() { return block.kernel == nullptr ? nullptr : block.kernel->address; }

std::string where() {
  if (block.kernel == nullptr) return "";
  std::string s = ", in kernel " + name_of(block.kernel->address) + " block " + text(blockIdx);
  if (block.running != nullptr) s += " thread " + text(block.running->index);
  return s;
}

const char* describe_fiber_memory(const void* address) {
  const auto* p = static_cast<const std::byte*>(address);
  if (block.stacks == nullptr) return nullptr;
  if (p >= block.stacks && p < stack_top(most_threads - 1))
    return "the stack of a thread, which is full at 64 KiB";
  if (p >= block.shared_end - shared_limit - page && p < block.shared_end + page)
    return "beyond the block's shared memory";
  return nullptr;
}

}  // namespace emulation
