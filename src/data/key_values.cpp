#include "data/key_values.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "config/deck.h"
#include "core/error.h"

namespace weft {
namespace {

constexpr std::string_view blanks = " \t\r\n";

std::string_view stripped(std::string_view text) {
  const auto first = text.find_first_not_of(blanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

}  // namespace

std::string read_keys(std::string_view spec, std::string_view kind, const std::string& hint,
                      std::span<const NumberKey> numbers, std::span<const TextKey> texts) {
  const auto number = [&](std::string_view key, std::string_view text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    WEFT_CHECK(error == std::errc() && end == text.data() + text.size(), Exit::usage, hint,
               "{} = \"{}\" of {} is not a whole number", key, text, kind);
    return value;
  };
  for (std::size_t at = 0; at <= spec.size();) {
    const std::size_t end = std::min(spec.find(',', at), spec.size());
    const std::string_view item = stripped(spec.substr(at, end - at));
    at = end + 1;
    if (item.empty()) continue;
    const auto equals = item.find('=');
    WEFT_CHECK(equals != std::string_view::npos, Exit::usage, hint,
               "\"{}\" in {}: is not key=value", item, kind);
    const std::string_view name = stripped(item.substr(0, equals));
    const std::string_view value = stripped(item.substr(equals + 1));
    const auto text = std::ranges::find(texts, name, &TextKey::name);
    if (text != texts.end()) {
      *text->target = value;
      continue;
    }
    const auto key = std::ranges::find(numbers, name, &NumberKey::name);
    if (key == numbers.end()) {
      std::vector<std::string> names;
      for (const NumberKey& k : numbers) names.emplace_back(k.name);
      for (const TextKey& k : texts) names.emplace_back(k.name);
      const std::string near = nearest_name(std::string(name), names);
      throw Error(Exit::usage, fmt::format("unknown key \"{}\" in {}:", name, kind),
                  near.empty() ? hint : fmt::format("did you mean \"{}\"?", near), __FILE__,
                  __LINE__);
    }
    const auto dots = key->range ? value.find("..") : std::string_view::npos;
    NumberRange& r = *key->target;
    r.low = number(name, value.substr(0, dots));
    r.high = dots == std::string_view::npos ? r.low : number(name, value.substr(dots + 2));
    WEFT_CHECK(r.low >= key->least && r.high <= key->most && r.low <= r.high, Exit::usage,
               fmt::format("choose {} to {}", key->least, key->most),
               "{} = {} of {} is out of range", name, value, kind);
  }
  std::string all;
  for (const NumberKey& k : numbers)
    all += fmt::format("{}={}..{}\n", k.name, k.target->low, k.target->high);
  return all;
}

}  // namespace weft
