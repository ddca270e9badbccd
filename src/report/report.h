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

// The page as HTML. Needs no network and no script to be read. Curves of several runs lie over
// one another, in the order given. `scaling` comes beside the results that the runs have
// themselves. `folder`: where the page goes; empty: the first run's.
std::string make_page(std::span<const Run> runs, std::span<const Scaling> scaling = {},
                      std::filesystem::path folder = {});

// The mean of the last tenth of the losses (at least one, at most 50), NaN without any; and a loss
// in five digits.
double last_loss(const Run& run);
std::string loss_text(double loss);

// The sections on many ranks: where the time of each went, who was waited for, how the job scales,
// and a rank's memory against its plan.
//
// All return "" for what the run does not tell. `of`, HTML, ends the titles: " of a".
std::string rank_bars(const Run& run, const std::string& of);
std::string memory_against_plan(const Run& run, const std::string& of);
// The curves of all results, efficiency against ranks, and their figures.
std::string scaling_curves(std::span<const Scaling> results);

// Write the pages of `weft evaluate` and `weft score` to `file` (job_pages.cpp): totals, classes by
// IoU, Hmean by score or rows by text regions, what bounded the job, and some pictures. HTML that
// needs no other file: pictures that are not too large are in it, others are named. Exit::data
// where `file` is not a page of weft (write_page).
void segmentation_page(const SegmentationScores& scores, const std::filesystem::path& file);
void detection_page(const DetectionScores& scores, const std::filesystem::path& file);
void score_page(const ScoreSummary& summary, const std::filesystem::path& file);

// ---- `weft report DIR`: one page over all jobs below a folder, which links to the page of each
// (folder_page.cpp)

// A row of the page. NaN or empty: unknown.
struct JobRow {
  KnownJob job;
  std::string name;   // its path below the folder
  std::string page;   // its own page, likewise
  std::string error;  // why it has no page, or no figures
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

}  // namespace report_page
}  // namespace weft
