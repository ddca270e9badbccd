// Pictures with polygons around their text: from a list, or drawn in memory. Training reads them
// through make_text_source(), an evaluation directly.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/clip_source.h"
#include "data/images/labelled_images.h"
#include "data/text_images/polygon.h"

namespace weft {

struct TextRegion {
  Polygon polygon;      // in pixels of the picture
  bool ignore = false;  // neither text nor background: illegible, or too small to be found
};

struct TextImage {
  ImageSize size;
  std::vector<std::uint8_t> rgb;  // [height, width, 3]
  std::vector<TextRegion> regions;
};

// Safe from several threads at once.
class TextImages {
 public:
  virtual ~TextImages() = default;
  virtual std::int64_t count() const = 0;
  virtual ImageSize size(std::int64_t i) const = 0;
  // A path as the list has it, or how the picture was drawn.
  virtual std::string name(std::int64_t i) const = 0;
  // Distinguishes it from what was called so before: the file's size and time, and its regions.
  virtual std::string identity(std::int64_t i) const { return {}; }
  virtual std::string content_id() const = 0;  // as ClipSource's
  // Throws Exit::data, naming list and picture, when it cannot be read.
  virtual void read(std::int64_t i, TextImage& out) const = 0;
};

// `path` is "text:key=value,..." drawn in memory (drawn/drawn_text.h), or pictures with their
// polygons (text_list.h): a .jsonl list, or, in ICDAR 2015's form, a .txt list or a folder.
std::unique_ptr<TextImages> open_text_images(const std::string& path, const MediaDeck& limits);
// Whether `path` has one of these forms: a file need not exist, and a folder has a picture.
bool is_text_list(const std::string& path);

// Number and sizes of the pictures, their regions and heights of text, for `weft inspect`. Reads
// the first 100 pictures.
std::string describe_text_images(const TextImages& images, const std::string& path);

// The picture with its regions outlined: green, or red where they are ignored. u8 [height, width,
// 3].
std::vector<std::uint8_t> with_outlines(const TextImage& image);

// Bits of a pixel's flags.
inline constexpr std::uint8_t text_bit = 1;       // within a shrunk polygon
inline constexpr std::uint8_t counts_bit = 2;     // for the loss of the probability
inline constexpr std::uint8_t threshold_bit = 4;  // for the loss of the threshold: near a polygon
// A pixel's threshold q in 0..255 stands for 0.3 + 0.4 q / 255.
inline constexpr float least_threshold = 0.3f, threshold_span = 0.4f;

// Pictures with text as a ClipSource, for the training of a text detector.
// One bucket, "text-SIDE": 1 frame of data.crop x data.crop pixels, 3 channels, u8, label_rate 1,
// label_bytes 2. A sample is the pixels u8 [H,W,3], then flags u8 [H,W], then thresholds u8 [H,W]
// (write_text_targets), of the picture as change_text makes it (text_view.h), or with data.augment
// = false fit_text. read() gives that of fit_text.
//
// Steps walk through the pictures in epochs, each shuffled with Philox(seed, sample_order, epoch);
// a micro-batch may hold the last pictures of an epoch and the first of the next. What happens to
// a picture follows from (seed, epoch, picture).
//
// Throws Exit::usage for a data.crop that is no multiple of 32.
std::unique_ptr<ClipSource> make_text_source(std::unique_ptr<TextImages> images,
                                             const DataDeck& data);

}  // namespace weft
