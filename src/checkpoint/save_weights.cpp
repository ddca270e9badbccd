#include <nlohmann/json.hpp>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/file.h"

namespace weft {
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
