// Media in folders: which files are taken, by their endings, and what is left out.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace weft {

enum class MediumKind { other, video, picture };
// By the ending of a file's name, in any case (folders.cpp has the lists).
MediumKind kind_of_name(const std::string& name);

// ".jpg" of "a/B.JPG"; "" where a name has no ending.
std::string ending_of(const std::string& path);

struct FolderFiles {
  std::vector<std::string> files;  // sorted by path
  // What was not taken: "3 files (.heic 2, .txt 1), 1 linked folder"; "" for nothing. Files that go
  // with a taken one, NAME.txt and NAME.json, are no loss.
  std::string left_out;
  bool only_hidden = false;
};

// All files in a folder and below whose name is `wanted`. Names that begin with a dot, links to
// folders, folders that cannot be read, and those in which the job writes, `results` and
// RESULTS.parts, are not entered. Exit::data if the folder itself cannot be read.
FolderFiles files_below(const std::string& folder,
                        const std::function<bool(const std::string& name)>& wanted,
                        const std::filesystem::path& results = {});

// "3 files (.heic 2, .txt 1)" of `others`, without those that go with a taken one; "" for none.
std::string count_by_ending(const std::vector<std::string>& others,
                            const std::vector<std::string>& taken);
// Tells on rank 0 what was left out of `where`, as a warning unless it is `only_hidden`.
void tell_left_out(const std::string& where, const std::string& left_out, bool only_hidden = false);

// Whether a file's extension is that of a still picture, in any case: .jpg, .png, .tif, .webp ...
// Those that are not read everywhere, as .heic, are among them, so that they are named as such.
bool is_picture_name(const std::string& path);
// Whether `path` is a folder with such a file in it.
bool has_pictures(const std::string& path);
// Paths of the pictures in a folder, not below it, sorted. Throws Exit::data if it is no folder or
// has none.
std::vector<std::string> list_pictures(const std::string& folder);

}  // namespace weft
