# What train.sbatch and torchrun.sbatch share; read by them, not run. Sets run, job, tasks_per_node,
# tasks, gpus_per_node, in_container and in_container_srun, refuses what cannot work, and has
# run_step and conclude.
#
# Variables of yours (sbatch passes the environment on):
#   RECIPES_ROOT  this repository, for copies of the sbatch files elsewhere
#   PYTHON        interpreter with torch; default .venv/bin/python (an image has its own)
#   RUNS          folder of all runs, seen by every node; default runs/ in the repository
#   CONTAINER     apptainer:FILE.sif or pyxis:IMAGE; default none
#   MOUNTS        what the container sees beside the run's folder: FROM:TO,FROM:TO
#   MASTER_PORT   port of rank 0; default one of the job's own
#   MAX_RESTARTS  how often in a row the job may restart without a new snapshot; default 3,
#                 0: never
#   MAX_REQUEUES  how often in all; default 100
# shellcheck shell=bash disable=SC2034
set -uo pipefail

fail() { # bad input: status 2, which is never requeued
    echo "error: $*" >&2
    exit 2
}

# shellcheck source=slurm/clean_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/clean_env.sh"
# Under --distribution=arbitrary Slurm does not set it.
SLURM_TASKS_PER_NODE=${SLURM_TASKS_PER_NODE:-$(((${SLURM_NTASKS:-$SLURM_NNODES} + SLURM_NNODES - 1) / SLURM_NNODES))}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export SLURM_EXPORT_ENV=ALL # where sbatch was given --export, srun would pass on as little
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
MAX_RESTARTS=${MAX_RESTARTS:-3} MAX_REQUEUES=${MAX_REQUEUES:-100}
# An array task's raw id can be that of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
tasks_per_node=${SLURM_TASKS_PER_NODE%%[(,]*}
gpus_per_node=${SLURM_GPUS_ON_NODE:-0}
# An exclusive job is given all GPUs of a node, and its steps those that were asked for: a100:4.
[[ ! ${SLURM_GPUS_PER_NODE:-} =~ ^([^:,]+:)?([0-9]+)$ ]] || gpus_per_node=${BASH_REMATCH[2]}

recipe=${1:-} options=("${@:2}")
known=$(cd "$root/recipes" && echo */train.py)
known=" ${known//\/train.py/} "
[[ $recipe && $known == *" $recipe "* ]] || fail "no recipe '$recipe': there are$known"

((${SLURM_HET_SIZE:-1} == 1)) ||
    fail "this heterogeneous job (sbatch ... : ...) would train on its first component only: submit one component"

run=${RUNS:-$root/runs}/$recipe/slurm-$job given=() next=
for word in "${options[@]}"; do # given by the user, it wins
    if [[ $next ]]; then
        run=$word next=
    elif [[ $word == --output[-_]dir ]]; then
        next=folder
        continue
    elif [[ $word == --output[-_]dir=* ]]; then
        run=${word#*=}
    else
        given+=("$word")
        continue
    fi
    [[ -z ${SLURM_ARRAY_TASK_ID:-} || $run =~ (^|[^0-9])$SLURM_ARRAY_TASK_ID([^0-9]|$) ]] ||
        fail "all tasks of the array would share --output-dir $run: leave it out, or give a folder with \$SLURM_ARRAY_TASK_ID in its name"
done
[[ ! $next ]] || fail "--output-dir needs a folder"
options=("${given[@]}")
run=$(realpath -m -- "$run") # a container has another working directory
problem=$({ mkdir -p "$run" && touch "$run/slurm_restarts.txt"; } 2>&1) ||
    fail "the run's folder cannot be written: ${problem#*: }"
# Two scripts of one job are on one host: the file says which one runs in the folder.
mine="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
if ! (set -C && echo "$mine $$" >"$run/slurm_running") 2>/dev/null; then
    read -r theirs pid <"$run/slurm_running"
    [[ $theirs != "$mine" ]] || ! kill -0 "$pid" 2>/dev/null ||
        fail "another run of job $job writes into $run: give each run its own --output-dir"
    echo "$mine $$" >"$run/slurm_running"
fi
trap 'rm -f "$run/slurm_running"' EXIT
[[ ${SLURM_JOB_NAME:-} != recipes ]] || scontrol update JobId="$job" JobName="$recipe" 2>/dev/null

export RECIPES_STATUS=$run/slurm_status.txt # of a rank with bad input, or that leaves before it trains
: >"$RECIPES_STATUS" # not removed: over NFS, a file that was missing may seem to be so for a minute

in_container=() in_container_srun=()
case ${CONTAINER:-} in
'')
    PYTHON=${PYTHON:-$(readlink -f "$root/.venv")/bin/python}
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

one_process() { # whether one process may drive several GPUs
    grep -qE '^LAUNCHED = "(one|stages)"' "$root/recipes/$recipe/__init__.py"
}

# A job that asks for GPUs and for no tasks gets a rank per GPU. With --ntasks-per-node, Slurm 22.05
# gives a job of --nodes=1-4 two nodes at most, however many are free.
tasks=()
if [[ -z ${SLURM_NTASKS:-} ]]; then
    tasks_per_node=1 # Slurm's figure is of cores
    if ((gpus_per_node > 1)) && ! one_process &&
        [[ ${SLURM_GPUS_PER_NODE:-} || " ${options[*]} " != *" --device"[=\ ]"cpu "* ]]; then
        tasks_per_node=$gpus_per_node
        tasks=(--ntasks="$((tasks_per_node * SLURM_NNODES))" --ntasks-per-node="$tasks_per_node")
    fi
fi

refuse_too_few_cores() { # RANKS_A_NODE
    ((SLURM_CPUS_ON_NODE >= $1)) ||
        fail "$1 ranks per node, but the job has only $SLURM_CPUS_ON_NODE cores on $SLURMD_NODENAME (and memory" \
            "to match, if the site limits it): give --ntasks-per-node=$1, or --cpus-per-gpu"
}

refuse_idle_or_shared_gpus() { # RANKS_A_NODE
    [[ " ${options[*]} " != *" --device"[=\ ]"cpu "* ]] || return 0
    if ((gpus_per_node && gpus_per_node != $1)) && ! { (($1 < gpus_per_node)) && one_process; }; then
        fail "$1 ranks per node, but $gpus_per_node GPUs on $SLURMD_NODENAME: one rank per GPU is" \
            "needed, give --ntasks-per-node=$gpus_per_node (or another --gpus-per-node)"
    fi
}

newest_snapshot() {
    local newest
    newest=$(find "$run/snapshots" -name 'step_*.pt' -printf '%f\n' 2>/dev/null | sort | tail -n 1)
    echo "${newest:-none}"
}

# Whether the last MAX_RESTARTS restarts all began where the run still is. The file has a line a
# restart of this job: the snapshot that it began from.
stuck() {
    local same
    same=$(tail -n "$MAX_RESTARTS" "$run/slurm_restarts.txt" | grep -cxF "$(newest_snapshot)")
    ((same >= MAX_RESTARTS))
}

from() { # SNAPSHOT
    if [[ $1 == none ]]; then echo "the start"; else echo "snapshot $1"; fi
}

resubmit() { # how to go on by hand; Slurm tells a job only some of the options that sbatch had
    echo "sbatch [its options and file as before${SLURM_ARRAY_TASK_ID:+, without --array}]" \
        "$(printf '%q ' "$recipe" "${options[@]}" --output-dir "$run")"
}

refuse_to_go_on() { # RESTARTS so far, with this one; else returns
    local why=
    ! stuck || why="$MAX_RESTARTS restarts in a row without a new snapshot in $run"
    (($1 <= MAX_REQUEUES)) || why="$MAX_REQUEUES restarts (MAX_REQUEUES)"
    [[ $why ]] || return 0
    echo "error: $why: not requeued. Look above for the reason; to continue anyway: $(resubmit)" >&2
    exit 1
}

if ((${SLURM_RESTART_COUNT:-0})); then
    refuse_to_go_on "$SLURM_RESTART_COUNT" # Slurm itself requeues for ever, where a node fails
    newest_snapshot >>"$run/slurm_restarts.txt"
    begins="restart $SLURM_RESTART_COUNT of job $job"
else
    : >"$run/slurm_restarts.txt"
    begins="job $job begins"
fi
# A job of --nodes=1-4 may get others at each start.
echo "$begins on $SLURM_JOB_NODELIST, from $(from "$(newest_snapshot)")"

run_step() { # COMMAND, whose status it returns
    local status last
    "$@" &
    step=$!
    # Where the batch script is warned and its tasks are not (scancel --batch): pass it on.
    trap 'kill -USR2 "$step" 2>/dev/null' TERM USR1 USR2
    wait "$step"
    status=$?
    while kill -0 "$step" 2>/dev/null; do # a trapped signal ends only the wait
        wait "$step"
        status=$?
    done
    wait "$step" 2>/dev/null # it may have ended just as the signal came; 127: already told
    last=$?
    ((last == 127)) || status=$last
    return "$status"
}

conclude() { # STATUS of the step: end the job with it, or have it requeued to go on
    local status=$1 state newest refused until
    trap '' TERM USR1 USR2 # a second one, for this or for what it asks
    newest=$(newest_snapshot) # now: the requeue kills what this script starts after it
    # Slurm tells the highest status, perhaps of a peer that was killed. torchrun tells no status; if
    # its restarts trained since, the input was good.
    if ((status != 0)) && grep -qsx 2 "$RECIPES_STATUS" &&
        ! [[ $run/snapshots/$newest -nt $RECIPES_STATUS ]]; then
        status=2
    fi
    if ((status == 2)) && [[ $newest != none ]]; then # the place is to blame, not the options
        echo "fix this, then continue from $(from "$newest"): $(resubmit)" >&2
    fi
    ((status == 0 || status == 2)) && exit "$status"
    until=$((SECONDS + 300))
    while ! scontrol ping >/dev/null 2>&1 && ((SECONDS < until)); do
        echo "slurmctld does not answer; retrying"
        sleep 10
    done
    state=$(squeue --noheader --job "$job" --format %T)
    if [[ ${state:-RUNNING} != RUNNING ]]; then
        echo "ended by Slurm with $status; if job $job is not requeued, continue from $(from "$newest"): $(resubmit)"
        exit "$status"
    fi
    case $status in
    138 | 140 | 143) status=75 ;; # the signals: of a task that had not come to listen
    *) ! grep -qsx 75 "$RECIPES_STATUS" || status=75 ;;
    esac
    # Perhaps no rank is left to say so. Else srun has killed the ranks that a failed one left behind.
    if ((status == 137)) && ! grep -qs '"error":' "$run/status.json"; then
        echo "error: a rank was killed by SIGKILL; if no line above says why, perhaps out of memory:" \
            "sacct -j $job -o State,MaxRSS; give --mem or --mem-per-cpu, or fewer --num-workers" >&2
    fi
    if ((status != 75)); then
        status=1
        if [[ $newest == none ]]; then # nothing to go on from: end, and let somebody look
            echo "failed before its first snapshot: not requeued; to run it again: $(resubmit)" >&2
            exit 1
        fi
    fi
    refuse_to_go_on $((${SLURM_RESTART_COUNT:-0} + 1))
    if refused=$(scontrol requeue incomplete "$job" 2>&1); then # incomplete: not a cancelled one
        echo "job $job is requeued, to continue from $(from "$newest")"
        exit "$status"
    fi
    echo "ended with $status, and not requeued ($refused); to continue from" \
        "$(from "$newest"): $(resubmit)" >&2
    exit "$status"
}
