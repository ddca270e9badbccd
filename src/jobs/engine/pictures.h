// List jobs whose items are pictures and videos: each picture or frame is read by a thread, goes
// through a network, and is written by a thread (prefetch.h). And what such jobs draw.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "data/images/labelled_images.h"
#include "jobs/engine/list_job.h"
#include "jobs/engine/prefetch.h"
#include "media/writers.h"

namespace weft {

// A picture on its way. What it holds is the work's own.
struct PictureUnit : PrefetchUnit {
  std::int64_t item = 0;
  bool dropped = false;  // it failed, or the job is to stop
};

// What a job does with pictures. An Error that a stage throws is the item's failure, unless it is
// none of an item (ItemResults::failed).
class PictureWork {
 public:
  virtual ~PictureWork() = default;
  // The item's next picture, `number` of them being before it; null after the last.
  virtual std::unique_ptr<PictureUnit> next(std::int64_t item, std::int64_t number) = 0;
  // Decodes and scales it. On several threads at once.
  virtual PrefetchWork::Prepared read(PictureUnit& picture) = 0;
  // In the network, on the thread of ListEngine::run().
  virtual void predict(PictureUnit& picture) = 0;
  // Draws and writes it, and reports the item. On several threads at once.
  virtual void finish(PictureUnit& picture, ItemResults& results) = 0;
  // Called in the error's handler.
  virtual void failed(PictureUnit& picture, const Error& e, ItemResults& results) {
    results.failed(picture.item, e);
  }
  // Last of all, for every picture that next() has given.
  virtual void done(PictureUnit&, ItemResults&) {}
};

// Runs them. `work` outlives it.
class PictureJob : public ListJob, private PrefetchWork {
 public:
  // For networks that take one picture at a time, of any size. `ahead`: pictures that may be read
  // ahead, besides what the host's memory allows.
  PictureJob(PictureWork& work, const ListEngine& engine, int threads, std::int64_t ahead);
  void make(const ItemBatch& items, ItemResults& results) override;
  void flush(ItemResults&) override { prefetch_.drain(); }
  // For the report: seconds that the network took and waited, and all that Prefetch measures.
  nlohmann::ordered_json share() const;

 private:
  Prepared prepare(PrefetchUnit& unit) override;
  double network(std::span<PrefetchUnit* const> units, int threads) override;
  double finish(PrefetchUnit& unit) override;
  // Runs a stage of the picture, unless it is dropped.
  template <class Stage>
  void run(PictureUnit& picture, Stage&& stage);

  PictureWork& work_;
  const ListEngine& engine_;
  const int threads_;
  ItemResults* results_ = nullptr;
  Prefetch prefetch_;  // last: its threads use the others
};

// Who waited for whom, of all ranks: printed, and in the report's header as "feed".
void report_prefetch(const ListReport& report, nlohmann::ordered_json& header);

// ---- Pictures of labels and predictions ----

// Colours of labels u8 [height, width] (0 for none, v for class v - 1): [height, width, 3].
std::vector<std::uint8_t> coloured(std::span<const std::uint8_t> labels,
                                   std::span<const Rgb> palette);
// Classes as such labels.
std::vector<std::uint8_t> as_labels(std::span<const std::uint8_t> classes);
// Half the picture, half the colours.
std::vector<std::uint8_t> blended(std::span<const std::uint8_t> rgb,
                                  std::span<const std::uint8_t> colours);
// The picture, dark, with the pixels white whose labels differ; darker still where none is wanted.
std::vector<std::uint8_t> differences(std::span<const std::uint8_t> rgb,
                                      std::span<const std::uint8_t> wanted,
                                      std::span<const std::uint8_t> found);
// Panels [height, width, 3] from left to right.
std::vector<std::uint8_t> side_by_side(const std::vector<std::span<const std::uint8_t>>& panels,
                                       ImageSize size);

}  // namespace weft
