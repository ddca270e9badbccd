#include "config/keep_inputs.h"

#include <map>
#include <vector>

#include "config/deck_table.h"
#include "core/error.h"

namespace weft {

namespace fs = std::filesystem;

fs::path absolute_path(const fs::path& file) {
  std::error_code none;
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  return fs::weakly_canonical(folder, none) / file.filename();
}

void keep_files(const Deck& deck, const std::string& key, std::span<const std::string> inputs,
                const std::function<bool(const fs::path&)>& is_result) {
  std::map<fs::path, fs::path> folders;  // of lists, many files are in the same
  const auto check = [&](const std::string& input) {
    std::error_code none;
    const fs::path path = input;
    const fs::file_type type = fs::symlink_status(path, none).type();
    if (type != fs::file_type::regular && type != fs::file_type::symlink) return;
    const auto [folder, is_new] = folders.try_emplace(path.parent_path());
    if (is_new) folder->second = absolute_path(path).parent_path();
    const bool replaced =
        is_result(folder->second / path.filename()) ||
        (type == fs::file_type::symlink && is_result(fs::weakly_canonical(path, none)));
    WEFT_CHECK(!replaced, Exit::usage, fmt::format("choose another {}", key),
               "a result would replace the input {}", input);
  };
  for (const std::string& input : inputs) check(input);
  check(deck.file);
}

void keep_inputs(const Deck& deck, const std::string& key, std::span<const std::string> inputs,
                 const std::function<bool(const fs::path&)>& is_result) {
  std::vector<std::string> files(inputs.begin(), inputs.end());
  Deck copy = deck;  // the table points into a mutable deck
  for (const Option& o : option_table(copy)) {
    if (o.key.ends_with(".output") || !o.choices.empty()) continue;
    if (const auto* text = std::get_if<std::string*>(&o.target)) {
      files.push_back(**text);
      std::error_code failed;
      if (o.key.ends_with("weights"))
        for (fs::directory_iterator it(**text, failed), end; !failed && it != end;
             it.increment(failed))
          files.push_back(it->path().string());
    }
    if (const auto* texts = std::get_if<std::vector<std::string>*>(&o.target))
      files.insert(files.end(), (*texts)->begin(), (*texts)->end());
    if (o.list != nullptr) files.insert(files.end(), o.list->begin(), o.list->end());
  }
  keep_files(deck, key, files, is_result);
}

}  // namespace weft
