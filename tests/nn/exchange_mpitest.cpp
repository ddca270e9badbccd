// Token grids that change hands between ranks: every token arrives in its place, in both
// directions.
#include "nn/exchange.h"

#include <mpi.h>

#include <cstring>

#include "fixture.h"

namespace weft::test {
namespace {

struct Grid {
  std::int64_t B, T, S, C;
};

// What tells each element of the grid from all others.
double mark(const Grid& g, std::int64_t b, std::int64_t t, std::int64_t s, std::int64_t c) {
  return static_cast<double>(((b * g.T + t) * g.S + s) * g.C + c);
}

// The part [t0, t1) x [s0, s1) of the grid's marks, times `factor`.
Tensor marks(const Grid& g, Part t, Part s, double factor = 1) {
  Vec v;
  for (std::int64_t b = 0; b < g.B; ++b)
    for (std::int64_t i = t.begin; i < t.end; ++i)
      for (std::int64_t j = s.begin; j < s.end; ++j)
        for (std::int64_t c = 0; c < g.C; ++c) v.push_back(factor * mark(g, b, i, j, c));
  return to_tensor(v, {g.B, t.size(), s.size(), g.C});
}

class Exchange : public OpTest {
 protected:
  std::unique_ptr<Communicator> world_ = make_mpi_communicator(MPI_COMM_WORLD);
  nn::SequenceGroup group_{world_.get()};
  ParameterTable parameters_;
  const Grid grids_[6] = {{1, 5, 9, 3},  {2, 5, 9, 3}, {1, 1, 4, 8},
                          {3, 2, 31, 1}, {1, 8, 8, 4}, {2, 1, 405, 2}};
};

TEST_F(Exchange, BringsEveryTokenToItsPlaceAndEveryGradientBack) {
  for (const Grid& g : grids_) {
    const Part all_t{0, g.T}, all_s{0, g.S};
    const Part t = nn::share_of(g.T, group_.rank, group_.size);
    const Part s = nn::share_of(g.S, group_.rank, group_.size);
    const std::size_t before = arena_->used();
    {
      Tape tape;
      const nn::Context c{tape, parameters_};
      const Var by_frames = make_var(marks(g, t, all_s));
      const Var by_tokens = nn::exchange(c, by_frames, group_, nn::Cut::tokens, g.T);
      EXPECT_FALSE(by_frames->value.defined()) << "memory that nothing needs";
      EXPECT_EQ(by_tokens->value.shape(), (Shape{g.B, g.T, s.size(), g.C}));
      EXPECT_TRUE(same_bits(by_tokens->value, marks(g, all_t, s)));
      const Var again = nn::exchange(c, by_tokens, group_, nn::Cut::frames, g.S);
      EXPECT_EQ(again->value.shape(), (Shape{g.B, t.size(), g.S, g.C}));
      EXPECT_TRUE(same_bits(again->value, marks(g, t, all_s)));
      again->grad = marks(g, t, all_s, -2);
      tape.backward();
      EXPECT_EQ(by_frames->grad.shape(), (Shape{g.B, t.size(), g.S, g.C}));
      EXPECT_TRUE(same_bits(by_frames->grad, marks(g, t, all_s, -2)));
    }
    EXPECT_EQ(arena_->used(), before);
  }
}

// Each rank gets the whole grid, or two share it by tokens: backward sums what the ranks return.
TEST_F(Exchange, CopiesWhereBlocksOverlapAndSumsTheGradients) {
  for (const Grid& g : grids_)
    for (const int sharers : {1, 2}) {
      if (group_.size % sharers != 0) continue;
      const nn::Blocks from = nn::blocks_of(nn::Cut::frames, g.T, g.S, group_.size);
      nn::Blocks to;
      for (int r = 0; r < group_.size; ++r)
        to.push_back({{0, g.T}, nn::share_of(g.S, r % sharers, sharers)});
      const Part t = from[group_.rank].frames, s = to[group_.rank].tokens;
      const Part all_t{0, g.T}, all_s{0, g.S};
      const std::size_t before = arena_->used();
      {
        Tape tape;
        const Var own = make_var(marks(g, t, all_s));
        const Var got = nn::exchange({tape, parameters_}, own, group_, from, to);
        EXPECT_TRUE(same_bits(got->value, marks(g, all_t, s)));
        got->grad = marks(g, all_t, s, group_.rank / sharers + 1);
        tape.backward();
        const int copies = group_.size / sharers;
        EXPECT_TRUE(same_bits(own->grad, marks(g, t, all_s, copies * (copies + 1) / 2)));
      }
      EXPECT_EQ(arena_->used(), before);
    }
}

TEST_F(Exchange, GathersAllTokensAndTakesBackItsOwn) {
  for (const Grid& g : grids_) {
    const Part all_t{0, g.T}, all_s{0, g.S};
    const Part s = nn::share_of(g.S, group_.rank, group_.size);
    Tape tape;
    const Var own = make_var(marks(g, all_t, s));
    const Var all = nn::gather_tokens({tape, parameters_}, own, group_, g.S);
    EXPECT_TRUE(same_bits(all->value, marks(g, all_t, all_s)));
    all->grad = marks(g, all_t, all_s, 3);
    tape.backward();
    EXPECT_TRUE(same_bits(own->grad, marks(g, all_t, s, 3)));
  }
}

TEST(Share, TilesInOrderAndDiffersByOneAtMost) {
  for (const std::int64_t n : {0, 1, 2, 5, 15, 405, 1590})
    for (const int ranks : {1, 2, 3, 8, 16}) {
      std::int64_t at = 0;
      for (int r = 0; r < ranks; ++r) {
        const Part p = nn::share_of(n, r, ranks);
        EXPECT_EQ(p.begin, at);
        EXPECT_GE(p.size(), n / ranks);
        EXPECT_LE(p.size(), n / ranks + 1);
        at = p.end;
      }
      EXPECT_EQ(at, n);
    }
}

}  // namespace
}  // namespace weft::test
