#!/usr/bin/env python3
"""How fast does `weft animate` render beside PyTorch, what do two ranks gain over one, and how does memory grow with a clip?

    compare_animate.py [--weft build/weft] [--parts speed ranks memory] [--rounds 3] [--threads 2] [--frames 4]
                       [--clip-frames 40] [--seconds 10 100] [--json FILE]

speed   frames of 256 x 256 with the released widths: weft, reference/sadtalker.py in the original's arrangement (the source's
        features computed again for both lanes of every batch), the same with the source kept, this also channels-last, and
        with its blocks compiled. Rounds in turn, medians; weft's time is that of its renderer as animate_report.json has it
ranks   one such clip: one rank, two ranks, and two jobs of one rank at the same time, which is the most that any sharing can
        gain; one thread each; rounds in turn, medians
memory  clips of that many seconds of speech, 64 x 64, with the widths of sadtalker.SMALL: the process's peak memory and
        that of the arena; beside it the original's way with frames, a list of them in f32, stacked, then turned to 8 bits as
        a whole, at 256 x 256
"""
import contextlib
import copy
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import check_animate
import common
import workers
from reference import sadtalker, sadtalker_chain, sadtalker_inputs, safetensors_io

SMALL = sadtalker.SMALL | {"fan_num_modules": 2}
NUMBERS = itertools.count()


def prepare(folder, widths, size, modules=2):
    """Inputs and weights of a part."""
    sadtalker_inputs.write_png(folder / "face.png", sadtalker_inputs.face())
    return sadtalker_inputs.write_weights(folder, widths, size=max(size, 64), modules=modules)


def released(folder, frames, piece=250):
    """A clip of 256 x 256 with the released widths, whose motion is given, so that all but the face's preparation is rendering:
    its weights' files and the motion."""
    files = prepare(folder, {}, 128, modules=4)
    rows = np.random.default_rng(1).standard_normal((frames, 70)).astype(np.float32) * 0.3
    safetensors_io.save(folder / "rows.safetensors", {"coeff_3dmm": rows})
    sadtalker_inputs.write_wav(folder / "speech.wav", sadtalker_inputs.speech(frames / 25))
    check_animate.write_deck(folder, files, {"size": 256, "batch_size": 2},
                             {"animate": {"picture": "face.png", "speech": "speech.wav", "name": "clip",
                                          "coefficients": "rows.safetensors", "piece": piece}})
    return files, rows


def start(args, folder, name, ranks, threads, *overrides):
    """A job under way, with an output of its own."""
    name = f"{name}{next(NUMBERS)}"
    command = common.mpi(ranks, [args.weft, "animate", folder / "deck.toml", f"animate.output={name}", f"run.threads={threads}",
                                 *overrides])
    log = open(folder / f"{name}.log", "w")
    return folder, name, command, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=common.environment(threads))


def finished(started):
    """The report, with peak memory in bytes."""
    folder, name, command, job = started
    peak = 0
    # Not ru_maxrss: a process inherits that of the one that started it, this one, whose networks are larger.
    while job.poll() is None:
        with contextlib.suppress(OSError, TypeError):  # it may end meanwhile
            peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{job.pid}/status").read_text())[1])
        time.sleep(0.05)
    if job.returncode != 0:
        sys.exit(f"exit code {job.returncode}: {' '.join(command)}\n{(folder / f'{name}.log').read_text()[-2000:]}")
    report = json.loads((folder / name / "animate_report.json").read_text())
    return report | {"peak_resident": peak}


# ---- speed ----

def speed(args, folder):
    files, rows = released(folder, args.frames)
    clip = safetensors_io.load(files["sadtalker"]) | safetensors_io.load(files["mapping"])
    clip = {n: a for n, a in clip.items() if not n.startswith("face_3drecon.")}
    nets = sadtalker.load(sadtalker.Networks(), clip).eval()
    del clip
    image = torch.from_numpy(sadtalker_chain.resize(sadtalker_inputs.face(), 256, 256)).permute(2, 0, 1) / 255
    torch.set_num_threads(args.threads)
    source, driven = torch.from_numpy(rows[0].copy()), torch.from_numpy(rows)

    last = workers.channels_last(copy.deepcopy(nets))
    compiled = workers.compile_blocks(copy.deepcopy(last), "Block", "ResBlock3d", "SpadeBlock", "Hourglass")

    def by_torch(nets, keep):
        with torch.inference_mode():
            steps = sadtalker.render(nets, image, source, driven, keep_source=keep)
            next(steps)
            began = time.monotonic()
            for _ in steps:
                pass
            return (time.monotonic() - began) / args.frames

    def limit():
        """Of a frame, from clips of two lengths: a clip's start is in both."""
        def job(times):
            longer = folder / f"{times}"
            longer.mkdir()
            released(longer, times * args.frames)
            started = start(args, longer, "profile", 1, args.threads, "run.profile=operations")
            finished(started)
            return (longer / f"{started[1]}.log").read_text()

        return common.limit_of(job) / args.frames

    def weft():
        report = finished(start(args, folder, "speed", 1, args.threads))
        return sum(rank["render"] for rank in report["ranks"]) / args.frames

    by_torch(compiled, True)  # which compiles it
    rounds = common.in_turn({"weft": weft, "torch_original": lambda: by_torch(nets, False),
                             "torch_source_kept": lambda: by_torch(nets, True), "torch_channels_last": lambda: by_torch(last, True),
                             "torch_compiled": lambda: by_torch(compiled, True)}, args.rounds)
    middle = common.medians(rounds)
    ratios = {n: middle[n] / middle["weft"] for n in rounds if n != "weft"}
    print("speed  " + ", ".join(f"{n} / weft {x:.2f}" for n, x in ratios.items()))
    row = common.row("talking heads, a frame of 256x256, f32", middle["weft"], limit(), {n: middle[n] for n in ratios})
    common.show_rows([row])
    return {"size": 256, "widths": "released", "frames": args.frames, "batch": 2, "threads": args.threads,
            "seconds_a_frame": middle, "times_weft": ratios, "rounds": rounds, "row": row}


# ---- ranks ----

def ranks(args, folder):
    frames = args.clip_frames
    piece = max(2, frames // 16 // 2 * 2)
    released(folder, frames, piece)

    def rate(report):
        return frames / max(rank["last_end"] for rank in report["ranks"])

    busy = []

    def two():
        report = finished(start(args, folder, "two", 2, 1))
        busy.append([rank["busy_share"] for rank in report["ranks"]])
        return rate(report)

    def beside():
        both = [start(args, folder, "beside", 1, 1) for _ in range(2)]
        return sum(rate(finished(job)) for job in both)

    rounds = common.in_turn({"one": lambda: rate(finished(start(args, folder, "one", 1, 1))), "two": two, "beside": beside}, args.rounds)
    middle = common.medians(rounds)
    print(f"ranks  two over one {middle['two'] / middle['one']:.2f}, "
          f"two jobs beside each other {middle['beside'] / middle['one']:.2f}")
    return {"size": 256, "widths": "released", "frames": frames, "piece": piece, "threads_a_rank": 1,
            "frames_a_second": middle, "speed_up": middle["two"] / middle["one"], "limit": middle["beside"] / middle["one"],
            "busy_share": busy, "rounds": rounds}


# ---- memory ----

# What the original does with the frames of a clip, without the networks: kept on the device in f32, put together, cut to
# pictures in f32 on the host, and turned to 8 bits all at once (skimage's img_as_ubyte makes an array of them first).
ACCUMULATE = r"""
import pathlib, re, sys
import numpy as np, torch
frames, side = int(sys.argv[1]), int(sys.argv[2])
def peak():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = peak()
predictions = [torch.rand((2, 3, side, side)) for _ in range(-(-frames // 2))]
together = torch.stack(predictions, dim=1).reshape(-1, 3, side, side)[:frames]
video = [np.transpose(together[i].numpy(), [1, 2, 0]).astype(np.float32) for i in range(frames)]
result = np.rint(np.asarray(video) * np.float32(255)).astype(np.uint8)
print(before, peak(), result.shape[0])
"""


def memory(args, folder):
    files = prepare(folder, SMALL, 64)
    check_animate.write_deck(folder, files, SMALL | {"size": 64, "batch_size": 4},
                             {"animate": {"picture": "face.png", "name": "clip"}})
    weft, original = {}, {}
    for seconds in args.seconds:
        sadtalker_inputs.write_wav(folder / f"speech{seconds}.wav", sadtalker_inputs.speech(seconds))
        report = finished(start(args, folder, f"memory{seconds}", 1, args.threads, f"animate.speech=speech{seconds}.wav"))
        weft[seconds] = {"frames": 25 * seconds, "peak_resident": report["peak_resident"],
                         "arena": max(rank["peak_bytes"] for rank in report["ranks"])}
        done = subprocess.run([sys.executable, "-c", ACCUMULATE, str(25 * seconds), "256"], capture_output=True, text=True,
                              check=True)
        before, peak, _ = map(int, done.stdout.split())
        original[seconds] = {"frames": 25 * seconds, "side": 256, "before": before, "peak_resident": peak}
        print(f"memory {seconds} s of speech: weft {weft[seconds]['peak_resident'] / 2**20:.0f} MiB, arena "
              f"{weft[seconds]['arena'] / 2**20:.0f} MiB; the original's frames {(peak - before) / 2**20:.0f} MiB", flush=True)
    first, last = min(args.seconds), max(args.seconds)
    more = 25 * (last - first)
    growth = {"weft": (weft[last]["peak_resident"] - weft[first]["peak_resident"]) / max(more, 1),
              "original": (original[last]["peak_resident"] - original[first]["peak_resident"]) / max(more, 1)}
    print(f"memory bytes a further frame: weft {growth['weft']:.0f} (64 x 64), the original's frames "
          f"{growth['original']:.0f} (256 x 256)")
    return {"size": 64, "widths": "sadtalker.SMALL", "weft": weft, "original_frames": original,
            "bytes_a_frame": growth}


def main():
    parser = common.parser(__doc__, rounds=3, threads=2, frames=4, clip_frames=40)  # frames: of speed; clip_frames: of ranks
    parser.add_argument("--parts", nargs="+", default=["speed", "ranks", "memory"], choices=["speed", "ranks", "memory"])
    parser.add_argument("--seconds", type=int, nargs="+", default=[10, 100], help="of memory: of speech")
    args = common.parse(parser)
    facts, results = common.about(args, "cv2", "numpy"), {}
    for part in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            load = os.getloadavg()[0]
            measure = {"speed": speed, "ranks": ranks, "memory": memory}[part]
            results[part] = measure(args, pathlib.Path(folder)) | {"load": round(load, 2)}
        common.write(args, facts, results | {"rows": [results["speed"]["row"]] if "speed" in results else []})
    return 0


if __name__ == "__main__":
    sys.exit(main())
