// The actors of a simulated step: one per rank, and a clerk that runs the transfers one at a time.
#include <algorithm>
#include <deque>
#include <utility>

#include "core/error.h"
#include "plan/simgrid_machine.h"

namespace weft::simulation {
namespace {

namespace sg = simgrid::s4u;

// Points of a backward or forward at which a rank checks the wire. Above `most_stops`, buckets are
// grouped, except the last ones of the backward: they decide what is left to wait for.
constexpr std::size_t most_stops = 64, single_stops = 16;

struct Stop {
  int first = 0, last = 0;  // buckets [first, last)
  double ready = 1, needed = 0;
};

std::vector<Stop> make_stops(const std::vector<Bucket>& buckets) {
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
  for (Stop& s : stops) s.needed = buckets[static_cast<std::size_t>(s.last - 1)].needed;
  return stops;
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
  std::vector<double> busy, computed_at, begun, ended;  // [rank] seconds
};

// Time spent in computing, however many share the processors.
double timed_compute(const Machine& machine, double seconds) {
  const double before = sg::Engine::get_clock();
  machine.compute(seconds);
  return sg::Engine::get_clock() - before;
}

class OverlappedPlay {
 public:
  OverlappedPlay(Machine& machine, const Overlapped& job, int steps)
      : machine_(machine), job_(job), stops_(make_stops(job.buckets)) {
    for (int s = 0; s < steps; ++s) {
      work_.push_back(job.work(s));
      WEFT_ASSERT(static_cast<int>(work_.back().size()) == machine.ranks());
      StepState& state = states_.emplace_back(stops_.size(), machine.ranks());
      for (auto* times : {&state.busy, &state.computed_at, &state.begun, &state.ended})
        times->assign(static_cast<std::size_t>(machine.ranks()), 0.0);
    }
  }

  void run() {
    for (int r = 0; r < machine_.ranks(); ++r)
      sg::Actor::create("rank" + std::to_string(r), machine_.host_of(r), [this, r] { rank(r); });
    sg::Actor::create("clerk", machine_.host_of(0), [this] { clerk(); });
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
      const double wait = all_computed - state.computed_at[r];
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
      for (std::size_t i = 0; i < mine.size(); ++i) {
        busy += forward(mine[i].forward, i == 0 ? before : nullptr);
        busy += backward(mine[i].backward, i + 1 == mine.size() ? &state : nullptr);
      }
      // A rank without micro-batches arrives at every stop all the same: each waits for all ranks.
      if (mine.empty()) {
        forward(0, before);
        backward(0, &state);
      }
      state.computed_at[me] = sg::Engine::get_clock();
      state.computed.arrive();
      state.reduced.wait();
      busy += timed_compute(machine_, job_.optimizer);
      state.updated.arrive();
      if (!job_.overlap && job_.sharded) state.gathered.front().wait();
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

  void clerk() {
    const Collective sum = job_.sharded ? Collective::reduce_scatter : Collective::all_reduce;
    for (StepState& state : states_) {
      for (std::size_t i = 0; i < stops_.size(); ++i) {
        state.ready[i].wait();
        // Grouped or not, each bucket is an operation of its own and pays its own latency.
        for (int b = stops_[i].first; b < stops_[i].last; ++b)
          machine_.collective(sum, bucket(b).gradient_bytes);
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

  const Bucket& bucket(int b) const { return job_.buckets[static_cast<std::size_t>(b)]; }

  Machine& machine_;
  const Overlapped& job_;
  std::vector<Stop> stops_;
  std::vector<RankWork> work_;
  std::deque<StepState> states_;
};

struct BarrierState {
  BarrierState(std::size_t phases, int ranks) : go(phases) {
    for (std::size_t p = 0; p < phases; ++p) met.emplace_back(ranks);
  }
  std::deque<Meeting> met;  // [phase]
  std::deque<Gate> go;
  double begun = 0, ended = 0, transfers = 0;  // seconds; transfers: and the optimizer
};

std::vector<StepTimes> play_overlapped(const Network& network, int ranks, const Overlapped& job,
                                       int steps, int warmup) {
  Machine machine(network, ranks);
  OverlappedPlay played(machine, job, steps + warmup);
  played.run();
  std::vector<StepTimes> times;
  for (int s = warmup; s < steps + warmup; ++s)
    times.push_back(played.times(static_cast<std::size_t>(s)));
  return times;
}

std::vector<StepTimes> play_barriers(const Network& network, int ranks, const Barriers& job,
                                     int steps, int warmup) {
  Machine machine(network, ranks);
  std::vector<std::vector<std::vector<double>>> seconds;
  std::deque<BarrierState> states;
  for (int s = 0; s < steps + warmup; ++s) {
    seconds.push_back(job.seconds(s));
    states.emplace_back(job.phases.size(), ranks);
  }
  for (int r = 0; r < ranks; ++r)
    sg::Actor::create("rank" + std::to_string(r), machine.host_of(r), [&, r] {
      for (std::size_t s = 0; s < states.size(); ++s)
        for (std::size_t p = 0; p < job.phases.size(); ++p) {
          machine.compute(seconds[s][static_cast<std::size_t>(r)][p]);
          states[s].met[p].arrive();
          states[s].go[p].wait();
        }
    });
  sg::Actor::create("clerk", machine.host_of(0), [&] {
    for (BarrierState& state : states) {
      state.begun = sg::Engine::get_clock();
      for (std::size_t p = 0; p < job.phases.size(); ++p) {
        state.met[p].wait();
        const double before = sg::Engine::get_clock();
        if (static_cast<int>(p) == job.reduce_after) {
          const int messages =
              std::max(1, static_cast<int>(job.gradient_bytes / job.message_bytes));
          machine.collective(Collective::reduce_scatter, job.gradient_bytes / messages, messages);
          machine.compute(job.optimizer);
          machine.collective(Collective::all_gather, job.weight_bytes / job.tensors, job.tensors);
        }
        machine.collective(Collective::all_reduce, sizeof(double));  // the barrier itself
        state.transfers += sg::Engine::get_clock() - before;
        state.go[p].open();
      }
      state.ended = sg::Engine::get_clock();
    }
  });
  machine.run();

  std::vector<StepTimes> times;
  for (std::size_t s = static_cast<std::size_t>(warmup); s < states.size(); ++s) {
    StepTimes t;
    for (const std::vector<double>& mine : seconds[s]) {
      double busy = job.optimizer;
      for (const double phase : mine) busy += phase;
      t.mean_busy += busy / ranks;
      t.longest_busy = std::max(t.longest_busy, busy);
    }
    t.seconds = states[s].ended - states[s].begun;
    t.exposed = states[s].transfers - job.optimizer;
    t.wait = t.seconds - t.mean_busy - t.exposed;
    times.push_back(t);
  }
  return times;
}

double play_one(const Network& network, int ranks, Collective kind, double bytes) {
  Machine machine(network, ranks);
  double seconds = 0;
  sg::Actor::create("clerk", machine.host_of(0), [&] {
    const double before = sg::Engine::get_clock();
    machine.collective(kind, bytes);
    seconds = sg::Engine::get_clock() - before;
  });
  machine.run();
  return seconds;
}

}  // namespace
}  // namespace weft::simulation

// What plan/simulation.cpp looks for.
extern "C" weft::simulation::Player weft_simulation_player() {
  using namespace weft::simulation;
  return {play_overlapped, play_barriers, play_one};
}
