// The arena and the tensors that live in it.
#include <gtest/gtest.h>

#include <vector>

#include "core/error.h"
#include "tensor/tensor.h"

namespace weft {
namespace {

constexpr std::size_t unit = Arena::alignment;

std::byte* take(Arena& a, std::size_t units) {
  return static_cast<std::byte*>(a.allocate(units * unit));
}

TEST(Arena, TakesTheSmallestHoleThatFitsAndTheLowestAmongEquals) {
  const auto arena = Arena::reserve(64 * unit);
  std::byte* base = take(*arena, 4);
  std::byte* wall1 = take(*arena, 1);
  std::byte* hole2 = take(*arena, 2);
  std::byte* wall2 = take(*arena, 1);
  std::byte* hole2b = take(*arena, 2);
  take(*arena, 1);
  arena->free(base, 4 * unit);
  arena->free(hole2, 2 * unit);
  arena->free(hole2b, 2 * unit);
  EXPECT_EQ(take(*arena, 2), hole2) << "best fit, lower of two equal holes";
  EXPECT_EQ(take(*arena, 2), hole2b);
  EXPECT_EQ(take(*arena, 3), base);
  EXPECT_EQ(take(*arena, 1), base + 3 * unit) << "the rest of a split hole";
  EXPECT_NE(wall1, wall2);
}

TEST(Arena, FreedNeighboursGrowTogether) {
  const auto arena = Arena::reserve(6 * unit);
  std::vector<std::byte*> p;
  for (int i = 0; i < 6; ++i) p.push_back(take(*arena, 1));
  // Every order of joining: left neighbour, right neighbour, both.
  for (const int i : {1, 2, 4, 3, 0, 5}) arena->free(p[i], unit);
  EXPECT_EQ(arena->used(), 0u);
  EXPECT_EQ(take(*arena, 6), p[0]);
}

TEST(Arena, CountsUseAndPeak) {
  const auto arena = Arena::reserve(100 * unit);
  void* a = arena->allocate(1);
  EXPECT_EQ(arena->used(), unit) << "rounded up to the alignment";
  std::byte* b = take(*arena, 9);
  arena->free(b, 9 * unit);
  EXPECT_EQ(arena->used(), unit);
  EXPECT_EQ(arena->peak(), 10 * unit);
  arena->reset_peak();
  EXPECT_EQ(arena->peak(), unit);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % unit, 0u);
  EXPECT_NE(arena->allocate(0), arena->allocate(0)) << "empty blocks have places of their own";
}

TEST(Arena, FullIsAUsersErrorAndLosesNothing) {
  const auto arena = Arena::reserve(4 * unit);
  std::byte* p = take(*arena, 3);
  try {
    take(*arena, 2);
    FAIL() << "more than there is";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Exit::usage);
    EXPECT_NE(e.hint().find("memory.arena_gib"), std::string::npos);
  }
  EXPECT_EQ(arena->used(), 3 * unit);
  arena->free(p, 3 * unit);
  EXPECT_EQ(take(*arena, 4), p);
}

TEST(Arena, PlanningFollowsSizesWithoutMemory) {
  const auto plan = Arena::planning();
  const auto real = Arena::reserve(1 << 20);
  EXPECT_TRUE(plan->is_planning());
  for (Arena* arena : {plan.get(), real.get()}) {
    void* a = arena->allocate(1000);
    void* b = arena->allocate(5000);
    arena->free(a, 1000);
    arena->allocate(70000);
    arena->free(b, 5000);
  }
  EXPECT_EQ(plan->peak(), real->peak());
  EXPECT_EQ(plan->used(), real->used());
  EXPECT_NE(plan->allocate(std::size_t{1} << 40), nullptr) << "a terabyte costs nothing to plan";
}

TEST(Arena, PlansTensorsOfMoreElementsThan32BitsCount) {
  const auto plan = Arena::planning();
  const ArenaScope scope(*plan);
  const std::int64_t rows = (std::int64_t{1} << 31) + 3;
  const Tensor t = Tensor::empty({2, rows, 5}, DType::f32);
  EXPECT_EQ(t.numel(), 10 * rows);
  EXPECT_EQ(t.bytes(), std::size_t{40} * static_cast<std::size_t>(rows));
  EXPECT_GE(plan->peak(), t.bytes());
  const Tensor flat = t.view({t.numel()});
  const Tensor last = flat.slice(t.numel() - 1, t.numel());
  EXPECT_EQ(static_cast<const char*>(last.raw()) - static_cast<const char*>(t.raw()),
            static_cast<std::ptrdiff_t>(t.bytes()) - 4);
}

TEST(Arena, ScopesNest) {
  EXPECT_FALSE(Arena::has_current());
  const auto a = Arena::reserve(unit), b = Arena::reserve(unit);
  ArenaScope outer(*a);
  {
    ArenaScope inner(*b);
    EXPECT_EQ(&Arena::current(), b.get());
  }
  EXPECT_EQ(&Arena::current(), a.get());
}

TEST(Tensor, ReturnsItsMemoryWithTheLastHandle) {
  const auto arena = Arena::reserve(1 << 20);
  ArenaScope scope(*arena);
  Tensor t = Tensor::empty({2, 3}, DType::f32);
  Tensor copy = t;
  Tensor part = t.slice(1, 2).view({3, 1});
  t.release();
  copy.release();
  EXPECT_FALSE(t.defined());
  EXPECT_EQ(arena->used(), unit) << "a slice keeps the whole alive";
  part.release();
  EXPECT_EQ(arena->used(), 0u);
}

TEST(Tensor, ShapesSlicesAndViews) {
  Tensor t = Tensor::persistent({4, 3, 2}, DType::i32);
  EXPECT_EQ(t.numel(), 24);
  EXPECT_EQ(t.bytes(), 96u);
  EXPECT_EQ(t.dim(-1), 2);
  EXPECT_EQ(t.shape().str(), "[4, 3, 2]");
  for (const std::int32_t v : t.span<std::int32_t>()) EXPECT_EQ(v, 0);
  for (int i = 0; i < 24; ++i) t.data<std::int32_t>()[i] = i;
  const Tensor s = t.slice(1, 3);
  EXPECT_EQ(s.shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(s.data<std::int32_t>()[0], 6);
  EXPECT_EQ(s.view({12}).data<std::int32_t>()[11], 17);
  EXPECT_EQ(t.slice(2, 2).numel(), 0);
  EXPECT_EQ((Shape{}).numel(), 1) << "a scalar";
}

TEST(Tensor, BrokenPromisesAreBugs) {
  const auto is_bug = [](auto&& f) {
    try {
      f();
    } catch (const Error& e) {
      return e.code() == Exit::internal;
    }
    return false;
  };
  Tensor t = Tensor::persistent({4, 2}, DType::f32);
  EXPECT_TRUE(is_bug([&] { t.data<std::int64_t>(); }));
  EXPECT_TRUE(is_bug([&] { t.view({3, 2}); }));
  EXPECT_TRUE(is_bug([&] { t.slice(3, 5); }));
  EXPECT_TRUE(is_bug([&] { Shape({1, 1, 1, 1, 1, 1, 1}); }));
  EXPECT_TRUE(is_bug([&] { Tensor::empty({1}, DType::f32); })) << "no arena is current";
}

TEST(Tensor, BorrowedMemoryStaysItsOwners) {
  std::vector<float> owner = {1, 2, 3};
  {
    Tensor t = Tensor::borrow(owner.data(), {3}, DType::f32);
    t.data<float>()[1] = 5;
  }
  EXPECT_EQ(owner[1], 5);
}

// A dry run in an arena that is too small goes on to the end: it tells what all of it needs, and
// that it does not fit.
TEST(Arena, PlanningTellsWhatDoesNotFit) {
  const auto endless = Arena::planning(DeviceKind::cpu);
  const auto small = Arena::planning(DeviceKind::cpu, 4 * Arena::alignment);
  for (Arena* arena : {endless.get(), small.get()}) {
    void* a = arena->allocate(2 * Arena::alignment);
    void* b = arena->allocate(Arena::alignment);
    EXPECT_TRUE(arena->need().fits);
    // Three blocks are free, but apart.
    arena->free(a, 2 * Arena::alignment);
    void* c = arena->allocate(3 * Arena::alignment);
    EXPECT_EQ(arena->need().fits, arena == endless.get());
    EXPECT_EQ(arena->need().bytes, 4 * Arena::alignment);
    arena->free(b, Arena::alignment);
    arena->free(c, 3 * Arena::alignment);
    EXPECT_EQ(arena->used(), 0u);
    arena->allocate(5 * Arena::alignment);
    EXPECT_EQ(arena->need().bytes, 5 * Arena::alignment);
  }
}

}  // namespace
}  // namespace weft
