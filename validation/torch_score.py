#!/usr/bin/env python3
"""Open-Sora 1.2's OCR scoring (tools/scoring/ocr), arranged as there, to measure it: written from what it does, without
its code. Its parts, per process (one for each GPU there): a strided share of the rows, a DataLoader with 16 worker processes,
batches of 16, frames by OpenCV, Pillow's resize, the network in float32 with autograd's graph kept, and post-processing by
OpenCV and pyclipper in the main thread, one picture after the other. Nothing is written before the last row is done.

    torch_score.py META.csv --deck DECK.toml --weights W.safetensors [--output OUT.csv] [--processes 1] [--bs 16]
                   [--num_workers 16] [--threads T] [--inference-mode] [--side 1024] [--report JSON]
    torch_score.py --time CASE.json     seconds and memory of the network's forward passes alone

The other side of compare_score.py. Threads of the network: those of torchrun, 1 where there is more than one process, else one a
core. The job is stopped when its processes hold more than --memory-limit GiB, or when the host has less than 1.5 GiB left: at its
defaults the original wants 40 GiB on each GPU.

Reported: wall time of the job with its start; that from the first row to the last; rows a second; peak memory of all processes
(proportional set size, sampled).
"""
import argparse
import csv
import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time
import tomllib
import warnings

import cv2
import numpy as np
import pyclipper

VIDEO = (".mp4", ".avi", ".mov", ".mkv")
POSTPROCESS = {"mask_threshold": 0.3, "min_text_score": 0.3, "min_text_width": 5, "unclip_ratio": 1.5, "epsilon_ratio": 0.002,
               "max_candidates": 3000}


def find_boxes(probability, options):
    """Text regions of a map f32 [H,W]: (four corners [4,2], score) each."""
    found = []
    mask = (probability > options["mask_threshold"]).astype(np.uint8)
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    for contour in contours[:int(options["max_candidates"]) + 1]:
        points = cv2.approxPolyDP(contour, options["epsilon_ratio"] * cv2.arcLength(contour, True), True).reshape(-1, 2)
        if len(points) < 4:
            continue
        x0, y0 = np.clip(points.min(0), 0, np.array(probability.shape)[::-1] - 1)
        x1, y1 = np.clip(points.max(0), 0, np.array(probability.shape)[::-1] - 1)
        inside = np.zeros((y1 - y0 + 1, x1 - x0 + 1), np.uint8)
        cv2.fillPoly(inside, [(points - [x0, y0]).astype(np.int32)], 1)
        score = cv2.mean(probability[y0:y1 + 1, x0:x1 + 1], inside)[0]
        if score < options["min_text_score"]:
            continue
        following = np.roll(points, -1, 0).astype(np.float64)
        area = abs(float((points[:, 0] * following[:, 1] - points[:, 1] * following[:, 0]).sum())) / 2
        length = float(np.hypot(*(following - points).T).sum())
        offsetter = pyclipper.PyclipperOffset()
        offsetter.AddPath(points.tolist(), pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
        grown = offsetter.Execute(area * options["unclip_ratio"] / length)
        if not grown or len({len(p) for p in grown}) > 1:
            continue
        rectangle = cv2.minAreaRect(np.array(grown[0]))
        if min(rectangle[1]) >= options["min_text_width"]:
            found.append((cv2.boxPoints(rectangle), np.float32(score)))
    return found


def extract_frame(path, index=10):
    """The frame as a PIL image."""
    from PIL import Image

    def at(position):
        capture.set(cv2.CAP_PROP_POS_FRAMES, position)
        return Image.fromarray(cv2.cvtColor(capture.read()[1], cv2.COLOR_BGR2RGB))

    capture = cv2.VideoCapture(str(path))
    try:
        count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        return at(min(index, count - 1))
    except cv2.error:
        try:
            return at(0)
        except cv2.error:
            size = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)), int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
            return Image.new("RGB", size if min(size) > 0 else (256, 256))
    finally:
        capture.release()


class Rows:
    """The data set: a strided share of the rows, padded with the first ones so that all shares are as long."""

    def __init__(self, paths, rank, ranks, side):
        import torchvision.transforms as T
        total = -(-len(paths) // ranks) * ranks
        self.indices = [i % len(paths) for i in range(rank, total, ranks)]
        self.paths, self.transform = paths, T.Compose([T.Resize(side), T.CenterCrop(side)])

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        from PIL import Image
        path = self.paths[self.indices[i]]
        image = extract_frame(path) if path.lower().endswith(VIDEO) else Image.open(path).convert("RGB")
        pixels = np.asarray(self.transform(image))[:, :, ::-1]
        return {"index": self.indices[i], "pixels": np.ascontiguousarray(pixels.transpose(2, 0, 1))}


def work(rank, args, paths, start, results):
    """One process, for one GPU there."""
    import torch

    from reference import dbnet, safetensors_io

    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: they are wanted
    if args.threads:
        torch.set_num_threads(args.threads)
    deck = tomllib.loads(args.deck.read_text(encoding="utf-8")) if args.deck else {}
    options, arrays = POSTPROCESS | deck.get("postprocess", {}), safetensors_io.load(args.weights)
    model = dbnet.load(dbnet.build_from_deck(deck.get("model", {}), arrays), arrays).eval()
    # Forked, as under torchrun; this process being spawned, its own default would be another.
    loader = torch.utils.data.DataLoader(Rows(paths, rank, args.processes, args.side), batch_size=args.bs,
                                         num_workers=args.num_workers,
                                         multiprocessing_context="fork" if args.num_workers else None)
    start.wait()
    began, counts = time.monotonic(), {}
    for batch in loader:
        with torch.inference_mode(args.inference_mode):
            pictures = dbnet.normalise(batch["pixels"].flip(1).permute(0, 2, 3, 1))
            probability = model(pictures).sigmoid()
        maps = probability.detach().numpy()
        for i, probability_map in zip(batch["index"].tolist(), maps):
            counts[i] = sum(bool(score > 0.3) for _, score in find_boxes(probability_map, options))
        probability = maps = None
    results.put({"rank": rank, "began": began, "ended": time.monotonic(), "counts": counts})


def family(root):
    """Root and all processes that it started."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as f:
                    parents[int(entry)] = int(f.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                pass
    found, grew = {root}, True
    while grew:
        grew = False
        for pid, parent in parents.items():
            if pid not in found and parent in found:
                found.add(pid)
                grew = True
    return found


def memory_of(pid):
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("Pss:")) * 1024
    except (OSError, StopIteration):
        return 0


def available():
    with open("/proc/meminfo", encoding="utf-8") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("MemAvailable:")) * 1024


class MemoryWatch(threading.Thread):
    """Peak memory of all processes of a job; stops the job beyond a limit. Looks rarely enough to take 1 % of a core."""

    def __init__(self, limit, stop):
        super().__init__(daemon=True)
        self.limit, self.stop, self.done = limit, stop, threading.Event()
        self.peak, self.peak_started, self.exceeded = 0, 0, False

    def run(self):
        took = 0.0
        while not self.done.wait(min(10.0, max(0.5, 100 * took))):
            began = time.thread_time()
            held = {pid: memory_of(pid) for pid in family(os.getpid())}
            total = sum(held.values())
            self.peak = max(self.peak, total)
            self.peak_started = max(self.peak_started, total - held[os.getpid()])  # without this process itself
            if total > self.limit or available() < 1.5 * 2**30:
                self.exceeded = True
                self.stop()
                return
            took = time.thread_time() - began


def score(args):
    """Runs the job; its report."""
    began = time.monotonic()
    with open(args.meta, newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    if not rows or "path" not in rows[0]:
        sys.exit(f"{args.meta}: no rows, or no column path")
    if args.processes > 1:  # as torchrun does it
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(args.processes), spawn.Queue()
    workers = [spawn.Process(target=work, args=(r, args, [row["path"] for row in rows], start, results))
               for r in range(args.processes)]
    for w in workers:
        w.start()

    def stop():
        for pid in family(os.getpid()) - {os.getpid()}:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                pass

    watch = MemoryWatch(args.memory_limit * 2**30, stop)
    watch.start()
    done = []
    while len(done) < args.processes:
        try:
            done.append(results.get(timeout=1))
        except Exception:  # queue.Empty: is anybody left who could answer?
            if watch.exceeded or any(w.exitcode not in (None, 0) for w in workers):
                stop()
                break
    watch.done.set()
    report = {"processes": args.processes, "bs": args.bs, "num_workers": args.num_workers, "threads": args.threads,
              "inference_mode": args.inference_mode, "side": args.side, "rows": len(rows),
              "peak_memory": watch.peak, "memory_exceeded": watch.exceeded, "complete": len(done) == args.processes}
    for w in workers:
        w.join()
    if not report["complete"]:
        return report | {"wall_seconds": time.monotonic() - began}
    counts = {i: n for d in done for i, n in d["counts"].items()}
    if args.output:
        with open(args.output, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, fieldnames=[*rows[0], "ocr"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | {"ocr": counts[i]} for i, row in enumerate(rows))
    wall, scoring = time.monotonic() - began, max(d["ended"] for d in done) - min(d["began"] for d in done)
    return report | {"wall_seconds": wall, "scoring_seconds": scoring, "rows_per_second": len(rows) / scoring,
                     "regions": sum(counts.values())}


def measure(case):
    """Forward passes to the probability of a picture each, after one that does not count, and the memory that they take."""
    import torch

    import workers
    from reference import dbnet, safetensors_io

    def memory(what):
        lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(what + ":")) * 1024

    torch.set_num_threads(case["threads"])
    arrays = safetensors_io.load(case["weights"])
    model = dbnet.load(dbnet.build_from_deck(case["model"], arrays), arrays).eval()
    pictures = torch.from_numpy(safetensors_io.load(case["pictures"])["pictures"].copy())
    layout = torch.channels_last if case["channels_last"] else torch.contiguous_format
    model = model.to(memory_format=layout)
    if case["compiled"]:
        workers.compile_blocks(model, "Bottleneck", "BasicBlock", "Neck", "Sequential")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the start
    seconds, before = [], memory("VmRSS")
    for i in range(case["passes"] + 1):
        image = dbnet.normalise(pictures[i % len(pictures)][None]).contiguous(memory_format=layout)
        began = time.monotonic()
        with torch.inference_mode(case["inference_mode"]):
            probability = model(image).sigmoid()
        seconds.append(time.monotonic() - began)
        del probability
    return {"seconds": seconds[1:], "peak_memory_above_weights": memory("VmHWM") - before}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meta", type=pathlib.Path, nargs="?")
    parser.add_argument("--time", type=pathlib.Path, metavar="CASE.json")
    parser.add_argument("--deck", type=pathlib.Path, help="[model] and [postprocess] as weft score takes them")
    parser.add_argument("--weights", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--bs", type=int, default=16)
    parser.add_argument("--num_workers", type=int, default=16, help="of each process")
    parser.add_argument("--threads", type=int, default=0, help="of the network, in each process")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--inference-mode", action="store_true", help="without autograd's graph")
    parser.add_argument("--memory-limit", type=float, default=1024, help="GiB")
    args = parser.parse_args()
    if args.time:
        print(json.dumps(measure(json.loads(args.time.read_text()))))
        return 0
    if not args.meta or not args.weights:
        parser.error("META.csv and --weights are needed")
    report = score(args)
    text = json.dumps(report, indent=1)
    print(text)
    if args.report:
        args.report.write_text(text + "\n")
    return 0 if report["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
