// The list of videos and pictures that a deck's ingest.inputs expands to.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "config/deck.h"
#include "core/json.h"
#include "data/table.h"
#include "media/media_source.h"

namespace weft {

// What a list may say of an item, by the names of Open-Sora's columns. NaN: it does not say.
enum class Fact { aes, flow, match, ocr, num_frames, height, width, fps };
inline constexpr std::array<const char*, 8> fact_names = {"aes",        "flow",   "match", "ocr",
                                                          "num_frames", "height", "width", "fps"};
struct Facts {
  std::array<double, fact_names.size()> values;
  Facts() { values.fill(std::numeric_limits<double>::quiet_NaN()); }
  double& operator[](Fact fact) { return values[static_cast<std::size_t>(fact)]; }
  double operator[](Fact fact) const { return values[static_cast<std::size_t>(fact)]; }
};

struct IngestInput {
  MediaSource media;
  std::string text;  // the caption, "" = none
  Facts facts;
};

// Throws Exit::data if the list is larger than limits.max_list_mib.
void check_list_size(const std::string& path, const MediaDeck& limits);
// The text of a list, under the same limit.
std::string read_list(const std::string& path, const MediaDeck& limits);

// Reads the facts in rows of a table. Other columns are ignored, and so are empty cells and what
// pandas writes for a missing value.
class FactColumns {
 public:
  explicit FactColumns(const TableReader& table, std::string path);
  bool any() const { return !columns_.empty(); }  // of CSV
  // Throws Exit::data with line, column and value for what is no number from 0 on.
  Facts read(const TableRow& row, const std::vector<std::string>& values) const;
  // The same of a JSON object; `where` is for messages.
  static Facts read(const nlohmann::json& object, const std::string& where);

 private:
  std::string path_;
  std::vector<std::pair<Fact, std::size_t>> columns_;
};

// Text of someone else's for a message: not too long, and nothing that a terminal obeys.
std::string shown(std::string text, std::size_t longest = 80);

// A path in a list is relative to the list, so that a folder can be moved as a whole.
std::string beside_list(const std::string& list, const std::string& path);

// Expands globs (sorted), .csv and .jsonl lists; everything else stays as it is. Order is kept. The
// entries of a list are not trusted: they may name only files. Throws Exit::data for a glob without
// a match and for a list that cannot be read, naming its line, or is larger than
// limits.max_list_mib.
std::vector<IngestInput> expand_inputs(const std::vector<std::string>& inputs,
                                       const MediaDeck& limits);

}  // namespace weft
