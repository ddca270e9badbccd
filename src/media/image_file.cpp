// libpng and libjpeg report errors by longjmp: between setjmp and the calls that may fail there are
// no objects with destructors, and errors are thrown after the return.
#include "media/image_file.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <string_view>

#include <jpeglib.h>
#include <png.h>

#include <jerror.h>
#include <cstdint>

#include "core/error.h"
#include "core/file.h"
#include "media/video_reader.h"

namespace weft {
namespace {

constexpr const char* general_hint = "leave it out, or convert it";

struct Fault {
  char text[256] = "";
  void set(const char* why) { std::snprintf(text, sizeof text, "%s", why); }
};

void check_size(std::int64_t height, std::int64_t width, const std::string& name,
                const MediaDeck& limits) {
  WEFT_CHECK(height > 0 && width > 0 && height <= 65535 && width <= 65535 &&
                 height * width <= std::llround(limits.max_megapixels * 1e6),
             Exit::data, "leave it out, make it smaller, or raise media.max_megapixels",
             "image {} has {}x{} pixels, media.max_megapixels = {}", name, height, width,
             limits.max_megapixels);
}

[[noreturn]] void fail(const std::string& name, const Fault& fault) {
  throw Error(Exit::data, fmt::format("cannot read image {}: {}", name, fault.text),
              "it may be truncated: copy it again, leave it out, or convert it", __FILE__,
              __LINE__);
}

// A PNG being read from memory. Each step is a function of its own, whose frame longjmp may leave.
class Png {
 public:
  explicit Png(std::span<const std::byte> bytes) : bytes_(bytes) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, &fault_, on_error, on_warning);
    WEFT_ASSERT(png_ != nullptr);
    info_ = png_create_info_struct(png_);
    WEFT_ASSERT(info_ != nullptr);
    png_set_read_fn(png_, this, on_read);
  }
  ~Png() { png_destroy_read_struct(&png_, &info_, nullptr); }
  Png(const Png&) = delete;
  Png& operator=(const Png&) = delete;

  const Fault& fault() const { return fault_; }
  std::int64_t height() const { return png_get_image_height(png_, info_); }
  std::int64_t width() const { return png_get_image_width(png_, info_); }
  int bits() const { return png_get_bit_depth(png_, info_); }
  int kind() const { return png_get_color_type(png_, info_); }

  bool read_header() {
    if (setjmp(png_jmpbuf(png_))) return false;
    png_read_info(png_, info_);
    return true;
  }
  // To rows of 8-bit RGB, or of 8-bit values as they are stored.
  bool prepare(bool rgb) {
    if (setjmp(png_jmpbuf(png_))) return false;
    if (rgb) {
      if (kind() == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png_);
      if ((kind() & PNG_COLOR_MASK_COLOR) == 0) {
        if (bits() < 8) png_set_expand_gray_1_2_4_to_8(png_);
        png_set_gray_to_rgb(png_);
      }
      png_set_strip_16(png_);
      png_set_strip_alpha(png_);
    } else {
      png_set_packing(png_);
    }
    png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    return true;
  }
  // RGB of each index; empty without a palette.
  std::vector<std::uint8_t> palette() const {
    png_colorp colours = nullptr;
    int count = 0;
    std::vector<std::uint8_t> rgb;
    if (png_get_PLTE(png_, info_, &colours, &count) == 0) return rgb;
    for (int i = 0; i < count; ++i)
      rgb.insert(rgb.end(), {colours[i].red, colours[i].green, colours[i].blue});
    return rgb;
  }
  std::size_t row_bytes() const { return png_get_rowbytes(png_, info_); }
  bool read_rows(png_bytep* rows) {
    if (setjmp(png_jmpbuf(png_))) return false;
    png_read_image(png_, rows);
    png_read_end(png_, nullptr);
    return true;
  }

 private:
  static void on_error(png_structp png, png_const_charp why) {
    static_cast<Fault*>(png_get_error_ptr(png))->set(why);
    png_longjmp(png, 1);
  }
  static void on_warning(png_structp, png_const_charp) {}
  static void on_read(png_structp png, png_bytep out, std::size_t wanted) {
    auto& self = *static_cast<Png*>(png_get_io_ptr(png));
    if (wanted > self.bytes_.size()) png_error(png, "it ends too early");
    std::memcpy(out, self.bytes_.data(), wanted);
    self.bytes_ = self.bytes_.subspan(wanted);
  }

  std::span<const std::byte> bytes_;
  Fault fault_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
};

ImageFile decode_png(std::span<const std::byte> bytes, const std::string& name,
                     const MediaDeck& limits, bool rgb) {
  Png png(bytes);
  if (!png.read_header()) fail(name, png.fault());
  ImageFile image;
  image.height = png.height();
  image.width = png.width();
  check_size(image.height, image.width, name, limits);
  if (rgb) {
    // Pillow cuts these values off at 255 instead of scaling them.
    WEFT_CHECK(png.bits() < 16 || (png.kind() & PNG_COLOR_MASK_COLOR) != 0, Exit::data,
               "convert it to 8 bits", "image {} is grey with 16 bits, which is not read", name);
  } else {
    WEFT_CHECK(png.kind() == PNG_COLOR_TYPE_PALETTE ||
                   (png.kind() == PNG_COLOR_TYPE_GRAY && png.bits() == 8),
               Exit::data, "labels are PNGs of 8-bit grey, or with a palette",
               "labels {} are {} with {} bits", name,
               (png.kind() & PNG_COLOR_MASK_COLOR) != 0   ? "in colour"
               : (png.kind() & PNG_COLOR_MASK_ALPHA) != 0 ? "grey with alpha"
                                                          : "grey",
               png.bits());
  }
  if (!rgb) image.palette = png.palette();
  if (!png.prepare(rgb)) fail(name, png.fault());
  const auto row = static_cast<std::size_t>(image.width) * (rgb ? 3 : 1);
  WEFT_ASSERT(png.row_bytes() == row);
  image.values.resize(row * static_cast<std::size_t>(image.height));
  std::vector<png_bytep> rows;
  for (std::size_t y = 0; y < static_cast<std::size_t>(image.height); ++y)
    rows.push_back(image.values.data() + y * row);
  if (!png.read_rows(rows.data())) fail(name, png.fault());
  return image;
}

// A JPEG likewise. After most warnings the decoder makes pixels up: these are errors.
class Jpeg {
 public:
  explicit Jpeg(std::span<const std::byte> bytes) : bytes_(bytes) {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = on_error;
    errors_.base.emit_message = on_message;
    progress_.progress_monitor = on_progress;
  }
  ~Jpeg() { jpeg_destroy_decompress(&info_); }
  Jpeg(const Jpeg&) = delete;
  Jpeg& operator=(const Jpeg&) = delete;

  const Fault& fault() const { return errors_.fault; }
  std::int64_t height() const { return info_.image_height; }
  std::int64_t width() const { return info_.image_width; }
  int components() const { return info_.num_components; }

  bool read_header() {
    if (setjmp(errors_.jump)) return false;
    jpeg_create_decompress(&info_);
    info_.progress = &progress_;
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(bytes_.data()), bytes_.size());
    jpeg_read_header(&info_, TRUE);
    return true;
  }
  // To rows of RGB, or of CMYK for a picture of four components.
  bool read_rows(std::uint8_t* out) {
    if (setjmp(errors_.jump)) return false;
    info_.out_color_space = components() == 4 ? JCS_CMYK : JCS_RGB;
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      JSAMPROW row = out + std::size_t{info_.output_scanline} * info_.output_width *
                               static_cast<std::size_t>(info_.output_components);
      jpeg_read_scanlines(&info_, &row, 1);
    }
    jpeg_finish_decompress(&info_);
    return true;
  }

 private:
  struct Errors {
    jpeg_error_mgr base{};  // first: libjpeg's pointer to it is one to this
    Fault fault;
    jmp_buf jump;
  };
  [[noreturn]] static void stop(j_common_ptr info) {
    auto& errors = *reinterpret_cast<Errors*>(info->err);
    char text[JMSG_LENGTH_MAX];
    info->err->format_message(info, text);
    const bool bits = info->err->msg_code == JERR_BAD_PRECISION;
    errors.fault.set(bits ? "a JPEG is read with 8 bits a sample, and this one has more" : text);
    longjmp(errors.jump, 1);
  }
  // Bytes that libjpeg has skipped before a marker: between headers whatever they are, after a scan
  // only padding. There others are mostly all that it says of damaged data.
  static bool are_stray(j_decompress_ptr info) {
    if (info->input_scan_number == 0) return true;
    const JOCTET* end = info->src->next_input_byte;
    return std::all_of(end - info->err->msg_parm.i[0], end,
                       [](JOCTET byte) { return byte == 0 || byte == 0xff; });
  }
  static void on_error(j_common_ptr info) { stop(info); }
  static void on_message(j_common_ptr info, int level) {
    // Warnings about headers that some cameras write otherwise: the pictures are whole.
    constexpr std::array harmless = {JWRN_NOT_SEQUENTIAL, JWRN_BOGUS_PROGRESSION, JWRN_ADOBE_XFORM,
                                     JWRN_JFIF_MAJOR};
    const int code = info->err->msg_code;
    if (level < 0 && std::ranges::find(harmless, code) == harmless.end() &&
        !(code == JWRN_EXTRANEOUS_DATA && are_stray(reinterpret_cast<j_decompress_ptr>(info))))
      stop(info);
  }
  // A small file may have very many scans, each of which takes the time of a whole picture.
  static void on_progress(j_common_ptr info) {
    constexpr int most_scans = 500;
    auto& errors = *reinterpret_cast<Errors*>(info->err);
    if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= most_scans) return;
    errors.fault.set("it has more than 500 scans");
    longjmp(errors.jump, 1);
  }

  std::span<const std::byte> bytes_;
  Errors errors_;
  jpeg_progress_mgr progress_{};
  jpeg_decompress_struct info_{};
};

// As Pillow: inks as Adobe stores them, 255 for none, whoever wrote the file; each colour is
// multiplied by what black lets through.
void cmyk_to_rgb(std::vector<std::uint8_t>& values) {
  const std::size_t pixels = values.size() / 4;
  for (std::size_t i = 0; i < pixels; ++i) {
    const int black = values[4 * i + 3];
    for (std::size_t c = 0; c < 3; ++c) {
      const int product = (255 - values[4 * i + c]) * black + 128;
      const int kept = black - (((product >> 8) + product) >> 8);
      values[3 * i + c] = static_cast<std::uint8_t>(std::clamp(kept, 0, 255));
    }
  }
  values.resize(3 * pixels);
}

ImageFile decode_jpeg(std::span<const std::byte> bytes, const std::string& name,
                      const MediaDeck& limits) {
  Jpeg jpeg(bytes);
  if (!jpeg.read_header()) fail(name, jpeg.fault());
  ImageFile image;
  image.height = jpeg.height();
  image.width = jpeg.width();
  check_size(image.height, image.width, name, limits);
  const int components = jpeg.components();
  WEFT_CHECK(components == 1 || components == 3 || components == 4, Exit::data, general_hint,
             "image {} is a JPEG of {} components, which is not read", name, components);
  const std::int64_t pixels = image.height * image.width;
  image.values.resize(pixels * std::max(components, 3));
  if (!jpeg.read_rows(image.values.data())) fail(name, jpeg.fault());
  if (components == 4) cmyk_to_rgb(image.values);
  return image;
}

std::string_view begin_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), std::min<std::size_t>(bytes.size(), 16)};
}
bool is_png(std::span<const std::byte> bytes) {
  return begin_of(bytes).starts_with("\x89PNG\r\n\x1a\n");
}
bool is_jpeg(std::span<const std::byte> bytes) {
  return begin_of(bytes).starts_with("\xff\xd8\xff");
}

ImageFile set_upright(ImageFile stored, std::span<const std::byte> bytes, const MediaDeck& limits) {
  const int orientation = limits.orientation == "upright" ? exif_orientation(bytes) : 1;
  if (orientation == 1) return stored;
  const UprightWalk walk = upright_walk(orientation, stored.height, stored.width, stored.width * 3);
  ImageFile out{stored.height, stored.width, {}};
  if (is_sideways(orientation)) std::swap(out.height, out.width);
  out.values.reserve(stored.values.size());
  for (std::int64_t y = 0; y < out.height; ++y)
    for (std::int64_t x = 0; x < out.width; ++x) {
      const auto pixel = stored.values.begin() + walk.first + y * walk.down + x * walk.along;
      out.values.insert(out.values.end(), pixel, pixel + 3);
    }
  return out;
}

}  // namespace

void check_file_size(std::uint64_t bytes, const std::string& name, const MediaDeck& limits) {
  const double most = 8e6 * limits.max_megapixels + (64 << 20);
  WEFT_CHECK(static_cast<double>(bytes) <= most, Exit::data,
             "leave it out, or raise media.max_megapixels",
             "picture {} has {} MiB, and one of media.max_megapixels = {} needs less", name,
             bytes >> 20, limits.max_megapixels);
}

ImageFile decode_image(std::span<const std::byte> bytes, const std::string& name,
                       const MediaDeck& limits) {
  WEFT_CHECK(is_png(bytes) || is_jpeg(bytes), Exit::data, "convert it to JPEG or PNG",
             "image {} is neither a JPEG nor a PNG", name);
  return set_upright(
      is_png(bytes) ? decode_png(bytes, name, limits, true) : decode_jpeg(bytes, name, limits),
      bytes, limits);
}

ImageFile read_image_file(const MediaSource& source, const MediaDeck& limits) {
  const std::string name = source.name();
  const File file = File::open(source.path, Exit::data);
  const std::uint64_t size = source.member.empty() ? file.size() : source.bytes;
  std::vector<std::byte> bytes(std::min<std::uint64_t>(size, 512));
  file.read(bytes, source.begin);
  if (is_png(bytes) || is_jpeg(bytes)) {
    check_file_size(size, name, limits);
    bytes.resize(size);
    file.read(bytes, source.begin);
    return decode_image(bytes, name, limits);
  }
  const FileKind other = unreadable_kind(bytes);
  WEFT_CHECK(other.what == nullptr, Exit::data, other.hint, "image {} is {}", name, other.what);
  VideoReaderOptions options;
  options.access.limits = limits;
  VideoReader reader(source, options);
  WEFT_CHECK(reader.is_image(), Exit::data, "name a JPEG, PNG, BMP, TIFF or WebP",
             "image {} is a video, not a picture", name);
  const VideoFrame* frame = reader.next();
  WEFT_CHECK(frame != nullptr && reader.damaged() == 0, Exit::data, general_hint,
             "image {} is damaged", name);
  ImageFile image;
  image.height = frame->height;
  image.width = frame->width;
  for (std::int64_t y = 0; y < image.height; ++y)
    image.values.insert(image.values.end(), frame->rgb + y * frame->stride,
                        frame->rgb + y * frame->stride + image.width * 3);
  return image;
}

ImageFile read_image_file(const std::string& path, const MediaDeck& limits) {
  return read_image_file(MediaSource{path, MediaTrust::untrusted}, limits);
}

ImageFile decode_labels(std::span<const std::byte> bytes, const std::string& name,
                        const MediaDeck& limits) {
  WEFT_CHECK(is_png(bytes), Exit::data, "labels are PNGs of 8-bit grey, or with a palette",
             "label map {} is not a PNG", name);
  return decode_png(bytes, name, limits, false);
}

ImageFile read_label_file(const std::string& path, const MediaDeck& limits) {
  const File file = File::open(path, Exit::data);
  check_file_size(file.size(), path, limits);
  std::vector<std::byte> bytes(file.size());
  file.read(bytes, 0);
  return decode_labels(bytes, path, limits);
}

namespace {

using Bytes = std::span<const std::byte>;

std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
Bytes rest_of(Bytes bytes, std::uint64_t at) {
  return bytes.subspan(std::min<std::uint64_t>(at, bytes.size()));
}

// A whole number of `count` bytes; 0 where the bytes end before.
std::uint32_t number_at(Bytes bytes, std::uint64_t at, int count, bool little) {
  if (at + static_cast<std::uint64_t>(count) > bytes.size()) return 0;
  std::uint32_t value = 0;
  for (int i = 0; i < count; ++i) {
    const auto place = at + static_cast<std::uint64_t>(little ? count - 1 - i : i);
    value = value << 8 | std::to_integer<std::uint32_t>(bytes[place]);
  }
  return value;
}

// A whole number in the first directory of a TIFF file, the form of which a block of EXIF has too;
// 0 where there is none.
std::uint32_t tiff_value(Bytes tiff, std::uint32_t tag) {
  constexpr std::string_view prefix("Exif\0\0", 6);
  if (text_of(tiff).starts_with(prefix)) tiff = tiff.subspan(prefix.size());
  const bool little = text_of(tiff).starts_with("II");
  if (!little && !text_of(tiff).starts_with("MM")) return 0;
  const std::uint64_t directory = number_at(tiff, 4, 4, little);
  const std::uint32_t entries = number_at(tiff, directory, 2, little);
  for (std::uint32_t i = 0; i < entries; ++i) {
    const std::uint64_t at = directory + 2 + 12 * std::uint64_t{i};
    if (number_at(tiff, at, 2, little) != tag) continue;
    constexpr std::uint32_t is_short = 3;
    return number_at(tiff, at + 8, number_at(tiff, at + 2, 2, little) == is_short ? 2 : 4, little);
  }
  return 0;
}

Bytes exif_of_jpeg(Bytes file) {
  constexpr std::uint32_t app1 = 0xe1, scan = 0xda, end = 0xd9;
  for (std::uint64_t at = 2; at + 4 <= file.size();) {
    if (number_at(file, at, 1, false) != 0xff) return {};
    const std::uint32_t marker = number_at(file, at + 1, 1, false);
    if (marker == 0xff) {  // a byte that fills up
      ++at;
      continue;
    }
    if (marker == scan || marker == end) return {};
    const std::uint32_t length = number_at(file, at + 2, 2, false);
    const Bytes body =
        rest_of(file, at + 4)
            .first(std::min<std::uint64_t>(length < 2 ? 0 : length - 2, file.size() - at - 4));
    if (marker == app1 && text_of(body).starts_with("Exif")) return body;
    at += 2 + std::uint64_t{length};
  }
  return {};
}

// The first chunk of that name: its length and name in front of it, `behind` bytes behind it.
Bytes chunk(Bytes file, std::uint64_t at, std::string_view name, bool riff) {
  while (at + 8 <= file.size()) {
    const std::uint64_t length = number_at(file, riff ? at + 4 : at, 4, riff);
    const Bytes body =
        rest_of(file, at + 8).first(std::min<std::uint64_t>(length, file.size() - at - 8));
    if (text_of(rest_of(file, riff ? at : at + 4)).starts_with(name)) return body;
    at += 8 + length + (riff ? length % 2 : 4);  // padding, or a checksum
  }
  return {};
}

}  // namespace

int exif_orientation(Bytes file) {
  constexpr std::uint32_t tag = 274;
  const std::string_view begin = text_of(file.first(std::min<std::size_t>(file.size(), 4)));
  const std::uint32_t value =
      tiff_value(begin.starts_with("\xff\xd8")  ? exif_of_jpeg(file)
                 : begin.starts_with("\x89PNG") ? chunk(file, 8, "eXIf", false)
                 : begin.starts_with("RIFF")    ? chunk(file, 12, "EXIF", true)
                                                : file,
                 tag);
  return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
}

bool is_misread_tiff(Bytes file) {
  constexpr std::uint32_t compression = 259, photometric = 262, range = 532;
  constexpr std::uint32_t old_jpeg = 6, jpeg = 7, ycbcr = 6;
  const std::uint32_t how = tiff_value(file, compression);
  return how == old_jpeg || how == jpeg ||
         (tiff_value(file, photometric) == ycbcr && tiff_value(file, range) == 0);
}

UprightWalk upright_walk(int orientation, std::int64_t height, std::int64_t width,
                         std::int64_t stride) {
  const std::int64_t bottom = (height - 1) * stride, right = (width - 1) * 3;
  const std::array<UprightWalk, 8> walks = {{{0, 3, stride},
                                             {right, -3, stride},
                                             {bottom + right, -3, -stride},
                                             {bottom, 3, -stride},
                                             {0, stride, 3},
                                             {bottom, -stride, 3},
                                             {bottom + right, -stride, -3},
                                             {right, stride, -3}}};
  return walks.at(static_cast<std::size_t>(orientation - 1));
}

}  // namespace weft
