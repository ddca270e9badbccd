#!/usr/bin/env python3
"""How fast is a T5 layer of XXL's width in weft, beside Hugging Face's in PyTorch?

    compare_t5.py [--weft build/weft] [--threads 2] [--rounds 5] [--lengths 18,25,...] [--json FILE]
                  [--device cpu|cuda] [--dtype f32|bf16] [--tf32]

One layer with random weights in one number format, a batch of captions of the given lengths in tokens. PyTorch has the layer of transformers'
T5EncoderModel (SDPA where it has it) with the captions padded to 300, as Open-Sora pads them, and padded to the longest of the
batch; weft computes real tokens alone (`weft bench t5`). With --tf32 both
sides may round f32 to TF32 on a GPU, else neither does. The three take turns, so that what else the machine does
falls on all; medians count. Exit status 0 if weft is at least 1.2 times as fast as the padding to 300.
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
# Captions as Open-Sora's training sets have them: a few sentences; some short prompts among them.
LENGTHS = "18,42,65,90,120,74,31,150"


class Weft:
    """`weft bench t5`, waiting for a line before each round."""

    def __init__(self, a, where, shape):
        import t5_cases
        (where / "deck.toml").write_text(f"[run]\nthreads = {a.threads}\n" + t5_cases.deck(shape, 1000))
        self.process = subprocess.Popen(
            [a.weft, "bench", "t5", where / "deck.toml", f"device.kind={a.device}", f"device.tf32={str(a.tf32).lower()}",
             f"t5.dtype={a.dtype}", "--lengths", a.lengths, "--rounds", str(a.rounds), "--paced"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS=str(a.threads)))

    def round(self):
        if self.process.stdout.readline().strip() != "ready":
            sys.exit("weft bench t5 ended early")
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weft", default=HERE.parent / "build" / "weft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--torch-device", help="PyTorch's, if not the same")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--small", action="store_true", help="a small layer, to rehearse: times then mean nothing")
    parser.add_argument("--note", default="", help="kept in the results, such as what else ran")
    parser.add_argument("--json", type=pathlib.Path)
    a = parser.parse_args()
    a.torch_device = a.torch_device or a.device
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    import torch
    import transformers

    import t5_cases
    torch.set_num_threads(a.threads)
    torch.backends.cuda.matmul.allow_tf32 = a.tf32
    lengths = [int(n) for n in a.lengths.split(",")]
    shape = t5_cases.SMALL if a.small else t5_cases.REAL_LAYER
    model = t5_cases.model_of(shape, 1000).to(a.torch_device, torch.bfloat16 if a.dtype == "bf16" else torch.float32)
    try:
        model.set_attn_implementation("sdpa")
    except (AttributeError, ValueError):
        pass  # this version has eager attention alone
    ids = [[(7 * i + 3) % 1000 for i in range(n)] for n in lengths]

    def torch_round(padded):
        start = time.perf_counter()
        t5_cases.encode_padded(model, ids, padded).cpu()
        return time.perf_counter() - start

    times = {"weft": [], "torch_padded_to_300": [], "torch_padded_to_longest": []}
    with tempfile.TemporaryDirectory() as folder:
        weft = Weft(a, pathlib.Path(folder), shape)
        torch_round(max(lengths))
        for _ in range(a.rounds):
            times["weft"].append(weft.round())
            times["torch_padded_to_300"].append(torch_round(300))
            times["torch_padded_to_longest"].append(torch_round(max(lengths)))
        weft.process.wait()
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratios = {name: medians[name] / medians["weft"] for name in medians if name != "weft"}
    for name, seconds in medians.items():
        print(f"{name:26} {seconds:8.3f} s" + (f"   weft is {ratios[name]:.2f} times as fast" if name in ratios else ""))
    if a.json:
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo", encoding="utf-8") if "model name" in line), "")
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
        a.json.write_text(json.dumps({
            "what": f"one T5 layer, d_model {shape['d_model']}, {a.dtype}", "device": a.device, "tf32": a.tf32, "captions_tokens": lengths, "threads": a.threads, "median_s": medians,
            "weft_is_faster_by": ratios, "samples_s": times,
            "hardware": f"{cpu}, {os.cpu_count()} processors" +
                        (f", {torch.cuda.get_device_name()}" if a.torch_device == "cuda" else ""), "torch": torch.__version__,
            "transformers": transformers.__version__, "python": platform.python_version(),
            "commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d"), "note": a.note}, indent=2) + "\n")
    return 0 if ratios["torch_padded_to_300"] >= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
