#!/usr/bin/env python3
"""What a user would run instead, on the same GPU: the STDiT3 of stdit3.py in PyTorch, SDPA, torch.compile, fused AdamW.

    torch_step.py DECK.toml --shape 1x15x60x106 [--captions 300] [--steps 10] [--warmup 5] [--precision bf16|autocast]
                  [--no-compile] [--device cuda|cpu] --json FILE

The same noise shapes and model as `weft bench step DECK.toml --shape ...`; weights and inputs are random on both sides
(agreement of the numbers is the business of check_golden.py and of weft probe). `bf16` keeps the weights themselves in bf16, which
is the fastest that PyTorch offers and leaves out the float32 master weights that weft keeps; `autocast` has them. Timed
with CUDA events: forward, backward, gradient norm and clipping, AdamW. `--device cpu` is for rehearsals.
"""
import argparse
import json
import pathlib
import sys
import time
import tomllib

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import rflow  # noqa: E402
import stdit3  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deck")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--captions", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--precision", choices=["bf16", "autocast"], default="bf16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()

    with open(args.deck, "rb") as f:
        deck = tomllib.load(f)["model"]
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    known = {k: v for k, v in deck.items() if k in stdit3.Config.__dataclass_fields__}
    with torch.device(args.device):
        model = stdit3.STDiT3(stdit3.Config(**known)).to(dtype).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    b, t, h, w = (int(n) for n in args.shape.split("x"))
    x = torch.randn(b, deck["in_channels"], t, h, w, device=args.device)
    conditions = {"y": torch.randn(b, 1, args.captions, deck["caption_channels"], device=args.device, dtype=dtype),
                  "mask": torch.ones(b, args.captions, dtype=torch.long, device=args.device),
                  "fps": torch.full((b,), 24.0, device=args.device),
                  "height": torch.full((b,), 8.0 * h, device=args.device),
                  "width": torch.full((b,), 8.0 * w, device=args.device)}
    noise, tau = torch.randn_like(x), torch.full((b,), 500.0, device=args.device)
    # Block by block: compiled once for all of them, in seconds. The whole model took more than four minutes (PyTorch 2.11).
    for block in () if args.no_compile else (*model.spatial_blocks, *model.temporal_blocks):
        block.compile()

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "autocast"):
            loss = rflow.losses(model, x.to(dtype), noise.to(dtype), tau, **conditions).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def timed():
        if args.device != "cuda":
            began = time.perf_counter()
            return step(), time.perf_counter() - began
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss = step()
        end.record()
        end.synchronize()
        return loss, begin.elapsed_time(end) * 1e-3

    seconds, losses = [], []
    for i in range(args.warmup + args.steps):
        loss, took = timed()
        if i >= args.warmup:
            seconds.append(took)
        losses.append(float(loss.detach()))
    cuda = args.device == "cuda"
    result = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu",
              "precision": args.precision, "compiled": not args.no_compile, "shape": args.shape, "seconds": seconds,
              "loss": losses, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0}
    pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"torch {args.precision}{'' if args.no_compile else ' compiled'}: median "
          f"{sorted(seconds)[len(seconds) // 2]:.4f} s, peak {result['peak_bytes'] / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
