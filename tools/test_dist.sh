#!/usr/bin/env bash
# Builds and tests a tarball of `make dist` as a compute centre would: without git, without network, with another prefix.
#   tools/test_dist.sh TARBALL ROOT [CTEST-OPTION...]
# ROOT is a Debian system with weft's packages, as tools/test_debian.sh leaves one in build/weft-debian-13. It is not changed: an
# overlay in FOLDER (build/test_dist) takes what is written. TARGETS: what is built (all); default options of ctest: -L unit -LE slow.
# The last steps run the installed program: `weft init`, a training on two ranks, `weft selftest`. Needs root.
set -euo pipefail
fail() { echo "test_dist: $*" >&2; exit 1; }
[ $# -ge 2 ] || fail "usage: tools/test_dist.sh TARBALL ROOT [CTEST-OPTION...]"
tarball=$(realpath "$1") root=$(realpath "$2")
shift 2
[ $# -gt 0 ] || set -- -L unit -LE slow
[ "$(id -u)" -eq 0 ] || fail "needs root, for chroot"
[ -x "$root/usr/bin/cmake" ] || fail "$root has no cmake. HINT: tools/test_debian.sh 13 makes such a system"
(cd "$(dirname "$tarball")" && sha256sum --check --quiet "$(basename "$tarball").sha256")
folder=$(realpath -m "${FOLDER:-$(dirname "$0")/../build/test_dist}")
rm -rf --one-file-system "$folder"
mkdir -p "$folder"/{upper,work,root}

cat >"$folder/inside.sh" <<'INSIDE'
set -euo pipefail
cd /srv
command -v git && { echo "git is there"; exit 1; }
getent hosts deb.debian.org && { echo "the network is there"; exit 1; }
tar xf dist.tar.gz
cd weft-*/
began=$SECONDS
say() { echo "test_dist: $* ($((SECONDS - began)) s)"; began=$SECONDS; }
# Packages are there, so nothing is fetched.
tools/deps.sh
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release >build.log 2>&1 || { tail -n 30 build.log; exit 1; }
cmake --build build --parallel "${JOBS:-$(nproc)}" ${TARGETS:+--target $TARGETS} >>build.log 2>&1 || { tail -n 30 build.log; exit 1; }
say "built: $(build/weft --version | head -n 1)"
ctest --test-dir build --no-tests=error --output-on-failure --no-label-summary "$@" || exit 1
say "tested"
cmake --install build --prefix /opt/weft >>build.log
mkdir /srv/job
cd /srv/job
rm -r /srv/weft-*
export PATH=/opt/weft/bin:$PATH OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
weft --version | head -n 1
weft init smoke smoke.toml
mpirun --oversubscribe -n 2 weft train smoke.toml 2>&1 | tail -n 4
mpirun --oversubscribe -n 2 weft selftest 2>&1 | tail -n 1
say "run from /opt/weft, the source gone"
INSIDE

# A namespace of its own for the network, in which only the loopback is up, which Open MPI needs.
unshare --mount --pid --net --fork --kill-child bash -c '
  set -e
  ip link set lo up
  folder=$0 root=$1 tarball=$2
  shift 2
  mount -t overlay overlay -o "lowerdir=$root,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
  mount -t proc proc "$folder/root/proc"
  mount --rbind /sys "$folder/root/sys"
  mount --rbind /dev "$folder/root/dev"
  rm -rf "$folder/root/usr/bin/git" "$folder/root/srv"
  mkdir "$folder/root/srv"
  cp "$tarball" "$folder/root/srv/dist.tar.gz"
  cp "$folder/inside.sh" "$folder/root/srv/"
  exec chroot "$folder/root" env -i HOME=/root TERM=dumb PATH=/usr/sbin:/usr/bin:/sbin:/bin JOBS="${JOBS:-}" TARGETS="${TARGETS:-}" \
    bash /srv/inside.sh "$@"' "$folder" "$root" "$tarball" "$@"
