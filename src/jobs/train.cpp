// `weft train`.
#include <mpi.h>

#include "core/error.h"
#include "core/log.h"
#include "core/progress.h"
#include "core/trace.h"
#include "jobs/jobs.h"
#include "models/registry.h"
#include "train/metrics/run_facts.h"
#include "train/metrics/run_trace.h"
#include "train/stop.h"
#include "train/trainer.h"

namespace weft {

namespace {

int run(const Deck& deck, MPI_Comm world, Trainer& trainer, ClockOffset& clock) {
  // 1. What this run is, for the reader of the log and for weft report.
  RunFacts facts(deck, trainer);
  std::optional<MetricsWriter> metrics;
  if (trainer.first_rank()) {
    facts.print();
    facts.write(deck.run.dir);
    metrics.emplace(deck.run.dir, trainer.steps_done());
  }

  const std::int64_t before = trainer.steps_done();
  Progress progress({std::filesystem::path(deck.run.dir) / "status.json", "train", "step", "",
                     deck.train.steps, before, log::rank(), trainer.communicator().size()});

  // 2. Steps, until done or asked to stop.
  bool last = false;
  const auto report = [&] {
    for (const StepMetrics& m : trainer.finished(last)) {
      facts.count(m);
      if (!trainer.first_rank()) continue;
      metrics->write(m);
      const std::int64_t done = m.step + 1;
      progress.advance(done, static_cast<double>(done - before),
                       static_cast<double>(deck.train.steps - before), {{"loss", m.loss}});
      if (done % deck.train.log_every == 0 || (last && done == trainer.steps_done()))
        facts.print_step(m, progress.left_text());
    }
  };
  if (before >= deck.train.steps)
    log::info("nothing to do: {} of {} steps are done, and a larger train.steps goes on", before,
              deck.train.steps);
  bool stopped = false;
  while (trainer.steps_done() < deck.train.steps && !stopped) {
    trainer.step();
    const unsigned asked = trainer.take_requests();
    const std::int64_t done = trainer.steps_done();
    stopped = (asked & request::stop) != 0;
    last = done == deck.train.steps || stopped;
    const bool regular = deck.train.checkpoint_every > 0 && done % deck.train.checkpoint_every == 0;
    if (!last && (asked & request::save) != 0)
      trainer.save();
    else if (!last && regular)
      trainer.save_if_free();
    if ((asked & request::dump_trace) != 0) write_trace(deck.run.dir, world, &clock);
    report();
  }
  last = true;
  report();
  progress.hide();

  // 3. The last state is always saved.
  if (!trainer.saved()) trainer.save();
  const bool saved = trainer.wait_for_save();
  if (deck.run.trace) write_trace(deck.run.dir, world, &clock);
  if (trainer.first_rank()) facts.print_end(trainer);
  WEFT_CHECK(saved, Exit::checkpoint, "free space under run.dir; the older checkpoints are intact",
             "the last checkpoint of {} (step {}) could not be written", deck.run.dir,
             trainer.steps_done());
  if (trainer.steps_done() < deck.train.steps) {
    log::info("stopped on request after step {}: run the same command to go on",
              trainer.steps_done());
    if (trainer.first_rank()) progress.end(static_cast<int>(Exit::stopped), trainer.steps_done());
    return static_cast<int>(Exit::stopped);
  }
  if (trainer.first_rank()) progress.end(0, trainer.steps_done());
  return 0;
}

int train(const Deck& deck, MPI_Comm world) {
  watch_stop_signals();
  // Always on, since it costs next to nothing: RUN/dump_trace can then show what just happened.
  trace::start();
  ClockOffset clock(world);
  // Data, model, run directory; then the state: new, or where the last job of this run left it.
  Trainer trainer(deck, make_task, world);
  trainer.start();
  try {
    return run(deck, world, trainer, clock);
  } catch (Error& e) {
    // A save under way finishes first, which may take minutes: the reason is reported before that.
    log::report(e);
    trainer.about_to_end();
    throw;
  }
}

}  // namespace

Command train_command() {
  Command c{"train", "train, resuming from RUN/latest if it exists", train};
  c.heeds_stops = true;
  c.takes_deck();
  c.key_option<bool>("--trace", "run.trace", "write RUN/trace.json, for Perfetto");
  return c;
}

}  // namespace weft
