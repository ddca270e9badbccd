// Adapters (LoRA, models/lora.h) outside of their training: in checkpoints, in files of weft and of
// others, and added to the weights of a model that is run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/weight_files.h"
#include "checkpoint/weights.h"
#include "nn/parameters.h"

namespace weft {

// What a checkpoint of adapters notes of them, beside their values.
struct AdapterFacts {
  std::int64_t rank = 0;
  double alpha = 0;
  std::string base;  // the files of the weights that they were trained on, as the deck had it
  // The hash of the base's values (hash_of_values); up to weft 0.2 that of its files (hash_of in
  // checkpoint/weights.h); "": nobody noted it.
  std::string base_hash;

  std::string to_json() const;
  // nullopt for a text that to_json() did not write.
  static std::optional<AdapterFacts> from_json(const std::string& text);
  std::string describe() const;  // "rank 8, alpha 16; base FILE, xxh3 0123..."
};
// The identity of a base: "values:" and the digits of XXH3-128 of the parameters' names and values
// as bf16, adapters aside. The same however files store them: in one or in shards, in f32 or
// rounded to bf16, under other names. Of a model with several: those with that prefix, which is no
// part of the names.
std::string hash_of_values(const ParameterTable& table, std::string_view prefix = {});
// nullopt for a checkpoint of a whole model.
std::optional<AdapterFacts> adapter_facts(const Checkpoint& checkpoint);

struct Adapter {
  std::string path;  // where it was read, for messages
  AdapterFacts facts;
  std::string layout = "weft";  // whose names the file has: "PEFT", "ComfyUI", "kohya" ...
  struct Layer {
    std::int64_t rank = 0, in = 0, out = 0;
    std::vector<float> a, b;  // [rank, in], [out, rank]
    double scale = 0;         // of B A: alpha / rank
  };
  std::map<std::string, Layer> layers;  // by the layer's name in the file, without prefixes
  // What is added to whole parameters, by the parameter's name likewise.
  std::map<std::string, std::vector<float>> differences;
  std::size_t left_out = 0;  // tensors for layers that only other variants of the model have
};
// The adapters of a checkpoint that has some: trained, or their moving average: the first, or that
// of `decay`.
Adapter adapter_of(const Checkpoint& checkpoint, bool ema,
                   std::optional<double> decay = std::nullopt);
// Whether files hold an adapter instead of weights.
bool holds_adapter(const WeightFiles& files);
// PEFT's files: a folder with adapter_model.safetensors and adapter_config.json, or the first of
// them with the other beside it. Or one file with the names of ComfyUI, kohya, diffusers or
// DiffSynth (docs/finetune_wan.md, Adapters of others), whose layers have their own alpha, or
// that of the rank. Exit::data for what is missing, not LoRA, or a kind of it that weft does not
// have.
Adapter read_adapter(const std::filesystem::path& path);
// The same by the model's own names, which `names` knows others of. With names.prefix for the
// parameters that begin so. Exit::data, with the nearest, for a name that is none of them.
Adapter by_model(Adapter adapter, const ParameterTable& table, const WeightNames& names);
// Whose names a written adapter has.
enum class AdapterNames { peft, comfy, kohya };
// With PEFT's names `path` is a folder, which is made; with the others a file, in which each layer
// has its alpha. The metadata of the tensors also names the base.
void write_adapter(const std::filesystem::path& path, const Adapter& adapter, AdapterNames names,
                   DType dtype);

// Adapters as keys of a deck name them.
struct NamedAdapter {
  std::string path;
  double factor = 1;
  std::optional<Checkpoint> checkpoint = std::nullopt;  // otherwise PEFT's files

  Adapter read(bool ema) const {
    return checkpoint ? adapter_of(*checkpoint, ema) : read_adapter(path);
  }
};
// Collective. `text` of the deck's `key`: "PATH" or "PATH=FACTOR", where PATH is what `weft export`
// or PEFT wrote, or a run that trained adapters. Exit::usage, Exit::data and Exit::checkpoint name
// the path.
NamedAdapter find_adapter(const std::string& key, const std::string& text, MPI_Comm world);

struct WeightedAdapter {
  Adapter adapter;
  double factor = 1;
};
// Exit::data unless the weights `weights`, whose values have that hash, are the base of the
// adapters `adapter`. Adapters that name none pass, with a WARN where they name one by its files'
// hash and `weights` are no files.
void check_base(const std::string& adapter, const AdapterFacts& facts, const std::string& weights,
                const std::string& values);
// w += factor * (scale * B A + difference) for each layer of each adapter, summed in f32 and
// rounded once to the formats that the table keeps. Exit::data for a layer that the model lacks or
// has in another size.
void merge_adapters(ParameterTable& table, std::span<const WeightedAdapter> adapters,
                    const WeightNames& names = {});

}  // namespace weft
