#!/usr/bin/env bash
# make fuzz: runs every parser under clang's libFuzzer, FUZZ_SECONDS each (3600), JOBS of them at a time; TARGET=name for one of
# them. The corpus grows in build/fuzz/corpus; inputs that cause a failure are saved in build/fuzz/findings, with exit status 1.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v clang++ >/dev/null; then
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    apt-get install -y --no-install-recommends clang libclang-rt-14-dev >/dev/null || apt-get install -y clang >/dev/null
  fi
fi
if ! command -v clang++ >/dev/null; then
  echo "fuzz: clang++ is missing. HINT: apt-get install clang, or load a module of LLVM; make test-all runs the same targets" \
    "without it, for seconds" >&2
  exit 1
fi
tools/deps.sh
seconds=${FUZZ_SECONDS:-3600} jobs=${JOBS:-$(nproc)}
generator=()
if [ ! -f build/fuzz/CMakeCache.txt ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
mkdir -p build/fuzz/corpus build/fuzz/findings
cmake -S tests/fuzz -B build/fuzz "${generator[@]}" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_C_COMPILER=clang >build/fuzz/build.log 2>&1 &&
  cmake --build build/fuzz --parallel "$jobs" >>build/fuzz/build.log 2>&1 ||
  { tail -n 40 build/fuzz/build.log >&2; echo "fuzz: the build failed; full log: build/fuzz/build.log" >&2; exit 1; }

fuzz() {  # runs one target; 0 if nothing was found
  local name=$1 dictionary=()
  [ ! -f "tests/fuzz/corpus/$name.dict" ] || dictionary=("-dict=tests/fuzz/corpus/$name.dict")
  mkdir -p "build/fuzz/corpus/$name"
  if ! WEFT_FUZZ_TARGET=$name build/fuzz/weft_fuzz "build/fuzz/corpus/$name" "tests/fuzz/corpus/$name" "${dictionary[@]}" \
    -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=4096 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/findings/$name-" >"build/fuzz/$name.log" 2>&1; then
    echo "fuzz: $name: FOUND: $(grep -m 1 -E 'ERROR|runtime error|^fuzz:' "build/fuzz/$name.log" || true)"
    echo "fuzz: $name: $(grep -m 1 'Test unit written' "build/fuzz/$name.log" || true); log in build/fuzz/$name.log"
    return 1
  fi
  echo "fuzz: $name: $(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/$name.log") runs, nothing found"
}
export -f fuzz
export seconds
names=${TARGET:-$(cd tests/fuzz/corpus && find . -mindepth 1 -maxdepth 1 -type d -printf '%f\n' | sort)}
printf '%s\n' $names | xargs -P "$jobs" -I{} bash -c 'fuzz "$1"' fuzz {}
