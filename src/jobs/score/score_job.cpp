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
#include "jobs/engine/file_table.h"
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

// By its name (data/lists/folders.h). Anything else is taken for a picture.
bool is_video(const std::string& path) { return kind_of_name(path) == MediumKind::video; }

class ScoreJob : public ListJob, private PrefetchWork {
 public:
  // In the current arena. `threads`: of this rank.
  ScoreJob(const Deck& deck, const std::vector<ScoreFile>& files, Detector& detector, int threads,
           const ListEngine& engine);
  void make(const ItemBatch& items, ItemResults& results) override;
  void flush(ItemResults&) override { prefetch_.drain(); }
  PrefetchTimes times() const { return prefetch_.times(); }

 private:
  struct Item;
  struct Unit;
  PrefetchLimits limits(int threads) const;
  Prepared prepare(PrefetchUnit& unit) override;
  double network(std::span<PrefetchUnit* const> units, int threads) override;
  double finish(PrefetchUnit& unit) override;
  bool read(Unit& unit, double& decoded);
  void close(Unit& unit);
  void report(Item& item);
  void draw(const Item& item, nlohmann::ordered_json& line) const;

  const Deck& deck_;
  const ScoreDeck& score_;
  const std::vector<ScoreFile>& files_;
  Detector& detector_;
  const ListEngine& engine_;
  ItemResults* results_ = nullptr;
  std::vector<std::int64_t> frames_;
  Prefetch prefetch_;  // last: its threads use the others
};

// A file on its way: its frames come one by one.
struct ScoreJob::Item {
  std::int64_t number = 0;
  std::mutex mutex;  // of what follows
  std::int64_t open = 0;
  // Facts of the frame with most text, the first of equals; -1: none yet.
  std::int64_t count = -1, frame = 0, height = 0, width = 0;
  std::vector<TextBox> boxes;
  std::vector<std::uint8_t> rgb;  // of that frame, if it is to be drawn
  std::string fault;              // the first
  std::optional<Error> error;     // no frame at all, or not in the network
  bool dropped = false;           // the job is to stop: the next one makes it
};

struct ScoreJob::Unit : PrefetchUnit {
  std::shared_ptr<Item> item;
  std::int64_t frame = 0, height = 0, width = 0;
  std::vector<std::uint8_t> rgb;  // [side, side, 3]
  std::vector<float> map;         // [side, side]; empty: no text
  std::string fault;
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

PrefetchLimits ScoreJob::limits(int threads) const {
  PrefetchLimits l;
  l.threads = threads;
  l.network_on_gpu = on_cuda();
  // On the CPU the detector takes frames one by one, and a frame alone fills the cores.
  l.most_batch = on_cuda() ? 64 : 1;
  l.frame_bytes = static_cast<std::size_t>(score_.side * score_.side) * 7;  // RGB and its map
  // A small part of the host's memory: other ranks and the decoders need it too.
  l.most_bytes = std::min(std::size_t{2} << 30, host_memory().available / 64);
  l.most_ahead = engine_.ahead_of_others();
  l.fits = [&detector = detector_, side = score_.side, capacity = Arena::current().capacity()](
               std::int64_t batch) { return detector.plan(batch, side, side, capacity).fits; };
  return l;
}

ScoreJob::ScoreJob(const Deck& deck, const std::vector<ScoreFile>& files, Detector& detector,
                   int threads, const ListEngine& engine)
    : deck_(deck),
      score_(deck.get<ScoreDeck>()),
      files_(files),
      detector_(detector),
      engine_(engine),
      frames_(frames_of(score_)),
      prefetch_(*this, limits(threads)) {}

void ScoreJob::make(const ItemBatch& items, ItemResults& results) {
  if (results_ == nullptr) results_ = &results;  // threads read it
  for (const std::int64_t number : items) {
    const auto item = std::make_shared<Item>();
    item->number = number;
    const bool video = is_video(files_[number].path);
    item->open = video ? std::ssize(frames_) : 1;
    for (std::int64_t f = 0, frames = item->open; f < frames; ++f) {
      auto unit = std::make_unique<Unit>();
      unit->item = item;
      unit->frame = video ? frames_[f] : 0;
      try {
        prefetch_.add(std::move(unit));
      } catch (const Error& e) {
        // The error is another file's, or that of all: read() keeps this file's own.
        throw JobError(e.code(), e.what(), e.hint());
      }
    }
  }
}

// Decodes the unit's picture and makes the detector's frame of it. False: there is none.
bool ScoreJob::read(Unit& unit, double& decoded) {
  const auto& [path, media, drawn] = files_[unit.item->number];
  std::vector<std::uint8_t> rgb;
  try {
    WEFT_CHECK(!path.empty(), Exit::data, "fill it in, or leave the row out", "the path is empty");
    if (is_video(path)) {
      PickedFrame picked =
          frame_at(media, unit.frame, {deck_.media, [this] { return engine_.stop_requested(); }});
      unit.height = picked.height;
      unit.width = picked.width;
      unit.fault = std::move(picked.fault);
      rgb = std::move(picked.rgb);
    } else {
      ImageFile file = read_image_file(media, deck_.media);
      unit.height = file.height;
      unit.width = file.width;
      rgb = std::move(file.values);
    }
    decoded = now_seconds();
    unit.rgb = detector_frame({rgb.data(), unit.height, unit.width, 3 * unit.width}, score_.side);
    return true;
  } catch (const Error& e) {
    if (e.code() != Exit::data && e.code() != Exit::stopped) throw;
    decoded = now_seconds();
    const std::lock_guard lock(unit.item->mutex);
    if (e.code() == Exit::stopped) {
      unit.item->dropped = true;
      return false;
    }
    if (!unit.item->error)
      unit.item->error = Error(e.code(), printable(e.what(), longest_reason), e.hint());
    return false;
  }
}

PrefetchWork::Prepared ScoreJob::prepare(PrefetchUnit& u) {
  auto& unit = static_cast<Unit&>(u);
  const double begin = now_seconds();
  double decoded = begin;
  const bool ready = read(unit, decoded);
  const double end = now_seconds();
  if (!ready) close(unit);
  return {decoded - begin, end - decoded, ready};
}

double ScoreJob::network(std::span<PrefetchUnit* const> units, int threads) {
  const double begin = now_seconds();
  const auto frames = std::ssize(units);
  set_threads(threads, 1);
  std::vector<std::uint8_t> pictures;
  pictures.reserve(frames * score_.side * score_.side * 3);
  for (PrefetchUnit* u : units) {
    const std::vector<std::uint8_t>& rgb = static_cast<Unit*>(u)->rgb;
    pictures.insert(pictures.end(), rgb.begin(), rgb.end());
  }
  std::vector<std::vector<float>> maps =
      detector_.detect(pictures, frames, score_.side, score_.side);
  for (std::int64_t i = 0; i < frames; ++i) {
    auto& unit = static_cast<Unit&>(*units[i]);
    unit.map = std::move(maps[i]);
    if (!files_[unit.item->number].drawn) unit.rgb = {};
  }
  return now_seconds() - begin;
}

double ScoreJob::finish(PrefetchUnit& u) {
  auto& unit = static_cast<Unit&>(u);
  const double begin = now_seconds();
  std::vector<TextBox> boxes;
  if (!unit.map.empty()) {
    const PostprocessDeck& p = deck_.get<PostprocessDeck>();
    boxes = find_text_boxes(unit.map, score_.side, score_.side, p);
    std::erase_if(boxes, [&](const TextBox& b) { return count_text({&b, 1}, p) == 0; });
  }
  const double end = now_seconds();
  {
    Item& item = *unit.item;
    const std::lock_guard lock(item.mutex);
    if (item.fault.empty()) item.fault = printable(unit.fault, longest_reason);
    const bool more = std::ssize(boxes) > item.count;
    // The first of equals counts, though frames come in any order.
    if (more || (std::ssize(boxes) == item.count && unit.frame < item.frame)) {
      item.count = std::ssize(boxes);
      item.frame = unit.frame;
      item.height = unit.height;
      item.width = unit.width;
      item.boxes = std::move(boxes);
      item.rgb = std::move(unit.rgb);
    }
  }
  close(unit);
  return end - begin;
}

// The last frame of a file reports it.
void ScoreJob::close(Unit& unit) {
  bool last = false;
  {
    const std::lock_guard lock(unit.item->mutex);
    last = --unit.item->open == 0;
  }
  if (last) report(*unit.item);
}

void ScoreJob::draw(const Item& item, Json& line) const {
  std::vector<std::uint8_t> rgb = item.rgb;
  draw_boxes(item.boxes, score_.side, rgb);
  const std::filesystem::path& directory = engine_.settings().directory;
  const std::string& path = files_[item.number].path;
  const std::string file = fmt::format("pictures/{:05d}_{}.png", item.number, plain_stem(path));
  write_png(result_path(directory, file).string(), score_.side, score_.side, rgb);
  add_file(line, directory, file, "picture");
}

void ScoreJob::report(Item& item) {
  if (item.dropped) return;
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
    results_->failed(item.number, e, line);
    return;
  }
  if (item.error)
    results_->failed(item.number, *item.error, line);
  else
    results_->finished(line);
}

Json score_missing(const Deck& deck, const ListStart& start, const DetectorSource& source,
                   const std::vector<ScoreFile>& files, ListEngine& engine) {
  const ScoreDeck& s = deck.get<ScoreDeck>();
  Detector detector(deck, source);
  log::info("weights   {}", source.describe());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, start.device));
  const ArenaScope scope(*arena);
  const std::size_t needed = detector.plan(1, s.side, s.side).bytes;
  WEFT_CHECK(needed <= arena->capacity(), Exit::usage,
             "set a smaller score.side, or give the rank more memory (memory.arena_gib, fewer "
             "ranks a host)",
             "a frame of {0}x{0} needs {1}, this rank has {2}", s.side,
             size_text(static_cast<double>(needed)),
             size_text(static_cast<double>(arena->capacity())));
  log::info("memory    {} for a frame in the network", size_text(static_cast<double>(needed)));
  ScoreJob job(deck, files, detector, start.threads, engine);
  engine.run(job, engine.one_by_one());
  Json share = as_share(job.times(), start.threads);
  share["peak_bytes"] = arena->peak();
  return share;
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
