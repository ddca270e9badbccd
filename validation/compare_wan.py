#!/usr/bin/env python3
"""How fast does a narrow Wan2.1 train and sample in weft beside PyTorch?

    compare_wan.py [--weft build/weft] [--what train sample] [--case a b] [--dtype f32|bf16] [--rounds 5] [--steps 6] [--warmup 3]
                   [--threads 2] [--json FILE]

Train: `weft train` on latents made in memory, beside torch_wan.py (SDPA, AdamW(fused=True), eager and with every block compiled): forward,
backward, norm and clipping of the gradient, AdamW. Sample: a step of `weft generate` (the seconds of clips of many steps less
those of few, over the steps between: no VAE, no start), beside torch_wan.py's guided Euler step. With --dtype bf16 weft in bf16
beside autocast. Each side is a process; they run in turn, and the median step counts, without the first ones.

Captions are a few tokens of TEXT_LEN rows, all of which are keys for PyTorch, as in the original. The losses of both sides on one
batch are compared first; that the network is right in every detail is what the golden cases show.
"""
import dataclasses
import pathlib
import statistics
import sys
import tempfile

import numpy as np
import torch

import common
import torch_wan
from reference import safetensors_io

import tiny_models  # of tests/e2e, by common's path

TEXT_LEN, TEXT_DIM = 24, 16
T5 = {"d_model": TEXT_DIM, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 2, "vocab_size": 144, "max_length": TEXT_LEN,
      "weights": "t5"}
CHANNELS, FEW_STEPS = 16, 2
TRAIN = {"lr": 1e-4, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "grad_clip": 1.0,
         "warmup_steps": 0, "ema_decay": 0.0}
LOSS_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    what: str
    hidden_size: int
    depth: int
    num_heads: int
    ffn_dim: int
    batch: int
    frames: int = 5
    side: int = 32  # of the latent: a quarter as many tokens a frame

    @property
    def model(self):
        return {"in_channels": CHANNELS, "hidden_size": self.hidden_size, "depth": self.depth, "num_heads": self.num_heads,
                "ffn_dim": self.ffn_dim, "text_dim": TEXT_DIM, "text_len": TEXT_LEN}

    def torch_case(self, args, folder, what):
        return {"model": self.model, "weights": str(folder / "weights.safetensors"), "what": what, "train": TRAIN,
                "latent": [self.batch if what == "train" else 1, CHANNELS, self.frames, self.side, self.side],
                "threads": args.threads, "autocast": args.dtype == "bf16", "warmup": args.warmup}


CASES = {case.name: case for case in (
    Case("a", "C=384, 6 blocks, 3 heads, 1280 tokens, batch 2", 384, 6, 3, 2240, 2),
    Case("b", "C=1536, 1 block, 12 heads, 1280 tokens, batch 1", 1536, 1, 12, 8960, 1),
)}


def write(case, args, folder):
    """Weights, a text encoder and the deck of training and sampling; the model."""
    torch.manual_seed(1)
    model = torch_wan.build(case.model)
    safetensors_io.save(folder / "weights.safetensors", common.arrays_of(model))
    tiny_models.write_t5(folder / "t5", umt5=True)
    pixels = 8 * case.side
    (folder / "deck.toml").write_text(common.toml({
        "run": {"threads": args.threads, "dir": "run"},
        "model": {"name": "wan", "weights": "weights.safetensors"} | case.model,
        "data": {"path": f"synthetic:latent=1,channels={CHANNELS},clips=64,frames={case.frames},height={case.side},"
                         f"width={case.side}"},
        "train": TRAIN | {"batch_size": case.batch, "micro_batches": 1, "steps": args.warmup + args.steps, "checkpoint_every": 0},
        "vae": {"weights": "random:1", "filters": 8, "num_res_blocks": 1}, "t5": T5,
        "generate": {"weights": "weights.safetensors", "image_size": [pixels, pixels], "num_frames": str(4 * case.frames - 3),
                     "num_samples": 3, "output": "out", "prompts": ["a cat and a dog"], "negative_prompt": "blue"}}))
    return model


def same_losses(case, args, folder, model):
    """Relative difference of the two sides' losses of a batch in float32."""
    size = (1, CHANNELS, case.frames, case.side, case.side)
    x, noise, sigma = torch.randn(size), torch.randn(size), 0.37
    text = torch.zeros(1, TEXT_LEN, TEXT_DIM)
    text[:, :3] = torch.randn(1, 3, TEXT_DIM)
    ours = common.probe(args.weft, folder, "loss",
                        {"x": x, "noise": noise, "timestep": np.array([1000 * sigma], np.float32), "context": text,
                         "context_lens": np.array([3])}, "--device", "cpu", deck=common.toml({"model": {"name": "wan"} | case.model}),
                        weights=folder / "weights.safetensors")["loss"][0]
    grid = [case.frames, case.side // 2, case.side // 2]
    with torch.no_grad():
        out = model(torch.lerp(x, noise, sigma), torch.tensor([1000 * sigma]), text,
                    torch_wan.rope_table(grid, case.hidden_size // case.num_heads))
        theirs = float((out - (noise - x)).square().mean())
    return abs(float(ours) - theirs) / theirs


def train(args, folder):
    with tempfile.TemporaryDirectory(dir=folder) as run:
        common.run([args.weft, "train", "deck.toml", f"run.dir={run}", "run.resume=false", f"model.dtype={args.dtype}"], args.threads,
                   folder)
        return [step["seconds"] for step in common.json_lines(f"{run}/metrics.jsonl") if "loss" in step][args.warmup:]


def sample(args, folder):
    def clip(steps):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            common.run([args.weft, "generate", "deck.toml", f"generate.output={out}/clips", f"sampler.steps={steps}",
                        f"model.dtype={args.dtype}"], args.threads, folder)
            return statistics.median(c["seconds"] for c in common.json_lines(f"{out}/clips/generated.jsonl"))

    return [(clip(FEW_STEPS + args.steps) - clip(FEW_STEPS)) / args.steps]


def limit(what, args, folder):
    """Of a step."""
    def job(steps):
        with tempfile.TemporaryDirectory(dir=folder) as out:
            options = ([f"run.dir={out}", "run.resume=false", f"train.steps={steps}"] if what == "train" else
                       [f"generate.output={out}/clips", "generate.num_samples=1", f"sampler.steps={steps}"])
            return common.run([args.weft, "train" if what == "train" else "generate", "deck.toml", f"model.dtype={args.dtype}",
                               "run.profile=operations", *options], args.threads, folder)

    return common.limit_of(job, 2, 6)


def measure(case, what, args):
    with tempfile.TemporaryDirectory(prefix="weft-wan-") as name:
        folder = pathlib.Path(name)
        loss = same_losses(case, args, folder, write(case, args, folder))
        others = {name: common.Workers("torch_wan.py", case.torch_case(args, folder, what) | {"compiled": "compiled" in name}, folder,
                                       name.replace(" ", "_"), threads=args.threads) for name in ("torch", "torch compiled")}
        ours = train if what == "train" else sample
        sides = {"weft": lambda: ours(args, folder)}
        sides |= {name: lambda other=other: other.run(args.steps)["seconds"] for name, other in others.items()}
        seconds = common.in_turn(sides, args.rounds)
        for other in others.values():
            other.stop()
        least = limit(what, args, folder)
    medians = common.medians(seconds)
    theirs = {name: medians[name] for name in others}
    ratio = min(theirs.values()) / medians["weft"]
    print(f"({case.name}) {case.what}, {what}, {args.dtype}: " + ", ".join(f"{k} {v:.4f} s a step" for k, v in medians.items())
          + f"; PyTorch takes {ratio:.2f}x; losses differ by {loss:.1e}")
    names = {"train": "training step", "sample": "guided sampling step"}
    row = common.row(f"{names[what]}, Wan2.1 of C = {case.hidden_size}, {args.dtype}", medians["weft"], least, theirs)
    return {"case": case.name, "what": what, "dtype": args.dtype, "seconds": seconds, "median": medians, "ratio": ratio,
            "loss_difference": loss, "row": row}


def main():
    parser = common.parser(__doc__, rounds=5, steps=6, warmup=3, threads=2)
    parser.add_argument("--what", nargs="+", default=["train", "sample"], choices=["train", "sample"])
    parser.add_argument("--case", nargs="+", default=sorted(CASES), choices=sorted(CASES))
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    args = common.parse(parser)
    facts = common.about(args)
    results = [measure(CASES[name], what, args) for what in args.what for name in args.case]
    rows = [result["row"] for result in results]
    common.show_rows(rows)
    common.write(args, facts, {"cases": results, "rows": rows})
    return 1 if any(r["loss_difference"] > LOSS_TOLERANCE for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
