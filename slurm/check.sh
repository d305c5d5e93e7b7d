#!/usr/bin/env bash
# Before a long run: would this site accept our files, do two of its nodes meet, how fast is the
# network, do the clocks agree? make slurm-check ARGS="--partition=gpu --gpus-per-node=4 ..."
set -euo pipefail
cd "$(dirname "$0")/.."
command -v sbatch >/dev/null || {
    echo "error: no sbatch here: run this where jobs are submitted" >&2
    exit 2
}
for file in slurm/*.sbatch; do
    sbatch --test-only --nodes=2 "$@" "$file" check_network || {
        echo "error: sbatch refuses $file, for the reason above: give the site's options in ARGS" >&2
        exit 2
    }
done
log=${RUNS:-runs}/slurm-check.log
mkdir -p "$(dirname "$log")"
: >"$log"
echo "submitted: waiting for two nodes, then about a minute for the check (log: $log)"
status=0
sbatch --wait --nodes=2 --time=5 --signal=USR2@10 --no-requeue --output="$log" "$@" slurm/train.sbatch \
    check_network || status=$?
cat "$log"
exit "$status"
