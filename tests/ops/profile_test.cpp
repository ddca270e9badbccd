#include <thread>

#include "ops/attention.h"
#include "ops/conv.h"
#include "ops/dispatch.h"
#include "ops/matmul.h"
#include "ops/pointwise.h"
#include "reference.h"

namespace weft::test {
namespace {

class ProfileTest : public OpTest {
 protected:
  // What f's operations add to a profile, which ends with it.
  template <class F>
  ops::Profile profile_of(F&& f) {
    ops::Profile profile;
    ops::set_profile(&profile);
    f();
    ops::set_profile(nullptr);
    return profile;
  }
};

TEST_F(ProfileTest, AnOperationThatAnotherCallsIsPartOfIt) {
  const Tensor x = poisoned({2, 1, 3, 4, 16}), w = poisoned({8, 16, 1, 1, 1});
  Tensor y = poisoned({2, 1, 3, 4, 8});
  const ops::Profile profile = profile_of([&] {
    for (int i = 0; i < 3; ++i) ops::conv_forward(x, w, Tensor(), Tensor(), ops::Conv(), y);
  });
  ASSERT_EQ(profile.size(), 1u);  // of 1x1, it calls linear_forward
  const ops::OpTime& time = profile.begin()->second;
  EXPECT_EQ(time.name, "conv_forward");
  EXPECT_EQ(time.calls, 3);
  EXPECT_GT(time.seconds, 0);
  EXPECT_EQ(time.flops, 3 * 2.0 * 24 * 8 * 16);
  EXPECT_EQ(time.bytes, 3 * 4.0 * (24 * 16 + 8 * 16 + 24 * 8));
}

TEST_F(ProfileTest, AttentionCountsItsProducts) {
  const Tensor qkv = to_tensor(random_values(2 * 3 * 5 * 3 * 2 * 16, 1), {2, 3, 5, 3, 2, 16});
  Tensor out = poisoned({2, 3, 5, 32}), lse = poisoned({6, 2, 5}), none;
  const ops::Profile profile = profile_of([&] {
    ops::self_attention_forward(qkv, Tensor(), Tensor(), Tensor(), ops::Axis::space, out, lse,
                                none);
  });
  ASSERT_EQ(profile.size(), 1u);
  EXPECT_EQ(profile.begin()->second.flops, 4.0 * 6 * 2 * 5 * 5 * 16);
}

// Their lengths are not in the shapes: counted are captions of the mean length.
TEST_F(ProfileTest, PackedCaptionsCountTheirMeanLength) {
  const Tensor qkv = to_tensor(random_values(3 * 7 * 2 * 16, 1), {3, 7, 2, 16});
  const Tensor bias = poisoned({32, 2}), offsets = to_tensor({0, 3, 7}, {3}, DType::i32);
  Tensor out = poisoned({7, 32});
  const ops::Profile profile =
      profile_of([&] { ops::relative_attention_forward(qkv, bias, offsets, 4, out); });
  ASSERT_EQ(profile.size(), 1u);
  EXPECT_EQ(profile.begin()->second.flops, 4.0 * 32 * 7 * 3.5);
}

TEST_F(ProfileTest, RowsDifferByShapesAndNamesByType) {
  const Tensor wide = poisoned({7}), narrow = poisoned({3}, DType::bf16);
  Tensor y = poisoned({7}), z = poisoned({3}, DType::bf16), u = poisoned({3});
  const ops::Profile profile = profile_of([&] {
    ops::convert(wide, y);
    ops::convert(wide, y);
    ops::convert(narrow, z);
    ops::convert(narrow, u);
    ops::add_inplace(wide, y);  // reads and writes y
  });
  std::map<std::string, std::int64_t> calls;
  for (const auto& [key, time] : profile) calls[time.name] += time.calls;
  EXPECT_EQ(calls, (std::map<std::string, std::int64_t>{
                       {"add_inplace", 1}, {"convert", 2}, {"convert bf16", 2}}));
  EXPECT_EQ(profile.at("add_inplace [7] [7]").bytes, 3 * 7 * 4);
  EXPECT_EQ(profile.at("convert [7] [7]").bytes, 2 * 2 * 7 * 4);
}

TEST_F(ProfileTest, DryRunsOtherThreadsAndWhatFollowsAreNotInIt) {
  const Tensor x = poisoned({7});
  Tensor y = poisoned({7});
  const ops::Profile profile = profile_of([&] {
    const auto planning = Arena::planning();
    const ArenaScope scope(*planning);
    ops::convert(x, y);
    std::thread([&] { ops::convert(x, y); }).join();
  });
  ops::convert(x, y);
  EXPECT_TRUE(profile.empty());
}

TEST_F(ProfileTest, AnOperationThatThrowsEnds) {
  const Tensor x = poisoned({1, 1, 3, 4, 16}), w = poisoned({8, 16, 1, 1, 1});
  Tensor y = poisoned({7}), wrong = poisoned({1, 1, 3, 5, 8});
  const ops::Profile profile = profile_of([&] {
    EXPECT_ANY_THROW(ops::conv_forward(x, w, Tensor(), Tensor(), ops::Conv(), wrong));
    ops::convert(y, y);
  });
  EXPECT_EQ(profile.count("convert [7] [7]"), 1u);
}

}  // namespace
}  // namespace weft::test
