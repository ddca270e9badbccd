#include "jobs/animate/animate_job.h"

#include <charconv>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "jobs/segment/inputs.h"
#include "media/writers.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Kind = ClipPart::Kind;

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

}  // namespace

std::string frames_folder(const ClipRequest& clip) { return clip.name + "_frames"; }

void remove_segments(const fs::path& output) {
  std::error_code none;
  fs::remove_all(output / work, none);
}

AnimateJob::AnimateJob(const Deck& deck, const std::vector<ClipRequest>& clips,
                       const std::vector<ClipPart>& parts, AnimateNetworks& networks,
                       const ListEngine& engine)
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

Json AnimateJob::line_of(std::int64_t item) const {
  return {
      {"name", item_of(item).name}, {"key", item_of(item).key}, {"rank", engine_.groups().rank}};
}

void AnimateJob::make(const ItemBatch& items, ItemResults& results) {
  for (const std::int64_t item : items) {
    // What is left of the batch is the next start's.
    if (engine_.stop_requested() && item != items.front()) return;
    results.begun(item);
    Json line = line_of(item);
    const double begin = now_seconds();
    try {
      if (!make_part(item, line)) return;
      line["seconds"] = now_seconds() - begin;
      add_files(line, item);
      results.finished(line);
    } catch (const Error& e) {
      if (e.code() == Exit::stopped) return;
      if (part(item).kind == Kind::clip)
        results.failed(item, e);
      else if (e.code() == Exit::data || e.code() == Exit::usage || e.code() == Exit::non_finite)
        results.skipped(line_of(item), e);  // the clip reports it
      else
        throw;
    }
  }
}

// False: stopped.
bool AnimateJob::make_part(std::int64_t item, Json& line) {
  make_folders(engine_.settings().directory, file_of(item));
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
    pictures = engine_.settings().directory / frames_folder(clip);
    make_folders(engine_.settings().directory, frames_folder(clip) + "/");
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
      if (fault.contains("fault"))
        throw Error(static_cast<Exit>(fault.value("code", 0)), fault.value("fault", ""),
                    fault.value("hint", ""), __FILE__, __LINE__);
      WEFT_CHECK(!fault.contains("died"), Exit::data,
                 "to try again, remove its line from animate.jsonl",
                 "{} was in hand when ranks died", item_of(i).name);
    }
    throw Error(Exit::data, fmt::format("{} is not there", path_of(i).string()),
                "the same command makes it again", __FILE__, __LINE__);
  }
  const double begin = now_seconds();
  const fs::path result = path_of(item);
  const std::int64_t frames =
      join_mp4(segments, {.file = clip.animate.speech}, speech_fps, result.string(),
               {deck_.media, [this] { return engine_.stop_requested(); }});
  WEFT_CHECK(frames == whole.count, Exit::data, "start again", "{} has {} frames of {}",
             result.string(), frames, whole.count);
  if (clip.animate.keep_frames)
    remove_frames_from(frames, engine_.settings().directory / frames_folder(clip));
  seconds_.join += now_seconds() - begin;
  line["picture"] = as_utf8(clip.animate.picture);
  line["speech"] = as_utf8(clip.animate.speech);
  line["frames"] = frames;
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

}  // namespace weft
