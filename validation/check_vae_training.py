#!/usr/bin/env python3
"""Does `weft train` of a VAE take the steps that PyTorch takes?

    check_vae_training.py [--weft build/weft] [--seeds 5,6,7,8,9] [--tolerance 1e-4] [--only "stage 3"] [--json FILE]

A tiny VAE (diffusers' AutoencoderKL and the temporal one), a VGG16 for LPIPS from the reference package `lpips` and, in the
last cases, a PatchGAN, all with random weights. Footage is cut by `weft ingest`; one step of four clips is trained by the real
binary in each of the stages of docs/models/video_vae.md, Training stages. Losses are those of its metrics,
gradients those of the first moments in its
checkpoint. PyTorch computes the same in f64 with the same draws, which are functions of (seed, purpose, step, sample)
(reference/philox.py). With LeCam two steps are trained (lr = 0), for its averages come from the
first. The figures are relative L2 errors over all gradients of the VAE (and of the discriminator), and of the
loss's terms, one a seed. |x|, the identity loss, ReLU and hinge have kinks: where rounding puts an element on the other side of
one, its gradient is another, in PyTorch's f32 as in ours, and with it what lies before. Losses are to be within the tolerance
with every seed. A wrong formula is wrong with every seed, a kink is chance: gradients are to be within it with two seeds at
least, and within 1e-2 with all. Everything is printed, with the error of PyTorch's own f32 beside it. Exit status 0 if so.
"""
import json
import pathlib
import sys
import tempfile

import h5py
import lpips
import numpy as np
import torch

import common
from reference import philox, safetensors_io, vae

PURPOSE = philox.purposes()
STEPS_OF_LECAM = 2  # its running averages are 0 in the first
SHAPE = {"channels": [8, 16], "blocks": 1, "groups": 4}
TEMPORAL = {"filters": 8, "blocks": 1, "multipliers": [1, 2, 2, 4], "halves": [False, True, True], "groups": 4}
DEFAULTS = {"freeze_spatial": False, "pixel_loss": True, "latent_loss": False, "identity_loss": False, "image_share": 0.0,
            "random_length": True, "perceptual_weight": 0.1, "kl_weight": 1e-6, "discriminator": "none",
            "discriminator_loss": "hinge", "discriminator_weight": 0.5, "discriminator_start": 0,
            "discriminator_lr": 0, "lecam_weight": 0.0, "gradient_penalty_weight": 0.0}
STAGES = {
    "stage 1": {"freeze_spatial": True, "pixel_loss": False, "latent_loss": True, "identity_loss": True, "image_share": 0.7,
                "random_length": False},
    "stage 2": {"pixel_loss": False, "latent_loss": True, "image_share": 0.5, "random_length": False},
    "stage 3": {"kl_weight": 0.1},  # enough to be seen beside the other terms
    "hinge": {"discriminator": "patchgan"},
    "vanilla, latents too": {"discriminator": "patchgan", "discriminator_loss": "vanilla", "latent_loss": True},
    "non-saturating, frozen": {"discriminator": "patchgan", "discriminator_loss": "non-saturating", "freeze_spatial": True},
    "LeCam": {"discriminator": "patchgan", "lecam_weight": 300.0},  # enough to be seen beside hinge
    "gradient penalty": {"discriminator": "patchgan", "gradient_penalty_weight": 10.0},
}


def arrays_of(where, array):
    """`master` or `exp_avg` of a checkpoint that one rank wrote, by tensor (docs/checkpoints.md)."""
    manifest = json.loads((where / "manifest.json").read_text())
    flat, begin = np.fromfile(where / "shard_0000.bin", "<f4"), 0
    for held in manifest["arrays"]:
        if held["name"] == array:
            break
        begin += held["elements"]
    return {t["name"]: flat[begin + t["offset"]:begin + t["offset"] + int(np.prod(t["shape"]))].reshape(t["shape"])
            for t in manifest["tensors"]}


def steps_of(settings):
    return STEPS_OF_LECAM if settings["lecam_weight"] else 1


def weft_steps(weft, where, settings, store, seed):
    """Metrics of the steps, and their gradients in one sum: each weighs 0.9 of the one after it, as in Adam's first moment."""
    steps = steps_of(settings)
    (where / "deck.toml").write_text(common.toml({
        "run": {"dir": str(where / "run"), "seed": seed, "resume": False}, "data": {"path": str(store)}, "model": {"name": "vae"},
        "vae": {"weights": str(where / "vae.safetensors"), "spatial_channels": SHAPE["channels"], "spatial_res_blocks": SHAPE["blocks"],
                "spatial_groups": SHAPE["groups"], "filters": TEMPORAL["filters"], "num_res_blocks": TEMPORAL["blocks"],
                "channel_multipliers": TEMPORAL["multipliers"], "temporal_downsample": TEMPORAL["halves"],
                "num_groups": TEMPORAL["groups"], "micro_batch_size": 2},
        "vae_train": {"lpips_weights": str(where / "lpips.safetensors")} | settings,
        "train": {"batch_size": 4, "lr": 0, "grad_clip": 0, "steps": steps}}))
    common.run([weft, "train", where / "deck.toml"])
    metrics = common.json_lines(where / "run" / "metrics.jsonl")[-steps:]
    moments = arrays_of(where / "run" / f"step_{steps}", "exp_avg")
    return metrics, {n: m.astype(np.float64) / 0.1 for n, m in moments.items()}


def clips_of(store):
    with h5py.File(store) as f:
        (bucket,) = f["clips"].values()
        return bucket["frames"][:]


def torch_steps(parts, settings, clips, samples, seed):
    """Of the last step the clips' mean loss and its terms; the gradients of all, summed as weft_steps has them."""
    averages, total = (0.0, 0.0), {}
    for step, of_step in enumerate(samples):
        loss, terms, grads = torch_step(parts, {**settings, "averages": averages}, clips, of_step, step, seed)
        averages = tuple(0.999 * a + 0.001 * terms.get(n, 0.0) for a, n in zip(averages, ("logit_real", "logit_made")))
        total = {n: g + 0.9 * total.get(n, 0.0) for n, g in grads.items()}
    return loss, terms, total


def torch_step(parts, settings, clips, samples, step, seed):
    """The mean loss of the clips, its terms and gradients."""
    total, terms = 0.0, {}
    two_d, temporal, _, critic = parts
    for p in [*two_d.parameters(), *temporal.parameters(), *(critic.parameters() if critic else [])]:
        p.grad = None
    scale = 2 ** (len(SHAPE["channels"]) - 1)
    for sample in samples:
        first, second = philox.words(seed, PURPOSE["clip_length"], step, sample, 2)[:2]
        frames = clips.shape[1]
        if (int(first) >> 8) * 2.0**-24 < settings["image_share"]:
            frames = 1
        elif settings["random_length"]:
            frames = 1 + int(second) * frames // 2 ** 32
        h, w = clips.shape[2] // scale, clips.shape[3] // scale
        noise = [torch.tensor(philox.normals(seed, PURPOSE[purpose], step, sample, shape)).movedim(-1, 1) for purpose, shape in (
            ("spatial_posterior", (frames, h, w, 4)), ("posterior", (1, -(-frames // temporal.factor), h, w, 4)))]
        dtype = next(temporal.parameters()).dtype
        x = (torch.tensor(clips[sample][:frames]).double().permute(3, 0, 1, 2)[None] / 127.5 - 1).to(dtype)
        noise = [eps.to(dtype) for eps in noise]
        loss, of_clip, of_critic = vae.losses(parts, x, noise, settings)
        saved = [p.grad.clone() if p.grad is not None else None for p in critic.parameters()] if critic else []
        (loss / len(samples)).backward()
        if critic:  # the generator's loss teaches the discriminator nothing
            for p, grad in zip(critic.parameters(), saved):
                p.grad = grad
            (of_critic[0] / len(samples)).backward()
            of_clip.update(of_critic[1])
        total += float(loss.detach()) / len(samples)
        for name, value in of_clip.items():
            terms[name] = terms.get(name, 0.0) + float(value.detach()) / len(samples)
    grads = {}
    for prefix, model in (("spatial_vae.module.", two_d), ("temporal_vae.", temporal), ("discriminator.", critic)):
        for name, p in model.named_parameters() if model else []:
            grads[prefix + name] = np.zeros(p.shape) if p.grad is None else p.grad.double().numpy()
    return total, terms, grads


def difference(ours, theirs, names):
    square = sum(np.square(ours[n] - theirs[n]).sum() for n in names)
    norm = sum(np.square(theirs[n]).sum() for n in names)
    return float(np.sqrt(square / norm))


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--only", choices=list(STAGES))
    parser.add_argument("--seeds", default="5,6,7,8,9")
    options = common.parse(parser)
    facts, seeds = common.about(options, "diffusers", "lpips"), [int(s) for s in options.seeds.split(",")]
    torch.manual_seed(1)
    two_d, temporal = vae.spatial(**SHAPE), vae.Temporal(**TEMPORAL)
    judge = lpips.LPIPS(net="vgg", pretrained=False, pnet_rand=True, verbose=False).eval().requires_grad_(False)
    for lin in judge.lins:
        lin.model[1].weight.data.abs_()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        where = pathlib.Path(scratch)
        names = {"spatial_vae.module." + n: p for n, p in two_d.named_parameters()}
        names.update({"temporal_vae." + n: p for n, p in temporal.named_parameters()})
        safetensors_io.save(where / "vae.safetensors", {n: p.detach().numpy() for n, p in names.items()})
        safetensors_io.save(where / "lpips.safetensors", {n: p.numpy() for n, p in judge.state_dict().items()})
        store = where / "clips.h5"
        (where / "ingest.toml").write_text(common.toml({"ingest": {
            "inputs": ["lavfi:testsrc2=size=64x64:rate=10:duration=4"], "output": str(store), "frames": [5], "height": 32,
            "width": 32}}))
        common.run([options.weft, "ingest", where / "ingest.toml"])
        clips = clips_of(store)
        for name, changes in STAGES.items():
            if options.only and name != options.only:
                continue
            settings = {**DEFAULTS, **changes}
            results[name] = of_seed = []
            for seed in seeds:
                steps, ours = weft_steps(options.weft, where, settings, store, seed)
                metrics, samples = steps[-1], [s["samples"] for s in steps]
                critic = None
                if settings["discriminator"] != "none":
                    critic = vae.patch_gan()
                    # As a step with learning rate 0 left it.
                    start = arrays_of(where / "run" / f"step_{len(steps)}", "master")
                    critic.load_state_dict({n.removeprefix("discriminator."): torch.tensor(v) for n, v in start.items()
                                            if n.startswith("discriminator.")}, strict=False)
                parts = (two_d, temporal, judge, critic)
                _, _, single = torch_steps([p and p.float() for p in parts], settings, clips, samples, seed)
                loss, terms, theirs = torch_steps([p and p.double() for p in parts], settings, clips, samples, seed)
                row = {"loss": abs(metrics["loss"] / loss - 1),
                       "terms": max(abs(metrics["terms"][t] - v) / abs(v) for t, v in terms.items() if v != 0)}
                of_vae = [n for n in ours if not n.startswith("discriminator.")]
                row["gradients"] = difference(ours, theirs, of_vae)
                row["PyTorch's own in f32"] = difference(single, theirs, of_vae)
                if critic:
                    row["disc. f32 PyTorch"] = difference(single, theirs, [n for n in ours if n not in of_vae])
                    row["discriminator"] = difference(ours, theirs, [n for n in ours if n not in of_vae])
                of_seed.append(row)
                print(f"{name}, seed {seed}: {len(metrics['samples'])} clips, terms {', '.join(t for t, v in terms.items() if v)}; "
                      + ", ".join(f"{k} {v:.1e}" for k, v in row.items()), flush=True)
    common.write(options, facts, {"seeds": seeds, "cases": results})
    good = True
    for name, rows in results.items():
        exact = all(row[k] < options.tolerance for row in rows for k in ("loss", "terms"))
        gradients = [max(row["gradients"], row.get("discriminator", 0)) for row in rows]
        within = sum(g < options.tolerance for g in gradients)
        print(f"{name}: gradients within {options.tolerance} with {within} of {len(rows)} seeds, worst {max(gradients):.1e}")
        good = good and exact and within >= min(2, len(rows)) and max(gradients) < 1e-2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
