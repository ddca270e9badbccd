#!/usr/bin/env python3
"""Does PEFT load the adapters that weft exports, and do both sides give the same output?

    check_lora.py [--weft build/weft] [--tolerance 1e-5]        (pip install peft, besides requirements.txt)

Trains a tiny STDiT3, then adapters on it. PEFT adds the exported adapters to the PyTorch STDiT3 (reference/stdit3.py), which has the
base's weights. Its output is compared with weft's own for the weights that `weft export --merged` wrote, with captions of
different lengths and conditioning frames. PEFT then saves what it loaded, and weft merges that: the same clips must come out.
The figures are relative L2 errors. Exit status 0 if all holds.
"""
import json
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # PEFT would look there for the base, which is a file

import numpy as np
import peft
import torch

import common
from check_export import model_of, random_inputs
from reference import safetensors_io, stdit3

DECK = """
[run]
dir = "run"
threads = 1
[data]
path = "synthetic:clips=24,frames=3,height=16,width=16"
[model]
in_channels = 3
hidden_size = 48
depth = 2
num_heads = 2
caption_channels = 16
model_max_length = 6
[train]
steps = 30
batch_size = 2
micro_batches = 2
lr = 5e-3
[generate]
weights = "base.safetensors"
image_size = [16, 16]
num_frames = "3"
tensors = true
[sampler]
steps = 3
"""


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    args = common.parse(parser)
    good = True

    def check(what, error, tolerance):
        nonlocal good
        good = good and error <= tolerance
        print(f"{what}: {error:.1e} (<= {tolerance:g}) {'ok' if error <= tolerance else 'WRONG'}")

    with tempfile.TemporaryDirectory(prefix="weft-lora-") as name:
        folder = pathlib.Path(name)
        (folder / "deck.toml").write_text(DECK)

        def weft(*arguments):
            common.run([args.weft, *arguments], cwd=folder)

        weft("train", "deck.toml", "run.dir=base")
        weft("export", "base", "base.safetensors")
        weft("train", "deck.toml", "run.dir=lora", "model.weights=base.safetensors", "lora.rank=4", "lora.alpha=6",
             'lora.targets=["*_blocks.*", "t_block.1", "y_embedder.*", "final_layer.linear"]')
        weft("export", "lora", "adapter", "--raw")
        weft("export", "lora", "merged.safetensors", "--merged", "--raw")

        base, merged = (safetensors_io.load(folder / f"{n}.safetensors") for n in ("base", "merged"))
        table = model_of(base)
        inputs = random_inputs(table)
        tensors = stdit3.to_torch(inputs)
        with torch.no_grad():
            plain = stdit3.build(table, base)(**tensors).numpy()
            model = peft.PeftModel.from_pretrained(stdit3.build(table, base), str(folder / "adapter"))
            theirs = model(**tensors).numpy()
        layers = json.loads((folder / "adapter" / "adapter_config.json").read_text())["target_modules"]
        loaded = [n for n, _ in model.named_parameters() if ".lora_A." in n]
        check(f"PEFT {peft.__version__} loads {len(loaded)} layers of {len(layers)}, left out", abs(len(loaded) - len(layers)), 0)
        ours = common.probe(args.weft, folder, "forward", inputs | {"cotangent": np.zeros_like(theirs)},
                            deck=common.toml({"model": {"name": "stdit3"} | table}), weights=folder / "merged.safetensors")["out"]
        check("output of base and adapters, PEFT and weft", common.relative_error(ours, theirs), args.tolerance)
        change = common.relative_error(plain, theirs)
        good = good and change > 1e-2
        print(f"output of the base alone is off by {change:.1e} (> 0.01): {'ok' if change > 1e-2 else 'WRONG'}")

        # The other direction: PEFT writes, weft reads.
        model.save_pretrained(str(folder / "by_peft"))
        clips = []
        for which in ("adapter", "by_peft"):
            weft("generate", "deck.toml", f"generate.output={which}_clips", f"generate.adapters=['{which}=0.7']")
            file, = sorted((folder / f"{which}_clips").glob("*.safetensors"))
            clips.append(safetensors_io.load(file))
        for tensor in clips[0]:
            check(f"clip from PEFT's file, {tensor}", common.relative_error(clips[1][tensor], clips[0][tensor]), 0)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
