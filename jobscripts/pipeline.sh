#!/usr/bin/env bash
# From footage to clips: submits ingest, the training of a VAE, encode, training and generate. Each job starts when the one before
# has ended with exit code 0, however often that was requeued; if one fails, Slurm cancels those behind it.
#   jobscripts/pipeline.sh DECK.toml [vae:DECK.toml] [STEP:WORD ...] [KEY=VALUE ...] [--OPTION=VALUE ...] [--from=STEP] [--dry-run]
# STEP is ingest, vae, encode, train or generate; vae is left out without a deck of its own: encode then takes the deck's vae.weights.
# STEP:WORD gives a deck, a key, an option of sbatch or another script to that step alone: encode:encode.toml train:--nodes=4
# train:train_16nodes.sbatch generate:generate.num_samples=2; gpu:WORD to all steps but ingest: gpu:--gpus-per-node=4. What has no
# STEP is for all. Files: runs/DECK (below WEFT_SCRATCH).
# --from=STEP begins with a later step, --to=STEP ends with an earlier one. --dry-run prints the commands.
set -uo pipefail

steps=(ingest vae encode train generate)
declare -A deck script words options
for step in "${steps[@]}"; do
  script[$step]=$step deck[$step]='' words[$step]='' options[$step]=''
done
script[vae]=train_1node
script[train]=train_1node   # train:SCRIPT.sbatch for another

jobs=()
fail() {
  [ ${#jobs[@]} -eq 0 ] || echo "cancel what was submitted: scancel ${jobs[*]}" >&2
  echo "ERROR: $1. HINT: $2" >&2
  exit 2
}
usage="jobscripts/pipeline.sh DECK.toml [vae:DECK.toml] [STEP:WORD ...] [KEY=VALUE ...] [--from=STEP] [--to=STEP] [--dry-run]; \
STEP: ${steps[*]} (gpu: all but ingest)"
is_step() { [[ " ${steps[*]} " == *" $1 "* ]]; }

from=ingest to=generate dry=
for word in "$@"; do
  to_steps=("${steps[@]}")
  if [[ $word =~ ^([a-z]+):(.+)$ ]] && is_step "${BASH_REMATCH[1]}"; then
    to_steps=("${BASH_REMATCH[1]}")
    word=${BASH_REMATCH[2]}
  elif [[ $word == gpu:?* ]]; then
    to_steps=(vae encode train generate)
    word=${word#gpu:}
  else
    case $word in
      --from=*) from=${word#*=}; continue ;;
      --to=*) to=${word#*=}; continue ;;
      --dry-run) dry=yes; continue ;;
      -h | --help) echo "$usage"; exit 0 ;;
      [a-z]*.*=*) ;;
      *.toml) to_steps=(ingest encode train generate) ;;
    esac
  fi
  for step in "${to_steps[@]}"; do
    case $word in
      -*) options[$step]+="$word"$'\n' ;;
      *.sbatch) script[$step]=${word%.sbatch} ;;
      [a-z]*.*=*) words[$step]+="$word"$'\n' ;;
      *.toml) deck[$step]=$word ;;
      *) fail "$word is no deck, key or option" "$usage" ;;
    esac
  done
done
for step in "$from" "$to"; do is_step "$step" || fail "$step is no step" "$usage"; done
jobscripts=jobscripts   # or those of the installed weft, as the scripts do
[ -r jobscripts/common.sh ] || jobscripts=${WEFT_SHARE:-.}/jobscripts
[ -r "$jobscripts/common.sh" ] || fail "jobscripts/ is not here" "start it in the folder that holds jobscripts/, or load the module weft"
[ -n "$dry" ] || type -P sbatch >/dev/null || fail "there is no sbatch" "start it on a login node, or give --dry-run"

# Only WEFT_SCRATCH is needed here; modules print what they like.
WEFT_ENV=${WEFT_ENV:-$jobscripts/weft.env}
if [ -r "$WEFT_ENV" ]; then
  # shellcheck source=jobscripts/weft.env
  WEFT_SCRATCH=$(set +u; . "$WEFT_ENV" >/dev/null 2>&1 && printf '%s' "${WEFT_SCRATCH:-}") ||
    fail "$WEFT_ENV fails here" "read it in your shell (source $WEFT_ENV) to see where"
fi
main=${deck[train]:-${deck[ingest]}}
main=${main##*/}
work=${WEFT_SCRATCH:+${WEFT_SCRATCH%/}/}runs/${main%.toml}

# What each step reads and writes. A key that is given to the step counts more: it comes later.
declare -A files=(
  [ingest]="ingest.output=$work/clips.h5"
  [vae]="data.path=$work/clips.h5"$'\n'"run.dir=$work/vae"
  [encode]="data.path=$work/clips.h5"$'\n'"encode.output=$work/latents.h5"$'\n'"vae.weights=$work/vae"
  [train]="data.path=$work/latents.h5"$'\n'"run.dir=$work/train"
  [generate]="data.path=$work/latents.h5"$'\n'"run.dir=$work/train"$'\n'"generate.output=$work/generated"$'\n'"vae.weights=$work/vae"
)
if [ -z "${deck[vae]}" ]; then
  for step in encode generate; do files[$step]=${files[$step]%$'\n'*}; done
  [[ vae != "$from" && vae != "$to" ]] || fail "vae has no deck" "vae:DECK.toml, or begin or end with another step"
fi

# All is checked before anything is submitted.
chosen=() begun='' ended=''
for step in "${steps[@]}"; do
  [ "$step" != "$from" ] || begun=yes
  [ -n "$begun" ] || continue
  if [ "$step" != vae ] || [ -n "${deck[vae]}" ]; then
    [ -n "${deck[$step]}" ] || fail "$step has no deck" "$usage"
    [ -r "${deck[$step]}" ] || fail "${deck[$step]} cannot be read" "a deck for all steps, or $step:DECK.toml"
    [ -r "$jobscripts/${script[$step]}.sbatch" ] || fail "there is no $jobscripts/${script[$step]}.sbatch" "a script that is there"
    chosen+=("$step")
  fi
  [ "$step" != "$to" ] || { ended=yes; break; }
done
[ -n "$ended" ] || fail "--to=$to comes before --from=$from" "${steps[*]}"
[ -n "$dry" ] || mkdir -p -- "$work" || fail "$work cannot be made" "WEFT_SCRATCH in $WEFT_ENV names the folder above it"

before=
for step in "${chosen[@]}"; do
  command=(sbatch --parsable --job-name="${main%.toml}-$step")
  [ -z "$before" ] || command+=(--dependency="afterok:$before" --kill-on-invalid-dep=yes)
  mapfile -t more <<<"${options[$step]}$jobscripts/${script[$step]}.sbatch"
  command+=("${more[@]}" "${deck[$step]}")
  mapfile -t more <<<"${files[$step]}${words[$step]:+$'\n'${words[$step]%$'\n'}}"
  command+=("${more[@]}")
  if [ -n "$dry" ]; then
    printf '%q ' "${command[@]}"
    echo
    before=JOB_OF_$step
  else
    before=$("${command[@]}") || fail "sbatch refused $step" "its message is above"
    before=${before%%;*}  # a cluster's name may follow
    jobs+=("$before")
    echo "$step: job $before"
  fi
done
[ -n "$dry" ] || echo "files: $work; all jobs: squeue --jobs=$(IFS=,; echo "${jobs[*]}"); cancel all: scancel ${jobs[*]}"
