#!/usr/bin/env python3
"""Do losses of a run in bf16 follow those of the same run in f32?

    check_bf16.py [--weft build/weft] [--steps 500] [--starts 2] [--threads 2] [--json FILE]

Runs of one deck: STDiT3 of width 256, two pairs, on synthetic pixels, 1280 tokens a clip. Every draw is a function of seed
and step, so all see the same clips, noise and times, and losses compare step by step. One run is in f32, one in bf16, and
the others in f32 from initial weights of other seeds, which nobody chooses for their losses. So the criterion: means over 50
steps of the run in bf16 are no farther from those in f32 (root mean square of relative differences) than means of these are.

Exit status 0 if it holds.
"""
import pathlib
import sys
import tempfile

import numpy as np

import common

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


def train(weft, run, steps, threads, *options):
    common.run([weft, "train", run.parent / "deck.toml", f"run.dir={run}", f"train.steps={steps}", f"run.threads={threads}", *options],
               threads)
    return np.array([line["loss"] for line in common.json_lines(run / "metrics.jsonl") if "loss" in line])


def losses(weft, where, starts, steps, threads):
    runs = {dtype: train(weft, where / dtype, steps, threads, f"model.dtype={dtype}") for dtype in ("f32", "bf16")}
    for i in range(starts):
        # Initial weights come of run.seed, as all draws do: a run of its own makes them.
        train(weft, where / f"seed{i}", 1, threads, "train.lr=0", f"run.seed={100 + i}")
        weights = where / f"seed{i}.safetensors"
        common.run([weft, "export", where / f"seed{i}", weights])
        runs[f"start {i}"] = train(weft, where / f"start{i}", steps, threads, f"model.weights={weights}")
    return runs


def distance(one, other):
    """Of means over WINDOW steps, relative: root mean square, and the largest."""
    a, b = (v[:len(v) // WINDOW * WINDOW].reshape(-1, WINDOW).mean(1) for v in (one, other))
    d = (b - a) / a
    return {"rms": float(np.sqrt(np.mean(d * d))), "largest": float(np.abs(d).max())}


def main():
    a = common.parse(common.parser(__doc__, steps=500, starts=2, threads=2))
    if a.steps < 2 * WINDOW or a.starts < 1:
        sys.exit(f"at least {2 * WINDOW} steps and one other start are wanted")
    facts = common.about(a)
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        (where / "deck.toml").write_text(DECK)
        runs = losses(a.weft, where, a.starts, a.steps, a.threads)
    if any(len(v) != a.steps for v in runs.values()):
        sys.exit(f"of {a.steps} steps: " + ", ".join(f"{len(v)} ({name})" for name, v in runs.items()))
    f32, bf16 = runs["f32"], runs["bf16"]
    step = np.abs(bf16 - f32) / f32
    means = {name: distance(f32, v) for name, v in runs.items() if name != "f32"}
    limit = float(np.sqrt(np.mean([d["rms"] ** 2 for name, d in means.items() if name != "bf16"])))
    result = {"first": float(f32[0]), "last_mean": {name: float(v[-WINDOW:].mean()) for name, v in runs.items()},
              "step": {"median": float(np.median(step)), "largest": float(step.max())}, "means": means, "limit": limit}
    print(f"{a.steps} steps: loss {f32[0]:.4f} at first; a step's loss differs by {result['step']['median']:.1e} (median), "
          f"{result['step']['largest']:.1e} at most\nmeans over {WINDOW} steps, beside f32:")
    for name, d in means.items():
        print(f"  {name:8} {d['rms']:.1e} rms, {d['largest']:.1e} at most; the last {result['last_mean'][name]:.4f} "
              f"(f32 {result['last_mean']['f32']:.4f})")
    print(f"bf16 is {means['bf16']['rms'] / limit:.2f} times as far from f32 as other initial weights in f32 are (limit 1)")
    common.write(a, facts, {"deck": DECK, **result, "losses": {n: v.tolist() for n, v in runs.items()}})
    return 0 if means["bf16"]["rms"] <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
