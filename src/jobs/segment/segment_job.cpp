#include "jobs/segment/segment_job.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <optional>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "jobs/evaluate/views.h"
#include "media/image_file.h"
#include "media/video_reader.h"
#include "models/segmentation/classes.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

constexpr double least_share = 1e-3;  // of the pixels, to be named
// A byte of a video stands for about as many pixels as so many of a picture.
constexpr double video_cost = 30;

}  // namespace

std::string result_file(const SegmentInput& input) {
  return input.name + (input.video ? ".mp4" : ".png");
}

std::vector<ListItem> segment_items(const std::vector<SegmentInput>& inputs,
                                    const std::string& job) {
  std::vector<ListItem> items;
  for (const SegmentInput& i : inputs) {
    const bool graph = is_source_graph(i.media.path);
    std::error_code none;
    const double bytes =
        graph ? 1e6 : static_cast<double>(std::filesystem::file_size(i.media.path, none));
    const std::string what = graph ? i.media.path : file_identity(i.media.path);
    items.push_back(
        {i.name, to_hex(hash128(job + what)), none ? 0 : bytes * (i.video ? video_cost : 1)});
  }
  return items;
}

SegmentJob::SegmentJob(const Deck& deck, const std::vector<SegmentInput>& inputs,
                       const std::vector<std::string>& class_names, std::vector<Rgb> palette,
                       Predictor& predictor, const ListEngine& engine)
    : deck_(deck),
      segment_(deck.get<SegmentDeck>()),
      inputs_(inputs),
      class_names_(class_names),
      predictor_(predictor),
      engine_(engine),
      palette_(std::move(palette)) {}

SegmentJob::Picture SegmentJob::read_picture(std::int64_t item) const {
  ImageFile file = read_image_file(inputs_[static_cast<std::size_t>(item)].media, deck_.media);
  Picture p{{file.height, file.width}, std::move(file.values), {}};
  p.scales = predictor_.scaled(p.rgb, p.size);
  return p;
}

void SegmentJob::prepare(const ItemBatch& items) {
  const std::int64_t item = items.front();
  if (inputs_[static_cast<std::size_t>(item)].video) return;
  reading_[item] = std::async(std::launch::async, [this, item] { return read_picture(item); });
}

std::vector<std::uint8_t> SegmentJob::look_at(const Picture& picture,
                                              std::vector<std::int64_t>& pixels) {
  predictor_.check_memory(picture.size, false, Arena::current().capacity());
  const Prediction p = predictor_.predict(picture.scales, picture.size);
  predicting_ += p.seconds;
  ++looked_at_;
  for (const std::uint8_t c : p.classes) ++pixels[c];
  return as_labels(p.classes);
}

std::vector<std::uint8_t> SegmentJob::drawn(const Picture& picture,
                                            const std::vector<std::uint8_t>& labels) const {
  std::vector<std::uint8_t> colours = coloured(labels, palette_);
  if (segment_.overlay == "blend") return blended(picture.rgb, colours);
  if (segment_.overlay == "side_by_side") return side_by_side({picture.rgb, colours}, picture.size);
  return colours;
}

void SegmentJob::write_picture(const std::string& path, const Picture& picture,
                               const std::vector<std::uint8_t>& labels) const {
  const auto [height, width] = picture.size;
  if (segment_.overlay == "mask")
    write_palette_png(path, height, width, labels, palette_);
  else
    write_png(path, height, segment_.overlay == "side_by_side" ? 2 * width : width,
              drawn(picture, labels));
}

Json SegmentJob::line_of(std::int64_t item, ImageSize size, std::int64_t frames,
                         const std::vector<std::int64_t>& pixels) const {
  const ListItem& i = engine_.items()[static_cast<std::size_t>(item)];
  const SegmentInput& input = inputs_[static_cast<std::size_t>(item)];
  Json line = {{"name", i.name}, {"key", i.key}, {"rank", engine_.groups().rank}};
  line["input"] = as_utf8(input.media.name());
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

void SegmentJob::make_picture(std::int64_t item, ItemResults& results) {
  const double begin = now_seconds();
  Picture picture = reading_.extract(item).mapped().get();
  waited_ += now_seconds() - begin;
  std::vector<std::int64_t> pixels(class_names_.size());
  std::vector<std::uint8_t> labels = look_at(picture, pixels);
  Json line = line_of(item, picture.size, 1, pixels);
  picture.scales.clear();
  writing_.start([this, item, &results, line = std::move(line), picture = std::move(picture),
                  labels = std::move(labels)]() mutable {
    try {
      const std::filesystem::path& directory = engine_.settings().directory;
      const std::string file = result_file(inputs_[static_cast<std::size_t>(item)]);
      write_whole(directory, file,
                  [&](const std::string& path) { write_picture(path, picture, labels); });
      add_file(line, directory, file);
      results.finished(line);
    } catch (const Error& e) {
      results.failed(item, e);
    }
  });
}

void SegmentJob::make_video(std::int64_t item, ItemResults& results) {
  const SegmentInput& input = inputs_[static_cast<std::size_t>(item)];
  VideoReader reader(input.media, {.access = {deck_.media, {}}});
  const auto read_frame = [&]() -> std::optional<Picture> {
    const VideoFrame* f = reader.next();
    if (f == nullptr) return std::nullopt;
    Picture p{{f->height, f->width}, {}, {}, f->seconds, f->duration};
    const std::int64_t row = 3 * f->width;
    p.rgb.resize(static_cast<std::size_t>(f->height * row));
    for (std::int64_t y = 0; y < f->height; ++y)
      std::memcpy(p.rgb.data() + y * row, f->rgb + y * f->stride, static_cast<std::size_t>(row));
    p.scales = predictor_.scaled(p.rgb, p.size);
    return p;
  };
  std::vector<std::int64_t> pixels(class_names_.size());
  const std::string file = result_file(input);
  ImageSize size;
  std::int64_t frames = 0;
  write_whole(engine_.settings().directory, file, [&](const std::string& path) {
    std::optional<Mp4Writer> writer;
    std::future<std::optional<Picture>> reading = std::async(std::launch::async, read_frame);
    for (;; ++frames) {
      const double begin = now_seconds();
      const std::optional<Picture> picture = reading.get();
      waited_ += now_seconds() - begin;
      if (!picture) break;
      reading = std::async(std::launch::async, read_frame);
      if (frames == 0) {
        size = picture->size;
        writer.emplace(path, size.height,
                       segment_.overlay == "side_by_side" ? 2 * size.width : size.width,
                       Mp4Options{.fps = reader.fps(), .ticks = reader.ticks()});
      }
      WEFT_CHECK(picture->size == size, Exit::data, "cut the video where its size changes",
                 "{}: frame {} is of {}x{}, those before of {}x{}", input.media.path, frames,
                 picture->size.height, picture->size.width, size.height, size.width);
      const std::vector<std::uint8_t> both = drawn(*picture, look_at(*picture, pixels));
      writer->add(
          {both.data(), 1, size.height, static_cast<std::int64_t>(both.size()) / (3 * size.height)},
          picture->seconds, picture->duration);
    }
    WEFT_CHECK(frames > 0, Exit::data, "is it a video?", "{} has no frame", input.media.path);
    writer->finish();
  });
  Json line = line_of(item, size, frames, pixels);
  line["fps"] = reader.fps();
  add_file(line, engine_.settings().directory, file);
  results.finished(line);
}

void SegmentJob::make(const ItemBatch& items, ItemResults& results) {
  const std::int64_t item = items.front();
  if (inputs_[static_cast<std::size_t>(item)].video)
    make_video(item, results);
  else
    make_picture(item, results);
}

Json SegmentJob::share() const {
  return {{"looked_at", looked_at_}, {"predicting", predicting_}, {"waited", waited_}};
}

}  // namespace weft
