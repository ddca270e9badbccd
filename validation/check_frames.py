#!/usr/bin/env python3
"""Picks frames of videos by weft and by OpenCV's VideoCapture, and compares every byte.

    check_frames.py [--weft build/weft] [--keep FOLDER]

Needs ffmpeg, numpy and OpenCV with the FFmpeg that weft has, since decoders and libswscale change a little: FFmpeg 5.1
is in opencv-python-headless 4.8 to 4.10. OpenCV's side is what Open-Sora does: the last frame where there are fewer,
the first where the frame cannot be read, a black one where nothing can.

Two things that OpenCV leaves open are fixed. Its decoders take one thread: with more, what a damaged frame looks like
depends on their number. New memory is zero (MALLOC_PERTURB_): the last rows of 10-bit frames are not written.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

if os.environ.get("MALLOC_PERTURB_") != "255":
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_PERTURB_": "255"})
os.environ.setdefault("OPENCV_LOG_LEVEL", "OFF")
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
import cv2
import numpy as np

import common

# Moving colours with text and noise, so that a wrong frame or chroma shows.
SOURCE = "testsrc2=size={size}:rate={rate},noise=alls=12:allf=t"
X264 = ["-c:v", "libx264", "-preset", "fast", "-bf", "3", "-g", "12"]
X265 = ["-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=error:bframes=3"]


def videos():
    """name: (size, rate, frames, options of ffmpeg)."""
    yuv = lambda name: ["-pix_fmt", name]
    cases = {}
    for size in ("320x240", "1920x1080", "322x182", "101x67", "640x362", "66x50"):
        even = all(int(v) % 2 == 0 for v in size.split("x"))
        layout = yuv("yuv420p") if even else yuv("yuv444p")
        for end in ("mp4", "mkv", "mov", "avi"):
            cases[f"h264_{size}.{end}"] = (size, 24, 30, X264 + layout)
        if size != "1920x1080":
            cases[f"mpeg4_{size}.avi"] = (size, 24, 30, ["-c:v", "mpeg4", "-bf", "2", "-q:v", "3", *yuv("yuv420p")])
            cases[f"mpeg4_{size}.mp4"] = (size, 25, 30, ["-c:v", "mpeg4", "-q:v", "3", *yuv("yuv420p")])
            cases[f"mjpeg_{size}.avi"] = (size, 24, 30, ["-c:v", "mjpeg", "-q:v", "3", *yuv("yuvj420p")])
            cases[f"mjpeg_{size}.mov"] = (size, 24, 30, ["-c:v", "mjpeg", "-q:v", "3", *yuv("yuvj422p")])
            cases[f"mjpeg444_{size}.mkv"] = (size, 24, 30, ["-c:v", "mjpeg", "-q:v", "3", *yuv("yuvj444p")])
            cases[f"hevc_{size}.mp4"] = (size, 24, 30, X265 + layout)
    cases["hevc_1080.mkv"] = ("1920x1080", 30, 20, X265 + yuv("yuv420p"))
    for name in ("yuv422p", "yuv444p", "yuv420p10le", "yuv422p10le", "gray", "gray10le", "yuvj420p"):
        for size in ("320x240", "322x182"):
            cases[f"h264_{name}_{size}.mp4"] = (size, 24, 30, X264 + yuv(name))
    cases["h264_10bit_1080.mp4"] = ("1920x1080", 24, 14, X264 + yuv("yuv420p10le"))
    cases["hevc_10bit_1080.mp4"] = ("1920x1080", 24, 14, X265 + yuv("yuv420p10le"))
    cases["rgb.mkv"] = ("322x182", 24, 14, ["-c:v", "libx264rgb"])
    cases["ffv1.mkv"] = ("322x182", 24, 14, ["-c:v", "ffv1", *yuv("yuv420p")])
    cases["vp9.mkv"] = ("322x182", 24, 14, ["-c:v", "libvpx-vp9", "-deadline", "realtime", *yuv("yuv420p")])
    cases["five.mp4"] = ("320x240", 24, 5, X264 + yuv("yuv420p"))
    cases["one.mp4"] = ("320x240", 24, 1, X264 + yuv("yuv420p"))
    cases["one.avi"] = ("320x240", 24, 1, ["-c:v", "mjpeg", *yuv("yuvj420p")])
    cases["ten.mkv"] = ("320x240", 24, 10, X264 + yuv("yuv420p"))
    cases["ntsc.mov"] = ("320x240", "30000/1001", 40, X264 + yuv("yuv420p"))
    cases["slow.mp4"] = ("320x240", "1/2", 14, X264 + yuv("yuv420p"))
    cases["fragments.mp4"] = ("320x240", 24, 30, X264 + ["-movflags", "frag_keyframe+empty_moov", *yuv("yuv420p")])
    cases["open_gop.mp4"] = ("320x240", 24, 40, X264 + ["-x264-params", "open-gop=1:keyint=7", *yuv("yuv420p")])
    cases["variable.mp4"] = ("320x240", 24, 40, ["-vf", "select='not(mod(n,3))+not(mod(n,7))'", "-vsync", "vfr", *X264,
                                                 *yuv("yuv420p")])
    cases["variable.mkv"] = cases["variable.mp4"]
    return cases


def make(folder):
    run = lambda *c: subprocess.run(["ffmpeg", "-loglevel", "error", "-y", *map(str, c)], check=True)
    for name, (size, rate, frames, options) in videos().items():
        run("-f", "lavfi", "-i", SOURCE.format(size=size, rate=rate), "-frames:v", frames, *options, folder / name)
    base = folder / "h264_322x182.mp4"
    for degrees in (90, 180, 270, 45):
        run("-i", base, "-c", "copy", "-metadata:s:v", f"rotate={degrees}", folder / f"turned_{degrees}.mp4")
        run("-i", base, "-c", "copy", "-metadata:s:v", f"rotate={degrees}", folder / f"turned_{degrees}.mov")
    run("-ss", "0.3", "-i", base, "-c", "copy", folder / "cut.mp4")
    run("-ss", "0.3", "-i", base, "-c", "copy", folder / "cut.mkv")
    run("-i", base, "-f", "lavfi", "-i", "sine", "-shortest", "-c:v", "copy", "-c:a", "aac", folder / "sound.mp4")
    run("-f", "lavfi", "-i", "sine=duration=1", "-c:a", "aac", folder / "only_sound.mp4")
    run("-f", "lavfi", "-i", "testsrc2=size=96x64", "-frames:v", 1, folder / "picture.png")
    (folder / "picture.png").rename(folder / "picture.mp4")
    whole = base.read_bytes()
    (folder / "text.mp4").write_text("this is no video\n" * 100)
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "no_index.mp4").write_bytes(whole[:len(whole) // 2])
    for name in ("h264_322x182.mkv", "mpeg4_322x182.avi", "mjpeg_322x182.avi", "h264_322x182.avi"):
        data = (folder / name).read_bytes()
        for share in (5, 30, 60):
            (folder / f"short_{share}_{name}").write_bytes(data[:len(data) * share // 100])
        damaged = bytearray(data)
        for at in range(len(data) // 5, len(data) // 2, 97):
            damaged[at] ^= 0x5a
        (folder / f"damaged_{name}").write_bytes(damaged)
    # The index in front: the end of the frames is missing.
    run("-i", base, "-c", "copy", "-movflags", "faststart", folder / "front.mp4")
    data = (folder / "front.mp4").read_bytes()
    for share in (10, 25, 60):
        (folder / f"short_{share}_front.mp4").write_bytes(data[:len(data) * share // 100])
    zeros = bytearray(data)
    zeros[len(data) // 3:] = bytes(len(data) - len(data) // 3)
    (folder / "zeros.mp4").write_bytes(zeros)


def by_opencv(path, index):
    video = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    count = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
    if index >= count:
        index = count - 1
    for number in (index, 0):
        video.set(cv2.CAP_PROP_POS_FRAMES, number)
        good, frame = video.read()
        if good:
            return np.ascontiguousarray(frame[:, :, ::-1]), "first" if number != index else ""
    height, width = (int(video.get(p)) for p in (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH))
    return np.zeros((height, width, 3) if height and width else (256, 256, 3), np.uint8), "black"


def main():
    p = common.parser(__doc__)
    p.add_argument("--keep", help="a folder for the videos, made there if it is empty or absent")
    a = common.parse(p)
    print(f"OpenCV {cv2.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(a.keep or temporary)
        folder.mkdir(exist_ok=True)
        if not any(folder.iterdir()):
            make(folder)
        jobs = [(f, i) for f in sorted(folder.iterdir()) for i in (10, 0, 1, 3, 25)]
        inputs = {"index": np.array([i for _, i in jobs])}
        for n, (file, _) in enumerate(jobs):
            inputs[f"path.{n:03}"] = np.frombuffer(str(file).encode(), np.uint8)
        out = common.probe(a.weft, pathlib.Path(temporary), "video_frames", inputs)
        same = 0
        for n, (file, index) in enumerate(jobs):
            wanted, stand_in = by_opencv(file, index)
            got, fault = out[f"frame.{n:03}"], bytes(out[f"fault.{n:03}"]).decode()
            what = "" if bool(stand_in) == bool(fault) else f" [OpenCV: {stand_in or 'the frame'}]"
            if wanted.shape == got.shape and (wanted == got).all() and not what:
                same += 1
                continue
            if wanted.shape != got.shape:
                how = f"{got.shape}, OpenCV {wanted.shape}"
            else:
                d = np.abs(wanted.astype(int) - got).max(2)
                rows = np.flatnonzero(d.any(1))
                how = f"{(d > 0).mean():.2%} of the pixels, at most by {d.max()}"
                how += f", rows {rows[0]} to {rows[-1]}" if len(rows) else ""
            print(f"{file.name} frame {index}: {how}{what} {fault}")
        print(f"{same} of {len(jobs)} frames are the same")
    return 0 if same == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
