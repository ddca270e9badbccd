// The pages of `weft evaluate` and `weft score`.
#include <fmt/format.h>

#include <algorithm>

#include "core/log.h"
#include "jobs/evaluate/scores.h"
#include "jobs/score/score.h"
#include "models/segmentation/classes.h"
#include "report/html.h"
#include "report/plot.h"
#include "report/report.h"

namespace weft::report_page {
namespace {

// The job that writes the page is this process.
std::string warnings_so_far() { return warning_section("Warnings", log::warnings()); }

std::string classes_table(const SegmentationScores& e) {
  std::string rows =
      "<div "
      "class=\"scroll\"><table><thead><tr><th></th><th>class</th><th>name</th><th>IoU</"
      "th><th>labelled "
      "pixels</th><th>predicted</th><th>found</th></tr></thead>\n";
  for (const std::size_t i : e.by_iou()) {
    const ClassScore& c = e.classes[i];
    const bool known = c.joined() > 0;
    rows += fmt::format(
        "<tr><td><i class=\"box\" style=\"display:inline-block;width:14px;height:14px;outline:1px "
        "solid var(--axis);"
        "background:{}\"></i></td><td>{}</td><td>{}</td><td>{}{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td></tr>\n",
        css_colour(e.palette[i + 1]), i, escape(c.name), meter(known ? c.iou() : 0, "var(--run0)"),
        known ? fmt::format(" {:.2f} %", 100 * c.iou()) : " -",
        short_number(static_cast<double>(c.labelled)),
        short_number(static_cast<double>(c.predicted)),
        percent(static_cast<double>(c.intersection), static_cast<double>(c.labelled)));
  }
  return section("Classes",
                 "By intersection over union; classes that are not labelled anywhere come last. "
                 "Found: the share of a class's pixels that are predicted as such.",
                 rows + "</table></div>");
}

// The colours of the classes that are in the pictures.
std::string class_legend(const SegmentationScores& e) {
  std::string legend;
  for (std::size_t i = 0; i < e.classes.size(); ++i)
    if (e.classes[i].joined() > 0)
      legend += swatch(css_colour(e.palette[i + 1]), escape(e.classes[i].name), true);
  return legend.empty() ? "" : "<div class=\"legend\">" + legend + "</div>\n";
}

std::string pictures(const EvaluationRecord& e, const std::string& what,
                     const std::string& legend = "") {
  std::vector<std::pair<std::string, std::string>> files;
  for (const EvaluationPicture& p : e.pictures) files.emplace_back(p.name, p.file);
  return picture_section(e.folder, files, what, true, legend);
}

std::string facts(const EvaluationRecord& e) {
  std::string rows = "<div class=\"scroll\"><table>";
  for (const auto& [name, value] : e.facts)
    rows += fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", escape(name), escape(value));
  if (e.pace.images > 0)
    rows += fmt::format("<tr><th>pace</th><td>{} on {} in {}: {:.2f} images/s</td></tr>\n",
                        counted(e.pace.images, "image"), counted(e.pace.ranks, "rank"),
                        seconds_text(e.pace.seconds), e.pace.images_a_second());
  return section("What was evaluated", "", rows + "</table></div>");
}

std::string scores_table(const DetectionScores& e) {
  std::string rows =
      "<div class=\"scroll\"><table><thead><tr><th>score</th><th>precision</th><th>recall</th>"
      "<th>Hmean</th><th>boxes</th><th>matched</th></tr></thead>\n";
  for (std::size_t i = 0; i < e.thresholds.size(); ++i) {
    const DetectionCounts& c = e.counts[i];
    rows += fmt::format(
        "<tr><td>{:.2f}</td><td>{} {:.2f} %</td><td>{} {:.2f} %</td><td>{} {:.2f} %</td><td>{}</td>"
        "<td>{}</td></tr>\n",
        e.thresholds[i], meter(c.precision(), "var(--run0)"), 100 * c.precision(),
        meter(c.recall(), "var(--run1)"), 100 * c.recall(), meter(c.hmean(), "var(--run2)"),
        100 * c.hmean(), c.found, c.matched);
  }
  return section("Scores", "What counts if boxes below a score are left out.",
                 rows + "</table></div>");
}

std::string head(const EvaluationRecord& e) {
  const std::string title = "Evaluation " + escape(e.folder.string());
  return open_page(title, e.facts.empty() ? "" : escape(e.facts.front().second)) +
         "<div class=\"tiles\">\n";
}

// Ends the tiles.
std::string last_tiles(const EvaluationRecord& e) {
  return tile(fmt::format("{}", e.images), "images") +
         tile(seconds_text(e.seconds_at(0.5)), "an image (median)") +
         tile(seconds_text(e.seconds_at(0.95)), "an image (95 %)") + "</div>\n";
}

}  // namespace

void segmentation_page(const SegmentationScores& e, const std::filesystem::path& file) {
  std::string page = head(e);
  page += tile(fmt::format("{:.2f} %", 100 * e.mean_iou()),
               fmt::format("mean IoU of {} classes", e.classes.size()));
  if (e.known() < std::ssize(e.classes))
    page += tile(fmt::format("{:.2f} %", 100 * e.mean_iou_of_known()),
                 fmt::format("mean IoU of the {} that are labelled", e.known()));
  page += tile(fmt::format("{:.2f} %", 100 * e.accuracy()), "pixel accuracy");
  page += last_tiles(e) + warnings_so_far() + facts(e) + classes_table(e);
  page += pictures(
      e, "The image, its labels (black: none), the prediction, and where they differ (white).",
      class_legend(e));
  write_page(file, page + close_page());
}

void detection_page(const DetectionScores& e, const std::filesystem::path& file) {
  const DetectionCounts& c = e.counts.front();
  std::string page = head(e);
  page += tile(fmt::format("{:.2f} %", 100 * c.hmean()), "Hmean");
  page += tile(fmt::format("{:.2f} %", 100 * c.precision()), "precision");
  page += tile(fmt::format("{:.2f} %", 100 * c.recall()), "recall");
  page += tile(fmt::format("{}", c.wanted), "regions of text");
  page += last_tiles(e) + warnings_so_far() + facts(e) + scores_table(e);
  page += pictures(e,
                   "Left: the regions, green where a box matches, red where none does. Right: the "
                   "boxes, green where they match a region, red where none. Grey ones do not "
                   "count.");
  write_page(file, page + close_page());
}

// ---- weft score ----

namespace {

constexpr std::size_t most_faults = 1000;  // that are listed

std::string histogram(const ScoreSummary& s) {
  const auto bins = s.bins();
  if (bins.empty()) return "";
  double most = 0;
  for (const auto& [label, rows] : bins) most = std::max(most, static_cast<double>(rows));
  const auto scored = static_cast<double>(s.rows - s.without);
  std::string body = "<div class=\"bars\">";
  for (const auto& [label, rows] : bins)
    body += bar(label, {{static_cast<double>(rows), run_colors[0], counted(rows, "row")}}, most,
                fmt::format("{} ({})", rows, percent(static_cast<double>(rows), scored)));
  return section("Text regions", "Rows by the number of text regions in their frame.",
                 body + "</div>");
}

std::string stages(const ScoreSummary& s) {
  const FeedSummary& f = s.feed;
  if (f.empty()) return "";
  const std::pair<const char*, double> rows[] = {{"decode", f.sum.decode},
                                                 {"resize", f.sum.resize},
                                                 {"network", f.sum.network},
                                                 {"post-processing", f.sum.post_processing}};
  double all = 0;
  for (const auto& [name, seconds] : rows) all += seconds;
  std::string body =
      "<div class=\"scroll\"><table><thead><tr><th>stage</th><th>seconds, all "
      "ranks</th><th>share</th><th>a frame</th></tr></thead>\n";
  for (const auto& [name, seconds] : rows)
    body += fmt::format("<tr><th>{}</th><td>{:.2f}</td><td>{}</td><td>{}</td></tr>\n", name,
                        seconds, percent(seconds, all),
                        seconds_text(seconds / static_cast<double>(f.sum.frames)));
  body += "</table></div>";
  return section(
      "What took the time",
      escape(fmt::format("{} on {}, up to {} and {} at once: {}; {}.", seconds_text(f.sum.elapsed),
                         counted(f.ranks, "rank"), counted(f.sum.threads, "thread"),
                         counted(f.sum.batch, "frame"), f.verdict(), f.waits())),
      body);
}

std::string faults(const ScoreSummary& s) {
  if (s.faults.empty()) return "";
  std::string body = "<div class=\"scroll\"><table>";
  for (std::size_t i = 0; i < std::min(most_faults, s.faults.size()); ++i)
    body += fmt::format("<tr><td>{}</td></tr>\n", escape(s.faults[i]));
  if (s.faults.size() > most_faults)
    body += fmt::format("<tr><td>and {} more, in {}</td></tr>\n", s.faults.size() - most_faults,
                        escape((s.folder / "score_report.json").string()));
  return section("Files with faults",
                 "A picture that cannot be read has no count; of a broken video its first frame is "
                 "scored, or a black one. Run the same command to retry them.",
                 body + "</table></div>");
}

std::string frames(const ScoreSummary& s) {
  return picture_section(s.folder, s.pictures,
                         "The frame as the network saw it, with the boxes of text regions.", false);
}

std::string facts(const ScoreSummary& s) {
  std::string rows = fmt::format(
      "<div class=\"scroll\"><table><tr><th>input</th><td>{}</td></tr>\n<tr><th>output</th>"
      "<td>{}</td></tr>\n",
      escape(s.input.string()), escape(s.output.string()));
  for (const auto& [name, value] : s.facts)
    rows += fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", escape(name), escape(value));
  return section("What was scored", "", rows + "</table></div>");
}

}  // namespace

void score_page(const ScoreSummary& s, const std::filesystem::path& file) {
  const std::string title = "Text in " + escape(s.input.filename().string());
  std::string page = open_page(title, s.facts.empty() ? "" : escape(s.facts.front().second)) +
                     "<div class=\"tiles\">\n";
  page += tile(fmt::format("{}", s.rows), "rows");
  page += tile(percent(static_cast<double>(s.with_text()), static_cast<double>(s.rows - s.without)),
               "of the scored rows have text");
  page += tile(fmt::format("{}", s.histogram.empty() ? 0 : s.histogram.rbegin()->first),
               "largest count");
  if (s.left_out > 0) page += tile(fmt::format("{}", s.left_out), "rows left out (score.maximum)");
  if (s.without > 0) page += tile(fmt::format("{}", s.without), "rows without a count");
  if (!s.faults.empty()) page += tile(fmt::format("{}", s.faults.size()), "files with faults");
  if (!s.feed.empty()) page += tile(fmt::format("{:.3g}", s.feed.rate()), "frames a second");
  page += "</div>\n" + warnings_so_far();
  page += histogram(s) + stages(s) + faults(s) + frames(s) + facts(s);
  write_page(file, page + close_page());
}

}  // namespace weft::report_page
