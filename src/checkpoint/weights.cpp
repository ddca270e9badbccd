#include "checkpoint/weights.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

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

bool same_shape(const WeightFiles::Tensor& t, const Parameter& p) {
  return std::ranges::equal(t.entry.shape, p.shape.dims());
}

void read_parameter(const WeightFiles& files, const WeightFiles::Tensor& from, Parameter& p) {
  for (std::int64_t first = 0; first < p.shape.numel(); first += piece) {
    const std::int64_t n = std::min(piece, p.shape.numel() - first);
    if (p.value.defined() || p.sharded) {
      std::vector<float> values(n);
      files.read_f32(from, first, values);
      p.set(first, values);
    } else {  // bf16_only: no f32 copy is made
      std::vector<bf16> values(n);
      files.read_bf16(from, first, values);
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
  for (const auto& p : whole.all()) {
    if (!is_meant(*p, names)) continue;
    const WeightFiles::Tensor* t = find(files, *p, names);
    const std::string name = name_in_files(*p, names);
    if (t == nullptr) {
      ++missing;
      add(name, "missing: keeps its initial value");
    } else if (same_shape(*t, *p)) {
      ++loaded;
      add(name, "loaded");
    } else {
      ++reshaped;
      add(name, fmt::format("skipped: [{}] in the file, {} in the model, keeps its initial value",
                            fmt::join(t->entry.shape, ", "), p->shape.str()));
    }
  }
  for (const WeightFiles::Tensor* t : unexpected)
    add(t->entry.name, "unexpected: not a parameter of this model, not read");
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
}

}  // namespace

std::string kind_of_tensor(const std::string& name) {
  std::string kind;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t end = std::min(name.find('.', at), name.size());
    const std::string part = name.substr(at, end - at);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    kind += (at > 0 ? "." : "") + (number ? "*" : part);
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

void check_weights(const WeightFiles& files, const ParameterTable& whole,
                   const WeightNames& names) {
  const std::string path = files.path().string();
  std::vector<std::string> known, others, held;
  for (const auto& p : whole.all()) {
    if (!is_meant(*p, names)) continue;
    known.push_back(name_in_files(*p, names));
    if (names.others)
      for (std::string& other : names.others(known.back())) others.push_back(std::move(other));
  }
  std::sort(others.begin(), others.end());
  std::vector<const WeightFiles::Tensor*> unexpected;
  for (const WeightFiles::Tensor& t : files.tensors()) {
    const std::string& name = t.entry.name;
    held.push_back(name);
    const Parameter* p = whole.find(names.prefix + name);
    const bool ours = (p != nullptr && is_meant(*p, names)) || (names.spare && names.spare(name)) ||
                      std::binary_search(others.begin(), others.end(), name);
    if (!ours) unexpected.push_back(&t);
    WEFT_CHECK(ours || names.matching, Exit::data,
               nearest(name, known, "the model's", names.section),
               "{}: tensor \"{}\" is not a parameter of this model", path, name);
  }
  if (names.matching) return log_match(files, whole, names, unexpected);
  for (const auto& p : whole.all()) {
    if (!is_meant(*p, names)) continue;
    const std::string name = name_in_files(*p, names);
    const WeightFiles::Tensor* t = find(files, *p, names);
    if (t == nullptr && names.may_lack && names.may_lack(name)) continue;
    WEFT_CHECK(t != nullptr, Exit::data, nearest(name, held, "the file's", names.section),
               "{} has no tensor {}", path, name);
    WEFT_CHECK(same_shape(*t, *p), Exit::data,
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
    if (t != nullptr && (!names.matching || same_shape(*t, *p))) {
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

std::string load_weights(const std::filesystem::path& path, ParameterTable& table,
                         const WeightNames& names) {
  const WeightFiles files = WeightFiles::open(path);
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

std::uint64_t bytes_of(const Item& item, DType dtype) {
  std::uint64_t n = size_of(dtype);
  for (const std::int64_t d : item.shape) n *= static_cast<std::uint64_t>(d);
  return n;
}

template <class T>
std::vector<std::byte> converted(std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  auto* to = reinterpret_cast<T*>(bytes.data());
  for (std::size_t i = 0; i < values.size(); ++i) to[i] = T(values[i]);
  return bytes;
}

void write_item(SafetensorsWriter& file, std::size_t place, const Item& item,
                const SaveWeights& how) {
  Tensor host;
  std::span<const float> values;
  if (item.buffer != nullptr) {
    values = *item.buffer;
  } else {
    const Parameter& p = *item.parameter;
    const std::int64_t n = p.shape.numel();
    const bool replaced = how.values.defined() && p.trainable;
    host = (replaced ? how.values.slice(p.offset, p.offset + n) : p.value.view({n})).to_host();
    values = host.span<float>();
  }
  if (how.dtype == DType::bf16)
    file.write(place, converted<bf16>(values));
  else if (how.dtype == DType::f16)
    file.write(place, converted<f16>(values));
  else
    file.write(place, std::as_bytes(values));
}

void write_file(const std::filesystem::path& path, std::span<const Item> items,
                const SaveWeights& how) {
  std::vector<SafetensorWrite> list;
  for (const Item& i : items) list.push_back({i.name, how.dtype, i.shape, {}});
  SafetensorsWriter file(path, list, {{"format", "pt"}, {"producer", "weft"}});
  for (std::size_t i = 0; i < items.size(); ++i) write_item(file, i, items[i], how);
  file.finish();
}

}  // namespace

void save_weights(const std::filesystem::path& path, const ParameterTable& table,
                  const SaveWeights& how) {
  const std::vector<Item> items = items_of(table, how);
  std::vector<std::size_t> begins;  // of the shards
  std::uint64_t filled = 0, all = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::uint64_t bytes = bytes_of(items[i], how.dtype);
    if (i == 0 || (how.shard_bytes > 0 && filled + bytes > how.shard_bytes)) {
      begins.push_back(i);
      filled = 0;
    }
    filled += bytes;
    all += bytes;
  }
  if (begins.size() <= 1) return write_file(path, items, how);
  begins.push_back(items.size());
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
