#include "plan/simgrid_machine.h"

#include <simgrid/version.h>

#include <array>

namespace weft::simulation {
namespace {

namespace sg = simgrid::s4u;

constexpr double core_speed =
    1e9;  // operations/s of a core: work is given in seconds, so any number serves

// Flows that share links fairly and nothing else: no TCP windows, no reverse traffic, no factors
// fitted to Ethernet. Rates and latencies are those of the Network, as collectives reach them.
std::unique_ptr<sg::Engine> make_engine() {
  static std::array<const char*, 7> words = {"weft",
                                             "--log=root.thres:warning",
                                             "--cfg=network/model:CM02",
                                             "--cfg=network/TCP-gamma:0",
                                             "--cfg=network/crosstraffic:0",
                                             "--cfg=contexts/stack-size:256",
                                             nullptr};
  std::array<const char*, 7> arguments = words;  // SimGrid takes out what it has understood
  int count = static_cast<int>(arguments.size()) - 1;
  return std::make_unique<sg::Engine>(&count, const_cast<char**>(arguments.data()));
}

int nodes_for(const Network& network, int ranks) {
  return (ranks + network.ranks_per_node - 1) / network.ranks_per_node;
}

}  // namespace

Machine::Machine(const Network& network, int ranks)
    : network_(network), ranks_(ranks), engine_(make_engine()) {
  // A star: each node has a link up and one down to a switch that never limits, and one that stands
  // for its inside.
#if SIMGRID_VERSION_MAJOR >= 4  // a zone there has a parent from the beginning
  sg::NetZone* zone = engine_->get_netzone_root()->add_netzone_star("machine");
#else
  sg::NetZone* zone = sg::create_star_zone("machine");
#endif
  for (int i = 0; i < nodes_for(network, ranks); ++i) {
    sg::Host* node = zone->create_host("node" + std::to_string(i), core_speed);
    if (network.cores_per_node > 0) node->set_core_count(network.cores_per_node);
    const auto* cards =
        zone->create_split_duplex_link("cards" + std::to_string(i), network.node_rate)
            ->set_latency(0)
            ->seal();
    const sg::Link* inside = zone->create_link("inside" + std::to_string(i), network.inside_rate)
                                 ->set_latency(0)
                                 ->seal();
    zone->add_route(node->get_netpoint(), nullptr, nullptr, nullptr,
                    {sg::LinkInRoute(cards, sg::LinkInRoute::Direction::UP)}, true);
    zone->add_route(node->get_netpoint(), node->get_netpoint(), nullptr, nullptr,
                    {sg::LinkInRoute(inside)}, false);
    nodes_.push_back(node->seal());
  }
  zone->seal();
}

Machine::~Machine() = default;

void Machine::run() { engine_->run(); }

// A ring in its steady state: every link carries the same stream from beginning to end, so one flow
// a node and kind of link is the whole operation. The ring's steps count as latency ahead of it.
void Machine::collective(Collective kind, double bytes, int times) const {
  if (ranks_ == 1) return;
  const Traffic traffic = traffic_of(network_, ranks_, kind, bytes);
  sg::this_actor::sleep_for(times * traffic.latency);
  const auto inside = static_cast<std::uint64_t>(times * traffic.inside);
  const auto between = static_cast<std::uint64_t>(times * traffic.between);
  const int nodes = static_cast<int>(nodes_.size());
  std::vector<sg::CommPtr> flows;
  for (int i = 0; i < nodes; ++i) {
    sg::Host* node = nodes_[static_cast<std::size_t>(i)];
    // A last node with one rank has no inside to cross.
    const int ranks_here = std::min(network_.ranks_per_node, ranks_ - i * network_.ranks_per_node);
    if (ranks_here > 1 && inside > 0) flows.push_back(sg::Comm::sendto_async(node, node, inside));
    if (nodes > 1 && between > 0)
      flows.push_back(
          sg::Comm::sendto_async(node, nodes_[static_cast<std::size_t>((i + 1) % nodes)], between));
  }
  sg::Comm::wait_all(flows);
}

void Machine::compute(double seconds) const {
  if (seconds <= 0) return;
  if (network_.cores_per_node > 0)
    sg::this_actor::execute(seconds * core_speed);
  else
    sg::this_actor::sleep_for(seconds);
}

void Gate::open() {
  if (open_) return;
  open_ = true;
  for (; waiting_ > 0; --waiting_) semaphore_->release();
}

void Gate::wait() {
  if (open_) return;
  if (!semaphore_) semaphore_ = simgrid::s4u::Semaphore::create(0);
  ++waiting_;
  semaphore_->acquire();
}

}  // namespace weft::simulation
