// Pictures and videos of a table to counts of text regions, as a list job.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "config/deck.h"
#include "jobs/engine/list_job.h"
#include "jobs/engine/prefetch.h"
#include "jobs/score/score.h"
#include "media/media_source.h"
#include "models/dbnet/boxes.h"
#include "models/dbnet/detector.h"

namespace weft {

// A file of the table.
struct ScoreFile {
  std::string path;  // from where weft was started; of a member of a shard: SHARD/MEMBER
  MediaSource media;
  bool drawn = false;  // among those whose picture is wanted
};

// By its name (data/lists/folders.h). Anything else is taken for a picture.
bool is_video(const std::string& path);

// Unique for each path, valid UTF-8 without control characters.
std::string item_name(const std::string& path);

// What score.frames or score.frame asks for.
std::vector<std::int64_t> frames_of(const ScoreDeck& deck);

// Item i is file i; all cost the same, so that rows are scored in their order. `job`: all that
// decides the results but the file itself. Looks at the files where `keys`: rank 0 has to.
std::vector<ListItem> score_items(const std::vector<ScoreFile>& files, const std::string& job,
                                  bool keys);

// A line has ocr (null: none), area, boxes (in pixels of the picture) and scores, picture if it is
// wanted; fault where the file could not be read as wanted.
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

}  // namespace weft
