"""`make gpu-check`: what only a GPU can show, for whoever has one for a few minutes.

`python -m tests.gpu_check` runs these parts in this order, each within LIMIT_S:

    use      every recipe's default; evaluate, predict and reproduce a run; stop, kill and resume
    laws     the same bits twice, on two gloo ranks, resumed; precisions; fsdp; a split model
    speed    ddp_launch beside the same loop in plain PyTorch and in Accelerate
    price    determinism, snapshots, virtual ranks, best.pt; memory of fsdp and checkpoint_rnn
    several  two GPUs or more: NCCL, a rank that hangs, pipelines, sharding, fewer GPUs after a stop

RESULTS/PART.json is written after every check, and RESULTS/logs.tar.gz holds what every command
printed, with the records of its runs. `--device cpu` runs small versions of all parts, to try the
scripts.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "results" / "gpu_check"
LIMIT_S = {"cuda": 200, "cpu": 1200}
"""Of a part, by device [s]."""
