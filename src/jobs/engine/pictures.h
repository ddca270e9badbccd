// List jobs whose items are pictures and videos: each picture or frame is read by a thread, goes
// through a network, and is written by a thread (feed.h).
#pragma once

#include <memory>
#include <span>

#include "jobs/engine/feed.h"
#include "jobs/engine/list_job.h"

namespace weft {

// A picture on its way. What it holds is the work's own.
struct PictureUnit : FeedUnit {
  std::int64_t item = 0;
  bool dropped = false;  // it failed, or the job is to stop
};

// What a job does with pictures. An Error that a stage throws is the item's failure, or if it is no
// item's, ends the job (Error::of_item).
class PictureWork {
 public:
  explicit PictureWork(ListEngine& engine) : engine_(engine) {}
  virtual ~PictureWork() = default;
  // The item's next picture, `number` of them being before it; null after the last.
  virtual std::unique_ptr<PictureUnit> next(std::int64_t item, std::int64_t number) = 0;
  // Decodes and scales it. On several threads at once.
  virtual FeedWork::Prepared read(PictureUnit& picture) = 0;
  // In the network, on the thread of ListEngine::run(). Several at once only as make_pictures() is
  // told.
  virtual void predict(std::span<PictureUnit* const> pictures) = 0;
  // Draws and writes it, and reports the item. On several threads at once.
  virtual void finish(PictureUnit& picture) = 0;
  // Reports the item's failure.
  virtual void failed(PictureUnit& picture, const Error& e) { engine_.failed(picture.item, e); }
  // Last of all, for every picture that next() has given.
  virtual void done(PictureUnit&) {}

 protected:
  ListEngine& engine_;
};

// What may be read ahead where a "picture" is a whole clip, of any size: with those in the network
// and behind it (FeedLimits), no more than 7 clips are in memory.
constexpr std::int64_t whole_clips_ahead = 2;

// Makes what is missing, in an arena of its own; collective as ListEngine::run(). `ahead`: pictures
// that may be read ahead, besides what the host's memory allows. `most_batch`: those that the
// network may take at once. Returns, for this rank's share of the report, seconds that the network
// took and waited, all that the feed measures, and peak_bytes of the arena.
nlohmann::ordered_json make_pictures(PictureWork& work, ListEngine& engine, const Deck& deck,
                                     const ListStart& start, std::int64_t ahead,
                                     std::int64_t most_batch = 1);

// Who waited for whom, of all ranks: printed, and in the report's header as "feed".
ListSummary report_feed(const ListReport& report);

}  // namespace weft
