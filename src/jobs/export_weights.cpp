// `weft export`.
#include <map>
#include <optional>
#include <string>

#include "checkpoint/adapter.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/weights.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "jobs/generate/options.h"
#include "jobs/jobs.h"
#include "models/dbnet/dbnet.h"
#include "models/registry.h"
#include "models/segmentation/segmentation.h"
#include "models/video_vae/options.h"
#include "models/video_vae/video_vae.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

struct ExportRequest {
  std::string run;     // a run directory (its newest usable checkpoint) or one checkpoint directory
  std::string output;  // NAME.safetensors
  bool ema = false;    // export the moving average (EMA) of the weights
  bool raw = false;    // of adapters: not that, although weft generate takes it
  double ema_decay = -1;  // of several, that of this decay; -1: the first of train.ema_decay
  std::string dtype = "f32";
  double shard_size = 0;  // GB (10^9 bytes) of a shard; 0: one file
  std::string latents;    // of a VAE: a store that `weft encode` made with it; "": none
  bool merged = false;    // of a run of adapters: the base's weights with the adapters in them
  std::string base;       // of these: the base, if it is no longer where the run had it
  std::string names;      // of a run of adapters: whose; "": PEFT's
  bool replace = false;

  bool by_decay() const { return ema_decay >= 0; }
  std::optional<double> decay() const {
    return by_decay() ? std::optional(ema_decay) : std::nullopt;
  }
  // Adapters are exported as samples have them.
  bool average(bool adapters, const Deck& deck) const {
    return ema || by_decay() || (adapters && !raw && deck.get<GenerateDeck>().ema);
  }
  std::string what(bool average) const {
    return by_decay() ? fmt::format("moving average of decay {}", ema_decay)
           : average  ? "moving average (EMA)"
                      : "raw weights";
  }
};

constexpr const char* weights_ending = ".safetensors";

Checkpoint open_checkpoint(const std::string& run) {
  if (is_there(fs::path(run) / "manifest.json", Exit::checkpoint)) return Checkpoint::open(run);
  std::optional<Checkpoint> newest = Checkpoint::newest(run, MPI_COMM_SELF);
  WEFT_CHECK(newest.has_value(), Exit::checkpoint, "name a run directory or a step_N in it",
             "{} holds no checkpoint", run);
  return *newest;
}

DType dtype_named(const std::string& name) {
  return name == "bf16" ? DType::bf16 : name == "f16" ? DType::f16 : DType::f32;
}

std::vector<float> as_floats(const std::vector<double>& values) {
  return {values.begin(), values.end()};
}

// The scale and shift in a VAE's exported weights.
std::map<std::string, std::vector<float>> constants(const ExportRequest& request,
                                                    const VaeDeck& vae) {
  std::vector<float> scale = as_floats(vae.scale), shift = as_floats(vae.shift);
  if (!request.latents.empty()) {
    const auto store = open_clip_store(request.latents, false);
    const Bucket& bucket = store->buckets().at(0);
    WEFT_CHECK(!bucket.scale.empty(), Exit::data,
               "name a store of latents that `weft encode` made with this VAE",
               "{} tells no scale and shift", request.latents);
    scale = bucket.scale, shift = bucket.shift;
  } else if (!scale.empty() && vae.weights.empty() && vae.scale == VaeDeck().scale) {
    log::warn(
        "scale and shift are those of the released VAE, but this VAE was trained: --latents "
        "STORE takes what `weft encode` measured with vae.scale = []");
  }
  // Without measured latents there are none.
  if (scale.empty()) return {};
  return {{"scale", scale}, {"shift", shift}};
}

// Into the model, f32: the base's weights with the adapters of a checkpoint added.
void load_merged(const ExportRequest& request, const Adapter& adapter, Denoiser& model) {
  const std::string& base = request.base.empty() ? adapter.facts.base : request.base;
  WEFT_CHECK(is_there(base, Exit::data), Exit::data, "say where the base is: --base FILE",
             "the base of these adapters, {}, does not exist", base);
  load_weights(base, model.params(), model.weight_names());
  check_base(adapter.path, adapter.facts, base, hash_of_values(model.params()));
  const WeightedAdapter whole{adapter, 1};
  merge_adapters(model.params(), std::span(&whole, 1), model.weight_names());
}

void check_target(const ExportRequest& request) {
  const fs::path output = request.output;
  for (const fs::path& file :
       {output, fs::path(request.output + ".index.json"), output / "adapter_model.safetensors",
        output / "adapter_config.json"})
    WEFT_CHECK(request.replace || fs::is_directory(file) || !is_there(file, Exit::checkpoint),
               Exit::checkpoint, "choose another output, or give --replace to replace it",
               "{} is there already", file.string());
}

// The adapters of a run, under the names of PEFT, ComfyUI or kohya.
int export_adapter(const ExportRequest& request, const Checkpoint& checkpoint, bool average) {
  using enum AdapterNames;
  const AdapterNames names = request.names == "comfy"   ? comfy
                             : request.names == "kohya" ? kohya
                                                        : peft;
  WEFT_CHECK(
      request.output.ends_with(weights_ending) == (names != peft) && request.shard_size == 0,
      Exit::usage,
      names == peft
          ? "name a folder, a file with --names comfy or kohya, or export whole weights: --merged"
          : "name one file, NAME.safetensors",
      "{} is a run of adapters, which are {}: {} {}", request.run,
      names == peft ? "a folder of two files" : "one file", request.output,
      request.shard_size != 0 ? "in shards is none"
      : names == peft         ? "is a file's name"
                              : "is none");
  const Adapter adapter = adapter_of(checkpoint, average, request.decay());
  write_adapter(request.output, adapter, names, dtype_named(request.dtype));
  log::info("adapters of {} of step {} ({}, {}) in {}: {}",
            counted(std::ssize(adapter.layers), "layer"), checkpoint.info().step,
            request.what(average), request.dtype, request.output, adapter.facts.describe());
  return 0;
}

// A VAE's file also has the buffers "scale" and "shift", but not the discriminator that it was
// trained against. The buffers come from `latents`, if given, where encode has measured them,
// otherwise from the run's deck; if that has none, they are left out.
int export_weights(const ExportRequest& request) {
  WEFT_CHECK(request.shard_size == 0 || request.output.ends_with(weights_ending), Exit::usage,
             "name the output NAME.safetensors: shards and index are named after it",
             "{} does not end in {}", request.output, weights_ending);
  const Checkpoint checkpoint = open_checkpoint(request.run);
  const bool adapters = adapter_facts(checkpoint).has_value();
  WEFT_CHECK(adapters || (!request.merged && request.base.empty()), Exit::usage,
             "leave --merged and --base out", "{} is a run of whole weights, not of adapters",
             request.run);
  WEFT_CHECK(
      request.names.empty() || (adapters && !request.merged), Exit::usage, "leave it out",
      "--names is for adapters alone, {}",
      adapters ? "--merged gives whole weights" : request.run + " is a run of whole weights");
  WEFT_CHECK(request.merged || request.base.empty(), Exit::usage, "add --merged",
             "--base is for --merged: adapters alone need none");
  WEFT_CHECK(!request.raw || !(request.ema || request.by_decay()), Exit::usage,
             "choose one of them", "--raw and --ema or --ema-decay");
  check_target(request);
  const Deck deck =
      parse_deck(checkpoint.info().deck, checkpoint.dir().string() + "/manifest.json", {});
  const bool average = request.average(adapters, deck);
  if (adapters && !request.merged) return export_adapter(request, checkpoint, average);
  const auto arena = Arena::reserve(std::size_t{1} << 32);
  const ArenaScope scope(*arena);
  SaveWeights how;
  how.dtype = dtype_named(request.dtype);
  how.shard_bytes = static_cast<std::uint64_t>(request.shard_size * 1e9);
  std::unique_ptr<Denoiser> model;
  std::optional<VideoVae> vae;
  std::optional<Segmentation> segmentation;
  std::optional<Dbnet> detector;
  if (deck.model.name == "vae") {
    vae.emplace(deck.get<VaeDeck>());
    how.buffers = constants(request, deck.get<VaeDeck>());
  } else {
    WEFT_CHECK(request.latents.empty(), Exit::usage, "leave --latents out",
               "--latents is for VAEs, {} is a run of {}", request.run, deck.model.name);
    if (deck.model.name == "segmentation")
      segmentation.emplace(deck.get<SegmentationDeck>());
    else if (deck.model.name == "dbnet")
      detector.emplace(deck.get<DbnetDeck>(), deck.get<DbnetDeck>().deformable == "on");
    else
      model = make_denoiser(deck);
  }
  ParameterTable& params = vae            ? vae->params()
                           : segmentation ? segmentation->params()
                           : detector     ? detector->params()
                                          : model->params();
  params.allocate_for_inference(false);
  const MayLack lacks = vae ? vae->weight_names().spare : nullptr;
  if (adapters)
    load_merged(request, adapter_of(checkpoint, average, request.decay()), *model);
  else if (average)
    restore_ema(checkpoint, params, request.decay(), lacks);
  else
    restore_state(checkpoint, params, lacks);
  save_weights(request.output, params, how);
  log::info("{} tensors of step {} ({}, {}) in {}", params.all().size() + how.buffers.size(),
            checkpoint.info().step, request.what(average), request.dtype, request.output);
  return 0;
}

}  // namespace

Command export_command() {
  const auto r = std::make_shared<ExportRequest>();
  Command c{"export", "write a run's weights as safetensors under the released names",
            [r](const Deck&, MPI_Comm) { return export_weights(*r); }};
  c.first_rank_only = true;
  c.path("run", r->run, "run or checkpoint directory").required = true;
  c.path("output", r->output,
         "safetensors file to write; of a run of adapters (LoRA) a folder, see --names")
      .required = true;
  c.option("--merged", r->merged,
           "of a run of adapters: its base with the adapters merged into it");
  c.option("--names", r->names,
           "of a run of adapters: whose names they get (peft: a folder; the others: one file)")
      .choices = {"peft", "comfy", "kohya"};
  c.path("--base", r->base, "for --merged: the base, if it is not where the run had it");
  c.option("--ema", r->ema,
           "export the moving average (EMA) of the weights; of adapters the default");
  c.option("--raw", r->raw,
           "of adapters: export the raw weights, not the average that samples have");
  c.number("--ema-decay", r->ema_decay, 0, 1,
           "of several moving averages (train.ema_decay), export that of this decay");
  c.option("--dtype", r->dtype, "number format (f32)").choices = {"f32", "bf16", "f16"};
  c.number("--shard-size", r->shard_size, 0, 1e9,
           "GB of a file; more make shards with an index (else one file)");
  c.option("--replace", r->replace, "replace an output that is there");
  c.path("--latents", r->latents,
         "of a VAE: the store of latents whose measured scale and shift go along");
  return c;
}

}  // namespace weft
