#include "checkpoint/weights.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/adapter.h"
#include "config/deck.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"

namespace weft {
namespace {

// Elements per read: 16 MiB of floats.
constexpr std::int64_t piece = std::int64_t{1} << 22;

// The name of a parameter in files.
std::string name_in_files(const Parameter& p, const WeightNames& names) {
  return p.name.substr(names.prefix.size());
}

const WeightFiles::Tensor* find(const WeightFiles& files, const Parameter& p,
                                const WeightNames& names) {
  const std::string name = name_in_files(p, names);
  if (const WeightFiles::Tensor* t = files.find(name)) return t;
  if (names.others)
    for (const std::string& other : names.others(name))
      if (const WeightFiles::Tensor* t = files.find(other)) return t;
  return nullptr;
}

// A hint that names the nearest of `known`.
std::string nearest(const std::string& name, const std::vector<std::string>& known,
                    const char* whose, const std::string& section) {
  const std::string near = nearest_name(name, known);
  if (!near.empty()) return fmt::format("{} nearest name is \"{}\"", whose, near);
  return fmt::format("check that the deck's [{}] is the one these weights belong to", section);
}

// Whether files are meant to have that parameter.
bool is_meant(const Parameter& p, const WeightNames& names) {
  return p.role != Parameter::Role::adapter && p.name.starts_with(names.prefix);
}

bool fits(const WeightFiles::Tensor& t, const Parameter& p) {
  return std::ranges::equal(t.entry.shape, p.shape.dims()) && is_floating(t.entry);
}

// Damage, or a training that diverged, would show only in the results.
template <class T>
void check_finite(std::span<const T> values, const WeightFiles& files,
                  const WeightFiles::Tensor& from) {
  bool finite = true;  // without a way out of the loop, which can then take many at once
  for (const T v : values) finite &= std::isfinite(static_cast<float>(v));
  WEFT_CHECK(finite, Exit::data,
             "weft inspect lists such tensors: copy the file again, or take another",
             "{}: tensor {} has values that are not finite", files.file_of(from).string(),
             printable(from.entry.name));
}

void read_parameter(const WeightFiles& files, const WeightFiles::Tensor& from, Parameter& p) {
  for (std::int64_t first = 0; first < p.shape.numel(); first += piece) {
    const std::int64_t n = std::min(piece, p.shape.numel() - first);
    if (p.value.defined() || p.sharded) {
      std::vector<float> values(n);
      files.read_f32(from, first, values);
      check_finite<float>(values, files, from);
      p.set(first, values);
    } else {  // bf16_only: no f32 copy is made
      std::vector<bf16> values(n);
      files.read_bf16(from, first, values);
      check_finite<bf16>(values, files, from);
      p.working.view({p.shape.numel()}).slice(first, first + n).set(std::span<const bf16>(values));
    }
  }
}

// What of the files a training starts from and what not, a line for each kind of tensor.
void log_match(const WeightFiles& files, const ParameterTable& whole, const WeightNames& names,
               const std::vector<const WeightFiles::Tensor*>& unexpected) {
  struct Row {
    std::string kind, what;
    std::int64_t tensors = 0;
  };
  std::vector<Row> rows;
  const auto add = [&](const std::string& name, const std::string& what) {
    const std::string kind = kind_of_tensor(name);
    const auto row = std::find_if(rows.begin(), rows.end(),
                                  [&](const Row& r) { return r.kind == kind && r.what == what; });
    if (row == rows.end())
      rows.push_back({kind, what, 1});
    else
      ++row->tensors;
  };
  std::int64_t loaded = 0, missing = 0, reshaped = 0;
  std::vector<std::string> kept, unread;
  for (const auto& p : whole.all()) {
    if (!is_meant(*p, names)) continue;
    const WeightFiles::Tensor* t = find(files, *p, names);
    const std::string name = name_in_files(*p, names);
    if (t != nullptr && fits(*t, *p)) {
      ++loaded;
      add(name, "loaded");
      continue;
    }
    kept.push_back(name);
    if (t == nullptr) {
      ++missing;
      add(name, "missing: keeps its initial value");
    } else {
      ++reshaped;
      add(name,
          fmt::format("skipped: {} [{}] in the file, {} in the model, keeps its initial value",
                      t->entry.type, fmt::join(t->entry.shape, ", "), p->shape.str()));
    }
  }
  for (const WeightFiles::Tensor* t : unexpected) {
    unread.push_back(t->entry.name);
    add(t->entry.name, "unexpected: not a parameter of this model, not read");
  }
  WEFT_CHECK(loaded > 0, Exit::data,
             fmt::format("check that the deck's [{}] is the one these weights belong to; such as "
                         "\"{}\" is in the file",
                         names.section,
                         files.tensors().empty() ? "nothing" : files.tensors()[0].entry.name),
             "{}: not one tensor fits the model by name and shape", files.path().string());
  log::info(
      "weights   {} by name and shape: {} loaded, {} missing, {} skipped by shape, {} "
      "unexpected",
      files.path().string(), loaded, missing, reshaped, unexpected.size());
  for (const Row& r : rows) log::info("weights   {:<48} {:>4}  {}", r.kind, r.tensors, r.what);
  const auto all = loaded + std::ssize(kept);
  if (log::rank() == 0 && 2 * loaded < all)
    log::warn(
        "only {} of the model's {} tensors come from {}; random: {}; of the file not used: {}",
        loaded, all, files.path().string(), few_of(kept), few_of(unread));
}

}  // namespace

std::string kind_of_tensor(const std::string& name) {
  std::string kind;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find_first_of("._", at), name.size());
    const std::string part = name.substr(at, end - at);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    kind += number ? "*" : part;
    if (end < name.size()) kind += name[end];
    at = end + 1;
  }
  return kind;
}

std::string renamed_parts(std::string name,
                          const std::vector<std::pair<std::string_view, std::string_view>>& parts) {
  const auto ends_part = [&](std::size_t at) { return at == name.size() || name[at] == '.'; };
  for (const auto& [from, to] : parts)
    for (std::size_t at = 0; at != name.npos; at = name.find('.', at)) {
      if (at > 0) ++at;  // behind the dot
      if (name.compare(at, from.size(), from) != 0 || !ends_part(at + from.size())) continue;
      name.replace(at, from.size(), to);
      break;
    }
  return name;
}

WeightNames to_start_from(const ModelDeck& deck, WeightNames names) {
  names.matching = deck.weights_partial == "matching";
  names.hashed = true;
  return names;
}

std::string few_of(const std::vector<std::string>& names) {
  constexpr std::size_t most = 3;
  std::string text = names.empty() ? "nothing" : "";
  for (std::size_t i = 0; i < std::min(names.size(), most); ++i)
    text += fmt::format("{}\"{}\"", i > 0 ? ", " : "", printable(names[i]));
  return text + (names.size() > most ? fmt::format(" and {} more", names.size() - most) : "");
}

std::string strip_prefix(WeightFiles& files, const std::set<std::string>& known) {
  std::map<std::string, std::size_t> counts;
  for (const WeightFiles::Tensor& t : files.tensors())
    for (std::size_t at = 0; at < t.name.size(); at = t.name.find('.', at), at += at != t.name.npos)
      if (known.contains(t.name.substr(at))) ++counts[t.name.substr(0, at)];
  const auto most = std::ranges::max_element(counts, {}, [](const auto& c) { return c.second; });
  if (most == counts.end() || most->second <= counts[""] ||
      2 * most->second <= std::min(known.size(), files.tensors().size()))
    return "";
  files.strip(most->first);
  log::info("weights   {}: names without their prefix \"{}\"", files.path().string(), most->first);
  return most->first;
}

void check_weights(WeightFiles& files, const ParameterTable& whole, const WeightNames& names) {
  const std::string path = files.path().string();
  WEFT_CHECK(!holds_adapter(files), Exit::data,
             "name its base here, and the adapter as generate.adapters or, to go on training it, "
             "model.adapters; or merge its run into the base: weft export RUN FILE --merged",
             "{} holds an adapter (LoRA), not weights", path);
  std::vector<std::string> known, held;
  std::set<std::string> taken;  // with other names
  for (const auto& p : whole.all()) {
    if (!is_meant(*p, names)) continue;
    known.push_back(name_in_files(*p, names));
    taken.insert(known.back());
    if (names.others)
      for (const std::string& other : names.others(known.back())) taken.insert(other);
  }
  const std::string prefix = strip_prefix(files, taken);
  std::vector<const WeightFiles::Tensor*> unexpected;
  std::vector<std::string> surplus, buffers;
  for (const WeightFiles::Tensor& t : files.tensors()) {
    held.push_back(t.name);
    if (taken.contains(t.name)) {
      // Whole numbers under a weight's name do not match; F8_E4M3 is a weight that is not read.
      if (!names.matching || t.entry.type.find('F') != t.entry.type.npos)
        check_floating(t.entry, files.file_of(t));
    } else if (!t.name.ends_with(".num_batches_tracked") && !(names.spare && names.spare(t.name))) {
      unexpected.push_back(&t);
      // Parameters are floating: the rest are counts, positions, a tokenizer's bytes.
      (t.entry.type.find('F') == t.entry.type.npos ? buffers : surplus).push_back(t.entry.name);
    }
  }
  if (names.matching) return log_match(files, whole, names, unexpected);
  if (!surplus.empty()) {
    const bool part = !prefix.empty() && !surplus.front().starts_with(prefix);
    const std::string first = surplus.front();
    surplus.erase(surplus.begin());
    throw Error(
        Exit::data,
        fmt::format("{}: tensor \"{}\" is not a parameter of this model{}", path, printable(first),
                    surplus.empty() ? "" : ", nor is " + few_of(surplus)),
        part ? fmt::format("convert_weights.py --only {} takes the part that is meant", prefix)
             : nearest(first, known, "the model's", names.section),
        __FILE__, __LINE__);
  }
  if (!buffers.empty())
    log::info("weights   {}: not read, as they are no weights: {}", path, few_of(buffers));
  for (const auto& p : whole.all()) {
    if (!is_meant(*p, names)) continue;
    const std::string name = name_in_files(*p, names);
    const WeightFiles::Tensor* t = find(files, *p, names);
    if (t == nullptr && names.may_lack && names.may_lack(name)) continue;
    const std::string shards = detail::shards_of(files.path());
    WEFT_CHECK(t != nullptr, Exit::data,
               shards.empty() ? nearest(name, held, "the file's", names.section)
                              : fmt::format("it is one of {}: name their folder", shards),
               "{} has no tensor {}", path, name);
    WEFT_CHECK(fits(*t, *p), Exit::data,
               fmt::format("check the sizes in the deck's [{}]", names.section),
               "{}: tensor \"{}\" has shape [{}], but the model expects {}", path, t->entry.name,
               fmt::join(t->entry.shape, ", "), p->shape.str());
  }
}

void read_weights(const WeightFiles& files, ParameterTable& part, const WeightNames& names,
                  const std::function<bool(const Parameter&)>& skip) {
  // In the order of the files, so that disks are read forwards.
  std::vector<std::pair<const WeightFiles::Tensor*, Parameter*>> reads;
  for (const auto& p : part.all()) {
    if (!is_meant(*p, names) || (skip && skip(*p))) continue;
    const WeightFiles::Tensor* t = find(files, *p, names);
    if (t != nullptr && (!names.matching || fits(*t, *p))) {
      reads.emplace_back(t, p.get());
    } else if (!names.matching) {  // one that files may lack
      WEFT_ASSERT(p->init.kind == Init::Kind::constant);
      p->set(0, std::vector<float>(p->shape.numel(), p->init.a));
    }
  }
  std::sort(reads.begin(), reads.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->shard, a.first->entry.begin) <
           std::pair(b.first->shard, b.first->entry.begin);
  });
  for (const auto& [from, to] : reads) read_parameter(files, *from, *to);
}

std::string describe(const WeightFiles& files, bool hashed) {
  return fmt::format("{}, {}{}", files.path().string(),
                     hashed && log::rank() == 0 ? fmt::format("xxh3 {}, ", hash_of(files)) : "",
                     counted(std::ssize(files.tensors()), "tensor"));
}

std::string hash_of(const WeightFiles& files) {
  const std::vector<std::filesystem::path> all = files.files();
  if (all.size() == 1) return to_hex(hash_of_file(all.front()).hash);
  std::string digits;
  for (const std::filesystem::path& file : all) digits += to_hex(hash_of_file(file).hash);
  return to_hex(hash128(std::string_view(digits)));
}

std::string fingerprint_of(WeightFiles files, const ParameterTable& whole,
                           const WeightNames& names) {
  check_weights(files, whole, names);
  constexpr std::int64_t most = 1024;
  Hasher hasher;
  for (const auto& p : whole.all()) {
    const WeightFiles::Tensor* t = find(files, *p, names);
    if (t == nullptr) continue;
    std::vector<bf16> values(static_cast<std::size_t>(std::min(p->shape.numel(), most)));
    files.read_bf16(*t, (p->shape.numel() - std::ssize(values)) / 2, values);
    hasher.add(std::as_bytes(std::span(p->name)));
    hasher.add(std::as_bytes(std::span<const bf16>(values)));
  }
  return to_hex(hasher.value());
}

std::string load_weights(const std::filesystem::path& path, ParameterTable& table,
                         const WeightNames& names) {
  WeightFiles files = WeightFiles::open(path);
  check_weights(files, table, names);
  read_weights(files, table, names);
  return describe(files, names.hashed);
}

namespace {

struct Item {
  std::string name;
  std::vector<std::int64_t> shape;
  const Parameter* parameter = nullptr;  // or
  const std::vector<float>* buffer = nullptr;
};

std::vector<Item> items_of(const ParameterTable& table, const SaveWeights& how) {
  std::vector<Item> items;
  for (const auto& p : table.all())
    if (!how.skip || !how.skip(*p))
      items.push_back({p->name, {p->shape.dims().begin(), p->shape.dims().end()}, p.get()});
  for (const auto& [name, values] : how.buffers)
    items.push_back(
        {name, {1, static_cast<std::int64_t>(values.size()), 1, 1, 1}, nullptr, &values});
  return items;
}

std::uint64_t stored_size(const Item& item, DType dtype) {
  std::uint64_t n = size_of(dtype);
  for (const std::int64_t d : item.shape) n *= static_cast<std::uint64_t>(d);
  return n;
}

// The bytes of an item in a file that is or will be `path`.
std::vector<std::byte> bytes_of(const Item& item, const SaveWeights& how,
                                const std::filesystem::path& path) {
  if (item.buffer != nullptr) return floats_as(*item.buffer, how.dtype, path, item.name);
  const Parameter& p = *item.parameter;
  const std::int64_t n = p.shape.numel();
  const bool replaced = how.values.defined() && p.trainable;
  const Tensor host =
      (replaced ? how.values.slice(p.offset, p.offset + n) : p.value.view({n})).to_host();
  return floats_as(host.span<float>(), how.dtype, path, item.name);
}

void write_file(const std::filesystem::path& path, std::span<const Item> items,
                const SaveWeights& how) {
  std::vector<SafetensorWrite> list;
  for (const Item& i : items) list.push_back({i.name, how.dtype, i.shape, {}});
  SafetensorsWriter file(path, list, {{"format", "pt"}, {"producer", "weft"}});
  for (std::size_t i = 0; i < items.size(); ++i) file.write(i, bytes_of(items[i], how, path));
  file.finish();
}

}  // namespace

void save_weights(const std::filesystem::path& path, const ParameterTable& table,
                  const SaveWeights& how) {
  const std::vector<Item> items = items_of(table, how);
  std::vector<std::size_t> begins;  // of the shards
  std::uint64_t filled = 0, all = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::uint64_t bytes = stored_size(items[i], how.dtype);
    if (i == 0 || (how.shard_bytes > 0 && filled + bytes > how.shard_bytes)) {
      begins.push_back(i);
      filled = 0;
    }
    filled += bytes;
    all += bytes;
  }
  if (begins.size() <= 1) return write_file(path, items, how);
  begins.push_back(items.size());
  // What does not fit the type must show before the first shard is written.
  for (const Item& i : items) bytes_of(i, how, path);
  const std::string stem = path.stem().string();
  nlohmann::ordered_json index = {{"metadata", {{"total_size", all}}}};
  for (std::size_t s = 0; s + 1 < begins.size(); ++s) {
    const std::string name =
        fmt::format("{}-{:05}-of-{:05}.safetensors", stem, s + 1, begins.size() - 1);
    const auto part = std::span(items).subspan(begins[s], begins[s + 1] - begins[s]);
    write_file(path.parent_path() / name, part, how);
    for (const Item& i : part) index["weight_map"][i.name] = name;
  }
  // Last, so that an index never names a shard that is not complete.
  replace_file(path.string() + ".index.json", dump_json(index, 2) + "\n", Exit::data, Durable::yes);
}

}  // namespace weft
