#include "train/validation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"
#include "core/host.h"
#include "core/json.h"
#include "core/log.h"
#include "data/step_plan.h"

namespace weft {
namespace {

void rows(Rows& r, ValidationDeck& d) {
  const auto chooses_data = [](Option& o) { o.fixed = true; };
  chooses_data(r.path("path", d.path,
                      "Held-out samples, as in data.path: training does not see them. Empty: see "
                      "share."));
  chooses_data(r.number("share", d.share, 0, below_one,
                        "Share of each bucket of data.path that is held out: training never sees "
                        "these samples, also where every is 0."));
  r.number("every", d.every, 0, many,
           "Steps between two measurements on the held-out samples; 0: none.");
  r.number("timesteps", d.timesteps, 1, 1000,
           "Video models: timesteps at which each held-out clip is measured, evenly spaced between "
           "0 and "
           "1000, the same in every measurement.");
  r.number("patience", d.patience, 0, many,
           "Early stopping: the run ends after so many measurements in a row without a smaller "
           "loss than the best; 0: never.");
}

void check(const Deck& deck, const DeckDemand& demand) {
  const ValidationDeck& d = deck.get<ValidationDeck>();
  demand(d.path.empty() || d.share == 0, "validation.path and validation.share are both set",
         "keep one of them");
  demand(d.every == 0 || !d.path.empty() || d.share > 0,
         "validation.every is set, and neither validation.path nor validation.share is",
         "name a store in validation.path, or hold out validation.share = 0.05 of data.path");
  demand(d.patience == 0 || d.every > 0, "validation.patience is set, and validation.every is 0",
         "set validation.every to a number of steps");
  demand(!deck.train.keep_best || d.every > 0, "train.keep_best is set, and validation.every is 0",
         "set validation.every to a number of steps");
}

// ---- Clips ----

class ClipValidation : public ValidationSet {
 public:
  ClipValidation(const ClipSource& source, ClipMeasure measure)
      : source_(source), measure_(std::move(measure)) {
    for (int b = 0; b < std::ssize(source.buckets()); ++b) {
      const Bucket& bucket = source.buckets()[b];
      for (std::int64_t i = 0; i < bucket.clips; ++i) {
        items_.push_back({bucket.name, measure_.cost(bucket)});
        clips_.emplace_back(b, i);
      }
    }
  }
  std::size_t figures() const override { return measure_.figures; }

  void measure(std::size_t item, std::span<double> figures) override {
    const auto [b, index] = clips_.at(item);
    const Bucket& bucket = source_.buckets()[b];
    std::vector<std::byte> clip(bucket.clip_bytes());
    source_.read(b, index, clip);
    LoadedBatch one;
    one.what.bucket = b;
    one.what.clips = {index};
    one.what.samples = {source_.sample_id(b, index)};
    one.info = {source_.info(b, index)};
    if (bucket.text_channels > 0) one.text = {source_.read_text(b, index)};
    one.bytes = clip;
    const Tensor values = run(bucket, one).to_host();
    std::ranges::copy(values.span<float>(), figures.begin());
  }

  std::size_t plan(std::size_t capacity) override {
    std::size_t most = 0;
    for (const Bucket& bucket : source_.buckets()) {
      if (bucket.clips == 0) continue;
      const auto arena = Arena::planning(this_device().kind, capacity);
      const ArenaScope scope(*arena);
      LoadedBatch one;
      one.what.clips.resize(1);
      run(bucket, one);
      check_validation_fits(arena->need(), capacity,
                            fmt::format("a held-out clip of bucket {}", bucket.name));
      most = std::max(most, arena->need().bytes);
    }
    return most;
  }

  ValidationScore score(std::span<const double> sums, std::int64_t items) const override {
    return measure_.score(sums, items);
  }

 private:
  Tensor run(const Bucket& bucket, const LoadedBatch& one) const {
    const auto size = static_cast<std::int64_t>(bucket.clip_bytes());
    Tensor bytes = Tensor::empty({size}, DType::u8);
    if (one.what.samples.empty()) return measure_.run(bucket, one, Tensor());
    bytes.set(one.bytes);
    return measure_.run(bucket, one, bytes);
  }

  const ClipSource& source_;
  ClipMeasure measure_;
  std::vector<std::pair<int, std::int64_t>> clips_;  // of the items: bucket, index
};

}  // namespace

DeckTable validation_table() {
  return {"validation", [](Rows& r, Deck& d) { rows(r, d.get<ValidationDeck>()); }, check,
          "parallel"};
}

HeldOutChoice held_out_choice(const Deck& deck) {
  const ValidationDeck& d = deck.get<ValidationDeck>();
  return {d.path, d.share, static_cast<std::uint64_t>(deck.run.seed)};
}

std::string identity_of_losses(const Deck& deck, const HeldOut& samples) {
  const ValidationDeck& d = deck.get<ValidationDeck>();
  const EvaluateDeck& e = deck.get<EvaluateDeck>();
  // The seed chooses a share, and the noise.
  std::string text = fmt::format("{} share {} seed {} timesteps {}", samples.content_id(), d.share,
                                 deck.run.seed, d.timesteps);
  if (samples.texts) text += fmt::format(", {} to {}", e.short_side, e.long_side);
  return to_hex(hash128(text));
}

std::unique_ptr<ValidationSet> make_clip_validation(const ClipSource& source, ClipMeasure measure) {
  return std::make_unique<ClipValidation>(source, std::move(measure));
}

void check_validation_fits(const MemoryNeed& need, std::size_t capacity, const std::string& what) {
  WEFT_CHECK(need.fits && need.bytes <= capacity, Exit::usage,
             "validate on smaller samples, or give the ranks more memory (fewer ranks a host, "
             "memory.arena_gib)",
             "{} needs {} in the network; a rank has {}", what,
             size_text(static_cast<double>(need.bytes)), size_text(static_cast<double>(capacity)));
}

// ---- Results ----

std::string ValidationResult::json(std::int64_t step, const std::string& set) const {
  nlohmann::ordered_json j = {{"step", step}, {"loss", total.loss}};
  if (!set.empty()) j["set"] = set;
  j["buckets"] = nlohmann::ordered_json::object();
  for (const auto& [name, loss] : buckets) j["buckets"][name] = loss;
  for (const auto& [name, value] : total.terms) j["terms"][name] = value;
  return dump_json(j);
}

std::string ValidationResult::text() const {
  std::string more;
  for (const auto& [name, value] : total.terms) more += fmt::format(", {} {:.5f}", name, value);
  std::string each;
  if (buckets.size() > 1)
    for (const auto& [name, loss] : buckets)
      each += fmt::format("{}{} {:.5f}", each.empty() ? " (" : ", ", name, loss);
  return fmt::format("loss {:.5f}{} of {}{}{}", total.loss, more, counted(items, "sample"), each,
                     each.empty() ? "" : ")");
}

Validation::Validation(ValidationSet& set, Communicator& comm, Groups groups)
    : set_(set),
      comm_(comm),
      groups_(groups),
      figures_(Tensor::persistent({static_cast<std::int64_t>(set.items().size() * set.figures())},
                                  DType::f64)) {}

ValidationResult Validation::run(const std::function<void()>& progress,
                                 const std::function<void()>& measured) {
  // 1. This rank's items. The others' figures stay zero, so that the sum over ranks is a copy.
  const auto& items = set_.items();
  const std::size_t each = set_.figures();
  std::vector<double> costs, figures(items.size() * each);
  for (const ValidationSet::Item& item : items) costs.push_back(item.cost);
  const std::vector<int> owners = share_out(costs, groups_.groups);
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (owners[i] != groups_.group) continue;
    if (progress) progress();
    const std::span<double> own(figures.data() + i * each, each);
    set_.measure(i, own);
    if (groups_.rank != 0) std::ranges::fill(own, 0.0);
  }
  if (progress) progress();
  if (measured) measured();

  // 2. All figures to all ranks.
  figures_.set(std::span<const double>(figures));
  comm_.wait(comm_.all_reduce_sum(figures_));
  const Tensor all = figures_.to_host();
  comm_.check();

  // 3. Sums in the order of the items.
  struct Sums {
    std::string bucket;
    std::vector<double> values;
    std::int64_t items = 0;
  };
  std::vector<Sums> buckets;
  Sums total{"", std::vector<double>(each)};
  const auto add = [&](Sums& to, std::span<const double> values) {
    for (std::size_t k = 0; k < each; ++k) to.values[k] += values[k];
    ++to.items;
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto values = all.span<double>().subspan(i * each, each);
    auto at = std::ranges::find(buckets, items[i].bucket, &Sums::bucket);
    if (at == buckets.end()) at = buckets.insert(at, {items[i].bucket, std::vector<double>(each)});
    add(*at, values);
    add(total, values);
  }
  ValidationResult result;
  result.items = total.items;
  result.total = set_.score(total.values, total.items);
  for (const Sums& s : buckets)
    result.buckets.emplace_back(s.bucket, set_.score(s.values, s.items).loss);
  return result;
}

// ---- History ----

bool ValidationHistory::go_on_with(const std::string& now) {
  const bool other = !set.empty() && set != now && newest > 0;
  if (other) *this = {};
  set = now;
  return other;
}

bool ValidationHistory::add(std::int64_t step, double loss) {
  newest = step;
  if (!(loss < best)) {
    ++since_best;
    return false;
  }
  best = loss;
  best_step = step;
  since_best = 0;
  return true;
}

std::string ValidationHistory::best_text() const {
  return fmt::format("best {:.5f} at step {}", best, best_step);
}

std::string ValidationHistory::to_text() const {
  // A hexadecimal float, so that from_text() restores every bit.
  return fmt::format("newest {} best_step {} since_best {} best {:a} set {}", newest, best_step,
                     since_best, best, set);
}

ValidationHistory ValidationHistory::from_text(const std::string& text) {
  ValidationHistory h;
  if (text.empty()) return h;
  long long newest = 0, best_step = 0, since_best = 0;
  char set[33] = "";
  const int fields =
      std::sscanf(text.c_str(), "newest %lld best_step %lld since_best %lld best %la set %32s",
                  &newest, &best_step, &since_best, &h.best, set);
  WEFT_CHECK(fields >= 4, Exit::checkpoint, "this is a bug in weft, please report it with the log",
             "the checkpoint's history of validations reads \"{}\"", text);
  h.newest = newest;
  h.best_step = best_step;
  h.since_best = since_best;
  h.set = set;
  return h;
}

}  // namespace weft
