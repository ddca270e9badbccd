#include "commands/export_weights.h"

#include "core/arena.h"
#include "core/error.h"
#include "core/log.h"
#include "models/stdit3.h"
#include "models/weights.h"
#include "train/state.h"

namespace weft {

int export_weights(const std::string& run, const std::string& output, bool ema) {
  namespace fs = std::filesystem;
  std::optional<Checkpoint> checkpoint;
  if (fs::exists(fs::path(run) / "manifest.json"))
    checkpoint = Checkpoint::open(run);
  else
    checkpoint = Checkpoint::newest(run, MPI_COMM_SELF);
  WEFT_CHECK(checkpoint.has_value(), Exit::checkpoint, "name a run directory or a step_N in it",
             "{} holds no checkpoint", run);
  const Deck deck =
      parse_deck(checkpoint->info().deck, checkpoint->dir().string() + "/manifest.json", {});
  const auto arena = Arena::reserve(std::size_t{1} << 32);
  const ArenaScope scope(*arena);
  Stdit3 model(deck.model);
  model.params().allocate(1 << 22, false, false);
  if (ema)
    restore_ema(*checkpoint, model.params());
  else
    restore_state(*checkpoint, model.params());
  save_weights(output, model.params());
  log::info("{} tensors of step {} ({}) in {}", model.params().all().size(),
            checkpoint->info().step, ema ? "EMA" : "weights", output);
  return 0;
}

}  // namespace weft
