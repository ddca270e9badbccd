// Pictures and videos to classes of their pixels, as a list job.
#pragma once

#include <future>
#include <map>

#include "config/deck.h"
#include "jobs/engine/list_job.h"
#include "jobs/evaluate/background.h"
#include "jobs/segment/inputs.h"
#include "media/writers.h"
#include "models/segmentation/predictor.h"

namespace weft {

// Item i is input i. `job`: all that decides the results but the input itself.
// The name of an input's result, in the output folder.
std::string result_file(const SegmentInput& input);

std::vector<ListItem> segment_items(const std::vector<SegmentInput>& inputs,
                                    const std::string& job);

// Makes items in the current arena, in memory that depends neither on their number nor on the
// length of a video. The next picture or frame is read and resized while one is looked at.
class SegmentJob : public ListJob {
 public:
  SegmentJob(const Deck& deck, const std::vector<SegmentInput>& inputs,
             const std::vector<std::string>& class_names, std::vector<Rgb> palette,
             Predictor& predictor, const ListEngine& engine);
  void prepare(const ItemBatch& items) override;
  void make(const ItemBatch& items, ItemResults& results) override;
  void flush(ItemResults&) override { writing_.wait(); }
  // For the report: pictures and frames, seconds that the model took, and that it waited for them.
  nlohmann::ordered_json share() const;

 private:
  struct Picture {
    ImageSize size;
    std::vector<std::uint8_t> rgb;
    std::vector<ScaledPicture> scales;
    double seconds = 0, duration = 0;  // of a video's frame: when, and how long
  };
  Picture read_picture(std::int64_t item) const;
  void make_picture(std::int64_t item, ItemResults& results);
  void make_video(std::int64_t item, ItemResults& results);
  // Labels of the pixels (class + 1), counted in `pixels` by class.
  std::vector<std::uint8_t> look_at(const Picture& picture, std::vector<std::int64_t>& pixels);
  // As segment.overlay says, [height, width or twice the width, 3].
  std::vector<std::uint8_t> drawn(const Picture& picture,
                                  const std::vector<std::uint8_t>& labels) const;
  void write_picture(const std::string& path, const Picture& picture,
                     const std::vector<std::uint8_t>& labels) const;
  nlohmann::ordered_json line_of(std::int64_t item, ImageSize size, std::int64_t frames,
                                 const std::vector<std::int64_t>& pixels) const;

  const Deck& deck_;
  const SegmentDeck& segment_;
  const std::vector<SegmentInput>& inputs_;
  const std::vector<std::string>& class_names_;
  Predictor& predictor_;
  const ListEngine& engine_;
  std::vector<Rgb> palette_;
  std::map<std::int64_t, std::future<Picture>> reading_;
  Background writing_;
  std::int64_t looked_at_ = 0;
  double predicting_ = 0, waited_ = 0;
};

}  // namespace weft
