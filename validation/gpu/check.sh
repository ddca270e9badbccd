#!/usr/bin/env bash
# Everything that only a GPU can show. The results are one page, OUT/summary.md, with a verdict a line, written anew after each
# part. A line has the number of its call; the page begins with the calls: commit, GPU, date.
#
#   validation/gpu/check.sh OUT [WEFT]        OUT: folder for the results; WEFT: the binary or the bundle's wrapper (build/weft)
#   validation/gpu/check.sh --list            the parts: group, name, estimated seconds on an H100, and each group's sum
#
# Environment:
#   PARTS=REGEX    runs the groups and parts whose whole names match. Calls with the same OUT add to its page. PARTS=failed:
#                  those that have failed, or were not run for want of time.
#   GOLDEN=DIR     the folder of golden cases (default: ../shared/golden)
#   PYTHON         one with torch, numpy, safetensors, opencv-python-headless; for the groups torch and segmentation also
#                  transformers, sentencepiece, diffusers, beautifulsoup4, ftfy, Pillow; for clips torchvision, scipy, xxhash
#   REHEARSE=1     small sizes, PyTorch on the CPU, no limits of time: finds mistakes without a GPU. WEFT is then the program
#                  on the stand-in for CUDA (tests/cuda_on_cpu):
#                  REHEARSE=1 WEFT_EMULATION_DEVICES=1 validation/gpu/check.sh OUT build/weft_cuda_on_cpu
#
# The most telling groups come first. Every group ends within 570 s (estimates sum to less than 550), for machines that are lent
# for ten minutes a call: a part may take twice its estimate and 20 s, and what is left of its group. No failure stops the
# others. Exit status 1 if any part failed.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
list=0
[ "${1:-}" != --list ] || list=1
[ $# -ge 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
weft=${2:-build/weft} python=${PYTHON:-python3}
# The tests' programs beside it, weft_kernels and weft_probe, also in the bundle; of weft_cuda_on_cpu weft_kernels_cuda_on_cpu.
name=$(basename "$weft")
kernels=$(dirname "$weft")/weft_kernels${name#weft} probe=$(dirname "$weft")/weft_probe${name#weft}
mpirun=$(dirname "$weft")/mpirun
[ -x "$mpirun" ] || mpirun=mpirun
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
rehearse=${REHEARSE:-}
if [ -n "$rehearse" ]; then
  size=small model=inputs/smoke.toml shapes="1x2x4x4" captions=8 torch_device=cpu torch_options="--no-compile" steps=1 pictures=2
  warmup=2 wan_shape=1x2x4x4 side=64 vae_clips="clips=1,frames=5,height=16,width=16" vae_sizes="5x16" rounds=1 ceiling=0.1
  vae_small=("vae.spatial_channels=[32, 32, 32, 32]" vae.filters=32 vae.spatial_res_blocks=1 vae.num_res_blocks=1)
  smoke_small=("data.path=synthetic:clips=64,frames=5,height=16,width=16" train.steps=4)
  wan_small=(model.hidden_size=256 model.num_heads=2 model.depth=1 model.ffn_dim=64 model.text_dim=16 model.text_len=8)
  segmentation_small=(model.encoder=resnet18dilated) text_small=(model.backbone=resnet18 train.batch_size=1)
  segmentation_pairs=(--pairs resnet18dilated+ppm_deepsup) t5_small=(--small --lengths "5,9") animate_clips="three_frames"
  generate_small=("${vae_small[@]}" model.hidden_size=32 model.depth=1 model.num_heads=2 "generate.image_size=[16, 16]"
    generate.num_frames=5 sampler.steps=2)
else
  size=real model=validation/gpu/xl2.toml shapes="1x15x60x106 16x4x32x32" captions=300 torch_device=cuda torch_options="" steps=10 pictures=200
  warmup=4 wan_shape=1x9x60x104 side=512 vae_clips="clips=1,frames=17,height=256,width=256" vae_sizes="17x256 51x512" rounds=5 ceiling=10
  vae_small=() smoke_small=() wan_small=() segmentation_small=() text_small=() segmentation_pairs=() t5_small=() generate_small=()
  animate_clips="crop full_still_strong camera both_references crop_128 crop_256"
fi

# ---- Groups, parts and the page

group=none group_began=0 group_sum=0 failed=0
selected() { [[ $1 =~ ^(${PARTS:-.*})$ || $group =~ ^(${PARTS:-.*})$ ]]; }
end_group() { [ $list = 0 ] || [ "$group" = none ] || printf '%-14s %-32s %5d s\n' "$group" "= all" "$group_sum"; }
group() { end_group; group=$1 group_began=$SECONDS group_sum=0; }

# What a log came to: its figure, or its last line.
figure() {
  { grep -hE 'median|apart|cases are|choices|x as fast|exit code|^ceilings' "$1" || grep -h . "$1"; } | tail -n 1 | tr '|' '/' | cut -c 1-300
}

part() {  # name, estimated seconds, command ...
  local name=$1 estimate=$2 row=$out/$1.row began=$SECONDS outcome status
  shift 2
  if [ $list = 1 ]; then
    printf '%-14s %-32s %5d\n' "$group" "$name" "$estimate"
    group_sum=$((group_sum + estimate))
    return
  fi
  if selected "$name"; then
    local limit=$((2 * estimate + 20)) left=$((group_began + 560 - SECONDS))  # and 10 to be killed
    [ "$limit" -le "$left" ] || limit=$left
    [ -z "$rehearse" ] || limit=3600
    rm -f "$row"
    if [ "$limit" -lt $((estimate / 2)) ]; then
      echo "no time was left of the group's" >"$out/$name.log"
      outcome="NOT RUN" failed=1
    else
      timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1  # weft takes the first signal for "save and stop"
      status=$?
      outcome=ok
      [ $status = 0 ] || { outcome="FAILED, status $status" failed=1; }
      [[ $status =~ ^(124|137)$ && $((SECONDS - began)) -ge $limit ]] && outcome="FAILED, limit of $limit s"
    fi
    echo "| $name | $call | $outcome | $((SECONDS - began)) | $(figure "$out/$name.log") |" \
      "$(sed -n "s/^$name: //p" validation/gpu/before.txt) |" >"$row"
    echo "$name: $outcome"
    page
  fi
}

page() {
  local name file missing=()
  {
    cat "$out/calls.txt"
    printf '\n| part | call | outcome | s | figure | before (results/h100.md) |\n|---|---:|---|---:|---|---|\n'
    for name in $names; do cat "$out/$name.row" 2>/dev/null || missing+=("$name"); done
    printf '\nNot run: %s.\n' "${missing[*]:-nothing}"
    for file in "$out"/clocks_*.csv; do
      awk -F', ' -v call="$(basename "$file" .csv | cut -d_ -f2)" '$3 > 300 { n++; clock += $2; power += $3 } END { if (n)
        printf "\nIn the %d seconds of call %d at over 300 W: %.0f MHz and %.0f W on average.\n", n, call, clock / n, power / n }' "$file"
    done 2>/dev/null
    cat "$out"/step_*_choices.md 2>/dev/null
  } >"$out/summary.md"
}

out=
if [ $list = 0 ]; then
  out=$(mkdir -p "$1" && cd "$1" && pwd)
  names=$(validation/gpu/check.sh --list | awk '$2 != "=" { print $2 }')
  touch "$out/calls.txt"
  call=$(($(wc -l <"$out/calls.txt") + 1))
  gpus="no nvidia-smi;"
  if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader 2>&1 | tr '\n' ';')
    # To tell a slow kernel from a slow GPU.
    nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu --format=csv,noheader,nounits -l 1 >"$out/clocks_$call.csv" 2>/dev/null &
    # shellcheck disable=SC2064  # the watcher's number of now
    trap "kill $! 2>/dev/null" EXIT
  fi
  echo "$call. $("$weft" --version 2>&1 | head -n 1); $gpus $(date -u)" >>"$out/calls.txt"
  page
fi
export out mpirun weft python
if [ "${PARTS:-}" = failed ]; then
  PARTS=$(grep -lE 'FAILED|NOT RUN' "$out"/*.row 2>/dev/null | sed 's,.*/,,; s,\.row$,,' | paste -sd '|')
  [ -n "$PARTS" ] || { echo "check.sh: nothing has failed in $out"; exit 0; }
fi

# ---- Training steps

step() {  # name, estimated seconds, deck and options of bench step ...
  part "$1" "$2" "$weft" bench step "${@:3}" device.kind=cuda --steps "$steps" --warmup "$warmup" --json "$out/$1.json"
}
# The same, and what the run measured and chose: algorithms of products, ways of computing the same thing.
tuned_step() {
  local choices="$out/${1}_choices"
  [ $list = 1 ] || ! selected "$1" || rm -f "$choices.txt" "$choices.md"
  step "$@" --ways "$choices.txt"
  part "${1}_choices" 2 "$python" validation/gpu/choices.py "$choices.txt" "$choices.md"
}
xl2() { echo "$model --captions $captions --shape"; }

# ---- Two ranks on one GPU through NCCL (each passes for a host of its own, over sockets on lo)

# shellcheck disable=SC2317  # called by bash -c, as below
# A training's losses beside those of one rank, or of two on the CPU where ranks share statistics.
two_ranks() {  # name, losses' tolerance, reference's ranks and device, deck, overrides ...
  local run=$out/$1 tolerance=$2 reference=$3 device=$4
  shift 4
  local common=("$@" run.resume=false train.checkpoint_every=0)
  local shared=("${common[@]}" device.kind=cuda device.share=true "run.dir=${run}_2")
  [ "$reference" = 2 ] || common+=(parallel.sp=1)
  "$mpirun" --oversubscribe -n "$reference" "$weft" train "${common[@]}" "device.kind=$device" "run.dir=${run}_1" &&
    "$mpirun" --oversubscribe -n 1 env NCCL_HOSTID=a WEFT_COMM=nccl "$weft" train "${shared[@]}" : \
      -n 1 env NCCL_HOSTID=b WEFT_COMM=nccl "$weft" train "${shared[@]}" &&
    "$python" validation/gpu/same_losses.py "${run}_1/metrics.jsonl" "${run}_2/metrics.jsonl" "$tolerance"
}
# shellcheck disable=SC2317
# One of two ranks is stopped: the job ends with exit code 7 and says which.
stopped_rank() {
  local run=$out/ranks_stopped_run pid rank code named=no
  local words=(train inputs/smoke.toml "$@" train.steps=100000 train.checkpoint_every=0 parallel.hang_timeout=10 run.resume=false
    device.kind=cuda device.share=true "run.dir=$run")
  rm -rf "$run"
  "$mpirun" --oversubscribe -n 1 env NCCL_HOSTID=a WEFT_COMM=nccl "$weft" "${words[@]}" : \
    -n 1 env NCCL_HOSTID=b WEFT_COMM=nccl "$weft" "${words[@]}" &
  local job=$!
  while kill -0 "$job" 2>/dev/null && [ ! -s "$run/metrics.jsonl" ]; do sleep 1; done
  pid=$(pgrep -f "^[^ ]*weft[^ ]* train .*run.dir=$run" | tail -n 1)
  [ -n "$pid" ] || { kill "$job"; wait "$job"; echo "no rank was found to stop"; return 1; }
  rank=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')
  kill -STOP "$pid"
  wait "$job"
  code=$?
  kill -KILL "$pid" 2>/dev/null
  rm -rf "$run"
  # part() sends what the job says to this file.
  grep -q "late: rank $rank on .*does not answer" "$out/ranks_stopped.log" && named=yes
  echo "exit code $code (7 is right); rank $rank named as late: $named"
  [ "$code $named" = "7 yes" ]
}
export -f two_ranks stopped_rank
ranks() {  # as two_ranks
  part "ranks_$1" 20 bash -c 'two_ranks "$@"' two_ranks "ranks_$1" "${@:2}"
  [ $list = 1 ] || rm -rf "$out/ranks_$1_1" "$out/ranks_$1_2"
}
tiny_wan=(inputs/wan_1.3b_train.toml model.weights= model.dtype=f32 model.hidden_size=256 model.num_heads=2 model.depth=2
  model.ffn_dim=512 model.text_dim=64 model.text_len=16 train.steps=8 train.micro_batches=2
  "data.path=synthetic:clips=8,frames=5,height=16,width=16,channels=16,latent=1,tokens=12,text_channels=64")

times() {  # part, filter, estimated seconds, options ...
  part "times_$1" "$3" "$kernels" --size "$size" --filter "$2" --device cuda --time-only --json "$out/times_$1.json" "${@:4}"
}

# ---- Call 1: what decides most

group first
part doctor 15 "$weft" doctor
part kernels_small 10 "$kernels" --size small --check-only --device cuda --json "$out/kernels_small.json"
# Every way of computing that an operation has, whatever its size: alone, and the one that is measured to be the fastest.
for filter in attention_backward linear; do
  part "kernels_ways_$filter" 15 "$kernels" --size small --ways --device cuda --filter $filter
done
shape=${shapes%% *}
try() { echo "device.try=[$(printf '"%s",' "$@")]" | sed 's/,]/]/'; }
# shellcheck disable=SC2046
{
  tuned_step "step_$shape" 30 $(xl2) "$shape" --ceiling "$ceiling"
  step "step_${shape}_untuned" 20 $(xl2) "$shape" --untuned
  step step_five 20 $(xl2) "$shape" "$(try five)"
  step step_ways 20 $(xl2) "$shape" "$(try gelu_sums second_stream kept)"
  step step_fp8 20 $(xl2) "$shape" model.dtype=fp8 "$(try fp8)"
  part steps_compared 1 "$python" validation/gpu/steps.py "$out" 1e-2 "step_$shape" "step_${shape}_untuned" step_five step_ways
  step step_profile 20 $(xl2) "$shape" --profile
}
# Its products must be the library's: they fall back without a word where it has none. GPUs before sm_89 have no e4m3 at all.
# shellcheck disable=SC2016  # for the other shell
part kernels_fp8 15 bash -c '"$@" | tee "$out/kernels_fp8.txt" && grep -Eq "^fp8: |sm_8[0-8]," "$out/kernels_fp8.txt"' kernels_fp8 \
  "$kernels" --size small --ways --filter fp8 --device cuda
wan=(inputs/wan_1.3b_train.toml model.weights= "${wan_small[@]}")
tuned_step step_wan 35 "${wan[@]}" --shape "$wan_shape" --ceiling "$ceiling"
step step_wan_five 25 "${wan[@]}" --shape "$wan_shape" "$(try five)"
part steps_wan_compared 1 "$python" validation/gpu/steps.py "$out" 1e-2 step_wan step_wan_five
ranks bf16 1e-3 1 cuda inputs/smoke.toml model.dtype=bf16 "${smoke_small[@]}"
ranks wan_zero_3 1e-6 1 cuda "${tiny_wan[@]}" parallel.zero=3
ranks sp 1e-6 1 cuda inputs/smoke.toml parallel.sp=2 "${smoke_small[@]}"
ranks wan_sp 1e-6 1 cuda "${tiny_wan[@]}" parallel.sp=2
ranks wire_bf16 1e-3 1 cuda inputs/smoke.toml parallel.wire=bf16 "${smoke_small[@]}"
part ranks_stopped 50 bash -c 'stopped_rank "$@"' stopped_rank "${smoke_small[@]}"
times attention attention 60
times attention_five attention_backward 30 --way five
# shellcheck disable=SC2086
part attention_cudnn 40 "$python" validation/gpu/attention.py "$out/times_attention.json" --device $torch_device \
  --json "$out/attention_cudnn.json"

group systems
for dtype in f32 bf16; do
  step "step_segmentation_$dtype" 20 inputs/segmentation_r50.toml "model.dtype=$dtype" "data.short_sides=[$side]" \
    "data.path=shapes:images=8,classes=8,height=$side,width=$side" "${segmentation_small[@]}"
  step "step_text_$dtype" 20 inputs/dbnetpp_icdar2015.toml "model.dtype=$dtype" "data.crop=$side" \
    "data.path=text:images=16,height=$side,width=$side,words=1..8,letters=12..48" "${text_small[@]}"
done
step step_text_no_graphs 20 inputs/dbnetpp_icdar2015.toml model.dtype=bf16 device.graphs=false "data.crop=$side" \
  "data.path=text:images=16,height=$side,width=$side,words=1..8,letters=12..48" "${text_small[@]}"
for stage in 1 2 3; do
  step "step_vae_$stage" 20 inputs/vae_stage$stage.toml vae.weights= vae_train.lpips_weights= train.batch_size=1 \
    "data.path=synthetic:$vae_clips" "${vae_small[@]}"
done
# Whole trainings, GPU and CPU side by side.
beside_cpu() {  # name, estimated seconds on the CPU, tolerance of the losses, deck, overrides ...
  local common=("${@:4}" run.resume=false train.checkpoint_every=0)
  part "$1_cpu" "$2" "$weft" train "${common[@]}" device.kind=cpu "run.dir=$out/$1_cpu"
  part "$1_cuda" 15 "$weft" train "${common[@]}" device.kind=cuda "run.dir=$out/$1_cuda"
  part "$1" 2 "$python" validation/gpu/same_losses.py "$out/$1_cpu/metrics.jsonl" "$out/$1_cuda/metrics.jsonl" "$3"
  [ $list = 1 ] || rm -rf "$out/$1_cpu" "$out/$1_cuda"
}
beside_cpu train_smoke 15 1e-4 inputs/smoke.toml "${smoke_small[@]}"
# At 0.02, from random weights, rounding grows from step to step.
beside_cpu train_segmentation 40 1e-3 inputs/segmentation_r50.toml model.encoder=resnet18dilated model.dropout=0 train.epochs=0 \
  train.steps=4 train.micro_batches=2 train.lr_encoder=1e-4 train.lr_decoder=1e-4 "data.short_sides=[48, 64]" \
  "data.path=shapes:images=32,classes=8,height=64..80,width=64..96"
beside_cpu train_text 40 1e-3 inputs/dbnet_demo.toml train.steps=4 train.batch_size=2
part video_tests 60 env WEFT_BIN="$(realpath -m "$weft")" WEFT_MPIEXEC="$mpirun" \
  "$python" -B tests/e2e/test_cuda_on_cpu.py -v Vae Video
part score 40 "$python" validation/gpu/score.py "$weft" --pictures "$pictures"

group ranks
ranks zero_1 1e-6 1 cuda inputs/smoke.toml "${smoke_small[@]}"
ranks zero_0 1e-6 1 cuda inputs/smoke.toml parallel.zero=0 "${smoke_small[@]}"
ranks zero_3 1e-6 1 cuda inputs/smoke.toml parallel.zero=3 "${smoke_small[@]}"
ranks buckets 1e-6 1 cuda inputs/smoke.toml parallel.bucket_mib=0.05 "${smoke_small[@]}"
# From random weights rounding grows from step to step.
ranks sync_bn 1e-3 2 cpu inputs/segmentation_demo.toml train.steps=2 train.lr_encoder=1e-4 train.lr_decoder=1e-4
ranks sync_text 1e-3 2 cpu inputs/dbnet_demo.toml train.steps=2
part comm_nccl 25 "$mpirun" --oversubscribe -n 1 env NCCL_HOSTID=a WEFT_COMM=nccl "$weft" bench comm --device cuda --share --mib 16 \
  --json "$out/comm_nccl.json" : -n 1 env NCCL_HOSTID=b WEFT_COMM=nccl "$weft" bench comm --device cuda --share --mib 16

# ---- Kernels

group times
# shellcheck disable=SC2046
for shape in ${shapes#"${shapes%% *}"}; do
  tuned_step "step_$shape" 30 $(xl2) "$shape"
  step "step_${shape}_untuned" 30 $(xl2) "$shape" --untuned
done
step step_wan_fp8 40 "${wan[@]}" --shape "$wan_shape" model.dtype=fp8 "$(try fp8)"
WEFT_ATTENTION=sm80 times attention_sm80 attention 60
times fp8 fp8 30
for kind in norm rope gate linear adamw; do times $kind $kind 30; done
for kind in conv batch_norm pool bilinear deform text_ volume; do times $kind $kind 25; done
# Real sizes are checked against the CPU, which takes it minutes: what the limit cuts off is still in the log.
group real
part real_attention 200 "$kernels" --size "$size" --filter attention --device cuda --json "$out/real_attention.json"
part real_conv 140 "$kernels" --size "$size" --filter conv --device cuda --json "$out/real_conv.json"

for tool in memcheck racecheck initcheck; do
  group $tool
  [ $list = 1 ] || command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on this machine"; continue; }
  for filter in attention ""; do
    part "$tool${filter:+_$filter}" $((${#filter} ? 150 : 390)) compute-sanitizer --tool $tool --error-exitcode 9 \
      "$kernels" --size small --check-only --device cuda --filter "$filter"
  done
done

# ---- Golden cases, and everything beside PyTorch

group golden
for dtype in f32 bf16; do
  part "golden_$dtype" 250 env WEFT_BIN="$(realpath -m "$weft")" WEFT_PROBE_BIN="$(realpath -m "$probe")" WEFT_MPIEXEC="$mpirun" \
    WEFT_GOLDEN="${GOLDEN:-../shared/golden}" WEFT_TEST_DEVICE=cuda WEFT_TEST_DTYPE=$dtype "$python" -B tests/e2e/test_golden.py -v
done

group torch
for shape in $shapes; do
  # shellcheck disable=SC2086
  part "torch_step_$shape" 80 "$python" validation/gpu/torch_step.py "$model" --shape "$shape" --steps "$steps" \
    --captions "$captions" --device $torch_device $torch_options --json "$out/torch_step_$shape.json"
done
for kind in "bf16" "f32" "f32 --tf32"; do
  # shellcheck disable=SC2086
  for clip in $vae_sizes; do
    name=vae_${clip}_${kind// --/_}
    part "$name" 40 "$python" validation/compare_vae.py --weft "$weft" --device cuda --torch-device $torch_device --dtype $kind \
      --frames "${clip%x*}" --size "${clip#*x}" --rounds $rounds --json "$out/$name.json" --small "${vae_small[@]}"
  done
  # shellcheck disable=SC2086
  part "t5_${kind// --/_}" 40 "$python" validation/compare_t5.py --weft "$weft" --device cuda --torch-device $torch_device \
    --dtype $kind --rounds $rounds --json "$out/t5_${kind// --/_}.json" "${t5_small[@]}"
done

# Random weights beside PyTorch in float64 on the CPU, and predictions to the pixel.
group segmentation
for dtype in f32 bf16; do
  part "segmentation_$dtype" 250 "$python" validation/check_segmentation.py --weft "$weft" --device cuda --dtype $dtype \
    --json "$out/segmentation_$dtype.json" "${segmentation_pairs[@]}"
done

group clips
# STDiT3-XL/2 and the VAE with random weights; without T5, whose weights are 19 GB: null captions, which cost as much.
part generate_480p 60 "$weft" generate inputs/generate.toml device.kind=cuda generate.weights=random:1 vae.weights=random:2 \
  t5.weights= "generate.output=$out/clips" "${generate_small[@]}"
[ ! -f "$out/clips/generate_report.json" ] || mv "$out/clips/generate_report.json" "$out/generate_480p.json"
[ $list = 1 ] || rm -rf "$out/clips"
# shellcheck disable=SC2086
part animate 450 "$python" validation/check_animate.py --weft "$weft" --device cuda --clips $animate_clips --output "$out/animate.json"

end_group
exit $failed
