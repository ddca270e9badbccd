// Pictures with polygons around their text: from a list, or drawn in memory. Training reads them
// through a text source (text_source.h), an evaluation directly.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config/deck.h"
#include "data/images/image_sizes.h"
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
  // Throws Exit::data, naming list and picture, when it cannot be read.
  virtual void read(std::int64_t i, TextImage& out) const = 0;
};

// `path` is a list of pictures (docs/score.md, Training data), or "text:key=value,..." drawn in
// memory (drawn_text.h).
std::unique_ptr<TextImages> open_text_images(const std::string& path, const MediaDeck& limits);
bool is_text_list(const std::string& path);

}  // namespace weft
