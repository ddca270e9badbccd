#!/usr/bin/env python3
"""Does model.dtype = "fp8" compute what PyTorch does with torch.float8_e4m3fn?

    check_fp8.py [--weft build/weft] [--steps 200] [--starts 2] [--threads 2] [--json FILE]

1. A linear layer, forward and the gradient of its input (weft_probe fp8_linear), beside a restatement: operands times a power
   of two of their own, to float8_e4m3fn and back, then a product in float64. Rounded to bf16 once, so nearly all results are
   equal, and none is further than one unit in the last place of bf16. With the unit matrix as weights the result is the rounded
   operand: equal to the bit.
2. A forward and backward of a small STDiT3 (weft_probe forward --backward) beside the PyTorch model whose blocks have such
   layers. Where bf16 activations differ in their last bit, a byte of e4m3 may differ: the sides are held to three quarters
   of what fp8 itself changes; of roundings that have nothing to do with each other it would be 1.4.
3. Losses of a training in fp8 follow those in f32 as well as losses from other initial weights do (check_bf16.py has the
   criterion and the deck). --steps 0 leaves this out.

Exit status 0 if all hold.
"""
import functools
import pathlib
import sys
import tempfile

import numpy as np
import torch

import check_bf16
import common
from reference import stdit3

MODEL = {"in_channels": 4, "hidden_size": 96, "depth": 2, "num_heads": 4, "caption_channels": 32, "model_max_length": 12}


def scale_of(x):
    """The greatest power of two that keeps x within 448, at most 2^117."""
    finite = x[torch.isfinite(x)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    power = 117 if largest == 0 else min(int(np.floor(np.log2(448 / largest))), 117)
    return 2.0 ** power


def to_bf16(x):
    return x.to(torch.bfloat16).double()


def to_e4m3(x):
    """Of bf16 values, as float64."""
    s = scale_of(x)
    return (x * s).float().to(torch.float8_e4m3fn).double() / s


# ---- 1. A layer

def layer(weft, folder, m, n, k, size):
    draw = np.random.default_rng(m)
    x, w, bias, dy = (draw.standard_normal(s).astype(np.float32) for s in ((m, k), (n, k), (n,), (m, n)))
    x, w, dy = (to_bf16(torch.tensor(a)).numpy().astype(np.float32) for a in (size * x, w / np.sqrt(k), 1e-4 * dy))
    made = common.probe(weft, folder, "fp8_linear", {"x": x, "w": w, "bias": bias, "dy": dy})
    x8, w8, dy8 = (to_e4m3(torch.tensor(a).double()) for a in (x, w, dy))
    wanted = {"y": x8 @ w8.T + torch.tensor(bias).double(), "dx": dy8 @ w8}
    result = {"shape": [m, n, k]}
    for name, exact in wanted.items():
        got, nearest = torch.tensor(made[name]).double(), to_bf16(exact)
        # Sums in f32 may fall on the other side of a tie; near zero, where terms cancel, they are off by parts of the terms.
        unit = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp_min(1e-30))) - 7) + 1e-6 * exact.abs().max()
        result[name] = {"equal": float((got == nearest).double().mean()),
                        "units": float(((got - exact).abs() / unit).max())}
    return result


def rounding_differs(weft, folder):
    """Operands of many sizes through a product with the unit matrix: how many differ in a bit."""
    k, draw = 32, np.random.default_rng(5)
    x = (draw.standard_normal((64, k)) * 2.0 ** draw.integers(-24, 3, (64, k))).astype(np.float32)
    x = to_bf16(torch.tensor(x)).numpy().astype(np.float32)
    one, zero = np.eye(k, dtype=np.float32), np.zeros(k, np.float32)
    made = common.probe(weft, folder, "fp8_linear", {"x": x, "w": one, "bias": zero, "dy": x})
    wanted = to_e4m3(torch.tensor(x).double()).numpy()
    return sum(int((made[name] != wanted).sum()) for name in ("y", "dx"))


# ---- 2. A model

class Rounded(torch.autograd.Function):
    """Values and gradients rounded to bf16, as where weft stores activations."""

    @staticmethod
    def forward(_, x):
        return to_bf16(x)

    @staticmethod
    def backward(_, g):
        return to_bf16(g)


class LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, fp8, rounds_result):
        x, w = to_bf16(x), to_bf16(w)
        ctx.save_for_backward(x, w)
        ctx.rounds = to_e4m3 if fp8 else lambda v: v
        y = ctx.rounds(x) @ ctx.rounds(w).T + to_bf16(bias)
        return to_bf16(y) if rounds_result else y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = to_bf16(dy)
        rows = dy.flatten(0, -2)
        dx = to_bf16(ctx.rounds(dy) @ ctx.rounds(w))
        return dx, rows.T @ x.flatten(0, -2), rows.sum(0), None, None


class Layer(torch.nn.Module):
    """Takes the place of an nn.Linear."""

    def __init__(self, linear, fp8):
        super().__init__()
        self.weight, self.bias, self.fp8, self.rounds_result = linear.weight, linear.bias, fp8, True

    def forward(self, x):
        return LayerFunction.apply(x, self.weight, self.bias, self.fp8, self.rounds_result)


def block_forward(block, x, y, lengths, t, t0, x_mask, rotation=None):
    """As Block.forward, with what lies between its layers in bf16."""
    low = Rounded.apply
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = stdit3.modulation(block.scale_shift_table, t, t0, x_mask)
    a = block.attn(low(stdit3.modulated_norm(x, shift_a, scale_a)), rotation)
    x = low(block.residual(x, gate_a, a))
    cross = block.cross_attn
    # The residual is added before the layer's result is rounded.
    exact, cross.proj.rounds_result = cross.proj.rounds_result, False
    x = low(x + cross(x, y, lengths))
    cross.proj.rounds_result = exact
    return low(block.residual(x, gate_m, block.mlp(low(stdit3.modulated_norm(x, shift_m, scale_m)))))


def in_low_precision(model, fp8):
    """Tokens, captions and their layers in bf16, with or without fp8 products in the blocks; times and modulation as they are."""
    for name, module in list(model.named_modules()):
        for child, linear in list(module.named_children()):
            if isinstance(linear, torch.nn.Linear) and ("blocks" in name or "y_embedder" in name or "final_layer" in name):
                setattr(module, child, Layer(linear, fp8 and "blocks" in name))
    for block in [*model.spatial_blocks, *model.temporal_blocks]:
        block.forward = functools.partial(block_forward, block)
    patchify, weight = model.patchify, model.x_embedder.proj.weight

    def patchify_low(x):
        tokens, grid = patchify(to_bf16(x))
        return Rounded.apply(tokens), grid

    model.patchify = patchify_low
    with torch.no_grad():
        weight.copy_(to_bf16(weight))
    return model


def model_errors(weft, folder):
    model = stdit3.drawn(MODEL).double().eval()
    # Weights as weft has them, in f32.
    weights = {name: value.float().numpy() for name, value in model.state_dict().items()}
    draw = np.random.default_rng(3)
    B, T, H, W, L = 2, 3, 8, 12, 12
    inputs = {"x": draw.standard_normal((B, 4, T, H, W)), "timestep": np.array([130.0, 820.0]),
              "y": draw.standard_normal((B, 1, L, 32)), "fps": np.array([8.0, 24.0]), "height": np.full(B, 64.0),
              "width": np.full(B, 96.0), "cotangent": draw.standard_normal((B, 8, T, H, W))}
    inputs = {name: value.astype(np.float32) for name, value in inputs.items()}

    def of_torch(fp8):
        net = in_low_precision(stdit3.build(MODEL, weights, torch.float64), fp8)
        given = stdit3.to_torch(inputs, torch.float64)
        cotangent = given.pop("cotangent")
        out = net(**given)
        (out.double() * cotangent).sum().backward()
        return {"out": out.detach().double().numpy()} | {
            "grad." + name: p.grad.double().numpy() for name, p in net.named_parameters() if p.grad is not None}

    def of_weft(dtype):
        return common.probe(weft, folder, "forward", inputs, "--backward", "--dtype", dtype, deck=common.toml({"model": MODEL}),
                            weights=weights)

    sides = {"weft fp8": of_weft("fp8"), "weft bf16": of_weft("bf16"), "torch fp8": of_torch(True),
             "torch bf16": of_torch(False)}
    # Biases of keys have rounding noise as a gradient (README.md).
    names = [n for n in sides["torch fp8"] if n.startswith("grad.") and not n.endswith(("kv_linear.bias", "qkv.bias"))]

    def gradients(side):
        return np.concatenate([np.asarray(sides[side][n], np.float64).ravel() for n in names])

    def apart(one, other):
        a, b = gradients(one), gradients(other)
        return {"out": common.relative_error(sides[one]["out"], sides[other]["out"]), "gradients": common.relative_error(a, b),
                "cosine": float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))}

    return {f"{one}, {other}": apart(one, other) for one, other in
            (("weft fp8", "torch fp8"), ("weft bf16", "torch bf16"), ("torch fp8", "torch bf16"), ("weft fp8", "weft bf16"))}


# ---- 3. A training

def training(weft, where, a):
    (where / "deck.toml").write_text(check_bf16.DECK)
    runs = check_bf16.losses(weft, where, a.starts, a.steps, a.threads)
    runs["fp8"] = check_bf16.train(weft, where / "fp8", a.steps, a.threads, "model.dtype=fp8")
    means = {name: check_bf16.distance(runs["f32"], v) for name, v in runs.items() if name != "f32"}
    starts = [d["rms"] ** 2 for name, d in means.items() if name.startswith("start")]
    return {"means": means, "limit": float(np.sqrt(np.mean(starts))), "losses": {n: v.tolist() for n, v in runs.items()}}


def main():
    a = common.parse(common.parser(__doc__, steps=200, starts=2, threads=2))
    if 0 < a.steps < 2 * check_bf16.WINDOW or a.starts < 1:
        sys.exit(f"--steps is 0 or at least {2 * check_bf16.WINDOW}, --starts at least 1")
    facts = common.about(a)
    good, result = True, {}

    def judge(holds, text):
        nonlocal good
        good &= bool(holds)
        print(("ok    " if holds else "WRONG ") + text, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        result["layers"] = [layer(a.weft, where, *shape) for shape in
                            ((70, 48, 64, 1.0), (257, 384, 128, 50.0), (512, 1152, 4608, 1e-3), (33, 30, 50, 1.0))]
        for one in result["layers"]:
            for name in ("y", "dx"):
                f = one[name]
                judge(f["equal"] > 0.99 and f["units"] <= 1, f"layer {one['shape']} {name}: {100 * f['equal']:.2f} % of values "
                      f"equal, {f['units']:.2f} units of bf16 off at most")
        result["rounding_differs"] = rounding_differs(a.weft, where)
        judge(result["rounding_differs"] == 0, f"rounded operands: {result['rounding_differs']} of 4096 differ")

        result["model"] = errors = model_errors(a.weft, where)
        for name, e in errors.items():
            print(f"      {name}: output {e['out']:.1e} apart, gradients {e['gradients']:.1e}, cosine {e['cosine']:.5f}")
        ours, format_ = errors["weft fp8, torch fp8"], errors["torch fp8, torch bf16"]
        for name in ("out", "gradients"):
            judge(ours[name] < 0.75 * format_[name], f"STDiT3's {name}: {ours[name] / format_[name]:.2f} of what fp8 changes "
                  "(limit 0.75)")
        if a.steps > 0:
            result["training"] = t = training(a.weft, where, a)
            for name, d in t["means"].items():
                print(f"      {a.steps} steps in {name}: means over {check_bf16.WINDOW} steps {d['rms']:.1e} (rms) from f32")
            judge(t["means"]["fp8"]["rms"] <= t["limit"], f"losses in fp8: {t['means']['fp8']['rms'] / t['limit']:.2f} of what "
                  "other initial weights change (limit 1)")
    common.write(a, facts, result)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
