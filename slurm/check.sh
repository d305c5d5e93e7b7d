#!/usr/bin/env bash
# Before a long run: would this site take our files, and do two of its nodes find each other, how
# fast, and by what clocks? make slurm-check ARGS="--partition=gpu --gpus-per-node=4 ..."
set -euo pipefail
cd "$(dirname "$0")/.."
command -v sbatch >/dev/null || {
    echo "error: no sbatch here: run this where jobs are submitted" >&2
    exit 2
}
for file in slurm/*.sbatch; do
    sbatch --test-only --nodes=2 "$@" "$file" check_network || {
        echo "error: this site refuses $file, as it says above; options for sbatch go into ARGS" >&2
        exit 2
    }
done
log=${RUNS:-runs}/slurm-check.log
mkdir -p "$(dirname "$log")"
: >"$log"
echo "submitting; waiting for two nodes and then about a minute (the log is $log)"
status=0
sbatch --wait --nodes=2 --time=5 --signal=USR2@10 --no-requeue --output="$log" "$@" slurm/train.sbatch \
    check_network || status=$?
cat "$log"
exit "$status"
