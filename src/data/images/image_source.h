// Labelled images as a training of a segmentation reads them: which of them a step takes, at which
// sizes, and their pixels and labels at these sizes.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "data/clip_source.h"
#include "data/images/labelled_images.h"
#include "data/step_plan.h"

namespace weft {

struct ImagePlanOptions {
  std::vector<std::int64_t> short_sides;
  std::int64_t max_side = 1000, padding = 8;
  std::int64_t batch_size = 1;     // images of a micro-batch
  std::int64_t micro_batches = 1;  // of a step
  std::uint64_t seed = 42;
};

// The walk: each epoch shuffles the images with Philox(seed, sample_order, epoch). Going through
// them, an image is put with those of its orientation; as soon as these are batch_size images, they
// are the next micro-batch. Images left over at an epoch's end are the first of the next one. Each
// micro-batch is given one of the short sides, each sample of it a flip with probability 1/2.
//
// The walk is cut into stretches of an epoch or more, a multiple of G = micro_batches each; the
// micro-batches of a stretch are sorted by their padded area, so that each G consecutive ones, a
// step, cost about the same, and the steps are shuffled.
//
// Buckets are numbered as ImageSource does: orientation (landscape first, if it occurs) times the
// number of short sides, plus the short side's index.
class ImagePlan : public StepPlan {
 public:
  ImagePlan(std::vector<ImageSize> sizes, ImagePlanOptions options);

  std::vector<MicroBatch> plan(std::int64_t step) const override;
  // The micro-batches of an epoch of the walk, rounded down.
  std::int64_t micro_batches_per_epoch() const override;
  std::int64_t stretch_steps() const { return stretch_steps_; }

 private:
  struct Orientation {
    std::vector<std::int64_t> images;  // by number
    int first_bucket = -1;
  };
  // The number of all micro-batches before an epoch of the walk.
  std::int64_t before_epoch(std::int64_t epoch) const;
  std::int64_t epoch_of(std::int64_t micro_batch) const;
  std::vector<std::int64_t> order(std::int64_t epoch) const;
  std::vector<MicroBatch> walk(std::int64_t epoch) const;
  std::vector<MicroBatch> stretch(std::int64_t number) const;
  // The bucket, the size and the views of the walk's micro-batch `number`, of which the samples are
  // known.
  void size_up(MicroBatch& batch, std::size_t orientation, std::int64_t number) const;
  // A stretch. The caller holds mutex_.
  const std::vector<MicroBatch>& cached(std::int64_t number) const;

  std::vector<ImageSize> sizes_;
  ImagePlanOptions options_;
  std::array<Orientation, 2> orientations_;  // landscape, portrait
  std::vector<std::int64_t> position_;       // of each image among those of its orientation
  std::int64_t stretch_steps_ = 1;
  // Readers are already in the next stretch while the trainer finishes one.
  mutable std::mutex mutex_;  // guards the cache below
  struct Cached {
    std::int64_t number = -1;
    std::vector<MicroBatch> batches;
  };
  mutable std::array<Cached, 2> cache_;
};

// Labelled images as a ClipSource. A bucket for each orientation that occurs and each of
// data.short_sides, "landscape-300" ... "portrait-600": 1 frame, 3 channels, u8, label_rate; height
// and width are the largest that a micro-batch of it can have. Portrait is height > width. A
// bucket's clips are the images of its orientation, in their order; a sample's id is the image's
// number among all.
//
// read_sample() gives the image scaled to its view by Pillow's BILINEAR, after it was flipped if
// the view says so, u8 [H,W,3] from the top left corner, the rest 0; then the labels u8 [H/rate,
// W/rate]: scaled by NEAREST, then of each square of `rate` pixels the one behind its middle, both
// as docs/models/segmentation.md says. 0 is unlabelled, v is class v - 1. Squares that no pixel of
// the image touches are data.pad_label + 1; where a square's pixel lies beyond the image's edge, 0.
// read() gives a sample at its bucket's short side, unflipped, at the bucket's size.
//
// Throws Exit::usage for a data.label_rate that data.padding is no multiple of.
std::unique_ptr<ClipSource> make_image_source(std::unique_ptr<LabelledImages> images,
                                              const DataDeck& data);

}  // namespace weft
