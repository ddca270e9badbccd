#!/usr/bin/env python3
"""Do weights that weft trained load in the PyTorch STDiT3, and do both give the same output?

    check_export.py RUN_OR_WEIGHTS [--weft build/weft] [--ema] [--tolerance 1e-5]

RUN_OR_WEIGHTS is a safetensors file that `weft export` wrote, or a run or checkpoint directory, which is exported first.
The file is loaded by name, strictly: a missing, surplus or misshapen tensor ends the check. Then both sides compute the output for the
same random inputs: odd sizes that need padding, captions of different lengths, conditioning frames. The figure is the
relative L2 error. Exit status 0 if it holds.
"""
import pathlib
import sys
import tempfile

import numpy as np
import torch

import common
from reference import safetensors_io, stdit3


def model_of(weights):
    """The [model] table that these weights belong to, read off their names and shapes."""
    hidden, channels, *patch = weights["x_embedder.proj.weight"].shape
    tokens, caption_channels = weights["y_embedder.y_embedding"].shape
    head_dim = 2 * weights["rope.freqs"].size
    outputs = weights["final_layer.linear.bias"].size // int(np.prod(patch))
    first = "spatial_blocks.0."
    return {"in_channels": channels, "patch_size": list(patch), "hidden_size": hidden,
            "depth": 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("spatial_blocks.")),
            "num_heads": hidden // head_dim, "mlp_ratio": weights[first + "mlp.fc1.bias"].size / hidden,
            "pred_sigma": outputs == 2 * channels, "caption_channels": caption_channels,
            "model_max_length": tokens, "qk_norm": first + "attn.q_norm.weight" in weights}


def random_inputs(model, seed=7):
    rng = np.random.default_rng(seed)
    batch, frames, tokens = 2, 4, model["model_max_length"]
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    lengths = [max(1, tokens // 3), tokens]
    return {"x": normal(batch, model["in_channels"], frames, 13, 10),
            "timestep": np.array([37.5, 871.25], np.float32), "y": normal(batch, 1, tokens, model["caption_channels"]),
            "mask": np.array([[i < n for i in range(tokens)] for n in lengths], np.int64),
            "x_mask": np.array([[True] * frames, [False] + [True] * (frames - 1)]),
            "fps": np.array([24, 30], np.float32), "height": np.full(batch, 104, np.float32),
            "width": np.full(batch, 80, np.float32)}


def main():
    parser = common.parser(__doc__)
    parser.add_argument("source", type=pathlib.Path, metavar="RUN_OR_WEIGHTS")
    parser.add_argument("--ema", action="store_true", help="export the moving average of the weights")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    args = common.parse(parser)

    with tempfile.TemporaryDirectory(prefix="weft-export-") as name:
        folder = pathlib.Path(name)
        path = args.source
        if path.is_dir():
            path = folder / "weights.safetensors"
            common.run([args.weft, "export", args.source, path, *(["--ema"] if args.ema else [])])
        weights = safetensors_io.load(path)
        table = model_of(weights)
        model = stdit3.build(table, weights)
        inputs = random_inputs(table)
        with torch.no_grad():
            theirs = model(**stdit3.to_torch(inputs)).numpy()

        ours = common.probe(args.weft, folder, "forward", inputs | {"cotangent": np.zeros_like(theirs)},
                            deck=common.toml({"model": {"name": "stdit3"} | table}), weights=path)["out"]

    error = common.relative_error(ours, theirs)
    good = error <= args.tolerance
    print(f"{len(weights)} tensors load strictly; relative error of the output {error:.1e} (<= {args.tolerance:g}): "
          + ("ok" if good else "WRONG"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
