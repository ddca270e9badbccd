#!/usr/bin/env bash
# The whole story in a few minutes, on two ranks: footage -> clip store -> a VAE trained for a minute -> latents and text
# features -> STDiT3 trained, stopped by a signal half-way, gone on -> clips generated from prompts -> report. `make run` calls
# this; VIDEO=path trains on footage of your own.
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
    [ -s .data/testsrc2_large.mp4 ] ||
      ffmpeg -v error -y -f lavfi -i testsrc2=size=768x576:rate=10:duration=60 .data/testsrc2_large.mp4
    echo .data/testsrc2_large.mp4
  fi
}

steps_done() { # lines of metrics.jsonl: one a step
  if [ -f "$run/stdit/metrics.jsonl" ]; then wc -l <"$run/stdit/metrics.jsonl"; else echo 0; fi
}

# Trains in the background and sends SIGUSR1 to mpirun, which hands it to the ranks, once half of the steps are done.
train_and_stop() {
  local half=$1 code=0
  mpirun -n "$ranks" "$weft" train "$deck" &
  local pid=$!
  trap 'kill "$pid" 2>/dev/null || true' EXIT
  while kill -0 "$pid" 2>/dev/null && [ "$(steps_done)" -lt "$half" ]; do sleep 0.2; done
  kill -USR1 "$pid" 2>/dev/null || true
  wait "$pid" || code=$?
  trap - EXIT
  [ "$code" -eq "$stopped_early" ] ||
    die "training was to stop half-way with exit code $stopped_early and ended with $code" "its messages are above"
  echo "(exit code $code: stopped on request; mpirun's words above, of a job that was aborted, are expected)"
}

tools/deps.sh
# Without a GPU the same program without the CUDA side, whose kernels take as long to compile as all the rest. `make build`
# makes the whole.
if ! nvidia-smi -L >/dev/null 2>&1 && PATH=$PATH:/usr/local/cuda/bin command -v nvcc >/dev/null; then weft=build/weft_cpu; fi
tools/build.sh "${weft#build/}"
timed "packages and build"
[ -r "$deck" ] || die "$deck is missing" "run from a complete checkout"
steps=$(awk -F'[ =#]+' '/^\[/ {section = $1} section == "[train]" && $1 == "steps" {print $2}' "$deck")
# Digits only: $(( )) would evaluate other text.
[[ $steps =~ ^[1-9][0-9]*$ ]] || die "$deck has no number train.steps" "set it in the [train] table"

say "footage"
mkdir -p .data runs
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
# Every demo starts from nothing; the one before stays beside it once.
rm -rf "$run.before"
[ ! -e "$run" ] || mv "$run" "$run.before"
rm -rf "$store" "$latents" "$latents.parts"
timed "footage"

say "ingest: footage -> clip store $store"
mpirun -n "$ranks" "$weft" ingest "$deck" "ingest.inputs=[\"$list\"]" ingest.output="$store"
timed "ingest"

say "train a small VAE on the clips, for about a minute"
mpirun -n "$ranks" "$weft" train "$vae_deck"
timed "VAE"

say "encode: clips -> latents, captions -> text features"
# No T5 can be downloaded here. This one is random and knows letters alone: it tells captions apart and understands nothing.
python3 -B -c 'import sys; sys.path.insert(0, "tests/e2e"); import tiny_models; tiny_models.write_t5(sys.argv[1])' "$t5"
echo "the text encoder is a stand-in for T5: two layers of random numbers, letters for tokens"
mpirun -n "$ranks" "$weft" encode "$deck" data.path="$store"
"$weft" inspect "$latents"
"$weft" export "$run/vae" "$run/vae.safetensors" --ema --latents "$latents"
timed "encode"

say "train STDiT3 on $ranks ranks: $steps steps, stopped by SIGUSR1 after half of them"
train_and_stop $((steps / 2))
timed "first half"

say "train again: goes on from the checkpoint"
mpirun -n "$ranks" "$weft" train "$deck"
timed "second half"

say "generate: prompts -> clips, from the moving average of the weights"
# The new VAE's latents have a mean and a deviation of their own: encode has measured them, and generate reads them in the store.
mpirun -n "$ranks" "$weft" generate "$deck" "generate.prompts=$prompts"
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
echo "To call it by its name:"
echo "  export PATH=$PWD/build:\$PATH"
[ "$(id -u)" -ne 0 ] || echo "  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1     # root, Open MPI"
