"""weft evaluate and weft segment on a tiny network with random weights: counts against an independent computation from the
pictures that they write, at any rank count, and what they refuse."""

import json
import os
import struct
import subprocess
import unittest
import zlib

from harness import WeftTest, read_safetensors, write_safetensors

DECK = """
[run]
dir = "run"
threads = 1
[model]
name = "segmentation"
encoder = "resnet18dilated"
decoder = "c1"
num_classes = 6
weights = "random:3"
[data]
path = "shapes:images=7,classes=6,height=33..60,width=40..70,seed=2"
short_sides = [24, 40]
max_side = 64
[evaluate]
pictures = 100
predictions = true
"""
CLASSES = 6
# The colours of classes where neither the deck nor the data gives any.
COLOURS = [(0, 0, 255), (0, 255, 0), (255, 0, 0), (204, 51, 153), (255, 204, 0), (0, 102, 0)]


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, pixel):
    """A picture of what pixel(x, y) gives: three values, RGB, or one, grey."""
    rows = b"".join(b"\0" + b"".join(bytes(pixel(x, y)) for x in range(width)) for y in range(height))
    colour = 2 if len(pixel(0, 0)) == 3 else 0
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def read_png(path):
    """Width, height, rows of pixels (tuples; of a palette: indices) and the palette, of 8 bits a channel."""
    data, at, body, palette = path.read_bytes(), 8, b"", None
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        piece = data[at + 8:at + 8 + length]
        at += 12 + length
        if kind == b"IHDR":
            width, height, bits, colour = struct.unpack(">IIBB", piece[:10])
        elif kind == b"PLTE":
            palette = [tuple(piece[i:i + 3]) for i in range(0, length, 3)]
        elif kind == b"IDAT":
            body += piece
    assert bits == 8 and colour in (2, 3), (bits, colour)
    n = 3 if colour == 2 else 1
    raw, before, rows = zlib.decompress(body), bytes(width * n), []
    for y in range(height):
        kind, *row = raw[y * (width * n + 1):(y + 1) * (width * n + 1)]
        for i in range(width * n):
            left, up, corner = row[i - n] if i >= n else 0, before[i], before[i - n] if i >= n else 0
            guess = left + up - corner
            paeth = min((left, up, corner), key=lambda v: abs(guess - v))
            row[i] = (row[i] + (0, left, up, (left + up) // 2, paeth)[kind]) & 255
        before = row
        rows.append([tuple(row[x * n:x * n + n]) for x in range(width)] if n == 3 else row)
    return width, height, rows, palette


class ListTest(WeftTest):
    def result(self, output):
        return json.loads((self.dir / output / "evaluation.json").read_text())

    def lines(self, output, stem="images"):
        """Lines of the manifest by name, without what differs from run to run."""
        found = {}
        for file in (self.dir / output).glob(f"{stem}*.jsonl"):
            for line in file.read_text().splitlines():
                j = json.loads(line)
                if "name" not in j:
                    continue  # what a rank begins, and that it ends
                for member in ("rank", "seconds", "xxh3"):
                    j.pop(member, None)
                found[j["name"]] = j
        return found


class Segmentation(ListTest):
    def setUp(self):
        super().setUp()
        (self.dir / "seg.toml").write_text(DECK)

    def evaluate(self, output, *overrides, ranks=0, expect=0):
        return self.weft("evaluate", "seg.toml", f"evaluate.output={output}", *overrides, ranks=ranks, expect=expect)


class Evaluate(Segmentation):
    def test_counts_are_those_of_the_pictures(self):
        said = self.evaluate("one")
        e = self.result("one")
        self.assertEqual(e["images"], 7)
        counts = {kind: [0] * CLASSES for kind in ("intersection", "predicted", "labelled")}
        for shown in e["pictures"]:
            width, height, rows, _ = read_png(self.dir / "one" / shown["file"])
            width //= 4
            mask_width, mask_height, mask, palette = read_png(
                self.dir / "one" / shown["file"].replace("pictures", "predictions"))
            self.assertEqual((mask_width, mask_height), (width, height))
            self.assertEqual(palette[:CLASSES + 1], [(0, 0, 0), *COLOURS])
            for row, labels in zip(rows, mask):
                for x in range(width):
                    truth, found = row[width + x], row[2 * width + x]
                    self.assertEqual(found, palette[labels[x]])
                    self.assertEqual(row[3 * width + x][0] == 255, truth != (0, 0, 0) and truth != found)
                    if truth == (0, 0, 0):
                        continue
                    t, p = COLOURS.index(truth), labels[x] - 1
                    counts["labelled"][t] += 1
                    counts["predicted"][p] += 1
                    counts["intersection"][t] += t == p
        for kind, wanted in counts.items():
            self.assertEqual([c[kind] for c in e["classes"]], wanted, kind)
        joined = [p + t - i for i, p, t in zip(*counts.values())]
        self.assertEqual([c["union"] for c in e["classes"]], joined)
        iou = [i / (u + 1e-10) for i, u in zip(counts["intersection"], joined)]
        self.assertAlmostEqual(e["mean_iou"], sum(iou) / CLASSES, 12)
        self.assertAlmostEqual(e["accuracy"], sum(counts["intersection"]) / sum(counts["labelled"]), 12)
        self.assertGreater(len([p for p in counts["predicted"] if p > 0]), 1, "one class alone tests little")
        # The same for people.
        self.assertIn(f"mean IoU {100 * e['mean_iou']:.2f} %", said.out)
        self.assertIn(f"mean IoU {100 * e['mean_iou']:.2f} %", (self.dir / "one/evaluation.txt").read_text())
        page = (self.dir / "one/evaluation.html").read_text()
        self.assertEqual(self.weft("report", "one", ranks=0).out, "one/evaluation.html\n")
        self.assertEqual([c["iou"] for c in self.page_data("one/evaluation.html")["classes"]], [c["iou"] for c in e["classes"]])
        self.assertEqual(page.count("data:image/png;base64,"), 7)
        # The dry run told the memory to the byte.
        share = json.loads((self.dir / "one/evaluate_report.json").read_text())["ranks"][0]
        self.assertEqual(share["planned_bytes"], share["peak_bytes"])
        # A page that is not weft's is not replaced; the results are there before.
        (self.dir / "one/evaluation.html").write_text("mine")
        (self.dir / "one/evaluation.json").unlink()
        self.refused(self.evaluate("one", expect=None), 3, "one/evaluation.html is not a page of weft")
        self.assertEqual((self.dir / "one/evaluation.html").read_text(), "mine")
        self.assertEqual(self.result("one")["mean_iou"], e["mean_iou"])

    def test_the_same_on_two_ranks(self):
        self.evaluate("one")
        self.evaluate("two", ranks=2)
        one, two = self.result("one"), self.result("two")
        self.assertEqual(one["classes"], two["classes"])
        self.assertEqual(self.lines("one"), self.lines("two"))
        for file in ("pictures", "predictions"):
            for path in (self.dir / "one" / file).iterdir():
                self.assertEqual(path.read_bytes(), (self.dir / "two" / file / path.name).read_bytes())

        # Other scales are another evaluation.
        again = self.evaluate("two", "data.short_sides=[24]")
        self.assertNotIn("evaluated before", again.err)
        # Old weights see other pixels.
        self.evaluate("bgr", "model.preprocessing=bgr")
        self.assertNotEqual(one["classes"], self.result("bgr")["classes"])

    def test_refusals(self):
        self.refused(self.evaluate("no", "model.weights=", expect=None), 4, "run", "checkpoint")
        self.refused(self.evaluate("no", "model.weights=none.safetensors", expect=None), 3, "none.safetensors")
        self.refused(self.evaluate("no", "model.weights=", "model.weights_encoder=a.safetensors", expect=None), 2,
                     "model.weights_decoder")
        self.refused(self.evaluate("no", "model.num_classes=5", expect=None), 2, "model.num_classes = 5")
        self.refused(self.evaluate("no", "data.padding=4", expect=None), 2, "data.padding = 4")
        self.refused(self.evaluate("no", "evaluate.data=synthetic:", expect=None), 2)
        (self.dir / "names.txt").write_text("wall\nsky\n")
        self.refused(self.evaluate("no", "model.class_names=names.txt", expect=None), 2, "2 names")

    def test_a_picture_too_large_for_the_memory_fails_alone(self):
        job = self.evaluate("tight", "memory.arena_gib=0.004", expect=3)
        self.assertRegex(job.err, r"a picture of \d+x\d+ needs [\d.]+ GiB")

    def test_a_store_and_a_damaged_image_in_it(self):
        for folder in ("images", "labels"):
            (self.dir / folder).mkdir()
        for i in range(4):
            (self.dir / f"images/p{i}.png").write_bytes(png(50, 40, lambda x, y: (5 * x, 6 * y, 40 * i)))
            (self.dir / f"labels/p{i}.png").write_bytes(png(50, 40, lambda x, y: ((x + y) // 10 % 4,)))
        self.weft("ingest", "seg.toml", "ingest.images=images", "ingest.labels=labels", "ingest.output=store.h5",
                  "ingest.num_classes=3", ranks=1)
        (self.dir / "names.csv").write_text(
            "Idx,Ratio,Train,Val,Stuff,Name\n" + "".join(f"{i},0.1,5,5,1,n{i};other\n" for i in range(1, 7)))
        self.evaluate("store", "evaluate.data=store.h5", "model.class_names=names.csv")
        e = self.result("store")
        self.assertEqual([c["name"] for c in e["classes"]], ["n1", "n2", "n3", "n4", "n5", "n6"])
        labels = [(x + y) // 10 % 4 for y in range(40) for x in range(50)]
        self.assertEqual([c["labelled"] for c in e["classes"]], [4 * labels.count(v) for v in range(1, 7)])
        self.assertEqual([p["name"] for p in e["pictures"]], [f"p{i}.png" for i in range(4)])
        # A byte of the third picture: it fails by name, and the others are there.
        store = bytearray((self.dir / "store.h5").read_bytes())
        row = bytes(v for x in range(50) for v in (5 * x, 6 * 20, 40 * 2))
        at = store.find(row)
        self.assertGreater(at, 0)
        store[at] ^= 1
        (self.dir / "damaged.h5").write_bytes(store)
        job = self.evaluate("damaged", "evaluate.data=damaged.h5", ranks=2, expect=3)
        self.assertIn("p2.png", job.err)
        self.assertEqual(sorted(self.lines("damaged")), ["image0", "image1", "image3"])
        self.assertFalse((self.dir / "damaged/evaluation.json").exists())

    def test_weights_of_a_run_of_a_file_and_of_a_pair(self):
        self.weft("train", "seg.toml", "model.weights=", "train.steps=2", "train.batch_size=2", "data.short_sides=[24]",
                  ranks=1)
        self.evaluate("run_dir", "model.weights=")
        wanted = self.result("run_dir")["classes"]
        self.assertGreater(len([c for c in wanted if c["predicted"] > 0]), 1, "one class alone tests little")
        self.weft("export", "run", "all.safetensors", ranks=0)
        self.evaluate("file", "model.weights=all.safetensors")
        self.assertEqual(self.result("file")["classes"], wanted)
        for half in ("encoder", "decoder"):
            tensors = read_safetensors(self.dir / "all.safetensors").items()
            write_safetensors(self.dir / f"{half}.safetensors",
                              {name[len(half) + 1:]: t for name, t in tensors if name.startswith(half + ".")})
        pair = ("model.weights_encoder=encoder.safetensors", "model.weights_decoder=decoder.safetensors")
        self.evaluate("pair", "model.weights=", *pair)
        self.assertEqual(self.result("pair")["classes"], wanted)
        self.refused(self.evaluate("no", *pair, expect=None), 2, "twice")


class Segment(Segmentation):
    def segment(self, inputs, *overrides, ranks=0, expect=0):
        return self.weft("segment", "seg.toml", f"segment.inputs={inputs}", *overrides, ranks=ranks, expect=expect)

    def folder(self):
        (self.dir / "in/sub").mkdir(parents=True)
        for n, name in enumerate(("a.png", "b.PNG", "sub/a.png")):
            (self.dir / "in" / name).write_bytes(png(40 + n, 30, lambda x, y: (6 * x % 256, 8 * y, (x * y) % 256)))

    def test_pictures_of_a_folder(self):
        self.folder()
        (self.dir / "in/sub/notes.txt").write_text("no picture")
        job = self.segment("['in']", "segment.overlay=mask")
        self.assertIn("left out of in: 1 file (.txt 1)", job.err)
        lines = self.lines("segmented", "segment")
        self.assertEqual(sorted(lines), ["a", "b", "sub/a"])
        for name, line in lines.items():
            width, height, rows, palette = read_png(self.dir / "segmented" / f"{name}.png")
            self.assertEqual((width, height), (line["width"], line["height"]))
            pixels = [label - 1 for row in rows for label in row]
            for s in line["shares"]:
                self.assertAlmostEqual(s["share"], pixels.count(s["class"]) / len(pixels), 12)
            self.assertAlmostEqual(sum(s["share"] for s in line["shares"]), 1, 2)
            self.assertRegex(job.out, rf"(?m)^{name}: (ground|disc|square|triangle|ring|stripes) ")
        # The picture beside the colours of the same classes, on two ranks.
        self.segment("['in']", "segment.output=beside", ranks=2)
        width, _, rows, _ = read_png(self.dir / "beside/sub/a.png")
        _, _, mask, palette = read_png(self.dir / "segmented/sub/a.png")
        self.assertEqual(width, 84)
        for y, row in enumerate(rows):
            self.assertEqual(row[:42], [(6 * x % 256, 8 * y, (x * y) % 256) for x in range(42)])
            self.assertEqual(row[42:], [palette[label] for label in mask[y]])
        again = self.segment("['in']", "segment.output=beside")
        self.assertIn("3 made before", again.err)
        # Results are no inputs.
        self.segment("['.']", "segment.output=beside")
        names = list(self.lines("beside", "segment"))
        self.assertIn("in/sub/a", names)
        self.assertEqual([n for n in names if n.startswith("beside")], [])

    def test_names_of_classes(self):
        """Those of the deck, else of its data, where that is there and has as many classes; else numbers."""
        self.folder()
        (self.dir / "names.txt").write_text("".join(f"n{c}\n" for c in range(CLASSES)))
        (self.dir / "bad.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90))
        ours = ["ground", "disc", "square", "triangle", "ring", "stripes"]
        numbers = [f"class {c}" for c in range(CLASSES)]
        for data, names, told in (
                ("", ours, False), ("model.class_names=names.txt", [f"n{c}" for c in range(CLASSES)], False),
                ("data.path=shapes:classes=4", numbers, False), ("data.path=none.h5", numbers, False), ("data.path=bad.h5", numbers, True)):
            with self.subTest(data=data):
                job = self.segment("['in/a.png']", *[data] * bool(data))
                for s in self.lines("segmented", "segment")["a"]["shares"]:
                    self.assertEqual(s["name"], names[s["class"]])
                self.assertEqual("WARN: " in job.err and "bad.h5" in job.err, told, job.err)

    def test_lists_and_shards(self):
        """Paths in a list begin in its folder; files that are not there are named before the others are made."""
        self.folder()
        (self.dir / "in/list.csv").write_text("path\na.png\ngone.png\nsub/a.png\n")
        job = self.segment("['in/list.csv']", ranks=2, expect=3)
        self.assertIn("WARN: 1 of 3 inputs is not there: in/gone.png", job.err)
        self.assertEqual(sorted(self.lines("segmented", "segment")), ["a", "a-2"])
        subprocess.run(["tar", "-cf", "s.tar", "-C", "in", "b.PNG", "sub/a.png"], cwd=self.dir, check=True)
        self.segment("['s.tar']", "segment.output=of_shard", "segment.overlay=mask", ranks=2)
        self.segment("['in']", "segment.output=of_folder", "segment.overlay=mask")
        self.assertEqual((self.dir / "of_shard/b.png").read_bytes(), (self.dir / "of_folder/b.png").read_bytes())
        self.assertEqual((self.dir / "of_shard/a.png").read_bytes(), (self.dir / "of_folder/sub/a.png").read_bytes())

    def test_a_broken_picture_does_not_stop_the_others(self):
        self.folder()
        whole = (self.dir / "in/a.png").read_bytes()
        (self.dir / "in/a.png").write_bytes(whole[:len(whole) // 2])
        job = self.segment("['in']", ranks=2, expect=3)
        self.assertIn("in/a.png", job.err)
        self.assertEqual(sorted(p.name for p in (self.dir / "segmented").rglob("*.png")), ["a.png", "b.png"])
        (self.dir / "in/a.png").write_bytes(whole)
        again = self.segment("['in']")
        self.assertIn("2 made before", again.err)

    def test_a_video(self):
        source = "lavfi:testsrc2=duration=1:rate=6:size=48x34"
        self.segment(f"['{source}']")
        line = self.lines("segmented", "segment")["lavfi"]
        self.assertEqual([line["frames"], line["height"], line["width"], line["fps"]], [6, 34, 48, 6])
        # What was written can be read: 6 frames, picture and colours beside each other.
        self.segment("['segmented/lavfi.mp4']", "segment.output=again", "segment.overlay=blend")
        line = self.lines("again", "segment")["lavfi"]
        self.assertEqual([line["frames"], line["height"], line["width"]], [6, 34, 96])

    def times(self, path):
        """Of each frame of a video: when it begins; and how long the video is."""
        said = subprocess.run(["ffprobe", "-v", "error", "-select_streams", "v", "-show_entries", "packet=pts_time:stream=duration",
                               "-of", "json", str(self.dir / path)], check=True, capture_output=True, stdin=subprocess.DEVNULL)
        said = json.loads(said.stdout)
        return sorted(float(p["pts_time"]) for p in said["packets"]), float(said["streams"][0]["duration"])

    def test_a_video_of_variable_rate_keeps_its_times(self):
        shown = "+".join(f"eq(n,{n})" for n in (0, 10, 50, 200, 225))
        subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", f"testsrc2=size=48x34:rate=100:duration=3,select='{shown}'",
                        "-vsync", "vfr", "-enc_time_base", "1:100", "-pix_fmt", "yuv420p", str(self.dir / "in.mp4")],
                       check=True, stdin=subprocess.DEVNULL)
        self.segment("['in.mp4']", "segment.overlay=blend")
        (begin, length), (wanted, whole) = self.times("segmented/in.mp4"), self.times("in.mp4")
        self.assertEqual(len(begin), 5)
        for got, right in zip(begin + [length], wanted + [whole]):
            self.assertAlmostEqual(got, right, 3)

    def test_pictures_of_other_kinds(self):
        """They make a PNG, however many endings say that it is a picture."""
        for name in ("a.tif", "b.jfif", "c.ppm"):
            subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc2=size=48x34", "-frames:v", "1", "-f", "image2",
                            "-c:v", {"a": "tiff", "b": "mjpeg", "c": "ppm"}[name[0]], str(self.dir / name)],
                           check=True, stdin=subprocess.DEVNULL)
        (self.dir / "d.png").write_bytes(b"PAR1" + bytes(90))
        (self.dir / "e.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
        job = self.segment("['a.tif','b.jfif','c.ppm','d.png','e.heic']", expect=3)
        self.assertEqual(sorted(p.name for p in (self.dir / "segmented").glob("*.*g*")), ["a.png", "b.png", "c.png", "legend.svg"])
        self.assertIn("d.png is a Parquet table", job.err)
        self.assertIn("e.heic is a HEIC picture", job.err)

    def test_refusals(self):
        self.refused(self.segment("[]", expect=None), 2, "segment.inputs is empty")
        self.refused(self.segment("['none.png']", expect=None), 3, "1 of 1 input is not there: none.png")
        os.mkdir(self.dir / "empty")
        self.refused(self.segment("['empty']", expect=None), 3, "folder empty has no videos and no pictures")


if __name__ == "__main__":
    unittest.main()
