#include "jobs/animate/animate.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/animate/animate_job.h"
#include "parallel/rank_device.h"
#include "train/memory_plan.h"
#include "train/stop.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;
using Kind = ClipPart::Kind;

ListSettings settings_of(const Deck& deck) {
  ListSettings s;
  s.directory = deck.get<AnimateDeck>().output;
  s.command = "animate";
  s.stem = "animate";
  s.report = "animate_report.json";
  s.noun = "part";
  s.batch_is_begun = false;  // a clip is a batch of many parts
  s.key = "animate.output";
  s.stop_margin = deck.run.stop_margin;
  return s;
}

void check_clips(const std::vector<ClipRequest>& clips) {
  for (const ClipRequest& c : clips) {
    WEFT_CHECK(c.animate.enhancer.empty() || c.animate.enhancer == "gfpgan", Exit::usage,
               "take gfpgan, or leave it out", "{}: the enhancer \"{}\"", c.where,
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
    clips.insert(static_cast<std::size_t>(parts[static_cast<std::size_t>(item)].clip));
  return {clips.begin(), clips.end()};
}

// Dry runs of the clips that take most.
std::size_t plan_arena(AnimateNetworks& networks, const std::vector<std::size_t>& missing,
                       const std::vector<ClipRequest>& clips, const std::vector<ClipSize>& sizes) {
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

Json make_missing(const Deck& deck, const RankDevice& device, AnimateNetworks& networks,
                  const std::vector<ClipRequest>& clips, const std::vector<ClipSize>& sizes,
                  const std::vector<ClipPart>& parts, ListEngine& engine, Json& header) {
  const std::vector<std::size_t> missing = clips_missing(engine, parts);
  std::vector<const ClipRequest*> requests;
  for (const std::size_t c : missing) requests.push_back(&clips[c]);
  networks.load(requests, requests);
  log::info("weights   {}", networks.describe());
  std::vector<ClipCost> costs(clips.size());
  for (const std::size_t c : missing) costs[c] = networks.cost(clips[c], sizes[c]);
  SharedParts shared = share_parts(parts, engine.missing(), costs, engine.groups().count);
  const std::int64_t split = std::ssize(shared.joins), whole = std::ssize(missing) - split;
  log::info("plan      {} made by one rank each, {} by several", counted(whole, "clip"), split);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, device));
  const ArenaScope scope(*arena);
  const std::size_t needed = plan_arena(networks, missing, clips, sizes);
  if (needed > arena->capacity() && log::rank() == 0)
    log::warn(
        "the largest clip needs {}, this rank has {}: it will fail, unless sadtalker.batch_size "
        "or its picture is made smaller",
        size_text(static_cast<double>(needed)), size_text(static_cast<double>(arena->capacity())));
  log::info("memory    {} for the largest clip in the networks",
            size_text(static_cast<double>(needed)));
  header["whole_clips"] = whole;
  header["split_clips"] = split;
  AnimateJob job(deck, clips, parts, networks, engine);
  engine.run(job, std::move(shared.pieces));
  engine.run(job, std::move(shared.joins));
  Json share = job.share();
  share["peak_bytes"] = arena->peak();
  share["resident_bytes"] = resident_bytes();
  share["device"] = on_cuda() ? device_runtime().describe() : "CPU";
  return share;
}

// Clips, and where the ranks' time went.
void print_clips(const ListReport& report, const ListEngine& engine,
                 const std::vector<ClipPart>& parts, ListEnd& last) {
  Json& header = last.header;
  std::int64_t clips = 0, there = 0, frames = 0;
  const ManifestLines lines = engine.lines();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].kind != Kind::clip) continue;
    ++clips;
    const auto line = lines.find(engine.items()[i].name);
    there += line != lines.end() && is_result(line->second, engine.items()[i].key) ? 1 : 0;
  }
  last.failed = fmt::format("{} of {}", clips - there, counted(clips, "clip"));
  double seconds = 0;
  std::int64_t enhanced = 0, restored = 0;
  std::map<std::string, double> stages;
  for (const RankShare& r : report.ranks) {
    seconds = std::max(seconds, r.last_end);
    frames += r.own.value("frames", std::int64_t{0});
    enhanced += r.own.value("enhanced_frames", std::int64_t{0});
    restored += r.own.value("restored_frames", std::int64_t{0});
    for (const char* stage : {"prepare", "speech", "render", "paste", "enhance", "encode", "join"})
      stages[stage] += r.own.value(stage, 0.0);
  }
  std::string text;
  for (const auto& [stage, time] : stages)
    if (time >= 0.05) text += fmt::format("{}{} {:.1f} s", text.empty() ? "" : ", ", stage, time);
  log::write_info(fmt::format("clips     {} of {} done, in {}", there, clips,
                              engine.settings().directory.string()));
  if (frames > 0)
    log::write_info(fmt::format("frames    {} in {:.1f} s, {:.2f} frames/s; all ranks: {}", frames,
                                seconds, static_cast<double>(frames) / std::max(seconds, 1e-9),
                                text));
  if (restored > 0)
    log::write_info(
        fmt::format("gfpgan    restored a face in {} of {}", restored, counted(enhanced, "frame")));
  else if (enhanced > 0)
    log::warn(
        "gfpgan restored no face in any of {}: the detector found none of 5 pixels or more "
        "between the eyes",
        counted(enhanced, "frame"));
  header["clips"] = clips;
  header["clips_there"] = there;
  header["frames"] = frames;
  header["frames_per_second"] = seconds > 0 ? static_cast<double>(frames) / seconds : 0.0;
  if (enhanced > 0) header["restored_frames"] = restored;
}

}  // namespace

int animate(const Deck& deck, MPI_Comm world) {
  // 1. What is to be made.
  watch_stop_signals();
  const std::vector<ClipRequest> clips = list_clips(deck, world);
  check_clips(clips);
  if (log::rank() == 0) check_results(deck, clips);
  if (deck.get<AnimateDeck>().plan != "auto" && log::rank() == 0)
    log::warn(
        "animate.plan is obsolete and ignored: clips and pieces of them go to whoever is free");
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  AnimateNetworks networks(deck, clips, world);
  const std::vector<ClipSize> sizes = measure_clips(clips, deck.media, world);
  const std::vector<ClipPart> parts = parts_of(sizes, clips);
  std::vector<std::string> keys;
  std::vector<ClipCost> costs;
  for (std::size_t i = 0; i < clips.size(); ++i) {
    keys.push_back(clip_key(clips[i], networks.identity(clips[i]) + "\n" + deck.media.orientation));
    costs.push_back({0, 1, 0, sizes[i].frames});
  }
  ListEngine engine(settings_of(deck), items_of(parts, clips, costs, keys), world);
  std::int64_t frames = 0;
  for (const ClipSize& s : sizes) frames += s.frames;
  const std::size_t missing = engine.missing().size();
  log::info("animate   {} of {} into {}{}", counted(std::ssize(clips), "clip"),
            counted(frames, "frame"), engine.settings().directory.string(),
            missing < parts.size() ? fmt::format(", {} of {} made before", parts.size() - missing,
                                                 counted(std::ssize(parts), "part"))
                                   : "");

  // 2. Parts, by whoever is free.
  ListEnd last;
  if (missing > 0)
    last.share = make_missing(deck, device, networks, clips, sizes, parts, engine, last.header);

  // 3. The report.
  last.print = [&](const ListReport& report) { print_clips(report, engine, parts, last); };
  last.finish = [&](const ListReport&) { remove_segments(engine.settings().directory); };
  return engine.end(last);
}

Command animate_command() {
  Command c{"animate", "make talking heads from pictures and speech", animate};
  c.heeds_stops = true;
  c.takes_deck();
  c.key_option<std::string>("--picture", "animate.picture", "picture of a face");
  c.key_option<std::string>("--speech", "animate.speech", "what it says");
  c.key_option<std::string>("--output", "animate.output", "folder of the results");
  return c;
}

}  // namespace weft
