#include "report/score_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/log.h"
#include "report/embed.h"
#include "report/html.h"

namespace weft::report_page {
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
  const PrefetchSummary& f = s.feed;
  if (f.empty()) return "";
  const std::pair<const char*, double> rows[] = {{"decode", f.sum.decode},
                                                 {"resize", f.sum.resize},
                                                 {"network", f.sum.network},
                                                 {"post-processing", f.sum.finish}};
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
                         counted(f.ranks, "rank"), counted(f.sum.readers, "thread"),
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
                 "scored, or a black one. The next start of the same command tries them again.",
                 body + "</table></div>");
}

std::string pictures(const ScoreSummary& s) {
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

std::string score_page(const ScoreSummary& s) {
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
  page += "</div>\n";
  page += histogram(s) + stages(s) + faults(s) + pictures(s) + facts(s);
  return page + close_page();
}

}  // namespace weft::report_page
