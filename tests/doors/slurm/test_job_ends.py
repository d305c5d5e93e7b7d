"""What slurm/job.sh says of a step's status; no Slurm is needed."""

import subprocess
from pathlib import Path

import pytest

from common.writing import write_json
from tests.helpers.commands import ROOT

ENDS = """
job=7 run=$1 RECIPES_STATUS=$1/slurm_status.txt
newest_snapshot() { echo step_00000004.pt; }
scontrol() { [[ $1 == ping ]]; }
squeue() { echo RUNNING; }
from() { :; }
resubmit() { :; }
stuck() { false; }
conclude 137
"""


@pytest.mark.parametrize(
    ("status", "guesses"),
    [({"status": "running"}, True), ({"status": "failed", "error": "error: rank 1 ..."}, False)],
)
def test_the_first_cause_stands_over_sruns_own_kill(
    tmp_path: Path, status: dict[str, str], *, guesses: bool
) -> None:
    """Out of memory is a guess, for a step that left no cause."""
    write_json(tmp_path / "status.json", status)
    text = (ROOT / "slurm" / "job.sh").read_text()
    conclude = text[text.index("\nconclude()") :].partition("\n}\n")[0] + "\n}\n"
    done = subprocess.run(
        ["bash", "-c", conclude + ENDS, "job", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert ("perhaps out of memory" in done.stderr) == guesses, done.stderr
