// The parameters of a model under their released checkpoint names, in one flat offset space:
// sharding, reduction, checkpoints and resharding are the same arithmetic over it.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/parts.h"
#include "tensor/tensor.h"

namespace weft {

// How a parameter starts. `a` is the half width of uniform, the deviation of normal, the value of
// constant, and the base of rotary frequencies (element i of n: a^(-i/n)).
struct Init {
  enum class Kind { uniform, normal, constant, rotary } kind = Kind::constant;
  float a = 0;

  static Init uniform(double a) { return {Kind::uniform, static_cast<float>(a)}; }
  static Init normal(double a) { return {Kind::normal, static_cast<float>(a)}; }
  static Init constant(double a) { return {Kind::constant, static_cast<float>(a)}; }
  // Xavier's, of a matrix [out,in].
  static Init xavier(std::int64_t out, std::int64_t in) {
    return uniform(std::sqrt(6.0 / static_cast<double>(in + out)));
  }
};

struct Parameter {
  std::string name;
  Shape shape;
  Init init;
  bool trainable = true;
  bool bf16_only = false;  // a bf16 model reads its bf16 copy alone (set by the model)
  // In a training of adapters (models/lora.h) the model's own parameters are its base: never
  // trained, read from files that checkpoints name instead of holding them. The adapters are all
  // that it trains.
  enum class Role { model, base, adapter } role = Role::model;
  std::int64_t offset = 0;  // elements, in the flat space of trainable or of fixed parameters
  int bucket = -1;
  // Parameters of a group are optimised together: one norm of the gradient, one learning rate, one
  // weight decay. Consecutive, from 0 on.
  int group = 0;

  Tensor value;    // f32; undefined in a bf16 model where it is base and bf16_only
  Tensor working;  // bf16 copy for matrix products; undefined in an f32 model
  Tensor grad;     // f32; undefined while not trainable

  // Weights that ranks hold in parts (Sharding, below): `value` or `working`, and `grad`, are
  // places in memory that buckets share, valid only while the parameter's bucket is gathered. What
  // this rank owns is f32: elements [owned.begin, owned.end) of the parameter, perhaps none.
  bool sharded = false;
  Part owned;
  Tensor shard;

  // The gradient, and whether it already holds a contribution of this step.
  bool grad_written = false;
  // Overwrites elements [first, first + values.size()) of `value` and `working`, whichever there
  // are; of a sharded parameter those that this rank owns.
  void set(std::int64_t first, std::span<const float> values);
  // A gradient to add to: zeroed at the first contribution of the step.
  Tensor& grad_to_add();

  int pending = 0;                       // uses whose backward has not run yet
  const Parameter* memory_of = nullptr;  // has the memory of that one (share_memory)
};

// Sharded weights (parallel.zero = 3): `ranks` ranks share out those of a model's blocks, of which
// this one is `rank`.
struct Sharding {
  int rank = 0, ranks = 1;
  // How the names of the blocks' parameters begin, before the block's number: "blocks.". Blocks are
  // used one after the other, in the order in which they were registered.
  std::vector<std::string> blocks;
};

class ParameterTable {
 public:
  // Registers a parameter, in the order of the forward pass. References stay valid.
  Parameter& add(const std::string& name, const Shape& shape, Init init, bool trainable = true);

  // Lays the parameters out and allocates values and gradients. Trainable ones come in reverse
  // order of registration, which is the order in which the backward finishes them, in buckets of at
  // least `bucket_elements` padded to bucket_pad(ranks): first those that are bf16_only, then the
  // others; among these by group, the last group first. Each has buckets of its own. `bf16_working`
  // also keeps a bf16 copy. What is base lies outside all flat tensors, in the formats of
  // allocate_for_inference().
  //
  // With `sharding` the blocks' parameters come first (in a bf16 model those that are bf16_only),
  // in buckets of whole blocks, at least one: bucket 0 has the last block. A rank keeps its part of
  // each in f32 (shard), and the part of its gradient. All else of a bucket is in one of two slots,
  // bucket b in slot b % 2, so that every parameter has one address for good: a bucket is gathered
  // into its slot while its neighbour in the other is used.
  void allocate(std::int64_t bucket_elements, bool bf16_working, bool gradients,
                const std::optional<Sharding>& sharding = std::nullopt, int ranks = 1);
  // Its beginning: buckets() and offsets, without any memory.
  void lay_out(std::int64_t bucket_elements, bool bf16_working,
               const std::optional<Sharding>& sharding, int ranks);
  // Where weights and gradients that ranks send each other lie: zeroed memory of the device. Before
  // allocate(); Tensor::persistent unless set.
  using NewTensor = std::function<Tensor(const Shape&, DType)>;
  void set_memory(NewTensor memory) { memory_ = std::move(memory); }
  // NCCL's reduce-scatter and all-gather take equal parts only, of whole units (core/parts.h). The
  // least multiple of a unit for each rank that is not below 15 * 2^13: for 2^k ranks up to 512,
  // and 3, 5 and 15 times as many, just that, so that they have one layout.
  static constexpr std::int64_t bucket_pad(int ranks) {
    const std::int64_t units = part_unit * ranks;
    return ((15 << 13) + units - 1) / units * units;
  }
  // The same for a model that is only run: no gradients, and in a bf16 model no f32 value of what
  // is bf16_only. There is no flat space then (values(), working(), fixed() are undefined):
  // Parameter::set, load_weights and restore_state fill the parameters.
  void allocate_for_inference(bool bf16_model);
  // Of two networks of one shape, whose parameters are named owner + NAME and user + NAME, the
  // second uses the memory of the first: one at a time has its values there. Call it before
  // allocate_for_inference().
  void share_memory(const std::string& owner, const std::string& user);
  // What that takes: the bytes of parameters, without those lost to alignment. base_bytes(): of
  // those that are base.
  std::size_t inference_bytes(bool bf16_model) const;
  std::size_t base_bytes(bool bf16_model) const;

  // Reports to `place` the offset of each parameter for which `fixed` holds, in a flat space laid
  // out as fixed() is. Returns the elements of that space.
  std::int64_t lay_out_fixed(
      const std::function<bool(const Parameter&)>& fixed,
      const std::function<void(Parameter&, std::int64_t offset)>& place) const;

  // Draws every value, of parameters whose names begin so, from Philox keyed by (seed, init, name):
  // the same on every rank.
  void initialise(std::uint64_t seed, const std::string& prefix = {});
  void refresh_working();  // working = bf16(value), where there are values

  const std::vector<std::unique_ptr<Parameter>>& all() const { return parameters_; }
  Parameter* find(const std::string& name) const;
  std::int64_t trainable_elements() const;  // without padding
  std::int64_t total_elements() const;

  // Flat, trainable, padded: of all buckets that are not sharded; values() from values_begin() on.
  Tensor& values() { return values_; }
  Tensor& working() { return working_; }
  Tensor& grads() { return grads_; }
  Tensor& fixed() { return fixed_; }  // flat, not trainable, without what is base

  struct Bucket {
    std::int64_t begin = 0, end = 0;  // elements of the flat space
    bool bf16_only = false;           // as its parameters
    bool sharded = false;             // likewise
    int group = 0;                    // likewise
    int pending = 0;
    bool ready = false;
    bool on_its_way = false;  // new weights are coming: to be awaited before the next use
  };
  const std::vector<Bucket>& buckets() const { return buckets_; }
  int sharded_buckets() const { return sharded_; }  // the first ones
  // The bucket's elements of values(), working() and grads(), or of its slot. Not of bf16_only
  // values that were dropped.
  Tensor values_of(int bucket) const;
  Tensor working_of(int bucket) const;
  Tensor gradient_of(int bucket) const;
  // What this rank owns of a sharded bucket, f32: the weights, and the sum of their gradient.
  Part owned(int bucket) const;  // elements of the flat space
  Tensor shard(int bucket) const;
  Tensor shard_gradient(int bucket) const;
  // Bytes of weights (slots and bf16 copies with them), gradients, and the shards.
  std::size_t weight_bytes() const;
  std::size_t gradient_bytes() const;
  std::size_t shard_bytes() const;
  int groups() const;  // of parameters, at least 1

  // Frees the f32 values of bf16_only buckets, whose masters are then kept in shards elsewhere:
  // values() then begins at values_begin(), and such a parameter's `value` is undefined. Needs a
  // bf16 copy.
  void drop_bf16_only_values();
  std::int64_t values_begin() const { return values_begin_; }

  // Weights that arrive during the forward: `arrive(bucket)` is called before the first use of a
  // parameter of a bucket that was said to be on its way.
  void set_arrival(std::function<void(int bucket)> arrive) { arrive_ = std::move(arrive); }
  void on_its_way(int bucket);
  void arrived(int bucket) { buckets_[bucket].on_its_way = false; }
  bool any_on_its_way() const;

  // How host work runs in the middle of device work that may be recorded (train/step_work.h), which
  // exchanges between ranks are: at once, unless set.
  void set_aside(std::function<void(std::function<void()>)> aside) { aside_ = std::move(aside); }
  void aside(std::function<void()> act) const {
    if (aside_)
      aside_(std::move(act));
    else
      act();
  }

  // Sharded buckets: `enter(from, to)` is called when the forward or backward leaves bucket `from`
  // (-1: a micro-batch begins) for `to`, before the first use of the weights and gradients there. A
  // forward enters ..., 1, 0, a backward 0, 1, ...
  void set_entry(std::function<void(int from, int to)> entry) { entry_ = std::move(entry); }
  void enter(int bucket);
  // A micro-batch, or a forward that no backward follows, begins. Gradients of sharded buckets
  // begin anew in each micro-batch: their sums go to the shards.
  void begin_micro_batch();
  // Sharded buckets as a micro-batch without clips treats them: entered in order and, with
  // `gradients`, reported ready with zeros.
  void walk(bool backward, bool gradients);

  // A step: begin() forgets gradients. While counting is on, uses are counted in the forward and
  // taken back in the backward; when a bucket has no use left, and all before it are ready,
  // on_ready(bucket) is called. finish() zeroes gradients that got no contribution and announces
  // the buckets that remain. A sharded bucket is reported in every micro-batch, whether counting is
  // on or not, never by finish(), and before all others.
  void begin_step(std::function<void(int bucket)> on_ready);
  void set_counting(bool on) { counting_ = on; }
  bool counting() const { return counting_; }
  void await(const Parameter& p);
  void note_use(Parameter& p);
  void note_done(Parameter& p);
  void finish_step();

  // What a step has changed in the table so far, for replaying recorded device work instead of
  // running it.
  struct StepState {
    std::vector<bool> grad_written;
    std::vector<Bucket> buckets;
    int next_bucket = 0, next_sharded = 0;
  };
  StepState step_state() const;
  // [parameter] Whether its gradient was written in this step, and is added to from now on.
  std::vector<bool> written() const;
  void set_step_state(const StepState& s);

 private:
  void announce();
  void complete(int bucket);
  bool counts(const Parameter& p) const;
  // The bucket in `flat`, which lacks its first `missing` elements, or in its slot.
  Tensor of_bucket(int bucket, const Tensor& flat, std::int64_t missing,
                   const std::array<Tensor, 2>& slots) const;
  void allocate_shards(bool bf16_working, bool gradients);
  // One flat tensor for each format, cut into the chosen parameters.
  void allocate_to_run(bool bf16_model, const std::function<bool(const Parameter&)>& chosen);

  std::vector<std::unique_ptr<Parameter>> parameters_;
  std::vector<Bucket> buckets_;
  Tensor values_, working_, grads_, fixed_;
  std::int64_t values_begin_ = 0;
  std::function<void(int)> on_ready_, arrive_;
  std::function<void(std::function<void()>)> aside_;
  NewTensor memory_ = &Tensor::persistent;
  bool counting_ = false;
  int next_bucket_ = 0;

  // Sharded buckets.
  std::optional<Sharding> sharding_;
  int sharded_ = 0;
  std::int64_t sharded_end_ = 0;  // elements of the flat space: of all of them
  std::array<Tensor, 2> weight_slots_, gradient_slots_;
  Tensor shards_, shard_gradients_;          // f32, one owned part after the other
  std::vector<std::int64_t> shard_offsets_;  // one more than sharded buckets
  std::vector<std::vector<Part>> gaps_;      // [bucket] elements of a slot that are no parameter's
  std::function<void(int, int)> entry_;
  int entered_ = -1, next_sharded_ = 0;
};

// "blocks.12" of "blocks.12.attn.q.weight" where `beginnings` has "blocks."; "" for a parameter of
// no block.
std::string block_of(const std::string& parameter, const std::vector<std::string>& beginnings);

// During its lifetime, parameters whose names begin with `prefix` are not trained: a backward sends
// gradients through their operations but accumulates none in them.
class FrozenScope {
 public:
  FrozenScope(ParameterTable& table, std::string_view prefix) {
    for (const auto& p : table.all())
      if (p->trainable && p->name.starts_with(prefix)) frozen_.push_back(p.get());
    for (Parameter* p : frozen_) p->trainable = false;
  }
  ~FrozenScope() {
    for (Parameter* p : frozen_) p->trainable = true;
  }
  FrozenScope(const FrozenScope&) = delete;
  FrozenScope& operator=(const FrozenScope&) = delete;

 private:
  std::vector<Parameter*> frozen_;
};
// Turns the counting of uses on or off during its lifetime.
class CountingScope {
 public:
  CountingScope(ParameterTable& table, bool on) : table_(table), before_(table.counting()) {
    table.set_counting(on);
  }
  ~CountingScope() { table_.set_counting(before_); }
  CountingScope(const CountingScope&) = delete;
  CountingScope& operator=(const CountingScope&) = delete;

 private:
  ParameterTable& table_;
  bool before_;
};

// The arrays that AdamW or SGD and EMA keep for the trainable parameters: whole on every rank, or
// only for the rank's own parts.

// The state of the elements that this rank updates: of every gradient bucket a part, one after the
// other. Sharded (parallel.zero = 1 or 3): part `rank` of `ranks` of each bucket. Whole: each
// bucket, on every rank.
class OptimizerState {
 public:
  // Zero moments; each EMA starts as a copy of the weights. A sharded bf16 model's f32 values of
  // bf16_only buckets move here, and leave the table. The table keeps those of sharded buckets.
  // `squares`: AdamW's second moments are kept; SGD has its momentum in exp_avg alone.
  // `ema_decays`: one moving average of the weights for each, at least one.
  OptimizerState(ParameterTable& table, bool sharded, int rank, int ranks, bool squares = true,
                 std::vector<double> ema_decays = {0.99});

  // What this rank owns of a bucket: elements of the flat space.
  const Part& part(int bucket) const { return parts_[bucket]; }
  bool sharded() const { return sharded_; }

  // The owned part of a bucket in each array, f32.
  Tensor master(int bucket) const;
  Tensor exp_avg(int bucket) const { return own(exp_avg_, bucket); }
  bool has_squares() const { return exp_avg_sq_.defined(); }
  Tensor exp_avg_sq(int bucket) const { return own(exp_avg_sq_, bucket); }
  int averages() const { return static_cast<int>(ema_.size()); }
  const std::vector<double>& ema_decays() const { return ema_decays_; }
  Tensor ema(int bucket, int average = 0) const { return own(ema_[average], bucket); }
  // The same of the gradients and of the bf16 weights (undefined in an f32 model, and of sharded
  // buckets, whose weights are made of the master when they are gathered).
  Tensor gradient(int bucket) const;
  Tensor working(int bucket) const;

  // Bytes on this rank, for the start table: masters that live here or in shards, moments, EMAs.
  std::size_t bytes() const;

 private:
  Tensor own(const Tensor& array, int bucket) const;
  Tensor owned(const Tensor& whole, int bucket) const;  // of all of the bucket

  ParameterTable& table_;
  bool sharded_;
  std::vector<Part> parts_;
  std::vector<std::int64_t> offsets_;  // of the parts in the arrays below; one more than parts
  Tensor master_;  // bf16_only buckets behind the sharded ones; undefined if the table has them
  Tensor exp_avg_, exp_avg_sq_;
  std::vector<double> ema_decays_;
  std::vector<Tensor> ema_;  // [decay]
};

}  // namespace weft
