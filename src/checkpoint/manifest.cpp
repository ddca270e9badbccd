#include "checkpoint/manifest.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"

namespace weft::checkpoint {
namespace {

using nlohmann::ordered_json;

constexpr const char* schema = "weft-checkpoint-2";
constexpr const char* tail_begin = ",\n \"manifest_hash\": \"";
constexpr const char* tail_end = "\"\n}\n";

std::string shard_name(std::size_t rank) { return fmt::format("shard_{:04d}.bin", rank); }

std::string tail(const std::string& hex) { return tail_begin + hex + tail_end; }

std::uint64_t block_count(std::uint64_t bytes) { return (bytes + block_bytes - 1) / block_bytes; }

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw Error(Exit::checkpoint, fmt::format("{}: {}", where, what),
              "an older checkpoint of the run may still be usable", __FILE__, __LINE__);
}

// More stretches than any state has in all lists, or in all arrays: at 2^16 elements or more each,
// 69 billion or more in all. A larger number is damage, and must not exhaust the memory.
constexpr std::int64_t most_stretches = std::int64_t{1} << 20;

// A list of cuts as text: the lengths of the stretches, "65536*12 4096" for twelve of one length
// and one of another. Most buckets of the state have the same size, so thousands of stretches fit a
// line or two.
std::string cuts_to_text(const std::vector<std::int64_t>& cuts) {
  std::string text;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < cuts.size();) {
    const std::int64_t size = cuts[i] - begin;
    std::size_t count = 0;
    for (; i < cuts.size() && cuts[i] - begin == size; ++count) begin = cuts[i++];
    text += (text.empty() ? "" : " ") + std::to_string(size);
    if (count > 1) text += "*" + std::to_string(count);
  }
  return text;
}

// Empty if the text is malformed.
std::vector<std::int64_t> cuts_from_text(const std::string& text) {
  std::vector<std::int64_t> cuts;
  const char *at = text.data(), *const stop = at + text.size();
  const auto number = [&](std::int64_t& n) {
    const auto [next, error] = std::from_chars(at, stop, n);
    at = next;
    return error == std::errc{} && n >= 0;
  };
  std::int64_t end = 0;
  while (true) {
    std::int64_t size = 0, count = 1;
    if (!number(size)) return {};
    if (at < stop && *at == '*' && (++at, !number(count))) return {};
    if (count < 1 || count > most_stretches - static_cast<std::int64_t>(cuts.size())) return {};
    for (; count > 0; --count) {
      if (__builtin_add_overflow(end, size, &end)) return {};
      cuts.push_back(end);
    }
    if (at == stop) return cuts;
    if (*at++ != ' ') return {};
  }
}

// The index of the list in `layout` that equals `cuts`; adds it if there is none.
std::size_t list_of(Layout& layout, std::vector<std::int64_t> cuts) {
  const auto it = std::find(layout.cuts.begin(), layout.cuts.end(), cuts);
  const auto index = static_cast<std::size_t>(it - layout.cuts.begin());
  if (it == layout.cuts.end()) layout.cuts.push_back(std::move(cuts));
  return index;
}

std::uint64_t shard_bytes(const Layout& layout, int rank, int ranks) {
  std::uint64_t bytes = 0;
  for (const Piece& p : pieces_of(layout, rank, ranks))
    bytes += static_cast<std::uint64_t>(p.end - p.begin) * sizeof(float);
  return bytes;
}

// A shard must be exactly what its place in the list makes it: no save writes anything else, and
// reading by such an entry is untested.
void check_shards(const Manifest& m, const std::string& where) {
  if (m.shards.empty()) refuse(where, "lists no shards");
  const int ranks = static_cast<int>(m.shards.size());
  for (int r = 0; r < ranks; ++r) {
    const ShardTable& s = m.shards[r];
    const std::string file = shard_name(static_cast<std::size_t>(r));
    const std::uint64_t bytes = shard_bytes(m.layout, r, ranks);
    // Counts the blocks without allocating them: invented arrays could ask for any number.
    if (s.file != file || s.bytes != bytes || s.blocks.size() != block_count(bytes))
      refuse(where, fmt::format("the entry of {} contradicts the arrays", file));
  }
}

Layout layout_from_json(const ordered_json& j, const std::string& where) {
  Layout layout;
  std::int64_t stretches = 0;
  const auto count = [&](const std::vector<std::int64_t>& cuts) {
    stretches += std::ssize(cuts);
    if (stretches > most_stretches) refuse(where, "has more stretches than any state");
  };
  for (const auto& list : j.at("cuts")) {
    layout.cuts.push_back(cuts_from_text(list.get<std::string>()));
    if (layout.cuts.back().empty()) refuse(where, "a list of cuts is not one");
    count(layout.cuts.back());
  }
  for (const auto& a : j.at("arrays")) {
    const auto name = a.at("name").get<std::string>();
    const auto n = whole_number<std::int64_t>(a.at("elements"));
    if (n < 0 || n > (std::int64_t{1} << 50)) refuse(where, "an array has no believable length");
    const auto cuts = whole_number<std::size_t>(a.at("cuts"));
    if (cuts >= layout.cuts.size() || layout.cuts[cuts].back() != n)
      refuse(where, fmt::format("the cuts of array {} do not end where it ends", name));
    count(layout.cuts[cuts]);
    layout.arrays.push_back({name, n, cuts});
  }
  return layout;
}

// Any member that is missing or of another type throws the JSON library's exception, which the
// caller turns into an Error.
Manifest from_json(const ordered_json& j, const std::string& where) {
  Manifest m;
  m.info.step = whole_number<std::int64_t>(j.at("step"));
  m.info.build = j.at("build").get<std::string>();
  m.info.deck = j.at("deck").get<std::string>();
  for (const auto& [name, note] : note_names) m.info.notes.*note = j.at("notes").value(name, "");
  m.layout = layout_from_json(j, where);
  for (const auto& t : j.at("tensors")) {
    TensorRange& tensor = m.info.tensors.emplace_back();
    tensor.name = t.at("name").get<std::string>();
    for (const auto& d : t.at("shape")) tensor.shape.push_back(whole_number<std::int64_t>(d));
    tensor.offset = whole_number<std::int64_t>(t.at("offset"));
  }
  for (const TensorRange& t : m.info.tensors) {
    std::int64_t end = 1;
    bool sound = t.offset >= 0;
    for (const std::int64_t d : t.shape)
      sound = sound && d >= 0 && !__builtin_mul_overflow(end, d, &end);
    if (!sound || __builtin_add_overflow(end, t.offset, &end))
      refuse(where, fmt::format("tensor {} has no believable shape or offset", t.name));
  }
  for (const auto& s : j.at("shards")) {
    ShardTable shard;
    shard.file = s.at("file").get<std::string>();
    shard.bytes = whole_number<std::uint64_t>(s.at("bytes"));
    for (const auto& b : s.at("blocks")) {
      const auto hash = hash_from_hex(b.get<std::string>());
      if (!hash) refuse(where, "a block's hash is not 32 hexadecimal digits");
      shard.blocks.push_back(*hash);
    }
    m.shards.push_back(std::move(shard));
  }
  const auto hash = hash_from_hex(j.at("state_hash").get<std::string>());
  if (!hash || *hash != state_hash(m.shards)) refuse(where, "the state's hash is wrong");
  m.state_hash = *hash;
  check_shards(m, where);
  return m;
}

}  // namespace

Layout layout_of(std::span<const FlatArray> arrays) {
  Layout layout;
  for (const FlatArray& a : arrays) {
    WEFT_ASSERT(a.cuts.empty() || a.cuts.back() == a.length);
    WEFT_ASSERT(std::is_sorted(a.cuts.begin(), a.cuts.end()));
    WEFT_ASSERT(static_cast<std::int64_t>(a.cuts.size()) <= most_stretches);
    const std::size_t list =
        list_of(layout, a.cuts.empty() ? std::vector<std::int64_t>{a.length} : a.cuts);
    layout.arrays.push_back({a.name, a.length, list});
  }
  return layout;
}

std::vector<Piece> pieces_of(const Layout& layout, int rank, int ranks) {
  std::vector<Piece> pieces;
  std::uint64_t offset = 0;
  for (std::size_t a = 0; a < layout.arrays.size(); ++a) {
    std::int64_t begin = 0;
    for (const std::int64_t end : layout.cuts[layout.arrays[a].cuts]) {
      const Part part = part_of(begin, end, rank, ranks);
      pieces.push_back({a, part.begin, part.end, offset});
      offset += static_cast<std::uint64_t>(part.size()) * sizeof(float);
      begin = end;
    }
  }
  return pieces;
}

ShardTable shard_of(const Layout& layout, int rank, int ranks) {
  ShardTable shard;
  shard.file = shard_name(static_cast<std::size_t>(rank));
  shard.bytes = shard_bytes(layout, rank, ranks);
  shard.blocks.resize(block_count(shard.bytes));
  return shard;
}

// Hashes the blocks' hashes, not the data, of which each rank has only its own share.
Hash128 state_hash(std::span<const ShardTable> shards) {
  Hasher hasher;
  for (const ShardTable& s : shards) hasher.add(std::as_bytes(std::span(s.blocks)));
  return hasher.value();
}

// One space of indent: readable, and hardly larger than the data itself.
std::string to_text(const Manifest& m) {
  ordered_json j;
  j["schema"] = schema;
  j["step"] = m.info.step;
  j["build"] = m.info.build;
  j["deck"] = m.info.deck;
  j["notes"] = ordered_json::object();
  for (const auto& [name, note] : note_names)
    if (const std::string& text = m.info.notes.*note; !text.empty()) j["notes"][name] = text;
  j["dtype"] = "f32, little-endian";
  j["block_bytes"] = block_bytes;
  j["hash"] = "XXH3-128";
  j["cuts"] = ordered_json::array();
  for (const auto& list : m.layout.cuts) j["cuts"].push_back(cuts_to_text(list));
  j["arrays"] = ordered_json::array();
  for (const Layout::Array& a : m.layout.arrays)
    j["arrays"].push_back({{"name", a.name}, {"elements", a.elements}, {"cuts", a.cuts}});
  j["tensors"] = ordered_json::array();
  for (const TensorRange& t : m.info.tensors)
    j["tensors"].push_back({{"name", t.name}, {"shape", t.shape}, {"offset", t.offset}});
  j["shards"] = ordered_json::array();
  for (const ShardTable& s : m.shards) {
    ordered_json shard = {{"file", s.file}, {"bytes", s.bytes}};
    shard["blocks"] = ordered_json::array();
    for (const Hash128& h : s.blocks) shard["blocks"].push_back(to_hex(h));
    j["shards"].push_back(std::move(shard));
  }
  j["state_hash"] = to_hex(m.state_hash);
  // Host names and paths may hold any bytes: invalid UTF-8 is replaced, not refused.
  std::string text = dump_json(j, 1, ' ', false, ordered_json::error_handler_t::replace);
  // The hash covers all text before it, so it is appended to the dump instead of put into `j`.
  text.resize(text.size() - 2);  // the last "\n}"
  return text + tail(to_hex(hash128(text)));
}

std::string manifest_hash(const std::string& text) {
  const std::size_t length = tail(std::string(32, '0')).size();
  if (text.size() < length) return "";
  return text.substr(text.size() - length + std::string_view(tail_begin).size(), 32);
}

Manifest manifest_from_text(const std::string& text, const std::string& where) {
  const std::size_t length = tail(std::string(32, '0')).size();
  if (text.size() <= length) refuse(where, fmt::format("cut off at {} bytes", text.size()));
  // The hash comes before parsing: damaged text is then reported as damaged, not as bad JSON.
  const std::string body = text.substr(0, text.size() - length);
  if (text.substr(body.size()) != tail(to_hex(hash128(body))))
    refuse(where, text.ends_with(tail_end) ? "damaged: it does not match its own hash"
                                           : "cut off or damaged: its end is missing");
  try {
    const ordered_json j = parse_json<ordered_json>(text);
    const std::string found = j.at("schema").get<std::string>();
    WEFT_CHECK(found == schema, Exit::checkpoint, "use the version of weft that wrote it",
               "{}: written in format {}, this weft reads {}", where, printable(found), schema);
    if (whole_number<std::uint64_t>(j.at("block_bytes")) != block_bytes)
      refuse(where, "blocks of another size than this weft's");
    return from_json(j, where);
  } catch (const ordered_json::exception& e) {
    refuse(where, fmt::format("not a manifest: {}", e.what()));
  }
}

std::string tensors_in(const Manifest& m, int rank, std::uint64_t begin, std::uint64_t end) {
  // The pieces of each array that the bytes touch, in elements, the unit of the tensor table.
  std::vector<std::vector<Part>> hit(m.layout.arrays.size());
  for (const Piece& p : pieces_of(m.layout, rank, static_cast<int>(m.shards.size()))) {
    const std::uint64_t stop = p.offset + static_cast<std::uint64_t>(p.end - p.begin) * 4;
    if (stop <= begin || p.offset >= end) continue;
    hit[p.array].push_back(
        {p.begin + static_cast<std::int64_t>((std::max(begin, p.offset) - p.offset) / 4),
         p.begin + static_cast<std::int64_t>((std::min(end, stop) - p.offset + 3) / 4)});
  }
  std::vector<std::string> parts;
  for (std::size_t a = 0; a < hit.size(); ++a) {
    if (hit[a].empty()) continue;
    std::vector<std::string> names;
    std::size_t more = 0;
    for (const TensorRange& t : m.info.tensors) {
      std::int64_t n = 1;
      for (const std::int64_t d : t.shape) n *= d;
      // Parts are sorted: the first one that ends after the tensor's begin decides.
      const auto part = std::upper_bound(hit[a].begin(), hit[a].end(), t.offset,
                                         [](std::int64_t at, const Part& p) { return at < p.end; });
      if (part == hit[a].end() || part->begin >= t.offset + n) continue;
      if (names.size() < 3)
        names.push_back(t.name);
      else
        ++more;
    }
    if (more > 0) names.push_back(fmt::format("{} more", more));
    const std::string& array = m.layout.arrays[a].name;
    parts.push_back(names.empty()
                        ? fmt::format("{} {}..{}", array, hit[a].front().begin, hit[a].back().end)
                        : fmt::format("{}: {}", array, fmt::join(names, ", ")));
  }
  return fmt::format("{}", fmt::join(parts, "; "));
}

void (*at_site)(const char* site) = nullptr;

namespace {

[[noreturn]] void refuse(const std::string& what, int reason, const std::string& hint) {
  throw Error(Exit::checkpoint, fmt::format("{}: {}", what, std::strerror(reason)), hint, __FILE__,
              __LINE__);
}

// Removes a tree or throws; never follows a link out of it.
void remove_tree(const fs::path& path) {
  std::error_code ec;
  fs::remove_all(path, ec);
  if (ec)
    throw Error(Exit::checkpoint, fmt::format("cannot delete {}: {}", path.string(), ec.message()),
                "delete it by hand", __FILE__, __LINE__);
}

fs::path temporary(const fs::path& run_dir, std::int64_t step) {
  return run_dir / (step_name(step) + ".tmp");
}

// Exchanges two names in one atomic step; false where the file system cannot.
bool exchange(const fs::path& a, const fs::path& b) {
  return syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

}  // namespace

std::string step_name(std::int64_t step) { return fmt::format("step_{}", step); }

// Accepts one spelling per step: with "step_020" two directories could claim the same step.
std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with("step_")) return std::nullopt;
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + 5, end, step);
  if (error != std::errc() || stop != end || step < 0 || name != step_name(step))
    return std::nullopt;
  return step;
}

std::vector<std::int64_t> list_steps(const fs::path& run_dir) {
  std::vector<std::int64_t> steps;
  std::error_code ec;
  fs::directory_iterator it(run_dir, ec);
  if (ec == std::errc::no_such_file_or_directory) return steps;
  if (ec)
    throw Error(Exit::checkpoint,
                fmt::format("cannot read directory {}: {}", run_dir.string(), ec.message()),
                "check run.dir and its permissions", __FILE__, __LINE__);
  for (; it != fs::directory_iterator(); it.increment(ec)) {
    const auto step = step_of(it->path().filename().string());
    if (step && it->symlink_status(ec).type() == fs::file_type::directory) steps.push_back(*step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

// The step of a whole copy that stands where a link was: programs that copy files, such as scp -r,
// follow links.
static std::optional<std::int64_t> step_of_copy(const fs::path& link) {
  std::error_code none;
  const fs::path file = link / manifest_name;
  if (!fs::is_directory(fs::symlink_status(link, none)) || !fs::is_regular_file(file, none))
    return std::nullopt;
  try {
    const std::string text = read_whole(file, std::uint64_t{1} << 30, Exit::checkpoint, "");
    return manifest_from_text(text, file.string()).info.step;
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::optional<std::string> read_latest(const fs::path& run_dir) {
  std::error_code ec;
  const fs::path latest = run_dir / "latest";
  const fs::file_status status = fs::symlink_status(latest, ec);
  if (!fs::exists(status)) return std::nullopt;
  if (const auto step = step_of_copy(latest)) return step_name(*step);
  // Anything else in its place is not weft's; the text returned names no step.
  if (status.type() != fs::file_type::symlink) return "(not a link)";
  return fs::read_symlink(latest, ec).string();
}

// Saves, clips and logs need a few more descriptors than are open now.
static void probe_open_files() {
  constexpr int wanted = 32;
  std::vector<int> opened;
  int reason = 0;
  while (reason == 0 && std::ssize(opened) < wanted) {
    const int fd = ::dup(STDERR_FILENO);
    if (fd >= 0)
      opened.push_back(fd);
    else
      reason = errno;
  }
  for (const int fd : opened) ::close(fd);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  WEFT_CHECK(reason != EMFILE, Exit::checkpoint, "raise ulimit -n",
             "a process may open {} files here (ulimit -n), and this one needs {} more than that",
             limit.rlim_cur, wanted - std::ssize(opened));
}

// Writing and syncing one page reveals full disks, quotas, read-only mounts and file size limits
// now rather than at the first save, hours into the training.
void probe_directory(const fs::path& run_dir, int rank) {
  probe_open_files();
  make_folders(run_dir, Exit::checkpoint, "set run.dir to a place that every host can write to");
  const fs::path probe = run_dir / fmt::format(".probe_{}_{}", rank, getpid());
  ::unlink(probe.c_str());
  try {
    File file = File::create(probe, Exit::checkpoint);
    const std::array<std::byte, 4096> page{};
    file.write(page, 0);
    file.sync();
    file.close();
  } catch (...) {
    ::unlink(probe.c_str());
    throw;
  }
  ::unlink(probe.c_str());
}

void check_own_files(const fs::path& run_dir) {
  struct stat status {};
  if (::stat(run_dir.c_str(), &status) == 0 && (status.st_mode & S_IWOTH) != 0)
    log::warn("{} can be written by every user of this host, checkpoints too: chmod o-w {}",
              run_dir.string(), run_dir.string());
  const auto check = [&](const fs::path& path, mode_t kind) {
    if (::lstat(path.c_str(), &status) != 0 || (status.st_mode & S_IFMT) == kind) return;
    WEFT_CHECK(false, Exit::checkpoint, "remove it, or choose another run.dir",
               "{} is {}, not {} of weft's", path.string(),
               S_ISLNK(status.st_mode)   ? "a link"
               : S_ISDIR(status.st_mode) ? "a directory"
               : S_ISREG(status.st_mode) ? "a file"
                                         : "a pipe or device",
               kind == S_IFLNK   ? "a link"
               : kind == S_IFDIR ? "a checkpoint"
                                 : "a file");
  };
  for (const char* name :
       {"deck.toml", "run.json", "metrics.jsonl", "metrics.jsonl.tmp", "validation.jsonl",
        "validation.jsonl.tmp", "status.json", "summary.json", "cite.bib", "matmul.txt",
        "trace.json", "trace.json.tmp", "latest", "best", "lock"}) {
    const fs::path path = run_dir / name;
    const bool link = name == std::string_view("latest") || name == std::string_view("best");
    if (link && step_of_copy(path)) continue;  // is replaced
    check(path, link ? S_IFLNK : S_IFREG);
  }
  // A save replaces what has its name.
  for (const fs::path& path : entries_of(run_dir, Exit::checkpoint))
    if (step_of(path.filename().string()) && !fs::is_symlink(path)) check(path, S_IFDIR);
}

void check_file_size(const fs::path& shard, std::uint64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  WEFT_CHECK(bytes <= limit.rlim_cur, Exit::checkpoint,
             "ulimit -f unlimited, or more ranks, which write less each",
             "{} will have {} bytes, a file of this process may have {} (ulimit -f)",
             shard.string(), bytes, limit.rlim_cur);
}

std::optional<std::uint64_t> free_space(const fs::path& path) {
  std::error_code none;
  fs::path there = fs::absolute(path, none);
  while (there.has_relative_path() && !fs::exists(there, none)) there = there.parent_path();
  struct statvfs disk {};
  // Some network file systems do not report their size.
  if (::statvfs(there.c_str(), &disk) != 0 || disk.f_blocks == 0) return {};
  return std::uint64_t{disk.f_bavail} * disk.f_frsize;
}

void check_free_space(const fs::path& run_dir, std::uint64_t bytes) {
  const std::optional<std::uint64_t> free = free_space(run_dir);
  WEFT_CHECK(!free || bytes <= *free, Exit::checkpoint, "free some space or choose another run.dir",
             "a checkpoint of {} takes {} bytes, its file system has {} left", run_dir.string(),
             bytes, *free);
}

void warn_of_little_space(const fs::path& run_dir, std::uint64_t bytes, std::int64_t keep) {
  const std::optional<std::uint64_t> free = free_space(run_dir);
  const std::int64_t there = std::min<std::int64_t>(std::ssize(list_steps(run_dir)), keep);
  const std::uint64_t more = static_cast<std::uint64_t>(keep + 1 - there) * bytes;
  if (!free || more <= *free) return;
  const auto text = [](std::uint64_t n) { return size_text(static_cast<double>(n)); };
  log::warn(
      "the file system of {} has {} left, and its checkpoints will take {} more: {} of {} "
      "(train.keep = {}, and the one that is being written), of which {} are there. Free some "
      "space, or choose another run.dir",
      run_dir.string(), text(*free), text(more), keep + 1, text(bytes), keep, there);
}

void clear_remains(const fs::path& run_dir) {
  // Collected first and changed later: entries must not move while the directory is iterated.
  std::vector<fs::path> remains;
  std::vector<std::int64_t> replaced, moved_aside;
  std::error_code ec;
  for (fs::directory_iterator it(run_dir, ec); it != fs::directory_iterator(); it.increment(ec)) {
    const std::string name = it->path().filename().string();
    const auto step = step_of(name.substr(0, name.size() - std::min<std::size_t>(4, name.size())));
    if (step && name.ends_with(".tmp")) {
      // A save cut off between exchange and read-back: step_N.tmp is the older, verified checkpoint
      // of the same step, and step_N the unproven one.
      const fs::path now = run_dir / step_name(*step);
      if (fs::exists(it->path() / verified_name, ec) && fs::exists(now, ec) &&
          !fs::exists(now / verified_name, ec))
        replaced.push_back(*step);
      else
        remains.push_back(it->path());
    } else if (step && name.ends_with(".old")) {
      moved_aside.push_back(*step);
    } else if (name == "latest.tmp" || name == "best.tmp" || name.starts_with(".probe_")) {
      remains.push_back(it->path());
    }
  }
  for (const std::int64_t step : replaced) withdraw(run_dir, step);
  for (const fs::path& path : remains) remove_tree(path);
  // publish() without an atomic exchange was cut off: unless step_N is there, .old holds the only
  // copy of it.
  for (const std::int64_t step : moved_aside) {
    const fs::path old = run_dir / (step_name(step) + ".old"), now = run_dir / step_name(step);
    if (fs::exists(now, ec))
      remove_tree(old);
    else
      rename_file(old, now, Exit::checkpoint);
  }
}

void publish(const fs::path& run_dir, std::int64_t step) {
  const fs::path from = temporary(run_dir, step), to = run_dir / step_name(step);
  std::error_code ec;
  if (!fs::exists(fs::symlink_status(to, ec))) {
    rename_file(from, to, Exit::checkpoint);
  } else if (!exchange(from, to)) {
    // Without an atomic exchange there is a moment without step_N: `latest` may dangle, and a
    // restart at that moment uses an older checkpoint. The older step_N ends up where an exchange
    // would have put it, since withdraw() looks for it there.
    const fs::path aside = run_dir / (step_name(step) + ".old");
    remove_tree(aside);
    rename_file(to, aside, Exit::checkpoint);
    rename_file(from, to, Exit::checkpoint);
    rename_file(aside, from, Exit::checkpoint);
  }
  pass("renamed");
  sync_directory(run_dir, Exit::checkpoint);
}

// If publish() displaced an older step_N, that one is at step_N.tmp and returns to its place.
void withdraw(const fs::path& run_dir, std::int64_t step) {
  const fs::path old = temporary(run_dir, step), now = run_dir / step_name(step);
  std::error_code ec;
  if (fs::exists(fs::symlink_status(old, ec))) {
    if (!exchange(old, now)) return remove_tree(now);
    return remove_tree(old);
  }
  remove_tree(now);
}

namespace {

// Points the link RUN/`name` at a step. A link cannot be changed in place; renaming a new one over
// it is atomic.
void point_link(const fs::path& run_dir, const char* name, std::int64_t step) {
  const fs::path link = run_dir / (std::string(name) + ".tmp");
  ::unlink(link.c_str());
  if (::symlink(step_name(step).c_str(), link.c_str()) != 0)
    refuse(fmt::format("cannot create link {}", link.string()), errno,
           "the file system must know symbolic links");
  pass("linked");
  if (const fs::path copy = run_dir / name; step_of_copy(copy)) {
    fs::path aside = run_dir / (std::string(name) + ".copy");
    while (fs::exists(aside)) aside += "_";  // a copy of a copy
    log::warn("{} was a folder, as copies that follow links have it (scp -r): it is {} now",
              copy.string(), aside.string());
    rename_file(copy, aside, Exit::checkpoint);
  }
  rename_file(link, run_dir / name, Exit::checkpoint);
  sync_directory(run_dir, Exit::checkpoint);
}

}  // namespace

// The order matters: the mark must be on disk before `latest` can point at the step.
void mark_verified(const fs::path& run_dir, std::int64_t step, const std::string& hash) {
  const fs::path dir = run_dir / step_name(step);
  replace_file(dir / verified_name, hash + "\n", Exit::checkpoint, Durable::yes);
  pass("marked");
  point_link(run_dir, "latest", step);
  pass("latest");
}

void link_best(const fs::path& run_dir, std::int64_t step) {
  std::error_code ec;
  if (fs::exists(run_dir / step_name(step) / verified_name, ec) &&
      fs::read_symlink(run_dir / "best", ec) != step_name(step))
    point_link(run_dir, "best", step);
}

void delete_older(const fs::path& run_dir, std::int64_t step, int keep) {
  int kept = 0;
  std::error_code ec;
  const std::string best = fs::read_symlink(run_dir / "best", ec).string();
  for (const std::int64_t s : list_steps(run_dir)) {
    if (s > step) continue;
    const fs::path dir = run_dir / step_name(s);
    if (kept < keep) {
      if (fs::exists(dir / verified_name, ec)) ++kept;
      continue;
    }
    if (step_name(s) == best) continue;
    // Renamed first: an interrupted deletion must not leave half a checkpoint under a step's name.
    const fs::path doomed = temporary(run_dir, s);
    remove_tree(doomed);
    rename_file(dir, doomed, Exit::checkpoint);
    pass("deleting");
    remove_tree(doomed);
  }
}

}  // namespace weft::checkpoint
