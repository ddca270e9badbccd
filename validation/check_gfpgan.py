#!/usr/bin/env python3
"""Does weft restore faces as GFPGAN v1.4 and facexlib do?

    check_gfpgan.py [--weft build/weft] [--device cpu] [--dtype f32] [--tolerance 1e-4] [--seed 0] [--json FILE]

The original modules (reference/gfpgan.py), with random weights, in f64: `weft_probe gfpgan` with the noise given, `weft_probe
parsenet`, and `weft_probe gfpgan_paste` at both scales with faces that are turned, overlap and reach beyond the frame. Errors are
the greatest ones, as a share of the greatest value. Pasted frames may differ by one level: the original cuts levels, and loses one
where the face's share is above 0 but below 1e-5, which weft takes for 0 (docs/models/gfpgan.md). Exit status 0 if at most one in
1000 values differs otherwise, and the rest holds.
"""
import json
import pathlib
import sys
import tempfile
import time

import numpy as np
import torch

import common
from reference import gfpgan


def probe(a, folder, what, weights, inputs):
    kept = weights and {k: v.numpy() for k, v in weights.items() if v.dtype == torch.float32}
    return common.probe(a.weft, folder, what, inputs, "--device", a.device, "--dtype", a.dtype,
                        deck='[model]\nname = "sadtalker"\n', weights=kept)


def worst(got, wanted):
    return float(np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max())


def check_restorer(a, folder, image):
    net = gfpgan.restorer(a.seed)
    torch.manual_seed(a.seed + 1)
    noise = [torch.randn(1, 1, s, s) for s in gfpgan.NOISE_SIDES]
    inputs = {"image": image.numpy()} | {f"noise.{i:03}": n.numpy() for i, n in enumerate(noise)}
    got = probe(a, folder, "gfpgan", net.state_dict(), inputs)["face"]
    begin = time.perf_counter()
    single = gfpgan.restore(net, image, noise).numpy()
    seconds = time.perf_counter() - begin
    wanted = gfpgan.restore(net.double(), image.double(), [n.double() for n in noise]).numpy()
    return {"error": worst(got, wanted), "error of PyTorch in f32": worst(single, wanted),
            "deviation of the face": float(wanted.std()), "seconds of PyTorch in f32": seconds}


def check_parser(a, folder, image):
    net = gfpgan.parser(a.seed)
    got = probe(a, folder, "parsenet", net.state_dict(), {"image": image.numpy()})
    with torch.no_grad():
        begin = time.perf_counter()
        single = net(image)[0].numpy()
        seconds = time.perf_counter() - begin
        wanted = net.double()(image.double())[0].numpy()
    return {"error": worst(got["logits"], wanted), "error of PyTorch in f32": worst(single, wanted),
            "classes that differ": float((got["classes"] != wanted[0].argmax(0)).mean()),
            "classes seen": len(np.unique(got["classes"])), "seconds of PyTorch in f32": seconds}


def faces_for(rng, height, width, count):
    """Landmarks of faces anywhere in a frame, one landmark far off in some; the restored faces and their classes."""
    template = np.array([[192.98, 239.95], [318.9, 240.19], [256.63, 314.02], [201.26, 371.41], [313.09, 371.15]]) - 256
    points, faces, classes = [], [], []
    y, x = np.mgrid[:512, :512]
    for i in range(count):
        turn, size = rng.uniform(-0.8, 0.8), rng.uniform(0.2, 0.9)
        way = size * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        p = template @ way.T + rng.uniform(0, [width, height]) + rng.normal(0, 1.5, (5, 2))
        if i % 3 == 1:
            p[rng.integers(5)] += rng.normal(0, 40, 2)
        points.append(p)
        faces.append(np.clip(128 + 60 * np.sin(x / rng.uniform(5, 60) + 1)[..., None] +
                             60 * np.cos(y / rng.uniform(5, 60))[..., None] + rng.normal(0, 20, (512, 512, 3)), 0, 255))
        inside = ((x - 256) / rng.uniform(120, 300)) ** 2 + ((y - 260) / rng.uniform(150, 320)) ** 2 < 1
        classes.append(np.where(inside, rng.integers(1, 19), rng.choice([0, 17])))
        classes[-1][300:340, 200:300] = 12
        classes[-1][420:, :] = 14
    return (np.array(points, np.float32), np.array(faces).astype(np.uint8), np.array(classes, np.uint8))


def check_paste(a, folder, scale):
    rng = np.random.default_rng(a.seed + scale)
    height, width = 301, 420
    y, x = np.mgrid[:height, :width]
    frame = np.stack([(x * 7 + y * 3) % 256, (x * y // 50) % 256, rng.integers(0, 256, x.shape)], 2).astype(np.uint8)
    points, faces, classes = faces_for(rng, height, width, 6)
    got = probe(a, folder, "gfpgan_paste", None,
                {"frame": frame, "points": points, "faces": faces, "classes": classes,
                 "scale": np.array([scale], np.int64)})
    transforms, crops, wanted = gfpgan.paste(frame, points, faces, classes, scale)
    off = got["result"].astype(int) - wanted.astype(int)
    cut = np.abs(got["crops"].astype(int) - crops.astype(int))
    return {"transforms": float(np.abs(got["transforms"] - transforms).max()), "crop levels, at most": int(cut.max()),
            "levels, at most": int(np.abs(off).max()), "values a level brighter": float((off == 1).mean()),
            "other values off": float((np.abs(off) > (off == 1)).mean())}


def main():
    p = common.parser(__doc__, seed=0)
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="f32")
    p.add_argument("--tolerance", type=float, default=1e-4)
    p.add_argument("--only", choices=("restorer", "parser", "paste"))
    a = common.parse(p)
    facts = common.about(a)
    torch.manual_seed(a.seed)
    image = torch.nn.functional.interpolate(torch.rand(1, 3, 33, 33), (512, 512), mode="bicubic").clamp(0, 1) * 2 - 1
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if a.only in (None, "restorer"):
            results["restorer"] = check_restorer(a, folder, image)
        if a.only in (None, "parser"):
            results["parser"] = check_parser(a, folder, image)
        for scale in (1, 2) if a.only in (None, "paste") else ():
            results[f"paste at {scale}"] = check_paste(a, folder, scale)
    print(json.dumps(results, indent=1))
    good = all(r["error"] < a.tolerance for r in results.values() if "error" in r)
    good &= all(r["levels, at most"] <= 1 and r["other values off"] < 1e-3 and r["transforms"] < 1e-3 and
                r["crop levels, at most"] == 0 for r in results.values() if "transforms" in r)
    common.write(a, facts, {"cases": results})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
