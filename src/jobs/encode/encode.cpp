#include "jobs/encode/encode.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <sstream>

#include "checkpoint/model_source.h"
#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/synthetic.h"
#include "jobs/encode/clips.h"
#include "jobs/generate/options.h"
#include "jobs/generate/prompts/prompt_features.h"
#include "models/registry.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"
#include "text/utf8.h"
#include "train/memory_plan.h"
#include "train/stop.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

// Each caption once, and the caption of each clip (-1: none).
struct Texts {
  std::vector<std::string> all;
  std::vector<std::int64_t> of_sample;
};

// Rank 0 alone. Exit::data for a caption that is not UTF-8.
Texts list_texts(const ClipSource& source) {
  Texts texts;
  std::map<std::string, std::int64_t> known;
  for (std::size_t b = 0; b < source.buckets().size(); ++b)
    for (std::int64_t i = 0; i < source.buckets()[b].clips; ++i) {
      const std::string text = source.info(static_cast<int>(b), i).text;
      if (text.empty()) {
        texts.of_sample.push_back(-1);
        continue;
      }
      check_utf8(text,
                 fmt::format("the caption of clip {} of bucket {}", i, source.buckets()[b].name));
      const auto [place, added] = known.emplace(text, std::ssize(texts.all));
      if (added) texts.all.push_back(text);
      texts.of_sample.push_back(place->second);
    }
  return texts;
}

// All that decides the latents, a line each. Features of captions have a key of their own
// (jobs/generate/prompts/prompt_features.h).
std::string describe_job(const Deck& deck, const VideoCodec& codec, const std::string& weights) {
  std::string label = codec.name();
  for (char& c : label) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::string job =
      fmt::format("seed {}\nclips {}\n{} {}\n", deck.run.seed,
                  is_synthetic(deck.data.path) ? deck.data.path : file_identity(deck.data.path),
                  label, weights);
  // The rest as lines of the deck, without keys that do not change the latents.
  const ResultTables tables = codec.result_tables();
  std::istringstream deck_text(to_toml(deck));
  std::string section;
  for (std::string line; std::getline(deck_text, line);) {
    if (line.starts_with("[")) section = line;
    const auto equals = line.find(" = ");
    if (equals == std::string::npos) continue;
    const std::string key = line.substr(0, equals);
    const auto of_codec = tables.find(section);
    const bool counts =
        (of_codec != tables.end() && !of_codec->second.contains(key)) || key == "latents";
    if (counts) job += line + "\n";
  }
  return job + "stored as " + deck.get<EncodeDeck>().dtype + "\n";
}

// Mean and deviation of each latent channel over all clips, from the stored moments: the codec's
// shift and scale (docs/models/video_vae.md, Chunks). The posterior's variance is included,
// since a drawn latent has it too.
void measure(const VideoCodec& codec, std::vector<Bucket>& stored, PartReader& parts) {
  const auto C = static_cast<std::size_t>(codec.channels());
  std::vector<double> sum(C), squares(C);
  double count = 0;  // of a channel
  std::vector<std::byte> clip;
  for (const Bucket& b : stored) {
    const auto positions = static_cast<std::size_t>(b.frames * b.height * b.width);
    clip.resize(b.clip_bytes());
    const auto value = [&](std::size_t i) {
      if (b.dtype == DType::f16) {
        f16 h;
        std::memcpy(&h, clip.data() + 2 * i, 2);
        return static_cast<float>(h);
      }
      float f = 0;
      std::memcpy(&f, clip.data() + 4 * i, 4);
      return f;
    };
    for (std::int64_t n = 0; n < b.clips; ++n) {
      parts.read(fmt::format("{}/{}", b.name, n), clip);
      for (std::size_t c = 0; c < C; ++c)
        for (std::size_t i = 0; i < positions; ++i) {
          const double mean = value(c * positions + i);
          sum[c] += mean;
          squares[c] += mean * mean + std::exp(value((C + c) * positions + i));
        }
      count += static_cast<double>(positions);
    }
  }
  std::vector<float> scale, shift;
  for (std::size_t c = 0; c < C; ++c) {
    const double mean = sum[c] / count, variance = squares[c] / count - mean * mean;
    shift.push_back(static_cast<float>(mean));
    scale.push_back(static_cast<float>(std::sqrt(std::max(variance, 1e-12))));
  }
  for (Bucket& b : stored) b.scale = scale, b.shift = shift;
  log::write_info(
      fmt::format("measured  {}, which the store keeps", codec.describe({scale, shift})));
}

// The clips in the order of the footage's store, so that sample ids stay what they are.
std::uint64_t merge(const Deck& deck, const ClipSource& source, std::vector<Bucket> stored,
                    const Texts& texts, const PromptFeatures& features, PartReader parts,
                    const std::string& made_by, const VideoCodec& codec) {
  if (!codec.lacks_scale().empty()) measure(codec, stored, parts);
  ClipStoreWriter writer(deck.get<EncodeDeck>().output, made_by);
  std::uint64_t bytes = 0;
  std::size_t sample = 0;
  std::vector<std::byte> clip;
  for (std::size_t b = 0; b < stored.size(); ++b) {
    const int bucket = writer.add_bucket(stored[b]);
    clip.resize(stored[b].clip_bytes());
    for (std::int64_t i = 0; i < stored[b].clips; ++i, ++sample) {
      parts.read(fmt::format("{}/{}", stored[b].name, i), clip);
      std::vector<std::byte> rows;
      if (stored[b].text_channels > 0)
        if (const std::int64_t text = texts.of_sample[sample]; text >= 0)
          rows =
              stored_values(features.read(text).values, stored[b].text_dtype,
                            fmt::format("the caption of clip {} of bucket {}", i, stored[b].name));
      writer.append(bucket, clip, source.info(static_cast<int>(b), i), rows);
      bytes += clip.size() + rows.size();
    }
  }
  writer.commit();
  return bytes;
}

// Removes the parts once the store is complete. `job` and the engine's open files are removed with
// the folder.
void remove_data(const fs::path& folder) {
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(folder, failed)) {
    const std::string name = entry.path().filename().string();
    if (name != "job" && name != ".ranks" && name != ".lock") fs::remove(entry.path(), failed);
  }
}

void remove_parts(const fs::path& folder) {
  std::error_code failed;
  fs::remove_all(folder, failed);
  if (failed) log::warn("cannot remove {}: {}", folder.string(), failed.message());
}

// Collective. Whether this very job has made the output already.
bool is_made(const std::string& output, const std::string& made_by, const fs::path& folder,
             const std::string& job, MPI_Comm world) {
  int made = log::rank() == 0 && stored_made_by(output) == made_by ? 1 : 0;
  MPI_Bcast(&made, 1, MPI_INT, 0, world);
  if (made != 0 && log::rank() == 0) {
    log::info(
        "{} is made already, of the same clips and with the same settings: remove it to make it "
        "anew",
        output);
    // A kill may have come after the store's commit and before its parts were removed.
    std::stringstream of_parts;
    of_parts << std::ifstream(folder / "job").rdbuf();
    if (of_parts.str() == job) {
      const auto lock = lock_output(folder, "encode.output");
      remove_parts(folder);
    }
  }
  return made != 0;
}

// What each rank did, and how busy it was until the last clip.
void print_shares(const ListReport& report, double seconds) {
  if (report.made() == 0) return;
  double frames = 0;
  for (std::size_t r = 0; r < report.ranks.size(); ++r) {
    const RankShare& s = report.ranks[r];
    frames += s.own.value("frames", 0.0);
    log::write_info(
        fmt::format("rank {:<4} {}, busy {:.1f} %, waited for clips to be read {:.1f} %", r,
                    counted(s.made, "clip"), 100 * s.busy / seconds,
                    100 * s.own.value("waited", 0.0) / seconds));
  }
  const auto clips = static_cast<double>(report.made());
  log::write_info(fmt::format("{}, {} in {:.1f} s: {:.2f} clips/s, {:.1f} frames/s",
                              counted(report.made(), "clip"), counted(frames, "frame"), seconds,
                              clips / seconds, frames / seconds));
}

// Exit::usage for a deck that cannot be carried out.
void check_deck(const Deck& deck) {
  WEFT_CHECK(!deck.get<EncodeDeck>().output.empty(), Exit::usage,
             "set encode.output = \"latents.h5\"", "encode.output is empty");
  const std::string& output = deck.get<EncodeDeck>().output;
  std::error_code not_there;
  WEFT_CHECK(output != deck.data.path && !fs::equivalent(output, deck.data.path, not_there),
             Exit::usage,
             "data.path is the footage to encode: data.path=CLIPS.h5, as `weft ingest` wrote it",
             "encode.output is data.path itself: {}", output);
  check_store_path(output, "encode.output");
  const fs::path store = absolute_path(output);
  keep_inputs(deck, "encode.output", {}, [&](const fs::path& path) { return path == store; });
}

// Collective. Whether captions are to be encoded.
bool with_features(const TextEncoder* encoder, const Texts& texts, MPI_Comm world) {
  auto captions = static_cast<long long>(texts.all.size());
  MPI_Bcast(&captions, 1, MPI_LONG_LONG, 0, world);
  const std::string lacks = encoder ? encoder->lacks() : "the model has no text encoder";
  if (captions > 0 && !lacks.empty() && log::rank() == 0)
    log::warn("{}: {} kept as text, without features", lacks, counted(captions, "caption"));
  return captions > 0 && lacks.empty();
}

ListSettings settings_of(const Deck& deck, const fs::path& folder) {
  ListSettings s;
  s.directory = folder;
  s.command = "encode";
  s.stem = "encoded";
  s.report = "encode_report.json";
  s.key = "encode.output";
  s.stop_margin = deck.run.stop_margin;
  s.ahead = true;
  // The folder goes once the store is there.
  s.status = deck.get<EncodeDeck>().output + ".status.json";
  return s;
}

// Encodes clips; a rank that is free takes the next one. Returns this rank's share of the report.
nlohmann::ordered_json encode_clips(const Deck& deck, const RankDevice& device,
                                    const ModelSource& weights, const ClipSource& source,
                                    VideoCodec& codec, ListEngine& engine) {
  weights.load(codec.params(), codec.weight_names(), codec.bf16());
  log::info("weights   {}", weights.describe());
  if (codec.lacks_scale().empty()) codec.check_weights(weights);
  const std::size_t capacity = arena_capacity(deck.memory, device);
  const std::size_t planned = fit_encoding(codec, source.buckets(), capacity);
  const auto arena = Arena::reserve(capacity);
  const ArenaScope scope(*arena);
  EncodeJob job(deck, source, codec, engine);
  engine.run(job, engine.one_by_one());
  log::info("memory    {:.1f} MiB at the peak ({:.1f} planned), {} at once",
            static_cast<double>(arena->peak()) / (1 << 20),
            static_cast<double>(planned) / (1 << 20),
            counted(codec.frames_at_once(std::numeric_limits<std::int32_t>::max()), "frame"));
  return job.share();
}

}  // namespace

int encode(const Deck& deck, MPI_Comm world) {
  // 1. The work to do.
  watch_stop_signals();
  check_deck(deck);
  const RankDevice device = choose_device(deck.device.kind, deck.device.share, world);
  set_threads(static_cast<int>(deck.run.threads), device.host_ranks);
  const auto source = open_clip_source(deck.data);
  const std::unique_ptr<VideoCodec> codec = make_codec(deck);
  const std::unique_ptr<TextEncoder> encoder = make_text_encoder(deck);
  WEFT_CHECK(codec->lacks_scale().empty() || deck.get<EncodeDeck>().latents == "moments",
             Exit::usage, "set encode.latents = \"moments\"",
             "{}: drawn latents cannot be normalised", codec->lacks_scale());
  const VideoCodec::WeightsKey key = codec->weights();
  const ModelSource weights(key.key, key.value, deck.run.dir, deck.get<GenerateDeck>().ema, world);
  Texts texts;
  if (deck.get<EncodeDeck>().text && log::rank() == 0) texts = list_texts(*source);
  const bool with_text = with_features(encoder.get(), texts, world);
  std::vector<Bucket> stored;
  for (const Bucket& b : source->buckets())
    stored.push_back(
        encoded_bucket(b, deck.get<EncodeDeck>(), *codec, with_text ? encoder->channels() : 0));
  const fs::path folder = deck.get<EncodeDeck>().output + ".parts";
  const std::string job = describe_job(deck, *codec, weights.identity());
  const std::string made_by = job + (with_text ? encoder->describe() : "no features") + "\n";
  if (is_made(deck.get<EncodeDeck>().output, made_by, folder, job, world)) return 0;
  warn_of_replacing(deck.get<EncodeDeck>().output);
  ListSettings settings = settings_of(deck, folder);
  settings.lock = lock_output(folder, settings.key);  // until the folder is removed
  open_parts(folder, job, world);
  std::optional<ListEngine> engine(std::in_place, settings, encode_items(source->buckets(), job),
                                   world);
  const std::size_t samples = engine->items().size(), missing = engine->missing().size();
  log::info("encode    {} of {} into {} ({}, {}){}", counted(samples, "clip"), deck.data.path,
            deck.get<EncodeDeck>().output, deck.get<EncodeDeck>().latents,
            deck.get<EncodeDeck>().dtype,
            missing < samples ? fmt::format(", {} made before", samples - missing) : "");

  // 2. Captions through the text encoder, whose memory is then freed.
  std::optional<PromptFeatures> features(std::in_place, with_text ? encoder.get() : nullptr,
                                         texts.all, folder, world,
                                         [&] { return engine->stop_requested(); });

  // 3. Clips through the codec.
  ListEnd last;
  const double begin = now_seconds();
  if (missing > 0 && !features->encoded().stopped)
    last.share = encode_clips(deck, device, weights, *source, *codec, *engine);
  const double seconds = now_seconds() - begin;

  // 4. Rank 0 merges the parts into one store and removes them.
  last.print = [&](const ListReport& report) { print_shares(report, seconds); };
  last.finish = [&](const ListReport&) {
    const std::uint64_t bytes =
        merge(deck, *source, stored, texts, *features, {folder, engine->lines()}, made_by, *codec);
    features.reset();
    remove_data(folder);
    log::write_info(fmt::format("{}, {:.1f} MB in {}", counted(samples, "clip"),
                                1e-6 * static_cast<double>(bytes), deck.get<EncodeDeck>().output));
  };
  const int code = engine->end(last);
  features.reset();
  // Its files are in the folder that is removed next.
  engine.reset();
  if (code == 0 && log::rank() == 0) remove_parts(folder);
  return code;
}

namespace {

void encode_rows(Rows& r, EncodeDeck& d) {
  r.text("output", d.output, "The store of latents (HDF5) to write.");
  r.text(
      "latents", d.latents,
      "What is stored: the moments, from which training draws anew each time, or one drawn sample.",
      {"moments", "sampled"});
  r.text("dtype", d.dtype, "Number format in the store.", {"f16", "f32"});
  r.flag("text", d.text, "Also store the features of the captions.");
}

}  // namespace

DeckTable encode_table() { return deck_table("encode", encode_rows); }

Command encode_command() {
  Command c{"encode", "turn a clip store of pixels into one of latents and text features", encode};
  c.heeds_stops = true;
  c.takes_deck();
  return c;
}

}  // namespace weft
