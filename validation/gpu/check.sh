#!/usr/bin/env bash
# Everything that only a GPU can show, in one command:
#
#   validation/gpu/check.sh OUT [WEFT]      OUT: folder for the results; WEFT: the binary or the bundle's wrapper (build/weft)
#
# 1 doctor, 2 every kernel against the CPU side, also under compute-sanitizer, 3 kernels timed, both attention paths,
# 4 golden cases (in the folder GOLDEN), 5 NCCL with one rank and with several on one GPU, 6 smoke deck: losses of GPU and
# CPU side by side, 7 training steps of STDiT3-XL/2 beside PyTorch in the same run, 8 VAE and T5: tests against the CPU, encode
# and decode beside diffusers with cuDNN, a layer beside transformers, VAE training steps, clips of 480p end to end,
# 9 segmentation: golden cases, networks and evaluation beside PyTorch, its operations timed, training on GPU and CPU, a step
# of ResNet-50, 10 text detection: training on GPU and CPU, a step of DBNet++; animation: clips beside PyTorch. Nothing stops
# at a failure: every part writes its JSON and log to OUT, OUT/summary.txt has one line a part.
# Exit status 1 if any part failed. PARTS=REGEX runs the parts whose whole names match. The most telling come first; in calls
# of at most ten minutes:
#   PARTS='doctor|kernels_small|step_.*|kernel_times_.*|ranks_.*'   PARTS='rates_.*|golden_.*|smoke_.*|comm_.*|video_tests'
#   PARTS='sanitizer_.*'   PARTS='kernels|attention_sm80'   PARTS='vae_.*|t5_.*|generate_480p'
#   PARTS='segmentation_.*'   PARTS='text_.*|animate'
# Packages of PYTHON: torch, numpy, safetensors; for part 8 transformers, sentencepiece, diffusers, beautifulsoup4, ftfy;
# for part 9 Pillow; for part 10 also torchvision, opencv-python-headless, scipy, xxhash.
# REHEARSE=1 runs every part on small sizes, with PyTorch on the CPU, to find mistakes without a GPU; WEFT is then the program
# on the stand-in for CUDA: REHEARSE=1 WEFT_EMULATION_DEVICES=1 validation/gpu/check.sh OUT build/weft_cuda_on_cpu
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
out=$(mkdir -p "$1" && cd "$1" && pwd)
weft=${2:-build/weft}
python=${PYTHON:-python3}
# The tests' programs beside it, weft_kernels and weft_probe, also in the bundle; of weft_cuda_on_cpu weft_kernels_cuda_on_cpu.
name=$(basename "$weft")
kernels=$(dirname "$weft")/weft_kernels${name#weft} probe=$(dirname "$weft")/weft_probe${name#weft}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
slower=1
if [ -n "${REHEARSE:-}" ]; then
  slower=5  # limits are for a GPU
  size=small model=inputs/smoke.toml shapes="1x2x4x4" captions=8 torch_device=cpu torch_options="--no-compile"
  vae_sizes="5x16"
  vae_small=("vae.spatial_channels=[32, 32, 32, 32]" vae.filters=32 vae.spatial_res_blocks=1 vae.num_res_blocks=1)
  smoke_small=("data.path=synthetic:clips=64,frames=5,height=16,width=16" train.steps=4)
  t5_small=(--small --lengths "5,9") rounds=1 steps=2
  train_small=("${vae_small[@]}" "data.path=synthetic:clips=4,frames=5,height=16,width=16")
  segmentation_pairs=(--pairs resnet18dilated+ppm_deepsup) segmentation_side=64
  segmentation_small=(model.encoder=resnet18dilated)
  text_small=(model.backbone=resnet18 train.batch_size=1) text_side=64 animate_clips="three_frames"

  generate_small=("${vae_small[@]}" model.hidden_size=32 model.depth=1 model.num_heads=2 "generate.image_size=[16, 16]"
    generate.num_frames=5 sampler.steps=2)
else
  size=real model=validation/gpu/xl2.toml shapes="1x15x60x106 16x4x32x32" captions=300 torch_device=cuda torch_options=""
  vae_sizes="17x256 51x512" smoke_small=() vae_small=() t5_small=() rounds=5 steps=10
  train_small=("data.path=synthetic:clips=8,frames=17,height=256,width=256")
  generate_small=() segmentation_pairs=() segmentation_small=() segmentation_side=512
  text_small=() text_side=640 animate_clips="crop full_still_strong camera both_references crop_128 crop_256"
fi
mpirun=$(dirname "$weft")/mpirun
[ -x "$mpirun" ] || mpirun=mpirun
summary=$out/summary.txt
{ "$weft" --version; nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader; date -u; } >"$summary" 2>&1
failed=0
# Clocks and power of every second, to tell a slow kernel from a slow GPU.
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv,nounits -l 1 >"$out/clocks_$$.csv" 2>/dev/null &
  trap 'kill %1 2>/dev/null' EXIT
fi

part() {  # name, time limit in seconds, command ...
  local name=$1 limit=$2
  shift 2
  [[ $name =~ ^(${PARTS:-.*})$ ]] || return 0
  local began=$SECONDS
  if timeout $((limit * slower)) "$@" >"$out/$name.log" 2>&1; then
    echo "ok      $name ($((SECONDS - began)) s): $(tail -n 1 "$out/$name.log")" >>"$summary"
  else
    echo "FAILED  $name (status $?, $((SECONDS - began)) s): $(tail -n 2 "$out/$name.log" | tr '\n' ' ')" >>"$summary"
    failed=1
  fi
}

part doctor 60 "$weft" doctor
part kernels_small 200 "$kernels" --size small --check-only --device cuda --json "$out/kernels_small.json"
# A training step of STDiT3-XL/2, with the products' algorithms measured as in training, and without; where its time goes.
for shape in $shapes; do
  for kind in "" --untuned; do
    # shellcheck disable=SC2086
    part "step_weft_$shape${kind//--/_}" 120 "$weft" bench step "$model" device.kind=cuda --shape "$shape" --captions "$captions" \
      --steps "$steps" --warmup 4 $kind --json "$out/step_weft_$shape${kind//--/_}.json"
  done
done
part step_profile 120 "$weft" bench step "$model" device.kind=cuda --shape "${shapes%% *}" \
  --captions "$captions" --steps 3 --warmup 2 --profile
for kind in attention norm gate linear adamw; do
  part "kernel_times_$kind" 100 "$kernels" --size "$size" --filter $kind --device cuda --time-only --json "$out/kernel_times_$kind.json"
done

# Two ranks of a training on one GPU, through NCCL, beside one rank, or two on the CPU where ranks share statistics: the losses
# agree. Each rank passes for a host of its own, so that NCCL takes them (over sockets on lo).
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
export -f two_ranks
export out mpirun weft python
ranks() {
  part "ranks_$1" 90 bash -c 'two_ranks "$@"' two_ranks "ranks_$1" "${@:2}"
  rm -rf "$out/ranks_$1_1" "$out/ranks_$1_2"
}
ranks zero_1 1e-5 1 cuda inputs/smoke.toml "${smoke_small[@]}"
ranks zero_0 1e-5 1 cuda inputs/smoke.toml parallel.zero=0 "${smoke_small[@]}"
ranks wire_bf16 1e-2 1 cuda inputs/smoke.toml parallel.wire=bf16 "${smoke_small[@]}"
ranks bf16 1e-2 1 cuda inputs/smoke.toml model.dtype=bf16 "${smoke_small[@]}"
ranks sp 1e-5 1 cuda inputs/smoke.toml parallel.sp=2 "${smoke_small[@]}"
ranks zero_3 1e-5 1 cuda inputs/smoke.toml parallel.zero=3 "${smoke_small[@]}"
wan=(inputs/wan_1.3b_train.toml model.weights=)
wan_small=("data.path=synthetic:clips=8,frames=5,height=16,width=16,channels=16,latent=1" model.hidden_size=256 model.num_heads=2
  model.depth=2 model.ffn_dim=512 model.text_dim=64 model.text_len=16 train.steps=8 train.micro_batches=2)
ranks wan_zero_3 1e-5 1 cuda "${wan[@]}" "${wan_small[@]}" model.dtype=f32 parallel.zero=3
ranks wan_sp 1e-5 1 cuda "${wan[@]}" "${wan_small[@]}" model.dtype=f32 parallel.sp=2
ranks sync_bn 1e-2 2 cpu inputs/segmentation_demo.toml train.steps=6 train.lr_encoder=1e-4 train.lr_decoder=1e-4

# Twenty steps of each vision model and of Wan; DBNet with and without recorded steps.
rate() {  # name, deck, overrides ...
  part "rates_$1" 90 "$weft" train "$2" device.kind=cuda "run.dir=$out/rates_$1" run.resume=false train.epochs=0 \
    "train.steps=$((steps * 2))" train.micro_batches=1 train.checkpoint_every=0 "${@:3}"
  [ ! -f "$out/rates_$1/metrics.jsonl" ] || cp "$out/rates_$1/metrics.jsonl" "$out/rates_$1.jsonl"
  rm -rf "$out/rates_$1"
}
for dtype in f32 bf16; do
  rate "segmentation_$dtype" inputs/segmentation_r50.toml "model.dtype=$dtype" "data.short_sides=[$segmentation_side]" \
    "data.path=shapes:images=64,classes=8,height=$segmentation_side,width=$segmentation_side,seed=1" "${segmentation_small[@]}"
  rate "text_$dtype" inputs/dbnetpp_icdar2015.toml "model.dtype=$dtype" "data.crop=$text_side" \
    "data.path=text:images=64,height=$text_side,width=$text_side,words=1..8,letters=12..48,seed=1" "${text_small[@]}"
done
[ "$size" = small ] || wan_small=("data.path=synthetic:clips=8,frames=9,height=60,width=104,channels=16,latent=1")
rate wan "${wan[@]}" "${wan_small[@]}"
rate text_no_graphs inputs/dbnetpp_icdar2015.toml model.dtype=bf16 device.graphs=false "data.crop=$text_side" \
  "data.path=text:images=64,height=$text_side,width=$text_side,words=1..8,letters=12..48,seed=1" "${text_small[@]}"

part kernels 500 "$kernels" --size "$size" --device cuda --json "$out/kernels.json"
part attention_sm80 200 env WEFT_ATTENTION=sm80 "$kernels" --size "$size" --filter attention --device cuda \
  --json "$out/attention_sm80.json"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck; do
    part "sanitizer_$tool" 400 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$kernels" --size small --check-only --device cuda
  done
else
  echo "absent  compute-sanitizer is not on this machine" >>"$summary"
fi

for dtype in f32 bf16; do
  part "golden_$dtype" 300 env WEFT_BIN="$(realpath "$weft")" WEFT_PROBE_BIN="$(realpath "$probe")" WEFT_MPIEXEC="$mpirun" WEFT_GOLDEN="${GOLDEN:-../shared/golden}" \
    WEFT_TEST_DEVICE=cuda WEFT_TEST_DTYPE=$dtype "$python" -B tests/e2e/test_golden.py -v
done

part comm_1 60 "$mpirun" -n 1 env WEFT_COMM=nccl "$weft" bench comm --device cuda --json "$out/comm_1.json"
# Several ranks on one GPU: each passes for a host of its own, so that NCCL takes them (over sockets on lo).
part comm_2_nccl 90 "$mpirun" --oversubscribe -n 1 env NCCL_HOSTID=a WEFT_COMM=nccl "$weft" bench comm --device cuda --share --mib 16 \
  --json "$out/comm_2.json" : -n 1 env NCCL_HOSTID=b WEFT_COMM=nccl "$weft" bench comm --device cuda --share --mib 16
part comm_2_staged 90 "$mpirun" --oversubscribe -n 2 "$weft" bench comm --device cuda --share --mib 16

for device in cpu cuda; do
  part "smoke_$device" 120 "$weft" train inputs/smoke.toml device.kind=$device "run.dir=$out/run_$device" run.resume=false \
    "${smoke_small[@]}"
done
part smoke_losses 10 "$python" validation/gpu/same_losses.py "$out/run_cpu/metrics.jsonl" "$out/run_cuda/metrics.jsonl" 1e-4
rm -rf "$out/run_cpu" "$out/run_cuda"

# The same steps in PyTorch.
for shape in $shapes; do
  # shellcheck disable=SC2086
  part "torch_step_$shape" 240 "$python" validation/gpu/torch_step.py "$model" --shape "$shape" --steps "$steps" \
    --captions "$captions" --device $torch_device $torch_options --json "$out/torch_step_$shape.json"
done

# VAE and T5. What the tests say of small models, GPU against CPU, then speed at the released sizes.
part video_tests 400 env WEFT_BIN="$(realpath "$weft")" WEFT_MPIEXEC="$mpirun" \
  "$python" -B tests/e2e/test_cuda_on_cpu.py -v Vae Video
for clip in $vae_sizes; do
  for kind in "bf16" "f32" "f32 --tf32"; do
    name=vae_${clip}_${kind// --/_}
    # shellcheck disable=SC2086
    part "$name" 300 "$python" validation/compare_vae.py --weft "$weft" --device cuda --torch-device $torch_device --dtype $kind \
      --frames "${clip%x*}" --size "${clip#*x}" --rounds $rounds --json "$out/$name.json" --small "${vae_small[@]}"
  done
done
for kind in "bf16" "f32" "f32 --tf32"; do
  name=t5_${kind// --/_}
  # shellcheck disable=SC2086
  part "$name" 120 "$python" validation/compare_t5.py --weft "$weft" --device cuda --torch-device $torch_device --dtype $kind \
    --rounds $rounds --json "$out/$name.json" "${t5_small[@]}"
done
for stage in 1 2 3; do
  part "vae_train_$stage" 200 "$weft" train inputs/vae_stage$stage.toml device.kind=cuda "run.dir=$out/vae_$stage" \
    run.resume=false vae.weights= vae_train.lpips_weights= train.steps=$((steps / 2)) train.micro_batches=1 \
    train.checkpoint_every=0 "${train_small[@]}"
  [ ! -f "$out/vae_$stage/metrics.jsonl" ] || cp "$out/vae_$stage/metrics.jsonl" "$out/vae_train_$stage.jsonl"
  rm -rf "$out/vae_$stage"
done
# STDiT3-XL/2 and the VAE with random weights; without T5, whose weights are 19 GB: null captions, which cost as much.
part generate_480p 500 "$weft" generate inputs/generate.toml device.kind=cuda generate.weights=random:1 vae.weights=random:2 \
  t5.weights= "generate.output=$out/clips" "${generate_small[@]}"
[ ! -f "$out/clips/generate_report.json" ] || cp "$out/clips/generate_report.json" "$out/generate_480p.json"
rm -rf "$out/clips"

# Segmentation. Golden cases alone, then random weights beside PyTorch in float64 on the CPU, and predictions to the pixel.
for dtype in f32 bf16; do
  part "segmentation_golden_$dtype" 200 env WEFT_BIN="$(realpath "$weft")" WEFT_PROBE_BIN="$(realpath "$probe")" WEFT_MPIEXEC="$mpirun" \
    WEFT_GOLDEN="${GOLDEN:-../shared/golden}" WEFT_TEST_DEVICE=cuda WEFT_TEST_DTYPE=$dtype \
    "$python" -B tests/e2e/test_golden.py -v -k segmentation
  part "segmentation_check_$dtype" 400 "$python" validation/check_segmentation.py --weft "$weft" --device cuda --dtype $dtype \
    --json "$out/segmentation_check_$dtype.json" "${segmentation_pairs[@]}"
done
for kind in conv batch_norm pool bilinear channels nll predict_classes normalise_images sgd_step; do
  part "segmentation_kernels_$kind" 100 "$kernels" --size "$size" --filter $kind --device cuda \
    --json "$out/segmentation_kernels_$kind.json"
done
segmentation=("data.path=shapes:images=32,classes=8,height=64..80,width=64..96,seed=1" "data.short_sides=[48, 64]" model.dropout=0
  model.encoder=resnet18dilated train.epochs=0 train.steps=4 train.micro_batches=2 train.checkpoint_every=0
  train.lr_encoder=1e-4 train.lr_decoder=1e-4)  # at 0.02, from random weights, rounding grows from step to step
for device in cpu cuda; do
  part "segmentation_train_$device" 120 "$weft" train inputs/segmentation_r50.toml device.kind=$device \
    "run.dir=$out/segmentation_$device" run.resume=false "${segmentation[@]}"
done
part segmentation_losses 10 "$python" validation/gpu/same_losses.py "$out/segmentation_cpu/metrics.jsonl" \
  "$out/segmentation_cuda/metrics.jsonl" 1e-3
rm -rf "$out/segmentation_cpu" "$out/segmentation_cuda"

# Text detection and animation. What the golden cases do not show: whole jobs.
for kind in deform text_; do
  part "text_kernels_$kind" 100 "$kernels" --size "$size" --filter $kind --device cuda \
    --json "$out/text_kernels_$kind.json"
done
for device in cpu cuda; do
  part "text_train_$device" 200 "$weft" train inputs/dbnet_demo.toml device.kind=$device "run.dir=$out/text_$device" \
    run.resume=false train.steps=4 train.batch_size=2 train.checkpoint_every=0
done
part text_losses 10 "$python" validation/gpu/same_losses.py "$out/text_cpu/metrics.jsonl" "$out/text_cuda/metrics.jsonl" 1e-3
rm -rf "$out/text_cpu" "$out/text_cuda"
# shellcheck disable=SC2086
part animate 500 "$python" validation/check_animate.py --weft "$weft" --device cuda --clips $animate_clips --output "$out/animate.json"

cat "$summary"
exit $failed
