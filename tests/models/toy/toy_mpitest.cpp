// What a new model costs: this file, but for the test at its end, is all of it. Of a real one the
// parts stand in
//   src/models/NAME/options.{h,cpp}   the table of the deck
//   src/models/NAME/NAME.{h,cpp}      the network
//   src/models/NAME/task.{h,cpp}      training, and what of planning is not left to the dry run
//   src/models/registry.cpp           one line
// Trainer, checkpoints, planner, parser and `weft help deck` know it by the registry alone.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "models/registry.h"
#include "nn/nn.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "train/step_cost.h"
#include "train/trainer.h"

namespace weft {
namespace {

// The table [toy].
struct ToyDeck {
  std::int64_t width = 8;
  double target = 0.5;
};
void toy_rows(Rows& r, ToyDeck& d) {
  r.number("width", d.width, 1, 1024, "Channels of the layer.");
  r.number("target", d.target, -1e6, 1e6, "What each of them is to become.");
}
std::vector<DeckTable> toy_tables() { return {deck_table("toy", toy_rows)}; }

// One linear layer that learns to turn ones into a constant, whatever the clips hold.
class ToyTask : public TrainingTask {
 public:
  explicit ToyTask(const Deck& deck)
      : deck_(deck), ones_(constant(1)), target_(constant(deck.get<ToyDeck>().target)) {
    const std::int64_t C = deck.get<ToyDeck>().width;
    layer_.weight = &table_.add("toy.weight", {C, C}, {Init::Kind::normal, 0.02f});
    layer_.bias = &table_.add("toy.bias", {C}, {Init::Kind::constant, 0});
  }

  ParameterTable& params() override { return table_; }
  std::string describe() const override { return "toy"; }
  bool bf16() const override { return false; }
  std::vector<TrainDeck> optimizers() const override { return {deck_.train}; }
  void check(std::span<const Bucket>) override {}
  void open(std::span<const Bucket>) override {}
  std::string start_weights() override {
    table_.initialise(static_cast<std::uint64_t>(deck_.run.seed));
    return "";
  }
  void share_clips(Communicator* group) override { ASSERT_EQ(group, nullptr); }
  std::int64_t blocks(const Bucket&) const override { return 0; }
  double cost(const Bucket&, double) const override { return 1; }

  TrainingWork prepare(const Bucket&, const LoadedBatch& clips, const Tensor&, double,
                       float weight) override {
    TrainingWork work;
    work.parts.assign(clips.what.clips.size(), [this, weight](Tape& tape) {
      const Var y = nn::linear({tape, table_}, make_var(ones_, false), layer_);
      Tensor loss = Tensor::empty({1}, DType::f32);
      ops::fill_zero(loss);
      ops::l1_forward(y->value, target_, 1, loss);
      const auto [dy, accumulate] = grad_target(y);
      ops::l1_backward(y->value, target_, weight, dy, accumulate);
      return TrainingLoss{loss, Tensor()};
    });
    return work;
  }

 private:
  Tensor constant(double value) const {
    const std::int64_t C = deck_.get<ToyDeck>().width;
    Tensor t = Tensor::persistent({1, C}, DType::f32);
    t.set(std::span<const float>(std::vector<float>(C, static_cast<float>(value))));
    return t;
  }

  const Deck& deck_;
  ParameterTable table_;
  nn::Linear layer_;
  Tensor ones_, target_;
};

// The line of the registry, and the parser's knowledge of it.
const bool registered = [] {
  add_model({"toy", toy_tables, [](const Deck& deck) -> std::unique_ptr<TrainingTask> {
               return std::make_unique<ToyTask>(deck);
             }});
  set_deck_tables(model_tables(), model_names());
  return true;
}();

class Toy : public testing::Test {
 protected:
  Toy() {
    long id = getpid();
    MPI_Bcast(&id, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    root_ = std::filesystem::path(testing::TempDir()) / ("weft_toy_" + std::to_string(id));
  }
  ~Toy() override {
    MPI_Barrier(MPI_COMM_WORLD);
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  Deck deck(const std::string& run) const {
    return parse_deck(
        "[model]\nname = \"toy\"\n[toy]\nwidth = 16\ntarget = 0.75\n"
        "[data]\npath = \"synthetic:clips=16,frames=1,height=16,width=16\"\n"
        "[device]\nkind = \"cpu\"\n[memory]\narena_gib = 0.25\n"
        "[train]\nsteps = 20\nlr = 0.02\nbatch_size = 2\nmicro_batches = 4\n",
        "toy.toml", {"run.dir=" + (root_ / run).string()});
  }
  std::filesystem::path root_;
};

std::vector<double> losses(Trainer& trainer, int steps) {
  for (int i = 0; i < steps; ++i) trainer.step();
  std::vector<double> all;
  for (const StepMetrics& m : trainer.finished(true)) all.push_back(m.loss);
  return all;
}

TEST_F(Toy, TheTrainerTrainsSavesAndGoesOn) {
  std::vector<double> weights;
  {
    Trainer whole(deck("whole"), make_task, MPI_COMM_WORLD);
    whole.start();
    const std::vector<double> loss = losses(whole, 20);
    ASSERT_EQ(loss.size(), 20u);
    EXPECT_LT(loss.back(), 0.5 * loss.front());
    weights = whole.weights_checksum();
  }
  {
    Trainer first(deck("cut"), make_task, MPI_COMM_WORLD);
    first.start();
    losses(first, 12);
    first.save();
    EXPECT_TRUE(first.wait_for_save());
  }
  Trainer second(deck("cut"), make_task, MPI_COMM_WORLD);
  second.start();
  EXPECT_EQ(second.steps_done(), 12);
  losses(second, 8);
  EXPECT_EQ(second.weights_checksum(), weights);
}

TEST_F(Toy, ThePlannerHasItsCostFromADryRun) {
  const Deck d = deck("plan");
  const auto task = make_task(d);
  task->params().allocate(1 << 16, false, true);
  Bucket bucket;
  bucket.frames = bucket.height = bucket.width = 1;
  const std::vector<Bucket> buckets = {bucket};
  const MicroBatchCost cost = dry_run_cost(*task, bucket, 3, 0, DeviceKind::cpu, h200_targets(), 1);
  // Three clips through a layer of 16 x 16: 2 x 256 operations forward; backward at its weight
  // alone, since its input is fixed.
  EXPECT_EQ(cost.flops, 3 * 2 * 512);
  EXPECT_GT(cost.backward, 0);
  const auto schedule = dry_run_schedule(*task, buckets, DeviceKind::cpu, h200_targets());
  EXPECT_EQ(schedule.size(), task->params().buckets().size());
}

}  // namespace
}  // namespace weft
