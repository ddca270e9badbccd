#!/usr/bin/env python3
"""What a user would run instead: training steps of reference/stdit3.py in PyTorch, each timed.

    torch_step.py DECK.toml --shape 1x15x60x106 [--captions 300] [--steps 10] [--warmup 5] [--precision bf16|autocast|f32]
                  [--no-compile] [--device cuda|cpu] --json FILE
    torch_step.py DECK.toml --weights W --inputs I [--outputs O] [--compile] [--precision f32|autocast] [--profile] ... --json FILE

With --shape (gpu/check.sh): noise shapes and model as `weft bench step DECK.toml --shape ...`, weights and inputs random on both
sides; SDPA, blocks compiled, gradient norm and clipping, fused AdamW. `bf16` keeps the weights themselves in bf16, which is the
fastest that PyTorch offers and leaves out the float32 master weights that weft keeps; `autocast` has them. On a GPU timed with CUDA
events.

With --weights and --inputs (compare_step.py): the deck's training step as it is, on the CPU, without clipping. O holds the
weights after all steps, warm-up too, and as first_gradient/NAME the gradients of the first.
"""
import argparse
import json
import pathlib
import sys
import time
import tomllib

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import workers  # noqa: E402
from reference import rflow, safetensors_io, stdit3  # noqa: E402


def random_inputs(args, model):
    b, t, h, w = (int(n) for n in args.shape.split("x"))
    x = torch.randn(b, model["in_channels"], t, h, w)
    return {"x": x, "noise": torch.randn_like(x), "timestep": torch.full((b,), 500.0),
            "y": torch.randn(b, 1, args.captions, model["caption_channels"]), "mask": torch.ones(b, args.captions, dtype=torch.long),
            "fps": torch.full((b,), 24.0), "height": torch.full((b,), 8.0 * h), "width": torch.full((b,), 8.0 * w)}


def timed(step, cuda):
    if not cuda:
        began = time.perf_counter()
        return step(), time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    loss = step()
    end.record()
    end.synchronize()
    return loss, begin.elapsed_time(end) * 1e-3


def profile(step, steps):
    """The operations that take the time: seconds of their own and calls a step, in order of time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
    rows = [{"op": e.key, "seconds": e.self_cpu_time_total * 1e-6 / steps, "calls": e.count / steps} for e in trace.key_averages()]
    return sorted(rows, key=lambda row: -row["seconds"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deck", type=pathlib.Path)
    parser.add_argument("--shape")
    parser.add_argument("--captions", type=int, default=300)
    parser.add_argument("--weights", type=pathlib.Path)
    parser.add_argument("--inputs", type=pathlib.Path)
    parser.add_argument("--outputs", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--precision", choices=["bf16", "autocast", "f32"], default="bf16")
    parser.add_argument("--no-compile", action="store_true", help="with --shape")
    parser.add_argument("--compile", action="store_true", help="with --weights")
    parser.add_argument("--profile", action="store_true", help="adds `operations` to the JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    args = parser.parse_args()
    if bool(args.shape) == bool(args.weights):
        parser.error("either --shape, or --weights and --inputs")
    deck = tomllib.loads(args.deck.read_text())
    train, cuda = deck.get("train", {}), args.device == "cuda"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    if args.weights:
        torch.set_num_threads(deck["run"]["threads"])
        model = stdit3.build(deck["model"], safetensors_io.load(args.weights), dtype).train()
        inputs = stdit3.to_torch(safetensors_io.load(args.inputs), dtype)
    else:
        known = {k: v for k, v in deck["model"].items() if k in stdit3.Config.__dataclass_fields__}
        with torch.device(args.device):
            model = stdit3.STDiT3(stdit3.Config(**known)).to(dtype).train()
            inputs = {k: v.to(dtype) if k in ("x", "noise", "y") else v for k, v in random_inputs(args, deck["model"]).items()}
    if compiled := args.compile if args.weights else not args.no_compile:
        workers.compile_blocks(model, "Block")
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=train.get("lr", 1e-4),
        betas=(train.get("adam_beta1", 0.9), train.get("adam_beta2", 0.999)), eps=train.get("adam_eps", 1e-8),
        weight_decay=train.get("weight_decay", 0.01), fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "autocast"):
            loss = rflow.losses(model, **inputs).mean()
        loss.backward()
        if args.shape:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    seconds, losses, gradients = [], [], {}
    for i in range(args.warmup + args.steps):
        loss, took = timed(step, cuda)
        if i == 0 and args.outputs:
            gradients = {f"first_gradient/{k}": p.grad.float().numpy().copy() for k, p in model.named_parameters()
                         if p.grad is not None}
        if i >= args.warmup:
            seconds.append(took)
        losses.append(float(loss.detach()))
    result = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu", "precision": args.precision,
              "compiled": compiled, "shape": args.shape, "seconds": seconds, "loss": losses,
              "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0}
    if args.outputs:
        safetensors_io.save(args.outputs, {k: v.numpy() for k, v in model.state_dict().items()} | gradients)
    if args.profile:
        result["operations"] = profile(step, args.steps)
    args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"torch {args.precision}{' compiled' if result['compiled'] else ''}: median {sorted(seconds)[len(seconds) // 2]:.4f} s, peak "
          f"{result['peak_bytes'] / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
