"""Training STDiT3 from stored latents against training with the VAE in the loop: the same clips, the same losses, and how many
samples a second. No T5 on either side.

    python3 -B validation/compare_latents.py --weft build/weft --json validation/results/latents_cpu_DATE.json

makes footage, draws a VAE, encodes the footage (f32 moments), and trains in turn on both, on one rank with all threads. Medians
of the steps behind the first two of each round count.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile

DECK = """
[run]
seed = 7
threads = {threads}
[ingest]
inputs = ["lavfi:testsrc2=size=256x256:rate=24:duration=4", "lavfi:mandelbrot=size=256x256:rate=24:end_pts=96"]
output = "clips.h5"
frames = [17]
height = 64
width = 64
max_clips = 8
[data]
path = "clips.h5"
[encode]
output = "latents.h5"
dtype = "f32"
text = false
[model]
in_channels = 4
hidden_size = 192
depth = 4
num_heads = 6
caption_channels = 64
model_max_length = 16
[vae]
spatial_channels = [64, 128, 256, 256]
filters = 64
[train]
steps = {steps}
batch_size = 2
micro_batches = 1
lr = 1e-3
checkpoint_every = 100000
"""


def run(weft, folder, *arguments):
    command = [str(weft), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def steps(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weft", default="build/weft")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args()
    weft = pathlib.Path(options.weft).resolve()
    with tempfile.TemporaryDirectory(prefix="weft_latents_") as name:
        folder = pathlib.Path(name)
        (folder / "deck.toml").write_text(DECK.format(steps=options.steps, threads=options.threads))
        run(weft, folder, "ingest", "deck.toml")
        # A VAE as it starts, as a file that both sides read.
        run(weft, folder, "train", "deck.toml", "model.name=vae", "train.steps=1", "train.batch_size=1",
            "run.dir=vae")
        run(weft, folder, "export", "vae", "vae.safetensors")
        vae = "vae.weights=vae.safetensors"
        run(weft, folder, "encode", "deck.toml", vae)
        seconds, losses = {"online": [], "stored": []}, {}
        for i in range(options.rounds):
            for side, extra in (("online", [vae]), ("stored", ["data.path=latents.h5"])):
                run(weft, folder, "train", "deck.toml", f"run.dir={side}{i}", *extra)
                found = steps(folder, f"{side}{i}")
                seconds[side] += [s["seconds"] for s in found[2:]]
                losses.setdefault(side, [s["loss"] for s in found])
    clips = 2
    rate = {side: clips / statistics.median(s) for side, s in seconds.items()}
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["stored"], losses["online"]))
    gain = rate["stored"] / rate["online"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            cwd=pathlib.Path(__file__).parent, check=False).stdout.strip()
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line),
               platform.processor())
    result = {
        "what": "training STDiT3 from stored f32 moments against the VAE in the loop",
        "hardware": f"{cpu}, {options.threads} threads", "commit": commit,
        "date": datetime.date.today().isoformat(), "load": os.getloadavg()[0], "deck": DECK,
        "samples_a_second": rate, "gain": gain, "losses": losses, "worst_loss_difference": worst,
        "step_seconds": seconds,
    }
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(f"from latents {rate['stored']:.2f} samples/s, VAE in the loop {rate['online']:.2f}: {gain:.1f}x; "
          f"losses differ by at most {worst:.1e}")
    raise SystemExit(0 if gain >= 3 and worst <= 1e-4 else 1)


if __name__ == "__main__":
    main()
