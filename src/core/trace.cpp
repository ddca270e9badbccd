#include "core/trace.h"

#include <algorithm>
#include <mutex>

namespace weft::trace {

std::atomic<bool> enabled{false};

namespace {

// One lock for all threads of a rank suffices: some hundred spans a step, each holding it for one
// copy.
struct Ring {
  std::mutex lock;
  std::vector<Span> spans;
  std::size_t room = 0, next = 0;  // `next` is the oldest once the ring is full
};

Ring& ring() {
  static Ring r;
  return r;
}

}  // namespace

void start(std::size_t room) {
  Ring& r = ring();
  const std::scoped_lock hold(r.lock);
  r.spans.clear();
  r.spans.reserve(room);  // here, not in the middle of a step
  r.room = room;
  r.next = 0;
  enabled = room > 0;
}

void stop() { enabled = false; }

void add(const Span& span) {
  if (!enabled.load(std::memory_order_relaxed)) return;
  Ring& r = ring();
  const std::scoped_lock hold(r.lock);
  if (r.spans.size() < r.room) {
    r.spans.push_back(span);
  } else {
    r.spans[r.next] = span;
    r.next = (r.next + 1) % r.room;
  }
}

std::vector<Span> spans() {
  Ring& r = ring();
  std::vector<Span> copy;
  {
    const std::scoped_lock hold(r.lock);
    copy = r.spans;
  }
  std::stable_sort(copy.begin(), copy.end(),
                   [](const Span& a, const Span& b) { return a.end < b.end; });
  return copy;
}

}  // namespace weft::trace
