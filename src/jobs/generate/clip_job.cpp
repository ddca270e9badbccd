#include "jobs/generate/clip_job.h"

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "jobs/generate/options.h"
#include "models/flow_sampler.h"
#include "nn/exchange.h"
#include "train/memory_plan.h"

namespace weft {

ClipModels::ClipModels(const Deck& deck, MPI_Comm world)
    : parts(deck),
      denoiser_weights("generate.weights", deck.get<GenerateDeck>().weights, deck.run.dir,
                       deck.get<GenerateDeck>().ema, world) {
  if (parts.codec->params().all().empty()) return;
  const VideoCodec::WeightsKey weights = parts.codec->weights();
  codec_weights.emplace(weights.key, weights.value, "", deck.get<GenerateDeck>().ema, world);
  parts.codec->check_weights(*codec_weights);
}

std::string ClipModels::identity() const {
  return denoiser_weights.identity() + "; " + (codec_weights ? codec_weights->identity() : "") +
         "; " + (parts.texts ? parts.texts->weights_identity() : "");
}

ClipJob::ClipJob(const Deck& deck, const GenerateJob& job, ClipModels& models,
                 const PromptFeatures& features, std::shared_ptr<const Watermark> watermark,
                 const RankDevice& device, const ListEngine& engine, MPI_Comm world)
    : deck_(deck),
      models_(models),
      first_(engine.groups().first),
      exchange_(nn::make_sequence_group(world, deck.parallel.sp, deck.parallel.hang_timeout)) {
  Denoiser& model = *models.parts.denoiser;
  VideoCodec& codec = *models.parts.codec;
  const std::vector<std::int64_t>& order = engine.missing();
  model.set_sequence_group(exchange_.get());
  models.denoiser_weights.load(model.params(), model.weight_names(), model.bf16());
  if (first_ && models.codec_weights)
    models.codec_weights->load(codec.params(), codec.weight_names(), codec.bf16());
  log::info("weights   {}; {} {}", models.denoiser_weights.describe(), codec.name(),
            models.codec_weights ? models.codec_weights->describe() : "as they are");
  capacity_ = arena_capacity(deck.memory, device);
  BatchLimits limits = limit_batches(deck, job, order, engine.groups().count);
  fit_batches(deck, job, order, models.parts, capacity_, limits, world);
  planned_ = fit_memory(deck, job, order, limits, models.parts, capacity_, first_);
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
  const auto bytes = [](auto& part) { return part.params().inference_bytes(part.bf16()); };
  const std::size_t weights = bytes(*models_.parts.denoiser) +
                              (first_ && models_.codec_weights ? bytes(*models_.parts.codec) : 0);
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
          {"micro_batch", static_cast<double>(models_.parts.codec->frames_at_once(
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
