// Pictures of a folder.
#pragma once

#include <string>
#include <vector>

namespace weft {

// Whether a file's extension is that of a still picture, in any case: .jpg, .png, .tif, .webp ...
// Those that are not read everywhere, as .heic, are among them, so that they are named as such.
bool is_picture_name(const std::string& path);
// Whether `path` is a folder with such a file in it.
bool has_pictures(const std::string& path);
// Paths of the pictures in a folder, not below it, sorted. Throws Exit::data if it is no folder or
// has none.
std::vector<std::string> list_pictures(const std::string& folder);

}  // namespace weft
