// Checks that a job does not overwrite its inputs.
#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "config/deck.h"

namespace weft {

// On one rank. Exit::usage, with `key` of the deck in the hint, if a result would replace one of
// `inputs`, the deck itself, a file that a key of the deck names, or one of a folder of weights.
// `is_result` is asked about paths without links in them; absolute_path() is such a one.
void keep_inputs(const Deck& deck, const std::string& key, std::span<const std::string> inputs,
                 const std::function<bool(const std::filesystem::path&)>& is_result);

// The same of `inputs` and the deck alone: for a job whose result other keys of its deck name, too.
void keep_files(const Deck& deck, const std::string& key, std::span<const std::string> inputs,
                const std::function<bool(const std::filesystem::path&)>& is_result);

// With the links of its folder resolved, those of the file itself not: where a rename would put it.
std::filesystem::path absolute_path(const std::filesystem::path& file);

}  // namespace weft
