#!/usr/bin/env bash
# Tests the README's two commands in a bare Debian of that release (debootstrap): a fresh clone of the last commit of this checkout,
# `make run`, then `make test`, as root. Prints versions, times, and which tests failed or were skipped.
#   tools/test_debian.sh 12|13 [--mpi openmpi|mpich] [TARGET...]      MPICH; other targets than `run test`
# Needs root, debootstrap, and a mirror: MIRROR, otherwise the one of this machine. The system is created from scratch in
# build/weft-debian-RELEASE[-mpich] (or below FOLDER instead of build; about 6 GB) and kept for inspection; it sees nothing else of
# this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "test_debian: $*" >&2; exit 1; }
release=${1:-}
case $release in
  12) suite=bookworm ;;
  13) suite=trixie ;;
  *) fail "usage: tools/test_debian.sh 12|13 [--mpi openmpi|mpich] [TARGET...]" ;;
esac
shift
mpi=openmpi option=
if [ "${1:-}" = --mpi ]; then
  mpi=${2:-}
  [[ $mpi =~ ^(openmpi|mpich)$ ]] || fail "--mpi $mpi: give openmpi or mpich"
  shift 2
fi
targets=("$@")
[ $# -gt 0 ] || targets=(run test)
[ "$(id -u)" -eq 0 ] || fail "needs root, for debootstrap and chroot"
command -v debootstrap >/dev/null || fail "debootstrap is missing. HINT: apt-get install debootstrap"
root=$(readlink -m "${FOLDER:-build}/weft-debian-$release")
[ "$mpi" = openmpi ] || root+=-$mpi option="WEFT_MPI=$mpi "
mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null | head -n 1)}
mirror=${mirror:-http://deb.debian.org/debian}

echo "test_debian: $suite from $mirror in $root, commit $(git rev-parse --short HEAD)"
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "test_debian: changes that are not committed are left out"
rm -rf --one-file-system "$root"
mkdir -p "$root"
debootstrap --variant=minbase "$suite" "$root" "$mirror" >"$root.log" 2>&1 || { tail -n 5 "$root.log" >&2; fail "debootstrap failed"; }
if [ "$suite" = bookworm ]; then  # debootstrap installs only the release; add its updates
  echo "deb $mirror $suite-updates main" >>"$root/etc/apt/sources.list"
fi
# As an installer does: a host that cannot resolve its own name would ask the network at each start of MPI.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
git clone --quiet --no-hardlinks . "$root/srv/weft"

# Runs a command in the chroot, with its own mounts and processes, which end with it.
inside() {
  unshare --mount --pid --fork --kill-child bash -c '
    set -e
    mount -t proc proc "$0/proc"
    mount --rbind /sys "$0/sys"
    mount --rbind /dev "$0/dev"
    exec chroot "$0" env -i HOME=/root USER=root TERM=dumb PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      bash -c "$1"' "$root" "cd /srv/weft && $1"
}

inside 'apt-get update && apt-get install -y --no-install-recommends make' >>"$root.log" 2>&1 ||
  { tail -n 5 "$root.log" >&2; fail "make cannot be installed"; }
failed=()
for target in "${targets[@]}"; do
  began=$SECONDS
  log=$root.$target.log
  status=passed
  inside "make $option$target" >"$log" 2>&1 </dev/null || { status=FAILED; failed+=("make $target"); }
  echo "test_debian: make $target $status in $((SECONDS - began)) s; output in $log"
  if [ $status = FAILED ]; then tail -n 40 "$log"; fi
  grep -aE 'tests passed|tests failed|\(Skipped\)|\(Failed\)|\(Timeout\)|Not Run' "$log" || true
done
echo "test_debian: versions: $(inside 'dpkg-query -W -f "\${source:Package} \${source:Version}\n" lib'"$mpi"'-dev libdnnl-dev \
  libavcodec-dev libopencv-core-dev libhdf5-dev libsimgrid-dev g++ cmake' | sort -u | paste -sd, | sed 's/,/, /g')"
[ ${#failed[@]} -eq 0 ] || fail "failed on Debian $release: ${failed[*]}"
echo "test_debian: Debian $release passed"
