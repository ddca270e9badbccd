#!/usr/bin/env python3
"""Weak scaling of plain `weft train` runs on one host, beside what the host itself takes.

    compare_runs.py [--weft build/weft] [--mix uniform mixed] [--ranks 1 2] [--rounds 10] [--epochs 3]
                    [--micro-batches N] [--set KEY=VALUE ...] [--tiny] [--json FILE]

A round is, in an order that turns: a run of one rank, two independent runs of one rank side by side (on which the host's own
losses show: clock, caches, memory), and a run of each other number of ranks; one thread a rank, the model and the clips of
scaling_case.py, as many micro-batches a rank in all of them. Every run counts the mean step of whole epochs.
Efficiency is the one rank's step over the step of n; `of the host` is that of the independent runs over that of n.
Of the rounds the median counts. Below come the parts of a step (metrics.jsonl of rank 0, medians), which name the losses.
--micro-batches changes how many a rank has in a step, and --set a key of the deck, in all runs. Ten rounds of both mixes take
nine minutes on two Zen 5 cores.
"""
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import numpy as np

import common
import scaling_case

WARMUP = 1  # epochs


class Run:
    """`weft train` of `ranks` ranks, under way."""

    def __init__(self, args, deck, folder, ranks, mix, name):
        micro_batches = args.of_a_rank[mix] * ranks
        epoch = sum(n for _, n in scaling_case.SHAPES[mix])
        # As many clips for 1 and 2 ranks; more ranks take as many steps as 2.
        self.first = -(-WARMUP * epoch // micro_batches)
        self.steps = self.first + args.epochs * epoch // args.of_a_rank[mix] // min(ranks, 2)
        self.folder = folder / name
        self.process = subprocess.Popen(
            common.mpi(ranks, [args.weft, "train", deck, f"run.dir={self.folder}", "run.resume=false",
                               f"train.micro_batches={micro_batches}", f"train.steps={self.steps}", "train.checkpoint_every=0",
                               *args.set]), env=common.environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def seconds(self):
        said = self.process.communicate()[1]
        if self.process.returncode != 0:
            sys.exit(f"weft train ended with {self.process.returncode}: {said}")
        self.counted = [j for j in common.json_lines(self.folder / "metrics.jsonl") if "loss" in j][self.first:]
        self.split = {key: statistics.fmean(j["split"][key] for j in self.counted) for key in self.counted[0]["split"]}
        return statistics.fmean(j["seconds"] for j in self.counted)


def divided_at_best(mix, alone, steps):
    """What two ranks could reach at most: a step takes as long as the rank with more to do, and micro-batches are not divided.
    The mean work of a rank over that of the busier one, at the best of all divisions of each step's micro-batches; a shape's
    seconds are fitted to the steps of one rank."""
    shape_of = [shape for shape, (_, clips) in enumerate(scaling_case.SHAPES[mix]) for _ in range(clips)]

    def shapes(step):
        return [shape_of[sample] for sample in step["samples"]]

    counts = np.array([np.bincount(shapes(step), minlength=shape_of[-1] + 1) for step in alone])
    seconds = np.linalg.lstsq(counts, np.array([step["split"]["compute"] for step in alone]), rcond=None)[0]
    mean = busier = 0
    for step in steps:
        costs = seconds[shapes(step)]
        choices = np.arange(2 ** (len(costs) - 1))[:, None] >> np.arange(len(costs)) & 1
        loads = choices @ costs
        mean += costs.sum() / 2
        busier += np.maximum(loads, costs.sum() - loads).min()
    return float(mean / busier)


def measure(mix, args):
    with tempfile.TemporaryDirectory(prefix="weft-runs-") as name:
        folder = pathlib.Path(name)
        deck = scaling_case.write_deck(mix, folder, args.tiny)
        kinds, splits, counted = [*[str(n) for n in args.ranks], "beside"], [], {}

        def once(kind):
            runs = [Run(args, deck, folder, 1 if kind == "beside" else int(kind), mix, f"{kind}{k}")
                    for k in range(2 if kind == "beside" else 1)]
            mean = statistics.fmean(run.seconds() for run in runs)
            splits.append({kind: runs[0].split})
            counted.setdefault(kind, []).extend(runs[0].counted)
            return mean

        found = common.in_turn({kind: lambda kind=kind: once(kind) for kind in kinds}, args.rounds)
        rounds = [{kind: found[kind][i] for kind in kinds} for i in range(args.rounds)]

    def median(share):
        return statistics.median(share(r) for r in rounds)

    result = {"mix": mix, "micro_batches": args.of_a_rank[mix], "rounds": rounds, "splits": splits,
              "seconds": {k: median(lambda s, k=k: s[k]) for k in kinds},
              "efficiency": {k: median(lambda s, k=k: s["1"] / s[k]) for k in kinds if k != "1"},
              "of_the_host": {k: median(lambda s, k=k: s["beside"] / s[k]) for k in kinds if k not in ("1", "beside")}}
    print(f"{mix}: " + "; ".join(
        f"{k} ranks {result['seconds'][k]:.4f} s, {result['efficiency'][k]:.1%}, {share:.1%} of the host's"
        for k, share in result["of_the_host"].items())
        + f"; 1 rank {result['seconds']['1']:.4f} s, two side by side {result['seconds']['beside']:.4f} s, "
        f"{result['efficiency']['beside']:.1%}")
    for kind in kinds:
        of_kind = [s[kind] for s in splits if kind in s]
        print(f"  {kind:7} " + ", ".join(f"{key} {statistics.median(s[key] for s in of_kind) * 1e3:.1f}" for key in of_kind[0])
              + " ms a step")
    if "2" in counted and args.of_a_rank[mix] <= 8:  # 2^15 divisions of a step at most
        result["divided_at_best"] = divided_at_best(mix, counted["1"], counted["2"])
        print(f"  divided at best, the micro-batches of two ranks' steps allow {result['divided_at_best']:.1%}")
    return result


def main():
    parser = common.parser(__doc__, rounds=10, epochs=3)  # epochs of clips in the counted window of one rank
    parser.add_argument("--mix", nargs="+", default=["uniform", "mixed"], choices=["uniform", "mixed"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--micro-batches", type=int, help="of a rank and step: a divisor of 16 (uniform 3, mixed 4)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it all work?")
    args = common.parse(parser)
    args.of_a_rank = {mix: args.micro_batches or count for mix, count in scaling_case.MICRO_BATCHES.items()}
    facts = common.about(args) | {"mpi": re.search(r"(?m)^ *MPI  +(.*?)  ", common.run([args.weft, "--version"]))[1]}
    print(f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores, {facts['mpi']}, commit {facts['commit']}")
    common.write(args, facts, {"cases": [measure(mix, args) for mix in args.mix]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
