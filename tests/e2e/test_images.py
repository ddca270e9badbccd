"""Labelled images: ingest from a list and from folders, restart, bad inputs, inspect. Pictures with text: inspect."""

import json
import random
import re
import struct
import subprocess
import unittest
import zlib

from harness import WeftTest

USAGE, DATA = 2, 3


def png(height, width, channels, values, palette=None, bits=8, orientation=None):
    """A PNG file: rows of grey (1), palette (1 with `palette`) or RGB (3) values; an orientation is that of EXIF."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    row = width * channels * bits // 8
    lines = b"".join(b"\0" + bytes(values[y * row:(y + 1) * row]) for y in range(height))
    kind = 3 if palette else {1: 0, 3: 2}[channels]
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)) +
            (chunk(b"PLTE", bytes(palette)) if palette else b"") +
            (chunk(b"eXIf", b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 274, 3, 1, orientation, 0, 0)) if orientation else b"") +
            chunk(b"IDAT", zlib.compress(lines)) +
            chunk(b"IEND", b""))


class Images(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "images").mkdir()
        (self.dir / "labels").mkdir()

    def draw(self, count, classes=4):
        """Pictures and label maps of various sizes, and the lines of their list."""
        rng = random.Random(5)
        lines = []
        for i in range(count):
            height, width = rng.randint(9, 40), rng.randint(9, 40)
            pixels = bytes(rng.randrange(256) for _ in range(height * width * 3))
            labels = bytes(rng.randrange(classes + 1) for _ in range(height * width))
            (self.dir / "images" / f"{i:03}.png").write_bytes(png(height, width, 3, pixels))
            (self.dir / "labels" / f"{i:03}.png").write_bytes(
                png(height, width, 1, labels, palette=range(60) if i % 3 == 0 else None))
            lines.append({"fpath_img": f"images/{i:03}.png", "fpath_segm": f"labels/{i:03}.png",
                          "width": width, "height": height})
        self.write_list(lines)
        return lines

    def write_list(self, lines, name="train.odgt"):
        (self.dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def ingest_images(self, *more, output="images.h5", ranks=0, expect=0, source="train.odgt"):
        return self.weft("ingest", "deck.toml", f"ingest.images={source}", f"ingest.output={output}",
                         *more, ranks=ranks, expect=expect)

    def bytes_of(self, name):
        return (self.dir / name).read_bytes()

    def inspect(self, name):
        return self.weft("inspect", name, ranks=0).out

    def test_the_store_does_not_depend_on_the_ranks_or_the_kind_of_input(self):
        self.draw(75)
        for ranks in (1, 2, 3):
            self.ingest_images("ingest.num_classes=4", output=f"{ranks}.h5", ranks=ranks)
            self.assertFalse((self.dir / f"{ranks}.h5.parts").exists())
        self.assertEqual(self.bytes_of("1.h5"), self.bytes_of("2.h5"))
        self.assertEqual(self.bytes_of("1.h5"), self.bytes_of("3.h5"))
        # Folders give the same images in the same order; only the paths are shorter.
        self.ingest_images("ingest.num_classes=4", "ingest.labels=labels", output="folder.h5", source="images")
        strip = lambda text: re.sub(r"^.*\.h5\n", "", text)
        self.assertEqual(strip(self.inspect("folder.h5")), strip(self.inspect("1.h5")))

    def test_paths_count_from_the_root(self):
        self.draw(3)
        (self.dir / "lists").mkdir()
        (self.dir / "train.odgt").rename(self.dir / "lists" / "train.odgt")
        self.refused(self.ingest_images(source="lists/train.odgt", expect=None), DATA,
                     "6 of 6 files are not there: lists/images/000.png", "ingest.root")
        self.ingest_images("ingest.root=.", source="lists/train.odgt")
        self.assertIn("3 images", self.inspect("images.h5"))

    def test_inspect_says_what_is_in_the_store(self):
        (self.dir / "images" / "a.png").write_bytes(png(4, 6, 3, bytes(72)))
        (self.dir / "labels" / "a.png").write_bytes(png(4, 6, 1, bytes([0] * 6 + [1] * 12 + [3] * 6)))
        (self.dir / "images" / "b.png").write_bytes(png(8, 2, 1, bytes(16)))
        (self.dir / "labels" / "b.png").write_bytes(png(8, 2, 1, bytes([1] * 16)))
        (self.dir / "names.csv").write_text('Idx,Ratio,Name\n1,0.5,wall\n2,0.3,"building;edifice"\n3,0.2,sky;air\n')
        self.ingest_images("ingest.labels=labels", "ingest.class_names=names.csv", source="images")
        text = self.inspect("images.h5")
        self.assertIn("2 images, 1 of them portrait", text)
        self.assertIn("shorter side 2 / 4 / 4, longer side 6 / 8 / 8", text)
        self.assertRegex(text, r"15\.00000 % .* 1 images: unlabelled")
        self.assertRegex(text, r"70\.00000 % .* 2 images: class 0 wall\n")
        self.assertRegex(text, r" 0\.00000 % .* 0 images: class 1 building\n")
        self.assertRegex(text, r"15\.00000 % .* 1 images: class 2 sky\n")
        self.assertIn("every hash verified", text)

    def test_a_damaged_store_is_named(self):
        self.draw(5)
        self.ingest_images()
        data = bytearray(self.bytes_of("images.h5"))
        at = len(data) // 2  # among the pixels
        data[at] ^= 1
        (self.dir / "images.h5").write_bytes(data)
        self.refused(self.weft("inspect", "images.h5", ranks=0, expect=None), DATA, "is damaged", "images/00")

    def test_finished_pieces_are_kept(self):
        lines = self.draw(100)
        self.ingest_images(output="whole.h5")
        # A directory in the place of the store's draft: everything is decoded, and joining fails.
        (self.dir / "images.h5.tmp").mkdir()
        (self.dir / "images.h5.tmp" / "file").touch()
        self.ingest_images(expect=DATA)
        (self.dir / "images.h5.tmp" / "file").unlink()
        (self.dir / "images.h5.tmp").rmdir()
        # A piece that is not whole, and a file that has changed since.
        piece = self.dir / "images.h5.parts" / "piece_000001"
        piece.write_bytes(piece.read_bytes()[:-5])
        label = self.dir / lines[99]["fpath_segm"]
        label.write_bytes(label.read_bytes() + b"\0")
        job = self.ingest_images(ranks=3)
        self.assertIn("64 images decoded by an earlier attempt", job.err)
        self.assertEqual(self.bytes_of("images.h5"), self.bytes_of("whole.h5"))

    def test_broken_images_are_left_out(self):
        """Each with its file, its line in the list, what it has and what was expected."""
        lines = self.draw(12)
        images, labels = ([self.dir / line[key] for line in lines] for key in ("fpath_img", "fpath_segm"))
        images[1].unlink()
        labels[2].unlink()
        labels[3].write_bytes(png(5, 5, 1, bytes(25)))
        lines[4]["width"] += 1
        height, width = lines[5]["height"], lines[5]["width"]
        labels[5].write_bytes(png(height, width, 1, bytes([5] * (height * width))))
        height, width = lines[6]["height"], lines[6]["width"]
        labels[6].write_bytes(png(height, width, 1, bytes(2 * height * width), bits=16))
        images[7].write_bytes(images[7].read_bytes()[:-30])
        jpeg = self.dir / "images" / "008.jpg"
        subprocess.run(["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc2=size=64x48", "-frames:v", "1", str(jpeg)],
                       check=True, stdin=subprocess.DEVNULL)
        for i in (8, 9):
            lines[i] = {"fpath_img": f"images/00{i}.jpg", "fpath_segm": f"labels/00{i}.png"}
            labels[i].write_bytes(png(48, 64, 1, bytes(48 * 64)))
        (self.dir / "images" / "009.jpg").write_bytes(jpeg.read_bytes())  # a good one
        jpeg.write_bytes(jpeg.read_bytes()[:-400])
        self.write_list(lines)
        job = self.ingest_images("ingest.num_classes=4", ranks=2)
        left = [line for line in job.err.splitlines() if "left out:" in line]
        for i, *said in ((1, "images/001.png", "No such file"), (2, "labels/002.png"), (3, "labels/003.png has 5x5", "images/003.png has"),
                         (4, "images/004.png has", "list says"), (5, "labels/005.png has the value 5", "ingest.num_classes = 4"),
                         (6, "labels/006.png", "16 bits"), (7, "images/007.png"), (8, "images/008.jpg", "JPEG")):
            mine = [line for line in left if f"train.odgt, line {i + 1}" in line and said[0] in line]
            self.assertEqual(len(mine), 1, job.err)
            for text in said:
                self.assertIn(text, mine[0])
        self.assertEqual(len(left), 8)
        self.assertIn("4 images", self.inspect("images.h5"))
        self.assertIn("8 of 12", self.ingest_images("--strict", "ingest.num_classes=4", expect=DATA).err)

    def test_what_folders_leave_out(self):
        self.draw(3)
        for name in ("images/sub", "labels/sub", "images/.hidden"):
            (self.dir / name).mkdir()
        for name in ("images", "labels"):
            (self.dir / name / "002.png").rename(self.dir / name / "sub/002.png")
        (self.dir / "images/001.png").rename(self.dir / "images/.hidden/001.png")
        (self.dir / "images/notes.txt").write_text("x")
        job = self.ingest_images("ingest.labels=labels", source="images")
        self.assertIn("left out of images: 1 file (.txt 1), 1 hidden", job.err)
        self.assertIn("left out of labels: 1 label map without a picture", job.err)
        self.assertIn("2 images", self.inspect("images.h5"))
        (self.dir / "labels/000.png").unlink()
        job = self.ingest_images("ingest.labels=labels", source="images")
        self.assertIn("WARN: 1 of 4 files is not there: labels/000.png", job.err)

    def test_an_image_that_its_camera_turned(self):
        """It is set upright, its labels are not: where they were drawn on it as it is stored, the message names the key."""
        lines = self.draw(5)
        pixels = bytes(range(3 * 4 * 5))
        (self.dir / lines[1]["fpath_img"]).write_bytes(png(4, 5, 3, pixels, orientation=6))
        (self.dir / lines[1]["fpath_segm"]).write_bytes(png(4, 5, 1, bytes(20)))
        lines[1] = {"fpath_img": lines[1]["fpath_img"], "fpath_segm": lines[1]["fpath_segm"]}
        self.write_list(lines)
        left = [line for line in self.ingest_images().err.splitlines() if "left out:" in line]
        self.assertEqual(len(left), 1)
        for text in ("labels/001.png has 4x5", "train.odgt, line 2", "5x4", 'media.orientation = "stored"'):
            self.assertIn(text, left[0])
        self.ingest_images("media.orientation=stored", "--strict")
        (self.dir / lines[1]["fpath_segm"]).write_bytes(png(5, 4, 1, bytes(20)))
        self.ingest_images("--strict")

    def label(self, name, values, palette=None):
        """A picture of 4 x 3 pixels and its labels, which may have a palette."""
        (self.dir / "images" / name).write_bytes(png(3, 4, 3, bytes(36)))
        (self.dir / "labels" / name).write_bytes(png(3, 4, 1, bytes(values), palette=palette))

    def classes(self, *more, output="images.h5"):
        """What an ingest of these says about classes: pixels and images of each, and its warnings about them."""
        job = self.ingest_images("ingest.labels=labels", *more, source="images", output=output, ranks=1)
        counts = {name: (int(pixels), int(images)) for name, pixels, images in
                  re.findall(r"  (unlabelled|\d+)\S* +(\d+) +[\d.]+ % +(\d+)$", job.err, re.M)}
        return counts, [line for line in job.err.splitlines() if "WARN" in line]

    def test_labels_that_begin_at_0(self):
        for name in ("a.png", "b.png"):
            self.label(name, [0] * 8 + [1] * 4)
        counts, warnings = self.classes("ingest.num_classes=2")
        self.assertEqual(counts, {"unlabelled": (16, 2), "0": (8, 2), "1": (0, 0)})
        self.assertIn("1 of 2 classes never occurs in the labels: 1; 0 is taken as unlabelled", warnings[0])
        self.assertIn("ingest.first_label = 0", warnings[0])
        # A training of them says so, too.
        job = self.weft("train", "deck.toml", "model.name=segmentation", "model.num_classes=2", "train.steps=1",
                        "model.encoder=mobilenetv2dilated", "model.decoder=c1", "data.path=images.h5",
                        "data.short_sides=[32]", ranks=1, expect=None)
        self.assertIn("images.h5: 1 of 2 classes never occurs in the labels: 1", job.err)
        counts, warnings = self.classes("ingest.num_classes=2", "ingest.first_label=0")
        self.assertEqual((counts, warnings[1:]), ({"unlabelled": (0, 0), "0": (16, 2), "1": (8, 2)}, []))
        self.assertRegex(self.inspect("images.h5"), r" 66\.66667 % .* 2 images: class 0\n")
        # Without a number of classes one class alone is odd.
        (self.dir / "images.h5").unlink()
        self.assertIn("class 0 is the only one", self.classes()[1][0])

    def test_a_label_to_ignore(self):
        self.label("a.png", [0] * 4 + [1] * 4 + [255] * 4)
        job = self.ingest_images("ingest.labels=labels", "ingest.num_classes=2", "ingest.first_label=0", source="images",
                                 ranks=1, expect=None)
        self.refused(job, DATA, "labels/a.png has the value 255", "ingest.ignore_label = 255")
        counts, warnings = self.classes("ingest.num_classes=2", "ingest.first_label=0", "ingest.ignore_label=255")
        self.assertEqual((counts, warnings), ({"unlabelled": (4, 1), "0": (4, 1), "1": (4, 1)}, []))
        # Of several values, and as decks have had it: without brackets.
        self.label("a.png", [0] * 3 + [1] * 3 + [7] * 2 + [255] * 4)
        several = ("ingest.num_classes=2", "ingest.first_label=0", "ingest.ignore_label=[7, 255]")
        self.assertEqual(self.classes(*several)[0], {"unlabelled": (6, 1), "0": (3, 1), "1": (3, 1)})
        self.label("a.png", [0] * 4 + [1] * 4 + [255] * 4)
        with open(self.dir / "deck.toml", "a") as deck:
            deck.write("[ingest]\nignore_label = 255\n")
        self.assertEqual(self.classes("ingest.num_classes=2", "ingest.first_label=0")[0]["unlabelled"], (4, 1))
        # Nobody said how many classes there are: 255 is taken, and told.
        (self.dir / "images.h5").unlink()
        counts, warnings = self.classes("ingest.ignore_label=-1")
        self.assertEqual(counts["254"], (4, 1))
        self.assertIn("ingest.ignore_label = 255", warnings[-1])

    def test_values_of_classes_by_list(self):
        self.label("a.png", [0] * 8 + [255] * 4)
        counts, warnings = self.classes("ingest.label_values=[0, 255]")
        self.assertEqual((counts, warnings), ({"unlabelled": (0, 0), "0": (8, 1), "1": (4, 1)}, []))
        self.label("a.png", [0] * 8 + [128] * 4)
        job = self.ingest_images("ingest.labels=labels", "ingest.label_values=[0, 255]", source="images", ranks=1, expect=None)
        self.refused(job, DATA, "labels/a.png has the value 128", "ingest.label_values = [0, 255]")
        for more in ("ingest.ignore_label=255", "ingest.num_classes=3", "ingest.first_label=0"):
            job = self.ingest_images("ingest.labels=labels", "ingest.label_values=[0, 255]", more, source="images", ranks=1, expect=None)
            self.refused(job, USAGE, "ingest.label_values = [0, 255] for")

    def test_names_that_end_differently(self):
        self.label("a.png", [1] * 12)
        (self.dir / "images/a.png").rename(self.dir / "images/a_left.png")
        for name in ("a_ids.png", "a_colour.png"):
            (self.dir / "labels" / name).write_bytes((self.dir / "labels/a.png").read_bytes())
        (self.dir / "labels/a.png").unlink()
        job = self.ingest_images("ingest.labels=labels", "ingest.image_suffix=_left", "ingest.label_suffix=_ids", source="images",
                                 ranks=1)
        self.assertIn("left out of labels: 1 file (.png 1)", job.err)
        job = self.ingest_images("ingest.labels=labels", "ingest.image_suffix=left", "ingest.label_suffix=x", source="images",
                                 ranks=1, expect=None)
        self.refused(job, DATA, 'folder labels has no file whose name ends with "x"')
        self.assertIn("1 image,", self.inspect("images.h5"))

    def test_the_palette_of_the_labels_is_kept(self):
        self.label("a.png", [0] * 6 + [1] * 6, palette=bytes([9, 8, 7, 200, 30, 40]))
        self.classes("ingest.first_label=0")
        data = self.bytes_of("images.h5")
        self.assertIn(bytes([0, 0, 0, 9, 8, 7, 200, 30, 40]), data)

    def test_an_image_that_is_too_large(self):
        self.draw(1)
        self.refused(self.ingest_images("media.max_megapixels=0.00001", expect=None), DATA, "no image came out of 1",
                     "media.max_megapixels")

    def test_lists_that_are_none(self):
        self.draw(3)
        with open(self.dir / "train.odgt", "a") as file:
            file.write("images/004.png labels/004.png\n")
        self.refused(self.ingest_images(ranks=1, expect=None), DATA, "train.odgt, line 4 is no JSON object")
        (self.dir / "train.odgt").write_text('{"fpath_img": "a\\u0000.png", "fpath_segm": "a.png"}\n')
        self.refused(self.ingest_images(ranks=1, expect=None), DATA, "train.odgt, line 1", "zero byte")
        (self.dir / "train.odgt").write_text('{"fpath_img": "a.png"}\n')
        self.refused(self.ingest_images(ranks=1, expect=None), DATA, "train.odgt, line 1: no texts fpath_img and fpath_segm")
        (self.dir / "train.odgt").write_text("\n")
        self.refused(self.ingest_images(ranks=1, expect=None), DATA, "names no image")
        self.refused(self.ingest_images(ranks=1, source="nowhere.odgt", expect=None), DATA, "nowhere.odgt")
        self.refused(self.ingest_images(ranks=1, source="images", expect=None), DATA, "ingest.labels")

    def test_settings_that_contradict_each_other(self):
        self.draw(1)
        (self.dir / "names.txt").write_text("one\ntwo\n")
        self.refused(self.ingest_images("ingest.num_classes=3", "ingest.class_names=names.txt", ranks=1, expect=None),
                     DATA, "has 2 names of classes, ingest.num_classes = 3")
        self.refused(self.ingest_images('ingest.inputs=["a.mp4"]', ranks=1, expect=None), USAGE,
                     "ingest.inputs and ingest.images")

    def test_probes_need_their_model(self):
        self.draw(1)
        self.refused(self.probe("resize_image", "--deck", "deck.toml", "--inputs", "a", "--outputs", "b", expect=None), USAGE,
                     'model.name = "stdit3"', "image_resize")
        self.refused(self.probe("forward", "--deck", "deck.toml", "--inputs", "a", "--outputs", "b", expect=None), USAGE,
                     "needs weights")


class Text(WeftTest):
    """Pictures with polygons around their text: inspect, and what is refused."""

    def test_inspect_shows_drawn_text(self):
        job = self.weft("inspect", "text:images=4,height=96,width=128,words=2..3,letters=12..20", "--picture",
                        "seen.png", ranks=0)
        for said in ("4 pictures", "96 to 96 pixels high", "shorter sides of regions", "seen.png is text:seed=1 picture 0"):
            self.assertIn(said, job.out)
        self.assertTrue((self.dir / "seen.png").read_bytes().startswith(b"\x89PNG"))

    def test_inspect_reads_a_list(self):
        (self.dir / "a.png").write_bytes(png(20, 30, 3, bytes(20 * 30 * 3)))
        (self.dir / "list.jsonl").write_text(json.dumps(
            {"path": "a.png", "polygons": [{"points": [[1, 2], [25, 2], [25, 14], [1, 14]], "ignore": True}]}) + "\n")
        self.assertIn("1 region, 1.0 a picture, 1 of them ignored", self.weft("inspect", "list.jsonl", ranks=0).out)

    def test_faults_are_named(self):
        (self.dir / "list.jsonl").write_text('{"path": "a.png", "polygons": [{"points": [[1, 2]]}]}\n')
        for job, code, *said in (("list.jsonl", DATA, "list.jsonl, line 1, polygon 1 has 1 points"),
                                 ("text:word=3", USAGE, 'did you mean "words"?')):
            self.refused(self.weft("inspect", job, ranks=0, expect=None), code, *said)
        self.refused(self.weft("inspect", "deck.toml", "--picture", "a.png", ranks=0, expect=None), USAGE, "--picture")


if __name__ == "__main__":
    unittest.main()
