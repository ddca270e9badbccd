#!/usr/bin/env python3
"""Is the held-out loss of STDiT3 ([validation], `weft evaluate`) what Open-Sora's eval_loss computes? Against PyTorch in
float64, on the golden model and clips of two shapes, with weft's own noise.

    check_held_out.py --golden DIR [--weft build/weft] [--json FILE]

The loss of each bucket and in total within 1e-6, relative. Exit status 0 if they hold.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

import torch

import common
from reference import philox, rflow, safetensors_io, stdit3
from tiny_models import TINY_VAE

sys.path.append(str(common.ROOT / "tools" / "python"))
import weft_files  # noqa: E402

SEED, TIMESTEPS, TOLERANCE = 9, 10, 1e-6
SIZES = {"a": (5, 48, 64), "b": (1, 64, 32)}  # frames, height and width of the footage
DATA = ";".join(f"clips=3,frames={t},height={h},width={w}" for t, h, w in SIZES.values())


def weft(args, folder, *argv):
    subprocess.run([args.weft, *map(str, argv)], cwd=folder, check=True, stdout=subprocess.DEVNULL, env=common.environment(2))


def restated(model, store):
    """{bucket: [loss of each clip and timestep]}; a clip's number counts over all buckets."""
    losses, number = {}, 0
    stream = philox.purposes()["held_out_noise"]
    null = model.y_embedder.y_embedding[None, None]
    for name, bucket in store.items():
        size = next(s for s in SIZES.values() if f"{s[0]}-" in name.split("-", 1)[1])
        for i in range(len(bucket)):
            x = torch.from_numpy(bucket.latent(i)).double()[None]
            for k in range(TIMESTEPS):
                noise = torch.from_numpy(philox.normals(SEED, stream, k, number, x.shape))
                t = torch.tensor([1000.0 * (k + 1) / (TIMESTEPS + 1)], dtype=torch.float64)
                loss = rflow.losses(model, x, noise, t, y=null, fps=torch.tensor([float(bucket.fps[i])], dtype=torch.float64),
                                    height=torch.tensor([float(size[1])]), width=torch.tensor([float(size[2])]))
                losses.setdefault(name, []).append(loss.item())
            number += 1
    return losses


def main():
    made = common.parser(__doc__)
    made.add_argument("--golden", type=pathlib.Path, required=True)
    args = common.parse(made)
    golden = args.golden.resolve()
    table = tomllib.loads((golden / "stdit3_rflow_loss.toml").read_text())["model"]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "vae.toml").write_text(f'[run]\nseed = {SEED}\n[data]\npath = "synthetic:{DATA}"\n{TINY_VAE}')
        weft(args, folder, "encode", "vae.toml", "model.name=stdit3", "vae.weights=random:1", "encode.output=latents.h5",
             "encode.latents=sampled", "encode.dtype=f32", "encode.text=false")
        keys = "\n".join(f"{k} = {json.dumps(v)}" for k, v in table.items())
        (folder / "deck.toml").write_text(f'[run]\nseed = {SEED}\ndir = "none"\n[data]\npath = "latents.h5"\n[model]\n{keys}\n'
                                          f'weights = "{golden}/stdit3_rflow_loss.weights.safetensors"\n'
                                          f'[validation]\ntimesteps = {TIMESTEPS}\n[evaluate]\ndata = "latents.h5"\n')
        weft(args, folder, "evaluate", "deck.toml")
        found = json.loads((folder / "evaluation" / "evaluation.json").read_text())
        model = stdit3.build(table, safetensors_io.load(golden / "stdit3_rflow_loss.weights.safetensors"), torch.float64)
        with torch.no_grad():
            wanted = restated(model, weft_files.read_store(folder / "latents.h5"))
    every = [loss for losses in wanted.values() for loss in losses]
    rows = {name: (found["buckets"][name], sum(v) / len(v)) for name, v in wanted.items()}
    rows["total"] = (found["loss"], sum(every) / len(every))
    good = True
    for name, (one, other) in rows.items():
        error = abs(one - other) / other
        good &= error <= TOLERANCE
        print(f"{name:16} weft {one:.9f}  PyTorch {other:.9f}  relative {error:.1e}")
    if args.json:
        args.json.write_text(json.dumps({name: {"weft": a, "pytorch": b} for name, (a, b) in rows.items()}, indent=2) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
