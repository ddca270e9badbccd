#!/usr/bin/env bash
# make test-slurm: tests jobscripts/ with a real Slurm. Installs Debian's Slurm, starts it on this host with its own files and
# ports, and stops it at the end. Prints the results. Needs root, for slurmd. Arguments go to unittest, as in
# `tools/test_slurm.sh -k smoke`. WEFT_BIN: a weft that is already built, with Open MPI or MPICH.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(id -u)" -ne 0 ]; then
  echo "test-slurm: needs root, to install Debian's Slurm and to start slurmd. HINT: sudo make test-slurm, or a container" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "test-slurm: needs Debian or Ubuntu, whose Slurm it installs. HINT: a container of debian:12" >&2
  exit 1
fi
if ! unshare --mount true 2>/dev/null; then
  echo "test-slurm: mounting is not allowed here (unshare --mount), but each slurmd needs its own /dev/shm." \
    "HINT: docker run --privileged, or --cap-add SYS_ADMIN" >&2
  exit 1
fi
tools/deps.sh
RUNLEVEL=1 tools/deps.sh tools/debian-packages-slurm.txt  # RUNLEVEL=1: the packages start no daemons
if [ -z "${WEFT_BIN:-}" ]; then
  tools/build.sh weft
  export WEFT_BIN=build/weft
fi
began=$SECONDS
python3 -B -m unittest discover -s tests/slurm -v "$@"
echo "test-slurm: passed in $((SECONDS - began)) s with $(slurmctld -V)"
