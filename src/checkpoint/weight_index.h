// Where weights are: which file a path means, and what the index of a model in shards says. Used by weight_files.cpp alone.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace weft::detail {

// The safetensors file or index that `path` means: itself, or what the folder holds: model.safetensors or
// diffusion_pytorch_model.safetensors, their index, or the one file or index there is. Exit::data otherwise.
std::filesystem::path find_weights(const std::filesystem::path& path);

bool is_index(const std::filesystem::path& file);

// The index's "weight_map": the tensors' names and the shards' file names. Shards lie beside the index: a name with a folder
// in it is refused, as is a tensor that occurs twice.
std::map<std::string, std::string> read_weight_index(const std::filesystem::path& file);

}  // namespace weft::detail
