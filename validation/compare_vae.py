#!/usr/bin/env python3
"""How fast does weft's VAE encode and decode a clip, beside diffusers' AutoencoderKL and the temporal VAE in PyTorch?

    compare_vae.py [--weft build/weft] [--frames 17] [--size 128] [--rounds 3] [--threads 2] [--require 1.2] [--json FILE]
                   [--device cpu|cuda] [--dtype f32|bf16] [--tf32]

Both have the released shape, random weights, one number format, micro-batches of four frames and chunks of 17.
PyTorch runs in inference mode with channels_last (2D) and channels_last_3d (temporal) weights and frames, after one
round that does not count. A round of weft is a process of its own, in which the first of two equal clips does not
count. On a GPU PyTorch's convolutions are cuDNN's; with --tf32 both sides may round f32 to TF32, else neither does;
there only the sum of encode and decode counts, for weft's encoding may still run when it is done asking. The two
sides take turns, so that what else the machine does falls on both; medians count. That they compute the same is
check_vae.py's question. Exit status 1, with --require, if weft is not that many times as fast.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent


class Weft:
    def __init__(self, a, where):
        self.weft, self.where, self.threads = str(a.weft), where, a.threads
        self.options = [f"device.kind={a.device}", f"device.tf32={str(a.tf32).lower()}", f"vae.dtype={a.dtype}", *a.small]
        clip = f"lavfi:testsrc2=duration={a.frames}:rate=1:size={a.size}x{a.size}"
        (where / "deck.toml").write_text(f"[run]\ndir = \"{where}/run\"\nthreads = {a.threads}\n[model]\nname = \"vae\"\n"
                                         f"[vae]\nweights = \"random:1\"\n[reconstruct]\nframes = {a.frames}\n"
                                         f"inputs = [\"{clip}\", \"{clip}\"]\n")

    def round(self):
        subprocess.run([self.weft, "reconstruct", self.where / "deck.toml", *self.options], check=True, stderr=subprocess.DEVNULL,
                       env=dict(os.environ, OMP_NUM_THREADS=str(self.threads)))
        clip = json.loads((self.where / "run/reconstructed/reconstruct.json").read_text())["clips"][1]
        return clip["encode_seconds"], clip["decode_seconds"]


class Torch:
    def __init__(self, a):
        import torch

        import vae_torch
        self.torch, self.module = torch, vae_torch
        torch.set_num_threads(a.threads)
        torch.manual_seed(1)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = a.tf32
        self.device, to = a.torch_device, {"device": a.torch_device, "dtype": torch.bfloat16 if a.dtype == "bf16" else torch.float32}
        self.two_d = vae_torch.spatial([128, 256, 512, 512], 2, 32).eval().to(memory_format=torch.channels_last, **to)
        self.temporal = vae_torch.Temporal(128, 4, [1, 2, 2, 4], [False, True, True], 32).eval()
        self.temporal = self.temporal.to(memory_format=torch.channels_last_3d, **to)
        self.frames = (torch.rand(a.frames, 3, a.size, a.size) * 2 - 1).to(**to)
        self.frames = self.frames.contiguous(memory_format=torch.channels_last)
        self.round()

    def encode(self):
        torch, m = self.torch, self.module
        z2 = []
        for part in self.frames.split(4):
            moments = self.two_d.quant_conv(self.two_d.encoder(part))
            z2.append(m.SCALING * m.draw(moments, torch.randn_like(moments[:, :4])))
        z = []
        for chunk in torch.cat(z2).split(17):
            chunk = chunk.transpose(0, 1)[None].contiguous(memory_format=torch.channels_last_3d)
            moments = self.temporal.moments(chunk)
            z.append(m.draw(moments, torch.randn_like(moments[:, :4])))
        return torch.cat(z, 2)

    def decode(self, z):
        torch, m, left, out = self.torch, self.module, len(self.frames), []
        for chunk in z.split(5, 2):
            chunk = chunk.contiguous(memory_format=torch.channels_last_3d)
            frames = self.temporal.decode(chunk, min(17, left))[0].transpose(0, 1) / m.SCALING
            left -= 17
            for part in frames.split(4):
                part = part.contiguous(memory_format=torch.channels_last)
                out.append(self.two_d.decoder(self.two_d.post_quant_conv(part)))
        return torch.cat(out)

    def round(self):
        with self.torch.inference_mode():
            begin = self.now()
            z = self.encode()
            middle = self.now()
            self.decode(z)
            return middle - begin, self.now() - middle

    def now(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weft", default=HERE.parent / "build" / "weft")
    parser.add_argument("--frames", type=int, default=17)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--torch-device", help="PyTorch's, if not the same")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--small", nargs="*", default=[], help="overrides of weft's deck, to rehearse: times then mean nothing")
    parser.add_argument("--require", type=float)
    parser.add_argument("--note", default="", help="kept in the results, such as what else ran")
    parser.add_argument("--json", type=pathlib.Path)
    a = parser.parse_args()
    a.torch_device = a.torch_device or a.device
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    with tempfile.TemporaryDirectory() as where:
        sides = {"weft": Weft(a, pathlib.Path(where)), "torch": Torch(a)}
        seconds = {name: [] for name in sides}
        for i in range(a.rounds):
            for name, side in sides.items():
                seconds[name].append(side.round())
                print(f"round {i + 1}: {name} encode {seconds[name][-1][0]:.2f} s, decode {seconds[name][-1][1]:.2f} s",
                      flush=True)
    median = {name: {"encode": statistics.median(r[0] for r in rounds), "decode": statistics.median(r[1] for r in rounds),
                     "both": statistics.median(sum(r) for r in rounds)} for name, rounds in seconds.items()}
    times = {part: median["torch"][part] / median["weft"][part] for part in ("encode", "decode", "both")}
    print(f"{a.frames} frames of {a.size}x{a.size}: weft is {times['encode']:.2f} times as fast to encode, "
          f"{times['decode']:.2f} to decode, {times['both']:.2f} in all")
    if a.json:
        import compare_step
        about = compare_step.provenance(argparse.Namespace(threads=a.threads, dtype=a.dtype, rounds=a.rounds, warmup=1, steps=1))
        if a.torch_device == "cuda":
            import torch
            about["hardware"]["gpu"] = torch.cuda.get_device_name()
        a.json.write_text(json.dumps(about | {"frames": a.frames, "size": a.size, "device": a.device,
                                              "dtype": a.dtype, "tf32": a.tf32, "note": a.note, "seconds": seconds,
                                              "median": median, "times_as_fast": times}, indent=1) + "\n")
    return 1 if a.require and times["both"] < a.require else 0


if __name__ == "__main__":
    sys.exit(main())
