#include "jobs/evaluate/segmentation_job.h"

#include <algorithm>

#include "core/clock.h"
#include "core/hash.h"
#include "jobs/evaluate/views.h"
#include "models/segmentation/classes.h"

namespace weft {

namespace {

std::string file_of(const LabelledImages& images, std::int64_t i) {
  return fmt::format("{:05d}_{}.png", i, plain_stem(images.name(i)));
}

}  // namespace

std::vector<ListItem> segmentation_items(const LabelledImages& images, const Predictor& predictor,
                                         const EvaluateDeck& deck, const std::string& job) {
  const std::string key = to_hex(hash128(job)),
                    with_picture = to_hex(hash128(job + "picture of 4\n"));
  std::vector<ListItem> items;
  for (std::int64_t i = 0; i < images.count(); ++i)
    items.push_back({fmt::format("image{}", i), i < deck.pictures ? with_picture : key,
                     predictor.cost(images.size(i))});
  return items;
}

void SegmentationJob::prepare(const ItemBatch& items) {
  const std::int64_t i = items.front();
  reading_[i] = std::async(std::launch::async, [this, i] {
    Ready r;
    images_.read(i, r.image);
    const std::int64_t most = predictor_.num_classes();
    const std::uint8_t greatest =
        r.image.labels.empty() ? std::uint8_t{0} : *std::ranges::max_element(r.image.labels);
    WEFT_CHECK(greatest <= most, Exit::data,
               "set model.num_classes to what the data has, or evaluate other data",
               "{} has pixels of class {}, and the model knows 0 to {}", images_.name(i),
               greatest - 1, most - 1);
    r.scales = predictor_.scaled(r.image.rgb, r.image.size);
    return r;
  });
}

// What people look at.
void SegmentationJob::write(std::int64_t i, const LabelledImage& image,
                            const std::vector<std::uint8_t>& classes,
                            nlohmann::ordered_json& line) const {
  const std::filesystem::path& directory = engine_.settings().directory;
  const ImageSize size = image.size;
  const std::vector<Rgb> palette = label_palette(predictor_.num_classes(), images_.palette());
  const std::vector<std::uint8_t> labels = as_labels(classes);
  if (i < deck_.pictures) {
    const auto truth = coloured(image.labels, palette), found = coloured(labels, palette);
    const auto wrong = differences(image.rgb, image.labels, labels);
    const std::string file = "pictures/" + file_of(images_, i);
    write_whole(directory, file, [&](const std::string& path) {
      write_png(path, size.height, 4 * size.width,
                side_by_side({image.rgb, truth, found, wrong}, size));
    });
    add_file(line, directory, file, "picture");
  }
  if (deck_.predictions) {
    const std::string file = "predictions/" + file_of(images_, i);
    write_whole(directory, file, [&](const std::string& path) {
      write_palette_png(path, size.height, size.width, labels, palette);
    });
    add_file(line, directory, file, "prediction");
  }
}

void SegmentationJob::make(const ItemBatch& items, ItemResults& results) {
  const std::int64_t i = items.front();
  const ListItem& item = engine_.items()[static_cast<std::size_t>(i)];
  const double begin = now_seconds();
  Ready r = reading_.extract(i).mapped().get();
  waited_ += now_seconds() - begin;
  predictor_.check_memory(r.image.size, true, Arena::current().capacity());
  Prediction p = predictor_.predict(r.scales, r.image.size, r.image.labels);
  predicting_ += p.seconds;
  nlohmann::ordered_json line = {
      {"name", item.name}, {"key", item.key}, {"rank", engine_.groups().rank}};
  line["seconds"] = p.seconds;
  put_counts(line, p.counts);
  if (i >= deck_.pictures && !deck_.predictions) {
    results.finished(line);
    return;
  }
  writing_.start([this, i, line, &results, image = std::move(r.image),
                  classes = std::move(p.classes)]() mutable {
    try {
      write(i, image, classes, line);
      results.finished(line);
    } catch (const Error& e) {
      results.failed(i, e);
    }
  });
}

}  // namespace weft
