// `weft evaluate` of models of clips: the loss on the held-out samples of [validation], as training
// measures it.
#include <algorithm>
#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "core/mpi.h"
#include "core/progress.h"
#include "jobs/evaluate/evaluate.h"
#include "models/cite.h"
#include "models/lora.h"
#include "models/registry.h"
#include "nn/exchange.h"
#include "train/memory_plan.h"
#include "train/task.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// The network that the deck trains: a denoiser, or a codec for itself.
struct Trained {
  VideoCodec::WeightsKey weights;
  WeightNames names;
};
Trained trained_part(const Deck& deck) {
  const Model& model = *find_model(deck.model.name);
  if (model.make_denoiser)
    return {{"model.weights", deck.model.weights}, model.make_denoiser(deck)->weight_names()};
  const std::unique_ptr<VideoCodec> codec = model.make_codec(deck);
  return {codec->weights(), codec->weight_names()};
}

// The newest checkpoint of run.dir; without one the file that a training would start from.
ModelSource weights_of(const Deck& deck, const Trained& part, MPI_Comm world) {
  const bool trained = is_there(fs::path(deck.run.dir) / "latest", Exit::checkpoint);
  ModelSource source(part.weights.key, trained ? "" : part.weights.value, deck.run.dir,
                     deck.get<EvaluateDeck>().ema, world);
  if (!trained) source.add_adapters("model.adapters", lora_deck(deck).adapters, world);
  return source;
}

}  // namespace

int evaluate_held_out(const Deck& deck, const ListStart& start, MPI_Comm world) {
  // 1. What is to be evaluated.
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  const HeldOutChoice choice = evaluated_samples(deck);
  WEFT_CHECK(choice.any(), Exit::usage,
             "name a store in evaluate.data or validation.path, or the validation.share that was "
             "held out of the training",
             "there are no held-out clips to evaluate on");
  check_results(deck, {});
  const TrainingData data = open_training_data(deck.data, deck.media, choice);
  const Trained part = trained_part(deck);
  const ModelSource weights = weights_of(deck, part, world);
  const std::unique_ptr<Communicator> comm = make_communicator(world);
  const auto sp = static_cast<int>(deck.parallel.sp);
  const std::unique_ptr<Communicator> sequence =
      nn::make_sequence_group(world, sp, default_comm_timeout, comm.get());
  // Adapters are merged into the weights when these are loaded.
  Deck merged = deck;
  lora_deck(merged).rank = 0;
  const std::unique_ptr<TrainingTask> task = make_task(merged);
  task->share_clips(sequence.get());
  std::vector<Bucket> buckets = data.training->buckets();
  if (data.held_out.clips)
    buckets.insert(buckets.end(), data.held_out.clips->buckets().begin(),
                   data.held_out.clips->buckets().end());
  task->open(buckets);
  weights.load(task->params(), part.names, task->bf16());
  const std::unique_ptr<ValidationSet> set = task->validation_set(data.held_out);
  log::info("evaluate  {} of {}", counted(set->items().size(), "clip"),
            choice.path.empty()
                ? fmt::format("{}, the share of {} that was held out", deck.data.path, choice.share)
                : choice.path);
  log::info("weights   {}", weights.describe());

  const auto clips = static_cast<std::int64_t>(set->items().size());
  if (comm->rank() == 0) make_folders(e.output, Exit::data, "choose another evaluate.output");
  Progress progress({fs::path(e.output) / "status.json", "evaluate", "clip", "evaluate", clips, 0,
                     comm->rank(), comm->size(), citations(deck, "evaluate")});

  // 2. Clips through the model.
  begin_part("clips");
  const std::size_t capacity = arena_capacity(deck.memory, start.device);
  const std::size_t planned = set->plan(capacity);
  const auto arena = Arena::reserve(capacity);
  const ArenaScope scope(*arena);
  Validation validation(*set, *comm, {comm->rank() / sp, comm->size() / sp, comm->rank() % sp});
  const double begin = now_seconds();
  double busy = 0;
  std::int64_t begun = 0;
  const ValidationResult result = validation.run(
      [&] {
        const std::int64_t done = std::min(clips, begun++ * (comm->size() / sp));
        progress.advance(done, static_cast<double>(done), static_cast<double>(clips));
      },
      [&] { busy = now_seconds() - begin; });
  JobWork work{"clip", static_cast<double>(clips)};
  const double own[] = {now_seconds() - begin, busy};
  begin_part("end");
  work.on_gpu = on_cuda();
  work.threads = threads_of_rank();
  work.hosts = texts_of_ranks(host_name(), world);
  std::vector<double> all(2 * work.hosts.size()), network, idle;
  MPI_Allgather(own, 2, MPI_DOUBLE, all.data(), 2, MPI_DOUBLE, world);
  for (std::size_t r = 0; r < all.size(); r += 2) work.seconds = std::max(work.seconds, all[r]);
  for (std::size_t r = 1; r < all.size(); r += 2) {
    network.push_back(all[r]);
    idle.push_back(work.seconds - all[r]);
  }
  work.parts = {{"network", std::move(network)}, {"idle", std::move(idle)}};
  log::info("memory    {} at the peak, {} planned", size_text(static_cast<double>(arena->peak())),
            size_text(static_cast<double>(planned)));

  // 3. Rank 0 writes.
  if (comm->rank() != 0) return 0;
  Json j = parse_json<Json>(result.json(0));
  j.erase("step");
  j["clips"] = result.items;
  j["facts"] = {{"model", task->describe()},
                {"weights", weights.describe()},
                {"data", evaluated_data(deck)},
                {"build", version_line()}};
  const std::string table = result.text() + "\n";
  const auto write = [&](const char* name, const std::string& text) {
    replace_file(fs::path(e.output) / name, text, Exit::data, Durable::no);
  };
  write("evaluation.json", dump_json(j, 2, ' ', false, Json::error_handler_t::replace) + "\n");
  write("evaluation.txt", table);
  fmt::print("{}", table);
  log::write_info(fmt::format("results   {}", (fs::path(e.output) / "evaluation.json").string()));
  progress.set_work(std::move(work));
  progress.end(0, clips);
  return 0;
}

}  // namespace weft
