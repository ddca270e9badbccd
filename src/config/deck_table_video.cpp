// The option table's rows for the VAE, the text encoder and generation.
#include "config/deck_rows.h"

namespace weft {

void vae_rows(Rows& r, Deck& d) {
  r.section("vae");
  r.text(
      "weights", d.vae.weights,
      "Safetensors file, index or folder with the VAE under the released names; empty draws it at "
      "random (training) or takes the newest checkpoint of run.dir.");
  r.number("spatial_channels", d.vae.spatial_channels, 1, 65536,
           "Channels of the 2D VAE at full, half, quarter ... size; the last two alike in the "
           "released one.");
  r.number("spatial_res_blocks", d.vae.spatial_res_blocks, 1, 100,
           "Residual blocks at each size of the 2D encoder; the decoder has one more.");
  r.number("spatial_groups", d.vae.spatial_groups, 1, 65536, "Groups of its GroupNorm.");
  r.number("filters", d.vae.filters, 1, 65536, "Channels of the temporal VAE at its full length.");
  r.number("num_res_blocks", d.vae.num_res_blocks, 1, 100,
           "Residual blocks at each of its levels.");
  r.number("channel_multipliers", d.vae.channel_multipliers, 1, 1024,
           "Channels of each level over filters.");
  r.flag("temporal_downsample", d.vae.temporal_downsample,
         "Whether the length halves behind each level but the last.");
  r.number("num_groups", d.vae.num_groups, 1, 65536, "Groups of its GroupNorm.");
  r.number("micro_frame_size", d.vae.micro_frame_size, 0, 100000,
           "Frames that the temporal VAE takes at once, each chunk by itself; 0 takes all.");
  r.number("micro_batch_size", d.vae.micro_batch_size, 0, 100000,
           "Frames that the 2D VAE takes at once; 0 takes as many as memory allows.");
  r.number(
      "scale", d.vae.scale, 1e-6, 1e6,
      "Deviation of each latent channel, which is divided by; empty, with shift: `weft encode` "
      "measures both.");
  r.number("shift", d.vae.shift, -1e6, 1e6, "Mean of each latent channel, which is subtracted.");
  r.text("dtype", d.vae.dtype, "Number format of its weights and activations.", {"f32", "bf16"});

  r.section("vae_train");
  r.flag("freeze_spatial", d.vae_train.freeze_spatial, "Train the temporal VAE alone.");
  r.flag("pixel_loss", d.vae_train.pixel_loss,
         "Train for the pixels: L1, LPIPS and KL divergence (stage 3).");
  r.flag("latent_loss", d.vae_train.latent_loss,
         "Train for the 2D latents, as the temporal VAE gives them back (stages 1 and 2).");
  r.flag("identity_loss", d.vae_train.identity_loss,
         "Hold latents of single frames to the 2D latents (stage 1).");
  r.number("image_share", d.vae_train.image_share, 0, 1,
           "Share of the samples that train with their first frame alone.");
  r.flag("random_length", d.vae_train.random_length,
         "Train with the first frames of each clip, as many as are drawn from 1 to all.");
  r.number("perceptual_weight", d.vae_train.perceptual_weight, 0, 1e6, "Weight of LPIPS.");
  r.number("kl_weight", d.vae_train.kl_weight, 0, 1e6, "Weight of the KL divergence.");
  r.text(
      "lpips_weights", d.vae_train.lpips_weights,
      "Safetensors file with VGG16 and LPIPS's own weights; empty leaves LPIPS out, and says so.");
  r.text("discriminator", d.vae_train.discriminator,
         "Adversarial loss against a PatchGAN; the released model was trained with none.",
         {"none", "patchgan"});
  r.text("discriminator_loss", d.vae_train.discriminator_loss, "Loss of the discriminator.",
         {"hinge", "vanilla", "non-saturating"});
  r.number("discriminator_weight", d.vae_train.discriminator_weight, 0, 1e6,
           "Factor of the adversarial loss, beside its adaptive weight.");
  r.number("discriminator_start", d.vae_train.discriminator_start, 0, many,
           "First step with the adversarial loss.");
  r.number("discriminator_lr", d.vae_train.discriminator_lr, 0, 1e3,
           "Learning rate of the discriminator.");
  r.number("lecam_weight", d.vae_train.lecam_weight, 0, 1e6,
           "Factor of the LeCam regularisation of the discriminator; 0 leaves it out.");
  r.number("gradient_penalty_weight", d.vae_train.gradient_penalty_weight, 0, 1e6,
           "Factor of the discriminator's gradient penalty; 0 leaves it out.");

  r.section("reconstruct");
  r.text("inputs", d.reconstruct.inputs,
         "Footage to send through the VAE and back: files or globs.");
  r.text("output", d.reconstruct.output, "Directory of the results; empty is RUN/reconstructed.");
  r.number("frames", d.reconstruct.frames, 0, many, "Frames of each to take; 0 takes all.");
  r.number("height", d.reconstruct.height, 0, 16384,
           "Height in pixels to resize to; 0 keeps that of the footage, cut to a multiple of 8.");
  r.number("width", d.reconstruct.width, 0, 16384, "Width in pixels, likewise.");
}

void text_rows(Rows& r, Deck& d) {
  r.section("t5");
  r.text("weights", d.t5.weights,
         "Safetensors file, index or folder with the T5 encoder; empty conditions on the null "
         "caption.");
  r.text("tokenizer", d.t5.tokenizer,
         "SentencePiece model; empty looks for spiece.model beside the weights.");
  r.number("d_model", d.t5.d_model, 1, 65536, "Channels of a token.");
  r.number("d_kv", d.t5.d_kv, 1, 1024, "Channels of an attention head.");
  r.number("num_heads", d.t5.num_heads, 1, 1024, "Attention heads.");
  r.number("d_ff", d.t5.d_ff, 1, 1e6, "Width of the gated MLP.");
  r.number("num_layers", d.t5.num_layers, 1, 1000, "Layers.");
  r.number("vocab_size", d.t5.vocab_size, 1, 1e7, "Rows of the embedding.");
  r.number("max_length", d.t5.max_length, 1, 65536,
           "Longest caption in tokens, its end mark included; longer ones are cut.");
  r.text("dtype", d.t5.dtype, "Number format of its weights and activations.", {"f32", "bf16"});
  r.flag("clean", d.t5.clean, "Clean captions as Open-Sora's inference does.");
  r.number("memory_gib", d.t5.memory_gib, 0, 1e6,
           "Memory in GiB that the encoder may take on each rank; one value counts for all, none "
           "takes what is free.");
  r.number("micro_batch", d.t5.micro_batch, 1, 65536,
           "Captions that go through the layers together.");

  r.section("encode");
  r.text("output", d.encode.output, "The store of latents (HDF5) to write.");
  r.text(
      "latents", d.encode.latents,
      "What is stored: the moments, from which training draws anew each time, or one drawn sample.",
      {"moments", "sampled"});
  r.text("dtype", d.encode.dtype, "Number format in the store.", {"f16", "f32"});
  r.flag("text", d.encode.text, "Also store the captions' T5 features.");
}

void generation_rows(Rows& r, Deck& d) {
  GenerateDeck& g = d.generate;
  r.section("generate");
  r.text("weights", g.weights,
         "STDiT3: safetensors file, index or folder, a run directory, or random:SEED; empty takes "
         "the newest checkpoint of run.dir.");
  r.flag("ema", g.ema, "Of a checkpoint, use the moving average of the weights.");
  r.text("prompts", g.prompts, "The prompts; they may end in options as JSON.");
  r.text("prompt_file", g.prompt_file, "Text file with a prompt a line, instead of prompts.");
  r.text("prompt_generator", g.prompt_generator,
         "One prompt for every number from start_index up to end_index, instead of prompts or "
         "prompt_file.");
  r.text("refine", g.refine,
         "Shell command that rewrites the texts before T5: a line in, a line out, in the same "
         "order; empty takes them as they are.");
  r.number("start_index", g.start_index, 0, many, "First of the prompts, counted from 0, to take.");
  r.number("end_index", g.end_index, 0, many,
           "Prompt to end before; 0 takes all, but for prompt_generator, which has no last one.");
  r.number("num_samples", g.num_samples, 1, 1e6, "Clips of each prompt.");
  r.number("max_clips", g.max_clips, 1, many,
           "Most clips of a job: prompts times num_samples; more are refused.");
  r.number("batch_size", g.batch_size, 1, 64,
           "Clips of one size that a rank, or a group of parallel.sp, samples together; those with "
           "references, masks or loops stay alone.");
  r.text("resolution", g.resolution, "Size by Open-Sora's names, such as 144p or 720p.");
  r.text("aspect_ratio", g.aspect_ratio,
         "Height to width, as Open-Sora writes it: 9:16 is a wide picture.");
  r.number("image_size", g.image_size, 8, 16384,
           "Height and width in pixels, instead of resolution and aspect_ratio.");
  r.text("num_frames", g.num_frames,
         "Frames as a number, or one of 1x/2s, 2x/4s, 4x/8s, 8x/16s, 16x/32s; 1 makes a picture.");
  r.number("fps", g.fps, 0.01, 1000, "Frames a second that the model is told.");
  r.number("frame_interval", g.frame_interval, 1, 1000,
           "Frames between two of the clip; divides the rate at which it is saved.");
  r.number("save_fps", g.save_fps, 0, 1000,
           "Frames a second of the files; 0 takes fps / frame_interval.");
  r.number("loop", g.loop, 1, 100000, "Clips in a row, each going on from the one before.");
  r.number("condition_frame_length", g.condition_frame_length, 0, 100000,
           "Latent frames of the clip before that the next one begins with.");
  r.number("condition_frame_edit", g.condition_frame_edit, 0, 1, "How far they may change.");
  r.number("align", g.align, 0, 100000,
           "Latent frames of a VAE chunk, to which mask strategies snap; 0 does not snap.");
  r.text("references", g.references,
         "For each prompt its reference files, separated by semicolons, or nothing.");
  r.text("mask_strategies", g.mask_strategies,
         "For each prompt where its references go, in Open-Sora's notation, or nothing.");
  r.number("aes", g.aes, 0, 100, "Aesthetic score that prompts ask for; 0 asks for none.");
  r.number("flow", g.flow, 0, 1000, "Motion score that prompts ask for; 0 asks for none.");
  r.text("camera_motion", g.camera_motion, "Camera motion that prompts ask for; empty for none.");
  r.text("output", g.output, "Directory of the results; empty is RUN/generated.");
  r.text("sample_name", g.sample_name,
         "Beginning of the files' names; empty is \"sample\", or nothing with prompt_as_path.");
  r.flag("prompt_as_path", g.prompt_as_path, "Name each file by its prompt.");
  r.text("watermark", g.watermark, "Picture to lay over a copy of each clip; empty for none.");
  r.flag(
      "tensors", g.tensors,
      "Beside each clip also its latents and its frames before they are rounded, as safetensors.");
  r.flag("share_out", g.share_out,
         "Ranks take prompts from a shared queue; false deals them out beforehand (to measure what "
         "the queue gains).");
}

}  // namespace weft
