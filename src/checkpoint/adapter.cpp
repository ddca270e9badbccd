#include "checkpoint/adapter.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
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
constexpr std::string_view peft_prefix = "base_model.model.", a_ending = ".lora_A.weight",
                           b_ending = ".lora_B.weight", down_ending = ".lora_down.weight",
                           up_ending = ".lora_up.weight", alpha_ending = ".alpha",
                           comfy_prefix = "diffusion_model.", kohya_prefix = "lora_unet_";
constexpr std::string_view of_values = "values:";  // begins a hash of values, not of files

// What a tensor of an adapter is to its layer.
struct AdapterPart {
  enum class Kind { a, b, alpha, weight, bias, modulation };
  std::string layer;
  Kind kind;
};
// Of "transformer.blocks.0.attn1.to_q.lora_A.weight" and the like; nullopt for another name.
std::optional<AdapterPart> piece_of(std::string_view name) {
  using enum AdapterPart::Kind;
  constexpr std::pair<std::string_view, AdapterPart::Kind> endings[] = {
      {a_ending, a},
      {".lora_A.default.weight", a},
      {down_ending, a},
      {b_ending, b},
      {".lora_B.default.weight", b},
      {up_ending, b},
      {alpha_ending, alpha},
      {".diff", weight},
      {".diff_b", bias},
      {".diff_m", modulation}};
  for (const std::string_view prefix :
       {peft_prefix, std::string_view("model.diffusion_model."), comfy_prefix,
        std::string_view("transformer_2."), std::string_view("transformer.")})
    if (name.starts_with(prefix)) {
      name.remove_prefix(prefix.size());
      break;
    }
  for (const auto& [ending, kind] : endings)
    if (name.ends_with(ending))
      return AdapterPart{std::string(name.substr(0, name.size() - ending.size())), kind};
  return std::nullopt;
}

// Whose names a file has, by one of them.
std::string layout_of(std::string_view name) {
  const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
  if (begins(peft_prefix)) return "PEFT";
  if (begins(kohya_prefix)) return "kohya";
  if (begins(comfy_prefix) || begins("model.diffusion_model.")) return "ComfyUI";
  if (begins("transformer.") || begins("transformer_2.")) return "diffusers";
  return name.find(".default.") != name.npos ? "DiffSynth" : "weft";
}

// Layers of Wan2.1's model for pictures, which adapters for both kinds of model hold too.
bool is_of_pictures(const std::string& layer) {
  for (const char* part : {"k_img", "v_img", "norm_k_img", "img_emb"})
    if (layer.find(part) != layer.npos) return true;
  return false;
}

// Takes one half of a layer: its shape, and values to fill.
std::vector<float>& add_half(Adapter& adapter, const std::string& name, const AdapterPart& piece,
                             const std::vector<std::int64_t>& shape) {
  const bool is_a = piece.kind == AdapterPart::Kind::a;
  WEFT_CHECK(shape.size() == 2, Exit::data, "weft takes LoRA of linear layers: matrices",
             "{}: tensor \"{}\" has shape [{}], which is not a matrix", adapter.path,
             printable(name), fmt::join(shape, ", "));
  Adapter::Layer& layer = adapter.layers[piece.layer];
  std::vector<float>& values = is_a ? layer.a : layer.b;
  WEFT_CHECK(values.empty(), Exit::data, "a file of adapters has one of each",
             "{}: two matrices {} of layer {}", adapter.path, is_a ? "A" : "B", piece.layer);
  (is_a ? layer.in : layer.out) = shape[is_a ? 1 : 0];
  const std::int64_t rank = shape[is_a ? 0 : 1];
  WEFT_CHECK(layer.rank == 0 || layer.rank == rank, Exit::data, "the file is damaged",
             "{}: A and B of layer {} have ranks {} and {}", adapter.path, piece.layer, layer.rank,
             rank);
  layer.rank = rank;
  values.resize(static_cast<std::size_t>(shape[0] * shape[1]));
  return values;
}

void check_halves(const Adapter& adapter) {
  WEFT_CHECK(!adapter.layers.empty() || !adapter.differences.empty(), Exit::data,
             "name the files of an adapter", "{} holds no adapter", adapter.path);
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

constexpr const char* kinds_hint =
    "write flags as true or false; merge other kinds with PEFT, and name the result as the weights";

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
      WEFT_CHECK(is_taken(key, value), Exit::data, kinds_hint,
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

std::string hash_of_values(const ParameterTable& table, std::string_view prefix) {
  std::map<std::string_view, const Parameter*> sorted;
  for (const auto& p : table.all())
    if (p->role != Parameter::Role::adapter && p->name.starts_with(prefix))
      sorted[std::string_view(p->name).substr(prefix.size())] = p.get();
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
  Adapter adapter;
  adapter.path = checkpoint.dir().string();
  adapter.facts = *facts;
  const std::string array = ema ? ema_array(checkpoint, decay) : "master";
  for (const TensorRange& t : checkpoint.info().tensors) {
    const std::optional<AdapterPart> piece = piece_of(t.name);
    WEFT_CHECK(
        piece && (piece->kind == AdapterPart::Kind::a || piece->kind == AdapterPart::Kind::b),
        Exit::data, "the checkpoint is damaged", "{}: tensor \"{}\" is no adapter's", adapter.path,
        t.name);
    checkpoint.read(array, t.offset, add_half(adapter, t.name, *piece, t.shape));
  }
  check_halves(adapter);
  for (auto& [name, layer] : adapter.layers)
    layer.scale = facts->alpha / static_cast<double>(layer.rank);
  return adapter;
}

bool holds_adapter(const WeightFiles& files) {
  return std::ranges::any_of(files.tensors(), [](const auto& t) {
    const std::optional<AdapterPart> piece = piece_of(t.entry.name);
    using enum AdapterPart::Kind;
    return piece && piece->kind != b && piece->kind != alpha;
  });
}

namespace {

// PEFT's configuration where diffusers notes it with the tensors: its entries behind the model's
// name. Layers may have ranks of their own, which the tensors tell.
std::optional<PeftConfig> noted_config(const SafetensorsFile& tensors, const std::string& path) {
  const auto found = tensors.metadata().find("lora_adapter_metadata");
  if (found == tensors.metadata().end()) return std::nullopt;
  const auto j = try_parse_json<ordered_json>(found->second);
  if (!j.is_object()) return std::nullopt;
  PeftConfig c;
  for (const auto& [whole, value] : j.items()) {
    const std::string key = whole.substr(whole.rfind('.') + 1);
    if (key == "rank_pattern") continue;
    WEFT_CHECK(is_taken(key, value), Exit::data, kinds_hint,
               "{}: {} is {}, which weft does not take", path, printable(whole),
               printable(json_text(value), 80));
    if (key == "lora_alpha" && value.is_number()) c.alpha = value.get<double>();
    if (key == "r" && value.is_number()) c.rank = value.get<std::int64_t>();
    if (key == "use_rslora") c.root = value == true;
  }
  return c.rank > 0 && c.alpha > 0 ? std::optional(c) : std::nullopt;
}

// The tensors; `alphas` gets those of layers.
void read_pieces(const SafetensorsFile& tensors, Adapter& adapter,
                 std::map<std::string, double>& alphas) {
  for (const SafetensorEntry& e : tensors.entries()) {
    const std::optional<AdapterPart> piece = piece_of(e.name);
    WEFT_CHECK(piece.has_value(), Exit::data,
               "weft takes LoRA: matrices NAME.lora_A.weight and NAME.lora_B.weight (or lora_down, "
               "lora_up), NAME.alpha, and differences NAME.diff, .diff_b, .diff_m",
               "{}: tensor \"{}\" with shape [{}] is none of them", adapter.path, printable(e.name),
               fmt::join(e.shape, ", "));
    if (is_of_pictures(piece->layer)) {
      ++adapter.left_out;
      continue;
    }
    std::vector<float> values = tensors.read_f32(e);
    WEFT_CHECK(std::ranges::all_of(values, [](float v) { return std::isfinite(v); }), Exit::data,
               "the file is damaged, or its training failed: name another one",
               "{}: tensor {} has values that are not finite", adapter.path, printable(e.name));
    switch (piece->kind) {
      case AdapterPart::Kind::a:
      case AdapterPart::Kind::b:
        add_half(adapter, e.name, *piece, e.shape) = std::move(values);
        break;
      case AdapterPart::Kind::alpha:
        WEFT_CHECK(values.size() == 1, Exit::data, "the file is damaged",
                   "{}: {} has {} numbers, not one", adapter.path, printable(e.name),
                   values.size());
        alphas[piece->layer] = values.front();
        break;
      case AdapterPart::Kind::weight:
        adapter.differences[piece->layer + ".weight"] = std::move(values);
        break;
      case AdapterPart::Kind::bias:
        adapter.differences[piece->layer + ".bias"] = std::move(values);
        break;
      case AdapterPart::Kind::modulation:
        adapter.differences[piece->layer + ".modulation"] = std::move(values);
        break;
    }
  }
  check_halves(adapter);
  for (const auto& [name, alpha] : alphas)
    WEFT_CHECK(adapter.layers.contains(name), Exit::data, "the file is incomplete: write it again",
               "{}: layer {} has an alpha and no matrices", adapter.path, name);
}

}  // namespace

Adapter read_adapter(const fs::path& path) {
  std::error_code ignored;
  const fs::path file = fs::is_directory(path, ignored) ? path / adapter_weights_name : path;
  const fs::path config_file = file.parent_path() / adapter_config_name;
  WEFT_CHECK(is_there(file, Exit::data), Exit::data,
             "name a run that was trained with [lora], a folder with adapter_model.safetensors "
             "and adapter_config.json, or a file of ComfyUI's, kohya's or diffusers'",
             "{} does not exist", file.string());
  const SafetensorsFile tensors = SafetensorsFile::open(file);
  Adapter adapter;
  adapter.path = path.string();
  if (!tensors.entries().empty()) adapter.layout = layout_of(tensors.entries().front().name);

  // Names of PEFT's, and weft's own, say nothing of alpha: the file beside them does.
  std::optional<PeftConfig> config = noted_config(tensors, file.string());
  const bool has_config = adapter.layout == "PEFT" || adapter.layout == "weft";
  if (has_config) {
    WEFT_CHECK(is_there(config_file, Exit::data), Exit::data,
               "PEFT and weft export write it beside the tensors: copy it with them",
               "{} is missing: rank and alpha of {} are not known", config_file.string(),
               file.string());
    config = read_config(config_file);
  }
  const auto noted = [&](const char* key) {
    const auto found = tensors.metadata().find(key);
    return found == tensors.metadata().end() ? "" : found->second;
  };
  const std::string scale = noted(scale_key);
  WEFT_CHECK(!has_config || scale.empty() || scale == scale_text(*config), Exit::data,
             "copy both files again, as weft export wrote them",
             "{} says {}, but {} was written with {}", config_file.string(), scale_text(*config),
             file.string(), printable(scale));
  std::map<std::string, double> alphas;
  read_pieces(tensors, adapter, alphas);
  for (auto& [name, layer] : adapter.layers) {
    const auto rank = static_cast<double>(layer.rank);
    const auto own = alphas.find(name);
    WEFT_CHECK(!has_config || layer.rank == config->rank, Exit::data,
               "the two files do not belong together: copy both again",
               "{}: r is {}, but layer {} in {} has rank {}", config_file.string(), config->rank,
               name, file.string(), layer.rank);
    // Without an alpha, or with 0, as kohya has it, a layer counts as it is.
    layer.scale = 1;
    if (config) layer.scale = config->alpha / (config->root ? std::sqrt(rank) : rank);
    if (own != alphas.end()) layer.scale = own->second == 0 ? 1 : own->second / rank;
    adapter.facts.rank = std::max(adapter.facts.rank, layer.rank);
    adapter.facts.alpha = layer.scale * rank;
  }
  if (config) adapter.facts = {config->rank, config->alpha, config->base, ""};
  adapter.facts.base_hash = noted("base_xxh3");
  return adapter;
}

Adapter by_model(Adapter adapter, const ParameterTable& table, const WeightNames& names) {
  // "blocks.0.self_attn.q" of any of its parameters; "" of a name without dots.
  const auto stem = [](const std::string& name) {
    const std::size_t dot = name.rfind('.');
    return dot == name.npos ? std::string() : name.substr(0, dot);
  };
  std::map<std::string, std::string> own, others;
  for (const auto& p : table.all()) {
    if (p->role == Parameter::Role::adapter || !p->name.starts_with(names.prefix)) continue;
    const std::string name = p->name.substr(names.prefix.size()), layer = stem(p->name);
    own.try_emplace(stem(name), layer);
    std::string flat = std::string(kohya_prefix) + stem(name);
    std::ranges::replace(flat, '.', '_');
    others.try_emplace(flat, layer);
    if (!names.others) continue;
    for (const std::string& other : names.others(name)) others.try_emplace(stem(other), layer);
  }
  const auto model_name = [&](const std::string& layer) {
    if (const auto found = own.find(layer); found != own.end()) return found->second;
    if (const auto found = others.find(layer); found != others.end()) return found->second;
    std::vector<std::string> known;
    for (const auto& [name, of] : own) known.push_back(name);
    const std::string near = nearest_name(layer, known);
    throw Error(Exit::data,
                fmt::format("adapter {} has layer {}, which the model lacks", adapter.path,
                            printable(layer)),
                near.empty() ? "it is an adapter of another model"
                             : fmt::format("the model's nearest layer is {}", near),
                __FILE__, __LINE__);
  };
  const auto renamed = [&](auto& map, const auto& name_of) {
    std::remove_cvref_t<decltype(map)> by_name;
    for (auto& [name, value] : map)
      WEFT_CHECK(by_name.emplace(name_of(name), std::move(value)).second, Exit::data,
                 "the file has two names of one layer", "adapter {}: layer {} is there twice",
                 adapter.path, printable(name));
    map = std::move(by_name);
  };
  renamed(adapter.layers, model_name);
  renamed(adapter.differences, [&](const std::string& name) {
    const std::string layer = stem(name);
    return model_name(layer) + name.substr(layer.size());
  });
  return adapter;
}

void write_adapter(const fs::path& path, const Adapter& adapter, AdapterNames names, DType dtype) {
  const bool peft = names == AdapterNames::peft;
  if (peft) make_own_folder(path, Exit::data);
  std::vector<SafetensorWrite> list;
  std::vector<std::vector<std::byte>> bytes;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape,
                       const std::vector<float>& values, DType type) {
    bytes.push_back(floats_as(values, type, path, name));
    list.push_back({name, type, shape, bytes.back()});
  };
  ordered_json targets = ordered_json::array();
  for (const auto& [layer_name, layer] : adapter.layers) {
    std::string name = std::string(peft ? peft_prefix : comfy_prefix) + layer_name;
    if (names == AdapterNames::kohya) {
      name = layer_name;
      std::ranges::replace(name, '.', '_');
      name = std::string(kohya_prefix) + name;
    }
    add(fmt::format("{}{}", name, peft ? a_ending : down_ending), {layer.rank, layer.in}, layer.a,
        dtype);
    add(fmt::format("{}{}", name, peft ? b_ending : up_ending), {layer.out, layer.rank}, layer.b,
        dtype);
    if (!peft)
      add(fmt::format("{}{}", name, alpha_ending), {},
          {static_cast<float>(layer.scale * static_cast<double>(layer.rank))}, DType::f32);
    targets.push_back(layer_name);
  }
  write_safetensors(
      peft ? path / adapter_weights_name : path, list,
      {{"format", "pt"},
       {"producer", "weft"},
       {"base", adapter.facts.base},
       {"base_xxh3", adapter.facts.base_hash},
       {scale_key, scale_text({adapter.facts.rank, adapter.facts.alpha, false, ""})}});
  if (!peft) return;
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
  replace_file(path / adapter_config_name, json_text(config, 2) + "\n", Exit::data, Durable::yes);
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

void merge_adapters(ParameterTable& table, std::span<const WeightedAdapter> adapters,
                    const WeightNames& names) {
  // By parameter, so that one at a time is in memory as f32.
  std::map<Parameter*, std::vector<std::function<void(float*)>>> added;
  constexpr const char* size_hint =
      "it is an adapter of a model of another size: check the deck's [model]";
  std::vector<Adapter> own;
  own.reserve(adapters.size());
  for (const auto& [given, factor] : adapters) {
    const Adapter& adapter = own.emplace_back(by_model(given, table, names));
    if (adapter.left_out > 0 && log::rank() == 0)
      log::warn("adapter {}: left out {} of layers that only a model for pictures has",
                adapter.path, counted(static_cast<std::int64_t>(adapter.left_out), "tensor"));
    for (const auto& [name, layer] : adapter.layers) {
      Parameter* const p = table.find(name + ".weight");
      WEFT_CHECK(p != nullptr && p->shape == Shape({layer.out, layer.in}), Exit::data, size_hint,
                 "adapter {}: layer {} is made for a weight of [{}, {}], the model's has {}",
                 adapter.path, name, layer.out, layer.in, p == nullptr ? "none" : p->shape.str());
      added[p].push_back([&layer, scale = static_cast<float>(factor * layer.scale)](float* w) {
        const std::int64_t in = layer.in, rank = layer.rank;
#pragma omp parallel for schedule(static)
        for (std::int64_t o = 0; o < layer.out; ++o)
          for (std::int64_t r = 0; r < rank; ++r) {
            const float b = scale * layer.b[o * rank + r];
            const float* const a = layer.a.data() + r * in;
            for (std::int64_t i = 0; i < in; ++i) w[o * in + i] += b * a[i];
          }
      });
    }
    for (const auto& [name, values] : adapter.differences) {
      Parameter* const p = table.find(name);
      WEFT_CHECK(p != nullptr && p->shape.numel() == std::ssize(values), Exit::data, size_hint,
                 "adapter {}: {} numbers are to be added to {}, the model's has {}", adapter.path,
                 values.size(), name, p == nullptr ? 0 : p->shape.numel());
      added[p].push_back([&values, times = static_cast<float>(factor)](float* w) {
        for (std::size_t i = 0; i < values.size(); ++i) w[i] += times * values[i];
      });
    }
  }
  for (const auto& [p, terms] : added) {
    std::vector<float> values = kept_values(*p);
    for (const auto& add : terms) add(values.data());
    p->set(0, values);
  }
}

}  // namespace weft
