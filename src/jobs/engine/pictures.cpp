#include "jobs/engine/pictures.h"

#include <algorithm>

#include "core/clock.h"
#include "core/host.h"
#include "core/log.h"
#include "tensor/device.h"

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

nlohmann::ordered_json make_pictures(PictureWork& work, ListEngine& engine, int threads,
                                     std::int64_t ahead, std::int64_t most_batch) {
  PictureJob job(work, engine, limits_of(threads, ahead, most_batch));
  engine.run(job, engine.one_by_one());
  const FeedTimes times = job.times();
  nlohmann::ordered_json share = {{"predicting", times.network}, {"waited", times.network_waited}};
  share.update(as_share(times, threads));
  return share;
}

ListSummary report_feed(const ListReport& report) {
  FeedSummary summary;
  summary.on_gpu = on_cuda();
  for (const RankShare& r : report.ranks) summary.add(r.own);
  if (summary.empty()) return {};
  log::write_info("pace      " + summary.verdict());
  log::write_info("waits     " + summary.waits());
  ListSummary said;
  said.header["feed"] = summary.json();
  return said;
}

// ---- Pictures of labels and predictions ----

std::vector<std::uint8_t> coloured(std::span<const std::uint8_t> labels,
                                   std::span<const Rgb> palette) {
  std::vector<std::uint8_t> rgb(3 * labels.size());
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const Rgb c = labels[i] < palette.size() ? palette[labels[i]] : Rgb{};
    rgb[3 * i] = c.r, rgb[3 * i + 1] = c.g, rgb[3 * i + 2] = c.b;
  }
  return rgb;
}

std::vector<std::uint8_t> as_labels(std::span<const std::uint8_t> classes) {
  std::vector<std::uint8_t> labels(classes.begin(), classes.end());
  for (std::uint8_t& v : labels) ++v;
  return labels;
}

std::vector<std::uint8_t> blended(std::span<const std::uint8_t> rgb,
                                  std::span<const std::uint8_t> colours) {
  std::vector<std::uint8_t> both(rgb.size());
  for (std::size_t i = 0; i < rgb.size(); ++i)
    both[i] = static_cast<std::uint8_t>((rgb[i] + colours[i] + 1) / 2);
  return both;
}

std::vector<std::uint8_t> differences(std::span<const std::uint8_t> rgb,
                                      std::span<const std::uint8_t> wanted,
                                      std::span<const std::uint8_t> found) {
  std::vector<std::uint8_t> shown(rgb.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const bool wrong = wanted[i] != 0 && wanted[i] != found[i];
    for (std::size_t c = 3 * i; c < 3 * i + 3; ++c)
      shown[c] = wrong ? 255 : static_cast<std::uint8_t>(rgb[c] / (wanted[i] == 0 ? 8 : 3));
  }
  return shown;
}

std::vector<std::uint8_t> side_by_side(const std::vector<std::span<const std::uint8_t>>& panels,
                                       ImageSize size) {
  const std::int64_t row = 3 * size.width;
  std::vector<std::uint8_t> all;
  all.reserve(panels.size() * static_cast<std::size_t>(size.height * row));
  for (std::int64_t y = 0; y < size.height; ++y)
    for (const std::span<const std::uint8_t> panel : panels)
      all.insert(all.end(), panel.begin() + y * row, panel.begin() + (y + 1) * row);
  return all;
}

}  // namespace weft
