#include "checkpoint/weight_files.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <regex>

#include "checkpoint/safetensors.h"
#include "core/error.h"
#include "core/file.h"
#include "core/file_kind.h"
#include "core/log.h"

namespace weft::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* index_ending = ".safetensors.index.json";
constexpr const char* convert =
    "convert_weights.py (docs/checkpoints.md) makes safetensors of PyTorch's files (.bin, .pt, "
    ".pth, .ckpt)";
// The same limit as for the header of a safetensors file.
constexpr std::uint64_t longest_index = 100'000'000;

bool ends_with(const fs::path& file, const char* ending) {
  return file.filename().string().ends_with(ending);
}

bool is_pytorch(const fs::path& file) {
  constexpr std::array endings = {".bin", ".pt", ".pth", ".ckpt", ".bin.index.json"};
  return std::any_of(endings.begin(), endings.end(),
                     [&](const char* e) { return ends_with(file, e); });
}

std::string names_of(const std::vector<fs::path>& files) {
  std::string text;
  for (const fs::path& f : files) text += (text.empty() ? "" : ", ") + f.filename().string();
  return text;
}

// All shards of one model, which no index names; empty if the files are others too.
std::vector<fs::path> shards_without_index(const fs::path& folder, std::vector<fs::path> files) {
  std::ranges::sort(files);
  const std::string all = shards_of(files.front());
  if (all.empty() || std::ranges::any_of(files, [&](const auto& f) { return shards_of(f) != all; }))
    return {};
  WEFT_CHECK(files.size() == std::stoul(all.substr(all.rfind('-') + 1)), Exit::data,
             "copy the missing ones, and the index", "{} holds only {} of the shards {}: {}",
             folder.string(), files.size(), all, names_of(files));
  return files;
}

// Releases of several parts have a folder for each.
std::string where_weights_are(const fs::path& folder) {
  std::vector<std::string> parts;
  std::error_code ignored;
  for (const fs::path& part : entries_of(folder, Exit::data))
    for (const fs::path& file : fs::directory_iterator(part, ignored))
      if (ends_with(file, ".safetensors")) {
        parts.push_back(part.string());
        break;
      }
  return parts.empty() ? "name the folder that holds NAME.safetensors or its index"
                       : fmt::format("name one of its folders: {}", fmt::join(parts, ", "));
}

std::vector<fs::path> find_in_folder(const fs::path& folder) {
  std::vector<fs::path> indices, files;
  bool pytorch = false;
  for (const fs::path& file : entries_of(folder, Exit::data)) {
    if (is_index(file)) indices.push_back(file);
    if (ends_with(file, ".safetensors")) files.push_back(file);
    pytorch = pytorch || is_pytorch(file);
  }
  WEFT_CHECK(!indices.empty() || !files.empty(), Exit::data,
             pytorch ? convert : where_weights_are(folder), "{} holds no safetensors file",
             folder.string());
  // In the order in which the libraries that write such folders look.
  for (const char* ending : {".safetensors", index_ending})
    for (const char* stem : {"model", "diffusion_pytorch_model"}) {
      const fs::path file = folder / (std::string(stem) + ending);
      if (is_there(file, Exit::data)) return {file};
    }
  if (indices.empty())
    if (const auto shards = shards_without_index(folder, files); !shards.empty()) return shards;
  const std::vector<fs::path>& among = indices.empty() ? files : indices;
  WEFT_CHECK(among.size() == 1, Exit::data, "name the one that is meant",
             "{} holds {} sets of weights: {}", folder.string(), among.size(), names_of(among));
  return among;
}

// Takes "weight_map" from the parser's events and skips everything else in the index, however
// deeply nested.
class IndexReader : public json::json_sax_t {
 public:
  explicit IndexReader(const std::string& file) : file_(file) {}

  std::map<std::string, std::string> shards;
  bool seen = false;

  bool start_object(std::size_t) override {
    if (depth_ == 1 && key_ == "weight_map") {
      if (seen) refuse("\"weight_map\" occurs twice");
      seen = inside_ = true;
    } else if (inside_) {
      unexpected();
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    inside_ = false;
    return true;
  }
  bool key(std::string& k) override {
    if (depth_ == 1 || inside_) key_ = k;
    return true;
  }
  bool string(std::string& shard) override {
    if (!inside_) return value();
    if (shard.empty() || shard.find('/') != shard.npos || shard == "." || shard == "..")
      refuse(fmt::format("tensor {} is in \"{}\", which is not a file in the index's folder",
                         printable(key_), printable(shard)));
    if (!shards.emplace(key_, shard).second)
      refuse(fmt::format("tensor {} occurs twice", printable(key_)));
    return true;
  }
  bool start_array(std::size_t) override {
    value();
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(std::int64_t) override { return value(); }
  bool number_unsigned(std::uint64_t) override { return value(); }
  bool number_float(double, const std::string&) override { return value(); }
  bool binary(json::binary_t&) override { return value(); }
  bool parse_error(std::size_t at, const std::string&,
                   const nlohmann::detail::exception& e) override {
    refuse(fmt::format("not JSON at byte {}: {}", at, printable(e.what())));
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(Exit::data, fmt::format("{}: {}", file_, what),
                "not the index of a model in shards, or a damaged one: copy it again", __FILE__,
                __LINE__);
  }

 private:
  bool value() {
    if (inside_ || (depth_ == 1 && key_ == "weight_map")) unexpected();
    return true;
  }
  [[noreturn]] void unexpected() const {
    refuse(
        fmt::format("the entry {} of \"weight_map\" is not the name of a file", printable(key_)));
  }

  const std::string& file_;
  std::string key_;
  int depth_ = 0;
  bool inside_ = false;
};

}  // namespace

bool is_index(const fs::path& file) { return ends_with(file, index_ending); }

std::string shards_of(const fs::path& file) {
  static const std::regex form(R"((.+-)\d+-of-(\d{1,6})\.safetensors)");
  const std::string name = file.filename().string();
  std::smatch parts;
  if (!std::regex_match(name, parts, form) || std::stoi(parts[2]) < 2) return "";
  return fmt::format("{}*-of-{}.safetensors", parts[1].str(), parts[2].str());
}

std::vector<fs::path> find_weights(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return find_in_folder(path);
  WEFT_CHECK(!is_pytorch(path), Exit::data, convert, "{} is not a safetensors file", path.string());
  return {path};
}

std::map<std::string, std::string> read_weight_index(const fs::path& file) {
  const File input = File::open(file, Exit::data);
  const std::string name = file.string();
  WEFT_CHECK(input.size() <= longest_index, Exit::data, "an index has a line for each tensor",
             "{} has {} bytes: too long for an index", name, input.size());
  std::string text(input.size(), '\0');
  input.read(std::as_writable_bytes(std::span(text)), 0);
  if (!text.starts_with('{')) refuse_other_kind(file, Exit::data, "name an index or its folder");
  IndexReader reader(name);
  // The JSON library takes a zero byte as the end of the text and would ignore the rest.
  if (text.find('\0') != text.npos) reader.refuse("not JSON: it holds a zero byte");
  json::sax_parse(text, &reader, json::input_format_t::json, true);
  if (!reader.seen || reader.shards.empty()) reader.refuse("no \"weight_map\", or an empty one");
  return reader.shards;
}

}  // namespace weft::detail

namespace weft {
namespace {

constexpr const char* mismatched = "copy the model again: its index and its shards belong together";

// Opens the shards that the index names; index and shards must list the same tensors.
void open_shards(const std::filesystem::path& index, std::vector<SafetensorsFile>& shards,
                 std::vector<WeightFiles::Tensor>& tensors) {
  const std::map<std::string, std::string> map = detail::read_weight_index(index);
  std::map<std::string, std::size_t> opened;
  for (const auto& [name, shard] : map) {
    const std::filesystem::path file = index.parent_path() / shard;
    const auto [place, fresh] = opened.emplace(shard, shards.size());
    if (fresh) {
      WEFT_CHECK(is_there(file, Exit::data), Exit::data,
                 "copy the missing shard into the index's folder",
                 "{} names {}, which is not there", index.string(), file.string());
      shards.push_back(SafetensorsFile::open(file));
    }
    const SafetensorEntry* e = shards[place->second].find(name);
    WEFT_CHECK(e != nullptr, Exit::data, mismatched,
               "{} says that tensor {} is in {}, but it is not", index.string(), printable(name),
               shard);
    tensors.push_back({*e, place->second});
  }
  // The other direction: a shard must hold nothing that the index does not place there.
  for (const SafetensorsFile& s : shards)
    for (const SafetensorEntry& e : s.entries()) {
      const auto it = map.find(e.name);
      const std::string shard = s.path().filename().string();
      WEFT_CHECK(it != map.end(), Exit::data, mismatched,
                 "{} holds tensor {}, which {} does not name", s.path().string(), printable(e.name),
                 index.string());
      WEFT_CHECK(it->second == shard, Exit::data, mismatched, "tensor {} is in {} and in {}",
                 printable(e.name), it->second, s.path().string());
    }
}

}  // namespace

WeightFiles WeightFiles::open(const std::filesystem::path& path) {
  WeightFiles w;
  w.path_ = path;
  const std::vector<std::filesystem::path> files = detail::find_weights(path);
  if (detail::is_index(files.front())) {
    open_shards(files.front(), w.shards_, w.tensors_);
  } else {
    for (const std::filesystem::path& file : files) {
      w.shards_.push_back(SafetensorsFile::open(file));
      for (const SafetensorEntry& e : w.shards_.back().entries())
        w.tensors_.push_back({e, w.shards_.size() - 1});
    }
  }
  for (Tensor& t : w.tensors_) {
    t.name = t.entry.name;
    // Parts of names that torch.compile, FSDP, gradient checkpointing and DeepSpeed put in.
    for (const std::string_view wrapper :
         {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module."})
      for (std::size_t at; (at = t.name.find(wrapper)) != t.name.npos;)
        t.name.erase(at, wrapper.size());
  }
  w.sort_names();
  return w;
}

void WeightFiles::strip(const std::string& prefix) {
  for (Tensor& t : tensors_)
    if (t.name.starts_with(prefix)) t.name.erase(0, prefix.size());
  sort_names();
}

void WeightFiles::sort_names() {
  std::ranges::sort(tensors_, {}, &Tensor::name);
  const auto twin = std::ranges::adjacent_find(tensors_, {}, &Tensor::name);
  if (twin == tensors_.end()) return;
  const Tensor &a = twin[0], &b = twin[1];
  throw Error(Exit::data,
              fmt::format("tensor {} occurs twice: {} in {} and {} in {}", printable(a.name),
                          printable(a.entry.name), file_of(a).string(), printable(b.entry.name),
                          file_of(b).string()),
              "name the file that is meant, or leave one of the tensors out", __FILE__, __LINE__);
}

const WeightFiles::Tensor* WeightFiles::find(const std::string& name) const {
  const auto it = std::ranges::lower_bound(tensors_, name, {}, &Tensor::name);
  return it != tensors_.end() && it->name == name ? &*it : nullptr;
}

std::vector<std::filesystem::path> WeightFiles::files() const {
  std::vector<std::filesystem::path> files;
  for (const SafetensorsFile& s : shards_) files.push_back(s.path());
  std::sort(files.begin(), files.end());
  return files;
}

void WeightFiles::read_f32(const Tensor& t, std::int64_t first, std::span<float> out) const {
  shards_[t.shard].read_f32(t.entry, first, out);
  bytes_read_ += out.size() * size_of(*t.entry.dtype);
}

void WeightFiles::read_bf16(const Tensor& t, std::int64_t first, std::span<bf16> out) const {
  shards_[t.shard].read_bf16(t.entry, first, out);
  bytes_read_ += out.size() * size_of(*t.entry.dtype);
}

}  // namespace weft
