#!/usr/bin/env python3
"""What does the shared queue of `weft generate` gain over a static split, and do two ranks halve the time?

    compare_queue.py [--weft build/weft] [--ranks 2] [--rounds 3] [--width 64] [--json FILE] [--mpiexec mpirun]

24 prompts of mixed lengths (1 to 102 frames, in no order), models with random weights, one thread a rank. Each round runs one
rank, all ranks by the queue, and all ranks by the original's way: each process has a range of the prompts (generate.share_out =
false); then as many jobs of one rank as there are ranks at the same time, which know nothing of each other: what the cores give
beside each other is the most that any sharing of work can gain ("limit"). Time is that from the first clip's start until the last clip is made, as OUT/generate_report.json has it; medians over
the rounds count. The pixels of all runs are compared. Exit status 0 if both ranks are busy for 95 % of the time until the last
clip, the speed-up over one rank is 1.9 for two (95 % of the ranks otherwise), and all pixels are the same.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
LENGTHS = [17, 17, 1, 51, 17, 34, 1, 17, 68, 17, 34, 1, 51, 17, 1, 102, 34, 17, 51, 1, 85, 17, 34, 68]
DECK = """
[run]
seed = 5
threads = 1
[model]
hidden_size = 256
depth = 2
num_heads = 4
caption_channels = 64
model_max_length = 32
[vae]
weights = "random:2"
spatial_channels = [16, 16, 32, 32]
spatial_groups = 8
filters = 16
num_groups = 8
[sampler]
steps = STEPS
[generate]
weights = "random:1"
"""


def start(a, where, name, ranks, *overrides):
    env = dict(os.environ, OMP_NUM_THREADS="1")
    command = [str(a.weft), "generate", str(where / "deck.toml"), f"generate.prompt_file={where / 'prompts.txt'}",
               f"generate.image_size=[{a.width * 9 // 16 // 8 * 8}, {a.width}]", f"generate.output={where / name}", *overrides]
    if ranks > 1:
        command = [*a.mpiexec.split(), "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *command]
    return name, command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def result_of(where, started):
    name, command, job = started
    said, _ = job.communicate()
    if job.returncode != 0:
        sys.exit(f"exit code {job.returncode}: {' '.join(command)}\n{said}")
    report = json.loads((where / name / "generate_report.json").read_text())
    pixels = {}
    for line in (where / name / "generated.jsonl").read_text().splitlines():
        clip = json.loads(line)
        pixels[clip["name"]] = clip["pixels"]
    return {"seconds": max(r["last_end"] for r in report["ranks"]), "busy": [r["busy_share"] for r in report["ranks"]],
            "clips": [r["clips"] for r in report["ranks"]]}, pixels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weft", default=HERE.parent / "build" / "weft")
    parser.add_argument("--mpiexec", default="mpirun")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of the sampler; Open-Sora's own number unless said")
    parser.add_argument("--width", type=int, default=64, help="of the clips in pixels; their height is 9/16 of it")
    parser.add_argument("--note", default="", help="for the JSON file, such as what else the machine was doing")
    parser.add_argument("--json", type=pathlib.Path)
    a = parser.parse_args()
    runs, all_pixels = {"one": [], "queue": [], "static": [], "beside": []}, []
    for r in range(a.rounds):
        with tempfile.TemporaryDirectory() as folder:
            where = pathlib.Path(folder)
            (where / "deck.toml").write_text(DECK.replace("STEPS", str(a.steps)))
            (where / "prompts.txt").write_text(
                "".join(f'prompt {i} {{"num_frames": {n}}}\n' for i, n in enumerate(LENGTHS)))
            for name, ranks, overrides in (("one", 1, []), ("queue", a.ranks, []),
                                           ("static", a.ranks, ["generate.share_out=false"])):
                result, pixels = result_of(where, start(a, where, name, ranks, *overrides))
                runs[name].append(result)
                all_pixels.append(pixels)
                print(f"round {r}, {name}: {result['seconds']:.2f} s, busy "
                      f"{', '.join(f'{100 * b:.1f} %' for b in result['busy'])}, clips {result['clips']}", flush=True)
            jobs = [start(a, where, f"beside{i}", 1) for i in range(a.ranks)]
            beside = [result_of(where, job)[0]["seconds"] for job in jobs]
            runs["beside"].append({"seconds": statistics.harmonic_mean(beside), "each": beside})
            print(f"round {r}, jobs beside each other: {', '.join(f'{s:.2f} s' for s in beside)}", flush=True)
    seconds = {name: statistics.median(x["seconds"] for x in of) for name, of in runs.items()}
    busy = {name: statistics.median(min(x["busy"]) for x in of) for name, of in runs.items() if name != "beside"}
    same = all(p == all_pixels[0] for p in all_pixels)
    summary = {"clips": len(LENGTHS), "ranks": a.ranks, "width": a.width, "seconds": seconds, "least_busy": busy,
               "speedup_queue": seconds["one"] / seconds["queue"], "speedup_static": seconds["one"] / seconds["static"],
               "limit": a.ranks * seconds["one"] / seconds["beside"], "same_pixels": same}
    print(json.dumps(summary, indent=2))
    if a.json:
        def output(*command):
            return subprocess.run(command, capture_output=True, text=True, cwd=HERE, check=False).stdout.strip()

        cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        about = {"commit": output("git", "rev-parse", "--short", "HEAD"), "date": output("date", "-I"),
                 "cpu": f"{len(cpu)} x {cpu[0]}", "note": a.note, "steps": a.steps}
        a.json.write_text(json.dumps({**about, **summary, "rounds": runs}, indent=2) + "\n")
    wanted = 1.9 if a.ranks == 2 else 0.95 * a.ranks
    return 0 if same and busy["queue"] >= 0.95 and summary["speedup_queue"] >= wanted else 1


if __name__ == "__main__":
    sys.exit(main())
