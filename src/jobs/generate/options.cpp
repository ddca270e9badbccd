#include "jobs/generate/options.h"

#include "config/deck_table.h"

namespace weft {
namespace {

// Most keys say which clips to make, and each clip has them in its own key (job.cpp).
void generate_rows(Rows& r, GenerateDeck& d) {
  r.decide(false);
  r.path(
      "weights", d.weights,
      "The model: safetensors file, index or folder, a run directory, or random:SEED; empty takes "
      "the newest checkpoint of run.dir.");
  r.path(
      "adapters", d.adapters,
      "Adapters (LoRA) to add to these weights, PATH or PATH=FACTOR each: folders of weft export "
      "or PEFT, run directories, or files with the names of ComfyUI, kohya or diffusers.");
  r.path("weights_high_noise", d.weights_high_noise,
         "Of a model of two experts (sampler.boundary), that of high noise, beside weights for low "
         "noise; empty: weights is a folder that holds both, as they are released.");
  r.path("adapters_high_noise", d.adapters_high_noise, "Adapters of that expert, as adapters.");
  r.text("experts", d.experts,
         "Of a model of two experts. together: both stay in memory; in_turn: one at a time, read "
         "again for its steps; auto: in turn where both do not fit.",
         {"auto", "together", "in_turn"});
  r.number("cfg_ranks", d.cfg_ranks, 1, 2,
           "2: the two halves of guidance on two ranks (or groups of parallel.sp), which make a "
           "clip together in about half the time.");
  r.flag("ema", d.ema, "Take the moving average of a checkpoint's weights.");
  r.text("prompts", d.prompts, "The prompts; they may end in options as JSON.");
  r.path("prompt_file", d.prompt_file, "Text file with a prompt a line, instead of prompts.");
  r.text("prompt_generator", d.prompt_generator,
         "One prompt for every number from start_index up to end_index, instead of prompts or "
         "prompt_file.");
  r.text("negative_prompt", d.negative_prompt,
         "What guidance steers away from, of prompts without a negative_prompt of their own; empty "
         "takes the model's: its null caption, or the text that it was released with.");
  r.text("refine", d.refine,
         "Shell command that rewrites the texts before they are encoded: a line in, a line out, in "
         "the same "
         "order; empty takes them as they are.");
  r.number("start_index", d.start_index, 0, many, "First of the prompts, counted from 0, to take.");
  r.number("end_index", d.end_index, 0, many,
           "Prompt to end before; 0 takes all, but for prompt_generator, which has no last one.");
  r.number("num_samples", d.num_samples, 1, 1e6, "Clips of each prompt.");
  r.number("max_clips", d.max_clips, 1, many,
           "Most clips of a job: prompts times num_samples; more are refused.");
  r.number("batch_size", d.batch_size, 1, 64,
           "Clips of one size that a rank, or a group of parallel.sp, samples together; clips with "
           "references, masks or loops are sampled alone.");
  r.text("resolution", d.resolution, "Size by Open-Sora's names, such as 144p or 720p.");
  r.text("aspect_ratio", d.aspect_ratio,
         "Height:width, as Open-Sora writes it: 9:16 is landscape, 16:9 portrait.");
  r.number("image_size", d.image_size, 8, 16384,
           "Height and width in pixels, instead of resolution and aspect_ratio.");
  r.text("num_frames", d.num_frames,
         "Frames as a number, or one of 1x/2s, 2x/4s, 4x/8s, 8x/16s, 16x/32s; 1 makes a picture.");
  r.decide(true);
  r.number("fps", d.fps, 0, 1000,
           "Frame rate given to the model; 0: the one that it was made for.");
  r.number("frame_interval", d.frame_interval, 1, 1000,
           "Frames between two of the clip; divides the rate at which it is saved.");
  r.number("save_fps", d.save_fps, 0, 1000, "Output frame rate; 0 takes fps / frame_interval.");
  r.number("loop", d.loop, 1, 100000, "Clips in a row, each continuing the one before.");
  r.number("condition_frame_length", d.condition_frame_length, 0, 100000,
           "Latent frames of the previous clip that the next one begins with.");
  r.number("condition_frame_edit", d.condition_frame_edit, 0, 1,
           "Editing strength of the condition frames, 0 (kept) to 1 (free).");
  r.number(
      "align", d.align, 0, 100000,
      "Latent frames of a chunk of the codec, to which mask strategies snap; 0 does not snap.");
  r.decide(false);
  r.path("references", d.references,
         "For each prompt its reference files, separated by semicolons, or nothing.");
  r.text("mask_strategies", d.mask_strategies,
         "For each prompt where its references go, in Open-Sora's notation, or nothing.");
  r.number(
      "aes", d.aes, -1, 100,
      "Aesthetic score that prompts ask for; 0 asks for none, below 0 for what the model was made "
      "for.");
  r.number("flow", d.flow, 0, 1000, "Motion score that prompts ask for; 0 asks for none.");
  r.text("camera_motion", d.camera_motion, "Camera motion that prompts ask for; empty for none.");
  r.path("output", d.output, "Directory of the results; empty is RUN/generated.");
  r.text("sample_name", d.sample_name,
         "Beginning of the files' names; empty is \"sample\", or nothing with prompt_as_path.");
  r.flag("prompt_as_path", d.prompt_as_path, "Name each file by its prompt.");
  r.decide(true);
  r.path("watermark", d.watermark, "Picture to lay over a copy of each clip; empty for none.");
  r.flag("tensors", d.tensors,
         "Also save the latents and unrounded frames of each clip, as safetensors.");
}

void check_generate(const GenerateDeck& d, const DeckDemand& demand) {
  demand(d.image_size.empty() || d.image_size.size() == 2,
         fmt::format("generate.image_size has {} numbers", d.image_size.size()),
         "give height and width, as [240, 426]");
  const double rate = d.save_fps > 0 ? d.save_fps : d.fps / static_cast<double>(d.frame_interval);
  demand(rate == 0 || rate >= 0.01,
         fmt::format("generate.save_fps = {:.4g}, or generate.fps / generate.frame_interval = "
                     "{:.4g}, is less than a frame in 100 seconds",
                     d.save_fps, d.fps / static_cast<double>(d.frame_interval)),
         "give frames a second, such as 24, or 0 for the model's own");
}

}  // namespace

DeckTable generate_table() { return deck_table("generate", generate_rows, check_generate); }

}  // namespace weft
