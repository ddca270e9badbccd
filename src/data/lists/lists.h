// What the keys of a deck name that take many files (ingest.inputs, segment.inputs, score.input):
// lists, folders, globs, WebDataset shards, single files. The one rule for paths: those of a deck
// begin where weft was started, those of a list in the list's folder.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/lists/table.h"
#include "media/media_source.h"

namespace weft {

// What a list may say of an item, by the names of Open-Sora's columns. NaN: it does not say.
enum class Fact { aes, flow, match, ocr, num_frames, height, width, fps };
inline constexpr std::array<const char*, 8> fact_names = {"aes",        "flow",   "match", "ocr",
                                                          "num_frames", "height", "width", "fps"};
struct Facts {
  // Behind these those of further columns that a job asks for, if anything says them.
  std::vector<double> values;
  Facts(std::size_t more = 0)
      : values(fact_names.size() + more, std::numeric_limits<double>::quiet_NaN()) {}
  double& operator[](Fact fact) { return values[static_cast<std::size_t>(fact)]; }
  double operator[](Fact fact) const { return values[static_cast<std::size_t>(fact)]; }
};

using Columns = std::vector<std::string>;
// The facts of a row or of an object. Columns other than `more` do not count, nor do frames, sizes
// and rates of 0 and less: whoever wrote them could not read the file. Exit::data with column and
// value for what is no finite number.
Facts facts_of(const TableReader& table, const TableRow& row, const Columns& more = {});
Facts facts_of(const nlohmann::ordered_json& object, const std::string& where,
               const Columns& more = {});
// The columns `text` or else `caption`; "" = none. Exit::data for what is no text.
std::string caption_of(const TableReader& table, const TableRow& row);
std::string caption_of(const nlohmann::ordered_json& object, const std::string& where);
inline constexpr std::uint64_t longest_caption = std::uint64_t{1} << 20;  // of a file, in bytes

// Whether captions and facts are wanted: where they are not, nobody reads them, and none is wrong.
enum class Described { no, yes };

struct MediaItem {
  MediaSource media;
  std::string text;  // the caption, "" = none
  Facts facts;
  std::string below;  // of a file in a folder: its path from there
};

// The items of all inputs, in their order:
//   NAME.csv, NAME.jsonl   a list, its rows in their order;
//   a folder               the videos and pictures in it and below, sorted by path (folders.h);
//   NAME.tar               the samples of a WebDataset shard (add_shard());
//   a glob                 what it matches, sorted, each as if it were named here;
//   a file, lavfi:GRAPH    as it is.
// A file that is not of a list has the text of NAME.txt beside it as its caption. Only what a deck
// names itself is trusted. What folders and globs leave out is told on rank 0. `key` is that of the
// deck, for messages; `results` is the job's output, which is no input. Exit::data for a glob
// without a match, a folder without media, a table in a form that weft does not read, and for
// lists that cannot be read or are larger than limits.max_list_mib.
std::vector<MediaItem> list_media(const std::vector<std::string>& inputs, const std::string& key,
                                  const MediaDeck& limits, Described described,
                                  const std::filesystem::path& results = {},
                                  const Columns& more = {});
// Whether `path` is a pattern, and not a file of such a name.
bool is_glob(const std::string& path);

// Where a path of a list leads: relative ones begin in the list's folder.
std::string beside_list(const std::string& list, const std::string& path);
// Exit::data for a table in a form that weft does not read (.tsv, Parquet), named with what to do.
void refuse_other_forms(const std::string& path);
// Exit::data if the list is larger than limits.max_list_mib.
void check_list_size(const std::string& path, const MediaDeck& limits);

// Why a file cannot be opened, "" if it can: "lost.mp4", "locked/a.mp4 (Permission denied)".
std::string missing_file(const std::string& path);
// Names what cannot be opened of `all` files or items, before any work: up to ten, and their
// number. Warns on rank 0; Exit::data where nothing is left, or `refuse`.
void report_missing(const std::vector<std::string>& missing, std::size_t all,
                    const std::string& noun, const std::string& hint, bool refuse = false);
inline constexpr const char* missing_hint =
    "paths in a list begin in the list's folder, those of a deck where weft was started";

// WebDataset shards: uncompressed tar files in which members of one name without endings, one after
// the other, are a sample: a.mp4, a.txt, a.json.

// Adds the samples of a shard that have a video, or else a picture. Its caption is the text of .txt
// (.text, .caption), or `text` or `caption` of .json, which may have facts too. A member stays in
// the shard and is read from there; its name is a label and never opened. Links, devices and
// members of other kinds are left out; a WARN line counts links. Not trusted: captions and JSON of
// more than a MiB, two videos in a sample, and a shard that is cut off, compressed or no tar are
// Exit::data, naming shard and member.
void list_shard(const std::string& path, Described described, std::vector<MediaItem>& out,
                const Columns& more = {});

// Sets the facts of items that a table of `weft score` has, such as `ocr`. Rows are matched by the
// files that their paths lead to, whatever links lead there: relative ones begin in the table's
// folder. Returns how many items it has. Exit::data for a table without facts, and for two rows of
// one path that differ.
std::size_t join_scores(const std::string& table, const MediaDeck& limits,
                        std::vector<MediaItem>& items, const Columns& more = {});

}  // namespace weft
