// The clips of a job, from the deck's table and a list to items: what is made, of what, in which
// parts. What a clip looks like is in [sadtalker] (models/sadtalker/options.h).
#pragma once

#include <mpi.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "config/deck.h"
#include "config/deck_table.h"
#include "jobs/engine/list_job.h"
#include "models/sadtalker/options.h"

namespace weft {

// The table [animate].
struct AnimateDeck {
  // A list of clips, or one clip; what a list's row does not say is as here.
  std::string input, picture, speech, name;
  std::string output = "animated";
  std::string ref_eyeblink, ref_pose;
  std::string landmarks, coefficients;
  std::string enhancer;
  std::int64_t enhancer_scale = 2;
  std::int64_t seed = 0;

  std::string weights = "SadTalker_V0.0.2_256.safetensors";
  std::string mapping_weights = "mapping_00229.safetensors";
  std::string mapping_full_weights = "mapping_00109.safetensors";
  std::string detector_weights = "detection_Resnet50_Final.safetensors";
  std::string landmark_weights = "alignment_WFLW_4HG.safetensors";
  std::string gfpgan_weights = "GFPGANv1.4.safetensors";
  std::string parsenet_weights = "parsing_parsenet.safetensors";
  std::int64_t gfpgan_channels = 512, parsenet_channels = 64;

  std::int64_t piece = 100;
  bool keep_frames = false;
};

DeckTable animate_table();

// ---- The list: rows of animate.input, or the one pair of the deck ----

// What a clip is made of and with: the deck's keys, with those that its row sets.
struct ClipRequest {
  std::string name;   // of its file, without .mp4: unique in the job
  std::string where;  // "clips.csv, line 3", or "the deck"
  AnimateDeck animate;
  SadtalkerDeck sadtalker;
};

// Columns of a list, each the key of a deck that it sets.
struct ListColumn {
  const char* name;
  const char* key;
};
const std::vector<ListColumn>& list_columns();

// Collective: rank 0 reads the list for all. Exit::data, naming file and line, for a list that
// cannot be read, an unknown column (with the nearest known one), a value that the deck would
// refuse (Exit::usage), a row without picture or speech, a name that is taken or is no plain file
// name, and where no clip has all its files. Paths of a list begin in its folder. Exit::usage for a
// deck that asks for nothing, or whose results would replace an input.
std::vector<ClipRequest> list_clips(const Deck& deck, MPI_Comm world);

// ---- Parts ----

// A clip is pieces of its frames, and the file that they are joined to. Each part is an item of the
// list engine. Whichever rank makes a piece prepares the clip by itself, which gives the same
// numbers everywhere and takes no longer than to wait for another rank that does.
struct ClipPart {
  enum class Kind { piece, clip };
  Kind kind = Kind::piece;
  std::int64_t clip = 0;
  std::int64_t first = 0, count = 0;  // of frames
};

// What a look at a clip's files tells.
struct AnimateSize {
  std::int64_t frames = 0;             // 0: they cannot be read, or are too short
  std::int64_t height = 0, width = 0;  // of the picture
};

// Collective: the ranks share the reading.
std::vector<AnimateSize> measure_clips(const std::vector<ClipRequest>& clips,
                                       const MediaDeck& limits, MPI_Comm world);

// What clips cost, in operations.
struct ClipCost {
  double prepare = 0, frame = 0, join = 0;
  std::int64_t frames = 0;
  double total() const { return prepare + frame * static_cast<double>(frames) + join; }
};

// Parts in the order of the clips: each clip's pieces, then the clip.
std::vector<ClipPart> parts_of(const std::vector<AnimateSize>& sizes,
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
  // First. A clip that one rank makes is one batch, joined at its end.
  std::vector<ItemBatch> pieces;
  std::vector<ItemBatch> joins;  // then, once all pieces are there: clips that several ranks make
};

// The costliest clips first. A clip goes to one rank as long as it costs no more than an even share
// of what remains; otherwise its pieces go to whoever is free. So do those of a clip with
// `suspects` (ListEngine::suspects), which the engine takes out of their batches: it is joined once
// all are there.
SharedParts share_parts(const std::vector<ClipPart>& parts,
                        const std::vector<std::int64_t>& missing,
                        const std::set<std::int64_t>& suspects, const std::vector<ClipCost>& costs,
                        int ranks);

// Hash of all that decides a clip's bytes. `weights` stands for all networks.
std::string clip_key(const ClipRequest& clip, const std::string& weights);

}  // namespace weft
