// The results of weft bench scaling as a table, as JSON and as a plot.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace weft {

// Seconds of a step in one round: the step itself, and of it the mean over ranks that communication
// left exposed and that was spent waiting for the slowest.
struct ScalingRound {
  double seconds = 0, exposed = 0, wait = 0;
};

struct ScalingPoint {
  int ranks = 1;
  std::vector<ScalingRound> rounds;
  std::vector<ScalingRound> without_overlap;  // empty: not measured
  std::vector<double>
      side_by_side;  // seconds of independent steps, a round each; empty: not measured

  // Medians over rounds. Ratios are taken within a round, so that what the machine did to all of it
  // cancels out.
  double seconds = 0, exposed = 0, wait = 0, speedup = 0, efficiency = 0;
  double ceiling = 0;  // efficiency of independent trainings, 0: not measured
  double seconds_without_overlap = 0, exposed_without_overlap = 0;
};

struct ScalingResult {
  std::string mode, mix;
  std::string hardware;
  int threads = 1;  // a rank
  int steps = 0, warmup = 0;
  std::int64_t micro_batches = 0;  // of the deck
  std::vector<std::string> buckets;
  // Greatest relative difference of a loss from that of the first rank count, and of the weights as
  // a share of the update.
  int checked_steps = 0;
  double loss_difference = 0, weight_difference = 0;
  std::vector<ScalingPoint> points;
  std::string deck;  // as it was used, TOML
};

// Fills in what follows from the rounds; the first point is what the others are compared with.
void summarise(ScalingResult& result);

std::string scaling_table(const ScalingResult& result);
std::string scaling_json(const ScalingResult& result);
// Efficiency (weak) or speed-up (strong) against ranks, as a file of its own.
std::string scaling_plot(const ScalingResult& result);

}  // namespace weft
