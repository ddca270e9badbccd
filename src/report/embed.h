// Pictures and clips within a page: as long as they are not too large they travel in it, the others
// are named and linked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace weft::report_page {

class Embedder {
 public:
  // A figure of the file `folder`/`file`, PNG, JPEG or MP4. `base` is the folder of the page, which
  // links begin at; `caption` is HTML, `alt` text. Clips with sound do not start by themselves.
  struct Shown {
    std::filesystem::path folder;
    std::string file, alt, caption;
    bool sound = false, wide = false;
  };
  std::string figure(const std::filesystem::path& base, const Shown& shown);
  std::size_t linked() const { return linked_; }

 private:
  std::string content(const std::filesystem::path& base, const Shown& shown, bool& wide);

  std::uint64_t total_ = 0;  // bytes embedded
  std::size_t linked_ = 0;
};

// A section of the pictures of a job's folder, beside which the page lies: what each shows, and its
// file. "" without pictures.
std::string picture_section(const std::filesystem::path& folder,
                            const std::vector<std::pair<std::string, std::string>>& pictures,
                            const std::string& note, bool wide);

// Whether a file named by an untrusted manifest lies in the manifest's folder: a relative path
// without "..".
bool stays_inside(const std::string& file);

// A whole file; "" for one that cannot be read.
std::string read_text(const std::filesystem::path& path);
std::string base64(const std::string& bytes);

}  // namespace weft::report_page
