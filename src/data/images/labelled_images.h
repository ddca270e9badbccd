// Images of any size with a class for each pixel: a store (image_store.h), or drawn in memory
// (shapes.h). Training reads them through an ImageSource, an evaluation directly.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/images/image_sizes.h"

namespace weft {

struct LabelledImage {
  ImageSize size;
  std::vector<std::uint8_t> rgb;     // [height, width, 3]
  std::vector<std::uint8_t> labels;  // [height, width]: 0 is unlabelled, v is class v - 1
};

// Safe from several threads at once.
class LabelledImages {
 public:
  virtual ~LabelledImages() = default;
  virtual std::int64_t count() const = 0;
  virtual ImageSize size(std::int64_t i) const = 0;
  // Where the image came from: a path as it was ingested, or how it was drawn.
  virtual std::string name(std::int64_t i) const = 0;
  virtual std::string content_id() const { return {}; }  // as ClipSource's
  // Reads into `out`, whose memory is used again. Throws Exit::data, naming file and image, when it
  // cannot be read; DamagedClip (data/clip_source.h) when a hash is wrong.
  virtual void read(std::int64_t i, LabelledImage& out) const = 0;

  virtual std::int64_t num_classes() const = 0;                     // 0: unknown
  virtual const std::vector<std::string>& class_names() const = 0;  // [num_classes], or empty
  // RGB of each label, as the label files have them; may be empty.
  virtual std::vector<std::uint8_t> palette() const { return {}; }
  // In how many images each label occurs, [256]; empty: not known.
  virtual std::vector<std::uint64_t> label_images() const { return {}; }
};

// Names the classes that occur in no image, by LabelledImages::label_images(); "" where all do.
// `num_classes` 0: those up to the greatest label.
std::string missing_classes(std::span<const std::uint64_t> label_images, std::int64_t num_classes,
                            std::span<const std::string> class_names);

// `path` is a store of labelled images, or "shapes:key=value,...". `verify` checks the XXH3 of
// every image that is read.
std::unique_ptr<LabelledImages> open_labelled_images(const std::string& path, bool verify);

}  // namespace weft
