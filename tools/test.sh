#!/usr/bin/env bash
# All tests, as many at a time as there are cores. Arguments go to ctest, as in `tools/test.sh -L unit`. The last line is
# ctest's own summary.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/deps.sh
tools/build.sh
exec ctest --test-dir build --output-on-failure --no-tests=error --no-label-summary \
  --parallel "${JOBS:-$(nproc)}" "$@"
