"""weft train, evaluate and export of text detectors on drawn text and on lists: they learn, restarts are exact to the bit,
the number of ranks does not change what is learned, counts are those of an independent computation, and what cannot be is
refused."""

import functools
import json
import random
import unittest

from harness import read_safetensors, write_safetensors
from test_evaluate import ListTest, png

DECK = """
[run]
dir = "run"
seed = 7
threads = 1
[memory]
arena_gib = 0.5
[data]
path = "text:images=40,height=96,width=96,words=2..6,letters=10..16,seed=3"
crop = 96
[model]
name = "dbnet"
backbone = "resnet18"
asf = false
[train]
steps = 6
batch_size = 2
micro_batches = 2
checkpoint_every = 3
skip_saves = false
[evaluate]
data = "text:images=6,height=96..128,width=96..160,words=2..6,letters=10..16,seed=4"
short_side = 0
"""


def area(polygon):
    return sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(polygon, polygon[1:] + polygon[:1])) / 2


@functools.cache  # each threshold asks again
def common_area(one, other):
    """Of convex polygons: one, cut at each edge of the other (Sutherland and Hodgman)."""
    one, other = (p if area(p) > 0 else p[::-1] for p in (one, other))
    for a, b in zip(other, other[1:] + other[:1]):
        def side(p):
            return (b[0] - a[0]) * (p[1] - a[1]) - (b[1] - a[1]) * (p[0] - a[0])
        kept = []
        for p, q in zip(one, one[1:] + one[:1]):
            if side(p) >= 0:
                kept.append(p)
            if side(p) * side(q) < 0:
                t = side(p) / (side(p) - side(q))
                kept.append([p[0] + t * (q[0] - p[0]), p[1] + t * (q[1] - p[1])])
        one = kept
        if not one:
            return 0
    return abs(area(one))


def corners(box):
    return tuple(tuple(box[i:i + 2]) for i in range(0, 8, 2))


def icdar(regions, boxes):
    """Regions (corners, ignored) and boxes that count, and how many of these are pairs."""
    counts = [b for b in boxes if not any(ignored and common_area(r, b) > 0.5 * abs(area(b)) for r, ignored in regions)]
    wanted, free, matched = [r for r, ignored in regions if not ignored], list(counts), 0
    for r in wanted:
        for b in free:
            common = common_area(r, b)
            if common > 0.5 * (abs(area(r)) + abs(area(b)) - common):
                free.remove(b)
                matched += 1
                break
    return len(wanted), len(counts), matched


class Text(ListTest):
    def setUp(self):
        super().setUp()
        (self.dir / "d.toml").write_text(DECK)

    def train(self, run, *options, ranks=1, expect=0):
        return self.weft("train", "d.toml", f"run.dir={run}", *options, ranks=ranks, expect=expect)

    def evaluate(self, output, *options, ranks=0, expect=0):
        return self.weft("evaluate", "d.toml", f"evaluate.output={output}", *options, ranks=ranks, expect=expect)


class Train(Text):
    def test_it_learns(self):
        # A step has all pictures there are.
        self.train("run", "train.steps=30", "train.lr_detector=0.01", "data.augment=false", "train.warmup_steps=5",
                   "data.path=text:images=4,height=96,width=96,words=2..6,letters=10..16,seed=3")
        metrics = self.metrics("run")
        losses = [m["loss"] for m in metrics]
        self.assertLess(sum(losses[-5:]), 0.8 * sum(losses[:5]))
        for m in metrics:
            t = m["terms"]
            self.assertEqual(set(t), {"probability_loss", "threshold_loss", "binary_loss"})
            whole = 5 * t["probability_loss"] + 10 * t["threshold_loss"] + t["binary_loss"]
            self.assertAlmostEqual(whole, m["loss"], delta=1e-5 * whole)
            self.assertLessEqual(t["binary_loss"], 1)
        rates = [0.01 * (s + 1) / 6 if s < 5 else 0.01 * (1 - s / 30) ** 0.9 for s in range(30)]
        self.assert_close([m["lr"] for m in metrics], rates, 1e-6)

    def test_ranks_learn_the_same_and_a_restart_is_exact(self):
        self.train("one", ranks=1)
        self.train("two", ranks=2)
        self.assertEqual(self.samples("one"), self.samples("two"))
        constant = "train.lr_power=0"  # else the rate depends on train.steps
        self.train("whole", constant, "train.steps=5", ranks=2)
        self.train("parts", constant, "train.steps=3", ranks=2)
        self.train("parts", constant, "train.steps=5", ranks=2)
        self.assert_same_run("parts", "whole")
        # The steep binarization magnifies rounding a hundredfold a step: other orders of sums, on as many ranks too, are
        # apart by the fourth step.
        for values in (lambda run: self.losses(run)[:2], lambda run: [m["grad_norm"] for m in self.metrics(run)[:2]]):
            self.assert_close(values("two"), values("one"), 1e-5)
        # All ranks save the same running statistics: their means.
        job = self.train("two", "train.steps=7", "parallel.check_every=1", ranks=2)
        self.assertNotIn("WARN", job.err)

    def test_less_memory_recomputes_to_the_same_bits(self):
        self.train("whole")
        peak = max(m["memory"]["arena_peak_bytes"] for m in self.metrics("whole"))
        self.train("all", "model.recompute=1")
        self.assertLess(max(m["memory"]["arena_peak_bytes"] for m in self.metrics("all")), peak)
        self.assertEqual(self.losses("all"), self.losses("whole"))

    def test_released_names_come_out_and_go_in(self):
        self.train("run")
        weights = self.exported("run")
        norms = [n[:-len(".running_var")] for n in weights if n.endswith(".running_var")]
        # 158 names are in the released file, each norm's count of batches with them.
        self.assertEqual(len(weights), 158 - len(norms))
        for name in ("backbone.conv1.weight", "backbone.layer2.0.downsample.1.running_mean",
                     "neck.lateral_convs.3.conv.weight", "neck.smooth_convs.0.conv.weight",
                     "det_head.binarize.3.bias", "det_head.threshold.6.weight"):
            self.assertIn(name, weights)
        self.weft("export", "run", "w.safetensors", ranks=0)
        tensors = read_safetensors(self.dir / "w.safetensors")
        # A released file counts batches too.
        more = tensors | {n + ".num_batches_tracked": ("I64", [], bytes(8)) for n in norms}
        write_safetensors(self.dir / "released.safetensors", more)
        # A step with no rate keeps what is trained.
        self.train("again", "model.weights=released.safetensors", "train.lr_detector=0", "train.steps=1")
        for name, tensor in self.exported("again").items():
            if ".running_" not in name:
                self.assertEqual(bytes(tensor[2]), bytes(tensors[name][2]), name)
        # A backbone of ImageNet: its names alone, and a classifier.
        backbone = {n[len("backbone."):]: t for n, t in tensors.items() if n.startswith("backbone.")}
        write_safetensors(self.dir / "imagenet.safetensors", backbone | {"fc.weight": ("F32", [2], bytes(8))})
        self.train("from", "model.weights_backbone=imagenet.safetensors", "train.lr_detector=0", "train.steps=1")
        for name, tensor in self.exported("from").items():
            if name.startswith("det_head") and name.endswith("0.weight"):
                self.assertNotEqual(bytes(tensor[2]), bytes(tensors[name][2]), name)
            elif name.startswith("backbone.") and ".running_" not in name:
                self.assertEqual(bytes(tensor[2]), bytes(tensors[name][2]), name)
        # Of another backbone, and of too many.
        self.refused(self.train("no", "model.weights=w.safetensors", "model.backbone=resnet50", expect=None), 3,
                     "backbone.layer1.0")
        self.refused(self.train("no", "model.weights=w.safetensors", "model.weights_backbone=imagenet.safetensors",
                                expect=None), 2, "model.weights_backbone")

    def test_a_larger_backbone_with_scale_fusion_and_deformable_convolutions(self):
        self.train("run", "model.backbone=resnet50", "model.asf=true", "model.deformable=on", "train.steps=1")
        self.assertIn("neck.asf_attn.attention_wise.conv.weight", self.exported("run"))

    def test_plan_and_inspect(self):
        plan = self.weft("plan", "d.toml", "--gpus", "1", "--memory", "6", ranks=0)
        self.assertIn("text-96", plan.out)
        facts = self.weft("inspect", "text:images=5,height=64,width=64,seed=3", ranks=0)
        self.assertIn("5 pictures", facts.out)

    def test_what_cannot_be_is_refused(self):
        for options, what in ((("model.conv2_gain=0.5",), "conv2_gain"),
                              (("data.path=synthetic:clips=4",), "text regions"),
                              (("data.path=shapes:images=9,classes=3,height=64,width=64",), "text regions"),
                              (("data.crop=48",), "data.crop"),
                              (("model.deformable=on",), "deformable"),
                              (("model.weights=none.safetensors",), "none.safetensors"),
                              (("data.path=none.jsonl",), "none.jsonl")):
            job = self.train("refused", *options, ranks=0, expect=None)
            self.assertIn(job.process.returncode, (2, 3), options)
            self.refused(job, job.process.returncode, what)


class Evaluate(Text):
    def setUp(self):
        super().setUp()
        # A network of random weights whose map has some blobs above the mask's threshold.
        self.options = ("model.weights=random:3", "evaluate.predictions=true", "postprocess.mask_threshold=0.5",
                        "postprocess.min_text_score=0.35", "postprocess.epsilon_ratio=0.01")

    def test_counts_are_those_of_the_boxes(self):
        folder = self.dir / "pictures"
        folder.mkdir()
        draw = random.Random(5)
        for i in range(4):
            spots = [(draw.uniform(0, 200), draw.uniform(0, 150), draw.uniform(6, 25), draw.randrange(256))
                     for _ in range(30)]

            def pixel(x, y):
                v = next((s[3] for s in spots if abs(x - s[0]) < s[2] and abs(y - s[1]) < s[2] / 2), 90)
                return (v, 255 - v, (x + 3 * y) % 256)
            (folder / f"p{i}.png").write_bytes(png(200, 150, pixel))
            (folder / f"gt_p{i}.txt").write_text("")
        sizes = ("evaluate.data=pictures", "evaluate.short_side=128", "evaluate.long_side=160")
        self.evaluate("first", *sizes, *self.options)
        boxes = {n: line["boxes"] for n, line in self.lines("first").items()}
        self.assertGreater(sum(map(len, boxes.values())), 20, "too few boxes to test much")
        # Regions near some of these boxes: the same, larger, moved, ignored.
        regions = {}
        for i in range(4):
            regions[i] = []
            for k, box in enumerate(boxes[f"image{i}"]):
                shift, ignored = draw.choice([0, 0, 3, 9]), k % 5 == 0
                moved = [v + shift for v in box]
                if k % 3 != 2:
                    regions[i].append((tuple(tuple(round(v, 3) for v in c) for c in corners(moved)), ignored))
            (folder / f"gt_p{i}.txt").write_text("".join(
                ",".join(str(v) for c in r for v in c) + (",###\n" if ignored else ",word\n")
                for r, ignored in regions[i]))
        said = self.evaluate("second", *sizes, *self.options)
        sums = [0, 0, 0]
        for i in range(4):
            line = self.lines("second")[f"image{i}"]
            self.assertEqual(line["boxes"], boxes[f"image{i}"])
            for t, threshold in enumerate(line["thresholds"]):
                counted = [corners(b) for b, s in zip(line["boxes"], line["scores"]) if s >= threshold]
                wanted = icdar(regions[i], counted)
                self.assertEqual((line["wanted"], line["found"][t], line["matched"][t]), wanted, (i, threshold))
                if t == 0:
                    sums = [a + b for a, b in zip(sums, wanted)]
        e = self.result("second")
        self.assertEqual([e["regions"], e["boxes"], e["matched"]], sums)
        self.assertTrue(0 < e["matched"] < e["boxes"] and e["matched"] < e["regions"], "nothing to tell apart")
        precision, recall = e["matched"] / e["boxes"], e["matched"] / e["regions"]
        self.assertAlmostEqual(e["hmean"], 2 * precision * recall / (precision + recall), 12)
        self.assertEqual(e["best_hmean"], max(s["hmean"] for s in e["scores"]))
        self.assertIn(f"Hmean {100 * e['hmean']:.2f} %", said.out)
        page = (self.dir / "second/evaluation.html").read_text()
        self.assertEqual(page.count("data:image/png;base64,"), 4)
        # The dry run told the memory to the byte.
        share = json.loads((self.dir / "second/evaluate_report.json").read_text())["ranks"][0]
        self.assertEqual(share["planned_bytes"], share["peak_bytes"])

    def test_the_same_on_two_ranks(self):
        self.evaluate("one", *self.options)
        self.evaluate("two", *self.options, ranks=2)
        self.assertEqual(self.lines("one"), self.lines("two"))
        for path in (self.dir / "one/pictures").iterdir():
            self.assertEqual(path.read_bytes(), (self.dir / "two/pictures" / path.name).read_bytes())
        # Other scores are another evaluation.
        again = self.evaluate("two", *self.options, "postprocess.min_text_score=0.4")
        self.assertNotIn("evaluated before", again.err)

    def test_a_run_and_its_exported_weights_find_the_same(self):
        self.train("run", "train.steps=4")
        (self.dir / "run").rename(self.dir / "moved")
        options = ("evaluate.predictions=true", "postprocess.min_text_score=0.05", "postprocess.mask_threshold=0.05")
        self.evaluate("of_run", "run.dir=moved", *options)
        self.weft("export", "moved", "w.safetensors", ranks=0)
        self.evaluate("of_file", "model.weights=w.safetensors", *options)
        found = [{n: [line["boxes"], line["scores"]] for n, line in self.lines(o).items()} for o in ("of_run", "of_file")]
        self.assertEqual(found[0], found[1])

    def test_a_broken_picture_fails_alone_and_refusals(self):
        folder = self.dir / "pictures"
        folder.mkdir()
        for i in range(3):
            (folder / f"p{i}.png").write_bytes(png(64, 40, lambda x, y: (4 * x, 6 * y, 40 * i)))
            (folder / f"gt_p{i}.txt").write_text("1,1,20,1,20,20,1,20,a\n")
        whole = (folder / "p1.png").read_bytes()
        (folder / "p1.png").write_bytes(whole[:len(whole) - 30])
        job = self.evaluate("broken", "evaluate.data=pictures", *self.options, ranks=2, expect=3)
        self.assertIn("p1.png", job.err)
        self.assertEqual(sorted(self.lines("broken")), ["image0", "image2"])
        job = self.evaluate("tight", "memory.arena_gib=0.004", *self.options, expect=3)
        self.assertRegex(job.err, r"a picture of \d+x\d+ in the network needs [\d.]+ GiB")
        self.refused(self.evaluate("no", expect=None), 4, "run", "checkpoint")
        self.refused(self.evaluate("no", "evaluate.data=shapes:images=2", *self.options, expect=None), 2, "text regions")
        self.refused(self.evaluate("no", "evaluate.output=", *self.options, expect=None), 2, "evaluate.output")


if __name__ == "__main__":
    unittest.main()
