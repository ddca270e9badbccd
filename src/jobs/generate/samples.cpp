#include "jobs/generate/samples.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "checkpoint/checkpoint.h"
#include "checkpoint/model_source.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/mpi.h"
#include "data/step_plan.h"
#include "jobs/generate/clip_writer.h"
#include "models/registry.h"
#include "nn/exchange.h"
#include "train/trainer.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

void rows(Rows& r, SamplesDeck& d) {
  r.text("prompts", d.prompts,
         "Prompts of the clips that a training of a video model makes meanwhile.");
  r.number("every", d.every, 0, many,
           "Steps between two sets of these clips, each with a checkpoint; 0: none.");
}

void check(const SamplesDeck& d, const DeckDemand& demand) {
  demand(d.every == 0 || !d.prompts.empty(), "samples.every is set, and samples.prompts is empty",
         "name prompts, such as samples.prompts = [\"a boat on a lake\"]");
}

}  // namespace

DeckTable samples_table() {
  DeckTable table = deck_table("samples", rows, check);
  table.next = "parallel";
  return table;
}

Deck samples_deck(const Deck& deck) {
  const Model* model = find_model(deck.model.name);
  WEFT_CHECK(model != nullptr && model->make_denoiser != nullptr, Exit::usage,
             "leave [samples] out", "samples.every is set, and model.name = \"{}\" makes no clips",
             deck.model.name);
  Deck own = deck;
  auto& g = own.get<GenerateDeck>();
  const GenerateDeck none;
  g.prompts = deck.get<SamplesDeck>().prompts;
  g.prompt_file = g.prompt_generator = g.refine = g.weights = g.watermark = "";
  g.references = g.mask_strategies = {};
  g.start_index = none.start_index;
  g.end_index = none.end_index;
  g.cfg_ranks = none.cfg_ranks;
  WEFT_CHECK(model->make_denoiser(own)->weight_sets().empty(), Exit::usage,
             "make clips of both when they are trained (weft generate), and leave out "
             "sampler.boundary and boundary_step or samples.every here",
             "samples.every = {} with sampler.boundary: a training has one of the two experts",
             deck.get<SamplesDeck>().every);
  return own;
}

TrainingSamples::TrainingSamples(const Deck& deck, MPI_Comm world)
    : deck_(complete_deck(samples_deck(deck), world)),
      run_dir_(deck.run.dir),
      world_(world),
      parts_(deck_) {
  int size = 1;
  MPI_Comm_rank(world, &rank_);
  MPI_Comm_size(world, &size);
  const int sp = static_cast<int>(deck.parallel.sp);
  group_number_ = rank_ / sp;
  groups_ = size / sp;
  first_ = rank_ % sp == 0;
  exchange_ = nn::make_sequence_group(world, sp, deck.parallel.hang_timeout);
  if (sp > 1) MPI_Comm_split(world, group_number_, rank_, &group_);
  parts_.check_texts();
  if (!parts_.encodes_texts() && parts_.denoiser->has_null_caption() && log::rank() == 0)
    log::warn("{}: every sample is made with the null caption, whatever its prompt",
              parts_.texts ? parts_.texts->lacks() : "the model has no text encoder");
  if (parts_.encodes_texts() && rank_ == 0)
    check_text_encoder(encoder_of_captions(deck.data), deck.data.path, *parts_.texts);
  job_ = plan_generate_job(deck_, read_prompts(deck_, parts_.encodes_texts()), parts_,
                           "training " + deck.run.dir);
  if (rank_ == 0) make_own_folder(run_dir_ / "samples", Exit::data);
  features_ =
      std::make_unique<PromptFeatures>(parts_.texts.get(), job_.texts, run_dir_ / "samples", world);
  Denoiser& model = *parts_.denoiser;
  model.set_sequence_group(exchange_.get());
  model.params().allocate_for_inference(model.bf16());
  VideoCodec& codec = *parts_.codec;
  if (codec.params().all().empty()) return;
  const VideoCodec::WeightsKey key = codec.weights();
  const ModelSource weights(key.key, key.value, "", deck_.get<GenerateDeck>().ema, world);
  codec.check_weights(weights);
  if (rank_ == 0) check_codec_of_latents(deck, codec, weights);
  if (first_) weights.load(codec.params(), codec.weight_names(), codec.bf16());
}

std::size_t TrainingSamples::plan(std::size_t capacity) {
  const std::vector<std::int64_t> order = job_.longest_first();
  BatchLimits limits = limit_batches(deck_, job_, order, groups_);
  fit_batches(deck_, job_, order, parts_, capacity, limits, world_);
  const std::size_t bytes = fit_memory(deck_, job_, order, limits, parts_, capacity, first_);
  batches_ = make_batches(deck_, job_, order, limits);
  if (first_) frames_ = plan_frames(deck_, job_, order, *parts_.codec);
  return bytes;
}

std::string TrainingSamples::describe() const {
  std::size_t bytes = parts_.denoiser->params().inference_bytes(parts_.denoiser->bf16());
  if (first_) bytes += parts_.codec->params().inference_bytes(parts_.codec->bf16());
  return fmt::format("{} of {}, every {}, by the {}; {} of weights beside the training's",
                     counted(std::ssize(job_.items), "clip"),
                     counted(std::ssize(job_.prompts), "prompt"),
                     counted(deck_.get<SamplesDeck>().every, "step"),
                     deck_.get<GenerateDeck>().ema ? "moving average (EMA)" : "weights",
                     size_text(static_cast<double>(bytes)));
}

fs::path TrainingSamples::folder(std::int64_t step) const {
  return run_dir_ / "samples" / std::to_string(step);
}

bool TrainingSamples::made(std::int64_t step) const {
  int there = rank_ == 0 && is_there(folder(step) / "generated.jsonl", Exit::data) ? 1 : 0;
  MPI_Bcast(&there, 1, MPI_INT, 0, world_);
  return there != 0;
}

void TrainingSamples::make(std::int64_t step, const std::function<void()>& progress) {
  // 1. The weights of the step, as they were saved.
  const std::optional<Checkpoint> checkpoint = Checkpoint::newest(run_dir_, world_);
  WEFT_CHECK(checkpoint && checkpoint->info().step == step, Exit::checkpoint,
             "check the log for what became of it", "the checkpoint of step {} is not there", step);
  const GenerateDeck& g = deck_.get<GenerateDeck>();
  Denoiser& model = *parts_.denoiser;
  ModelSource weights("generate.weights", checkpoint->dir().string(), "", g.ema, world_);
  weights.add_adapters("generate.adapters", g.adapters, world_);
  weights.read(model.params(), model.weight_names());
  if (rank_ == 0) make_own_folder(folder(step), Exit::data);
  MPI_Barrier(world_);

  // 2. This rank's clips.
  std::vector<double> costs;
  for (const ClipBatch& batch : batches_)
    costs.push_back(job_.items[batch.front()].cost * static_cast<double>(batch.size()));
  const std::vector<int> owners = share_out(costs, groups_);
  std::mutex mutex;
  std::string lines;
  {
    ClipMaker maker(deck_, job_, model, *parts_.codec, *features_, group_);
    ClipWriter writer(folder(step), nullptr, rank_, frames_.piece, [&](const Json& line) {
      const std::lock_guard lock(mutex);
      lines += dump_json(line) + "\n";
    });
    for (std::size_t b = 0; b < batches_.size(); ++b) {
      if (owners[b] != group_number_) continue;
      progress();
      maker.make(batches_[b], writer, [&](std::int64_t item, const Error& e) {
        log::warn("sample {} of step {}: {}", job_.items[item].name, step, e.what());
      });
    }
    for (const ClipWriter::Failure& f : writer.finish())
      log::warn("sample {} of step {}: {}", f.name, step, f.why);
  }
  progress();

  // 3. The list of all of them, in their order.
  std::map<std::string, std::string> by_name;
  for (const std::string& of_rank : gather_texts(lines, world_))
    for (std::size_t at = 0; at < of_rank.size();) {
      const std::size_t end = of_rank.find('\n', at);
      const std::string line = of_rank.substr(at, end - at);
      by_name[parse_json<Json>(line).at("name")] = line;
      at = end + 1;
    }
  if (rank_ != 0) return;
  std::string text;
  for (const ClipItem& item : job_.items)
    if (const auto line = by_name.find(item.name); line != by_name.end())
      text += seal_json(line->second) + "\n";
  replace_file(folder(step) / "generated.jsonl", text, Exit::data, Durable::no);
}

}  // namespace weft
