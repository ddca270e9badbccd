// The rows of the tables that config/deck.h declares, and the list of all tables.
#include <algorithm>
#include <map>
#include <utility>

#include "config/deck_table.h"
#include "core/log.h"

namespace weft {
namespace {

std::vector<std::string>& model_names() {
  static std::vector<std::string> names;
  return names;
}

void run_rows(Rows& r, RunDeck& d) {
  r.path("dir", d.dir, "Directory of the run: checkpoints, metrics, samples, report.");
  r.number("seed", d.seed, 0, many, "Seed of every random number of the run.").fixed = true;
  r.flag("resume", d.resume,
         "Resume from the run's newest checkpoint if there is one; false starts a new run.");
  r.number(
      "threads", d.threads, 0, 4096,
      "Processor threads a rank uses; 0: OMP_NUM_THREADS, or else its share of the host's cores.");
  r.flag("trace", d.trace, "Write RUN/trace.json for Perfetto: what every rank did when.");
  r.text("profile", d.profile,
         "Time every operation and print a table at the end, of rank 0: by operation, or by "
         "operation and shapes; \"\" does not. On GPUs it runs without graphs.",
         {"", "operations", "shapes"});
  r.number("stop_margin", d.stop_margin, 0, 1e6,
           "Seconds before the end of the job (of Slurm, of PBS, or run.max_hours) at which a run "
           "saves and stops by itself.");
  r.number("max_hours", d.max_hours, 0, 1e6,
           "Hours that the program may run, as a job's time limit; 0: no limit of its own.");
}

void device_rows(Rows& r, DeviceDeck& d) {
  r.text("kind", d.kind, "Where the work is done; auto takes a GPU if there is one.",
         {"auto", "cpu", "cuda"});
  r.flag("share", d.share,
         "Let several ranks use one GPU; they then reduce through the host (for tests).");
  r.flag("graphs", d.graphs,
         "On GPUs, record the work of a micro-batch once for each shape and replay it.");
  r.flag("tf32", d.tf32,
         "On GPUs, let products and convolutions in f32 round their factors to TF32, as PyTorch's "
         "convolutions do.");
  r.text("try", d.tried,
         "Ways of computing that no GPU has run yet, to be taken where they agree with the tested "
         "ones and are faster; weft doctor lists them.",
         {"five", "fp8", "gelu_sums", "kept", "second_stream"});
}

void memory_rows(Rows& r, MemoryDeck& d) {
  r.number("arena_gib", d.arena_gib, 0, 1e6,
           "Memory for the activations of a step in GiB a rank; 0 reserves what the host has for "
           "each rank and touches what a step needs.");
}

void media_rows(Rows& r, MediaDeck& d) {
  r.number("max_gib", d.max_gib, 0, 1e6, "Largest video or picture file that is read, in GiB.");
  r.number("max_hours", d.max_hours, 0, 1e6, "Longest video, in hours.");
  r.number("max_frames", d.max_frames, 1, many, "Most frames of a video.");
  r.number("max_megapixels", d.max_megapixels, 1e-6, 2000,
           "Largest frame: height times width in millions of pixels.");
  r.number(
      "timeout", d.timeout, 0, 1e9,
      "Seconds that reading and decoding one file, or fetching it, may take; 0 sets no limit.");
  r.number("max_list_mib", d.max_list_mib, 0, 1e6,
           "Largest list of footage or file of prompts, in MiB.");
  r.number("max_download_mib", d.max_download_mib, 0, 1e9,
           "Largest file fetched from an address that a prompt names, in MiB; 0 fetches none.");
  r.text(
      "orientation", d.orientation,
      "Pictures that a camera marked as turned or mirrored (EXIF): upright, as viewers show them, "
      "or as they are stored. Videos are always turned as their containers say.",
      {"upright", "stored"});
}

void data_rows(Rows& r, DataDeck& d) {
  Option& path =
      r.path("path", d.path,
             "A store of clips or labelled images, or synthetic:key=value,..., shapes:... or "
             "text:... for data made in memory; to train a text detector also a .jsonl list of "
             "pictures with polygons, or a .txt list or a folder with ICDAR's gt_NAME.txt. A list "
             "of stores of clips trains on all of them.");
  path.fixed = true;
  path.list = &d.paths;
  r.number(
       "weights", d.weights, 0, 1e9,
       "Each store's part of the samples, where there are several, in any unit; 0 leaves one out. "
       "Empty: as many as each has clips.")
      .fixed = true;
  r.text("prompt_prefixes", d.prompt_prefixes,
         "Texts, one for each store, put before the captions of its clips (weft encode); \"\" for "
         "none.")
      .fixed = true;
  r.text("keep", d.keep,
         "Share of the clips of some buckets that an epoch trains on, as BUCKET=SHARE with 0 to 1; "
         "BUCKET is a bucket's name or its beginning, up to a dash. All clips of the others are "
         "kept.")
      .fixed = true;
  r.path("text_features", d.text_features,
         "A safetensors file with T5 features of the captions; empty trains on the null caption.")
      .fixed = true;
  r.number("readers", d.readers, 0, 256,
           "Threads a rank reads clips with; 0 chooses from the cores it has.");
  r.number("prefetch", d.prefetch, 1, 1024, "Micro-batches a rank reads ahead.");
  r.flag("verify", d.verify, "Check the hash of every clip that is read.");
  r.number("max_damaged", d.max_damaged, 0, 1,
           "Share of the clips that may be damaged: each is replaced by the next intact one of its "
           "bucket, the same in every run. 0 ends the job at the first.");
  const auto of_images = [](Option& o) { o.fixed = true; };
  of_images(r.number("short_sides", d.short_sides, 8, 65536,
                     "Labelled images: short sides in pixels. A micro-batch trains at one drawn "
                     "from them; an evaluation takes all."));
  of_images(r.number("max_side", d.max_side, 8, 65536,
                     "Longest side in pixels that an image is scaled to."));
  of_images(
      r.number("padding", d.padding, 1, 256,
               "Sides are rounded up to a multiple of this: 8, or 32 for models of stride 32."));
  of_images(
      r.number("label_rate", d.label_rate, 1, 256,
               "Pixels of a side for each label of training: 8, or 4 for UPerNet and HRNet."));
  of_images(
      r.number("pad_label", d.pad_label, -1, 254,
               "Class of the padding: 0 as in the original, or -1 to leave it out of the loss."));
  of_images(r.number("crop", d.crop, 32, 8192,
                     "Pictures with text: side in pixels of the squares that are trained on; a "
                     "multiple of 32."));
  of_images(r.flag("augment", d.augment,
                   "Flip, turn, crop and colour pictures with text at random; false only scales "
                   "them."));
}

void check_data(const Deck& deck, const DeckDemand& demand) {
  const DataDeck& d = deck.data;
  const std::int64_t stores = std::ssize(d.all_paths());
  const auto one_each = [&](const char* key, std::int64_t count) {
    demand(
        count == 0 || count == stores,
        fmt::format("data.{} has {}, and data.path names {}", key,
                    counted(count, "entry", "entries"), counted(stores, "store")),
        fmt::format("give data.{} one entry for each store of data.path, in the same order", key));
  };
  demand(std::ranges::find(d.paths, "") == d.paths.end(), "data.path names an empty text",
         "name a store in each entry of the list");
  one_each("weights", std::ssize(d.weights));
  demand(d.weights.empty() || std::ranges::any_of(d.weights, [](double w) { return w > 0; }),
         "data.weights are all 0", "give at least one store a weight above 0");
  one_each("prompt_prefixes", std::ssize(d.prompt_prefixes));
  demand(d.text_features.empty() ||
             std::ranges::all_of(d.prompt_prefixes, [](const auto& p) { return p.empty(); }),
         "data.prompt_prefixes cannot be put before the captions of data.text_features, which are "
         "features already",
         "leave out data.prompt_prefixes, or compute the features with the prefixes");
}

// [model] begins and ends with the keys of any model; the shape of STDiT3 is in between.
void model_rows(Rows& r, ModelDeck& d) {
  r.text("name", d.name, "The model that is trained; the shape of a VAE is in [vae].",
         model_names())
      .decides = false;
}

void model_rows_behind(Rows& r, ModelDeck& d) {
  r.text("dtype", d.dtype,
         "Number format of weights and activations. fp8 is bf16, but the blocks' linear layers "
         "multiply in e4m3, forward and for the gradient of their input (stdit3 and wan).",
         {"f32", "bf16", "fp8"});
  Option& recompute =
      r.number("recompute", d.recompute, 0, 1,
               "Share of the blocks whose activations are recomputed instead of kept (gradient "
               "checkpointing).");
  recompute.fixed = recompute.decides = false;
  r.path("weights", d.weights,
         "Safetensors file with weights to start from; empty draws them at random.")
      .decides = false;
  r.text("weights_partial", d.weights_partial,
         "\"strict\": the file holds exactly the model's tensors; \"matching\": what fits by name "
         "and shape is loaded, the rest starts at random, and the log lists both.",
         {"strict", "matching"})
      .decides = false;
}

void train_rows(Rows& r, TrainDeck& d) {
  Option& steps = r.number("steps", d.steps, 1, many,
                           "Steps that the run takes in all, restarts included; \"+1000\" takes "
                           "so many more than the run has.");
  steps.fixed = false;
  steps.more = &d.more_steps;
  r.number(
       "epochs", d.epochs, 0, 1e6,
       "Where it is not 0, steps is that many times epoch_steps, as the original of segmentation "
       "counts.")
      .fixed = false;
  r.number("epoch_steps", d.epoch_steps, 1, many, "Steps of such an epoch.").fixed = false;
  r.number("batch_size", d.batch_size, 1, 1e6, "Clips or images in a micro-batch.");
  r.text("batch_sizes", d.batch_sizes,
         "Clips in a micro-batch of some buckets, as NAME=CLIPS; NAME is a bucket's name or its "
         "beginning, up to a dash. The others take batch_size.");
  r.number("micro_batches", d.micro_batches, 1, 1e6,
           "Micro-batches in a step (gradient accumulation), distributed over the ranks.");
  r.text("optimizer", d.optimizer,
         "auto is what the model was released with: SGD for segmentation and text detection, else "
         "AdamW. -1 in the keys below is likewise the model's own.",
         {"auto", "adamw", "sgd"});
  r.number("lr", d.lr, 0, 1e3,
           "Learning rate; segmentation has lr_encoder and lr_decoder in its place, text detection "
           "lr_detector.");
  r.text("lr_scheduler", d.lr_scheduler,
         "How the rate goes on after warmup_steps: polynomial falls by lr_power; constant; linear "
         "and cosine fall until the last step; warmup_stable_decay stays constant and falls over "
         "the last lr_decay_steps.",
         {"polynomial", "constant", "linear", "cosine", "warmup_stable_decay"});
  r.number(
      "lr_power", d.lr_power, -1, 100,
      "With polynomial the rate falls as (1 - step / steps) to this power. 0: constant. -1: the "
      "model's default, 0.9 for segmentation and text detection, else 0.");
  r.number("warmup_steps", d.warmup_steps, 0, many,
           "Steps over which the learning rate rises to lr, with any lr_scheduler.");
  r.number(
      "lr_decay_steps", d.lr_decay_steps, 0, many,
      "With warmup_stable_decay, steps at the end of the run over which the rate falls; 0 is a "
      "tenth of steps.");
  r.text(
      "lr_decay_type", d.lr_decay_type,
      "With warmup_stable_decay, how it falls, x being the share of lr_decay_steps that is done: "
      "linear as 1 - x, cosine as (1 + cos(pi x)) / 2, sqrt as 1 - sqrt(x).",
      {"linear", "cosine", "sqrt"});
  r.number("min_lr_factor", d.min_lr_factor, 0, 1,
           "The rate falls to this share of lr, rather than to 0.");
  r.number("weight_decay", d.weight_decay, -1, 1e3,
           "Weight decay, decoupled in AdamW; -1 is 0, or 1e-4 in segmentation and "
           "text detection.");
  r.number("momentum", d.momentum, 0, below_one, "Momentum of SGD.");
  r.number("adam_beta1", d.adam_beta1, 0, below_one, "Decay of the mean gradient.");
  r.number("adam_beta2", d.adam_beta2, 0, below_one, "Decay of the mean squared gradient.");
  r.number("adam_eps", d.adam_eps, 0, 1, "Added to the root of the mean squared gradient.");
  r.number("grad_clip", d.grad_clip, -1, 1e9,
           "Largest norm of the gradient over all parameters; 0 never clips, -1 is 1, or 0 in "
           "segmentation and text detection.");
  r.number("ema_decay", d.ema_decay, 0, 1,
           "Decay of the moving average of the weights (EMA). A list keeps an average for each; "
           "the first is the one that other commands use.")
      .or_one = true;
  r.number("ema_start", d.ema_start, 0, many,
           "Steps after which averaging begins; until then the average equals the weights.");
  r.number("checkpoint_every", d.checkpoint_every, 0, many,
           "Steps between two checkpoints; 0 saves at the end alone.")
      .fixed = false;
  r.number("keep", d.keep, 2, 1e6, "Checkpoints that are kept, at least two.").fixed = false;
  r.flag("keep_best", d.keep_best,
         "Save whenever [validation] finds a smaller loss than before, and keep that checkpoint, "
         "which RUN/best names, beside the newest ones.")
      .fixed = false;
  r.flag("skip_saves", d.skip_saves,
         "Leave out a checkpoint of checkpoint_every while the one before is still being written; "
         "false waits for that.")
      .fixed = false;
  r.number("log_every", d.log_every, 1, many, "Steps between two lines of the log.").fixed = false;
  r.number("layer_norms_every", d.layer_norms_every, 0, many,
           "Steps between two lines of RUN/layer_norms.jsonl, the gradient's norm in each layer; 0 "
           "writes none.")
      .fixed = false;
  r.text("loss_spike", d.loss_spike,
         "What to do when a loss or a gradient norm far exceeds those of the last 64 steps: warn, "
         "or end the job (exit code 5) with the checkpoint from before it.",
         {"warn", "stop"});
  r.number("spike_deviations", d.spike_deviations, 1, 1e6,
           "How far above the median of the last steps a spike is, in robust standard deviations.");
}

// Keys of one schedule are refused with another, where they would do nothing.
void check_train(const TrainDeck& d, const DeckDemand& demand) {
  const std::string key = fmt::format("train.lr_scheduler = \"{}\"", d.lr_scheduler);
  demand(d.lr_power < 0 || d.lr_scheduler == "polynomial",
         fmt::format("train.lr_power = {} has no effect with {}", d.lr_power, key),
         "leave lr_power out, or set train.lr_scheduler = \"polynomial\"");
  demand(d.min_lr_factor == 0 || d.lr_scheduler != "constant",
         fmt::format("train.min_lr_factor = {} has no effect with {}", d.min_lr_factor, key),
         "leave min_lr_factor out, or take a schedule that falls");
  if (d.lr_scheduler != "warmup_stable_decay") {
    const char* hint = "leave it out, or set train.lr_scheduler = \"warmup_stable_decay\"";
    demand(d.lr_decay_steps == 0,
           fmt::format("train.lr_decay_steps = {} has no effect with {}", d.lr_decay_steps, key),
           hint);
    demand(d.lr_decay_type == "linear",
           fmt::format("train.lr_decay_type = \"{}\" has no effect with {}", d.lr_decay_type, key),
           hint);
  } else if (d.lr_decay_steps > 0 && d.more_steps == 0) {  // "+N": not known here
    const double steps = d.epochs > 0
                             ? static_cast<double>(d.epochs) * static_cast<double>(d.epoch_steps)
                             : static_cast<double>(d.steps);
    demand(static_cast<double>(d.warmup_steps) + static_cast<double>(d.lr_decay_steps) <= steps,
           fmt::format("train.warmup_steps = {} and train.lr_decay_steps = {} are more than the "
                       "run's {} steps",
                       d.warmup_steps, d.lr_decay_steps, steps),
           "lower either; lr_decay_steps = 0 takes a tenth of the steps");
  }
  demand(!d.ema_decay.empty(), "train.ema_decay is an empty list", "name one decay or more");
  for (std::size_t i = 0; i < d.ema_decay.size(); ++i)
    demand(std::count(d.ema_decay.begin(), d.ema_decay.end(), d.ema_decay[i]) == 1,
           fmt::format("train.ema_decay names {} twice", d.ema_decay[i]),
           "name each decay once: an average is known by its decay");
}

void parallel_rows(Rows& r, ParallelDeck& d) {
  r.number("zero", d.zero, 0, 3,
           "1 keeps the optimizer's state of a parameter on one rank only; 3 also the weights and "
           "gradients of the model's blocks, which are gathered when they are used; 0 keeps all on "
           "every rank.");
  r.number("sp", d.sp, 1, 1024,
           "Ranks that share the tokens of a clip (sequence parallelism); divides the ranks.");
  r.number(
      "bucket_mib", d.bucket_mib, 0, 65536,
      "Gradients sent together, in MiB: larger is fewer messages, smaller overlaps more. 0 goes "
      "by the number of ranks: 25 up to 32 ranks, then 25/32 MiB a rank, at most 200.");
  r.text("wire", d.wire, "Number format of gradients on the wire; sums are always made in f32.",
         {"f32", "bf16"});
  r.flag("overlap", d.overlap,
         "Send gradients under the backward and weights under the next forward; false waits for "
         "each at once (to measure what overlapping gains).");
  r.flag("deterministic", d.deterministic,
         "On GPUs: matrix products take the library's first algorithm instead of the measured "
         "fastest, no more activations are kept than must be, and NCCL leaves sums in NVLink's "
         "switches alone (NCCL_ALGO), so that two runs repeat their bits there too. On CPUs they "
         "do so anyway.");
  r.number("check_every", d.check_every, 0, many,
           "Steps between two comparisons of the weights of all ranks; 0 never compares.");
  r.number("hang_timeout", d.hang_timeout, 0, 1e6,
           "Seconds without progress after which a job ends with exit code 7; 0 takes ten median "
           "steps, at least 60 s.");
}

// A table that is a member of Deck.
template <class T>
DeckTable member(const char* section, T Deck::*table, void (*rows)(Rows&, T&)) {
  return {section, [=](Rows& r, Deck& d) { rows(r, d.*table); }, nullptr};
}

std::vector<DeckTable>& all_tables() {
  static std::vector<DeckTable> tables = common_tables();
  return tables;
}

}  // namespace

std::vector<DeckTable> common_tables() {
  std::vector<DeckTable> tables = {member("run", &Deck::run, run_rows),
                                   member("device", &Deck::device, device_rows),
                                   member("memory", &Deck::memory, memory_rows),
                                   member("media", &Deck::media, media_rows),
                                   member("data", &Deck::data, data_rows),
                                   member("model", &Deck::model, model_rows),
                                   member("model", &Deck::model, model_rows_behind),
                                   member("train", &Deck::train, train_rows),
                                   member("parallel", &Deck::parallel, parallel_rows)};
  for (DeckTable& t : tables) t.fixed = t.section == "train" || t.section == "model";
  tables.front().check = [](const Deck& d, const DeckDemand& demand) {
    demand(!d.run.dir.empty(), "run.dir is empty", "name the directory of the run");
  };
  const auto table = [&](const char* section) {
    return std::ranges::find(tables, std::string(section),
                             [](const DeckTable& t) { return t.section; });
  };
  table("data")->check = check_data;
  table("model")->check = [](const Deck& d, const DeckDemand& demand) {
    demand(d.model.dtype != "fp8" || d.model.name == "stdit3" || d.model.name == "wan",
           fmt::format("model.dtype = \"fp8\" with model.name = \"{}\"", d.model.name),
           "\"stdit3\" and \"wan\" alone have layers that multiply in fp8; take \"bf16\"");
  };
  table("train")->check = [](const Deck& d, const DeckDemand& demand) {
    check_train(d.train, demand);
  };
  table("parallel")->check = [](const Deck& d, const DeckDemand& demand) {
    demand(d.parallel.zero != 2, "parallel.zero = 2 does not exist here",
           "take 1, or 3, which shards the gradients too");
  };
  return tables;
}

const std::vector<DeckTable>& deck_tables() { return all_tables(); }

void set_deck_tables(std::vector<DeckTable> tables, std::vector<std::string> models) {
  model_names() = std::move(models);
  std::vector<DeckTable>& all = all_tables();
  all = common_tables();
  for (DeckTable& t : tables) {
    const auto last = [&](const std::string& section) {
      return std::find_if(all.rbegin(), all.rend(),
                          [&](const DeckTable& other) { return other.section == section; });
    };
    const auto same = last(t.section), next = last(t.next);
    auto place = next == all.rend() ? all.end() : next.base() - 1;
    if (same != all.rend() && t.next != t.section) place = same.base();
    all.insert(place, std::move(t));
  }
}

std::vector<Option> option_table(Deck& deck) {
  const std::vector<DeckTable>& tables = deck_tables();
  // The row of a key that has the greatest claim counts, the first of equal ones.
  const auto claim = [&](const Option& o) {
    if (o.models.empty()) return 1;
    return std::ranges::find(o.models, deck.model.name) != o.models.end() ? 2 : 0;
  };
  std::vector<Option> options;
  std::vector<std::size_t> table_of;                 // [option]
  std::vector<bool> replaced(tables.size(), false);  // by another model's table
  std::map<std::string, std::size_t> place;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    Rows rows(tables[t].section, tables[t].fixed);
    tables[t].rows(rows, deck);
    for (Option& o : rows.take()) {
      o.models = tables[t].models;
      const auto [known, is_new] = place.try_emplace(o.key, options.size());
      if (is_new) {
        options.push_back(std::move(o));
        table_of.push_back(t);
        continue;
      }
      Option& used = options[known->second];
      WEFT_ASSERT(used.models != o.models);  // one model, two rows of a key
      std::size_t loser = t;
      if (claim(o) > claim(used)) {
        o.others = std::exchange(used.others, {});
        std::swap(o, used);
        std::swap(loser, table_of[known->second]);
      }
      replaced[loser] = true;
      used.others.push_back(std::move(o));
    }
  }
  for (std::size_t i = 0; i < options.size(); ++i) {
    options[i].applies = !replaced[table_of[i]];
    options[i].own = claim(options[i]) == 2;
  }
  return options;
}

}  // namespace weft
