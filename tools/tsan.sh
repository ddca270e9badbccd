#!/usr/bin/env bash
# make tsan: runs the unit tests of all code with threads under ThreadSanitizer, in build/tsan: the trace, the loader, the
# watchdog, the communicator, the checkpoint writer, the list engine, those with MPI on 1 and 2 ranks, and the readers of
# frames. Exit status 1 if anything is reported. OpenMP runs on one thread, because libgomp is not instrumented and its barriers
# would be reported.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/deps.sh
build=build/tsan
generator=()
if [ ! -f $build/CMakeCache.txt ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
mkdir -p $build
rm -f $build/report.*
{ cmake -S . -B $build "${generator[@]}" -DCMAKE_BUILD_TYPE=None -DWEFT_CUDA=OFF -DWEFT_UNITY=OFF \
    -DCMAKE_CXX_FLAGS="-O1 -g1 -fno-omit-frame-pointer -fsanitize=thread" &&
  cmake --build $build --parallel "${JOBS:-$(nproc)}" \
    --target test_core test_data mpitest_parallel mpitest_train mpitest_engine test_feed; } >$build/build.log 2>&1 ||
  { tail -n 40 $build/build.log >&2; echo "tsan: the build failed; full log: $build/build.log" >&2; exit 1; }

export OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
. tools/mpi.sh
export TSAN_OPTIONS="history_size=4 suppressions=$PWD/tools/tsan.supp log_path=$PWD/$build/report"
# For kernels that randomise addresses over more bits than ThreadSanitizer can map.
fixed=()
if ! $build/test_core --gtest_list_tests >/dev/null 2>&1; then fixed=(setarch -R); fi
failed=0
check() {  # a name for its log, and the command
  local log="$build/$1.log"
  if "${@:2}" >"$log" 2>&1; then
    echo "tsan: $1: $(grep -o '[0-9]* tests* from .* ran' "$log" | head -n 1), nothing reported"
  else
    echo "tsan: $1: FAILED, see $log and $build/report.*"
    failed=1
  fi
}
check trace "${fixed[@]}" $build/test_core --gtest_filter='Trace*'
check loader "${fixed[@]}" $build/test_data --gtest_filter='*Prefetch*'
check feed "${fixed[@]}" $build/test_feed
for ranks in 1 2; do
  mpi=("$mpiexec" -n $ranks "${fixed[@]}")
  # Without one test that reads a sum on purpose while it may still change.
  check watchdog_$ranks "${mpi[@]}" $build/mpitest_parallel \
    --gtest_filter='WatchdogTest.*:HungCommunicator.*:CommunicatorTest.*:MailboxTest.*-*ProgressesWhileTheMainThreadComputes'
  check checkpoint_$ranks "${mpi[@]}" $build/mpitest_train --gtest_filter='CheckpointTest.*:Trace*'
  check engine_$ranks "${mpi[@]}" $build/mpitest_engine
done
cat $build/report.* 2>/dev/null | grep SUMMARY | sort | uniq -c | sort -rn || true
exit $failed
