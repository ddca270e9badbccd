// Pages: HTML files that need no other file and no network. C++ gathers what a page is about as
// JSON; page.js shows it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace weft::report_page {

using Json = nlohmann::ordered_json;

// A page of `data`, whose member "kind" says which of page.js's pages it is; "title", "note" (below
// the title) and "several" (it compares jobs) are of all kinds. Strings in it are data, whoever
// wrote them, and never become markup. `text`, as a terminal shows it, is what can be read where
// scripts are off.
std::string page_html(const Json& data, const std::string& text);
// The files page.css, and chart.js with page.js (page_files.cpp).
std::string page_style();
std::string page_script();

// Whose the file is that lies at the path of a page.
enum class PageOwner { nobody, weft, weft_for_several_jobs, other };
PageOwner owner_of(const std::filesystem::path& page);
// Throws Exit::data where another's file lies at the path of a page.
void check_owner(const std::filesystem::path& page);
// Writes a page, or replaces one that weft has written. Throws Exit::data where another's file lies
// there, or where it cannot be written.
void write_page(const std::filesystem::path& page, const std::string& html);

// Pictures and clips of a page. As long as they are not too large they travel in it.
class Embedder {
 public:
  explicit Embedder(std::filesystem::path page_folder) : base_(std::move(page_folder)) {}
  // The file `folder`/`file`, PNG, JPEG or MP4: "data" is its content as an address. A larger
  // one has "name", its path from the page, "link", the same as an address, and "bytes"; one that
  // cannot be read has "lost", its path.
  Json media(const std::filesystem::path& folder, const std::string& file);

 private:
  std::filesystem::path base_;
  std::uint64_t total_ = 0;  // bytes embedded
};

// Whether a file named by an untrusted manifest lies in the manifest's folder: a relative path
// without "..".
bool stays_inside(const std::string& file);
// A path in an address: what is neither unreserved there nor a slash is percent-encoded (RFC 3986).
std::string percent_encoded(const std::string& path);
// Whether shells take each of its characters as it is.
bool is_plain_word(const std::string& text);
// The last part of a path: "runs/demo/" and "runs/demo" are the same run.
std::string name_of(const std::filesystem::path& path);
// Not open where the path is no regular file: a pipe would block, and behind a link may lie what
// its owner would not put on a page that is passed on.
std::ifstream open_regular(const std::filesystem::path& path);
// A whole regular file; "" for one that cannot be read.
std::string read_text(const std::filesystem::path& path);
std::string base64(const std::string& bytes);

}  // namespace weft::report_page
