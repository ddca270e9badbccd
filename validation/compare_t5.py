#!/usr/bin/env python3
"""How fast is a T5 layer of XXL's width in weft, beside Hugging Face's in PyTorch?

    compare_t5.py [--weft build/weft] [--threads 2] [--rounds 5] [--lengths 18,25,...] [--json FILE]
                  [--device cpu|cuda] [--dtype f32|bf16] [--tf32]

One layer with random weights in one number format, a batch of captions of the given lengths in tokens. PyTorch has the layer of
transformers' T5EncoderModel (SDPA where it has it) with the captions padded to 300, as Open-Sora pads them, and padded to the
longest of the batch, this also compiled; weft computes real tokens alone (`weft_probe t5_rounds`). With --tf32 both sides may round f32
to TF32 on a GPU, else neither does. They take turns; medians count. Exit status 0 if weft is at least 1.2 times as fast as the
padding to 300.
"""
import copy
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import common
import workers
from reference import safetensors_io, t5

# Captions as Open-Sora's training sets have them: a few sentences; some short prompts among them.
LENGTHS = "18,42,65,90,120,74,31,150"


class Weft:
    """`weft_probe t5_rounds`, which waits for a line before each round."""

    def __init__(self, args, folder, shape):
        (folder / "deck.toml").write_text(f"[run]\nthreads = {args.threads}\n" + t5.deck(shape, 1000))
        self.threads = args.threads
        self.args, self.folder = args, folder
        self.process = subprocess.Popen(self.command(args.rounds), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=common.environment(args.threads))

    def command(self, rounds):
        inputs = self.folder / f"rounds_{rounds}.safetensors"
        safetensors_io.save(inputs, {"lengths": np.array([int(n) for n in self.args.lengths.split(",")]), "rounds": np.array([rounds])})
        return [common.probe_of(self.args.weft), "t5_rounds", "--deck", self.folder / "deck.toml", "--inputs", inputs, "--outputs",
                self.folder / "seconds.safetensors", f"device.kind={self.args.device}", f"device.tf32={str(self.args.tf32).lower()}",
                f"t5.dtype={self.args.dtype}"]

    def limit(self):
        return common.limit_of(lambda rounds: common.run([*self.command(rounds), "run.profile=operations"], self.threads), 1, 6)

    def round(self):
        if self.process.stdout.readline().strip() != "ready":
            sys.exit("weft_probe t5_rounds ended early")
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main():
    parser = common.parser(__doc__, threads=2, rounds=5)
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--torch-device", help="PyTorch's, if not the same")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--small", action="store_true", help="a small layer, to rehearse: times then mean nothing")
    args = common.parse(parser)
    args.torch_device = args.torch_device or args.device
    facts = common.about(args, "transformers")
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    lengths = [int(n) for n in args.lengths.split(",")]
    shape = t5.SMALL if args.small else t5.REAL_LAYER
    model = t5.model_of(shape, 1000).to(args.torch_device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
    try:
        model.set_attn_implementation("sdpa")
    except (AttributeError, ValueError):
        pass  # this version has eager attention alone
    ids = [[(7 * i + 3) % 1000 for i in range(n)] for n in lengths]

    compiled = workers.compile_blocks(copy.deepcopy(model), "T5LayerSelfAttention", "T5LayerFF")

    def padded(model, length):
        start = time.perf_counter()
        t5.encode_padded(model, ids, length).cpu()
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        weft = Weft(args, pathlib.Path(folder), shape)
        longest = max(lengths)
        padded(model, longest)
        padded(compiled, longest)
        rounds = common.in_turn({"weft": weft.round, "torch_padded_to_300": lambda: padded(model, 300),
                                 "torch_padded_to_longest": lambda: padded(model, longest),
                                 "torch_compiled": lambda: padded(compiled, longest)}, args.rounds)
        weft.process.wait()
        limit = weft.limit()
    median = common.medians(rounds)
    ratios = {name: median[name] / median["weft"] for name in median if name != "weft"}
    for name, seconds in median.items():
        print(f"{name:26} {seconds:8.4f} s" + (f"   weft is {ratios[name]:.2f} times as fast" if name in ratios else ""))
    row = common.row(f"a T5 layer of d_model {shape['d_model']}, {len(lengths)} captions, {args.dtype}", median["weft"], limit,
                     {name: m for name, m in median.items() if name in ("torch_padded_to_longest", "torch_compiled")})
    common.show_rows([row])
    common.write(args, facts, {"what": f"one T5 layer, d_model {shape['d_model']}, {args.dtype}", "median": median, "seconds": rounds,
                               "weft_is_faster_by": ratios, "rows": [row]})
    return 0 if ratios["torch_padded_to_300"] >= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
