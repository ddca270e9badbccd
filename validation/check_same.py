#!/usr/bin/env python3
"""Two builds of weft give the same bits: for changes that move code and change no result.

    validation/check_same.py BEFORE/weft AFTER/weft

Both run the smoke deck and the chain of the demo (footage -> store -> VAE -> latents -> STDiT3 -> clips) on 1 and 2 ranks,
20 steps each. Compared: losses and gradient norms in metrics.jsonl, the exported weights and their moving average, the
latents, and the pixels of the clips. Exit status 1 if anything differs.
"""
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import launcher  # noqa: E402
import tiny_models  # noqa: E402  (a T5 of random numbers)

ENVIRONMENT = os.environ | launcher.MPI_ON_ONE_HOST | {"OMP_NUM_THREADS": "1"}
# Numbers that follow from the deck alone, not from the machine.
METRICS = ("step", "loss", "grad_norm", "lr", "samples", "terms")


def weft(binary, work, ranks, *words):
    command = [launcher.launcher_of(binary), "-n", str(ranks), binary, *map(str, words)]
    result = subprocess.run(command, cwd=work, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")


def digest(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:16]


def metrics(path):
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    assert len(rows) == 20 and "loss" in rows[0], f"{path} has {len(rows)} steps"
    return [{key: row[key] for key in METRICS if key in row} for row in rows]


def trained(binary, work, ranks, deck, run, *overrides):
    weft(binary, work, ranks, "train", deck, f"run.dir={run}", "train.steps=20", "run.threads=1", *overrides)
    for flag, name in ((), "weights"), (("--ema",), "ema"):
        weft(binary, work, 1, "export", run, f"{run}/{name}.safetensors", *flag)
    return {"metrics": metrics(work / run / "metrics.jsonl"), "weights": digest(work / run / "weights.safetensors"),
            "ema": digest(work / run / "ema.safetensors")}


def latents(path):
    """Values and texts of a store; what it says of the program that wrote it may differ."""
    import h5py  # noqa: PLC0415
    import numpy  # noqa: PLC0415
    total = hashlib.sha256()

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            total.update(name.encode() + numpy.asarray(item[()]).tobytes() if item.dtype.kind != "O"
                         else name.encode() + repr(item[()].tolist()).encode())

    with h5py.File(path) as store:
        store.visititems(add)
    return total.hexdigest()[:16]


def results(binary, work):
    out = {}
    (work / "t5").mkdir()
    tiny_models.write_t5(str(work / "t5"))
    smoke, demo, vae = (ROOT / "inputs" / name for name in ("smoke.toml", "demo.toml", "demo_vae.toml"))
    weft(binary, work, 1, "ingest", demo, "ingest.output=demo.h5",
         'ingest.inputs=["lavfi:testsrc2=size=256x192:rate=10:duration=20"]')
    out["store"] = latents(work / "demo.h5")
    for ranks in 1, 2:
        here = {"smoke": trained(binary, work, ranks, smoke, f"smoke{ranks}")}
        here["VAE"] = trained(binary, work, ranks, vae, f"vae{ranks}", "data.path=demo.h5")
        files = [f"vae.weights=vae{ranks}", "t5.weights=t5", "run.threads=1"]
        weft(binary, work, ranks, "encode", demo, "data.path=demo.h5", f"encode.output=latents{ranks}.h5", *files)
        here["latents"] = latents(work / f"latents{ranks}.h5")
        here["STDiT3"] = trained(binary, work, ranks, demo, f"stdit{ranks}", f"data.path=latents{ranks}.h5", *files)
        weft(binary, work, ranks, "generate", demo, f"run.dir=stdit{ranks}", f"generate.output=clips{ranks}", *files,
             "sampler.steps=5", "vae.scale=[1,1,1,1]", "vae.shift=[0,0,0,0]")
        lines = (work / f"clips{ranks}" / "generated.jsonl").read_text().splitlines()
        here["clips"] = sorted((c["name"], c["pixels"], c["file_xxh3"]) for c in map(json.loads, lines))
        assert len(here["clips"]) == 4, here["clips"]
        out[f"{ranks} ranks"] = here
    return out


def compare(before, after, path=""):
    if isinstance(before, dict):
        return sum(compare(before[key], after[key], f"{path}, {key}" if path else key) for key in before)
    same = before == after
    what = f"{len(before)} entries" if isinstance(before, list) else before
    print(f"{'same' if same else 'DIFFERENT'}  {path}: {what}" + ("" if same else f"\n  before {before}\n  after  {after}"))
    return 0 if same else 1


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    found = []
    for binary in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            found.append(results(str(pathlib.Path(binary).resolve()), pathlib.Path(work)))
    differing = compare(*found)
    print("the same to the bit" if differing == 0 else f"{differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
