#!/usr/bin/env python3
"""Does a training step of the text detector take the step that PyTorch takes: losses, gradients, running statistics?

    check_dbnet_training.py [--weft build/weft] [--networks resnet18 resnet18+asf ...] [--pictures 3] [--side 96] [--json FILE]

Pictures with words and their polygons are drawn here, as a list that `weft train` reads with data.augment = false; targets
and loss on the other side are those of reference/dbnet.py, in float64. The gradient is what one step of SGD without momentum
and decay subtracts, over the learning rate. An error is let through if it is within the tolerance, or no more than a few
times that of PyTorch itself in float32: a ReLU's input close to zero moves whole gradients. Exit status 0 if all hold.
"""
import json
import pathlib
import sys
import tempfile

import cv2
import numpy as np
import torch

import common
from reference import dbnet, safetensors_io

TOLERANCE, TIMES = 1e-4, 5
RATE = 100.0  # of the step: rounding of the weights then is small beside it


def draw_pictures(folder, count, side, seed):
    """Pictures and their polygons; among these an ignored one, one that is too small, and some that are turned."""
    random = np.random.default_rng(seed)
    pictures, regions = [], []
    with open(folder / "list.jsonl", "w") as out:
        for i in range(count):
            ground = cv2.resize(random.integers(0, 256, (6, 6, 3), np.uint8), (side, side), interpolation=cv2.INTER_CUBIC)
            polygons = []
            for k in range(3):
                middle = (random.uniform(0.3, 0.7) * side, (k + 0.5) / 3 * side)
                size = (random.uniform(0.35, 0.5) * side, random.uniform(0.15, 0.25) * side)
                if i == 0 and k == 2:
                    size = (20, 5)
                box = cv2.boxPoints((middle, size, random.uniform(-20, 20))).astype(np.float64)
                box = np.clip(np.round(box, 1), 0, side - 1)
                colour = tuple(int(v) for v in random.integers(0, 256, 3))
                cv2.putText(ground, "word", (int(middle[0] - size[0] / 2), int(middle[1] + size[1] / 3)),
                            cv2.FONT_HERSHEY_SIMPLEX, size[1] / 30, colour, 2)
                polygons.append({"points": box.tolist(), "ignore": i == 1 and k == 0})
            cv2.imwrite(str(folder / f"p{i}.png"), ground[:, :, ::-1])
            out.write(json.dumps({"path": f"p{i}.png", "polygons": polygons}) + "\n")
            pictures.append(ground)
            regions.append(polygons)
    return np.stack(pictures), regions


def maps_of(regions, side):
    """Targets of all pictures; thresholds as weft keeps them, in 8 bits."""
    all_maps = [dbnet.targets(side, side, [np.array(p["points"]) for p in polygons], [p["ignore"] for p in polygons])
                for polygons in regions]
    text, counts, thresholds, near = (torch.from_numpy(np.stack(m)) for m in zip(*all_maps))
    steps = torch.round((thresholds.double() - 0.3) / 0.4 * 255)
    return text, counts, 0.3 + 0.4 * steps / 255, near


def step_of_torch(model, pictures, maps, dtype):
    """Losses, and gradients and running statistics by name."""
    model = model.to(dtype).train()
    model.zero_grad()
    logits, thresholds = model(dbnet.normalise(pictures).to(dtype), want_threshold=True)
    loss, parts = dbnet.text_loss(logits, thresholds, *(m.to(dtype) for m in maps))
    loss.backward()
    values = {n: p.grad.double().numpy() for n, p in model.named_parameters()}
    values |= {n: b.double().numpy().copy() for n, b in model.named_buffers() if ".running_" in n}
    return [loss.item()] + [p.item() for p in parts], values


def step_of_weft(weft, folder, network, side, count):
    backbone, *more = network.split("+")
    (folder / "deck.toml").write_text(common.toml({
        "run": {"dir": "run"}, "data": {"path": "list.jsonl", "crop": side, "augment": False},
        "model": {"name": "dbnet", "backbone": backbone, "asf": "asf" in more, "weights": "start.safetensors",
                  "deformable": "on" if "deformable" in more else "off"},
        "train": {"steps": 1, "batch_size": count, "optimizer": "sgd", "momentum": 0, "weight_decay": 0, "lr_power": 0,
                  "lr_detector": RATE}}))
    common.run([weft, "train", "deck.toml"], cwd=folder)
    common.run([weft, "export", "run", "end.safetensors"], cwd=folder)
    metrics = common.json_lines(folder / "run/metrics.jsonl")[0]
    terms = metrics["terms"]
    before, after = (safetensors_io.load(folder / f"{n}.safetensors") for n in ("start", "end"))
    values = {n: after[n].astype(np.float64) if ".running_" in n else (before[n].astype(np.float64) - after[n]) / RATE
              for n in after}
    return [metrics["loss"]] + [terms[f"{t}_loss"] for t in ("probability", "threshold", "binary")], values


def error(got, wanted):
    """Relative; a bias in front of batch norm has no gradient but rounding noise, which the floor lets pass."""
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-12))


def compare(weft, network, pictures, side, seed):
    backbone, *more = network.split("+")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        shown, regions = draw_pictures(folder, pictures, side, seed)
        model = dbnet.draw(dbnet.build(backbone, "asf" in more, deformable="deformable" in more), seed)
        start = dbnet.parameters(model)
        safetensors_io.save(folder / "start.safetensors", start)
        got_losses, got = step_of_weft(weft, folder, network, side, pictures)
        maps = maps_of(regions, side)
        losses, wanted = step_of_torch(dbnet.load(model, start), shown, maps, torch.float64)
        rounded_losses, rounded = step_of_torch(dbnet.load(model.float(), start), shown, maps, torch.float32)
    if got.keys() != wanted.keys():
        sys.exit(f"{network}: other names: {sorted(got.keys() ^ wanted.keys())[:6]}")
    worst, bad = ("", 0.0), []
    for name in wanted:
        e, limit = error(got[name], wanted[name]), max(TOLERANCE, TIMES * error(rounded[name], wanted[name]))
        worst = max(worst, (name, e), key=lambda w: w[1])
        if not e <= limit:
            bad.append((name, e, limit))
    loss_error = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(got_losses, losses))
    own = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(rounded_losses, losses))
    if not loss_error <= max(TOLERANCE, TIMES * own):
        bad.append(("losses", loss_error, TIMES * own))
    print(f"{network:28} losses {loss_error:.1e} (PyTorch in float32 {own:.1e}), worst of {len(wanted)}: {worst[0]} "
          f"{worst[1]:.1e}", flush=True)
    for name, e, limit in bad[:8]:
        print(f"    {name}: {e:.2e}, let through {limit:.2e}")
    return {"network": network, "losses": got_losses, "loss_error": loss_error, "loss_error_of_torch_f32": own,
            "worst": {"name": worst[0], "error": worst[1]}, "failures": len(bad)}


def main():
    parser = common.parser(__doc__, pictures=3, side=96, seed=1)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet18+asf", "resnet50", "oclip_resnet50+asf",
                                                          "resnet50+asf+deformable"])
    args = common.parse(parser)
    facts = common.about(args, "cv2")
    results = [compare(args.weft, n, args.pictures, args.side, args.seed) for n in args.networks]
    common.write(args, facts, {"networks": results})
    return 1 if any(r["failures"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
