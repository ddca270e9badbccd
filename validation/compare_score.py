#!/usr/bin/env python3
"""How fast does `weft score` count text, beside Open-Sora's arrangement of the same network (ocr_original.py)?

    compare_score.py VIDEOS.csv [--weft build/weft] [--parts forward job ranks wait] [--rounds 3] [--backbone oclip_resnet50]
                     [--weights W.safetensors] [--counts 1 2 4 8] [--side 1024] [--no-original] [--results DIR | --no-results]

VIDEOS.csv: a table of files, such as make_score_videos.py makes. Weights are drawn unless given, with the last bias so that
0.4 % of some frames' pixels count as text. All on the CPU, in float32.

forward  a frame through the network on 2 threads: weft's figure of a scoring job, seconds in the network over frames; PyTorch
         in inference mode, as it comes and channels-last; and as the original calls it, with autograd's graph kept. Memory a
         frame: of weft the arena's peak over its batch; of PyTorch the process's growth over its size with the weights
         loaded. First weft's maps are compared with PyTorch's.
job      --job-rows rows, from the start of the commands to their tables: weft on one rank; the original's arrangement, once as
         it is (one process, 16 workers, autograd's graph; batches of --original-bs, since 16 want 40 GiB), once eased (2
         workers, inference mode, 2 threads). The counts of both tables are compared.
ranks    --rank-rows rows on 1, 2, 4, 8 ranks; the same number of the original's processes with 16 workers each, with
         --original-rows rows, for inference mode and --original-bs
wait     the network replaced by 5 ms a frame, a fast GPU as the host sees it: all rows on --wait-ranks ranks of weft, and as many
         of the original's processes

Sides run in turn, another first in each round; medians count. Ratios are of the same round.
"""
import argparse
import csv
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import compare_step
import ocr_original
import safetensors_io
import step_cases

HERE = pathlib.Path(__file__).resolve().parent
OUTPUT_TOLERANCE = 1e-4
PARTS = ("forward", "job", "ranks", "wait")


def environment():
    return os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                         "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def run(argv, allowed=(0,)):
    done = subprocess.run([str(a) for a in argv], env=environment(), capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        sys.exit(f"exit code {done.returncode} of {' '.join(map(str, argv))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def first_rows(source, path, count):
    """A table of its first rows."""
    with open(source, newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[:count])
    return min(count, len(rows))


def score_weft(args, folder, table, ranks=1, *options):
    """One job of weft: its seconds, the feed of its report, the counts."""
    output = folder / "weft.csv"
    shutil.rmtree(f"{output}.parts", ignore_errors=True)
    output.unlink(missing_ok=True)
    argv = [args.weft, "score", args.deck, f"score.input={table}", f"score.output={output}", f"score.weights={args.weights}",
            f"score.side={args.side}", *options]
    if ranks > 1:
        argv = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", ranks, *argv]
    watch = ocr_original.MemoryWatch(float("inf"), lambda: None)
    watch.start()
    began = time.monotonic()
    run(argv)
    wall = time.monotonic() - began
    watch.done.set()
    watch.join()
    report = json.loads(pathlib.Path(f"{output}.parts/score_report.json").read_text())
    return {"wall_seconds": wall, "feed": report["feed"], "arena_peak": arena_peak(report), "peak_memory": watch.peak_started,
            "counts": counts_of(output)}


def arena_peak(report):
    """Of the arena, the largest of all ranks; None where the report does not say."""
    found = [s["peak_bytes"] for s in report.get("ranks", []) if isinstance(s, dict) and "peak_bytes" in s]
    return max(found, default=None)


def counts_of(path):
    with open(path, newline="", encoding="utf-8") as f:
        return [float(row["ocr"]) if row["ocr"] else None for row in csv.DictReader(f)]


def score_original(args, folder, table, processes=1, bs=1, workers=16, threads=0, inference=False, wait=0.0):
    report, output = folder / "original.json", folder / "original.csv"
    output.unlink(missing_ok=True)
    argv = [sys.executable, HERE / "ocr_original.py", table, "--deck", args.deck, "--weights", args.weights, "--side", args.side,
            "--processes", processes, "--bs", bs, "--num_workers", workers, "--threads", threads, "--network-wait", wait,
            "--report", report, "--output", output, "--memory-limit", args.memory_limit]
    run([*argv, *(["--inference-mode"] if inference else [])], (0, 1))
    found = json.loads(report.read_text())
    if not found["complete"] and not found["memory_exceeded"]:
        sys.exit("ocr_original.py lost a process")
    return found | {"counts": counts_of(output) if found["complete"] else None}


def in_turn(sides, rounds):
    names, results = list(sides), {name: [] for name in sides}
    for i in range(rounds):
        for name in names[i % len(names):] + names[:i % len(names)]:
            load = os.getloadavg()[0]
            results[name].append(sides[name]() | {"load_before": load})
            short = {k: round(v, 3) for k, v in results[name][-1].items() if isinstance(v, float)}
            print(f"    round {i + 1}  {name:24} {short}", file=sys.stderr, flush=True)
    return results


def medians(rounds, key):
    return {name: statistics.median(r[key] for r in found) for name, found in rounds.items()
            if all(r.get(key) is not None for r in found)}


def ratios(rounds, key, of, over):
    """Median over the rounds of one side's figure over another's."""
    return statistics.median(a[key] / b[key] for a, b in zip(rounds[of], rounds[over]))


def make_pictures(table, folder, side, count):
    """PNG files of `side` x `side` that are frames of the table's files, a table of them, and their pixels."""
    from PIL import Image

    with open(table, newline="", encoding="utf-8") as f:
        paths = [row["path"] for row in csv.DictReader(f)]
    rows = ocr_original.Rows(paths[::max(1, len(paths) // count)][:count], 0, 1, side)
    pixels = np.stack([rows[i]["pixels"][::-1].transpose(1, 2, 0) for i in range(len(rows))])
    (folder / "pictures.csv").write_text("path\n" + "".join(f"{folder / f'{i}.png'}\n" for i in range(len(pixels))))
    for i, p in enumerate(pixels):
        Image.fromarray(p).save(folder / f"{i}.png")
    return folder / "pictures.csv", np.ascontiguousarray(pixels)


def draw_weights(args, pixels, path):
    import torch

    import dbnet_torch
    torch.set_num_threads(os.cpu_count())
    model = dbnet_torch.draw(dbnet_torch.build_from_deck(args.model), 1).eval()
    with torch.inference_mode():
        dbnet_torch.text_share(model, dbnet_torch.normalise(pixels[:3]))
    safetensors_io.save(path, dbnet_torch.parameters(model))
    return path


def same_maps(args, folder, pixels):
    """Relative error of weft's probabilities of a picture, and the largest difference."""
    import torch

    import dbnet_torch
    image = dbnet_torch.normalise(pixels[:1])
    given, found = folder / "image.safetensors", folder / "maps.safetensors"
    safetensors_io.save(given, {"image": image.numpy()})
    run([args.weft, "probe", "forward", "--deck", args.deck, "--weights", args.weights, "--inputs", given, "--outputs", found,
         "--device", "cpu"])
    arrays = safetensors_io.load(args.weights)
    model = dbnet_torch.load(dbnet_torch.build_from_deck(args.model, arrays), arrays).eval()
    with torch.inference_mode():
        theirs = model(image).sigmoid().numpy()
    ours = safetensors_io.load(found)["probability"]
    return {"relative_error": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)),
            "largest_difference": float(np.abs(ours - theirs).max())}


def measure_forward(args, folder):
    table, pixels = make_pictures(args.table, folder, args.side, args.passes)
    safetensors_io.save(folder / "pictures.safetensors", {"pictures": pixels})

    def weft():
        found = score_weft(args, folder, table, 1, f"score.threads={args.threads}")
        feed = found["feed"]
        return {"seconds": feed["stages"]["network"] / feed["frames"], "batch": feed["batch"],
                "memory_a_frame": found["arena_peak"] and found["arena_peak"] / max(1, feed["batch"])}

    def torch(channels_last, inference):
        case = {"model": args.model, "weights": str(args.weights), "pictures": str(folder / "pictures.safetensors"),
                "threads": args.threads, "passes": args.passes, "channels_last": channels_last, "inference_mode": inference}
        (folder / "case.json").write_text(json.dumps(case))
        found = json.loads(run([sys.executable, HERE / "dbnet_torch.py", "--time", folder / "case.json"]))
        return {"seconds": statistics.median(found["seconds"]), "memory_a_frame": found["peak_memory_above_weights"],
                "samples": found["seconds"]}

    sides = {"weft": weft} if args.weft else {}
    sides |= {"torch": lambda: torch(False, True), "torch channels_last": lambda: torch(True, True),
              "torch with graph": lambda: torch(False, False)}
    maps = same_maps(args, folder, pixels) if args.weft else None
    rounds = in_turn(sides, args.rounds)
    middle = medians(rounds, "seconds")
    best = min((n for n in middle if n in ("torch", "torch channels_last")), key=middle.get)
    return {"pictures": len(pixels), "maps": maps, "rounds": rounds, "median_seconds": middle,
            "median_memory": medians(rounds, "memory_a_frame"), "best_torch": best,
            "ratio": ratios(rounds, "seconds", best, "weft") if args.weft else None}


def differing(a, b):
    return None if a is None or b is None else sum(x != y for x, y in zip(a, b, strict=True))


def measure_job(args, folder):
    table = folder / "rows.csv"
    count = first_rows(args.table, table, args.job_rows)
    sides = {"weft": lambda: score_weft(args, folder, table)} if args.weft else {}
    if not args.no_original:
        sides |= {"original": lambda: score_original(args, folder, table, 1, args.original_bs),
                  "original, eased": lambda: score_original(args, folder, table, 1, args.original_bs, 2, args.threads, True)}
    rounds = in_turn(sides, args.rounds)
    report = {"rows": count, "median_seconds": medians(rounds, "wall_seconds"), "median_memory": medians(rounds, "peak_memory")}
    if args.weft and not args.no_original:
        report["ratio"] = {n: ratios(rounds, "wall_seconds", n, "weft") for n in sides
                           if n != "weft" and all(r["complete"] for r in rounds[n])}
        report["rows_that_differ"] = differing(rounds["weft"][0]["counts"], rounds["original, eased"][0]["counts"])
    return report | {"rounds": rounds}


def measure_ranks(args, folder, wait=0.0):
    """Ranks of weft and processes of the original; with `wait` without a network."""
    table, short = folder / "rows.csv", folder / "short.csv"
    count = first_rows(args.table, table, args.rank_rows if not wait else 1 << 30)
    fewer = first_rows(args.table, short, args.original_rows if not wait else 1 << 30)
    options = [f"score.network_wait={wait}"] if wait else []
    sides = {}
    for n in args.counts if not wait else args.wait_ranks:
        if args.weft:
            sides[f"weft {n}"] = lambda n=n: score_weft(args, folder, table, n, *options)
        if not args.no_original:
            sides[f"original {n}"] = lambda n=n: score_original(args, folder, short, n, args.original_bs if not wait else 16,
                                                                inference=True, wait=wait)
    rounds = in_turn(sides, args.rounds)
    for name, found in rounds.items():
        rows = count if name.startswith("weft") else fewer
        for r in found:
            r["rows_a_second"] = rows / r["wall_seconds"]
            # Without the start of the processes: imports and weights.
            r["rows_a_second_running"] = r["feed"]["frames_a_second"] if "feed" in r else r.get("rows_per_second")
            if "feed" in r:
                r["network_busy_share"] = r["feed"]["network_busy_share"]
    gains = {}
    for name in rounds:
        first = f"{name.split()[0]} {(args.counts if not wait else args.wait_ranks)[0]}"
        if all(r.get("complete", True) for r in rounds[name] + rounds[first]):
            gains[name] = {key: ratios(rounds, key, name, first) for key in ("rows_a_second", "rows_a_second_running")}
    return {"rows": count, "original_rows": fewer, "wait_ms": wait, "rows_a_second": medians(rounds, "rows_a_second"),
            "rows_a_second_running": medians(rounds, "rows_a_second_running"), "over_first": gains,
            "network_busy_share": medians(rounds, "network_busy_share"), "peak_memory": medians(rounds, "peak_memory"),
            "verdicts": {n: r[-1]["feed"]["verdict"] for n, r in rounds.items() if "feed" in r[-1]}, "rounds": rounds}


def show(report):
    def gib(n):
        return "" if n is None else f"{n / 2**30:.2f} GiB"

    if "forward" in report:
        r = report["forward"]
        print("\na frame through the network" + (f"; maps agree to {r['maps']['relative_error']:.1e}" if r["maps"] else ""))
        for name, m in r["median_seconds"].items():
            print(f"  {name:22} {m:8.3f} s  {gib(r['median_memory'].get(name))}")
        if r["ratio"]:
            print(f"  the best PyTorch ({r['best_torch']}) over weft, of the same round: {r['ratio']:.2f}x")
    if "job" in report:
        r = report["job"]
        print(f"\na job of {r['rows']} rows, with its start; rows that differ: {r.get('rows_that_differ')}")
        for name, m in r["median_seconds"].items():
            ratio = r.get("ratio", {}).get(name)
            print(f"  {name:22} {m:8.1f} s  {gib(r['median_memory'].get(name))}" + (f"  {ratio:.2f}x" if ratio else ""))
    for part in ("ranks", "wait"):
        if part not in report:
            continue
        r = report[part]
        print(f"\n{part}: weft {r['rows']} rows, original {r['original_rows']}; rows a second with and without the start")
        for name, found in r["rounds"].items():
            if name not in r["over_first"]:
                print(f"  {name:14} did not end: {gib(max(x['peak_memory'] for x in found))}")
                continue
            gain, busy = r["over_first"][name], r["network_busy_share"].get(name)
            print(f"  {name:14} {r['rows_a_second'][name]:8.2f} ({gain['rows_a_second']:.2f}x)  "
                  f"{r['rows_a_second_running'][name]:8.2f} ({gain['rows_a_second_running']:.2f}x)  "
                  f"{gib(r['peak_memory'].get(name))}" + (f"  network busy {busy:.1%}" if busy is not None else ""))
        for name, verdict in r["verdicts"].items():
            print(f"    {name}: {verdict}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument("--weft", type=pathlib.Path, default=HERE.parent / "build" / "weft")
    parser.add_argument("--no-weft", action="store_true", help="the original's side alone")
    parser.add_argument("--no-original", action="store_true", help="weft's side alone, in job, ranks and wait")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--backbone", default="oclip_resnet50", choices=["oclip_resnet50", "resnet50", "resnet18"])
    parser.add_argument("--weights", type=pathlib.Path, help="of the backbone, with ASF unless it is resnet18")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=6, help="frames a side and round of forward")
    parser.add_argument("--job-rows", type=int, default=24)
    parser.add_argument("--rank-rows", type=int, default=200)
    parser.add_argument("--original-rows", type=int, default=48, help="of ranks")
    parser.add_argument("--original-bs", type=int, default=1, help="the original's batch")
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--wait-ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-limit", type=float, default=16, help="GiB that the original's processes may take")
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--no-results", action="store_true", help="print only")
    args = parser.parse_args()
    args.weft = None if args.no_weft else args.weft.resolve()
    if args.weft and not args.weft.is_file():
        sys.exit(f"{args.weft} is not there. HINT: make build, or --weft PATH, or --no-weft")
    args.table, args.warmup, args.steps = args.table.resolve(), 1, args.passes
    args.model = {"name": "dbnet", "backbone": args.backbone, "asf": args.backbone != "resnet18", "conv2_gain": 1.0}
    about = compare_step.provenance(args)
    if about["load_average_at_start"] > 0.5:
        print(f"WARN: the machine is at work already (load {about['load_average_at_start']:.1f})", file=sys.stderr)
    import cv2
    about["versions"] |= {"opencv": cv2.__version__}
    if args.weft:
        about["versions"]["weft"] = run([args.weft, "--version"]).splitlines()[0]
    report, began = {"network": args.model, "side": args.side}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-score-") as name:
        folder = pathlib.Path(name)
        args.deck = folder / "deck.toml"
        args.deck.write_text(step_cases.toml({"model": args.model, "device": {"kind": "cpu"},
                                              "postprocess": {"epsilon_ratio": 0.002 if args.model["asf"] else 0.01}}))
        if args.weights:
            args.weights = args.weights.resolve()
        else:
            (folder / "drawing").mkdir()
            args.weights = draw_weights(args, make_pictures(args.table, folder / "drawing", args.side, 3)[1],
                                        folder / "weights.safetensors")
        for part in args.parts:
            (folder / part).mkdir()
            print(f"  {part}", file=sys.stderr, flush=True)
            report[part] = {"forward": measure_forward, "job": measure_job, "ranks": measure_ranks,
                            "wait": lambda a, f: measure_ranks(a, f, 5.0)}[part](args, folder / part)
    about["load_average_at_end"], about["seconds"] = os.getloadavg()[0], time.monotonic() - began
    print(f"{about['hardware']['cpu']}, {about['hardware']['cores']} cores, f32, {args.backbone} at {args.side}, torch "
          f"{about['versions']['torch']}, commit {about['commit'][:12]}, load {about['load_average_at_start']:.1f} at the start, "
          f"{about['load_average_at_end']:.1f} at the end")
    show(report)
    if not args.no_results:
        args.results.mkdir(parents=True, exist_ok=True)
        path = args.results / f"score_{'_'.join(args.parts)}_{args.backbone}_cpu_{about['date'][:10]}.json"
        path.write_text(json.dumps(about | report, indent=1) + "\n")
        print(f"\nwritten to {path}")
    maps = report.get("forward", {}).get("maps")
    return 1 if maps and not maps["relative_error"] <= OUTPUT_TOLERANCE else 0


if __name__ == "__main__":
    sys.exit(main())
