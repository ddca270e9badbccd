// Still pictures and label maps from files, as Pillow reads them: the bytes that a network was
// trained on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
#include "core/file_kind.h"
#include "media/media_source.h"

namespace weft {

struct ImageFile {
  std::int64_t height = 0, width = 0;
  std::vector<std::uint8_t> values;     // [height, width, 3] RGB, or [height, width] of labels
  std::vector<std::uint8_t> palette{};  // of labels with one: RGB of each index
};

// Pixels as Pillow's convert("RGB") gives them: grey is repeated, a palette looked up, alpha
// dropped, of 16 bits the high byte taken, CMYK multiplied out. JPEG (libjpeg-turbo with the same
// settings: exact inverse cosine transform, smooth upsampling of colour) and PNG byte for byte;
// other still pictures (BMP, TIFF, WebP, AVIF, PNM ...) through FFmpeg. The first of several
// pictures in one file is read. media.orientation says whether EXIF's rotation is applied. Files
// are not trusted: a size beyond media.max_megapixels, a truncated file, one whose decoder had to
// make pixels up, and kinds that are not read throw Exit::data, naming the file.
ImageFile read_image_file(const std::string& path, const MediaDeck& limits);
// The same of a member of an archive, where `source` is one.
ImageFile read_image_file(const MediaSource& source, const MediaDeck& limits);
// Throws Exit::data for a file of more bytes than a picture of media.max_megapixels has, before
// anyone reads it into memory.
void check_file_size(std::uint64_t bytes, const std::string& name, const MediaDeck& limits);
// As read_image_file, of a PNG or a JPEG in memory; `name` is for messages.
ImageFile decode_image(std::span<const std::byte> bytes, const std::string& name,
                       const MediaDeck& limits);

// Labels of a PNG: values of 8-bit grey, or the indices of a palette. Other kinds (16 bits, colour,
// JPEG, which is not exact) throw Exit::data.
ImageFile read_label_file(const std::string& path, const MediaDeck& limits);
ImageFile decode_labels(std::span<const std::byte> bytes, const std::string& name,
                        const MediaDeck& limits);

// How the picture in a file lies, by its bytes, before anything decodes them.
// How the picture in a file lies, as EXIF numbers it from 1 (upright) to 8: of a JPEG, PNG, WebP or
// TIFF, from its first EXIF block. 1 where the file has none, or one that makes no sense.
int exif_orientation(std::span<const std::byte> file);

// Whether it is a TIFF of which FFmpeg makes a black or a pale picture: one compressed as JPEG, or
// in YCbCr of the full range, which is the default.
bool is_misread_tiff(std::span<const std::byte> file);

// Whether setting it upright swaps height and width.
constexpr bool is_sideways(int orientation) { return orientation >= 5; }

// How to walk over stored pixels so that they come upright: the byte of the first pixel, and the
// steps in bytes along a row of the upright picture and down its columns.
struct UprightWalk {
  std::int64_t first = 0, along = 0, down = 0;
};
// The walk over a picture [height, width, 3] as stored, whose rows begin `stride` bytes apart.
UprightWalk upright_walk(int orientation, std::int64_t height, std::int64_t width,
                         std::int64_t stride);

}  // namespace weft
