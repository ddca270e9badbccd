// Layers of the text encoder placed by memory: even where there is room, shifted where there is
// not, and what is missing.
#include "models/t5/placement.h"
#include "models/t5/options.h"

#include <gtest/gtest.h>

#include <numeric>

#include "models/t5/t5.h"

namespace weft {
namespace {

constexpr std::size_t gib = std::size_t{1} << 30;

// Layers on each rank; all of them once, in order, and nobody above its memory.
std::vector<std::int64_t> layers(const T5Deck& config, const std::vector<std::size_t>& memory,
                                 std::size_t work) {
  const T5Placement p = place_t5(config, memory, work);
  std::vector<std::int64_t> on(memory.size());
  std::int64_t at = 0;
  for (const T5Part& part : p.parts) {
    EXPECT_EQ(part.first, at);
    EXPECT_GT(part.last, part.first);
    const auto rank = static_cast<std::size_t>(part.rank);
    EXPECT_EQ(on[rank], 0) << "one part a rank";
    EXPECT_LE(part.weights + work, memory[rank]);
    // The figure is that of the real parameters, but for one final norm that only the last part
    // has.
    T5Encoder real(config, part.first, part.last);
    const std::size_t bytes = real.params().inference_bytes(config.dtype == "bf16");
    EXPECT_GE(part.weights, bytes);
    EXPECT_LE(part.weights - bytes, 6u * static_cast<std::size_t>(config.d_model));
    on[rank] = part.last - part.first;
    at = part.last;
  }
  EXPECT_EQ(at, p.parts.empty() ? 0 : config.num_layers);
  return on;
}

// As much memory as so many layers take, with the embedding where `embedding`.
std::size_t room(const T5Deck& config, std::int64_t n, bool embedding, std::size_t work) {
  const T5Encoder::Sizes s = T5Encoder::sizes(config);
  return s.every_part + work + static_cast<std::size_t>(n) * s.layer +
         (embedding ? s.embedding : 0);
}

using Layers = std::vector<std::int64_t>;

TEST(T5Placement, XxlOnFourDevicesOf16GB) {
  T5Deck xxl;
  // What a device of 16 GB has free: a CUDA context and a 16th are gone.
  const std::vector<std::size_t> devices(4, 14 * gib);
  TextBatch batch;
  batch.longest = xxl.max_length;
  batch.tokens = xxl.micro_batch * xxl.max_length;
  for (const char* dtype : {"bf16", "f32"}) {
    xxl.dtype = dtype;
    const std::size_t work = T5Encoder(xxl, 0, 24).plan(batch.tokens, batch.longest);
    EXPECT_LT(work, gib);
    EXPECT_EQ(layers(xxl, devices, work), (Layers{6, 6, 6, 6})) << dtype;
  }
  // In bf16 one device of 16 GB takes it whole.
  xxl.dtype = "bf16";
  EXPECT_EQ(layers(xxl, {14 * gib}, gib), (Layers{24}));
}

TEST(T5Placement, EvenWhereThereIsRoom) {
  T5Deck t5;
  const std::size_t much = 100 * gib;
  EXPECT_EQ(layers(t5, {much}, 0), (Layers{24}));
  EXPECT_EQ(layers(t5, {much, much, much}, 0), (Layers{8, 8, 8}));
  EXPECT_EQ(layers(t5, {much, much, much, much, much}, 0), (Layers{4, 5, 5, 5, 5}));
  t5.num_layers = 2;
  EXPECT_EQ(layers(t5, {much, much, much}, 0), (Layers{1, 0, 1})) << "one rank has nothing to do";
}

TEST(T5Placement, ShiftsLayersFromWhereMemoryIsShort) {
  const T5Deck t5;
  const std::size_t work = gib;
  const auto fits = [&](std::int64_t n) { return room(t5, n, false, work); };
  EXPECT_EQ(layers(t5, {room(t5, 2, true, work), fits(30), fits(30)}, work), (Layers{2, 11, 11}));
  EXPECT_EQ(layers(t5, {fits(30), fits(0), fits(30)}, work), (Layers{12, 0, 12}));
  EXPECT_EQ(layers(t5, {fits(30), fits(3), fits(30), fits(5)}, work), (Layers{8, 3, 8, 5}));
  // Exactly enough, and no room for the embedding on the first rank: another part goes first.
  EXPECT_EQ(layers(t5, {fits(1), room(t5, 23, true, work)}, work), (Layers{1, 23}));
  EXPECT_EQ(place_t5(t5, std::vector{fits(1), room(t5, 23, true, work)}, work).parts[0].rank, 1);
}

TEST(T5Placement, SaysHowMuchIsMissing) {
  const T5Deck t5;
  const T5Encoder::Sizes s = T5Encoder::sizes(t5);
  const auto lacks = [&](const std::vector<std::size_t>& memory) {
    const T5Placement p = place_t5(t5, memory, gib);
    EXPECT_TRUE(p.parts.empty());
    return p.missing;
  };
  EXPECT_EQ(lacks({room(t5, 10, true, gib), room(t5, 12, false, gib)}), 2 * s.layer);
  EXPECT_EQ(lacks({room(t5, 0, true, gib)}), 24 * s.layer);
  // Many ranks, none of which takes embedding and a layer: its own lack counts.
  EXPECT_EQ(lacks(std::vector<std::size_t>(40, room(t5, 1, false, gib))), s.embedding);
}

TEST(CaptionBatches, AreSortedByLengthAndHoldEachCaptionOnce) {
  const std::vector<TextBatch> b = batch_captions({3, 9, 1, 9, 4}, 2);
  ASSERT_EQ(b.size(), 3u);
  EXPECT_EQ(b[0].texts, (std::vector<std::size_t>{1, 3}));
  EXPECT_EQ(b[0].tokens, 18);
  EXPECT_EQ(b[1].texts, (std::vector<std::size_t>{4, 0}));
  EXPECT_EQ(b[1].longest, 4);
  EXPECT_EQ(b[2].texts, (std::vector<std::size_t>{2}));
  EXPECT_EQ(b[2].tokens, 1);
}

}  // namespace
}  // namespace weft
