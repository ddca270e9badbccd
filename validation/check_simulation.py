#!/usr/bin/env python3
"""weft simulate against real ranks: are the steps of 1, 2 and 4 CPU ranks as long as it says?

    check_simulation.py [--weft build/weft] [--rounds 3] [--steps 40] [--cores 2] [--results FILE]

A small model with clips of three sizes and eight micro-batches a step trains on 1, 2 and 4 ranks in turn, one thread a rank.
The simulation gets what one rank measured alone (--costs RUN: the costs in its checkpoint, the medians of its metrics), the
rate of `weft bench comm` between two ranks, and the number of cores, and foretells all three. Medians over the steps after
the tenth, then over the rounds. Exit status 1 if any is more than 15 % off. Other work on the same cores spoils it.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile

DECK = """
[run]
seed = 5
threads = 1
resume = false
[data]
path = '''synthetic:
  name=small,clips=256,frames=4,height=16,width=16;
  name=long,clips=256,frames=8,height=16,width=24;
  name=large,clips=256,frames=4,height=32,width=32'''
[model]
in_channels = 3
hidden_size = 128
depth = 2
num_heads = 4
patch_size = [1, 2, 2]
caption_channels = 64
model_max_length = 8
[train]
batch_size = 1
batch_sizes = ["small=2"]
micro_batches = 8
lr = 1e-4
checkpoint_every = 0
[parallel]
bucket_mib = 1
"""
RANKS = (1, 2, 4)
SETTLING = 10  # steps: costs are agreed on and placements follow them
LIMIT = 0.15


def mpi(ranks, weft, *arguments, cwd):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
                                "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    job = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks),
                          weft, *map(str, arguments)], cwd=cwd, env=environment, text=True, capture_output=True)
    if job.returncode:
        sys.exit(f"weft {arguments[0]} on {ranks} ranks ended with {job.returncode}:\n{job.stderr}")


def median_step(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(m["seconds"] for m in lines[SETTLING:])


def one_round(weft, steps, cores, folder):
    """Seconds of a step by ranks: measured and foretold."""
    (folder / "deck.toml").write_text(DECK)
    mpi(2, weft, "bench", "comm", "--mib", "1", "--json", "comm.json", cwd=folder)
    rate = json.loads((folder / "comm.json").read_text())["sizes"][-1]["bus_bytes_per_second"] / 1e9
    measured = {}
    for ranks in RANKS:
        run = folder / f"run{ranks}"
        mpi(ranks, weft, "train", "deck.toml", f"run.dir={run}", f"train.steps={steps}", cwd=folder)
        measured[ranks] = median_step(run)
    subprocess.run([weft, "simulate", "deck.toml", "--fabric", "local", "--cores", str(cores), "--costs", "run1", "--cv",
                    "0", "--link-rate", str(rate), "--gpus", ",".join(map(str, RANKS)), "--warmup", str(SETTLING),
                    "--steps", str(steps - SETTLING), "--json", "out.json"],
                   cwd=folder, check=True, stdout=subprocess.DEVNULL)
    case = json.loads((folder / "out.json").read_text())["cases"][0]
    return measured, {r["ranks"]: r["step_seconds"] for r in case["results"]}, rate


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weft", default="build/weft")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--results", type=pathlib.Path)
    args = parser.parse_args()
    weft = str(pathlib.Path(args.weft).resolve())

    rounds = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            measured, foretold, rate = one_round(weft, args.steps, args.cores, pathlib.Path(folder))
        rounds.append({"measured": measured, "simulated": foretold, "link_gb_a_second": rate,
                       "load": os.getloadavg()[0]})
        print(f"round {number + 1}: " + ", ".join(
            f"{n} ranks {measured[n] * 1e3:.1f} ms, simulated {foretold[n] * 1e3:.1f} ms" for n in RANKS), flush=True)

    result, good = [], True
    for n in RANKS:
        measured, foretold = (statistics.median(r[k][n] for r in rounds) for k in ("measured", "simulated"))
        error = foretold / measured - 1
        good &= abs(error) <= LIMIT
        result.append({"ranks": n, "measured_seconds": measured, "simulated_seconds": foretold, "error": error})
        print(f"{n} ranks: measured {measured * 1e3:.1f} ms, simulated {foretold * 1e3:.1f} ms, {100 * error:+.1f} %")
    if args.results:
        version = subprocess.run([weft, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
        cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8")
                    if line.startswith("model name")), platform.machine())
        args.results.write_text(json.dumps({
            "kind": "simulation against real ranks", "date": datetime.date.today().isoformat(), "weft": version,
            "cpu": cpu, "cores": args.cores, "steps": args.steps, "settling": SETTLING, "deck": DECK, "limit": LIMIT,
            "ranks": result, "rounds": rounds}, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
