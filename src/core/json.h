// Parses untrusted JSON, with a limit on nesting, and writes JSON.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace weft {

// Deeper than any real document. nlohmann's dump, copies and comparisons recurse, so enough
// brackets would overflow the stack.
inline constexpr int deepest_json = 64;

// Whether no bracket of `text` lies deeper. Strings are recognised as in JSON up to its first
// error, where a parser stops.
inline bool is_shallow_json(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\')
        ++i;
      else if (c == '"')
        quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > deepest_json) return false;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return true;
}

struct JsonTooDeep : nlohmann::json::exception {
  JsonTooDeep() : exception(0, "[json.exception] nested deeper than 64 brackets") {}
};

// nlohmann's parser and writer take three seconds to compile: json.cpp has them, for nlohmann::json
// and nlohmann::ordered_json, and no other file calls Json::parse or dump().

// As Json::parse, but throws JsonTooDeep, which is a nlohmann::json::exception too, before parsing.
// All input from users, files or other programs goes through here.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text);

// The same without exceptions: broken or too deep input is_discarded().
template <class Json = nlohmann::json>
Json try_parse_json(std::string_view text);

// A member of an untrusted object: NaN where it is absent, null or no number.
template <class Json>
double number_of(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number() ? it->template get<double>()
                                               : std::numeric_limits<double>::quiet_NaN();
}

// j.dump() with the same arguments.
template <class Json>
std::string dump_json(
    const Json& j, int indent = -1, char blank = ' ', bool ascii = false,
    nlohmann::json::error_handler_t errors = nlohmann::json::error_handler_t::strict);

struct JsonNotWhole : nlohmann::json::exception {
  JsonNotWhole() : exception(0, "[json.exception] not a whole number of its range") {}
};

// The whole number that `j` holds; JsonNotWhole if it is not one, or does not fit in a T. get<T>()
// would also accept fractions, 1e300 and 2^64 - 1, with arbitrary results.
template <class T, class Json>
T whole_number(const Json& j) {
  if (j.is_number_unsigned()) {
    const auto n = j.template get<std::uint64_t>();
    if (std::in_range<T>(n)) return static_cast<T>(n);
  } else if (j.is_number_integer()) {
    const auto n = j.template get<std::int64_t>();
    if (std::in_range<T>(n)) return static_cast<T>(n);
  }
  throw JsonNotWhole();
}

}  // namespace weft
