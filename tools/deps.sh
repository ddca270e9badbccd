#!/usr/bin/env bash
# Makes sure that everything in tools/debian-packages.txt is installed. As root on Debian or Ubuntu it installs missing packages.
# Otherwise it accepts libraries that CMake finds elsewhere (modules, Spack); if CMake fails, a message says what to do, and the
# exit status is 1. Takes under a second if nothing is missing.
#   tools/deps.sh --program   only what building and running weft needs: the first part of the list
#   tools/deps.sh LIST        another list, whose packages can only be installed by root
# WEFT_MPI=mpich in the environment: Debian's MPICH in place of its Open MPI (docs/mpi.md).
set -euo pipefail
cd "$(dirname "$0")/.."
list=tools/debian-packages.txt tests=ON
case ${1:-} in
  --program) tests=OFF; shift ;;
  ?*) list=$1 ;;
esac
lists=("$list") without=
if [ "${WEFT_MPI:-}" = mpich ] && [ "$list" = tools/debian-packages.txt ]; then
  lists=(tools/debian-packages-mpich.txt "$list") without=openmpi
fi
mapfile -t wanted < <(awk -v tests=$tests -v without="$without" '
  /^## tests/ && tests == "OFF" {exit} $1 !~ /^#/ && NF && !(without && $1 ~ without) {print $1}' "${lists[@]}")

missing=()
have_apt=no
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  have_apt=yes
  # dpkg-query fails if one of the names is unknown, but still answers for the others.
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${wanted[@]}" 2>/dev/null || true)
  for package in "${wanted[@]}"; do
    grep -qxF "$package installed" <<<"$installed" || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || exit 0
else
  missing=("${wanted[@]}")
fi

if [ "$have_apt" = yes ] && [ "$(id -u)" -eq 0 ]; then
  echo "deps: installing ${#missing[@]} packages: ${missing[*]}"
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  export DEBIAN_FRONTEND=noninteractive
  install() { apt-get install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1; }
  # The package lists of a fresh machine or container are empty or old: update them if the installation fails.
  if ! install && ! { apt-get update >"$log" 2>&1 && install; }; then
    tail -n 20 "$log" >&2
    echo "deps: apt-get could not install the packages (above: its last lines). HINT: is there a network, and does" \
      "/etc/apt/sources.list name a mirror that this machine reaches?" >&2
    exit 1
  fi
  exit 0
fi

if [ $# -gt 0 ]; then
  echo "deps: ${#missing[@]} packages of $list are missing, and only root on Debian can install them: ${missing[*]}" >&2
  exit 1
fi

# Not root. The same libraries may be available as modules or from Spack: ask CMake.
if command -v cmake >/dev/null; then
  probe=$(mktemp -d)
  trap 'rm -rf "$probe"' EXIT
  if grep -qs "^WEFT_TESTS:BOOL=\(ON\|$tests\)$" build/CMakeCache.txt || cmake -S . -B "$probe" -DWEFT_TESTS=$tests \
    ${WEFT_MPI:+-DMPI_EXECUTABLE_SUFFIX=.$WEFT_MPI} >"$probe/log" 2>&1; then
    exit 0
  fi
fi
column() {  # the modules (1) or Spack packages (2) that provide the missing packages
  awk -v field="$1" -v missing=" ${missing[*]} " 'index(missing, " " $1 " ") {
    sub(/^[^#]*# */, ""); line = $0; if (field == 1) line = $1; else sub(/^[^ ]+ +/, "", line)
    if (line != "-" && !seen[line]++) print line }' "${lists[@]}"
}
{
  echo "deps: weft cannot be built yet: ${#missing[@]} packages are missing, and only root can install them."
  echo "  Debian, Ubuntu:  sudo apt-get install --no-install-recommends ${missing[*]}"
  echo "  modules:         module load $(column 1 | paste -sd' ')"
  echo "  Spack:           spack install $(column 2 | awk '{print (NF > 1 ? "\"" $0 "\"" : $0)}' | paste -sd' ')"
  if [ -n "${probe:-}" ] && grep -q "CMake Error" "$probe/log"; then
    echo "  First error of CMake: $(grep -A 3 -m 1 'CMake Error' "$probe/log" | tail -n +2 | tr -s ' \n' ' ')"
  fi
  echo "  HINT: docs/install.md explains each of these."
} >&2
exit 1
