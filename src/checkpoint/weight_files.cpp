#include "checkpoint/weight_files.h"

#include <algorithm>
#include <map>

#include "checkpoint/safetensors_header.h"
#include "checkpoint/weight_index.h"
#include "core/error.h"

namespace weft {
namespace {

constexpr const char* damaged = "copy the model again: its index and its shards belong together";

// Opens the shards that the index names and takes from each what it says is there.
void open_shards(const std::filesystem::path& index, std::vector<SafetensorsFile>& shards,
                 std::vector<WeightFiles::Tensor>& tensors) {
  const std::map<std::string, std::string> map = detail::read_weight_index(index);
  std::map<std::string, std::size_t> opened;
  for (const auto& [name, shard] : map) {
    const std::filesystem::path file = index.parent_path() / shard;
    const auto [place, fresh] = opened.emplace(shard, shards.size());
    if (fresh) {
      WEFT_CHECK(std::filesystem::exists(file), Exit::data,
                 "copy the missing shard beside the index", "{} names {}, which is not there",
                 index.string(), file.string());
      shards.push_back(SafetensorsFile::open(file));
    }
    const SafetensorEntry* e = shards[place->second].find(name);
    WEFT_CHECK(e != nullptr, Exit::data, damaged, "{} says that tensor {} is in {}, but it is not",
               index.string(), detail::printable(name), shard);
    tensors.push_back({*e, place->second});
  }
  for (const SafetensorsFile& s : shards)
    for (const SafetensorEntry& e : s.entries()) {
      const auto it = map.find(e.name);
      const std::string shard = s.path().filename().string();
      WEFT_CHECK(it != map.end(), Exit::data, damaged, "{} holds tensor {}, which {} does not name",
                 s.path().string(), detail::printable(e.name), index.string());
      WEFT_CHECK(it->second == shard, Exit::data, damaged, "tensor {} is in {} and in {}",
                 detail::printable(e.name), it->second, s.path().string());
    }
}

}  // namespace

WeightFiles WeightFiles::open(const std::filesystem::path& path) {
  WeightFiles w;
  w.path_ = path;
  const std::filesystem::path file = detail::find_weights(path);
  if (detail::is_index(file)) {
    open_shards(file, w.shards_, w.tensors_);
  } else {
    w.shards_.push_back(SafetensorsFile::open(file));
    for (const SafetensorEntry& e : w.shards_[0].entries()) w.tensors_.push_back({e, 0});
  }
  std::sort(w.tensors_.begin(), w.tensors_.end(),
            [](const Tensor& a, const Tensor& b) { return a.entry.name < b.entry.name; });
  return w;
}

const WeightFiles::Tensor* WeightFiles::find(const std::string& name) const {
  const auto it =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const Tensor& t, const std::string& n) { return t.entry.name < n; });
  return it != tensors_.end() && it->entry.name == name ? &*it : nullptr;
}

void WeightFiles::read_f32(const Tensor& t, std::int64_t first, std::span<float> out) const {
  shards_[t.shard].read_f32(t.entry, first, out);
  bytes_read_ += out.size() * size_of(t.entry.dtype);
}

void WeightFiles::read_bf16(const Tensor& t, std::int64_t first, std::span<bf16> out) const {
  shards_[t.shard].read_bf16(t.entry, first, out);
  bytes_read_ += out.size() * size_of(t.entry.dtype);
}

}  // namespace weft
