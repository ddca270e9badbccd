#!/usr/bin/env bash
# Tests weft for 64-bit Arm on an x86 machine: cross-compiles it and its unit tests in build/aarch64 against Debian's arm64 libraries
# and runs them under qemu. Part of `make test-all`.
#   tools/test_aarch64.sh [PART...]   which, as in `core media weft`: unit_core, unit_media, the program; otherwise those of `parts` below
# Needs root on Debian, and a mirror: MIRROR, otherwise the one of this machine. Where it cannot run it says so, exit status 77.
# The libraries are unpacked into build/aarch64-root (or below FOLDER instead of build; 2 GB) and kept: delete it to fetch them anew.
set -euo pipefail
cd "$(dirname "$0")/.."
skip() { echo "test_aarch64: skipped: $*"; exit 77; }
fail() { echo "test_aarch64: $*" >&2; exit 1; }
parts=(core tensor ops media weft)
[ $# -eq 0 ] || parts=("$@")
# Left out of the unit tests: the largest cases of the operations, for the emulator multiplies hundreds of times slower and the
# other cases of these tests are smaller; what asks for the same bits of oneDNN's convolutions, whose plain C++ for Arm adds in
# another order for other numbers of samples; and what compares with libswscale, which on Arm gives other bytes than on x86 (ours
# are the same on both).
left_out=(OpTest.ConvInPassesIsTheSame
  OpTest.EveryCaseMatchesItsReference OpTest.EveryCaseIsTheSameForAnyThreadCount OpTest.ConvRoundsNotMuchWorseThanAPlainSum
  Shapes/SelfAttention.MatchesReferenceAndFiniteDifferences/{1,2,6} Shapes/Absorbed.IsCrossAttentionForwardAndBackward/1
  Shapes/NormTest.{LayerNormModulate,GateResidual}/3
  YuvRowsTest.{SwscalesBytes,RowsMayLieBackwards,Ranges,StreamsAreAsByTheFilterScale})
# Of the self test, what is fast enough; a smaller training than its own is below.
checks=operations,collectives,ingest,captions,encode,generate,score

[ "$(uname -m)" = x86_64 ] || skip "this is a machine of $(uname -m); make test shows what it does here"
[ "$(id -u)" -eq 0 ] || skip "needs root, to install the cross compiler and qemu"
[ ! -r /etc/os-release ] || . /etc/os-release
[ "${ID:-}" = debian ] || skip "needs Debian, whose arm64 libraries it takes"
folder=$(readlink -m "${FOLDER:-build}")
root=$folder/aarch64-root build=$folder/aarch64
mkdir -p "$folder"
RUNLEVEL=1 tools/deps.sh tools/debian-packages-aarch64.txt
# Programs start others, as weft does to read stores: the kernel must know qemu. It is told in a namespace, unseen by the machine.
in_namespace=(unshare --user --map-root-user --mount sh -c 'mount -t binfmt_misc none /proc/sys/fs/binfmt_misc &&
  cat /usr/lib/binfmt.d/qemu-aarch64.conf >/proc/sys/fs/binfmt_misc/register && exec "$@"' sh)
"${in_namespace[@]}" true || skip "the kernel cannot be told of qemu in a namespace (Linux 6.7 can, where users' namespaces are allowed)"

# 1. The libraries: packages of the other architecture with all that they depend on, by an apt with lists of its own.
if [ ! -e "$root/complete" ]; then
  mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null | head -n 1)}
  mirror=${mirror:-http://deb.debian.org/debian}
  echo "test_aarch64: arm64 libraries of $VERSION_CODENAME from $mirror"
  rm -rf --one-file-system "$root"
  mkdir -p "$root"/{apt/lists/partial,packages/archives/partial,usr/lib,usr/bin,usr/sbin}
  touch "$root/apt/status"
  ln -s usr/lib usr/bin usr/sbin "$root"
  for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-updates"; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
  done >"$root/sources.list"
  apt=(apt-get -y -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State=$root/apt"
    -o "Dir::State::status=$root/apt/status" -o "Dir::Cache=$root/packages" -o "Dir::Etc::SourceList=$root/sources.list"
    -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=root -o APT::Install-Recommends=false)
  mapfile -t wanted < <(awk '$1 ~ /-dev$/ {print $1}' tools/debian-packages.txt)
  { "${apt[@]}" update && "${apt[@]}" --download-only install "${wanted[@]}"; } >"$root/apt.log" 2>&1 ||
    { tail -n 20 "$root/apt.log" >&2; fail "the packages cannot be fetched (above: apt's last lines)"; }
  for package in "$root"/packages/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
      tar -x -C "$root" --keep-directory-symlink --no-same-owner --exclude='./usr/share/doc' --exclude='./usr/share/man'
  done
  rm -r "$root/packages"
  # What an installation would do: links that lead out of the folder, and alternatives.
  find "$root" -type l -lname '/*' -print0 | while IFS= read -r -d '' link; do
    ln -sfnr "$root$(readlink "$link")" "$link"
  done
  libraries=$root/usr/lib/aarch64-linux-gnu
  for library in blas/libblas.so.3 lapack/liblapack.so.3; do
    [ ! -e "$libraries/$library" ] || ln -sfr "$libraries/$library" "$libraries"
  done
  touch "$root/complete"
fi

# 2. The build.
began=$SECONDS
targets=("${parts[@]/#/test_}")
targets=("${targets[@]/#test_weft/weft}")
generator=()
if [ ! -f "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
if command -v ccache >/dev/null; then generator+=(-DWEFT_CCACHE=ON); fi
mkdir -p "$build"
{ cmake -S . -B "$build" "${generator[@]}" -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/aarch64.cmake" -DWEFT_SYSROOT="$root" \
    -DCMAKE_BUILD_TYPE=Release -DWEFT_CUDA=OFF &&
  cmake --build "$build" --parallel "${JOBS:-$(nproc)}" --target "${targets[@]}"; } >"$build/build.log" 2>&1 ||
  { grep -m 1 -A 40 -E '^FAILED|: error:|CMake Error' "$build/build.log" >&2 || true; fail "the build failed; the output is in $build/build.log"; }
echo "test_aarch64: built in $((SECONDS - began)) s with $(aarch64-linux-gnu-g++ -dumpfullversion) and $(qemu-aarch64-static --version | head -n 1)"

# 3. The tests.
export QEMU_LD_PREFIX=$root QEMU_CPU=neoverse-n1
names=$(IFS='|'; echo "${parts[*]}")
if [[ "$names" != weft ]]; then
  GTEST_FILTER="*-$(IFS=:; echo "${left_out[*]}")" "${in_namespace[@]}" ctest --test-dir "$build" --output-on-failure --no-tests=error \
    --no-label-summary -R "^unit_($names)$" --parallel "${JOBS:-$(nproc)}"
fi

# 4. The program on two ranks, by Arm's mpirun: small jobs with the results that x86 has, and a training that is stopped and resumed.
if [[ "|$names|" == *"|weft|"* ]]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1
  weft=("${in_namespace[@]}" "$root/usr/bin/mpirun.openmpi" -n 2 "$build/weft")
  "${weft[@]}" selftest --dir "$build" --timeout 3600 --checks "$checks"
  train() {
    "${weft[@]}" train inputs/smoke.toml data.path=synthetic:clips=16,frames=5,height=16,width=16 model.hidden_size=32 model.depth=1 \
      model.num_heads=2 train.batch_size=1 train.micro_batches=2 train.checkpoint_every=2 parallel.deterministic=true "$@" \
      >>"$build/train.log" 2>&1 || fail "a training failed; the output is in $build/train.log"
  }
  state() { grep -o '"state_hash": *"[^"]*"' "$build/runs/$1/latest/manifest.json"; }
  rm -rf "$build/runs" "$build/train.log"
  train run.dir="$build/runs/whole" train.steps=4
  train run.dir="$build/runs/parts" train.steps=2
  train run.dir="$build/runs/parts" train.steps=4
  loss=$(tail -n 1 "$build/runs/whole/metrics.jsonl" | grep -o '"loss":[0-9.]*')
  [[ "$loss" == '"loss":1.72698'* ]] || fail "the training's last loss is $loss instead of 1.72698.. (x86: 1.72698671)"
  [ "$(state whole)" = "$(state parts)" ] || fail "a training that was stopped and resumed ended with other bits ($build/runs)"
  echo "test_aarch64: training: $loss, resumed to the same bits"
fi
echo "test_aarch64: passed in $((SECONDS - began)) s"
