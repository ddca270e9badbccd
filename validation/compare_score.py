#!/usr/bin/env python3
"""How fast does `weft score` count text, beside Open-Sora's arrangement of the same network (torch_score.py)?

    compare_score.py VIDEOS.csv [--weft build/weft] [--parts forward job ranks] [--rounds 3] [--backbone oclip_resnet50]
                     [--counts 1 2 4 8] [--side 1024] [--json FILE]

VIDEOS.csv: a table of files, such as make_score_videos.py makes. Weights are drawn, with the last bias so that 0.4 % of some
frames' pixels count as text. All on the CPU, in float32.

forward  a frame through the network on 2 threads: weft's figure of a scoring job, seconds in the network over frames; PyTorch
         in inference mode and channels-last, eager and with its blocks compiled; and as the original calls it, with
         autograd's graph kept. Memory a frame: of weft the arena's peak over its batch; of PyTorch the process's growth over
         its size with the weights loaded. First weft's maps are compared with PyTorch's.
job      --job-rows rows, from the start of the commands to their tables: weft on one rank; the original's arrangement, once as
         it is (one process, 16 workers, autograd's graph; batches of --original-bs, since 16 want 40 GiB), once eased (2
         workers, inference mode, 2 threads). The counts of both tables are compared.
ranks    --rank-rows rows on 1, 2, 4, 8 ranks; the same number of the original's processes with 16 workers each, with
         --original-rows rows, for inference mode and --original-bs

Sides run in turn; medians count. Ratios are of the same round. Exit status 1 if maps differ by more than 1e-4.
"""
import csv
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from PIL import Image

import common
import torch_score
from reference import dbnet, safetensors_io

OUTPUT_TOLERANCE = 1e-4
SCRIPT = common.HERE / "torch_score.py"


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def first_rows(source, path, count):
    """A table of its first rows."""
    rows = rows_of(source)[:count]
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def score_weft(args, folder, table, ranks=1, *options):
    """One job of weft: its seconds, memory, counts, and the stages of its report."""
    output = folder / "weft.csv"
    shutil.rmtree(f"{output}.parts", ignore_errors=True)
    output.unlink(missing_ok=True)
    watch = torch_score.MemoryWatch(float("inf"), lambda: None)
    watch.start()
    began = time.monotonic()
    said = common.run([args.weft, "score", args.deck, f"score.input={table}", f"score.output={output}",
                       f"score.weights={args.weights}", f"score.side={args.side}", *options], ranks=ranks)
    wall = time.monotonic() - began
    watch.done.set()
    watch.join()
    report = json.loads(pathlib.Path(f"{output}.parts/score_report.json").read_text())
    stages = next(part for part in report.values() if isinstance(part, dict) and "stages" in part)
    arena = [rank["peak_bytes"] for rank in report.get("ranks", []) if "peak_bytes" in rank]
    return {"said": said, "wall_seconds": wall, "stages": stages, "arena_peak": max(arena, default=None), "peak_memory": watch.peak_started,
            "rows_per_second": stages["frames_a_second"], "counts": [row["ocr"] for row in rows_of(output)]}


def score_original(args, folder, table, processes=1, workers=16, threads=0, inference=False):
    report, output = folder / "original.json", folder / "original.csv"
    output.unlink(missing_ok=True)
    common.run([sys.executable, SCRIPT, table, "--deck", args.deck, "--weights", args.weights, "--side", args.side, "--processes",
                processes, "--bs", args.original_bs, "--num_workers", workers, "--threads", threads, "--report", report, "--output",
                output, "--memory-limit", args.memory_limit, *(["--inference-mode"] if inference else [])], allowed=(0, 1))
    found = json.loads(report.read_text())
    if not found["complete"] and not found["memory_exceeded"]:
        sys.exit("torch_score.py lost a process")
    return found | {"counts": [row["ocr"] for row in rows_of(output)] if found["complete"] else None}


def ratios(rounds, key, of, over):
    """Median over the rounds of one side's figure over another's."""
    return statistics.median(a[key] / b[key] for a, b in zip(rounds[of], rounds[over]))


def make_pictures(table, folder, side, count):
    """PNG files of `side` x `side` that are frames of the table's files, a table of them, and their pixels."""
    paths = [row["path"] for row in rows_of(table)]
    rows = torch_score.Rows(paths[::max(1, len(paths) // count)][:count], 0, 1, side)
    pixels = np.stack([rows[i]["pixels"][::-1].transpose(1, 2, 0) for i in range(len(rows))])
    for i, p in enumerate(pixels):
        Image.fromarray(p).save(folder / f"{i}.png")
    (folder / "pictures.csv").write_text("path\n" + "".join(f"{folder / f'{i}.png'}\n" for i in range(len(pixels))))
    return folder / "pictures.csv", np.ascontiguousarray(pixels)


def draw_weights(args, pixels, path):
    torch.set_num_threads(os.cpu_count())
    model = dbnet.draw(dbnet.build_from_deck(args.model), 1).eval()
    with torch.inference_mode():
        dbnet.text_share(model, dbnet.normalise(pixels[:3]))
    safetensors_io.save(path, dbnet.parameters(model))
    return path


def same_maps(args, folder, pixels):
    """Relative error of weft's probabilities of a picture."""
    image, arrays = dbnet.normalise(pixels[:1]), safetensors_io.load(args.weights)
    model = dbnet.load(dbnet.build_from_deck(args.model, arrays), arrays).eval()
    with torch.inference_mode():
        theirs = model(image).sigmoid().numpy()
    return common.relative_error(common.probe(args.weft, folder, "forward", {"image": image}, "--device", "cpu",
                                              deck=args.deck.read_text(), weights=args.weights)["probability"], theirs)


def measure_forward(args, folder):
    table, pixels = make_pictures(args.table, folder, args.side, args.passes)
    safetensors_io.save(folder / "pictures.safetensors", {"pictures": pixels})

    def weft():
        found = score_weft(args, folder, table, 1, f"score.threads={args.threads}")
        stages = found["stages"]
        return {"seconds": stages["stages"]["network"] / stages["frames"],
                "memory_a_frame": found["arena_peak"] and found["arena_peak"] / max(1, stages["batch"])}

    def by_torch(channels_last, inference, compiled=False):
        (folder / "case.json").write_text(json.dumps({
            "model": args.model, "weights": str(args.weights), "pictures": str(folder / "pictures.safetensors"),
            "threads": args.threads, "passes": args.passes, "channels_last": channels_last, "inference_mode": inference,
            "compiled": compiled}))
        found = json.loads(common.run([sys.executable, SCRIPT, "--time", folder / "case.json"]))
        return {"seconds": statistics.median(found["seconds"]), "memory_a_frame": found["peak_memory_above_weights"]}

    error = same_maps(args, folder, pixels)
    rounds = common.in_turn({"weft": weft, "torch channels_last": lambda: by_torch(True, True),
                             "torch compiled": lambda: by_torch(True, True, True),
                             "torch with graph": lambda: by_torch(False, False)}, args.rounds)
    middle, memory = common.medians(rounds, "seconds"), common.medians(rounds, "memory_a_frame")
    best = min(("torch channels_last", "torch compiled"), key=middle.get)
    ratio = ratios(rounds, "seconds", best, "weft")
    profiled = score_weft(args, folder, table, 1, f"score.threads={args.threads}", "run.profile=operations")
    row = common.row(f"text detection, {args.backbone}, a frame of {args.side}x{args.side}, f32", middle["weft"],
                     common.totals(profiled["said"])["limit"] / profiled["stages"]["frames"], {best: middle[best]})
    print(f"\na frame through the network; maps agree to {error:.1e}")
    for name, m in middle.items():
        print(f"  {name:22} {m:8.3f} s  {gib(memory.get(name))}")
    print(f"  the best PyTorch ({best}) over weft, of the same round: {ratio:.2f}x")
    return {"pictures": len(pixels), "error_of_maps": error, "rounds": rounds, "median_seconds": middle, "median_memory": memory,
            "best_torch": best, "ratio": ratio, "row": row}


def measure_job(args, folder):
    table = folder / "rows.csv"
    count = first_rows(args.table, table, args.job_rows)
    rounds = common.in_turn({
        "weft": lambda: score_weft(args, folder, table), "original": lambda: score_original(args, folder, table),
        "original, eased": lambda: score_original(args, folder, table, 1, 2, args.threads, True)}, args.rounds)
    ratio = {n: ratios(rounds, "wall_seconds", n, "weft") for n in rounds
             if n != "weft" and all(r["complete"] for r in rounds[n])}
    ours, theirs = rounds["weft"][0]["counts"], rounds["original, eased"][0]["counts"]
    differ = theirs and sum(float(a) != float(b) for a, b in zip(ours, theirs, strict=True))
    middle, memory = common.medians(rounds, "wall_seconds"), common.medians(rounds, "peak_memory")
    print(f"\na job of {count} rows, with its start; rows that differ: {differ}")
    for name, m in middle.items():
        print(f"  {name:22} {m:8.1f} s  {gib(memory[name])}" + (f"  {ratio[name]:.2f}x" if name in ratio else ""))
    return {"rows": count, "median_seconds": middle, "median_memory": memory, "ratio": ratio, "rows_that_differ": differ,
            "rounds": rounds}


def measure_ranks(args, folder):
    """Ranks of weft and processes of the original."""
    table, short, sides = folder / "rows.csv", folder / "short.csv", {}
    rows = {"weft": first_rows(args.table, table, args.rank_rows), "original": first_rows(args.table, short, args.original_rows)}
    for n in args.counts:
        sides[f"weft {n}"] = lambda n=n: score_weft(args, folder, table, n)
        sides[f"original {n}"] = lambda n=n: score_original(args, folder, short, n, inference=True)
    rounds = common.in_turn(sides, args.rounds)
    print(f"\nranks: weft {rows['weft']} rows, original {rows['original']}; rows a second with and without the start")
    gains = {}
    for name, found in rounds.items():
        for r in found:
            r["rows_a_second"] = rows[name.split()[0]] / r["wall_seconds"]
        first = f"{name.split()[0]} {args.counts[0]}"
        if not all(r.get("complete", True) for r in found + rounds[first]):
            print(f"  {name:14} did not end: {gib(max(r['peak_memory'] for r in found))}")
            continue
        gains[name] = ratios(rounds, "rows_a_second", name, first)
        print(f"  {name:14} {statistics.median(r['rows_a_second'] for r in found):8.2f} ({gains[name]:.2f}x)  "
              f"{statistics.median(r['rows_per_second'] for r in found):8.2f}  {gib(max(r['peak_memory'] for r in found))}")
    return {"rows": rows, "rows_a_second": common.medians(rounds, "rows_a_second"), "over_first": gains, "rounds": rounds}


def gib(count):
    return "" if count is None else f"{count / 2**30:.2f} GiB"


PARTS = {"forward": measure_forward, "job": measure_job, "ranks": measure_ranks}


def main():
    parser = common.parser(__doc__, rounds=3, passes=6, job_rows=24, rank_rows=200, original_rows=48, original_bs=1, side=1024,
                           threads=2)  # passes: frames a side and round of forward
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--backbone", default="oclip_resnet50", choices=["oclip_resnet50", "resnet50", "resnet18"])
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--memory-limit", type=float, default=16, help="GiB that the original's processes may take")
    args = common.parse(parser)
    args.table = args.table.resolve()
    args.model = {"name": "dbnet", "backbone": args.backbone, "asf": args.backbone != "resnet18", "conv2_gain": 1.0}
    facts, report = common.about(args, "cv2"), {}
    with tempfile.TemporaryDirectory(prefix="weft-score-") as name:
        folder = pathlib.Path(name)
        args.deck = folder / "deck.toml"
        args.deck.write_text(common.toml({"model": args.model, "device": {"kind": "cpu"},
                                          "postprocess": {"epsilon_ratio": 0.002 if args.model["asf"] else 0.01}}))
        (folder / "drawing").mkdir()
        pictures = make_pictures(args.table, folder / "drawing", args.side, 3)[1]
        args.weights = draw_weights(args, pictures, folder / "weights.safetensors")
        for part in args.parts:
            (folder / part).mkdir()
            report[part] = PARTS[part](args, folder / part)
    rows = [report["forward"]["row"]] if "forward" in report else []
    common.show_rows(rows)
    common.write(args, facts, report | {"rows": rows})
    return 0 if report.get("forward", {}).get("error_of_maps", 0) <= OUTPUT_TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
