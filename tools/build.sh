#!/usr/bin/env bash
# Configures build/ (Release) and builds the targets named, or all; silent but for one line, unless it fails.
# WEFT_CUDA_ARCHITECTURES: the GPUs to compile kernels for, as in "90a", "80;90a" or "90a-real" (no PTX), or "all"; unset: those
# of this machine, and all where it has none. WEFT_TESTS=OFF: a new build folder is configured without tests; a later call without
# the variable adds them. WEFT_MPI=openmpi or mpich: which of Debian's two a new build folder takes (docs/mpi.md).
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
log=build/build.log
began=$SECONDS
fail() {
  tail -n 60 "$log" >&2
  echo "build: $1; the whole output is in $log" >&2
  exit 1
}
first=()  # what a build folder keeps from its first configuration on
case ${WEFT_MPI:-} in
  '') mpi= ;;
  openmpi) mpi=WEFT_OPEN_MPI ;;
  mpich) mpi=WEFT_MPICH ;;
  *) echo "build: WEFT_MPI=$WEFT_MPI: give openmpi or mpich" >&2; exit 2 ;;
esac
if [ -f build/CMakeCache.txt ]; then
  [ -z "$mpi" ] || grep -qx "$mpi:INTERNAL=1" build/CMakeCache.txt ||
    { echo "build: build/ was configured with another MPI than WEFT_MPI=$WEFT_MPI. HINT: make clean" >&2; exit 2; }
else
  [ -z "$mpi" ] || first+=(-DMPI_EXECUTABLE_SUFFIX=".$WEFT_MPI")
  if command -v ninja >/dev/null; then first+=(-G Ninja); fi
  if command -v ccache >/dev/null; then first+=(-DWEFT_CCACHE=ON); fi
fi
tests=(-DWEFT_TESTS=ON)
if [ "${WEFT_TESTS:-ON}" = OFF ]; then
  tests=()
  if [ ! -f build/CMakeCache.txt ]; then tests=(-DWEFT_TESTS=OFF); fi
fi
architectures=${WEFT_CUDA_ARCHITECTURES:-}
if [ -z "$architectures" ] && command -v nvidia-smi >/dev/null; then
  architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    sed -n 's/^\([0-9]*\)\.\([0-9]\)$/\1\2/p' | sort -u | paste -sd';') || architectures=
fi
cmake -S . -B build "${first[@]}" "${tests[@]}" -DCMAKE_BUILD_TYPE=Release \
  -DWEFT_CUDA_ARCHITECTURES="${architectures:-all}" >"$log" 2>&1 || fail "CMake stopped"
cores=$(nproc)
echo "build: Release in build/ on $cores cores (a first build takes some minutes; output in $log)"
# From the failing command's own output on, which ninja repeats: the first error is what one wants to read.
targets=()
[ $# -eq 0 ] || targets=(--target "$@")
if ! cmake --build build --parallel "${JOBS:-$cores}" "${targets[@]}" >>"$log" 2>&1; then
  grep -m 1 -A 40 -E '^FAILED|: error:|: fatal error:|Error [0-9]' "$log" >&2 || true
  echo "build: failed; the whole output is in $log" >&2
  exit 1
fi
name=${1:-weft}
[ "$name" != all ] || name=weft
echo "build: build/$name is ready ($((SECONDS - began)) s)"
