// `weft ingest DECK`: videos in, a clip store out; or labelled images in, a store of them out.
#pragma once

#include <mpi.h>

#include "config/command.h"

namespace weft {

// The table [ingest] of the deck.
struct IngestDeck {
  std::vector<std::string> inputs;
  std::string output = "clips.h5";
  std::vector<std::string> resolutions = {"144p"};
  std::vector<std::int64_t> frames = {51};
  std::int64_t frame_interval = 1;
  std::int64_t stride = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  double fps = 0;
  double cuts = 0;
  std::int64_t max_clips = 0;
  bool strict = false;
  // Which items are taken (data/ingest/selection.h); -1: no bound.
  std::vector<std::string> scores;
  double min_aes = -1, min_flow = -1, min_match = -1, max_ocr = -1;
  double min_frames = -1, max_frames = -1, min_fps = -1, max_fps = -1;
  double min_pixels = -1, max_pixels = -1;
  std::vector<std::string> min, max;  // "COLUMN=NUMBER"
  bool keep_duplicates = false;
  // Labelled images instead (data/ingest/ingest_images.h): a list or a folder, and what goes with
  // it.
  std::string images, labels, image_suffix, label_suffix, root, class_names;
  std::int64_t num_classes = 0;
  std::int64_t first_label = 1;
  std::vector<std::int64_t> ignore_label, label_values;
};
DeckTable ingest_table();

// Cuts the videos of [ingest] into clips and writes them to ingest.output. Collective over `comm`.
//
// Inputs: files; folders; globs; WebDataset shards (.tar); .csv or .jsonl lists with a column
// `path` and maybe `text` and scores (relative paths count from the list's directory); `lavfi:...`
// sources. Filters and duplicates (select_items) leave some out, which is told. Video i of the rest
// goes to rank i % n.
//
// A clip of T frames is a window of T * frame_interval frames, of which every frame_interval-th is
// taken. Windows lie back to back (or `stride` apart); each is of the longest length in
// ingest.frames that the rest of the video can fill. A video of exactly T frames does give a clip
// of T frames (Open-Sora's own rule asks for one more, and never uses such a video at that length).
// With ingest.cuts no window crosses a cut: the next one begins at it.
// Length 1 beside longer ones takes stills only; its clips count as images (fps 120).
//
// Each clip goes to the largest of ingest.resolutions of which the picture has 0.8 of the pixels,
// and there to the shape with the nearest aspect; ingest.height and ingest.width, both given,
// override that.
//
// The store does not depend on the number of ranks, byte by byte: each of several ranks keeps its
// clips in a part file beside the output until all are cut; rank 0 gives each clip its place, in
// the order of the inputs, and all ranks copy theirs there, or rank 0 does if they are on several
// hosts (all must see the output's folder).
//
// A video that breaks is named in a WARN line and counted; its whole clips before the fault are
// kept. So is one in which the decoder had to guess; all its clips are kept.
//
// With ingest.images it makes a store of labelled images instead: ingest_images().
//
// Returns 0, or Exit::data (3) with ingest.strict if any broke. Throws Exit::usage when the deck
// makes no sense, Exit::data when a list cannot be read or a part file cannot be written; on rank 0
// alone, while the others return its code, when no clip at all came out or the store cannot be
// written.
//
// With `plan` it opens the files that no list describes, tells what would be taken, and writes
// nothing.
int ingest(const Deck& deck, MPI_Comm comm, bool plan = false);
Command ingest_command();

}  // namespace weft
