#!/usr/bin/env python3
"""Do the segmentation models of weft agree with PyTorch: outputs, losses, gradients, running statistics, predicted pixels?

    check_segmentation.py [--weft build/weft] [--device cpu] [--dtype f32] [--pairs ENCODER+DECODER ... | --all]
                          [--original DIR] [--parts networks evaluate] [--json FILE]

networks    `weft_probe` on random weights and images beside PyTorch (reference/segmentation.py) in float64. An error is let
            through if it is within the tolerance, or no more than a few times that of PyTorch itself in weft's number
            format: a ReLU's input close to zero moves whole gradients
evaluate    `weft ingest` and `weft evaluate` of pictures drawn here: counts of the predictions that it writes are its
            counts to the last pixel, and predictions are those of PyTorch except where two classes are as good as equal

With --original the original's own code is asked too (see reference/segmentation_original.py): its modules give the same numbers as
those of reference/, its dataset, evaluation and metrics the predictions and counts. Exit status 0 if all hold.
"""
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch

import common
from common import relative_error
from reference import safetensors_io, segmentation, segmentation_original

CLASSES = 7
PAIRS = ["resnet18dilated+ppm_deepsup", "resnet18dilated+c1", "resnet50dilated+ppm_deepsup", "resnet50dilated+upernet",
         "resnet101dilated+c1_deepsup", "resnet18+c1", "resnet50+upernet", "resnet101+ppm", "resnext101+upernet_lite",
         "mobilenetv2dilated+c1_deepsup", "mobilenetv2dilated+ppm", "hrnetv2+c1", "hrnetv2+ppm"]
# Of outputs, losses and running statistics, relative in the L2 norm. bf16 keeps 8 bits of every activation.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2}
# How many times PyTorch's own error in that format is let through.
FACTOR = 4
# Pixels whose two best classes are closer than this may be predicted otherwise.
MARGIN = {"f32": 1e-4, "bf16": 5e-2}
# With a Pillow newer than 9.5, which leaves some resized pixels one level apart.
NEWER_PILLOW_MARGIN = 2e-2


def trains(encoder, decoder):
    """In the original, deep supervision needs both maps at one size."""
    return not (decoder.endswith("deepsup") and not encoder.endswith("dilated"))


def joined(found, names):
    return np.concatenate([np.asarray(found[n], np.float64).ravel() for n in names])


def calm(model, image):
    """Logits of order one: a softmax that is all but decided would hide errors."""
    with torch.no_grad():
        logits = model.eval()(image)
        for module in model.decoder.modules():
            if isinstance(module, torch.nn.Conv2d) and module.bias is not None:
                module.weight.mul_(2 / float(logits[0].std()))
                module.bias.mul_(2 / float(logits[0].std()))
    return model


def inspect_pair(pair, args, folder):
    """Errors of weft, and of PyTorch in the same number format, against float64: {what: (weft, PyTorch)}."""
    encoder, decoder = pair.split("+")
    stride = 8 if encoder.endswith("dilated") else 32
    rate = segmentation.label_rate(encoder, decoder)
    generator = torch.Generator().manual_seed(3)
    # Four images: batch norm over a pyramid's single cell needs more than two values.
    height, width = (64, 96) if stride == 8 else (64, 128)
    image = torch.randn((4, 3, height, width), generator=generator)
    label = torch.randint(-1, CLASSES, (4, height // rate, width // rate), generator=generator)
    model = calm(segmentation.draw(segmentation.build(encoder, decoder, CLASSES, 0.0), 11), image[:1])
    arrays = segmentation.parameters(model)
    table = common.toml({"model": {"name": "segmentation", "encoder": encoder, "decoder": decoder, "num_classes": CLASSES,
                                   "dropout": 0.0}})

    def probe(what, inputs, *options):
        return common.probe(args.weft, folder, what, inputs, "--device", args.device, "--dtype", args.dtype, *options, deck=table,
                            weights=arrays)

    def fresh(dtype):
        return segmentation.load(segmentation.build(encoder, decoder, CLASSES, 0.0), arrays).to(dtype)

    low = args.dtype == "bf16"
    result = {}
    with torch.no_grad():
        exact = fresh(torch.float64).eval().probabilities(image[:1].double()).numpy()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            torch_own = fresh(torch.float32).eval().probabilities(image[:1]).float().numpy()
        if args.original:
            module = segmentation_original.build(encoder, decoder, CLASSES, arrays, 0.0, use_softmax=True).double().eval()
            theirs = module({"img_data": image[:1].double()}, segSize=(height, width)).numpy()
            result["original"] = (relative_error(exact, theirs), 0.0)
    found = probe("forward", {"image": image[:1]})["probabilities"]
    result["output"] = (relative_error(found, exact), relative_error(torch_own, exact))
    if trains(encoder, decoder):
        found = probe("loss", {"image": image, "label": label}, "--backward")
        exact = segmentation.train_results(fresh(torch.float64), image.double(), label)
        torch_own = segmentation.train_results(fresh(torch.float32), image, label, low)
        missing = set(exact) - set(found)
        if missing:
            sys.exit(f"{pair}: weft wrote no {sorted(missing)[:5]}")
        gradients = [n for n in exact if n.startswith("grad.")]
        statistics = [n for n in exact if n.endswith(("running_mean", "running_var")) and "_tmp" not in n]
        for what, names in (("loss", ["loss"]), ("gradients", gradients), ("statistics", statistics)):
            wanted = joined(exact, names)
            result[what] = (relative_error(joined(found, names), wanted), relative_error(joined(torch_own, names), wanted))
    return result


def networks(args):
    pairs = args.pairs
    if args.all:
        pairs = [f"{e}+{d}" for e in segmentation.ENCODERS for d in segmentation.DECODERS
                 if segmentation.fits(e, d)]
    good, table = True, []
    for pair in pairs:
        with tempfile.TemporaryDirectory(prefix="weft-seg-") as folder:
            try:
                result = inspect_pair(pair, args, pathlib.Path(folder))
            except SystemExit as e:
                print(f"network   {pair:32} FAIL: {e}", flush=True)
                good = False
                continue
        bad = [w for w, (ours, own) in result.items() if not ours <= max(TOLERANCE[args.dtype], FACTOR * own)]
        good &= not bad
        table.append({"pair": pair, "errors": {w: {"weft": a, "torch": b} for w, (a, b) in result.items()}})
        print(f"network   {pair:32} " + "  ".join(f"{w} {a:.1e} ({b:.0e})" for w, (a, b) in result.items())
              + (f"  FAIL: {', '.join(bad)}" if bad else "  ok"), flush=True)
    print("          errors relative to float64; in parentheses PyTorch's own in "
          + ("float32" if args.dtype == "f32" else "bf16 under autocast"))
    return good, table


def draw_pictures(folder, count):
    """PNG images of smooth patches with noise, and labels of 0 to CLASSES; lines of an .odgt list."""
    from PIL import Image

    rng, records = np.random.default_rng(5), []
    for i in range(count):
        height, width = [(83, 120), (131, 90), (64, 64), (97, 143)][i % 4]
        small = rng.integers(0, CLASSES + 1, (6, 8)).astype(np.uint8)
        label = np.asarray(Image.fromarray(small).resize((width, height), Image.NEAREST))
        colours = rng.integers(30, 220, (CLASSES + 1, 3))
        image = np.clip(colours[label] + rng.normal(0, 25, (height, width, 3)), 0, 255).astype(np.uint8)
        paths = {"fpath_img": f"image_{i}.png", "fpath_segm": f"label_{i}.png"}
        Image.fromarray(image).save(folder / paths["fpath_img"])
        Image.fromarray(label).save(folder / paths["fpath_segm"])
        records.append(paths | {"width": width, "height": height})
    (folder / "list.odgt").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def evaluate(args):
    from PIL import Image, __version__ as pillow

    margin = MARGIN[args.dtype]
    if tuple(map(int, pillow.split(".")[:2])) > (9, 5):
        margin = max(margin, NEWER_PILLOW_MARGIN)

    data = {"short_sides": [48, 64, 90], "max_side": 140, "padding": 8}
    encoder, decoder = "resnet18dilated", "ppm_deepsup"
    model = segmentation.draw(segmentation.build(encoder, decoder, CLASSES, 0.0), 21).eval()
    arrays = segmentation.parameters(model)
    with tempfile.TemporaryDirectory(prefix="weft-seg-") as name:
        folder = pathlib.Path(name)
        records = draw_pictures(folder, 4)
        safetensors_io.save(folder / "weights.safetensors", arrays)
        deck = folder / "deck.toml"
        deck.write_text(common.toml({
            "run": {"dir": str(folder / "run"), "threads": args.threads}, "device": {"kind": args.device},
            "data": data | {"path": str(folder / "store.h5")},
            "model": {"name": "segmentation", "encoder": encoder, "decoder": decoder, "num_classes": CLASSES, "dropout": 0.0,
                      "dtype": args.dtype, "weights": str(folder / "weights.safetensors")},
            "ingest": {"images": str(folder / "list.odgt"), "output": str(folder / "store.h5"), "num_classes": CLASSES},
            "evaluate": {"output": str(folder / "evaluation"), "predictions": True}}))
        common.run([args.weft, "ingest", deck])
        common.run([args.weft, "evaluate", deck])
        found = json.loads((folder / "evaluation" / "evaluation.json").read_text())
        theirs = None
        if args.original:
            theirs = segmentation_original.build(encoder, decoder, CLASSES, arrays, 0.0, use_softmax=True).eval()
            items = segmentation_original.validation_set(folder, records, data)
        right, union = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
        other = wrong = pixels = 0
        lines = common.json_lines(folder / "evaluation" / "images.jsonl")
        files = [line["prediction"] for line in sorted((x for x in lines if "prediction" in x), key=lambda x: x["name"])]
        files = [f["file"] if isinstance(f, dict) else f for f in files]
        by_name = {pathlib.Path(f).stem: f for f in files}
        same_metrics = True
        for i, record in enumerate(records):
            stem = next(s for s in by_name if f"image_{i}" in s)
            predictions = np.asarray(Image.open(folder / "evaluation" / by_name[stem])).astype(np.int64) - 1
            label = np.asarray(Image.open(folder / record["fpath_segm"])).astype(np.int64) - 1
            a, b = segmentation.counts_of(predictions, label, CLASSES)
            right, union = right + a, union + b
            if theirs is None:
                scores = segmentation.scores_of(model, Image.open(folder / record["fpath_img"]).convert("RGB"), data)
            else:
                result = segmentation_original.evaluate(theirs, items[i], CLASSES)
                scores = result["scores"][0].numpy()
                utils = segmentation_original.part("utils")
                i_and_u = utils.intersectionAndUnion(predictions, label, CLASSES)
                same_metrics &= np.array_equal(i_and_u[0], a) and np.array_equal(i_and_u[1], b)
                same_metrics &= int(utils.accuracy(predictions, label)[1]) == int((label >= 0).sum())
            best = np.sort(scores, axis=0)
            differs = predictions != scores.argmax(0)
            other += int(differs.sum())
            wrong += int((differs & (best[-1] - best[-2] > margin)).sum())
            pixels += label.size
    same_counts = ([c["intersection"] for c in found["classes"]] == right.tolist()
                   and [c["union"] for c in found["classes"]] == union.tolist())
    good = same_counts and same_metrics and wrong == 0
    print(f"evaluate  {len(records)} pictures at {len(data['short_sides'])} scales: counts of the predictions "
          + ("equal" if same_counts else "DIFFER") + (", the original's metrics " + ("equal" if same_metrics else "DIFFER")
                                                      if theirs else "")
          + f"; {other} of {pixels} pixels predicted otherwise than {'the original' if theirs else 'PyTorch'} does, "
          f"{wrong} of them with a margin above {margin:g}  {'ok' if good else 'FAIL'}", flush=True)
    return good, {"pixels": pixels, "other": other, "wrong": wrong, "counts_equal": bool(same_counts)}


def main():
    parser = common.parser(__doc__, threads=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="ENCODER+DECODER")
    parser.add_argument("--all", action="store_true", help="every encoder with every decoder that fits")
    parser.add_argument("--parts", nargs="+", default=["networks", "evaluate"], choices=["networks", "evaluate"])
    parser.add_argument("--original", type=pathlib.Path, help="folder that holds the original's package mit_semseg")
    args = common.parse(parser)
    facts = common.about(args)
    torch.set_num_threads(args.threads)
    if args.original:
        segmentation_original.use(args.original)
    good, report = True, {}
    if "networks" in args.parts:
        held, report["networks"] = networks(args)
        good &= held
    if "evaluate" in args.parts:
        held, report["evaluate"] = evaluate(args)
        good &= held
    common.write(args, facts, report)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
