// Pieces of pages that their sections share: text made safe, numbers with units, frames, legends
// and bars, pictures and clips.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/progress.h"

namespace weft::report_page {

// Told apart by most colour-blind eyes and in grey print; the style has them for light and dark.
inline constexpr const char* run_colors[] = {"var(--run0)", "var(--run1)", "var(--run2)",
                                             "var(--run3)", "var(--run4)", "var(--run5)",
                                             "var(--run6)", "var(--run7)"};
std::string color_of(std::size_t run);

// Text from files is data, never HTML.
std::string escape(const std::string& text);
// Text that is escaped, such as a path: lines may end after its slashes and underscores.
std::string breakable(const std::string& text);

// Fields may be absent and losses NaN: statistics cover the finite values. NaN if there are none;
// the sum of none is 0.
std::vector<double> finite(std::span<const double> values);
double median(std::span<const double> values);
double total(std::span<const double> values);
double greatest(std::span<const double> values);

std::string seconds_text(double seconds);
std::string bytes_text(double bytes);
// Three digits at least: "0.35", "41.2", "1,660".
std::string rate_text(double rate);
std::string percent(double part, double whole);

// The files page.css and page.js (page.cpp).
std::string_view page_style();
std::string_view page_script();
// All of a page before its tiles and sections, and after them. `title` and `note` are HTML. The
// page is marked as weft's; `several`: as one that compares several jobs.
std::string open_page(const std::string& title, const std::string& note, bool several = false);
std::string close_page();

// Whose the file is that lies at the path of a page.
enum class PageOwner { nobody, weft, weft_for_several_jobs, other };
PageOwner owner_of(const std::filesystem::path& page);
// Throws Exit::data where another's file lies at the path of a page.
void check_owner(const std::filesystem::path& page);
// Writes a page, or replaces one that weft has written. Throws Exit::data where another's file lies
// there, or where it cannot be written.
void write_page(const std::filesystem::path& page, const std::string& html);

// ---- What sections are made of: HTML, unless it says text ----

using Named = std::pair<std::string, std::string>;

// The numbers that a reader looks for first, each with what it is.
std::string tiles(std::span<const Named> values);
// `note` and `body` are HTML; an empty note is left out.
std::string section(const std::string& title, const std::string& note, const std::string& body);
// Cells by row; `names`: the first of each row names it.
using Rows = std::vector<std::vector<std::string>>;
std::string table(const std::vector<std::string>& head, const Rows& rows, bool names = false);
// A section of names and values, both text.
std::string facts_section(const std::string& title, std::span<const Named> facts);
// A section of lines of text, such as warnings, of which the first `most` are shown, and `more`
// tells where the others are; "" without any.
std::string list_section(const std::string& title, const std::string& note,
                         std::span<const std::string> lines, std::size_t most = 1000,
                         const std::string& more = "");
// How a job's last start ended, unless it goes on or has finished, and its warnings; `of`, HTML,
// ends the titles: " of a".
std::string status_sections(const JobStatus& status, const std::string& of = "");
// One entry of a legend: a stroke, or a box.
std::string swatch(const std::string& color, const std::string& text, bool box = false);
std::string legend(const std::string& swatches);  // "" for none

// A short bar within a table, filled to this share of 1.
std::string meter(double share, const std::string& color);
// A bar of stacked parts with text to its left and right, and a list of such bars.
// `whole` is what the full width stands for; a piece's title shows under the pointer.
struct BarPiece {
  double value;
  std::string color, title;
};
std::string bar(const std::string& name, const std::vector<BarPiece>& pieces, double whole,
                const std::string& text);
std::string bars(const std::string& list, bool many = false);

// ---- Files within a page ----

// As long as they are not too large they travel in it, the others are named and linked.
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
// file; `legend` is HTML above them. "" without pictures.
std::string picture_section(const std::filesystem::path& folder, std::span<const Named> pictures,
                            const std::string& note, bool wide, const std::string& legend = "");

// Whether a file named by an untrusted manifest lies in the manifest's folder: a relative path
// without "..".
bool stays_inside(const std::string& file);

// A path in an address: what is neither unreserved there nor a slash is percent-encoded (RFC 3986).
std::string percent_encoded(const std::string& path);
// Whether shells take each of its characters as it is.
bool is_plain_word(const std::string& text);
// The last part of a path: "runs/demo/" and "runs/demo" are the same run.
std::string name_of(const std::filesystem::path& path);
// A relative path as a link.
std::string url_of(const std::string& path);
// Not open where the path is no regular file: a pipe would block, and behind a link may lie what
// its owner would not put on a page that is passed on.
std::ifstream open_regular(const std::filesystem::path& path);
// A whole regular file; "" for one that cannot be read.
std::string read_text(const std::filesystem::path& path);
std::string base64(const std::string& bytes);

}  // namespace weft::report_page
