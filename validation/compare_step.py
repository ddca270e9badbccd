#!/usr/bin/env python3
"""A full training step of weft against PyTorch eager: does it agree, and how fast is it (`make bench`)?

    compare_step.py [--weft build/weft] [--case a b] [--dtype f32|bf16] [--rounds 5] [--steps 4] [--warmup 2] [--threads 2]
                    [--require 1.3] [--require-f32 1.5] [--profile] [--json FILE]

A step is the forward pass of the rectified-flow loss on a given batch, the backward pass, and AdamW. Each side
runs in short processes of its own, in turn: weft, PyTorch (gpu/torch_step.py, SDPA, AdamW(fused=True)) eager, and with its blocks
compiled. All start from the same weights. The faster PyTorch is the yardstick.

Agreement: losses of all steps within 1e-5, and the weights after the last step, see `compare_weights`. Exit status 1 if
they do not agree, or with --require if weft is not that many times as fast.

With --dtype bf16 weft trains in bf16 and PyTorch under autocast, and weft in float32 runs in turn with them. Agreement: losses
and weights of weft are at most twice as far from those of PyTorch in float32 as autocast's are.
"""
import dataclasses
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch

import common
from reference import safetensors_io, stdit3

LOSS_TOLERANCE = 1e-5
# Both sides round in float32, in different orders. Rounding enters the weights through AdamW, which divides a gradient by its
# own size: relative errors of large gradients pass unchanged, small gradients near the noise may even change sign and
# move by up to 2 lr a step, but are few. PyTorch in float32 against itself in float64 ends, over 6 steps of these cases, within
# 4e-5 of the total update (L2 over all weights) and 3e-4 of a single tensor's; weft gets ten times that, for its sums run in
# an order of their own.
TOTAL_TOLERANCE, TENSOR_TOLERANCE = 4e-4, 3e-3
# AdamW's first step is lr * g / (|g| + eps): of full size whatever that of g. Where PyTorch's first gradient is less than this
# part of its tensor's root mean square, rounding decides the sign; such elements are left out, and may not be many.
NO_GRADIENT, MOST_WITHOUT = 1e-5, 1e-3
BF16_FACTOR = 2.0  # times autocast's own distance from float32
TRAIN = {"lr": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "grad_clip": 0.0,
         "warmup_steps": 0, "ema_decay": 0.0}  # PyTorch keeps no moving average either


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    what: str
    hidden_size: int
    depth: int
    num_heads: int
    batch: int
    frames: int = 5
    side: int = 32  # of the latent: S = (side / 2)^2 tokens a frame
    tokens: int = 32
    caption_channels: int = 512

    @property
    def model(self):
        return {"in_channels": 4, "patch_size": [1, 2, 2], "hidden_size": self.hidden_size, "depth": self.depth,
                "num_heads": self.num_heads, "caption_channels": self.caption_channels,
                "model_max_length": self.tokens, "class_dropout_prob": 0.0}

    def write(self, folder, threads):
        """Paths of the deck, the weights and one batch, drawn from a fixed seed."""
        weights = common.arrays_of(stdit3.drawn(self.model))
        b, pixels, latent = self.batch, 8.0 * self.side, (self.batch, 4, self.frames, self.side, self.side)
        inputs = {"x": torch.randn(latent), "noise": torch.randn(latent), "timestep": torch.rand(b) * 1000,
                  "y": torch.randn(b, 1, self.tokens, self.caption_channels),
                  "mask": torch.ones(b, self.tokens, dtype=torch.int64), "fps": torch.full((b,), 24.0),
                  "height": torch.full((b,), pixels), "width": torch.full((b,), pixels)}
        paths = [folder / "deck.toml", folder / "weights.safetensors", folder / "inputs.safetensors"]
        paths[0].write_text(common.toml({"run": {"threads": threads}, "model": {"name": "stdit3"} | self.model, "train": TRAIN}))
        safetensors_io.save(paths[1], weights)
        safetensors_io.save(paths[2], {k: v.numpy() for k, v in inputs.items()})
        return paths


CASES = {case.name: case for case in (
    Case("a", "C=384, 6 pairs, 6 heads, T=5, S=256, batch 2, 32 text tokens of 512", 384, 6, 6, 2),
    Case("b", "C=1152, 1 pair, 16 heads, T=5, S=256, batch 1, 32 text tokens of 512", 1152, 1, 16, 1),
)}


def run_side(side, args, paths, folder, extra=()):
    """One process; its JSON, what it printed and the path of the weights it ends with."""
    stem = folder / side.replace(" ", "-")
    if side.startswith("weft"):
        argv = [args.weft, "bench", "step", paths[0]] + (["model.dtype=bf16"] if side == "weft bf16" else [])
    else:
        precision = "autocast" if "autocast" in side else "f32"
        argv = [sys.executable, common.HERE / "gpu" / "torch_step.py", paths[0], "--device", "cpu", "--precision", precision,
                *(["--compile"] if "compiled" in side else [])]
    outputs, report = f"{stem}.safetensors", pathlib.Path(f"{stem}.json")
    said = common.run([*argv, "--weights", paths[1], "--inputs", paths[2], "--outputs", outputs, "--steps", args.steps, "--warmup",
                       args.warmup, "--json", report, *extra], args.threads)
    return json.loads(report.read_text()), said, outputs


def without_free_directions(tensors):
    """Leaves out what no loss determines: a bias on the keys of cross attention shifts all logits of a query alike, its true
    gradient is zero, and AdamW turns the rounding noise that is left into steps of full size."""
    kept = {}
    for name, array in tensors.items():
        array = array.astype(np.float64)
        kept[name] = array[array.size // 2:] if name.endswith("cross_attn.kv_linear.bias") else array
    return kept


def compare_weights(start, ours, theirs):
    """Distance of the two results over the length of the update: over all weights, and the worst single tensor."""
    first = "first_gradient/"
    start, ours, theirs = (safetensors_io.load(path) for path in (start, ours, theirs))
    gradients = without_free_directions({n.removeprefix(first): v for n, v in theirs.items() if n.startswith(first)})
    start, ours, theirs = (without_free_directions({n: v for n, v in t.items() if not n.startswith(first)})
                           for t in (start, ours, theirs))
    if set(ours) != set(theirs):
        sys.exit(f"weights differ in names: {sorted(set(ours) ^ set(theirs))}")
    distance = update = 0.0
    elements = without = 0
    worst = ("", 0.0)
    for name in theirs:
        counted = np.ones(theirs[name].shape, bool)
        if name in gradients:
            size = np.abs(gradients[name])
            counted = size >= NO_GRADIENT * np.sqrt(np.mean(size**2))
        elements, without = elements + counted.size, without + int(np.sum(~counted))
        d = np.linalg.norm((ours[name] - theirs[name])[counted])
        u = np.linalg.norm((theirs[name] - start[name])[counted])
        distance, update = distance + d * d, update + u * u
        ratio = d / u if u > 0 else (0.0 if d == 0 else float("inf"))
        if not ratio <= worst[1]:
            worst = (name, float(ratio))
    if without > MOST_WITHOUT * elements:
        sys.exit(f"{without} of {elements} weights have no gradient to speak of: the case compares too little")
    return {"total": float(np.sqrt(distance / update)), "worst_tensor": worst[0], "worst": worst[1], "without_gradient": without}


def distances(reference, found, start):
    losses = [abs(a - b) / abs(b) for a, b in zip(found[0]["loss"], reference[0]["loss"], strict=True)]
    return {"loss": max(losses)} | compare_weights(start, found[2], reference[2])


def agreement(reference, found, start, limits):
    """Distances, their limits, and whether they are kept."""
    d = distances(reference, found, start)
    return d | {"limits": limits, "ok": all(d[key] <= limit for key, limit in limits.items())}


def measure(case, args):
    """All rounds of a case: samples a side, agreement of the last round, the ratio."""
    bf16 = args.dtype == "bf16"
    theirs = ["torch autocast", "torch compiled autocast"] if bf16 else ["torch", "torch compiled"]
    names = (["weft", "weft bf16"] if bf16 else ["weft"]) + theirs
    with tempfile.TemporaryDirectory(prefix="weft-step-") as name:
        folder, last = pathlib.Path(name), {}
        paths = case.write(folder, args.threads)

        def once(side):
            last[side] = run_side(side, args, paths, folder)
            return last[side][0]["seconds"]

        seconds = common.in_turn({side: lambda side=side: once(side) for side in names}, args.rounds)
        medians = common.medians(seconds)
        yardstick, ours = min(theirs, key=medians.get), "weft bf16" if bf16 else "weft"
        result = {"case": case.name, "what": case.what, "seconds": {n: sum(s, []) for n, s in seconds.items()}, "median": medians,
                  "ours": ours, "yardstick": yardstick, "loss": {side: r[0]["loss"] for side, r in last.items()},
                  "ratio": medians[yardstick] / medians[ours]}
        profile = run_side(ours, args, paths, folder, ["--profile"])[1]
        result["row"] = common.row(f"training step, STDiT3 of C = {case.hidden_size}, {args.dtype}", medians[ours],
                                   common.totals(profile)["limit"], {n: medians[n] for n in theirs})
        if bf16:
            result["ratio_f32"] = medians["weft"] / medians["weft bf16"]
            exact = run_side("torch", args, paths, folder)
            own = distances(exact, last[theirs[0]], paths[1])
            limits = {key: BF16_FACTOR * own[key] for key in ("loss", "total")}
            result["agreement"] = {"torch in float32": agreement(exact, last[ours], paths[1], limits)}
        else:
            limits = {"loss": LOSS_TOLERANCE, "total": TOTAL_TOLERANCE, "worst": TENSOR_TOLERANCE}
            result["agreement"] = {"torch": agreement(last["torch"], last[ours], paths[1], limits)}
        if args.profile:
            result["operations"] = run_side(theirs[-1], args, paths, folder, ["--profile"])[0]["operations"]
            result["weft_profile"] = profile
    return result


def show(result):
    print(f"\n({result['case']}) {result['what']}")
    print(f"  {'side':20} {'median s':>9} {'min':>7} {'max':>7} {'steps':>6}  against {result['ours']}")
    for side, samples in result["seconds"].items():
        median = result["median"][side]
        print(f"  {side:20} {median:9.4f} {min(samples):7.4f} {max(samples):7.4f} {len(samples):6}  "
              f"{median / result['median'][result['ours']]:.2f}x" + ("  (yardstick)" if side == result["yardstick"] else ""))
    for side, a in result["agreement"].items():
        limit = {key: f" (<= {value:.1e})" for key, value in a["limits"].items()}
        print(f"  agreement with {side}: losses {a['loss']:.1e}{limit['loss']}, weights {a['total']:.1e} of the update"
              f"{limit['total']}, worst {a['worst_tensor']} {a['worst']:.1e}{limit.get('worst', '')}: "
              + ("ok" if a["ok"] else "WRONG"))
    if "operations" in result:
        total = sum(row["seconds"] for row in result["operations"])
        print(f"  where PyTorch's time goes, {total * 1e3:.0f} ms a step:")
        for row in result["operations"][:16]:
            print(f"    {row['seconds'] * 1e3:8.1f} ms {row['seconds'] / total:6.1%} {row['calls']:5.0f} calls  {row['op']}")
        print(result["weft_profile"])


def add_arguments(parser):
    """What compare_sampling.py has too."""
    parser.add_argument("--case", nargs="+", default=sorted(CASES), choices=sorted(CASES))
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    return parser


def main():
    parser = add_arguments(common.parser(__doc__, rounds=5, steps=4, warmup=2, threads=2))
    parser.add_argument("--require", type=float, help="least ratio of PyTorch's time to weft's")
    parser.add_argument("--require-f32", type=float, help="with --dtype bf16: least ratio of weft's time in float32 to that in bf16")
    parser.add_argument("--profile", action="store_true", help="also where each side spends its time")
    args = common.parse(parser)
    if args.require_f32 and args.dtype == "f32":
        parser.error("--require-f32 needs --dtype bf16")
    facts = common.about(args)
    results = [measure(CASES[name], args) for name in args.case]
    for result in results:
        show(result)
    rows = [result["row"] for result in results]
    common.show_rows(rows)
    common.write(args, facts, {"cases": results, "rows": rows})
    if not all(a["ok"] for r in results for a in r["agreement"].values()):
        return 1
    slow = [r for r in results if r["ratio"] < (args.require or 0) or r.get("ratio_f32", 0) < (args.require_f32 or 0)]
    for r in slow:
        print(f"({r['case']}) is {r['ratio']:.2f} times as fast as PyTorch"
              + (f", {r['ratio_f32']:.2f} times as fast as in float32" if "ratio_f32" in r else "") + ": less than required")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
