// The input deck: TOML -> typed structs. Each table belongs to the module that reads it, which
// provides its struct and its rows (config/deck_table.h). Parser, reference page, default deck and
// the copy kept with every run all follow from the rows.
#pragma once

#include <any>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <typeindex>
#include <utility>
#include <vector>

namespace weft {

// The tables of the run itself, which every layer reads.
struct RunDeck {
  std::string dir = "runs/default";
  std::int64_t seed = 42;
  bool resume = true;
  std::int64_t threads = 0;
  bool trace = false;
  std::string profile;
  double stop_margin = 120;
  double max_hours = 0;
};
struct DeviceDeck {
  std::string kind = "auto";
  bool share = false;
  bool graphs = true;
  bool tf32 = false;
  std::vector<std::string> tried;  // device.try: ways that no GPU has run (ops/ways.h)
};
struct MemoryDeck {
  double arena_gib = 0;
};
// Limits of all media, and of lists and prompts in files (docs/security.md); how pictures are read.
struct MediaDeck {
  double max_gib = 64;
  double max_hours = 24;
  std::int64_t max_frames = 1'000'000;
  double max_megapixels = 100;
  double timeout = 3600;
  double max_list_mib = 256;
  double max_download_mib = 1024;
  std::string orientation = "upright";
};
struct DataDeck {
  std::string path = "synthetic:";  // of several stores their list as TOML, for messages
  std::vector<std::string> paths;   // several stores; empty where there is one
  std::vector<double> weights;      // [entry of path], or empty
  std::vector<std::string> prompt_prefixes;
  std::vector<std::string> keep;  // "BUCKET=SHARE"
  std::string text_features;
  std::int64_t readers = 0;
  std::int64_t prefetch = 4;
  bool verify = true;
  double max_damaged = 0;
  // Keys for labelled images (data/images/).
  std::vector<std::int64_t> short_sides = {300, 375, 450, 525, 600};
  std::int64_t max_side = 1000;
  std::int64_t padding = 8;
  std::int64_t label_rate = 8;
  std::int64_t pad_label = 0;
  // Keys for pictures with text (data/text_images/).
  std::int64_t crop = 640;
  bool augment = true;

  std::vector<std::string> all_paths() const {
    return paths.empty() ? std::vector<std::string>{path} : paths;
  }
};
// Whether weights and activations are bf16 in a model of that dtype. One of fp8 is a bf16 model
// some of whose products round their operands further (ops/fp8.h).
inline bool holds_bf16(std::string_view dtype) { return dtype != "f32"; }

// Settings of any model, trained or run; its shape has a table of its own, or for STDiT3 follows
// these keys.
struct ModelDeck {
  std::string name = "stdit3";
  std::string dtype = "f32";
  double recompute = 0.0;
  std::string weights;
  std::string weights_partial = "strict";
};
struct TrainDeck {
  std::int64_t steps = 1000;
  std::int64_t more_steps = 0;  // of steps = "+N"; the training sets `steps` by it
  std::int64_t epochs = 0;
  std::int64_t epoch_steps = 5000;
  std::int64_t batch_size = 1;
  std::vector<std::string> batch_sizes;
  std::int64_t micro_batches = 1;
  std::string optimizer = "auto";
  double lr = 1e-4;
  std::string lr_scheduler = "polynomial";
  double lr_power = -1;
  std::int64_t warmup_steps = 0;
  std::int64_t lr_decay_steps = 0;
  std::string lr_decay_type = "linear";
  double min_lr_factor = 0;
  double weight_decay = -1;
  double momentum = 0.9;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-15;
  double grad_clip = -1;
  std::vector<double> ema_decay = {0.99};
  std::int64_t ema_start = 0;
  std::int64_t checkpoint_every = 200;
  std::int64_t keep = 2;
  bool keep_best = false;
  bool skip_saves = true;
  std::int64_t log_every = 1;
  std::int64_t layer_norms_every = 0;
  std::string loss_spike = "warn";
  double spike_deviations = 10;
};
struct ParallelDeck {
  std::int64_t zero = 1;
  std::int64_t sp = 1;
  double bucket_mib = 0;
  std::string wire = "f32";
  bool overlap = true;
  bool deterministic = false;
  std::int64_t check_every = 100;
  double hang_timeout = 0;
};

// All tables of a deck: those above by name, those of models and jobs by their type. A table for
// which no deck was read has its defaults. References stay valid while the deck lives.
class Deck {
 public:
  std::string file;  // that it was read from; empty for one from text
  RunDeck run;
  DeviceDeck device;
  MemoryDeck memory;
  MediaDeck media;
  DataDeck data;
  ModelDeck model;
  TrainDeck train;
  ParallelDeck parallel;

  template <class Table>
  Table& get() {
    std::any& held = others_[typeid(Table)];
    if (!held.has_value()) held = Table{};
    return std::any_cast<Table&>(held);
  }
  template <class Table>
  const Table& get() const {
    static const Table defaults;
    const auto held = others_.find(typeid(Table));
    return held == others_.end() ? defaults : std::any_cast<const Table&>(held->second);
  }

 private:
  std::map<std::type_index, std::any> others_;
};

// Adds the tables of models and jobs to those above, once, before the first deck is read
// (jobs/jobs.h). `models`: the values of model.name.
struct DeckTable;
void set_deck_tables(std::vector<DeckTable> tables, std::vector<std::string> models);

// Reads a deck file and applies `overrides` ("section.key=value") in order. Unknown keys, wrong
// types, values out of range and unreadable files throw Exit::usage, with the line of the deck and
// the nearest known key. An older name of a key is a WARN.
Deck load_deck(const std::filesystem::path& path, const std::vector<std::string>& overrides);
// The same from text, such as a checkpoint's deck, where an older name is not worth a WARN;
// `origin` names it in messages.
Deck parse_deck(const std::string& toml, const std::string& origin,
                const std::vector<std::string>& overrides);

// The whole deck as TOML that load_deck reads back to the same values.
std::string to_toml(const Deck& deck);
// As above with every key's help, type and range as comments: `weft help deck`.
std::string default_deck_with_help();

struct ChangedKey {
  std::string key, was, is;  // values as TOML
};
// Keys whose values differ between two decks, in the order of the table; `fixed` selects only those
// that a run should keep when it resumes (Option::fixed).
std::vector<ChangedKey> changed_keys(Deck a, Deck b, bool fixed = false);

// The name in `known` closest to `name` by edit distance, or "" if none is near.
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// Sets keys of a deck that has been read, from (key, value) as the command line writes them: the
// rows of a list do so. `origin` names them in messages.
// Values are checked alone, not with those of other keys. Exit::usage.
void set_keys(Deck& deck, std::span<const std::pair<std::string, std::string>> values,
              const std::string& origin);

// For `weft help`: as default_deck_with_help(), of a table ("train"), a key ("train.lr"), or a key
// of any table
// ("lr"). Exit::usage where there is none.
std::string deck_help(const std::string& name);

// A JSON Schema (draft 4, which Taplo and other editors' plugins read) of every table and key, with
// types, ranges, values, defaults and help; other names are refused: `weft help schema`.
std::string deck_schema();

// For messages, where a wrong value comes from: the key of the deck whose text `message` has as a
// word of its own, such as the path that cannot be opened; "" if there is none. The longest of
// several values counts. Defaults are not searched: the user did not write them.
std::string key_of_value(const Deck& deck, std::string_view message);

}  // namespace weft
