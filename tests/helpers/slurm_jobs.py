"""Jobs on the cluster of the tests: submitted, watched, interrupted."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.cluster import Cluster
from tests.helpers.commands import ROOT, Result, wait_for
from tests.helpers.pool import PATIENCE_S

ASK_S = 0.5  # asking Slurm costs time that the jobs could use
EVERY = 10  # steps between two snapshots
OPTIONS = ("--epochs", "12", "--snapshot-every", str(EVERY), "--log-every", "1")
TWO_BY_TWO = ("--nodes", "2", "--ntasks-per-node", "2")
# Python reads this before anything else: what a test must change inside a rank.
_SITECUSTOMIZE = """\
import os, signal, sys, time
rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
if "SLURM_STEP_ID" in os.environ and {"FAIL_AT", "KILLED_AT", "STEP_S"} & {*os.environ}:
    from common.run.loop import Loop
    after_step = Loop.after_step
    begun = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    slowly = begun < int(os.environ.get("SLOW_STARTS", 1))
    def changed(self, loss):
        after_step(self, loss)
        time.sleep(float(os.environ.get("STEP_S", 0)) if slowly else 0)
        if rank == "1" and self.state.step == int(os.environ.get("FAIL_AT", -1)):
            raise RuntimeError("a bug of this test")
        if self.state.step == int(os.environ.get("KILLED_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
    Loop.after_step = changed
if {"GATE", "SLURM_STEP_ID"} <= {*os.environ} and "SLURM_RESTART_COUNT" not in os.environ:
    from tools.on_import import OnImport
    def wait(_module):
        gate = os.environ["GATE"]
        open(f"{gate}.{os.environ['SLURM_JOB_ID']}.{rank}", "w").close()
        while os.path.exists(gate):
            time.sleep(0.01)
    OnImport("torch._C", wait)
if "SLURM_STEP_ID" in os.environ and rank == os.environ.get("REFUSED", ""):
    from common import cli
    run = cli.run
    cli.run = lambda name, kind, train, words: run(name, kind, train, [*words, "--lr", "none"])
if os.environ.get("SLURMD_NODENAME") == os.environ.get("AHEAD", ""):
    now = time.time
    time.time = lambda: now() + 5
"""


def steps_of(run: Path) -> int:
    """The last step in a run's metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # whole ones only
    return int(json.loads(lines[-1])["step"]) if lines else 0


@dataclass
class Job:
    """A job and what it leaves."""

    cluster: Cluster
    job_id: str
    log: Path
    run: Path

    @property
    def info(self) -> dict[str, str]:
        return self.cluster.job(self.job_id)

    @property
    def step(self) -> int:
        """The last step in the run's metrics."""
        return steps_of(self.run)

    @property
    def snapshots(self) -> list[int]:
        return sorted(int(path.name[5:13]) for path in (self.run / "snapshots").glob("step_*.pt"))

    def ended(self, timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """Wait until Slurm has nothing more to do for the job."""

        def done() -> dict[str, str] | None:
            info = self.info
            alive = info["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
            if alive:
                return None
            time.sleep(1)  # between two starts of a requeued job there is a moment like its end
            return info if self.info["JobState"] == info["JobState"] else None

        try:
            found: dict[str, str] = wait_for(done, timeout_s, ASK_S)
        except AssertionError:
            raise AssertionError(f"{self.info}\n{self.said}") from None
        return found

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def result(self) -> Result:
        info = self.ended()
        return Result(int(info["ExitCode"].split(":")[0]), self.said, self.said, self.run)


@dataclass
class Submitter:
    """Submits jobs into a folder of the test's own; ends what still runs at its end."""

    cluster: Cluster
    folder: Path

    def __call__(
        self,
        file: str | Path,
        *arguments: str | Path,
        sbatch: tuple[str, ...] = TWO_BY_TWO,
        env: Mapping[str, str] | None = None,
        name: str = "job",
        inside: tuple[str, ...] = (),
    ) -> Job:
        """Submit train, torchrun or a script of the test's; `inside` runs sbatch."""
        path = ROOT / "slurm" / f"{file}.sbatch" if isinstance(file, str) else file
        log = self.folder / f"{name}.log"
        done = self.cluster.run(
            *inside,
            "sbatch",
            "--parsable",
            "--output",
            log,
            *sbatch,
            path,
            *arguments,
            env={"RUNS": str(self.folder / "all runs"), **(env or {})},
            cwd=self.folder,
        )
        job_id = done.stdout.strip()
        recipe = str(arguments[0]) if arguments else "none"
        run = self.folder / "all runs" / recipe / f"slurm-{job_id}"
        return Job(self.cluster, job_id, log, run)

    def script(self, text: str) -> Path:
        """A batch script of the test's own."""
        path = self.folder / "script.sh"
        path.write_text(f"#!/bin/bash\nexport PYTHONPATH={ROOT}\n{text}\n")
        return path

    def patch(self, **env: str) -> dict[str, str]:
        """Environment in which ranks fail or take their time.

        STEP_S is how much longer each step takes [s], so that a test can act in time: in the job's
        first start, or in its first SLOW_STARTS. GATE is a file: as long as it is there, the ranks
        of the first start wait while torch is imported.
        """
        (self.folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        return {"PYTHONPATH": f"{ROOT}:{self.folder}", **env}


def requeue(cluster: Cluster, job: Job) -> None:
    cluster.run("scontrol", "requeue", job.job_id)


def signal_tasks(cluster: Cluster, job: Job) -> None:
    cluster.run("scancel", "--signal=USR2", job.job_id)


def hold_a_node(cluster: Cluster) -> None:
    """Preempt what runs on one node, and keep it."""
    cluster.run(
        *"sbatch --partition=high --nodes=1 --exclusive --output=/dev/null".split(),
        "--wrap=sleep 100000",
    )
