#include "jobs/animate/prepare.h"

#include <algorithm>

#include "checkpoint/model_source.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/log.h"
#include "jobs/animate/sources.h"
#include "media/audio.h"

namespace weft {
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
