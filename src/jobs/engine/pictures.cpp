#include "jobs/engine/pictures.h"

#include <algorithm>

#include "core/clock.h"
#include "core/host.h"
#include "core/log.h"
#include "tensor/device.h"

namespace weft {
namespace {

PrefetchLimits limits_of_pictures(int threads, std::int64_t ahead) {
  PrefetchLimits l;
  l.threads = threads;
  l.network_on_gpu = on_cuda();
  l.most_batch = 1;
  l.frame_bytes = std::size_t{32} << 20;  // until larger ones are seen
  // A small part of the host's memory: other ranks and the decoders need it too.
  l.most_bytes = std::min(std::size_t{2} << 30, host_memory().available / 64);
  l.most_ahead = ahead;
  return l;
}

}  // namespace

PictureJob::PictureJob(PictureWork& work, const ListEngine& engine, int threads, std::int64_t ahead)
    : work_(work),
      engine_(engine),
      threads_(threads),
      prefetch_(*this, limits_of_pictures(threads, ahead)) {}

void PictureJob::make(const ItemBatch& items, ItemResults& results) {
  if (results_ == nullptr) results_ = &results;  // threads read it
  for (const std::int64_t item : items)
    for (std::int64_t number = 0;; ++number) {
      std::unique_ptr<PictureUnit> picture = work_.next(item, number);
      if (!picture) break;
      picture->item = item;
      try {
        prefetch_.add(std::move(picture));
      } catch (const Error& e) {
        // The error is another item's, or that of all: this item's own are dealt with below.
        throw JobError(e.code(), e.what(), e.hint());
      }
    }
}

template <class Stage>
void PictureJob::run(PictureUnit& picture, Stage&& stage) {
  // What is not finished when the job is to stop is left to the next start.
  if (engine_.stop_requested()) picture.dropped = true;
  if (picture.dropped) return;
  try {
    stage();
  } catch (const Error& e) {
    picture.dropped = true;
    if (e.code() == Exit::hardware) throw;  // not the picture's: nothing more comes of this GPU
    if (e.code() != Exit::stopped) work_.failed(picture, e, *results_);
  }
}

PrefetchWork::Prepared PictureJob::prepare(PrefetchUnit& unit) {
  auto& picture = static_cast<PictureUnit&>(unit);
  Prepared prepared{0, 0, false, 0};
  run(picture, [&] { prepared = work_.read(picture); });
  if (!prepared.ready) work_.done(picture, *results_);
  return prepared;
}

double PictureJob::network(std::span<PrefetchUnit* const> units, int threads) {
  const double begin = now_seconds();
  set_threads(threads, 1);
  for (PrefetchUnit* unit : units) {
    auto& picture = static_cast<PictureUnit&>(*unit);
    run(picture, [&] { work_.predict(picture); });
  }
  return now_seconds() - begin;
}

double PictureJob::finish(PrefetchUnit& unit) {
  const double begin = now_seconds();
  auto& picture = static_cast<PictureUnit&>(unit);
  // A predicted picture is written also when the job is to stop.
  if (!picture.dropped) try {
      work_.finish(picture, *results_);
    } catch (const Error& e) {
      picture.dropped = true;
      if (e.code() == Exit::hardware) throw;
      work_.failed(picture, e, *results_);
    }
  work_.done(picture, *results_);
  return now_seconds() - begin;
}

nlohmann::ordered_json PictureJob::share() const {
  const PrefetchTimes times = prefetch_.times();
  nlohmann::ordered_json share = {{"predicting", times.network}, {"waited", times.network_waited}};
  share.update(as_share(times, threads_));
  return share;
}

void report_prefetch(const ListReport& report, nlohmann::ordered_json& header) {
  PrefetchSummary summary;
  summary.on_gpu = on_cuda();
  for (const RankShare& r : report.ranks) summary.add(r.own);
  if (summary.empty()) return;
  header["feed"] = summary.json();
  log::write_info("pace      " + summary.verdict());
  log::write_info("waits     " + summary.waits());
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
