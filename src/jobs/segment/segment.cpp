#include "jobs/segment/segment.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "config/deck_table.h"
#include "config/keep_inputs.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/log.h"
#include "data/clip_store.h"
#include "data/images/label_pictures.h"
#include "data/images/labelled_images.h"
#include "data/lists/folders.h"
#include "data/lists/lists.h"
#include "jobs/engine/pictures.h"
#include "media/image_file.h"
#include "media/video_reader.h"
#include "models/segmentation/classes.h"
#include "models/segmentation/options.h"
#include "models/segmentation/predictor.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---- What is to be segmented ----

// Printed, and a file's name with an ending and more behind it: no control characters, and the last
// part no longer than file systems take.
std::string plain_name(const fs::path& path) {
  constexpr std::size_t most = 180;
  const std::string folder = path.parent_path().string();
  return plain_text(folder.empty() ? "" : folder + "/") +
         plain_text(cut_text(as_utf8(path.filename().string()), most));
}

// The result's path below the output, without ending, as far as the input's name decides it.
fs::path plain_path(const MediaItem& item) {
  fs::path path = item.below;
  if (is_source_graph(item.media.path))
    path = "lavfi";
  else if (path.empty())
    path = fs::path(item.media.name()).filename();
  return plain_name(path.replace_extension());
}

// A name for each result: that of the input, with a number behind it where another one has it. A
// subfolder with the name of a result, or of a file of weft's, gets an underscore in front.
std::vector<SegmentInput> named(const std::vector<MediaItem>& items) {
  std::vector<SegmentInput> inputs;
  std::set<std::string> files, taken;
  for (const MediaItem& item : items)
    for (const char* ending : {".png", ".mp4"}) files.insert(plain_path(item).string() + ending);
  for (const MediaItem& item : items) {
    const fs::path plain = plain_path(item);
    fs::path folder;
    for (const fs::path& part : plain.parent_path()) {
      folder /= part;
      while (files.contains(folder.string()) || is_own_name(folder.string(), "segment"))
        folder.replace_filename("_" + folder.filename().string());
    }
    const std::string stem = (folder / plain.filename()).string();
    std::string name = stem;
    for (int n = 2; !taken.insert(name).second; ++n) name = fmt::format("{}-{}", stem, n);
    const bool picture =
        !is_source_graph(item.media.path) && kind_of_name(item.media.name()) == MediumKind::picture;
    inputs.push_back({item.media, name, !picture});
  }
  return inputs;
}

void refuse_folder(const fs::path& folder, const fs::path& output) {
  std::error_code none;
  WEFT_CHECK(!fs::equivalent(folder, output, none), Exit::usage, "choose another segment.output",
             "{} is both among segment.inputs and segment.output: the next start would take the "
             "results for pictures",
             folder.string());
}

std::vector<SegmentInput> list(const SegmentDeck& deck, const MediaDeck& limits) {
  for (const std::string& input : deck.inputs) refuse_folder(input, deck.output);
  const std::vector<MediaItem> items =
      list_media(deck.inputs, "segment.inputs", limits, Described::no, deck.output);
  WEFT_CHECK(!items.empty(), Exit::data, "check the lists in segment.inputs",
             "segment.inputs names no picture and no video");
  std::vector<std::string> missing;
  for (const MediaItem& item : items)
    if (std::string why = missing_file(item.media.path); !why.empty())
      missing.push_back(std::move(why));
  report_missing(missing, items.size(), "input", missing_hint);
  return named(items);
}

constexpr std::size_t longest_path = 4096;
constexpr double least_share = 1e-3;  // of the pixels, to be named
// A byte of a video holds about as many pixels as this many bytes of a picture.
constexpr double video_cost = 30;

// The name of an input's result, in the output folder.
std::string result_file(const SegmentInput& input) {
  return input.name + (input.video ? ".mp4" : ".png");
}

// Item i is input i. `job`: all that decides the results but the input itself.
std::vector<ListItem> segment_items(const std::vector<SegmentInput>& inputs,
                                    const std::string& job) {
  std::vector<ListItem> items;
  for (const SegmentInput& i : inputs) {
    const bool graph = is_source_graph(i.media.path);
    std::error_code none;
    const double bytes = graph ? 1e6 : static_cast<double>(fs::file_size(i.media.path, none));
    const std::string what = graph ? i.media.path : file_identity(i.media.path);
    items.push_back(
        {i.name, to_hex(hash128(job + what)), none ? 0 : bytes * (i.video ? video_cost : 1)});
  }
  return items;
}

// No result may replace an input.
void check_results(const Deck& deck, const std::vector<SegmentInput>& inputs) {
  const fs::path output = deck.get<SegmentDeck>().output;
  std::set<fs::path> results = {absolute_path(output / legend_file)};
  std::vector<std::string> paths;
  for (const SegmentInput& i : inputs) {
    results.insert(absolute_path(output / result_file(i)));
    paths.push_back(i.media.path);
  }
  keep_inputs(deck, "segment.output", paths,
              [&](const fs::path& path) { return results.contains(path); });
}

// ---- What classes are called and coloured ----

// Names and colours from the data that the deck trains on, where it has them and as many classes as
// the model; pictures can be segmented without that data.
struct DataClasses {
  std::vector<std::string> names;
  std::vector<std::uint8_t> palette;  // as LabelledImages::palette()
};

// Collective: rank 0 asks for all.
DataClasses classes_of_data(const Deck& deck, MPI_Comm world) {
  const std::string& data = deck.data.path;
  std::error_code none;
  const Json found = from_first_rank(world, [&] {
    Json j = {{"names", Json::array()}, {"palette", Json::array()}};
    if (is_shapes(data) || (fs::exists(data, none) && is_hdf5(data))) try {
        const auto images = open_labelled_images(data, deck.data.verify);
        if (images->num_classes() == deck.get<SegmentationDeck>().num_classes)
          j = {{"names", images->class_names()}, {"palette", images->palette()}};
      } catch (const Error& e) {
        log::warn("classes have neither names nor colours of the data: {}", e.what());
      }
    return j;
  });
  return {found.at("names"), found.at("palette")};
}

// ---- Pictures and frames through the model ----

constexpr std::int64_t most_ahead_of_videos = 64;  // frames

// A video whose frames are on their way. They come in any order and are written in theirs.
struct SegmentVideo {
  SegmentVideo(const MediaSource& source, const MediaDeck& limits, std::size_t classes)
      : reader(source, {.access = {limits, {}}}), pixels(classes) {}

  std::mutex reading;  // of these
  VideoReader reader;
  std::int64_t frames = 0;  // read so far
  ImageSize size;           // of the first one
  double fps = 0, ticks = 0;
  std::atomic<bool> ended = false;  // there are no more, or one has failed

  struct Drawn {
    std::vector<std::uint8_t> rgb;
    double seconds = 0, duration = 0;
  };
  std::mutex writing;  // of these
  std::optional<Mp4Writer> writer;
  std::map<std::int64_t, Drawn> drawn;  // frames that wait for those before them
  std::int64_t written = 0;
  std::vector<std::int64_t> pixels;  // of each class
  std::int64_t open = 0;             // frames on their way
  bool all_given = false;            // no more will be on their way
  bool failed = false;               // reported, or left to the next start
};

// A picture, or a frame of a video.
struct SegmentPicture : PictureUnit {
  ImageSize size;
  std::vector<std::uint8_t> rgb;
  std::vector<ScaledPicture> scales;
  std::vector<std::uint8_t> labels;  // class + 1
  std::vector<std::int64_t> pixels;  // of each class
  std::shared_ptr<SegmentVideo> video;
  bool last = false;  // the end marker after a video's last frame
  std::int64_t frame = 0;
  double seconds = 0, duration = 0;  // of a frame: when, and how long
};

class SegmentWork : public PictureWork {
 public:
  SegmentWork(const Deck& deck, const std::vector<SegmentInput>& inputs,
              const std::vector<std::string>& class_names, const std::vector<Rgb>& palette,
              Predictor& predictor, ListEngine& engine)
      : PictureWork(engine),
        deck_(deck),
        overlay_(deck.get<SegmentDeck>().overlay),
        inputs_(inputs),
        class_names_(class_names),
        palette_(palette),
        predictor_(predictor) {}
  std::unique_ptr<PictureUnit> next(std::int64_t item, std::int64_t number) override;
  FeedWork::Prepared read(PictureUnit& picture) override;
  void predict(std::span<PictureUnit* const> pictures) override;
  void finish(PictureUnit& picture) override;
  void failed(PictureUnit& picture, const Error& e) override;
  void done(PictureUnit& picture) override;
  // Pictures and frames that went through the model.
  std::int64_t predicted() const { return predicted_; }

 private:
  bool decode(SegmentPicture& p) const;
  void write_frame(SegmentPicture& p);
  void finish_video(std::int64_t item, SegmentVideo& video);
  std::vector<std::uint8_t> drawn(const SegmentPicture& picture) const;
  void write_picture(const std::string& path, const SegmentPicture& picture) const;
  Json line_of(std::int64_t item, ImageSize size, std::int64_t frames,
               const std::vector<std::int64_t>& pixels) const;
  const SegmentInput& input(std::int64_t item) const { return inputs_[item]; }

  const Deck& deck_;
  const std::string& overlay_;
  const std::vector<SegmentInput>& inputs_;
  const std::vector<std::string>& class_names_;
  const std::vector<Rgb>& palette_;
  Predictor& predictor_;
  std::shared_ptr<SegmentVideo> video_;  // whose frames are being handed out
  std::int64_t predicted_ = 0;
};

// A video gives frames until one reader has found its end, then one that is none: with it the last
// of them is known, whichever comes last.
std::unique_ptr<PictureUnit> SegmentWork::next(std::int64_t item, std::int64_t number) {
  auto p = std::make_unique<SegmentPicture>();
  if (!input(item).video) return number == 0 ? std::move(p) : nullptr;
  if (number == 0)
    video_ = std::make_shared<SegmentVideo>(input(item).media, deck_.media, class_names_.size());
  if (!video_) return nullptr;
  p->last = video_->ended || engine_.stop_requested();
  p->video = p->last ? std::exchange(video_, nullptr) : video_;
  const std::lock_guard lock(p->video->writing);
  ++p->video->open;
  p->video->all_given = p->last;
  return p;
}

// False after a video's last frame.
bool SegmentWork::decode(SegmentPicture& p) const {
  if (!p.video) {
    ImageFile file = read_image_file(input(p.item).media, deck_.media);
    p.size = {file.height, file.width};
    p.rgb = std::move(file.values);
    return true;
  }
  SegmentVideo& v = *p.video;
  const VideoFrame* f = v.ended ? nullptr : v.reader.next();
  if (f == nullptr) {
    v.ended = true;
    return false;
  }
  p.frame = v.frames++;
  p.size = {f->height, f->width};
  p.seconds = f->seconds;
  p.duration = f->duration;
  if (p.frame == 0) v.size = p.size;
  WEFT_CHECK(p.size == v.size, Exit::data, "cut the video where its size changes",
             "{}: frame {} is of {}x{}, those before of {}x{}", input(p.item).media.path, p.frame,
             p.size.height, p.size.width, v.size.height, v.size.width);
  v.fps = v.reader.fps();
  v.ticks = v.reader.ticks();
  const std::int64_t row = 3 * f->width;
  p.rgb.resize(f->height * row);
  for (std::int64_t y = 0; y < f->height; ++y)
    std::memcpy(p.rgb.data() + y * row, f->rgb + y * f->stride, static_cast<std::size_t>(row));
  return true;
}

FeedWork::Prepared SegmentWork::read(PictureUnit& picture) {
  auto& p = static_cast<SegmentPicture&>(picture);
  if (p.last) return {0, 0, false, 0};
  std::unique_lock<std::mutex> lock;
  if (p.video) lock = std::unique_lock(p.video->reading);  // frames are decoded one by one
  const double begin = now_seconds();
  const bool there = decode(p);
  const double decoded = now_seconds();
  if (lock) lock.unlock();
  if (!there) return {decoded - begin, 0, false, 0};
  const double scaling = now_seconds();
  p.scales = predictor_.scaled(p.rgb, p.size);
  std::size_t bytes = 2 * p.rgb.size();  // and what is drawn
  for (const ScaledPicture& s : p.scales) bytes += s.rgb.size();
  return {decoded - begin, now_seconds() - scaling, true, bytes};
}

void SegmentWork::predict(std::span<PictureUnit* const> pictures) {
  auto& p = static_cast<SegmentPicture&>(*pictures.front());
  predictor_.check_memory(p.size, false, Arena::current().capacity());
  const Prediction found = predictor_.predict(p.scales, p.size);
  ++predicted_;
  p.scales.clear();
  p.pixels.resize(class_names_.size());
  for (const std::uint8_t c : found.classes) ++p.pixels[c];
  p.labels = as_labels(found.classes);
}

void SegmentWork::finish(PictureUnit& picture) {
  auto& p = static_cast<SegmentPicture&>(picture);
  if (p.video) return write_frame(p);
  Json line = line_of(p.item, p.size, 1, p.pixels);
  const fs::path& directory = engine_.settings().directory;
  const std::string file = result_file(input(p.item));
  write_picture(result_path(directory, file).string(), p);
  add_file(line, directory, file);
  engine_.finished(line);
}

// Draws the frame, and writes all that are due.
void SegmentWork::write_frame(SegmentPicture& p) {
  SegmentVideo& v = *p.video;
  std::vector<std::uint8_t> rgb = drawn(p);
  const std::lock_guard lock(v.writing);
  if (v.failed) return;
  for (std::size_t c = 0; c < p.pixels.size(); ++c) v.pixels[c] += p.pixels[c];
  v.drawn[p.frame] = {std::move(rgb), p.seconds, p.duration};
  for (auto due = v.drawn.begin(); due != v.drawn.end() && due->first == v.written;
       due = v.drawn.erase(due), ++v.written) {
    const SegmentVideo::Drawn& d = due->second;
    const std::int64_t width = std::ssize(d.rgb) / (3 * p.size.height);
    if (!v.writer) {
      const fs::path file = result_path(engine_.settings().directory, result_file(input(p.item)));
      v.writer.emplace(file.string(), p.size.height, width,
                       Mp4Options{.fps = v.fps, .ticks = v.ticks});
    }
    v.writer->add({d.rgb.data(), 1, p.size.height, width}, d.seconds, d.duration);
  }
}

void SegmentWork::failed(PictureUnit& picture, const Error& e) {
  auto& p = static_cast<SegmentPicture&>(picture);
  if (!p.video) return engine_.failed(p.item, e);
  p.video->ended = true;
  const std::lock_guard lock(p.video->writing);
  if (!std::exchange(p.video->failed, true)) engine_.failed(p.item, e);
}

void SegmentWork::done(PictureUnit& picture) {
  auto& p = static_cast<SegmentPicture&>(picture);
  if (!p.video) return;
  {
    const std::lock_guard lock(p.video->writing);
    if (p.dropped && !p.last) p.video->failed = true;
    if (--p.video->open > 0 || !p.video->all_given || p.video->failed) return;
  }
  // A stop may have ended it before its last frame.
  if (!p.video->ended) return;
  try {
    finish_video(p.item, *p.video);
  } catch (const Error& e) {
    engine_.failed(p.item, e);
  }
}

void SegmentWork::finish_video(std::int64_t item, SegmentVideo& v) {
  WEFT_CHECK(v.written > 0, Exit::data, "is it a video?", "{} has no frame",
             input(item).media.path);
  v.writer->finish();
  Json line = line_of(item, v.size, v.written, v.pixels);
  line["fps"] = v.fps;
  add_file(line, engine_.settings().directory, result_file(input(item)));
  engine_.finished(line);
}

Json SegmentWork::line_of(std::int64_t item, ImageSize size, std::int64_t frames,
                          const std::vector<std::int64_t>& pixels) const {
  Json line = engine_.line_of(item);
  line["input"] = printable(input(item).media.name(), longest_path);
  line["height"] = size.height;
  line["width"] = size.width;
  line["frames"] = frames;
  std::vector<std::size_t> order(pixels.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order,
                           [&](std::size_t a, std::size_t b) { return pixels[a] > pixels[b]; });
  const double all = static_cast<double>(size.height * size.width * frames);
  line["shares"] = Json::array();
  for (const std::size_t c : order)
    if (const double share = static_cast<double>(pixels[c]) / all; share > least_share)
      line["shares"].push_back({{"class", c},
                                {"name", class_names_[c]},
                                {"share", share},
                                {"colour", css_colour(palette_[c + 1])}});
  return line;
}

// As segment.overlay says, [height, width or twice the width, 3].
std::vector<std::uint8_t> SegmentWork::drawn(const SegmentPicture& p) const {
  std::vector<std::uint8_t> colours = coloured(p.labels, palette_);
  if (overlay_ == "blend") return blended(p.rgb, colours);
  if (overlay_ == "side_by_side") return side_by_side({p.rgb, colours}, p.size);
  return colours;
}

void SegmentWork::write_picture(const std::string& path, const SegmentPicture& p) const {
  const auto [height, width] = p.size;
  if (overlay_ == "mask")
    write_palette_png(path, height, width, p.labels, palette_);
  else
    write_png(path, height, overlay_ == "side_by_side" ? 2 * width : width, drawn(p));
}

// ---- The end ----

// "sky 41.2 %, sea 30.1 %, ...", at most 8 classes.
std::string shares_text(const nlohmann::ordered_json& line) {
  std::string text;
  std::size_t named = 0;
  for (const auto& s : line.at("shares")) {
    if (++named > 8) return text + ", ...";
    text += fmt::format("{}{} {:.1f} %", text.empty() ? "" : ", ", s.at("name").get<std::string>(),
                        100 * s.at("share").get<double>());
  }
  return text;
}

// What is in the first inputs; segment.jsonl has all.
void print_shares(const ListEngine& engine) {
  constexpr std::size_t most = 20;
  const ManifestLines lines = engine.lines();
  std::size_t printed = 0;
  for (const ListItem& item : engine.items()) {
    const auto line = lines.find(item.name);
    if (line == lines.end() || !is_result(line->second, item.key)) continue;
    if (++printed > most) break;
    fmt::print("{}: {}\n", printable(item.name),
               printable(shares_text(line->second.parsed()), 1000));
  }
  const auto all = (engine.settings().directory / (engine.settings().stem + ".jsonl")).string();
  if (printed > most)
    fmt::print("... and of {}: {}\n", counted(engine.items().size() - most, "other"), all);
  else
    log::write_info("results   " + all);
}

}  // namespace

std::vector<SegmentInput> list_inputs(const SegmentDeck& deck, const MediaDeck& limits,
                                      MPI_Comm world) {
  WEFT_CHECK(!deck.inputs.empty(), Exit::usage, "set segment.inputs = [\"pictures/\"]",
             "segment.inputs is empty");
  const Json all = from_first_rank(world, [&] {
    Json j = Json::array();
    for (const SegmentInput& i : list(deck, limits))
      j.push_back({i.media.path, i.media.trust == MediaTrust::deck, i.media.member, i.media.begin,
                   i.media.bytes, i.name, i.video});
    return j;
  });
  std::vector<SegmentInput> inputs;
  for (const Json& j : all)
    inputs.push_back({{j.at(0), j.at(1).get<bool>() ? MediaTrust::deck : MediaTrust::untrusted,
                       j.at(2), j.at(3), j.at(4)},
                      j.at(5),
                      j.at(6)});
  return inputs;
}

int segment(const Deck& deck, MPI_Comm world) {
  // 1. What is to be made.
  const SegmentDeck& s = deck.get<SegmentDeck>();
  WEFT_CHECK(!s.output.empty(), Exit::usage, "set segment.output = \"segmented\"",
             "segment.output is empty");
  const ListStart start = start_list_job(deck, world);
  const std::vector<SegmentInput> inputs = list_inputs(s, deck.media, world);
  if (log::rank() == 0) check_results(deck, inputs);
  Predictor predictor(deck);
  const SegmentationSource weights(deck, s.ema, world);
  const DataClasses of_data = classes_of_data(deck, world);
  weights.check_classes(of_data.names, deck.data.path);
  const std::vector<std::string> names = class_names(deck, of_data.names);
  const std::vector<Rgb> palette = label_palette(deck, of_data.palette);
  std::string job = fmt::format("weights {}\n{}overlay {}\norientation {}\nclasses {}\n",
                                weights.identity(), describe_prediction(deck), s.overlay,
                                deck.media.orientation, fmt::join(names, "\n"));
  for (const Rgb& colour : palette) job += css_colour(colour);
  ListEngine engine(list_settings(deck, "segment", s.output, "input"), segment_items(inputs, job),
                    world);
  log::info("segment   {} at {} into {}{}", counted(std::ssize(inputs), "input"),
            counted(std::ssize(deck.data.short_sides), "scale"), s.output, engine.made_before());

  // 2. Inputs through the model; a rank that is free takes the next one.
  ListEnd last;
  if (!engine.missing().empty()) {
    weights.load(predictor.params());
    log::info("weights   {}", weights.describe());
    SegmentWork work(deck, inputs, names, palette, predictor, engine);
    // Every rank should have some of few pictures; one rank has all frames of a video.
    const bool videos =
        std::ranges::any_of(engine.missing(), [&](std::int64_t i) { return inputs[i].video; });
    last.share = make_pictures(work, engine, deck, start,
                               videos ? most_ahead_of_videos : engine.ahead_of_others());
    log::info("memory    {} at the peak", size_text(last.share.at("peak_bytes")));
    last.share["looked_at"] = work.predicted();
  }

  // 3. The report.
  last.summarise = [&](const ListReport& report) {
    replace_file(engine.settings().directory / legend_file, legend_svg(names, palette), Exit::data,
                 Durable::no);
    print_shares(engine);
    return report_feed(report);
  };
  return engine.end(last);
}

namespace {

void segment_rows(Rows& r, SegmentDeck& d) {
  r.path("inputs", d.inputs,
         "Pictures and videos, folders of them, globs, lists and shards, as ingest.inputs takes "
         "them.");
  r.path("output", d.output, "Folder of the results: a PNG for a picture, an MP4 for a video.");
  r.text("overlay", d.overlay,
         "What is drawn: side_by_side has the picture and the classes' colours, blend mixes them, "
         "mask "
         "is a PNG of labels (class + 1) with a palette.",
         {"side_by_side", "blend", "mask"});
  r.flag("ema", d.ema, "Take the moving average of the weights from a checkpoint.");
}

}  // namespace

DeckTable segment_table() { return deck_table("segment", segment_rows); }

Command segment_command() {
  Command c{"segment", "classify the pixels of pictures and videos", segment};
  c.handles_stop_signals = true;
  takes_list_job(c);
  return c;
}

}  // namespace weft
