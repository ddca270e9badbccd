// Labelled images as a ClipSource: what a training of a segmentation reads.
#pragma once

#include <memory>

#include "data/clip_source.h"
#include "data/images/labelled_images.h"

namespace weft {

// A bucket for each orientation that occurs and each of data.short_sides, "landscape-300" ...
// "portrait-600": 1 frame, 3 channels, u8, label_rate; height and width are the largest that a
// micro-batch of it can have. Portrait is height > width. A bucket's clips are the images of its
// orientation, in their order; a sample's id is the image's number among all.
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
