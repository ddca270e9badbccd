#include "jobs/generate/clip_job.h"

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/generate/options.h"
#include "models/stdit3/options.h"
#include "models/t5/options.h"
#include "models/video_vae/options.h"
#include "nn/exchange.h"
#include "train/memory_plan.h"

namespace weft {

ClipModels::ClipModels(const Deck& deck, MPI_Comm world)
    : model(stdit3_config(deck)),
      codec(deck),
      model_source("generate.weights", deck.get<GenerateDeck>().weights, deck.run.dir,
                   deck.get<GenerateDeck>().ema, world) {
  codec.open_weights(deck, world);
}

std::string ClipModels::identity(const Deck& deck) const {
  return model_source.identity() + "; " + codec.identity() + "; " +
         (deck.get<T5Deck>().weights.empty() ? "" : folder_identity(deck.get<T5Deck>().weights));
}

ClipJob::ClipJob(const Deck& deck, const GenerateJob& job, ClipModels& models,
                 const PromptFeatures& features, std::shared_ptr<const Watermark> watermark,
                 const RankDevice& device, const ListEngine& engine, MPI_Comm world)
    : deck_(deck),
      models_(models),
      first_(engine.groups().first),
      exchange_(nn::make_sequence_group(world, deck.parallel.sp, deck.parallel.hang_timeout)) {
  Stdit3& model = models.model;
  ClipCodec& codec = models.codec;
  const std::vector<std::int64_t>& order = engine.missing();
  model.set_sequence_group(exchange_.get());
  models.model_source.load(model.params(), {}, deck.model.dtype == "bf16");
  if (first_) codec.load_weights();
  log::info("weights   {}; VAE {}", models.model_source.describe(), codec.describe());
  capacity_ = arena_capacity(deck.memory, device);
  BatchLimits limits = limit_batches(deck, job, order, engine.groups().count);
  fit_batches(deck, job, order, model, capacity_, limits, world);
  planned_ = fit_memory(deck, job, order, limits, model, codec, capacity_, first_);
  batches_ = make_batches(deck, job, order, limits);
  arena_ = Arena::reserve(capacity_);
  scope_.emplace(*arena_);
  if (first_) frames_ = plan_frames(deck, job, order, codec);
  maker_.emplace(deck, job, model, codec, features, engine.groups().group);
  writer_.emplace(engine.settings().directory, std::move(watermark), engine.groups().rank,
                  frames_.piece,
                  [this](const FinishedClip& clip) { results_->finished(manifest_line(clip)); });
}

void ClipJob::make(const ItemBatch& clips, ItemResults& results) {
  if (results_ == nullptr) results_ = &results;  // the writer thread reads it from then on
  maker_->make(clips, *writer_,
               [&](std::int64_t clip, const Error& e) { results.failed(clip, e); });
}

void ClipJob::flush(ItemResults& results) {
  for (const ClipWriter::Failure& f : writer_->finish()) results.failed(f.name, f.why);
}

nlohmann::ordered_json ClipJob::share() const {
  const auto weights = models_.model.params().inference_bytes(deck_.model.dtype == "bf16") +
                       (first_ ? models_.codec.weight_bytes() : 0);
  return {{"encode", maker_->times().encode},
          {"sample", maker_->times().sample},
          {"decode", maker_->times().decode},
          {"write", writer_->busy_seconds()},
          {"write_wait", writer_->waited_seconds()},
          {"weights_bytes", static_cast<double>(weights)},
          {"arena_planned_bytes", static_cast<double>(planned_)},
          {"arena_peak_bytes", static_cast<double>(arena_->peak())},
          {"arena_capacity_bytes", static_cast<double>(capacity_)},
          {"frames_planned_bytes", static_cast<double>(frames_.bytes)},
          {"frames_peak_bytes", static_cast<double>(FrameMemory::peak())},
          {"resident_bytes", static_cast<double>(resident_bytes())},
          {"micro_batch", static_cast<double>(models_.codec.frames_at_once(
                              std::numeric_limits<std::int32_t>::max()))}};
}

void print_clip_table(const ListReport& report) {
  if (report.made() == 0 && report.failures.empty()) return;
  log::write_info(
      "rank  clips  busy%  encode s  sample s  decode s  write s  arena MiB peak/planned/there  "
      "frames MiB peak/planned  frames at once");
  const std::vector<double> shares = report.busy_shares();
  for (std::size_t r = 0; r < report.ranks.size(); ++r) {
    const RankShare& s = report.ranks[r];
    const auto of = [&](const char* name) { return s.own.value(name, 0.0); };
    const auto mib = [&](const char* name) { return of(name) / (1 << 20); };
    log::write_info(fmt::format(
        "{:4}  {:5}  {:5.1f}  {:8.1f}  {:8.1f}  {:8.1f}  {:7.1f}  {:8.1f}/{:.1f}/{:.0f}  "
        "{:.2f}/{:.2f}  {}",
        r, s.made, 100 * shares[r], of("encode"), of("sample"), of("decode"), of("write"),
        mib("arena_peak_bytes"), mib("arena_planned_bytes"), mib("arena_capacity_bytes"),
        mib("frames_peak_bytes"), mib("frames_planned_bytes"),
        static_cast<std::int64_t>(of("micro_batch"))));
  }
}

}  // namespace weft
