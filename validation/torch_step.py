#!/usr/bin/env python3
"""The PyTorch side of compare_step.py: K training steps of the model in stdit3.py on one batch, each timed.

    torch_step.py DECK.toml --weights W --inputs I --steps K --warmup W --json FILE [--outputs O] [--fused] [--autocast]
                  [--profile]

Takes the same deck, weights and inputs as `weft bench step`, and writes the same JSON: `seconds` and `loss`, one entry a
timed step. Warm-up steps train too; O holds the weights after all warmup + K steps, and as first_gradient/NAME the
gradients of the first.
"""
import argparse
import json
import time
import tomllib

import torch

import check_golden
import rflow
import safetensors_io


def make_optimizer(model, train, fused):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=train["lr"], betas=(train["adam_beta1"], train["adam_beta2"]), eps=train["adam_eps"],
                             weight_decay=train["weight_decay"], fused=True if fused else None)


def make_step(model, optimizer, inputs, autocast):
    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = rflow.losses(model, **inputs).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def profile(step, steps):
    """The operations that take the time: {name: seconds of its own per step}, calls per step, in order of time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            step()
    rows = [{"op": e.key, "seconds": e.self_cpu_time_total * 1e-6 / steps, "calls": e.count / steps}
            for e in trace.key_averages()]
    return sorted(rows, key=lambda row: -row["seconds"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deck")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--inputs", required=True)
    parser.add_argument("--outputs")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", required=True)
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    parser.add_argument("--autocast", action="store_true", help="the forward pass under autocast to bf16")
    parser.add_argument("--profile", action="store_true", help="adds `operations` to the JSON")
    args = parser.parse_args()

    with open(args.deck, "rb") as f:
        deck = tomllib.load(f)
    torch.set_num_threads(deck["run"]["threads"])
    model = check_golden.build(deck, safetensors_io.load(args.weights), torch.float32).train()
    inputs = check_golden.to_torch(safetensors_io.load(args.inputs), torch.float32)
    step = make_step(model, make_optimizer(model, deck["train"], args.fused), inputs, args.autocast)

    result = {"seconds": [], "loss": [], "threads": torch.get_num_threads(), "torch": torch.__version__}
    for i in range(args.warmup + args.steps):
        begin = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - begin
        if i == 0 and args.outputs:
            gradients = {f"first_gradient/{k}": p.grad.float().numpy().copy() for k, p in model.named_parameters()
                         if p.grad is not None}
        result["loss"].append(float(loss.detach()))
        if i >= args.warmup:
            result["seconds"].append(seconds)
    if args.outputs:
        safetensors_io.save(args.outputs, {k: v.numpy() for k, v in model.state_dict().items()} | gradients)
    if args.profile:
        result["operations"] = profile(step, args.steps)
    with open(args.json, "w", encoding="utf-8") as f:
        json.dump(result, f)


if __name__ == "__main__":
    main()
