// Adapters (LoRA, models/lora.h) outside of their training: in checkpoints, in PEFT's files, and
// added to the weights of a model that is run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "nn/parameters.h"

namespace weft {

// What a checkpoint of adapters notes of them, beside their values.
struct AdapterFacts {
  std::int64_t rank = 0;
  double alpha = 0;
  std::string base;       // the files of the weights that they were trained on, as the deck had it
  std::string base_hash;  // of these (hash_of in checkpoint/weights.h); "": nobody noted it

  std::string to_json() const;
  // nullopt for a text that to_json() did not write.
  static std::optional<AdapterFacts> from_json(const std::string& text);
  std::string describe() const;  // "rank 8, alpha 16; base FILE, xxh3 0123..."
};
// nullopt for a checkpoint of a whole model.
std::optional<AdapterFacts> adapter_facts(const Checkpoint& checkpoint);

struct Adapter {
  std::string path;  // where it was read, for messages
  AdapterFacts facts;
  struct Layer {
    std::int64_t rank = 0, in = 0, out = 0;
    std::vector<float> a, b;  // [rank, in], [out, rank]
    double scale = 0;         // of B A: alpha / rank
  };
  std::map<std::string, Layer> layers;  // by the layer's name in the model
};
// The adapters of a checkpoint that has some: trained, or their moving average.
Adapter adapter_of(const Checkpoint& checkpoint, bool ema);
// PEFT's files: a folder with adapter_model.safetensors and adapter_config.json, or the first of
// them with the other beside it. Exit::data for what is missing, not LoRA, or a kind of it that
// weft does not have.
Adapter read_adapter(const std::filesystem::path& path);
// Writes them into `folder`, which is made. The metadata of the tensors also names the base.
void write_adapter(const std::filesystem::path& folder, const Adapter& adapter, DType dtype);

struct WeightedAdapter {
  Adapter adapter;
  double factor = 1;
};
// Exit::data unless `hash`, that of the weights in `path`, is of the adapter's base; an adapter
// that names none passes.
void check_base(const Adapter& adapter, const std::string& path, const std::string& hash);
// w += factor * scale * B A for each layer of each adapter, summed in f32 and rounded once to the
// formats that the table keeps. Exit::data for a layer that the model lacks or has in another size.
void merge_adapters(ParameterTable& table, std::span<const WeightedAdapter> adapters);

}  // namespace weft
