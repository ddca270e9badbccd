// Pictures with text regions to counts of boxes that match them, as a list job.
#pragma once

#include <future>
#include <map>

#include "jobs/engine/list_job.h"
#include "jobs/evaluate/background.h"
#include "jobs/evaluate/detection_scores.h"
#include "jobs/evaluate/evaluate.h"
#include "models/dbnet/detector.h"

namespace weft {

// Item i is picture i; its line holds its counts (put_matches) and seconds, and where they are
// wanted a file picture, or boxes and scores. `job`: all that decides the results but the picture.
// Keys and costs on the first rank alone, which reads the pictures' sizes.
std::vector<ListItem> detection_items(const TextImages& images, const EvaluateDeck& deck,
                                      const std::string& job, bool first_rank);

// Looks for text in the current arena. The next picture is read and resized, and the boxes of the
// one before are found and matched, while one is in the network.
class DetectionJob : public ListJob {
 public:
  DetectionJob(const Deck& deck, const TextImages& images, Detector& detector,
               const ListEngine& engine)
      : deck_(deck), images_(images), detector_(detector), engine_(engine) {}
  void prepare(const ItemBatch& items) override;
  void make(const ItemBatch& items, ItemResults& results) override;
  void flush(ItemResults&) override { finding_.wait(); }
  // For the report: seconds that the network took, and that it waited for pictures.
  nlohmann::ordered_json share() const {
    return {{"predicting", predicting_}, {"waited", waited_}};
  }

 private:
  struct Ready {
    TextImage image;
    ViewSize size;
    std::vector<std::uint8_t> view;
  };
  void check_memory(const ViewSize& size);
  std::vector<FoundText> find(const Ready& ready, const std::vector<float>& probability) const;
  void draw(std::int64_t item, const TextImage& image, std::span<const FoundText> boxes,
            const TextMatch& match, nlohmann::ordered_json& line) const;

  const Deck& deck_;
  const TextImages& images_;
  Detector& detector_;
  const ListEngine& engine_;
  std::vector<ImageSize> known_;  // padded sizes that fit the memory
  std::map<std::int64_t, std::future<Ready>> reading_;
  Background finding_;
  double predicting_ = 0, waited_ = 0;
};

}  // namespace weft
