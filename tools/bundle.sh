#!/usr/bin/env bash
# make bundle: build/bundle/weft-VERSION/ and its archives, which run from any folder of another machine (docs/bundle.md). The
# programs that check a GPU have an archive of their own, for each holds all kernels once more.
# Fails if an archive is larger than it may be.
set -euo pipefail
cd "$(dirname "$0")/.."
limit_mib=96
build=${BUILD:-build}

for tool in patchelf readelf gcc python3; do
  command -v "$tool" >/dev/null || { echo "bundle: $tool is missing. HINT: make deps" >&2; exit 1; }
done
# weft_cpu is linked without the CUDA side, so that it starts where no CUDA library is (CMakeLists.txt). Where there is no nvcc,
# weft is the same program.
sides=(--cpu "$build/weft")
if readelf -d "$build/weft" | grep -qE 'NEEDED.*lib(cublas|nccl|cudart|cudnn)'; then
  sides=(--cpu "$build/weft_cpu" --cuda "$build/weft" --checks "$build/weft_kernels" "$build/weft_probe")
fi
version=$("$build/weft" --version | awk 'NR == 1 {print $2}')
mkdir -p "$build/bundle"
folder=$build/bundle/weft-$version
python3 tools/bundle.py "${sides[@]}" --output "$folder"

rm -f "$folder"{,-checks}.tar.*
pack() {  # to archive $1, from tar's arguments: a tar that does not tell who made it, in the same order every time
  local archive=$1
  shift
  tar -C "$build/bundle" --sort=name --owner=0 --group=0 --numeric-owner -cf "$archive.tar" "$@"
  gzip -6 <"$archive.tar" >"$archive.tar.gz"
  if command -v zstd >/dev/null; then zstd -12 --long=27 -T0 -q -f -o "$archive.tar.zst" "$archive.tar"; fi
  rm "$archive.tar"
}
checks="weft_(kernels|probe)(-cuda)?$"
mapfile -t checking < <(cd "$build/bundle" && find "weft-$version" -type f | grep -E "/$checks" | sort)
pack "$folder" "${checking[@]/#/--exclude=}" "weft-$version"
[ ${#checking[@]} -eq 0 ] || pack "$folder-checks" "${checking[@]}"
for archive in "$folder"{,-checks}.tar.*; do
  [ -e "$archive" ] || continue
  mib=$(($(stat -c %s "$archive") / 1048576 + 1))
  echo "bundle: $archive, $mib MiB"
  if [ "$mib" -gt "$limit_mib" ]; then
    echo "bundle: more than $limit_mib MiB. HINT: the largest files: $(du -a "$folder" | sort -rn | awk '$2 ~ /\.so/ {print $2}' |
      head -n 5 | paste -sd' ')" >&2
    exit 1
  fi
done
