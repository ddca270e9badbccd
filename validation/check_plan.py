#!/usr/bin/env python3
"""`weft plan --fabric local` against real runs: step time and memory of five decks on CPU ranks, two of them a VAE's.

    check_plan.py [--weft build/weft] [--ranks 1 2] [--rounds 3] [--decks NAME ...] [--json FILE]

For each deck and rank count: plan, train, plan, train ..., so that both sides see the same machine. Step times are medians
over all runs (of a run the steps after the first four), memory is the arena's peak as the run reports it. Exit status 1 if
a prediction is further off than the bounds (15 % in time, 3 % in memory).
"""
import json
import os
import pathlib
import statistics
import tempfile

import common

TIME_BOUND, MEMORY_BOUND = 0.15, 0.03
WARM_UP = 4

DECK = """
[run]
dir = "run"
resume = false
threads = 1
[data]
path = "synthetic:{data}"
[model]
in_channels = 4
hidden_size = {width}
depth = {depth}
num_heads = {heads}
caption_channels = 128
model_max_length = 32
[train]
steps = {steps}
batch_size = {batch}
micro_batches = {micro_batches}
checkpoint_every = 0
[parallel]
bucket_mib = {bucket_mib}
"""
DECKS = {
    "small width": dict(data="clips=64,latent=1,frames=5,height=16,width=16", width=128, depth=4,
                        heads=4, batch=4, micro_batches=4, bucket_mib=1, steps=24),
    "C = 384": dict(data="clips=64,latent=1,frames=4,height=12,width=12", width=384, depth=3,
                    heads=6, batch=2, micro_batches=2, bucket_mib=4, steps=16),
    "mixed sizes": dict(data="clips=60,latent=1,frames=1,height=16,width=16;"
                             "clips=60,latent=1,frames=5,height=16,width=16;"
                             "clips=30,latent=1,frames=10,height=12,width=20", width=192, depth=3,
                        heads=6, batch=2, micro_batches=8, bucket_mib=2, steps=16),
}
VAE_DECK = """
[run]
dir = "run"
resume = false
threads = 1
[data]
path = "synthetic:clips=32,frames=17,height=64,width=64"
[model]
name = "vae"
[vae]
spatial_channels = [32, 64, 64, 64]
filters = 32
channel_multipliers = [1, 2, 2, 4]
num_res_blocks = 2
micro_batch_size = 4
[vae_train]
random_length = false
[train]
steps = 12
micro_batches = 2
checkpoint_every = 0
[parallel]
bucket_mib = 4
"""
DECKS = {name: DECK.format(**deck) for name, deck in DECKS.items()} | {
    "VAE, pixels": VAE_DECK,
    "VAE, critic": VAE_DECK.replace(
        "random_length", 'discriminator = "patchgan"\ndiscriminator_start = 0\nrandom_length')}


def compare(weft, deck, ranks, rounds):
    """Median predicted and measured step, and the bytes of memory of both."""
    planned, measured, step_medians = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "deck.toml").write_text(deck)
        for _ in range(rounds):
            common.run([weft, "plan", "deck.toml", "--fabric", "local", "--json", "plan.json"], 1, folder, ranks)
            plan = json.loads((folder / "plan.json").read_text())
            planned.append(plan["step"]["seconds"])
            common.run([weft, "train", "deck.toml"], 1, folder, ranks)
            steps = common.json_lines(folder / "run" / "metrics.jsonl")
            seconds = [s["seconds"] for s in steps[WARM_UP:]]
            measured += seconds
            step_medians.append(statistics.median(seconds))
            peak = max(s["memory"]["arena_peak_bytes"] for s in steps)
    return dict(ranks=ranks, planned_seconds=statistics.median(planned),
                measured_seconds=statistics.median(measured),
                planned_runs=planned, measured_runs=step_medians,
                planned_bytes=plan["memory"]["activations"], measured_bytes=peak,
                exposed_planned=plan["step"]["exposed_reduce"] + plan["step"]["exposed_gather"])


def main():
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--decks", nargs="+", default=list(DECKS), choices=list(DECKS))
    a = common.parse(parser)
    facts = common.about(a)
    rows, worst = [], True
    print(f"{'deck':<12} {'ranks':>5} {'planned':>10} {'measured':>10} {'error':>7}   memory error")
    for name in a.decks:
        for ranks in a.ranks:
            row = dict(deck=name, load_before=os.getloadavg()[0],
                       **compare(a.weft, DECKS[name], ranks, a.rounds))
            row["time_error"] = row["planned_seconds"] / row["measured_seconds"] - 1
            row["memory_error"] = row["planned_bytes"] / row["measured_bytes"] - 1
            worst = worst and (abs(row["time_error"]) <= TIME_BOUND and
                               abs(row["memory_error"]) <= MEMORY_BOUND)
            rows.append(row)
            print(f"{name:<12} {ranks:>5} {row['planned_seconds']:>8.4f} s "
                  f"{row['measured_seconds']:>8.4f} s {100 * row['time_error']:>+6.1f}% "
                  f"{100 * row['memory_error']:>+10.2f}%", flush=True)
    common.write(a, facts, {"bounds": [TIME_BOUND, MEMORY_BOUND], "decks": {n: DECKS[n] for n in a.decks}, "rows": rows})
    return 0 if worst else 1


if __name__ == "__main__":
    raise SystemExit(main())
