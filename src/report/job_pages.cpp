// The pages of `weft evaluate` and `weft score`: what their results have as JSON, and the pictures.
#include <algorithm>

#include "core/log.h"
#include "jobs/evaluate/scores.h"
#include "jobs/score/score.h"
#include "models/segmentation/classes.h"
#include "report/report.h"

namespace weft::report_page {
namespace {

namespace fs = std::filesystem;
using Named = std::vector<std::pair<std::string, std::string>>;

// Names and values, which need not differ.
Json pairs(const Named& named) {
  Json list = Json::array();
  for (const auto& [name, value] : named) list.push_back({name, value});
  return list;
}

// Writes the page beside the folder that its pictures are in. The job that writes it is this
// process, whose warnings it has.
void write(Json page, const std::string& kind, const std::string& title, const Named& facts,
           const Named& pictures, const fs::path& folder, const std::string& text,
           const fs::path& file) {
  Embedder embedder(folder);
  page["pictures"] = Json::array();
  for (const auto& [name, picture] : pictures)
    page["pictures"].push_back(
        {{"name", name}, {"file", picture}, {"media", embedder.media(folder, picture)}});
  page.update({{"kind", kind},
               {"title", title},
               {"note", facts.empty() ? "" : facts.front().second},
               {"facts", pairs(facts)},
               {"status", {{"warnings", log::warnings()}}}});
  write_page(file, page_html(page, text));
}

void write_evaluation(const EvaluationRecord& e, Json page, const std::string& kind,
                      const std::string& text, const fs::path& file) {
  Named pictures;
  for (const EvaluationPicture& p : e.pictures) pictures.emplace_back(p.name, p.file);
  write(std::move(page), kind, "Evaluation " + e.folder.string(), e.facts, pictures, e.folder, text,
        file);
}

}  // namespace

void segmentation_page(const SegmentationScores& e, const fs::path& file) {
  Json page = e.json();
  for (std::size_t i = 0; i < e.classes.size(); ++i)
    page["classes"][i]["colour"] = css_colour(e.palette[i + 1]);
  write_evaluation(e, std::move(page), "segmentation", e.table(), file);
}

void detection_page(const DetectionScores& e, const fs::path& file) {
  write_evaluation(e, e.json(), "detection", e.table(), file);
}

void score_page(const ScoreSummary& s, const fs::path& file) {
  const std::size_t shown = std::min<std::size_t>(1000, s.faults.size());
  Json page = {{"rows", s.rows},
               {"with_text", s.with_text()},
               {"left_out", s.left_out},
               {"without", s.without},
               {"largest", s.histogram.empty() ? 0 : s.histogram.rbegin()->first},
               {"bins", Json::array()},
               {"faults", std::span(s.faults).first(shown)},
               {"files_with_faults", s.faults.size()},
               {"all_faults", (s.folder / "score_report.json").string()}};
  for (const auto& [label, rows] : s.bins()) page["bins"].push_back({label, rows});
  if (!s.feed.empty()) page["feed"] = s.feed.json();
  Named facts = s.facts;
  facts.insert(facts.begin() + (facts.empty() ? 0 : 1),
               {{"input", s.input.string()}, {"output", s.output.string()}});
  write(page, "score", "Text in " + s.input.filename().string(), facts, s.pictures, s.folder,
        s.table(), file);
}

}  // namespace weft::report_page
