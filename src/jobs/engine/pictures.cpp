#include "jobs/engine/pictures.h"

#include <algorithm>

#include "core/clock.h"
#include "core/host.h"
#include "core/log.h"
#include "tensor/device.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

FeedLimits limits_of(int threads, std::int64_t ahead, std::int64_t most_batch) {
  FeedLimits l;
  l.threads = threads;
  l.network_on_gpu = on_cuda();
  l.most_batch = most_batch;
  // A small part of the host's memory: other ranks and the decoders need it too.
  l.most_bytes = std::min(std::size_t{2} << 30, host_memory().available / 64);
  l.most_ahead = ahead;
  return l;
}

// Takes the pictures of a batch's items through the stages.
class PictureJob : public ListJob, private FeedWork {
 public:
  PictureJob(PictureWork& work, const ListEngine& engine, const FeedLimits& limits)
      : work_(work), engine_(engine), feed_(*this, limits) {}

  void make(const ItemBatch& items) override {
    for (const std::int64_t item : items)
      for (std::int64_t number = 0;; ++number) {
        std::unique_ptr<PictureUnit> picture = work_.next(item, number);
        if (!picture) break;
        picture->item = item;
        try {
          feed_.add(std::move(picture));
        } catch (const Error& e) {
          // Those of items are dealt with below.
          throw Error(e).for_job();
        }
      }
  }
  void flush() override { feed_.drain(); }
  FeedTimes times() const { return feed_.times(); }

 private:
  // Runs a stage of pictures; its error is theirs.
  template <class Stage>
  void run(std::span<PictureUnit* const> pictures, Stage&& stage) {
    try {
      stage();
    } catch (const Error& e) {
      for (PictureUnit* picture : pictures) {
        picture->dropped = true;
        if (e.code() != Exit::stopped) work_.failed(*picture, e);
      }
    }
  }

  Prepared prepare(FeedUnit& unit) override {
    auto* picture = static_cast<PictureUnit*>(&unit);
    Prepared prepared{0, 0, false, 0};
    // What is not finished when the job is to stop is left to the next start.
    picture->dropped = engine_.stop_requested();
    if (!picture->dropped) run({&picture, 1}, [&] { prepared = work_.read(*picture); });
    if (!prepared.ready) work_.done(*picture);
    return prepared;
  }

  double network(std::span<FeedUnit* const> units, int threads) override {
    const double begin = now_seconds();
    set_threads(threads, 1);
    std::vector<PictureUnit*> pictures;
    for (FeedUnit* unit : units) {
      auto* picture = static_cast<PictureUnit*>(unit);
      picture->dropped = engine_.stop_requested();
      if (!picture->dropped) pictures.push_back(picture);
    }
    if (!pictures.empty()) run(pictures, [&] { work_.predict(pictures); });
    return now_seconds() - begin;
  }

  double finish(FeedUnit& unit) override {
    const double begin = now_seconds();
    auto* picture = static_cast<PictureUnit*>(&unit);
    // A predicted picture is written also when the job is to stop.
    if (!picture->dropped) run({&picture, 1}, [&] { work_.finish(*picture); });
    work_.done(*picture);
    return now_seconds() - begin;
  }

  PictureWork& work_;
  const ListEngine& engine_;
  Feed feed_;  // last: its threads use the others
};

}  // namespace

nlohmann::ordered_json make_pictures(PictureWork& work, ListEngine& engine, const Deck& deck,
                                     const ListStart& start, std::int64_t ahead,
                                     std::int64_t most_batch) {
  const auto arena = Arena::reserve(arena_capacity(deck.memory, start.device));
  const ArenaScope scope(*arena);
  PictureJob job(work, engine, limits_of(start.threads, ahead, most_batch));
  engine.run(job, engine.one_by_one());
  const FeedTimes times = job.times();
  nlohmann::ordered_json share = {{"predicting", times.network}, {"waited", times.network_waited}};
  share.update(nlohmann::ordered_json(nlohmann::json(times)));
  share["peak_bytes"] = arena->peak();
  return share;
}

ListSummary report_feed(const ListReport& report) {
  FeedSummary summary;
  summary.on_gpu = on_cuda();
  for (const auto& share : report.ranks) summary.add(share);
  if (summary.empty()) return {};
  log::write_info("pace      " + summary.verdict());
  log::write_info("waits     " + summary.waits());
  ListSummary said;
  said.header["feed"] = summary.json();
  return said;
}

}  // namespace weft
