// The JSON Schema of decks, from the same rows as the parser's.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "config/deck_table.h"
#include "core/json.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

template <class T>
constexpr bool is_list = false;
template <class T>
constexpr bool is_list<std::vector<T>> = true;

// The schema of one value: type, range, values.
template <class T>
Json one_value(const Option& o) {
  if constexpr (std::is_same_v<T, bool>) {
    return {{"type", "boolean"}};
  } else if constexpr (std::is_same_v<T, std::string>) {
    Json j = {{"type", "string"}};
    if (!o.choices.empty()) j["enum"] = o.choices;
    return j;
  } else {
    constexpr bool whole = std::is_same_v<T, std::int64_t>;
    Json j = {{"type", whole ? "integer" : "number"}};
    const auto limit = [&](const char* name, double value) {
      if (std::abs(value) >= many) return;
      if (whole)
        j[name] = static_cast<std::int64_t>(value);
      else
        j[name] = value;
    };
    limit("minimum", o.minimum);
    limit("maximum", o.maximum);
    return j;
  }
}

// What a key takes.
Json values_of_row(const Option& o) {
  return std::visit(
      [&](auto* target) -> Json {
        using T = std::remove_pointer_t<decltype(target)>;
        if constexpr (is_list<T>) {
          const Json item = one_value<typename T::value_type>(o);
          const Json list = {{"type", "array"}, {"items", item}};
          return o.or_one ? Json{{"anyOf", {item, list}}} : list;
        } else {
          const Json item = one_value<T>(o);
          if (o.more != nullptr)
            return {{"anyOf", {item, {{"type", "string"}, {"pattern", "^\\+[0-9]+$"}}}}};
          if (o.list == nullptr) return item;
          return {{"anyOf", {item, {{"type", "array"}, {"items", item}, {"minItems", 1}}}}};
        }
      },
      o.target);
}

Json default_of(const Option& o) {
  if (o.list != nullptr && !o.list->empty()) return *o.list;
  return std::visit(
      [&](auto* target) -> Json {
        using T = std::remove_pointer_t<decltype(target)>;
        if constexpr (is_list<T>) {
          using Item = typename T::value_type;
          if (o.or_one && target->size() == 1) return static_cast<Item>(target->front());
        }
        return *target;
      },
      o.target);
}

// The schema of a key: where several models have it, what any of them takes.
Json schema_of(const Option& o) {
  std::vector<Json> kinds = {values_of_row(o)};
  std::string description = o.help;
  for (const Option& other : o.others) {
    const Json kind = values_of_row(other);
    if (std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
    if (const Json value = default_of(other); value != default_of(o))
      description +=
          fmt::format(" Default of {}: {}.", fmt::join(other.models, ", "), dump_json(value));
  }
  Json j = kinds.size() == 1 ? kinds.front() : Json{{"anyOf", kinds}};
  j["default"] = default_of(o);
  j["description"] = description;
  return j;
}

}  // namespace

std::string deck_schema() {
  Deck deck;
  const std::vector<Option> rows = option_table(deck);
  Json tables = Json::object();
  const auto keys_of = [&](const std::string& key) -> Json& {
    Json& table = tables[key.substr(0, key.find('.'))];
    if (table.is_null())
      table = {{"type", "object"}, {"additionalProperties", false}, {"properties", Json::object()}};
    return table["properties"];
  };
  for (const Option& o : rows) keys_of(o.key)[o.key.substr(o.key.find('.') + 1)] = schema_of(o);
  // Other names, behind all keys.
  for (const Option& o : rows) {
    std::vector<const Option*> all = {&o};
    for (const Option& other : o.others) all.push_back(&other);
    for (const Option* row : all) {
      if (row->alias.empty()) continue;
      Json& keys = keys_of(row->alias);
      const std::string name = row->alias.substr(row->alias.find('.') + 1);
      if (keys.contains(name)) continue;
      keys[name] = schema_of(o);
      keys[name].erase("default");
      keys[name]["description"] = "Another name of " + o.key + ".";
    }
  }
  const Json schema = {{"$schema", "http://json-schema.org/draft-04/schema#"},
                       {"title", "Deck of weft"},
                       {"type", "object"},
                       {"additionalProperties", false},
                       {"properties", tables}};
  return dump_json(schema, 1) + "\n";
}

}  // namespace weft
