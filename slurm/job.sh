# What train.sbatch and torchrun.sbatch share; read by them, not run. Sets run, job, tasks_per_node,
# gpus_per_node, in_container and in_container_srun, refuses what cannot work, and has supervise.
#
# Variables of yours (sbatch passes the environment on):
#   PYTHON        interpreter with torch; default .venv/bin/python, in a container python
#   RUNS          folder of all runs, seen by every node; default runs/ in the repository
#   CONTAINER     apptainer:FILE.sif or pyxis:IMAGE; default none
#   MOUNTS        what the container sees beside the run's folder: FROM:TO,FROM:TO
#   MASTER_PORT   port of rank 0; default one of the job's own
#   MAX_RESTARTS  how often in a row the job may start anew without a new snapshot; default 3
# shellcheck shell=bash disable=SC2034
set -uo pipefail

fail() { # bad input: status 2, which is never requeued
    echo "error: $*" >&2
    exit 2
}

original=${original:-$0} # the reader's own file, where the user keeps it
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
MAX_RESTARTS=${MAX_RESTARTS:-3}
# An array task's raw id can be that of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
tasks_per_node=${SLURM_TASKS_PER_NODE%%[(,]*}
gpus_per_node=${SLURM_GPUS_ON_NODE:-0}

recipe=${1:-} options=("${@:2}")
known=$(cd "$root/recipes" && echo */train.py)
known=" ${known//\/train.py/} "
[[ $recipe && $known == *" $recipe "* ]] || fail "no recipe '$recipe': there are$known"

run=${RUNS:-$root/runs}/$recipe/slurm-$job
for i in "${!options[@]}"; do # given by the user, it wins
    case ${options[i]} in
    --output[-_]dir=*) run=${options[i]#*=} ;;
    --output[-_]dir) run=${options[i + 1]:-} ;;
    esac
done
problem=$({ mkdir -p "$run" && : >>"$run/slurm_starts.txt"; } 2>&1) ||
    fail "the run's folder cannot be written: ${problem##*mkdir: }"

in_container=() in_container_srun=()
case ${CONTAINER:-} in
'')
    PYTHON=${PYTHON:-$root/.venv/bin/python}
    [[ -x $(command -v "$PYTHON") ]] ||
        fail "no environment: there is no $PYTHON; run 'make venv' in $root, or give PYTHON"
    ;;
apptainer:?*)
    command -v apptainer >/dev/null || fail "CONTAINER=$CONTAINER, but there is no apptainer here"
    in_container=(apptainer exec --nv --bind "$run${MOUNTS:+,$MOUNTS}" "${CONTAINER#*:}")
    ;;
pyxis:?*)
    in_container_srun=(--container-image="${CONTAINER#*:}" --container-mounts="$run:$run${MOUNTS:+,$MOUNTS}"
        --no-container-entrypoint)
    ;;
*) fail "CONTAINER must be apptainer:FILE.sif or pyxis:IMAGE, got '$CONTAINER'" ;;
esac
if [[ ${CONTAINER:-} ]]; then # the image has its own code and interpreter
    PYTHON=python
    unset PYTHONPATH
fi

refuse_idle_or_shared_gpus() { # RANKS_A_NODE OPTION
    ((gpus_per_node == 0 || gpus_per_node == $1)) && return
    if (($1 < gpus_per_node)) && grep -qE '^LAUNCHED = "(one|stages)"' "$root/recipes/$recipe/train.py"; then
        return # one process drives several GPUs
    fi
    fail "$1 ranks a node, but $gpus_per_node GPUs on $SLURMD_NODENAME: one rank a GPU is needed," \
        "give $2=$gpus_per_node (or another --gpus-per-node)"
}

newest_snapshot() {
    find "$run/snapshots" -name 'step_*.pt' -printf '%f\n' 2>/dev/null | sort | tail -n 1 | grep . ||
        echo none
}

# How many of the last restarts began where the run still is. One line a restart: its snapshot.
restarts_without_progress() {
    tail -n "$MAX_RESTARTS" "$run/slurm_starts.txt" | grep -cxF "$(newest_snapshot)"
}

no_progress() {
    echo "error: $(restarts_without_progress) restarts in a row without a new snapshot in $run:" \
        "not requeued. Its log says why; to go on all the same remove slurm_starts.txt there and" \
        "run 'scontrol requeue $job'" >&2
    exit 1
}

if ((${SLURM_RESTART_COUNT:-0})); then # Slurm itself requeues for ever, where a node fails
    (($(restarts_without_progress) < MAX_RESTARTS)) || no_progress
    newest_snapshot >>"$run/slurm_starts.txt"
    echo "restart ${SLURM_RESTART_COUNT} of job $job, from snapshot $(newest_snapshot)"
fi

# Run a step; end the job by its status, or have it requeued to go on.
supervise() {
    local status step state newest refused
    "$@" &
    step=$!
    # Where the batch script is warned and its tasks are not (scancel --batch): pass it on.
    trap 'kill -USR2 $step 2>/dev/null' TERM USR1 USR2
    wait "$step"
    status=$?
    while kill -0 "$step" 2>/dev/null; do # a trapped signal ends only the wait
        wait "$step"
        status=$?
    done
    ((status == 0 || status == 2)) && exit "$status"
    state=$(squeue --noheader --job "$job" --format %T)
    [[ $state == RUNNING ]] || exit "$status" # cancelled, or Slurm requeues it already
    newest=$(newest_snapshot) # now: the requeue kills what this script starts after it
    if ((status != 75)); then
        # Before the first snapshot there is nothing to go on from: end, and let somebody look.
        [[ $newest != none ]] || exit 1
        status=1
    fi
    (($(restarts_without_progress) < MAX_RESTARTS)) || no_progress
    if refused=$(scontrol requeue "$job" 2>&1); then
        echo "job $job is requeued, to go on from snapshot $newest"
        exit "$status"
    fi
    echo "stopped, and this site does not requeue ($refused); to go on from snapshot" \
        "$newest: $(printf '%q ' sbatch --nodes="$SLURM_NNODES" \
            --ntasks-per-node="$tasks_per_node" --partition="$SLURM_JOB_PARTITION" \
            --time="$(squeue --noheader --job "$job" --format %l)" \
            ${SLURM_GPUS_PER_NODE:+--gpus-per-node="$SLURM_GPUS_PER_NODE"} \
            "$original" "$recipe" --output-dir "$run" "${options[@]}")" >&2
    exit "$status"
}
