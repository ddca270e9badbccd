// The folder that a list job writes: its owner, and how files get into it.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "core/file.h"

namespace weft {

// On rank 0; null on the others, who wait for it in the engine. Makes the folder, and keeps other
// jobs out of it while the lock lives: Exit::checkpoint if one is in it, as for a run directory.
// `key` of the deck names the folder.
std::shared_ptr<FolderLock> lock_output(const std::filesystem::path& folder,
                                        const std::string& key);

// Removes what killed jobs have left half-written: `.X.partial`, where X is the file of a result of
// that name (NAME, NAME.mp4, NAME_watermark.mp4).
void remove_remains(const std::filesystem::path& folder, const std::set<std::string>& names);

// Whether results in a folder of that name, within the output folder, would be in the way of the
// job's own files. `stem`: ListSettings::stem.
bool is_own_name(const std::string& folder, const std::string& stem);

// Makes the folders of `file` below `directory`. Exit::data where a link or a file is in their
// place: results stay in the output folder.
void make_folders(const std::filesystem::path& directory, const std::filesystem::path& file);

// Makes directory/file, and the folders in between: `write` gets the name of a file beside it,
// which is renamed once it is whole.
void write_whole(const std::filesystem::path& directory, const std::string& file,
                 const std::function<void(const std::string&)>& write);

}  // namespace weft
