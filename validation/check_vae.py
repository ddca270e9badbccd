#!/usr/bin/env python3
"""Does weft's VAE compute what diffusers' AutoencoderKL and the temporal VAE in PyTorch compute?

    check_vae.py [--weft build/weft] [--tolerance 1e-4] [--skip-real] [--json FILE]

`weft_probe forward` with the noise of both posteriors given, against PyTorch in f64: moments, latents, reconstructions and, for
narrow models, every gradient. One pass has the released width (f32 in PyTorch, forward alone). Then pictures go through `weft
reconstruct`, and its PSNR and SSIM are held to scikit-image's, on the very pixels that it wrote. Figures are relative L2
errors; exit status 0 if all are below the tolerance. Gradients of the biases of keys are left out: they are zero but for rounding.
"""
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch

import common
from reference import vae

RELEASED = dict(channels=[128, 256, 512, 512], blocks=2, groups=32, filters=128, t_blocks=4, multipliers=[1, 2, 2, 4],
                halves=[False, True, True], t_groups=32)
NARROW = dict(channels=[32, 64, 96, 96], blocks=2, groups=16, filters=16, t_blocks=2, multipliers=[1, 2, 2, 4],
              halves=[False, True, True], t_groups=8)
OTHER = dict(channels=[16, 24, 40], blocks=1, groups=8, filters=16, t_blocks=1, multipliers=[1, 1, 3],
             halves=[True, True], t_groups=4)
CASES = {
    "narrow, 5 frames of 43x50": (NARROW, (1, 5, 43, 50), True),
    "narrow, one frame": (NARROW, (1, 1, 48, 40), True),
    "other shape, 2 clips of 7 frames": (OTHER, (2, 7, 21, 16), True),
    "released width, 6 frames of 40x48": (RELEASED, (1, 6, 40, 48), False),
}


def deck(s, **more):
    return common.toml({"model": {"name": "vae"}, "vae": {
        "spatial_channels": s["channels"], "spatial_res_blocks": s["blocks"], "spatial_groups": s["groups"], "filters": s["filters"],
        "num_res_blocks": s["t_blocks"], "channel_multipliers": s["multipliers"], "temporal_downsample": s["halves"],
        "num_groups": s["t_groups"], "micro_frame_size": 0, **more}})


def models(s, seed):
    torch.manual_seed(seed)
    two_d = vae.spatial(s["channels"], s["blocks"], s["groups"])
    temporal = vae.Temporal(s["filters"], s["t_blocks"], s["multipliers"], s["halves"], s["t_groups"])
    with torch.no_grad():
        for model in (two_d, temporal):
            for module in model.modules():
                if isinstance(module, torch.nn.GroupNorm):
                    module.weight.add_(0.2 * torch.randn_like(module.weight))
                    module.bias.add_(0.2 * torch.randn_like(module.bias))
    return two_d, temporal


def names(two_d, temporal):
    for prefix, model in (("spatial_vae.module.", two_d), ("temporal_vae.", temporal)):
        for name, p in model.named_parameters():
            yield prefix + name, p


def forward(two_d, temporal, x, noise_2d, noise):
    """All outputs of the probe, [B,C,T,H,W]."""
    b, _, t = x.shape[:3]
    apart = lambda v: v.transpose(1, 2).flatten(0, 1)
    together = lambda v: v.unflatten(0, (b, t)).transpose(1, 2)
    clamp = lambda m: torch.cat([m.chunk(2, 1)[0], m.chunk(2, 1)[1].clamp(-30, 20)], 1)
    out = {"moments_2d": clamp(together(two_d.quant_conv(two_d.encoder(apart(x)))))}
    out["latent_2d"] = vae.SCALING * vae.draw(out["moments_2d"], noise_2d)
    out["moments"] = clamp(temporal.moments(out["latent_2d"]))
    out["latent"] = vae.draw(out["moments"], noise)
    out["reconstruction_2d"] = temporal.decode(out["latent"], t)
    out["reconstruction"] = together(two_d.decoder(two_d.post_quant_conv(apart(out["reconstruction_2d"])
                                                                         / vae.SCALING)))
    return out


def error(got, wanted):
    return common.relative_error(np.array(got), wanted.detach().double().numpy())


def check(weft, where, shape, size, backward, seed):
    b, t, h, w = size
    factor, side = 2 ** sum(shape["halves"]), 2 ** (len(shape["channels"]) - 1)
    dtype = torch.float64 if backward else torch.float32
    two_d, temporal = models(shape, seed)
    lt, lh, lw = -(-t // factor), h // side, w // side
    inputs = {"x": torch.rand(b, 3, t, h, w) * 2 - 1, "noise_2d": torch.randn(b, 4, t, lh, lw),
              "noise": torch.randn(b, 4, lt, lh, lw), "cotangent": torch.randn(b, 3, t, lh * side, lw * side),
              "cotangent_moments": torch.randn(b, 8, lt, lh, lw), "cotangent_moments_2d": torch.randn(b, 8, t, lh, lw)}
    got = common.probe(weft, where, "forward", inputs, "--device", "cpu", "run.threads=2", *(["--backward"] if backward else []),
                       deck=deck(shape), weights={n: p.detach().numpy() for n, p in names(two_d, temporal)})
    two_d, temporal = two_d.to(dtype), temporal.to(dtype)
    inputs = {n: v.to(dtype) for n, v in inputs.items()}
    x = inputs["x"].requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        out = forward(two_d, temporal, x, inputs["noise_2d"], inputs["noise"])
    errors = {name: error(got[name], value) for name, value in out.items()}
    if backward:
        ((out["reconstruction"] * inputs["cotangent"]).sum() + (out["moments"] * inputs["cotangent_moments"]).sum()
         + (out["moments_2d"] * inputs["cotangent_moments_2d"]).sum()).backward()
        errors["grad.x"] = error(got["grad.x"], x.grad)
        for name, p in names(two_d, temporal):
            if not name.endswith("to_k.bias"):
                errors["grad." + name] = error(got["grad." + name], p.grad)
    worst = max(errors, key=errors.get)
    return {"tensors": len(errors), "worst": worst, "error": errors[worst],
            "outputs": {name: errors[name] for name in out}}


def check_quality(weft, where):
    from skimage import io, metrics
    rng = np.random.default_rng(5)
    for i, (h, w) in enumerate([(64, 96), (57, 73)]):
        y, x = np.mgrid[0:h, 0:w]
        picture = np.stack([127 + 100 * np.sin(x / 7 + c) * np.cos(y / 9 - c) for c in range(3)], -1)
        picture = (picture + rng.normal(0, 8, picture.shape)).clip(0, 255).astype(np.uint8)
        io.imsave(where / f"{i}.png", picture, check_contrast=False)
    (where / "deck.toml").write_text(deck(OTHER, weights="random:3") + common.toml({
        "run": {"dir": str(where / "run"), "threads": 1}, "reconstruct": {"inputs": [str(where / "0.png"), str(where / "1.png")]}}))
    common.run([weft, "reconstruct", where / "deck.toml"])
    clips = json.loads((where / "run/reconstructed/reconstruct.json").read_text())["clips"]
    worst = 0.0
    for clip in clips:
        both = io.imread(clip["output"])
        a, b = both[:, :clip["width"]], both[:, clip["width"]:]
        psnr = metrics.peak_signal_noise_ratio(a, b, data_range=255)
        ssim = metrics.structural_similarity(a, b, channel_axis=-1, data_range=255)
        worst = max(worst, abs(clip["psnr"] - psnr) / psnr, abs(clip["ssim"] - ssim))
    return {"pictures": len(clips), "error": worst, "ssim": [c["ssim"] for c in clips], "psnr": [c["psnr"] for c in clips]}


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--skip-real", action="store_true", help="leave the pass of the released width out (6 GiB)")
    a = common.parse(parser)
    facts = common.about(a, "diffusers", "skimage")
    torch.set_num_threads(2)
    results = {}
    for i, (name, (shape, size, backward)) in enumerate(CASES.items()):
        if a.skip_real and shape is RELEASED:
            continue
        with tempfile.TemporaryDirectory() as where:
            results[name] = check(a.weft, pathlib.Path(where), shape, size, backward, i + 1)
        r = results[name]
        print(f"{name}: {r['tensors']} tensors, worst {r['worst']} {r['error']:.2e}", flush=True)
    with tempfile.TemporaryDirectory() as where:
        results["PSNR and SSIM"] = check_quality(a.weft, pathlib.Path(where))
    print(f"PSNR and SSIM beside scikit-image: {results['PSNR and SSIM']['error']:.2e}")
    common.write(a, facts, {"cases": results})
    return 0 if all(r["error"] <= a.tolerance for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
