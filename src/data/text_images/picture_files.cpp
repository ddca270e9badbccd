#include "data/text_images/picture_files.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <string_view>

#include "core/error.h"

namespace weft {

namespace fs = std::filesystem;

bool is_picture_name(const std::string& path) {
  static constexpr std::array<std::string_view, 20> extensions = {
      ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".dib", ".tif",  ".tiff", ".webp",
      ".ppm", ".pgm",  ".pbm", ".pnm",  ".jp2", ".jxl", ".qoi", ".avif", ".heic", ".heif"};
  std::string extension = fs::path(path).extension().string();
  std::ranges::transform(extension, extension.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return std::ranges::find(extensions, extension) != extensions.end();
}

bool has_pictures(const std::string& path) {
  std::error_code error;
  fs::directory_iterator entries(path, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error))
    if (is_picture_name(entries->path().string())) return true;
  return false;
}

std::vector<std::string> list_pictures(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> paths;
  fs::directory_iterator entries(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error))
    if (is_picture_name(entries->path().string())) paths.push_back(entries->path().string());
  WEFT_CHECK(!error, Exit::data, "name a folder that can be read", "cannot list folder {}: {}",
             folder, error.message());
  WEFT_CHECK(!paths.empty(), Exit::data, "put .jpg, .png, .bmp, .tif or .webp files into it",
             "folder {} has no pictures", folder);
  std::ranges::sort(paths);
  return paths;
}

}  // namespace weft
