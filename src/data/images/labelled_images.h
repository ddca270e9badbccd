// Images of any size with a class for each pixel: a store (image_store.h), or drawn in memory
// ("shapes:"). Training reads them through an ImageSource, an evaluation directly. Sides are in
// pixels throughout.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/step_plan.h"

namespace weft {

struct ImageSize {
  std::int64_t height = 0, width = 0;
  bool operator==(const ImageSize&) const = default;
};

// Portraits and landscapes are batched apart: 1 of a portrait, else 0.
constexpr std::size_t orientation_of(ImageSize size) { return size.height > size.width ? 1 : 0; }

// n rounded up to a multiple of `multiple`.
constexpr std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The image scaled, in double, by min(short_side / its shorter side, max_side / its longer one);
// sides are cut to whole pixels, 1 at least.
ImageSize training_size(ImageSize image, std::int64_t short_side, std::int64_t max_side);

// The size of a micro-batch: the greatest height and width of its views, rounded up to multiples of
// `padding`.
ImageSize micro_batch_size(std::span<const ImageView> views, std::int64_t padding);

// An evaluation stretches the image to training_size with both sides rounded up to multiples of
// `padding`, and pads nothing.
ImageSize evaluation_size(ImageSize image, std::int64_t short_side, std::int64_t max_side,
                          std::int64_t padding);

struct LabelledImage {
  ImageSize size;
  std::vector<std::uint8_t> rgb;     // [height, width, 3]
  std::vector<std::uint8_t> labels;  // [height, width]: 0 is unlabelled, v is class v - 1
};

// Counts for each label of a store, [256] each; empty: not known.
struct LabelCounts {
  std::vector<std::uint64_t> images;            // in how many images it occurs
  std::vector<std::uint64_t> pixels;            // how many pixels have it
  std::vector<std::uint64_t> pixels_of_images;  // how many labelled pixels these images have
  std::uint64_t blank = 0;  // images without a labelled pixel; not known of a store that is read
  // The labels of the next image.
  void add(std::span<const std::uint8_t> labels);
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
  virtual LabelCounts label_counts() const { return {}; }
};

// Names the classes that occur in no image, by LabelCounts::images; "" where all do.
// `num_classes` 0: those up to the greatest label.
std::string missing_classes(std::span<const std::uint64_t> label_images, std::int64_t num_classes,
                            std::span<const std::string> class_names);

// Labels are numbers, and only names say what they stand for. Exit::data, naming the first class
// that differs, where `data` calls its classes otherwise than the data that `model` was trained on.
// Names a line each; "": not known, and nothing is compared.
void check_class_names(const std::string& trained, const std::string& model,
                       const std::string& names, const std::string& data);

// `path` is a store of labelled images, or "shapes:key=value,...". `verify` checks the XXH3 of
// every image that is read.
std::unique_ptr<LabelledImages> open_labelled_images(const std::string& path, bool verify);

// Labelled pictures drawn in memory: shapes over a textured ground. For tests, benchmarks and a
// first run without data. `path` is "shapes:key=value,..." (spaces and line ends do not count):
//   images=400               how many
//   classes=6                2 to 8: ground, disc, square, triangle, ring, stripes, cross, checks
//   height=96..160           of each picture: drawn from this range, or one number
//   width=96..160
//   hues=0                   1: each class in shades of a colour of its own, which is learnt fast
//   seed=1                   another seed, other pictures: training and held-out ones differ by it
// Without hues every class occurs in every colour, so that only shape and texture tell them apart;
// a network learns that slowly. Pictures have noise, and shapes overlap; a margin of a few pixels
// at some sides is unlabelled. Everything about picture i follows from (seed, i). Throws
// Exit::usage on an unknown key (naming the nearest) or a value out of range.
inline constexpr const char* shapes_prefix = "shapes:";
inline bool is_shapes(const std::string& path) { return path.starts_with(shapes_prefix); }
std::unique_ptr<LabelledImages> make_shapes(const std::string& path);

}  // namespace weft
