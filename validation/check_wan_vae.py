#!/usr/bin/env python3
"""Does weft's Wan2.1 VAE compute what diffusers' AutoencoderKLWan computes?

    check_wan_vae.py [--weft build/weft] [--tolerance 1e-4] [--json FILE]

`weft_probe forward` on narrow models in f32, whose weights have diffusers' names in the file, against PyTorch in f64, which goes
through the clip in chunks of one latent frame: moments, reconstructions, every gradient. Figures are relative L2 errors; exit
status 0 if all are below the tolerance. Gradients of the biases of keys are left out: they are zero but for rounding.
"""
import pathlib
import sys
import tempfile

import diffusers
import numpy as np
import torch

import common

CASES = {  # filters, residual blocks, then [B,T,H,W]
    "released blocks, 9 frames of 24x40": (8, 2, (1, 9, 24, 40)),
    "one frame": (8, 2, (1, 1, 16, 16)),
    "one block a level, 2 clips of 5 frames": (16, 1, (2, 5, 16, 24)),
}


def relative(found, wanted):
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-300))


def errors_of(args, folder, filters, blocks, shape):
    torch.manual_seed(1)
    model = diffusers.AutoencoderKLWan(base_dim=filters, num_res_blocks=blocks).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gamma"):
                p.add_(0.2 * torch.randn_like(p))
            p.copy_(p.float())
    B, T, H, W = shape
    x = (torch.rand(B, 3, T, H, W).double() * 2 - 1).float().double().requires_grad_()
    # Not clamped, as the wrapper's decode would.
    model.clear_cache()
    moments = torch.cat(list(model.encode(x).latent_dist.parameters.chunk(2, dim=1)), dim=1)
    z = moments[:, :16]
    model.clear_cache()
    z2, frames = model.post_quant_conv(z), []
    for i in range(z.shape[2]):
        model._conv_idx = [0]
        frames.append(model.decoder(z2[:, :, i:i + 1], feat_cache=model._feat_map, feat_idx=model._conv_idx, first_chunk=i == 0))
    out = torch.cat(frames, dim=2)
    cotangent = torch.randn(out.shape).double().float().double()
    (out * cotangent).sum().backward()
    wanted = {"moments": moments, "reconstruction": out, "grad.x": x.grad}
    deck = common.toml({"model": {"name": "wan_vae", "filters": filters, "num_res_blocks": blocks}})
    found = common.probe(args.weft, folder, "forward", {"x": x.detach().float().numpy(), "cotangent": cotangent.float().numpy()},
                         "--backward", deck=deck, weights={n: p.detach().float().numpy() for n, p in model.named_parameters()})
    errors = {name: relative(found[name].astype(np.float64), value.detach().numpy()) for name, value in wanted.items()}
    # By what they are, under weft's names: each length against all of PyTorch's gradients together.
    ours = np.sort([np.linalg.norm(v.astype(np.float64)) for n, v in found.items() if n.startswith("grad.") and n != "grad.x"])
    theirs = np.sort([0.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()])
    errors["lengths of all gradients"] = relative(ours, theirs)
    return errors


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = common.parse(parser)
    facts, results = common.about(args, "diffusers"), {}
    with tempfile.TemporaryDirectory() as name:
        for case, (filters, blocks, shape) in CASES.items():
            results[case] = errors_of(args, pathlib.Path(name), filters, blocks, shape)
            worst = max(results[case], key=results[case].get)
            print(f"{case}: at most {results[case][worst]:.1e} ({worst})")
    common.write(args, facts, {"errors": results})
    return 0 if max(max(r.values()) for r in results.values()) < args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
