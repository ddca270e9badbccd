#!/usr/bin/env python3
"""How fast does weft's VAE encode and decode a clip, beside diffusers' AutoencoderKL and the temporal VAE in PyTorch? With --model
wan_vae: Wan2.1's VAE, beside diffusers' AutoencoderKLWan.

    compare_vae.py [--weft build/weft] [--model vae|wan_vae] [--frames 17] [--size 128] [--rounds 3] [--threads 2] [--require 1.2]
                   [--json FILE] [--device cpu|cuda] [--dtype f32|bf16] [--tf32]

Both have the released shape, random weights, one number format, micro-batches of four frames and chunks of 17; Wan's go by one
latent frame, which is four of pixels, on both sides. PyTorch (reference/vae.py) runs in inference mode with channels-last weights
and frames (Wan's if they are faster), eager and with its blocks compiled, after one round that does not count. A round of weft is
a process of its own, in which the first of two equal clips does not count. On a GPU PyTorch's convolutions are cuDNN's; with --tf32
both sides may round f32 to TF32, else neither does; there only the sum of encode and decode counts, for weft's encoding may still
run when it is done asking. The sides take turns; medians count. That they compute the same is the question of check_vae.py and
check_wan_vae.py. Exit status 1, with --require, if weft is not that many times as fast.
"""
import json
import pathlib
import shutil
import sys
import tempfile
import time

import diffusers
import torch

import common
import workers
from reference import vae

PARTS = ("encode", "decode", "both")
WAN_BLOCKS = ("WanRMS_norm", "WanCausalConv3d")  # its larger blocks count the frames that they keep, and so compile again and again


def weft_job(args, folder, clips, *options):
    """What a job of so many clips printed."""
    clip = f"lavfi:testsrc2=duration={args.frames}:rate=1:size={args.size}x{args.size}"
    (folder / "deck.toml").write_text(common.toml({
        "run": {"dir": str(folder / "run"), "threads": args.threads}, "model": {"name": args.model}, "vae": {"weights": "random:1"},
        "reconstruct": {"frames": args.frames, "inputs": [clip] * clips}}))
    shutil.rmtree(folder / "run/reconstructed", ignore_errors=True)  # what is finished would stay
    return common.run([args.weft, "reconstruct", folder / "deck.toml", "--replace", f"device.kind={args.device}",
                       f"device.tf32={str(args.tf32).lower()}", f"vae.dtype={args.dtype}", *args.small, *options], args.threads)


def weft_side(args, folder):
    def once():
        weft_job(args, folder, 2)
        clip = json.loads((folder / "run/reconstructed/reconstruct.json").read_text())["clips"][1]
        return seconds(clip["encode_seconds"], clip["decode_seconds"])

    return once


def torch_side(args, compiled=False):
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = args.tf32
    device, dtype = args.torch_device, torch.bfloat16 if args.dtype == "bf16" else torch.float32
    codec = (WanCodec if args.model == "wan_vae" else vae.Codec)(dtype, device)
    if compiled and args.model == "wan_vae":
        workers.compile_blocks(codec.model, *WAN_BLOCKS)
    elif compiled:
        for part in (codec.two_d, codec.temporal):
            workers.compile_blocks(part, *vae.BLOCKS)
    frames = (torch.rand(args.frames, 3, args.size, args.size) * 2 - 1).to(device=device, dtype=dtype)
    frames = frames.contiguous(memory_format=torch.channels_last)

    def now():
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.inference_mode()
    def once():
        begin = now()
        z = codec.encode(frames)
        middle = now()
        codec.decode(z, len(frames))
        return seconds(middle - begin, now() - middle)

    once()
    return once


class WanCodec:
    """diffusers' AutoencoderKLWan, frames in and out as vae.Codec has them. Its layers go through frames in the order that its
    weights are in: the faster of two on a few frames."""

    def __init__(self, dtype, device):
        self.model = diffusers.AutoencoderKLWan().to(device=device, dtype=dtype).eval()
        trial = torch.rand(1, 3, 5, 64, 64, device=device, dtype=dtype)
        times = {order: self.time_of(order, trial) for order in (torch.contiguous_format, torch.channels_last_3d)}
        self.order = min(times, key=times.get)
        self.model = self.ordered(self.order)

    def ordered(self, order):
        for p in self.model.parameters():
            if p.dim() == 5:
                p.data = p.data.contiguous(memory_format=order)
        return self.model

    @torch.inference_mode()
    def time_of(self, order, trial):
        self.ordered(order)
        for _ in range(2):
            begin = time.perf_counter()
            float(self.model.encode(trial.contiguous(memory_format=order)).latent_dist.mode().sum())
            took = time.perf_counter() - begin
        return took

    def encode(self, frames):
        x = frames.permute(1, 0, 2, 3)[None].contiguous(memory_format=self.order)
        return self.model.encode(x).latent_dist.mode()

    def decode(self, z, count):
        return self.model.decode(z.contiguous(memory_format=self.order)).sample


def seconds(encode, decode):
    return {"encode": encode, "decode": decode, "both": encode + decode}


def main():
    parser = common.parser(__doc__, frames=17, size=128, rounds=3, threads=2)
    parser.add_argument("--model", choices=["vae", "wan_vae"], default="vae")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--torch-device", help="PyTorch's, if not the same")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--small", nargs="*", default=[], help="overrides of weft's deck, to rehearse: times then mean nothing")
    parser.add_argument("--require", type=float)
    args = common.parse(parser)
    args.torch_device = args.torch_device or args.device
    facts = common.about(args, "diffusers")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rounds = common.in_turn({"weft": weft_side(args, folder), "torch": torch_side(args), "torch compiled": torch_side(args, True)},
                                args.rounds)
        limit = common.limit_of(lambda clips: weft_job(args, folder, clips, "run.profile=operations"))
    median = {part: common.medians(rounds, part) for part in PARTS}
    theirs = {name: m for name, m in median["both"].items() if name != "weft"}
    name = "Wan2.1" if args.model == "wan_vae" else "Open-Sora"
    row = common.row(f"VAE of {name}, {args.frames} frames of {args.size}x{args.size}, {args.dtype}", median["both"]["weft"], limit,
                     theirs)
    times = {part: m[row["torch"]] / m["weft"] for part, m in median.items()}
    print(f"{args.model}: {args.frames} frames of {args.size}x{args.size}, {args.dtype}: weft {median['encode']['weft']:.3f} s to encode, "
          f"{median['decode']['weft']:.3f} to decode, {times['encode']:.2f} and {times['decode']:.2f} times as fast")
    common.show_rows([row])
    common.write(args, facts, {"seconds": rounds, "median": median, "times_as_fast": times, "rows": [row]})
    return 1 if args.require and times["both"] < args.require else 0


if __name__ == "__main__":
    sys.exit(main())
