// The option table: every key of a deck, once. Parsing, --help, the reference page, the default
// deck and the copy kept with each run are all made from these rows.
#include "config/deck_rows.h"

namespace weft {
namespace {

void run_and_data(Rows& r, Deck& d) {
  r.section("run");
  r.text("dir", d.run.dir, "Directory of the run: checkpoints, metrics, samples, report.");
  r.number("seed", d.run.seed, 0, many, "Seed of every random number of the run.");
  r.flag("resume", d.run.resume,
         "Go on from the run's newest checkpoint if there is one; false starts anew.");
  r.number("threads", d.run.threads, 0, 4096,
           "Processor threads a rank uses; 0 shares the host's cores among its ranks.");
  r.flag("trace", d.run.trace, "Write RUN/trace.json for Perfetto: what every rank did when.");
  r.number("stop_margin", d.run.stop_margin, 0, 1e6,
           "Seconds before the end of a Slurm job (SLURM_JOB_END_TIME) at which a run saves and "
           "stops by itself.");

  r.section("device");
  r.text("kind", d.device.kind, "Where the work is done; auto takes a GPU if there is one.",
         {"auto", "cpu", "cuda"});
  r.flag("share", d.device.share,
         "Let several ranks use one GPU; they then reduce through the host (for tests).");
  r.flag("graphs", d.device.graphs,
         "On GPUs, record the work of a micro-batch once for each shape and replay it.");
  r.flag("tf32", d.device.tf32,
         "On GPUs, let products and convolutions in f32 round their factors to TF32, as PyTorch's "
         "convolutions do.");

  r.section("memory");
  r.number("arena_gib", d.memory.arena_gib, 0, 1e6,
           "Memory for the activations of a step in GiB a rank; 0 reserves what the host has for "
           "each rank and touches what a step needs.");

  r.section("media");
  r.number("max_gib", d.media.max_gib, 0, 1e6,
           "Largest video or picture file that is read, in GiB.");
  r.number("max_hours", d.media.max_hours, 0, 1e6, "Longest video, in hours.");
  r.number("max_frames", d.media.max_frames, 1, many, "Most frames of a video.");
  r.number("max_megapixels", d.media.max_megapixels, 1e-6, 2000,
           "Largest frame: height times width in millions of pixels.");
  r.number(
      "timeout", d.media.timeout, 0, 1e9,
      "Seconds that reading and decoding one file, or fetching it, may take; 0 sets no limit.");
  r.number("max_list_mib", d.media.max_list_mib, 0, 1e6,
           "Largest list of footage or file of prompts, in MiB.");
  r.number("max_download_mib", d.media.max_download_mib, 0, 1e9,
           "Largest file fetched from an address that a prompt names, in MiB; 0 fetches none.");

  r.section("ingest");
  r.text("inputs", d.ingest.inputs,
         "Footage: video files, globs, .csv or .jsonl lists, or lavfi:SOURCE.");
  r.text("output", d.ingest.output, "The clip store (HDF5) to write.");
  r.text("resolutions", d.ingest.resolutions,
         "Bucket resolutions to cut clips for, by the names of Open-Sora.",
         {"144p", "240p", "256", "360p", "480p", "512", "720p", "1024", "1080p", "2k", "2048",
          "2880", "4k"});
  r.number("frames", d.ingest.frames, 1, 100000, "Clip lengths to cut, in frames.");
  r.number("frame_interval", d.ingest.frame_interval, 1, 1000,
           "Take every n-th frame of the footage.");
  r.number("stride", d.ingest.stride, 0, many,
           "Frames of footage between the starts of two clips; 0 cuts clips end to end.");
  r.number("height", d.ingest.height, 0, 16384,
           "Height of every clip in pixels instead of the bucket's; 0 keeps the bucket's.");
  r.number("width", d.ingest.width, 0, 16384,
           "Width of every clip in pixels instead of the bucket's; 0 keeps the bucket's.");
  r.number("fps", d.ingest.fps, 0, 1000,
           "Frames a second to resample the footage to; 0 keeps its own rate.");
  r.number("max_clips", d.ingest.max_clips, 0, many, "Stop after so many clips; 0 takes all.");
  r.flag("strict", d.ingest.strict, "End with exit code 3 if any input had to be skipped.");

  r.section("data");
  r.text("path", d.data.path,
         "A clip store, or synthetic:key=value,... for moving shapes made in memory.");
  r.text("text_features", d.data.text_features,
         "A safetensors file with T5 features of the captions; empty trains on the null caption.");
  r.number("readers", d.data.readers, 0, 256,
           "Threads a rank reads clips with; 0 chooses from the cores it has.");
  r.number("prefetch", d.data.prefetch, 1, 1024, "Micro-batches a rank reads ahead.");
  r.flag("verify", d.data.verify, "Check the hash of every clip that is read.");
  r.number("max_damaged", d.data.max_damaged, 0, 1,
           "Share of the clips that may be damaged: each is replaced by the next whole one of its "
           "bucket, the same in every run. 0 ends the job at the first.");
}

void model_and_diffusion(Rows& r, Deck& d) {
  r.section("model");
  r.text("name", d.model.name,
         "The model that is trained or probed; the shape of a VAE is in [vae].",
         {"stdit3", "vae", "vae_temporal"});
  r.number("in_channels", d.model.in_channels, 1, 4096,
           "Channels of its input: 3 for pixels, 4 for latents of the VAE.");
  r.number("patch_size", d.model.patch_size, 1, 64,
           "Patch in frames, rows and columns of the input.");
  r.number("hidden_size", d.model.hidden_size, 4, 65536, "Channels of a token.");
  r.number("depth", d.model.depth, 1, 1000, "Pairs of a spatial and a temporal block.");
  r.number("num_heads", d.model.num_heads, 1, 1024, "Attention heads; divides hidden_size.");
  r.number("mlp_ratio", d.model.mlp_ratio, 0.01, 64, "Width of the MLP over hidden_size.");
  r.number("class_dropout_prob", d.model.class_dropout_prob, 0, 1,
           "Share of samples that train without their caption.");
  r.flag("pred_sigma", d.model.pred_sigma,
         "Give the output twice the input's channels, as the released models do.");
  r.number("drop_path", d.model.drop_path, 0, below_one,
           "Probability of leaving the last block out for a sample; grows linearly with depth.");
  r.number("caption_channels", d.model.caption_channels, 1, 65536,
           "Channels of the caption features: 4096 for T5 XXL.");
  r.number("model_max_length", d.model.model_max_length, 1, 65536, "Longest caption in tokens.");
  r.flag("qk_norm", d.model.qk_norm, "Normalise queries and keys in each head.");
  r.number("input_sq_size", d.model.input_sq_size, 1, 65536,
           "Side in pixels at which the position embedding has scale 1.");
  r.flag("only_train_temporal", d.model.only_train_temporal, "Train the temporal blocks alone.");
  r.flag("freeze_y_embedder", d.model.freeze_y_embedder, "Keep the caption projection as it is.");
  r.flag("skip_y_embedder", d.model.skip_y_embedder,
         "Captions come already projected to hidden_size.");
  r.text("dtype", d.model.dtype, "Number format of weights and activations.", {"f32", "bf16"});
  r.number("recompute", d.model.recompute, 0, 1,
           "Share of the blocks whose activations are computed again instead of kept.");
  r.text("weights", d.model.weights,
         "Safetensors file with weights to start from; empty draws them at random.");

  r.section("diffusion");
  r.number("num_timesteps", d.diffusion.num_timesteps, 1, many,
           "Timesteps that the time from noise to data is measured in.");
  r.text("sample_method", d.diffusion.sample_method, "Distribution of the training timesteps.",
         {"logit-normal", "uniform"});
  r.number("loc", d.diffusion.loc, -100, 100, "Mean of the normal in logit-normal.");
  r.number("scale", d.diffusion.scale, 1e-6, 100, "Deviation of the normal in logit-normal.");
  r.flag("use_discrete_timesteps", d.diffusion.use_discrete_timesteps,
         "Draw whole timesteps only.");
  r.flag("use_timestep_transform", d.diffusion.use_timestep_transform,
         "Shift timesteps towards noise for larger and longer clips.");
  r.number("transform_scale", d.diffusion.transform_scale, 1e-6, 1e6,
           "Strength of that shift in training.");
  r.flag("fix_short_clips", d.diffusion.fix_short_clips,
         "Cure the shift for clips under 17 frames; false repeats Open-Sora 1.2 as released.");

  r.section("mask");
  const auto share = [&r](const char* name, double& target, const char* help) {
    r.number(name, target, 0, 1, help);
  };
  share("random", d.mask.random, "Share of samples with frames masked at random.");
  share("intepolate", d.mask.intepolate,
        "Share with every second frame given (spelt as in Open-Sora).");
  share("quarter_random", d.mask.quarter_random, "Share with up to a quarter given, anywhere.");
  share("quarter_head", d.mask.quarter_head, "Share with up to a quarter given at the start.");
  share("quarter_tail", d.mask.quarter_tail, "Share with up to a quarter given at the end.");
  share("quarter_head_tail", d.mask.quarter_head_tail,
        "Share with up to a quarter given at both ends.");
  share("image_random", d.mask.image_random, "Share with one frame given, anywhere.");
  share("image_head", d.mask.image_head, "Share with the first frame given.");
  share("image_tail", d.mask.image_tail, "Share with the last frame given.");
  share("image_head_tail", d.mask.image_head_tail, "Share with the first and last frame given.");
}

void training_and_sampling(Rows& r, Deck& d) {
  r.section("train");
  r.number("steps", d.train.steps, 1, many, "Steps that the run takes in all, restarts included.");
  r.number("batch_size", d.train.batch_size, 1, 1e6, "Clips in a micro-batch.");
  r.text("batch_sizes", d.train.batch_sizes,
         "Clips in a micro-batch of some buckets, as NAME=CLIPS; NAME is a bucket's name or its "
         "beginning, up to a dash. The others take batch_size.");
  r.number("micro_batches", d.train.micro_batches, 1, 1e6,
           "Micro-batches in a step, shared out over the ranks.");
  r.number("lr", d.train.lr, 0, 1e3, "Learning rate of AdamW.");
  r.number("warmup_steps", d.train.warmup_steps, 0, many,
           "Steps over which the learning rate rises to lr.");
  r.number("weight_decay", d.train.weight_decay, 0, 1e3, "Decoupled weight decay of AdamW.");
  r.number("adam_beta1", d.train.adam_beta1, 0, below_one, "Decay of the mean gradient.");
  r.number("adam_beta2", d.train.adam_beta2, 0, below_one, "Decay of the mean squared gradient.");
  r.number("adam_eps", d.train.adam_eps, 0, 1, "Added to the root of the mean squared gradient.");
  r.number("grad_clip", d.train.grad_clip, 0, 1e9,
           "Largest norm of the gradient over all parameters; 0 never clips.");
  r.number("ema_decay", d.train.ema_decay, 0, 1, "Decay of the moving average of the weights.");
  r.number("checkpoint_every", d.train.checkpoint_every, 0, many,
           "Steps between two checkpoints; 0 saves at the end alone.");
  r.number("keep", d.train.keep, 2, 1e6, "Checkpoints that are kept, at least two.");
  r.flag("skip_saves", d.train.skip_saves,
         "Leave out a checkpoint of checkpoint_every while the one before is still being written; "
         "false waits for that.");
  r.number("log_every", d.train.log_every, 1, many, "Steps between two lines of the log.");
  r.text("loss_spike", d.train.loss_spike,
         "What a loss or a gradient norm does that leaps far above those of the last 64 steps: a "
         "warning, the end of the job (exit code 5) with the checkpoint from before it, or "
         "nothing.",
         {"warn", "stop", "ignore"});
  r.number("spike_deviations", d.train.spike_deviations, 1, 1e6,
           "How far above the median of the last steps a leap is, in robust standard deviations.");

  r.section("parallel");
  r.number("zero", d.parallel.zero, 0, 1,
           "1 keeps the optimizer's state of a parameter on one rank only; 0 keeps all on every "
           "rank.");
  r.number("sp", d.parallel.sp, 1, 1024,
           "Ranks that share the tokens of a clip (sequence parallelism); divides the ranks.");
  r.number("bucket_mib", d.parallel.bucket_mib, 0.001, 65536,
           "Gradients sent together, in MiB: larger is fewer messages, smaller overlaps more.");
  r.text("wire", d.parallel.wire,
         "Number format of gradients on the wire; sums are always made in f32.", {"f32", "bf16"});
  r.flag("overlap", d.parallel.overlap,
         "Send gradients under the backward and weights under the next forward; false waits for "
         "each at once (to measure what overlapping gains).");
  r.flag("deterministic", d.parallel.deterministic,
         "On GPUs: matrix products take the library's first algorithm instead of the measured "
         "fastest, so that two runs repeat their bits there too. On CPUs they do so anyway.");
  r.number("check_every", d.parallel.check_every, 0, many,
           "Steps between two comparisons of the weights of all ranks; 0 never compares.");
  r.number("hang_timeout", d.parallel.hang_timeout, 0, 1e6,
           "Seconds without progress after which a job ends with exit code 7; 0 takes ten median "
           "steps, at least 60 s.");

  r.section("sampler");
  r.number("steps", d.sampler.steps, 1, 100000, "Steps from noise to clip.");
  r.number("cfg_scale", d.sampler.cfg_scale, 0, 1000,
           "Weight of the caption in classifier-free guidance; 1 follows it plainly.");
  r.flag("use_timestep_transform", d.sampler.use_timestep_transform,
         "Shift timesteps towards noise for larger and longer clips.");
}

}  // namespace

std::vector<Option> option_table(Deck& deck) {
  Rows rows;
  run_and_data(rows, deck);
  model_and_diffusion(rows, deck);
  training_and_sampling(rows, deck);
  vae_rows(rows, deck);
  text_rows(rows, deck);
  generation_rows(rows, deck);
  return rows.take();
}

}  // namespace weft
