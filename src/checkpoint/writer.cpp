// Saving. The caller's thread copies this rank's share (the cut); the writer's own thread does the
// rest in phases. After every phase all ranks agree on its outcome, so that a failure anywhere is a
// failure everywhere and no rank waits for one that has given up.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include "checkpoint/agree.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace weft {

using namespace checkpoint;

namespace {

constexpr int most_failures = 3;  // in a row, before the job stops

// One piece of this rank's share: where it is and where it goes in the shard.
struct Source {
  const std::byte* from = nullptr;
  std::uint64_t offset = 0, bytes = 0;
  DeviceKind device = DeviceKind::cpu;
};

// This rank's pieces in the order of the shard. Pieces that are adjacent in memory too are merged:
// a model's state has thousands of stretches, and each copy from a GPU has a start-up cost.
std::vector<Source> sources_of(const Layout& layout, std::span<const FlatArray> arrays, int rank,
                               int ranks) {
  std::vector<Source> sources;
  std::size_t stretch = 0, array = 0;
  for (const Piece& p : pieces_of(layout, rank, ranks)) {
    if (p.array != array) stretch = 0;
    array = p.array;
    const FlatArray& a = arrays[array];
    WEFT_ASSERT(stretch < a.parts.size());
    const std::span<float> part = a.parts[stretch++];
    WEFT_ASSERT(part.size() == static_cast<std::size_t>(p.end - p.begin));
    if (part.empty()) continue;
    const Source s{reinterpret_cast<const std::byte*>(part.data()), p.offset, part.size_bytes(),
                   a.device};
    if (!sources.empty() && sources.back().device == s.device &&
        sources.back().from + sources.back().bytes == s.from)
      sources.back().bytes += s.bytes;
    else
      sources.push_back(s);
  }
  return sources;
}

// Copies and hashes bytes [begin, end) of the shard. Hashes the source, not the copy, so that
// reading the file back reveals a faulty copy. Data from a GPU is in `staging` already.
Hash128 cut_block(const std::vector<Source>& sources, std::uint64_t begin, std::uint64_t end,
                  std::byte* staging) {
  constexpr std::uint64_t at_once = 128 << 10;  // stays in the cache between hash and copy
  Hasher hasher;
  auto s = std::upper_bound(
      sources.begin(), sources.end(), begin,
      [](std::uint64_t at, const Source& source) { return at < source.offset + source.bytes; });
  for (; s != sources.end() && s->offset < end; ++s) {
    const std::uint64_t first = std::max(begin, s->offset);
    const std::uint64_t last = std::min(end, s->offset + s->bytes);
    if (s->device == DeviceKind::cuda) {
      hasher.add({staging + first, last - first});
      continue;
    }
    for (std::uint64_t at = first; at < last; at += at_once) {
      const std::uint64_t n = std::min(at_once, last - at);
      hasher.add({s->from + (at - s->offset), n});
      std::memcpy(staging + at, s->from + (at - s->offset), n);
    }
  }
  return hasher.value();
}

}  // namespace

struct CheckpointWriter::State {
  fs::path run_dir;
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, ranks = 1, keep = 2;
  std::unique_ptr<FolderLock> lock;  // rank 0's

  // The copy of this rank's share. Allocated once, so that saves do not make the job grow.
  std::unique_ptr<std::byte[]> staging;
  std::uint64_t staging_bytes = 0;

  // The save in flight; only the thread touches these until it is joined.
  std::thread thread;
  Manifest manifest;  // complete on rank 0
  bool best = false;  // RUN/best shall name it
  ShardTable shard;   // this rank's
  bool last_ok = true;
  int failures = 0;
  std::chrono::steady_clock::time_point began;  // of the newest save
  std::atomic<bool> writing = false;
  std::atomic<double> longest = 0;  // seconds to write and verify a save; the thread's alone to set
  Outcome last_failure;

  fs::path temporary() const { return run_dir / (step_name(manifest.info.step) + ".tmp"); }
  fs::path final_dir() const { return run_dir / step_name(manifest.info.step); }

  void cut(std::span<const FlatArray> arrays);
  void write_all();
  Outcome try_to_write(std::string& manifest_text, bool& published);
  void write_shard();
  std::string write_manifest(std::span<const std::byte> hashes);
  void read_back(const std::string& manifest_text);
  void clean_up(bool published);
};

void CheckpointWriter::State::cut(std::span<const FlatArray> arrays) {
  if (staging_bytes != shard.bytes) {
    // Frees the old buffer first: both at once may not fit.
    staging.reset();
    staging.reset(new (std::nothrow) std::byte[shard.bytes]);
    WEFT_CHECK(staging != nullptr, Exit::checkpoint, "use more ranks, or hosts with more memory",
               "no memory for a copy of {} bytes of state", shard.bytes);
    staging_bytes = shard.bytes;
  }
  const std::vector<Source> sources = sources_of(manifest.layout, arrays, rank, ranks);
  for (const Source& s : sources)
    if (s.device == DeviceKind::cuda)
      device_runtime().download(staging.get() + s.offset, s.from, s.bytes);
  const auto blocks = static_cast<std::int64_t>(shard.blocks.size());
#pragma omp parallel for schedule(dynamic)
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::uint64_t begin = static_cast<std::uint64_t>(b) * block_bytes;
    const std::uint64_t end = std::min(begin + block_bytes, shard.bytes);
    shard.blocks[b] = cut_block(sources, begin, end, staging.get());
  }
}

void CheckpointWriter::State::write_shard() {
  File file = File::create(temporary() / shard.file, Exit::checkpoint);
  for (std::uint64_t at = 0; at < shard.bytes; at += block_bytes) {
    file.write({staging.get() + at, std::min(block_bytes, shard.bytes - at)}, at);
    pass("block");
  }
  pass("shard");
  // Synced first: only written pages can leave the cache, and the read-back must come from disk.
  file.sync();
  file.drop_cache();
  file.close();
}

// Rank 0: completes the manifest with all ranks' hashes and writes it durably.
std::string CheckpointWriter::State::write_manifest(std::span<const std::byte> hashes) {
  manifest.shards.clear();
  for (int r = 0; r < ranks; ++r) {
    ShardTable s = shard_of(manifest.layout, r, ranks);
    const std::size_t bytes = s.blocks.size() * sizeof(Hash128);
    WEFT_ASSERT(bytes <= hashes.size());
    if (bytes > 0) std::memcpy(s.blocks.data(), hashes.data(), bytes);  // a rank may have none
    hashes = hashes.subspan(bytes);
    manifest.shards.push_back(std::move(s));
  }
  manifest.state_hash = state_hash(manifest.shards);
  const std::string text = to_text(manifest);
  File file = File::create(temporary() / manifest_name, Exit::checkpoint);
  file.write(std::as_bytes(std::span(text)), 0);
  pass("manifest");
  file.sync();
  file.close();
  // Every rank has written its shard by now: this makes the names of all of them durable.
  sync_directory(temporary(), Exit::checkpoint);
  pass("synced");
  return text;
}

// Reads this rank's shard (and rank 0 the manifest) from the disk and compares it with the hashes
// of the cut. The staging buffer is free again and takes the bytes.
void CheckpointWriter::State::read_back(const std::string& manifest_text) {
  pass("verify");
  const File file = File::open(final_dir() / shard.file, Exit::checkpoint, false);
  file.drop_cache();
  WEFT_CHECK(file.size() == shard.bytes, Exit::checkpoint,
             "the storage loses data: report it to the administrators",
             "{} has {} bytes after writing {}", file.path().string(), file.size(), shard.bytes);
  for (std::size_t b = 0; b < shard.blocks.size(); ++b) {
    const std::uint64_t at = b * block_bytes;
    const std::span<std::byte> block(staging.get() + at, std::min(block_bytes, shard.bytes - at));
    file.read(block, at);
    WEFT_CHECK(hash128(block) == shard.blocks[b], Exit::checkpoint,
               "memory or storage of this host changes data: take it out of the job",
               "{} block {} (byte {}) read back is not what the model held", file.path().string(),
               b, at);
  }
  if (rank != 0) return;
  const File written = File::open(final_dir() / manifest_name, Exit::checkpoint, false);
  written.drop_cache();
  std::string text(written.size(), '\0');
  written.read(std::as_writable_bytes(std::span(text)), 0);
  WEFT_CHECK(text == manifest_text, Exit::checkpoint,
             "the storage loses data: report it to the administrators", "{} read back differs",
             written.path().string());
}

Outcome CheckpointWriter::State::try_to_write(std::string& text, bool& published) {
  const auto on_root = [&](auto&& work) {
    return agree(comm, rank == 0 ? attempt(work) : Outcome{});
  };
  Outcome o = on_root([&] {
    std::error_code ec;
    fs::remove_all(temporary(), ec);
    fs::create_directory(temporary(), ec);
    WEFT_CHECK(!ec, Exit::checkpoint, "check space, quota and permissions of run.dir",
               "cannot create directory {}: {}", temporary().string(), ec.message());
  });
  if (!o.ok()) return o;
  o = agree(comm, attempt([&] { write_shard(); }));
  if (!o.ok()) return o;
  const std::vector<std::byte> hashes = collect(comm, std::as_bytes(std::span(shard.blocks)));
  o = on_root([&] {
    text = write_manifest(hashes);
    published = true;  // from here on clean_up() must look at step_N on disk
    publish(run_dir, manifest.info.step);
  });
  if (!o.ok()) return o;
  o = agree(comm, attempt([&] { read_back(text); }));
  if (!o.ok()) return o;
  return on_root([&] { mark_verified(run_dir, manifest.info.step, manifest_hash(text)); });
}

// Rank 0, after a failure: removes everything of the failed save.
void CheckpointWriter::State::clean_up(bool published) {
  const Outcome o = attempt([&] {
    std::error_code ec;
    // The mark on disk decides: a step without it is the one that failed.
    if (published && !fs::exists(final_dir() / verified_name, ec))
      withdraw(run_dir, manifest.info.step);
    fs::remove_all(temporary(), ec);
    sync_directory(run_dir, Exit::checkpoint);
  });
  if (!o.ok()) log::warn("after a failed save: {}", o.error);
}

void CheckpointWriter::State::write_all() {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  bool published = false;
  const Outcome o = try_to_write(text, published);
  last_ok = o.ok();
  failures = o.ok() ? 0 : failures + 1;
  last_failure = o;
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  longest = std::max(longest.load(), taken.count());
  if (rank != 0) return;
  if (!o.ok()) {
    std::uint64_t bytes = 0;
    for (int r = 0; r < ranks; ++r) bytes += shard_of(manifest.layout, r, ranks).bytes;
    clean_up(published);
    log::error(
        "ERROR: checkpoint {} ({} bytes) was not saved: {}{}{}. Training continues with the older "
        "checkpoints kept; failure {} of {} in a row.",
        final_dir().string(), bytes, o.error, o.hint.empty() ? "" : "; ", o.hint, failures,
        most_failures);
    return;
  }
  const Outcome tidy = attempt([&] {
    fs::remove_all(temporary());
    if (best) link_best(run_dir, manifest.info.step);
    delete_older(run_dir, manifest.info.step, keep);
  });
  if (!tidy.ok()) log::warn("older checkpoints stay: {}", tidy.error);
  pass("done");
}

CheckpointWriter::CheckpointWriter(std::filesystem::path run_dir, MPI_Comm comm, int keep)
    : state_(std::make_unique<State>()) {
  WEFT_ASSERT(keep >= 2);
  int threads = 0;
  MPI_Query_thread(&threads);
  WEFT_ASSERT(threads == MPI_THREAD_MULTIPLE);
  // Hitting a file size limit must be an error of write(), not kill the job.
  std::signal(SIGXFSZ, SIG_IGN);
  State& s = *state_;
  s.run_dir = std::move(run_dir);
  s.keep = keep;
  MPI_Comm_dup(comm, &s.comm);
  MPI_Comm_rank(s.comm, &s.rank);
  MPI_Comm_size(s.comm, &s.ranks);
  Outcome o = attempt([&] {
    if (s.rank != 0) return;
    probe_directory(s.run_dir, 0);
    check_own_files(s.run_dir);
    s.lock = std::make_unique<FolderLock>(s.run_dir / "lock", "run directory " + s.run_dir.string(),
                                          "run.dir", Exit::checkpoint);
    clear_remains(s.run_dir);
  });
  o = agree(s.comm, o);
  if (o.ok())
    o = agree(s.comm, attempt([&] {
                if (s.rank != 0) probe_directory(s.run_dir, s.rank);
              }));
  if (!o.ok()) {
    MPI_Comm_free(&s.comm);
    o.raise();
  }
}

CheckpointWriter::~CheckpointWriter() {
  State& s = *state_;
  // Joins even during stack unwinding: a save in flight on this rank is in flight, or about to be,
  // on all others.
  if (s.thread.joinable()) s.thread.join();
  // MPI_Comm_free() is collective: this rank may be the only one that unwinds.
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (std::uncaught_exceptions() == 0 && finalized == 0) MPI_Comm_free(&s.comm);
}

double CheckpointWriter::save(const CheckpointInfo& info, std::span<const FlatArray> arrays,
                              bool best) {
  const auto start = std::chrono::steady_clock::now();
  State& s = *state_;
  wait();
  // All ranks agreed on each outcome, so they count the same failures and all throw here.
  if (s.failures >= most_failures)
    throw Error(Exit::checkpoint,
                fmt::format("{} saves in a row have failed, the last with: {}", s.failures,
                            s.last_failure.error),
                s.last_failure.hint, __FILE__, __LINE__);
  s.manifest = {};
  s.best = best;
  s.manifest.layout = layout_of(arrays);
  if (s.rank == 0) s.manifest.info = info;
  s.manifest.info.step = info.step;
  s.shard = shard_of(s.manifest.layout, s.rank, s.ranks);
  s.cut(arrays);
  pass("cut");
  s.began = std::chrono::steady_clock::now();
  s.writing = true;
  s.thread = std::thread([&s] {
    s.write_all();
    s.writing = false;
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void CheckpointWriter::check_room(std::span<const FlatArray> arrays) {
  const State& s = *state_;
  const Layout layout = layout_of(arrays);
  const Outcome o = agree(s.comm, attempt([&] {
                            const ShardTable mine = shard_of(layout, s.rank, s.ranks);
                            check_file_size(s.run_dir / mine.file, mine.bytes);
                            if (s.rank != 0) return;
                            std::uint64_t all = 0;
                            for (int r = 0; r < s.ranks; ++r)
                              all += shard_of(layout, r, s.ranks).bytes;
                            check_free_space(s.run_dir, all);
                            warn_of_little_space(s.run_dir, all, s.keep);
                          }));
  o.raise();
}

std::optional<double> CheckpointWriter::writing_for() const {
  if (!state_->writing) return std::nullopt;
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - state_->began).count();
}

double CheckpointWriter::longest_save() const { return state_->longest; }

bool CheckpointWriter::wait() {
  if (state_->thread.joinable()) state_->thread.join();
  return state_->last_ok;
}

}  // namespace weft
