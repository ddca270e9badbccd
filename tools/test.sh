#!/usr/bin/env bash
# All tests, as many at a time as there are cores. Arguments go to ctest, as in `tools/test.sh -L unit`. The last line is
# ctest's own summary.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/deps.sh
tools/build.sh
# The disassembler of tools/kernel_budget.py, whose test is skipped without it.
if grep -q '^CMAKE_CUDA_COMPILER:.*nvcc' build/CMakeCache.txt && ! PATH=$PATH:/usr/local/cuda/bin command -v cuobjdump >/dev/null &&
  [ ! -e build/python ] && python3 -m pip --version >/dev/null 2>&1; then
  python3 -m pip install --quiet --no-deps --target build/python -r tools/python-packages.txt || rm -rf build/python
fi
exec ctest --test-dir build --output-on-failure --no-tests=error --no-label-summary \
  --parallel "${JOBS:-$(nproc)}" "$@"
