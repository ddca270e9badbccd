// Loading. No value is used before every byte of the checkpoint has been compared with its hash;
// the ranks share that work.
#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/adapter.h"
#include "checkpoint/agree.h"
#include "checkpoint/manifest.h"
#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "core/mpi.h"

namespace weft {

using namespace checkpoint;

namespace {

constexpr const char* older_hint = "an older checkpoint of the run may still be usable";
constexpr std::uint64_t longest_manifest = std::uint64_t{1} << 30;

[[noreturn]] void refuse(const std::string& what, const std::string& hint = older_hint) {
  throw Error(Exit::checkpoint, what, hint, __FILE__, __LINE__);
}

std::string read_text(const fs::path& path, std::uint64_t limit) {
  const File file = File::open(path, Exit::checkpoint, false);
  const std::uint64_t bytes = file.size();
  if (bytes > limit) refuse(fmt::format("{} has {} bytes: too many", path.string(), bytes));
  std::string text(bytes, '\0');
  file.read(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

// Returns the manifest's text after every check that does not read the shards: missing files,
// surplus files, and whether this is the manifest that was verified here.
std::string read_manifest(const fs::path& dir) {
  std::error_code ec;
  const fs::file_status status = fs::symlink_status(dir, ec);
  if (!fs::exists(status)) refuse(fmt::format("{} is missing", dir.string()));
  if (status.type() != fs::file_type::directory)
    refuse(fmt::format("{} is not a directory", dir.string()));
  const fs::path path = dir / manifest_name;
  if (!fs::exists(fs::symlink_status(path, ec)))
    refuse(fmt::format("{} has no {}: an interrupted save, or not a checkpoint", dir.string(),
                       manifest_name));
  std::string text = read_text(path, longest_manifest);
  const Manifest m = manifest_from_text(text, path.string());

  // A directory whose name is no step's is accepted at any step.
  const auto named = step_of(dir.filename().string());
  if (named && *named != m.info.step)
    refuse(fmt::format("{} is the manifest of step {}: of another checkpoint", path.string(),
                       m.info.step));
  const fs::path mark = dir / verified_name;
  if (fs::exists(fs::symlink_status(mark, ec)) &&
      read_text(mark, 4096) != manifest_hash(text) + "\n")
    refuse(fmt::format("{} does not fit {}: either is damaged or of another run", mark.string(),
                       manifest_name));

  std::set<std::string> present;
  for (const fs::path& entry : entries_of(dir, Exit::checkpoint)) {
    const std::string name = entry.filename().string();
    if (name.starts_with("shard_")) present.insert(name);
  }
  for (const ShardTable& s : m.shards)
    if (present.erase(s.file) == 0) refuse(fmt::format("{} is missing", (dir / s.file).string()));
  if (!present.empty())
    refuse(fmt::format("{} is one shard too many: not in {}", (dir / *present.begin()).string(),
                       manifest_name));
  return text;
}

// Compares this part's blocks of all shards with their hashes: part p takes the blocks whose
// running number is p modulo `parts`, so that the work is even at any rank count. Throws at the
// first that differs.
void verify_blocks(const Manifest& m, const fs::path& dir, int part, int parts) {
  std::vector<std::byte> buffer;
  std::uint64_t number = 0;
  for (std::size_t rank = 0; rank < m.shards.size(); ++rank) {
    const ShardTable& s = m.shards[rank];
    const fs::path path = dir / s.file;
    const File file = File::open(path, Exit::checkpoint, false);
    if (file.size() != s.bytes)
      refuse(fmt::format("{} has {} bytes, {} were saved", path.string(), file.size(), s.bytes));
    for (std::size_t b = 0; b < s.blocks.size(); ++b, ++number) {
      if (number % static_cast<std::uint64_t>(parts) != static_cast<std::uint64_t>(part)) continue;
      const std::uint64_t begin = b * block_bytes, end = std::min(begin + block_bytes, s.bytes);
      buffer.resize(end - begin);
      file.read(buffer, begin);
      const Hash128 found = hash128(buffer);
      if (found == s.blocks[b]) continue;
      // A block that matches another shard's hash means swapped files, not damaged bytes.
      for (const ShardTable& other : m.shards)
        if (&other != &s && b < other.blocks.size() && other.blocks[b] == found)
          refuse(fmt::format("{} holds what belongs into {}: swapped or copied over", path.string(),
                             other.file));
      refuse(fmt::format("{} block {} (bytes {} to {}) is damaged; it holds {}", path.string(), b,
                         begin, end, tensors_in(m, static_cast<int>(rank), begin, end)));
    }
  }
}

// Otherwise a checkpoint copied into the directory of another run would pass for that run's state.
void check_run(const CheckpointInfo& info, const fs::path& dir, const std::string& run) {
  if (run.empty() || info.notes.run.empty() || info.notes.run == run) return;
  refuse(fmt::format("{} is of another run ({}) than {} ({})", dir.string(), info.notes.run,
                     (dir.parent_path() / "run.json").string(), run),
         "to resume from it anyway, remove run.json");
}

std::string human_bytes(std::uint64_t bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes < 1000) return fmt::format("{} B", bytes);
  if (b < 1e6) return fmt::format("{:.1f} kB", b / 1e3);
  if (b < 1e9) return fmt::format("{:.1f} MB", b / 1e6);
  return fmt::format("{:.2f} GB", b / 1e9);
}

}  // namespace

// Where every element is. In a shard, a rank's part of a stretch follows its parts of the earlier
// stretches. Their sizes are summed once for each list of cuts, so that a read finds its place
// among thousands of stretches by binary search.
struct Checkpoint::Placement {
  Layout layout;
  std::vector<fs::path> files;                     // one a rank
  std::vector<std::vector<std::int64_t>> before;   // [list][rank * stretches + stretch], elements
  std::vector<std::vector<std::uint64_t>> offset;  // [array][rank], bytes: where the array begins

  Placement(Layout given, std::vector<fs::path> shards)
      : layout(std::move(given)), files(std::move(shards)) {
    std::vector<std::vector<std::int64_t>> size(layout.cuts.size());  // [list][rank], elements
    for (std::size_t list = 0; list < layout.cuts.size(); ++list) {
      before.emplace_back();
      for (int r = 0; r < ranks(); ++r) {
        std::int64_t begin = 0, sum = 0;
        for (const std::int64_t end : layout.cuts[list]) {
          before.back().push_back(sum);
          sum += part_of(begin, end, r, ranks()).size();
          begin = end;
        }
        size[list].push_back(sum);
      }
    }
    std::vector<std::uint64_t> end(files.size(), 0);
    for (const Layout::Array& a : layout.arrays) {
      offset.push_back(end);
      for (std::size_t r = 0; r < end.size(); ++r)
        end[r] += static_cast<std::uint64_t>(size[a.cuts][r]) * sizeof(float);
    }
  }
  int ranks() const { return static_cast<int>(files.size()); }

  // Goes file by file, so that each is opened at most once.
  void read(std::size_t array, std::int64_t begin, std::span<float> out) const {
    const std::size_t list = layout.arrays[array].cuts;
    const std::vector<std::int64_t>& cuts = layout.cuts[list];
    const auto end = begin + static_cast<std::int64_t>(out.size());
    const auto first =
        static_cast<std::size_t>(std::upper_bound(cuts.begin(), cuts.end(), begin) - cuts.begin());
    for (int r = 0; r < ranks(); ++r) {
      const auto rank = static_cast<std::size_t>(r);
      std::optional<File> file;
      for (std::size_t s = first; s < cuts.size(); ++s) {
        const std::int64_t stretch = s == 0 ? 0 : cuts[s - 1];
        if (stretch >= end) break;
        const Part part = part_of(stretch, cuts[s], r, ranks());
        const std::int64_t from = std::max(begin, part.begin), to = std::min(end, part.end);
        if (from >= to) continue;
        if (!file) file.emplace(File::open(files[rank], Exit::checkpoint, false));
        const auto elements =
            static_cast<std::uint64_t>(before[list][rank * cuts.size() + s] + from - part.begin);
        file->read(std::as_writable_bytes(out.subspan(from - begin, to - from)),
                   offset[array][rank] + elements * sizeof(float));
      }
    }
  }
};

// Turns a manifest into the public object.
struct Checkpoint::Loader {
  static Checkpoint make(const fs::path& dir, Manifest m) {
    Checkpoint c;
    c.dir_ = dir;
    c.info_ = std::move(m.info);
    std::vector<fs::path> files;
    for (const Layout::Array& a : m.layout.arrays) {
      c.arrays_[a.name] = a.elements;
      if (const std::size_t n = m.layout.cuts[a.cuts].size(); n > 1)
        c.files_ +=
            fmt::format("    {} in {} stretches, each divided among the ranks\n", a.name, n);
    }
    for (const ShardTable& s : m.shards) {
      files.push_back(dir / s.file);
      c.files_ += fmt::format("    {}  {:>10}  {}  first {}\n", s.file, human_bytes(s.bytes),
                              counted(std::ssize(s.blocks), "block"),
                              s.blocks.empty() ? "-" : to_hex(s.blocks[0]));
    }
    c.files_ += fmt::format("  hash of the state  {}\n", to_hex(m.state_hash));
    c.placement_ = std::make_shared<const Placement>(std::move(m.layout), std::move(files));
    return c;
  }
};

std::optional<Checkpoint> Checkpoint::newest(const std::filesystem::path& run_dir, MPI_Comm comm,
                                             const std::string& run) {
  MPI_Comm own = MPI_COMM_NULL;
  MPI_Comm_dup(comm, &own);
  struct Free {
    MPI_Comm& c;
    ~Free() { MPI_Comm_free(&c); }
  } free{own};
  int rank = 0, size = 1;
  MPI_Comm_rank(own, &rank);
  MPI_Comm_size(own, &size);

  // Rank 0 decides the order of candidates: the one that `latest` names, then older ones; if
  // `latest` is missing, all of them, newest first.
  std::vector<std::int64_t> candidates;
  std::optional<std::string> latest;
  agree(own, attempt([&] {
          if (rank != 0) return;
          candidates = list_steps(run_dir);
          latest = read_latest(run_dir);
        }))
      .raise();
  std::vector<std::string> faults;
  if (latest) {
    const auto named = step_of(*latest);
    const auto it =
        named ? std::find(candidates.begin(), candidates.end(), *named) : candidates.end();
    if (it != candidates.end())
      // Later steps belong to an abandoned run or to another one: never fall back to those.
      candidates.erase(candidates.begin(), it);
    else
      faults.push_back(fmt::format("{} names {}, which is no checkpoint here",
                                   (run_dir / "latest").string(), *latest));
  } else if (rank == 0 && !candidates.empty()) {
    faults.push_back(fmt::format("{} is missing", (run_dir / "latest").string()));
  }
  for (const std::string& f : faults) log::warn("{}", f);

  for (std::size_t i = 0;; ++i) {
    // Rank 0 sends its next candidate as the directory's name and then the manifest's text, so
    // that all ranks judge the same bytes. An empty name ends the search.
    std::string name = i < candidates.size() ? step_name(candidates[i]) : "", text;
    broadcast_sized(name, own);
    if (name.empty()) break;
    const fs::path dir = run_dir / name;
    Outcome o = agree(own, attempt([&] {
                        if (rank == 0) text = read_manifest(dir);
                      }));
    if (o.ok()) {
      broadcast_sized(text, own);
      Manifest m;
      o = agree(own, attempt([&] {
                  m = manifest_from_text(text, (dir / manifest_name).string());
                  if (rank == 0) check_run(m.info, dir, run);
                  verify_blocks(m, dir, rank, size);
                }));
      if (o.ok()) {
        if (rank == 0 && !faults.empty()) log::warn("going on from {}", dir.string());
        return Loader::make(dir, std::move(m));
      }
    }
    faults.push_back(o.error);
    if (rank == 0) log::warn("checkpoint {} is not usable: {}", dir.string(), o.error);
  }
  // Only rank 0 knows of a dangling `latest`; all ranks must leave in the same way.
  const Outcome end =
      agree(own, attempt([&] {
              if (rank != 0 || faults.empty()) return;
              refuse(fmt::format("no checkpoint of {} is usable: {}", run_dir.string(),
                                 fmt::join(faults, "; ")),
                     "restore an intact copy, or start a new run in another run.dir");
            }));
  end.raise();
  return std::nullopt;
}

Checkpoint Checkpoint::open(const std::filesystem::path& given) {
  // `latest` is a link, and so may be a path that a user types; links within the checkpoint are not
  // followed.
  std::error_code ec;
  fs::path dir = fs::canonical(given, ec);
  if (ec) refuse(fmt::format("cannot open {}: {}", given.string(), ec.message()), "check the path");
  Manifest m = manifest_from_text(read_manifest(dir), (dir / manifest_name).string());
  verify_blocks(m, dir, 0, 1);
  return Loader::make(dir, std::move(m));
}

void Checkpoint::read(const std::string& array, std::int64_t begin, std::span<float> out) const {
  const auto it = arrays_.find(array);
  WEFT_CHECK(it != arrays_.end(), Exit::checkpoint, "it was saved by another kind of run",
             "checkpoint {} has no array {}", dir_.string(), array);
  const auto end = begin + static_cast<std::int64_t>(out.size());
  WEFT_CHECK(begin >= 0 && end <= it->second, Exit::checkpoint,
             "the deck's model differs from the one that was saved",
             "elements {} to {} of array {} in checkpoint {}, which has {}", begin, end, array,
             dir_.string(), it->second);
  const auto& all = placement_->layout.arrays;
  const auto named =
      std::find_if(all.begin(), all.end(), [&](const Layout::Array& a) { return a.name == array; });
  placement_->read(static_cast<std::size_t>(named - all.begin()), begin, out);
}

std::string Checkpoint::describe() const {
  std::string text = fmt::format("checkpoint {}\n  step   {}\n  build  {}\n", dir_.string(),
                                 info_.step, info_.build);
  // "costs" are measured times, for weft_simulate and the next start's warnings: no text for
  // people.
  const auto adapter = adapter_facts(*this);
  for (const auto& [name, note] : note_names)
    if (!(info_.notes.*note).empty() && note != &RunNotes::costs &&
        !(note == &RunNotes::task && adapter))
      text += fmt::format("  {}  {}\n", name, info_.notes.*note);
  if (adapter) text += fmt::format("  adapter  {}\n", adapter->describe());
  text += "  arrays (f32)\n";
  for (const auto& [name, elements] : arrays_)
    text += fmt::format("    {:<16} {:>14} elements  {:>10}\n", name, elements,
                        human_bytes(static_cast<std::uint64_t>(elements) * 4));
  text += fmt::format("  tensors ({})\n", info_.tensors.size());
  for (const TensorRange& t : info_.tensors)
    text += fmt::format("    {:<56} [{}] at {}\n", t.name, fmt::join(t.shape, ", "), t.offset);
  text += "  shards\n" + files_ + "  deck\n";
  std::string line;
  for (const char c : info_.deck + (info_.deck.ends_with('\n') ? "" : "\n")) {
    if (c != '\n') {
      line += c;
    } else {
      text += "    " + line + "\n";
      line.clear();
    }
  }
  // The verdict comes last: a terminal shows the end of a long text.
  return text + fmt::format("checkpoint {}: step {}, complete, every byte matches its hash\n",
                            dir_.string(), info_.step);
}

namespace {

constexpr const char* same_model =
    "continue with the [model] and [lora] that the run was started with, or name another run.dir";

// What a run has trained must not be dropped without a word.
void check_surplus(const Checkpoint& c, const ParameterTable& table, const MayLack& lacks) {
  std::vector<std::string> surplus;
  for (const TensorRange& r : c.info().tensors)
    if (table.find(r.name) == nullptr && !(lacks && lacks(r.name))) surplus.push_back(r.name);
  WEFT_CHECK(surplus.empty(), Exit::checkpoint, same_model,
             "{}: of its {} the deck's model lacks {}: {}", c.dir().string(),
             counted(std::ssize(c.info().tensors), "tensor"), surplus.size(), few_of(surplus));
}

// Null where the checkpoint has no trained tensor of that name.
const TensorRange* find_range(const Checkpoint& c, const Parameter& p) {
  for (const TensorRange& r : c.info().tensors)
    if (r.name == p.name) {
      const Shape shape{std::span<const std::int64_t>(r.shape)};
      WEFT_CHECK(shape == p.shape, Exit::checkpoint, same_model,
                 "{}: tensor {} has shape {}, but the deck's model expects {}", c.dir().string(),
                 p.name, shape.str(), p.shape.str());
      return &r;
    }
  return nullptr;
}

const TensorRange& range_of(const Checkpoint& c, const Parameter& p) {
  const TensorRange* range = find_range(c, p);
  WEFT_CHECK(range != nullptr, Exit::checkpoint, same_model, "{} has no tensor {}",
             c.dir().string(), p.name);
  return *range;
}

// Fills `to`, which may be on a GPU, with elements of `array` from `offset` on.
void read_into(const Checkpoint& c, const std::string& array, std::int64_t offset, Tensor& to) {
  if (to.device() == DeviceKind::cpu) {
    c.read(array, offset, to.span<float>());
    return;
  }
  std::vector<float> values(to.numel());
  c.read(array, offset, values);
  to.set(std::span<const float>(values));
}

// Reads `array` of the checkpoint into `target(b)`, which holds elements `owned(b)` of the flat
// space, for each bucket b.
template <class Owned, class Target>
void read_trainable(const Checkpoint& c, const std::string& array, ParameterTable& table,
                    Owned&& owned, Target&& target) {
  for (const auto& p : table.all()) {
    if (!p->trainable) continue;
    const Part part = owned(p->bucket);
    const std::int64_t first = std::max(p->offset, part.begin);
    const std::int64_t last = std::min(p->offset + p->shape.numel(), part.end);
    const TensorRange& range = range_of(c, *p);
    if (first >= last) continue;
    Tensor to = target(p->bucket).slice(first - part.begin, last - part.begin);
    read_into(c, array, range.offset + first - p->offset, to);
  }
}

void read_fixed(const Checkpoint& c, ParameterTable& table) {
  const auto it = c.arrays().find("fixed");
  WEFT_CHECK(it != c.arrays().end() && it->second == table.fixed().numel(), Exit::checkpoint,
             "continue with the [model] table that the run was started with",
             "{}: its parameters that are not trained do not fit the deck's model",
             c.dir().string());
  read_into(c, "fixed", 0, table.fixed());
}

// Reads weights alone, piece by piece, into whatever formats the table keeps. A parameter that the
// checkpoint does not name was not trained by the run, whether or not this table would train it.
void read_weights(const Checkpoint& c, const std::string& array, ParameterTable& table,
                  const MayLack& lacks) {
  check_surplus(c, table, lacks);
  std::map<const Parameter*, std::int64_t> fixed;
  const Parameter* first_fixed = nullptr;  // the last to be placed
  const std::int64_t length = table.lay_out_fixed(
      [&](const Parameter& p) { return find_range(c, p) == nullptr; },
      [&](Parameter& p, std::int64_t offset) { fixed[first_fixed = &p] = offset; });
  const auto stored = c.arrays().find("fixed");
  const std::int64_t there = stored == c.arrays().end() ? 0 : stored->second;
  WEFT_CHECK(length == there, Exit::checkpoint,
             "use the [model] and [vae] tables that the run was started with",
             "{} has {}: the deck's model has {} elements more than it names, and its run left {} "
             "untrained",
             c.dir().string(),
             first_fixed != nullptr ? "no tensor " + first_fixed->name : "tensors of another model",
             length, there);
  constexpr std::int64_t piece = std::int64_t{1} << 20;
  for (const auto& p : table.all()) {
    const auto place = fixed.find(p.get());
    const bool trained = place == fixed.end();
    const std::int64_t offset = trained ? range_of(c, *p).offset : place->second;
    for (std::int64_t at = 0; at < p->shape.numel(); at += piece) {
      std::vector<float> values(std::min(piece, p->shape.numel() - at));
      c.read(trained ? array : "fixed", offset + at, values);
      p->set(at, values);
    }
  }
}

}  // namespace

CheckpointInfo describe_state(const Deck& deck, ParameterTable& table, std::int64_t steps_done) {
  CheckpointInfo info;
  info.step = steps_done;
  info.deck = to_toml(deck);
  info.build = version_line();
  for (const auto& p : table.all())
    if (p->trainable)
      info.tensors.push_back(
          {p->name, {p->shape.dims().begin(), p->shape.dims().end()}, p->offset});
  return info;
}

namespace {

// The array of a moving average, `number` in the list of decays.
std::string ema_name(std::size_t number, double decay) {
  return number == 0 ? "ema" : fmt::format("ema_{}", decay);
}

// The averages that a checkpoint holds: decays, and the arrays' names. Its deck says which decay is
// the first one's.
std::vector<std::pair<double, std::string>> stored_averages(const Checkpoint& c) {
  std::vector<std::pair<double, std::string>> stored;
  const Deck deck = parse_deck(c.info().deck, c.dir().string(), {});
  for (std::size_t i = 0; i < deck.train.ema_decay.size(); ++i) {
    const double decay = deck.train.ema_decay[i];
    if (const std::string name = ema_name(i, decay); c.arrays().contains(name))
      stored.emplace_back(decay, name);
  }
  return stored;
}

// The name of the average of that decay; "" if there is none.
std::string array_of(const std::vector<std::pair<double, std::string>>& stored, double decay) {
  for (const auto& [known, name] : stored)
    if (known == decay) return name;
  return "";
}

}  // namespace

std::vector<FlatArray> flat_arrays(ParameterTable& table, const OptimizerState& state, int rank,
                                   int ranks) {
  std::vector<std::int64_t> cuts;
  for (const ParameterTable::Bucket& b : table.buckets()) cuts.push_back(b.end);
  // Each rank writes its part of every bucket: all that it holds if the state is sharded.
  const auto flat = [&](const std::string& name, auto&& array) {
    FlatArray a{name, cuts.back(), cuts, {}, table.values().device()};
    for (int b = 0; b < static_cast<int>(cuts.size()); ++b) {
      const auto& bucket = table.buckets()[b];
      const Part mine = part_of(bucket.begin, bucket.end, rank, ranks), held = state.part(b);
      const Tensor t = array(b).slice(mine.begin - held.begin, mine.end - held.begin);
      a.parts.emplace_back(t.device_data<float>(), static_cast<std::size_t>(t.numel()));
    }
    return a;
  };
  const Part fixed = part_of(0, table.fixed().numel(), rank, ranks);
  const FlatArray rest{
      "fixed",
      table.fixed().numel(),
      {},
      {{table.fixed().device_data<float>() + fixed.begin, static_cast<std::size_t>(fixed.size())}},
      table.fixed().device()};
  std::vector<FlatArray> all = {flat("master", [&](int b) { return state.master(b); }),
                                flat("exp_avg", [&](int b) { return state.exp_avg(b); })};
  if (state.has_squares())
    all.push_back(flat("exp_avg_sq", [&](int b) { return state.exp_avg_sq(b); }));
  for (int i = 0; i < state.averages(); ++i) {
    const auto number = static_cast<std::size_t>(i);
    all.push_back(flat(ema_name(number, state.ema_decays()[number]),
                       [&, i](int b) { return state.ema(b, i); }));
  }
  all.push_back(rest);
  return all;
}

void restore_state(const Checkpoint& checkpoint, ParameterTable& table, const MayLack& lacks) {
  read_weights(checkpoint, "master", table, lacks);
}

void restore_state(const Checkpoint& checkpoint, ParameterTable& table, OptimizerState& state) {
  check_surplus(checkpoint, table, nullptr);
  const auto read = [&](const std::string& name, auto&& array) {
    read_trainable(
        checkpoint, name, table, [&](int b) { return state.part(b); }, array);
  };
  read("master", [&](int b) { return state.master(b); });
  read("exp_avg", [&](int b) { return state.exp_avg(b); });
  if (state.has_squares()) read("exp_avg_sq", [&](int b) { return state.exp_avg_sq(b); });
  const auto stored = stored_averages(checkpoint);
  for (int i = 0; i < state.averages(); ++i) {
    const double decay = state.ema_decays()[static_cast<std::size_t>(i)];
    const std::string name = array_of(stored, decay);
    if (name.empty() && !stored.empty())
      log::info("{} has no average of decay {}: it goes on from that of {}",
                checkpoint.dir().string(), decay, stored.front().first);
    read(name.empty() ? "ema" : name, [&](int b) { return state.ema(b, i); });
  }
  read_fixed(checkpoint, table);
  table.refresh_working();
}

std::string ema_array(const Checkpoint& checkpoint, std::optional<double> decay) {
  if (!decay) return "ema";
  const auto stored = stored_averages(checkpoint);
  const std::string name = array_of(stored, *decay);
  std::vector<double> decays;
  for (const auto& average : stored) decays.push_back(average.first);
  WEFT_CHECK(!name.empty(), Exit::usage,
             fmt::format("its averages have the decays {}", fmt::join(decays, ", ")),
             "{} has no moving average of decay {}", checkpoint.dir().string(), *decay);
  return name;
}

void restore_ema(const Checkpoint& checkpoint, ParameterTable& table, std::optional<double> decay,
                 const MayLack& lacks) {
  read_weights(checkpoint, ema_array(checkpoint, decay), table, lacks);
}

}  // namespace weft
