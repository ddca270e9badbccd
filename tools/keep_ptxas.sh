#!/usr/bin/env bash
# Runs the CUDA compiler (CMake's compiler launcher) and keeps what ptxas says of registers, shared memory and spills beside
# the object, for tools/kernel_resources.py. Only what is not such talk is shown.
set -uo pipefail
object=
previous=
for argument in "$@"; do
  if [ "$previous" = -o ]; then object=$argument; fi
  previous=$argument
done
"$@" 2>"$object.log"
status=$?
grep -vE '^ptxas info|^ *[0-9]+ bytes stack frame|^ *Used [0-9]+ registers|^Compile time|^$' "$object.log" >&2
exit $status
