#!/usr/bin/env bash
# The pictures of docs/gallery.md, into docs/images, from runs of the demos:
#   tools/run_segmentation.sh; tools/run_score.sh; tools/run_animate.sh; tools/gallery.sh [OWN]
# OWN is the folder in which the commands of docs/own_footage.md were run. `make run` makes its frames.png by itself.
set -euo pipefail
own=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."
out=docs/images

# rows OUT WIDTH HEIGHT FRAMES FILE...: a row a file, of so many frames, every second one; of a picture the picture.
rows() {
  local name=$1 width=$2 height=$3 frames=$4 inputs=() graph="" row=0 file
  shift 4
  for file in "$@"; do
    inputs+=(-i "$file")
    graph+="[$row:v]framestep=2,scale=$width:$height:force_original_aspect_ratio=decrease:flags=neighbor,"
    graph+="pad=$width:$height:0:0:white,setsar=1,tile=${frames}x1:padding=4:color=white[r$row];"
    row=$((row + 1))
  done
  local all=""
  for ((i = 0; i < row; ++i)); do all+="[r$i]"; done
  ffmpeg -nostdin -v error -y "${inputs[@]}" -filter_complex "$graph${all}vstack=inputs=$row" -frames:v 1 -q:v 4 "$out/$name"
  echo "$out/$name"
}

first() { # first N FOLDER PATTERN: the first N files
  find "$2" -name "$3" | sort | head -n "$1"
}

if [ -d runs/segmentation_demo/evaluation/pictures ]; then
  mapfile -t files < <(first 5 runs/segmentation_demo/evaluation/pictures '*.png')
  rows segmentation.jpg 520 130 1 "${files[@]}"
fi
if [ -d runs/dbnet_demo/media_ocr.csv.parts/pictures ]; then
  mapfile -t files < <(first 6 runs/dbnet_demo/media_ocr.csv.parts/pictures '*.png')
  inputs=()
  for file in "${files[@]}"; do inputs+=(-i "$file"); done
  ffmpeg -nostdin -v error -y "${inputs[@]}" -filter_complex \
    "concat=n=${#files[@]}:v=1,scale=240:240,tile=3x2:padding=4:color=white" -frames:v 1 -q:v 4 "$out/boxes.jpg"
  echo "$out/boxes.jpg"
fi
if [ -d runs/animate_demo/clips ]; then
  mapfile -t files < <(first 1 runs/animate_demo/clips '*.mp4')
  ffmpeg -nostdin -v error -y -i runs/animate_demo/face.png -i "${files[0]}" -filter_complex \
    "[0:v]scale=128:128,setsar=1[face];[1:v]framestep=16,scale=128:128,setsar=1,tile=5x1[clip];[face][clip]hstack" \
    -frames:v 1 -q:v 4 "$out/head.jpg"
  echo "$out/head.jpg"
fi
if [ -n "$own" ]; then
  mapfile -t files < <(first 4 "$own/runs/own_vae/reconstructed" '*.mp4')
  rows own_vae.jpg 256 128 2 "${files[@]}"
  mapfile -t files < <(first 8 "$own/runs/own/generated" '*.mp4')
  rows own_clips.jpg 96 96 5 "${files[@]}"
fi
