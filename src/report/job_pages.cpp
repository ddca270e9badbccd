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
std::string warnings_so_far() {
  return list_section("Warnings", "From rank 0's last start, oldest first.", log::warnings());
}

// A page whose note is the first of the facts.
std::string open_job_page(const std::string& title, const std::vector<Named>& facts) {
  return open_page(title, facts.empty() ? "" : escape(facts.front().second));
}

std::string share_text(double share) { return fmt::format("{:.2f} %", 100 * share); }

// ---- weft evaluate ----

std::string classes_table(const SegmentationScores& e) {
  Rows rows;
  for (const std::size_t i : e.by_iou()) {
    const ClassScore& c = e.classes[i];
    const bool known = c.joined() > 0;
    rows.push_back(
        {fmt::format("<i class=\"colour\" style=\"background:{}\"></i>",
                     css_colour(e.palette[i + 1])),
         fmt::to_string(i), escape(c.name),
         meter(known ? c.iou() : 0, "var(--run0)") + (known ? " " + share_text(c.iou()) : " -"),
         short_number(static_cast<double>(c.labelled)),
         short_number(static_cast<double>(c.predicted)),
         percent(static_cast<double>(c.intersection), static_cast<double>(c.labelled))});
  }
  return section(
      "Classes",
      "By intersection over union; classes that are not labelled anywhere come last. "
      "Found: the share of a class's pixels that are predicted as such.",
      table({"", "class", "name", "IoU", "labelled pixels", "predicted", "found"}, rows));
}

// The colours of the classes that are in the pictures.
std::string class_legend(const SegmentationScores& e) {
  std::string swatches;
  for (std::size_t i = 0; i < e.classes.size(); ++i)
    if (e.classes[i].joined() > 0)
      swatches += swatch(css_colour(e.palette[i + 1]), escape(e.classes[i].name), true);
  return legend(swatches);
}

std::string scores_table(const DetectionScores& e) {
  Rows rows;
  for (std::size_t i = 0; i < e.thresholds.size(); ++i) {
    const DetectionCounts& c = e.counts[i];
    const auto measured = [](double share, const char* color) {
      return meter(share, color) + " " + share_text(share);
    };
    rows.push_back({fmt::format("{:.2f}", e.thresholds[i]), measured(c.precision(), "var(--run0)"),
                    measured(c.recall(), "var(--run1)"), measured(c.hmean(), "var(--run2)"),
                    fmt::to_string(c.found), fmt::to_string(c.matched)});
  }
  return section("Scores", "What counts if boxes below a score are left out.",
                 table({"score", "precision", "recall", "Hmean", "boxes", "matched"}, rows));
}

// Writes the page of an evaluation: what its model was measured by, and what all have in common.
void evaluation_page(const EvaluationRecord& e, std::vector<Named> values,
                     const std::string& scores, const std::string& pictures_show,
                     const std::string& pictures_legend, const std::filesystem::path& file) {
  values.insert(values.end(), {{fmt::to_string(e.images), "images"},
                               {seconds_text(e.seconds_at(0.5)), "an image (median)"},
                               {seconds_text(e.seconds_at(0.95)), "an image (95 %)"}});
  std::vector<Named> facts = e.facts, pictures;
  if (e.pace.images > 0)
    facts.emplace_back(
        "pace", fmt::format("{} on {} in {}: {:.2f} images/s", counted(e.pace.images, "image"),
                            counted(e.pace.ranks, "rank"), seconds_text(e.pace.seconds),
                            e.pace.images_a_second()));
  for (const EvaluationPicture& p : e.pictures) pictures.emplace_back(p.name, p.file);
  write_page(file, open_job_page("Evaluation " + escape(e.folder.string()), e.facts) +
                       tiles(values) + warnings_so_far() +
                       facts_section("What was evaluated", facts) + scores +
                       picture_section(e.folder, pictures, pictures_show, true, pictures_legend) +
                       close_page());
}

}  // namespace

void segmentation_page(const SegmentationScores& e, const std::filesystem::path& file) {
  std::vector<Named> values = {
      {share_text(e.mean_iou()), fmt::format("mean IoU of {} classes", e.classes.size())}};
  if (e.known() < std::ssize(e.classes))
    values.emplace_back(share_text(e.mean_iou_of_known()),
                        fmt::format("mean IoU of the {} that are labelled", e.known()));
  values.emplace_back(share_text(e.accuracy()), "pixel accuracy");
  evaluation_page(
      e, values, classes_table(e),
      "The image, its labels (black: none), the prediction, and where they differ (white).",
      class_legend(e), file);
}

void detection_page(const DetectionScores& e, const std::filesystem::path& file) {
  const DetectionCounts& c = e.counts.front();
  evaluation_page(e,
                  {{share_text(c.hmean()), "Hmean"},
                   {share_text(c.precision()), "precision"},
                   {share_text(c.recall()), "recall"},
                   {fmt::to_string(c.wanted), "regions of text"}},
                  scores_table(e),
                  "Left: the regions, green where a box matches, red where none does. Right: the "
                  "boxes, green where they match a region, red where none. Grey ones do not "
                  "count.",
                  "", file);
}

// ---- weft score ----

namespace {

std::string histogram(const ScoreSummary& s) {
  const auto bins = s.bins();
  if (bins.empty()) return "";
  double most = 0;
  for (const auto& [label, rows] : bins) most = std::max(most, static_cast<double>(rows));
  const auto scored = static_cast<double>(s.rows - s.without);
  std::string list;
  for (const auto& [label, rows] : bins)
    list += bar(label, {{static_cast<double>(rows), run_colors[0], counted(rows, "row")}}, most,
                fmt::format("{} ({})", rows, percent(static_cast<double>(rows), scored)));
  return section("Text regions", "Rows by the number of text regions in their frame.", bars(list));
}

std::string stages(const ScoreSummary& s) {
  const FeedSummary& f = s.feed;
  if (f.empty()) return "";
  const double all = f.sum.decode + f.sum.resize + f.sum.network + f.sum.post_processing;
  Rows rows;
  for (const auto& [name, seconds] : {std::pair{"decode", f.sum.decode},
                                      {"resize", f.sum.resize},
                                      {"network", f.sum.network},
                                      {"post-processing", f.sum.post_processing}})
    rows.push_back({name, fmt::format("{:.2f}", seconds), percent(seconds, all),
                    seconds_text(seconds / static_cast<double>(f.sum.frames))});
  return section(
      "What took the time",
      escape(fmt::format("{} on {}, up to {} and {} at once: {}; {}.", seconds_text(f.sum.elapsed),
                         counted(f.ranks, "rank"), counted(f.sum.threads, "thread"),
                         counted(f.sum.batch, "frame"), f.verdict(), f.waits())),
      table({"stage", "seconds, all ranks", "share", "a frame"}, rows, true));
}

}  // namespace

void score_page(const ScoreSummary& s, const std::filesystem::path& file) {
  std::vector<Named> values = {
      {fmt::to_string(s.rows), "rows"},
      {percent(static_cast<double>(s.with_text()), static_cast<double>(s.rows - s.without)),
       "of the scored rows have text"},
      {fmt::to_string(s.histogram.empty() ? 0 : s.histogram.rbegin()->first), "largest count"}};
  for (const auto& [number, label] :
       {std::pair{s.left_out, "rows left out (score.maximum)"},
        {s.without, "rows without a count"},
        {static_cast<std::int64_t>(s.faults.size()), "files with faults"}})
    if (number > 0) values.emplace_back(fmt::to_string(number), label);
  if (!s.feed.empty()) values.emplace_back(fmt::format("{:.3g}", s.feed.rate()), "frames a second");
  std::vector<Named> facts = {{"input", s.input.string()}, {"output", s.output.string()}};
  facts.insert(facts.end(), s.facts.begin(), s.facts.end());
  write_page(file,
             open_job_page("Text in " + escape(s.input.filename().string()), s.facts) +
                 tiles(values) + warnings_so_far() + histogram(s) + stages(s) +
                 list_section("Files with faults",
                              "A picture that cannot be read has no count; of a broken video its "
                              "first frame is scored, or a black one. Run the same command to "
                              "retry them.",
                              s.faults, 1000, (s.folder / "score_report.json").string()) +
                 picture_section(s.folder, s.pictures,
                                 "The frame as the network saw it, with the boxes of text regions.",
                                 false) +
                 facts_section("What was scored", facts) + close_page());
}

}  // namespace weft::report_page
