// `weft score DECK`: how much text is in the pictures and videos of a table, by a text detector
// (docs/score.md).
#pragma once

#include <mpi.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/command.h"
#include "data/lists/file_table.h"
#include "jobs/engine/feed.h"
#include "jobs/engine/list_job.h"
#include "media/media_source.h"
#include "models/dbnet/boxes.h"
#include "models/dbnet/detector.h"

namespace weft {

// ---- The command ----

// The table [score] of the deck.
struct ScoreDeck {
  std::string input, output, weights;
  bool ema = false;
  std::vector<std::string> columns;
  std::int64_t frame = 10;
  std::vector<std::int64_t> frames;
  std::int64_t side = 1024;
  std::int64_t maximum = -1;
  std::string shard;
  std::int64_t pictures = 0;
  std::int64_t threads = 0;
};
DeckTable score_table();

// Results and bottleneck of a scoring job, for the end table, score_report.json and the page.
struct ScoreSummary {
  std::filesystem::path input, output, folder;     // folder: of finished items
  std::int64_t rows = 0, files = 0;                // of the table (or shard); different ones
  std::int64_t left_out = 0;                       // rows above score.maximum
  std::int64_t without = 0;                        // rows without a count
  std::map<std::int64_t, std::int64_t> histogram;  // rows of each count
  std::vector<std::string> faults;                 // "PATH: why", of files
  std::vector<std::pair<std::string, std::string>> pictures;  // path, file in `folder`
  std::vector<std::pair<std::string, std::string>> facts;     // for people: name and value
  FeedSummary feed;

  std::int64_t with_text() const;  // rows whose count is above 0
  // Rows by ranges of counts (0, 1, 2, 3, 4, 5 to 8, 9 to 16 ...): label and rows.
  std::vector<std::pair<std::string, std::int64_t>> bins() const;
  std::string table() const;  // for a terminal
};

// Writes the page of a scoring to a file.
using ScorePage = std::function<void(const ScoreSummary&, const std::filesystem::path&)>;

// Collective. Writes the table score.output, a page beside it, and what is finished into
// OUTPUT.parts/. Returns the exit code: 0, 3 if files could not be read, 75 if asked to stop. The
// same command scores what is missing.
int score(const Deck& deck, const ScorePage& page, MPI_Comm world);
Command score_command(ScorePage page);

// ---- The table: what is read, what is written (table.cpp) ----

// A file of the table.
struct ScoreFile {
  std::string path;  // from where weft was started; of a member of a shard: SHARD/MEMBER
  MediaSource media;
  bool drawn = false;  // among those whose picture is wanted
};

// The rows of score.input that this job scores, and the files that they name.
struct ScoreRows {
  std::int64_t begin = 0, end = 0;  // of the table's rows, from 0
  FileTable table;                  // on rank 0
  std::vector<ScoreFile> files;     // different ones, in the order of their first rows
};

// Rows [begin, end) of `rows` that "K/N" stands for; "" for all. Exit::usage for anything else.
std::pair<std::int64_t, std::int64_t> shard_of(const std::string& shard, std::int64_t rows);

// Collective: rank 0 reads the table, or lists the files (data/lists/lists.h), for all, and names
// those that are not there.
ScoreRows read_rows(const Deck& deck, MPI_Comm world);

// What score.columns may name; the columns are ocr_area and so on.
inline constexpr std::array<std::string_view, 4> extra_columns = {"area", "boxes", "scores",
                                                                  "fault"};

std::filesystem::path parts_folder(const ScoreDeck& deck);  // OUTPUT.parts
std::filesystem::path page_file(const ScoreDeck& deck);     // OUTPUT.html

// On rank 0. Reads the table again, row by row, and writes each with its result; the
// output is renamed once it is whole. Fills in what the summary says of rows and files. Exit::data
// if the table has changed since it was read.
void write_output(const Deck& deck, const ScoreRows& rows, const ListEngine& engine,
                  const ListReport& report, ScoreSummary& summary);

// ---- The files through the network (score_job.cpp) ----

// What score.frames or score.frame asks for.
std::vector<std::int64_t> frames_of(const ScoreDeck& deck);

// Item i is file i; all cost the same, so that rows are scored in their order. `job`: all that
// decides the results but the file itself. Looks at the files where `keys`: rank 0 has to.
std::vector<ListItem> score_items(const std::vector<ScoreFile>& files, const std::string& job,
                                  bool keys);

// Scores what is missing; returns this rank's share of the report.
// A line has ocr (null: none), area, boxes (in pixels of the picture) and scores, picture if it is
// wanted; fault where the file could not be read as wanted.
nlohmann::ordered_json score_missing(const Deck& deck, const ListStart& start,
                                     const DetectorSource& source,
                                     const std::vector<ScoreFile>& files, ListEngine& engine);

// Share of the pixels of a frame of side x side that lie in a box at least.
double covered_share(std::span<const TextBox> boxes, std::int64_t side);

// The boxes in pixels of the picture of height x width that the frame of `side` was made of
// (models/dbnet/detector.h): scaled, its middle cut out.
std::vector<TextBox> in_picture(std::span<const TextBox> boxes, std::int64_t height,
                                std::int64_t width, std::int64_t side);

// Draws the boxes' outlines into rgb [side, side, 3].
void draw_boxes(std::span<const TextBox> boxes, std::int64_t side, std::vector<std::uint8_t>& rgb);

}  // namespace weft
