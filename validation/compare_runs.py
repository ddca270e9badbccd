#!/usr/bin/env python3
"""Weak scaling of plain `weft train` runs on one host, beside what the host itself takes.

    compare_runs.py [--weft build/weft] [--mix uniform mixed] [--ranks 1 2] [--rounds 10] [--epochs 4]
                    [--set KEY=VALUE ...] [--tiny] [--results DIR | --no-results]

A round is, in an order that turns: a run of one rank, two independent runs of one rank side by side (on which the host's own
losses show: clock, caches, memory), and a run of each other number of ranks; one thread a rank, the model and the clips of
compare_scaling.py, as many micro-batches a rank in all of them. Every run counts the mean step of whole epochs.
Efficiency is the one rank's step over the step of n; `of the host` is that of the independent runs over that of n.
Of the rounds the median counts. --set changes a key of the deck in all runs.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import compare_scaling
import compare_step

HERE = pathlib.Path(__file__).resolve().parent
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
            ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), str(args.weft), "train", str(deck),
             f"run.dir={self.folder}", "run.resume=false", f"train.micro_batches={micro_batches}",
             f"train.steps={self.steps}", "train.checkpoint_every=0", *args.set],
            env=compare_scaling.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def seconds(self):
        said = self.process.communicate()[1]
        if self.process.returncode != 0:
            sys.exit(f"weft train ended with {self.process.returncode}: {said}")
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        steps = [j for j in lines if "loss" in j][self.first:]
        self.split = {key: statistics.fmean(j["split"][key] for j in steps) for key in steps[0]["split"]}
        return statistics.fmean(j["seconds"] for j in steps)


def measure(mix, args):
    with tempfile.TemporaryDirectory(prefix="weft-runs-") as name:
        folder = pathlib.Path(name)
        deck = compare_scaling.prepare(mix, args, folder)[0]
        rounds, kinds = [], [*[str(n) for n in args.ranks], "beside"]
        for i in range(args.rounds):
            found, splits = {}, {}
            for kind in kinds[i % len(kinds):] + kinds[:i % len(kinds)]:
                if kind == "beside":
                    runs = [Run(args, deck, folder, 1, mix, f"beside{k}") for k in range(2)]
                    found[kind] = statistics.fmean(run.seconds() for run in runs)
                else:
                    run = Run(args, deck, folder, int(kind), mix, kind)
                    found[kind], splits[kind] = run.seconds(), run.split
            rounds.append({"seconds": found, "split": splits})
            print(f"  {mix} round {i + 1}: " + ", ".join(f"{k}: {found[k]:.4f} s" for k in kinds), file=sys.stderr)
    def median(share):
        return statistics.median(share(r["seconds"]) for r in rounds)
    result = {"mix": mix, "micro_batches": compare_scaling.MICRO_BATCHES[mix], "rounds": rounds,
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weft", type=pathlib.Path, default=HERE.parent / "build" / "weft")
    parser.add_argument("--mix", nargs="+", default=["uniform", "mixed"], choices=["uniform", "mixed"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=4, help="of clips in the counted window of one rank")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it all work?")
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--no-results", action="store_true", help="print only")
    args = parser.parse_args()
    if not args.weft.is_file():
        sys.exit(f"{args.weft} is not there. HINT: make build, or --weft PATH")
    args.weft, args.threads, args.warmup, args.dtype, args.steps = args.weft.resolve(), 1, WARMUP, "f32", 0
    about = compare_step.provenance(args)
    results = [measure(mix, args) for mix in args.mix]
    if not args.no_results and not args.tiny:
        path = compare_step.result_path(args, "runs", about)
        path.write_text(json.dumps(about | {"cases": results}, indent=1) + "\n")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
