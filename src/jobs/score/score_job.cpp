// The files of `weft score` through the network: frames, their text regions, lines of the manifest.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/log.h"
#include "data/lists/folders.h"
#include "data/text_images/polygon.h"
#include "jobs/engine/pictures.h"
#include "jobs/score/score.h"
#include "media/image_file.h"
#include "media/video_reader.h"
#include "models/dbnet/detector.h"
#include "tensor/device.h"
#include "train/memory_plan.h"

namespace weft {

using Json = nlohmann::ordered_json;

namespace {

constexpr std::size_t longest_reason = 400;
constexpr std::int64_t most_together = 64;  // frames in the network, on a GPU

// By its name (data/lists/folders.h). Anything else is taken for a picture.
bool is_video(const std::string& path) { return kind_of_name(path) == MediumKind::video; }

// A file on its way: its frames come one by one.
struct FileInHand {
  std::int64_t number = 0;
  std::mutex mutex;  // of what follows
  std::int64_t open = 0;
  // Facts of the frame with most text, the first of equals; -1: none yet.
  std::int64_t count = -1, frame = 0, height = 0, width = 0;
  std::vector<TextBox> boxes;
  std::vector<std::uint8_t> rgb;  // of that frame, if it is to be drawn
  std::string fault;              // the first
  std::optional<Error> error;     // no frame at all
  bool left = false;              // to the next start: the job is to stop
};

struct ScoredFrame : PictureUnit {
  std::shared_ptr<FileInHand> file;
  std::int64_t frame = 0, height = 0, width = 0;
  std::vector<std::uint8_t> rgb;  // [side, side, 3]
  std::vector<float> map;         // [side, side]; empty: no text
  std::string fault;
  bool failed = false;
};

class ScoreWork : public PictureWork {
 public:
  ScoreWork(const Deck& deck, const std::vector<ScoreFile>& files, Detector& detector,
            ListEngine& engine)
      : PictureWork(engine),
        deck_(deck),
        score_(deck.get<ScoreDeck>()),
        files_(files),
        detector_(detector),
        frames_(frames_of(score_)) {}
  std::unique_ptr<PictureUnit> next(std::int64_t item, std::int64_t number) override;
  FeedWork::Prepared read(PictureUnit& picture) override;
  void predict(std::span<PictureUnit* const> pictures) override;
  void finish(PictureUnit& picture) override;
  void failed(PictureUnit& picture, const Error& e) override;
  void done(PictureUnit& picture) override;

 private:
  void report(FileInHand& file);
  void draw(const FileInHand& file, Json& line) const;

  const Deck& deck_;
  const ScoreDeck& score_;
  const std::vector<ScoreFile>& files_;
  Detector& detector_;
  const std::vector<std::int64_t> frames_;
  std::shared_ptr<FileInHand> file_;  // whose frames are being handed out
};

}  // namespace

std::vector<std::int64_t> frames_of(const ScoreDeck& deck) {
  return deck.frames.empty() ? std::vector{deck.frame} : deck.frames;
}

std::vector<ListItem> score_items(const std::vector<ScoreFile>& files, const std::string& job,
                                  bool keys) {
  std::vector<ListItem> items;
  for (const ScoreFile& f : files) {
    std::string key;
    if (keys) key = to_hex(hash128(job + (f.drawn ? "drawn\n" : "") + file_identity(f.media.path)));
    items.push_back({item_name(f.path), std::move(key), 1});
  }
  return items;
}

std::unique_ptr<PictureUnit> ScoreWork::next(std::int64_t item, std::int64_t number) {
  const bool video = is_video(files_[item].path);
  const std::int64_t frames = video ? std::ssize(frames_) : 1;
  if (number == frames) return nullptr;
  if (number == 0) {
    file_ = std::make_shared<FileInHand>();
    file_->number = item;
    file_->open = frames;
  }
  auto frame = std::make_unique<ScoredFrame>();
  frame->file = file_;
  frame->frame = video ? frames_[number] : 0;
  return frame;
}

// Decodes the picture and makes the detector's frame of it.
FeedWork::Prepared ScoreWork::read(PictureUnit& picture) {
  auto& f = static_cast<ScoredFrame&>(picture);
  const auto& [path, media, drawn] = files_[f.item];
  const double begin = now_seconds();
  std::vector<std::uint8_t> rgb;
  WEFT_CHECK(!path.empty(), Exit::data, "fill it in, or leave the row out", "the path is empty");
  if (is_video(path)) {
    PickedFrame picked =
        frame_at(media, f.frame, {deck_.media, [this] { return engine_.stop_requested(); }});
    f.height = picked.height;
    f.width = picked.width;
    f.fault = std::move(picked.fault);
    rgb = std::move(picked.rgb);
  } else {
    ImageFile file = read_image_file(media, deck_.media);
    f.height = file.height;
    f.width = file.width;
    rgb = std::move(file.values);
  }
  const double decoded = now_seconds();
  f.rgb = detector_frame({rgb.data(), f.height, f.width, 3 * f.width}, score_.side);
  // The map has a float a pixel.
  return {decoded - begin, now_seconds() - decoded, true, f.rgb.size() / 3 * 7};
}

void ScoreWork::predict(std::span<PictureUnit* const> pictures) {
  std::vector<std::uint8_t> all;
  for (PictureUnit* picture : pictures) {
    const std::vector<std::uint8_t>& rgb = static_cast<ScoredFrame*>(picture)->rgb;
    all.insert(all.end(), rgb.begin(), rgb.end());
  }
  std::vector<std::vector<float>> maps;
  try {
    maps = detector_.detect(all, std::ssize(pictures), score_.side, score_.side);
  } catch (const Error& e) {
    throw Error(e).for_job();  // all frames are alike
  }
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    auto& f = static_cast<ScoredFrame&>(*pictures[i]);
    f.map = std::move(maps[i]);
    if (!files_[f.item].drawn) f.rgb = {};
  }
}

void ScoreWork::finish(PictureUnit& picture) {
  auto& f = static_cast<ScoredFrame&>(picture);
  std::vector<TextBox> boxes;
  if (!f.map.empty()) {
    const PostprocessDeck& p = deck_.get<PostprocessDeck>();
    boxes = find_text_boxes(f.map, score_.side, score_.side, p);
    std::erase_if(boxes, [&](const TextBox& b) { return count_text({&b, 1}, p) == 0; });
  }
  FileInHand& file = *f.file;
  const std::lock_guard lock(file.mutex);
  if (file.fault.empty()) file.fault = printable(f.fault, longest_reason);
  const bool more = std::ssize(boxes) > file.count;
  // The first of equals counts, though frames come in any order.
  if (more || (std::ssize(boxes) == file.count && f.frame < file.frame)) {
    file.count = std::ssize(boxes);
    file.frame = f.frame;
    file.height = f.height;
    file.width = f.width;
    file.boxes = std::move(boxes);
    file.rgb = std::move(f.rgb);
  }
}

// The file's other frames may still count. What is wrong with the deck is so for all files.
void ScoreWork::failed(PictureUnit& picture, const Error& e) {
  if (!e.of_item() || e.code() != Exit::data) throw e;
  auto& f = static_cast<ScoredFrame&>(picture);
  f.failed = true;
  const std::lock_guard lock(f.file->mutex);
  if (!f.file->error)
    f.file->error = Error(e.code(), printable(e.what(), longest_reason), e.hint());
}

// The last frame of a file reports it.
void ScoreWork::done(PictureUnit& picture) {
  auto& f = static_cast<ScoredFrame&>(picture);
  bool last = false;
  {
    const std::lock_guard lock(f.file->mutex);
    if (f.dropped && !f.failed) f.file->left = true;
    last = --f.file->open == 0;
  }
  if (last) report(*f.file);
}

void ScoreWork::draw(const FileInHand& item, Json& line) const {
  std::vector<std::uint8_t> rgb = item.rgb;
  draw_boxes(item.boxes, score_.side, rgb);
  const std::filesystem::path& directory = engine_.settings().directory;
  const std::string& path = files_[item.number].path;
  const std::string file = fmt::format("pictures/{:05d}_{}.png", item.number, plain_stem(path));
  write_png(result_path(directory, file).string(), score_.side, score_.side, rgb);
  add_file(line, directory, file, "picture");
}

void ScoreWork::report(FileInHand& item) {
  if (item.left) return;
  Json line = engine_.line_of(item.number);
  line["ocr"] = item.count < 0 ? Json() : Json(item.count);
  if (item.count >= 0) {
    line["frame"] = item.frame;
    line["height"] = item.height;
    line["width"] = item.width;
    line["area"] = covered_share(item.boxes, score_.side);
    line["boxes"] = line["scores"] = Json::array();
    for (const TextBox& b : in_picture(item.boxes, item.height, item.width, score_.side)) {
      line["boxes"].push_back(b.corners);
      line["scores"].push_back(b.score);
    }
  }
  if (!item.error && !item.fault.empty())
    item.error = Error(Exit::data, item.fault, "check the path, then whether ffplay plays it");
  try {
    if (item.count >= 0 && files_[item.number].drawn) draw(item, line);
  } catch (const Error& e) {
    engine_.failed(item.number, e, line);
    return;
  }
  if (item.error)
    engine_.failed(item.number, *item.error, line);
  else
    engine_.finished(line);
}

Json score_missing(const Deck& deck, const ListStart& start, const DetectorSource& source,
                   const std::vector<ScoreFile>& files, ListEngine& engine) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  Detector detector(deck, source);
  log::info("weights   {}", source.describe());
  const std::size_t capacity = arena_capacity(deck.memory, start.device);
  const std::size_t needed = detector.plan(1, s.side, s.side).bytes;
  WEFT_CHECK(needed <= capacity, Exit::usage,
             "set a smaller score.side, or give the rank more memory (memory.arena_gib, fewer "
             "ranks a host)",
             "a frame of {0}x{0} needs {1}, this rank has {2}", s.side,
             size_text(static_cast<double>(needed)), size_text(static_cast<double>(capacity)));
  log::info("memory    {} for a frame in the network", size_text(static_cast<double>(needed)));
  // On the CPU the detector takes frames one by one, and a frame alone fills the cores.
  std::int64_t together = 1;
  while (on_cuda() && 2 * together <= most_together &&
         detector.plan(2 * together, s.side, s.side, capacity).fits)
    together *= 2;
  ScoreWork work(deck, files, detector, engine);
  return make_pictures(work, engine, deck, start, engine.ahead_of_others(), together);
}

// ---- Text regions as people want them ----

namespace {

std::array<Point, 4> corners_of(const TextBox& box) {
  std::array<Point, 4> p;
  for (std::size_t i = 0; i < 4; ++i) p[i] = {box.corners[2 * i], box.corners[2 * i + 1]};
  return p;
}

// Python's int(side * length / shorter), and its round, as in models/dbnet/detector.cpp.
std::int64_t scaled(std::int64_t length, std::int64_t shorter, std::int64_t side) {
  return static_cast<std::int64_t>(static_cast<double>(side * length) /
                                   static_cast<double>(shorter));
}
double middle(std::int64_t length, std::int64_t side) {
  return std::nearbyint(static_cast<double>(length - side) / 2);
}

}  // namespace

double covered_share(std::span<const TextBox> boxes, std::int64_t side) {
  std::vector<bool> covered(side * side, false);
  const auto within = [side](double v) {
    return static_cast<std::int64_t>(std::clamp(v, -1.0, static_cast<double>(side)));
  };
  for (const TextBox& box : boxes) {
    const std::array<Point, 4> p = corners_of(box);
    const auto [low, high] = std::ranges::minmax(p, {}, &Point::y);
    for (std::int64_t y = std::max<std::int64_t>(0, within(std::ceil(low.y)));
         y <= std::min(side - 1, within(std::floor(high.y))); ++y) {
      // A convex outline crosses a row between two points at most.
      double from = 1e30, to = -1e30;
      const auto row = static_cast<double>(y);
      for (std::size_t i = 0; i < 4; ++i) {
        const Point a = p[i], b = p[(i + 1) % 4];
        if (std::min(a.y, b.y) > row || std::max(a.y, b.y) < row) continue;
        const double t = a.y == b.y ? 0 : (row - a.y) / (b.y - a.y);
        for (const double x : {a.x + t * (b.x - a.x), a.y == b.y ? b.x : a.x + t * (b.x - a.x)})
          from = std::min(from, x), to = std::max(to, x);
      }
      for (std::int64_t x = std::max<std::int64_t>(0, within(std::ceil(from)));
           x <= std::min(side - 1, within(std::floor(to))); ++x)
        covered[y * side + x] = true;
    }
  }
  return static_cast<double>(std::ranges::count(covered, true)) / static_cast<double>(side * side);
}

std::vector<TextBox> in_picture(std::span<const TextBox> boxes, std::int64_t height,
                                std::int64_t width, std::int64_t side) {
  const std::int64_t shorter = std::min(height, width);
  const std::int64_t h = scaled(height, shorter, side), w = scaled(width, shorter, side);
  std::vector<TextBox> moved(boxes.begin(), boxes.end());
  for (TextBox& box : moved)
    for (std::size_t i = 0; i < 8; ++i) {
      const bool is_x = i % 2 == 0;
      const std::int64_t whole = is_x ? w : h, of_picture = is_x ? width : height;
      // Coordinates are those of pixel centres, half a pixel from the edge at any scale.
      const double at = box.corners[i] + middle(whole, side) + 0.5;
      box.corners[i] = static_cast<float>(
          at * static_cast<double>(of_picture) / static_cast<double>(whole) - 0.5);
    }
  return moved;
}

void draw_boxes(std::span<const TextBox> boxes, std::int64_t side, std::vector<std::uint8_t>& rgb) {
  for (const TextBox& box : boxes)
    draw_outline(rgb, {side, side}, corners_of(box), {255, 40, 40}, 3);
}

}  // namespace weft
