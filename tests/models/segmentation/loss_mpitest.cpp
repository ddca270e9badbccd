// The loss with weights of classes, OHEM and Dice over ranks: a step's micro-batches give the same
// loss and the same gradient however many ranks share them, those of docs/models/segmentation.md.
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "models/segmentation/task.h"
#include "tests/nn/fixture.h"

namespace weft::test {
namespace {

constexpr std::int64_t micro_batches = 6, side = 32, classes = 4;
const std::vector<double> weights = {0.5, 2, 1, 4};
constexpr double dice = 0.5, thresh = 0.3;
constexpr std::int64_t min_kept = 6;

// An image with labels of its own: micro-batch 4 has two labelled pixels, the last one none.
struct Image {
  Tensor pixels, labels;
  explicit Image(std::int64_t m)
      : pixels(to_tensor(random_values(side * side * 3, 20 + static_cast<std::uint64_t>(m)),
                         {1, 1, side, side, 3})) {
    const std::int64_t cells = (side / 8) * (side / 8);
    Vec v(static_cast<std::size_t>(cells));
    for (std::int64_t i = 0; i < cells; ++i) {
      const bool labelled = m < 4 ? i % 5 != m : m == 4 && i < 2;
      v[i] = labelled ? static_cast<double>(1 + (i * (m + 1) + i / 3) % classes) : 0;
    }
    labels = to_tensor(v, {1, side / 8, side / 8}, DType::u8);
  }
};

// In fp64, of the logits [cells, classes] of one image.
double restated(const Tensor& logits, const Tensor& labels) {
  const Vec x = to_values(logits);
  struct Pixel {
    double nll, weight;
  };
  std::vector<Pixel> pixels;
  Vec area(classes), count(classes), overlap(classes);
  for (std::int64_t i = 0; i < labels.numel(); ++i) {
    const int k = labels.data<std::uint8_t>()[i] - 1;
    if (k < 0) continue;
    double sum = 0;
    for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(x[i * classes + c]);
    for (std::int64_t c = 0; c < classes; ++c) area[c] += std::exp(x[i * classes + c]) / sum;
    const double p = std::exp(x[i * classes + k]) / sum;
    count[k] += 1, overlap[k] += p;
    pixels.push_back({-std::log(p), weights[k]});
  }
  std::ranges::sort(pixels, std::greater<>(), &Pixel::nll);
  double nll = 0, weight = 0, coefficient = 0, occurring = 0;
  for (std::size_t i = 0; i < pixels.size(); ++i) {
    if (i >= static_cast<std::size_t>(min_kept) && pixels[i].nll <= -std::log(thresh)) continue;
    nll += pixels[i].weight * pixels[i].nll;
    weight += pixels[i].weight;
  }
  for (std::int64_t c = 0; c < classes; ++c) {
    if (count[c] == 0) continue;
    occurring += 1;
    coefficient += 2 * overlap[c] / (area[c] + count[c]);
  }
  return pixels.empty() ? 0 : nll / weight + dice * (1 - coefficient / occurring);
}

struct Step {
  double loss = 0;
  std::vector<float> gradient;
};

class WeightedLoss : public OpTest {
 protected:
  WeightedLoss() {
    auto& model = deck_.get<SegmentationDeck>();
    model.encoder = "mobilenetv2dilated";
    model.decoder = "c1";
    model.num_classes = classes;
    auto& train = deck_.get<SegmentationTrainDeck>();
    train.fix_bn = true;
    train.class_weight = weights;
    train.dice_weight = dice;
    train.ohem_thresh = thresh;
    train.ohem_min_kept = min_kept;
    task_ = std::make_unique<SegmentationTask>(deck_);
    task_->params().allocate(1 << 20, false, true);
    task_->params().initialise(5);
  }

  // Micro-batches first, first + every, ... of a step.
  Step run(std::int64_t first, std::int64_t every) {
    Step step;
    ParameterTable& params = task_->params();
    params.begin_step([](int) {});
    for (std::int64_t m = first; m < micro_batches; m += every) {
      const Image image(m);
      Tape tape;
      const TrainingLoss loss = task_->loss(tape, image.pixels, image.labels, {}, 0,
                                            1.0f / micro_batches, task_->class_weights());
      step.loss += static_cast<double>(loss.clips.data<float>()[0]) / micro_batches;
      tape.backward();
    }
    params.finish_step();
    step.gradient = floats(params.grads());
    return step;
  }

  Deck deck_;
  std::unique_ptr<SegmentationTask> task_;
};

TEST_F(WeightedLoss, IsTheSameOnAnyNumberOfRanks) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const Step alone = run(0, 1);
  Step shared = run(rank, ranks);
  MPI_Allreduce(MPI_IN_PLACE, &shared.loss, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, shared.gradient.data(), static_cast<int>(shared.gradient.size()),
                MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  EXPECT_NEAR(shared.loss, alone.loss, 1e-7);
  double largest = 0, difference = 0;
  for (std::size_t i = 0; i < alone.gradient.size(); ++i) {
    largest = std::max<double>(largest, std::abs(alone.gradient[i]));
    difference = std::max<double>(difference, std::abs(alone.gradient[i] - shared.gradient[i]));
  }
  EXPECT_GT(largest, 0);
  EXPECT_LT(difference, 1e-5 * largest);

  // The mean over the micro-batches of each one's own weighted mean.
  Segmentation model(deck_.get<SegmentationDeck>());
  model.params().allocate(1 << 20, false, false);
  model.params().initialise(5);
  nn::BatchNormGroup norm;
  norm.use_running = true;
  double wanted = 0;
  for (std::int64_t m = 0; m < micro_batches; ++m) {
    const Image image(m);
    Tape tape(Tape::Mode::infer);
    const auto logits =
        model.forward({tape, model.params()}, make_var(image.pixels, false), norm, {}, false);
    wanted += restated(logits.main->value, image.labels) / micro_batches;
  }
  EXPECT_NEAR(alone.loss, wanted, 1e-5 * wanted);
}

}  // namespace
}  // namespace weft::test
