// The parameter table: layout, order of announcements, initial values.
#include "nn/parameters.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parts.h"
#include "fixture.h"
#include "ops/pointwise.h"

namespace weft::test {
namespace {

constexpr std::int64_t pad = ParameterTable::bucket_pad(1);

TEST(ParameterLayout, ReverseOrderAlignedPadded) {
  ParameterTable table;
  Parameter& first = table.add("first", {10}, {});
  Parameter& a = table.add("a", {70000}, {});
  Parameter& fixed = table.add("fixed", {5}, {}, false);
  Parameter& b = table.add("b", {3, 7}, {});
  Parameter& c = table.add("c", {30000}, {});
  Parameter& d = table.add("d", {500, 300}, {});
  Parameter& fixed2 = table.add("fixed2", {17}, {}, false);
  table.allocate(65536, true, true);

  // The backward finishes the last first; a bucket closes once it is full, and the next starts on
  // the padding.
  EXPECT_EQ(d.offset, 0);
  EXPECT_EQ(c.offset, 2 * pad);
  EXPECT_EQ(b.offset, c.offset + 30000);
  EXPECT_EQ(a.offset, b.offset + 32);
  EXPECT_EQ(first.offset, 3 * pad);
  EXPECT_EQ((std::vector<int>{d.bucket, c.bucket, b.bucket, a.bucket, first.bucket, fixed.bucket}),
            (std::vector<int>{0, 1, 1, 1, 2, -1}));
  ASSERT_EQ(table.buckets().size(), 3u);
  std::int64_t at = 0;
  for (const auto& bucket : table.buckets()) {
    EXPECT_EQ(bucket.begin, at);
    EXPECT_GT(bucket.end, bucket.begin);
    EXPECT_EQ(bucket.end % pad, 0);
    at = bucket.end;
  }
  // One layout for whole nodes of 1, 2, 4 and 8 GPUs, three, five and six of them as well.
  for (const int ranks : {2, 3, 4, 5, 6, 8, 12, 24, 40, 48, 80, 96, 128, 192, 320, 512, 960})
    EXPECT_EQ(ParameterTable::bucket_pad(ranks), pad) << ranks;
  EXPECT_EQ(fixed2.offset, 0);
  EXPECT_EQ(fixed.offset, 32);

  for (const auto& p : table.all()) {
    EXPECT_EQ(p->offset % 16, 0) << p->name;
    EXPECT_EQ(p->value.shape(), p->shape);
    EXPECT_EQ(p->working.shape(), p->shape);
    EXPECT_EQ(p->grad.defined(), p->trainable) << p->name;
    const Tensor& flat = p->trainable ? table.values() : table.fixed();
    EXPECT_EQ(p->value.raw(), flat.data<float>() + p->offset) << p->name;
    if (p->trainable) {
      EXPECT_EQ(p->grad.raw(), table.grads().data<float>() + p->offset) << p->name;
    }
  }
  EXPECT_EQ(table.values().numel(), at);
  EXPECT_EQ(table.grads().numel(), at);
  EXPECT_EQ(table.trainable_elements(), 10 + 70000 + 21 + 30000 + 150000);
  EXPECT_EQ(table.total_elements(), table.trainable_elements() + 22);
  EXPECT_EQ(table.find("b"), &b);
  EXPECT_EQ(table.find("e"), nullptr);
}

TEST(ParameterLayout, BucketsHaveEqualPartsForAnyNumberOfRanks) {
  for (int ranks = 1; ranks <= 1024; ++ranks) {
    ParameterTable table;
    for (const std::int64_t n : {10, 7000, 21, 13000}) table.add("p" + std::to_string(n), {n}, {});
    table.allocate(5000, false, false, std::nullopt, ranks);
    EXPECT_EQ(table.buckets().size(), 3u);
    std::int64_t at = 0;
    for (const auto& bucket : table.buckets()) {
      EXPECT_EQ(bucket.begin, std::exchange(at, bucket.end));
      for (const int rank : {0, ranks / 2, ranks - 1})
        EXPECT_EQ(part_of(bucket.begin, bucket.end, rank, ranks).size() * ranks,
                  bucket.end - bucket.begin)
            << ranks;
    }
    EXPECT_LE(at, 4 * pad);
  }
}

TEST(ParameterLayout, OnlyWhatIsAskedForIsAllocated) {
  ParameterTable table;
  Parameter& a = table.add("a", {4}, {});
  table.allocate(1 << 16, false, false);
  EXPECT_TRUE(a.value.defined());
  EXPECT_FALSE(a.grad.defined());
  EXPECT_FALSE(a.working.defined());
  EXPECT_FALSE(table.grads().defined());
  EXPECT_THROW(table.add("late", {4}, {}), Error) << "the layout is fixed by then";
  ParameterTable twice;
  twice.add("a", {4}, {});
  EXPECT_THROW(twice.add("a", {4}, {}), Error);
}

// Six parameters of a bucket each: the last registered is bucket 0.
class AnnounceTest : public OpTest {
 protected:
  void SetUp() override {
    for (int i = 0; i < 6; ++i) p_.push_back(&table_.add(std::to_string(i), {pad}, {}, i != 4));
    table_.allocate(pad, false, true);
    ASSERT_EQ(table_.buckets().size(), 5u);               // parameter 4 is frozen
    for (float& g : table_.grads().span<float>()) g = 9;  // left over from a step before
    begin();
  }
  void begin() {
    announced_.clear();
    table_.begin_step([this](int b) { announced_.push_back(b); });
  }
  void use(std::initializer_list<int> which) {
    for (const int i : which) table_.note_use(*p_[i]);
  }
  void done(std::initializer_list<int> which) {
    for (const int i : which) {
      Parameter& p = *p_[i];
      if (p.trainable) p.grad_to_add().data<float>()[0] += 1;
      table_.note_done(p);
    }
  }
  float grad(int i, std::int64_t element) { return p_[i]->grad.data<float>()[element]; }
  using Order = std::vector<int>;

  ParameterTable table_;
  std::vector<Parameter*> p_;
  Order announced_;
};

TEST_F(AnnounceTest, AsSoonAsTheLastUseIsTakenBack) {
  table_.set_counting(true);
  use({0, 1, 2, 3, 4, 5});
  done({5});
  EXPECT_EQ(announced_, (Order{0}));
  done({4, 3});
  EXPECT_EQ(announced_, (Order{0, 1})) << "a frozen parameter has no bucket to wait for";
  done({2, 1, 0});
  EXPECT_EQ(announced_, (Order{0, 1, 2, 3, 4}));
  table_.finish_step();
  EXPECT_EQ(announced_.size(), 5u) << "announced again";
  EXPECT_EQ(grad(0, 0), 1);
  EXPECT_EQ(grad(0, 1), 0) << "the last step's gradient came through";
}

TEST_F(AnnounceTest, InOrderOfBucketsWhateverTheBackwardDoes) {
  table_.set_counting(true);
  use({0, 1, 2, 3, 5});
  done({1, 2, 0});
  EXPECT_EQ(announced_, (Order{}));
  done({5});
  EXPECT_EQ(announced_, (Order{0}));
  done({3});
  EXPECT_EQ(announced_, (Order{0, 1, 2, 3, 4}));
}

TEST_F(AnnounceTest, AParameterUsedTwiceWaitsForBoth) {
  table_.set_counting(true);
  use({0, 1, 2, 3, 5, 5, 3});
  done({3, 5});
  EXPECT_EQ(announced_, (Order{}));
  done({5});
  EXPECT_EQ(announced_, (Order{0}));
  EXPECT_EQ(grad(5, 0), 2);
  done({3, 2, 1, 0});
  EXPECT_EQ(announced_, (Order{0, 1, 2, 3, 4}));
}

TEST_F(AnnounceTest, UnusedParametersAreZeroAndAnnouncedAtTheEnd) {
  table_.set_counting(true);
  use({0, 2, 5});
  done({5, 2, 0});
  EXPECT_EQ(announced_, (Order{0})) << "bucket 1 was not used, so that nothing says it is ready";
  table_.finish_step();
  EXPECT_EQ(announced_, (Order{0, 1, 2, 3, 4}));
  for (const int i : {1, 3})
    for (const float g : p_[i]->grad.span<float>()) ASSERT_EQ(g, 0);
  EXPECT_EQ(grad(2, 0), 1);
}

TEST_F(AnnounceTest, OnlyTheLastMicroBatchCounts) {
  use({0, 1, 2, 3, 5});
  done({5, 3, 2, 1, 0});
  EXPECT_EQ(announced_, (Order{}));
  table_.set_counting(true);
  use({0, 1, 2, 3, 5});
  done({5});
  EXPECT_EQ(announced_, (Order{0}));
  EXPECT_EQ(grad(5, 0), 2) << "both micro-batches are in when the bucket leaves";
  done({3, 2, 1, 0});
  table_.finish_step();
  EXPECT_EQ(announced_, (Order{0, 1, 2, 3, 4}));

  begin();  // the next step starts over, with counting off
  use({5});
  done({5});
  EXPECT_EQ(announced_, (Order{}));
  EXPECT_EQ(grad(5, 0), 1);
  table_.finish_step();
  EXPECT_EQ(announced_.size(), 5u);
}

TEST_F(AnnounceTest, ARankWithoutWorkAnnouncesZeros) {
  table_.finish_step();
  EXPECT_EQ(announced_, (Order{0, 1, 2, 3, 4}));
  for (const float g : table_.grads().span<float>()) ASSERT_EQ(g, 0);
}

TEST_F(AnnounceTest, DoneWithoutUseIsABug) {
  table_.set_counting(true);
  EXPECT_THROW(table_.note_done(*p_[0]), Error);
}

// An unused parameter that shares its bucket with a used one is zero before the bucket leaves.
TEST(Announce, SharedBucketIsCleanWhenItLeaves) {
  ParameterTable table;
  Parameter& unused = table.add("unused", {100}, {});
  Parameter& used = table.add("used", {100}, {});
  table.allocate(pad, false, true);
  for (float& g : table.grads().span<float>()) g = 9;
  int announced = 0;
  table.begin_step([&](int) {
    ++announced;
    EXPECT_EQ(unused.grad.data<float>()[7], 0);
  });
  table.set_counting(true);
  table.note_use(used);
  used.grad_to_add();
  table.note_done(used);
  EXPECT_EQ(announced, 1);
}

// The tape's side of the counting: recompute runs a part twice, but its parameters count once.
class TapeCountingTest : public OpTest {
 protected:
  void SetUp() override {
    for (int i = 0; i < 3; ++i) {
      layers_.push_back({&table_.add(std::to_string(i) + ".weight", {256, 256}, {}),
                         &table_.add(std::to_string(i) + ".bias", {256}, {}, i != 1)});
    }
    table_.allocate(256 * 256, false, true);
    randomise(table_, 1);
  }
  std::vector<std::size_t> announced_when_done(bool recomputed) {
    std::vector<int> order;
    table_.begin_step([&](int b) { order.push_back(b); });
    table_.set_counting(true);
    Tape tape;
    Var x = make_var(to_tensor(random_values(2 * 256, 3), {2, 256}));
    std::vector<std::size_t> seen;
    const auto watch = [&](Tape& t) { t.record([&] { seen.push_back(order.size()); }); };
    for (const nn::Linear& l : layers_) {
      watch(tape);  // runs after this layer's backward
      const auto part = [this, x, l](Tape& t) {
        const Var once = nn::linear({t, table_}, x, l);
        return nn::linear({t, table_}, once, l);
      };
      x = recomputed ? recompute(tape, part) : part(tape);
    }
    EXPECT_TRUE(order.empty()) << "announced before the backward";
    x->grad = to_tensor(random_values(2 * 256, 4), {2, 256});
    tape.backward();
    table_.finish_step();
    for (std::size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], static_cast<int>(i));
    EXPECT_EQ(order.size(), table_.buckets().size());
    return seen;
  }
  ParameterTable table_;
  std::vector<nn::Linear> layers_;
};

TEST_F(TapeCountingTest, BucketsLeaveAfterEachLayerWithAndWithoutRecompute) {
  // Reverse order: 2.bias and 2.weight fill bucket 0, 1.weight bucket 1, 0.bias and 0.weight
  // bucket 2.
  ASSERT_EQ(table_.buckets().size(), 3u);
  EXPECT_EQ(announced_when_done(false), (std::vector<std::size_t>{1, 2, 3}));
  EXPECT_EQ(announced_when_done(true), (std::vector<std::size_t>{1, 2, 3}));
}

Vec initial(std::uint64_t seed, const std::string& name, Init init, const Shape& shape,
            const std::string& before = "") {
  ParameterTable table;
  if (!before.empty()) table.add(before, {33}, {Init::Kind::normal, 1.0f});
  table.add(name, shape, init);
  table.add("after", {9}, {Init::Kind::constant, 3.0f});
  table.allocate(pad, false, false);
  table.initialise(seed);
  return to_values(table.find(name)->value);
}

TEST(ParameterInit, FunctionOfSeedAndName) {
  const Init normal{Init::Kind::normal, 1.0f};
  const Vec v = initial(1, "a.weight", normal, {50, 40});
  EXPECT_EQ(initial(1, "a.weight", normal, {50, 40}, "another"), v) << "depends on its neighbours";
  EXPECT_EQ(initial(1, "a.weight", normal, {40, 50}), v);
  EXPECT_NE(initial(2, "a.weight", normal, {50, 40}), v);
  EXPECT_NE(initial(1, "b.weight", normal, {50, 40}), v);
  // Streams of similar names are not shifted copies of each other.
  const Vec w = initial(1, "a.weighu", normal, {50, 40});
  EXPECT_LT(std::abs(dot(v, w)) / 2000, 5 / std::sqrt(2000.0));
}

TEST(ParameterInit, Distributions) {
  const std::int64_t n = 200000;
  const auto moment = [](const Vec& v, int power) {
    double s = 0;
    for (const double x : v) s += std::pow(x, power);
    return s / static_cast<double>(v.size());
  };
  const Vec u = initial(3, "u", {Init::Kind::uniform, 0.3f}, {n});
  EXPECT_NEAR(moment(u, 1), 0, 5 * 0.3 / std::sqrt(3.0 * n));
  EXPECT_NEAR(moment(u, 2), 0.03, 5 * 0.03 * std::sqrt(0.8 / n));
  EXPECT_LE(*std::max_element(u.begin(), u.end()), 0.3f);
  EXPECT_GE(*std::min_element(u.begin(), u.end()), -0.3f);
  EXPECT_GT(*std::max_element(u.begin(), u.end()), 0.2999);
  EXPECT_LT(*std::min_element(u.begin(), u.end()), -0.2999);
  const Vec g = initial(3, "g", {Init::Kind::normal, 0.5f}, {n});
  EXPECT_NEAR(moment(g, 1), 0, 5 * 0.5 / std::sqrt(n));
  EXPECT_NEAR(moment(g, 2), 0.25, 5 * 0.25 * std::sqrt(2.0 / n));
  EXPECT_NEAR(moment(g, 4) / 0.0625, 3, 5 * std::sqrt(96.0 / n));
  EXPECT_EQ(initial(3, "c", {Init::Kind::constant, 2.5f}, {7}), Vec(7, 2.5));
  const Vec r = initial(3, "r", {Init::Kind::rotary, 10000.0f}, {36});
  for (int i = 0; i < 36; ++i) EXPECT_EQ(r[i], static_cast<float>(std::pow(10000.0, -i / 36.0)));
}

TEST(ParameterInit, WorkingCopyFollows) {
  ParameterTable table;
  Parameter& a = table.add("a", {64}, {Init::Kind::normal, 1.0f});
  Parameter& fixed = table.add("fixed", {64}, {Init::Kind::normal, 1.0f}, false);
  table.allocate(pad, true, false);
  table.initialise(1);
  for (const Parameter* p : {&a, &fixed})
    for (int i = 0; i < 64; ++i)
      ASSERT_EQ(p->working.data<bf16>()[i].bits, bf16(p->value.data<float>()[i]).bits) << p->name;
}

TEST(ParameterInference, KeepsOneFormatOfWhatIsBf16Only) {
  ParameterTable whole, low, wide;
  for (ParameterTable* t : {&whole, &low, &wide}) {
    t->add("matrix", {5, 7}, {Init::Kind::normal, 1.0f}).bf16_only = true;
    t->add("norm", {9}, {Init::Kind::normal, 1.0f}, false);
  }
  whole.allocate(pad, true, false);
  low.allocate_for_inference(true);
  wide.allocate_for_inference(false);
  for (ParameterTable* t : {&whole, &low, &wide}) t->initialise(1);
  EXPECT_FALSE(low.find("matrix")->value.defined());
  EXPECT_FALSE(wide.find("matrix")->working.defined());
  for (const char* name : {"matrix", "norm"}) {
    EXPECT_TRUE(same_bits(low.find(name)->working, whole.find(name)->working)) << name;
    EXPECT_TRUE(same_bits(wide.find(name)->value, whole.find(name)->value)) << name;
  }
  EXPECT_TRUE(same_bits(low.find("norm")->value, whole.find("norm")->value));
  EXPECT_EQ(low.inference_bytes(true), 35u * 2 + 9 * 6);
  EXPECT_EQ(low.inference_bytes(false), 44u * 4);
}

TEST(ParameterBase, LiesOutsideTheFlatTensors) {
  ParameterTable table;
  Parameter& low = table.add("low", {5, 7}, {Init::Kind::normal, 1.0f}, false);
  Parameter& wide = table.add("wide", {9}, {Init::Kind::normal, 1.0f}, false);
  Parameter& fixed = table.add("fixed", {9}, {Init::Kind::normal, 1.0f}, false);
  Parameter& adapter = table.add("adapter", {3}, {Init::Kind::normal, 1.0f});
  low.role = wide.role = Parameter::Role::base;
  low.bf16_only = true;
  adapter.role = Parameter::Role::adapter;
  table.allocate(pad, true, true);
  table.initialise(1);
  EXPECT_EQ(table.fixed().numel(), 16) << "one parameter of 9 elements, aligned";
  EXPECT_FALSE(low.value.defined());
  EXPECT_EQ(table.base_bytes(true), 35u * 2 + 9 * 6);
  EXPECT_EQ(table.base_bytes(false), 44u * 4);
  // The refresh takes masters to copies; of the base there may be no masters.
  const Vec before = to_values(low.working);
  fixed.value.data<float>()[0] = 3;
  table.refresh_working();
  EXPECT_EQ(to_values(low.working), before);
  EXPECT_EQ(to_values(fixed.working)[0], 3);
  EXPECT_TRUE(adapter.grad.defined());
}

TEST(ParameterInference, SetOverwritesAPieceOfBothFormats) {
  ParameterTable table;
  Parameter& p = table.add("a", {2, 3}, {Init::Kind::constant, 1.0f});
  table.allocate_for_inference(true);
  table.initialise(1);
  p.set(2, std::vector<float>{3.00390625f, 4});
  EXPECT_EQ(to_values(p.value), (Vec{1, 1, 3.00390625, 4, 1, 1}));
  EXPECT_EQ(to_values(p.working), (Vec{1, 1, 3, 4, 1, 1}));
}

// Five blocks between a stem and a head, a bucket each, which three ranks share out evenly.
class ShardedTable : public OpTest {
 protected:
  static constexpr int blocks = 5, width = 320;

  static std::vector<nn::Linear> add_layers(ParameterTable& table) {
    std::vector<nn::Linear> layers;
    const auto add = [&](const std::string& name) {
      nn::Linear l;
      l.weight = &table.add(name + ".weight", {width, width}, {Init::Kind::normal, 0.05f});
      l.bias = &table.add(name + ".bias", {width}, {Init::Kind::normal, 0.05f});
      l.weight->bf16_only = true;
      layers.push_back(l);
    };
    add("stem.0");  // a number makes no block
    for (int i = 0; i < blocks; ++i) add("blocks." + std::to_string(i + 8) + ".fc");
    add("head");
    return layers;
  }
  static Sharding sharding(int rank, int ranks) { return {rank, ranks, {"blocks."}}; }

  // Forward and backward, each block recomputed or not; the loss is a . output.
  static void run(ParameterTable& table, const std::vector<nn::Linear>& layers, bool recomputed) {
    Tape tape;
    Var x = make_var(to_tensor(random_values(3 * width, 3), {3, width}));
    for (const nn::Linear& l : layers) {
      const auto part = [&table, x, l](Tape& t) {
        return nn::silu({t, table}, nn::linear({t, table}, x, l));
      };
      x = recomputed ? recompute(tape, part) : part(tape);
    }
    x->grad = to_tensor(random_values(3 * width, 4), {3, width});
    tape.backward();
  }
};

TEST_F(ShardedTable, BlocksShareTwoSlotsAndAllElseIsWhole) {
  for (const bool bf16_model : {false, true}) {
    ParameterTable table;
    const auto layers = add_layers(table);
    table.allocate(1, bf16_model, true, sharding(1, 3));
    ASSERT_EQ(table.sharded_buckets(), blocks);
    for (int i = 0; i < blocks; ++i) {
      const nn::Linear& l = layers[static_cast<std::size_t>(i + 1)];
      EXPECT_TRUE(l.weight->sharded);
      EXPECT_EQ(l.bias->sharded, !bf16_model) << "a bf16 model reads it in f32: whole";
      EXPECT_EQ(l.weight->bucket, blocks - 1 - i) << "the last block comes first";
      const Tensor& held = bf16_model ? l.weight->working : l.weight->value;
      EXPECT_EQ((bf16_model ? l.weight->value : l.weight->working).defined(), false);
      const nn::Linear& other = layers[static_cast<std::size_t>(i + 1 < 3 ? i + 3 : i - 1)];
      EXPECT_EQ(held.raw(), (bf16_model ? other.weight->working : other.weight->value).raw())
          << "every second block has the same place";
      EXPECT_EQ(l.weight->grad.raw(), other.weight->grad.raw());
      if (!bf16_model) {
        EXPECT_EQ(l.bias->bucket, l.weight->bucket);
      }
    }
    for (const nn::Linear* l : {&layers.front(), &layers.back()})
      for (const Parameter* p : {l->weight, l->bias}) {
        EXPECT_FALSE(p->sharded);
        EXPECT_TRUE(p->value.defined() && p->grad.defined());
        EXPECT_GE(p->bucket, blocks);
      }
    EXPECT_EQ(table.gradient_bytes(), table.grads().bytes() + 4u * (2 * pad + blocks * (pad / 3)));
    EXPECT_EQ(table.weight_bytes(), table.values().bytes() +
                                        (bf16_model ? table.working().bytes() : 0) +
                                        (bf16_model ? 2u : 4u) * 2 * pad);
  }
  ParameterTable joined;
  add_layers(joined);
  joined.allocate(2 * width * width, false, true, sharding(0, 2));
  EXPECT_EQ(joined.sharded_buckets(), 3) << "whole blocks until a bucket is full";
}

TEST_F(ShardedTable, EachRankDrawsAndKeepsItsPart) {
  ParameterTable whole;
  add_layers(whole);
  whole.allocate(1, false, true);
  whole.initialise(5);
  for (const auto& p : whole.all())  // two pieces, as files are read
    if (p->name == "blocks.9.fc.weight")
      for (const std::int64_t first : {0, 300})
        p->set(first, std::vector<float>(first == 0 ? 300 : width * width - 300,
                                         1.0f + static_cast<float>(first)));
  std::map<std::string, std::vector<float>> joined;
  for (int rank = 0; rank < 3; ++rank) {
    ParameterTable part;
    add_layers(part);
    part.allocate(1, false, true, sharding(rank, 3));
    part.initialise(5);
    Parameter& p = *part.find("blocks.9.fc.weight");
    p.set(0, std::vector<float>(300, 1.0f));
    p.set(300, std::vector<float>(width * width - 300, 301.0f));
    for (const auto& q : part.all()) {
      auto& values = joined[q->name];
      if (!q->sharded) {
        EXPECT_TRUE(same_bits(q->value, whole.find(q->name)->value)) << q->name;
      } else if (q->owned.size() > 0) {
        EXPECT_EQ(q->owned.begin, std::ssize(values)) << q->name << ": parts one after the other";
        const std::vector<float> mine = floats(q->shard);
        values.insert(values.end(), mine.begin(), mine.end());
      }
    }
  }
  for (const auto& p : whole.all())
    if (p->name.starts_with("blocks.")) {
      EXPECT_EQ(joined[p->name], floats(p->value)) << p->name;
    }
}

// One rank that owns everything plays the communicator: weights are copied to the slot when a
// bucket is entered, and what the other slot and the gradients' padding hold is rubbish.
TEST_F(ShardedTable, IsEnteredForwardAndBackwardAndComputesTheSame) {
  ParameterTable whole;
  const auto of_whole = add_layers(whole);
  whole.allocate(1, false, true);
  whole.initialise(5);
  whole.begin_step([](int) {});
  run(whole, of_whole, false);

  using Entries = std::vector<std::pair<int, int>>;
  const Entries there = {{-1, 4}, {4, 3}, {3, 2}, {2, 1}, {1, 0}},
                back = {{0, 1}, {1, 2}, {2, 3}, {3, 4}};
  for (const bool recomputed : {false, true}) {
    ParameterTable table;
    const auto layers = add_layers(table);
    table.allocate(1, false, true, sharding(0, 1));
    table.initialise(5);
    Entries entries;
    table.set_entry([&](int from, int to) {
      entries.emplace_back(from, to);
      Tensor place = table.values_of(to);
      ops::convert(table.shard(to), place);
      if (blocks > 1)
        std::ranges::fill(table.values_of(to + 1 < blocks ? to + 1 : to - 1).span<float>(), 1e9f);
    });
    std::vector<int> ready;
    bool walking = false;
    const auto on_ready = [&](int b) {
      ready.push_back(b);
      if (b >= blocks || walking) return;
      for (const auto& p : table.all())
        if (p->bucket == b) {
          EXPECT_TRUE(same_bits(p->grad, whole.find(p->name)->grad)) << p->name;
        }
      const auto written = [](const Tensor& t) {
        return std::ranges::count_if(t.span<float>(), [](float g) { return g != 0; });
      };
      std::int64_t of_parameters = 0;
      for (const auto& p : table.all())
        if (p->bucket == b) of_parameters += written(p->grad);
      EXPECT_EQ(written(table.gradient_of(b)), of_parameters) << "padding is not zero";
      std::ranges::fill(table.gradient_of(b).span<float>(), 1e9f);
    };
    table.begin_step(on_ready);
    for (const bool last : {false, true}) {
      entries.clear();
      ready.clear();
      table.begin_micro_batch();
      const CountingScope counted(table, last);
      run(table, layers, recomputed);
      Entries both = there;
      both.insert(both.end(), back.begin(), back.end());
      EXPECT_EQ(entries, both);
      std::vector<int> wanted(last ? table.buckets().size() : blocks);
      std::iota(wanted.begin(), wanted.end(), 0);
      EXPECT_EQ(ready, wanted) << "blocks in every micro-batch, the rest behind them in the last";
    }
    ready.clear();
    table.finish_step();
    EXPECT_TRUE(ready.empty());

    // A forward alone, and a micro-batch without clips.
    entries.clear();
    {
      table.begin_micro_batch();
      Tape tape(Tape::Mode::infer);
      Var x = make_var(to_tensor(random_values(3 * width, 3), {3, width}));
      for (const nn::Linear& l : layers) x = nn::linear({tape, table}, x, l);
    }
    EXPECT_EQ(entries, there);
    entries.clear();
    ready.clear();
    walking = true;
    table.walk(true, true);
    EXPECT_EQ(entries.size(), there.size() + back.size());
    EXPECT_EQ(ready, (std::vector<int>{0, 1, 2, 3, 4}));
  }
}

}  // namespace
}  // namespace weft::test
