// Training steps as SimGrid plays them: the simulated machine, collectives as flows between its
// nodes, an actor for each rank, and one that runs the transfers one at a time.
#include "validation/simulate/play.h"

#include <simgrid/s4u.hpp>

#include <simgrid/version.h>  // only after it

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <utility>

#include "core/error.h"

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

// One simulation: an engine with the machine in it. One at a time in a process (SimGrid's engine is
// a singleton).
class SimulatedMachine {
 public:
  SimulatedMachine(const Network& network, int ranks);
  SimulatedMachine(const SimulatedMachine&) = delete;
  SimulatedMachine& operator=(const SimulatedMachine&) = delete;

  int ranks() const { return ranks_; }
  sg::Host* host_of(int rank) const { return nodes_[rank / network_.ranks_per_node]; }
  void run();  // until every actor has ended

  // For actors: blocks until all ranks have done such an operation.
  void collective(Collective kind, double bytes) const;
  // For actors on host_of(rank): so much work of one core or device.
  void compute(double seconds) const;

 private:
  Network network_;
  int ranks_;
  std::unique_ptr<sg::Engine> engine_;
  std::vector<sg::Host*> nodes_;
};

SimulatedMachine::SimulatedMachine(const Network& network, int ranks)
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

void SimulatedMachine::run() { engine_->run(); }

// A ring in its steady state: every link carries the same stream from beginning to end, so one flow
// a node and kind of link is the whole operation. The ring's steps count as latency ahead of it.
void SimulatedMachine::collective(Collective kind, double bytes) const {
  if (ranks_ == 1) return;
  const Traffic traffic = traffic_of(network_, ranks_, kind, bytes);
  sg::this_actor::sleep_for(traffic.latency);
  const auto inside = static_cast<std::uint64_t>(traffic.inside);
  const auto between = static_cast<std::uint64_t>(traffic.between);
  const int nodes = static_cast<int>(nodes_.size());
  std::vector<sg::CommPtr> flows;
  for (int i = 0; i < nodes; ++i) {
    sg::Host* node = nodes_[i];
    // A last node with one rank has no inside to cross.
    const int ranks_here = std::min(network_.ranks_per_node, ranks_ - i * network_.ranks_per_node);
    if (ranks_here > 1 && inside > 0) flows.push_back(sg::Comm::sendto_async(node, node, inside));
    if (nodes > 1 && between > 0)
      flows.push_back(sg::Comm::sendto_async(node, nodes_[(i + 1) % nodes], between));
  }
  sg::Comm::wait_all(flows);
}

void SimulatedMachine::compute(double seconds) const {
  if (seconds <= 0) return;
  if (network_.cores_per_node > 0)
    sg::this_actor::execute(seconds * core_speed);
  else
    sg::this_actor::sleep_for(seconds);
}

// Blocks actors until it is opened; stays open. Actors run one at a time, so plain members are
// safe.
class Gate {
 public:
  void open() {
    if (open_) return;
    open_ = true;
    for (; waiting_ > 0; --waiting_) semaphore_->release();
  }
  void wait() {
    if (open_) return;
    if (!semaphore_) semaphore_ = sg::Semaphore::create(0);
    ++waiting_;
    semaphore_->acquire();
  }

 private:
  bool open_ = false;
  int waiting_ = 0;
  sg::SemaphorePtr semaphore_;
};

// A gate that opens when all have arrived.
class Meeting {
 public:
  explicit Meeting(int expected) : missing_(expected) {}
  void arrive() {
    if (--missing_ == 0) gate_.open();
  }
  void wait() { gate_.wait(); }

 private:
  int missing_;
  Gate gate_;
};

// Points of a backward or forward at which a rank checks the wire. Above `most_stops`, buckets are
// grouped, except the last ones of the backward: they decide what is left to wait for.
constexpr std::size_t most_stops = 64, single_stops = 16;

struct Stop {
  int first = 0, last = 0;  // buckets [first, last)
  double ready = 1, needed = 0;
};

std::vector<Stop> make_stops(const std::vector<TransferBucket>& buckets) {
  const std::size_t n = buckets.size();
  const std::size_t singles = n <= most_stops ? n : single_stops;
  const std::size_t groups = n <= most_stops ? 0 : most_stops - single_stops;
  std::vector<Stop> stops;
  const auto add = [&](std::size_t first, std::size_t last) {
    stops.push_back({static_cast<int>(first), static_cast<int>(last), buckets[last - 1].ready,
                     buckets[first].needed});
  };
  // A group is ready with its last bucket, and needed with the one used first: also the last, as
  // `needed` falls from bucket to bucket.
  for (std::size_t g = 0; g < groups; ++g)
    add((n - singles) * g / groups, (n - singles) * (g + 1) / groups);
  for (std::size_t b = n - singles; b < n; ++b) add(b, b + 1);
  for (Stop& s : stops) s.needed = buckets[s.last - 1].needed;
  return stops;
}

// The order of train/sharded_blocks.cpp for one step of so many micro-batches: `at` is told each
// event, the transfers (gather, sum) when they are issued.
struct BlockEvent {
  enum Kind { forward, backward, gather, sum, need, need_sum, need_sums } kind;
  int micro_batch = 0;
  int block = 0;  // -1: the rest of a forward or backward
};
template <class At>
void play_blocks(int blocks, int micro_batches, At&& at) {
  int held[2] = {-1, -1};
  int m = 0;
  const auto fetch = [&](int b) {
    if (b < 0 || b >= blocks || held[b % 2] == b) return;
    held[b % 2] = b;
    at(BlockEvent{BlockEvent::gather, m, b});
  };
  fetch(blocks - 1);
  fetch(blocks - 2);
  for (; m < micro_batches; ++m) {
    for (int b = blocks; b-- > 0;) {
      at(BlockEvent{BlockEvent::forward, m, b});  // up to where it is needed
      fetch(b);
      at(BlockEvent{BlockEvent::need, m, b});
      if (b == 0) at(BlockEvent{BlockEvent::need_sums, m, b});
      fetch(b - 1);
    }
    at(BlockEvent{BlockEvent::forward, m, -1});
    for (int b = 0; b < blocks; ++b) {
      fetch(b);
      at(BlockEvent{BlockEvent::need, m, b});
      if (b >= 2) at(BlockEvent{BlockEvent::need_sum, m, b - 2});
      fetch(b + 1);
      at(BlockEvent{BlockEvent::backward, m, b});  // up to where its gradient is complete
      at(BlockEvent{BlockEvent::sum, m, b});
    }
    at(BlockEvent{BlockEvent::backward, m, -1});
  }
  at(BlockEvent{BlockEvent::need_sums, m, 0});
}

// What the ranks of one step tell each other.
struct StepState {
  StepState(std::size_t stops, int ranks)
      : summed(stops), gathered(stops), computed(ranks), updated(ranks) {
    for (std::size_t i = 0; i < stops; ++i) ready.emplace_back(ranks);
  }
  std::deque<Meeting> ready;  // [stop] its gradients are there on all ranks
  std::deque<Gate> summed, gathered;
  Meeting computed, updated;
  Gate reduced;
  // Transfers of blocks (Overlapped::blocks), in the order in which they are issued.
  struct Transfer {
    Transfer(bool is_sum, int of, int ranks) : sum(is_sum), block(of), issued(ranks) {}
    bool sum;
    int block;
    Meeting issued;
    Gate done;
  };
  std::deque<Transfer> transfers;
  std::vector<double> busy, computed_at, begun, ended;  // [rank] seconds
};

// Time spent in computing, however many share the processors.
double timed_compute(const SimulatedMachine& machine, double seconds) {
  const double before = sg::Engine::get_clock();
  machine.compute(seconds);
  return sg::Engine::get_clock() - before;
}

class OverlappedPlay {
 public:
  OverlappedPlay(SimulatedMachine& machine, const Overlapped& job, int steps)
      : machine_(machine), job_(job), stops_(make_stops(job.buckets)) {
    for (int s = 0; s < steps; ++s) {
      work_.push_back(job.work(s));
      WEFT_ASSERT(static_cast<int>(work_.back().size()) == machine.ranks());
      StepState& state = states_.emplace_back(stops_.size(), machine.ranks());
      for (auto* times : {&state.busy, &state.computed_at, &state.begun, &state.ended})
        times->assign(static_cast<std::size_t>(machine.ranks()), 0.0);
      if (job.blocks.empty()) continue;
      play_blocks(blocks(), rounds(work_.back()), [&](const BlockEvent& e) {
        if (e.kind == BlockEvent::gather || e.kind == BlockEvent::sum)
          state.transfers.emplace_back(e.kind == BlockEvent::sum, e.block, machine.ranks());
      });
    }
  }

  void run() {
    for (int r = 0; r < machine_.ranks(); ++r)
      sg::Actor::create("rank" + std::to_string(r), machine_.host_of(r), [this, r] { rank(r); });
    sg::Actor::create("wire", machine_.host_of(0), [this] { wire(); });
    machine_.run();
  }

  StepTimes times(std::size_t s) const {
    const StepState& state = states_[s];
    const auto greatest = [](const std::vector<double>& v) {
      return *std::max_element(v.begin(), v.end());
    };
    // A rank's step is busy + wait + exposed: what is neither work nor waiting for a slower rank is
    // communication that nothing hid.
    const double all_computed = greatest(state.computed_at);
    StepTimes t;
    for (std::size_t r = 0; r < state.busy.size(); ++r) {
      // Ranks that meet within micro-batches end them together: the slower ones computed for
      // longer.
      const double wait = job_.blocks.empty() ? all_computed - state.computed_at[r]
                                              : greatest(state.busy) - state.busy[r];
      t.mean_busy += state.busy[r];
      t.wait += wait;
      t.exposed += state.ended[r] - state.begun[r] - state.busy[r] - wait;
    }
    const auto n = static_cast<double>(state.busy.size());
    t.mean_busy /= n;
    t.wait /= n;
    t.exposed /= n;
    t.longest_busy = greatest(state.busy);
    const double before = s > 0 ? greatest(states_[s - 1].ended)
                                : *std::min_element(state.begun.begin(), state.begun.end());
    t.seconds = greatest(state.ended) - before;
    return t;
  }

 private:
  void rank(int r) {
    const auto me = static_cast<std::size_t>(r);
    for (std::size_t s = 0; s < states_.size(); ++s) {
      StepState& state = states_[s];
      StepState* before = s > 0 && job_.sharded ? &states_[s - 1] : nullptr;
      const std::vector<Work>& mine = work_[s][me];
      double& busy = state.busy[me];
      state.begun[me] = sg::Engine::get_clock();
      busy += timed_compute(machine_, job_.host);
      if (!job_.blocks.empty()) busy += in_blocks(state, before, mine, rounds(work_[s]));
      for (std::size_t i = 0; job_.blocks.empty() && i < mine.size(); ++i) {
        busy += forward(mine[i].forward, i == 0 ? before : nullptr);
        busy += backward(mine[i].backward, i + 1 == mine.size() ? &state : nullptr);
      }
      // A rank without micro-batches arrives at every stop all the same: each waits for all ranks.
      if (mine.empty() && job_.blocks.empty()) {
        forward(0, before);
        backward(0, &state);
      }
      state.computed_at[me] = sg::Engine::get_clock();
      state.computed.arrive();
      state.reduced.wait();
      busy += timed_compute(machine_, job_.optimizer);
      state.updated.arrive();
      if (!job_.overlap && job_.sharded && !state.gathered.empty()) state.gathered.front().wait();
      state.ended[me] = sg::Engine::get_clock();
    }
  }

  // Both return the seconds of computing. The first forward of a step needs the weights that are
  // `on_their_way`.
  double forward(double seconds, StepState* on_their_way) {
    double busy = 0, done = 0;
    if (on_their_way != nullptr)
      for (std::size_t i = stops_.size(); i-- > 0;) {
        busy += timed_compute(machine_, (stops_[i].needed - done) * seconds);
        done = stops_[i].needed;
        on_their_way->gathered[i].wait();
      }
    return busy + timed_compute(machine_, (1 - done) * seconds);
  }

  // The last backward of a step hands its gradients in as they are ready.
  double backward(double seconds, StepState* state) {
    double busy = 0, done = 0;
    if (state != nullptr)
      for (std::size_t i = 0; i < stops_.size(); ++i) {
        busy += timed_compute(machine_, (stops_[i].ready - done) * seconds);
        done = stops_[i].ready;
        state->ready[i].arrive();
        if (!job_.overlap) state->summed[i].wait();
      }
    return busy + timed_compute(machine_, (1 - done) * seconds);
  }

  int blocks() const { return static_cast<int>(job_.blocks.size()); }
  static int rounds(const RankWork& work) {
    std::size_t most = 0;
    for (const auto& mine : work) most = std::max(most, mine.size());
    return static_cast<int>(most);
  }

  // A step's micro-batches, whose blocks' weights are gathered as they go. What is whole waits for
  // nothing in between: its weights are there before the first, its gradients ready after the last.
  double in_blocks(StepState& state, StepState* before, const std::vector<Work>& mine,
                   int micro_batches) {
    if (before != nullptr && !before->gathered.empty()) before->gathered.front().wait();
    double busy = 0, done = 0;
    std::size_t issued = 0;
    std::vector<std::size_t> arrived(job_.blocks.size(), 0), summed(job_.blocks.size(), 0);
    const auto compute = [&](double until, double seconds, bool ends) {
      busy += timed_compute(machine_, std::max(0.0, until - done) * seconds);
      done = ends ? 0 : std::max(done, until);
    };
    play_blocks(blocks(), micro_batches, [&](const BlockEvent& e) {
      const auto b = static_cast<std::size_t>(std::max(0, e.block));
      const auto m = static_cast<std::size_t>(e.micro_batch);
      const Work work = m < mine.size() ? mine[m] : Work{};
      const bool rest = e.block < 0;
      switch (e.kind) {
        case BlockEvent::forward:
          return compute(rest ? 1 : job_.blocks[b].needed, work.forward, rest);
        case BlockEvent::backward:
          return compute(rest ? 1 : job_.blocks[b].ready, work.backward, rest);
        case BlockEvent::gather:
        case BlockEvent::sum:
          (e.kind == BlockEvent::gather ? arrived : summed)[b] = ++issued;
          state.transfers[issued - 1].issued.arrive();
          if (!job_.overlap) state.transfers[issued - 1].done.wait();
          return;
        case BlockEvent::need:
          return wait_for(state, arrived[b]);
        case BlockEvent::need_sum:
          return wait_for(state, summed[b]);
        case BlockEvent::need_sums:
          return wait_for(state, *std::max_element(summed.begin(), summed.end()));
      }
    });
    for (Meeting& ready : state.ready) ready.arrive();
    return busy;
  }
  // The transfer of that number from 1 on; 0: none.
  static void wait_for(StepState& state, std::size_t number) {
    if (number > 0) state.transfers[number - 1].done.wait();
  }

  void wire() {
    const auto sum = [&](double bytes) {
      if (!job_.bf16_wire)
        return machine_.collective(
            job_.sharded ? Collective::reduce_scatter : Collective::all_reduce, bytes);
      machine_.collective(Collective::bf16_sum, bytes);
      if (!job_.sharded) machine_.collective(Collective::all_gather, bytes);
    };
    for (StepState& state : states_) {
      for (StepState::Transfer& t : state.transfers) {
        const TransferBucket& block = job_.blocks[static_cast<std::size_t>(t.block)];
        t.issued.wait();
        if (t.sum)
          sum(block.gradient_bytes);
        else
          machine_.collective(Collective::all_gather, block.weight_bytes);
        t.done.open();
      }
      for (std::size_t i = 0; i < stops_.size(); ++i) {
        state.ready[i].wait();
        // Grouped or not, each bucket is an operation of its own and pays its own latency.
        for (int b = stops_[i].first; b < stops_[i].last; ++b) sum(bucket(b).gradient_bytes);
        state.summed[i].open();
      }
      state.computed.wait();
      machine_.collective(Collective::all_gather, job_.report_bytes);
      machine_.collective(Collective::all_reduce, sizeof(double));
      state.reduced.open();
      state.updated.wait();
      for (std::size_t i = stops_.size(); job_.sharded && i-- > 0;) {
        // Last bucket first: roughly the order in which the next forward needs them.
        for (int b = stops_[i].last; b-- > stops_[i].first;)
          machine_.collective(Collective::all_gather, bucket(b).weight_bytes);
        state.gathered[i].open();
      }
    }
  }

  const TransferBucket& bucket(int b) const { return job_.buckets[b]; }

  SimulatedMachine& machine_;
  const Overlapped& job_;
  std::vector<Stop> stops_;
  std::vector<RankWork> work_;
  std::deque<StepState> states_;
};

}  // namespace

std::vector<StepTimes> play(const Network& network, int ranks, const Overlapped& job, int steps,
                            int warmup) {
  SimulatedMachine machine(network, ranks);
  OverlappedPlay played(machine, job, steps + warmup);
  played.run();
  std::vector<StepTimes> times;
  for (int s = warmup; s < steps + warmup; ++s)
    times.push_back(played.times(static_cast<std::size_t>(s)));
  return times;
}

double play_collective(const Network& network, int ranks, Collective kind, double bytes) {
  SimulatedMachine machine(network, ranks);
  double seconds = 0;
  sg::Actor::create("wire", machine.host_of(0), [&] {
    const double before = sg::Engine::get_clock();
    machine.collective(kind, bytes);
    seconds = sg::Engine::get_clock() - before;
  });
  machine.run();
  return seconds;
}

}  // namespace weft::simulation
