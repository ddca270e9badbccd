#!/usr/bin/env python3
"""`weft plan --fabric local` against real runs: step time and memory of five decks on CPU ranks, two of them a VAE's.

    python3 validation/check_plan.py --weft build/weft --json validation/results/plan_cpu_DATE.json

For each deck and rank count: plan, train, plan, train ..., so that both sides see the same machine. Step times are medians
over all runs (of a run the steps after the first four), memory is the arena's peak as the run reports it. Exit status 1 if
a prediction is further off than the bounds (15 % in time, 3 % in memory).
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

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


def run(weft, ranks, arguments, cwd):
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1",
                       OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1",
                       OMPI_MCA_btl_vader_single_copy_mechanism="none")
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), weft, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def compare(weft, deck, ranks, rounds):
    """Median predicted and measured step, and the bytes of memory of both."""
    planned, measured, step_medians = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "deck.toml").write_text(deck)
        for _ in range(rounds):
            run(weft, ranks, ["plan", "deck.toml", "--fabric", "local", "--json", "plan.json"],
                folder)
            plan = json.loads((folder / "plan.json").read_text())
            planned.append(plan["step"]["seconds"])
            run(weft, ranks, ["train", "deck.toml"], folder)
            lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            seconds = [s["seconds"] for s in steps[WARM_UP:]]
            measured += seconds
            step_medians.append(statistics.median(seconds))
            peak = max(s["memory"]["arena_peak_bytes"] for s in steps)
    return dict(ranks=ranks, planned_seconds=statistics.median(planned),
                measured_seconds=statistics.median(measured),
                planned_runs=planned, measured_runs=step_medians,
                planned_bytes=plan["memory"]["activations"], measured_bytes=peak,
                exposed_planned=plan["step"]["exposed_reduce"] + plan["step"]["exposed_gather"])


def hardware():
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        model = next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    return f"{model}, {os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weft", default="build/weft")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decks", nargs="+", default=list(DECKS), choices=list(DECKS))
    parser.add_argument("--json")
    a = parser.parse_args()
    weft = str(pathlib.Path(a.weft).resolve())
    version = subprocess.run([weft, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    rows, worst = [], True
    print(f"{'deck':<12} {'ranks':>5} {'planned':>10} {'measured':>10} {'error':>7}   memory error")
    for name in a.decks:
        for ranks in a.ranks:
            row = dict(deck=name, load_before=os.getloadavg()[0],
                       **compare(weft, DECKS[name], ranks, a.rounds))
            row["time_error"] = row["planned_seconds"] / row["measured_seconds"] - 1
            row["memory_error"] = row["planned_bytes"] / row["measured_bytes"] - 1
            worst = worst and (abs(row["time_error"]) <= TIME_BOUND and
                               abs(row["memory_error"]) <= MEMORY_BOUND)
            rows.append(row)
            print(f"{name:<12} {ranks:>5} {row['planned_seconds']:>8.4f} s "
                  f"{row['measured_seconds']:>8.4f} s {100 * row['time_error']:>+6.1f}% "
                  f"{100 * row['memory_error']:>+10.2f}%", flush=True)
    if a.json:
        result = dict(build=version, date=datetime.date.today().isoformat(), hardware=hardware(),
                      command="validation/check_plan.py", bounds=[TIME_BOUND, MEMORY_BOUND],
                      decks={name: DECKS[name] for name in a.decks}, rows=rows)
        pathlib.Path(a.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if worst else 1


if __name__ == "__main__":
    raise SystemExit(main())
