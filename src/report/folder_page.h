// `weft report DIR`: one page over all jobs below a folder, which links to the page of each.
#pragma once

#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "report/status.h"

namespace weft::report_page {

// A row of the page. NaN or empty: unknown.
struct JobRow {
  KnownJob job;
  std::string name;   // its path below the folder
  std::string page;   // its own page, likewise
  std::string fault;  // why it has no page, or no figures
  double loss = std::numeric_limits<double>::quiet_NaN();
  double held_out = std::numeric_limits<double>::quiet_NaN();  // the last loss of held-out samples
  double seconds = std::numeric_limits<double>::quiet_NaN();   // a step or another item
  std::vector<double> losses;                                  // some dozens, over all steps
  std::vector<std::string> pictures;                           // PNG files, of the newest samples
};

// Reads these jobs, which lie below `folder` (find_jobs), writes the pages of those that have none
// yet or have gone on since then, and `folder`/index.html, whose path it returns. A job that cannot
// be read, or in whose folder another's report.html lies, has a row that says why, and is a WARN.
// `now`: seconds since 1970. Throws Exit::data when the index cannot be written, or index.html is
// not a page of weft.
std::filesystem::path write_folder_page(const std::filesystem::path& folder,
                                        std::span<const KnownJob> jobs, double now);

// The page of these rows. Needs no other file, no network, and a script only to sort its rows.
std::string folder_page(const std::filesystem::path& folder, std::span<const JobRow> rows,
                        double now);

// The page that weft evaluate or weft score has written itself, for its folder or its output; empty
// where there is none.
std::filesystem::path own_page(const std::filesystem::path& input);

}  // namespace weft::report_page
