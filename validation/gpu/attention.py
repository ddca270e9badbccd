#!/usr/bin/env python3
"""attention.py WEFT.json [--device cuda|cpu] --json OUT.json: cuDNN's scaled-dot-product attention beside weft's, which
`weft_kernels --filter attention --json WEFT.json` has timed on the same GPU. bf16, forward and backward, milliseconds and
TFLOP/s; the ratio is cuDNN's time by weft's. PyTorch calls cuDNN here. On the CPU (to try the script): PyTorch's own, few rows.
"""
import argparse
import contextlib
import json
import sys
import time

import torch
import torch.nn.functional as F

# Sequences, heads, queries, keys, D; the beginning of weft's names of the shape: of self attention and of other attention.
SHAPES = [(15, 16, 1590, 1590, 72, "B1 T15 S1590 H16 D72"), (9, 16, 1590, 1590, 128, "B1 T9 S1590 H16 D128"),
          (1, 12, 32760, 32760, 128, "B1 N32760 H12 D128 keys 32760"), (1, 12, 32760, 101, 128, "B1 N32760 H12 D128 keys 101"),
          (1, 16, 23850, 300, 72, "B1 N23850 H16 D72 captions 300")]


def cudnn():
    from torch.nn.attention import SDPBackend, sdpa_kernel  # PyTorch 2.5
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def milliseconds(run, cuda):
    for _ in range(3):
        run()
    times = []
    for _ in range(7):
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weft")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    with open(args.weft, encoding="utf-8") as file:
        cases = [c for c in json.load(file)["cases"] if c["dtype"] == "bf16" and "attention" in c["op"]]
    rows, missing = [], 0
    for sequences, heads, queries, keys, d, name in SHAPES:
        if not cuda:
            sequences, queries, keys = 1, min(queries, 64), min(keys, 64)
        q, k, v = (torch.randn(sequences, heads, n, d, device=args.device, dtype=torch.bfloat16, requires_grad=True)
                   for n in (queries, keys, keys))
        dout = torch.randn_like(q)
        with cudnn() if cuda else contextlib.nullcontext():
            forward = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v), cuda)
            out = F.scaled_dot_product_attention(q, k, v)
            backward = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), cuda)
        for kind, ms, products in (("forward", forward, 2), ("backward", backward, 5)):
            ours = [1e3 * c["seconds"] for c in cases if c["op"].endswith(kind) and c["shape"].startswith(name)]
            missing += not ours
            rows.append({"shape": name, "pass": kind, "cudnn_ms": ms, "weft_ms": min(ours, default=None),
                         "cudnn_tflops": 2e-9 * products * sequences * heads * queries * keys * d / ms})
            print(f"{name:34} {kind:9} cuDNN {ms:8.3f} ms, {rows[-1]['cudnn_tflops']:6.1f} TFLOP/s"
                  + (f", weft {min(ours):8.3f} ms, {ms / min(ours):.2f} x as fast" if ours else ", weft: not in the file"))
    with open(args.json, "w", encoding="utf-8") as file:
        json.dump({"device": torch.cuda.get_device_name() if cuda else "CPU", "torch": torch.__version__, "rows": rows}, file, indent=1)
    # Small sizes, as the CPU has them, have other names.
    sys.exit(cuda and missing > 0)


main()
