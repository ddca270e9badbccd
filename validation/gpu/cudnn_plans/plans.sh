#!/usr/bin/env bash
# What the installed cuDNN would run for weft's convolutions on an H200, asked without one:
#
#   validation/gpu/cudnn_plans/plans.sh OUT.json [BUILD]     BUILD: a build folder (build)
#
# kernels/conv/convolution_cudnn.cu, compiled by itself, talks to the real library through without_gpu.cpp. Exit status 1 if a
# convolution gets no engine.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/../../.."
build=${2:-build}
cuda=${CUDA_HOME:-/usr/local/cuda}
here=validation/gpu/cudnn_plans
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/before"
g++ -O1 -shared -fPIC "$here/without_gpu.cpp" -I"$cuda/include" -ldl -o "$work/before/libcudnn.so.9"
"$cuda/bin/nvcc" -std=c++20 -O1 --expt-relaxed-constexpr -arch=sm_90a -DWEFT_CUDNN -Isrc -Ikernels \
  -c kernels/conv/convolution_cudnn.cu -o "$work/convolution_cudnn.o"
g++ -std=c++20 -O1 "$here/plans.cpp" -Isrc -Ikernels -I"$cuda/include" \
  "$work/convolution_cudnn.o" "$build/libweft_ops.a" "$build/libweft_tensor.a" "$build/libweft_core.a" \
  -lfmt -lgomp -lpthread -ltomlplusplus -L"$cuda/lib64" -lcudart_static -ldl -lrt -o "$work/plans"
status=0
WEFT_REAL_CUDNN=$(realpath "$cuda/lib64/libcudnn.so.9") WEFT_DEVICE_JSON=$here/h200.json \
  LD_LIBRARY_PATH=$work/before:$cuda/lib64 "$work/plans" >"$work/plans.json" || status=$?
version=$(sed -nE 's/^#define CUDNN_(MAJOR|MINOR|PATCHLEVEL) ([0-9]+)$/\2/p' "$cuda/include/cudnn_version.h" | paste -sd.)
python3 - "$work/plans.json" "$out" "$version" "$(git rev-parse --short HEAD)" "$(date -u +%F)" <<'PYTHON'
import json
import sys

plans, out, version, commit, date = sys.argv[1:]
rows = json.load(open(plans, encoding="utf-8"))
with open(out, "w", encoding="utf-8") as f:
    json.dump({"what": "engines that cuDNN chooses for weft's convolutions on a described H200; nothing was executed",
               "device": "none (the library's heuristics were given validation/gpu/cudnn_plans/h200.json)",
               "cudnn": version, "commit": commit, "date": date, "plans": rows}, f, indent=1)
    f.write("\n")
bf16 = [r for r in rows if r["dtype"] == "bf16"]
print(f"{sum(r['found'] for r in rows)} of {len(rows)} convolutions have an engine; in bf16 "
      f"{sum(r['looked_at'] == 1 for r in bf16)} of {len(bf16)} take the first proposal, workspace at most "
      f"{max(r['workspace'] for r in bf16) / 1e6:.0f} MB")
PYTHON
exit $status
