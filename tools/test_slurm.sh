#!/usr/bin/env bash
# make test-slurm: jobscripts/ under a real Slurm, which is installed (Debian's), started on this host with files and ports
# of its own, and gone when the test ends. Prints what was shown. Needs root: slurmd does. WEFT_BIN: a weft that is built already.
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
  echo "test-slurm: this machine lets nobody mount (unshare --mount): each slurmd needs a /dev/shm of its own." \
    "HINT: docker run --privileged, or --cap-add SYS_ADMIN" >&2
  exit 1
fi
tools/deps.sh
RUNLEVEL=1 tools/deps.sh tools/debian-packages-slurm.txt  # which starts none of its daemons where init scripts would
if [ -z "${WEFT_BIN:-}" ]; then
  tools/build.sh weft
  export WEFT_BIN=build/weft
fi
began=$SECONDS
for script in jobscripts list_jobs; do python3 -B "tests/slurm/test_$script.py" -v; done
echo "test-slurm: passed in $((SECONDS - began)) s with $(slurmctld -V)"
