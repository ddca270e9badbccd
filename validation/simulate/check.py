#!/usr/bin/env python3
"""weft_simulate against real ranks: are the steps of 1, 2 and 4 CPU ranks as long as it says?

    simulate/check.py [--weft build/weft] [--rounds 3] [--steps 40] [--cores 2] [--json FILE]

A small model with clips of three sizes and eight micro-batches a step trains on 1, 2 and 4 ranks in turn, one thread a rank.
The simulation gets what one rank measured alone (--costs RUN: the costs in its checkpoint, the medians of its metrics), the
rate of `weft bench comm` between two ranks, and the number of cores, and foretells all three. Medians over the steps after
the tenth, then over the rounds. Exit status 1 if any is more than 15 % off. Other work on the same cores spoils it.
"""
import json
import os
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common

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


def median_step(run):
    return statistics.median(m["seconds"] for m in common.json_lines(run / "metrics.jsonl")[SETTLING:])


def one_round(weft, steps, cores, folder):
    """Seconds of a step by ranks: measured and foretold."""
    (folder / "deck.toml").write_text(DECK)
    common.run([weft, "bench", "comm", "--mib", "1", "--json", "comm.json"], 1, folder, 2)
    rate = json.loads((folder / "comm.json").read_text())["sizes"][-1]["bus_bytes_per_second"] / 1e9
    measured = {}
    for ranks in RANKS:
        run = folder / f"run{ranks}"
        common.run([weft, "train", "deck.toml", f"run.dir={run}", f"train.steps={steps}"], 1, folder, ranks)
        measured[ranks] = median_step(run)
    common.run([str(pathlib.Path(weft).with_name("weft_simulate")), "deck.toml", "--fabric", "local", "--cores", cores, "--costs", "run1", "--cv", "0", "--link-rate", rate,
                "--gpus", ",".join(map(str, RANKS)), "--warmup", SETTLING, "--steps", steps - SETTLING, "--json", "out.json"], 1, folder)
    case = json.loads((folder / "out.json").read_text())["cases"][0]
    return measured, {r["ranks"]: r["step_seconds"] for r in case["results"]}, rate


def main():
    args = common.parse(common.parser(__doc__, rounds=3, steps=40, cores=os.cpu_count()))
    facts = common.about(args)
    rounds = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            measured, foretold, rate = one_round(args.weft, args.steps, args.cores, pathlib.Path(folder))
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
    common.write(args, facts, {"deck": DECK, "limit": LIMIT, "ranks": result, "rounds": rounds})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
