#include "core/seal.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <initializer_list>

namespace weft {
namespace {

constexpr std::size_t digits = 16;

struct Form {
  std::string_view before, after;  // of the digits
  std::string_view lost;           // what stood there before the text was sealed
};
constexpr Form json{",\"xxh3\":\"", "\"}", "}"}, lines{"# xxh3 ", "", ""};

std::string hash_of(std::string_view text) {
  return fmt::format("{:016x}", XXH3_64bits(text.data(), text.size()));
}

}  // namespace

std::string seal_json(std::string object) {
  const std::string hash = hash_of(object);
  // The hash covers the object as it was, closing brace included; the brace then follows the seal.
  object.pop_back();
  return object.append(json.before).append(hash).append(json.after);
}

std::string seal_text(std::string text) {
  const std::string hash = hash_of(text);
  return text.append(lines.before).append(hash).append("\n");
}

bool seal_holds(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  for (const Form& form : {json, lines}) {
    const std::size_t length = form.before.size() + digits + form.after.size();
    if (text.size() < length || !text.ends_with(form.after)) continue;
    const std::string_view seal = text.substr(text.size() - length);
    if (!seal.starts_with(form.before)) continue;
    const std::string sealed = std::string(text.substr(0, text.size() - length)).append(form.lost);
    return seal.substr(form.before.size(), digits) == hash_of(sealed);
  }
  return true;
}

bool is_cut_off(std::string_view line, bool last) {
  return last && line.find(json.before) == line.npos;
}

}  // namespace weft
