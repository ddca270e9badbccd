// `weft segment DECK`: predicts the class of each pixel of pictures and videos and draws the
// classes next to or over them.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "config/command.h"
#include "media/media_source.h"

namespace weft {

// The table [segment] of the deck.
struct SegmentDeck {
  std::vector<std::string> inputs;
  std::string output = "segmented";
  std::string overlay = "side_by_side";
  bool ema = false;
};
DeckTable segment_table();

// Collective. Writes a PNG for each picture and an MP4 for each video, and OUTPUT/segment.jsonl.
// Returns the exit code: 0, 3 if inputs failed, 75 if asked to stop. The same command makes what is
// missing.
int segment(const Deck& deck, MPI_Comm world);
Command segment_command();

// A picture or video of segment.inputs.
struct SegmentInput {
  MediaSource media;
  // The result's name, without ending: unique, valid UTF-8 without control characters, no absolute
  // path.
  std::string name;
  bool video = false;
};

// Collective: rank 0 lists them for all, as list_media does, but for what is in `output`, and names
// those that are not there. Results of a folder's files keep its subfolders. Exit::usage where a
// result would replace an input.
std::vector<SegmentInput> list_inputs(const SegmentDeck& deck, const MediaDeck& limits,
                                      MPI_Comm world);

}  // namespace weft
