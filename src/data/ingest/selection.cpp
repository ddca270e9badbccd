#include "data/ingest/selection.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <unordered_map>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/ingest/cut.h"
#include "data/lists/folders.h"
#include "media/video_reader.h"

namespace weft {
namespace {

constexpr std::array measurable = {Fact::num_frames, Fact::height, Fact::width, Fact::fps};

bool is_measurable(const FilterKey& f) {
  const std::string_view column = f.column;
  return column == "pixels" || column == "num_frames" || column == "fps";
}

// A filter that is asked for.
struct Filter {
  std::string rule;
  ColumnBound bound;
  bool measurable = false;
  std::size_t place = 0;  // in Facts::values
};

double value_of(const Facts& facts, const Filter& f) {
  if (f.measurable && f.bound.column == "pixels") return facts[Fact::height] * facts[Fact::width];
  return f.place < facts.values.size() ? facts.values[f.place] : Facts().values.front();
}

std::vector<Filter> filters_asked(const IngestDeck& deck, bool of_measures) {
  std::vector<Filter> asked;
  for (const FilterKey& f : filter_keys()) {
    const double limit = deck.*f.limit;
    if (limit < 0 || is_measurable(f) != of_measures) continue;
    const auto place = std::ranges::find(fact_names, std::string_view(f.column));
    asked.push_back({fmt::format("{} = {}", f.key, limit),
                     {f.column, f.minimum, limit},
                     of_measures,
                     static_cast<std::size_t>(place - fact_names.begin())});
  }
  if (of_measures) return asked;
  std::size_t place = fact_names.size();
  for (const ColumnBound& b : column_bounds(deck))
    asked.push_back({fmt::format("{} {} = {}", b.minimum ? "min" : "max", b.column, b.limit), b,
                     false, place++});
  return asked;
}

// What the deck's lists and tables have, for messages.
std::string columns_there(const IngestDeck& deck) {
  std::string text;
  std::error_code none;
  for (const auto* tables : {&deck.inputs, &deck.scores})
    for (const std::string& table : *tables)
      if (form_of_name(table) != TableForm::none && std::filesystem::exists(table, none))
        text += fmt::format("{}{} has {}", text.empty() ? "; " : ", ", table, columns_in(table));
  return text;
}

bool is_picture(const MediaItem& item) {
  const double frames = item.facts[Fact::num_frames];
  if (!std::isnan(frames)) return frames == 1;
  const MediaSource& media = item.media;
  return kind_of_name(media.member.empty() ? media.path : media.member) == MediumKind::picture;
}

void apply(const Filter& f, const IngestDeck& deck, Selection& selection) {
  const ColumnBound& bound = f.bound;
  Selection::Dropped dropped;
  dropped.rule = f.rule;
  const std::int64_t before = std::ssize(selection.kept);
  const bool of_rates = f.measurable && bound.column == "fps";
  std::erase_if(selection.kept, [&](const MediaItem& item) {
    if (of_rates && is_picture(item)) return false;  // it has none
    const double value = value_of(item.facts, f);
    const bool unknown = std::isnan(value);
    const bool drop = unknown || (bound.minimum ? value < bound.limit : value > bound.limit);
    dropped.items += drop ? 1 : 0;
    dropped.unknown += unknown ? 1 : 0;
    return drop;
  });
  WEFT_CHECK(before == 0 || dropped.unknown < before, Exit::data,
             f.measurable
                 ? "check that the files can be read"
                 : fmt::format("give the lists a column {0}, or name a table that has it in "
                               "ingest.scores (weft score makes `ocr`, weft evaluate others)",
                               bound.column),
             "ingest.{}, but none of {} items has a value {}{}", dropped.rule, before, bound.column,
             f.measurable ? "" : columns_there(deck));
  selection.dropped.push_back(std::move(dropped));
}

// Calls `work(i)` for this rank's share of `count`.
template <class F>
void each_of_mine(std::size_t count, MPI_Comm comm, F&& work) {
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  for (std::size_t i = static_cast<std::size_t>(rank); i < count;
       i += static_cast<std::size_t>(size))
    work(i);
}

// Sums in pieces whose length an int holds. Where all ranks but one have 0, the one's values.
template <class T>
void sum_over_ranks(std::vector<T>& values, MPI_Datatype type, MPI_Comm comm) {
  constexpr std::size_t piece = std::size_t{1} << 28;
  for (std::size_t at = 0; at < values.size(); at += piece)
    MPI_Allreduce(MPI_IN_PLACE, values.data() + at,
                  static_cast<int>(std::min(piece, values.size() - at)), type, MPI_SUM, comm);
}

// Names and drops items whose files are not there, before hours of work.
void drop_missing(Selection& selection, const IngestDeck& deck, bool plan, MPI_Comm comm) {
  std::vector<MediaItem>& items = selection.kept;
  std::vector<std::uint8_t> gone(items.size(), 0);
  each_of_mine(items.size(), comm,
               [&](std::size_t i) { gone[i] = missing_file(items[i].media.path).empty() ? 0 : 1; });
  sum_over_ranks(gone, MPI_UINT8_T, comm);
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (gone[i] == 0) continue;
    const std::string& path = items[i].media.path;
    const std::string here = missing_file(path);
    missing.push_back(here.empty() ? path + " (on another host)" : here);
  }
  report_missing(
      missing, items.size(), "item",
      names_a_list(deck) ? missing_hint : "paths in ingest.inputs begin where weft was started",
      plan);
  selection.missing = std::ssize(missing);
  std::size_t i = 0;
  std::erase_if(items, [&](const MediaItem&) { return gone[i++] != 0; });
}

// Fills in frames, sizes and rates of items that lack any. Files that cannot be read stay as they
// are: the cut names them.
void measure_items(std::vector<MediaItem>& items, const MediaAccess& access, MPI_Comm comm) {
  std::vector<std::size_t> wanted;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (std::ranges::any_of(measurable, [&](Fact f) { return std::isnan(items[i].facts[f]); }))
      wanted.push_back(i);
  std::vector<double> found(measurable.size() * wanted.size(), 0.0);
  each_of_mine(wanted.size(), comm, [&](std::size_t i) {
    try {
      const VideoReader reader(items[wanted[i]].media, {.access = access});
      double* values = found.data() + measurable.size() * i;
      values[1] = static_cast<double>(reader.height());
      values[2] = static_cast<double>(reader.width());
      values[3] = reader.is_image() ? 0 : reader.fps();
      if (std::isnan(items[wanted[i]].facts[measurable[0]]))  // it may read the whole file
        values[0] = static_cast<double>(reader.counted());
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;
    }
  });
  sum_over_ranks(found, MPI_DOUBLE, comm);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    for (std::size_t f = 0; f < measurable.size(); ++f) {
      double& value = items[wanted[i]].facts[measurable[f]];
      const double measured = found[measurable.size() * i + f];
      if (std::isnan(value) && measured > 0) value = measured;
    }
}

// A hash of the medium's bytes as they lie in the file.
Hash128 hash_of_medium(const MediaSource& media) {
  const File file = File::open(media.path, Exit::data);
  const bool member = !media.member.empty();
  const std::uint64_t bytes = member ? media.bytes : file.size();
  Hasher hasher;
  std::vector<std::byte> block(std::min<std::uint64_t>(bytes, std::uint64_t{4} << 20));
  for (std::uint64_t at = 0; at < bytes;) {
    const auto part = std::span(block).first(std::min<std::uint64_t>(block.size(), bytes - at));
    file.read(part, (member ? media.begin : 0) + at);
    hasher.add(part);
    at += part.size();
  }
  return hasher.value();
}

// Only files of one size can be the same, so others are not read.
void drop_duplicates(Selection& selection, MPI_Comm comm) {
  std::vector<MediaItem>& items = selection.kept;
  std::vector<std::uint64_t> bytes(items.size(), 0);
  each_of_mine(items.size(), comm, [&](std::size_t i) {
    const MediaSource& media = items[i].media;
    std::error_code none;
    if (!media.member.empty())
      bytes[i] = media.bytes;
    else if (!is_source_graph(media.path) && std::filesystem::is_regular_file(media.path, none))
      bytes[i] = std::filesystem::file_size(media.path, none);
    if (none) bytes[i] = 0;
  });
  sum_over_ranks(bytes, MPI_UINT64_T, comm);
  std::unordered_map<std::uint64_t, std::int64_t> of_size;
  for (const std::uint64_t b : bytes) ++of_size[b];
  std::vector<std::size_t> wanted;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (bytes[i] > 0 && of_size[bytes[i]] > 1) wanted.push_back(i);

  std::vector<std::uint64_t> hashes(2 * wanted.size(), 0);
  each_of_mine(wanted.size(), comm, [&](std::size_t i) {
    try {
      const Hash128 hash = hash_of_medium(items[wanted[i]].media);
      hashes[2 * i] = hash.high;
      hashes[2 * i + 1] = hash.low;
    } catch (const Error& e) {  // it vanished, or its disk fails: the cut names it
      if (e.code() != Exit::data) throw;
    }
  });
  sum_over_ranks(hashes, MPI_UINT64_T, comm);

  Selection::Dropped dropped;
  dropped.rule = "duplicates";
  std::vector<bool> drop(items.size(), false);
  std::map<std::array<std::uint64_t, 3>, std::size_t> first;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (hashes[2 * i] == 0 && hashes[2 * i + 1] == 0) continue;
    const auto [known, added] =
        first.emplace(std::array{bytes[wanted[i]], hashes[2 * i], hashes[2 * i + 1]}, wanted[i]);
    if (added) continue;
    drop[wanted[i]] = true;
    if (dropped.items++ == 0)
      dropped.example = fmt::format("{} has the bytes of {}", items[wanted[i]].media.name(),
                                    items[known->second].media.name());
  }
  std::size_t i = 0;
  std::erase_if(items, [&](const MediaItem&) { return drop[i++]; });
  if (dropped.items > 0) selection.dropped.push_back(std::move(dropped));
}

}  // namespace

const std::vector<FilterKey>& filter_keys() {
  static const std::vector<FilterKey> keys = {
      {"min_aes", "aes", true, &IngestDeck::min_aes,
       "Take only items with at least this aesthetic score (column aes); -1 takes all."},
      {"min_flow", "flow", true, &IngestDeck::min_flow,
       "Take only items with at least this optical flow (column flow); -1 takes all."},
      {"min_match", "match", true, &IngestDeck::min_match,
       "Take only items whose caption fits at least this well (column match); -1 takes all."},
      {"max_ocr", "ocr", false, &IngestDeck::max_ocr,
       "Maximum number of text regions (column ocr); -1: no limit."},
      {"min_frames", "num_frames", true, &IngestDeck::min_frames,
       "Minimum number of frames; -1: no limit."},
      {"max_frames", "num_frames", false, &IngestDeck::max_frames,
       "Maximum number of frames; -1: no limit."},
      {"min_fps", "fps", true, &IngestDeck::min_fps, "Minimum frame rate of videos; -1: no limit."},
      {"max_fps", "fps", false, &IngestDeck::max_fps,
       "Maximum frame rate of videos; -1: no limit."},
      {"min_pixels", "pixels", true, &IngestDeck::min_pixels,
       "Minimum height x width in pixels; -1: no limit."},
      {"max_pixels", "pixels", false, &IngestDeck::max_pixels,
       "Maximum height x width in pixels; -1: no limit."},
  };
  return keys;
}

std::vector<ColumnBound> column_bounds(const IngestDeck& deck) {
  std::vector<ColumnBound> bounds;
  for (const bool minimum : {true, false})
    for (const std::string& entry : minimum ? deck.min : deck.max) {
      const std::size_t equals = std::min(entry.rfind('='), entry.size());
      ColumnBound b{std::string(trimmed(entry.substr(0, equals))), minimum, 0};
      const std::string number(trimmed(entry.substr(std::min(equals + 1, entry.size()))));
      const char* last = number.data() + number.size();
      const auto [end, fault] = std::from_chars(number.data(), last, b.limit);
      WEFT_CHECK(!b.column.empty() && fault == std::errc() && end == last && std::isfinite(b.limit),
                 Exit::usage, "write a column and a number, like \"psnr=30\"",
                 "ingest.{} has \"{}\", which is not COLUMN=NUMBER", minimum ? "min" : "max",
                 entry);
      bounds.push_back(std::move(b));
    }
  return bounds;
}

Selection select_items(std::vector<MediaItem> items, const IngestDeck& deck,
                       const MediaAccess& access, bool plan, MPI_Comm comm) {
  Selection selection;
  selection.kept = std::move(items);
  for (const Filter& f : filters_asked(deck, false)) apply(f, deck, selection);
  drop_missing(selection, deck, plan, comm);
  const std::vector<Filter> of_measures = filters_asked(deck, true);
  if (plan || !of_measures.empty()) measure_items(selection.kept, access, comm);
  for (const Filter& f : of_measures) apply(f, deck, selection);
  if (!deck.keep_duplicates) drop_duplicates(selection, comm);
  return selection;
}

bool names_a_list(const IngestDeck& deck) {
  return std::ranges::any_of(deck.inputs, [](const std::string& input) {
    return !is_source_graph(input) && form_of_name(input) != TableForm::none;
  });
}

Forecast forecast(const std::vector<MediaItem>& items, const IngestDeck& deck) {
  Forecast f;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const MediaItem& item = items[i];
    const bool picture = is_picture(item);
    ++(picture ? f.pictures : f.videos);
    const Facts& facts = item.facts;
    const double height = facts[Fact::height], width = facts[Fact::width], fps = facts[Fact::fps];
    double frames = picture ? 1 : facts[Fact::num_frames];
    if (deck.fps > 0 && !picture) frames *= deck.fps / fps;
    // Sizes that no list can mean: the cut will tell.
    constexpr double most = 1e9;
    if (!(frames >= 1 && frames < most && height >= 1 && height < most && width >= 1 &&
          width < most)) {
      f.unknown.push_back(i);
      continue;
    }
    const auto size =
        choose_clip_size(deck, static_cast<std::int64_t>(height), static_cast<std::int64_t>(width));
    if (!size) {
      ++f.small;
      continue;
    }
    const auto all = static_cast<std::int64_t>(std::llround(frames));
    // As the cutter: at each start the longest that the rest fills.
    bool any = false;
    std::int64_t start = 0;
    for (const std::int64_t length : clip_lengths(deck, picture)) {
      const std::int64_t window = length * clip_interval(deck, picture);
      const std::int64_t step = deck.stride > 0 ? deck.stride : window;
      if (all - start < window) continue;
      const std::int64_t count = (all - start - window) / step + 1;
      f.clips[size->bucket(length)] += count;
      start += count * step;
      any = true;
    }
    if (!any) ++f.brief;
  }
  return f;
}

std::string count_media(const Forecast& f) {
  std::string text = f.videos > 0 ? counted(f.videos, "video") : "";
  if (f.pictures > 0) text += (text.empty() ? "" : " and ") + counted(f.pictures, "picture");
  return text.empty() ? "nothing" : text;
}

void report_selection(const Selection& selection, std::size_t listed, const Forecast& f) {
  for (const Selection::Dropped& d : selection.dropped) {
    std::string more = d.example.empty() ? "" : fmt::format("; {}", printable(d.example, 400));
    if (d.unknown > 0) more += fmt::format(", {} of them without a value", d.unknown);
    log::info("{:>10} dropped by {}{}", d.items, d.rule, more);
  }
  const auto share = [](std::int64_t part, std::int64_t whole) {
    return 100.0 * static_cast<double>(part) /
           static_cast<double>(std::max<std::int64_t>(1, whole));
  };
  const std::int64_t kept = std::ssize(selection.kept);
  log::info("{:>10} kept of {}: {} ({:.1f} %), {} ({:.1f} %)", kept, listed,
            counted(f.videos, "video"), share(f.videos, kept), counted(f.pictures, "picture"),
            share(f.pictures, kept));
  if (selection.missing > 0) log::info("{:>10} not there", selection.missing);
  if (f.small > 0) log::info("{:>10} of them too small for every resolution", f.small);
  if (f.brief > 0) log::info("{:>10} of them too short for every clip", f.brief);
  const std::int64_t captions = std::ranges::count_if(
      selection.kept, [](const MediaItem& item) { return !item.text.empty(); });
  if (captions > 0 || kept == 0)
    log::info("captions: {} of {}", captions, kept);
  else
    log::warn(
        "captions: 0 of {}. That of NAME.mp4 is read from NAME.txt next to it, that of a row of a "
        "list from its column `text` or `caption`; training without text needs none",
        kept);
  if (f.clips.empty()) return;
  std::int64_t clips = 0;
  for (const auto& [bucket, count] : f.clips) clips += count;
  log::info("{:<24}{:>10}{:>9}", "expected bucket", "clips", "share");
  for (const auto& [bucket, count] : f.clips)
    log::info("{:<24}{:>10}{:>7.1f} %", bucket, count, share(count, clips));
  if (!f.unknown.empty())
    log::info("{:>10} of unknown size or length, not counted", f.unknown.size());
}

void explain_unknown(const Selection& selection, const Forecast& f, const MediaAccess& access) {
  constexpr std::size_t most = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(most, f.unknown.size()); ++i) {
    const MediaSource& media = selection.kept[f.unknown[i]].media;
    if (i > 0) text += "; ";
    try {
      const VideoReader reader(media, {.access = access});
      text += media.name() + ": the file does not say how many frames it has";
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;
      text += e.what();
    }
  }
  if (f.unknown.size() > most) text += fmt::format("; and {} more", f.unknown.size() - most);
  if (!text.empty()) log::warn("{} not counted: {}", counted(std::ssize(f.unknown), "item"), text);
}

}  // namespace weft
