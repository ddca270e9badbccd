// Words as outlines and outlines as pixels, by FreeType.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/text_images/polygon.h"

namespace weft {

struct FontFile {
  std::string path;
  int face = 0;                          // of a collection
  std::span<const unsigned char> bytes;  // of a font within the program; else empty
};

// Six faces of DejaVu, in the program (fonts.cpp): Latin, Greek and Cyrillic letters.
std::vector<FontFile> built_in_fonts();
// Scalable fonts with Latin letters and digits in `folder` and below, by path. Throws Exit::usage,
// saying what to do, where there is none.
std::vector<FontFile> find_fonts(const std::string& folder);

// Closed curves around ink; x to the right, y down, in pixels.
struct Outline {
  std::vector<Point> points;
  std::vector<char> tags;          // of FreeType: which points lie on the curve
  std::vector<std::int16_t> ends;  // last point of each curve
  Point low, high;                 // the ink's corners
  double advance = 0;              // where the next letter begins
  bool empty() const { return points.empty(); }
};

// How much of each pixel is ink, 0 to 255: [height, width] from column `left` and row `top` on.
struct Coverage {
  int left = 0, top = 0, height = 0, width = 0;
  std::vector<std::uint8_t> values;
};

// One thread uses it at a time.
class Typesetter {
 public:
  explicit Typesetter(const std::vector<FontFile>& fonts);
  ~Typesetter();
  // Height of a capital letter in a font of size 1.
  double capital(std::size_t font);
  bool has(std::size_t font, char32_t letter);
  // The baseline is at y = 0, and the first letter begins at x = 0. `spacing` pixels are added
  // between letters.
  Outline set(std::size_t font, const std::u32string& text, double size, double spacing);
  Coverage fill(const Outline& outline);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
