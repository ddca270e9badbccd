// Validation over 1, 2 and 3 ranks: the same bits on each of them.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>

#include "parallel/communicator.h"
#include "train/validation.h"

namespace weft {
namespace {

// Figures whose sums depend on their order.
double figure(std::size_t item, std::size_t k) {
  return std::pow(10.0, static_cast<double>(item % 17) - 8) / static_cast<double>(3 + item + k);
}

class Made : public ValidationSet {
 public:
  explicit Made(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      items_.push_back({i % 3 == 0 ? "a" : "b", static_cast<double>(1 + i % 5)});
  }
  std::size_t figures() const override { return 2; }
  void measure(std::size_t item, std::span<double> figures) override {
    ++measured;
    for (std::size_t k = 0; k < 2; ++k) figures[k] = figure(item, k);
  }
  std::size_t plan(std::size_t) override { return 0; }
  ValidationScore score(std::span<const double> sums, std::int64_t items) const override {
    return {sums[0] / static_cast<double>(items), {{"second", sums[1]}}};
  }
  int measured = 0;
};

TEST(Validation, SumsInTheOrderOfTheItemsOnAnyNumberOfRanks) {
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD);
  constexpr std::size_t count = 31;
  double first = 0, second = 0, of_a = 0;
  for (std::size_t i = 0; i < count; ++i) {
    first += figure(i, 0);
    second += figure(i, 1);
    if (i % 3 == 0) of_a += figure(i, 0);
  }
  Made set(count);
  Validation validation(set, *comm, {comm->rank(), comm->size(), 0});
  for (int time = 0; time < 2; ++time) {
    const ValidationResult r = validation.run();
    EXPECT_EQ(r.items, 31);
    EXPECT_EQ(r.total.loss, first / 31);
    EXPECT_EQ(r.total.terms[0].second, second);
    ASSERT_EQ(r.buckets.size(), 2u);
    EXPECT_EQ(r.buckets[0].first, "a");
    EXPECT_EQ(r.buckets[0].second, of_a / 11);
  }
  int all = 0;
  MPI_Allreduce(&set.measured, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  EXPECT_EQ(all, 62) << "each item by one rank";
  EXPECT_GT(set.measured, 0);
}

// All ranks as one group that shares clips: each measures every item, and one of them counts.
TEST(Validation, ARankOfAGroupCounts) {
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD);
  Made set(5);
  Validation validation(set, *comm, {0, 1, comm->rank()});
  double sum = 0;
  for (std::size_t i = 0; i < 5; ++i) sum += figure(i, 0);
  EXPECT_EQ(validation.run().total.loss, sum / 5);
  EXPECT_EQ(set.measured, 5);
}

}  // namespace
}  // namespace weft
