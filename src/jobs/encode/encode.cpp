#include "jobs/encode/encode.h"

#include <mpi.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/model_source.h"
#include "config/deck.h"
#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/log.h"
#include "data/clip_source.h"
#include "data/clip_store.h"
#include "data/synthetic.h"
#include "jobs/engine/list_job.h"
#include "jobs/engine/manifest.h"
#include "jobs/engine/pictures.h"
#include "jobs/generate/options.h"
#include "jobs/generate/texts.h"
#include "models/interfaces.h"
#include "models/pixels.h"
#include "models/registry.h"
#include "parallel/rank_device.h"
#include "tensor/tensor.h"
#include "text/utf8.h"
#include "train/memory_plan.h"
#include "train/stop.h"

namespace weft {

Bucket encoded_bucket(const Bucket& pixels, const EncodeDeck& deck, const VideoCodec& codec,
                      std::int64_t text_channels, std::int64_t condition) {
  const std::int64_t side = codec.pixels_a_latent();
  check_holds_clips(pixels);
  WEFT_CHECK(pixels.dtype == DType::u8, Exit::usage, "data.path must hold pixels",
             "bucket {} holds latents already", pixels.name);
  WEFT_CHECK(pixels.height >= side && pixels.width >= side, Exit::data,
             fmt::format("the {0} takes frames of at least {1}x{1}", codec.name(), side),
             "bucket {} has frames of {}x{}", pixels.name, pixels.height, pixels.width);
  Bucket b = pixels;
  b.frames = codec.latent_frames(pixels.frames);
  b.height = pixels.height / side;
  b.width = pixels.width / side;
  b.moments = deck.latents == "moments";
  b.channels = codec.channels() * (b.moments ? 2 : 1) + condition;
  b.dtype = deck.dtype == "f16" ? DType::f16 : DType::f32;
  VideoCodec::Normalisation n = codec.normalisation();
  if (condition > 0) {  // a mask, as it is, and latents again
    const auto mask = static_cast<std::size_t>(condition - codec.channels());
    const VideoCodec::Normalisation again = n;
    n.scale.insert(n.scale.end(), mask, 1.0f);
    n.shift.insert(n.shift.end(), mask, 0.0f);
    n.scale.insert(n.scale.end(), again.scale.begin(), again.scale.end());
    n.shift.insert(n.shift.end(), again.shift.begin(), again.shift.end());
  }
  b.scale = n.scale;
  b.shift = n.shift;
  b.text_channels = text_channels;
  b.text_dtype = b.dtype;
  return b;
}

namespace {

namespace fs = std::filesystem;

// ---- Parts: encoded clips before they are merged into one store, in a folder beside it that
// survives a kill at any moment. OUTPUT.parts/ holds
//   job                what is encoded, and by which weights: a folder of another job is refused
//   G-R.data           clips one behind the other, written by rank R of the G-th start
//   encoded.jsonl      a line for each: file, offset, bytes, XXH3-128 (jobs/engine/manifest.h);
//                      encoded.rankR.jsonl while it runs
//   text_features.*    the captions' features (jobs/generate/texts.h)

// This rank's file of clips, made with the first one.
class PartWriter {
 public:
  PartWriter(fs::path folder, int rank) : folder_(std::move(folder)), rank_(rank) {}

  // Appends a clip. Adds the members file, offset, bytes and file_xxh3 to its line.
  void append(std::span<const std::byte> clip, nlohmann::ordered_json& line) {
    if (!file_) {
      int start = 0;
      const auto path = [&] { return folder_ / fmt::format("{}-{}.data", start, rank_); };
      // Every start writes a file of its own: lines in the manifest refer to the older ones.
      std::error_code none;
      while (fs::exists(path(), none)) ++start;
      file_.emplace(File::create(path(), Exit::data));
    }
    file_->write(clip, end_);
    line["file"] = file_->path().filename().string();
    line["offset"] = end_;
    line["bytes"] = clip.size();
    line["file_xxh3"] = to_hex(hash128(clip));
    end_ += clip.size();
  }
  // From then on other nodes can read all of it, also over NFS.
  void close() {
    if (!file_) return;
    file_->sync();
    file_->close();
    file_.reset();
  }

 private:
  fs::path folder_;
  int rank_;
  std::optional<File> file_;
  std::uint64_t end_ = 0;
};

// Clips of all parts, by their lines.
class PartReader {
 public:
  PartReader(fs::path folder, ManifestLines lines)
      : folder_(std::move(folder)), lines_(std::move(lines)) {}

  // Exit::data if its bytes are damaged.
  void read(const std::string& name, std::span<std::byte> clip) {
    const auto found = lines_.find(name);
    WEFT_ASSERT(found != lines_.end());
    const auto line = found->second.parsed();
    const auto file = line.at("file").get<std::string>();
    auto part = files_.find(file);
    if (part == files_.end())
      part = files_.emplace(file, File::open(folder_ / file, Exit::data)).first;
    const bool fits = line.at("bytes").get<std::uint64_t>() == clip.size();
    if (fits) part->second.read(clip, line.at("offset").get<std::uint64_t>());
    WEFT_CHECK(fits && to_hex(hash128(clip)) == line.at("file_xxh3").get<std::string>(), Exit::data,
               "run the same command again to rebuild it", "clip {} in {} is damaged", name,
               folder_.string());
  }

 private:
  fs::path folder_;
  ManifestLines lines_;
  std::map<std::string, File> files_;
};

// Removes the parts. `job` and the engine's open files are removed with the folder.
void remove_data(const fs::path& folder) {
  std::error_code failed;
  for (const auto& entry : fs::directory_iterator(folder, failed)) {
    const std::string name = entry.path().filename().string();
    if (name != "job" && name != ".ranks" && name != ".lock") fs::remove(entry.path(), failed);
  }
}

// Rank 0 alone. Claims the folder for this job, or finds that an earlier start of it did.
// Exit::checkpoint for the folder of another job, with the first line that differs; with --replace
// its clips go.
void check_job(const fs::path& folder, const std::string& job) {
  const fs::path path = folder / "job";
  std::error_code none;
  if (fs::exists(path, none)) {
    std::stringstream found(content_of(path)), wanted(job);
    if (found.str() == job) return;
    std::string a, b;
    for (bool more = true; more && a == b;)
      more = bool(std::getline(found, a)) | bool(std::getline(wanted, b));
    const std::string what = fmt::format(
        "{} holds the clips of another job: it has \"{}\", this one \"{}\"", folder.string(), a, b);
    WEFT_CHECK(replace_asked, Exit::checkpoint,
               fmt::format("delete {} or give --replace to start over, or use the earlier settings",
                           folder.string()),
               "{}", what);
    log::warn("{}; they are removed", what);
    remove_data(folder);
  }
  replace_file(path, job, Exit::data, Durable::no);
}

// ---- Clips, as a list job

// Arena bytes that the largest clip takes, with micro-batches that fit `capacity`: set in `codec`.
// Exit::usage where nothing fits.
std::size_t fit_encoding(VideoCodec& codec, const std::vector<Bucket>& buckets,
                         std::size_t capacity) {
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t>> sizes;
  for (const Bucket& b : buckets) sizes.emplace(b.frames, b.height, b.width);
  std::int64_t fitting = std::numeric_limits<std::int64_t>::max(), most = 0;
  for (const auto& [frames, height, width] : sizes) {
    const std::int64_t at_once = codec.fit_micro_batch(frames, height, width, capacity, false);
    // A clip shorter than a micro-batch, such as a picture, takes fewer frames for want of more,
    // not of memory.
    if (at_once < codec.frames_asked(frames)) fitting = std::min(fitting, at_once);
    most = std::max(most, codec.frames_asked(frames));
  }
  if (fitting < most)
    log::warn("{} micro-batch reduced to {} (asked: {}) to fit {:.2f} GiB", codec.name(),
              counted(fitting, "frame"), most, gib(capacity));
  const std::int64_t at_once = std::min(fitting, most);
  codec.set_micro_batch(at_once);
  std::size_t bytes = 0;
  for (const auto& [frames, height, width] : sizes)
    bytes = std::max(bytes, codec.plan_encode(frames, height, width, at_once).bytes);
  return bytes;
}

// Values as the store has them, f16 or f32. Exit::non_finite where one is not finite, Exit::data
// where f16 cannot hold it; `what` begins the message.
std::vector<std::byte> stored_values(std::span<const float> values, DType dtype,
                                     const std::string& what) {
  for (const float v : values)
    WEFT_CHECK(std::isfinite(v), Exit::non_finite,
               "look at the encoder's weights and at what it is given",
               "{} does not encode to finite numbers", what);
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  if (dtype == DType::f32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const f16 h(values[i]);
    // All exponent bits set: the value has become infinite.
    WEFT_CHECK((h.bits & 0x7c00u) != 0x7c00u, Exit::data, "set encode.dtype = \"f32\"",
               "{} encodes to {}, which f16 cannot hold", what, values[i]);
    std::memcpy(bytes.data() + 2 * i, &h, 2);
  }
  return bytes;
}

// All clips, each by its running number over all buckets (its sample id). `job`: all that decides
// the latents.
std::vector<ListItem> encode_items(const std::vector<Bucket>& buckets, const std::string& job) {
  const std::string key = to_hex(hash128(job));
  std::vector<ListItem> items;
  for (const Bucket& b : buckets)
    for (std::int64_t i = 0; i < b.clips; ++i)
      items.push_back({fmt::format("{}/{}", b.name, i), key, static_cast<double>(b.clip_bytes())});
  return items;
}

struct EncodedClip : PictureUnit {
  std::vector<std::byte> pixels, latents;
};

// Encodes clips: "pictures" that are read ahead whole. Noise is a function of
// (run.seed, sample id): the same latents at any rank count.
class EncodeWork : public PictureWork {
 public:
  EncodeWork(const Deck& deck, const ClipSource& source, VideoCodec& codec,
             const PictureStart* start, ListEngine& engine)
      : PictureWork(engine),
        deck_(deck),
        source_(source),
        codec_(codec),
        start_(start),
        writer_(engine.settings().directory, engine.groups().rank) {}

  std::unique_ptr<PictureUnit> next(std::int64_t, std::int64_t number) override {
    return number == 0 ? std::make_unique<EncodedClip>() : nullptr;
  }

  FeedWork::Prepared read(PictureUnit& unit) override {
    const double begin = now_seconds();
    const Place p = place_of(unit.item);
    std::vector<std::byte>& pixels = static_cast<EncodedClip&>(unit).pixels;
    pixels.resize(bucket(p).clip_bytes());
    source_.read(p.bucket, p.index, pixels);
    return {now_seconds() - begin, 0, true, pixels.size()};
  }

  void predict(std::span<PictureUnit* const> units) override {
    auto& clip = static_cast<EncodedClip&>(*units.front());
    const Place p = place_of(clip.item);
    clip.latents = encode(clip.pixels, bucket(p), clip.item,
                          fmt::format("clip {} of bucket {}", p.index, bucket(p).name));
    clip.pixels = {};
    frames_ += bucket(p).frames;
  }

  void finish(PictureUnit& unit) override {
    nlohmann::ordered_json line = engine_.line_of(unit.item);
    const std::lock_guard lock(writing_);
    writer_.append(static_cast<EncodedClip&>(unit).latents, line);
    engine_.finished(line);
  }

  // Ends this rank's file of clips. The frames of what was encoded.
  std::int64_t close() {
    writer_.close();
    return frames_;
  }

 private:
  struct Place {
    int bucket = 0;
    std::int64_t index = 0;  // in the bucket
  };
  Place place_of(std::int64_t sample) const {
    int number = 0;
    for (const Bucket& b : source_.buckets()) {
      if (sample < b.clips) return {number, sample};
      sample -= b.clips;
      ++number;
    }
    WEFT_ASSERT(false);
    return {};
  }
  const Bucket& bucket(const Place& p) const { return source_.buckets()[p.bucket]; }

  // A GPU gets a few frames at a time: the pixels of a long clip would take more memory than all of
  // its latents' needs.
  std::vector<std::byte> encode(const std::vector<std::byte>& clip, const Bucket& b,
                                std::int64_t sample, const std::string& what) {
    const VideoCodec::Noise noise{static_cast<std::uint64_t>(deck_.run.seed),
                                  static_cast<std::uint64_t>(sample)};
    const Shape size{static_cast<std::int64_t>(clip.size())};
    const Tensor host = Tensor::borrow(const_cast<std::byte*>(clip.data()), size, DType::u8);
    const std::int64_t frame = b.height * b.width * 3;
    const VideoCodec::FrameSource frames = [&](std::int64_t first, std::int64_t n) {
      return pixel_frames(host.slice(first * frame, (first + n) * frame).to_device(), 0, n,
                          b.height, b.width);
    };
    const EncodeDeck& settings = deck_.get<EncodeDeck>();
    const VideoCodec::Part all = codec_.whole(b.frames);
    const Tensor values = (settings.latents == "moments"
                               ? codec_.encode_moments(all, b.height, b.width, frames, &noise)
                               : codec_.encode(all, b.height, b.width, frames,
                                               settings.latents == "sampled" ? &noise : nullptr))
                              .to_host();
    const DType dtype = settings.dtype == "f16" ? DType::f16 : DType::f32;
    std::vector<std::byte> stored = stored_values(values.span<float>(), dtype, what);
    if (start_ != nullptr) {
      const Tensor beside = start_->condition(codec_, frames(0, 1), all.frames).to_host();
      const std::vector<std::byte> more = stored_values(beside.span<float>(), dtype, what);
      stored.insert(stored.end(), more.begin(), more.end());
    }
    return stored;
  }

  const Deck& deck_;
  const ClipSource& source_;
  VideoCodec& codec_;
  const PictureStart* start_;  // of a model that reads its condition beside the latent; else null
  std::mutex writing_;
  PartWriter writer_;
  std::int64_t frames_ = 0;
};

// ---- The job

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
// (jobs/generate/texts.h).
std::string describe_job(const Deck& deck, const VideoCodec& codec, const std::string& weights) {
  std::string label = codec.name();
  for (char& c : label) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::string job =
      fmt::format("seed {}\nclips {}\n{} {}\n", deck.run.seed,
                  is_synthetic(deck.data.path) ? deck.data.path : file_identity(deck.data.path),
                  label, weights);
  std::set<std::string> tables = codec.tables();
  tables.insert("encode");
  for (const DeckLine& line : identity(deck, tables)) job += line.text + "\n";
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
    log::info("{} is up to date (same clips, same settings); delete it to rebuild", output);
    // A kill may have come after the store's commit and before its parts were removed.
    if (content_of(folder / "job") == job) {
      const auto lock = lock_output(folder, "encode.output");
      remove_parts(folder);
    }
  }
  return made != 0;
}

// Exit::usage for a deck that cannot be carried out.
void check_deck(const Deck& deck) {
  WEFT_CHECK(!deck.get<EncodeDeck>().output.empty(), Exit::usage,
             "set encode.output = \"latents.h5\"", "encode.output is empty");
  const std::string& output = deck.get<EncodeDeck>().output;
  WEFT_CHECK(deck.data.paths.empty(), Exit::usage,
             "encode each store by a job of its own; a training takes the list of what they wrote",
             "weft encode takes one store, and data.path names {}", deck.data.paths.size());
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
  ListSettings s = list_settings(deck, "encode", folder, "clip");
  s.stem = "encoded";
  // The folder goes once the store is there.
  s.status = deck.get<EncodeDeck>().output + ".status.json";
  s.cite = citations(deck, "encode", deck.get<EncodeDeck>().text);
  return s;
}

// Encodes clips; a rank that is free takes the next one. Returns this rank's share of the report.
nlohmann::ordered_json encode_clips(const Deck& deck, const ListStart& start,
                                    const ModelSource& weights, const ClipSource& source,
                                    VideoCodec& codec, const Denoiser* beside, ListEngine& engine) {
  weights.load(codec.params(), codec.weight_names(), codec.bf16());
  log::info("weights   {}", weights.describe());
  if (codec.lacks_scale().empty()) codec.check_weights(weights);
  const std::size_t planned =
      fit_encoding(codec, source.buckets(), arena_capacity(deck.memory, start.device));
  EncodeWork work(deck, source, codec, beside ? beside->picture_start() : nullptr, engine);
  const nlohmann::ordered_json times = make_pictures(work, engine, deck, start, whole_clips_ahead);
  const std::int64_t frames = work.close();
  log::info("memory    {:.1f} MiB at the peak ({:.1f} planned), {} at once",
            times.at("peak_bytes").get<double>() / (1 << 20),
            static_cast<double>(planned) / (1 << 20),
            counted(codec.frames_at_once(std::numeric_limits<std::int32_t>::max()), "frame"));
  nlohmann::ordered_json share = times;
  share["frames"] = frames;
  return share;
}

}  // namespace

std::unique_ptr<Denoiser> with_condition(const Deck& deck) {
  for (const Model& m : models())
    if (m.name == deck.model.name && m.make_denoiser != nullptr)
      if (std::unique_ptr<Denoiser> model = m.make_denoiser(deck);
          model->condition_channels() > 0 && model->picture_start() != nullptr)
        return model;
  return nullptr;
}

int encode(const Deck& deck, MPI_Comm world) {
  // 1. The work to do.
  check_deck(deck);
  const ListStart start = start_list_job(deck, world);
  const auto source = open_clip_source(deck.data);
  const std::unique_ptr<VideoCodec> codec = make_codec(deck);
  const std::unique_ptr<TextEncoder> encoder = make_text_encoder(deck);
  WEFT_CHECK(codec->lacks_scale().empty() || deck.get<EncodeDeck>().latents == "moments",
             Exit::usage, "set encode.latents = \"moments\"",
             "{}: drawn latents cannot be normalised", codec->lacks_scale());
  const std::unique_ptr<Denoiser> beside = with_condition(deck);
  const std::int64_t condition = beside ? beside->condition_channels() : 0;
  WEFT_CHECK(condition == 0 || deck.get<EncodeDeck>().latents != "moments", Exit::usage,
             "set encode.latents = \"mean\"",
             "encode.latents = \"moments\": {} reads a picture beside each clip, whose latents are "
             "means",
             beside->name());
  const VideoCodec::WeightsKey key = codec->weights();
  const ModelSource weights(key.key, key.value, deck.run.dir, deck.get<GenerateDeck>().ema, world);
  Texts texts;
  if (deck.get<EncodeDeck>().text && log::rank() == 0) texts = list_texts(*source);
  const bool with_text = with_features(encoder.get(), texts, world);
  std::vector<Bucket> stored;
  for (const Bucket& b : source->buckets()) {
    if (const std::int64_t coded = codec->coded_frames(b.frames);
        coded != b.frames && log::rank() == 0)
      log::warn("bucket {}: the {} codes {} of its {} frames", b.name, codec->name(), coded,
                b.frames);
    stored.push_back(encoded_bucket(b, deck.get<EncodeDeck>(), *codec,
                                    with_text ? encoder->channels() : 0, condition));
  }
  const fs::path folder = deck.get<EncodeDeck>().output + ".parts";
  const std::string job =
      describe_job(deck, *codec, weights.identity()) +
      (condition > 0 ? fmt::format("and {} channels of the first frame\n", condition) : "");
  std::string made_by = job + (with_text ? encoder->describe() : "no features") + "\n";
  for (const std::string& prefix : deck.data.prompt_prefixes)
    if (!prefix.empty()) made_by += "captions begin with " + printable(prefix) + "\n";
  if (is_made(deck.get<EncodeDeck>().output, made_by, folder, job, world)) return 0;
  std::error_code none;
  if (const std::string& output = deck.get<EncodeDeck>().output;
      log::rank() == 0 && fs::exists(output, none))
    check_replaced(output, "encode.output", {output});
  ListSettings settings = settings_of(deck, folder);
  if (log::rank() == 0) make_own_folder(folder, Exit::data);
  settings.lock = lock_output(folder, settings.key);  // until the folder is removed
  if (log::rank() == 0) check_job(folder, job);
  MPI_Barrier(world);
  std::optional<ListEngine> engine(std::in_place, settings, encode_items(source->buckets(), job),
                                   world);
  const std::size_t samples = engine->items().size(), missing = engine->missing().size();
  log::info("encode    {} of {} into {} ({}, {}){}", counted(samples, "clip"), deck.data.path,
            deck.get<EncodeDeck>().output, deck.get<EncodeDeck>().latents,
            deck.get<EncodeDeck>().dtype,
            missing < samples ? fmt::format(", {} made before", samples - missing) : "");

  // 2. Captions through the text encoder, whose memory is then freed.
  begin_part("text");
  std::optional<PromptFeatures> features(std::in_place, with_text ? encoder.get() : nullptr,
                                         texts.all, folder, world,
                                         [&] { return engine->stop_requested(); });

  // 3. Clips through the codec.
  ListEnd last;
  begin_part("weights");
  if (missing > 0 && !features->encoded().stopped)
    last.share = encode_clips(deck, start, weights, *source, *codec, beside.get(), *engine);

  // 4. Rank 0 merges the parts into one store and removes them.
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
  r.path("output", d.output, "The store of latents (HDF5) to write.").decides = false;
  r.text("latents", d.latents,
         "moments: store mean and log variance, from which training samples in every step; "
         "sampled: store one sample; mean: store the mean. A model that reads a picture beside the "
         "latent also gets what it reads of each clip's first frame, and no moments.",
         {"moments", "sampled", "mean"});
  // Told in a line of its own (describe_job).
  r.text("dtype", d.dtype, "Number format in the store.", {"f16", "f32"}).decides = false;
  r.flag("text", d.text, "Also store the features of the captions.").decides = false;
}

}  // namespace

DeckTable encode_table() { return deck_table("encode", encode_rows); }

Command encode_command() {
  Command c{"encode", "turn a clip store of pixels into one of latents and text features", encode};
  c.handles_stop_signals = true;
  takes_list_job(c);
  return c;
}

}  // namespace weft
