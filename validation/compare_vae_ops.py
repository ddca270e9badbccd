#!/usr/bin/env python3
"""The VAE's layers, weft against PyTorch (channels-last), one layer at a time in turn.

    ninja -C build vae_ops_rate
    compare_vae_ops.py [--program build/vae_ops_rate] [--rounds 7] [--threads 2] [--require 1.2]
                       [--results DIR | --no-results]

Layers of the 2D VAE at 256x256 and one of the temporal VAE, float32, forward and backward (gradients of input and parameters).
Both sides stay loaded and run one after the other in every round; medians. With --require, exit status 1 if the sum of all
forward layers is not that many times as fast. Values are compared elsewhere (test_ops, and the whole VAE against diffusers).
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent


def convolution(torch, frames, inputs, outputs, size, kernel=3, stride=1, pad=None, upsample=False):
    """Pairs of functions: forward, and backward of what forward made."""
    F = torch.nn.functional
    last = torch.channels_last
    x = torch.randn(frames, inputs, size, size).to(memory_format=last).requires_grad_()
    w = (torch.randn(outputs, inputs, kernel, kernel) * 0.02).to(memory_format=last).requires_grad_()
    bias = torch.randn(outputs, requires_grad=True)

    def layer():
        h = F.interpolate(x, scale_factor=2.0, mode="nearest") if upsample else x
        h = F.pad(h, pad) if pad else h
        return F.conv2d(h, w, bias, stride, 0 if pad else kernel // 2)

    return layer, (x, w, bias)


def causal(torch, channels, frames, size):
    F = torch.nn.functional
    last = torch.channels_last_3d
    x = torch.randn(1, channels, frames, size, size).to(memory_format=last).requires_grad_()
    w = (torch.randn(channels, channels, 3, 3, 3) * 0.02).to(memory_format=last).requires_grad_()
    bias = torch.randn(channels, requires_grad=True)
    return lambda: F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), w, bias), (x, w, bias)


def group_norm(torch):
    F = torch.nn.functional
    x = torch.randn(1, 128, 256, 256).to(memory_format=torch.channels_last).requires_grad_()
    gamma, beta = torch.randn(128, requires_grad=True), torch.randn(128, requires_grad=True)
    return lambda: F.silu(F.group_norm(x, 32, gamma, beta, 1e-6)), (x, gamma, beta)


def attention(torch):
    q, k, v = (torch.randn(4, 1, 1024, 512, requires_grad=True) for _ in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), (q, k, v)


def torch_cases(torch):
    """In the order of vae_ops_rate.cpp."""
    layers = [convolution(torch, 1, 128, 128, 256), convolution(torch, 1, 256, 256, 128),
              convolution(torch, 1, 512, 512, 64), convolution(torch, 4, 512, 512, 32),
              convolution(torch, 1, 256, 256, 128, upsample=True),
              convolution(torch, 1, 128, 128, 256, stride=2, pad=(0, 1, 0, 1)),
              convolution(torch, 1, 3, 128, 256), convolution(torch, 1, 128, 3, 256),
              convolution(torch, 1, 256, 128, 256, kernel=1), causal(torch, 256, 10, 32), group_norm(torch),
              attention(torch)]
    cases = []
    for layer, inputs in layers:
        def forward(layer=layer):
            with torch.no_grad():
                layer()

        y = layer()
        g = torch.randn_like(y)

        def backward(y=y, g=g, inputs=inputs):
            torch.autograd.grad(y, inputs, g, retain_graph=True)

        cases += [forward, backward]
    return cases


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build" / "vae_ops_rate")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--require", type=float)
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--no-results", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    load = os.getloadavg()[0]
    import torch
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    cases = torch_cases(torch)
    weft = subprocess.Popen([args.program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    names = [weft.stdout.readline().strip() for _ in cases]
    build = weft.stdout.readline().strip()

    def ask(k):
        weft.stdin.write(f"{k}\n")
        weft.stdin.flush()
        answer = weft.stdout.readline()
        if not answer:
            sys.exit("vae_ops_rate ended early")
        time.sleep(0.005)  # its threads fall asleep
        return float(answer)

    table, total = [], {"forward": [0.0, 0.0], "backward": [0.0, 0.0]}
    print(f"{'layer':<44} {'weft ms':>9} {'torch ms':>9} {'ratio':>6}")
    for k, (name, case) in enumerate(zip(names, cases)):
        ask(k), case()  # warm up
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(ask(k))
            theirs.append(seconds(case))
        a, b = statistics.median(ours), statistics.median(theirs)
        way = name.rsplit(" ", 1)[1]
        total[way][0] += a
        total[way][1] += b
        table.append({"layer": name, "weft": ours, "torch": theirs, "ratio": b / a})
        print(f"{name:<44} {a * 1e3:9.2f} {b * 1e3:9.2f} {b / a:6.2f}", flush=True)
    for way, (a, b) in total.items():
        print(f"{'all ' + way:<44} {a * 1e3:9.2f} {b * 1e3:9.2f} {b / a:6.2f}")
    weft.stdin.close()
    weft.wait()
    git = lambda *a: subprocess.run(["git", "-C", ROOT, *a], capture_output=True, text=True).stdout.strip()
    now = datetime.datetime.now(datetime.timezone.utc)
    report = {"date": now.isoformat(timespec="seconds"), "commit": git("rev-parse", "HEAD"), "build": build,
              "hardware": {"cpu": next((line.split(":")[1].strip() for line in open("/proc/cpuinfo")
                                        if line.startswith("model name")), platform.processor()),
                           "cores": os.cpu_count(), "system": platform.platform()},
              "threads": args.threads, "dtype": "f32", "rounds": args.rounds, "load_average_at_start": load,
              "versions": {"torch": torch.__version__, "python": platform.python_version()},
              "ratio": {way: b / a for way, (a, b) in total.items()}, "layers": table}
    if not args.no_results:
        path = args.results / f"vae_ops_cpu_{now.date()}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(path)
    if args.require and report["ratio"]["forward"] < args.require:
        sys.exit(f"forward: {report['ratio']['forward']:.2f} times as fast, wanted {args.require}")


if __name__ == "__main__":
    main()
