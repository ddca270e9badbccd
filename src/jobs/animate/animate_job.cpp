#include "jobs/animate/animate_job.h"

#include <charconv>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "jobs/segment/inputs.h"
#include "media/join_mp4.h"

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

}  // namespace

std::string frames_folder(const ClipRequest& clip) { return clip.name + "_frames"; }

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
  for (const std::int64_t item : engine.missing()) {
    const WorkFolder folder = folder_of(item);
    if (parts_[static_cast<std::size_t>(item)].kind == Kind::join) {
      folder.forget_end();
      folder.drop_others();
    }
    std::error_code none;
    fs::remove(folder.path(file_of(item)), none);
  }
}

WorkFolder AnimateJob::folder_of(std::int64_t item) const {
  return {engine_.settings().directory, clip_of(parts_[static_cast<std::size_t>(item)]).name,
          item_of(item).key};
}

std::string AnimateJob::file_of(std::int64_t item) const {
  const ClipPart& part = parts_[static_cast<std::size_t>(item)];
  switch (part.kind) {
    case Kind::prepare:
      return folder_of(item).prepared();
    case Kind::frames:
      return folder_of(item).segment(part.first);
    case Kind::join:
      break;
  }
  return clip_of(part).name + ".mp4";
}

void AnimateJob::make(const ItemBatch& items, ItemResults& results) {
  for (const std::int64_t item : items) {
    // What is left of the batch is the next start's.
    if (engine_.stop_requested() && item != items.front()) return;
    make_part(item, results);
  }
}

void AnimateJob::make_part(std::int64_t item, ItemResults& results) {
  const ClipPart& part = parts_[static_cast<std::size_t>(item)];
  const WorkFolder folder = folder_of(item);
  Json line = {
      {"name", item_of(item).name}, {"key", item_of(item).key}, {"rank", engine_.groups().rank}};
  const double begin = now_seconds();
  try {
    folder.create();
    Made made = Made::no;
    if (!folder.end())
      made = part.kind == Kind::prepare  ? prepare(item)
             : part.kind == Kind::frames ? make_frames(item)
                                         : join(item, line);
    if (made == Made::stopped) return;
    if (const auto end = folder.end(); end && made == Made::no)
      return conclude(item, *end, results);
    line["seconds"] = now_seconds() - begin;
    add_files(line, item);
    results.finished(line);
    if (part.kind == Kind::join) folder.remove();
  } catch (const Error& e) {
    if (e.code() == Exit::stopped) return;
    const bool of_clip =
        e.code() == Exit::data || e.code() == Exit::usage || e.code() == Exit::non_finite;
    if (!of_clip) throw;
    const WorkFolder::End end{false, static_cast<int>(e.code()), e.what(), e.hint()};
    folder.note_end(end);
    conclude(item, end, results);
  }
}

// A clip that has ended: another rank has made all of it, or it has failed, which is said once.
void AnimateJob::conclude(std::int64_t item, const WorkFolder::End& end, ItemResults& results) {
  const ClipPart& part = parts_[static_cast<std::size_t>(item)];
  if (part.kind != Kind::join) return results.skipped(item);
  try {
    if (!end.whole) throw Error(static_cast<Exit>(end.code), end.what, end.hint);
    Json line = {
        {"name", item_of(item).name}, {"key", item_of(item).key}, {"rank", engine_.groups().rank}};
    add_files(line, item);
    results.finished(line);
  } catch (const Error& e) {
    results.failed(item, e);
  }
}

AnimateJob::Made AnimateJob::under_lock(const WorkFolder& folder, const std::string& file,
                                        const std::function<bool()>& make) {
  const auto go_on = [&] { return !engine_.stop_requested(); };
  if (folder.has(file)) return Made::yes;
  const double begin = now_seconds();
  const WorkLock lock(folder.path(folder.lock(file)), go_on);
  seconds_.waited += now_seconds() - begin;
  if (!lock.held()) return Made::stopped;
  if (folder.end()) return Made::no;
  if (folder.has(file)) return Made::yes;
  return make() ? Made::yes : Made::stopped;
}

AnimateJob::Made AnimateJob::prepare(std::int64_t item) {
  const ClipPart& part = parts_[static_cast<std::size_t>(item)];
  const WorkFolder folder = folder_of(item);
  return under_lock(folder, folder.prepared(), [&] {
    in_hand_.reset();  // its features make room
    in_hand_key_.clear();
    const MediaAccess access{deck_.media, [this] { return engine_.stop_requested(); }};
    const PreparedClip prepared = prepare_clip(clip_of(part), networks_, access, seconds_);
    std::int64_t planned = 0;
    for (const ClipPart& p : parts_)
      if (p.clip == part.clip && p.kind == Kind::join) planned = p.count;
    WEFT_CHECK(prepared.frames() == planned, Exit::data,
               "start again once nothing writes to its files",
               "{} has {} frames, and had {} when the job began", clip_of(part).name,
               prepared.frames(), planned);
    write_prepared(prepared, folder.path(folder.prepared()));
    return true;
  });
}

const ClipInHand& AnimateJob::in_hand(std::int64_t item) {
  const ClipRequest& clip = clip_of(parts_[static_cast<std::size_t>(item)]);
  const WorkFolder folder = folder_of(item);
  const std::string key = clip.name + "/" + item_of(item).key;
  if (in_hand_key_ == key) return *in_hand_;
  in_hand_.reset();
  const double begin = now_seconds();
  in_hand_ = std::make_unique<ClipInHand>(clip, read_prepared(folder.path(folder.prepared())),
                                          networks_.renderer(clip), deck_.media);
  seconds_.render += now_seconds() - begin;
  in_hand_key_ = key;
  return *in_hand_;
}

AnimateJob::Made AnimateJob::make_frames(std::int64_t item) {
  if (const Made made = prepare(item); made != Made::yes) return made;
  const ClipPart& part = parts_[static_cast<std::size_t>(item)];
  const ClipRequest& clip = clip_of(part);
  const WorkFolder folder = folder_of(item);
  const std::string segment = folder.segment(part.first);
  return under_lock(folder, segment, [&] {
    const fs::path& directory = engine_.settings().directory;
    fs::path pictures;
    if (clip.animate.keep_frames) {
      pictures = directory / frames_folder(clip);
      make_folders(directory, frames_folder(clip) + "/");
    }
    if (!maker_.make(in_hand(item), part.first, part.count, folder.path(segment), pictures,
                     [this] { return !engine_.stop_requested(); }))
      return false;
    frames_ += part.count;
    return true;
  });
}

// The item's file, and the frames that are kept of it.
void AnimateJob::add_files(Json& line, std::int64_t item) const {
  const ClipPart& part = parts_[static_cast<std::size_t>(item)];
  const ClipRequest& clip = clip_of(part);
  const fs::path& directory = engine_.settings().directory;
  add_file(line, directory, file_of(item));
  if (!clip.animate.keep_frames) return;
  for (std::int64_t f = part.first; f < part.first + part.count; ++f)
    add_file(line, directory, frames_folder(clip) + "/" + frame_file(f), fmt::format("frame{}", f));
}

// Waits for pieces in the hands of other ranks, and makes those that failed ranks have left: a
// piece that is not there, and that nobody holds, is nobody's.
AnimateJob::Made AnimateJob::join(std::int64_t item, Json& line) {
  const ClipPart& part = parts_[static_cast<std::size_t>(item)];
  const ClipRequest& clip = clip_of(part);
  const WorkFolder folder = folder_of(item);
  std::vector<std::string> segments;
  std::int64_t first = item;
  while (first > 0 && parts_[static_cast<std::size_t>(first - 1)].clip == part.clip) --first;
  for (std::int64_t i = first; i < item; ++i) {
    if (parts_[static_cast<std::size_t>(i)].kind != Kind::frames) {
      // A clip without frames: its preparation says why.
      if (const Made made = part.count > 0 ? Made::yes : prepare(i); made != Made::yes) return made;
      continue;
    }
    if (const Made made = make_frames(i); made != Made::yes) return made;
    segments.push_back(folder.path(file_of(i)).string());
  }
  const double begin = now_seconds();
  const fs::path result = folder.path(file_of(item));
  const std::int64_t frames =
      join_mp4(segments, {.file = clip.animate.speech}, speech_fps, result.string(),
               {deck_.media, [this] { return engine_.stop_requested(); }});
  WEFT_CHECK(frames == part.count, Exit::data, "start again", "{} has {} frames of {}",
             result.string(), frames, part.count);
  folder.note_end({true, 0, "", ""});
  if (clip.animate.keep_frames)
    remove_frames_from(frames, engine_.settings().directory / frames_folder(clip));
  seconds_.join += now_seconds() - begin;
  line["picture"] = as_utf8(clip.animate.picture);
  line["speech"] = as_utf8(clip.animate.speech);
  line["frames"] = frames;
  log::write_info(fmt::format("clip      {}  {}  rank {}", result.string(),
                              counted(frames, "frame"), engine_.groups().rank));
  return Made::yes;
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
          {"join", seconds_.join},
          {"waited", seconds_.waited}};
}

}  // namespace weft
