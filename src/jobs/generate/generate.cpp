#include "jobs/generate/generate.h"

#include <mpi.h>

#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "checkpoint/model_source.h"
#include "config/deck.h"
#include "config/keep_inputs.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "data/clip_source.h"
#include "data/clip_store.h"
#include "jobs/engine/list_job.h"
#include "jobs/generate/clip_maker.h"
#include "jobs/generate/clip_writer.h"
#include "jobs/generate/job.h"
#include "jobs/generate/options.h"
#include "jobs/generate/references.h"
#include "jobs/generate/texts.h"
#include "models/flow_sampler.h"
#include "models/registry.h"
#include "nn/exchange.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"
#include "train/memory_plan.h"
#include "train/stop.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// ---- What makes clips, before its weights are loaded

// Exit::usage for a deck whose parts do not fit together.
struct ClipModels {
  ClipParts parts;
  std::vector<WeightSet> sets;
  ModelSource denoiser_weights;
  std::optional<ModelSource> high_noise_weights;  // where they are another file
  std::optional<ModelSource> codec_weights;       // none of a codec without parameters

  ClipModels(const Deck& deck, MPI_Comm world)
      : parts(deck),
        sets(parts.denoiser->weight_sets()),
        denoiser_weights("generate.weights", of_set(deck, 0), deck.run.dir,
                         deck.get<GenerateDeck>().ema, world) {
    const GenerateDeck& g = deck.get<GenerateDeck>();
    denoiser_weights.add_adapters("generate.adapters", g.adapters, world);
    const std::string high = of_set(deck, 1);
    WEFT_CHECK((g.weights_high_noise.empty() && g.adapters_high_noise.empty()) || !sets.empty(),
               Exit::usage, "set sampler.boundary, or leave both out",
               "generate.weights_high_noise or adapters_high_noise is set, and {} is one model",
               parts.denoiser->name());
    WEFT_CHECK(sets.empty() || !high.empty() || holds_both(deck), Exit::usage,
               "name it as generate.weights_high_noise, or a folder that holds both as "
               "generate.weights",
               "sampler.boundary asks for two experts, and {} is one", denoiser_weights.describe());
    WEFT_CHECK(g.experts != "in_turn" || sets.empty() || !high.empty(), Exit::usage,
               "name each expert's weights by themselves, or their folder",
               "generate.experts is \"in_turn\", and {} is both experts in one",
               denoiser_weights.describe());
    WEFT_CHECK(g.adapters_high_noise.empty() || !high.empty(), Exit::usage,
               "name each expert's weights by themselves, or their folder",
               "generate.adapters_high_noise is set, and {} is both experts in one",
               denoiser_weights.describe());
    if (!sets.empty() && !high.empty()) {
      high_noise_weights.emplace("generate.weights_high_noise", high, "", g.ema, world);
      high_noise_weights->add_adapters("generate.adapters_high_noise", g.adapters_high_noise,
                                       world);
    }
    if (parts.codec->params().all().empty()) return;
    const VideoCodec::WeightsKey weights = parts.codec->weights();
    codec_weights.emplace(weights.key, weights.value, "", deck.get<GenerateDeck>().ema, world);
    parts.codec->check_weights(*codec_weights);
  }
  // Stands for the weights in the clips' keys.
  std::string identity() const {
    return denoiser_weights.identity() + "; " +
           (high_noise_weights ? high_noise_weights->identity() + "; " : "") +
           (codec_weights ? codec_weights->identity() : "");
  }
  // in_turn: the experts have one memory. Both are read, so that faults show before the first clip;
  // that of high noise, which clips begin with, stays.
  void load_denoiser(bool in_turn) {
    Denoiser& model = *parts.denoiser;
    if (!high_noise_weights)
      return denoiser_weights.load(model.params(), model.weight_names(), model.bf16());
    if (in_turn) model.params().share_memory(sets[0].names.prefix, sets[1].names.prefix);
    model.params().allocate_for_inference(model.bf16());
    for (const bool high_noise : {false, true}) read_expert(high_noise);
  }
  // Unless it was the last that was read.
  void read_expert(bool high_noise) {
    if (last_read_ == high_noise) return;
    last_read_.reset();
    try {
      (high_noise ? *high_noise_weights : denoiser_weights)
          .read(parts.denoiser->params(), sets[high_noise ? 1 : 0].names);
    } catch (const Error& e) {
      throw Error(e).for_job();  // no clip is to blame
    }
    last_read_ = high_noise;
  }

 private:
  std::optional<bool> last_read_;

  // Whether generate.weights is both by itself: a file with the names of both, or random numbers.
  bool holds_both(const Deck& deck) const {
    if (is_random_source(deck.get<GenerateDeck>().weights)) return true;
    const std::optional<WeightFiles> files = denoiser_weights.files();
    return files && std::ranges::any_of(files->tensors(), [&](const WeightFiles::Tensor& t) {
             return t.entry.name.starts_with(sets[1].names.prefix);
           });
  }
  // The deck's weights of that set; of both in one folder, the set's own. Empty: there are none of
  // their own.
  std::string of_set(const Deck& deck, std::size_t number) const {
    const GenerateDeck& g = deck.get<GenerateDeck>();
    if (sets.empty() || !g.weights_high_noise.empty())
      return number == 0 ? g.weights : g.weights_high_noise;
    for (const std::string& folder : sets[number].folders) {
      const fs::path path = fs::path(g.weights) / folder;
      if (!g.weights.empty() && is_there(path, Exit::data)) return path;
    }
    return number == 0 ? g.weights : "";
  }
};

// Where scale and shift are those of the latents at data.path, both models must be the latents',
// too. Exit::data otherwise.
void check_latents(const Deck& deck, const ClipModels& models) {
  check_codec_of_latents(deck, *models.parts.codec, *models.codec_weights);
  const std::string trained_on = models.denoiser_weights.notes().data_id;
  WEFT_CHECK(
      trained_on.empty() || trained_on == open_clip_source(deck.data, deck.media)->content_id(),
      Exit::data,
      "name the latents of that training, or set scale and shift (`weft inspect STORE` tells them)",
      "data.path = {} is not the data that {} was trained on, and its latents have another scale "
      "and shift",
      deck.data.path, models.denoiser_weights.describe());
}

// Joins each rank of a group's first half to one of its second; null where a rank makes both
// branches.
std::unique_ptr<Communicator> make_branches(const Deck& deck, MPI_Comm world) {
  if (deck.get<GenerateDeck>().cfg_ranks == 1) return nullptr;
  const int sp = static_cast<int>(deck.parallel.sp);
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  MPI_Comm pair = MPI_COMM_NULL;
  MPI_Comm_split(world, rank / (2 * sp) * sp + rank % sp, rank, &pair);
  auto branches = make_communicator(pair, deck.parallel.hang_timeout);
  MPI_Comm_free(&pair);
  return branches;
}

// ---- Clips as a list job: a rank's state while it makes them

class ClipJob : public ListJob {
 public:
  // Collective: loads the weights, and fits batches and the codec's micro-batch to the memory of
  // the engine's missing clips.
  ClipJob(const Deck& deck, const GenerateJob& job, ClipModels& models,
          const PromptFeatures& features, std::shared_ptr<const Watermark> watermark,
          const RankDevice& device, ListEngine& engine, MPI_Comm world)
      : models_(models),
        engine_(engine),
        first_(engine.groups().first),
        exchange_(nn::make_sequence_group(world, deck.parallel.sp, deck.parallel.hang_timeout)),
        branches_(make_branches(deck, world)) {
    Denoiser& model = *models.parts.denoiser;
    VideoCodec& codec = *models.parts.codec;
    const std::vector<std::int64_t>& order = engine.missing();
    model.set_sequence_group(exchange_.get());
    const bool in_turn =
        experts_in_turn(deck, job, models.parts, arena_capacity(MemoryDeck(), device)) &&
        models.high_noise_weights;
    models.load_denoiser(in_turn);
    if (first_ && models.codec_weights)
      models.codec_weights->load(codec.params(), codec.weight_names(), codec.bf16());
    log::info(
        "weights   {}{}; {} {}", models.denoiser_weights.describe(),
        models.high_noise_weights ? " and for high noise " + models.high_noise_weights->describe()
                                  : "",
        codec.name(), models.codec_weights ? models.codec_weights->describe() : "without weights");
    if (in_turn)
      log::info("experts   in turn: one is in memory ({:.1f} GiB), and read again for its steps",
                gib(model.params().inference_bytes(model.bf16())));
    capacity_ = arena_capacity(deck.memory, device);
    BatchLimits limits = limit_batches(deck, job, order, engine.groups().count);
    fit_batches(deck, job, order, models.parts, capacity_, limits, world);
    planned_ = fit_memory(deck, job, order, limits, models.parts, capacity_, first_);
    batches_ = make_batches(deck, job, order, limits);
    arena_ = Arena::reserve(capacity_);
    scope_.emplace(*arena_);
    if (first_) frames_ = plan_frames(deck, job, order, codec);
    maker_.emplace(deck, job, model, codec, features, engine.groups().group, branches_.get(),
                   in_turn ? [&models](bool high_noise) { models.read_expert(high_noise); }
                           : std::function<void(bool)>());
    writer_.emplace(engine.settings().directory, std::move(watermark), engine.groups().rank,
                    frames_.piece,
                    [this](const nlohmann::ordered_json& line) { engine_.finished(line); });
  }

  // Which clips are sampled together, costliest first.
  const std::vector<ItemBatch>& batches() const { return batches_; }

  void make(const ItemBatch& clips) override {
    maker_->make(clips, *writer_,
                 [&](std::int64_t clip, const Error& e) { engine_.failed(clip, e); });
  }
  void flush() override {
    for (const ClipWriter::Failure& f : writer_->finish()) {
      const auto item = std::ranges::find(engine_.items(), f.name, &ListItem::name);
      engine_.failed(item - engine_.items().begin(), Error(Exit::data, f.why, "is the disk full?"));
    }
  }

  // This rank's numbers for the report: seconds by stage, bytes next to their plans.
  nlohmann::ordered_json share() const {
    const auto bytes = [](auto& part) { return part.params().inference_bytes(part.bf16()); };
    const std::size_t weights = bytes(*models_.parts.denoiser) +
                                (first_ && models_.codec_weights ? bytes(*models_.parts.codec) : 0);
    return {{"encode", maker_->times().encode},
            {"sample", maker_->times().sample},
            {"decode", maker_->times().decode},
            {"write", writer_->busy_seconds()},
            {"write_wait", writer_->waited_seconds()},
            {"steps", maker_->times().steps},
            {"steps_skipped", maker_->times().skipped},
            {"weights_bytes", static_cast<double>(weights)},
            {"arena_planned_bytes", static_cast<double>(planned_)},
            {"arena_peak_bytes", static_cast<double>(arena_->peak())},
            {"arena_capacity_bytes", static_cast<double>(capacity_)},
            {"frames_planned_bytes", static_cast<double>(frames_.bytes)},
            {"resident_bytes", static_cast<double>(resident_bytes())},
            {"micro_batch", static_cast<double>(models_.parts.codec->frames_at_once(
                                std::numeric_limits<std::int32_t>::max()))}};
  }

 private:
  ClipModels& models_;
  ListEngine& engine_;
  const bool first_;                        // of its group: decodes and writes
  std::unique_ptr<Communicator> exchange_;  // of the model, with parallel.sp
  std::unique_ptr<Communicator> branches_;  // of the halves of guidance, with generate.cfg_ranks
  std::size_t capacity_, planned_ = 0;      // bytes of the arena
  std::vector<ItemBatch> batches_;
  std::unique_ptr<Arena> arena_;
  std::optional<ArenaScope> scope_;
  FramePlan frames_;
  std::optional<ClipMaker> maker_;
  std::optional<ClipWriter> writer_;
};

// The table of ranks at the end of the log.
void print_clip_table(const ListReport& report) {
  if (report.made == 0 && report.failures.empty()) return;
  log::write_info(
      "rank  clips  busy%  encode s  sample s  decode s  write s  arena MiB peak/planned/capacity  "
      "frames planned MiB  frames at once");
  for (std::size_t r = 0; r < report.ranks.size(); ++r) {
    const auto of = [&](const char* name) { return report.ranks[r].value(name, 0.0); };
    const auto mib = [&](const char* name) { return of(name) / (1 << 20); };
    log::write_info(fmt::format(
        "{:4}  {:5}  {:5.1f}  {:8.1f}  {:8.1f}  {:8.1f}  {:7.1f}  {:8.1f}/{:.1f}/{:.0f}  "
        "{:.2f}  {}",
        r, static_cast<std::int64_t>(of("clips")), 100 * of("busy_share"), of("encode"),
        of("sample"), of("decode"), of("write"), mib("arena_peak_bytes"),
        mib("arena_planned_bytes"), mib("arena_capacity_bytes"), mib("frames_planned_bytes"),
        static_cast<std::int64_t>(of("micro_batch"))));
  }
}

// What a step cache saved, of all ranks.
void print_skipped_steps(const ListReport& report) {
  std::int64_t steps = 0, skipped = 0;
  for (const auto& share : report.ranks) {
    steps += share.value("steps", std::int64_t{0});
    skipped += share.value("steps_skipped", std::int64_t{0});
  }
  if (skipped > 0) log::write_info(fmt::format("cache     {} of {} steps skipped", skipped, steps));
}

// ---- The job

fs::path output_of(const Deck& deck) {
  const std::string& named = deck.get<GenerateDeck>().output;
  return named.empty() ? fs::path(deck.run.dir) / "generated" : fs::path(named);
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
  ListSettings s = list_settings(deck, "generate", output_of(deck), "clip");
  s.stem = "generated";
  s.group = static_cast<int>(deck.parallel.sp * deck.get<GenerateDeck>().cfg_ranks);
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
  if (!parts.encodes_texts() && parts.denoiser->has_null_caption() && log::rank() == 0)
    log::warn("{}: every clip is made with the null caption, whatever its prompt",
              parts.texts ? parts.texts->lacks() : "the model has no text encoder");
}

nlohmann::ordered_json report_header(const Deck& deck, const EncodedTexts& texts) {
  nlohmann::ordered_json header = {
      {"ranks_a_clip", deck.parallel.sp * deck.get<GenerateDeck>().cfg_ranks}};
  for (const auto& [part, seconds] : wall_parts()) header["seconds"][part] = seconds;
  if (!texts.bytes_taken.empty())
    header["text"] = {{"bytes_planned", texts.bytes_planned}, {"bytes_taken", texts.bytes_taken}};
  return header;
}

}  // namespace

int generate(const Deck& written, MPI_Comm world) {
  // 1. The clips to make. Everything is checked before any weights are loaded.
  const ListStart start = start_list_job(written, world);
  const Deck deck = complete_deck(written, world);
  ClipModels models(deck, world);
  if (log::rank() == 0 && models.codec_weights && !make_codec(written)->lacks_scale().empty())
    check_latents(deck, models);
  if (models.parts.encodes_texts() && log::rank() == 0)
    check_text_encoder(models.denoiser_weights.notes().text_encoder,
                       models.denoiser_weights.describe(), *models.parts.texts);
  ListSettings settings = settings_of(deck);
  int ranks = 0;
  MPI_Comm_size(world, &ranks);
  WEFT_CHECK(deck.get<GenerateDeck>().cfg_ranks == 1 || ranks % settings.group == 0, Exit::usage,
             "start a multiple of them, or lower parallel.sp or generate.cfg_ranks",
             "{} cannot form groups of parallel.sp times generate.cfg_ranks = {}",
             counted(ranks, "rank"), settings.group);
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
  begin_part("text");
  if (missing > 0) check_texts(models.parts);
  const PromptFeatures features(missing > 0 ? models.parts.texts.get() : nullptr, job.texts,
                                output_of(deck), world, [&] { return engine.stop_requested(); });

  // 3. The other models on every rank, then clips: a rank that is free makes the next batch.
  ListEnd last;
  last.stages = {"encode", "sample", "decode", "write_wait"};
  if (missing > 0 && !features.encoded().stopped) {
    begin_part("weights");
    ClipJob clips(deck, job, models, features, watermark, start.device, engine, world);
    engine.run(clips, clips.batches());
    last.share = clips.share();
  }

  // 4. The report.
  last.summarise = [&](const ListReport& report) {
    print_clip_table(report);
    print_skipped_steps(report);
    return ListSummary{report_header(deck, features.encoded())};
  };
  return engine.end(last);
}

Command generate_command() {
  Command c{"generate", "make clips from prompts: text encoder, denoiser and codec over all ranks",
            generate};
  c.handles_stop_signals = true;
  takes_list_job(c);
  return c;
}

}  // namespace weft
