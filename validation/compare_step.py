#!/usr/bin/env python3
"""A full training step of weft against PyTorch eager: does it agree, and how fast is it?

    compare_step.py [--weft build/weft] [--case a b] [--dtype f32|bf16] [--rounds 5] [--steps 4] [--warmup 2] [--threads 2]
                    [--require 1.3] [--require-f32 1.5] [--profile] [--results DIR | --no-results]

A step is the forward pass of the rectified-flow loss on a given batch, the backward pass, and AdamW. Each side
runs in short processes of its own, in turn, so that whatever else the machine does hits both alike: weft, PyTorch with
AdamW as it comes, PyTorch with AdamW(fused=True). All start from the same weights. The faster PyTorch is the yardstick.

Agreement: losses of all steps within 1e-5, and the weights after the last step, see `compare_weights`. Exit status 1 if
they do not agree, or with --require if weft is not that many times as fast.

With --dtype bf16 weft trains in bf16 and PyTorch under autocast, and weft in float32 runs in turn with them. Agreement: losses
and weights of weft are at most twice as far from those of PyTorch in float32 as autocast's are.
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

import numpy as np

import safetensors_io
import step_cases

HERE = pathlib.Path(__file__).resolve().parent
LOSS_TOLERANCE = 1e-5
# Both sides round in float32, in different orders. Rounding enters the weights through AdamW, which divides a gradient by its
# own size: relative errors of large gradients pass unchanged, small gradients near the noise may even change sign and
# move by up to 2 lr a step, but are few. PyTorch in float32 against itself in float64 ends, over 6 steps of these cases, within
# 4e-5 of the total update (L2 over all weights) and 3e-4 of a single tensor's; weft gets ten times that, for its sums run in
# an order of their own.
TOTAL_TOLERANCE, TENSOR_TOLERANCE = 4e-4, 3e-3
# AdamW's first step is lr * g / (|g| + eps): of full size whatever that of g. Where PyTorch's first gradient is less than this
# part of its tensor's root mean square, rounding decides the sign; such elements are left out, and may not be many.
NO_GRADIENT, MOST_WITHOUT = 1e-5, 1e-3
BF16_FACTOR = 2.0  # times autocast's own distance from float32


def environment(threads):
    """The same for both sides. glibc is told to keep freed memory: PyTorch is 3 % faster and much steadier so, and weft
    does not mind."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        "GLIBC_TUNABLES": "glibc.malloc.top_pad=268435456:glibc.malloc.trim_threshold=8589934592:"
                          "glibc.malloc.mmap_threshold=33554432"}


def command(side, weft):
    if side.startswith("weft"):
        return [str(weft), "bench", "step"]
    return ([sys.executable, str(HERE / "torch_step.py")] + (["--fused"] if "fused" in side else [])
            + (["--autocast"] if "autocast" in side else []))


def run_side(side, args, case_paths, folder, extra=()):
    """One process; returns its JSON, its output and the path of the weights it ends with."""
    deck, weights, inputs = case_paths
    stem = folder / side.replace(" ", "-")
    outputs, report = f"{stem}.safetensors", f"{stem}.json"
    argv = command(side, args.weft)
    argv += [str(deck)] + (["model.dtype=bf16"] if side == "weft bf16" else []) + ["--weights", str(weights), "--inputs", str(inputs), "--outputs", outputs, "--steps",
             str(args.steps), "--warmup", str(args.warmup), "--json", report, *extra]
    done = subprocess.run(argv, env=environment(args.threads), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{side} failed with exit code {done.returncode}: {' '.join(argv)}\n{done.stdout}{done.stderr}")
    return json.loads(pathlib.Path(report).read_text()), done.stdout, outputs


def without_free_directions(tensors):
    """Leaves out what no loss determines: a bias on the keys of cross attention shifts all logits of a query alike, its true
    gradient is zero, and AdamW turns the rounding noise that is left into steps of full size."""
    kept = {}
    for name, array in tensors.items():
        array = array.astype(np.float64)
        kept[name] = array[array.size // 2:] if name.endswith("cross_attn.kv_linear.bias") else array
    return kept


def compare_weights(start, ours, theirs):
    """Distance of the two results over the length of the update: over all weights, and the worst single tensor."""
    theirs = safetensors_io.load(theirs)
    gradients = {name.removeprefix("first_gradient/"): theirs.pop(name) for name in list(theirs) if name.startswith("first_gradient/")}
    gradients, theirs, start, ours = (without_free_directions(t) for t in
                                      (gradients, theirs, safetensors_io.load(start), safetensors_io.load(ours)))
    ours = {name: array for name, array in ours.items() if not name.startswith("first_gradient/")}
    if set(ours) != set(theirs):
        sys.exit(f"weights differ in names: {sorted(set(ours) ^ set(theirs))}")
    distance = update = 0.0
    elements = without = 0
    worst = ("", 0.0)
    for name in theirs:
        counted = np.ones(theirs[name].shape, bool)
        if name in gradients:
            size = np.abs(gradients[name])
            counted = size >= NO_GRADIENT * np.sqrt(np.mean(size**2))
        elements, without = elements + counted.size, without + int(np.sum(~counted))
        d = np.linalg.norm((ours[name] - theirs[name])[counted])
        u = np.linalg.norm((theirs[name] - start[name])[counted])
        distance, update = distance + d * d, update + u * u
        ratio = d / u if u > 0 else (0.0 if d == 0 else float("inf"))
        if not ratio <= worst[1]:
            worst = (name, float(ratio))
    if without > MOST_WITHOUT * elements:
        sys.exit(f"{without} of {elements} weights have no gradient to speak of: the case compares too little")
    return {"total": float(np.sqrt(distance / update)), "worst_tensor": worst[0], "worst": worst[1], "without_gradient": without}


def distances(reference, found, start, reference_weights, found_weights):
    losses = [abs(a - b) / abs(b) for a, b in zip(found["loss"], reference["loss"], strict=True)]
    return {"loss": max(losses)} | compare_weights(start, found_weights, reference_weights)


def agreement(sides, last, start, reference, limits):
    """Of every side with the reference: distances, their limits, and whether they are kept."""
    result = {}
    for side in sides:
        d = distances(last[reference][0], last[side][0], start, last[reference][2], last[side][2])
        result[side] = d | {"limits": limits, "ok": all(d[key] <= limit for key, limit in limits.items())}
    return result


def measure(case, args):
    """All rounds of a case: samples a side, agreement of the last round, the ratio."""
    ours = [] if args.torch_only else ["weft"] if args.dtype == "f32" else ["weft", "weft bf16"]
    theirs = ["torch", "torch fused"] if args.dtype == "f32" else ["torch autocast", "torch fused autocast"]
    sides = ours + theirs
    seconds = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="weft-step-") as name:
        folder = pathlib.Path(name)
        paths = step_cases.write(case, folder, args.threads)
        for i in range(args.rounds):
            last = {}
            # Another side begins in each round, so that none always follows the same one.
            for side in sides[i % len(sides):] + sides[:i % len(sides)]:
                last[side] = run_side(side, args, paths, folder)
                seconds[side] += last[side][0]["seconds"]
                print(f"  round {i + 1}  {side:12} " + " ".join(f"{s:.3f}" for s in last[side][0]["seconds"]),
                      file=sys.stderr)
        medians = {side: statistics.median(s) for side, s in seconds.items()}
        yardstick = min(theirs, key=medians.get)
        result = {"case": case.name, "what": case.what, "seconds": seconds, "median": medians,
                  "yardstick": yardstick, "loss": {side: r[0]["loss"] for side, r in last.items()}}
        if ours:
            result["ratio"] = medians[yardstick] / medians[ours[-1]]
            if args.dtype == "f32":
                limits = {"loss": LOSS_TOLERANCE, "total": TOTAL_TOLERANCE, "worst": TENSOR_TOLERANCE}
                result["agreement"] = {side: agreement(ours, last, paths[1], side, limits)["weft"] for side in theirs}
            else:
                result["ratio_f32"] = medians["weft"] / medians["weft bf16"]
                last["torch"] = run_side("torch", args, paths, folder)
                own = distances(last["torch"][0], last[theirs[0]][0], paths[1], last["torch"][2], last[theirs[0]][2])
                limits = {key: BF16_FACTOR * own[key] for key in ("loss", "total")}
                result["agreement"] = {"torch in float32": agreement(ours[1:], last, paths[1], "torch", limits)["weft bf16"]}
        if args.profile:
            profile, _, _ = run_side(theirs[-1], args, paths, folder, ["--profile"])
            result["operations"] = profile["operations"]
            if ours:
                result["weft_profile"] = run_side(ours[-1], args, paths, folder, ["--profile"])[1]
    return result


def show(result):
    print(f"\n({result['case']}) {result['what']}")
    ours = "weft bf16" if "weft bf16" in result["median"] else "weft"
    print(f"  {'side':20} {'median s':>9} {'min':>7} {'max':>7} {'steps':>6}  against {ours}")
    for side, samples in result["seconds"].items():
        median = result["median"][side]
        ratio = f"{median / result['median'][ours]:.2f}x" if ours in result["median"] else ""
        print(f"  {side:20} {median:9.4f} {min(samples):7.4f} {max(samples):7.4f} {len(samples):6}  {ratio}"
              + ("  (yardstick)" if side == result["yardstick"] else ""))
    for side, a in result.get("agreement", {}).items():
        limit = {key: f" (<= {value:.1e})" for key, value in a["limits"].items()}
        print(f"  agreement with {side}: losses {a['loss']:.1e}{limit['loss']}, weights {a['total']:.1e} of the update"
              f"{limit['total']}, worst {a['worst_tensor']} {a['worst']:.1e}{limit.get('worst', '')}: "
              + ("ok" if a["ok"] else "WRONG"))
    if "operations" in result:
        total = sum(row["seconds"] for row in result["operations"])
        print(f"  where PyTorch's time goes, {total * 1e3:.0f} ms a step:")
        for row in result["operations"][:16]:
            print(f"    {row['seconds'] * 1e3:8.1f} ms {row['seconds'] / total:6.1%} {row['calls']:5.0f} calls  {row['op']}")
    if "weft_profile" in result:
        print(result["weft_profile"])


def hardware():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return {"cpu": model, "cores": os.cpu_count(), "machine": platform.machine(), "system": platform.platform()}


def add_arguments(parser, rounds):
    """What compare_sampling.py has too."""
    parser.add_argument("--weft", type=pathlib.Path, default=HERE.parent / "build" / "weft")
    parser.add_argument("--case", nargs="+", default=sorted(step_cases.CASES), choices=sorted(step_cases.CASES))
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--no-results", action="store_true", help="print only")


def result_path(args, stem, about):
    """Of this day and make of processor, so that those of Intel and AMD lie beside each other."""
    make = about["hardware"]["cpu"].split()[0].split("(")[0].lower()
    return args.results / f"{stem}_cpu_{make}_{about['date'][:10]}.json"


def provenance(args):
    def git(*words):
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    import torch  # only for its version; the steps run in processes of their own

    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": git("rev-parse", "HEAD"), "uncommitted_changes": bool(git("status", "--porcelain", "-uno")),
            "hardware": hardware(), "threads": args.threads, "dtype": getattr(args, "dtype", "f32"),
            "load_average_at_start": os.getloadavg()[0],
            "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
            "rounds": args.rounds, "warmup": args.warmup, "steps": args.steps}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--require", type=float, help="least ratio of PyTorch's time to weft's")
    parser.add_argument("--require-f32", type=float, help="with --dtype bf16: least ratio of weft's time in float32 to that in bf16")
    parser.add_argument("--profile", action="store_true", help="also where each side spends its time")
    parser.add_argument("--torch-only", action="store_true", help="no weft: how fast PyTorch is here")
    args = parser.parse_args()
    if args.torch_only and (args.require or args.require_f32):
        parser.error("--require and --require-f32 need weft's side")
    if args.require_f32 and args.dtype == "f32":
        parser.error("--require-f32 needs --dtype bf16")
    if not args.torch_only and not args.weft.is_file():
        sys.exit(f"{args.weft} is not there. HINT: make build, or --weft PATH, or --torch-only")

    about = provenance(args)
    if about["load_average_at_start"] > 0.5:
        print(f"WARN: the machine is at work already (load {about['load_average_at_start']:.1f}): threads that wait for "
              "each other suffer from that far more than their share, and not all sides alike", file=sys.stderr)
    results = [measure(step_cases.CASES[name], args) for name in args.case]
    print(f"{about['hardware']['cpu']}, {args.threads} threads, {args.dtype}, torch {about['versions']['torch']}, "
          f"commit {about['commit'][:12]}, load {about['load_average_at_start']:.1f} at the start")
    for result in results:
        show(result)
    if not args.no_results and not args.torch_only:
        args.results.mkdir(parents=True, exist_ok=True)
        path = result_path(args, "step" if args.dtype == "f32" else "step_bf16", about)
        path.write_text(json.dumps(about | {"cases": results}, indent=1) + "\n")
        print(f"\nwritten to {path}")

    wrong = [r["case"] for r in results if not all(a["ok"] for a in r.get("agreement", {}).values())]
    slow = [r["case"] for r in results if args.require and r["ratio"] < args.require]
    slow_f32 = [r["case"] for r in results if args.require_f32 and r["ratio_f32"] < args.require_f32]
    for names, what in ((wrong, "weft and PyTorch do not agree"), (slow, f"slower than {args.require} times PyTorch"),
                        (slow_f32, f"slower than {args.require_f32} times float32")):
        if names:
            print(f"{what}: case {', '.join(names)}", file=sys.stderr)
    return 1 if wrong or slow or slow_f32 else 0


if __name__ == "__main__":
    sys.exit(main())
