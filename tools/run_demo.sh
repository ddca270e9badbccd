#!/usr/bin/env bash
# The demo of `make run`, a few minutes on two ranks: footage -> clip store -> train a VAE for a minute -> encode latents and text
# features -> train STDiT3, stop it by a signal half-way, resume -> generate clips from prompts -> report. VIDEO=path trains on
# your own footage.
set -euo pipefail
cd "$(dirname "$0")/.."

deck=inputs/demo.toml
vae_deck=inputs/demo_vae.toml
run=runs/demo
store=.data/demo.h5
latents=.data/demo_latents.h5
t5=.data/demo_t5
weft=build/weft
ranks=2
stopped_early=75 # weft's exit code for "stopped on request; run again to resume"

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

package_video=.data/vtest.avi
# Real footage from a package on every Debian mirror; it is unpacked here, not installed. Leaves none if it cannot be fetched.
fetch_footage() {
  local work=.data/opencv-doc
  rm -rf "$work"
  mkdir -p "$work"
  if (cd "$work" && apt-get download opencv-doc >download.log 2>&1 ||
    { [ "$(id -u)" -eq 0 ] && apt-get update >download.log 2>&1 && apt-get download opencv-doc >download.log 2>&1; }) &&
    dpkg-deb --fsys-tarfile "$work"/opencv-doc_*.deb | tar -x -C "$work" --wildcards '*/vtest.avi*'; then
    local found
    found=$(find "$work" -name 'vtest.avi*' | head -n 1)
    case "$found" in
      *.gz) gunzip -c "$found" >"$package_video.part" && mv "$package_video.part" "$package_video" ;;
      ?*) mv "$found" "$package_video" ;;
    esac
  fi
  rm -rf "$work"
}

# Prints the path of the footage to train on; messages go to stderr.
footage() {
  if [ -n "${VIDEO:-}" ]; then
    [ -r "$VIDEO" ] || die "VIDEO=$VIDEO cannot be read" "give the path of a video file, or leave VIDEO out"
    printf '%s\n' "$VIDEO"
  elif [ -s "$package_video" ]; then
    printf '%s\n' "$package_video"
  else
    echo "WARN: vtest.avi (Debian package opencv-doc) cannot be fetched: training on FFmpeg's own test picture instead." \
      "VIDEO=path gives real footage." >&2
    [ -s .data/testsrc2_large.mp4 ] ||
      ffmpeg -v error -y -f lavfi -i testsrc2=size=768x576:rate=10:duration=60 .data/testsrc2_large.mp4
    echo .data/testsrc2_large.mp4
  fi
}

steps_done() { # lines of metrics.jsonl: one a step
  if [ -f "$run/stdit/metrics.jsonl" ]; then wc -l <"$run/stdit/metrics.jsonl"; else echo 0; fi
}

# Trains in the background; when half of the steps are done, sends SIGUSR1 to mpiexec, which passes it to the ranks.
train_and_stop() {
  local half=$1 code=0
  "$mpiexec" -n "$ranks" "$weft" train "$deck" &
  local pid=$!
  trap 'kill "$pid" 2>/dev/null || true' EXIT
  while kill -0 "$pid" 2>/dev/null && [ "$(steps_done)" -lt "$half" ]; do sleep 0.2; done
  kill -USR1 "$pid" 2>/dev/null || true
  wait "$pid" || code=$?
  trap - EXIT
  [ "$code" -eq "$stopped_early" ] ||
    die "training should have stopped half-way with exit code $stopped_early, but ended with $code" "its messages are above"
  echo "(exit code $code: stopped on request, as intended; ignore the launcher's message above about an aborted job)"
}

tools/deps.sh --program
mkdir -p .data runs
fetching=
if [ -z "${VIDEO:-}" ] && [ ! -s "$package_video" ]; then # while the compiler works
  fetch_footage &
  fetching=$!
  trap 'kill "$fetching" 2>/dev/null || true' EXIT
fi
# Without a GPU, build only the CPU program: the CUDA kernels take as long to compile as all the rest. `make build` builds both.
if ! nvidia-smi -L >/dev/null 2>&1 && PATH=$PATH:/usr/local/cuda/bin command -v nvcc >/dev/null; then weft=build/weft_cpu; fi
WEFT_TESTS=OFF tools/build.sh "${weft#build/}"
. tools/mpi.sh
timed "packages and build"
[ -r "$deck" ] || die "$deck is missing" "run from a complete checkout"
steps=$(awk -F'[ =#]+' '/^\[/ {section = $1} section == "[train]" && $1 == "steps" {print $2}' "$deck")
# Digits only, because $(( )) would evaluate other text.
[[ $steps =~ ^[1-9][0-9]*$ ]] || die "$deck has no number train.steps" "set it in the [train] table"

say "footage"
[ -z "$fetching" ] || wait "$fetching" || true
video=$(footage)
echo "training on $video, and on a test picture of FFmpeg's"
test_picture=.data/testsrc2.mp4
[ -s "$test_picture" ] || ffmpeg -v error -y -f lavfi -i testsrc2=size=256x192:rate=10:duration=40 "$test_picture"
# Two captions, so that a prompt can make a difference.
list=.data/demo.jsonl
python3 - "$video" "$test_picture" "${VIDEO:+a scene of my own}" >"$list" <<'END'
import json, os, sys
video, picture, mine = sys.argv[1:]
known = "a test picture" if "testsrc2" in video else "people walk over a square"
for path, text in ((os.path.abspath(video), mine or known), (os.path.abspath(picture), "a test picture with moving colours")):
    print(json.dumps({"path": path, "text": text}))
END
prompts=$(python3 -c 'import json, sys; print(json.dumps([json.loads(line)["text"] for line in open(sys.argv[1])]))' "$list")
# Every demo starts from scratch; the results of the previous one are kept once.
rm -rf "$run.before"
[ ! -e "$run" ] || mv "$run" "$run.before"
rm -rf "$store" "$latents" "$latents.parts"
timed "footage"

say "ingest: footage -> clip store $store"
"$mpiexec" -n "$ranks" "$weft" ingest "$deck" "ingest.inputs=[\"$list\"]" ingest.output="$store"
timed "ingest"

say "train a small VAE on the clips, for about a minute"
"$mpiexec" -n "$ranks" "$weft" train "$vae_deck"
timed "VAE"

say "encode: clips -> latents, captions -> text features"
# A small random T5 instead of a download, with letters as tokens: it distinguishes captions but does not understand them.
python3 -B -c 'import sys; sys.path.insert(0, "tests/e2e"); import tiny_models; tiny_models.write_t5(sys.argv[1])' "$t5"
echo "the text encoder is a stand-in for T5: two layers of random numbers, letters for tokens"
"$mpiexec" -n "$ranks" "$weft" encode "$deck" --replace data.path="$store"
"$weft" inspect "$latents"
"$weft" export "$run/vae" "$run/vae.safetensors" --ema --latents "$latents"
timed "encode"

say "train STDiT3 on $ranks ranks: $steps steps, stopped by SIGUSR1 after half of them"
train_and_stop $((steps / 2))
timed "first half"

say "train again: goes on from the checkpoint"
"$mpiexec" -n "$ranks" "$weft" train "$deck"
timed "second half"

say "generate: prompts -> clips, from the moving average of the weights"
# The new VAE's latents have their own mean and deviation: encode measures them, and generate reads them from the store.
"$mpiexec" -n "$ranks" "$weft" generate "$deck" --replace "generate.prompts=$prompts"
timed "generate"

say "report"
"$weft" report "$run/stdit"
python3 -B tools/demo_pictures.py "$run"
timed "report"

newest() { find "$run" -type f -name "$1" -printf '%T@ %p\n' | sort -rn | head -n 1 | cut -d' ' -f2-; }
clip=$(newest '*.mp4')
report=$(newest '*.html')
for result in "$clip" "$report"; do
  [ -s "$result" ] || die "a result is missing: clip '$clip', report '$report'"
done
say "done in $SECONDS s"
printf '  clips   %s\n  report  %s\n  frames  %s\n  program %s\n' "$(dirname "$clip")" "$report" "$run/frames.png" "$weft"
echo "To run weft by name:"
echo "  export PATH=$PWD/build:\$PATH"
[ "$(id -u)" -ne 0 ] || echo "  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1     # root, Open MPI"
