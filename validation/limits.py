#!/usr/bin/env python3
"""The tables of speed, of this machine: every system beside the fastest PyTorch, and both beside the machine's limit.

    limits.py [--weft build/weft] [--threads 2] [--rounds 2] [--only step wan sampling vae t5 segmentation score animate] [--out DIR]

Runs the comparisons of this folder one after the other with few rounds, some 20 minutes on two cores, and prints their rows as one
table. A row's limit is the least time that the rates of products and copies of this machine allow for what weft has to compute, as
`run.profile` counts it (docs/monitoring.md, Profile). DIR gets the JSON files with all samples. Exit status 1 if a comparison
failed; the others' rows are printed all the same.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import common

# part: scripts with their options; {table}: some videos.
RUNS = {
    "step": [["compare_step.py", "--case", "a", "--steps", 3, "--warmup", 1],
             ["compare_step.py", "--case", "a", "--steps", 3, "--warmup", 1, "--dtype", "bf16"]],
    "wan": [["compare_wan.py", "--case", "a", "--steps", 3, "--warmup", 2],
            ["compare_wan.py", "--case", "a", "--steps", 3, "--warmup", 2, "--dtype", "bf16"]],
    "sampling": [["compare_sampling.py", "--case", "a", "--clips", 1],
                 ["compare_sampling.py", "--case", "a", "--clips", 1, "--dtype", "bf16"]],
    "vae": [["compare_vae.py"], ["compare_vae.py", "--model", "wan_vae"]],
    "t5": [["compare_t5.py"]],
    "segmentation": [["compare_segmentation.py", "--parts", "step", "evaluate", "--sizes", "304x400"]],
    "score": [["compare_score.py", "{table}", "--parts", "forward", "--passes", 4]],
    "animate": [["compare_animate.py", "--parts", "speed", "--frames", 2]],
}


def main():
    parser = common.parser(__doc__, rounds=2, threads=2)
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--out", type=pathlib.Path)
    args = common.parse(parser)
    facts, rows, failed = common.about(args), [], []
    with tempfile.TemporaryDirectory() as name:
        folder = args.out or pathlib.Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "videos.csv"
        if "score" in args.only:
            common.run([sys.executable, common.HERE / "make_score_videos.py", folder, "--videos", 4, "--pictures", 0])
        for i, (script, *options) in enumerate(run for part in args.only for run in RUNS[part]):
            report = folder / f"{i}_{pathlib.Path(script).stem}.json"
            report.unlink(missing_ok=True)
            words = [str(word).replace("{table}", str(table)) for word in options]
            done = subprocess.run([sys.executable, common.HERE / script, *words, "--weft", args.weft, "--threads", str(args.threads),
                                   "--rounds", str(args.rounds), "--json", report], check=False)
            # A script's status also tells whether a goal is reached; without its report it failed.
            if not report.exists() or done.returncode not in (0, 1):
                failed.append(" ".join([script, *words]))
                continue
            rows += json.loads(report.read_text())["rows"]
    common.show_rows(rows)
    common.write(args, facts, {"rows": rows})
    for run in failed:
        print(f"failed: {run}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
