#include "jobs/animate/prepare.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/model_source.h"
#include "checkpoint/safetensors.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/json.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "media/audio.h"

namespace weft {
namespace {

// ---- Files ----

void check_there(const std::string& path) {
  WEFT_CHECK(is_there(path, Exit::data), Exit::data,
             "check the path, and the directory weft was started in", "{} is not there", path);
}

void copy_frame(const VideoFrame& f, ImageFile& picture) {
  picture.height = f.height;
  picture.width = f.width;
  const auto row = static_cast<std::size_t>(3 * f.width);
  picture.values.resize(row * static_cast<std::size_t>(f.height));
  for (std::int64_t y = 0; y < f.height; ++y)
    std::memcpy(picture.values.data() + static_cast<std::size_t>(y) * row, f.rgb + y * f.stride,
                row);
}

// Numbers of a JSON list of lists, which all have the same length.
std::vector<float> numbers_of(const nlohmann::json& rows, std::int64_t& width,
                              const std::string& path) {
  std::vector<float> values;
  width = -1;
  for (const auto& row : rows) {
    WEFT_CHECK(row.is_array() && (width < 0 || std::ssize(row) == width), Exit::data,
               "write a list of rows of the same length, [[0.1, 0.2], [0.3, 0.4]]",
               "{}: row {} is not as the others", path,
               width < 0 ? 0 : std::ssize(values) / std::max<std::int64_t>(1, width));
    width = std::ssize(row);
    for (const auto& value : row) {
      WEFT_CHECK(value.is_number(), Exit::data, "write numbers",
                 "{} contains {}, which is not a number", path, dump_json(value).substr(0, 40));
      values.push_back(value.get<float>());
    }
  }
  width = std::max<std::int64_t>(width, 0);
  return values;
}

nlohmann::json json_rows(const std::string& path, const char* member, std::uint64_t most) {
  auto j = try_parse_json(read_whole(path, most, Exit::data, "is it the right file?"));
  if (j.is_object() && j.contains(member)) j = j.at(member);
  WEFT_CHECK(j.is_array(), Exit::data,
             fmt::format("it should hold a list of rows, alone or as the member \"{}\"", member),
             "{} is not a JSON list", path);
  return j;
}

constexpr const char* coefficient_kinds =
    "a safetensors file or JSON with [frames,70], [frames,73] or [frames,257] is read";

struct GivenRows {
  std::int64_t count = 0, width = 0;
  std::vector<float> values;
};

GivenRows rows_of_safetensors(const std::string& path) {
  const auto file = SafetensorsFile::open(path);
  const SafetensorEntry* entry = file.find("coeff_3dmm");
  if (entry == nullptr) {
    WEFT_CHECK(file.entries().size() == 1, Exit::data, "name the tensor coeff_3dmm",
               "{} has {} tensors, none of them coeff_3dmm", path, file.entries().size());
    entry = &file.entries().front();
  }
  WEFT_CHECK(entry->shape.size() == 2, Exit::data, coefficient_kinds,
             "{}: the tensor {} has {} dimensions", path, entry->name, entry->shape.size());
  return {entry->shape[0], entry->shape[1], file.read_f32(*entry)};
}

}  // namespace

ImageFile read_picture(const std::string& path, const MediaDeck& limits) {
  check_there(path);
  if (kind_of_name(path) != MediumKind::video) return read_image_file(path, limits);
  ImageFile picture;
  PictureStream video(path, {limits, {}});
  WEFT_CHECK(video.next(picture), Exit::data, "is it a video?", "{} has no frame", path);
  return picture;
}

PictureStream::PictureStream(const std::string& path, const MediaAccess& access)
    : reader_((check_there(path), MediaSource{path, MediaTrust::untrusted}), {.access = access}) {}

bool PictureStream::next(ImageFile& picture) {
  const VideoFrame* frame = reader_.next();
  if (frame != nullptr) copy_frame(*frame, picture);
  return frame != nullptr;
}

std::vector<float> read_motion(const std::string& path, const MediaDeck& limits) {
  check_there(path);
  const std::string ending = ending_of(path);
  WEFT_CHECK(ending == ".safetensors" || ending == ".json", Exit::data, coefficient_kinds, "{}: {}",
             path,
             ending == ".mat" ? "MATLAB's files of coefficients are not read"
                              : fmt::format("coefficients do not come as \"{}\"", ending));
  GivenRows given;
  if (ending == ".json") {
    const auto most = static_cast<std::uint64_t>(limits.max_list_mib * (1 << 20));
    given.values = numbers_of(json_rows(path, "coeff_3dmm", most), given.width, path);
    given.count = given.width > 0 ? std::ssize(given.values) / given.width : 0;
  } else {
    given = rows_of_safetensors(path);
  }
  const std::int64_t width = given.width;
  WEFT_CHECK(width == 70 || width == 73 || width == 257, Exit::data, coefficient_kinds,
             "{} has {} coefficients a frame", path, width);
  WEFT_CHECK(given.count > 0 && given.count <= limits.max_frames, Exit::data,
             "media.max_frames bounds it", "{} has {} frames", path, given.count);
  WEFT_CHECK(std::ranges::all_of(given.values, [](float v) { return std::isfinite(v); }),
             Exit::data, "create the file again", "{} has a coefficient that is not finite", path);
  std::vector<float> rows;
  for (std::int64_t t = 0; t < given.count; ++t) {
    const auto row = given.values.begin() + t * width;
    if (width < 257) {
      rows.insert(rows.end(), row, row + 70);
      continue;
    }
    rows.insert(rows.end(), row + 80, row + 144);   // expression
    rows.insert(rows.end(), row + 224, row + 227);  // angle
    rows.insert(rows.end(), row + 254, row + 257);  // translation
  }
  return rows;
}

std::vector<float> read_landmarks(const std::string& path) {
  check_there(path);
  constexpr std::uint64_t most = 1 << 20;
  std::vector<float> points;
  if (ending_of(path) == ".json") {
    std::int64_t width = 0;
    points = numbers_of(json_rows(path, "landmarks", most), width, path);
    WEFT_CHECK(width == 2, Exit::data, "write 68 pairs [[x, y], ...]",
               "{} has rows of {} numbers, not of x and y", path, width);
  } else {
    const std::string text = read_whole(path, most, Exit::data, "is it the right file?");
    for (const char *at = text.data(), *end = at + text.size(); at < end;) {
      if (std::strchr(" ,;\t\r\n", *at) != nullptr) {
        ++at;
        continue;
      }
      float value = 0;
      const auto [next, failed] = std::from_chars(at, end, value);
      WEFT_CHECK(failed == std::errc(), Exit::data, "write x and y of a point a line",
                 "{}: \"{}\" is no number", path, std::string(at, std::min(at + 12, end)));
      points.push_back(value);
      at = next;
    }
  }
  WEFT_CHECK(points.size() == 136, Exit::data, "landmarks are 68 points, x and y of each",
             "{} has {} numbers, not 136", path, points.size());
  WEFT_CHECK(
      std::ranges::all_of(points, [](float v) { return std::isfinite(v) && std::abs(v) < 1e6f; }),
      Exit::data, "they count in pixels of the picture",
      "{} has a landmark that is not finite, or far out", path);
  return points;
}

// ---- Clips ----

namespace {

// Adds the time of its life.
class Stopwatch {
 public:
  explicit Stopwatch(double& to) : to_(to) {}
  ~Stopwatch() { to_ += now_seconds() - begin_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& to_;
  double begin_ = now_seconds();
};

SourceFace face_of(const ClipRequest& clip, AnimateNetworks& networks, const ImageFile& picture) {
  const AnimateDeck& a = clip.animate;
  const Preprocess mode = preprocess_of(clip.sadtalker.preprocess);
  if (a.landmarks.empty()) try {
      return find_source_face(networks.finder(clip), picture, mode, clip.sadtalker.size, a.picture);
    } catch (const Error& e) {
      if (!is_random_source(a.detector_weights)) throw;
      throw Error(e.code(), e.what(),
                  "animate.detector_weights are random numbers, which find no face: give the "
                  "released weights, or the face's 68 landmarks (animate.landmarks)",
                  __FILE__, __LINE__);
    }
  const Landmarks given = landmarks_of(read_landmarks(a.landmarks));
  return find_source_face({}, picture, mode, clip.sadtalker.size, a.picture, given);
}

// Rows [n,70] of a reference video, no more than the clip has frames.
std::vector<float> reference_rows(const std::string& file, const ClipRequest& clip,
                                  AnimateNetworks& networks, std::int64_t frames,
                                  const MediaAccess& access) {
  std::vector<float> rows;
  ReferenceRows reference(networks.finder(clip), networks.coefficients(),
                          preprocess_of(clip.sadtalker.preprocess), file);
  PictureStream video(file, access);
  ImageFile frame;
  for (std::int64_t i = 0; i < frames && video.next(frame); ++i) {
    if (access.stop && access.stop())
      throw Error(Exit::stopped, "stopped on request", "", __FILE__, __LINE__);
    const FaceRow row = reference.next(frame);
    rows.insert(rows.end(), row.begin(), row.begin() + motion_coefficients);
  }
  WEFT_CHECK(!rows.empty(), Exit::data, "is it a video?", "{} has no frame", file);
  return rows;
}

}  // namespace

std::array<std::int64_t, 2> frame_size(const PreparedClip& clip, const SadtalkerDeck& deck) {
  // As the original computes it: in double, cut off.
  const double height = static_cast<double>(deck.size) * static_cast<double>(clip.frame_height) /
                        static_cast<double>(clip.frame_width);
  return {std::max<std::int64_t>(1, static_cast<std::int64_t>(height)), deck.size};
}

std::uint64_t draws_of(const ClipRequest& clip) {
  return hash128(fmt::format("{} {}", clip.animate.seed, clip.name)).low;
}

PreparedClip prepare_clip(const ClipRequest& clip, AnimateNetworks& networks,
                          const MediaAccess& access, StageSeconds& seconds) {
  const AnimateDeck& a = clip.animate;
  PreparedClip prepared;
  {
    const Stopwatch watch(seconds.prepare);
    const ImageFile picture = read_picture(a.picture, access.limits);
    SourceFace face = face_of(clip, networks, picture);
    if (face.faces > 1)
      log::warn("{}: {} faces in {}; the one with the greatest score is animated", clip.name,
                face.faces, a.picture);
    prepared.source = networks.coefficients().row(face, a.picture);
    prepared.place = face.cut.place;
    prepared.frame_height = face.cut.frame_height;
    prepared.frame_width = face.cut.frame_width;
    prepared.crop = std::move(face.crop);
  }
  if (!a.coefficients.empty()) {
    prepared.motion = read_motion(a.coefficients, access.limits);
    return prepared;
  }
  const Stopwatch watch(seconds.speech);
  const std::vector<float> speech = read_speech(a.speech, speech_rate, access);
  const std::int64_t frames = SpeechMotion::frames(std::ssize(speech));
  MotionOptions options{.seed = draws_of(clip), .pose_style = clip.sadtalker.pose_style};
  std::vector<float> eyeblink, pose;
  if (!a.ref_eyeblink.empty())
    eyeblink = reference_rows(a.ref_eyeblink, clip, networks, frames, access);
  if (!a.ref_pose.empty())
    pose = a.ref_pose == a.ref_eyeblink
               ? eyeblink
               : reference_rows(a.ref_pose, clip, networks, frames, access);
  options.eyeblink = eyeblink;
  options.pose = pose;
  prepared.motion = networks.speech().rows(
      speech, std::span(prepared.source).first(motion_coefficients), options);
  return prepared;
}

}  // namespace weft
