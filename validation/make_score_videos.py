#!/usr/bin/env python3
"""Real video files and pictures of many kinds to score, some with text, made by ffmpeg (Debian: ffmpeg, fonts-dejavu-core).

    make_score_videos.py OUT [--videos 200] [--pictures 300] [--seed 1] [--jobs 2]

H.264, HEVC, MPEG-4 and MJPEG in mp4, mov, mkv and avi; 320x240 to 1920x1080, landscape and portrait; 1 to 10 seconds at 10
to 60 frames a second, most of them short; pictures as JPEG and PNG. In about half of them drawtext writes one to five lines in
DejaVu. The seed determines kinds, words and, with the same build of ffmpeg, bytes. Writes OUT/media/* and

    OUT/videos.csv   the videos    OUT/files.csv   videos and pictures, mixed

with the columns path, text (a caption with commas and quotation marks), num_frames, width, height, fps and words (how many were
drawn). Paths are absolute. Files that stand already are kept, so a stopped run goes on.
"""
import argparse
import concurrent.futures
import csv
import os
import pathlib
import random
import subprocess
import sys

FONTS = pathlib.Path("/usr/share/fonts/truetype/dejavu")
# width, height, how often
SIZES = [(320, 240, 10), (426, 240, 12), (480, 360, 14), (640, 360, 16), (640, 480, 12), (360, 640, 8), (854, 480, 10),
         (960, 540, 5), (1280, 720, 9), (720, 1280, 3), (1920, 1080, 4)]
PICTURE_SIZES = SIZES + [(1023, 769, 6), (1024, 1024, 4), (1600, 1200, 4), (257, 1031, 3)]
# encoder, its options, containers, how often
CODECS = [("libx264", "-preset veryfast -crf 27 -bf 2", ("mp4", "mov", "mkv"), 60),
          ("libx265", "-preset ultrafast -crf 30 -x265-params pools=1:frame-threads=1:log-level=error", ("mp4", "mkv"), 15),
          ("mpeg4", "-q:v 6", ("avi", "mp4"), 15), ("mjpeg", "-q:v 7 -pix_fmt yuvj420p", ("avi", "mov"), 10)]
# Sources without any text; drawn at a small size and enlarged, which leaves most of the time to the encoder.
SOURCES = ["gradients=s={s}:r={r}:seed={n}:speed=0.02:nb_colors=5", "mandelbrot=s={s}:r={r}:start_x=-0.74{n}:start_scale=0.3",
           "smptehdbars=s={s}:r={r}", "sierpinski=s={s}:r={r}:seed={n}",
           "cellauto=s={s}:r={r}:rule=110:seed={n}", "life=s={s}:r={r}:seed={n}:life_color=#C0D8A0:death_color=#303860",
           "color=c=0x{n:06x}:s={s}:r={r},noise=alls=40:allf=t:all_seed={n},boxblur=6:2,eq=contrast=2"]
SYLLABLES = "ba co de fin gar hol in ka lo mer nu or pi qua ros sta ti ul ven wor xi yan zed th str 20 7 45 199".split()
COLOURS = ["white", "black", "yellow", "red", "0x2040C0", "0x10A040"]


def pick(rng, rows):
    return rng.choices(rows, weights=[row[-1] for row in rows])[0]


def draw_lines(rng, width, height):
    """drawtext filters and the words that they write."""
    filters, words = [], []
    for line in range(rng.randint(1, 5)):
        text = " ".join("".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3)))
        text = rng.choice([str.upper, str.title, str])(text)
        size = max(12, int(min(width, height) * rng.uniform(0.04, 0.13)))
        box = f":box=1:boxborderw=4:boxcolor={rng.choice(COLOURS)}@0.6" if rng.random() < 0.4 else ":borderw=2:bordercolor=black"
        font = rng.choice(["DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf"])
        filters.append(f"drawtext=fontfile={FONTS / font}:expansion=none:text='{text}':fontsize={size}:"
                       f"fontcolor={rng.choice(COLOURS)}:x=(w-tw)*{rng.random():.3f}:y=h*{0.05 + 0.18 * line:.3f}{box}")
        words += text.split()
    return filters, words


def plan(kind, i, seed, folder):
    """The row of file i of a kind, and ffmpeg's arguments."""
    rng = random.Random(f"{seed} {kind} {i}")
    width, height, _ = pick(rng, SIZES if kind == "video" else PICTURE_SIZES)
    rate = rng.choice([10, 12, 24, 25, 30, 30, 50, 60]) if kind == "video" else 10
    seconds = min(10.0, 1 + rng.expovariate(1 / 1.3)) if kind == "video" else 0.1
    small = f"{max(80, width // 4 * 2)}x{max(80, height // 4 * 2)}"
    source = rng.choice(SOURCES).format(s=small, r=rate, n=rng.randint(1, 99999))
    filters, words = draw_lines(rng, width, height) if rng.random() < 0.55 else ([], [])
    chain = ",".join([f"scale={width}:{height}:flags=bilinear+bitexact", *filters])
    frames = max(1, round(seconds * rate))
    if kind == "video":
        encoder, options, containers, _ = pick(rng, CODECS)
        path = folder / f"{kind}_{i:04d}_{encoder.removeprefix('lib')}.{rng.choice(containers)}"
        tail = ["-c:v", encoder, *options.split(), *([] if encoder == "mjpeg" else ["-pix_fmt", "yuv420p"])]
        if encoder == "libx265" and path.suffix == ".mp4":
            tail += ["-tag:v", "hvc1"]
    else:
        path = folder / f"{kind}_{i:04d}.{rng.choice(['jpg', 'jpg', 'png'])}"
        tail = ["-q:v", "4", "-pix_fmt", "yuvj420p"] if path.suffix == ".jpg" else ["-pix_fmt", "rgb24"]
    caption = f'a {kind} of {source.split("=")[0]}, "{" ".join(words)}"' if words else f"a {kind} of {source.split('=')[0]}"
    row = {"path": str(path), "text": caption, "num_frames": frames, "width": width, "height": height,
           "fps": float(rate), "words": len(words)}
    argv = ["ffmpeg", "-hide_banner", "-loglevel", "error", "-nostdin", "-y", "-filter_threads", "1", "-f", "lavfi", "-i",
            source, "-vf", chain, "-frames:v", str(frames), "-threads", "1", *tail, "-fflags", "+bitexact", "-flags:v",
            "+bitexact"]
    return row, argv


def make(task):
    row, argv = task
    path = pathlib.Path(row["path"])
    if path.is_file():
        return
    part = path.with_name("part_" + path.name)
    done = subprocess.run([*argv, str(part)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{path}: ffmpeg ended with {done.returncode}\n{' '.join(argv)}\n{done.stderr[-2000:]}")
    os.replace(part, path)


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--videos", type=int, default=200)
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files made at once")
    args = parser.parse_args()
    if args.videos < 1 or args.pictures < 0:
        parser.error("at least one video is needed")
    if not (FONTS / "DejaVuSans.ttf").is_file():
        sys.exit(f"{FONTS}/DejaVuSans.ttf is not there. HINT: apt-get install fonts-dejavu-core")
    media = args.out.resolve() / "media"
    media.mkdir(parents=True, exist_ok=True)
    videos = [plan("video", i, args.seed, media) for i in range(args.videos)]
    pictures = [plan("picture", i, args.seed, media) for i in range(args.pictures)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(make, videos + pictures))
    files = [row for row, _ in videos + pictures]
    random.Random(args.seed).shuffle(files)
    write_csv(args.out / "videos.csv", [row for row, _ in videos])
    write_csv(args.out / "files.csv", files)
    size = sum(pathlib.Path(row["path"]).stat().st_size for row in files)
    print(f"{len(videos)} videos and {len(pictures)} pictures, {size / 2**20:.0f} MiB, {sum(r['words'] > 0 for r in files)} with text")


if __name__ == "__main__":
    main()
