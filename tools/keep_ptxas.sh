#!/usr/bin/env bash
# CMake's compiler launcher for CUDA: runs the compiler, saves ptxas's report on registers, shared memory and spills next to the
# object, for tools/kernel_resources.py, and shows only the other messages.
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
