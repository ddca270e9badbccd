// `weft report RUN... [SCALING.json...]`: one self-contained HTML page about runs of any job.
#pragma once

#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "config/command.h"
#include "report/data.h"
#include "report/status.h"

namespace weft {

struct DetectionScores;
struct ScoreSummary;
struct SegmentationScores;

// Writes report.html into the first run's directory, and likewise for folders of clips, and prints
// the paths to stdout. Several runs share the page, their curves overlaid; several folders share
// theirs, the clips next to each other. A folder that contains jobs gets an index.html about all of
// them (folder_page.cpp). Inputs that end in .json are results of weft bench scaling. weft
// evaluate and weft score write their pages themselves: their paths are printed. With
// `tensorboard`, a directory, event files are written instead; `output` is where the page of
// training runs goes. With `open`, the desktop's browser shows the pages; without a desktop stderr
// says how to copy them. Returns 0; throws Exit::data when a run has no metrics, a result no
// points, a file cannot be written, or a file in a page's place is not a page of weft; Exit::usage
// without a run.
int report(const std::vector<std::string>& inputs, const std::string& tensorboard = "",
           const std::string& output = "", bool open = false);
Command report_command();

namespace report_page {

// The page of training runs, whose curves lie over one another, in the order given. `scaling` comes
// beside the results that the runs have themselves; it may be all there is. `folder`: where the
// page goes; empty: the first run's.
std::string make_page(std::span<const Run> runs, std::span<const Json> scaling = {},
                      std::filesystem::path folder = {});

// Write the pages of `weft evaluate` and `weft score` to `file` (job_pages.cpp). Exit::data where
// `file` is not a page of weft (write_page).
void segmentation_page(const SegmentationScores& scores, const std::filesystem::path& file);
void detection_page(const DetectionScores& scores, const std::filesystem::path& file);
void score_page(const ScoreSummary& summary, const std::filesystem::path& file);

// ---- `weft report DIR`: one page over all jobs below a folder, which links to the page of each
// (folder_page.cpp)

// Reads these jobs, which lie below `folder` (find_jobs), writes the pages of those that have none
// yet or have gone on since then, and `folder`/index.html, whose path it returns. A job that cannot
// be read, or in whose folder another's report.html lies, has a row that says why, and is a WARN.
// `now`: seconds since 1970. Throws Exit::data when the index cannot be written, or index.html is
// not a page of weft.
std::filesystem::path write_folder_page(const std::filesystem::path& folder,
                                        std::span<const KnownJob> jobs, double now);

// The page that weft evaluate or weft score has written itself, for its folder or its output; empty
// where there is none.
std::filesystem::path own_page(const std::filesystem::path& input);

}  // namespace report_page
}  // namespace weft
