#include "jobs/generate/generate.h"

#include <algorithm>
#include <set>

#include "config/keep_inputs.h"
#include "core/clock.h"
#include "core/log.h"
#include "jobs/engine/list_job.h"
#include "jobs/generate/clip_job.h"
#include "jobs/generate/options.h"
#include "jobs/generate/prompts/prompt_sources.h"
#include "parallel/rank_device.h"
#include "train/stop.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

fs::path output_of(const Deck& deck) {
  return deck.get<GenerateDeck>().output.empty() ? fs::path(deck.run.dir) / "generated"
                                                 : fs::path(deck.get<GenerateDeck>().output);
}

// Reads and refines the prompts, fetches their references, and plans their clips.
GenerateJob plan_clips(const Deck& deck, const ClipModels& models, MPI_Comm world) {
  const auto stop = [] { return stop_signal() != 0; };
  std::vector<Prompt> prompts =
      read_prompts(deck, models.parts.encodes_texts(),
                   refine_by(deck.get<GenerateDeck>().refine, output_of(deck), world, stop));
  fetch_references(prompts, deck.get<GenerateDeck>(), {deck.media, stop}, output_of(deck), world);
  return plan_generate_job(deck, std::move(prompts), models.parts, models.identity());
}

std::shared_ptr<const Watermark> open_watermark(const Deck& deck) {
  if (deck.get<GenerateDeck>().watermark.empty()) return nullptr;
  return std::make_shared<Watermark>(deck.get<GenerateDeck>().watermark, deck.media);
}

ListSettings settings_of(const Deck& deck) {
  ListSettings s;
  s.directory = output_of(deck);
  s.command = "generate";
  s.stem = "generated";
  s.report = "generate_report.json";
  s.key = "generate.output";
  s.stop_margin = deck.run.stop_margin;
  s.group = static_cast<int>(deck.parallel.sp);
  s.shared = deck.get<GenerateDeck>().share_out;
  return s;
}

// No clip may replace an input.
void check_results(const Deck& deck, const GenerateJob& job) {
  const fs::path output = absolute_path(output_of(deck) / "").parent_path();
  std::set<std::string> names;
  for (const ClipItem& clip : job.items)
    for (const char* ending : {".png", ".mp4", "_watermark.png", "_watermark.mp4"})
      names.insert(clip.name + ending);
  std::vector<std::string> inputs;
  for (const Prompt& p : job.prompts)
    inputs.insert(inputs.end(), p.references.begin(), p.references.end());
  keep_inputs(deck, "generate.output", inputs, [&](const fs::path& path) {
    return path.parent_path() == output && names.contains(path.filename().string());
  });
}

std::vector<ListItem> items_of(const GenerateJob& job) {
  std::vector<ListItem> items;
  for (const ClipItem& clip : job.items) items.push_back({clip.name, clip.key, clip.cost});
  return items;
}

// Exit::usage where the texts' features do not fit; warns where there are none.
void check_texts(const ClipParts& parts) {
  parts.check_texts();
  if (!parts.encodes_texts() && log::rank() == 0)
    log::warn("{}: every clip is made with the null caption, whatever its prompt",
              parts.texts ? parts.texts->lacks() : "the model has no text encoder");
}

// Seconds of the stages on this rank.
struct Stages {
  double begin = now_seconds(), text = 0, load = 0, clips = 0;
  double since_last() const { return now_seconds() - begin - text - load - clips; }
};

nlohmann::ordered_json report_header(const Deck& deck, const Stages& stages,
                                     const EncodedTexts& texts) {
  nlohmann::ordered_json header = {
      {"ranks_a_clip", deck.parallel.sp},
      {"share_out", deck.get<GenerateDeck>().share_out},
      {"seconds", {{"text", stages.text}, {"load", stages.load}, {"clips", stages.clips}}}};
  if (!texts.bytes_taken.empty())
    header["text"] = {{"bytes_planned", texts.bytes_planned}, {"bytes_taken", texts.bytes_taken}};
  return header;
}

}  // namespace

int generate(const Deck& written, MPI_Comm world) {
  // 1. The clips to make. Everything is checked before any weights are loaded.
  watch_stop_signals();
  const RankDevice device = choose_device(written.device.kind, written.device.share, world);
  set_threads(static_cast<int>(written.run.threads), device.host_ranks);
  const Deck deck = with_scale_of_latents(written, world);
  ClipModels models(deck, world);
  ListSettings settings = settings_of(deck);
  // Answers of refine are kept in the folder.
  if (!deck.get<GenerateDeck>().refine.empty())
    settings.lock = lock_output(settings.directory, settings.key);
  const GenerateJob job = plan_clips(deck, models, world);
  if (log::rank() == 0) check_results(deck, job);
  const std::shared_ptr<const Watermark> watermark = open_watermark(deck);
  ListEngine engine(settings, items_of(job), world);
  const std::size_t wanted = job.items.size(), missing = engine.missing().size();
  log::info("generate  {} of {} into {}{}", counted(wanted, "clip"),
            counted(std::ssize(job.prompts), "prompt"), output_of(deck).string(),
            missing < wanted ? fmt::format(", {} finished before", wanted - missing) : "");

  // 2. All texts through the text encoder, whose memory is then freed.
  Stages stages;
  if (missing > 0) check_texts(models.parts);
  const PromptFeatures features(missing > 0 ? models.parts.texts.get() : nullptr, job.texts,
                                output_of(deck), world, [&] { return engine.stop_requested(); });
  stages.text = stages.since_last();

  // 3. The other models on every rank, then clips: a rank that is free makes the next batch.
  ListEnd last;
  if (missing > 0 && !features.encoded().stopped) {
    ClipJob clips(deck, job, models, features, watermark, device, engine, world);
    stages.load = stages.since_last();
    engine.run(clips, clips.batches());
    last.share = clips.share();
    stages.clips = stages.since_last();
  }

  // 4. The report.
  last.header = report_header(deck, stages, features.encoded());
  last.print = [&](const ListReport& report) {
    print_clip_table(report);
    log::write_info(fmt::format("stages    text {:.1f} s, weights {:.1f} s, clips {:.1f} s",
                                stages.text, stages.load, stages.clips));
  };
  return engine.end(last);
}

Command generate_command() {
  Command c{"generate", "make clips from prompts: text encoder, denoiser and codec over all ranks",
            generate};
  c.heeds_stops = true;
  c.takes_deck();
  return c;
}

}  // namespace weft
