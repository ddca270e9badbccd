#!/usr/bin/env python3
"""Times PyTorch's convolutions at the shapes of SadTalker's renderer (256x256), f32 on the CPU.

    python3 validation/volume_torch.py [--threads 2] [--repeats 5] [--batch 1] [--only TEXT]

One line a shape: the least of the repeats' times in milliseconds and the rate in GFLOP/s of the
plain definition. Compare with `weft bench kernels --op conv_forward` at the same thread count.
With one thread the time is that of the processor, which other work on the machine hardly changes.
"""

import argparse
import time

import torch
import torch.nn.functional as F

# name, (depth,) height, width, Cin, Cout, kernel, upsampled
SHAPES = [
    ("vol 80-64@64", 16, 64, 80, 64, 3, False),
    ("vol 64-128@32", 16, 32, 64, 128, 3, False),
    ("vol 128-256@16", 16, 16, 128, 256, 3, False),
    ("vol 256-512@8", 16, 8, 256, 512, 3, False),
    ("vol 512-1024@4", 16, 4, 512, 1024, 3, False),
    ("up 1024-512@2", 16, 2, 1024, 512, 3, True),
    ("up 1024-256@4", 16, 4, 1024, 256, 3, True),
    ("up 512-128@8", 16, 8, 512, 128, 3, True),
    ("up 256-64@16", 16, 16, 256, 64, 3, True),
    ("up 128-32@32", 16, 32, 128, 32, 3, True),
    ("vol 112-112@64", 16, 64, 112, 112, 3, False),
    ("vol 32-32@64", 16, 64, 32, 32, 3, False),
    ("vol 32-15@64", 16, 64, 32, 15, 3, False),
    ("vol7 112-16@64", 16, 64, 112, 16, 7, False),
    ("7x7 1792-1@64", 0, 64, 1792, 1, 7, False),
    ("3x3 64-3@256", 0, 256, 64, 3, 3, False),
    ("3x3 3-64@256", 0, 256, 3, 64, 3, False),
    ("3x3 512-512@64", 0, 64, 512, 512, 3, False),
    ("3x3 512-512@128", 0, 128, 512, 512, 3, False),
    ("3x3 512-256@128", 0, 128, 512, 256, 3, False),
    ("3x3 256-256@256", 0, 256, 256, 256, 3, False),
    ("3x3 256-64@256", 0, 256, 256, 64, 3, False),
    ("3x3 128-1024@64", 0, 64, 128, 1024, 3, False),
    ("3x3 128-512@256", 0, 256, 128, 512, 3, False),
    ("3x3 256-128@64", 0, 64, 256, 128, 3, False),
    ("3x3 256-768@64", 0, 64, 256, 768, 3, False),
]


def convolve(x, w, b, upsampled):
    if upsampled:
        x = F.interpolate(x, scale_factor=(1, 2, 2))
    return (F.conv3d if x.dim() == 5 else F.conv2d)(x, w, b, padding=w.shape[-1] // 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    for name, depth, size, channels, outputs, kernel, upsampled in SHAPES:
        if args.only not in name:
            continue
        space = ([depth] if depth else []) + [size, size]
        x = torch.randn([args.batch, channels] + space)
        w = torch.randn([outputs, channels] + [kernel] * len(space))
        b = torch.randn(outputs)
        best = float("inf")
        with torch.inference_mode():
            for _ in range(args.repeats + 1):
                start = clock()
                y = convolve(x, w, b, upsampled)
                best = min(best, clock() - start)
        flops = 2 * y.numel() * w[0].numel()
        print(f"{name:18s} {best * 1e3:8.2f} ms  {flops / best * 1e-9:8.1f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
