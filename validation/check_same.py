#!/usr/bin/env python3
"""Two builds of weft give the same bits: for changes that move code and change no result.

    validation/check_same.py BEFORE/weft AFTER/weft

Both run the smoke deck and the chain of the demo (footage -> store -> VAE -> latents -> STDiT3 -> clips) on 1 and 2 ranks,
20 steps each, and so Wan, segmentation and text detection; then reconstruct, evaluate, segment, score and animate. Compared:
losses and gradient norms in metrics.jsonl, the exported weights and their moving average, the latents, the pixels of the
clips, class maps, boxes, tables and videos. Exit status 1 if anything differs.
"""
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import launcher  # noqa: E402
import test_animate  # noqa: E402  (a drawn face, its landmarks, a hum)
import test_dbnet  # noqa: E402
import test_evaluate  # noqa: E402
import test_segmentation  # noqa: E402
import tiny_models  # noqa: E402  (T5s of random numbers)

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
        here |= wan(binary, work, ranks) | pictures(binary, work, ranks) | videos(binary, work, ranks)
        out[f"{ranks} ranks"] = here
    return out


def files(folder, *patterns):
    found = sorted(p for pattern in patterns for p in folder.glob(pattern))
    assert found, f"nothing in {folder} is {patterns}"
    return [(str(p.relative_to(folder)), digest(p)) for p in found]


def wan(binary, work, ranks):
    """Trained on pixels with captions, sampled with UniPC."""
    deck, features = ROOT / "inputs" / "wan_demo.toml", f"text{ranks}.safetensors"
    (work / "umt5").mkdir(exist_ok=True)
    tiny_models.write_t5(str(work / "umt5"), umt5=True)
    weft(binary, work, 1, "ingest", deck, f"ingest.output=wan{ranks}.h5",
         'ingest.inputs=["lavfi:testsrc2=size=192x144:rate=10:duration=4"]')
    facts = subprocess.run([binary, "inspect", f"wan{ranks}.h5"], cwd=work, env=ENVIRONMENT, capture_output=True, text=True,
                           check=True).stdout
    clips = int(re.search(r"(\d+) clips? in ", facts)[1])
    (work / "captions.txt").write_text("people walk over a square\n" * clips)
    given = ["t5.weights=umt5", "run.threads=1"]
    weft(binary, work, ranks, "text", deck, "captions.txt", "--features", features, *given)
    result = trained(binary, work, ranks, deck, f"wan{ranks}", f"data.path=wan{ranks}.h5", f"data.text_features={features}", *given)
    weft(binary, work, ranks, "generate", deck, f"run.dir=wan{ranks}", f"generate.output=wan_clips{ranks}", "sampler.steps=5",
         *given)
    lines = (work / f"wan_clips{ranks}" / "generated.jsonl").read_text().splitlines()
    return {"Wan": result, "Wan's clips": sorted((c["name"], c["pixels"], c["file_xxh3"]) for c in map(json.loads, lines))}


def pictures(binary, work, ranks):
    """Segmentation of drawn shapes and detection of drawn words: trained, evaluated, and applied to pictures and a table."""
    (work / "words").mkdir(exist_ok=True)
    regions = {}
    for i in range(24):
        boxes = [(8 + 5 * i % 23 + 40 * (j % 2), 10 + 30 * (j // 2), 24 + i % 7, 12) for j in range(1 + i % 5)]

        def pixel(x, y, boxes=boxes, i=i):
            ink = any(bx <= x < bx + w and by <= y < by + h and (x * (i + 2) + y) % 5 for bx, by, w, h in boxes)
            return (30, 20 + i, 40) if ink else (200, 220 - (x + i) % 60, 180 + y % 40)
        (work / "words" / f"{i}.png").write_bytes(test_evaluate.png(96, 96, pixel))
        regions[f"words/{i}.png"] = boxes
    (work / "words.jsonl").write_text("".join(
        json.dumps({"path": name, "polygons": [{"points": [[x, y], [x + w, y], [x + w, y + h], [x, y + h]], "ignore": False}
                                               for x, y, w, h in boxes]}) + "\n" for name, boxes in regions.items()))
    (work / "table.csv").write_text("id,path\n" + "".join(f"{i},{name}\n" for i, name in enumerate(regions)))
    (work / "segmentation.toml").write_text(test_segmentation.DECK + '[evaluate]\ndata = "shapes:images=6,classes=3,'
                                            'height=40..72,width=40..72,hues=1,seed=2"\n')
    (work / "text.toml").write_text(test_dbnet.DECK)
    out, words = {}, ["data.path=words.jsonl", "evaluate.data=words.jsonl"]
    for name, deck, given in ("segmentation", "segmentation.toml", []), ("detection", "text.toml", words):
        run = f"{name}{ranks}"
        out[name] = trained(binary, work, ranks, deck, run, "train.ema_decay=0.9", *given)
        weft(binary, work, ranks, "evaluate", deck, f"run.dir={run}", f"evaluate.output={run}_e",
             "evaluate.predictions=true", *given)
        out[name]["evaluated"] = files(work / f"{run}_e", "predictions/*", "pictures/*")
    weft(binary, work, ranks, "segment", "segmentation.toml", f"run.dir=segmentation{ranks}", f"segment.output=maps{ranks}",
         'segment.inputs=["words"]')
    out["segmentation"]["maps"] = files(work / f"maps{ranks}", "**/*.png")
    weft(binary, work, ranks, "score", "text.toml", "score.weights=random:3", "score.input=table.csv",
         f"score.output=scores{ranks}.csv", "postprocess.mask_threshold=0.5", "postprocess.min_text_score=0.35")
    out["detection"]["scores"] = [line.split(",")[2] for line in (work / f"scores{ranks}.csv").read_text().splitlines()]
    assert any(int(n) > 0 for n in out["detection"]["scores"][1:]), out["detection"]["scores"]
    return out


def videos(binary, work, ranks):
    """A clip through the VAE and back, and a face that is animated by networks of random numbers."""
    weft(binary, work, ranks, "reconstruct", ROOT / "inputs" / "demo_vae.toml", f"vae.weights=vae{ranks}", "run.threads=1",
         'reconstruct.inputs=["lavfi:testsrc2=size=64x48:rate=10:duration=2"]', f"reconstruct.output=again{ranks}")
    (work / "animate.toml").write_text(test_animate.DECK)
    (work / "face.png").write_bytes(test_evaluate.png(64, 56, test_animate.drawn_face(64, 56)))
    (work / "points.csv").write_text("".join(f"{x:.3f},{y:.3f}\n" for x, y in test_animate.face_points(32, 28, 36)))
    test_animate.write_wav(work / "hum.wav", 0.2)
    weft(binary, work, ranks, "animate", "animate.toml", f"animate.output=faces{ranks}", "animate.picture=face.png",
         "animate.speech=hum.wav")
    return {"reconstructed": files(work / f"again{ranks}", "**/*.mp4"), "animated": files(work / f"faces{ranks}", "*.mp4")}


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
