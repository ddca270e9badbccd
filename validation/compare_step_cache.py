#!/usr/bin/env python3
"""What does a step cache save, and how far are its clips from those of all steps?

    compare_step_cache.py DECK [KEY=VALUE ...] [--weft build/weft] [--ranks 1] [--rounds 3] [--solver euler ...]
                          [--cache easycache ...] [--threshold 0.05 ...] [--json FILE]

Runs `weft generate DECK` with each solver, without a cache and with each rule and threshold, in turn, and prints a table: the
steps that were run, seconds of sampling a clip (the median of the rounds, all ranks together), the gain, and the PSNR of the
frames, clamped but not rounded to 8 bits, against those of all steps. A PSNR says how close a threshold stays to the full run,
not how good a clip looks.
"""
import functools
import json
import pathlib
import sys
import tempfile

import numpy as np

import common
from reference import safetensors_io


def frames_of(folder):
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("text_features"))
    return {f.name: np.clip(np.asarray(safetensors_io.load(f)["frames"], np.float64), -1, 1) for f in files}


def psnr(full, other):
    """Of all clips together, whose values are 2 apart at most."""
    error = np.mean([np.mean((full[name] - other[name]) ** 2) for name in full])
    return 10 * np.log10(4 / error) if error > 0 else float("inf")


def generate(args, folder, settings):
    """One run: its steps, and seconds of sampling a clip."""
    common.run([args.weft, "generate", args.deck, *args.overrides, *settings, f"generate.output={folder / 'new'}",
                "generate.tensors=true"], ranks=args.ranks)
    report = json.loads((folder / "new" / "generate_report.json").read_text(encoding="utf-8"))
    made = {"steps": sum(r["steps"] for r in report["ranks"]), "skipped": sum(r["steps_skipped"] for r in report["ranks"]),
            "seconds": sum(r["sample"] for r in report["ranks"]) / sum(r["clips"] for r in report["ranks"])}
    name = "_".join(settings).replace("sampler.", "").replace("=", "")
    made["frames"] = str(folder / name)
    if not (folder / name).exists():
        (folder / "new").rename(folder / name)
    else:
        for file in (folder / "new").iterdir():
            file.unlink()
    return made


def main():
    made = common.parser(__doc__, ranks=1, rounds=3)
    made.add_argument("deck", type=pathlib.Path)
    made.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    made.add_argument("--solver", nargs="+", default=["euler"])
    made.add_argument("--cache", nargs="+", default=["easycache"], choices=["teacache", "easycache"])
    made.add_argument("--threshold", nargs="+", type=float, default=[0.05, 0.1, 0.2])
    args = common.parse(made)
    facts = common.about(args)
    with tempfile.TemporaryDirectory() as temporary:
        sides, full_of = {}, {}
        for solver in args.solver:
            full = [f"sampler.solver={solver}"]
            sides[solver] = functools.partial(generate, args, pathlib.Path(temporary), full)
            full_of[solver] = solver
            for cache in args.cache:
                for threshold in args.threshold:
                    name = f"{solver}, {cache} {threshold:g}"
                    settings = [*full, f"sampler.cache={cache}", f"sampler.cache_threshold={threshold}"]
                    sides[name] = functools.partial(generate, args, pathlib.Path(temporary), settings)
                    full_of[name] = solver
        rounds = common.in_turn(sides, args.rounds)
        seconds = common.medians(rounds, "seconds")
        print("| solver, cache and threshold | steps run | seconds a clip | gain | PSNR |\n|---|---|---|---|---|")
        results = []
        for name, runs in rounds.items():
            full = full_of[name]
            distance = psnr(frames_of(pathlib.Path(rounds[full][0]["frames"])), frames_of(pathlib.Path(runs[0]["frames"])))
            run, steps = runs[0]["steps"] - runs[0]["skipped"], runs[0]["steps"]
            print(f"| {name} | {run} of {steps} | {seconds[name]:.3f} | {seconds[full] / seconds[name]:.2f}x | "
                  + ("-" if name == full else f"{distance:.1f} dB") + " |")
            results.append({"name": name, "steps": steps, "run": run, "seconds": [r["seconds"] for r in runs],
                            "psnr": None if np.isinf(distance) else distance})
        common.write(args, facts, {"cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
