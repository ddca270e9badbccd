#!/usr/bin/env bash
# tools/make_corpus.sh VERSION: writes, with this build, the files that every later weft must be able to load
# (tests/e2e/test_corpus.py) into tests/corpus/VERSION/ (contents: tests/corpus/README.md). WEFT is the program (build/weft).
# VERSION `unreleased` writes only what no released version has: runs of the other models.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
fail() {
  printf 'make_corpus: %s\nHINT: %s\n' "$1" "$2" >&2
  exit "${3:-2}"
}

version=${1:-}
[ $# -eq 1 ] && [[ $version =~ ^([0-9]+\.[0-9]+\.[0-9]+|unreleased)$ ]] || fail "usage: tools/make_corpus.sh VERSION" "as in 0.1.0"
weft=$(realpath "${WEFT:-build/weft}")
[ -x "$weft" ] || fail "$weft is no program" "make build, or WEFT=path"
[ "$version" = unreleased ] || "$weft" --version | grep -q "^weft $version " || fail "$weft is not version $version" "build that version first"
out=tests/corpus/$version
[ ! -e "$out" ] || fail "$out exists already" "files of a release are never changed; before the release, delete it to make it again"
. tools/mpi.sh
for tool in ffmpeg "$mpiexec" python3 xz; do
  command -v "$tool" >/dev/null || fail "$tool is missing" "tools/deps.sh says what weft needs"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/out"
cp tests/corpus/decks/*.toml "$work"
cd "$work"
export OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1
quietly() { "$@" >>log 2>&1 || { tail -n 20 log >&2; fail "failed: $*" "see above" 1; }; }
train() { quietly "$mpiexec" -n 2 "$weft" train "$@"; }
tiny_models() { PYTHONPATH=$repository/tests/e2e quietly python3 -B -c "import tiny_models; tiny_models.$1"; }
draw() { quietly ffmpeg -v error -y -f lavfi -i "$1" "${@:2}" </dev/null; }

# What a release has in addition to the runs of write_models.
write_all() {
  # 1. Footage with captions, labelled pictures, a text encoder.
  draw testsrc2=duration=2:size=32x32:rate=10 -pix_fmt yuv420p one.mp4
  draw smptebars=duration=2:size=32x32:rate=10 -pix_fmt yuv420p two.mp4
  printf 'path,text\none.mp4,"a test picture, moving"\ntwo.mp4,colour bars\n' >list.csv
  mkdir pictures labels
  for i in 0 1 2; do
    draw "testsrc2=size=30x24:rate=10,trim=start_frame=$i:end_frame=$((i + 1))" -frames:v 1 "pictures/$i.png"
    draw "color=black:size=30x24,format=gray,geq=lum='mod(X+$i,5)'" -frames:v 1 -pix_fmt gray "labels/$i.png"
  done
  tiny_models 'write_t5("t5")'

  # 2. Stores.
  quietly "$weft" ingest train.toml ingest.inputs=list.csv 'ingest.frames=[3]' ingest.height=16 ingest.width=16
  quietly "$weft" ingest evaluate.toml ingest.images=pictures ingest.labels=labels ingest.output=images.h5 ingest.num_classes=4
  quietly "$weft" encode latents.toml data.path=clips.h5 t5.weights=t5

  # 3. A run that was stopped half-way, its weights, and its results after resuming.
  train train.toml train.steps=3
  quietly "$weft" export run weights.safetensors
  tar -cJf run.tar.xz --owner=0 --group=0 --numeric-owner run
  train train.toml
  train latents.toml

  # 4. An evaluation of data drawn in memory, which depends on no file.
  quietly "$weft" evaluate evaluate.toml
  quietly "$weft" evaluate evaluate.toml data.path=images.h5 evaluate.output=of_images
  mkdir out/evaluation
  cp clips.h5 latents.h5 images.h5 weights.safetensors run.tar.xz train.toml latents.toml evaluate.toml out
  cp evaluation/{evaluation.json,images.jsonl} out/evaluation
}

# Runs of the other models, stopped half-way, and their results after resuming. Random numbers do not compress, so the weights
# repeat after two channels, and so do gradients and momenta.
write_models() {
  # Own pictures for dbnet: files of the corpus.
  for source in testsrc2 smptebars; do
    draw "$source=size=96x96:rate=1" -frames:v 1 -pix_fmt rgb24 "$source.png"
    echo '{"path": "'$source'.png", "polygons": [{"points": [[10, 10], [80, 14], [78, 40], [9, 36]]}]}' >>pictures.jsonl
  done
  cp testsrc2.png smptebars.png pictures.jsonl out
  for model in vae segmentation dbnet; do
    weights=model.weights
    [ "$model" != vae ] || weights=vae.weights
    train "$model.toml" run.dir=seed train.steps=1
    quietly "$weft" export seed seed.safetensors
    tiny_models 'repeat_channels("seed.safetensors", "start.safetensors")'
    rm -r seed
    train "$model.toml" "$weights=start.safetensors" train.steps=3
    tar -cJf "out/$model.tar.xz" --owner=0 --group=0 --numeric-owner "$model"
    quietly "$weft" export "$model" "$model.safetensors"
    train "$model.toml" "$weights=start.safetensors"
    cp "$model.toml" out
  done
}

write_models
if [ "$version" != unreleased ]; then write_all; fi
PYTHONPATH=$repository/tests/e2e python3 -B - <<'PYTHON'
import json, pathlib
from tiny_models import hash_of_weights

def losses(run):
    return [json.loads(line)["loss"] for line in pathlib.Path(run, "metrics.jsonl").read_text().splitlines()]

def evaluation(folder):
    j = json.loads(pathlib.Path(folder, "evaluation.json").read_text())
    return {key: j[key] for key in ("images", "pixels", "accuracy", "mean_iou")}

expected = {m: {"losses": losses(m), "weights": hash_of_weights(m + ".safetensors")} for m in ("vae", "segmentation", "dbnet")}
if pathlib.Path("run").exists():
    expected |= {"train": losses("run"), "latents": losses("latents_run"), "evaluation": evaluation("evaluation"),
                 "images": evaluation("of_images")}
pathlib.Path("out/expected.json").write_text(json.dumps(expected, indent=1) + "\n")
PYTHON

# 5. Copy into the source tree.
cd "$repository"
cp -r "$work/out" "$out"
bytes=$(du -sb "$out" | cut -f1)
[ "$bytes" -lt 1000000 ] || fail "$out has $bytes bytes, more than 1 MB" "make its models smaller" 1
echo "$out: $bytes bytes; commit it"
