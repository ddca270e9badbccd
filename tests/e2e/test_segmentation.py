"""weft train of segmentation models: it learns, two ranks share the statistics of batch norm, restarts are exact, sizes are
balanced, and what cannot be is refused."""

import json
import random
import struct
import unittest

from harness import WeftTest, read_safetensors
from test_evaluate import read_png
from test_images import png

DECK = """
[run]
dir = "run"
seed = 7
threads = 1
[memory]
arena_gib = 0.5
[data]
path = "shapes:images=60,classes=3,height=40..72,width=40..72,hues=1"
short_sides = [32, 48]
max_side = 64
pad_label = -1
[model]
name = "segmentation"
encoder = "mobilenetv2dilated"
decoder = "c1_deepsup"
num_classes = 3
[train]
steps = 6
batch_size = 2
micro_batches = 2
bn_momentum = 0.1
checkpoint_every = 3
skip_saves = false
"""


class Trained(WeftTest):
    def setUp(self):
        super().setUp()
        (self.dir / "d.toml").write_text(DECK)

    def train(self, run, *options, ranks=1, expect=0):
        return self.weft("train", "d.toml", f"run.dir={run}", *options, ranks=ranks, expect=expect)


class Segmentation(Trained):
    def test_it_learns(self):
        options = ("train.lr_encoder=0.05", "train.lr_decoder=0.05")
        self.train("one", "train.steps=40", *options)
        losses = self.losses("one")
        self.assertLess(sum(losses[-5:]), 0.8 * sum(losses[:5]))
        terms = self.metrics("one")[-1]["terms"]
        self.assertEqual(set(terms), {"accuracy", "main_loss", "aux_loss"})
        self.assertAlmostEqual(terms["main_loss"] + 0.4 * terms["aux_loss"], losses[-1], delta=1e-5 * losses[-1])
        self.assertTrue(0 <= terms["accuracy"] <= 1)
        rates = [m["lr"] for m in self.metrics("one")]
        self.assert_close(rates, [0.05 * (1 - s / 40) ** 0.9 for s in range(40)], 1e-6)

    def test_two_ranks_share_statistics_and_a_restart_is_exact(self):
        constant = "train.lr_power=0"  # else the rate depends on train.steps
        whole = self.train("whole", constant, ranks=2)
        self.assertIn("batch norm over 2 ranks", whole.err + whole.out)
        self.assertNotIn("momentum", whole.err)  # statistics of before the run are dropped
        self.train("parts", constant, "train.steps=4", ranks=2)
        self.train("parts", constant, ranks=2)
        self.assert_same_run("whole", "parts")

    def test_ranks_recompute_alike_whatever_their_sizes(self):
        # Only the largest batches do not fit without recomputation.
        options = ("data.short_sides=[16,48]", "train.steps=8")
        self.train("whole", *options, ranks=2)
        peak = max(m["memory"]["arena_peak_bytes"] for m in self.metrics("whole"))
        job = self.train("tight", *options, f"memory.arena_gib={0.8 * peak / 2**30}", ranks=2)
        self.assertIn("recompute", job.err + job.out)
        self.assertEqual(self.losses("tight"), self.losses("whole"))

    def test_statistics_of_one_rank_go_on_with_two(self):
        self.train("run", "train.steps=6")
        self.train("run", "train.steps=7", ranks=2)
        weights = self.exported("run")
        iterations = [struct.unpack("<f", bytes(v))[0] for n, (_, _, v) in weights.items() if n.endswith("_running_iter")]
        self.assertTrue(iterations)
        # Those of a new run would be 1.9 after a step.
        self.assertTrue(all(abs(i - 10) < 1e-3 for i in iterations), iterations)

    def test_ranks_by_themselves_have_the_same_statistics_in_the_end(self):
        self.train("run", "train.sync_bn=false", "parallel.check_every=1", ranks=2)
        self.train("again", "train.sync_bn=false", "parallel.zero=0", ranks=2)
        self.assert_close(self.losses("again"), self.losses("run"), 1e-5)

    def test_fixed_statistics_stay(self):
        warning = "batch norm's momentum is 0.1: after 6 steps, 53 % of its running statistics"
        self.assertIn(warning, self.train("first").err)
        self.weft("export", "first", "w.safetensors", ranks=0)
        self.assertNotIn("momentum", self.train("fixed", "train.fix_bn=true", "model.weights=w.safetensors").err)
        self.weft("export", "fixed", "v.safetensors", ranks=0)
        before, after = (read_safetensors(self.dir / f"{n}.safetensors") for n in "wv")
        self.assertEqual(set(before), set(after))
        same = {name for name in before if bytes(before[name][2]) == bytes(after[name][2])}
        statistics = {name for name in before if "running_" in name}
        self.assertEqual(statistics - same, set())
        # A norm whose gradient is below its weights' last bit may stay as well.
        self.assertLess(len(same - statistics), 0.02 * len(before), same - statistics)

    def test_what_cannot_be_is_refused(self):
        for options, what in ((("data.label_rate=4",), "data.label_rate"),
                              (("data.path=synthetic:clips=4",), "holds clips"),
                              (("model.encoder=hrnetv2",), "does not fit"),
                              (("model.encoder=resnet18dilated", "model.decoder=upernet"), "upernet"),
                              (("model.num_classes=2",), "3 classes"),
                              (("data.pad_label=3",), "data.pad_label"),
                              (("model.weights_encoder=none.safetensors",), "none.safetensors")):
            job = self.train("refused", *options, ranks=0, expect=None)
            self.assertIn(job.process.returncode, (2, 3), options)
            self.refused(job, job.process.returncode, what)
        self.refused(self.train("odd", "train.micro_batches=3", ranks=2, expect=None), 2, "train.micro_batches")
        self.refused(self.train("odd", "train.bn_ranks=4", ranks=2, expect=None), 2, "train.bn_ranks")


class OwnLabels(Trained):
    """Labels that begin at 0, with 255 to ignore and colours of their own, through ingest, train, evaluate and segment."""

    COLOURS = [(128, 64, 128), (244, 35, 232), (70, 70, 70)]
    NAMES = ["road", "sign", "wall"]
    LOSS = ("train.class_weight_by=median_frequency", "train.dice_weight=0.5", "train.ohem_thresh=0.9", "train.ohem_min_kept=5")
    DATA = ("data.path=own.h5", "train.steps=3", "train.batch_size=1", "train.micro_batches=6", "train.fix_bn=true")

    def setUp(self):
        super().setUp()
        for folder in ("pictures", "labels"):
            (self.dir / folder).mkdir()
        rng = random.Random(3)
        palette = bytes(v for colour in self.COLOURS for v in colour) + bytes(3 * 252) + bytes([255, 255, 255])
        self.counts = {255: 0, 0: 0, 1: 0, 2: 0}
        for i in range(8):
            height, width = rng.randint(40, 60), rng.randint(40, 60)
            def label(y, x):
                if y < 3:
                    return 255
                return 1 if i % 2 == 0 and y < 20 and x < 20 else 2 if x > 30 else 0
            labels = [label(y, x) for y in range(height) for x in range(width)]
            for v in labels:
                self.counts[v] += 1
            pixels = [v for k in labels for v in (rng.randrange(60) + 90 * (k % 3), 200 if k == 1 else 20, 30)]
            (self.dir / f"pictures/{i}.png").write_bytes(png(height, width, 3, pixels))
            (self.dir / f"labels/{i}.png").write_bytes(png(height, width, 1, labels, palette=palette))
        (self.dir / "names.txt").write_text("".join(f"{name}\n" for name in self.NAMES))

    def ingest(self, *more, expect=0):
        return self.weft("ingest", "d.toml", "ingest.images=pictures", "ingest.labels=labels", "ingest.output=own.h5",
                         "ingest.first_label=0", *more, ranks=2, expect=expect)

    def test_from_files_to_pictures(self):
        job = self.ingest("ingest.ignore_label=255", "ingest.class_names=names.txt")
        for name, value in (("unlabelled", 255), ("0 road", 0), ("1 sign", 1), ("2 wall", 2)):
            self.assertRegex(job.err, rf"(?m)  {name} +{self.counts[value]} +[\d.]+ % +{4 if value == 1 else 8}$")
        # The weights are the formula's, the loss does not depend on the ranks.
        job = self.train("one", *self.DATA, *self.LOSS)
        shares = [0, 0, 0]
        for value in range(3):
            images = [i for i in range(8) if value != 1 or i % 2 == 0]
            inside = sum(sum(v != 255 for v in read_png(self.dir / f"labels/{i}.png")[2][y]) for i in images
                         for y in range(read_png(self.dir / f"labels/{i}.png")[1]))
            shares[value] = self.counts[value] / inside
        weights = [sorted(shares)[1] / share for share in shares]
        self.assertIn("class weights by median_frequency: " + ", ".join(
            f"{name} {weight:.3g}" for name, weight in zip(self.NAMES, weights)), job.err)
        terms = self.metrics("one")[-1]["terms"]
        self.assertEqual(set(terms), {"accuracy", "main_loss", "aux_loss", "dice_loss"})
        self.assertTrue(0 < terms["dice_loss"] < 1)
        for ranks in (2, 3):
            self.train(f"on{ranks}", *self.DATA, *self.LOSS, ranks=ranks)
            self.assert_close(self.losses(f"on{ranks}"), self.losses("one"), 1e-5)
        # A restart is exact.
        constant = "train.lr_power=0"
        self.train("whole", *self.DATA, *self.LOSS, constant, "train.steps=4", ranks=2)
        self.train("parts", *self.DATA, *self.LOSS, constant, "train.steps=2", ranks=2)
        self.train("parts", *self.DATA, *self.LOSS, constant, "train.steps=4", ranks=2)
        self.assert_same_run("whole", "parts")

        # The colours of the label files, in every picture, page and legend; pixels of value 255 count nowhere.
        self.weft("evaluate", "d.toml", "run.dir=one", "data.path=own.h5", "evaluate.output=e", "evaluate.predictions=true", ranks=1)
        e = json.loads((self.dir / "e/evaluation.json").read_text())
        self.assertEqual([c["labelled"] for c in e["classes"]], [self.counts[v] for v in range(3)])
        self.assertEqual([c["name"] for c in e["classes"]], self.NAMES)
        self.check_colours("e", self.COLOURS)
        self.weft("segment", "d.toml", "run.dir=one", "data.path=own.h5", "segment.inputs=['pictures']", "segment.output=s",
                  "segment.overlay=mask", ranks=1)
        self.assertEqual(read_png(self.dir / "s/3.png")[3][:4], [(0, 0, 0), *self.COLOURS])
        self.assertIn('fill="#804080"', (self.dir / "s/legend.svg").read_text())

        # Those of the deck come before them, and what was drawn in others is drawn again.
        own = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
        (self.dir / "colours.txt").write_text("255 0 0\n#00ff00\n#0000FF\n")
        self.weft("evaluate", "d.toml", "run.dir=one", "data.path=own.h5", "evaluate.output=e", "evaluate.predictions=true",
                  "model.palette=colours.txt", ranks=1)
        self.check_colours("e", own)
        self.weft("segment", "d.toml", "run.dir=one", "data.path=own.h5", "segment.inputs=['pictures']", "segment.output=s",
                  "segment.overlay=mask", 'model.palette=["#ff0000", "#00ff00", "#0000ff"]', ranks=1)
        self.assertEqual(read_png(self.dir / "s/3.png")[3][:4], [(0, 0, 0), *own])

    def check_colours(self, output, colours):
        self.assertEqual(read_png(next((self.dir / output / "predictions").iterdir()))[3][:4], [(0, 0, 0), *colours])
        width, _, rows, _ = read_png(sorted((self.dir / output / "pictures").iterdir())[0])
        truth = {row[x] for row in rows for x in range(width // 4, width // 2)}
        self.assertEqual(truth, {(0, 0, 0), *colours})
        legend = (self.dir / output / "legend.svg").read_text()
        page = (self.dir / output / "evaluation.html").read_text()
        for i, (name, colour) in enumerate(zip(self.NAMES, colours)):
            hexadecimal = "#%02x%02x%02x" % colour
            self.assertIn(f'fill="{hexadecimal}"', legend)
            self.assertIn(f">{i} {name}</text>", legend)
            self.assertGreaterEqual(page.count(hexadecimal), 2)  # in the legend of the pictures, and in the table

    def test_what_cannot_be_is_refused(self):
        # A label outside the classes: the file, the value, the key.
        self.refused(self.ingest("ingest.num_classes=3", expect=None), 3, "labels/0.png has the value 255",
                     "ingest.ignore_label = 255")
        self.ingest("ingest.ignore_label=255", "ingest.num_classes=3")
        for options, what in ((("train.class_weight=[1, 2]",), "train.class_weight has 2 weights, and model.num_classes = 3"),
                              (("train.class_weight=[0, 0, 0]",), "train.class_weight is 0 for every class"),
                              (("train.class_weight=[1, 1, -1]",), "out of range"),
                              (("train.class_weight=[1, 1, 1]", "train.class_weight_by=median_frequency"), "both weigh"),
                              (("train.class_weight_by=frequency",), "median_frequency"),
                              (("train.class_weight_by=median_frequency", "data.path=shapes:classes=3"), "no counts of pixels"),
                              (("train.ohem_thresh=1.5",), "out of range")):
            with self.subTest(options=options):
                self.refused(self.train("refused", *self.DATA, *options, expect=None), 2, what)
        self.train("run", *self.DATA, "train.steps=1")
        for palette, what in (("red.txt", "red.txt"), ('["#ff0000"]', "1 colours"), ('["#ff0000", "#00ff00", "blue"]', '"blue" is no colour')):
            with self.subTest(palette=palette):
                job = self.weft("segment", "d.toml", "run.dir=run", "segment.inputs=['pictures']", f"model.palette={palette}", ranks=1,
                                expect=None)
                self.refused(job, 3 if palette == "red.txt" else 2, what)


if __name__ == "__main__":
    unittest.main()
