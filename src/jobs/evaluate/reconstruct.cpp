#include "jobs/evaluate/reconstruct.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "checkpoint/model_source.h"
#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "data/images/label_pictures.h"
#include "data/lists/lists.h"
#include "jobs/engine/list_job.h"
#include "jobs/engine/pictures.h"
#include "jobs/generate/options.h"
#include "media/video_reader.h"
#include "media/writers.h"
#include "models/pixels.h"
#include "models/registry.h"
#include "tensor/tensor.h"
#include "train/memory_plan.h"

namespace weft {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

// The footage of one input, cut to whole latents. The codec takes a few frames at a time; for
// comparing and writing, the whole clip stays in host memory, a byte a value.
Footage read_footage(const MediaSource& source, const MediaDeck& limits,
                     const ReconstructDeck& deck, const VideoCodec& codec) {
  const std::int64_t side = codec.pixels_a_latent();
  const std::string& path = source.path;
  Footage f = read_frames(source, deck.frames, deck.height, deck.width, {.access = {limits, {}}});
  f.frames = codec.coded_frames(f.frames);
  f.rgb.resize(static_cast<std::size_t>(f.frames * f.height * f.width * 3));
  const std::int64_t height = f.height / side * side, width = f.width / side * side;
  WEFT_CHECK(height > 0 && width > 0, Exit::data,
             fmt::format("the {0} takes frames of at least {1}x{1}", codec.name(), side),
             "{}: frames of {}x{}", path, f.height, f.width);
  if (height == f.height && width == f.width) return f;
  Footage cut;
  cut.frames = f.frames, cut.height = height, cut.width = width, cut.fps = f.fps;
  for (std::int64_t row = 0; row < f.frames * height; ++row) {
    const std::int64_t from = (row / height * f.height + row % height) * f.width * 3;
    cut.rgb.insert(cut.rgb.end(), f.rgb.begin() + from, f.rgb.begin() + from + width * 3);
  }
  return cut;
}

// Frames [first, first + count) as the codec's input.
Tensor to_model(const Footage& f, std::int64_t first, std::int64_t count) {
  const std::int64_t frame = f.height * f.width * 3;
  std::vector<float> values(count * frame);
  const std::uint8_t* from = f.rgb.data() + first * frame;
#pragma omp parallel for schedule(static)
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(from[i]) * (1.0f / 127.5f) - 1.0f;
  return Tensor::from_host(std::span<const float>(values), {count, f.height, f.width, 3});
}

// Sums over the values of each channel of the latent as drawn from the posterior: shift and scale
// are undone.
json latent_sums(const VideoCodec& codec, const Tensor& latent) {
  const Tensor z = latent.to_host();
  const VideoCodec::Normalisation back = codec.normalisation();
  const std::int64_t C = codec.channels(), count = z.numel() / C;
  std::vector<double> sum(C), squares(sum);
  for (std::int64_t c = 0; c < C; ++c)
    for (std::int64_t i = 0; i < count; ++i) {
      const double v =
          static_cast<double>(z.data<float>()[c * count + i]) * static_cast<double>(back.scale[c]) +
          static_cast<double>(back.shift[c]);
      sum[c] += v;
      squares[c] += v * v;
    }
  return {{"count", count}, {"sum", sum}, {"squares", squares}};
}

// Original left, reconstruction right.
void write_both(const std::string& file, const Footage& f, const std::vector<std::uint8_t>& again) {
  const std::vector<std::uint8_t> both =
      side_by_side({f.rgb, again}, {f.frames * f.height, f.width});
  if (f.frames == 1)
    write_png(file, f.height, 2 * f.width, both);
  else
    write_mp4(file, {both.data(), f.frames, f.height, 2 * f.width}, f.fps);
}

// The stem of a result's name.
std::string stem_of(const std::string& input, std::int64_t item) {
  return fmt::format(
      "{:04d}_{}", item,
      is_source_graph(input) ? "lavfi" : plain_text(fs::path(input).stem().string()));
}

// The file of an input's result, but for its ending, is the item's name.
std::vector<ListItem> reconstruct_items(const Deck& deck, const std::vector<MediaItem>& inputs,
                                        const VideoCodec& codec, const std::string& weights) {
  std::string job = fmt::format("weights {}\nseed {}\norientation {}\n", weights, deck.run.seed,
                                deck.media.orientation);
  std::set<std::string> tables = codec.tables();
  tables.insert("reconstruct");
  for (const DeckLine& line : identity(deck, tables)) job += line.table + "." + line.text + "\n";
  std::vector<ListItem> items;
  for (const MediaItem& i : inputs) {
    const std::string name = i.media.name();
    items.push_back(
        {stem_of(name, std::ssize(items)),
         to_hex(hash128(job + (is_source_graph(name) ? name : file_identity(i.media.path)))), 1});
  }
  return items;
}

// No result may replace an input.
void check_results(const Deck& deck, const fs::path& out, const std::vector<MediaItem>& inputs) {
  std::vector<std::string> paths;
  std::set<fs::path> results;
  for (const MediaItem& i : inputs) {
    for (const char* ending : {".png", ".mp4"})
      results.insert(absolute_path(out / (stem_of(i.media.name(), std::ssize(paths)) + ending)));
    paths.push_back(i.media.path);
  }
  keep_inputs(deck, "reconstruct.output", paths,
              [&](const fs::path& path) { return results.contains(path); });
}

// Before the engine, on rank 0. A weft that kept no manifest here has left its results, with their
// keys, in the report alone: those of another request stay, too.
void check_earlier(const fs::path& out, const std::vector<ListItem>& items) {
  std::error_code none;
  if (fs::exists(out / "reconstruct.jsonl", none)) return;
  const auto all = try_parse_json<json>(content_of(out / "reconstruct.json"));
  std::map<std::string, std::string> keys;  // by the file
  try {
    for (const json& clip : all.at("clips"))
      keys[fs::path(clip.at("output").get<std::string>()).filename()] = clip.value("key", "");
  } catch (const json::exception&) {
    return;  // nothing was made here, or it is no file of ours
  }
  std::vector<std::string> replaced;
  for (const ListItem& item : items)
    for (const char* ending : {".png", ".mp4"}) {
      const std::string file = item.name + ending;
      const auto earlier = keys.find(file);
      if (earlier != keys.end() && earlier->second != item.key && fs::exists(out / file, none))
        replaced.push_back(file);
    }
  check_replaced(out.string(), "reconstruct.output", replaced);
}

struct ReconstructedClip : PictureUnit {
  ordered_json line;
  Footage footage;
  std::vector<std::uint8_t> again;  // as the codec gives it back
  double seconds = 0;
};

// Inputs through the codec and back, each as one "picture".
class ReconstructWork : public PictureWork {
 public:
  ReconstructWork(const Deck& deck, const std::vector<MediaItem>& inputs, VideoCodec& codec,
                  ListEngine& engine)
      : PictureWork(engine), deck_(deck), inputs_(inputs), codec_(codec) {}
  std::unique_ptr<PictureUnit> next(std::int64_t, std::int64_t number) override {
    return number == 0 ? std::make_unique<ReconstructedClip>() : nullptr;
  }
  FeedWork::Prepared read(PictureUnit& unit) override;
  void predict(std::span<PictureUnit* const> units) override;
  void finish(PictureUnit& unit) override;
  void failed(PictureUnit& unit, const Error& e) override;

 private:
  void code(ReconstructedClip& clip);

  const Deck& deck_;
  const std::vector<MediaItem>& inputs_;
  VideoCodec& codec_;
};

FeedWork::Prepared ReconstructWork::read(PictureUnit& unit) {
  auto& clip = static_cast<ReconstructedClip&>(unit);
  const double begin = now_seconds();
  clip.footage =
      read_footage(inputs_[clip.item].media, deck_.media, deck_.get<ReconstructDeck>(), codec_);
  clip.seconds = now_seconds() - begin;
  return {clip.seconds, 0, true, 2 * clip.footage.rgb.size()};
}

void ReconstructWork::predict(std::span<PictureUnit* const> units) {
  try {
    code(static_cast<ReconstructedClip&>(*units.front()));
  } catch (const Error& e) {
    throw Error(e).for_job();  // the codec's
  }
}

void ReconstructWork::code(ReconstructedClip& clip) {
  const Footage& f = clip.footage;
  const std::string path = inputs_[clip.item].media.name();
  const std::size_t capacity = Arena::current().capacity();
  const std::int64_t at_once = codec_.fit_micro_batch(f.frames, f.height, f.width, capacity);
  if (at_once < codec_.frames_asked(f.frames))
    log::warn("{}: {} micro-batch reduced to {} frames (asked: {}) to fit {:.3f} GiB", path,
              codec_.name(), at_once, codec_.frames_asked(f.frames), gib(capacity));
  codec_.set_micro_batch(at_once);
  const std::size_t planned =
      std::max(codec_.plan_encode(f.frames, f.height, f.width, at_once).bytes,
               codec_.plan_decode(f.frames, f.height, f.width, at_once).bytes);
  Arena& arena = Arena::current();
  arena.reset_peak();
  const VideoCodec::Noise noise{static_cast<std::uint64_t>(deck_.run.seed),
                                static_cast<std::uint64_t>(clip.item)};
  const double begin = now_seconds();
  const Tensor latent = codec_.encode(
      codec_.whole(f.frames), f.height, f.width,
      [&](std::int64_t first, std::int64_t count) { return to_model(f, first, count); }, &noise);
  latent.to_host();  // waits for the GPU, for the times below
  const double encoded = now_seconds();
  const std::int64_t frame = f.height * f.width * 3;
  clip.again.resize(f.frames * frame);
  codec_.decode(latent, f.frames, [&](std::int64_t first, const Tensor& frames) {
    const std::int64_t bad =
        pixels_of(frames, std::span(clip.again).subspan(first * frame, frames.numel()));
    WEFT_CHECK(bad < 0, Exit::non_finite,
               fmt::format("check the {}'s weights, and try {} = \"f32\"", codec_.name(),
                           codec_.dtype_key()),
               "{}: frame {} is not finite when decoded", path, first + bad);
  });
  const double decoded = now_seconds();
  clip.seconds += decoded - begin;
  clip.line = {{"latent_frames", codec_.latent_frames(f.frames)},
               {"micro_batch", at_once},
               {"planned_bytes", planned},
               {"peak_bytes", arena.peak()},
               {"encode_seconds", encoded - begin},
               {"decode_seconds", decoded - encoded},
               {"latent", latent_sums(codec_, latent)}};
}

void ReconstructWork::finish(PictureUnit& unit) {
  auto& clip = static_cast<ReconstructedClip&>(unit);
  const double begin = now_seconds();
  const Footage& f = clip.footage;
  const std::int64_t frame = f.height * f.width * 3;
  double psnrs = 0, ssims = 0;
  for (std::int64_t t = 0; t < f.frames; ++t) {
    psnrs += psnr(f.rgb.data() + t * frame, clip.again.data() + t * frame, f.height, f.width);
    ssims += ssim(f.rgb.data() + t * frame, clip.again.data() + t * frame, f.height, f.width);
  }
  const fs::path& out = engine_.settings().directory;
  const std::string file = engine_.items()[clip.item].name + (f.frames == 1 ? ".png" : ".mp4");
  write_both((out / file).string(), f, clip.again);
  const auto frames = static_cast<double>(f.frames);
  ordered_json line = engine_.line_of(clip.item);
  add_file(line, out, file);
  line.update({{"item", clip.item},
               {"input", printable(inputs_[clip.item].media.name(), 4096)},
               {"output", as_utf8((out / file).string())},
               {"frames", f.frames},
               {"height", f.height},
               {"width", f.width},
               {"psnr", psnrs / frames},
               {"ssim", ssims / frames},
               {"seconds", clip.seconds + now_seconds() - begin}});
  line.update(clip.line);
  engine_.finished(line);
}

// A file that cannot be read is left out of the figures, and the report says why.
void ReconstructWork::failed(PictureUnit& unit, const Error& e) {
  if (!static_cast<ReconstructedClip&>(unit).again.empty()) return engine_.failed(unit.item, e);
  if (!e.of_item() || e.code() != Exit::data) throw e;
  log::warn("skipped {}: {} ({})", inputs_[unit.item].media.name(), e.what(), e.hint());
  engine_.skipped(unit.item, e);
}

// All clips, in the order of the inputs; of those that were skipped, why.
json clips_of(const ListEngine& engine, const std::vector<MediaItem>& inputs) {
  const ManifestLines lines = engine.lines();
  json clips = json::array();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const ManifestLine& line = lines.at(engine.items()[i].name);
    json clip = parse_json(line.text);
    if (line.fault)
      clip = {{"item", i},
              {"input", printable(inputs[i].media.name(), 4096)},
              {"fault", fmt::format("{} ({})", clip.at("fault").get<std::string>(),
                                    clip.at("hint").get<std::string>())}};
    for (const char* own : {"name", "file", "bytes", "file_xxh3", "xxh3"}) clip.erase(own);
    clips.push_back(std::move(clip));
  }
  return clips;
}

// Means over clips, and over all values of each latent channel; what was skipped, apart.
json summary(json clips) {
  json all;
  all["skipped"] = json::array();
  for (const json& clip : clips)
    if (clip.contains("fault")) all["skipped"].push_back(clip);
  std::erase_if(clips.get_ref<json::array_t&>(), [](const json& c) { return c.contains("fault"); });
  WEFT_CHECK(!clips.empty(), Exit::data, "see to that file, or name others in reconstruct.inputs",
             "none of {} can be read; the first fault: {}",
             counted(std::ssize(all["skipped"]), "input"),
             all["skipped"].at(0)["fault"].get<std::string>());
  double psnrs = 0, ssims = 0, count = 0;
  const std::size_t C = clips.at(0)["latent"]["sum"].size();
  std::vector<double> mean(C), deviation(C);
  for (json& clip : clips) {
    // JSON has no infinity: identical frames give null.
    psnrs += clip["psnr"].is_null() ? INFINITY : clip["psnr"].get<double>();
    ssims += clip["ssim"].get<double>();
    const json latent = clip["latent"];
    clip.erase("latent");
    count += latent["count"].get<double>();
    for (std::size_t c = 0; c < C; ++c) {
      mean[c] += latent["sum"][c].get<double>();
      deviation[c] += latent["squares"][c].get<double>();
    }
  }
  for (std::size_t c = 0; c < C; ++c) {
    mean[c] /= count;
    deviation[c] = std::sqrt(std::max(0.0, deviation[c] / count - mean[c] * mean[c]));
  }
  const auto n = static_cast<double>(clips.size());
  all["psnr"] = psnrs / n;
  all["ssim"] = ssims / n;
  all["latent"] = {{"mean", mean}, {"deviation", deviation}, {"values_a_channel", count}};
  all["clips"] = std::move(clips);
  return all;
}

void report(const json& all, const fs::path& out) {
  for (const json& c : all["clips"]) {
    log::info(
        "clip      {}: {} of {}x{}, PSNR {:.3f} dB, SSIM {:.4f}, {:.1f} s (encode {:.1f}, "
        "decode {:.1f})",
        c["output"].get<std::string>(), counted(c["frames"].get<std::int64_t>(), "frame"),
        c["width"].get<std::int64_t>(), c["height"].get<std::int64_t>(),
        c["psnr"].is_null() ? INFINITY : c["psnr"].get<double>(), c["ssim"].get<double>(),
        c["seconds"].get<double>(), c["encode_seconds"].get<double>(),
        c["decode_seconds"].get<double>());
    log::info("memory    {:.3f} GiB at the peak ({:.3f} planned), {} at once",
              gib(c["peak_bytes"].get<std::size_t>()), gib(c["planned_bytes"].get<std::size_t>()),
              counted(c["micro_batch"].get<std::int64_t>(), "frame"));
  }
  const std::int64_t skipped = std::ssize(all["skipped"]);
  log::info("all       PSNR {:.3f} dB, SSIM {:.4f} over {}{}", all["psnr"].get<double>(),
            all["ssim"].get<double>(), counted(std::ssize(all["clips"]), "clip"),
            skipped > 0 ? fmt::format("; {} skipped", counted(skipped, "input")) : "");
  log::info("latents   shift = [{:.4f}], scale = [{:.4f}]: their mean and deviation a channel",
            fmt::join(all["latent"]["mean"].get<std::vector<double>>(), ", "),
            fmt::join(all["latent"]["deviation"].get<std::vector<double>>(), ", "));
  const fs::path file = out / "reconstruct.json";
  replace_file(file, dump_json(all, 2) + "\n", Exit::data, Durable::no);
  log::info("results   {}", file.string());
}

}  // namespace

int reconstruct(const Deck& deck, MPI_Comm world) {
  // 1. Inputs and model.
  const ReconstructDeck& r = deck.get<ReconstructDeck>();
  WEFT_CHECK(!r.inputs.empty(), Exit::usage, "set reconstruct.inputs = [\"clip.mp4\"]",
             "reconstruct.inputs is empty");
  WEFT_CHECK((r.height == 0) == (r.width == 0), Exit::usage, "give both in pixels, or neither",
             "reconstruct.height = {} but reconstruct.width = {}", r.height, r.width);
  const ListStart start = start_list_job(deck, world);
  const fs::path out =
      r.output.empty() ? fs::path(deck.run.dir) / "reconstructed" : fs::path(r.output);
  const std::vector<MediaItem> inputs =
      list_media(r.inputs, "reconstruct.inputs", deck.media, Described::no, out);
  WEFT_CHECK(!inputs.empty(), Exit::data, "check the lists in reconstruct.inputs",
             "reconstruct.inputs names no picture and no video");
  std::vector<std::string> missing;
  for (const MediaItem& i : inputs)
    if (std::string why = is_source_graph(i.media.path) ? "" : missing_file(i.media.path);
        !why.empty())
      missing.push_back(std::move(why));
  report_missing(missing, inputs.size(), "input", missing_hint);
  const std::unique_ptr<VideoCodec> codec = make_codec(deck);
  const VideoCodec::WeightsKey key = codec->weights();
  const ModelSource weights(key.key, key.value, deck.run.dir, deck.get<GenerateDeck>().ema, world);
  codec->check_weights(weights);
  const std::vector<ListItem> items = reconstruct_items(deck, inputs, *codec, weights.identity());
  if (log::rank() == 0) {
    check_results(deck, out, inputs);
    check_earlier(out, items);
  }
  ListEngine engine(list_settings(deck, "reconstruct", out, "clip"), items, world);

  // 2. Clips; a rank that is free takes the next one.
  ListEnd last;
  if (!engine.missing().empty()) {
    weights.load(codec->params(), codec->weight_names(), codec->bf16());
    log::info("weights   {}, {:.3f} GiB", weights.describe(),
              gib(codec->params().inference_bytes(codec->bf16())));
    ReconstructWork work(deck, inputs, *codec, engine);
    last.share = make_pictures(work, engine, deck, start, whole_clips_ahead);
    last.share.erase("peak_bytes");  // each clip's line has its own
  }

  // 3. The results.
  last.finish = [&](const ListReport&) { report(summary(clips_of(engine, inputs)), out); };
  return engine.end(last);
}

namespace {

void reconstruct_rows(Rows& r, ReconstructDeck& d) {
  r.path("inputs", d.inputs,
         "Footage to send through the codec and back, as ingest.inputs takes it.")
      .decides = false;
  r.path("output", d.output, "Directory of the results; empty is RUN/reconstructed.").decides =
      false;
  r.number("frames", d.frames, 0, many, "Frames of each to take; 0 takes all.");
  r.number("height", d.height, 0, 16384,
           "Height in pixels to resize to; 0 keeps that of the footage, cut to a multiple of 8.");
  r.number("width", d.width, 0, 16384, "Width in pixels, likewise.");
}

}  // namespace

DeckTable reconstruct_table() {
  DeckTable table = deck_table("reconstruct", reconstruct_rows);
  table.next = "t5";
  return table;
}

Command reconstruct_command() {
  Command c{"reconstruct", "encode and decode footage: PSNR, SSIM, statistics of the latents",
            reconstruct};
  c.handles_stop_signals = true;
  takes_list_job(c);
  return c;
}

}  // namespace weft
