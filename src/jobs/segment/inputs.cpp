#include "jobs/segment/inputs.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "data/ingest/inputs.h"
#include "jobs/engine/output.h"
#include "parallel/broadcast.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

bool ends_as(const fs::path& path, std::initializer_list<std::string_view> endings) {
  std::string ending = path.extension().string();
  for (char& c : ending)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return std::ranges::find(endings, ending) != endings.end();
}

struct Found {
  MediaSource media;
  fs::path name;  // below the output, with the input's ending
};

void add_folder(const fs::path& folder, const fs::path& output, std::vector<Found>& found) {
  std::vector<fs::path> files;
  std::error_code failed, none;
  const fs::path results = fs::weakly_canonical(output, none);
  std::size_t others = 0;
  fs::recursive_directory_iterator entry(folder, failed);
  while (!failed && entry != fs::recursive_directory_iterator()) {
    if (entry->is_directory(none) && fs::weakly_canonical(entry->path(), none) == results)
      entry.disable_recursion_pending();
    else if (!entry->is_regular_file(none))
      ;
    else if (ends_as(entry->path(), {".jpg", ".jpeg", ".png"}))
      files.push_back(entry->path());
    else
      ++others;
    entry.increment(failed);
  }
  WEFT_CHECK(!failed, Exit::data, "check its permissions", "cannot list the folder {}: {}",
             folder.string(), failed.message());
  WEFT_CHECK(!files.empty(), Exit::data, "name pictures, videos, or a folder with pictures",
             "{} holds no .jpg, .jpeg or .png file", folder.string());
  if (others > 0 && log::rank() == 0)
    log::warn("{}: {} left out, being no .jpg, .jpeg or .png; videos are named one by one",
              folder.string(), counted(others, "file"));
  std::ranges::sort(files);
  for (const fs::path& file : files)
    found.push_back({{file.string(), MediaTrust::untrusted}, file.lexically_relative(folder)});
}

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
  // The job's own files lie in the output folder too.
  if (const std::size_t folder = name.find('/');
      folder != name.npos && is_own_name(name.substr(0, folder), "segment"))
    name.insert(0, 1, '_');
  return name;
}

// A name for each result: that of the input, with a number behind it where another one has it.
std::vector<SegmentInput> named(const std::vector<Found>& found) {
  std::vector<SegmentInput> inputs;
  std::set<std::string> taken;
  for (const Found& f : found) {
    const fs::path plain = fs::path(f.name).replace_extension();
    const std::string stem = plain_name(plain);
    std::string name = stem;
    for (int n = 2; !taken.insert(name).second; ++n) name = fmt::format("{}-{}", stem, n);
    const bool picture = !is_source_graph(f.media.path) &&
                         ends_as(f.media.path, {".jpg", ".jpeg", ".png", ".bmp", ".webp"});
    inputs.push_back({f.media, name, !picture});
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

// No result may replace an input.
void keep_inputs(const std::vector<SegmentInput>& inputs, const fs::path& output) {
  std::set<fs::path> files;
  std::error_code none;
  for (const SegmentInput& i : inputs)
    if (!is_source_graph(i.media.path)) files.insert(fs::weakly_canonical(i.media.path, none));
  for (const SegmentInput& i : inputs) {
    const fs::path result = output / (i.name + (i.video ? ".mp4" : ".png"));
    WEFT_CHECK(!files.contains(fs::weakly_canonical(result, none)), Exit::usage,
               "choose another segment.output", "the result of {} would replace the input {}",
               i.media.path, result.string());
  }
}

std::vector<SegmentInput> list(const SegmentDeck& deck, const MediaDeck& limits) {
  std::vector<Found> found;
  for (const IngestInput& input : expand_inputs(deck.inputs, limits)) {
    const std::string& path = input.media.path;
    if (is_source_graph(path)) {
      found.push_back({input.media, "lavfi"});
      continue;
    }
    std::error_code none;
    WEFT_CHECK(fs::exists(path, none), Exit::data,
               "check segment.inputs, and the directory weft was started in", "{} is not there",
               path);
    if (fs::is_directory(path, none))
      refuse_folder(path, deck.output), add_folder(path, deck.output, found);
    else
      found.push_back({input.media, fs::path(path).filename()});
  }
  const std::vector<SegmentInput> inputs = named(found);
  keep_inputs(inputs, deck.output);
  return inputs;
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
  std::string text;  // of paths and names, each ended by a zero byte
  if (rank == 0) {
    inputs = list(deck, limits);
    for (const SegmentInput& i : inputs) {
      text += i.video ? 'v' : 'p';
      text += i.media.trust == MediaTrust::deck ? 'd' : 'u';
      text += i.media.path + '\0' + i.name + '\0';
    }
  }
  broadcast_sized(text, world);
  if (rank == 0) return inputs;
  auto next = [&text, at = std::size_t{0}]() mutable {
    const std::size_t end = text.find('\0', at), begin = std::exchange(at, end + 1);
    return text.substr(begin, end - begin);
  };
  for (std::size_t left = static_cast<std::size_t>(std::ranges::count(text, '\0')); left > 0;
       left -= 2) {
    const std::string path = next();
    const MediaTrust trust = path[1] == 'd' ? MediaTrust::deck : MediaTrust::untrusted;
    inputs.push_back({{path.substr(2), trust}, next(), path[0] == 'v'});
  }
  return inputs;
}

}  // namespace weft
