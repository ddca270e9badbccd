#include "checkpoint/weights.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "config/deck.h"
#include "core/error.h"
#include "core/file.h"
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

void read_parameter(const WeightFiles& files, const WeightFiles::Tensor& from, Parameter& p) {
  for (std::int64_t first = 0; first < p.shape.numel(); first += piece) {
    const std::int64_t n = std::min(piece, p.shape.numel() - first);
    if (p.value.defined()) {
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

}  // namespace

void check_weights(const WeightFiles& files, const ParameterTable& whole,
                   const WeightNames& names) {
  const std::string path = files.path().string();
  std::vector<std::string> known, others, held;
  for (const auto& p : whole.all()) {
    if (!p->name.starts_with(names.prefix)) continue;
    known.push_back(name_in_files(*p, names));
    if (names.others)
      for (std::string& other : names.others(known.back())) others.push_back(std::move(other));
  }
  std::sort(others.begin(), others.end());
  for (const WeightFiles::Tensor& t : files.tensors()) {
    const std::string& name = t.entry.name;
    held.push_back(name);
    const bool ours = whole.find(names.prefix + name) != nullptr ||
                      (names.spare && names.spare(name)) ||
                      std::binary_search(others.begin(), others.end(), name);
    WEFT_CHECK(ours, Exit::data, nearest(name, known, "the model's", names.section),
               "{}: tensor \"{}\" is not a parameter of this model", path, name);
  }
  for (const auto& p : whole.all()) {
    if (!p->name.starts_with(names.prefix)) continue;
    const std::string name = name_in_files(*p, names);
    const WeightFiles::Tensor* t = find(files, *p, names);
    if (t == nullptr && names.may_lack && names.may_lack(name)) continue;
    WEFT_CHECK(t != nullptr, Exit::data, nearest(name, held, "the file's", names.section),
               "{} has no tensor {}", path, name);
    WEFT_CHECK(std::ranges::equal(t->entry.shape, p->shape.dims()), Exit::data,
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
    if (!p->name.starts_with(names.prefix) || (skip && skip(*p))) continue;
    if (const WeightFiles::Tensor* t = find(files, *p, names)) {
      reads.emplace_back(t, p.get());
    } else {  // one that files may lack
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

std::string describe(const WeightFiles& files) {
  return fmt::format("{}, {}", files.path().string(),
                     counted(std::ssize(files.tensors()), "tensor"));
}

std::string load_weights(const std::filesystem::path& path, ParameterTable& table,
                         const WeightNames& names) {
  const WeightFiles files = WeightFiles::open(path);
  check_weights(files, table, names);
  read_weights(files, table, names);
  return describe(files);
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
  replace_file(path.string() + ".index.json", index.dump(2) + "\n", Exit::data, Durable::yes);
}

}  // namespace weft
