# shellcheck shell=bash
# Shared code of the job scripts. Each sources this file, from jobscripts/ of the folder in which sbatch was called or else of the
# installed weft (WEFT_SHARE), and then starts weft. The deck is removed from the script's arguments; the others go to weft.
# Nothing to edit here: what differs between sites is in weft.env.

# A signal that comes before weft is there, or after it has ended, must not end this shell.
trap : USR1

# Before `set -u`, because module scripts fail with it.
if [ -n "${WEFT_ENV:-}" ] && [ ! -r "$WEFT_ENV" ]; then
  echo "ERROR: WEFT_ENV=$WEFT_ENV cannot be read" >&2
  exit 2
fi
if [ -r "${WEFT_ENV:=${BASH_SOURCE[0]%/*}/weft.env}" ]; then
  # shellcheck source=jobscripts/weft.env
  . "$WEFT_ENV" || {
    echo "ERROR: $WEFT_ENV failed: its last command, or the one with \`return\`, ended with $?" >&2
    exit 2
  }
fi
set -uo pipefail
WEFT=${WEFT:-build/weft}

# `job` is this job's name in Slurm: ARRAY_ELEMENT in an array. SLURM_JOB_ID does not serve: the last element has the array's own
# id, which scontrol and squeue apply to all elements. The array variables may be inherited from a job inside which this one was
# submitted, so squeue is asked. It also gives the end time, so that weft stops in time even without a signal: older Slurm
# (22.05) does not set SLURM_JOB_END_TIME, and an inherited value belongs to another job.
unset SLURM_JOB_END_TIME
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
while read -r number name end; do
  [ "$number" = "$SLURM_JOB_ID" ] || continue
  job=$name
  if [ -n "$end" ] && end=$(date -d "$end" +%s 2>/dev/null); then export SLURM_JOB_END_TIME=$end; fi
done < <(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$SLURM_JOB_ID" --format='%A %i %e' 2>/dev/null)
task=
if [[ $job =~ _([0-9]+)$ ]]; then task=${BASH_REMATCH[1]}; fi

say() { printf '%s\n' "$(date +%FT%T) job $job: $*"; }
stop_here() {  # CODE MESSAGE...
  local code=$1
  shift
  say "$*" >&2
  exit "$code"
}

# Replace %a by the element's number, as sbatch --output does.
[ -z "$task" ] || set -- "${@//%a/$task}"

# The deck is the first argument, unless that is KEY=VALUE or an option.
DECK=${default_deck:-}
if [ $# -gt 0 ] && { [ -f "$1" ] || [[ $1 != *=* && $1 != -* ]]; }; then
  DECK=$1
  shift
fi
# The hint is the usage line in the script's header.
[ -n "$DECK" ] || stop_here 2 "no deck is named. HINT: $(sed -n '/^#   sbatch /{s/^# *//p;q}' "$0")"
deck_name=${DECK##*/}
deck_name=${deck_name%.toml}

# The folder of run folders.
runs=${WEFT_SCRATCH:+${WEFT_SCRATCH%/}/}runs

[[ ${MAX_RESTARTS:=200} =~ ^[0-9]{1,9}$ ]] || stop_here 2 "MAX_RESTARTS=$MAX_RESTARTS is no number"

# One thread per core of the task. Since Slurm 22.05, srun reads the number only from SRUN_CPUS_PER_TASK.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=$SRUN_CPUS_PER_TASK
# With sbatch --export=NONE, the default at some sites, the tasks would otherwise not get these variables.
export SLURM_EXPORT_ENV=ALL

# A job that requested GPUs, in any way, must compute on them or end: on the CPU it would waste its time on a few steps.
# SLURM_JOB_GPUS is a list of indices, the others are counts, possibly with a type: a100:4. device.kind=cpu after the deck counts.
gpus=${SLURM_JOB_GPUS:+some}
for number in "${SLURM_GPUS_ON_NODE:-0}" "${SLURM_GPUS:-0}" "${SLURM_GPUS_PER_NODE:-0}" "${SLURM_GPUS_PER_SOCKET:-0}" \
  "${SLURM_GPUS_PER_TASK:-0}"; do
  [ "${number##*:}" = 0 ] || gpus=some
done
device=()
[ -z "$gpus" ] || [[ " $*" == *" device.kind="* ]] || device=(device.kind=cuda)
# sbatch --gres=gpu:2 overrides the script's --gpus-per-node, which srun would still request: unset it, so that srun takes what the
# job has.
[ "${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}" = "${SLURM_GPUS_PER_NODE:-}" ] || unset SLURM_GPUS_PER_NODE

say "$SLURM_JOB_NAME on $SLURM_JOB_NODELIST, ${SLURM_NTASKS:-1} tasks, started ${SLURM_RESTART_COUNT:-0} times before"

# Sets an array to the words of a command, which is one text, or an array already.
# shellcheck disable=SC2034  # the array is the caller's
words_of() {  # ARRAY WORD...
  local -n array=$1
  shift
  array=("$@")
  # One text with blanks is several words, unless it is the path of a program.
  [ $# -ne 1 ] || type -P "$1" >/dev/null || read -ra array <<<"$1"
}

# Starts weft on all tasks, waits for it and returns its exit code. Slurm signals this shell (--signal=B:USR1@300), which passes
# the signal on; srun and mpirun pass it to the tasks.
run_weft() {
  local code weft launch options
  # WEFT is a program, or a command such as `apptainer exec --nv weft.sif weft`; words with blanks need an array.
  words_of weft "${WEFT[@]}"
  type -P "${weft[0]:-}" >/dev/null ||
    stop_here 2 "WEFT=${WEFT[*]} is no program. HINT: make build, or WEFT=PREFIX/bin/weft where it was installed, bin/weft of a bundle"
  words_of launch "${WEFT_LAUNCH[@]:-srun --mpi=pmix}"
  type -P "${launch[0]:-}" >/dev/null ||
    stop_here 2 "WEFT_LAUNCH=${launch[*]} is no program. HINT: srun --mpi=TYPE (srun --mpi=list says which), or your site's mpirun"
  # Tasks that end with 75 at slightly different times are not killed; `wait_seconds` after the first the job ends all the same.
  # Every rank sees all GPUs of its node, so that NCCL can access them directly, and takes one by UUID. Options of WEFT_LAUNCH
  # come later, and count.
  options=(--cpu-bind=cores --kill-on-bad-exit=0 --wait="${wait_seconds:-120}")
  [ -z "$gpus" ] || options+=(--gpu-bind=none)
  [ "${launch[0]##*/}" != srun ] || launch=("${launch[0]}" "${options[@]}" "${launch[@]:1}")
  "${launch[@]}" "${weft[@]}" "$@" &
  local pid=$!
  trap 'kill -USR1 "$pid" 2>/dev/null' USR1
  # At the time limit Slurm also sends TERM to this shell. Ignore it: weft saves and ends, and then the job must be requeued.
  trap : TERM
  while :; do
    wait "$pid"
    code=$?
    # 128 + USR1 or TERM: the signal interrupted `wait`, and weft is still running.
    case $code in
      138 | 143) kill -0 "$pid" 2>/dev/null || { wait "$pid"; code=$?; break; } ;;
      *) break ;;
    esac
  done
  trap - TERM
  trap : USR1
  [ "$code" -ne 9 ] || code=137  # MPICH's mpiexec returns the signal's number alone
  [ "$code" -ne 137 ] ||
    say "137: a task was killed (SIGKILL), most often for want of memory; then oom_kill stands above, or in the node's log. HINT:" \
      "--mem=0 is all memory of a node; fewer --ntasks-per-node, memory.arena_gib (docs/troubleshooting.md)" >&2
  return "$code"
}

# The value of the last KEY=VALUE among the words (quotes are removed); DEFAULT if there is none.
value_of() {  # KEY DEFAULT WORD...
  local value=$2 word
  for word in "${@:3}"; do
    case $word in
      "$1="*)
        value=${word#*=}
        value=${value#[\"\']}
        value=${value%[\"\']}
        ;;
    esac
  done
  printf '%s\n' "$value"
}

# Steps in the newest checkpoint of RUN. Digits only: the link's target is untrusted, and bash evaluates text in $(( )).
steps_saved() {
  if [[ $(readlink "$RUN/latest") =~ ^step_([1-9][0-9]{0,17})$ ]]; then echo "${BASH_REMATCH[1]}"; else echo 0; fi
}

# A run must be resumed with the deck that it was started with, which may have been edited or moved with the run. With another
# deck, by a mistake in RUN, the wrong weights would be trained further.
check_deck() {
  local deck begun_with
  [ -f "$DECK" ] || return 0  # weft reports what is wrong with it
  deck=$(realpath -s -- "$DECK")
  if [ ! -s "$RUN/deck_path" ]; then  # empty: the disk was full at the first start
    rm -f -- "$RUN/deck_path"
    # noclobber: do not write through a link that somebody else placed there.
    mkdir -p -- "$RUN" && (set -o noclobber && printf '%s\n' "$deck" >"$RUN/deck_path")
    return 0
  fi
  begun_with=$(<"$RUN/deck_path")
  if [ -e "$begun_with" ]; then [ "$begun_with" -ef "$deck" ]; else [ "${begun_with##*/}" = "${deck##*/}" ]; fi ||
    stop_here 2 "run.dir = ${RUN@Q} is a run of ${begun_with@Q}, not of ${deck@Q}. HINT: another run.dir=FOLDER after the deck;" \
      "to go on with this deck all the same, remove ${RUN@Q}/deck_path"
}

queue_again() {  # MESSAGE: what to do where Slurm does not
  [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ] ||
    stop_here 75 "started again $SLURM_RESTART_COUNT times already: not queued again. HINT: MAX_RESTARTS sets how often"
  say "queued again"
  scontrol requeue "$job" || stop_here 75 "Slurm does not requeue this job. HINT: $1"
  exit 75
}

# Tells how much may still be written below that folder: on its file system, and of the user's quota where the site has one.
show_space() {  # FOLDER
  local folder=$1 left quota=
  while [ ! -d "$folder" ] && [[ $folder == */* ]]; do folder=${folder%/*}; done
  [ -d "$folder" ] || case $1 in /*) folder=/ ;; *) folder=. ;; esac
  left=$(df -Ph -- "$folder" 2>/dev/null | awk 'NR == 2 {print $4 " of " $2 " free on " $6}')
  say "space for ${1@Q}: ${left:-not known}"
  # A quota server that does not answer must not hold up the job.
  if type -P lfs >/dev/null; then quota=$(timeout 20 lfs quota -h -u "$(id -un)" "$folder" 2>/dev/null); fi
  if [ -z "$quota" ] && type -P quota >/dev/null; then quota=$(timeout 20 quota -s 2>/dev/null); fi
  [ -z "$quota" ] || say "quota:"$'\n'"$quota"
}

# Runs weft train in RUN. Returns when all steps are done; requeues the job after 75; otherwise exits with weft's code.
train() {
  local before after code
  RUN=$(value_of run.dir "$runs/$deck_name-$job" "$@")
  check_deck
  show_space "$RUN"
  before=$(steps_saved)
  rm -f -- "$RUN/stopped_while_staging"
  run_weft train "$DECK" run.dir="$RUN" ${WEFT_STAGE:+"data.stage=$WEFT_STAGE"} "$@" ${device[@]+"${device[@]}"}
  code=$?
  after=$(steps_saved)
  say "weft train ended with $code, $((after - before)) steps further: $after saved in $RUN"
  [ "$code" -ne 0 ] || return 0
  [ "$code" -eq 75 ] || exit "$code"
  # 75: stopped early, all saved. Requeue, unless the user stopped it, or no progress was made (endless loop). While stores were
  # copied to the nodes (data.stage) no step could be made; a file RUN/stopped is then of an earlier start.
  if [ ! -e "$RUN/stopped_while_staging" ]; then
    [ ! -e "$RUN/stopped" ] || stop_here 75 "stopped by the file $RUN/stop: not queued again"
    [ "$after" -gt "$before" ] ||
      stop_here 75 "no step further: not queued again. HINT: a longer --time, or a smaller run.stop_margin"
  fi
  queue_again "a chain of jobs (docs/slurm.md), or submit it again with run.dir=$RUN after the deck"
}

# Runs a command that resumes finished work: `weft encode`, `generate`, `evaluate`, `segment`, `score` or `animate`. Returns after 0,
# requeues after 75 and 137, otherwise exits with weft's code.
until_done() {  # COMMAND WORD...
  local code command=$1 output begun made folder
  local wait_seconds=30  # its ranks end together: a rank that was killed ends the job half a minute later
  shift
  output=$(value_of "$command.output" "" "$@")
  [ -n "$output" ] || say "HINT: with $command.output=... after the deck this job can see its progress, and a file \`stop\` of yours"
  begun=$(item_lines "$output" | cksum) made=$(made_lines "$output" | cksum)
  show_space "${output:-.}"
  run_weft "$command" "$DECK" "$@" ${device[@]+"${device[@]}"}
  code=$?
  say "weft $command ended with $code"
  case $code in 0) return 0 ;; 75 | 137) ;; *) exit "$code" ;; esac
  # A file `stop` in the output is a request of the user.
  for folder in "$output" "$output.parts"; do
    [ -z "$output" ] || [ ! -e "$folder/stopped" ] || stop_here 75 "stopped by the file $folder/stop: not queued again"
  done
  # The next start makes what is missing. 75: stopped early. 137: a rank was killed, which ended the job; an item during which two
  # ranks died is then given up, so that it counts what was begun.
  if [ -n "$output" ] && [ "${SLURM_RESTART_COUNT:-0}" -ne 0 ]; then
    [ "$code" -ne 75 ] || [ "$(made_lines "$output" | cksum)" != "$made" ] ||
      stop_here 75 "started again, and nothing more was made: not queued again. HINT: a longer --time"
    [ "$code" -ne 137 ] || [ "$(item_lines "$output" | cksum)" != "$begun" ] ||
      stop_here 137 "a rank was killed again, and nothing more was begun or made: not queued again"
  fi
  queue_again "submit it again, it goes on where it was"
}

# Of item_lines those of items that were made.
made_lines() {  # OUTPUT
  item_lines "$1" | grep -v '^{"begun"\|^{"ended"'
}

# Runs any other command, once, and exits with its code.
run_once() {  # COMMAND WORD...
  local code command=$1 wait_seconds=30
  shift
  show_space "$(value_of "$command.output" . "$@")"
  run_weft "$command" "$DECK" "$@" ${device[@]+"${device[@]}"}
  code=$?
  say "weft $command ended with $code"
  exit "$code"
}

# A line for each item of a list job that was begun or made, and one for the store that `weft encode` writes. The lines of a job that
# was killed are in OUTPUT.parts.
item_lines() {  # OUTPUT
  [ -n "$1" ] || return 0
  {
    cat "$1"/{generated,images,clips,segment,animate}{,.rank*}.jsonl "$1".parts/{encoded,score}*.jsonl
    [ ! -f "$1" ] || echo whole
  } 2>/dev/null | sort
}
