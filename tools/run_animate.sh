#!/usr/bin/env bash
# Demo of weft animate, one minute on two ranks, without downloads: a drawn face, speech made by ffmpeg, and random networks. The
# clip is noise; it shows that all parts work together, and how fast.
#   tools/run_animate.sh [PICTURE SPEECH]     your own files; the face must fill the middle. WEFT=path: another binary
set -euo pipefail

die() {
  printf '%s\n' "$1" >&2
  [ $# -lt 2 ] || printf 'HINT: %s\n' "$2" >&2
  exit 2
}
[ $# -eq 0 ] || [ $# -eq 2 ] || die "usage: tools/run_animate.sh [PICTURE SPEECH]"
mine=()
for file in "$@"; do
  [ -r "$file" ] || die "$file cannot be read"
  mine+=("$(realpath "$file")")
done
cd "$(dirname "$0")/.."

deck=inputs/animate_demo.toml
run=runs/animate_demo
weft=${WEFT:-build/weft}
picture=${mine[0]:-$run/face.png}
speech=${mine[1]:-$run/speech.wav}
landmarks=$run/landmarks.csv

. tools/mpi.sh
[ -x "$weft" ] || die "$weft is no program." "make build"
rm -rf "$run"
mkdir -p "$run"

if [ ${#mine[@]} -eq 0 ]; then
  # A face as a formula: skin, eyes, mouth, on a gradient; u and v are distances from its middle in half widths.
  face='st(0,(X-128)/92)+st(1,(Y-128)/92)'
  skin='lt(hypot(ld(0)/0.95,ld(1)/1.25),1)'
  eyes='lt(min(hypot(ld(0)-0.4,ld(1)+0.3),hypot(ld(0)+0.4,ld(1)+0.3)),0.13)'
  mouth='lt(abs(ld(1)-0.6),0.1)*lt(abs(ld(0)),0.35)'
  channel() { printf "%s;if(%s,if(%s,%s,if(%s,%s,%s)),%s)" "$face" "$skin" "$eyes" "$1" "$mouth" "$2" "$3" "$4"; }
  ffmpeg -nostdin -loglevel error -y -f lavfi -i color=size=256x256 -frames:v 1 -vf "format=gbrp,geq=r='$(
    channel 30 160 '210-30*ld(1)' 40+X/3)':g='$(channel 30 50 180 70+Y/3)':b='$(channel 40 60 150 120)'" "$picture"
  # Spoken words if this ffmpeg can synthesise speech, otherwise a hum modulated like syllables.
  ffmpeg -nostdin -loglevel error -y -f lavfi -i "flite=text='This is a talking head, drawn by networks without weights.'" \
    "$speech" 2>/dev/null ||
    ffmpeg -nostdin -loglevel error -y -f lavfi -i \
      "aevalsrc=0.3*sin(2*PI*180*t+4*sin(5*t))*abs(sin(9*t)):sample_rate=16000:duration=4" "$speech"
fi

# Random networks find no face. These are the 68 landmarks of a face that fills the middle.
size=$(ffprobe -v error -select_streams v:0 -show_entries stream=width,height -of csv=p=0 "$picture") ||
  die "$picture is no picture"
python3 - "${size%%,*}" "$(cut -d, -f2 <<<"$size")" >"$landmarks" <<'END'
import math
import sys

width, height = (int(n) for n in sys.argv[1:])


def line(count, x0, y0, x1, y1):
    return [(x0 + (x1 - x0) * i / (count - 1), y0 + (y1 - y0) * i / (count - 1)) for i in range(count)]


def ring(count, x, y, rx, ry):
    return [(x - rx * math.cos(2 * math.pi * i / count), y - ry * math.sin(2 * math.pi * i / count)) for i in range(count)]


# In face widths, from its middle: jaw, brows, nose, eyes, lips.
points = [(-0.5 * math.cos(math.pi * i / 16), -0.1 + 0.65 * math.sin(math.pi * i / 16)) for i in range(17)]
points += line(5, -0.4, -0.32, -0.1, -0.34) + line(5, 0.1, -0.34, 0.4, -0.32) + line(4, 0, -0.2, 0, 0.05)
points += line(5, -0.1, 0.1, 0.1, 0.1) + ring(6, -0.22, -0.18, 0.08, 0.03) + ring(6, 0.22, -0.18, 0.08, 0.03)
points += ring(12, 0, 0.3, 0.18, 0.07) + ring(8, 0, 0.3, 0.12, 0.03)
side = 0.7 * min(width, height)
for u, v in points:
    print(f"{width / 2 + side * u:.2f},{height / 2 + side * v:.2f}")
END

# Pieces of 16 frames, so that both ranks have work in one short clip.
"$mpiexec" -n 2 "$weft" animate "$deck" --replace --picture "$picture" --speech "$speech" "animate.landmarks=$landmarks" \
  "animate.output=$run/clips" animate.piece=16
for clip in "$run"/clips/*.mp4; do echo "look at $clip"; done
echo "The clip is noise, because the weights are random. For a speaking face use the released weights, which find the" \
  "face by themselves: docs/checkpoints.md says where they are and how to convert them, inputs/animate.toml is the deck."
