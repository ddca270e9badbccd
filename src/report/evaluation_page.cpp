#include "report/evaluation_page.h"

#include <fmt/format.h>

#include "core/log.h"
#include "models/segmentation/classes.h"
#include "report/embed.h"
#include "report/html.h"

namespace weft::report_page {
namespace {

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
        known ? fmt::format(" {:.2f} %", 100 * c.iou()) : " -", c.labelled, c.predicted,
        percent(static_cast<double>(c.intersection), static_cast<double>(c.labelled)));
  }
  return section("Classes",
                 "By intersection over union; classes that are not labelled anywhere come last. "
                 "Found: the share of a class's pixels that are predicted as such.",
                 rows + "</table></div>");
}

std::string pictures(const EvaluationRecord& e, const std::string& what) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const EvaluationPicture& p : e.pictures) files.emplace_back(p.name, p.file);
  return picture_section(e.folder, files, what, true);
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

std::string segmentation_page(const SegmentationScores& e) {
  std::string page = head(e);
  page += tile(fmt::format("{:.2f} %", 100 * e.mean_iou()),
               fmt::format("mean IoU of {} classes", e.classes.size()));
  if (e.known() < std::ssize(e.classes))
    page += tile(fmt::format("{:.2f} %", 100 * e.mean_iou_of_known()),
                 fmt::format("mean IoU of the {} that are labelled", e.known()));
  page += tile(fmt::format("{:.2f} %", 100 * e.accuracy()), "pixel accuracy");
  page += last_tiles(e) + facts(e) + classes_table(e);
  return page +
         pictures(
             e,
             "The image, its labels (black: none), the prediction, and where they differ (red).") +
         close_page();
}

std::string detection_page(const DetectionScores& e) {
  const DetectionCounts& c = e.counts.front();
  std::string page = head(e);
  page += tile(fmt::format("{:.2f} %", 100 * c.hmean()), "Hmean");
  page += tile(fmt::format("{:.2f} %", 100 * c.precision()), "precision");
  page += tile(fmt::format("{:.2f} %", 100 * c.recall()), "recall");
  page += tile(fmt::format("{}", c.wanted), "regions of text");
  page += last_tiles(e) + facts(e) + scores_table(e);
  return page +
         pictures(e,
                  "Left: the regions, green where a box matches, red where none does. Right: the "
                  "boxes, green where they match a region, red where none. Grey ones do not "
                  "count.") +
         close_page();
}

}  // namespace weft::report_page
