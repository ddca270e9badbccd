#include "jobs/score/output.h"

#include <fstream>
#include <sstream>
#include <unordered_map>

#include "core/error.h"
#include "core/file.h"
#include "core/json.h"
#include "data/lists/table.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// A file that takes its name once it is whole, and then survives a power cut.
class WholeFile {
 public:
  WholeFile(const fs::path& folder, fs::path path)
      : partial_(folder / ("." + path.filename().string() + ".partial")),
        path_(std::move(path)),
        file_(make(partial_)) {}
  void add(std::string_view text) {
    buffer_ += text;
    if (buffer_.size() >= (std::size_t{1} << 20)) write();
  }
  void finish() {
    write();
    file_.sync();
    file_.close();
    rename_file(partial_, path_, Exit::data);
    sync_directory(path_.has_parent_path() ? path_.parent_path() : ".", Exit::data);
  }

 private:
  static File make(const fs::path& path) {
    std::error_code none;
    fs::remove(path, none);  // what a killed job has left
    return File::create(path, Exit::data);
  }
  void write() {
    file_.write(std::as_bytes(std::span(buffer_)), written_);
    written_ += buffer_.size();
    buffer_.clear();
  }

  fs::path partial_, path_;
  File file_;
  std::string buffer_;
  std::uint64_t written_ = 0;
};

// Whether the output lies in another folder than that in which the rows' paths begin: then they are
// written as absolute ones, which lead to the same files.
bool is_elsewhere(const ScoreDeck& deck) {
  const bool table = form_of_name(deck.input) != TableForm::none;
  const auto folder = [](const fs::path& path) {
    return path.has_parent_path() ? path.parent_path() : fs::path(".");
  };
  std::error_code none;
  return !fs::equivalent(table ? folder(deck.input) : ".", folder(deck.output), none);
}

}  // namespace

fs::path parts_folder(const ScoreDeck& deck) { return deck.output + ".parts"; }

fs::path page_file(const ScoreDeck& deck) { return deck.output + ".html"; }

void add_feeds(const ListReport& report, const fs::path& file, PrefetchSummary& feed) {
  const auto add = [&](const Json& share) {
    const double cores = share.value("cores", 0.0);
    if (cores > 0) feed.add(from_share(share), cores);
  };
  if (report.made() > 0) {
    for (const RankShare& r : report.ranks) add(r.own);
    return;
  }
  std::ifstream in(file);
  std::stringstream text;
  text << in.rdbuf();
  const auto before = try_parse_json<Json>(text.str());
  try {
    for (const Json& rank : before.at("ranks")) add(rank);
  } catch (const nlohmann::json::exception&) {
    feed.sum = {};  // nothing was measured, or it is of another weft
  }
}

void write_output(const Deck& deck, const ScoreRows& rows, const ListEngine& engine,
                  const ListReport& report, ScoreSummary& summary) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  summary.input = s.input;
  summary.output = s.output;
  summary.folder = engine.settings().directory;
  summary.files = std::ssize(rows.files);
  summary.faults = report.failures;
  const auto check_same = [&] {
    WEFT_CHECK(!rows.made.empty() || file_identity(s.input) == rows.identity, Exit::data,
               "run the same command again: what is scored is kept",
               "{} has changed since this job read it", s.input);
  };
  check_same();
  const ManifestLines lines = engine.lines();
  std::unordered_map<std::string_view, std::size_t> places;
  for (std::size_t i = 0; i < rows.files.size(); ++i) places.emplace(rows.files[i].path, i);
  for (std::size_t i = 0; i < rows.files.size() && rows.files[i].drawn; ++i)
    if (const auto line = lines.find(engine.items()[i].name); line != lines.end())
      if (const Json j = line->second.parsed(); j.contains("picture")) {
        const Json count = j.value("ocr", Json());
        summary.pictures.emplace_back(
            fmt::format("{}: {}", rows.files[i].path,
                        count.is_number_integer() ? counted(count.get<std::int64_t>(), "region")
                                                  : "no count"),
            j["picture"]);
      }

  std::vector<std::string> columns = {"ocr"};
  for (const std::string& c : s.columns) columns.push_back("ocr_" + c);
  const bool moved = is_elsewhere(s);
  if (moved) columns.push_back("path");
  // All null for a file that has no result: it was given up, or failed without a line.
  const auto values_of = [&](const std::string& row_path) {
    std::vector<Json> values(columns.size());
    const std::string path = path_of_row(s, row_path);
    if (moved)
      values.back() = path.empty() || is_source_graph(path)
                          ? path
                          : fs::absolute(path).lexically_normal().string();
    const ListItem& item = engine.items()[places.at(path)];
    const auto found = lines.find(item.name);
    if (found == lines.end() || found->second.key != item.key) return values;
    const Json line = found->second.parsed();
    values[0] = line.value("ocr", Json());
    for (std::size_t i = 0; i < s.columns.size(); ++i)
      values[i + 1] = line.value(s.columns[i], Json());
    return values;
  };

  TableReader table = open_table(s, rows);
  WholeFile out(summary.folder, s.output);
  TableWriter writer(table, columns, [&](std::string_view text) { out.add(text); });
  TableRow row;
  for (std::int64_t i = 0; table.next(row); ++i) {
    if (i < rows.begin) continue;
    if (i >= rows.end) break;
    const std::vector<Json> values = values_of(row.path);
    ++summary.rows;
    if (values[0].is_number_integer())
      ++summary.histogram[values[0].get<std::int64_t>()];
    else
      ++summary.without;
    if (s.maximum >= 0 && values[0].is_number_integer() && values[0] > s.maximum)
      ++summary.left_out;
    else
      writer.add(row, values);
  }
  check_same();
  out.finish();
}

}  // namespace weft
