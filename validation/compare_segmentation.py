#!/usr/bin/env python3
"""How fast are training and evaluation of segmentation models beside PyTorch, and beside the original's own code?

    compare_segmentation.py [--weft build/weft] [--parts step evaluate scaling] [--rounds 3] [--original DIR]
                            [--networks resnet18dilated resnet50dilated] [--tiny] [--json FILE]

step      a training step, ResNet-50 dilated + PPM with deep supervision, batch 2, on 2 threads: forward, backward, SGD
evaluate  one image of 512x683 at five scales (short sides 300 to 600) to its counts of pixels, on 2 threads: weft's wall
          time over a list of images; the other sides' loop of resizing, network, softmax, sum, argmax and metrics
scaling   one rank and two of one thread each, sync_bn: seconds of the same images; beside it two one-rank trainings at
          once, which is what the host can give, and PyTorch DDP with the original's sizes

Sides run in turn, each in short processes of its own, and start in another order each round, so that whatever else the
machine does hits all alike. PyTorch runs channels-last, eager and with its blocks compiled. All start from the same weights; for
`step`, weft's and PyTorch's losses are compared first. Medians count. With --original DIR (see
reference/segmentation_original.py) the original's modules, dataset and metrics are timed too.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np
import torch

import common
from reference import safetensors_io, segmentation

LOSS_TOLERANCE = 1e-4
DECODER = "ppm_deepsup"
CLASSES = 150
TRAIN = {"lr_encoder": 1e-3, "lr_decoder": 1e-3, "momentum": 0.9, "weight_decay": 1e-4, "deep_sup_scale": 0.4}
STEP_SIZES = ["384x512", "304x400"]
SCALES = [300, 375, 450, 525, 600]
PICTURE = (512, 683)
# A third of the original's short sides: one thread has to take both networks. Photographs are mostly landscapes.
SCALING = {"short_sides": [96, 120, 144, 168, 192], "max_side": 320, "padding": 8}
SCALING_PICTURES = {"height": (150, 230), "width": (190, 280)}
# Images of a round: whole epochs of micro-batches of two.
SCALING_IMAGES = {"resnet18dilated": 48, "resnet50dilated": 24}


def weights_of(encoder, folder):
    """The file, drawn once."""
    path = folder / f"{encoder}.safetensors"
    model = segmentation.draw(segmentation.build(encoder, DECODER, CLASSES), 1)
    safetensors_io.save(path, segmentation.parameters(model))
    return path


def model_table(encoder, weights):
    return {"name": "segmentation", "encoder": encoder, "decoder": DECODER, "num_classes": CLASSES, "dropout": 0.1,
            "weights": str(weights)}


def training_deck(path, encoder, weights, data, images, pictures, steps, micro_batches, threads):
    """A deck that trains on pictures drawn in memory."""
    height, width = ("..".join(map(str, pictures[k])) for k in ("height", "width"))
    path.write_text(common.toml({
        "run": {"threads": threads, "seed": 7}, "device": {"kind": "cpu"},
        "data": data | {"path": f"shapes:images={images},classes=8,height={height},width={width},seed=1", "label_rate": 8},
        "model": model_table(encoder, weights),
        "train": TRAIN | {"steps": steps, "batch_size": 2, "micro_batches": micro_batches, "sync_bn": True,
                          "checkpoint_every": 0}}))
    return path


def start_weft(args, deck, folder, name, ranks, threads, *options):
    """A training in the background; finish_weft gives its steps."""
    run_dir = folder / name
    argv = common.mpi(ranks, [args.weft, "train", deck, f"run.dir={run_dir}", "run.resume=false", *options])
    log = open(folder / f"{name}.log", "w", encoding="utf-8")
    return subprocess.Popen(argv, env=common.environment(threads), stdout=log, stderr=subprocess.STDOUT), run_dir, log.name


def finish_weft(started):
    process, run_dir, log = started
    if process.wait() != 0:
        sys.exit(f"weft train failed with {process.returncode}\n{pathlib.Path(log).read_text()[-3000:]}")
    return common.json_lines(run_dir / "metrics.jsonl")


def train_weft(*words):
    return finish_weft(start_weft(*words))


def torch_times(case, folder, name, count, ranks=1):
    worker = common.Workers("torch_segmentation.py", case, folder, name, ranks, case["threads"])
    worker.run(1)
    done = worker.run(count)
    worker.stop()
    return done


def same_loss(args, encoder, weights, size, folder):
    """Relative difference of the losses of both sides for one batch, without dropout."""
    generator = torch.Generator().manual_seed(9)
    image = torch.randn((2, 3, *size), generator=generator)
    label = torch.randint(-1, CLASSES, (2, size[0] // 8, size[1] // 8), generator=generator)
    found = common.probe(args.weft, folder, "loss", {"image": image, "label": label}, "--device", "cpu", f"run.threads={args.threads}",
                         deck=common.toml({"model": model_table(encoder, "") | {"dropout": 0.0}}), weights=weights)
    model = segmentation.build(encoder, DECODER, CLASSES, 0.0)
    segmentation.load(model, safetensors_io.load(weights)).train()
    with torch.no_grad():
        theirs = float(model.loss(image, label)[0])
    return abs(float(found["loss"][0]) - theirs) / abs(theirs)


def torch_sides(args):
    """Kinds of PyTorch that are timed: name -> keys of a case."""
    sides = {"torch": {"original": None, "channels_last": True},
             "torch compiled": {"original": None, "channels_last": True, "compiled": True}}
    if args.original:
        sides["original"] = {"original": str(args.original.resolve()), "channels_last": False}
    return sides


def measure_steps(args, folder):
    results = []
    for size in args.sizes:
        encoder = args.step_network
        weights = weights_of(encoder, folder)
        fixed = {"height": (size[0], size[0]), "width": (size[1], size[1])}
        data = {"short_sides": [min(size)], "max_side": max(size), "padding": 8}
        deck = training_deck(folder / "step.toml", encoder, weights, data, 8, fixed, args.steps + 1, 1, args.threads)
        case = {"what": "train", "model": model_table(encoder, weights), "train": TRAIN, "data": data | fixed,
                "threads": args.threads, "weights": str(weights), "micro_batches": 1, "batch_size": 2}

        def weft():
            steps = train_weft(args, deck, folder, "step", 1, args.threads)[1:]
            return [s["split"]["compute"] + s["split"]["optimizer"] for s in steps]

        sides = {"weft": weft} | {
            name: lambda keys=keys, name=name: torch_times(case | keys, folder, name, args.steps)["seconds"]
            for name, keys in torch_sides(args).items()}
        print(f"  step {size[0]}x{size[1]}", file=sys.stderr, flush=True)
        loss = same_loss(args, encoder, weights, size, folder)
        rounds = common.in_turn(sides, args.rounds)
        medians = common.medians(rounds)
        limit = common.limit_of(lambda steps: common.run(
            [args.weft, "train", deck, f"run.dir={folder}/profile{steps}", "run.resume=false", f"train.steps={steps}",
             "run.profile=operations"], args.threads), 1, 3)
        others = {n: m for n, m in medians.items() if n != "weft"}
        results.append({"network": f"{encoder}+{DECODER}", "size": size, "batch": 2, "rounds": rounds, "median": medians,
                        "ratio": {n: m / medians["weft"] for n, m in others.items()}, "loss_difference": loss,
                        "row": common.row(f"segmentation step, {encoder} + PPM, 2 images of {size[0]}x{size[1]}, f32",
                                          medians["weft"], limit, others)})
    return results


def draw_pictures(folder, count):
    from PIL import Image

    rng, records = np.random.default_rng(2), []
    height, width = PICTURE
    for i in range(count):
        label = np.asarray(Image.fromarray(rng.integers(0, CLASSES + 1, (8, 10)).astype(np.uint8)).resize((width, height), 0))
        image = rng.integers(0, 256, (64, 86, 3)).astype(np.uint8)
        paths = {"fpath_img": f"image_{i}.png", "fpath_segm": f"label_{i}.png"}
        Image.fromarray(image).resize((width, height), Image.BILINEAR).save(folder / paths["fpath_img"])
        Image.fromarray(label).save(folder / paths["fpath_segm"])
        records.append(paths | {"width": width, "height": height})
    (folder / "list.odgt").write_text("".join(json.dumps(r) + "\n" for r in records))
    return records


def measure_evaluation(args, folder):
    encoder = args.step_network
    weights = weights_of(encoder, folder)
    records = draw_pictures(folder, args.images + 1)
    data = {"short_sides": SCALES if not args.tiny else [60, 90], "max_side": 1000, "padding": 8}
    deck = folder / "evaluate.toml"
    deck.write_text(common.toml({
        "run": {"dir": str(folder / "run"), "threads": args.threads}, "device": {"kind": "cpu"},
        "data": data | {"path": str(folder / "store.h5")}, "model": model_table(encoder, weights),
        "ingest": {"images": str(folder / "list.odgt"), "output": str(folder / "store.h5")},
        "evaluate": {"pictures": 0}}))
    common.run([args.weft, "ingest", deck], args.threads)
    case = {"what": "evaluate", "model": model_table(encoder, weights), "data": data, "threads": args.threads,
            "weights": str(weights), "root": str(folder), "records": records}
    took = []

    def weft(*options):
        output = folder / f"evaluation{len(took)}"
        said = common.run([args.weft, "evaluate", deck, f"evaluate.output={output}", *options], args.threads)
        if options:
            return said
        found = json.loads((output / "evaluation.json").read_text())
        took.append(statistics.median(line["seconds"] for line in common.json_lines(output / "images.jsonl") if "seconds" in line))
        return [found["pace"]["seconds"] / found["pace"]["images"]]

    sides = {"weft": weft} | {
        name: lambda keys=keys, name=name: torch_times(case | keys, folder, name, args.images)["seconds"]
        for name, keys in torch_sides(args).items()}
    print("  evaluate", file=sys.stderr, flush=True)
    rounds = common.in_turn(sides, args.rounds)
    medians = common.medians(rounds)
    others = {n: m for n, m in medians.items() if n != "weft"}
    limit = common.totals(weft("run.profile=operations"))["limit"] / len(records)  # it draws nothing
    return {"network": f"{encoder}+{DECODER}", "picture": PICTURE, "short_sides": data["short_sides"], "images": args.images,
            "rounds": rounds, "median": medians, "weft_prediction_alone": statistics.median(took),
            "ratio": {n: m / medians["weft"] for n, m in others.items()},
            "row": common.row(f"segmentation, evaluating {PICTURE[0]}x{PICTURE[1]} at {len(data['short_sides'])} scales, f32",
                              medians["weft"], limit, others)}


def measure_scaling(args, folder):
    results = []
    for encoder in args.networks:
        weights = weights_of(encoder, folder)
        images = args.scaling_images or SCALING_IMAGES[encoder]
        steps = images // 4  # two micro-batches of two
        by = args.scaling_enlarged
        sizes = SCALING | {"short_sides": [round(s * by) for s in SCALING["short_sides"]], "max_side": round(SCALING["max_side"] * by)}
        pictures = {side: tuple(round(s * by) for s in ends) for side, ends in SCALING_PICTURES.items()}
        deck = training_deck(folder / "deck.toml", encoder, weights, sizes, images, pictures, steps, 2, 1)

        def seconds(metrics):
            """Of all steps but the first, in which memory and threads are new."""
            return sum(s["seconds"] for s in metrics[1:])

        def weft(ranks):
            return seconds(train_weft(args, deck, folder, f"weft{ranks}", ranks, 1))

        def side_by_side():
            both = [start_weft(args, deck, folder, f"side{i}", 1, 1) for i in range(2)]
            return max(seconds(finish_weft(s)) for s in both)

        case = {"what": "train", "model": model_table(encoder, weights), "train": TRAIN, "data": sizes | pictures,
                "threads": 1, "weights": str(weights), "micro_batches": 2, "batch_size": 2, "original": None,
                "channels_last": True}

        def ddp(ranks):
            done = torch_times(case, folder, f"ddp{ranks}", steps, ranks=ranks)
            return [sum(done["seconds"]), sum(done["pixels"]) / 1e6]

        sides = {"weft 1": lambda: weft(1), "weft 2": lambda: weft(2), "two at once": side_by_side}
        if not args.no_ddp:
            sides |= {"ddp 1": lambda: ddp(1), "ddp 2": lambda: ddp(2)}
        print(f"  scaling {encoder}", file=sys.stderr, flush=True)
        rounds = common.in_turn(sides, args.rounds)
        gains = {"weft": [a / b for a, b in zip(rounds["weft 1"], rounds["weft 2"])],
                 "host": [2 * a / b for a, b in zip(rounds["weft 1"], rounds["two at once"])]}
        if not args.no_ddp:
            gains["ddp"] = [(a[0] / a[1]) / (b[0] / b[1]) for a, b in zip(rounds["ddp 1"], rounds["ddp 2"])]
        results.append({"network": f"{encoder}+{DECODER}", "images": images, "steps": steps, "data": sizes,
                        "pictures": pictures, "rounds": rounds, "speed_up_rounds": gains,
                        "speed_up": {name: statistics.median(g) for name, g in gains.items()}})
    return results


def show(report):
    for r in report.get("step", []):
        print(f"\nstep, {r['network']}, batch {r['batch']} of {r['size'][0]}x{r['size'][1]}; losses agree to "
              f"{r['loss_difference']:.1e}")
        for name, m in r["median"].items():
            print(f"  {name:14} {m:8.3f} s" + (f"  {r['ratio'][name]:.2f}x" if name in r["ratio"] else ""))
    if "evaluate" in report:
        r = report["evaluate"]
        print(f"\none image of {r['picture'][0]}x{r['picture'][1]} at short sides {r['short_sides']}, {r['network']}")
        for name, m in r["median"].items():
            print(f"  {name:14} {m:8.3f} s" + (f"  {r['ratio'][name]:.2f}x" if name in r["ratio"] else
                                                f"  (the model alone {r['weft_prediction_alone']:.3f} s)"))
    for r in report.get("scaling", []):
        print(f"\n{r['network']}, {r['images']} images, 2 ranks of one thread over one:")
        for name, g in r["speed_up"].items():
            what = {"host": "two one-rank trainings at once", "ddp": "PyTorch DDP, the original's sizes, pixels a second"}
            print(f"  {what.get(name, name):50} {g:.2f}x of 2")


def main():
    parser = common.parser(__doc__, rounds=3, steps=2, images=2, threads=2)  # steps and images: timed, of a side and round
    parser.add_argument("--parts", nargs="+", default=["step", "evaluate", "scaling"], choices=["step", "evaluate", "scaling"])
    parser.add_argument("--original", type=pathlib.Path, help="folder that holds the original's package mit_semseg")
    parser.add_argument("--networks", nargs="+", default=sorted(SCALING_IMAGES), choices=sorted(SCALING_IMAGES),
                        help="of scaling")
    parser.add_argument("--sizes", nargs="+", default=STEP_SIZES, help="of step's images")
    parser.add_argument("--scaling-images", type=int, help="of a side and round of scaling, a multiple of 4")
    parser.add_argument("--scaling-enlarged", type=float, default=1, help="factor of scaling's sizes; 3 is the original's")
    parser.add_argument("--no-ddp", action="store_true", help="leave PyTorch DDP out of scaling")
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it all work?")
    args = common.parse(parser)
    facts = common.about(args)
    args.sizes = [tuple(map(int, size.split("x"))) for size in args.sizes] if not args.tiny else [(64, 96)]
    args.step_network = "resnet50dilated" if not args.tiny else "resnet18dilated"
    if args.tiny:
        args.scaling_images = 8
    measures = {"step": measure_steps, "evaluate": measure_evaluation, "scaling": measure_scaling}
    report = {}
    with tempfile.TemporaryDirectory(prefix="weft-seg-") as name:
        for part in args.parts:
            (folder := pathlib.Path(name) / part).mkdir()
            report[part] = measures[part](args, folder)
    show(report)
    rows = [r["row"] for r in [*report.get("step", []), report.get("evaluate", {})] if "row" in r]
    common.show_rows(rows)
    common.write(args, facts, report | {"rows": rows})
    wrong = [r for r in report.get("step", []) if not r["loss_difference"] <= LOSS_TOLERANCE]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
