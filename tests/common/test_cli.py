"""What a command line says before its recipe runs."""

import pytest

from common.launch import ranks
from recipes.ddp_launch import train as ddp_launch

SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
}


@pytest.mark.parametrize(
    ("gpus", "tasks", "device", "says"),
    [
        ("4", 1, "auto", "Slurm gave 4 GPUs of this node to this job step, and one process uses"),
        ("4", 2, "cuda", "2 processes use one each: give srun --ntasks-per-node=4"),
        ("4", 4, "cuda", ""),
        ("4", 1, "cpu", ""),
        ("1", 1, "auto", ""),
        (None, 2, "auto", ""),
    ],
)
def test_gpus_that_no_task_of_slurm_uses_are_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: str | None,
    tasks: int,
    device: str,
    says: str,
) -> None:
    monkeypatch.setattr(ranks, "_has_terminal", lambda: False)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(tasks))
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", str(tasks))
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    if gpus:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", gpus)
    assert ddp_launch.main(["--check", "--device", device]) == 0
    said = capsys.readouterr().err
    assert (says in said) if says else (said == "")
