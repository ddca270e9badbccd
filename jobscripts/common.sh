# shellcheck shell=bash
# What the job scripts share. Each says what to start (`launch`, WEFT, DECK, RUN) and sources this from the folder that
# sbatch was called in. Nothing to edit here.
set -uo pipefail

say() { echo "$(date +%FT%T) job $SLURM_JOB_ID: $*"; }
stop_here() {  # CODE MESSAGE...
  local code=$1
  shift
  say "$*" >&2
  exit "$code"
}

# One thread a core that the task was given. srun takes the number from SRUN_CPUS_PER_TASK alone since Slurm 22.05.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export OMP_NUM_THREADS=$SRUN_CPUS_PER_TASK
# sbatch --export=NONE, a custom of some sites, would otherwise keep these from the tasks.
export SLURM_EXPORT_ENV=ALL

# A job that asked for GPUs computes on them or ends: on the CPU it would take the whole time for a few steps.
DEVICE=${DEVICE-${SLURM_GPUS_PER_NODE:+cuda}}
device=(${DEVICE:+"device.kind=$DEVICE"})

# When the job ends, for weft to stop in time even if no signal comes. Older Slurm (22.05) does not set it, and a job
# submitted from inside another would inherit a wrong one: it is always asked for.
unset SLURM_JOB_END_TIME
if end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e) && end=$(date -d "$end" +%s); then
  export SLURM_JOB_END_TIME=$end
fi 2>/dev/null

[ -x "$WEFT" ] || stop_here 2 "WEFT=$WEFT is no program. HINT: make build, or WEFT=PREFIX/bin/weft where it was installed, bin/weft of a bundle"
say "$SLURM_JOB_NAME on $SLURM_JOB_NODELIST, ${SLURM_NTASKS:-1} tasks, started ${SLURM_RESTART_COUNT:-0} times before"

# Starts weft on all tasks and waits for its end; its exit code. Slurm signals the tasks that srun started by itself. USR1
# that reaches this shell (--signal=B:USR1@300, for mpirun) is passed on.
run_weft() {
  local code
  "${launch[@]:?}" "$WEFT" "$@" &
  local pid=$!
  trap 'kill -USR1 "$pid" 2>/dev/null' USR1
  # At the time limit Slurm sends TERM to this shell too: weft saves and ends, and then there is a job to queue again.
  trap : TERM
  while :; do
    wait "$pid"
    code=$?
    # 128 + USR1 or TERM: the signal cut the wait short, and weft is still at work.
    case $code in
      138 | 143) kill -0 "$pid" 2>/dev/null || { wait "$pid"; code=$?; break; } ;;
      *) break ;;
    esac
  done
  trap - USR1 TERM
  return "$code"
}

# The value of the last KEY=VALUE among the words, which may stand in quotes; DEFAULT if there is none.
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

# Steps in the newest checkpoint of RUN.
steps_saved() {
  local latest
  latest=$(readlink "$RUN/latest") || latest=step_0
  echo "${latest##*_}"
}

# Trains until done, stopped or broken: returns when all steps are done; 75 queues the job again, all else ends it with
# weft's code.
train() {
  local before after code again=${SLURM_RESTART_COUNT:-0}
  RUN=$(value_of run.dir "$RUN" "$@")
  before=$(steps_saved)
  run_weft train "$DECK" run.dir="$RUN" ${device[@]+"${device[@]}"} "$@"
  code=$?
  after=$(steps_saved)
  say "weft train ended with $code, $((after - before)) steps further: $after saved in $RUN"
  [ "$code" -ne 0 ] || return 0
  [ "$code" -eq 75 ] || exit "$code"
  # 75: stopped early, all saved. Queued again, unless somebody wants it stopped, or it would go round for ever.
  [ ! -e "$RUN/stopped" ] || stop_here 75 "stopped by the file $RUN/stop: not queued again"
  [ "$after" -gt "$before" ] ||
    stop_here 75 "no step further: not queued again. HINT: a longer --time, or a smaller run.stop_margin"
  [ "$again" -lt "${MAX_RESTARTS:-200}" ] ||
    stop_here 75 "started again $again times already: not queued again. HINT: MAX_RESTARTS sets how often"
  say "queued again"
  scontrol requeue "$SLURM_JOB_ID" ||
    stop_here 75 "Slurm does not requeue this job. HINT: a chain of jobs (docs/slurm.md), or submit with RUN=$RUN"
  exit 75
}

# A command that keeps what it has made and goes on with it, `weft encode`, `generate`, `evaluate`, `score` or `animate`: 0 ends the job,
# 75 queues it again, all else ends it with weft's code.
until_done() {
  local code again=${SLURM_RESTART_COUNT:-0} command=$1 folder before
  shift
  # If only the deck sets it, the environment may, too.
  OUTPUT=$(value_of "$command.output" "${OUTPUT:-}" "$@")
  before=$(clips_made)
  run_weft "$command" "$DECK" ${device[@]+"${device[@]}"} "$@"
  code=$?
  say "weft $command ended with $code"
  # 137: a rank failed. The others made what they could; another start makes the rest, or finds all done.
  if [ "$code" -eq 137 ]; then
    [ -z "${OUTPUT:-}" ] || [ "$(clips_made)" != "$before" ] || [ "$again" -eq 0 ] ||
      stop_here 137 "a rank failed in a start after the first, and no clip was made: not queued again. HINT: too little memory?" \
        "the node's log tells"
  elif [ "$code" -ne 75 ]; then
    exit "$code"
  fi
  # A file `stop` in OUTPUT is somebody's request.
  for folder in "${OUTPUT:-}" "${OUTPUT:-}.parts"; do
    [ -z "${OUTPUT:-}" ] || [ ! -e "$folder/stopped" ] || stop_here 75 "stopped by the file $folder/stop: not queued again"
  done
  [ "$again" -lt "${MAX_RESTARTS:-200}" ] ||
    stop_here 75 "started again $again times already: not queued again. HINT: MAX_RESTARTS sets how often"
  say "queued again"
  scontrol requeue "$SLURM_JOB_ID" ||
    stop_here 75 "Slurm does not requeue this job. HINT: submit it again, it goes on where it was"
  exit 75
}

# What changes with each clip that has been made, and with the store that `weft encode` makes of them; where no rank is left
# to gather their lines, they lie in parts.
clips_made() {
  {
    cat "${OUTPUT:-}"/{generated,images,segment,animate}{,.rank*}.jsonl "${OUTPUT:-}".parts/{encoded,score}*.jsonl
    [ ! -f "${OUTPUT:-}" ] || echo whole
  } 2>/dev/null | sort | cksum
}
