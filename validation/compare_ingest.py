#!/usr/bin/env python3
"""How fast does `weft ingest` cut footage into a store, beside the decoder alone and beside a script of OpenCV and h5py?

    compare_ingest.py [--weft build/weft] [--seconds 20] [--rounds 3] [--threads 2] [--json FILE]

Three sets of H.264 made by ffmpeg: a video of 1920x1080 to clips of 480p, one of 1280x720 to 240p, and ten times as many seconds in
files of one second of 320x240 to 144p. The decoder alone, `ffmpeg -f null`, is the limit: weft's share of it is printed. The script
does what a user would write: cv2.VideoCapture, cv2.resize (bilinear, without antialiasing, as weft), the middle, and a chunk of h5py a
clip. Both write the same number of frames of the same size, on the same number of threads. The time of weft and of the decoder
includes the start of a process (weft's with MPI: some 0.3 s), that of the script does not. The sides take turns; medians count.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import cv2
import h5py
import numpy as np

import common

# name: size, bits a second, times so many seconds, in files of a second?, resolution, frames of a clip
SETS = {"1080p": ("1920x1080", "8M", 1, False, "480p", 51), "720p": ("1280x720", "4M", 1, False, "240p", 51),
        "small files": ("320x240", "500k", 10, True, "144p", 17)}


def make(folder, name, seconds):
    size, rate, times, cut, *_ = SETS[name]
    made = folder / name.replace(" ", "_")
    made.mkdir()
    source = f"testsrc2=size={size}:rate=24:duration={seconds * times},noise=alls=6:allf=t"
    how = ["-g", "24", "-sc_threshold", "0", "-f", "segment", "-segment_time", "1", "-reset_timestamps", "1"] if cut else []
    subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", source, "-pix_fmt", "yuv420p", "-c:v", "libx264", "-preset",
                    "veryfast", "-b:v", rate, *how, str(made / "%04d.mp4")], check=True)
    return made


def decoder(videos, threads):
    listed = videos.with_suffix(".txt")
    listed.write_text("".join(f"file '{video}'\n" for video in sorted(videos.iterdir())))
    begin = time.perf_counter()
    subprocess.run(["ffmpeg", "-v", "error", "-threads", str(threads), "-f", "concat", "-safe", "0", "-i", listed, "-f", "null", "-"],
                   check=True)
    return time.perf_counter() - begin


def weft(args, videos, name, store):
    *_, resolution, frames = SETS[name]
    deck = store.with_suffix(".toml")
    deck.write_text("")
    begin = time.perf_counter()
    common.run([args.weft, "ingest", deck, f"ingest.inputs={videos}", f'ingest.resolutions=["{resolution}"]',
                f"ingest.frames=[{frames}]", f"ingest.output={store}"], args.threads)
    return time.perf_counter() - begin


def shape_of(store):
    with h5py.File(store) as file:
        return next(iter(file["clips"].values()))["frames"].shape


def script(videos, shape, path):
    """Clips of that shape, [N,T,H,W,3]."""
    _, frames, height, width, _ = shape
    begin = time.perf_counter()
    with h5py.File(path, "w") as file:
        clips = file.create_dataset("frames", (0, *shape[1:]), np.uint8, maxshape=(None, *shape[1:]), chunks=(1, *shape[1:]))
        clip = np.empty(shape[1:], np.uint8)
        for video in sorted(videos.iterdir()):
            capture, at = cv2.VideoCapture(str(video)), 0
            while True:
                there, frame = capture.read()
                if not there:
                    break
                scale = max(height / frame.shape[0], width / frame.shape[1])
                big = cv2.resize(frame, (max(width, round(frame.shape[1] * scale)), max(height, round(frame.shape[0] * scale))),
                                 interpolation=cv2.INTER_LINEAR)
                top, left = (big.shape[0] - height) // 2, (big.shape[1] - width) // 2
                clip[at] = cv2.cvtColor(big[top:top + height, left:left + width], cv2.COLOR_BGR2RGB)
                at += 1
                if at == frames:
                    clips.resize(len(clips) + 1, 0)
                    clips[-1] = clip
                    at = 0
        file.flush()
        os.fsync(file.id.get_vfd_handle())
        count = len(clips)
    assert count == shape[0], (count, shape)
    return time.perf_counter() - begin


def main():
    parser = common.parser(__doc__, seconds=20, rounds=3, threads=2)
    args = common.parse(parser)
    facts = common.about(args, "cv2", "h5py")
    cv2.setNumThreads(args.threads)
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = f"threads;{args.threads}"
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for what in SETS:
            videos, store = make(folder, what, args.seconds), folder / "weft.h5"
            weft(args, videos, what, store)  # which also warms the page cache
            shape = shape_of(store)
            rounds = common.in_turn({"decoder": lambda v=videos: decoder(v, args.threads),
                                     "weft": lambda v=videos, w=what: weft(args, v, w, store),
                                     "OpenCV + h5py": lambda v=videos, s=shape: script(v, s, folder / "script.h5")}, args.rounds)
            m = common.medians(rounds)
            print(f"{what}: {args.seconds * SETS[what][2] * 24} frames to {shape}: decoder {m['decoder']:.2f} s, weft {m['weft']:.2f} s "
                  f"({100 * m['decoder'] / m['weft']:.0f} %), OpenCV + h5py {m['OpenCV + h5py']:.2f} s "
                  f"({m['OpenCV + h5py'] / m['weft']:.2f}x)")
            results[what] = {"seconds": rounds, "median": m}
            read = common.run([args.weft, "bench", "read", store, "--readers", args.threads])
            ratio = re.search(r"plain pread\s+([\d.]+).*verified\s+([\d.]+)", read, re.S)
            print(f"    reading that store: {ratio[2]} GB/s with hashes, plain reads {ratio[1]} GB/s")
    common.write(args, facts, results)


if __name__ == "__main__":
    sys.exit(main())
