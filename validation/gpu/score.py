#!/usr/bin/env python3
"""Does `weft score` count the same text regions on a GPU as on the CPU, and how fast?

    score.py WEFT [--pictures 200]

Pictures with words, random weights of DBNet++: what it finds means nothing, but both sides must find it. Rounding moves a region
over a threshold now and then, so counts of one picture in twenty may differ.
"""
import argparse
import csv
import pathlib
import subprocess
import sys
import tempfile
import time

import cv2
import numpy as np

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("weft")
parser.add_argument("--pictures", type=int, default=200)
args = parser.parse_args()
weft = str(pathlib.Path(args.weft).resolve())
deck = """[model]
name = "dbnet"
backbone = "resnet18"
[score]
weights = "random:1"
side = 320
"""

with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "deck.toml").write_text(deck)
    random = np.random.default_rng(1)
    with open(folder / "table.csv", "w") as table:
        table.write("id,path\n")
        for i in range(args.pictures):
            picture = np.full((240, 320, 3), random.integers(0, 255, 3), np.uint8)
            for word in range(random.integers(0, 5)):
                cv2.putText(picture, "weft"[: 1 + word], (10 + 60 * word, 40 + 45 * word), cv2.FONT_HERSHEY_SIMPLEX,
                            random.uniform(0.5, 2), random.integers(0, 255, 3).tolist(), 2)
            cv2.imwrite(str(folder / f"{i}.png"), picture)
            table.write(f"{i},{i}.png\n")
    counts, seconds = {}, {}
    for device in ("cpu", "cuda"):
        began = time.time()
        subprocess.run([weft, "score", "deck.toml", f"device.kind={device}", "score.input=table.csv", f"score.output={device}.csv"],
                       cwd=folder, check=True)
        seconds[device] = time.time() - began
        with open(folder / f"{device}.csv", newline="") as rows:
            counts[device] = [row["ocr"] for row in csv.DictReader(rows)]
same = sum(a == b for a, b in zip(counts["cpu"], counts["cuda"], strict=True))
print(f"counts of {same} of {len(counts['cpu'])} pictures agree; {seconds['cpu'] / seconds['cuda']:.2f} x as fast as the CPU, "
      f"{seconds['cuda']:.1f} s with the start")
sys.exit(not (counts["cpu"] and same >= 0.95 * len(counts["cpu"])))
