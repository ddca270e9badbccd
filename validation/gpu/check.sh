#!/usr/bin/env bash
# Everything that only a GPU can show, in one command:
#
#   validation/gpu/check.sh OUT [WEFT]      OUT: folder for the results; WEFT: the binary or the bundle's wrapper (build/weft)
#
# 1 doctor, 2 every kernel against the CPU side, also under compute-sanitizer, 3 kernels timed, both attention paths,
# 4 golden cases (in the folder GOLDEN), 5 NCCL with one rank and with several on one GPU, 6 smoke deck: losses of GPU and
# CPU side by side, 7 training steps of STDiT3-XL/2 beside PyTorch in the same run. Nothing stops at a failure: every part
# writes its JSON and log to OUT, OUT/summary.txt has one line a part. Exit status 1 if any part failed. PARTS=REGEX runs the
# parts whose names match, such as PARTS='golden|comm'.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
weft=${2:-build/weft}
python=${PYTHON:-python3}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun=$(dirname "$weft")/mpirun
[ -x "$mpirun" ] || mpirun=mpirun
summary=$out/summary.txt
{ "$weft" --version; nvidia-smi --query-gpu=name,driver_version,power.limit --format=csv,noheader; date -u; } >"$summary" 2>&1
failed=0

part() {  # name, time limit in seconds, command ...
  local name=$1 limit=$2
  shift 2
  [[ $name =~ ${PARTS:-.} ]] || return 0
  local began=$SECONDS
  if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "ok      $name ($((SECONDS - began)) s): $(tail -n 1 "$out/$name.log")" >>"$summary"
  else
    echo "FAILED  $name (status $?, $((SECONDS - began)) s): $(tail -n 2 "$out/$name.log" | tr '\n' ' ')" >>"$summary"
    failed=1
  fi
}

part doctor 60 "$weft" doctor
part kernels_small 200 "$weft" bench kernels --size small --check-only --device cuda --json "$out/kernels_small.json"
part kernels 500 "$weft" bench kernels --size real --device cuda --json "$out/kernels.json"
part attention_sm80 60 env WEFT_ATTENTION=sm80 "$weft" bench kernels --size real --filter attention --device cuda \
  --json "$out/attention_sm80.json"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck; do
    part "sanitizer_$tool" 400 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$weft" bench kernels --size small --check-only --device cuda
  done
else
  echo "absent  compute-sanitizer is not on this machine" >>"$summary"
fi

for dtype in f32 bf16; do
  part "golden_$dtype" 120 env WEFT_BIN="$(realpath "$weft")" WEFT_MPIEXEC="$mpirun" WEFT_GOLDEN="${GOLDEN:-../shared/golden}" \
    WEFT_TEST_DEVICE=cuda WEFT_TEST_DTYPE=$dtype "$python" -B tests/e2e/test_golden.py -v
done

part comm_1 60 "$mpirun" -n 1 env WEFT_COMM=nccl "$weft" bench comm --device cuda --json "$out/comm_1.json"
# Several ranks on one GPU: each passes for a host of its own, so that NCCL takes them (over sockets on lo).
part comm_2_nccl 90 "$mpirun" --oversubscribe -n 1 env NCCL_HOSTID=a WEFT_COMM=nccl "$weft" bench comm --device cuda --share --mib 16 \
  --json "$out/comm_2.json" : -n 1 env NCCL_HOSTID=b WEFT_COMM=nccl "$weft" bench comm --device cuda --share --mib 16
part comm_2_staged 90 "$mpirun" --oversubscribe -n 2 "$weft" bench comm --device cuda --share --mib 16

for device in cpu cuda; do
  part "smoke_$device" 120 "$weft" train inputs/smoke.toml device.kind=$device "run.dir=$out/run_$device" run.resume=false
done
part smoke_losses 10 "$python" validation/gpu/same_losses.py "$out/run_cpu/metrics.jsonl" "$out/run_cuda/metrics.jsonl" 1e-4
rm -rf "$out/run_cpu" "$out/run_cuda"

for shape in 1x15x60x106 16x4x32x32; do
  part "step_weft_$shape" 120 "$weft" bench step validation/gpu/xl2.toml device.kind=cuda --shape $shape --steps 10 --warmup 4 \
    --json "$out/step_weft_$shape.json"
  part "step_torch_$shape" 240 "$python" validation/gpu/torch_step.py validation/gpu/xl2.toml --shape $shape --steps 10 \
    --json "$out/step_torch_$shape.json"
  part "step_weft_again_$shape" 120 "$weft" bench step validation/gpu/xl2.toml device.kind=cuda --shape $shape --steps 10 \
    --warmup 4 --json "$out/step_weft_again_$shape.json"
done
part step_profile 120 "$weft" bench step validation/gpu/xl2.toml device.kind=cuda --shape 1x15x60x106 --steps 3 --warmup 2 --profile

cat "$summary"
exit $failed
