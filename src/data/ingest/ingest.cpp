// The steps of the job: list the videos, cut this rank's share, join what all have cut to one store
// in the order of the inputs (data/ingest/parts.h). What a single rank cuts is the store already.
#include "data/ingest/ingest.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config/deck_table.h"
#include "core/error.h"
#include "core/log.h"
#include "core/mpi.h"
#include "data/aspect.h"
#include "data/clip_store.h"
#include "data/ingest/cut.h"
#include "data/ingest/ingest_images.h"
#include "data/ingest/parts.h"
#include "data/ingest/progress.h"
#include "data/ingest/selection.h"
#include "data/lists/lists.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

void check_deck(const IngestDeck& deck) {
  WEFT_CHECK(!deck.inputs.empty(), Exit::usage,
             "set ingest.inputs = [\"video.mp4\"], a glob, a .csv or .jsonl list, or lavfi:...",
             "ingest.inputs is empty");
  WEFT_CHECK(!deck.output.empty(), Exit::usage, "set ingest.output = \"clips.h5\"",
             "ingest.output is empty");
  WEFT_CHECK(!deck.frames.empty(), Exit::usage, "set ingest.frames = [51]",
             "ingest.frames is empty");
  for (const std::int64_t t : deck.frames)
    WEFT_CHECK(t >= 1, Exit::usage, "choose clip lengths of 1 frame or more",
               "ingest.frames has a length of {}", t);
  WEFT_CHECK(deck.frame_interval >= 1, Exit::usage, "1 takes every frame",
             "ingest.frame_interval = {}", deck.frame_interval);
  WEFT_CHECK((deck.height > 0) == (deck.width > 0), Exit::usage,
             "set both ingest.height and ingest.width, or neither",
             "ingest.height = {}, ingest.width = {}", deck.height, deck.width);
  WEFT_CHECK(deck.height > 0 || !deck.resolutions.empty(), Exit::usage,
             "set ingest.resolutions = [\"144p\"]", "ingest.resolutions is empty");
  for (const std::string& name : deck.resolutions) resolution_area(name);  // throws if unknown
}

std::string part_path(const std::string& output, int rank) {
  return fmt::format("{}.part{}", output, rank);
}

// What a rank cut from its videos.
struct Share {
  std::vector<CutClip> clips;  // of several ranks, in the order of the videos
  Written written;             // to the store itself
  std::int64_t frames = 0, broken = 0, unused = 0, cuts = 0;
  std::string first_fault;
};

// A single rank writes the store itself, one of several to `part`.
Share cut_share(const Deck& deck, const std::vector<MediaItem>& inputs, int rank, int size,
                PartFile& part, IngestProgress& progress) {
  Share share;
  std::unique_ptr<BucketedWriter> store;
  const IngestDeck& d = deck.get<IngestDeck>();
  const std::int64_t limit = d.max_clips;
  const int threads = omp_get_max_threads();
  std::int64_t clips = 0;
  for (std::size_t i = static_cast<std::size_t>(rank); i < inputs.size();
       i += static_cast<std::size_t>(size)) {
    const auto enough = [&] { return limit > 0 && clips >= limit; };
    if (enough()) break;
    const CutResult cut = cut_video(
        inputs[i], d, {deck.media, {}}, threads,
        [&](const Bucket& bucket, std::span<const std::byte> clip, const ClipInfo& info) {
          if (size == 1) {
            if (!store) store = std::make_unique<BucketedWriter>(d.output);
            store->append(bucket, clip, info);
          } else {
            share.clips.push_back({static_cast<std::int64_t>(i), part.append(clip), bucket, info});
          }
          ++clips;
          progress.add(0, 1, 0);
          return !enough();
        },
        [&](std::int64_t) { progress.add(1, 0, 0); });
    progress.add(0, 0, 1);
    share.frames += cut.frames;
    share.cuts += cut.cuts;
    const std::string fault = cut.broken.empty() ? cut.unused : cut.broken;
    if (!fault.empty() && share.first_fault.empty()) share.first_fault = fault;
    if (!cut.broken.empty()) {
      ++share.broken;
      if (cut.frames == 0)
        log::warn("skipped {}: {}", inputs[i].media.name(), cut.broken);
      else
        log::warn(
            "{} cannot be decoded after frame {}; the {} complete clips before it are kept: {}",
            inputs[i].media.name(), cut.frames, cut.clips, cut.broken);
    } else if (cut.damaged > 0) {
      // FFmpeg guesses what it cannot decode; such clips are kept, but never silently.
      ++share.broken;
      log::warn("{} is damaged: {} of its {} frames could not be decoded completely, {} kept",
                inputs[i].media.name(), cut.damaged, cut.frames, counted(cut.clips, "clip"));
    } else if (!cut.unused.empty()) {
      ++share.unused;
      log::warn("no clip from {}: {}", inputs[i].media.name(), cut.unused);
    }
  }
  part.close();
  if (store) {
    store->commit();
    share.written = store->written();
  }
  return share;
}

void print_table(const std::string& output, const Written& written,
                 const std::array<std::int64_t, 4>& sums, const std::string& media, bool cuts,
                 double seconds) {
  log::info("{:<24}{:>8}  {:<22}{:>12}", "bucket", "clips", "shape", "MB");
  for (const auto& [name, entry] : written.buckets) {
    const Bucket& b = entry.first;
    log::info("{:<24}{:>8}  {:<22}{:>12.1f}", name, entry.second,
              fmt::format("[{},{},{},3] u8", b.frames, b.height, b.width),
              1e-6 * static_cast<double>(b.clip_bytes()) * static_cast<double>(entry.second));
  }
  log::info("{}, {:.1f} MB in {}", counted(written.clips, "clip"),
            1e-6 * static_cast<double>(written.bytes), output);
  if (cuts) log::info("{} found, at which clips begin anew", counted(sums[3], "cut"));
  log::info("{}: {} broken, {} without a clip; {} in {:.1f} s, {:.0f} frames/s", media, sums[1],
            sums[2], counted(sums[0], "frame"), seconds,
            static_cast<double>(sums[0]) / std::max(seconds, 1e-3));
}

// Removes what a killed job left beside its output: OUTPUT.partN, OUTPUT.partN.tmp and OUTPUT.tmp.
// Before anything is written, because the disk may be full of them.
void remove_left_parts(const std::string& output) {
  const fs::path path = fs::absolute(output);
  const std::string begin = path.filename().string() + ".part";
  std::error_code error;
  std::vector<fs::path> left;
  fs::directory_iterator entries(path.parent_path(), error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    if (name == path.filename().string() + ".tmp") left.push_back(entries->path());
    if (!name.starts_with(begin)) continue;
    const std::size_t end = name.find_first_not_of("0123456789", begin.size());
    if (end == begin.size() || name.size() == begin.size()) continue;  // OUTPUT.parts of images
    if (end == std::string::npos || name.compare(end, 4, ".tmp") == 0)
      left.push_back(entries->path());
  }
  for (const fs::path& file : left) unlink(file.c_str());
}

// All items of ingest.inputs, with the facts that ingest.scores has of them.
std::vector<MediaItem> list_items(const IngestDeck& deck, const MediaDeck& limits) {
  Columns bounded;
  for (const ColumnBound& b : column_bounds(deck)) bounded.push_back(b.column);
  std::vector<MediaItem> items =
      list_media(deck.inputs, "ingest.inputs", limits, Described::yes, deck.output, bounded);
  WEFT_CHECK(!items.empty(), Exit::data, "check the lists in ingest.inputs",
             "ingest.inputs names no video and no picture");
  for (const std::string& table : deck.scores) {
    const std::size_t joined = join_scores(table, limits, items, bounded);
    if (joined > 0)
      log::info("ingest: {} has scores of {} of {}", table, joined,
                counted(std::ssize(items), "item"));
    else if (log::rank() == 0)
      log::warn("{} has scores of none of {}: its relative paths begin in its own folder", table,
                counted(std::ssize(items), "item"));
  }
  return items;
}

// On rank 0: Exit::data if no rank has cut a clip. `faults` are the first of each, "" for none.
void check_clips(const IngestDeck& deck, std::int64_t clips, const std::vector<std::string>& faults,
                 const std::string& media) {
  const auto fault = std::ranges::find_if(faults, [](const std::string& f) { return !f.empty(); });
  WEFT_CHECK(clips > 0, Exit::data,
             fault == faults.end()
                 ? "try fewer ingest.frames, a lower ingest.resolutions, or other footage"
             : names_a_list(deck)
                 ? "see to that file; the paths of a list start in the list's folder"
                 : "see to that file; paths in ingest.inputs begin where weft was started",
             "no clip came out of {}; the first fault: {}", media,
             fault == faults.end() ? "none" : *fault);
}

std::vector<std::uint64_t> offsets_in(const std::string& bytes) {
  std::vector<std::uint64_t> offsets(bytes.size() / sizeof(std::uint64_t));
  std::memcpy(offsets.data(), bytes.data(), bytes.size());
  return offsets;
}

// The store of what all ranks have cut. Returns 0, or the code of an error that rank 0 throws.
int join_parts(const IngestDeck& deck, const Share& mine,
               const std::function<void(std::int64_t)>& check, Written& written, MPI_Comm comm) {
  MPI_Comm host = split_by_host(comm);
  int here = 0, ranks = 0;
  MPI_Comm_size(host, &here);
  MPI_Comm_size(comm, &ranks);
  MPI_Comm_free(&host);
  const bool one_host = here == ranks;
  const std::vector<std::string> lists = gather_texts(to_text(mine.clips), comm);
  std::unique_ptr<BucketedWriter> store;
  std::vector<std::string> places(lists.size());
  int code = on_first_rank(comm, [&] {
    std::vector<std::vector<CutClip>> made;
    std::int64_t clips = 0;
    for (const std::string& list : lists) clips += std::ssize(made.emplace_back(from_text(list)));
    check(clips);
    store = std::make_unique<BucketedWriter>(deck.output);
    const auto offsets = store->lay_out(made, deck.max_clips);
    for (std::size_t r = 0; r < offsets.size(); ++r)
      if (!one_host)
        copy_part(part_path(deck.output, static_cast<int>(r)), made[r], offsets[r],
                  store->temporary());
      else
        places[r].assign(reinterpret_cast<const char*>(offsets[r].data()),
                         offsets[r].size() * sizeof(std::uint64_t));
  });
  if (code != 0) return code;
  if (one_host) {
    std::string file = store ? store->temporary() : "";
    broadcast_sized(file, comm);
    copy_part(part_path(deck.output, log::rank()), mine.clips,
              offsets_in(scatter_texts(places, comm)), file);
    MPI_Barrier(comm);
  }
  return on_first_rank(comm, [&] {
    store->commit();
    written = store->written();
  });
}

}  // namespace

int ingest(const Deck& deck, MPI_Comm comm, bool plan) {
  const auto begin = std::chrono::steady_clock::now();
  const IngestDeck& d = deck.get<IngestDeck>();
  if (!d.images.empty()) {
    WEFT_CHECK(!plan, Exit::usage, "leave it out", "--plan is for footage, not for ingest.images");
    return ingest_images(deck, comm);
  }
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);

  // 1. Which items are taken. Every rank lists them itself; what has to be opened to decide is
  // shared out among the ranks, so that all come to the same list.
  check_deck(d);
  std::vector<MediaItem> listed = list_items(d, deck.media);
  const std::size_t all = listed.size();
  const Selection selection = select_items(std::move(listed), d, {deck.media, {}}, plan, comm);
  const std::vector<MediaItem>& inputs = selection.kept;
  const Forecast expected = forecast(inputs, d);
  const std::string media = count_media(expected);
  if (rank == 0) report_selection(selection, all, expected);
  if (rank == 0 && d.cuts > 0 && !expected.clips.empty())
    log::info(
        "           cuts are found as frames are decoded: there will be fewer clips, or shorter");
  if (rank == 0 && plan) explain_unknown(selection, expected, {deck.media, {}});
  WEFT_CHECK(!inputs.empty(), Exit::data, "relax the filters of [ingest]",
             "none of {} items is left", all);
  if (plan) return 0;

  // 2. The output must be none of the inputs, nor another job's.
  log::info("ingest: {} over {} into {}", media, counted(size, "rank"), d.output);
  std::vector<std::string> files = d.inputs;
  files.insert(files.end(), d.scores.begin(), d.scores.end());
  for (const MediaItem& i : inputs) files.push_back(i.media.path);
  const auto lock = lock_output(deck, d.output, files, comm);
  if (rank == 0) remove_left_parts(d.output);
  MPI_Barrier(comm);

  // 3. Each rank cuts its videos, into a part file if there are several.
  IngestProgress progress(comm, d.output, std::ssize(inputs),
                          expected.pictures == 0 ? "video"
                          : expected.videos == 0 ? "picture"
                                                 : "item");
  PartFile part(part_path(d.output, rank));
  const Share share = cut_share(deck, inputs, rank, size, part, progress);
  progress.finish();

  // 4. Rank 0 hears what all have made, and gives each clip its place in the store, in the order of
  // the inputs.
  const std::vector<std::string> faults = gather_texts(share.first_fault, comm);
  std::array<std::int64_t, 4> sums = {share.frames, share.broken, share.unused, share.cuts};
  MPI_Allreduce(MPI_IN_PLACE, sums.data(), 4, MPI_INT64_T, MPI_SUM, comm);
  Written written = share.written;
  const auto check = [&](std::int64_t clips) { check_clips(d, clips, faults, media); };
  if (size == 1) check(written.clips);
  const int code = size == 1 ? 0 : join_parts(d, share, check, written, comm);
  if (code != 0) return code;  // rank 0 reports the reason
  if (rank == 0) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    print_table(d.output, written, sums, media, d.cuts > 0, seconds.count());
  }

  // 5. With ingest.strict a broken file sets the exit code.
  const std::int64_t lost = sums[1] + selection.missing;
  return progress.end(
      lost, d.strict,
      fmt::format(
          "{} of {} are broken{}", lost, counted(std::ssize(inputs) + selection.missing, "item"),
          selection.missing > 0 ? fmt::format(", {} of them not there", selection.missing) : ""));
}

namespace {

void ingest_rows(Rows& r, IngestDeck& d) {
  r.path("inputs", d.inputs,
         "Footage: videos and pictures, folders of them, globs, .csv or .jsonl lists, WebDataset "
         "shards (.tar), or lavfi:SOURCE.");
  r.path("output", d.output, "The clip store (HDF5) to write.");
  r.text("resolutions", d.resolutions,
         "Bucket resolutions to cut clips for, by the names of Open-Sora.",
         {"144p", "240p", "256", "360p", "480p", "512", "720p", "1024", "1080p", "2k", "2048",
          "2880", "4k"});
  r.number("frames", d.frames, 1, 100000, "Clip lengths to cut, in frames.");
  r.number("frame_interval", d.frame_interval, 1, 1000, "Take every n-th frame of the footage.");
  r.number("stride", d.stride, 0, many,
           "Frames of footage between the starts of two clips; 0 cuts clips end to end.");
  r.number("height", d.height, 0, 16384,
           "Height of every clip in pixels instead of the bucket's; 0 keeps the bucket's.");
  r.number("width", d.width, 0, 16384,
           "Width of every clip in pixels instead of the bucket's; 0 keeps the bucket's.");
  r.number("fps", d.fps, 0, 1000,
           "Frames a second to resample the footage to; 0 keeps its own rate.");
  r.number("cuts", d.cuts, 0, 100,
           "No clip crosses a cut: clips begin anew where FFmpeg's scdet scores at least this, of "
           "100 (its own default is 10); 0 does not look for cuts.");
  r.number("max_clips", d.max_clips, 0, many, "Maximum number of clips; 0: no limit.");
  r.path("scores", d.scores,
         "Tables with scores of the items, joined by path, as weft score writes them: .csv or "
         ".jsonl.");
  for (const FilterKey& f : filter_keys()) r.number(f.key, d.*f.limit, -1, many, f.help);
  r.text("min", d.min,
         "Take only items with at least this value in a column of the lists or of ingest.scores, "
         "as COLUMN=NUMBER: [\"psnr=30\", \"motion=1\"].");
  r.text("max", d.max, "The same with at most this value: [\"flicker=2\"].");
  r.flag("keep_duplicates", d.keep_duplicates, "Take files whose bytes an earlier one has, too.");
  r.path("images", d.images,
         "Labelled images instead of videos: a list (.odgt: lines of JSON with fpath_img, "
         "fpath_segm, width, height), or a folder.");
  r.path("labels", d.labels,
         "The folder of the label maps, if ingest.images is a folder: PNGs of the same names.");
  r.text("image_suffix", d.image_suffix,
         "What the names in the folder ingest.images end with, before the ending: _leftImg8bit.");
  r.text("label_suffix", d.label_suffix,
         "The same in ingest.labels: _gtFine_labelTrainIds. Files without it are left out.");
  r.path("root", d.root, "Where the paths of the list begin; empty: in the list's folder.");
  r.number("num_classes", d.num_classes, 0, 255,
           "Classes of the labelled images: a label above is an error; 0 does not check.");
  r.number("first_label", d.first_label, 0, 255,
           "Value of the first class in the label maps; lower ones are unlabelled. 1 as in ADE20K, "
           "where 0 is unlabelled; 0 as in Cityscapes (trainId) and Pascal VOC.");
  r.number(
       "ignore_label", d.ignore_label, -1, 255,
       "Values of pixels that stay unlabelled (ignore_index), often 255; one needs no brackets.")
      .or_one = true;
  r.number("label_values", d.label_values, 0, 255,
           "Values of the classes 0, 1, ... in the label maps, as in [0, 255] for a mask; empty: "
           "all from first_label on.");
  r.path("class_names", d.class_names,
         "File with the names of the classes, one a line, or a .csv with a column Name.");
  r.flag("strict", d.strict, "End with exit code 3 if any input had to be skipped.");
}

void check_ingest(const IngestDeck& d, const DeckDemand& demand) {
  demand(!d.frames.empty(), "ingest.frames is empty", "give clip lengths, as [17, 51]");
  demand(!d.resolutions.empty(), "ingest.resolutions is empty", "give one, as [\"144p\"]");
  demand((d.height == 0) == (d.width == 0),
         fmt::format("ingest.height = {} but ingest.width = {}", d.height, d.width),
         "give both in pixels, or neither");
  demand(d.images.empty() || d.inputs.empty(), "ingest.inputs and ingest.images are both set",
         "make a store of videos, or one of labelled images");
}

}  // namespace

DeckTable ingest_table() {
  DeckTable table = deck_table("ingest", ingest_rows, check_ingest);
  table.next = "data";
  return table;
}

Command ingest_command() {
  const auto plan = std::make_shared<bool>(false);
  Command c{"ingest", "make a store (HDF5) of clips from videos, or of labelled images",
            [plan](const Deck& deck, MPI_Comm comm) { return ingest(deck, comm, *plan); }};
  c.takes_deck();
  c.option("--plan", *plan, "show what would be taken, by filter and bucket, without writing");
  for (const FilterKey& f : filter_keys()) {
    std::string name = std::string("--") + f.key;
    std::ranges::replace(name, '_', '-');
    c.key_option<std::string>(name, std::string("ingest.") + f.key, f.help);
  }
  c.key_option<std::string>("--min", "ingest.min", "minimum of any column, as COLUMN=NUMBER");
  c.key_option<std::string>("--max", "ingest.max", "maximum of any column, as COLUMN=NUMBER");
  c.key_option<bool>("--keep-duplicates", "ingest.keep_duplicates",
                     "take files whose bytes an earlier one has, too");
  c.key_option<bool>("--strict", "ingest.strict", "exit code 3 if any video breaks");
  return c;
}

}  // namespace weft
