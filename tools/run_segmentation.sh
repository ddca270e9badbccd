#!/usr/bin/env bash
# Demo of segmentation, a few minutes on two ranks: trains a small network on shapes drawn in memory, stops it half-way, resumes,
# and evaluates it on new pictures. WEFT=path: another binary.
set -euo pipefail
cd "$(dirname "$0")/.."

deck=inputs/segmentation_demo.toml
run=runs/segmentation_demo
weft=${WEFT:-build/weft}
stopped_early=75 # weft's exit code for "stopped on request; run again to resume"

. tools/mpi.sh
[ -x "$weft" ] || { echo "$weft is no program. HINT: make build" >&2; exit 2; }
rm -rf "$run"

# Half-way, a file `stop` makes the job save and stop, as the signal of a time limit would.
"$mpiexec" -n 2 "$weft" train "$deck" train.log_every=50 &
job=$!
until [ -e "$run/step_200" ] || ! kill -0 "$job" 2>/dev/null; do sleep 1; done
touch "$run/stop"
code=0
wait "$job" || code=$?
[ "$code" -eq "$stopped_early" ] || { echo "the first half ended with $code instead of $stopped_early" >&2; exit 1; }
echo "(exit code $code: stopped on request; the launcher's words above, of a job that was aborted, are expected)"
rm -f "$run/stop" "$run/stopped"
"$mpiexec" -n 2 "$weft" train "$deck" train.log_every=50
"$mpiexec" -n 2 "$weft" evaluate "$deck" --replace
"$weft" report "$run"
echo "look at $run/evaluation/evaluation.html and $run/report.html"
