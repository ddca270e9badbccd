// The sampler's tables of the deck: [diffusion] and [sampler].
#include "config/deck_table.h"
#include "models/flow_sampler.h"

namespace weft {
namespace {

// Sampling heeds use_discrete_timesteps alone; the others are of training.
void diffusion_rows(Rows& r, DiffusionDeck& d) {
  r.decide(false);
  r.number("num_timesteps", d.num_timesteps, 1, many,
           "Timesteps that the time from noise to data is measured in.");
  r.text("sample_method", d.sample_method, "Distribution of the training timesteps.",
         {"logit-normal", "uniform"});
  r.number("loc", d.loc, -100, 100, "Mean of the normal in logit-normal.");
  r.number("scale", d.scale, 1e-6, 100, "Deviation of the normal in logit-normal.");
  r.decide(true);
  r.flag("use_discrete_timesteps", d.use_discrete_timesteps, "Draw whole timesteps only.");
  r.decide(false);
  r.flag("use_timestep_transform", d.use_timestep_transform,
         "Shift timesteps towards noise for larger and longer clips.");
  r.number("transform_scale", d.transform_scale, 1e-6, 1e6, "Strength of that shift in training.");
}

}  // namespace

// Keys that are newer than clips of today's decks count once they are used, so that such clips are
// not made again.
void sampler_rows(Rows& r, SamplerDeck& d) {
  r.decide(d.solver != "euler");
  r.text("solver", d.solver, "How a step goes from noise towards the clip.",
         {"euler", "unipc", "dpm++"});
  r.decide(true);
  r.number("steps", d.steps, 1, 100000, "Steps from noise to clip.");
  r.number("cfg_scale", d.cfg_scale, 0, 1000,
           "Weight of the caption in classifier-free guidance; 1 follows it plainly, with half of "
           "the work. A list of two is for low and for high noise (sampler.boundary).")
      .or_one = true;
  r.flag("use_timestep_transform", d.use_timestep_transform,
         "Shift timesteps towards noise for larger and longer clips.");
  r.decide(d.shift > 0);
  r.number(
      "shift", d.shift, 0, 1000,
      "Shift timesteps towards noise by this factor, whatever the clip's size; 0: by its size.");
  r.decide(!d.timesteps.empty());
  r.number("timesteps", d.timesteps, 1e-3, 1000,
           "Timesteps before the shift, falling, in place of steps: of a model that was distilled "
           "to few steps. Needs solver = \"euler\" and a shift.");
  r.decide(d.caches());
  r.text("cache", d.cache,
         "Rule by which steps take the model's work from the step before: teacache for models with "
         "published coefficients, easycache for any.",
         {"none", "teacache", "easycache"});
  r.number("cache_threshold", d.cache_threshold, 0, 1000,
           "Sum of relative changes up to which steps are skipped; 0 skips none.");
}

void expert_rows(Rows& r, SamplerDeck& d) {
  r.decide(d.boundary > 0);
  r.number("boundary", d.boundary, 0, 1,
           "Two experts: the one of high noise makes the steps from this timestep / 1000 on; 0: "
           "there is one model.");
  r.decide(d.boundary_step > 0);
  r.number("boundary_step", d.boundary_step, 0, 100000,
           "Two experts: so many steps first are the one's of high noise, whatever the boundary.");
}

void check_sampler(const SamplerDeck& d, const DeckDemand& demand) {
  const bool experts = d.boundary > 0 || d.boundary_step > 0;
  demand(d.cfg_scale.size() == 1 || (d.cfg_scale.size() == 2 && experts),
         fmt::format("sampler.cfg_scale has {} numbers", d.cfg_scale.size()),
         "give one, or two with sampler.boundary: for low and for high noise");
  demand(d.timesteps.empty() || (d.solver == "euler" && d.shift > 0),
         fmt::format("sampler.timesteps with sampler.solver = \"{}\" and sampler.shift = {}",
                     d.solver, d.shift),
         "set solver = \"euler\", and the shift that the model was distilled with (1: none)");
  for (std::size_t i = 1; i < d.timesteps.size(); ++i)
    demand(d.timesteps[i] < d.timesteps[i - 1],
           fmt::format("sampler.timesteps[{}] = {} is not below {}", i, d.timesteps[i],
                       d.timesteps[i - 1]),
           "list them from noise to data, as [1000, 750, 500, 250]");
  demand(d.cache != "none" || d.cache_threshold == 0,
         fmt::format("sampler.cache_threshold is {}, and sampler.cache is \"none\"",
                     d.cache_threshold),
         "set sampler.cache = \"easycache\", or leave the threshold out");
}

DeckTable diffusion_table() { return deck_table("diffusion", diffusion_rows); }

}  // namespace weft
