#include "jobs/animate/prepared.h"

#include <algorithm>
#include <cmath>

#include "checkpoint/safetensors.h"
#include "core/error.h"

namespace weft {

std::array<std::int64_t, 2> frame_size(const PreparedClip& clip, const SadtalkerDeck& deck) {
  // As the original computes it: in double, cut off.
  const double height = static_cast<double>(deck.size) * static_cast<double>(clip.frame_height) /
                        static_cast<double>(clip.frame_width);
  return {std::max<std::int64_t>(1, static_cast<std::int64_t>(height)), deck.size};
}

void write_prepared(const PreparedClip& clip, const std::filesystem::path& file) {
  const std::vector<std::int64_t> numbers = {clip.place.x1, clip.place.y1,     clip.place.x2,
                                             clip.place.y2, clip.frame_height, clip.frame_width};
  const SafetensorWrite tensors[] = {
      {"crop",
       DType::u8,
       {clip.crop.height, clip.crop.width, 3},
       std::as_bytes(std::span(clip.crop.values))},
      {"motion",
       DType::f32,
       {clip.frames(), motion_coefficients},
       std::as_bytes(std::span(clip.motion))},
      {"place", DType::i64, {std::ssize(numbers)}, std::as_bytes(std::span(numbers))},
      {"source", DType::f32, {std::ssize(clip.source)}, std::as_bytes(std::span(clip.source))}};
  write_safetensors(file, tensors);
}

PreparedClip read_prepared(const std::filesystem::path& path) {
  const auto file = SafetensorsFile::open(path);
  PreparedClip clip;
  const SafetensorEntry& crop = file.at("crop");
  const auto place = file.read_i64(file.at("place"));
  const auto source = file.read_f32(file.at("source"));
  clip.motion = file.read_f32(file.at("motion"));
  WEFT_CHECK(crop.dtype == DType::u8 && crop.shape.size() == 3 && crop.shape[2] == 3 &&
                 place.size() == 6 && source.size() == clip.source.size() &&
                 std::ssize(clip.motion) % motion_coefficients == 0,
             Exit::data, "remove it and start again", "{} is no preparation of a clip",
             path.string());
  clip.crop = {crop.shape[0], crop.shape[1],
               std::vector<std::uint8_t>(static_cast<std::size_t>(crop.end - crop.begin))};
  file.read(crop, std::as_writable_bytes(std::span(clip.crop.values)));
  std::ranges::copy(source, clip.source.begin());
  clip.place = {place[0], place[1], place[2], place[3]};
  clip.frame_height = place[4];
  clip.frame_width = place[5];
  return clip;
}

}  // namespace weft
