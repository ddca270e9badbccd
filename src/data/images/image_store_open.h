// What HDF5 reports about a store of labelled images; for the stores' own files only.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "core/hash.h"
#include "data/clip_store_open.h"

namespace weft {

// The datasets of /images, each contiguous and of one dimension (image_store.h), and the bytes of
// an element.
struct ImageArray {
  const char* name;
  std::uint64_t element;
};
enum ImageArrayNumber {
  image_pixels,
  image_labels,
  image_height,
  image_width,
  image_xxh3,
  image_labels_xxh3,
  image_sources,
  image_sources_end,
  image_class_names,
  image_class_names_end,
  image_palette,
  image_label_images,
};
inline constexpr std::array<ImageArray, 12> image_arrays = {{{"pixels", 1},
                                                             {"labels", 1},
                                                             {"height", 4},
                                                             {"width", 4},
                                                             {"xxh3", 8},
                                                             {"labels_xxh3", 8},
                                                             {"sources", 1},
                                                             {"sources_end", 8},
                                                             {"class_names", 1},
                                                             {"class_names_end", 8},
                                                             {"palette", 1},
                                                             {"label_images", 8}}};
// Stores of version 1 end with the classes' names.
inline constexpr std::size_t image_arrays_v1 = 10;
inline constexpr const char* image_store_format = "weft images";
inline constexpr std::int64_t image_store_version = 2;

// Adds a table to tables_xxh3: its size in bytes, and its bytes.
void add_table(ClipHash& hash, std::span<const std::byte> bytes);

// The places of these datasets, checked to lie inside the file; what is in them is for the reader
// to check. Nothing if the file's attribute `format` is not that of an image store, or the file
// cannot be opened. As open_checked() otherwise.
std::optional<StoreFacts> open_images_checked(const std::string& path, std::uint64_t bytes,
                                              const std::function<void()>& alive);

}  // namespace weft
