#!/usr/bin/env python3
"""Text boxes of weft beside those of a released detector (PP-OCRv4's DBNet, as the package rapidocr-onnxruntime 1.4.4 brings it)
on the photographs of Debian's package opencv-doc.

    compare_detector.py --list EXAMPLES LIST.csv    the photographs: /usr/share/doc/opencv-doc/examples, or an unpacked package
    weft score DECK score.input=LIST.csv score.output=SCORED.csv 'score.columns=["boxes", "scores"]' score.weights=W
    compare_detector.py SCORED.csv --output FOLDER [--released BOXES.json] [--side 1024]

Writes FOLDER/NAME.jpg with weft's boxes in green and the released detector's in red, released.json (its boxes; read instead
of running it when given as --released) and counts.json, and prints a table. Only the square that weft looks at counts, drawn in
grey: boxes of the released detector are clipped to it, and left out where less than half of them is inside.

Two counts, because detectors disagree on what a box is, a word or a line: boxes that have one of the other side's at IoU 0.5 for
themselves, and boxes that the other side's boxes together cover by half.
"""
import argparse
import csv
import importlib.metadata
import json
import pathlib
import sys

import cv2
import numpy as np

WITH_TEXT = ["text/scenetext01.jpg", "text/scenetext02.jpg", "text/scenetext03.jpg", "text/scenetext04.jpg",
             "text/scenetext05.jpg", "text/scenetext06.jpg", "text/scenetext_segmented_word01.jpg",
             "text/scenetext_segmented_word02.jpg", "text/scenetext_segmented_word03.jpg",
             "text/scenetext_segmented_word04.jpg", "text/scenetext_segmented_word05.jpg", "text/scenetext_word02.jpg",
             "data/board.jpg", "data/box.png", "data/box_in_scene.png", "data/left.jpg", "data/right.jpg", "data/messi5.jpg",
             "data/imageTextN.png", "data/imageTextR.png", "data/sudoku.png", "data/LinuxLogo.jpg",
             "alphamat/input_images/plant.jpg"]
WITHOUT_TEXT = ["data/fruits.jpg", "data/baboon.jpg", "data/aloeL.jpg", "data/butterfly.jpg", "data/building.jpg",
                "data/apple.jpg", "data/orange.jpg", "data/leuvenA.jpg", "data/squirrel_cls.jpg", "data/left01.jpg"]
GREEN, RED = (0, 200, 0), (0, 0, 255)


def write_list(examples, path):
    rows = [(examples / name, text) for names, text in ((WITH_TEXT, "yes"), (WITHOUT_TEXT, "no")) for name in names]
    missing = [str(p) for p, _ in rows if not p.is_file()]
    if missing:
        sys.exit(f"not there: {', '.join(missing[:3])}. HINT: apt-get install opencv-doc, or unpack it with dpkg-deb -x")
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["path", "has_text"])
        writer.writerows((str(p.resolve()), text) for p, text in rows)
    print(f"{len(rows)} photographs, {len(WITH_TEXT)} with text")


def released_boxes(paths):
    from rapidocr_onnxruntime import RapidOCR
    detector = RapidOCR()
    found = {}
    for path in paths:
        boxes, _ = detector(cv2.imread(path), use_det=True, use_cls=False, use_rec=False)
        found[path] = np.asarray(boxes if boxes is not None else []).reshape(-1, 8).tolist()
    return found


def visible(shape, side):
    """The square that the detector looks at, in the picture's pixels: x0, y0, x1, y1."""
    height, width = shape[:2]
    scale = side / min(height, width)
    left, top = max(0.0, (width - side / scale) / 2), max(0.0, (height - side / scale) / 2)
    return left, top, width - left, height - top


def iou(a, b):
    inter = cv2.intersectConvexConvex(a, b)[0]
    return inter / max(cv2.contourArea(a) + cv2.contourArea(b) - inter, 1e-9)


def clipped(box, square):
    """What is inside; None where that is less than half."""
    area, points = cv2.intersectConvexConvex(box, square)
    return points[:, 0] if area > 0 and area >= 0.5 * cv2.contourArea(box) else None


def matched(ours, theirs, least=0.5):
    """Pairs one to one, best first."""
    pairs = sorted(((iou(a, b), i, j) for i, a in enumerate(ours) for j, b in enumerate(theirs)), reverse=True)
    used_a, used_b = set(), set()
    for value, i, j in pairs:
        if value >= least and i not in used_a and j not in used_b:
            used_a.add(i), used_b.add(j)
    return len(used_a)


def covered(boxes, others, shape, least=0.5):
    """Of `boxes`, how many are covered by `others` together."""
    mask = np.zeros(shape[:2], np.uint8)
    for box in others:
        cv2.fillPoly(mask, [np.rint(box).astype(np.int32)], 1)
    count = 0
    for box in boxes:
        inside = np.zeros(shape[:2], np.uint8)
        cv2.fillPoly(inside, [np.rint(box).astype(np.int32)], 1)
        count += bool((mask * inside).sum() >= least * inside.sum())
    return count


def as_quads(boxes):
    """Convex, in one direction: [4,2] f32 each."""
    return [cv2.convexHull(np.array(b, np.float32).reshape(4, 2))[:, 0] for b in boxes]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scored", type=pathlib.Path, nargs="?", help="what weft score wrote, with a column ocr_boxes")
    parser.add_argument("--list", nargs=2, type=pathlib.Path, metavar=("EXAMPLES", "LIST.csv"))
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--released", type=pathlib.Path)
    parser.add_argument("--side", type=int, default=1024, help="score.side")
    args = parser.parse_args()
    if args.list:
        return write_list(*args.list)
    if not args.scored or not args.output:
        parser.error("SCORED.csv and --output are needed, or --list")
    with open(args.scored, newline="", encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    if not rows or "ocr_boxes" not in rows[0]:
        sys.exit(f"{args.scored}: no rows, or no column ocr_boxes. HINT: score.columns=[\"boxes\"]")
    rows = [row for row in rows if row["ocr_boxes"]]
    args.output.mkdir(parents=True, exist_ok=True)
    if args.released:
        released = json.loads(args.released.read_text())["boxes"]
    else:
        released = released_boxes([row["path"] for row in rows])
        about = {p: importlib.metadata.version(p) for p in ("rapidocr-onnxruntime", "onnxruntime", "opencv-python-headless")}
        (args.output / "released.json").write_text(json.dumps({"versions": about, "boxes": released}, indent=1) + "\n")
    counts = []
    print(f"{'picture':34} {'weft':>5} {'rel.':>5} {'IoU 0.5':>8}  of weft's covered, of the released one's")
    for row in rows:
        path = pathlib.Path(row["path"])
        picture = cv2.imread(str(path))
        x0, y0, x1, y1 = visible(picture.shape, args.side)
        ours = as_quads(json.loads(row["ocr_boxes"]))
        square = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]], np.float32)
        theirs = [q for q in (clipped(b, square) for b in as_quads(released[row["path"]])) if q is not None]
        counts.append({"picture": f"{path.parent.name}/{path.name}", "has_text": row.get("has_text", ""), "weft": len(ours),
                       "released": len(theirs), "matched": matched(ours, theirs),
                       "weft_covered": covered(ours, theirs, picture.shape),
                       "released_covered": covered(theirs, ours, picture.shape)})
        c = counts[-1]
        print(f"{c['picture']:34} {c['weft']:5} {c['released']:5} {c['matched']:8} {c['weft_covered']:8} {c['released_covered']:8}")
        cv2.rectangle(picture, (round(x0), round(y0)), (round(x1) - 1, round(y1) - 1), (160, 160, 160), 1)
        for quads, colour in ((theirs, RED), (ours, GREEN)):
            for q in quads:
                cv2.polylines(picture, [np.rint(q).astype(np.int32)], True, colour, 2)
        cv2.imwrite(str(args.output / f"{path.parent.name}_{path.stem}.jpg"), picture)
    sums = {has: {k: sum(c[k] for c in counts if c["has_text"] == has) for k in counts[0] if isinstance(counts[0][k], int)}
            for has in sorted({c["has_text"] for c in counts})}
    for has, s in sums.items():
        print(f"has_text = {has}: weft {s['weft']}, released {s['released']}, matched at IoU 0.5 {s['matched']}, covered "
              f"{s['weft_covered']} of weft's, {s['released_covered']} of the released one's")
    (args.output / "counts.json").write_text(json.dumps({"sums": sums, "pictures": counts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
