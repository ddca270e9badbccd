// What tells one run from another: "id" of RUN/run.json and a note of each checkpoint. It goes with the run directory,
// wherever that is moved.
#pragma once

#include <filesystem>
#include <string>

namespace weft {

// "" where run.json is not there, is damaged or of an older weft.
std::string stored_run_id(const std::filesystem::path& run_dir);
// 32 hexadecimal digits that no other run has.
std::string new_run_id();

}  // namespace weft
