#include "bench/bench.h"

#include <sys/mman.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/prefetch.h"

namespace weft {
namespace {

constexpr int repeats = 7;  // of which the first is not counted
constexpr int batch = 2;    // clips a micro-batch
constexpr int slots = 4;    // as data.prefetch

using Clock = std::chrono::steady_clock;
double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Clip {
  int bucket;
  std::int64_t index;
};

// Memory as the prefetcher's slots have it, so that both sides pay the same for it.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    WEFT_CHECK(p != MAP_FAILED, Exit::memory, "free some memory", "no memory for {} bytes", bytes);
    madvise(p, bytes, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(p);
  }
  ~Buffer() { munmap(data_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* data() { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// Micro-batches of the whole store in order, one a step.
std::vector<MicroBatch> in_order(const std::vector<Bucket>& buckets) {
  std::vector<MicroBatch> out;
  SampleId sample = 0;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::int64_t i = 0; i < buckets[b].clips; ++i, ++sample) {
      if (i % batch == 0) {
        out.emplace_back();
        out.back().bucket = static_cast<int>(b);
      }
      out.back().clips.push_back(i);
      out.back().samples.push_back(sample);
    }
  }
  return out;
}

}  // namespace

int bench_read(const std::string& store, int readers, bool json) {
  if (readers <= 0)
    readers = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 4);
  const auto verified = open_clip_source(store, true);
  const auto plain = open_clip_source(store, false);
  const auto& buckets = plain->buckets();
  const std::vector<MicroBatch> work = in_order(buckets);

  std::vector<Clip> clips;
  std::vector<std::uint64_t> hashes;  // of the plain reads
  std::size_t largest = 0, bytes = 0;
  for (const MicroBatch& m : work) {
    const std::size_t size = buckets[m.bucket].clip_bytes();
    for (const std::int64_t i : m.clips) {
      clips.push_back({m.bucket, i});
      bytes += size;
    }
    largest = std::max(largest, size);
  }
  hashes.resize(clips.size());

  // Plain reads: the same clips, the same number of threads, nothing checked.
  const std::size_t ring = static_cast<std::size_t>(slots * batch);
  Buffer buffer(ring * largest);
  const auto read_plain = [&](bool keep_hashes) {
    std::atomic<std::size_t> next = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < readers; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = next++; i < clips.size(); i = next++) {
          const std::size_t size = buckets[clips[i].bucket].clip_bytes();
          // Each thread keeps to its own share of the ring.
          const std::size_t share =
              std::max<std::size_t>(1, ring / static_cast<std::size_t>(readers));
          const std::size_t place = (static_cast<std::size_t>(t) * share +
                                     i / static_cast<std::size_t>(readers) % share) %
                                    ring;
          std::byte* to = buffer.data() + place * largest;
          plain->read(clips[i].bucket, clips[i].index, {to, size});
          if (keep_hashes) hashes[i] = XXH3_64bits(to, size);
        }
      });
    }
    for (std::thread& t : threads) t.join();
  };

  // A steady state is timed: a ring's worth of micro-batches goes before the clock starts, and as
  // many are in flight when it stops, so that neither filling the ring nor reading ahead counts.
  std::int64_t wrong = 0;
  const auto steps = static_cast<std::int64_t>(work.size());
  const auto read_prefetched = [&](bool compare) {
    Prefetcher prefetch(
        *verified,
        [&](std::int64_t step) {
          return Prefetcher::Work{{0, work[step % steps]}};
        },
        0, steps + 2 * slots, slots, readers, steps + 2 * slots);
    for (int i = 0; i < slots; ++i) prefetch.next();
    const auto begin = Clock::now();
    for (std::int64_t step = 0; step < steps; ++step) {
      const LoadedBatch& loaded = prefetch.next();
      const std::size_t n = loaded.what.clips.size(), size = loaded.bytes.size() / n;
      for (std::size_t i = 0; compare && i < n; ++i) {
        const auto clip = static_cast<std::size_t>(loaded.what.samples[i]);
        if (XXH3_64bits(loaded.bytes.data() + i * size, size) != hashes[clip]) ++wrong;
      }
    }
    return since(begin);
  };

  std::vector<double> plain_rate, prefetch_rate;
  const double gigabytes = 1e-9 * static_cast<double>(bytes);
  for (int r = 0; r < repeats; ++r) {
    const auto begin = Clock::now();
    read_plain(r == 0);
    if (r > 0) plain_rate.push_back(gigabytes / since(begin));
    const double seconds = read_prefetched(r == 0);
    if (r > 0) prefetch_rate.push_back(gigabytes / seconds);
  }
  const double p = upper_median(plain_rate), f = upper_median(prefetch_rate);
  if (json) {
    std::puts(fmt::format("{{\"store_bytes\": {}, \"clips\": {}, \"readers\": {}, \"pread_gb_s\": "
                          "{:.3f}, \"prefetch_gb_s\": {:.3f}, \"ratio\": {:.3f}, \"wrong\": {}}}",
                          bytes, clips.size(), readers, p, f, f / p, wrong)
                  .c_str());
  } else {
    std::puts(fmt::format("{}, {:.1f} MB, {}, medians of {}\n"
                          "{:<28}{:>10}{:>8}{:>8}\n{:<28}{:>10.2f}{:>8}{:>8}\n"
                          "{:<28}{:>10.2f}{:>8.2f}{:>8}",
                          counted(std::ssize(clips), "clip"), 1e3 * gigabytes,
                          counted(readers, "reader"), repeats - 1, "", "GB/s", "ratio", "wrong",
                          "plain pread", p, "", "", "prefetch, hashes verified", f, f / p, wrong)
                  .c_str());
  }
  return wrong == 0 ? 0 : static_cast<int>(Exit::internal);
}

Command bench_read_command() {
  struct Request {
    std::string store;
    std::int64_t readers = 0;
    bool json = false;
  };
  const auto r = std::make_shared<Request>();
  Command c{"read", "prefetch against plain reads of the same clips", [r](const Deck&, MPI_Comm) {
              return bench_read(r->store, static_cast<int>(r->readers), r->json);
            }};
  c.first_rank_only = true;
  c.path("store", r->store, "clip store").required = true;
  c.number("--readers", r->readers, 0, 256, "reader threads (0: chosen)");
  c.option("--json", r->json, "JSON on stdout");
  return c;
}

}  // namespace weft
