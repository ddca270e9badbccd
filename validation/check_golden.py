#!/usr/bin/env python3
"""Does the package `reference` reproduce what the originals computed? All golden cases of a folder, in float64.

    check_golden.py --golden DIR [--only stdit3 segmentation detector score sadtalker] [--verbose]

stdit3        every output and gradient within 1e-4, relative in the L2 norm; in float32, too
segmentation  seg_*_infer and seg_*_train within 1e-6
detector      ocr_dbnet*: maps of the backbone, neck and probabilities within 1e-7; names and sizes of the released files; DCNv2
              whose offsets are all zero is the network without
score         ocr_boxes*, ocr_frame*: post-processing and frames of torch_score.py
sadtalker     networks within 1e-5, whole numbers equal, pictures but for what each line prints

What agrees here is a reference that others may be measured against. Exit status 0 if all hold.
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile
import tomllib

import numpy as np
import torch

from common import relative_error
from reference import face, rflow, sadtalker, safetensors_io, stdit3
from reference import sadtalker_chain as chain

TOLERANCE = {"stdit3": 1e-4, "segmentation": 1e-6, "detector": 1e-7, "sadtalker": 1e-5}  # files hold float32
# Pictures in 8 bits: the largest difference, and the share of values that may differ. A frame is rounded from float32 in the
# original, from float64 here; the crop of an aligned face comes from another Pillow.
LEVELS, SHARE = 1, 2e-3


class Case:
    """NAME.toml, NAME.inputs.safetensors and so on."""

    def __init__(self, golden, name):
        self.golden, self.name = golden, name
        self.deck = tomllib.loads((golden / f"{name}.toml").read_text())

    def file(self, part):
        return self.golden / f"{self.name}.{part}.safetensors"

    def load(self, part):
        return safetensors_io.load(self.file(part))

    def weights(self):
        """Drawn by the folder's own script, as its manifest says."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "weights.safetensors"
            subprocess.run([sys.executable, self.golden / "make_weights.py", self.golden / f"{self.name}.manifest.json", path],
                           check=True)
            return safetensors_io.load(path)

    def judged_by(self, script, found, *options):
        """By a script of the folder, on what is found; (does it hold, its last line)."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "found.safetensors"
            safetensors_io.save(path, {n: np.asarray(v) for n, v in found.items()})
            done = subprocess.run([sys.executable, self.golden / script, self.file("expected"), path, *options],
                                  capture_output=True, text=True, check=False)
        return done.returncode == 0, (done.stdout + done.stderr).strip().splitlines()[-1]


def say(name, holds, text):
    print(f"{name:34} {text}  {'ok' if holds else 'FAIL'}", flush=True)
    return bool(holds)


# ---- STDiT3 ----

def of_stdit3(case, dtype):
    model = stdit3.build(case.deck["model"], case.load("weights"), dtype)
    inputs = stdit3.to_torch(case.load("inputs"), dtype)
    if "sampler" in case.deck:
        return {"samples": rflow.sample(model, inputs.pop("x"), **inputs, **case.deck["sampler"])}
    if "noise" in inputs:
        loss = rflow.losses(model, **inputs)
        loss.mean().backward()
        found = {"loss": loss.detach()}
    else:
        cotangent = inputs.pop("cotangent")
        for name in ("x", "y"):
            inputs[name].requires_grad_(True)
        out = model(**inputs)
        (out * cotangent).sum().backward()
        found = {"out": out.detach(), "grad.x": inputs["x"].grad, "grad.y": inputs["y"].grad}
    return found | {"grad." + name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def check_stdit3(golden, verbose):
    good = True
    for path in sorted(golden.glob("stdit3*.weights.safetensors")):
        case = Case(golden, path.name.removesuffix(".weights.safetensors"))
        expected = case.load("expected")
        for dtype in (torch.float64, torch.float32):
            found = of_stdit3(case, dtype)
            errors = {k: relative_error(found[k].numpy(), expected[k]) for k in expected if k in found}
            worst = max(errors, key=errors.get)
            one_sided = sorted(set(expected) ^ set(found))
            good &= say(f"{case.name} {str(dtype)[6:]}", not one_sided and errors[worst] <= TOLERANCE["stdit3"],
                        f"{len(errors)} tensors, worst {worst} {errors[worst]:.1e}"
                        + (f", on one side only: {one_sided[:5]}" if one_sided else ""))
            for k, e in sorted(errors.items(), key=lambda item: -item[1]) if verbose else ():
                print(f"    {e:.2e}  {k}")
    return good


# ---- segmentation ----

def check_segmentation(golden, _):
    from reference import segmentation

    good = True
    for path in sorted(golden.glob("seg_*.toml")):
        if not path.stem.endswith("_infer") and "train" not in path.stem:
            continue
        case = Case(golden, path.stem)
        table, inputs = case.deck["model"], case.load("inputs")
        model = segmentation.build(table["encoder"], table["decoder"], table["num_classes"], table["dropout"])
        segmentation.load(model, case.weights()).double()
        image = torch.from_numpy(inputs["image"].copy()).double()
        if path.stem.endswith("_infer"):
            with torch.no_grad():
                found = {"probabilities": model.eval().probabilities(image).numpy()}
        else:
            found = segmentation.train_results(model, image, torch.from_numpy(inputs["label"].copy()))
        good &= say(case.name, *case.judged_by("compare.py", found, "--tolerance", str(TOLERANCE["segmentation"])))
    return good


# ---- text detection and scoring ----

def check_detector(golden, _):
    from reference import dbnet

    good = True
    for path in sorted(golden.glob("ocr_dbnet*.toml")):
        case = Case(golden, path.stem)
        arrays = case.weights()
        model = dbnet.load(dbnet.build_from_deck(case.deck["model"], arrays), arrays).double().eval()
        image = torch.from_numpy(case.load("inputs")["image"].copy()).double()
        with torch.inference_mode():
            maps, logits = model.backbone(image), model(image)
            found = {"logits": logits, "probability": logits.sigmoid(), "neck": model.neck(maps)[:1]}
            found |= {f"backbone.c{i + 2}": m for i, m in enumerate(maps)}
        errors = {}
        for name, value in (case.load("expected") | case.load("debug")).items():
            ours = found[name].numpy()
            ours = ours[:len(value)] if ours.ndim == value.ndim else ours[0]
            errors[name] = relative_error(ours.reshape(value.shape), value)
        worst = max(errors, key=errors.get)
        good &= say(case.name, errors[worst] <= TOLERANCE["detector"], f"{len(errors)} maps, worst {worst} {errors[worst]:.1e}")
    for (backbone, asf), (names, millions) in {("oclip_resnet50", True): (375, 26.05), ("resnet18", False): (158, 12.34)}.items():
        model = dbnet.build(backbone, asf)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        good &= say(f"{backbone}, asf = {asf}", len(model.state_dict()) == names and abs(size - millions) < 0.006,
                    f"{len(model.state_dict())} names ({names}), {size:.2f} M parameters ({millions})")
    image = torch.randn((1, 3, 64, 96), generator=torch.Generator().manual_seed(3)).double()
    for backbone in ("oclip_resnet50", "resnet50"):
        halved = dbnet.draw(dbnet.build(backbone, True, 0.5), 1).double().eval()
        deformable = dbnet.build(backbone, True, 1.0, True).double().eval()
        deformable.load_state_dict(halved.state_dict(), strict=False)
        with torch.inference_mode():
            for name, p in deformable.named_parameters():
                if ".conv_offset." in name:
                    p.zero_()
            difference = float((deformable(image) - halved(image)).abs().max())
        good &= say(f"{backbone}, DCNv2", difference < 1e-9, f"zero offsets against conv2_gain = 0.5: {difference:.1e}")
    return good


def check_score(golden, _):
    import torchvision.transforms as T
    from PIL import Image

    import torch_score

    good = True
    for path in sorted(golden.glob("ocr_boxes*.toml")):
        case = Case(golden, path.stem)
        maps = case.load("inputs")
        found = [torch_score.find_boxes(np.float32(maps[n]) / np.float32(255), case.deck["postprocess"]) for n in sorted(maps)]
        boxes = [b for each in found for b in each]
        good &= say(case.name, *case.judged_by("compare_boxes.py", {
            "kept": [len(each) for each in found], "count": [sum(bool(s > 0.3) for _, s in each) for each in found],
            "quads": np.array([q for q, _ in boxes], np.float32), "scores": np.array([s for _, s in boxes], np.float32)}))
    transform = T.Compose([T.Resize(1024), T.CenterCrop(1024)])
    for path in sorted(golden.glob("ocr_frame*.frames.json")):
        case = Case.__new__(Case)
        case.golden, case.name = golden, path.name.removesuffix(".frames.json")
        with tempfile.TemporaryDirectory() as folder:
            made = pathlib.Path(folder) / "inputs.safetensors"
            if not case.file("inputs").is_file():
                subprocess.run([sys.executable, golden / "make_frames.py", path, made], check=True)
            images = safetensors_io.load(made if made.is_file() else case.file("inputs"))
        good &= say(case.name, *case.judged_by("compare_frames.py", {
            name.replace("image", "crop"): np.asarray(transform(Image.fromarray(image))) for name, image in images.items()}))
    return good


# ---- SadTalker ----

def network(kind, inputs, options, arrays):
    """Outputs of a case with networks, by name."""
    def t(name):
        return torch.from_numpy(np.array(inputs[name])).double()

    def pictures(name):
        return (t(name) / 255).permute(0, 3, 1, 2)

    if kind == "detect":
        return sadtalker.load(face.RetinaFace(), arrays).double().eval().detect(t("image"))
    if kind == "fan":
        maps = sadtalker.load(face.Fan(options.get("fan_num_modules", 4)), arrays).double().eval()(t("image"))
        points = face.points_of(maps[0].numpy(), 256, 256)
        return {"heatmaps": maps, "points98": points, "points68": face.points_68(points)}
    if kind == "recon":
        net = torch.nn.Module()
        net.face_3drecon = face.Recon()
        sadtalker.load(net, arrays).double().eval()
        return {"coefficients": net.face_3drecon((t("image") / 255).permute(2, 0, 1)[None])}
    nets, parts = sadtalker.Networks(options), {n.split(".")[0] for n in arrays}
    for name in [n for n, _ in nets.named_children() if n not in parts]:
        delattr(nets, name)
    sadtalker.load(nets, arrays).double().eval()
    if kind == "kp":
        return {"keypoints": nets.kp_extractor(pictures("image"))}
    if kind == "transform":
        m = nets.mapping(t("windows"))
        yaw, pitch, roll = map(sadtalker.degrees, m[:3])
        return {"yaw": yaw, "pitch": pitch, "roll": roll, "t": m[3], "exp": m[4],
                "rotation": sadtalker.rotation(yaw, pitch, roll), "keypoints": sadtalker.transformed(t("kp_canonical"), m)}
    if kind == "exp":
        return {"exp": nets.audio2exp(t("windows"), t("ref")[:, :64], t("ratio"))}
    if kind == "pose":
        pose = nets.audio2pose(t("windows"), t("ref"), t("z"), nets.options["pose_style"])
        return {"pose": pose, "pose_smooth": chain.smoothed(pose.numpy())}
    if kind == "generator":
        image, mask, occlusion, deformation = nets.generator(pictures("image"), t("kp_source"), t("kp_driving"))
        return {"image": image, "mask": mask, "occlusion": occlusion, "deformation": deformation}
    if kind == "render":
        return rendered(nets, t, inputs)
    raise ValueError(kind)


def rendered(nets, t, inputs):
    """With the source computed again for every frame, and with it kept: the same frames."""
    rows = chain.driving_rows(inputs["coeff"], inputs["source_coeff"], nets.options)
    angles = chain.angles_of(nets.options, len(rows))
    image, runs = (t("image") / 255).permute(2, 0, 1), []
    for keep in (False, True):
        steps = list(sadtalker.render(nets, image, t("source_coeff")[0], torch.from_numpy(rows).double(), angles, keep))
        runs.append({"kp_source": steps[0][0], "kp_driving": sadtalker.in_order([s[0] for s in steps[1:]], len(rows)),
                     "prediction": sadtalker.in_order([s[1] for s in steps[1:]], len(rows))})
    if max(float((runs[0][n] - runs[1][n]).abs().max()) for n in runs[0]) > 1e-12:
        raise AssertionError("the source kept gives other frames than the source computed again")
    out = runs[0]
    out["frames"] = chain.as_bytes(out["prediction"].permute(0, 2, 3, 1).numpy())
    out["frames_resized"] = np.stack([chain.resized_frame(f, inputs["crop_size"], nets.options["size"]) for f in out["frames"]])
    return out


def plain(kind, inputs):
    """Outputs of a case without a network."""
    if kind == "mel":
        mel = chain.mel_spectrogram(inputs["wav"])
        return {"mel": mel, "windows": chain.mel_windows(mel, len(inputs["wav"]) // 640)}
    if kind == "crop":
        boxes = [chain.crop_boxes(lm, *size) for lm, size in zip(inputs["landmarks"], inputs["size"].tolist())]
        return {name: np.array([b[name] for b in boxes]) for name in ("resized", "crop", "quad_int", "quad")}
    if kind == "align":
        faces, params, points = zip(*(chain.aligned(inputs["image"], lm) for lm in inputs["landmarks"]))
        return {"trans_params": np.array(params), "landmarks_aligned": np.array(points), "crop": np.stack(faces)}
    if kind == "landmarks":
        points = [face.points_of(m, *size) for m, size in zip(inputs["heatmaps"], inputs["size"].tolist())]
        return {"points98": np.array(points), "points68": np.array([face.points_68(p) for p in points])}
    if kind == "resize":
        return {f"resized{i}": chain.resize(inputs[f"image{i}"], *inputs[f"size{i}"].tolist())
                for i in range(sum(n.startswith("image") for n in inputs))}
    if kind == "paste":
        patches, whole = zip(*(chain.pasted(inputs["image"], f, inputs["box"].tolist()) for f in inputs["frames"]))
        return {"resized": np.stack(patches), "pasted": np.stack(whole)}
    raise ValueError(kind)


def judged(expected, found):
    """Does it hold, and the worst tensor; of pictures how many values differ, and by how much."""
    worst, pictures, good = ("", 0.0), [], True
    for name, wanted in expected.items():
        got = np.asarray(found[name])
        if got.shape != wanted.shape:
            return False, f"{name}: shape {got.shape}, expected {wanted.shape}"
        difference = np.abs(got.astype(np.float64) - wanted)
        if wanted.dtype == np.uint8:
            differ = int((difference > 0).sum())
            pictures.append(f"{name}: {differ} of {wanted.size} differ, by {int(difference.max())}")
            good &= bool(difference.max() <= LEVELS and differ <= SHARE * wanted.size)
        elif wanted.dtype.kind == "i":
            good &= not difference.any()
        else:
            error = relative_error(got, wanted)
            worst = max(worst, (name, error), key=lambda w: w[1])
            good &= error <= TOLERANCE["sadtalker"]
    return good, "; ".join(([f"worst {worst[0]} {worst[1]:.1e}"] if worst[0] else []) + pictures) or "all equal"


def check_sadtalker(golden, _):
    good = True
    for path in sorted(golden.glob("sadtalker_*.toml")):
        case = Case(golden, path.stem)
        kind, inputs, arrays = path.stem.split("_")[1], case.load("inputs"), case.weights()
        with torch.inference_mode():
            found = network(kind, inputs, case.deck.get("sadtalker", {}), arrays) if arrays else plain(kind, inputs)
        expected = {}
        for part in ("expected", "u8.expected"):
            if case.file(part).is_file():
                expected |= case.load(part)
        good &= say(case.name, *judged(expected, found))
    return good


FAMILIES = {"stdit3": ("stdit3*.toml", check_stdit3), "segmentation": ("seg_*.toml", check_segmentation),
            "detector": ("ocr_dbnet*.toml", check_detector), "score": ("ocr_boxes*.toml", check_score),
            "sadtalker": ("sadtalker_*.toml", check_sadtalker)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--verbose", action="store_true", help="every tensor of STDiT3, not only the worst one")
    args = parser.parse_args()
    good = True
    for name in args.only:
        pattern, check = FAMILIES[name]
        if not any(args.golden.glob(pattern)):
            good = say(name, False, f"{args.golden} has no case {pattern}")
            continue
        good &= check(args.golden, args.verbose)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
