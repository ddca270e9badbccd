#include "jobs/generate/generate.h"

#include <algorithm>

#include "checkpoint/model_source.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "jobs/clip_queue.h"
#include "jobs/generate/clip_maker.h"
#include "jobs/generate/clip_writer.h"
#include "jobs/generate/memory.h"
#include "jobs/generate/options.h"
#include "jobs/generate/prompts/prompt_sources.h"
#include "jobs/generate/report.h"
#include "jobs/lost_ranks.h"
#include "models/stdit3/options.h"
#include "models/t5/options.h"
#include "models/video_vae/options.h"
#include "parallel/rank_device.h"
#include "tensor/arena.h"
#include "train/memory_plan.h"
#include "train/stop.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

fs::path output_of(const Deck& deck) {
  return deck.get<GenerateDeck>().output.empty() ? fs::path(deck.run.dir) / "generated"
                                                 : fs::path(deck.get<GenerateDeck>().output);
}

// Rank 0's keys for all: times of files, which are in them, may differ from node to node where each has its own copy.
void agree_on_keys(GenerateJob& job, MPI_Comm world) {
  for (ClipItem& item : job.items)
    MPI_Bcast(item.key.data(), static_cast<int>(item.key.size()), MPI_CHAR, 0, world);
}

// Which of the job's clips are to be made, in the order in which they are.
std::vector<std::int64_t> missing_items(const Deck& deck, const GenerateJob& job, MPI_Comm world) {
  std::vector<char> done(job.items.size(), 0);
  if (log::rank() == 0) {
    const fs::path directory = output_of(deck);
    const auto finished = ClipManifest::gather(directory);
    for (std::size_t i = 0; i < done.size(); ++i)
      done[i] = is_finished(finished, job.items[i].name, job.items[i].key, directory) ? 1 : 0;
  }
  MPI_Bcast(done.data(), static_cast<int>(done.size()), MPI_CHAR, 0, world);
  std::vector<std::int64_t> order = job.longest_first();
  // Dealt out beforehand, the clips stay in their order, as a range of prompts a process.
  if (!deck.get<GenerateDeck>().share_out) std::sort(order.begin(), order.end());
  std::erase_if(order, [&](std::int64_t i) { return done[static_cast<std::size_t>(i)] != 0; });
  return order;
}

// Failures of one clip that leave this rank able to make others. What fails in the middle of a group's exchanges does not.
bool may_go_on(const Error& e, const ClipGroups& groups) {
  return e.code() == Exit::data || e.code() == Exit::non_finite ||
         (e.code() == Exit::usage && groups.size == 1);
}

// Of a batch that a lost rank has left, the clips that are to be made here.
ClipBatch left_of(std::int64_t place, const ClipGroups& groups, OrderedClips& clips,
                  const ClipQueue& queue, RankRoll& roll) {
  ClipBatch left;
  if (groups.first) {
    left = clips.left(place);
    for (const std::int64_t clip : clips.batch(place))
      if (std::find(left.begin(), left.end(), clip) == left.end()) roll.note_settled(clip);
    for (const std::int64_t clip : left)
      if (queue.from_lost())
        log::warn("{} was in the hands of a rank that is lost: made here", clips.name(clip));
  }
  groups.share(left);
  return left;
}

// Batch after batch, until there are none.
GenerateShare make_clips(const ClipGroups& groups, OrderedClips& clips, ClipQueue& queue,
                         RankRoll& roll, ClipMaker& maker, ClipWriter& writer, MPI_Comm world,
                         std::vector<std::string>& failures) {
  GenerateShare mine;
  const auto written = [&] {
    for (const std::string& failure : writer.finish()) {
      failures.push_back(failure);
      log::warn("clip {}", failure);
      --mine.clips;
    }
  };
  MPI_Barrier(world);
  // From here on each group is on its own.
  roll.watch(groups.mates(), [&](int rank) { leave_group(roll, rank); });
  const double start = now_seconds();
  const auto failed = [&](std::int64_t clip, const Error& e) {
    if (!may_go_on(e, groups)) throw;
    if (!groups.first) return;
    failures.push_back(fmt::format("{}: {}", clips.name(clip), e.what()));
    roll.note_failed(clip, failures.back());
    log::warn("clip {} failed: {} ({})", clips.name(clip), e.what(), e.hint());
  };
  for (;;) {
    std::int64_t place = queue.next();
    const bool left = place < 0;
    if (left) {
      written();
      if ((place = queue.leftover()) < 0) break;
    }
    ClipBatch batch = clips.batch(place);
    if (left) batch = left_of(place, groups, clips, queue, roll);
    const double begin = now_seconds();
    try {
      mine.clips += maker.make(batch, writer, failed);
      if (groups.first) ++mine.batches[std::to_string(batch.size())];
    } catch (const Error& e) {
      for (const std::int64_t clip : batch) failed(clip, e);
    }
    mine.last_end = now_seconds() - start;
    mine.busy += now_seconds() - begin;
    queue.took(now_seconds() - begin);
  }
  mine.stopped = queue.asked_to_stop() ? 1 : 0;
  mine.failed = static_cast<std::int64_t>(failures.size());
  mine.encode = maker.times().encode;
  mine.sample = maker.times().sample;
  mine.decode = maker.times().decode;
  mine.write = writer.busy_seconds();
  mine.write_wait = writer.waited_seconds();
  return mine;
}

int end(const Deck& deck, const GenerateReport& report, bool speaks) {
  if (speaks) {
    ClipManifest::gather(output_of(deck));
    report.print();
    // A job that found everything done leaves the report of the one that did it.
    if (report.made() > 0 || !report.failures.empty()) report.write(output_of(deck));
  }
  const bool stopped = std::any_of(report.ranks.begin(), report.ranks.end(),
                                   [](const GenerateShare& r) { return r.stopped > 0; });
  if (!report.failures.empty()) {
    Error e(Exit::data, fmt::format("{} of {} clips failed", report.failures.size(), report.wanted),
            "see the lines above; the same command makes only what is missing");
    if (speaks) log::tell(e);
    return static_cast<int>(Exit::data);
  }
  if (stopped && report.made() + report.finished_before < report.wanted) {
    if (speaks) log::write_info("stopped on request: run the same command to go on");
    return static_cast<int>(Exit::stopped);
  }
  return 0;
}

int make_all(const Deck& deck, MPI_Comm world) {
  // 1. What is to be made. Nothing is loaded before all of it is known to be in order.
  watch_stop_signals();
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  Stdit3 model(stdit3_config(deck));
  VideoVae vae(deck.get<VaeDeck>());
  WEFT_CHECK(deck.get<Stdit3Deck>().in_channels == TemporalVae::latent_channels, Exit::usage,
             "weft sample makes clips with models of pixels",
             "model.in_channels = {}, the VAE's latents have {}",
             deck.get<Stdit3Deck>().in_channels, TemporalVae::latent_channels);
  WEFT_CHECK(!deck.get<VaeDeck>().scale.empty(), Exit::usage,
             "weft inspect on the store of latents tells what `weft encode` measured",
             "vae.scale and vae.shift are empty: latents of the model cannot be decoded");
  const ModelSource model_source("generate.weights", deck.get<GenerateDeck>().weights, deck.run.dir,
                                 deck.get<GenerateDeck>().ema, world);
  const ModelSource vae_source("vae.weights", deck.get<VaeDeck>().weights, "",
                               deck.get<GenerateDeck>().ema, world);
  const auto asked_to_stop = [] { return stop_signal() != 0; };
  std::vector<Prompt> prompts = read_prompts(
      deck.get<GenerateDeck>(),
      refine_by(deck.get<GenerateDeck>().refine, output_of(deck), world, asked_to_stop),
      deck.media);
  fetch_references(prompts, deck.get<GenerateDeck>(), {deck.media, asked_to_stop}, output_of(deck),
                   world);
  GenerateJob job = plan_generate_job(
      deck, std::move(prompts), model, vae,
      model_source.identity() + "; " + vae_source.identity() + "; " +
          (deck.get<T5Deck>().weights.empty() ? "" : folder_identity(deck.get<T5Deck>().weights)));
  agree_on_keys(job, world);
  compare_scale(vae_source, deck.get<VaeDeck>());
  std::shared_ptr<const Watermark> watermark;
  if (!deck.get<GenerateDeck>().watermark.empty())
    watermark = std::make_shared<Watermark>(deck.get<GenerateDeck>().watermark, deck.media);
  const std::vector<std::int64_t> order = missing_items(deck, job, world);
  const auto wanted = static_cast<std::int64_t>(job.items.size());
  const auto missing = static_cast<std::int64_t>(order.size());
  log::info("generate  {} clips of {} prompts into {}{}", wanted, job.prompts.size(),
            output_of(deck).string(),
            missing < wanted ? fmt::format(", {} finished before", wanted - missing) : "");

  RankRoll roll(output_of(deck) / ".ranks", world);
  roll.watch(roll.neighbour(), [&](int rank) { end_for_lost(roll, rank, world); });

  // 2. All texts through T5, whose memory is given back.
  GenerateStages stages;
  const double begin = now_seconds();
  Requests requests(output_of(deck), deck.run.stop_margin);
  const PromptFeatures features(deck, job.texts, output_of(deck), missing > 0, world,
                                [&] { return (requests.look(0, 0) & wish::stop) != 0; });
  if (features.encoded().stopped) {
    log::info("stopped on request: run the same command to go on");
    return static_cast<int>(Exit::stopped);
  }
  stages.text = now_seconds() - begin;

  // 3. The other models, on every rank.
  GenerateShare mine;
  std::vector<std::string> failures;
  std::unique_ptr<Arena> arena;
  const int sp = static_cast<int>(deck.parallel.sp);
  const auto exchange = nn::make_sequence_group(world, sp, deck.parallel.hang_timeout);
  const ClipGroups groups(world, sp);
  OrderedClips clips(output_of(deck), job, roll);
  std::unique_ptr<ClipQueue> queue;
  if (missing > 0) {
    model.set_sequence_group(exchange.get());
    model_source.load(model.params(), {}, deck.model.dtype == "bf16");
    if (groups.first)
      vae_source.load(vae.params(), vae_weight_names(), deck.get<VaeDeck>().dtype == "bf16");
    log::info("weights   {}; VAE {}", model_source.describe(), vae_source.describe());
    const std::size_t capacity = arena_capacity(deck.memory, device);
    BatchLimits limits = limit_batches(deck, job, order, groups.count);
    fit_batches(deck, job, order, model, capacity, limits, world);
    const std::size_t planned =
        fit_memory(deck, job, order, limits, model, vae, capacity, groups.first);
    clips.set_batches(make_batches(deck, job, order, limits));
    arena = Arena::reserve(capacity);
    const ArenaScope scope(*arena);
    stages.load = now_seconds() - begin - stages.text;

    // 4. Clips, whoever is free the next batch.
    ClipMaker maker(deck, job, model, vae, features, groups.group);
    const FramePlan frames = groups.first ? plan_frames(deck, job, order, vae) : FramePlan();
    ClipWriter writer(output_of(deck), watermark, groups.rank, frames.piece);
    queue = std::make_unique<ClipQueue>(
        deck, output_of(deck), groups, roll, clips.count(),
        [&](int rank, std::int64_t place) { return clips.settled(rank, place); });
    mine = make_clips(groups, clips, *queue, roll, maker, writer, world, failures);
    mine.frames_planned = static_cast<double>(frames.bytes);
    mine.frames_peak = static_cast<double>(FrameMemory::peak());
    mine.arena_planned = static_cast<double>(planned);
    mine.arena_peak = static_cast<double>(arena->peak());
    mine.arena_capacity = static_cast<double>(capacity);
    mine.weights = static_cast<double>(
        model.params().inference_bytes(deck.model.dtype == "bf16") +
        (groups.first ? vae.params().inference_bytes(deck.get<VaeDeck>().dtype == "bf16") : 0));
    mine.resident = static_cast<double>(resident_bytes());
    mine.micro_batch = static_cast<double>(vae.micro_batch());
    stages.clips = now_seconds() - begin - stages.text - stages.load;
  }

  // 5. What it took.
  roll.note_end(last_word(mine, failures));
  roll.wait_for_ends();
  GenerateReport report =
      read_report(roll, [&](int rank, std::int64_t place) { return clips.taken(rank, place); });
  const bool speaks = report.speaker == roll.rank();
  if (speaks && !report.lost.empty()) count_left(report, roll, clips);
  report.stages = stages;
  report.wanted = wanted;
  report.finished_before = wanted - missing;
  report.ranks_a_clip = sp;
  report.share_out = deck.get<GenerateDeck>().share_out;
  report.text_planned = features.encoded().bytes_planned;
  report.text_taken = features.encoded().bytes_taken;
  const int code = end(deck, report, speaks);
  // The launcher may end the job with the first that leaves: the others wait for the one that speaks.
  if (speaks) roll.note_told();
  while (!speaks && !roll.lost(report.speaker) &&
         (!report.lost.empty() || !roll.state(report.speaker).told))
    roll.pause();
  // MPI would wait for those that are lost, also for one that is lost only now.
  if (!report.lost.empty()) leave_job(code, speaks, world);
  roll.watch(roll.neighbour(), [=](int) { leave_job(code, speaks, world); });
  return code;
}

}  // namespace

int generate(const Deck& deck, MPI_Comm world) {
  const int code = make_all(deck, world);
  int ranks = 1;
  MPI_Comm_size(world, &ranks);
  if (code == 0 || ranks == 1 || exit_codes_pass()) return code;
  Error e(static_cast<Exit>(code), "");
  e.set_told();
  throw e;
}

Command generate_command() {
  Command c{"generate", "make clips from prompts: T5, STDiT3 and VAE over all ranks", generate};
  c.heeds_stops = true;
  c.takes_deck();
  return c;
}

}  // namespace weft
