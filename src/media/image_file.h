// Still pictures and label maps from files, as Pillow reads them: the bytes that a network was
// trained on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "config/deck.h"
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

}  // namespace weft
