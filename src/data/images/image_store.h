// The store of labelled images: one HDF5 file, made by `weft ingest`, readable with h5ls, h5dump
// and h5py. Image i has height[i] x width[i] pixels; its bytes follow those of image i - 1.
//
//   /                        attributes format = "weft images", schema_version = 3; num_classes, 0
//                            where it is not known; tables_xxh3: XXH3-64 (seed 0) of all that
//                            stands below but pixels and labels
//   /images/pixels           u8: RGB, [height, width, 3] of each image, decoded
//   /images/labels           u8: [height, width] of each image: 0 is unlabelled, v is class v - 1
//   /images/height, width    u32 [N]
//   /images/xxh3             u64 [N]: XXH3-64 (seed 0) of the image's pixels
//   /images/labels_xxh3      u64 [N]: of its labels
//   /images/sources          u8: the images' paths as ingested, one behind the other, UTF-8;
//   /images/sources_end      u64 [N]: where each of them ends
//   /images/class_names      u8: the names of the classes likewise; class_names_end u64
//                            [num_classes], or [0] where there are none
//   /images/palette          u8 [3 * labels]: the colour of each label, as the label files have it;
//                            [0] where they have none
//   /images/label_images     u64 [256]: in how many images each label occurs
//   /images/label_pixels     u64 [256]: how many pixels have each label
//   /images/label_image_pixels
//                            u64 [256]: how many labelled pixels the images have in which it occurs
// Stores of version 1 have none of the last four, those of version 2 not the last two.
//
// All of them are contiguous, so that images are read with pread, past HDF5 and its lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/images/labelled_images.h"
#include "data/store_file.h"

namespace weft {

inline constexpr const char* image_store_format = "weft images";  // the attribute
inline constexpr std::int64_t image_store_version = 3;

// Opens and checks everything but the images' bytes; takes memory for the tables, some dozens of
// bytes and a path for each image. Throws Exit::data with one message that names file and fault.
std::unique_ptr<LabelledImages> open_image_store(const std::string& path, bool verify);
// The same of an open file, which holds images.
std::unique_ptr<LabelledImages> make_image_store(StoreFile file, bool verify);

// Sizes, bytes and the classes' shares of pixels as text, for `weft inspect`. Reads the whole file:
// throws Exit::data, naming the image, when a hash is wrong.
std::string describe_image_store(StoreFile file);

// Writes a store to PATH.tmp; commit() renames it to PATH. Without commit nothing is left behind.
// Sizes and names of all images are known before the first is appended. Throws Exit::data when the
// disk is full or the directory is not writable.
class ImageStoreWriter {
 public:
  struct Entry {
    ImageSize size;
    std::string source;
  };
  ImageStoreWriter(const std::string& path, std::vector<Entry> entries, std::int64_t num_classes,
                   std::vector<std::string> class_names, std::vector<std::uint8_t> palette = {});
  ~ImageStoreWriter();

  // The next image: its pixels and labels.
  void append(std::span<const std::uint8_t> rgb, std::span<const std::uint8_t> labels);
  // The counts of the images so far.
  const LabelCounts& label_counts() const;
  // After the last: writes the tables, closes, fsyncs, renames.
  void commit();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft
