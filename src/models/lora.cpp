#include "models/lora.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/log.h"

namespace weft {
namespace {

constexpr std::string_view weight_ending = ".weight";
constexpr std::string_view a_weight_ending = ".lora_A.weight";

void lora_rows(Rows& r, LoraDeck& d) {
  r.number("rank", d.rank, 0, 65536,
           "Train adapters of this rank (LoRA) instead of the model's weights; 0 trains the "
           "weights.");
  r.number("alpha", d.alpha, 1e-6, 1e6, "What an adapter adds is multiplied by alpha / rank.");
  r.text("targets", d.targets,
         "The layers that get adapters: names of parameters without .weight; * stands for any "
         "characters.");
}

bool matches_layer(const std::string& target, const std::string& name) {
  return fnmatch(target.c_str(), name.c_str(), 0) == 0;
}

// Patterns that a user may have meant, of a layer "spatial_blocks.0.attn.qkv": itself,
// "spatial_blocks.*.attn.qkv", "*.attn.qkv", "*.qkv".
void add_patterns(const std::string& name, std::vector<std::string>& patterns) {
  patterns.insert(patterns.end(), {name, kind_of_tensor(name)});
  for (std::size_t at = name.find('.'); at != name.npos; at = name.find('.', at + 1))
    patterns.push_back("*" + name.substr(at));
}

void check_target(const std::string& target, std::span<nn::Linear* const> layers) {
  std::vector<std::string> patterns;
  for (const nn::Linear* l : layers) {
    const std::string name = layer_name(*l->weight);
    if (matches_layer(target, name)) return;
    add_patterns(name, patterns);
  }
  std::string near = nearest_name(target, patterns);
  if (near.empty() && !layers.empty()) near = layer_name(*layers.front()->weight);
  throw Error(
      Exit::usage, fmt::format("lora.targets: \"{}\" matches no linear layer", target),
      fmt::format("the nearest is \"{}\"; targets are names of parameters without .weight", near),
      __FILE__, __LINE__);
}

void check_lora(const Deck& deck, const DeckDemand& demand) {
  const LoraDeck& lora = lora_deck(deck);
  demand(lora.adapters.size() <= (lora.on() ? 1u : 0u),
         fmt::format("model.adapters = [{}] with lora.rank = {}", fmt::join(lora.adapters, ", "),
                     lora.rank),
         "a training with [lora] goes on from one adapter, of its rank, alpha and targets; whole "
         "weights start from model.weights, into which `weft export RUN FILE --merged` merges one");
  if (!lora.on()) return;
  demand(deck.model.name == "stdit3" || deck.model.name == "wan",
         fmt::format("lora.rank = {} with model.name = \"{}\"", lora.rank, deck.model.name),
         "adapters are trained for \"stdit3\" and \"wan\" alone; set lora.rank = 0");
  demand(deck.model.weights_partial == "strict",
         fmt::format("lora.rank = {} with model.weights_partial = \"{}\"", lora.rank,
                     deck.model.weights_partial),
         "adapters belong to a whole base: load it with \"matching\" in a run without [lora], "
         "export that, and name the export as model.weights");
  demand(!lora.targets.empty(), fmt::format("lora.rank = {} without lora.targets", lora.rank),
         "name layers, such as [\"*.attn.*\"]");
}

void adapters_rows(Rows& r, LoraDeck& d) {
  r.path(
       "adapters", d.adapters,
       "The adapter (LoRA) that a training with [lora] goes on from, PATH or PATH=FACTOR: a folder "
       "of weft export or PEFT, or a run directory, whose moving average is taken.")
      .decides = false;
}

}  // namespace

DeckTable lora_table() {
  DeckTable t = deck_table("lora", lora_rows);
  t.check = check_lora;
  return t;
}

DeckTable wan_lora_table() {
  return deck_table<WanLoraDeck>("lora", [](Rows& r, WanLoraDeck& d) { lora_rows(r, d); });
}

DeckTable adapters_table() { return deck_table("model", adapters_rows); }

DeckTable wan_adapters_table() {
  return deck_table<WanLoraDeck>("model", [](Rows& r, WanLoraDeck& d) { adapters_rows(r, d); });
}

LoraDeck& lora_deck(Deck& deck) {
  return deck.model.name == "wan" ? deck.get<WanLoraDeck>() : deck.get<LoraDeck>();
}
const LoraDeck& lora_deck(const Deck& deck) {
  return deck.model.name == "wan" ? deck.get<WanLoraDeck>() : deck.get<LoraDeck>();
}

std::string layer_name(const Parameter& weight) {
  WEFT_ASSERT(weight.name.ends_with(weight_ending));
  return weight.name.substr(0, weight.name.size() - weight_ending.size());
}

void add_adapters(const LoraDeck& lora, ParameterTable& table,
                  std::span<nn::Linear* const> layers) {
  for (const std::string& target : lora.targets) check_target(target, layers);
  for (const auto& p : table.all()) {
    p->trainable = false;
    p->role = Parameter::Role::base;
  }
  for (nn::Linear* l : layers) {
    const std::string name = layer_name(*l->weight);
    if (std::ranges::none_of(lora.targets, [&](const auto& t) { return matches_layer(t, name); }))
      continue;
    const std::int64_t out = l->weight->shape[0], in = l->weight->shape[1];
    const auto width = static_cast<float>(1 / std::sqrt(static_cast<double>(in)));
    l->lora_a = &table.add(name + ".lora_A.weight", {lora.rank, in}, Init::uniform(width));
    l->lora_b = &table.add(name + ".lora_B.weight", {out, lora.rank}, Init::constant(0));
    l->lora_scale = static_cast<float>(lora.alpha / static_cast<double>(lora.rank));
    for (Parameter* p : {l->lora_a, l->lora_b}) {
      p->role = Parameter::Role::adapter;
      p->bf16_only = l->weight->bf16_only;
    }
  }
}

void start_from(const LoraDeck& lora, ParameterTable& table, const Adapter& adapter,
                double factor) {
  constexpr const char* same = "take the rank, alpha and targets that the adapter was trained with";
  const std::string named = fmt::format("lora.targets = [{}]", fmt::join(lora.targets, ", "));
  std::set<std::string> targets;
  for (const auto& p : table.all())
    if (p->name.ends_with(a_weight_ending))
      targets.insert(p->name.substr(0, p->name.size() - a_weight_ending.size()));
  for (const auto& [name, layer] : adapter.layers) {
    const double alpha = layer.scale * static_cast<double>(layer.rank);
    WEFT_CHECK(
        layer.rank == lora.rank && std::abs(alpha - lora.alpha) <= 1e-9 * lora.alpha, Exit::usage,
        same, "model.adapters: {} has rank {} and alpha {}, not lora.rank = {} and lora.alpha = {}",
        adapter.path, layer.rank, alpha, lora.rank, lora.alpha);
    WEFT_CHECK(targets.erase(name) == 1, Exit::usage, same,
               "model.adapters: layer {} of {} is not among {}", name, adapter.path, named);
    Parameter& a = *table.find(name + ".lora_A.weight");
    Parameter& b = *table.find(name + ".lora_B.weight");
    WEFT_CHECK(
        a.shape == Shape({layer.rank, layer.in}) && b.shape == Shape({layer.out, layer.rank}),
        Exit::usage, "check the deck's [model]",
        "model.adapters: layer {} of {} is for a weight of [{}, {}], the model's has [{}, {}]",
        name, adapter.path, layer.out, layer.in, b.shape[0], a.shape[1]);
    a.set(0, layer.a);
    std::vector<float> scaled = layer.b;
    for (float& v : scaled) v *= static_cast<float>(factor);
    b.set(0, scaled);
  }
  WEFT_CHECK(targets.empty(), Exit::usage, same,
             "model.adapters: {} has no layer {}, one of {} of {}", adapter.path, *targets.begin(),
             targets.size(), named);
}

}  // namespace weft
