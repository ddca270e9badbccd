#!/usr/bin/env python3
"""Weak scaling of weft against PyTorch DDP (gloo): the same model on 1 and 2 ranks of one thread each, clips of one shape and
of mixed shapes.

    compare_scaling.py [--weft build/weft] [--mix uniform mixed] [--rounds 3] [--epochs 2] [--require] [--tiny] [--json FILE]

Both sides live through all rounds and are timed in turn, so that whatever else the machine does hits both alike: a round is
`weft bench scaling` (1 rank, 2 ranks with and without overlap), then DDP with 1 and with 2
processes. Every timed window holds whole epochs, thus on both sides and at both rank counts the same clips. One shape: the
median step of a round counts; mixed shapes: the mean. Of the rounds the median counts.

That both sides train the same model is shown first: the loss of every shape on the same weights and inputs, within 1e-4.
Exit status 1 if they differ, or with --require if a target is missed.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch

import common
import scaling_case
from reference import rflow, safetensors_io, stdit3
from scaling_case import MICRO_BATCHES, MODEL, SHAPES

LOSS_TOLERANCE = 1e-4
TARGETS = {"uniform": 0.95, "mixed": 0.93}  # efficiency of weft on 2 ranks

WARMUP = {"uniform": 2, "mixed": 2}


def prepare(mix, args, folder):
    """Deck, case of torch_ddp.py and weights; their paths."""
    model_table = scaling_case.model(args.tiny)
    weights, micro_batches = folder / "weights.safetensors", scaling_case.MICRO_BATCHES[mix]
    safetensors_io.save(weights, common.arrays_of(stdit3.drawn(model_table)))
    deck = scaling_case.write_deck(mix, folder, args.tiny, weights)
    case = {"model": model_table, "train": scaling_case.TRAIN, "threads": 1, "weights": str(weights),
            "bucket_mib": scaling_case.BUCKET_MIB, "micro_batches": micro_batches, "warmup": 4,
            "shapes": [{"shape": s, "clips": n} for s, n in SHAPES[mix]]}
    return deck, case, weights


def same_losses(mix, args, deck, weights, folder):
    """Greatest relative difference of the two sides' losses over all shapes."""
    model = stdit3.build(scaling_case.model(args.tiny), safetensors_io.load(weights))
    worst = 0.0
    for shape, _ in SHAPES[mix]:
        latent, tokens = (1, 4, *shape), MODEL["model_max_length"]
        inputs = {"x": torch.randn(latent), "noise": torch.randn(latent), "timestep": torch.rand(1) * 1000,
                  "y": torch.randn(1, 1, tokens, MODEL["caption_channels"]), "mask": torch.ones(1, tokens, dtype=torch.int64),
                  "fps": torch.tensor([24.0]), "height": torch.tensor([8.0 * shape[1]]), "width": torch.tensor([8.0 * shape[2]])}
        ours = float(common.probe(args.weft, folder, "loss", inputs, "--device", "cpu", deck=deck.read_text(),
                                  weights=weights)["loss"][0])
        with torch.no_grad():
            theirs = float(rflow.losses(model, **inputs)[0])
        worst = max(worst, abs(ours - theirs) / abs(theirs))
    return worst


class Weft:
    """`weft bench scaling --paced`: a line on its stdin starts a round, the end of the last one brings the results."""

    def __init__(self, mix, args, deck, folder):
        self.report = folder / "scaling.json"
        steps = args.steps[mix]
        self.process = subprocess.Popen(
            common.mpi(2, [args.weft, "bench", "scaling", deck, "--ranks", "1,2", "--mode", "weak", "--mix", "mixed", "--no-overlap",
                           "--paced", "--rounds", args.rounds, "--steps", steps, "--warmup", WARMUP[mix], "--json", self.report]),
            env=common.environment(1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.wait_ready()

    def wait_ready(self):
        line = self.process.stdout.readline()
        if "is ready" not in line:
            sys.exit(f"weft bench scaling ended: {line}{self.process.communicate()[0]}")

    def round(self, last):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        if not last:
            self.wait_ready()
            return
        table = self.process.communicate()[0]
        if self.process.returncode != 0:
            sys.exit(f"weft bench scaling failed with {self.process.returncode}")
        print(table, file=sys.stderr)

    def results(self):
        return json.loads(self.report.read_text())


def measure(mix, args):
    with tempfile.TemporaryDirectory(prefix="weft-scaling-") as name:
        folder = pathlib.Path(name)
        deck, case, weights = prepare(mix, args, folder)
        loss = same_losses(mix, args, deck, weights, folder)
        middle = statistics.median if mix == "uniform" else statistics.fmean
        # One after the other: what starts must not meet what is being timed.
        weft = Weft(mix, args, deck, folder)
        ddp = [common.Workers("torch_ddp.py", case, folder, f"ddp{n}", n) for n in (1, 2)]
        rounds = {1: [], 2: []}
        for i in range(args.rounds):
            sides = [lambda last=i + 1 == args.rounds: weft.round(last)]
            for d in ddp:  # fewer processes take more steps for the same clips
                sides.append(lambda d=d: rounds[d.ranks].append(middle(d.run(args.steps[mix] * 2 // d.ranks)["seconds"])))
            for side in sides[i % 3:] + sides[:i % 3]:
                side()
            print(f"  {mix} round {i + 1}: DDP {rounds[1][-1]:.3f} s on 1, {rounds[2][-1]:.3f} s on 2", file=sys.stderr)
        for d in ddp:
            d.stop()
        ours = weft.results()
    theirs = {"rounds": rounds, "seconds": {n: statistics.median(s) for n, s in rounds.items()},
              "efficiency": statistics.median(a / b for a, b in zip(rounds[1], rounds[2]))}
    one, two = ours["points"]
    bare = two["without_overlap"]["exposed"]
    checks = {
        f"losses of both sides within {LOSS_TOLERANCE:g}": loss <= LOSS_TOLERANCE,
        f"weft's efficiency on 2 ranks >= {TARGETS[mix]:.0%}": two["efficiency"] >= TARGETS[mix],
        "weft's efficiency above DDP's": two["efficiency"] > theirs["efficiency"],
        "weft's step faster than DDP's on 1 rank": one["seconds"] < theirs["seconds"][1],
        "weft's step faster than DDP's on 2 ranks": two["seconds"] < theirs["seconds"][2],
        "exposed communication at most a third of that without overlap": two["exposed"] <= bare / 3,
    }
    return {"mix": mix, "shapes": [{"latent": s, "clips": n} for s, n in SHAPES[mix]],
            "micro_batches": MICRO_BATCHES[mix], "loss_difference": loss, "weft": ours, "ddp": theirs,
            "checks": checks}


def show(result):
    one, two = result["weft"]["points"]
    ddp = result["ddp"]
    print(f"\n{result['mix']}: {result['micro_batches']} micro-batches a rank and step of "
          + ", ".join(f"{'x'.join(map(str, s['latent']))} ({s['clips']} of an epoch)" for s in result["shapes"])
          + f"; losses agree to {result['loss_difference']:.1e}")
    print(f"  {'':12} {'1 rank':>10} {'2 ranks':>10} {'efficiency':>11}")
    print(f"  {'weft':12} {one['seconds']:8.3f} s {two['seconds']:8.3f} s {two['efficiency']:10.1%}"
          f"   exposed {two['exposed'] * 1e3:.1f} ms ({two['without_overlap']['exposed'] * 1e3:.1f} ms without overlap), wait "
          f"for the slowest {two['wait'] * 1e3:.1f} ms")
    print(f"  {'PyTorch DDP':12} {ddp['seconds'][1]:8.3f} s {ddp['seconds'][2]:8.3f} s {ddp['efficiency']:10.1%}")
    for what, good in result["checks"].items():
        print(f"    {'ok    ' if good else 'MISSED'} {what}")


def main():
    parser = common.parser(__doc__, rounds=3, epochs=2)  # epochs of mixed clips in a timed window; uniform: 6 steps
    parser.add_argument("--mix", nargs="+", default=["uniform", "mixed"], choices=["uniform", "mixed"])
    parser.add_argument("--require", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it all work?")
    args = common.parse(parser)
    facts = common.about(args)
    # Two ranks take two micro-batches for one of a rank: steps of whole epochs.
    epoch = sum(n for _, n in SHAPES["mixed"]) // (2 * MICRO_BATCHES["mixed"])
    args.steps = {"uniform": 6, "mixed": args.epochs * epoch}
    results = [measure(mix, args) for mix in args.mix]
    for result in results:
        show(result)
    common.write(args, facts, {"cases": results})
    if any(r["loss_difference"] > LOSS_TOLERANCE for r in results):
        return 1
    return 1 if args.require and not all(good for r in results for good in r["checks"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
