#include "jobs/evaluate/detection_job.h"

#include <algorithm>

#include "core/clock.h"
#include "core/error.h"
#include "core/hash.h"
#include "core/host.h"
#include "data/text_images/outlines.h"
#include "jobs/evaluate/views.h"
#include "models/dbnet/boxes.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

constexpr Rgb right{0, 210, 0}, wrong{240, 30, 30}, not_counted{160, 160, 160};

Rgb colour_of(int partner) {
  return partner == TextMatch::none ? wrong : partner < 0 ? not_counted : right;
}

}  // namespace

std::vector<ListItem> detection_items(const TextImages& images, const EvaluateDeck& deck,
                                      const std::string& job, bool first_rank) {
  std::vector<ListItem> items;
  for (std::int64_t i = 0; i < images.count(); ++i) {
    ListItem& item = items.emplace_back();
    item.name = fmt::format("image{}", i);
    if (!first_rank) continue;
    item.key = to_hex(hash128(job + (i < deck.pictures ? "picture\n" : "") + images.identity(i)));
    try {
      const ImageSize size = view_size(images.size(i), deck.short_side, deck.long_side).padded;
      item.cost = static_cast<double>(size.height) * static_cast<double>(size.width);
    } catch (const Error& e) {
      if (e.code() != Exit::data) throw;  // a broken picture fails when its turn comes, alone
    }
  }
  return items;
}

void DetectionJob::prepare(const ItemBatch& items) {
  const std::int64_t i = items.front();
  reading_[i] = std::async(std::launch::async, [this, i] {
    const EvaluateDeck& e = deck_.get<EvaluateDeck>();
    Ready r;
    images_.read(i, r.image);
    r.size = view_size(r.image.size, e.short_side, e.long_side);
    r.view = detector_view(
        {r.image.rgb.data(), r.image.size.height, r.image.size.width, 3 * r.image.size.width},
        r.size);
    return r;
  });
}

void DetectionJob::check_memory(const ViewSize& size) {
  if (std::ranges::find(known_, size.padded) != known_.end()) return;
  const auto [height, width] = size.padded;
  const std::size_t capacity = Arena::current().capacity();
  WEFT_CHECK(detector_.plan(1, height, width, capacity).fits, Exit::data,
             "set a smaller evaluate.short_side and evaluate.long_side, or give the rank more "
             "memory (memory.arena_gib)",
             "a picture of {}x{} in the network needs {:.2f} GiB, this rank has {:.2f}", height,
             width, gib(detector_.plan(1, height, width).bytes), gib(capacity));
  known_.push_back(size.padded);
}

// In pixels of the picture.
std::vector<FoundText> DetectionJob::find(const Ready& ready,
                                          const std::vector<float>& probability) const {
  std::vector<FoundText> found;
  if (probability.empty()) return found;
  const auto& [scaled, padded] = ready.size;
  const double x = static_cast<double>(ready.image.size.width) / static_cast<double>(scaled.width);
  const double y =
      static_cast<double>(ready.image.size.height) / static_cast<double>(scaled.height);
  for (const TextBox& box :
       find_text_boxes(probability, padded.height, padded.width, deck_.get<PostprocessDeck>())) {
    FoundText& f = found.emplace_back();
    f.score = static_cast<double>(box.score);
    for (std::size_t k = 0; k < 8; k += 2)
      f.polygon.push_back(
          {static_cast<double>(box.corners[k]) * x, static_cast<double>(box.corners[k + 1]) * y});
  }
  return found;
}

// What is wanted on the left, what was found on the right.
void DetectionJob::draw(std::int64_t item, const TextImage& image, std::span<const FoundText> boxes,
                        const TextMatch& match, nlohmann::ordered_json& line) const {
  const std::filesystem::path& directory = engine_.settings().directory;
  const ImageSize size = image.size;
  const int thickness = 1 + static_cast<int>(std::max(size.height, size.width) / 500);
  std::vector<std::uint8_t> wanted = image.rgb, found = image.rgb;
  for (std::size_t i = 0; i < image.regions.size(); ++i)
    draw_outline(wanted, size, image.regions[i].polygon, colour_of(match.box_of[i]), thickness);
  for (std::size_t i = 0; i < boxes.size(); ++i)
    if (match.region_of[i] != TextMatch::left_out)
      draw_outline(found, size, boxes[i].polygon, colour_of(match.region_of[i]), thickness);
  const std::string file =
      fmt::format("pictures/{:05d}_{}.png", item, plain_stem(images_.name(item)));
  write_whole(directory, file, [&](const std::string& path) {
    write_png(path, size.height, 2 * size.width, side_by_side({wanted, found}, size));
  });
  add_file(line, directory, file, "picture");
}

void DetectionJob::make(const ItemBatch& items, ItemResults& results) {
  const std::int64_t i = items.front();
  const ListItem& item = engine_.items()[static_cast<std::size_t>(i)];
  const double begin = now_seconds();
  Ready r = reading_.extract(i).mapped().get();
  waited_ += now_seconds() - begin;
  check_memory(r.size);
  const double start = now_seconds();
  std::vector<std::vector<float>> maps =
      detector_.detect(r.view, 1, r.size.padded.height, r.size.padded.width);
  const double seconds = now_seconds() - start;
  predicting_ += seconds;
  nlohmann::ordered_json line = {
      {"name", item.name}, {"key", item.key}, {"rank", engine_.groups().rank}};
  finding_.start([this, i, seconds, line, &results, ready = std::move(r),
                  probability = std::move(maps.at(0))]() mutable {
    try {
      const double begun = now_seconds();
      const std::vector<FoundText> boxes = find(ready, probability);
      line["seconds"] = seconds + now_seconds() - begun;
      const TextMatcher matcher(ready.image.regions, boxes);
      const std::vector<double> thresholds =
          score_thresholds(deck_.get<PostprocessDeck>().min_text_score);
      put_matches(line, matcher, thresholds);
      if (deck_.get<EvaluateDeck>().predictions) {
        line["boxes"] = nlohmann::ordered_json::array();
        line["scores"] = nlohmann::ordered_json::array();
        for (const FoundText& f : boxes) {
          nlohmann::ordered_json corners = nlohmann::ordered_json::array();
          for (const Point& p : f.polygon) corners.insert(corners.end(), {p.x, p.y});
          line["boxes"].push_back(std::move(corners));
          line["scores"].push_back(f.score);
        }
      }
      if (i < deck_.get<EvaluateDeck>().pictures)
        draw(i, ready.image, boxes, matcher.match(thresholds.front()), line);
      results.finished(line);
    } catch (const Error& e) {
      results.failed(i, e);
    }
  });
}

}  // namespace weft
