// Validation: how well the weights of a step do on samples that training does not see
// ([validation], docs/train.md). A task says how one sample is measured (ValidationSet); here are
// its distribution over the ranks, the sums, and which result was the best.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "config/deck_table.h"
#include "data/held_out.h"
#include "data/prefetch.h"
#include "parallel/communicator.h"
#include "tensor/tensor.h"

namespace weft {

// The table [validation] of the deck.
struct ValidationDeck {
  std::string path;
  double share = 0;
  std::int64_t every = 0;
  std::int64_t timesteps = 10;
  std::int64_t patience = 0;
};
DeckTable validation_table();
HeldOutChoice held_out_choice(const Deck& deck);
// What losses must have in common to be compared: the samples, and the deck's keys that say how
// they are measured.
std::string identity_of_losses(const Deck& deck, const HeldOut& samples);

// The table [evaluate], whose rows are in jobs/evaluate/. A text detector is validated at its
// sizes.
struct EvaluateDeck {
  std::string data;
  std::string output = "evaluation";
  std::int64_t pictures = 12;
  bool predictions = false;
  bool ema = false;
  std::int64_t short_side = 736, long_side = 1333;
};

struct ValidationScore {
  double loss = 0;                                    // the smaller the better
  std::vector<std::pair<std::string, double>> terms;  // further figures by name; may be empty
};

// Held-out samples and how a task measures them: by figures that are summed over the samples.
class ValidationSet {
 public:
  virtual ~ValidationSet() = default;

  struct Item {
    std::string bucket;
    double cost = 1;  // of measuring it, in any unit
  };
  const std::vector<Item>& items() const { return items_; }
  virtual std::size_t figures() const = 0;  // of an item
  // Runs the model forward on an item, by the weights in the task's table as they are, in the
  // current arena. All ranks that share clips call it alike, and get the same figures.
  virtual void measure(std::size_t item, std::span<double> figures) = 0;
  // The peak of the arena in bytes over all items, from dry runs. Exit::usage for an item that an
  // arena of `capacity` bytes does not hold.
  virtual std::size_t plan(std::size_t capacity) = 0;
  // The score from the sums over some items, one at least.
  virtual ValidationScore score(std::span<const double> sums, std::int64_t items) const = 0;

 protected:
  std::vector<Item> items_;
};

// Clips of a source, one at a time.
struct ClipMeasure {
  std::size_t figures = 1;
  // f32 [figures] of one clip; `bytes` u8 are on this rank's device. While planning,
  // clips.what.samples is empty and `bytes` undefined.
  std::function<Tensor(const Bucket& bucket, const LoadedBatch& clips, const Tensor& bytes)> run;
  std::function<double(const Bucket& bucket)> cost;
  std::function<ValidationScore(std::span<const double> sums, std::int64_t clips)> score;
};
// `source` outlives it.
std::unique_ptr<ValidationSet> make_clip_validation(const ClipSource& source, ClipMeasure measure);

// Exit::usage: "`what` needs so much, a rank has so much".
void check_validation_fits(const MemoryNeed& need, std::size_t capacity, const std::string& what);

struct ValidationResult {
  ValidationScore total;
  std::vector<std::pair<std::string, double>> buckets;  // the loss of each, in the items' order
  std::int64_t items = 0;
  // {"step", "loss", "set", "buckets", "terms"}: a line of RUN/validation.jsonl, without its hash.
  // `set`: identity_of_losses(), if that is to be told.
  std::string json(std::int64_t step, const std::string& set = {}) const;
  // "loss 0.41234 of 12 samples (240p: 0.40123, ...)"
  std::string text() const;
};

class Validation {
 public:
  // This rank is `rank` of the `ranks` in group `group` of `groups`: the ranks of a group measure
  // an item together. Both outlive it. Allocates memory on the device.
  struct Groups {
    int group = 0, groups = 1, rank = 0;
  };
  Validation(ValidationSet& set, Communicator& comm, Groups groups);

  // Collective. The same bits on every rank, and on any number of them as long as measure() gives
  // the same: sums are made in the order of the items. `progress` is called between items,
  // `measured` once after the last, before the sums over ranks.
  ValidationResult run(const std::function<void()>& progress = {},
                       const std::function<void()>& measured = {});

 private:
  ValidationSet& set_;
  Communicator& comm_;
  Groups groups_;
  Tensor figures_;  // f64 [items * figures]
};

// Which validation of a run was the best: part of its state.
struct ValidationHistory {
  std::int64_t newest = 0;  // steps done at the last one; 0: none yet
  std::int64_t best_step = 0;
  std::int64_t since_best = 0;  // validations after the best one
  double best = std::numeric_limits<double>::infinity();
  std::string set;  // identity_of_losses(); "" in checkpoints of weft 0.2.0 and before
  // The history goes on with losses of `now`. Another set begins a new one: true if that drops a
  // best.
  bool go_on_with(const std::string& now);
  // Adds a result; true if it is the best so far. One that is not a number never is.
  bool add(std::int64_t step, double loss);
  std::string best_text() const;  // "best 0.41234 at step 40"
  std::string to_text() const;
  // Exit::checkpoint for a text that to_text() does not make; "" is a history without any.
  static ValidationHistory from_text(const std::string& text);
};

}  // namespace weft
