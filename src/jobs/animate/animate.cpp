#include "jobs/animate/animate.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "config/keep_inputs.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/animate/networks.h"
#include "jobs/animate/prepare.h"
#include "jobs/engine/list_job.h"
#include "media/resize.h"
#include "media/writers.h"
#include "models/sadtalker/face/crop.h"
#include "models/sadtalker/face/paste.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Kind = ClipPart::Kind;

// ---- Frames: from a clip's preparation to segments of MP4 ----

std::span<const float> source_row(const ClipRequest& clip, const PreparedClip& prepared) {
  const auto columns = static_cast<std::size_t>(clip.sadtalker.coefficients());
  return std::span(prepared.source).first(std::min(columns, prepared.source.size()));
}

// The name of a frame that is kept, in the folder of its clip's frames.
std::string frame_file(std::int64_t frame) { return fmt::format("{:06d}.png", frame); }

// A clip whose pieces a rank makes: what they share is computed once.
class ClipInHand {
 public:
  // In the current arena, where the source's features stay.
  ClipInHand(const ClipRequest& clip, PreparedClip prepared, const Renderer& renderer,
             const MediaDeck& limits);
  ClipInHand(const ClipInHand&) = delete;
  ClipInHand& operator=(const ClipInHand&) = delete;

  const ClipRequest& clip() const { return clip_; }
  std::int64_t frames() const { return rows_.frames; }
  std::vector<std::uint8_t> render(std::int64_t first, std::int64_t count) const {
    return renderer_.render(source_, rows_, first, count);
  }
  // A rendered frame at its final size and, in the full modes, in its picture. Thread-safe.
  ImageFile shaped(ImageFile frame) const;

 private:
  const ClipRequest& clip_;
  const Renderer& renderer_;
  PreparedClip prepared_;
  DrivingRows rows_;
  Renderer::Source source_;
  ImageFile picture_;  // in the full modes
  std::optional<Pasting> pasting_;
};

// Makes segments. This thread renders and enhances; meanwhile another one shapes the batch before,
// and a third encodes the one before that: a few batches are in memory, whatever the length.
class SegmentMaker {
 public:
  SegmentMaker(AnimateNetworks& networks, StageSeconds& seconds)
      : networks_(networks), seconds_(seconds) {}

  // Frames [first, first + count) to `file`, which is there only once it is whole. `pictures`: a
  // folder for them as PNG too, which is there; empty: none. False if `go_on`, asked before each
  // batch, said no.
  bool make(const ClipInHand& clip, std::int64_t first, std::int64_t count,
            const std::filesystem::path& file, const std::filesystem::path& pictures,
            const std::function<bool()>& go_on);

 private:
  using Batch = std::vector<ImageFile>;
  struct Segment;

  AnimateNetworks& networks_;
  StageSeconds& seconds_;
};

ClipInHand::ClipInHand(const ClipRequest& clip, PreparedClip prepared, const Renderer& renderer,
                       const MediaDeck& limits)
    : clip_(clip),
      renderer_(renderer),
      prepared_(std::move(prepared)),
      rows_(driving_rows(clip.sadtalker, prepared_.motion, source_row(clip, prepared_))),
      source_(renderer.prepare(prepared_.crop, source_row(clip, prepared_))) {
  if (!is_full(clip)) return;
  picture_ = read_picture(clip.animate.picture, limits);
  const PixelBox& p = prepared_.place;
  pasting_.emplace(picture_, p);
}

ImageFile ClipInHand::shaped(ImageFile frame) const {
  const auto [height, width] = frame_size(prepared_, clip_.sadtalker);
  ImageFile sized = frame.height == height && frame.width == width
                        ? std::move(frame)
                        : resize_bilinear(frame, height, width);
  return pasting_ ? pasting_->paste(sized) : sized;
}

// A segment on its way. The futures' destructors wait for their threads, which use the rest.
struct SegmentMaker::Segment {
  const ClipInHand& clip;
  fs::path file, pictures;
  std::int64_t next = 0;  // frame to be written, in the clip
  std::optional<Mp4Writer> writer;
  std::future<Batch> shaping;
  std::future<void> encoding;

  Batch shape(const std::vector<std::uint8_t>& rendered, std::int64_t count) const {
    Batch batch;
    const std::int64_t side = clip.clip().sadtalker.size;
    const std::int64_t bytes = side * side * 3;
    for (std::int64_t i = 0; i < count; ++i)
      batch.push_back(clip.shaped(
          {side, side, {rendered.begin() + i * bytes, rendered.begin() + (i + 1) * bytes}}));
    return batch;
  }

  void encode(const Batch& frames) {
    for (const ImageFile& f : frames) {
      if (!writer)
        writer.emplace(file.string(), f.height, f.width,
                       Mp4Options{.fps = speech_fps, .segment = true});
      writer->add({f.values.data(), 1, f.height, f.width});
      if (!pictures.empty())
        write_png((pictures / frame_file(next)).string(), f.height, f.width, f.values);
      ++next;
    }
  }
};

// What the thread brings; adds to `seconds` how long this one waits for it.
template <class T>
T awaited(std::future<T>& thread, double& seconds) {
  const double begin = now_seconds();
  thread.wait();
  seconds += now_seconds() - begin;
  return thread.get();
}

bool SegmentMaker::make(const ClipInHand& clip, std::int64_t first, std::int64_t count,
                        const fs::path& file, const fs::path& pictures,
                        const std::function<bool()>& go_on) {
  Segment segment{clip, file, pictures, first, {}, {}, {}};
  const auto encoded = [&] {
    if (segment.encoding.valid()) awaited(segment.encoding, seconds_.encode);
  };
  const auto hand_on = [&](Batch batch) {
    if (is_enhanced(clip.clip())) {
      const double begin = now_seconds();
      const auto scale = static_cast<int>(clip.clip().animate.enhancer_scale);
      for (ImageFile& frame : batch)
        frame = networks_.enhancer().enhance(frame, scale, draws_of(clip.clip()));
      seconds_.enhance += now_seconds() - begin;
    }
    encoded();
    segment.encoding = std::async(
        std::launch::async, [&segment, frames = std::move(batch)] { segment.encode(frames); });
  };
  const std::int64_t together = clip.clip().sadtalker.batch_size;
  for (std::int64_t at = first; at < first + count; at += together) {
    if (!go_on()) return false;
    const double begin = now_seconds();
    const std::int64_t n = std::min(together, first + count - at);
    std::vector<std::uint8_t> rendered = clip.render(at, n);
    seconds_.render += now_seconds() - begin;
    Batch before;
    if (segment.shaping.valid()) before = awaited(segment.shaping, seconds_.paste);
    segment.shaping = std::async(std::launch::async, [&segment, n, rendered = std::move(rendered)] {
      return segment.shape(rendered, n);
    });
    if (at > first) hand_on(std::move(before));
  }
  hand_on(awaited(segment.shaping, seconds_.paste));
  encoded();
  const double begin = now_seconds();
  segment.writer->finish();
  seconds_.encode += now_seconds() - begin;
  return true;
}

// ---- Parts: pieces and whole clips, as a list job ----

// Where a clip's frames are kept, in the output folder.
std::string frames_folder(const ClipRequest& clip) { return clip.name + "_frames"; }

// What a clip is made from, as a small picture in the output folder for weft report; `what` is the
// key that names it.
std::string reference_file(const ClipRequest& clip, const char* what) {
  return fmt::format("references/{}-{}.png", clip.name, what);
}
struct Reference {
  const char* what;
  const std::string& path;
};
std::array<Reference, 3> references_of(const AnimateDeck& a) {
  return {{{"picture", a.picture}, {"ref_pose", a.ref_pose}, {"ref_eyeblink", a.ref_eyeblink}}};
}

void write_reference(const ImageFile& picture, const fs::path& folder, const std::string& file) {
  constexpr std::int64_t largest_side = 512;
  std::int64_t height = picture.height, width = picture.width;
  if (const std::int64_t side = std::max(height, width); side > largest_side) {
    height = std::max<std::int64_t>(1, height * largest_side / side);
    width = std::max<std::int64_t>(1, width * largest_side / side);
  }
  std::vector<std::uint8_t> rgb(static_cast<std::size_t>(3 * height * width));
  pillow_resize({picture.values.data(), picture.height, picture.width, 3 * picture.width}, height,
                width, PillowFilter::bilinear, rgb.data(), 3 * width);
  write_png(result_path(folder, file).string(), height, width, rgb);
}

// Frames of an earlier, longer clip of the same name.
void remove_frames_from(std::int64_t frames, const fs::path& folder) {
  std::vector<fs::path> others;
  std::error_code failed;
  for (fs::directory_iterator it(folder, failed), last; !failed && it != last;
       it.increment(failed)) {
    const std::string name = it->path().filename().string();
    std::int64_t number = -1;
    std::from_chars(name.data(), name.data() + name.size(), number);
    if (number >= frames && name == frame_file(number)) others.push_back(it->path());
  }
  for (const fs::path& file : others) fs::remove(file, failed);
}

// Where the segments of clips are until they are joined, in the output folder.
constexpr const char* work = ".work";

fs::path segments_folder(const ClipRequest& clip, const fs::path& output) {
  return output / work / clip.name;
}

// What the names of a clip's segments begin with.
std::string mark_of(const std::string& key) { return key.substr(0, 16); }

void remove_segments_but(const fs::path& folder, const std::string& key) {
  std::error_code failed;
  std::vector<fs::path> others;
  for (fs::directory_iterator it(folder, failed), last; !failed && it != last; it.increment(failed))
    if (!it->path().filename().string().starts_with(mark_of(key))) others.push_back(it->path());
  for (const fs::path& file : others) fs::remove(file, failed);
}

// Removes the segments of all clips from the output folder.
void remove_segments(const fs::path& output) {
  std::error_code none;
  fs::remove_all(output / work, none);
}

// A rank's state while it makes parts of clips.
class AnimateJob : public ListJob {
 public:
  // The first rank removes what an earlier job left of the parts that are to be made: files that
  // remain are whole.
  AnimateJob(const Deck& deck, const std::vector<ClipRequest>& clips,
             const std::vector<ClipPart>& parts, AnimateNetworks& networks, ListEngine& engine);
  void make(const ItemBatch& items) override;
  nlohmann::ordered_json share() const;

 private:
  const ClipPart& part(std::int64_t item) const { return parts_[item]; }
  const ClipRequest& clip_of(std::int64_t item) const { return clips_[part(item).clip]; }
  const ListItem& item_of(std::int64_t item) const { return engine_.items()[item]; }
  // The part's file, relative to the output folder.
  std::string file_of(std::int64_t item) const;
  std::filesystem::path path_of(std::int64_t item) const;
  void add_files(nlohmann::ordered_json& line, std::int64_t item) const;

  bool make_part(std::int64_t item, nlohmann::ordered_json& line);
  bool make_piece(std::int64_t item);
  void join(std::int64_t item, nlohmann::ordered_json& line);
  const ClipInHand& in_hand(std::int64_t item);

  const Deck& deck_;
  const std::vector<ClipRequest>& clips_;
  const std::vector<ClipPart>& parts_;
  AnimateNetworks& networks_;
  ListEngine& engine_;
  StageSeconds seconds_;
  std::int64_t frames_ = 0;
  SegmentMaker maker_;
  std::unique_ptr<ClipInHand> in_hand_;  // the last one
  std::int64_t in_hand_clip_ = -1;
};

AnimateJob::AnimateJob(const Deck& deck, const std::vector<ClipRequest>& clips,
                       const std::vector<ClipPart>& parts, AnimateNetworks& networks,
                       ListEngine& engine)
    : deck_(deck),
      clips_(clips),
      parts_(parts),
      networks_(networks),
      engine_(engine),
      maker_(networks, seconds_) {
  if (engine.groups().rank != 0) return;
  std::error_code none;
  for (const std::int64_t item : engine.missing()) {
    fs::remove(path_of(item), none);
    // Segments of other settings.
    if (part(item).kind == Kind::clip)
      remove_segments_but(segments_folder(clip_of(item), engine.settings().directory),
                          item_of(item).key);
  }
}

std::string AnimateJob::file_of(std::int64_t item) const {
  const std::string& name = clip_of(item).name;
  if (part(item).kind == Kind::clip) return name + ".mp4";
  return fmt::format("{}/{}/{}.{:07d}.mp4", work, name, mark_of(item_of(item).key),
                     part(item).first);
}

fs::path AnimateJob::path_of(std::int64_t item) const {
  return engine_.settings().directory / file_of(item);
}

void AnimateJob::make(const ItemBatch& items) {
  for (const std::int64_t item : items) {
    // What is left of the batch is the next start's.
    if (engine_.stop_requested() && item != items.front()) return;
    Json line = engine_.line_of(item);
    const double begin = now_seconds();
    try {
      if (!make_part(item, line)) return;
      line["seconds"] = now_seconds() - begin;
      add_files(line, item);
      engine_.finished(line);
    } catch (const Error& e) {
      if (e.code() == Exit::stopped) return;
      if (part(item).kind == Kind::clip)
        engine_.failed(item, e);
      else if (e.of_item())
        engine_.skipped(item, e);  // the clip reports it
      else
        throw;
    }
  }
}

// False: stopped.
bool AnimateJob::make_part(std::int64_t item, Json& line) {
  result_path(engine_.settings().directory, file_of(item));
  if (part(item).kind == Kind::piece) return make_piece(item);
  join(item, line);
  std::error_code none;
  fs::remove_all(segments_folder(clip_of(item), engine_.settings().directory), none);
  return true;
}

const ClipInHand& AnimateJob::in_hand(std::int64_t item) {
  if (in_hand_clip_ == part(item).clip) return *in_hand_;
  in_hand_.reset();  // its features make room
  in_hand_clip_ = -1;
  const ClipRequest& clip = clip_of(item);
  const MediaAccess access{deck_.media, [this] { return engine_.stop_requested(); }};
  PreparedClip prepared = prepare_clip(clip, networks_, access, seconds_);
  std::int64_t planned = 0;
  for (const ClipPart& p : parts_)
    if (p.clip == part(item).clip && p.kind == Kind::clip) planned = p.count;
  WEFT_CHECK(
      prepared.frames() == planned, Exit::data, "start again once nothing writes to its files",
      "{} has {} frames, and had {} when the job began", clip.name, prepared.frames(), planned);
  const double begin = now_seconds();
  in_hand_ = std::make_unique<ClipInHand>(clip, std::move(prepared), networks_.renderer(clip),
                                          deck_.media);
  seconds_.render += now_seconds() - begin;
  in_hand_clip_ = part(item).clip;
  return *in_hand_;
}

// False: stopped.
bool AnimateJob::make_piece(std::int64_t item) {
  const ClipPart& p = part(item);
  const ClipRequest& clip = clip_of(item);
  fs::path pictures;
  if (clip.animate.keep_frames) {
    pictures = result_path(engine_.settings().directory, frames_folder(clip) + "/");
  }
  if (!maker_.make(in_hand(item), p.first, p.count, path_of(item), pictures,
                   [this] { return !engine_.stop_requested(); }))
    return false;
  frames_ += p.count;
  return true;
}

// The part's file, and the frames that are kept of it.
void AnimateJob::add_files(Json& line, std::int64_t item) const {
  const ClipPart& p = part(item);
  const ClipRequest& clip = clip_of(item);
  const fs::path& directory = engine_.settings().directory;
  add_file(line, directory, file_of(item));
  if (!clip.animate.keep_frames) return;
  for (std::int64_t f = p.first; f < p.first + p.count; ++f)
    add_file(line, directory, frames_folder(clip) + "/" + frame_file(f), fmt::format("frame{}", f));
}

// Throws what kept a rank from making a piece of the clip.
void AnimateJob::join(std::int64_t item, Json& line) {
  const ClipPart& whole = part(item);
  const ClipRequest& clip = clip_of(item);
  if (whole.count == 0) in_hand(item);  // a clip without frames: its preparation says why
  std::vector<std::string> segments;
  std::int64_t first = item;
  while (first > 0 && part(first - 1).clip == whole.clip) --first;
  for (std::int64_t i = first; i < item; ++i) {
    segments.push_back(path_of(i).string());
    std::error_code none;
    if (fs::exists(path_of(i), none)) continue;
    const ManifestLines lines =
        Manifest::all(engine_.settings().directory, engine_.settings().stem);
    const auto said = lines.find(item_of(i).name);
    if (said != lines.end() && said->second.key == item_of(i).key) {
      const Json fault = said->second.parsed();
      if (said->second.fault)
        throw Error(static_cast<Exit>(fault.value("code", 0)), fault.value("fault", ""),
                    fault.value("hint", ""), __FILE__, __LINE__);
      WEFT_CHECK(said->second.died < most_deaths, Exit::data,
                 "to try again, remove its line from animate.jsonl", "ranks died while making {}",
                 item_of(i).name);
    }
    throw Error(Exit::data, fmt::format("{} is not there", path_of(i).string()),
                "the same command makes it again", __FILE__, __LINE__);
  }
  const double begin = now_seconds();
  const fs::path result = path_of(item);
  const std::int64_t frames =
      join_mp4(segments, {.file = clip.animate.speech}, speech_fps, result.string(),
               {deck_.media, [this] { return engine_.stop_requested(); }});
  WEFT_CHECK(frames == whole.count, Exit::data,
             "run the same command again, which makes the clip again", "{} has {} of {} frames",
             result.string(), frames, whole.count);
  if (clip.animate.keep_frames)
    remove_frames_from(frames, engine_.settings().directory / frames_folder(clip));
  line["picture"] = as_utf8(clip.animate.picture);
  line["speech"] = as_utf8(clip.animate.speech);
  line["frames"] = frames;
  line["references"] = Json::array();
  // They are for weft report alone: the clip is there without them.
  for (const auto& [what, path] : references_of(clip.animate)) {
    if (path.empty()) continue;
    try {
      ImageFile shown;
      if (std::string_view(what) == "picture")
        shown = read_picture(path, deck_.media);
      else if (!PictureStream(path, {deck_.media, {}}).next(shown))
        continue;
      write_reference(shown, engine_.settings().directory, reference_file(clip, what));
      line["references"].push_back(reference_file(clip, what));
    } catch (const Error& e) {
      log::warn("{}: weft report will not show its {} {}: {}", clip.name, what, path, e.what());
    }
  }
  seconds_.join += now_seconds() - begin;
  log::write_info(fmt::format("clip      {}  {}  rank {}", result.string(),
                              counted(frames, "frame"), engine_.groups().rank));
}

Json AnimateJob::share() const {
  const Enhancer::Counts enhanced = networks_.enhanced();
  return {{"frames", frames_},
          {"enhanced_frames", enhanced.frames},
          {"restored_frames", enhanced.restored},
          {"prepare", seconds_.prepare},
          {"speech", seconds_.speech},
          {"render", seconds_.render},
          {"paste", seconds_.paste},
          {"enhance", seconds_.enhance},
          {"encode", seconds_.encode},
          {"join", seconds_.join}};
}

// ---- The command ----

void check_clips(const std::vector<ClipRequest>& clips) {
  for (const ClipRequest& c : clips) {
    WEFT_CHECK(c.animate.enhancer.empty() || c.animate.enhancer == "gfpgan", Exit::usage,
               "set it to \"gfpgan\", or leave it out", "{}: unknown enhancer \"{}\"", c.where,
               c.animate.enhancer);
  }
}

// No clip, and no frame that is kept, may replace an input.
void check_results(const Deck& deck, const std::vector<ClipRequest>& clips) {
  const std::filesystem::path output =
      absolute_path(std::filesystem::path(deck.get<AnimateDeck>().output) / "").parent_path();
  std::set<std::filesystem::path> results, folders;
  std::vector<std::string> inputs;
  for (const ClipRequest& c : clips) {
    const AnimateDeck& a = c.animate;
    results.insert(output / (c.name + ".mp4"));
    for (const auto& [what, path] : references_of(a))
      if (!path.empty()) results.insert(output / reference_file(c, what));
    if (a.keep_frames) folders.insert(output / frames_folder(c));
    for (const std::string* file :
         {&a.picture, &a.speech, &a.ref_eyeblink, &a.ref_pose, &a.landmarks, &a.coefficients})
      inputs.push_back(*file);
  }
  keep_inputs(deck, "animate.output", inputs, [&](const std::filesystem::path& path) {
    return results.contains(path) ||
           (path.extension() == ".png" && folders.contains(path.parent_path()));
  });
}

// Places in the list of the clips that are missing, or parts of them.
std::vector<std::size_t> clips_missing(const ListEngine& engine,
                                       const std::vector<ClipPart>& parts) {
  std::set<std::size_t> clips;
  for (const std::int64_t item : engine.missing())
    clips.insert(static_cast<std::size_t>(parts[item].clip));
  return {clips.begin(), clips.end()};
}

// Dry runs of the clips that take most.
std::size_t plan_arena(AnimateNetworks& networks, const std::vector<std::size_t>& missing,
                       const std::vector<ClipRequest>& clips,
                       const std::vector<AnimateSize>& sizes) {
  std::size_t most = 0;
  std::set<std::vector<std::int64_t>> seen;
  for (const std::size_t c : missing) {
    const ClipRequest& clip = clips[c];
    if (!seen.insert({sizes[c].height, sizes[c].width, clip.sadtalker.size, is_full(clip),
                      is_enhanced(clip), finds_faces(clip)})
             .second ||
        sizes[c].frames == 0)
      continue;
    most = std::max(most, networks.plan(clip, sizes[c], true).bytes);
  }
  return most;
}

Json make_missing(const Deck& deck, const ListStart& start, AnimateNetworks& networks,
                  const std::vector<ClipRequest>& clips, const std::vector<AnimateSize>& sizes,
                  const std::vector<ClipPart>& parts, ListEngine& engine) {
  const std::vector<std::size_t> missing = clips_missing(engine, parts);
  std::vector<const ClipRequest*> requests;
  for (const std::size_t c : missing) requests.push_back(&clips[c]);
  networks.load(requests, requests);
  log::info("weights   {}", networks.describe());
  std::vector<ClipCost> costs(clips.size());
  // A clip whose picture or speech cannot be read has no costs: it fails by itself.
  for (const std::size_t c : missing)
    if (sizes[c].frames > 0) costs[c] = networks.cost(clips[c], sizes[c]);
  const SharedParts shared =
      share_parts(parts, engine.missing(), engine.suspects(), costs, engine.groups().count);
  const std::int64_t split = std::ssize(shared.joins), whole = std::ssize(missing) - split;
  log::info("plan      {} on one rank each, {} shared by several", counted(whole, "clip"), split);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, start.device));
  const ArenaScope scope(*arena);
  const std::size_t needed = plan_arena(networks, missing, clips, sizes);
  if (needed > arena->capacity() && log::rank() == 0)
    log::warn(
        "the largest clip needs {}, this rank has {}: it will fail, unless sadtalker.batch_size "
        "or its picture is made smaller",
        size_text(static_cast<double>(needed)), size_text(static_cast<double>(arena->capacity())));
  log::info("memory    {} for the largest clip in the networks",
            size_text(static_cast<double>(needed)));
  AnimateJob job(deck, clips, parts, networks, engine);
  engine.run(job, shared.pieces);
  engine.run(job, shared.joins);
  Json share = job.share();
  share["whole_clips"] = whole;
  share["split_clips"] = split;
  share["peak_bytes"] = arena->peak();
  share["resident_bytes"] = resident_bytes();
  share["device"] = on_cuda() ? device_runtime().describe() : "CPU";
  return share;
}

// Clips, and where the ranks' time went.
ListSummary summarise_clips(const ListReport& report, const ListEngine& engine,
                            const std::vector<ClipPart>& parts) {
  std::int64_t clips = 0, there = 0, frames = 0;
  const ManifestLines lines = engine.lines();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].kind != Kind::clip) continue;
    ++clips;
    const auto line = lines.find(engine.items()[i].name);
    there += line != lines.end() && is_result(line->second, engine.items()[i].key) ? 1 : 0;
  }
  double seconds = 0;
  std::int64_t enhanced = 0, restored = 0;
  for (const Json& share : report.ranks) {
    seconds = std::max(seconds, share.at("last_end").get<double>());
    frames += share.value("frames", std::int64_t{0});
    enhanced += share.value("enhanced_frames", std::int64_t{0});
    restored += share.value("restored_frames", std::int64_t{0});
  }
  log::write_info(fmt::format("clips     {} of {} done, in {}", there, clips,
                              engine.settings().directory.string()));
  if (restored > 0)
    log::write_info(
        fmt::format("gfpgan    restored a face in {} of {}", restored, counted(enhanced, "frame")));
  else if (enhanced > 0)
    log::warn(
        "gfpgan restored no face in any of {}: the detector found none of 5 pixels or more "
        "between the eyes",
        counted(enhanced, "frame"));
  ListSummary said{
      {{"clips", clips},
       {"clips_there", there},
       {"frames", frames},
       {"frames_per_second", seconds > 0 ? static_cast<double>(frames) / seconds : 0.0}},
      fmt::format("{} of {}", clips - there, counted(clips, "clip"))};
  if (enhanced > 0) said.header["restored_frames"] = restored;
  for (const char* number : {"whole_clips", "split_clips"})
    if (report.ranks.front().contains(number)) said.header[number] = report.ranks.front()[number];
  return said;
}

}  // namespace

int animate(const Deck& deck, MPI_Comm world) {
  // 1. What is to be made.
  const std::vector<ClipRequest> clips = list_clips(deck, world);
  check_clips(clips);
  if (log::rank() == 0) check_results(deck, clips);
  const ListStart start = start_list_job(deck, world);
  AnimateNetworks networks(deck, clips, world);
  const std::vector<AnimateSize> sizes = measure_clips(clips, deck.media, world);
  const std::vector<ClipPart> parts = parts_of(sizes, clips);
  std::vector<std::string> keys;
  std::vector<ClipCost> costs;
  for (std::size_t i = 0; i < clips.size(); ++i) {
    keys.push_back(clip_key(clips[i], networks.identity(clips[i]) + "\n" + deck.media.orientation));
    costs.push_back({0, 1, 0, sizes[i].frames});
  }
  ListEngine engine(list_settings(deck, "animate", deck.get<AnimateDeck>().output, "part"),
                    items_of(parts, clips, costs, keys), world);
  std::int64_t frames = 0;
  for (const AnimateSize& s : sizes) frames += s.frames;
  const std::size_t missing = engine.missing().size();
  log::info("animate   {} of {} into {}{}", counted(std::ssize(clips), "clip"),
            counted(frames, "frame"), engine.settings().directory.string(),
            missing < parts.size() ? fmt::format(", {} of {} made before", parts.size() - missing,
                                                 counted(std::ssize(parts), "part"))
                                   : "");

  // 2. Parts, by whoever is free.
  ListEnd last;
  last.unit = "frame", last.units = "frames";
  last.stages = {"prepare", "speech", "render", "paste", "enhance", "encode", "join"};
  if (missing > 0) last.share = make_missing(deck, start, networks, clips, sizes, parts, engine);

  // 3. The report.
  last.summarise = [&](const ListReport& report) { return summarise_clips(report, engine, parts); };
  last.finish = [&](const ListReport&) { remove_segments(engine.settings().directory); };
  return engine.end(last);
}

Command animate_command() {
  Command c{"animate", "make talking-head videos from pictures and speech", animate};
  c.handles_stop_signals = true;
  takes_list_job(c);
  c.key_option<std::string>("--picture", "animate.picture", "picture of a face");
  c.key_option<std::string>("--speech", "animate.speech", "what it says");
  c.key_option<std::string>("--output", "animate.output", "folder of the results");
  return c;
}

}  // namespace weft
