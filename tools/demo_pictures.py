#!/usr/bin/env python3
"""Makes pictures from the results of `make run`: demo_pictures.py [RUN [FOLDER]].

RUN/frames.png is a strip of generated frames, a clip a row. With FOLDER, for the docs, it goes there, and so does step_time.svg, the
plot of the training run's report, which needs chromium.
"""
import html
import json
import pathlib
import re
import subprocess
import sys

SHOWN = 6  # frames of a clip
STYLE = ("text{font:12px sans-serif;fill:#444}line{stroke:#ddd}"
         ".axis{stroke:#888}")


def frames(run, out):
    clips = [json.loads(line) for line in (run / "generated/generated.jsonl").read_text().splitlines()]
    chosen = {clip["prompt"]: clip for clip in clips}  # one of each prompt
    inputs, rows = [], []
    for row, clip in enumerate(chosen.values()):
        inputs += ["-i", str(run / "generated" / clip["file"])]
        rows.append(f"[{row}:v]framestep={max(1, clip['frames'] // SHOWN)},scale=iw*2:ih*2:flags=lanczos,"
                    f"tile={SHOWN}x1:padding=4:color=white[r{row}]")
    stack = "".join(f"[r{row}]" for row in range(len(rows)))
    graph = ";".join(rows) + f";{stack}vstack=inputs={len(rows)}" if len(rows) > 1 else rows[0][:-4]
    subprocess.run(["ffmpeg", "-v", "error", "-y", *inputs, "-filter_complex", graph, "-frames:v", "1",
                    str(out / "frames.png")], check=True)


def step_time(run, out):
    # A browser draws the charts.
    page = subprocess.run(["chromium", "--headless", "--no-sandbox", "--window-size=1120,800", "--virtual-time-budget=3000", "--dump-dom",
                           (run / "stdit/report.html").resolve().as_uri()], check=True, capture_output=True, text=True).stdout
    colors = re.findall(r"--(\w+):(#\w+);", page.split("prefers-color-scheme")[0])  # of the light style
    for name, value in colors:
        page = page.replace(f"var(--{name})", value)
    section = re.search(r"<h2>Step time</h2>(.*?)</section>", page, re.S)[1]
    plot = re.search(r"<svg viewBox=\"0 0 (\d+) (\d+)\"[^>]*?>(.*?)</svg>", section, re.S)
    width, height, body = int(plot[1]), int(plot[2]), plot[3]
    legend, x = "", 64
    for color, name in re.findall(r"background: (#\w+);\"></i>([^<]+)", section):
        name = html.unescape(name).strip()
        legend += (f'<rect x="{x}" y="10" width="11" height="11" fill="{color}"/><text x="{x + 16}" y="20">'
                   f"{html.escape(name)}</text>")
        x += 40 + 7 * len(name)
    (out / "step_time.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 30}" width="{width}" '
        f'height="{height + 30}"><style>{STYLE}</style><rect width="100%" height="100%" fill="white"/>{legend}'
        f'<g transform="translate(0,30)">{body}</g></svg>\n')


def main():
    run = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else run
    out.mkdir(parents=True, exist_ok=True)
    frames(run, out)
    if out != run:
        step_time(run, out)


if __name__ == "__main__":
    main()
