// A clip as parts: pieces of its frames, and the file that they are joined to. Each part is an item
// of the list engine. Whichever rank makes a piece prepares the clip by itself, which gives the
// same numbers everywhere and takes no longer than to wait for another rank that does.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

#include "jobs/animate/list.h"
#include "jobs/engine/list_job.h"

namespace weft {

struct ClipPart {
  enum class Kind { piece, clip };
  Kind kind = Kind::piece;
  std::int64_t clip = 0;
  std::int64_t first = 0, count = 0;  // of frames
};

// What a look at a clip's files tells.
struct ClipSize {
  std::int64_t frames = 0;             // 0: they cannot be read, or are too short
  std::int64_t height = 0, width = 0;  // of the picture
};

// Collective: the ranks share the reading.
std::vector<ClipSize> measure_clips(const std::vector<ClipRequest>& clips, const MediaDeck& limits,
                                    MPI_Comm world);

// What clips cost, in operations.
struct ClipCost {
  double prepare = 0, frame = 0, join = 0;
  std::int64_t frames = 0;
  double total() const { return prepare + frame * static_cast<double>(frames) + join; }
};

// Parts in the order of the clips: each clip's pieces, then the clip.
std::vector<ClipPart> parts_of(const std::vector<ClipSize>& sizes,
                               const std::vector<ClipRequest>& clips);

// Frames of a piece: animate.piece rounded up to whole batches.
std::int64_t piece_of(const ClipRequest& clip);

// Item i is part i. `keys`: of each clip; may be empty, except on rank 0.
std::vector<ListItem> items_of(const std::vector<ClipPart>& parts,
                               const std::vector<ClipRequest>& clips,
                               const std::vector<ClipCost>& costs,
                               const std::vector<std::string>& keys);

// How the ranks share what is missing.
struct SharedParts {
  std::vector<ItemBatch>
      pieces;  // first; a clip that one rank makes is one batch, joined at its end
  std::vector<ItemBatch> joins;  // then, once all pieces are there: clips that several ranks make
};

// The costliest clips first. A clip goes to one rank as long as it costs no more than an even share
// of what remains; otherwise its pieces go to whoever is free.
SharedParts share_parts(const std::vector<ClipPart>& parts,
                        const std::vector<std::int64_t>& missing,
                        const std::vector<ClipCost>& costs, int ranks);

// Hash of all that decides a clip's bytes. `weights` stands for all networks.
std::string clip_key(const ClipRequest& clip, const std::string& weights);

}  // namespace weft
