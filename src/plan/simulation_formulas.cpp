// Closed formulas of what the simulation plays. Part of the program and of the module both.
#include <algorithm>
#include <cmath>

#include "plan/simulation.h"

namespace weft::simulation {

Traffic traffic_of(const Network& network, int ranks, Collective kind, double bytes) {
  if (ranks == 1) return {};
  const double rounds = kind == Collective::all_reduce ? 2 : 1;
  const double n = ranks, inside = std::min(ranks, network.ranks_per_node);
  const double nodes = std::ceil(n / network.ranks_per_node);
  const auto around = [&](double ring) { return rounds * (ring - 1) / ring * bytes; };
  // A flat ring has n - 1 steps, nodes - 1 of them over the network; two levels have the steps of
  // both rings.
  const double inside_steps = network.two_level ? inside - 1 : n - nodes;
  Traffic t;
  t.latency = network.start +
              rounds * (inside_steps * network.hop_inside + (nodes - 1) * network.hop_between);
  if (inside > 1) t.inside = around(network.two_level ? inside : n);
  if (nodes > 1) t.between = around(network.two_level ? nodes : n);
  return t;
}

double collective_seconds(const Network& network, int ranks, Collective kind, double bytes) {
  const Traffic t = traffic_of(network, ranks, kind, bytes);
  return t.latency + std::max(t.inside / network.inside_rate, t.between / network.node_rate);
}

}  // namespace weft::simulation
