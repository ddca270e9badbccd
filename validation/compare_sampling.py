#!/usr/bin/env python3
"""How fast does `weft generate` sample a clip beside PyTorch with the same model?

    compare_sampling.py [--weft build/weft] [--case a b] [--dtype f32|bf16] [--rounds 3] [--clips 3] [--steps 10] [--threads 2]
                        [--vae] [--json FILE]

The models of compare_step.py, but on pixels, so that no VAE takes part: T=5, 32x32, guidance 7, captions of some 20 tokens. With
--vae on latents, which the VAE of the released shape (random weights) decodes to 17 frames of 256x256. Each side runs in
processes of its own, in turn: weft, and PyTorch (reference/stdit3.py, rflow.sample) under no_grad, eager and with its blocks
compiled; with --dtype bf16 weft in bf16 and in float32 beside autocast. The seconds of a clip count, without the first clip of a
process. That both make the same clips is what check_generate.py shows.
"""
import argparse
import json
import pathlib
import sys
import tempfile
import time

import torch

import common
import compare_step
import workers
from reference import rflow, safetensors_io, stdit3, vae

SIDE, FRAMES, TOKENS, GUIDANCE, WARMUP = 32, 5, 32, 7.0, 1
DECODED_FRAMES, REDUCED = 17, 8  # what FRAMES latents decode to, and in the plane
T5 = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 2, "vocab_size": 144, "max_length": TOKENS,
      "weights": "t5"}
PROMPT = "a cat and a dog on a roof"


def model_of(case, args):
    return case.model | {"in_channels": 4 if args.vae else 3, "caption_channels": T5["d_model"], "model_max_length": TOKENS}


def size_of(args):
    return (SIDE * REDUCED, DECODED_FRAMES) if args.vae else (SIDE, FRAMES)


def write(case, folder, args):
    import tiny_models
    safetensors_io.save(folder / "weights.safetensors", common.arrays_of(stdit3.drawn(model_of(case, args))))
    tiny_models.write_t5(folder / "t5")
    side, frames = size_of(args)
    (folder / "deck.toml").write_text(common.toml({
        "run": {"threads": args.threads, "dir": "run"}, "model": {"name": "stdit3"} | model_of(case, args),
        "t5": T5, "sampler": {"steps": args.steps, "cfg_scale": GUIDANCE}, "vae": {"weights": "random:1" if args.vae else ""},
        "generate": {"weights": "weights.safetensors", "image_size": [side, side], "num_frames": str(frames),
                     "num_samples": WARMUP + args.clips, "output": "out", "prompts": [PROMPT]}}))


def run_weft(folder, args, dtype):
    with tempfile.TemporaryDirectory(dir=folder) as out:
        common.run([args.weft, "generate", "deck.toml", f"model.dtype={dtype}", f"vae.dtype={dtype}", f"generate.output={out}/clips"],
                   args.threads, folder)
        return [clip["seconds"] for clip in common.json_lines(f"{out}/clips/generated.jsonl")][WARMUP:]


def limit(folder, args):
    """Of a clip."""
    def job(clips):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            return common.run([args.weft, "generate", "deck.toml", f"model.dtype={args.dtype}", f"vae.dtype={args.dtype}",
                               f"generate.output={out}/clips", f"generate.num_samples={clips}", "run.profile=operations"],
                              args.threads, folder)

    return common.limit_of(job)


def torch_side(folder, case, args):
    """In a process of its own: prints the seconds of each clip."""
    torch.set_num_threads(args.threads)
    model = stdit3.build(model_of(case, args), safetensors_io.load(folder / "weights.safetensors"))
    mask = torch.zeros(1, TOKENS, dtype=torch.int64)
    mask[:, :len(PROMPT)] = 1  # the stand-in's tokens are letters
    (side, frames), one, dtype = size_of(args), torch.ones(1), torch.bfloat16 if args.autocast else torch.float32
    codec = vae.Codec(dtype) if args.vae else None
    if args.compiled:
        workers.compile_blocks(model, "Block")
        for part in (codec.two_d, codec.temporal) if codec else ():
            workers.compile_blocks(part, *vae.BLOCKS)
    seconds = []
    for _ in range(WARMUP + args.clips):
        z, y = torch.randn(1, model.config.in_channels, FRAMES, SIDE, SIDE), torch.randn(1, 1, TOKENS, T5["d_model"])
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            z = rflow.sample(model, z, y, mask, 24 * one, side * one, side * one, frames * one, args.steps, GUIDANCE)
        if codec:
            with torch.inference_mode():
                codec.decode(z.to(dtype), frames)
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds[WARMUP:]))


def run_torch(folder, case, args, autocast, compiled):
    flags = [flag for flag, wanted in (("--autocast", autocast), ("--compiled", compiled), ("--vae", args.vae)) if wanted]
    said = common.run([sys.executable, __file__, "--weft", args.weft, "--torch-side", folder, "--case", case.name, "--clips", args.clips,
                       "--steps", args.steps, "--threads", args.threads, *flags], args.threads)
    return json.loads(said.splitlines()[-1])


def measure(case, args):
    ours, theirs = ("weft bf16", "torch autocast") if args.dtype == "bf16" else ("weft", "torch")
    with tempfile.TemporaryDirectory(prefix="weft-sampling-") as name:
        folder = pathlib.Path(name)
        write(case, folder, args)
        sides = {"weft": lambda: run_weft(folder, args, "f32")}
        if args.dtype == "bf16":
            sides[ours] = lambda: run_weft(folder, args, "bf16")
        for compiled in (False, True):
            sides[theirs + " compiled" * compiled] = lambda compiled=compiled: run_torch(folder, case, args, args.dtype == "bf16",
                                                                                         compiled)
        seconds = common.in_turn(sides, args.rounds)
        least = limit(folder, args)
    medians = common.medians(seconds)
    row = common.row(f"a clip{' and its VAE' * args.vae}, {args.steps} steps, STDiT3 of C = {case.hidden_size}, {args.dtype}",
                     medians[ours], least, {name: m for name, m in medians.items() if "torch" in name})
    print(f"({case.name}) a clip, {args.steps} steps: " + ", ".join(f"{k} {v:.3f} s" for k, v in medians.items()))
    return {"case": case.name, "what": case.what, "seconds": seconds, "median": medians, "row": row}


def main():
    parser = compare_step.add_arguments(common.parser(__doc__, rounds=3, clips=3, steps=10, threads=2))
    parser.add_argument("--vae", action="store_true", help="decode what is sampled")
    parser.add_argument("--torch-side", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--autocast", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    args = common.parse(parser)
    cases = [compare_step.CASES[name] for name in args.case]
    if args.torch_side:
        torch_side(args.torch_side, cases[0], args)
        return 0
    facts = common.about(args)
    results = [measure(case, args) for case in cases]
    rows = [result["row"] for result in results]
    common.show_rows(rows)
    common.write(args, facts, {"cases": results, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
