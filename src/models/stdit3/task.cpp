#include "models/stdit3/task.h"

#include "core/error.h"
#include "models/lora.h"
#include "models/stdit3/options.h"

namespace weft {

Stdit3Task::Stdit3Task(const Deck& deck)
    : VideoTask(deck, stdit3_latents(deck), stdit3_captions(deck),
                deck.get<Stdit3Deck>().patch_size),
      held_out_deck_(deck),
      model_(stdit3_config(deck)) {
  held_out_deck_.get<MaskDeck>() = {};
  held_out_deck_.get<Stdit3Deck>().class_dropout_prob = 0;
  held_out_deck_.get<Stdit3Deck>().drop_path = 0;
  WEFT_CHECK(deck.model.name == "stdit3", Exit::usage,
             "plan a VAE with model.name = \"vae\", and encoding with weft plan --job encode",
             "model.name = \"{}\": this job is for stdit3 alone", deck.model.name);
  WEFT_CHECK(!masks_wanted(deck.get<MaskDeck>()) || deck.get<Stdit3Deck>().patch_size[0] == 1,
             Exit::usage, "use a patch_size of one frame, or no [mask]",
             "frame masks choose single frames, model.patch_size takes {} together",
             deck.get<Stdit3Deck>().patch_size[0]);
  if (!trains_adapters()) return;
  WEFT_CHECK(!deck.get<Stdit3Deck>().only_train_temporal, Exit::usage,
             "leave it out; lora.targets = [\"temporal_blocks.*\"] chooses these layers",
             "model.only_train_temporal = true with lora.rank = {}", deck.get<LoraDeck>().rank);
  const std::vector<nn::Linear*> layers = model_.linears();
  add_adapters(deck.get<LoraDeck>(), model_.params(), layers);
}

std::string Stdit3Task::describe() const {
  const Stdit3Deck& m = deck_.get<Stdit3Deck>();
  const LoraDeck& lora = deck_.get<LoraDeck>();
  return fmt::format("{}: {} pairs, C = {}, {} heads, {}{}", deck_.model.name, m.depth,
                     m.hidden_size, m.num_heads, deck_.model.dtype,
                     lora.on() ? fmt::format(", LoRA of rank {}", lora.rank) : "");
}

VideoTask::Flow Stdit3Task::make_flow(const Bucket& bucket, const LoadedBatch& clips,
                                      const Tensor& bytes, double recompute, bool held_out) {
  TrainingBatch batch =
      make_batch(held_out ? held_out_deck_ : deck_, bucket, clips, bytes, features(), latents());
  batch.in.recompute = recompute;
  Flow flow{batch.x0, batch.eps, batch.in.timestep,
            fmt::format("captions {}", batch.in.captions.index.numel()), nullptr};
  flow.loss = [this, batch](Tape& tape, const Tensor& weight) {
    return flow_loss(tape, model_, batch.x0, batch.eps, batch.in, weight);
  };
  return flow;
}

}  // namespace weft
