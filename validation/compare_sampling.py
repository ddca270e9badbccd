#!/usr/bin/env python3
"""How fast does `weft generate` sample a clip beside PyTorch with the same model?

    compare_sampling.py [--weft build/weft] [--case a b] [--dtype f32|bf16] [--rounds 3] [--clips 3] [--steps 10] [--threads 2]
                        [--vae] [--results DIR | --no-results]

The models of compare_step.py, but on pixels, so that no VAE takes part: T=5, 32x32, guidance 7, captions of some 20 tokens. With
--vae on latents, which the VAE of the released shape (random weights, compare_vae.py) decodes to 17 frames of 256x256.
Each side runs in processes of its own, in turn: weft, and PyTorch (stdit3.py, rflow.sample) under no_grad; with --dtype bf16
weft in bf16 and in float32 beside autocast. The seconds of a clip count, without the first clip of a process. That both make
the same clips is what check_generate.py shows.
"""
import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import compare_step
import compare_vae
import rflow
import safetensors_io
import step_cases
import stdit3

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "e2e"))
import tiny_models  # noqa: E402

SIDE, FRAMES, TOKENS, GUIDANCE, WARMUP = 32, 5, 32, 7.0, 1
DECODED_FRAMES, REDUCED = 17, 8  # what FRAMES latents decode to, and in the plane
T5 = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 2, "vocab_size": 144, "max_length": TOKENS,
      "weights": "t5"}
PROMPT = "a cat and a dog on a roof"


def model_of(case, args):
    return case.model | {"in_channels": 4 if args.vae else 3, "caption_channels": T5["d_model"]}


def write(case, folder, args):
    torch.manual_seed(20240617)
    model = stdit3.STDiT3(stdit3.Config.from_deck(model_of(case, args)))
    for p in model.parameters():
        if p.requires_grad and not p.any():
            torch.nn.init.normal_(p, std=0.02)
    safetensors_io.save(folder / "weights.safetensors", {k: v.numpy() for k, v in model.state_dict().items()})
    tiny_models.write_t5(folder / "t5")
    side, frames = (SIDE * REDUCED, DECODED_FRAMES) if args.vae else (SIDE, FRAMES)
    (folder / "deck.toml").write_text(step_cases.toml({
        "run": {"threads": args.threads, "dir": "run"}, "model": {"name": "stdit3"} | model_of(case, args),
        "t5": T5, "sampler": {"steps": args.steps, "cfg_scale": GUIDANCE},
        "vae": {"weights": "random:1" if args.vae else ""},
        "generate": {"weights": "weights.safetensors", "image_size": [side, side], "num_frames": str(frames),
                     "num_samples": WARMUP + args.clips, "output": "out"}}) + f'prompts = ["{PROMPT}"]\n')


def run_weft(folder, args, dtype, turn):
    out = folder / f"out-{dtype}-{turn}"
    done = subprocess.run([str(args.weft), "generate", "deck.toml", f"model.dtype={dtype}", f"vae.dtype={dtype}", f"generate.output={out}"], cwd=folder,
                          env=compare_step.environment(args.threads), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"weft generate failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in (out / "generated.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines][WARMUP:]


def torch_side(folder, case, args, autocast):
    """In a process of its own: prints the seconds of each clip."""
    torch.set_num_threads(args.threads)
    model = stdit3.STDiT3(stdit3.Config.from_deck(model_of(case, args)))
    weights = safetensors_io.load(folder / "weights.safetensors")
    model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=True)
    model.eval()
    mask = torch.zeros(1, TOKENS, dtype=torch.int64)
    mask[:, :len(PROMPT)] = 1  # the stand-in's tokens are letters
    one = torch.ones(1)
    side, frames = (SIDE * REDUCED, DECODED_FRAMES) if args.vae else (SIDE, FRAMES)
    if args.vae:
        kind = torch.bfloat16 if autocast else torch.float32
        vae = compare_vae.Torch(argparse.Namespace(threads=args.threads, tf32=False, torch_device="cpu", frames=frames, size=side,
                                                   dtype="bf16" if autocast else "f32"))
    seconds = []
    for _ in range(WARMUP + args.clips):
        z, y = torch.randn(1, model_of(case, args)["in_channels"], FRAMES, SIDE, SIDE), torch.randn(1, 1, TOKENS, T5["d_model"])
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            z = rflow.sample(model, z, y, mask, 24 * one, side * one, side * one, frames * one, args.steps, GUIDANCE)
        if args.vae:
            with torch.inference_mode():
                vae.decode(z.to(kind))
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds[WARMUP:]))


def run_torch(folder, case, args, autocast):
    done = subprocess.run([sys.executable, __file__, "--torch-side", str(folder), "--case", case.name, "--clips", str(args.clips),
                           "--steps", str(args.steps), "--threads", str(args.threads)] + (["--autocast"] if autocast else [])
                          + (["--vae"] if args.vae else []),
                          env=compare_step.environment(args.threads), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"PyTorch failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(case, args):
    sides = {"weft": lambda f, i: run_weft(f, args, "f32", i)}
    if args.dtype == "bf16":
        sides["weft bf16"] = lambda f, i: run_weft(f, args, "bf16", i)
        sides["torch autocast"] = lambda f, _: run_torch(f, case, args, True)
    else:
        sides["torch"] = lambda f, _: run_torch(f, case, args, False)
    seconds = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="weft-sampling-") as name:
        folder = pathlib.Path(name)
        write(case, folder, args)
        names = list(sides)
        for i in range(args.rounds):
            for side in names[i % len(names):] + names[:i % len(names)]:
                seconds[side] += sides[side](folder, i)
    medians = {side: statistics.median(s) for side, s in seconds.items()}
    ours, theirs = ("weft bf16", "torch autocast") if args.dtype == "bf16" else ("weft", "torch")
    result = {"case": case.name, "what": case.what, "seconds": seconds, "median": medians,
              "ratio": medians[theirs] / medians[ours]}
    print(f"({case.name}) a clip, {args.steps} steps: " + ", ".join(f"{k} {v:.3f} s" for k, v in medians.items())
          + f"; {theirs} takes {result['ratio']:.2f}x")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compare_step.add_arguments(parser, rounds=3)
    parser.add_argument("--clips", type=int, default=3, help="timed, of a process")
    parser.add_argument("--steps", type=int, default=10, help="of the sampler")
    parser.add_argument("--vae", action="store_true", help="decode what is sampled")
    parser.add_argument("--torch-side", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--autocast", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [dataclasses.replace(step_cases.CASES[name], tokens=TOKENS) for name in args.case]
    if args.torch_side:
        torch_side(args.torch_side, cases[0], args, args.autocast)
        return 0
    if not args.weft.is_file():
        sys.exit(f"{args.weft} is not there. HINT: make build, or --weft PATH")
    args.weft, args.warmup = args.weft.resolve(), WARMUP
    about = compare_step.provenance(args)
    results = [measure(case, args) for case in cases]
    if not args.no_results:
        path = compare_step.result_path(args, ("generate" if args.vae else "sampling") + ("_bf16" if args.dtype == "bf16" else ""), about)
        path.write_text(json.dumps(about | {"clips": args.clips, "cases": results}, indent=1) + "\n")
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
