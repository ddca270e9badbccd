// The pictures and videos of segment.inputs.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

#include "jobs/segment/segment.h"
#include "media/media_source.h"

namespace weft {

struct SegmentInput {
  MediaSource media;
  // Of the result, without ending: unique, valid UTF-8 without control characters, no absolute
  // path.
  std::string name;
  bool video = false;
};

// Collective: rank 0 lists them for all, as list_media does, but for what is in `output`, and names
// those that are not there. Results of a folder's files keep its subfolders. Exit::usage where a
// result would replace an input.
std::vector<SegmentInput> list_inputs(const SegmentDeck& deck, const MediaDeck& limits,
                                      MPI_Comm world);

// Bytes that are not UTF-8 as U+FFFD: names stand in lines of JSON.
std::string as_utf8(const std::string& name);

}  // namespace weft
