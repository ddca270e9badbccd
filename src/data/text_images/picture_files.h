// Pictures of a folder.
#pragma once

#include <string>
#include <vector>

namespace weft {

// Whether a file's extension is that of a picture: .jpg, .jpeg, .png, .bmp, .webp, in any case.
bool is_picture_name(const std::string& path);
// Whether `path` is a folder with such a file in it.
bool has_pictures(const std::string& path);
// Paths of the pictures in a folder, not below it, sorted. Throws Exit::data if it is no folder or
// has none.
std::vector<std::string> list_pictures(const std::string& folder);

}  // namespace weft
