#!/usr/bin/env python3
"""Do runs repeat their bits? Undisturbed runs of a deck, and runs that are killed at random moments and started again until
they are done, compared by the hash of the state that they end with (docs/parallel.md).

    check_exact.py [--weft build/weft] [--runs 10] [--ranks 1 2 3] [--seed 1] [--json FILE]

Three decks: STDiT3 with one bucket, STDiT3 with three, a VAE with a discriminator and clips of random length. Exit status 1
if any two runs of a deck on as many ranks differ.
"""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import common
from tiny_models import TINY_VAE

STDIT3 = """
[run]
seed = 5
threads = 1
[model]
name = "stdit3"
in_channels = 3
hidden_size = 32
depth = 2
num_heads = 2
caption_channels = 16
model_max_length = 8
[train]
steps = 24
micro_batches = 6
checkpoint_every = 4
lr = 1e-3
[data]
path = "synthetic:"""
DECKS = {
    "STDiT3, one bucket": STDIT3 + 'clips=24,frames=3,height=16,width=16"\n',
    "STDiT3, three buckets": STDIT3 + 'clips=12,frames=3,height=16,width=16;clips=12,frames=1,height=24,width=16;'
                                      'clips=12,frames=5,height=12,width=20"\n',
    "VAE, discriminator, random lengths": """
[run]
seed = 7
threads = 1
[data]
path = "synthetic:clips=12,frames=5,height=24,width=24"
""" + TINY_VAE + """[train]
steps = 10
batch_size = 1
micro_batches = 4
lr = 1e-3
checkpoint_every = 3
""",
}
VAE_OPTIONS = ["vae_train.discriminator=patchgan", "vae_train.discriminator_start=1", "vae_train.random_length=true",
               "vae_train.lecam_weight=10", "vae_train.image_share=0.2"]


def train(weft, deck, run, ranks, options, kill_after=None):
    """True when the run is done; all its ranks are killed after so many seconds."""
    command = common.mpi(ranks, [weft, "train", deck, f"run.dir={run}", *options])
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=common.environment(),
                           start_new_session=True)
    try:
        _, err = job.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        # mpiexec starts ranks in process groups of their own.
        subprocess.run(["pkill", "-KILL", "-f", f"run.dir={run}"], check=False)
        job.communicate()
        return False
    if job.returncode != 0:
        sys.exit(f"{' '.join(job.args)} ended with {job.returncode}:\n{err}")
    return True


def state_hash(run):
    return json.loads((run / "latest" / "manifest.json").read_text(encoding="utf-8"))["state_hash"]


def main():
    parser = common.parser(__doc__, runs=10, seed=1)
    parser.add_argument("--ranks", nargs="+", default=[1, 2, 3], type=int)
    args = common.parse(parser)
    weft, facts = args.weft, common.about(args)
    rng = random.Random(args.seed)
    rows, failed = [], False
    for name, text in DECKS.items():
        options = VAE_OPTIONS if name.startswith("VAE") else []
        for ranks in args.ranks:
            with tempfile.TemporaryDirectory() as folder:
                folder = pathlib.Path(folder)
                deck = folder / "deck.toml"
                deck.write_text(text, encoding="utf-8")
                undisturbed, restarted, kills, shortest = [], [], 0, float("inf")
                for i in range(args.runs):
                    began = time.monotonic()
                    train(weft, deck, folder / f"run{i}", ranks, options)
                    shortest = min(shortest, time.monotonic() - began)
                    undisturbed.append(state_hash(folder / f"run{i}"))
                for i in range(args.runs):
                    run = folder / f"killed{i}"
                    for _ in range(rng.randint(1, 3)):
                        kills += not train(weft, deck, run, ranks, options, rng.uniform(0.3, 0.95) * shortest)
                    train(weft, deck, run, ranks, options)
                    restarted.append(state_hash(run))
                ends = set(undisturbed + restarted)
                failed = failed or len(ends) != 1
                rows.append({"deck": name, "ranks": ranks, "undisturbed": len(undisturbed), "restarted": len(restarted),
                             "kills": kills, "different_ends": len(ends)})
                print(f"{name}, {ranks} ranks: {len(undisturbed)} undisturbed and {len(restarted)} restarted runs "
                      f"({kills} kills): {'the same bits' if len(ends) == 1 else f'{len(ends)} DIFFERENT ENDS'}", flush=True)
    common.write(args, facts, {"rows": rows})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
