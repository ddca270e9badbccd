#include "data/text_images/text_images.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"
#include "data/text_images/drawn/drawn_text.h"
#include "data/text_images/outlines.h"
#include "data/text_images/picture_files.h"
#include "data/text_images/text_list.h"
#include "media/image_file.h"

namespace weft {
namespace {

class TextList : public TextImages {
 public:
  TextList(const std::string& path, const MediaDeck& limits)
      : path_(path), limits_(limits), entries_(read_text_list(path, limits)) {}

  std::int64_t count() const override { return std::ssize(entries_); }
  std::string name(std::int64_t i) const override { return entry(i).name; }
  ImageSize size(std::int64_t i) const override {
    const ImageFile file = decode(i);
    return {file.height, file.width};
  }
  std::string identity(std::int64_t i) const override {
    return file_identity(entry(i).path) + limits_.orientation + regions_text(entry(i));
  }
  // Pictures are not opened. Their folders' names change with the place.
  std::string content_id() const override {
    Hasher hash;
    for (const TextListEntry& e : entries_) {
      const std::string text =
          std::filesystem::path(e.name).filename().string() + regions_text(e) + "\n";
      hash.add(std::as_bytes(std::span(text)));
    }
    return to_hex(hash.value());
  }
  void read(std::int64_t i, TextImage& out) const override {
    ImageFile file = decode(i);
    out.size = {file.height, file.width};
    out.rgb = std::move(file.values);
    out.regions = entry(i).regions;
  }

 private:
  static std::string regions_text(const TextListEntry& entry) {
    std::string text;
    for (const TextRegion& r : entry.regions) {
      text += r.ignore ? "\nignored" : "\n";
      for (const Point& p : r.polygon) text += fmt::format(" {} {}", p.x, p.y);
    }
    return text;
  }
  const TextListEntry& entry(std::int64_t i) const {
    return entries_.at(static_cast<std::size_t>(i));
  }
  ImageFile decode(std::int64_t i) const {
    try {
      return read_image_file(entry(i).path, limits_);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{} (picture {} of {})", e.what(), i + 1, path_), e.hint(),
                  e.file(), e.line());
    }
  }

  std::string path_;
  MediaDeck limits_;
  std::vector<TextListEntry> entries_;
};

}  // namespace

std::unique_ptr<TextImages> open_text_images(const std::string& path, const MediaDeck& limits) {
  if (is_drawn_text(path)) return make_drawn_text(path, limits);
  return std::make_unique<TextList>(path, limits);
}

bool is_text_list(const std::string& path) {
  return is_drawn_text(path) || path.ends_with(".jsonl") || path.ends_with(".txt") ||
         has_pictures(path);
}

std::string describe_text_images(const TextImages& images, const std::string& path) {
  const std::int64_t read = std::min<std::int64_t>(100, images.count());
  std::int64_t least_height = INT64_MAX, least_width = INT64_MAX, most_height = 0, most_width = 0;
  std::int64_t regions = 0, ignored = 0, without = 0;
  std::vector<double> heights;  // of regions: the shorter side of the least rectangle
  TextImage image;
  for (std::int64_t i = 0; i < read; ++i) {
    images.read(i, image);
    least_height = std::min(least_height, image.size.height);
    most_height = std::max(most_height, image.size.height);
    least_width = std::min(least_width, image.size.width);
    most_width = std::max(most_width, image.size.width);
    without += image.regions.empty() ? 1 : 0;
    for (const TextRegion& r : image.regions) {
      ++regions;
      ignored += r.ignore ? 1 : 0;
      heights.push_back(min_area_rect(r.polygon).shorter_side);
    }
  }
  std::string out = fmt::format(
      "pictures with text {}\n  {}; of the first {}:\n  {} to {} pixels high, {} to {} "
      "wide\n  {}, {:.1f} a picture, {} of them ignored; {} without any\n",
      printable(path), counted(images.count(), "picture"), read, least_height, most_height,
      least_width, most_width, counted(regions, "region"),
      static_cast<double>(regions) / static_cast<double>(read), ignored,
      counted(without, "picture"));
  if (heights.empty()) return out;
  std::ranges::sort(heights);
  const auto at = [&](double share) {
    return heights[static_cast<std::size_t>(share * static_cast<double>(heights.size() - 1))];
  };
  return out + fmt::format(
                   "  shorter sides of regions in pixels: least {:.1f}, 10 % below {:.1f}, "
                   "median {:.1f}, 90 % below {:.1f}, greatest {:.1f}\n",
                   at(0), at(0.1), at(0.5), at(0.9), at(1));
}

std::vector<std::uint8_t> with_outlines(const TextImage& image) {
  std::vector<std::uint8_t> rgb = image.rgb;
  for (const TextRegion& r : image.regions)
    draw_outline(rgb, image.size, r.polygon, r.ignore ? Rgb{255, 0, 0} : Rgb{0, 255, 0}, 1);
  return rgb;
}

}  // namespace weft
