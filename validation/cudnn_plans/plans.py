#!/usr/bin/env python3
"""Which engine of cuDNN each convolution of weft's models would get on an H200, asked without one.

    plans.py [--build build] [--json FILE] [--page FILE] [NAME ...]      NAME: part of a model's name; all without one

Each model runs dry, as on a GPU (dry_runs.cpp), and its convolutions go through weft's own calls (ask.cu) to the installed
cuDNN, whose heuristics get the description of an H200 (without_gpu.cpp). Nothing is executed. Needs a build with the CPU side
(`ninja weft`), nvcc and cuDNN 9. Exit status 1 if a convolution has no engine.
"""
import argparse
import collections
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CUDA = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
# What the driver says of an H200 (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION).
H200 = {
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "multiProcessorCount": 132, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "l2CacheSize": 62914560,
    "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "pciDeviceId": 0, "maxCtasPerSM": 32,
    "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0,
    "deviceName": "NVIDIA H200", "totalGlobalMem": 150000000000, "isTccDriver": 0, "supportCoopLaunch": 1}

RANDOM = [f"animate.{name}=random:1" for name in ("weights", "mapping_weights", "mapping_full_weights", "detector_weights",
                                                  "landmark_weights", "gfpgan_weights", "parsenet_weights")]
IMAGES = "--height 608 --width 800 --batch 2"
# Name, deck of inputs/, the key of its type, sizes and other keys.
MODELS = [
    ("segmentation, ResNet-18 dilated, PPM", "segmentation_r18", "model.dtype", IMAGES),
    ("segmentation, ResNet-50 dilated, PPM", "segmentation_r50", "model.dtype", IMAGES),
    ("segmentation, ResNet-101 dilated, PPM", "segmentation_r101", "model.dtype", IMAGES),
    ("segmentation, ResNet-50, UPerNet", "segmentation_upernet50", "model.dtype", IMAGES),
    ("segmentation, ResNet-101, UPerNet", "segmentation_upernet101", "model.dtype", IMAGES),
    ("segmentation, HRNet", "segmentation_hrnet", "model.dtype", IMAGES),
    ("segmentation, MobileNetV2", "segmentation_mobilenet", "model.dtype", IMAGES),
    ("segmentation, MobileNetV2, batch 16", "segmentation_mobilenet", "model.dtype", "--height 608 --width 800 --batch 16"),
    ("DBNet++, oCLIP ResNet-50", "dbnetpp_icdar2015", "model.dtype", "--height 640 --width 640 --batch 16"),
    ("DBNet++, oCLIP ResNet-50, batch 64", "dbnetpp_icdar2015", "model.dtype", "--height 640 --width 640 --batch 64"),
    ("DBNet, ResNet-50, batch 64", "dbnetpp_icdar2015", "model.dtype",
     "--height 640 --width 640 --batch 64 model.backbone=resnet50 model.asf=false"),
    ("SadTalker at 256, GFPGAN", "animate_full", "model.dtype", "--height 600 --width 800 " + " ".join(RANDOM)),
    ("SadTalker at 512, batch 8", "animate_full", "model.dtype",
     "--height 600 --width 800 sadtalker.size=512 sadtalker.batch_size=8 " + " ".join(RANDOM)),
    ("video VAE, stage 3, LPIPS, PatchGAN", "vae_stage3", "vae.dtype",
     "--height 256 --width 256 --frames 33 vae_train.discriminator=patchgan vae_train.discriminator_start=1"),
    ("video VAE, 480p", "generate", "vae.dtype", "--code --height 480 --width 854 --frames 51"),
    ("Wan VAE, 480p", "wan_1.3b_generate", "vae.dtype", "--code --height 480 --width 832 --frames 21"),
]


def build(folder, tree):
    """The programs in `folder`: the library that stands before cuDNN, and weft's dry runs."""
    def run(*argv, cwd=ROOT):
        subprocess.run([str(word) for word in argv], cwd=cwd, check=True)
    (folder / "before").mkdir()
    run("c++", "-O1", "-std=c++20", "-shared", "-fPIC", HERE / "without_gpu.cpp", f"-I{CUDA}/include", "-ldl",
        "-o", folder / "before" / "libcudnn.so.9")
    run(CUDA / "bin" / "nvcc", "-std=c++20", "-O1", "--expt-relaxed-constexpr", "-arch=sm_90a", "-DWEFT_CUDNN", "-Isrc",
        "-Ikernels", "-c", HERE / "ask.cu", "-o", folder / "ask.o")
    # As weft's own main.cpp is compiled and linked, with these two files in its place and before what they replace.
    commands = subprocess.run(["ninja", "-C", tree, "-t", "commands", "weft"], capture_output=True, text=True,
                              check=True).stdout.splitlines()
    compiled = next(c for c in commands if c.endswith("/src/main.cpp"))
    compiled = re.sub(r"-MD .*", "", compiled[compiled.index("c++"):]).split()
    run(*compiled, "-O1", "-c", HERE / "dry_runs.cpp", "-o", folder / "dry_runs.o", cwd=tree)
    linked = next(c for c in commands if " -o weft " in c).removeprefix(": && ").removesuffix(" && :")
    linked = re.sub(r"\S+main\.cpp\.o -o weft ", f"{folder}/dry_runs.o {folder}/ask.o -o {folder}/dry_runs -Wl,-z,muldefs ", linked)
    run(*linked.split(), f"-L{CUDA}/lib64", "-lcudart_static", "-ldl", "-lrt", cwd=tree)


def ask(folder, deck, dtype_key, dtype, more):
    """The convolutions of a deck's model, as `ask.cu` prints them."""
    environment = os.environ | {
        "WEFT_REAL_CUDNN": str((CUDA / "lib64" / "libcudnn.so.9").resolve()), "WEFT_DEVICE": json.dumps(H200),
        "LD_LIBRARY_PATH": f"{folder}/before:{CUDA}/lib64", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run([folder / "dry_runs", ROOT / "inputs" / f"{deck}.toml", f"{dtype_key}={dtype}", *more.split()],
                          cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{deck}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 5]
    return [dict(convolution=c, found=found == "true", engine=int(engine), looked_at=int(at), tensor_cores=int(cores),
                 workspace=int(workspace)) for c, found, engine, at, cores, workspace in rows]


def passes(rows):
    """Rows by pass and type."""
    made = collections.defaultdict(list)
    for row in rows:
        made[re.match(r"(forward|backward input|backward weight) (\S+)", row["convolution"]).groups()].append(row)
    return made


def page(results, version, commit):
    """A table of the models, then the convolutions in bf16 that do not run as the library would have it."""
    lines = [f"Asked of cuDNN {version} on {datetime.date.today()} (commit {commit}).", "",
             "| model | type, pass | convolutions | first proposal | without an engine | most workspace, MB | engines: convolutions |",
             "|---|---|---|---|---|---|---|"]
    remarks = []
    for model, rows in results.items():
        for (kind, dtype), some in sorted(passes(rows).items(), key=lambda item: item[0][::-1]):
            found = [r for r in some if r["found"]]
            engines = collections.Counter(r["engine"] for r in found)
            lines.append(f"| {model} | {dtype} {kind} | {len(some)} | {sum(r['looked_at'] == 1 for r in found)} | "
                         f"{len(some) - len(found)} | {max((r['workspace'] for r in found), default=0) / 1e6:.0f} | "
                         + ", ".join(f"{engine}: {count}" for engine, count in sorted(engines.items())) + " |")
            for r in some:
                if not r["found"]:
                    remarks.append((r["convolution"], "no engine"))
                elif dtype == "bf16" and (r["looked_at"] > 1 or not r["tensor_cores"] and ",1] stride" not in r["convolution"]):
                    remarks.append((r["convolution"], f"engine {r['engine']}, no. {r['looked_at']}"
                                    + ("" if r["tensor_cores"] else ", no tensor cores") + f", {r['workspace'] / 1e6:.0f} MB"))
    lines += ["", "Without an engine, or in bf16 not the first proposal, or not on tensor cores (but depthwise ones, which memory bounds):", ""]
    lines += [f"- `{convolution}`: {what}" for convolution, what in dict(remarks).items()]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--json", type=pathlib.Path, help="file for all rows")
    parser.add_argument("--page", type=pathlib.Path, help="file for the tables; otherwise they are printed")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    results = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        build(folder, args.build.resolve())
        for model, deck, key, more in MODELS:
            if not args.names or any(n in model for n in args.names):
                for dtype in ("bf16", "f32"):
                    results[model] += ask(folder, deck, key, dtype, more)
    header = (CUDA / "include" / "cudnn_version.h").read_text()
    version = ".".join(re.search(rf"CUDNN_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCHLEVEL"))
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    text = page(results, version, commit)
    if args.page:
        args.page.write_text(text)
    else:
        print(text)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(not r["found"] for rows in results.values() for r in rows))


if __name__ == "__main__":
    main()
