// The input deck: TOML -> typed structs through one option table, which also makes --help, the
// reference page, the default deck and the copy of the effective deck kept with every run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace weft {

struct RunDeck {
  std::string dir = "runs/default";
  std::int64_t seed = 42;
  bool resume = true;
  std::int64_t threads = 0;
  bool trace = false;
  double stop_margin = 120;
};
struct DeviceDeck {
  std::string kind = "auto";
  bool share = false;
  bool graphs = true;
  bool tf32 = false;
};
struct MemoryDeck {
  double arena_gib = 0;
};
// Limits of all media that is read, and of lists and prompts in files (docs/security.md).
struct MediaDeck {
  double max_gib = 64;
  double max_hours = 24;
  std::int64_t max_frames = 1'000'000;
  double max_megapixels = 100;
  double timeout = 3600;
  double max_list_mib = 256;
  double max_download_mib = 1024;
};
struct IngestDeck {
  std::vector<std::string> inputs;
  std::string output = "clips.h5";
  std::vector<std::string> resolutions = {"144p"};
  std::vector<std::int64_t> frames = {51};
  std::int64_t frame_interval = 1;
  std::int64_t stride = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  double fps = 0;
  std::int64_t max_clips = 0;
  bool strict = false;
};
struct DataDeck {
  std::string path = "synthetic:";
  std::string text_features;
  std::int64_t readers = 0;
  std::int64_t prefetch = 4;
  bool verify = true;
  double max_damaged = 0;
};
struct ModelDeck {
  std::string name = "stdit3";
  std::int64_t in_channels = 4;
  std::vector<std::int64_t> patch_size = {1, 2, 2};
  std::int64_t hidden_size = 1152;
  std::int64_t depth = 28;
  std::int64_t num_heads = 16;
  double mlp_ratio = 4.0;
  double class_dropout_prob = 0.1;
  bool pred_sigma = true;
  double drop_path = 0.0;
  std::int64_t caption_channels = 4096;
  std::int64_t model_max_length = 300;
  bool qk_norm = true;
  double input_sq_size = 512;
  bool only_train_temporal = false;
  bool freeze_y_embedder = false;
  bool skip_y_embedder = false;
  std::string dtype = "f32";
  double recompute = 0.0;
  std::string weights;
};
struct DiffusionDeck {
  std::int64_t num_timesteps = 1000;
  std::string sample_method = "logit-normal";
  double loc = 0.0;
  double scale = 1.0;
  bool use_discrete_timesteps = false;
  bool use_timestep_transform = true;
  double transform_scale = 1.0;
  bool fix_short_clips = true;
};
// Share of samples that train with each frame mask (specs/training.md 5); the rest has none.
struct MaskDeck {
  double random = 0, intepolate = 0;
  double quarter_random = 0, quarter_head = 0, quarter_tail = 0, quarter_head_tail = 0;
  double image_random = 0, image_head = 0, image_tail = 0, image_head_tail = 0;
};
struct TrainDeck {
  std::int64_t steps = 1000;
  std::int64_t batch_size = 1;
  std::vector<std::string> batch_sizes;
  std::int64_t micro_batches = 1;
  double lr = 1e-4;
  std::int64_t warmup_steps = 0;
  double weight_decay = 0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-15;
  double grad_clip = 1.0;
  double ema_decay = 0.99;
  std::int64_t checkpoint_every = 200;
  std::int64_t keep = 2;
  bool skip_saves = true;
  std::int64_t log_every = 1;
  std::string loss_spike = "warn";
  double spike_deviations = 10;
};
struct ParallelDeck {
  std::int64_t zero = 1;
  std::int64_t sp = 1;
  double bucket_mib = 25;
  std::string wire = "f32";
  bool overlap = true;
  bool deterministic = false;
  std::int64_t check_every = 100;
  double hang_timeout = 0;
};
// Shape of Open-Sora's VAE (specs/vae.md 1, 2) and how it is run. The released one is the default.
struct VaeDeck {
  std::string weights;
  std::vector<std::int64_t> spatial_channels = {128, 256, 512, 512};
  std::int64_t spatial_res_blocks = 2;
  std::int64_t spatial_groups = 32;
  std::int64_t filters = 128;
  std::int64_t num_res_blocks = 4;
  std::vector<std::int64_t> channel_multipliers = {1, 2, 2, 4};
  std::vector<bool> temporal_downsample = {false, true, true};
  std::int64_t num_groups = 32;
  std::int64_t micro_frame_size = 17;
  std::int64_t micro_batch_size = 4;
  std::vector<double> scale = {3.85, 2.32, 2.33, 3.06};
  std::vector<double> shift = {-0.10, 0.34, 0.27, 0.98};
  std::string dtype = "f32";
};
// What a VAE is trained for (specs/vae.md 4, 5). The defaults are stage 3's.
struct VaeTrainDeck {
  bool freeze_spatial = false;
  bool pixel_loss = true;
  bool latent_loss = false;
  bool identity_loss = false;
  double image_share = 0;
  bool random_length = true;
  double perceptual_weight = 0.1;
  double kl_weight = 1e-6;
  std::string lpips_weights;
  std::string discriminator = "none";
  std::string discriminator_loss = "hinge";
  double discriminator_weight = 0.5;
  std::int64_t discriminator_start = 50001;
  double discriminator_lr = 1e-5;
  double lecam_weight = 0;
  double gradient_penalty_weight = 0;
};
// Shape of the T5 v1.1 encoder (specs/t5.md 3) and how it is run. The default is XXL.
struct T5Deck {
  std::string weights;
  std::string tokenizer;
  std::int64_t d_model = 4096;
  std::int64_t d_kv = 64;
  std::int64_t num_heads = 64;
  std::int64_t d_ff = 10240;
  std::int64_t num_layers = 24;
  std::int64_t vocab_size = 32128;
  std::int64_t max_length = 300;
  std::string dtype = "f32";
  bool clean = true;
  std::vector<double> memory_gib;
  std::int64_t micro_batch = 4;
};
struct EncodeDeck {
  std::string output = "latents.h5";
  std::string latents = "moments";
  std::string dtype = "f16";
  bool text = true;
};
struct GenerateDeck {
  std::string weights;
  bool ema = true;
  std::vector<std::string> prompts;
  std::string prompt_file;
  std::string prompt_generator;
  std::string refine;
  std::int64_t start_index = 0;
  std::int64_t end_index = 0;
  std::int64_t num_samples = 1;
  std::int64_t max_clips = 1'000'000;
  std::int64_t batch_size = 1;
  std::string resolution = "240p";
  std::string aspect_ratio = "9:16";
  std::vector<std::int64_t> image_size;
  std::string num_frames = "2s";
  double fps = 24;
  std::int64_t frame_interval = 1;
  double save_fps = 0;
  std::int64_t loop = 1;
  std::int64_t condition_frame_length = 5;
  double condition_frame_edit = 0;
  std::int64_t align = 5;
  std::vector<std::string> references;
  std::vector<std::string> mask_strategies;
  double aes = 6.5;
  double flow = 0;
  std::string camera_motion;
  std::string output;
  std::string sample_name;
  bool prompt_as_path = false;
  std::string watermark;
  bool tensors = false;
  bool share_out = true;
};
struct ReconstructDeck {
  std::vector<std::string> inputs;
  std::string output;
  std::int64_t frames = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
};
struct SamplerDeck {
  std::int64_t steps = 30;
  double cfg_scale = 7.0;
  bool use_timestep_transform = true;
};
struct Deck {
  RunDeck run;
  DeviceDeck device;
  MemoryDeck memory;
  MediaDeck media;
  IngestDeck ingest;
  DataDeck data;
  ModelDeck model;
  DiffusionDeck diffusion;
  MaskDeck mask;
  TrainDeck train;
  ParallelDeck parallel;
  SamplerDeck sampler;
  VaeDeck vae;
  VaeTrainDeck vae_train;
  T5Deck t5;
  EncodeDeck encode;
  ReconstructDeck reconstruct;
  GenerateDeck generate;
};

// One row of the option table. `target` points into the Deck that the table was made for.
struct Option {
  using Target =
      std::variant<bool*, std::int64_t*, double*, std::string*, std::vector<bool>*,
                   std::vector<std::int64_t>*, std::vector<double>*, std::vector<std::string>*>;
  std::string key;  // "train.lr"
  Target target;
  std::string help;                  // one sentence, with the unit
  std::vector<std::string> choices;  // of a string; empty: any
  double minimum, maximum;           // of a number, inclusive
};

// The option table for `deck`: every key there is, in the order of the reference page.
std::vector<Option> option_table(Deck& deck);

// Reads a deck file and applies `overrides` ("section.key=value") in order. Unknown keys, wrong
// types, values out of range and unreadable files throw Exit::usage, with the line of the deck and
// the nearest known key.
Deck load_deck(const std::filesystem::path& path, const std::vector<std::string>& overrides);
// The same from text; `origin` names it in messages.
Deck parse_deck(const std::string& toml, const std::string& origin,
                const std::vector<std::string>& overrides);

// The whole deck as TOML that load_deck reads back to the same values.
std::string to_toml(const Deck& deck);
// As above with every key's help, type and range as comments: `weft help deck`.
std::string default_deck_with_help();

// Keys whose values differ between two decks, in the order of the table.
std::vector<std::string> changed_keys(Deck a, Deck b);

// The name in `known` closest to `name` by edit distance, or "" if none is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

}  // namespace weft
