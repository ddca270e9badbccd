#!/usr/bin/env python3
"""Do losses of a run in bf16 follow those of the same run in f32?

    check_bf16.py [--weft build/weft] [--steps 500] [--threads 2] [--tolerance 0.01] [--json FILE]

Two runs of one deck, model.dtype apart: STDiT3 of width 256, two pairs, on synthetic pixels, 1280 tokens a clip. Every
draw is a function of seed and step, so both see the same clips, noise and times, and losses compare step by step.
Figures: the relative difference of a step's loss (median, largest) and of the means over 50 steps (largest). Exit
status 0 if that is within the tolerance.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

import compare_step

DECK = """
[run]
seed = 7
[data]
path = "synthetic:clips=64,frames=5,height=32,width=32"
[model]
in_channels = 3
hidden_size = 256
depth = 2
num_heads = 4
caption_channels = 32
model_max_length = 8
[train]
batch_size = 1
micro_batches = 2
lr = 5e-4
warmup_steps = 50
checkpoint_every = 0
"""
WINDOW = 50


def losses(weft, where, dtype, steps, threads):
    run = where / dtype
    subprocess.run([weft, "train", where / "deck.toml", f"model.dtype={dtype}", f"run.dir={run}", f"train.steps={steps}",
                    f"run.threads={threads}"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                   env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if "loss" in line])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weft", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent / "build" / "weft")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--json", type=pathlib.Path)
    a = parser.parse_args()
    about = compare_step.provenance(argparse.Namespace(threads=a.threads, dtype="bf16", rounds=1, warmup=0, steps=a.steps))
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        (where / "deck.toml").write_text(DECK)
        f32, bf16 = (losses(a.weft.resolve(), where, dtype, a.steps, a.threads) for dtype in ("f32", "bf16"))
    if len(f32) != a.steps or len(bf16) != a.steps or a.steps < 2 * WINDOW:
        sys.exit(f"{len(f32)} and {len(bf16)} steps of {a.steps}; at least {2 * WINDOW} are wanted")
    step = np.abs(bf16 - f32) / f32
    means = [v[:a.steps // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1) for v in (f32, bf16)]
    result = {"first": float(f32[0]), "last_mean": {"f32": float(means[0][-1]), "bf16": float(means[1][-1])},
              "step": {"median": float(np.median(step)), "largest": float(step.max())},
              "means": float((np.abs(means[1] - means[0]) / means[0]).max())}
    print(f"{a.steps} steps: loss {f32[0]:.4f} at first, {means[0][-1]:.4f} (f32) and {means[1][-1]:.4f} (bf16) in the mean of the "
          f"last {WINDOW}\n  a step's loss differs by {result['step']['median']:.1e} (median), {result['step']['largest']:.1e} at most; "
          f"means over {WINDOW} by {result['means']:.1e} at most (limit {a.tolerance})")
    if a.json:
        a.json.write_text(json.dumps(about | {"deck": DECK, **result, "losses": {"f32": f32.tolist(), "bf16": bf16.tolist()}}) + "\n")
    return 0 if result["means"] <= a.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
