#!/usr/bin/env python3
"""Weak scaling of plain `weft train` runs on one host, beside what the host itself takes.

    compare_runs.py [--weft build/weft] [--mix uniform mixed] [--ranks 1 2] [--rounds 10] [--epochs 4]
                    [--set KEY=VALUE ...] [--tiny] [--json FILE]

A round is, in an order that turns: a run of one rank, two independent runs of one rank side by side (on which the host's own
losses show: clock, caches, memory), and a run of each other number of ranks; one thread a rank, the model and the clips of
compare_scaling.py, as many micro-batches a rank in all of them. Every run counts the mean step of whole epochs.
Efficiency is the one rank's step over the step of n; `of the host` is that of the independent runs over that of n.
Of the rounds the median counts. --set changes a key of the deck in all runs.
"""
import pathlib
import statistics
import subprocess
import sys
import tempfile

import common
import compare_scaling

WARMUP = 1  # epochs


class Run:
    """`weft train` of `ranks` ranks, under way."""

    def __init__(self, args, deck, folder, ranks, mix, name):
        micro_batches = compare_scaling.MICRO_BATCHES[mix] * ranks
        epoch = sum(n for _, n in compare_scaling.SHAPES[mix])
        # As many clips for 1 and 2 ranks; more ranks take as many steps as 2.
        self.first = -(-WARMUP * epoch // micro_batches)
        self.steps = self.first + args.epochs * epoch // compare_scaling.MICRO_BATCHES[mix] // min(ranks, 2)
        self.folder = folder / name
        self.process = subprocess.Popen(
            common.mpi(ranks, [args.weft, "train", deck, f"run.dir={self.folder}", "run.resume=false",
                               f"train.micro_batches={micro_batches}", f"train.steps={self.steps}", "train.checkpoint_every=0",
                               *args.set]), env=common.environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def seconds(self):
        said = self.process.communicate()[1]
        if self.process.returncode != 0:
            sys.exit(f"weft train ended with {self.process.returncode}: {said}")
        steps = [j for j in common.json_lines(self.folder / "metrics.jsonl") if "loss" in j][self.first:]
        self.split = {key: statistics.fmean(j["split"][key] for j in steps) for key in steps[0]["split"]}
        return statistics.fmean(j["seconds"] for j in steps)


def measure(mix, args):
    with tempfile.TemporaryDirectory(prefix="weft-runs-") as name:
        folder = pathlib.Path(name)
        deck = compare_scaling.prepare(mix, args, folder)[0]
        kinds, splits = [*[str(n) for n in args.ranks], "beside"], []

        def once(kind):
            runs = [Run(args, deck, folder, 1 if kind == "beside" else int(kind), mix, f"{kind}{k}")
                    for k in range(2 if kind == "beside" else 1)]
            mean = statistics.fmean(run.seconds() for run in runs)
            splits.append({kind: runs[0].split})
            return mean

        found = common.in_turn({kind: lambda kind=kind: once(kind) for kind in kinds}, args.rounds)
        rounds = [{kind: found[kind][i] for kind in kinds} for i in range(args.rounds)]

    def median(share):
        return statistics.median(share(r) for r in rounds)

    result = {"mix": mix, "micro_batches": compare_scaling.MICRO_BATCHES[mix], "rounds": rounds, "splits": splits,
              "seconds": {k: median(lambda s, k=k: s[k]) for k in kinds},
              "efficiency": {k: median(lambda s, k=k: s["1"] / s[k]) for k in kinds if k != "1"},
              "of_the_host": {k: median(lambda s, k=k: s["beside"] / s[k]) for k in kinds if k not in ("1", "beside")}}
    print(f"{mix}: " + "; ".join(
        f"{k} ranks {result['seconds'][k]:.4f} s, {result['efficiency'][k]:.1%}, {share:.1%} of the host's"
        for k, share in result["of_the_host"].items())
        + f"; 1 rank {result['seconds']['1']:.4f} s, two side by side {result['seconds']['beside']:.4f} s, "
        f"{result['efficiency']['beside']:.1%}")
    return result


def main():
    parser = common.parser(__doc__, rounds=10, epochs=4)  # epochs of clips in the counted window of one rank
    parser.add_argument("--mix", nargs="+", default=["uniform", "mixed"], choices=["uniform", "mixed"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it all work?")
    args = common.parse(parser)
    facts = common.about(args)
    common.write(args, facts, {"cases": [measure(mix, args) for mix in args.mix]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
