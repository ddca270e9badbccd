#!/usr/bin/env python3
"""Does `weft animate` make the frames that the original's arithmetic makes, from the picture and the speech to the pixels?

    check_animate.py [--weft build/weft] [--clips NAME ...] [--seed 1] [--device cpu] [--threads 2] [--keep DIR]
                        [--output FILE.json]

A drawn face, speech and weights (reference/sadtalker_inputs.py, widths of sadtalker.SMALL) go through one run of `weft animate`
and through reference/sadtalker_chain.py, which is given the blinking and the noise that weft draws of the clip's seed. Frames are
compared before they are encoded (animate.keep_frames): the mean difference of every frame is at most TOLERANCE levels of
255. Clips cover all five kinds of preprocessing and every key that changes pixels. A clip whose frames hardly differ from
each other would show nothing, so that fails, too. Exit status 0 if all hold.
"""
import json
import pathlib
import sys
import tempfile
import time

import cv2
import numpy as np
import torch
import xxhash

import common
from reference import sadtalker, sadtalker_chain, sadtalker_inputs

TOLERANCE = 1.0  # levels of 255, of a frame's mean
LEAST_MOTION = 0.5  # of neighbouring frames' mean difference, over a clip
# Frames, and what the clip's row says.
CLIPS = {
    "crop": (26, {}), "extcrop": (12, {"preprocess": "extcrop"}), "resize_128": (5, {"preprocess": "resize", "size": 128}),
    "full": (12, {"preprocess": "full", "picture": "edge.png"}), "extfull_128": (5, {"preprocess": "extfull", "size": 128}),
    "still": (8, {"still": True}), "full_still_strong": (8, {"preprocess": "full", "still": True, "expression_scale": 1.6}),
    "camera": (9, {"picture": "edge.png", "input_yaw": [-20, 30, 0], "input_pitch": [8], "input_roll": [-5, 10]}),
    "style_two_calls": (36, {"pose_style": 17, "seed": 9}), "eyeblink": (14, {"ref_eyeblink": "blink.avi"}),
    "both_references": (14, {"ref_eyeblink": "blink.avi", "ref_pose": "pose.avi", "preprocess": "extcrop"}),
    "crop_128": (7, {"size": 128, "expression_scale": 0.5}), "crop_256": (4, {"size": 256}), "three_frames": (3, {"seed": 3})}
PICTURES = {"face.png": {}, "edge.png": {"middle": (88, 30), "seed": 6}}  # the second one's box is cut by the picture's edge
REFERENCES = {"blink.avi": sadtalker_inputs.blinking, "pose.avi": sadtalker_inputs.nodding}

REFERENCE_KEYS = ("ref_eyeblink", "ref_pose")


def seed_of(clip_seed, name):
    """Of a clip's random numbers."""
    return xxhash.xxh3_128_intdigest(f"{clip_seed} {name}".encode()) & (1 << 64) - 1


def write_deck(folder, files, options, more=None):
    """A deck for clips of these weights; `options` are the widths. Its path."""
    tables = {"sadtalker": dict(options), "animate": {"output": "out", "weights": files["sadtalker"].name,
              "mapping_weights": files["mapping"].name, "mapping_full_weights": files["mapping_full"].name,
              "detector_weights": files["detector"].name, "landmark_weights": files["landmarks"].name}}
    tables = {"model": {"name": "sadtalker"}} | tables
    for table, keys in (more or {}).items():
        tables[table] = tables.get(table, {}) | keys
    (folder / "deck.toml").write_text(common.toml(tables))
    return folder / "deck.toml"


def run_weft(args, folder, clips):
    with open(folder / "clips.jsonl", "w") as out:
        for name, (frames, row) in clips.items():
            sadtalker_inputs.write_wav(folder / f"{name}.wav", sadtalker_inputs.speech(frames / 25, args.seed))
            said = {"name": name, "picture": "face.png", "speech": f"{name}.wav", "seed": args.seed} | row
            out.write(json.dumps(said) + "\n")
    began = time.monotonic()
    common.run([args.weft, "animate", "deck.toml", f"device.kind={args.device}", f"run.threads={args.threads}"], args.threads, folder)
    return time.monotonic() - began


def read_frames(folder):
    return [cv2.imread(str(p))[:, :, ::-1] for p in sorted(folder.glob("*.png"))]


def compare(name, got, wanted):
    if len(got) != len(wanted) or got[0].shape != wanted[0].shape:
        shape = got[0].shape if got else None
        print(f"{name:18} {len(got)} frames of {shape}, expected {len(wanted)} of {wanted[0].shape}  FAIL")
        return {"failed": "other frames"}
    apart = np.stack([np.abs(a.astype(int) - b) for a, b in zip(got, wanted)])
    means = apart.mean((1, 2, 3))
    motion = float(np.abs(np.diff(np.stack(wanted).astype(int), axis=0)).mean())
    result = {"frames": len(got), "shape": list(got[0].shape), "mean_difference": float(means.mean()),
              "worst_frame": float(means.max()), "largest_difference": int(apart.max()),
              "equal_values": float((apart == 0).mean()), "motion": motion}
    good = means.max() <= TOLERANCE and motion >= LEAST_MOTION
    height, width = got[0].shape[:2]
    print(f"{name:18} {len(got):3} frames of {width}x{height}: mean difference {means.mean():.5f} levels, worst frame "
          f"{means.max():.5f}, largest {apart.max()}; motion {motion:.1f}  {'ok' if good else 'FAIL'}", flush=True)
    return result | ({} if good else {"failed": "difference" if motion >= LEAST_MOTION else "no motion"})


def check(args, folder):
    clips = {n: CLIPS[n] for n in args.clips}
    pictures = {file: sadtalker_inputs.face(**how) for file, how in PICTURES.items()}
    for file, picture in pictures.items():
        sadtalker_inputs.write_png(folder / file, picture)
    for file, frames in REFERENCES.items():
        sadtalker_inputs.write_video(folder / file, frames())
    widths = sadtalker.SMALL | {"fan_num_modules": 2}
    files = {name: folder / file for name, file in sadtalker_inputs.FILES.items()}
    if not all(path.exists() for path in files.values()):
        sadtalker_inputs.write_weights(folder, widths, args.seed)
    write_deck(folder, files, widths | {"size": 64}, {"animate": {"input": "clips.jsonl", "keep_frames": True}})
    seconds = run_weft(args, folder, clips)
    chains, results = {}, {}
    for name, (frames, row) in clips.items():
        full = "full" in row.get("preprocess", "")
        if full not in chains:
            chains[full] = sadtalker_chain.Chain(files | ({"mapping": files["mapping_full"]} if full else {}),
                                                 widths | {"mapping_coeff_nc": 73 if full else 70})
        samples = sadtalker_chain.read_wav(folder / f"{name}.wav")
        noise = sadtalker_chain.drawn(frames, seed_of(row.get("seed", args.seed), name))
        references = [REFERENCES[row[r]]() if r in row else None for r in REFERENCE_KEYS]
        picture = pictures[row.get("picture", "face.png")]
        settings = {"size": 64} | {k: v for k, v in row.items() if k not in ("picture", "seed", *REFERENCE_KEYS)}
        wanted = chains[full].animate(picture, samples, *noise, settings, *references)
        results[name] = {"row": row} | compare(name, read_frames(folder / "out" / f"{name}_frames"), wanted)
    return seconds, results


def main():
    parser = common.parser(__doc__, seed=1, threads=2)
    parser.add_argument("--clips", nargs="+", default=list(CLIPS), choices=list(CLIPS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", type=pathlib.Path, help="folder to leave everything in; weights that lie there are taken")
    args = common.parse(parser)
    facts = common.about(args, "cv2", "numpy")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seconds, results = check(args, folder)
    failed = [name for name, r in results.items() if "failed" in r]
    print(f"{len(results) - len(failed)} of {len(results)} clips hold; weft took {seconds:.0f} s")
    common.write(args, facts, {"widths": "sadtalker.SMALL", "tolerance": TOLERANCE, "clips": results})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
