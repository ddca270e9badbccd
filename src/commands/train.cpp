#include "commands/train.h"

#include "core/error.h"
#include "core/log.h"
#include "train/run_facts.h"
#include "train/stop.h"
#include "train/trainer.h"

namespace weft {

int train(const Deck& deck, MPI_Comm world) {
  watch_stop_signals();
  // 1. Data, model, run directory; then the state: new, or where the last job of this run left it.
  Trainer trainer(deck, world);
  trainer.start();

  // 2. What this run is, for the reader of the log and for weft report.
  RunFacts facts(deck, trainer.model(), trainer.source(), trainer.communicator(), trainer.threads(),
                 trainer.planned_bytes());
  std::optional<MetricsWriter> metrics;
  if (trainer.first_rank()) {
    facts.print();
    facts.write(deck.run.dir);
    metrics.emplace(deck.run.dir, trainer.steps_done());
  }

  // 3. Steps, until done or asked to stop.
  bool last = false;
  const auto tell = [&] {
    for (const StepMetrics& m : trainer.finished(last)) {
      facts.count(m);
      if (!trainer.first_rank()) continue;
      metrics->write(m);
      const std::int64_t done = m.step + 1;
      if (done % deck.train.log_every == 0 || (last && done == trainer.steps_done()))
        facts.print_step(m);
    }
  };
  while (trainer.steps_done() < deck.train.steps && !trainer.stop_requested()) {
    trainer.step();
    const std::int64_t done = trainer.steps_done();
    last = done == deck.train.steps || trainer.stop_requested();
    if (!last && deck.train.checkpoint_every > 0 && done % deck.train.checkpoint_every == 0)
      trainer.save();
    tell();
  }
  last = true;
  tell();

  // 4. The last state is always saved.
  if (!trainer.saved()) trainer.save();
  const bool saved = trainer.wait_for_save();
  if (trainer.first_rank())
    facts.print_end(trainer.arena().peak(), trainer.communicator().busy_seconds());
  WEFT_CHECK(saved, Exit::checkpoint, "free space under run.dir; the older checkpoints are intact",
             "the last checkpoint of {} (step {}) could not be written", deck.run.dir,
             trainer.steps_done());
  if (trainer.steps_done() < deck.train.steps) {
    log::info("stopped on request after step {}: run the same command to go on",
              trainer.steps_done());
    return static_cast<int>(Exit::stopped);
  }
  return 0;
}

}  // namespace weft
