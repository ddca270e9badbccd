// Parameters from and to safetensors under their released names.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/weight_files.h"
#include "config/deck.h"
#include "nn/parameters.h"

namespace weft {

// How a model's files may differ from its list of parameters.
struct WeightNames {
  std::string section = "model";  // of the deck that gives the shapes, for messages
  // Whether a file may hold that name in addition to the model's; such a tensor is not read.
  std::function<bool(const std::string&)> spare;
  // Other names that files use for that parameter.
  std::function<std::vector<std::string>(const std::string&)> others;
  // Whether files may lack that parameter, which then takes the constant that it starts with.
  std::function<bool(const std::string&)> may_lack = nullptr;
  // Only parameters whose names begin so are meant; files have them without it.
  std::string prefix = {};
  // model.weights_partial = "matching": what files and model have under one name and in one shape
  // is read. All else stays as it is, and the log says what that was.
  bool matching = false;
  // What is returned for the log has the files' hash too, on rank 0.
  bool hashed = false;
};
// `name` with parts of it renamed, for WeightNames::others: each (from, to) in order, where `from`
// is whole parts between the dots of the name.
std::string renamed_parts(std::string name,
                          const std::vector<std::pair<std::string_view, std::string_view>>& parts);
// The same for a training that starts from files, as its deck asks.
WeightNames to_start_from(const ModelDeck& deck, WeightNames names = {});

// Every parameter of the table, adapters aside, must be in the files (a file, an index, a folder:
// checkpoint/weight_files.h) with its shape, and they must hold no other floating tensor; otherwise
// Exit::data names the tensors, both shapes and the nearest name (with `matching`: unless nothing
// fits). One prefix in front of the names is taken off, and the log says so. Reads piece by piece
// into place, rounded to bf16 where the table keeps that: memory holds nothing beyond the table and
// one piece; Exit::data for a value that is not finite. Returns what was read, for the log: "dl/hf,
// 89 tensors".
std::string load_weights(const std::filesystem::path& path, ParameterTable& table,
                         const WeightNames& names = {});
std::string describe(const WeightFiles& files, bool hashed = false);
// "spatial_blocks.3.mlp.fc1.bias" as "spatial_blocks.*.mlp.fc1.bias", for lists with a line for
// each kind of tensor.
std::string kind_of_tensor(const std::string& name);
// The first names and how many there are besides: "\"a\", \"b\", \"c\" and 5 more".
std::string few_of(const std::vector<std::string>& names);
// XXH3-128 of the file, which is read, as 32 digits (xxhsum -H2); of a model in shards that of its
// files' digits, in the order of their names.
std::string hash_of(const WeightFiles& files);
// Distinguishes a model's weights from others, in whatever files they lie, as f32 or bf16: XXH3-128
// of some values of each parameter of `whole`, rounded to bf16. Reads little of large files.
// Exit::data as load_weights().
std::string fingerprint_of(WeightFiles files, const ParameterTable& whole,
                           const WeightNames& names);
// Takes off what most names of the files have in front of `known` ones, such as "module.", and logs
// it. Returns it; "" where as many names are known as they are.
std::string strip_prefix(WeightFiles& files, const std::set<std::string>& known);
// load_weights() in two steps, for a rank that has some of a model's parameters: `whole` has all of
// them (it needs no memory), `part` those to read. check_weights() takes the prefix off. `skip`, if
// given, selects those that another rank reads.
void check_weights(WeightFiles& files, const ParameterTable& whole, const WeightNames& names);
void read_weights(const WeightFiles& files, ParameterTable& part, const WeightNames& names,
                  const std::function<bool(const Parameter&)>& skip = nullptr);

// How weights are written.
struct SaveWeights {
  DType dtype = DType::f32;  // or bf16, f16
  std::uint64_t shard_bytes =
      0;  // 0: one file; otherwise shards of at most that (or of one tensor) and their index
  Tensor values = {};  // in place of the trainable values: flat, such as the EMA
  std::function<bool(const Parameter&)> skip = nullptr;  // what is left out
  std::map<std::string, std::vector<float>> buffers =
      {};  // [1,n,1,1,1] each: what released files hold beside parameters
};

// Writes the parameters to `path`; of a model in shards, path + ".index.json" is written last and
// names them (NAME-00001-of-00003.safetensors). Memory: one tensor.
void save_weights(const std::filesystem::path& path, const ParameterTable& table,
                  const SaveWeights& how = {});

}  // namespace weft
