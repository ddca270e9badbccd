// Which samples a training does not see, because its validation measures them ([validation],
// train/validation.h): those of a store of their own, or a share of the training's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "data/images/labelled_images.h"
#include "data/text_images/text_images.h"

namespace weft {

// The held-out samples, of the kind of the training's data; all null: there are none.
struct HeldOut {
  std::unique_ptr<ClipSource> clips;
  std::unique_ptr<LabelledImages> images;
  std::unique_ptr<TextImages> texts;
  bool any() const { return clips || images || texts; }
  std::string content_id() const;  // as ClipSource's, of the whole source; there are some
};

// A store as in data.path, or a share of each bucket (or of all images) of data.path. At most one
// of the two.
struct HeldOutChoice {
  std::string path;
  double share = 0;
  std::uint64_t seed = 0;
  bool any() const { return !path.empty() || share > 0; }
};

struct TrainingData {
  std::unique_ptr<ClipSource> training;  // without what is held out
  HeldOut held_out;
};
// Exit::usage where the share is not one sample. Without a share `training` is what
// open_clip_source() gives. Clips keep the ids that they have in the whole store.
TrainingData open_training_data(const DataDeck& data, const MediaDeck& limits,
                                const HeldOutChoice& choice);

// The numbers of the samples that are held out of `count`, ascending: share * count of them,
// rounded, but never all. A function of (seed, list, share, count).
std::vector<std::int64_t> held_out_of(std::int64_t count, double share, std::uint64_t seed,
                                      std::int64_t list);

}  // namespace weft
