#!/usr/bin/env bash
# Checks formatting: clang-format over src, tests and kernels, no tabs, no trailing blanks, no file too long. Prints a summary of
# file lengths. Exit status 1 if anything is wrong.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export LC_ALL=C
bad=0
mapfile -d '' -t code < <(find src tests kernels -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 | sort -z)
mapfile -d '' -t scripts < <(find tools validation inputs .ci $([ -d jobscripts ] && echo jobscripts) -type f \( -name '*.py' -o -name '*.sh' -o -name '*.sbatch' -o -name '*.toml' -o -name run \) -print0 | sort -z)

if ! command -v clang-format >/dev/null; then
  echo "format: clang-format is missing (make deps)" >&2
  exit 1
fi
clang-format --dry-run -Werror "${code[@]}" || { echo "format: run make format" >&2; bad=1; }
grep -nP '\t' "${code[@]}" "${scripts[@]}" && { echo "format: tabs (above)" >&2; bad=1; }
grep -nE '[[:blank:]]+$' "${code[@]}" "${scripts[@]}" && { echo "format: trailing blanks (above)" >&2; bad=1; }

# Generated tables are data and may be long.
census=$(wc -l "${code[@]}" "${scripts[@]}" | awk '$2 != "total" && $2 !~ /generated/ {print $1, $2}' | sort -n)
awk '{n[NR] = $1; if ($1 > 900) {print "format: " $2 " has " $1 " lines, at most 900: split it"; over = 1}}
     END {printf "census: %d files, lines median %d, p90 %d, max %d\n", NR, n[int((NR + 1) / 2)], n[int(NR * 0.9 + 0.5)], n[NR]
          exit over}' <<<"$census" || bad=1

# src alone: many tiny files are as hard to read as very long ones.
find src -type f \( -name '*.cpp' -o -name '*.h' \) -exec wc -l {} + | awk '$2 != "total" {print $1}' | sort -n |
  awk '{n[NR] = $1; lines += $1; short += $1 < 60}
       END {printf "census of src: %d files, %d lines, median %d, %d files under 60\n", NR, lines, n[int((NR + 1) / 2)], short}'
exit "$bad"
