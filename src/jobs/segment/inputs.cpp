#include "jobs/segment/inputs.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/lists/lists.h"
#include "jobs/engine/output.h"
#include "parallel/mpi.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Printed, and a file's name with an ending and more behind it: no control characters, and the last
// part no longer than file systems take.
std::string plain_name(const fs::path& path) {
  constexpr std::size_t most = 180;
  std::string last = as_utf8(path.filename().string());
  std::size_t end = std::min(last.size(), most);
  while (end < last.size() && (static_cast<unsigned char>(last[end]) & 0xc0) == 0x80) --end;
  last.resize(end);
  std::string name = as_utf8(path.parent_path().string());
  if (!name.empty()) name += '/';
  name += last;
  for (char& c : name)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '_';
  return name;
}

// The result's path below the output, without ending, as far as the input's name decides it.
fs::path plain_path(const MediaItem& item) {
  fs::path path = item.below;
  if (is_source_graph(item.media.path))
    path = "lavfi";
  else if (path.empty())
    path = fs::path(item.media.name()).filename();
  return plain_name(path.replace_extension());
}

// A name for each result: that of the input, with a number behind it where another one has it. A
// subfolder with the name of a result, or of a file of weft's, gets an underscore in front.
std::vector<SegmentInput> named(const std::vector<MediaItem>& items) {
  std::vector<SegmentInput> inputs;
  std::set<std::string> files, taken;
  for (const MediaItem& item : items)
    for (const char* ending : {".png", ".mp4"}) files.insert(plain_path(item).string() + ending);
  for (const MediaItem& item : items) {
    const fs::path plain = plain_path(item);
    fs::path folder;
    for (const fs::path& part : plain.parent_path()) {
      folder /= part;
      while (files.contains(folder.string()) || is_own_name(folder.string(), "segment"))
        folder.replace_filename("_" + folder.filename().string());
    }
    const std::string stem = (folder / plain.filename()).string();
    std::string name = stem;
    for (int n = 2; !taken.insert(name).second; ++n) name = fmt::format("{}-{}", stem, n);
    const bool picture =
        !is_source_graph(item.media.path) && kind_of_name(item.media.name()) == MediumKind::picture;
    inputs.push_back({item.media, name, !picture});
  }
  return inputs;
}

void refuse_folder(const fs::path& folder, const fs::path& output) {
  std::error_code none;
  WEFT_CHECK(!fs::equivalent(folder, output, none), Exit::usage, "choose another segment.output",
             "{} is both among segment.inputs and segment.output: the next start would take the "
             "results for pictures",
             folder.string());
}

std::vector<SegmentInput> list(const SegmentDeck& deck, const MediaDeck& limits) {
  for (const std::string& input : deck.inputs) refuse_folder(input, deck.output);
  const std::vector<MediaItem> items =
      list_media(deck.inputs, "segment.inputs", limits, Described::no, deck.output);
  WEFT_CHECK(!items.empty(), Exit::data, "check the lists in segment.inputs",
             "segment.inputs names no picture and no video");
  std::vector<std::string> missing;
  for (const MediaItem& item : items)
    if (std::string why = missing_file(item.media.path); !why.empty())
      missing.push_back(std::move(why));
  report_missing(missing, items.size(), "input", missing_hint);
  return named(items);
}

}  // namespace

std::string as_utf8(const std::string& name) {
  const nlohmann::json j = name;
  return nlohmann::json::parse(j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

std::vector<SegmentInput> list_inputs(const SegmentDeck& deck, const MediaDeck& limits,
                                      MPI_Comm world) {
  WEFT_CHECK(!deck.inputs.empty(), Exit::usage, "set segment.inputs = [\"pictures/\"]",
             "segment.inputs is empty");
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  std::vector<SegmentInput> inputs;
  std::vector<std::uint8_t> binary;  // names may be of any bytes
  if (rank == 0) {
    inputs = list(deck, limits);
    Json j = Json::array();
    for (const SegmentInput& i : inputs)
      j.push_back({i.media.path, i.media.trust == MediaTrust::deck, i.media.member, i.media.begin,
                   i.media.bytes, i.name, i.video});
    Json::to_cbor(j, binary);
  }
  broadcast_sized(binary, world);
  if (rank == 0) return inputs;
  for (const Json& j : Json::from_cbor(binary))
    inputs.push_back({{j.at(0), j.at(1).get<bool>() ? MediaTrust::deck : MediaTrust::untrusted,
                       j.at(2), j.at(3), j.at(4)},
                      j.at(5),
                      j.at(6)});
  return inputs;
}

}  // namespace weft
