#include "jobs/animate/parts.h"

#include <algorithm>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "jobs/animate/sources.h"
#include "media/audio.h"
#include "models/sadtalker/speech_motion.h"

namespace weft {
namespace {

using Kind = ClipPart::Kind;

std::int64_t frames_of(const ClipRequest& clip, const MediaDeck& limits) {
  if (!clip.animate.coefficients.empty())
    return std::ssize(read_motion(clip.animate.coefficients, limits)) / motion_coefficients;
  AudioReader reader({clip.animate.speech, MediaTrust::untrusted}, {.access = {limits, {}}});
  std::int64_t samples = 0;
  for (auto some = reader.next(); !some.empty(); some = reader.next()) samples += std::ssize(some);
  return samples / speech_samples_per_frame;
}

}  // namespace

std::vector<ClipSize> measure_clips(const std::vector<ClipRequest>& clips, const MediaDeck& limits,
                                    MPI_Comm world) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  std::vector<std::int64_t> numbers(3 * clips.size(), 0);
  for (auto i = static_cast<std::size_t>(rank); i < clips.size();
       i += static_cast<std::size_t>(ranks)) {
    try {
      const std::int64_t frames = frames_of(clips[i], limits);
      const ImageFile picture = read_picture(clips[i].animate.picture, limits);
      numbers[3 * i] = frames;
      numbers[3 * i + 1] = picture.height;
      numbers[3 * i + 2] = picture.width;
    } catch (const Error& e) {
      // Whoever prepares the clip meets it again, and reports it.
      if (e.code() != Exit::data && e.code() != Exit::usage) throw;
    }
  }
  MPI_Allreduce(MPI_IN_PLACE, numbers.data(), static_cast<int>(numbers.size()), MPI_INT64_T,
                MPI_SUM, world);
  std::vector<ClipSize> sizes;
  for (std::size_t i = 0; i < clips.size(); ++i)
    sizes.push_back({numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]});
  return sizes;
}

std::int64_t piece_of(const ClipRequest& clip) {
  const std::int64_t batch = clip.sadtalker.batch_size;
  return (clip.animate.piece + batch - 1) / batch * batch;
}

std::vector<ClipPart> parts_of(const std::vector<ClipSize>& sizes,
                               const std::vector<ClipRequest>& clips) {
  std::vector<ClipPart> parts;
  for (std::size_t i = 0; i < clips.size(); ++i) {
    const auto clip = static_cast<std::int64_t>(i);
    const std::int64_t frames = sizes[i].frames, piece = piece_of(clips[i]);
    for (std::int64_t first = 0; first < frames; first += piece)
      parts.push_back({Kind::piece, clip, first, std::min(piece, frames - first)});
    parts.push_back({Kind::clip, clip, 0, frames});
  }
  return parts;
}

std::vector<ListItem> items_of(const std::vector<ClipPart>& parts,
                               const std::vector<ClipRequest>& clips,
                               const std::vector<ClipCost>& costs,
                               const std::vector<std::string>& keys) {
  std::vector<ListItem> items;
  for (const ClipPart& p : parts) {
    const auto c = static_cast<std::size_t>(p.clip);
    const std::string& name = clips[c].name;
    const std::string key = keys.empty() ? "" : keys[c];
    if (p.kind == Kind::piece)
      items.push_back({fmt::format("{}/{}-{}", name, p.first, p.first + p.count - 1), key,
                       costs[c].frame * static_cast<double>(p.count)});
    else
      items.push_back({name, key, costs[c].join});
  }
  // A clip's pieces stand in front of it.
  for (std::size_t i = items.size(), whole = 0; i-- > 0;)
    if (parts[i].kind == Kind::clip)
      whole = i;
    else
      items[i].whole = static_cast<std::int64_t>(whole);
  return items;
}

SharedParts share_parts(const std::vector<ClipPart>& parts,
                        const std::vector<std::int64_t>& missing,
                        const std::vector<ClipCost>& costs, int ranks) {
  struct Clip {
    ItemBatch items;
    double cost = 0;
  };
  std::map<std::int64_t, Clip> clips;
  std::vector<std::int64_t> sorted = missing;
  std::ranges::sort(sorted);  // clip by clip, in the order in which parts are made
  double remaining = 0;
  for (const std::int64_t item : sorted) {
    const ClipPart& p = parts[static_cast<std::size_t>(item)];
    const ClipCost& c = costs[static_cast<std::size_t>(p.clip)];
    Clip& clip = clips[p.clip];
    const double cost = (clip.items.empty() ? c.prepare : 0) +
                        (p.kind == Kind::piece ? c.frame * static_cast<double>(p.count) : c.join);
    clip.items.push_back(item);
    clip.cost += cost;
    remaining += cost;
  }
  std::vector<Clip> order;
  for (auto& [number, clip] : clips) order.push_back(std::move(clip));
  std::ranges::stable_sort(order, std::greater(), &Clip::cost);
  SharedParts shared;
  for (Clip& clip : order) {
    // One piece and its join, or the join alone, have nothing to share.
    if (ranks == 1 || clip.items.size() <= 2 || ranks * clip.cost <= remaining) {
      shared.pieces.push_back(std::move(clip.items));
    } else {
      for (const std::int64_t item : clip.items)
        (parts[static_cast<std::size_t>(item)].kind == Kind::piece ? shared.pieces : shared.joins)
            .push_back({item});
    }
    remaining -= clip.cost;
  }
  return shared;
}

std::string clip_key(const ClipRequest& clip, const std::string& weights) {
  const AnimateDeck& a = clip.animate;
  const SadtalkerDeck& s = clip.sadtalker;
  nlohmann::json j = {{"weights", weights},
                      {"name", clip.name},
                      {"seed", a.seed},
                      {"preprocess", s.preprocess},
                      {"size", s.size},
                      {"batch", s.batch_size},
                      {"piece", piece_of(clip)},
                      {"pose_style", s.pose_style},
                      {"expression_scale", s.expression_scale},
                      {"still", s.still},
                      {"turns", {s.input_yaw, s.input_pitch, s.input_roll}},
                      {"enhancer", {a.enhancer, a.enhancer.empty() ? 0 : a.enhancer_scale}},
                      {"keep_frames", a.keep_frames}};
  for (const std::string* file :
       {&a.picture, &a.speech, &a.ref_eyeblink, &a.ref_pose, &a.landmarks, &a.coefficients})
    j["files"].push_back(file->empty() ? "" : file_identity(*file));
  return to_hex(
      hash128(std::string_view(j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))));
}

}  // namespace weft
