#!/usr/bin/env bash
# The whole story in a few minutes: footage -> clip store -> training on two ranks -> stopped by a signal half-way ->
# gone on -> a sampled clip and a report. `make run` calls this; VIDEO=path trains on footage of your own.
set -euo pipefail
cd "$(dirname "$0")/.."

deck=inputs/demo.toml
run=runs/demo
store=.data/demo.h5
weft=build/weft
ranks=2
stopped_early=75 # weft's exit code for "stopped as asked, resubmit"

say() { printf '\n== %s\n' "$*"; }
die() {
  printf 'demo: %s\n' "$1" >&2
  [ $# -lt 2 ] || printf 'HINT: %s\n' "$2" >&2
  exit 1
}
phase_began=$SECONDS
timed() {
  printf -- '-- %s: %d s\n' "$1" $((SECONDS - phase_began))
  phase_began=$SECONDS
}

# Open MPI refuses root unless told, and pins a rank to one core unless told; other MPIs do not read these.
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
  export OMPI_MCA_btl_vader_single_copy_mechanism=none # containers often forbid it
fi

# Prints the footage to train on; what it says goes to stderr.
footage() {
  if [ -n "${VIDEO:-}" ]; then
    [ -r "$VIDEO" ] || die "VIDEO=$VIDEO cannot be read" "give the path of a video file, or leave VIDEO out"
    printf '%s\n' "$VIDEO"
    return
  fi
  local clip=.data/vtest.avi
  if [ ! -s "$clip" ]; then
    # Real footage that every Debian mirror carries; the package is unpacked here, not installed.
    local work=.data/opencv-doc
    rm -rf "$work"
    mkdir -p "$work"
    if (cd "$work" && apt-get download opencv-doc >download.log 2>&1 ||
      { [ "$(id -u)" -eq 0 ] && apt-get update >download.log 2>&1 && apt-get download opencv-doc >download.log 2>&1; }) &&
      dpkg-deb -x "$work"/opencv-doc_*.deb "$work"; then
      local found
      found=$(find "$work" -name 'vtest.avi*' | head -n 1)
      case "$found" in
        *.gz) gunzip -c "$found" >"$clip.part" && mv "$clip.part" "$clip" ;;
        ?*) mv "$found" "$clip" ;;
      esac
    fi
    rm -rf "$work"
  fi
  if [ -s "$clip" ]; then
    printf '%s\n' "$clip"
  else
    echo "WARN: vtest.avi (Debian package opencv-doc) cannot be fetched: training on FFmpeg's own test picture instead." \
      "VIDEO=path gives real footage." >&2
    echo "lavfi:testsrc2=size=768x576:rate=10:duration=60"
  fi
}

steps_done() { # lines of metrics.jsonl: one a step
  if [ -f "$run/metrics.jsonl" ]; then wc -l <"$run/metrics.jsonl"; else echo 0; fi
}

# Trains in the background and sends SIGUSR1 to mpirun, which hands it to the ranks, once half of the steps are done.
train_and_stop() {
  local half=$1 code=0
  mpirun -n "$ranks" "$weft" train "$deck" run.dir="$run" data.path="$store" &
  local pid=$!
  trap 'kill "$pid" 2>/dev/null || true' EXIT
  while kill -0 "$pid" 2>/dev/null && [ "$(steps_done)" -lt "$half" ]; do sleep 0.2; done
  kill -USR1 "$pid" 2>/dev/null || true
  wait "$pid" || code=$?
  trap - EXIT
  [ "$code" -eq "$stopped_early" ] ||
    die "training was to stop half-way with exit code $stopped_early and ended with $code" "its messages are above"
}

tools/deps.sh
tools/build.sh weft
timed "packages and build"
[ -r "$deck" ] || die "$deck is missing" "run from a complete checkout"
steps=$(awk -F'[ =#]+' '/^\[/ {section = $1} section == "[train]" && $1 == "steps" {print $2}' "$deck")
[ -n "$steps" ] || die "$deck has no train.steps" "set it in the [train] table"

say "footage"
mkdir -p .data runs
video=$(footage)
echo "training on $video"
# Every demo starts from nothing; the one before stays beside it once.
rm -rf "$run.before"
[ ! -e "$run" ] || mv "$run" "$run.before"
rm -f "$store"
timed "footage"

say "ingest: footage -> clip store $store"
mpirun -n "$ranks" "$weft" ingest "$deck" "ingest.inputs=[\"$video\"]" ingest.output="$store"
timed "ingest"

say "train on $ranks ranks: $steps steps, stopped by SIGUSR1 after half of them"
train_and_stop $((steps / 2))
timed "first half"

say "train again: goes on from the checkpoint"
mpirun -n "$ranks" "$weft" train "$deck" run.dir="$run" data.path="$store"
timed "second half"

say "sample a clip from the moving average of the weights"
mpirun -n 1 "$weft" sample "$deck" run.dir="$run" data.path="$store"
timed "sample"

say "report"
"$weft" report "$run"
timed "report"

newest() { find "$run" -type f -name "$1" -printf '%T@ %p\n' | sort -rn | head -n 1 | cut -d' ' -f2-; }
clip=$(newest '*.mp4')
sheet=$(newest '*.png')
report=$(newest '*.html')
for result in "$clip" "$sheet" "$report"; do
  [ -s "$result" ] || die "a result is missing: clip '$clip', contact sheet '$sheet', report '$report'"
done
say "done in $SECONDS s"
printf '  clip           %s\n  contact sheet  %s\n  report         %s\n' "$clip" "$sheet" "$report"
