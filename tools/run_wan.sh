#!/usr/bin/env bash
# Demo of Wan, some minutes on two ranks, without weights: footage -> clips -> text features -> train a small Wan on pixels -> clips
# from a prompt, and from a prompt and a picture -> report.
#   [VIDEO=path] [WEFT=build/weft] tools/run_wan.sh       without VIDEO: FFmpeg's test picture
set -euo pipefail
video=${VIDEO:+$(realpath "$VIDEO")}
cd "$(dirname "$0")/.."

deck=inputs/wan_demo.toml
weft=${WEFT:-build/weft}
caption="people walk over a square"
. tools/mpi.sh
[ -x "$weft" ] || { echo "$weft is no program. HINT: make build" >&2; exit 2; }
run() { "$mpiexec" -n 2 "$weft" "$@"; }

mkdir -p .data
PYTHONPATH=tests/e2e python3 -B -c "import tiny_models; tiny_models.write_t5('.data/wan_t5', umt5=True)"
ingest=() picture=()
[ -z "$video" ] || ingest=("ingest.inputs=[\"$video\"]") picture=("generate.references=[\"\", \"$video\"]")
run ingest "$deck" "${ingest[@]}"
clips=$("$weft" inspect .data/wan_demo.h5 | awk '/ clips? in / {print $1}')
for ((i = 0; i < clips; ++i)); do echo "$caption"; done >.data/wan_demo.txt
run text "$deck" .data/wan_demo.txt --features .data/wan_demo_text.safetensors
run train "$deck"
run generate "$deck" "${picture[@]}"
"$weft" report runs/wan_demo
echo "Clips: runs/wan_demo/clips"
