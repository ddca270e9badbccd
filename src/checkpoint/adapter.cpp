#include "checkpoint/adapter.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/safetensors.h"
#include "checkpoint/weights.h"
#include "config/deck.h"
#include "core/error.h"
#include "core/file.h"
#include "core/file_kind.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* adapter_weights_name = "adapter_model.safetensors";
constexpr const char* adapter_config_name = "adapter_config.json";
// PEFT's names: base_model.model.LAYER.lora_A.weight.
constexpr std::string_view peft_prefix = "base_model.model.", a_ending = ".lora_A.weight",
                           b_ending = ".lora_B.weight";
constexpr std::string_view of_values = "values:";  // begins a hash of values, not of files

// "spatial_blocks.0.attn.qkv" and whether it is A of "spatial_blocks.0.attn.qkv.lora_A.weight";
// nullopt for another name.
struct AdapterHalf {
  std::string layer;
  bool is_a = false;
};
std::optional<AdapterHalf> half_of(std::string_view name) {
  if (name.starts_with(peft_prefix)) name.remove_prefix(peft_prefix.size());
  for (const std::string_view ending : {a_ending, b_ending})
    if (name.ends_with(ending))
      return AdapterHalf{std::string(name.substr(0, name.size() - ending.size())),
                         ending == a_ending};
  return std::nullopt;
}

// Takes one half of a layer: its shape, and values to fill.
std::vector<float>& add_half(Adapter& adapter, const std::string& name,
                             const std::vector<std::int64_t>& shape) {
  const std::optional<AdapterHalf> half = half_of(name);
  WEFT_CHECK(half.has_value() && shape.size() == 2, Exit::data,
             "weft takes LoRA of linear layers: matrices NAME.lora_A.weight and NAME.lora_B.weight",
             "{}: tensor \"{}\" with shape [{}] is neither", adapter.path, name,
             fmt::join(shape, ", "));
  Adapter::Layer& layer = adapter.layers[half->layer];
  std::vector<float>& values = half->is_a ? layer.a : layer.b;
  WEFT_CHECK(values.empty(), Exit::data, "a file of adapters has one of each",
             "{}: two matrices {} of layer {}", adapter.path, half->is_a ? "A" : "B", half->layer);
  (half->is_a ? layer.in : layer.out) = shape[half->is_a ? 1 : 0];
  const std::int64_t rank = shape[half->is_a ? 0 : 1];
  WEFT_CHECK(layer.rank == 0 || layer.rank == rank, Exit::data, "the file is damaged",
             "{}: A and B of layer {} have ranks {} and {}", adapter.path, half->layer, layer.rank,
             rank);
  layer.rank = rank;
  values.resize(static_cast<std::size_t>(shape[0] * shape[1]));
  return values;
}

void check_halves(const Adapter& adapter) {
  WEFT_CHECK(!adapter.layers.empty(), Exit::data, "name the files of an adapter",
             "{} holds no adapter", adapter.path);
  for (const auto& [name, layer] : adapter.layers)
    WEFT_CHECK(!layer.a.empty() && !layer.b.empty(), Exit::data,
               "the file is incomplete: write it again", "{}: layer {} has no matrix {}",
               adapter.path, name, layer.a.empty() ? "A" : "B");
}

// What decides the result in PEFT's adapter_config.json; what weft lacks is refused.
struct PeftConfig {
  std::int64_t rank = 0;
  double alpha = 0;
  bool root = false;  // use_rslora: alpha / sqrt(rank)
  std::string base;
};
// What weft export notes with the tensors, so that a changed configuration is seen.
constexpr const char* scale_key = "lora";
std::string scale_text(const PeftConfig& c) {
  return fmt::format("rank {}, alpha {}{}", c.rank, c.alpha, c.root ? ", use_rslora" : "");
}

std::string json_text(const ordered_json& value, int indent = -1) {
  return dump_json(value, indent, ' ', false, ordered_json::error_handler_t::replace);
}

// Whether the result follows from rank and alpha as far as this entry of PEFT's goes.
bool is_taken(const std::string& key, const ordered_json& value) {
  static const std::set<std::string_view> flags = {"use_dora", "use_qalora", "use_bdlora",
                                                   "lora_bias", "fan_in_fan_out"};
  static const std::set<std::string_view> lists = {
      "rank_pattern",      "alpha_pattern", "layers_to_transform",     "layer_replication",
      "modules_to_save",   "loftq_config",  "trainable_token_indices", "alora_invocation_tokens",
      "target_parameters", "arrow_config"};
  if (value.is_null()) return true;
  if (key == "use_rslora") return value.is_boolean();
  if (flags.contains(key)) return value == false;
  if (lists.contains(key)) return value.empty();
  if (key == "bias") return value == "none";
  // Others took what the adapter began with from the base: "pissa", "olora", ...
  return key != "init_lora_weights" || !value.is_string() || value == "gaussian" ||
         value == "orthogonal" || value == "eva";
}

PeftConfig read_config(const fs::path& path) {
  const std::string where = path.string();
  const char* hint = "PEFT writes it with the adapter's tensors: copy both again";
  refuse_other_kind(path, Exit::data, hint);
  try {
    const auto j = parse_json<ordered_json>(read_whole(path, 1 << 20, Exit::data, hint));
    const std::string type = j.value("peft_type", "");
    WEFT_CHECK(type == "LORA", Exit::data, "weft takes peft_type \"LORA\" alone",
               "{}: peft_type is \"{}\"", where, printable(type));
    for (const auto& [key, value] : j.items())
      WEFT_CHECK(is_taken(key, value), Exit::data,
                 "write flags as true or false; merge other kinds with PEFT, and name the result "
                 "as the weights",
                 "{}: {} is {}, which weft does not take", where, key,
                 printable(json_text(value), 80));
    PeftConfig c;
    c.rank = whole_number<std::int64_t>(j.at("r"));
    c.alpha = j.at("lora_alpha").get<double>();
    c.root = j.contains("use_rslora") && j.at("use_rslora") == true;
    if (j.contains("base_model_name_or_path") && j.at("base_model_name_or_path").is_string())
      c.base = j.at("base_model_name_or_path").get<std::string>();
    WEFT_CHECK(c.rank > 0 && std::isfinite(c.alpha), Exit::data, "the file is damaged",
               "{}: r = {}, lora_alpha = {}", where, c.rank, c.alpha);
    return c;
  } catch (const nlohmann::json::exception& e) {
    throw Error(
        Exit::data,
        fmt::format("{}: not the configuration of an adapter: {}", where, printable(e.what())),
        hint, __FILE__, __LINE__);
  }
}

std::vector<float> kept_values(const Parameter& p) {
  if (p.value.defined()) {
    const Tensor host = p.value.to_host();
    return {host.span<float>().begin(), host.span<float>().end()};
  }
  const Tensor host = p.working.to_host();
  std::vector<float> values;
  for (const bf16 v : host.span<bf16>()) values.push_back(static_cast<float>(v));
  return values;
}

}  // namespace

std::string AdapterFacts::to_json() const {
  const ordered_json j = {
      {"lora", {{"rank", rank}, {"alpha", alpha}, {"base", base}, {"base_xxh3", base_hash}}}};
  // Paths may hold any bytes.
  return json_text(j);
}

std::optional<AdapterFacts> AdapterFacts::from_json(const std::string& text) {
  const auto j = try_parse_json<ordered_json>(text);
  if (!j.is_object() || !j.contains("lora")) return std::nullopt;
  try {
    const ordered_json& l = j.at("lora");
    return AdapterFacts{whole_number<std::int64_t>(l.at("rank")), l.at("alpha").get<double>(),
                        l.at("base").get<std::string>(), l.at("base_xxh3").get<std::string>()};
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

std::string AdapterFacts::describe() const {
  return fmt::format("rank {}, alpha {}; base {}, xxh3 {}", rank, alpha,
                     base.empty() ? "unknown" : printable(base),
                     base_hash.empty() ? "unknown" : base_hash);
}

std::string hash_of_values(const ParameterTable& table) {
  std::map<std::string_view, const Parameter*> sorted;
  for (const auto& p : table.all())
    if (p->role != Parameter::Role::adapter) sorted[p->name] = p.get();
  Hasher hasher;
  for (const auto& [name, p] : sorted) {
    hasher.add(std::as_bytes(std::span(name)));
    const Tensor host = (p->value.defined() ? p->value : p->working).to_host();
    if (host.dtype() == DType::bf16) {
      hasher.add(std::as_bytes(host.span<bf16>()));
    } else {
      const std::vector<bf16> rounded(host.span<float>().begin(), host.span<float>().end());
      hasher.add(std::as_bytes(std::span(rounded)));
    }
  }
  return std::string(of_values) + to_hex(hasher.value());
}

std::optional<AdapterFacts> adapter_facts(const Checkpoint& checkpoint) {
  return AdapterFacts::from_json(checkpoint.info().notes.task);
}

Adapter adapter_of(const Checkpoint& checkpoint, bool ema, std::optional<double> decay) {
  const std::optional<AdapterFacts> facts = adapter_facts(checkpoint);
  WEFT_CHECK(facts.has_value(), Exit::data, "name a run that was trained with [lora]",
             "{} holds a whole model, not an adapter", checkpoint.dir().string());
  Adapter adapter{checkpoint.dir().string(), *facts, {}};
  const std::string array = ema ? ema_array(checkpoint, decay) : "master";
  for (const TensorRange& t : checkpoint.info().tensors)
    checkpoint.read(array, t.offset, add_half(adapter, t.name, t.shape));
  check_halves(adapter);
  for (auto& [name, layer] : adapter.layers)
    layer.scale = facts->alpha / static_cast<double>(layer.rank);
  return adapter;
}

bool holds_adapter(const WeightFiles& files) {
  return std::ranges::any_of(files.tensors(),
                             [](const auto& t) { return t.entry.name.ends_with(a_ending); });
}

Adapter read_adapter(const fs::path& path) {
  std::error_code ignored;
  const fs::path file = fs::is_directory(path, ignored) ? path / adapter_weights_name : path;
  const fs::path config_file = file.parent_path() / adapter_config_name;
  WEFT_CHECK(is_there(file, Exit::data), Exit::data,
             "name a run that was trained with [lora], or a folder with adapter_model.safetensors "
             "and adapter_config.json",
             "{} does not exist", file.string());
  WEFT_CHECK(is_there(config_file, Exit::data), Exit::data,
             "PEFT and weft export write it beside the tensors: copy it with them",
             "{} is missing: rank and alpha of {} are not known", config_file.string(),
             file.string());
  const PeftConfig config = read_config(config_file);
  const SafetensorsFile tensors = SafetensorsFile::open(file);
  Adapter adapter{path.string(), {config.rank, config.alpha, config.base, ""}, {}};
  const auto noted = [&](const char* key) {
    const auto found = tensors.metadata().find(key);
    return found == tensors.metadata().end() ? "" : found->second;
  };
  adapter.facts.base_hash = noted("base_xxh3");
  const std::string scale = noted(scale_key);
  WEFT_CHECK(scale.empty() || scale == scale_text(config), Exit::data,
             "copy both files again, as weft export wrote them",
             "{} says {}, but {} was written with {}", config_file.string(), scale_text(config),
             file.string(), printable(scale));
  for (const SafetensorEntry& e : tensors.entries()) {
    std::vector<float>& values = add_half(adapter, e.name, e.shape) = tensors.read_f32(e);
    WEFT_CHECK(std::ranges::all_of(values, [](float v) { return std::isfinite(v); }), Exit::data,
               "the file is damaged, or its training failed: name another one",
               "{}: tensor {} has values that are not finite", file.string(), printable(e.name));
  }
  check_halves(adapter);
  for (auto& [name, layer] : adapter.layers) {
    WEFT_CHECK(layer.rank == config.rank, Exit::data,
               "the two files do not belong together: copy both again",
               "{}: r is {}, but layer {} in {} has rank {}", config_file.string(), config.rank,
               name, file.string(), layer.rank);
    const auto rank = static_cast<double>(layer.rank);
    layer.scale = config.alpha / (config.root ? std::sqrt(rank) : rank);
  }
  return adapter;
}

void write_adapter(const fs::path& folder, const Adapter& adapter, DType dtype) {
  make_own_folder(folder, Exit::data);
  std::vector<SafetensorWrite> list;
  std::vector<std::vector<std::byte>> bytes;
  const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t columns,
                       const std::vector<float>& values) {
    bytes.push_back(floats_as(values, dtype, folder, name));
    list.push_back({std::string(peft_prefix) + name, dtype, {rows, columns}, bytes.back()});
  };
  ordered_json targets = ordered_json::array();
  for (const auto& [name, layer] : adapter.layers) {
    add(fmt::format("{}{}", name, a_ending), layer.rank, layer.in, layer.a);
    add(fmt::format("{}{}", name, b_ending), layer.out, layer.rank, layer.b);
    targets.push_back(name);
  }
  write_safetensors(
      folder / adapter_weights_name, list,
      {{"format", "pt"},
       {"producer", "weft"},
       {"base", adapter.facts.base},
       {"base_xxh3", adapter.facts.base_hash},
       {scale_key, scale_text({adapter.facts.rank, adapter.facts.alpha, false, ""})}});
  // What PEFT's LoraConfig needs to be made again; the rest has its defaults.
  const ordered_json config = {{"peft_type", "LORA"},
                               {"task_type", nullptr},
                               {"base_model_name_or_path", adapter.facts.base},
                               {"r", adapter.facts.rank},
                               {"lora_alpha", adapter.facts.alpha},
                               {"lora_dropout", 0.0},
                               {"bias", "none"},
                               {"fan_in_fan_out", false},
                               {"inference_mode", true},
                               {"target_modules", targets}};
  replace_file(folder / adapter_config_name, json_text(config, 2) + "\n", Exit::data, Durable::yes);
}

NamedAdapter find_adapter(const std::string& key, const std::string& text, MPI_Comm world) {
  NamedAdapter n{text};
  // What follows the last = is a factor if it is a number: paths may hold one too.
  const std::size_t at = text.rfind('=');
  if (at != text.npos) {
    const char *const first = text.data() + at + 1, *const last = text.data() + text.size();
    double factor = 1;
    const auto [end, failed] = std::from_chars(first, last, factor);
    const bool number = failed == std::errc{} && end == last;
    if (number || (!is_there(text, Exit::data) && is_there(text.substr(0, at), Exit::data)))
      n = {text.substr(0, at), number ? factor : std::nan("")};
  }
  WEFT_CHECK(!n.path.empty() && std::isfinite(n.factor), Exit::usage,
             "write a path, or PATH=FACTOR as in \"styles/ink=0.8\"", "{}: \"{}\"", key, text);
  const fs::path path = n.path;
  if (is_there(path / "latest", Exit::checkpoint))
    n.checkpoint = Checkpoint::newest(path, world);
  else if (is_there(path / "manifest.json", Exit::checkpoint))
    n.checkpoint = Checkpoint::open(path);
  else
    WEFT_CHECK(is_there(path, Exit::data), Exit::data,
               "name a run that was trained with [lora], or a folder with "
               "adapter_model.safetensors and adapter_config.json",
               "{}: {} does not exist", key, n.path);
  return n;
}

void check_base(const std::string& adapter, const AdapterFacts& facts, const std::string& weights,
                const std::string& values) {
  const std::string& own = facts.base_hash;
  if (own.empty()) return;
  std::string hash = values;
  if (!own.starts_with(of_values)) {
    hash = is_there(weights, Exit::data) ? hash_of(WeightFiles::open(weights)) : "";
    if (hash.empty() && log::rank() == 0)
      log::warn("adapters {} were trained on {}: whether {} has the same weights is not known",
                adapter, facts.base, weights);
  }
  WEFT_CHECK(
      hash.empty() || own == hash, Exit::data,
      fmt::format("name the weights that they were trained on: {}, xxh3 {}", facts.base, own),
      "the adapters {} belong to another base than {} (xxh3 {})", adapter, weights, hash);
}

void merge_adapters(ParameterTable& table, std::span<const WeightedAdapter> adapters) {
  std::map<Parameter*, std::vector<float>> sums;
  std::vector<std::string> known;
  for (const auto& p : table.all())
    if (p->shape.rank() == 2 && p->name.ends_with(".weight"))
      known.push_back(p->name.substr(0, p->name.size() - std::string_view(".weight").size()));
  for (const auto& [adapter, factor] : adapters)
    for (const auto& [name, layer] : adapter.layers) {
      Parameter* const p = table.find(name + ".weight");
      const std::string near = nearest_name(name, known);
      WEFT_CHECK(p != nullptr, Exit::data,
                 near.empty() ? "it is an adapter of another model"
                              : fmt::format("the model's nearest layer is {}", near),
                 "adapter {} has layer {}, which the model lacks", adapter.path, name);
      WEFT_CHECK(p->shape == Shape({layer.out, layer.in}), Exit::data,
                 "it is an adapter of a model of another size: check the deck's [model]",
                 "adapter {}: layer {} is made for a weight of [{}, {}], the model's has {}",
                 adapter.path, name, layer.out, layer.in, p->shape.str());
      auto [at, fresh] = sums.try_emplace(p);
      if (fresh) at->second = kept_values(*p);
      float* const w = at->second.data();
      const auto scale = static_cast<float>(factor * layer.scale);
      const std::int64_t in = layer.in, rank = layer.rank;
#pragma omp parallel for schedule(static)
      for (std::int64_t o = 0; o < layer.out; ++o)
        for (std::int64_t r = 0; r < rank; ++r) {
          const float b = scale * layer.b[o * rank + r];
          const float* const a = layer.a.data() + r * in;
          for (std::int64_t i = 0; i < in; ++i) w[o * in + i] += b * a[i];
        }
    }
  for (const auto& [p, values] : sums) p->set(0, values);
}

}  // namespace weft
