// `weft train`.
#include <mpi.h>

#include <filesystem>
#include <memory>
#include <optional>

#include "checkpoint/manifest.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/log.h"
#include "core/progress.h"
#include "core/trace.h"
#include "jobs/generate/samples.h"
#include "jobs/jobs.h"
#include "models/cite.h"
#include "models/registry.h"
#include "train/metrics/run_facts.h"
#include "train/metrics/run_trace.h"
#include "train/stop.h"
#include "train/trainer.h"
#include "train/validation.h"

namespace weft {

namespace {

// The measurements of [validation] within a training, and their lines in RUN/validation.jsonl.
class HeldOutLoss {
 public:
  // Before the trainer's start(), which plans the memory.
  HeldOutLoss(const Deck& deck, Trainer& trainer)
      : deck_(deck),
        validation_(deck.get<ValidationDeck>()),
        trainer_(trainer),
        set_(trainer.task().validation_set(trainer.held_out())) {
    trainer.plan_also([this](std::size_t capacity) { return set_->plan(capacity); });
  }
  // After it.
  void begin() {
    history_ = ValidationHistory::from_text(trainer_.validation_note());
    const ValidationHistory before = history_;
    if (history_.go_on_with(identity_of_losses(deck_, trainer_.held_out())) &&
        trainer_.first_rank())
      log::warn(
          "the held-out samples (or validation.timesteps, run.seed) are not those of before, {}: "
          "their losses cannot be compared. A new best, a new curve and validation.patience begin "
          "here",
          before.best_text());
    const WorkPlan::Groups& g = trainer_.groups();
    const int rank = trainer_.communicator().rank();
    work_ = std::make_unique<Validation>(*set_, trainer_.communicator(),
                                         Validation::Groups{g.own, g.count, rank % g.ranks});
    if (!trainer_.first_rank()) return;
    // A job may have died between a save and the link.
    if (deck_.train.keep_best) checkpoint::link_best(deck_.run.dir, history_.best_step);
    log::info("held out  {}, measured every {}", counted(set_->items().size(), "sample"),
              counted(validation_.every, "step"));
    // The line of a step stands before the checkpoint of that step.
    lines_.emplace(std::filesystem::path(deck_.run.dir) / "validation.jsonl",
                   trainer_.steps_done() + 1);
  }

  bool due() const {
    const std::int64_t done = trainer_.steps_done();
    return done > 0 && done % validation_.every == 0 && history_.newest != done;
  }
  // Collective. True if it is the best so far.
  bool measure() {
    const WallPart part("validation");
    const std::int64_t done = trainer_.steps_done();
    const double start = now_seconds();
    trainer_.forward_only(Phase::validation, [&] {
      result_ = work_->run([&] { trainer_.communicator().progress(done, Phase::validation); },
                           [&] { trainer_.forwards_done(); });
    });
    best_ = history_.add(done, result_->total.loss);
    trainer_.set_validation_note(history_.to_text());
    seconds_ = now_seconds() - start;
    if (lines_) lines_->write(result_->json(done, history_.set));
    return best_;
  }
  // Prints the result of the last measure(), once, behind the line of its step.
  void print() {
    if (seconds_ < 0) return;
    log::info("held out  step {}: {}, {}; {:.3f} s", history_.newest, result_->text(),
              best_ ? "the best so far" : history_.best_text(), seconds_);
    seconds_ = -1;
  }
  // Whether patience is at its end.
  bool exhausted() const {
    return validation_.patience > 0 && history_.since_best >= validation_.patience;
  }
  std::string verdict() const {
    return fmt::format("{} without a smaller held-out loss than {:.5f} at step {}",
                       counted(history_.since_best, "validation"), history_.best,
                       history_.best_step);
  }
  // For the end of the log.
  std::string best_text() const { return history_.best_text(); }
  // The newest loss of this start.
  std::optional<double> newest() const {
    return result_ ? std::optional(result_->total.loss) : std::nullopt;
  }

 private:
  const Deck& deck_;
  const ValidationDeck& validation_;
  Trainer& trainer_;
  std::unique_ptr<ValidationSet> set_;
  std::unique_ptr<Validation> work_;
  std::optional<StepLines> lines_;  // rank 0's
  ValidationHistory history_;
  std::optional<ValidationResult> result_;
  bool best_ = false;
  double seconds_ = -1;
};

// [samples], made from the checkpoint of their step.
class SampleClips {
 public:
  // Before the trainer's start(), which plans the memory.
  SampleClips(const Deck& deck, MPI_Comm world, Trainer& trainer)
      : every_(deck.get<SamplesDeck>().every), trainer_(trainer), samples_(deck, world) {
    trainer.plan_also([this](std::size_t capacity) { return samples_.plan(capacity); });
    log::info("samples   {}", samples_.describe());
  }
  bool due() const { return trainer_.steps_done() > 0 && trainer_.steps_done() % every_ == 0; }
  bool made() const { return samples_.made(trainer_.steps_done()); }
  // Collective, once a save of this step has begun.
  void make() {
    const std::int64_t done = trainer_.steps_done();
    if (!trainer_.wait_for_save()) {
      if (trainer_.first_rank())
        log::warn("no samples of step {}: its checkpoint could not be written", done);
      return;
    }
    const WallPart part("samples");
    const double start = now_seconds();
    trainer_.forward_only(Phase::samples, [&] {
      samples_.make(done, [&] { trainer_.communicator().progress(done, Phase::samples); });
    });
    log::info("samples   step {}: {}; {:.3f} s", done, samples_.folder(done).string(),
              now_seconds() - start);
  }

 private:
  std::int64_t every_;
  Trainer& trainer_;
  TrainingSamples samples_;
};

int run(const Deck& deck, MPI_Comm world, Trainer& trainer, HeldOutLoss* held_out,
        SampleClips* samples, ClockOffset& clock) {
  // 1. What this run is, for the reader of the log and for weft report.
  RunFacts facts(deck, trainer);
  std::optional<MetricsWriter> metrics;
  if (trainer.first_rank()) {
    facts.print();
    facts.write(deck.run.dir);
    metrics.emplace(deck.run.dir, trainer.steps_done());
  }

  const std::int64_t before = trainer.steps_done();
  const auto exhausted = [&] { return held_out != nullptr && held_out->exhausted(); };
  const std::filesystem::path status = std::filesystem::path(deck.run.dir) / "status.json";
  const std::optional<JobStatus> known = read_status(status);
  // A repeat of a finished run has nothing to add to what stands there.
  const bool repeats = (before >= deck.train.steps || exhausted()) && known &&
                       known->state == "finished" && known->done == before;
  Progress progress({repeats ? "" : status, "train", "step", "", deck.train.steps, before,
                     log::rank(), trainer.communicator().size(), citations(deck, "train")});

  // 2. Steps, until done or asked to stop.
  begin_part("steps");
  bool last = false;
  const auto report = [&] {
    for (const StepMetrics& m : trainer.finished(last)) {
      facts.count(m);
      if (!trainer.first_rank()) continue;
      metrics->write(m);
      const std::int64_t done = m.step + 1;
      Progress::Values values = {{"loss", m.loss}};
      if (held_out != nullptr && held_out->newest())
        values.emplace_back("validation_loss", *held_out->newest());
      progress.advance(done, static_cast<double>(done - before),
                       static_cast<double>(deck.train.steps - before), values);
      if (done % deck.train.log_every == 0 || (last && done == trainer.steps_done()))
        facts.print_step(m, progress.left_text());
    }
    if (held_out != nullptr) held_out->print();
  };
  // A job that dies after a save goes on from it: the lines until then must be there.
  trainer.before_saves(report);
  // True if a measurement was due, and this checkpoint is to be kept as the best.
  const auto measure = [&] {
    return held_out != nullptr && held_out->due() && held_out->measure() && deck.train.keep_best;
  };
  if (before >= deck.train.steps)
    log::info("nothing to do: {} of {} steps are done; raise train.steps to continue", before,
              deck.train.steps);
  // A run that was asked to stop has left this for now.
  if (before < deck.train.steps && measure()) trainer.save(true);
  if (samples != nullptr && samples->due() && !samples->made()) samples->make();
  bool stopped = false;
  while (trainer.steps_done() < deck.train.steps && !stopped && !exhausted()) {
    trainer.step();
    const unsigned asked = trainer.take_requests();
    const std::int64_t done = trainer.steps_done();
    stopped = (asked & request::stop) != 0;
    const bool whole = !stopped || done == deck.train.steps;
    const bool best = whole && measure(), sample = whole && samples != nullptr && samples->due();
    last = done == deck.train.steps || stopped || exhausted();
    const bool regular = deck.train.checkpoint_every > 0 && done % deck.train.checkpoint_every == 0;
    if (best || sample)
      trainer.save(best);
    else if (!last && (asked & request::save) != 0)
      trainer.save();
    else if (!last && regular)
      trainer.save_if_free();
    if (sample) samples->make();
    if ((asked & request::dump_trace) != 0) write_trace(deck.run.dir, world, &clock);
    report();
  }
  last = true;
  report();
  progress.hide();

  // 3. The last state is always saved.
  if (!trainer.saved()) trainer.save();
  const bool saved = trainer.wait_for_save();
  begin_part("end");
  if (deck.run.trace) write_trace(deck.run.dir, world, &clock);
  if (trainer.first_rank()) facts.print_end(trainer);
  // After that: the limit is measured in the arena, whose peak would be the measurement's.
  const JobWork work = facts.work(trainer, world);
  if (work.items > 0) progress.set_work(work);
  if (held_out != nullptr && held_out->newest())
    log::info("held out  {}{}", held_out->best_text(),
              deck.train.keep_best ? ", kept as " + deck.run.dir + "/best" : "");
  WEFT_CHECK(saved, Exit::checkpoint, "free space under run.dir; the older checkpoints are intact",
             "the last checkpoint of {} (step {}) could not be written", deck.run.dir,
             trainer.steps_done());
  if (trainer.steps_done() < deck.train.steps && exhausted()) {
    const std::string why = fmt::format(
        "stopped early after step {} of {}: {} (validation.patience = {})", trainer.steps_done(),
        deck.train.steps, held_out->verdict(), deck.get<ValidationDeck>().patience);
    log::info("{}", why);
    if (trainer.first_rank()) progress.end(0, trainer.steps_done(), why);
    return 0;
  }
  if (trainer.steps_done() < deck.train.steps) {
    log::info("stopped on request after step {}: run the same command to resume",
              trainer.steps_done());
    if (trainer.first_rank()) progress.end(static_cast<int>(Exit::stopped), trainer.steps_done());
    return static_cast<int>(Exit::stopped);
  }
  if (trainer.first_rank()) progress.end(0, trainer.steps_done());
  return 0;
}

// Collective. The deck with the steps of train.steps = "+N": N more than the run's newest
// checkpoint. A start before that was asked for as many, and was stopped, is finished first: a job
// that is queued again goes on to the same step.
Deck with_more_steps(Deck deck, MPI_Comm world) {
  std::int64_t until = 0;
  if (log::rank() == 0) {
    const auto latest = deck.run.resume ? checkpoint::read_latest(deck.run.dir) : std::nullopt;
    const std::int64_t done = latest ? checkpoint::step_of(*latest).value_or(0) : 0;
    const auto [asked, then] = stored_more_steps(deck.run.dir);
    until = asked == deck.train.more_steps && then > done ? then : done + deck.train.more_steps;
    log::info("steps     until {}: train.steps = \"+{}\"{}", until, deck.train.more_steps,
              until == then ? ", as before" : fmt::format(", and {} are done", done));
  }
  MPI_Bcast(&until, 1, MPI_INT64_T, 0, world);
  deck.train.steps = until;
  return deck;
}

int train(const Deck& given, MPI_Comm world) {
  const Deck deck = given.train.more_steps > 0 ? with_more_steps(given, world) : given;
  watch_stop_signals();
  // Always on, since it costs next to nothing: RUN/dump_trace can then show what just happened.
  trace::start();
  ClockOffset clock(world);
  if (!stage_data(deck, world)) return static_cast<int>(Exit::stopped);
  // Data, model, run directory; then the state: new, or where the last job of this run left it.
  Trainer trainer(deck, make_task, world);
  std::optional<HeldOutLoss> held_out;
  if (deck.get<ValidationDeck>().every > 0) held_out.emplace(deck, trainer);
  std::optional<SampleClips> samples;
  if (deck.get<SamplesDeck>().every > 0) samples.emplace(deck, world, trainer);
  trainer.start();
  if (held_out) held_out->begin();
  try {
    return run(deck, world, trainer, held_out ? &*held_out : nullptr, samples ? &*samples : nullptr,
               clock);
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
  c.handles_stop_signals = true;
  c.takes_deck();
  c.key_option<bool>("--trace", "run.trace", "write RUN/trace.json, for Perfetto");
  return c;
}

}  // namespace weft
