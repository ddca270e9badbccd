#!/usr/bin/env python3
"""How fast are training and evaluation of segmentation models beside PyTorch, and beside the original's own code?

    compare_segmentation.py [--weft build/weft] [--parts step evaluate scaling] [--rounds 3] [--original DIR]
                            [--networks resnet18dilated resnet50dilated] [--processor-time] [--tiny]
                            [--results DIR | --no-results]

step      a training step, ResNet-50 dilated + PPM with deep supervision, batch 2, on 2 threads: forward, backward, SGD
evaluate  one image of 512x683 at five scales (short sides 300 to 600) to its counts of pixels, on 2 threads: weft's wall
          time over a list of images; the other sides' loop of resizing, network, softmax, sum, argmax and metrics
scaling   one rank and two of one thread each, sync_bn, both size policies: seconds of the same images; beside it two
          one-rank trainings at once, which is what the host can give, and PyTorch DDP with the original's sizes

Sides run in turn, each in short processes of its own, and start in another order each round, so that whatever else the
machine does hits all alike. All start from the same weights; for `step`, weft's and PyTorch's losses are compared first.
Medians count. With --processor-time, for a machine that others use too, `step` and `evaluate` take one thread a side and
count its processor time (weft's: that of a run less that of a shorter one). With --original DIR (see
segmentation_original.py) the original's modules, dataset and metrics are timed too.
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import check_segmentation
import compare_step
import safetensors_io
import segmentation_torch
import step_cases

HERE = pathlib.Path(__file__).resolve().parent
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


def environment(threads):
    return compare_step.environment(threads) | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def processor_seconds():
    """Of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(argv, threads):
    done = subprocess.run([str(a) for a in argv], env=environment(threads), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode} of {' '.join(map(str, argv))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def weights_of(encoder, folder):
    """Drawn once; the file and its arrays."""
    path = folder / f"{encoder}.safetensors"
    model = segmentation_torch.draw(segmentation_torch.build(encoder, DECODER, CLASSES), 1)
    safetensors_io.save(path, segmentation_torch.parameters(model))
    return path


def model_table(encoder, weights):
    return {"name": "segmentation", "encoder": encoder, "decoder": DECODER, "num_classes": CLASSES, "dropout": 0.1,
            "weights": str(weights)}


def training_deck(path, encoder, weights, data, images, pictures, steps, micro_batches, threads):
    """A deck that trains on pictures drawn in memory."""
    height, width = ("..".join(map(str, pictures[k])) for k in ("height", "width"))
    path.write_text(step_cases.toml({
        "run": {"threads": threads, "seed": 7}, "device": {"kind": "cpu"},
        "data": data | {"path": f"shapes:images={images},classes=8,height={height},width={width},seed=1", "label_rate": 8},
        "model": model_table(encoder, weights),
        "train": TRAIN | {"steps": steps, "batch_size": 2, "micro_batches": micro_batches, "sync_bn": True,
                          "checkpoint_every": 0}}))
    return path


def start_weft(args, deck, folder, name, ranks, threads, *options):
    """A training in the background; finish_weft gives its steps."""
    run_dir = folder / name
    argv = [str(args.weft), "train", str(deck), f"run.dir={run_dir}", "run.resume=false", *options]
    if ranks > 1:
        argv = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *argv]
    log = open(folder / f"{name}.log", "w", encoding="utf-8")
    return subprocess.Popen(argv, env=environment(threads), stdout=log, stderr=subprocess.STDOUT), run_dir, log.name


def finish_weft(started):
    process, run_dir, log = started
    if process.wait() != 0:
        sys.exit(f"weft train failed with {process.returncode}\n{pathlib.Path(log).read_text()[-3000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_weft(*words):
    return finish_weft(start_weft(*words))


class Torch:
    """A process or several of torch_segmentation.py."""

    def __init__(self, case, folder, name, ranks=1):
        path, store = folder / f"{name}.json", folder / f"{name}.store"
        path.write_text(json.dumps(case))
        store.unlink(missing_ok=True)
        self.processes = [
            subprocess.Popen([sys.executable, str(HERE / "torch_segmentation.py"), str(path), "--rank", str(r), "--ranks",
                              str(ranks), "--store", str(store)], env=environment(case["threads"]), text=True,
                             stdin=subprocess.PIPE if r == 0 else subprocess.DEVNULL,
                             stdout=subprocess.PIPE if r == 0 else subprocess.DEVNULL)
            for r in range(ranks)]
        self.answer()

    def answer(self):
        line = self.processes[0].stdout.readline()
        if not line:
            sys.exit("torch_segmentation.py ended early")
        return json.loads(line)

    def run(self, count):
        self.processes[0].stdin.write(f"{count}\n")
        self.processes[0].stdin.flush()
        return self.answer()

    def stop(self):
        self.processes[0].stdin.close()
        for p in self.processes:
            p.wait(120)


def torch_times(case, folder, name, count, warmup=1, ranks=1):
    worker = Torch(case, folder, name, ranks)
    if warmup:
        worker.run(warmup)
    done = worker.run(count)
    worker.stop()
    return done


def in_turn(sides, rounds):
    """Calls every side once a round, another first each time; {name: results}."""
    names, results = list(sides), {name: [] for name in sides}
    for i in range(rounds):
        for name in names[i % len(names):] + names[:i % len(names)]:
            results[name].append(sides[name]())
            print(f"    round {i + 1}  {name:16} load {os.getloadavg()[0]:.1f}  "
                  + str(results[name][-1] if isinstance(results[name][-1], float) else
                        [round(float(x), 3) for x in results[name][-1]]), file=sys.stderr, flush=True)
    return results


def same_loss(args, encoder, weights, size, folder):
    """Relative difference of the losses of both sides for one batch, without dropout."""
    generator = torch.Generator().manual_seed(9)
    image = torch.randn((2, 3, *size), generator=generator)
    label = torch.randint(-1, CLASSES, (2, size[0] // 8, size[1] // 8), generator=generator)
    given, found, deck = folder / "in.safetensors", folder / "out.safetensors", folder / "probe.toml"
    safetensors_io.save(given, {"image": image.numpy(), "label": label.numpy()})
    deck.write_text(step_cases.toml({"model": model_table(encoder, "") | {"dropout": 0.0}}))
    run([args.weft, "probe", "loss", "--deck", deck, "--weights", weights, "--inputs", given, "--outputs", found, "--device",
         "cpu", f"run.threads={args.threads}"], args.threads)
    model = segmentation_torch.build(encoder, DECODER, CLASSES, 0.0)
    segmentation_torch.load(model, safetensors_io.load(weights)).train()
    with torch.no_grad():
        theirs = float(model.loss(image, label)[0])
    return abs(float(safetensors_io.load(found)["loss"][0]) - theirs) / abs(theirs)


def torch_sides(args):
    """Kinds of PyTorch that are timed: name -> keys of a case."""
    sides = {"torch": {"original": None, "channels_last": True}}
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
            if args.processor_time:
                used = [processor_seconds()]
                for steps in (args.steps + 1, 1):
                    train_weft(args, deck, folder, "step", 1, args.threads, f"train.steps={steps}")
                    used.append(processor_seconds())
                return [((used[1] - used[0]) - (used[2] - used[1])) / args.steps]
            steps = train_weft(args, deck, folder, "step", 1, args.threads)[1:]
            return [s["split"]["compute"] + s["split"]["optimizer"] for s in steps]

        sides = {"weft": weft} | {
            name: lambda keys=keys, name=name: torch_times(case | keys, folder, name, args.steps)[args.clock]
            for name, keys in torch_sides(args).items()}
        print(f"  step {size[0]}x{size[1]}", file=sys.stderr, flush=True)
        loss = same_loss(args, encoder, weights, size, folder)
        rounds = in_turn(sides, args.rounds)
        medians = {name: statistics.median(x for r in samples for x in r) for name, samples in rounds.items()}
        results.append({"network": f"{encoder}+{DECODER}", "size": size, "batch": 2, "rounds": rounds, "median": medians,
                        "ratio": {n: m / medians["weft"] for n, m in medians.items() if n != "weft"},
                        "loss_difference": loss})
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
    deck.write_text(step_cases.toml({
        "run": {"dir": str(folder / "run"), "threads": args.threads}, "device": {"kind": "cpu"},
        "data": data | {"path": str(folder / "store.h5")}, "model": model_table(encoder, weights),
        "ingest": {"images": str(folder / "list.odgt"), "output": str(folder / "store.h5")},
        "evaluate": {"pictures": 0}}))
    run([args.weft, "ingest", deck], args.threads)
    lines = (folder / "list.odgt").read_text().splitlines(keepends=True)
    (folder / "one.odgt").write_text(lines[0])
    one = [f"ingest.images={folder / 'one.odgt'}", f"ingest.output={folder / 'one.h5'}"]
    run([args.weft, "ingest", deck, *one], args.threads)
    case = {"what": "evaluate", "model": model_table(encoder, weights), "data": data, "threads": args.threads,
            "weights": str(weights), "root": str(folder), "records": records}
    took = []

    def weft():
        output = folder / f"evaluation{len(took)}"
        used = [processor_seconds()]
        run([args.weft, "evaluate", deck, f"evaluate.output={output}"], args.threads)
        used.append(processor_seconds())
        if args.processor_time:
            run([args.weft, "evaluate", deck, f"evaluate.output={output}_one", f"evaluate.data={folder / 'one.h5'}"],
                args.threads)
            used.append(processor_seconds())
        found = json.loads((output / "evaluation.json").read_text())
        lines = [json.loads(line) for line in (output / "images.jsonl").read_text().splitlines()]
        took.append(statistics.median(line["seconds"] for line in lines if "seconds" in line))
        if args.processor_time:
            return [((used[1] - used[0]) - (used[2] - used[1])) / args.images]
        return [found["pace"]["seconds"] / found["pace"]["images"]]

    sides = {"weft": weft} | {
        name: lambda keys=keys, name=name: torch_times(case | keys, folder, name, args.images)[args.clock]
        for name, keys in torch_sides(args).items()}
    print("  evaluate", file=sys.stderr, flush=True)
    rounds = in_turn(sides, args.rounds)
    medians = {name: statistics.median(x for r in samples for x in r) for name, samples in rounds.items()}
    return {"network": f"{encoder}+{DECODER}", "picture": PICTURE, "short_sides": data["short_sides"], "images": args.images,
            "rounds": rounds, "median": medians, "weft_prediction_alone": statistics.median(took),
            "ratio": {n: m / medians["weft"] for n, m in medians.items() if n != "weft"}}


def measure_scaling(args, folder):
    results = []
    for encoder in args.networks:
        weights = weights_of(encoder, folder)
        images = args.scaling_images or SCALING_IMAGES[encoder]
        steps = images // 4  # two micro-batches of two
        by = args.scaling_enlarged
        sizes = SCALING | {"short_sides": [round(s * by) for s in SCALING["short_sides"]], "max_side": round(SCALING["max_side"] * by)}
        pictures = {side: tuple(round(s * by) for s in ends) for side, ends in SCALING_PICTURES.items()}
        decks = {}
        for policy in ("balanced", "original"):
            decks[policy] = training_deck(folder / f"{policy}.toml", encoder, weights, sizes | {"size_policy": policy}, images,
                                          pictures, steps, 2, 1)

        def seconds(metrics):
            """Of all steps but the first, in which memory and threads are new."""
            return sum(s["seconds"] for s in metrics[1:])

        def weft(policy, ranks):
            return seconds(train_weft(args, decks[policy], folder, f"{policy}{ranks}", ranks, 1))

        def side_by_side():
            both = [start_weft(args, decks["original"], folder, f"side{i}", 1, 1) for i in range(2)]
            return max(seconds(finish_weft(s)) for s in both)

        case = {"what": "train", "model": model_table(encoder, weights), "train": TRAIN, "data": sizes | pictures,
                "threads": 1, "weights": str(weights), "micro_batches": 2, "batch_size": 2, "original": None,
                "channels_last": True}

        def ddp(ranks):
            done = torch_times(case, folder, f"ddp{ranks}", steps, ranks=ranks)
            return [sum(done["seconds"]), sum(done["pixels"]) / 1e6]

        sides = {f"{policy} {n}": lambda policy=policy, n=n: weft(policy, n) for policy in decks for n in (1, 2)}
        sides |= {"two at once": side_by_side}
        if not args.no_ddp:
            sides |= {"ddp 1": lambda: ddp(1), "ddp 2": lambda: ddp(2)}
        print(f"  scaling {encoder}", file=sys.stderr, flush=True)
        rounds = in_turn(sides, args.rounds)
        gains = {policy: [a / b for a, b in zip(rounds[f"{policy} 1"], rounds[f"{policy} 2"])] for policy in decks}
        gains["host"] = [2 * a / b for a, b in zip(rounds["original 1"], rounds["two at once"])]
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
            print(f"  {what.get(name, 'weft, sizes ' + name):50} {g:.2f}x of 2")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weft", type=pathlib.Path, default=HERE.parent / "build" / "weft")
    parser.add_argument("--parts", nargs="+", default=["step", "evaluate", "scaling"], choices=["step", "evaluate", "scaling"])
    parser.add_argument("--original", type=pathlib.Path, help="folder that holds the original's package mit_semseg")
    parser.add_argument("--networks", nargs="+", default=sorted(SCALING_IMAGES), choices=sorted(SCALING_IMAGES),
                        help="of scaling")
    parser.add_argument("--sizes", nargs="+", default=STEP_SIZES, help="of step's images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a side and round")
    parser.add_argument("--images", type=int, default=2, help="evaluated images of a side and round")
    parser.add_argument("--scaling-images", type=int, help="of a side and round of scaling, a multiple of 4")
    parser.add_argument("--scaling-enlarged", type=float, default=1, help="factor of scaling's sizes; 3 is the original's")
    parser.add_argument("--no-ddp", action="store_true", help="leave PyTorch DDP out of scaling")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="of one thread, in step and evaluate")
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it all work?")
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--no-results", action="store_true", help="print only")
    args = parser.parse_args()
    if not args.weft.is_file():
        sys.exit(f"{args.weft} is not there. HINT: make build, or --weft PATH")
    args.weft, args.warmup = args.weft.resolve(), 1
    args.clock = "processor" if args.processor_time else "seconds"
    if args.processor_time:
        args.threads = 1
    args.sizes = [tuple(map(int, size.split("x"))) for size in args.sizes] if not args.tiny else [(64, 96)]
    args.step_network = "resnet50dilated" if not args.tiny else "resnet18dilated"
    if args.tiny:
        args.scaling_images = 8
    about = compare_step.provenance(args)
    if about["load_average_at_start"] > 0.5:
        print(f"WARN: the machine is at work already (load {about['load_average_at_start']:.1f})", file=sys.stderr)
    measures = {"step": measure_steps, "evaluate": measure_evaluation, "scaling": measure_scaling}
    report, began = {}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-seg-") as name:
        for part in args.parts:
            (folder := pathlib.Path(name) / part).mkdir()
            report[part] = measures[part](args, folder)
    about["load_average_at_end"], about["seconds"] = os.getloadavg()[0], time.monotonic() - began
    about["original"], about["clock"] = bool(args.original), args.clock
    print(f"{about['hardware']['cpu']}, {args.threads} threads, {args.clock}, f32, torch {about['versions']['torch']}, "
          f"commit {about['commit'][:12]}, load "
          f"{about['load_average_at_start']:.1f} at the start, {about['load_average_at_end']:.1f} at the end")
    show(report)
    if not args.no_results and not args.tiny:
        args.results.mkdir(parents=True, exist_ok=True)
        path = args.results / f"segmentation_{'_'.join(args.parts)}_cpu_{about['date'][:10]}.json"
        path.write_text(json.dumps(about | report, indent=1) + "\n")
        print(f"\nwritten to {path}")
    wrong = [r for r in report.get("step", []) if not r["loss_difference"] <= LOSS_TOLERANCE]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
