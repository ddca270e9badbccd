#!/usr/bin/env python3
"""Runs the PyTorch model of this folder on golden cases and reports the relative L2 error of every output and gradient.

    check_golden.py --golden DIR [--dtype float64 float32] [--tolerance 1e-4] [--verbose]

DIR holds NAME.toml, NAME.inputs.safetensors, NAME.weights.safetensors, NAME.expected.safetensors of STDiT3 cases. What
agrees here is a reference that others may be measured against. Exit status 0 if all hold.
"""
import argparse
import pathlib
import sys
import tomllib

import numpy as np
import torch

import rflow
import safetensors_io
import stdit3


def to_torch(arrays, dtype):
    """Floating inputs in the model's dtype, the rest as they are."""
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def build(deck, weights, dtype):
    model = stdit3.STDiT3(stdit3.Config.from_deck(deck["model"])).to(dtype)
    model.load_state_dict(to_torch(weights, dtype), strict=True)
    return model.eval()  # caption dropout and drop path are random; golden cases have neither


def gradients(model, found):
    for name, p in model.named_parameters():
        if p.requires_grad:
            found["grad." + name] = p.grad


def run_forward(model, inputs):
    cotangent = inputs.pop("cotangent")
    for name in ("x", "y"):
        inputs[name].requires_grad_(True)
    out = model(**inputs)
    (out * cotangent).sum().backward()
    found = {"out": out.detach(), "grad.x": inputs["x"].grad, "grad.y": inputs["y"].grad}
    gradients(model, found)
    return found


def run_loss(model, inputs):
    loss = rflow.losses(model, **inputs)
    loss.mean().backward()
    found = {"loss": loss.detach()}
    gradients(model, found)
    return found


def run_sample(model, inputs, sampler):
    return {"samples": rflow.sample(model, inputs.pop("x"), **inputs, **sampler)}


def run_case(folder, name, dtype):
    with open(folder / f"{name}.toml", "rb") as f:
        deck = tomllib.load(f)
    model = build(deck, safetensors_io.load(folder / f"{name}.weights.safetensors"), dtype)
    inputs = to_torch(safetensors_io.load(folder / f"{name}.inputs.safetensors"), dtype)
    if "sampler" in deck:
        return run_sample(model, inputs, deck["sampler"])
    return run_loss(model, inputs) if "noise" in inputs else run_forward(model, inputs)


def relative_error(actual, expected):
    a, e = actual.numpy().astype(np.float64), expected.astype(np.float64)
    if a.shape != e.shape or not np.all(np.isfinite(a)):
        return float("inf")
    scale = np.linalg.norm(e)
    return float(np.linalg.norm(a - e) / (scale if scale > 0 else 1.0))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=pathlib.Path, required=True)
    parser.add_argument("--dtype", nargs="+", default=["float64", "float32"], choices=["float64", "float32"])
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--verbose", action="store_true", help="every tensor, not only the worst one")
    args = parser.parse_args()
    names = sorted(p.name.removesuffix(".weights.safetensors") for p in args.golden.glob("stdit3*.weights.safetensors"))
    if not names:
        sys.exit(f"{args.golden}: no stdit3*.weights.safetensors here")
    failed = False
    for dtype in args.dtype:
        for name in names:
            expected = safetensors_io.load(args.golden / f"{name}.expected.safetensors")
            found = run_case(args.golden, name, getattr(torch, dtype))
            missing = sorted(set(expected) - set(found)) + sorted(set(found) - set(expected))
            errors = {k: relative_error(found[k], expected[k]) for k in expected if k in found}
            worst = max(errors, key=errors.get)
            first = next(iter(expected))
            bad = missing or not errors[worst] <= args.tolerance
            failed |= bool(bad)
            print(f"{dtype}  {name:22} {len(errors):3} tensors  {first} {errors[first]:.1e}  "
                  f"worst {worst} {errors[worst]:.1e}  {'FAIL' if bad else 'ok'}")
            for k in missing:
                print(f"    {k}: on one side only")
            if args.verbose:
                for k, e in sorted(errors.items(), key=lambda item: -item[1]):
                    print(f"    {e:.2e}  {k}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
