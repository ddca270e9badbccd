// A ring of slots. The consumer's thread plans a micro-batch into every free slot; readers take
// single clips from the oldest slot that has any left, so that several of them share the work on
// the micro-batch that is needed next. Everything waits on condition variables; nothing polls.
#include "data/prefetch.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

// Memory in whole pages, faulted in once: a slot is rewritten throughout the run.
class Pages {
 public:
  Pages() = default;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { release(); }

  void grow(std::size_t bytes) {
    if (bytes <= bytes_) return;
    release();
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    WEFT_CHECK(p != MAP_FAILED, Exit::memory, "lower data.prefetch or train.batch_size",
               "no memory for a prefetch slot of {} bytes", bytes);
    data_ = static_cast<std::byte*>(p);
    bytes_ = bytes;
    madvise(p, bytes, MADV_HUGEPAGE);  // fewer TLB misses; no harm where it is refused
  }
  std::byte* data() { return data_; }

 private:
  void release() {
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

struct Slot {
  Pages pages;
  LoadedBatch batch;
  std::size_t clip_bytes = 0;
  std::size_t taken = 0;  // clips that readers have begun
  std::size_t left = 0;   // clips not finished yet
  std::exception_ptr error;
};

}  // namespace

struct Prefetcher::State {
  const ClipSource& source;
  std::function<Work(std::int64_t)> next_work;
  std::int64_t step, last_step;                    // next step to plan; end (exclusive)
  std::int64_t begun, horizon;                     // nothing is planned after begun + horizon
  std::deque<std::pair<int, MicroBatch>> planned;  // of `step - 1`, not in a slot yet
  std::size_t most_clips = 0;                      // in a micro-batch so far
  std::size_t largest_clip = 0;                    // bytes, over all buckets
  double max_damaged;
  std::set<std::pair<int, std::int64_t>> damaged;  // (bucket, clip), met here

  std::deque<Slot> slots;
  // Slots are filled and delivered in turn: these count micro-batches since the start.
  std::size_t head = 0;  // next to deliver
  std::size_t tail = 0;  // next to plan
  bool delivered = false;

  std::mutex mutex;
  std::condition_variable work_ready, batch_ready;
  std::size_t reading = 0;  // first micro-batch with clips that no reader has begun
  bool stop = false;
  std::vector<std::thread> readers;

  State(const ClipSource& s, std::function<Work(std::int64_t)> w, std::int64_t first,
        std::int64_t last, std::int64_t ahead, double most_damaged)
      : source(s),
        next_work(std::move(w)),
        step(first),
        last_step(last),
        begun(first),
        horizon(ahead),
        max_damaged(most_damaged) {
    for (const Bucket& b : source.buckets()) largest_clip = std::max(largest_clip, b.clip_bytes());
  }

  Slot& slot(std::size_t count) { return slots[count % slots.size()]; }

  // Fills free slots. Runs on the consumer's thread only, and plans outside the lock.
  void plan() {
    while (tail - head < slots.size()) {
      while (planned.empty() && step < last_step && step <= begun + horizon) {
        for (auto& item : next_work(step)) planned.push_back(std::move(item));
        ++step;
      }
      if (planned.empty()) return;
      auto [index, what] = std::move(planned.front());
      planned.pop_front();
      WEFT_ASSERT(!what.clips.empty());

      // No reader touches this slot before `tail` passes it, so it is filled without the lock.
      Slot& s = slot(tail);
      most_clips = std::max(most_clips, what.clips.size());
      // Large enough for any bucket, so that a slot is not reallocated when buckets alternate.
      s.pages.grow(most_clips * largest_clip);
      const Bucket& bucket = source.buckets()[what.bucket];
      s.clip_bytes = source.clip_bytes(what);
      s.taken = 0;
      s.left = what.clips.size();
      s.error = nullptr;
      s.batch.step = step - 1;
      s.batch.index = index;
      s.batch.bytes = {s.pages.data(), what.clips.size() * s.clip_bytes};
      s.batch.text.assign(bucket.text_channels > 0 ? what.clips.size() : 0, {});
      s.batch.info.clear();
      for (const std::int64_t clip : what.clips)
        s.batch.info.push_back(source.info(what.bucket, clip));
      s.batch.what = std::move(what);
      {
        std::lock_guard lock(mutex);
        ++tail;
      }
      work_ready.notify_all();
    }
  }

  // Reads a clip, or if it is damaged the next whole one of its bucket. Damage is permanent, so
  // every run, restart and rank substitutes the same clip.
  void read_clip(Slot& s, std::size_t clip) {
    MicroBatch& what = s.batch.what;
    const std::int64_t clips = source.buckets()[what.bucket].clips;
    for (std::int64_t tries = 0;; ++tries) {
      const std::int64_t index = what.clips[clip];
      try {
        source.read_sample(what, clip, {s.pages.data() + clip * s.clip_bytes, s.clip_bytes});
        if (!s.batch.text.empty()) s.batch.text[clip] = source.read_text(what.bucket, index);
        if (tries > 0) s.batch.info[clip] = source.info(what.bucket, index);
        return;
      } catch (const DamagedClip& e) {
        note_damage(what.bucket, index, e);
        if (tries + 1 == clips) throw;
      }
      source.take_next(what, clip);
    }
  }

  // Throws if there are too many damaged clips.
  void note_damage(int bucket, std::int64_t index, const DamagedClip& e) {
    std::size_t found = 0;
    {
      std::lock_guard lock(mutex);
      if (!damaged.emplace(bucket, index).second) return;
      found = damaged.size();
    }
    std::int64_t clips = 0;
    for (const Bucket& b : source.buckets()) clips += b.clips;
    if (static_cast<double>(found) > max_damaged * static_cast<double>(clips)) {
      if (max_damaged == 0) throw e;
      throw DamagedClip(Exit::data,
                        fmt::format("{}; this rank has met {} damaged clips of {}, and "
                                    "data.max_damaged = {}",
                                    e.what(), found, clips, max_damaged),
                        e.hint(), e.file(), e.line());
    }
    log::warn("{}: the next intact clip of the bucket replaces it", e.what());
  }

  void read_clips() {
    // Stop signals are handled by the main thread.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);

    std::unique_lock lock(mutex);
    for (;;) {
      work_ready.wait(lock, [&] { return stop || reading < tail; });
      if (stop) return;
      Slot& s = slot(reading);
      const std::size_t clip = s.taken++;
      if (s.taken == s.batch.what.clips.size()) ++reading;
      lock.unlock();
      // An error is kept in its slot: the batches before it are still good and are delivered first.
      std::exception_ptr error;
      try {
        read_clip(s, clip);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error && !s.error) s.error = error;
      // Only the consumer waits for this.
      if (--s.left == 0) batch_ready.notify_one();
    }
  }
};

Prefetcher::Prefetcher(const ClipSource& source, std::function<Work(std::int64_t step)> next_work,
                       std::int64_t first_step, std::int64_t last_step, int slots, int readers,
                       std::int64_t horizon, double max_damaged)
    : state_(std::make_unique<State>(source, std::move(next_work), first_step, last_step, horizon,
                                     max_damaged)) {
  WEFT_ASSERT(horizon >= 0);
  WEFT_CHECK(slots >= 1, Exit::usage, "set data.prefetch to 1 or more (4 is a good value)",
             "a prefetch ring of {} slots", slots);
  WEFT_CHECK(readers >= 1, Exit::usage, "set data.readers to 1 or more, or 0 to let weft choose",
             "{} prefetch readers", readers);
  state_->slots.resize(slots);
  state_->plan();
  for (int i = 0; i < readers; ++i)
    state_->readers.emplace_back([s = state_.get()] { s->read_clips(); });
}

Prefetcher::~Prefetcher() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->work_ready.notify_all();
  for (std::thread& t : state_->readers) t.join();
}

void Prefetcher::begin_step(std::int64_t step) {
  WEFT_ASSERT(step >= state_->begun);
  state_->begun = step;
  state_->plan();
}

const LoadedBatch& Prefetcher::next() {
  State& s = *state_;
  const auto begin = std::chrono::steady_clock::now();
  if (s.delivered) {
    ++s.head;  // the caller has finished with the last one: its slot is free
    s.delivered = false;
    s.plan();
  }
  WEFT_ASSERT(s.head <
              s.tail);  // asked for more micro-batches than last_step or the horizon allows
  Slot& slot = s.slot(s.head);
  {
    std::unique_lock lock(s.mutex);
    s.batch_ready.wait(lock, [&] { return slot.left == 0; });
  }
  // The slot stays at the head, so that calling again reports the same error.
  if (slot.error) std::rethrow_exception(slot.error);
  s.delivered = true;
  slot.batch.waited_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return slot.batch;
}

int Prefetcher::default_readers(int threads) {
  // One reader keeps several compute cores supplied; more than four gain nothing.
  return std::clamp(threads / 4, 1, 4);
}

}  // namespace weft
