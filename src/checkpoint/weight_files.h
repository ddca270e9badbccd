// Weights as users have them: one safetensors file, a model in shards with its index
// (NAME.safetensors.index.json) or without, or the folder that holds any, under Hugging Face's
// names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace weft {

class WeightFiles {
 public:
  // Opens every file and reads only the headers. Exit::data, naming the fault, if there is no such
  // file, an index names a shard that is missing or cut short, index and shards do not hold the
  // same names, or two tensors have one name.
  static WeightFiles open(const std::filesystem::path& path);

  struct Tensor {
    SafetensorEntry entry;
    std::size_t shard = 0;
    std::string name = {};  // without the parts that PyTorch's wrappers add ("_orig_mod.")
  };
  const std::vector<Tensor>& tensors() const { return tensors_; }  // sorted by name
  // Takes `prefix` from the names that begin with it.
  void strip(const std::string& prefix);
  const Tensor* find(const std::string& name) const;
  const std::filesystem::path& path() const { return path_; }  // as given to open()
  const std::filesystem::path& file_of(const Tensor& t) const { return shards_[t.shard].path(); }
  std::vector<std::filesystem::path> files() const;  // sorted

  // Elements [first, first + out.size()) of a floating tensor (F32, F16, BF16), read alone: as
  // floats, or rounded to bf16. Exit::data if it is not floating or the file ends there by now.
  void read_f32(const Tensor& t, std::int64_t first, std::span<float> out) const;
  void read_bf16(const Tensor& t, std::int64_t first, std::span<bf16> out) const;

  // Bytes of tensors read since open(), without headers.
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  void sort_names();

  std::filesystem::path path_;
  std::vector<SafetensorsFile> shards_;
  std::vector<Tensor> tensors_;
  mutable std::uint64_t bytes_read_ = 0;
};

}  // namespace weft

// What a path means and what an index says: for weight_files.cpp, and for tests of the parser.
namespace weft::detail {

// The safetensors file or index that `path` means: itself, or what the folder holds:
// model.safetensors or diffusion_pytorch_model.safetensors, their index, or the one file or index
// there is; or all shards of one model (NAME-00001-of-00002.safetensors). Exit::data otherwise.
std::vector<std::filesystem::path> find_weights(const std::filesystem::path& path);

// "NAME-*-of-00002.safetensors" of a shard's name; "" of the name of a whole model's file.
std::string shards_of(const std::filesystem::path& file);

bool is_index(const std::filesystem::path& file);

// The index's "weight_map": the tensors' names and the shards' file names. Shards lie beside the
// index: a name with a folder in it is refused, as is a tensor that occurs twice.
std::map<std::string, std::string> read_weight_index(const std::filesystem::path& file);

}  // namespace weft::detail
