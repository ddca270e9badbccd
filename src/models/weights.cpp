#include "models/weights.h"

#include "core/deck.h"
#include "core/error.h"
#include "formats/safetensors.h"

namespace weft {

void load_weights(const std::filesystem::path& path, ParameterTable& table) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  std::vector<std::string> known;
  for (const auto& p : table.all()) known.push_back(p->name);
  for (const SafetensorEntry& e : file.entries()) {
    if (table.find(e.name) != nullptr) continue;
    const std::string near = nearest_name(e.name, known);
    WEFT_CHECK(false, Exit::data,
               near.empty() ? "check that the deck's [model] is the one these weights belong to"
                            : "the model's nearest name is \"" + near + "\"",
               "{}: tensor \"{}\" is no parameter of this model", path.string(), e.name);
  }
  for (const auto& p : table.all()) {
    const SafetensorEntry& e = file.at(p->name);
    const Shape shape{std::span<const std::int64_t>(e.shape)};
    WEFT_CHECK(shape == p->shape, Exit::data,
               "check hidden_size, depth, num_heads and caption_channels of the deck's [model]",
               "{}: tensor \"{}\" has shape {}, the model wants {}", path.string(), p->name,
               shape.str(), p->shape.str());
    const std::vector<float> values = file.read_f32(e);
    p->value.set(std::span<const float>(values));
  }
  table.refresh_working();
}

void save_weights(const std::filesystem::path& path, const ParameterTable& table,
                  const Tensor& values) {
  std::vector<SafetensorWrite> tensors;
  std::vector<Tensor> on_host;
  for (const auto& p : table.all()) {
    SafetensorWrite w;
    w.name = p->name;
    w.shape.assign(p->shape.dims().begin(), p->shape.dims().end());
    const bool replaced = values.defined() && p->trainable;
    const Tensor flat = p->value.view({p->shape.numel()});
    on_host.push_back(
        (replaced ? values.slice(p->offset, p->offset + p->shape.numel()) : flat).to_host());
    w.bytes = std::as_bytes(on_host.back().span<float>());
    tensors.push_back(w);
  }
  write_safetensors(path, tensors, {{"format", "pt"}, {"producer", "weft"}});
}

}  // namespace weft
