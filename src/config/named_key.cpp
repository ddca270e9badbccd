#include "config/named_key.h"

#include "config/deck_table.h"

namespace weft {
namespace {

bool ends_word(std::string_view text, std::size_t at) {
  return at >= text.size() || std::string_view(" \"',;:()[]").find(text[at]) != text.npos;
}

bool has_word(std::string_view text, const std::string& word) {
  for (std::size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1))
    if (const std::size_t end = at + word.size();
        (at == 0 || ends_word(text, at - 1)) &&
        (ends_word(text, end) || text[end] == '/'))  // or what is below that folder
      return true;
  return false;
}

}  // namespace

std::string key_of_value(const Deck& deck, std::string_view message) {
  Deck copy = deck, untouched;  // tables point into mutable decks
  const std::vector<Option> rows = option_table(copy), defaults = option_table(untouched);
  std::string key;
  std::size_t longest = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].choices.empty()) continue;
    const auto look = [&](const std::string& value) {
      if (value.size() <= longest || !has_word(message, value)) return;
      longest = value.size();
      key = rows[i].key;
    };
    if (const auto* text = std::get_if<std::string*>(&rows[i].target);
        text != nullptr && **text != *std::get<std::string*>(defaults[i].target))
      look(**text);
    if (const auto* texts = std::get_if<std::vector<std::string>*>(&rows[i].target))
      for (const std::string& text : **texts) look(text);
  }
  return key;
}

}  // namespace weft
