#!/usr/bin/env bash
# The tests, one more at a time than there are cores, for many wait: for the start of ranks, for signals, and for limits to pass.
# --rest: those of CI behind `make test`; --all: all, the slow ones too (tests/README.md). Other arguments go to ctest, as in
# `tools/test.sh --all -L unit`. The last line is ctest's own summary.
set -euo pipefail
cd "$(dirname "$0")/.."
which=(-L first) targets=(first_tests)
case ${1:-} in
  --rest) shift; which=(-LE "first|slow") targets=() ;;
  --all) shift; which=() targets=(all slow_tests) ;;
esac
tools/deps.sh
tools/build.sh "${targets[@]}"
# Without these the tests that want them are skipped.
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  tools/deps.sh tools/debian-packages-test.txt
fi
if [ ! -e build/python/tensorboard ] && python3 -m pip --version >/dev/null 2>&1; then
  rm -rf build/python
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --no-deps --target build/python -r tools/python-packages.txt || rm -rf build/python
fi
# Within an allocation, mpiexec would ask Slurm for every test's ranks.
unset ${!SLURM_@} ${!PMI_@} ${!PMIX_@}
exec ctest --test-dir build --output-on-failure --no-tests=error --no-label-summary "${which[@]}" \
  --parallel "${JOBS:-$(($(nproc) + 1))}" "$@"
