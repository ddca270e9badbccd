#!/usr/bin/env python3
"""Do the PyTorch networks and the chain of `weft animate`'s checks (sadtalker_torch.py, face_torch.py, sadtalker_chain.py)
reproduce what the original computed?

    check_sadtalker_torch.py --golden DIR [--cases sadtalker_kp ...] [--output FILE.json]

Runs every case sadtalker_* of the folder in float64. Networks are within 1e-5, relative in the L2 norm, of every tensor;
whole numbers and pictures are the same but for what each line prints. Exit status 0 if all hold.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import tomllib

import numpy as np
import torch

import face_torch
import safetensors_io
import sadtalker_chain as chain
import sadtalker_torch

TOLERANCE = 1e-5
# Pictures in 8 bits: the largest difference, and the share of values that may differ. A frame is rounded from float32 in the
# original, from float64 here; the crop of an aligned face comes from another Pillow.
LEVELS, SHARE = 1, 2e-3


def network(case, inputs, options, arrays):
    """Outputs of a case, by name."""
    def t(name):
        return torch.from_numpy(np.array(inputs[name])).double()

    def pictures(name):
        return (t(name) / 255).permute(0, 3, 1, 2)

    prefixes = {n.split(".")[0] for n in arrays}
    if case == "detect":
        return sadtalker_torch.load(face_torch.RetinaFace(), arrays).double().eval().detect(t("image"))
    if case == "fan":
        net = sadtalker_torch.load(face_torch.Fan(options.get("fan_num_modules", 4)), arrays).double().eval()
        maps = net(t("image"))
        points = face_torch.points_of(maps[0].numpy(), 256, 256)
        return {"heatmaps": maps, "points98": points, "points68": face_torch.points_68(points)}
    if case == "recon":
        net = torch.nn.Module()
        net.face_3drecon = face_torch.Recon()
        sadtalker_torch.load(net, arrays).double().eval()
        return {"coefficients": net.face_3drecon((t("image") / 255).permute(2, 0, 1)[None])}
    nets = sadtalker_torch.Networks(options)
    for name in [n for n, _ in nets.named_children() if n not in prefixes]:
        delattr(nets, name)
    sadtalker_torch.load(nets, arrays).double().eval()
    if case == "kp":
        return {"keypoints": nets.kp_extractor(pictures("image"))}
    if case == "transform":
        m = nets.mapping(t("windows"))
        yaw, pitch, roll = map(sadtalker_torch.degrees, m[:3])
        return {"yaw": yaw, "pitch": pitch, "roll": roll, "t": m[3], "exp": m[4],
                "rotation": sadtalker_torch.rotation(yaw, pitch, roll),
                "keypoints": sadtalker_torch.transformed(t("kp_canonical"), m)}
    if case == "exp":
        return {"exp": nets.audio2exp(t("windows"), t("ref")[:, :64], t("ratio"))}
    if case == "pose":
        pose = nets.audio2pose(t("windows"), t("ref"), t("z"), nets.options["pose_style"])
        return {"pose": pose, "pose_smooth": chain.smoothed(pose.numpy())}
    if case == "generator":
        image, mask, occlusion, deformation = nets.generator(pictures("image"), t("kp_source"), t("kp_driving"))
        return {"image": image, "mask": mask, "occlusion": occlusion, "deformation": deformation}
    if case == "render":
        return rendered(nets, t, inputs)
    raise ValueError(case)


def rendered(nets, t, inputs):
    rows = chain.driving_rows(inputs["coeff"], inputs["source_coeff"], nets.options)
    angles = chain.angles_of(nets.options, len(rows))
    image = (t("image") / 255).permute(2, 0, 1)
    runs = []
    for keep in (False, True):
        steps = list(sadtalker_torch.render(nets, image, t("source_coeff")[0], torch.from_numpy(rows).double(), angles, keep))
        runs.append({"kp_source": steps[0][0], "kp_driving": sadtalker_torch.in_order([s[0] for s in steps[1:]], len(rows)),
                     "prediction": sadtalker_torch.in_order([s[1] for s in steps[1:]], len(rows))})
    if max(float((runs[0][n] - runs[1][n]).abs().max()) for n in runs[0]) > 1e-12:
        raise AssertionError("the source kept gives other frames than the source computed again")
    out = runs[0]
    out["frames"] = chain.as_bytes(out["prediction"].permute(0, 2, 3, 1).numpy())
    out["frames_resized"] = np.stack([chain.resized_frame(f, inputs["crop_size"], nets.options["size"]) for f in out["frames"]])
    return out


def plain(case, inputs):
    """Cases without a network."""
    if case == "mel":
        mel = chain.mel_spectrogram(inputs["wav"])
        return {"mel": mel, "windows": chain.mel_windows(mel, len(inputs["wav"]) // 640)}
    if case == "crop":
        boxes = [chain.crop_boxes(lm, *size) for lm, size in zip(inputs["landmarks"], inputs["size"].tolist())]
        return {name: np.array([b[name] for b in boxes]) for name in ("resized", "crop", "quad_int", "quad")}
    if case == "align":
        done = [chain.aligned(inputs["image"], lm) for lm in inputs["landmarks"]]
        return {"trans_params": np.array([d[1] for d in done]), "landmarks_aligned": np.array([d[2] for d in done]),
                "crop": np.stack([d[0] for d in done])}
    if case == "landmarks":
        points = [face_torch.points_of(m, *size) for m, size in zip(inputs["heatmaps"], inputs["size"].tolist())]
        return {"points98": np.array(points), "points68": np.array([face_torch.points_68(p) for p in points])}
    if case == "resize":
        return {f"resized{i}": chain.resize(inputs[f"image{i}"], *inputs[f"size{i}"].tolist())
                for i in range(sum(n.startswith("image") for n in inputs))}
    if case == "paste":
        done = [chain.pasted(inputs["image"], f, inputs["box"].tolist()) for f in inputs["frames"]]
        return {"resized": np.stack([d[0] for d in done]), "pasted": np.stack([d[1] for d in done])}
    raise ValueError(case)


def judged(expected, found):
    """The worst tensor's name and relative error; for pictures the number of values that differ, and the largest difference."""
    worst, pictures, good = ("", 0.0), [], True
    for name, wanted in expected.items():
        got = np.asarray(found[name])
        if got.shape != wanted.shape:
            return f"{name}: shape {got.shape}, expected {wanted.shape}", {}, False
        difference = np.abs(got.astype(np.float64) - wanted)
        if wanted.dtype == np.uint8:
            differ = int((difference > 0).sum())
            pictures.append(f"{name}: {differ} of {wanted.size} differ, by {int(difference.max())}")
            good &= difference.max() <= LEVELS and differ <= SHARE * wanted.size
        elif wanted.dtype.kind == "i":
            good &= not difference.any()
        else:
            error = float(np.linalg.norm(difference) / max(np.linalg.norm(wanted), 1e-30))
            worst = max(worst, (name, error), key=lambda w: w[1])
            good &= error <= TOLERANCE
    text = "; ".join(([f"worst {worst[0]} {worst[1]:.1e}"] if worst[0] else []) + pictures)
    return text or "all equal", {"worst": worst[0], "error": worst[1], "pictures": pictures}, bool(good)


def check(golden, name):
    inputs = safetensors_io.load(golden / f"{name}.inputs.safetensors")
    options = tomllib.loads((golden / f"{name}.toml").read_text()).get("sadtalker", {})
    with tempfile.TemporaryDirectory() as folder:
        weights = pathlib.Path(folder) / "weights.safetensors"
        subprocess.run([sys.executable, golden / "make_weights.py", golden / f"{name}.manifest.json", weights], check=True)
        arrays = safetensors_io.load(weights)
    case = name.split("_")[1]
    with torch.inference_mode():
        found = network(case, inputs, options, arrays) if arrays else plain(case, inputs)
    expected = {}
    for path in golden.glob(f"{name}*.expected.safetensors"):
        if path.name in (f"{name}.expected.safetensors", f"{name}.u8.expected.safetensors"):
            expected |= safetensors_io.load(path)
    return judged(expected, found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=pathlib.Path, required=True)
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--output", type=pathlib.Path, help="JSON")
    args = parser.parse_args()
    cases = args.cases or sorted(p.stem for p in args.golden.glob("sadtalker_*.toml"))
    if not cases:
        sys.exit(f"{args.golden} has no case sadtalker_*")
    good, results = True, {}
    for name in cases:
        text, result, holds = check(args.golden, name)
        print(f"{name:24} {text}  {'ok' if holds else 'FAIL'}", flush=True)
        good &= holds
        results[name] = result
    if args.output:
        args.output.write_text(json.dumps(chain.provenance() | {"cases": results}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
