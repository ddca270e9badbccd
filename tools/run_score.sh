#!/usr/bin/env bash
# Demo of weft score, some minutes on two ranks, without downloads: trains a small detector on drawn text, evaluates it on new text,
# and scores the pictures and videos of a folder.
#   tools/run_score.sh [FOLDER]     WEFT=path: another binary
# Without a folder, ffmpeg makes some videos and pictures, with and without text.
set -euo pipefail
cd "$(dirname "$0")/.."

deck=inputs/dbnet_demo.toml
run=runs/dbnet_demo
weft=${WEFT:-build/weft}
folder=${1:-$run/media}

. tools/mpi.sh
[ -x "$weft" ] || { echo "$weft is no program. HINT: make build" >&2; exit 2; }
[ $# -eq 0 ] || [ -d "$folder" ] || { echo "$folder is no folder" >&2; exit 2; }
rm -rf "$run"

"$mpiexec" -n 2 "$weft" train "$deck" train.log_every=50
"$mpiexec" -n 2 "$weft" evaluate "$deck" --replace

make_media() {  # NAME SOURCE [WORDS]
  local words=()
  [ -z "${3:-}" ] || words=(-vf "drawtext=text='$3':fontsize=h/9:fontcolor=white:borderw=3:x=(w-tw)/2:y=h*2/3")
  ffmpeg -nostdin -loglevel error -y -f lavfi -i "$2" "${words[@]}" "${@:4}" "$folder/$1"
}
if [ $# -eq 0 ]; then
  mkdir -p "$folder"
  for text in "" "Exit 12" "Open daily"; do
    name=${text:-no text}
    make_media "colours ${name,,}.mp4" gradients=size=640x360:rate=24:c0=0x78BEA0:c1=0x3C7A48:x0=0:y0=0:x1=300:y1=90 \
      "$text" -t 1
    make_media "cells ${name,,}.png" life=size=480x360:mold=10:ratio=0.1:random_seed=1:death_color=#C83232:life_color=#00ff00 \
      "$text" -frames:v 1
  done
fi

# The detector has learnt letters of 12 to 48 pixels; the letters of these pictures have that size at side 320, not at 1024.
"$mpiexec" -n 2 "$weft" score "$deck" --replace score.weights="$run" score.input="$folder" score.output="$run/media_ocr.csv" \
  score.side=320 postprocess.min_text_score=0.6 score.pictures=50
echo "look at $run/evaluation/evaluation.html, $run/media_ocr.csv.html and $run/media_ocr.csv.parts/pictures/"
