"""The shipped files on a real cluster: every way to submit, every way to be interrupted."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import Cluster
from tests.helpers.commands import INJECTED, ROOT, Recipe, Result, make_run, wait_for
from tests.helpers.images import flowers
from tests.helpers.machine import need
from tests.helpers.pool import PATIENCE_S
from tests.helpers.slurm_jobs import (
    ASK_S,
    EVERY,
    OPTIONS,
    TWO_BY_TWO,
    Job,
    Submitter,
    hold_a_node,
    requeue,
    signal_tasks,
    steps_of,
)

pytestmark = pytest.mark.slurm

FOR_EVER = ("--epochs", "100000", "--log-every", "1")
ONE_EACH = ("--nodes", "2", "--ntasks-per-node", "1")  # half the start-up, where that is as good
# Restarts after one interruption. A second was seen once, on a slow machine whose log was not kept;
# what must hold then too is that the weights are the same and no hand was needed.
TIMES = (1, 2)

_PROBE = """\
import json, os, socket, torch
from common.group.devices import choose_device
from common.launch.ranks import resolve
ranks = resolve()
visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
gpus = len(visible.split(",")) if visible else 0
torch.cuda.device_count, torch.cuda.init = lambda: gpus, lambda: None
device = choose_device("cuda", ranks).index if gpus else None
print(json.dumps(["probe", ranks.launcher, ranks.rank, ranks.local_rank, ranks.world_size,
                  ranks.local_world_size, ranks.master_addr, socket.gethostname(), visible,
                  device]), flush=True)
"""


def submitter(cluster: Cluster, folder: Path) -> Iterator[Submitter]:
    yield Submitter(cluster, folder)
    cluster.run("scancel", "--user", "root")
    wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), every_s=ASK_S)


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Submitter]:
    yield from submitter(cluster, tmp_path)


@pytest.fixture
def submit_strictly(strict: Cluster, tmp_path: Path) -> Iterator[Submitter]:
    yield from submitter(strict, tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return make_run(4, OPTIONS, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return make_run(2, OPTIONS, tmp_path_factory.mktemp("pair"))


def test_two_nodes_with_two_ranks_each(submit: Submitter, reference: Result) -> None:
    """A job without tasks has a rank per GPU, and arguments reach the recipe untouched."""
    folder = submit.folder / "a 'quoted' \"folder\" $HOME"
    options = (*OPTIONS, "--device", "cpu", "--output-dir", folder)
    gpus = ("--nodes=2", "--gpus-per-node=2", "--cpus-per-gpu=1")
    job = submit("train", "ddp_launch", *options, sbatch=gpus)
    assert not job.run.exists()
    job.run = folder
    assert job.result.assert_ok().sha == reference.sha
    assert "error" not in job.said.lower()
    assert "world_size 4 (launcher: slurm)" in job.said
    assert json.loads((folder / "manifest.json").read_text())["hosts"] == ["n1", "n2"]
    assert job.info["JobName"] == "ddp_launch"


def submit_py(
    submit: Submitter, *options: str, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    command = (sys.executable, ROOT / "slurm" / "submit.py", "ddp_launch", "--runs", submit.folder)
    return submit.cluster.start(*command, *options, cwd=submit.folder, env=env)


def submitted(submit: Submitter, said: str) -> list[Job]:
    found = re.findall(r"(?m)^job (.+)\n  results  (.+)\n  log      (.+)$", said)
    return [Job(submit.cluster, job_id, Path(log), Path(run)) for job_id, run, log in found]


# What a notebook's cell and an interactive session leave in the shell that submits.
LEAKED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMPI_COMM_WORLD_RANK": "0",
    "SLURM_MEM_PER_CPU": "10",
    "SLURM_PTY_PORT": "1",
    "SLURM_STEP_RESV_PORTS": "29500",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND": "bad",
}


def test_submitit_follows_a_job_that_goes_on(submit: Submitter, pair: Result) -> None:
    asked = "--nodes 2 --tasks-per-node 1 --mem 1000 --nodelist=n[1-2]".split()
    env = {**LEAKED, **submit.patch(STEP_S="0.1")}
    following = submit_py(submit, *asked, "--follow", "--", *OPTIONS, env=env)
    try:
        assert following.stdout
        (job,) = submitted(submit, "".join(following.stdout.readline() for _ in range(3)))
        went = interrupt(job, signal_tasks, pair)
        said, errors = following.communicate(timeout=PATIENCE_S)
    finally:
        following.kill()
    assert following.returncode == 0, errors
    assert went.repeated_steps == 0
    assert "Calling checkpoint method" in job.said
    assert "world_size 2 (launcher: slurm)" in said
    assert said.endswith(f"job {job.job_id} finished\n")
    # --dry-run shows the file that is submitted, and Slurm accepts it.
    dry, errors = submit_py(submit, *asked, "--dry-run", "--", *OPTIONS).communicate()
    (file,) = (submit.folder / "ddp_launch" / "submitit").glob("*_submission.sh")
    assert dry.strip() == file.read_text().strip(), errors
    assert "wckey" not in dry
    submit.cluster.run("sbatch", "--test-only", file)


def power_cut(cluster: Cluster, job: Job) -> None:
    cluster.power_off("n2")
    try:
        wait_for(
            lambda: "down" in cluster.run("sinfo", "-h", "-n", "n2", "-o", "%T").stdout,
            every_s=ASK_S,
        )
    finally:
        cluster.power_on("n2")


@dataclass
class Interrupted:
    """How a job went on."""

    result: Result
    restarts: int
    repeated_steps: int
    said: str


def interrupt(
    job: Job, how: Callable[[Cluster, Job], None], reference: Result, timeout_s: float = PATIENCE_S
) -> Interrupted:
    """Interrupt a job between two snapshots, and wait for its end with no further hand."""
    wait_for(lambda: job.step >= 25)
    how(job.cluster, job)
    reached = 0

    def again() -> bool:
        nonlocal reached
        reached = max(reached, job.step)
        return job.info["JobState"] == "RUNNING" and int(job.info["Restarts"]) > 0

    wait_for(again, timeout_s, ASK_S)
    info = job.ended(timeout_s)
    result = job.result.assert_ok()
    assert result.sha == reference.sha, job.said
    assert result.losses == reference.losses
    assert "with other" not in job.said, "a restart is the same environment"
    repeated = reached - result.summary["resumed_from"]
    print(f"{how.__name__}: step {reached} reached, {repeated} steps done again")
    return Interrupted(result, int(info["Restarts"]), repeated, job.said)


def test_a_requeued_job_ends_with_the_same_weights(submit: Submitter, pair: Result) -> None:
    job = submit("train", "ddp_launch", *OPTIONS, env=submit.patch(STEP_S="0.1"), sbatch=ONE_EACH)
    went = interrupt(job, requeue, pair)
    assert went.restarts in TIMES, went.said
    assert went.repeated_steps == 0


def test_a_job_whose_ranks_all_wait_for_data_goes_on_and_loses_nothing(
    submit: Submitter, pair: Result
) -> None:
    stalled = submit.folder / "stalled"
    stalled.touch()
    env = {**INJECTED, "STALLED": str(stalled)}
    job = submit("train", "ddp_launch", *OPTIONS, env=env, sbatch=ONE_EACH)
    wait_for(lambda: job.step == 3)
    signal_tasks(submit.cluster, job)
    wait_for(lambda: "is requeued, to continue from" in job.said)
    stalled.unlink()
    result = job.result.assert_ok()
    assert (result.sha, result.losses) == (pair.sha, pair.losses), job.said
    assert "resuming after step 3" in job.said, "no step is done again"


def held_by_others(cluster: Cluster) -> int:
    ask = ("squeue", "--noheader", "--partition=high", "--states=RUNNING", "--format=%i")
    return len(cluster.run(*ask).stdout.split())


def test_a_job_goes_on_with_whatever_nodes_it_gets(submit: Submitter, recipe: Recipe) -> None:
    """Three nodes, then two, as another job preempts this one; then one, as the power goes."""
    options, cluster = (*OPTIONS, "--virtual-ranks", "8"), submit.cluster
    reference = recipe("ddp_launch", *options, "--nproc", "1").assert_ok()
    hold_a_node(cluster)
    wait_for(lambda: held_by_others(cluster) == 1, every_s=ASK_S)
    env = submit.patch(STEP_S="0.1", SLOW_STARTS="9")
    job = submit("train", "ddp_launch", *options, env=env, sbatch=("--nodes=1-3",))
    for restarts, nodes in enumerate((3, 2)):
        wait_for(lambda: int(job.info["Restarts"]) >= restarts, PATIENCE_S, ASK_S)  # noqa: B023
        wait_for(lambda: job.info["JobState"] == "RUNNING", PATIENCE_S, ASK_S)
        begun = job.step
        wait_for(lambda: job.step >= begun + 10)  # noqa: B023 - now
        assert job.info["NumNodes"] == str(nodes), job.said
        if nodes == 3:
            hold_a_node(cluster)
    nodelist = job.info["NodeList"]
    *_, lost = cluster.run("scontrol", "show", "hostnames", nodelist).stdout.split()
    cluster.power_off(lost)
    try:
        info, result = job.ended(), job.result.assert_ok()
    finally:
        cluster.power_on(lost)
    assert result.sha == reference.sha, job.said
    assert result.losses == reference.losses
    assert info["NumNodes"] == "1", job.said
    assert int(info["Restarts"]) >= 2
    said = re.findall(r"(?m)^(?:job \d+ begins|restart \d of job \d+) on (\S+), from ", job.said)
    assert len(said) == int(info["Restarts"]) + 1
    stopped, resumed = (
        set(re.findall(rf"{word} after step (\d+)", job.said)) for word in ("stopped", "resuming")
    )
    assert stopped, "a preempted job is warned"
    assert stopped <= resumed, job.said
    assert "SLURM_JOB_NUM_NODES" not in job.said, "other nodes are no other environment"


def test_shards_of_two_nodes_go_on_after_a_power_cut(submit: Submitter, recipe: Recipe) -> None:
    text = submit.folder / "book.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}, and that is true.\n" for n in range(300)))
    data = ("--data", "text", "--data-path", str(text), "--context", "16")
    options = (*data, "--layers", "1", "--width", "16", "--heads", "2", *OPTIONS)
    reference = recipe("fsdp", *options, "--nproc", "2").assert_ok()
    env = submit.patch(STEP_S="0.1")
    job = submit("train", "fsdp", *options, env=env, sbatch=(*ONE_EACH, "--nodelist=n[1-2]"))
    went = interrupt(job, power_cut, reference)
    assert went.restarts in TIMES, went.said
    assert 0 <= went.repeated_steps <= EVERY


def test_torchrun_starts_a_killed_rank_again_and_goes_on_after_a_signal(
    submit: Submitter, pair: Result
) -> None:
    job = submit(
        "torchrun", "ddp_launch", *OPTIONS, env=submit.patch(STEP_S="0.1"), sbatch=ONE_EACH
    )
    wait_for(lambda: job.step > 25)
    kill = ("pkill", "-KILL", "--newest", "-f", f"slurm-{job.job_id}$")  # a rank
    on_n2 = ("srun", "--overlap", "--jobid", job.job_id, "-n1", "-N1", "--nodelist=n2")
    submit.cluster.run(*on_n2, *kill)
    (step,) = wait_for(lambda: re.findall(r"resuming after step (\d+)", job.said))
    wait_for(lambda: job.snapshots[-1:] > [int(step)])
    assert (job.info["Restarts"], int(step) >= 20) == ("0", True)
    went = interrupt(job, signal_tasks, pair)
    assert went.restarts in TIMES, went.said
    assert went.repeated_steps == 0


def set_a_time_limit(cluster: Cluster, job: Job) -> None:
    """One that comes in one to two minutes, so that Slurm warns now; the next start has none."""
    hours, minutes, _ = job.info["RunTime"].split(":")
    limit = int(hours) * 60 + int(minutes) + 2
    cluster.run("scontrol", "update", f"JobId={job.job_id}", f"TimeLimit={limit}")
    wait_for(lambda: "is requeued, to continue from" in job.said)
    cluster.run("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=60")


def test_a_real_time_limit(submit: Submitter, pair: Result) -> None:
    """It is set when the job trains, so no start is too slow for it."""
    env = submit.patch(STEP_S="0.6")  # Slurm looks twice a minute
    job = submit("train", "ddp_launch", *OPTIONS, env=env, sbatch=ONE_EACH)
    went = interrupt(job, set_a_time_limit, pair)
    assert went.repeated_steps == 0


def test_submitit_here_and_now(submit: Submitter) -> None:
    asked = ("--local", "--tasks-per-node", "2")
    here = submit_py(submit, *asked, "--", "--max-steps", "1", env=LEAKED)
    said, errors = here.communicate(timeout=PATIENCE_S)
    assert here.returncode == 0, said + errors
    assert "world_size 2 (launcher: recipes)" in said
    (run,) = (submit.folder / "ddp_launch").glob("local-*")
    assert f"  results  {run}\n" in said
    assert (run / "summary.json").exists()


def test_a_sweep_is_an_array(submit: Submitter) -> None:
    asked = "--tasks-per-node 1 --mem 1000 --over".split()
    sent = submit_py(submit, *asked, "--lr 0.05 0.1 --seed 0 1", "--", "--max-steps", "1")
    said, errors = sent.communicate(timeout=PATIENCE_S)
    jobs = submitted(submit, said)
    assert len(jobs) == 4, errors
    for job in jobs:
        job.result.assert_ok()
    configs = [json.loads((job.run / "config.json").read_text()) for job in jobs]
    options = [(config["lr"], config["seed"], config["max_steps"]) for config in configs]
    assert options == [(0.05, 0, 1), (0.05, 1, 1), (0.1, 0, 1), (0.1, 1, 1)]


REFUSED_AT_SUBMISSION = {
    "--nodes two": "--nodes: invalid literal",
    "--gpus-per-node=2 --tasks-per-node=1": "one rank per GPU is needed",
    "--runs /proc/no": "cannot be written",
    "--local --runs /proc/no": "cannot be written",
    "-- --epocs 3": "--epocs",
    "--array=0-3": "-- OPTIONS -- OPTIONS, or --over",
    "--over ''": "--over is empty",
    "--mem 10 lots": "lots: the recipe's options go after a --",
    "--local --partition high": "no option of sbatch (partition)",
    "-- --lr -1": "--lr must be positive",
    "-- --output-dir=x -- --output-dir=x": "would share --output-dir x",
    "--over '--lr 0.1 x'": "--lr: could not convert",
    "--over '--lr 0.1 1' -- --seed 1 -- --seed 2": "give one -- OPTIONS, which all of them get",
    "--over '--lr 0.1 1' -- --output-dir=x": "would share --output-dir x",
}


def test_wrong_at_submission(
    submit: Submitter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_main = import_module("slurm.submit").main
    for words, says in REFUSED_AT_SUBMISSION.items():
        monkeypatch.setattr(sys, "argv", ["submit.py", "ddp_launch", *shlex.split(words)])
        assert submit_main() == 2, words
        (error,) = re.findall("(?m)^error: .*$", capsys.readouterr().err)
        assert says in error
    refused = submit_py(submit, "--partition=none")
    _, said = refused.communicate(timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert re.findall("(?m)^error: sbatch refused: .*$", said)
    assert "Traceback" not in said


@pytest.mark.parametrize("how", ["train", "submitit"])
def test_a_signal_before_training_starts_the_job_again(
    submit: Submitter, pair: Result, how: str
) -> None:
    gate = submit.folder / "gate"  # the first start's ranks wait there while torch is imported
    gate.touch()
    held = submit.patch(GATE=str(gate))
    if how == "submitit":
        said, _ = submit_py(submit, *ONE_EACH, "--", *OPTIONS, env=held).communicate()
        (job,) = submitted(submit, said)
    else:
        job = submit(how, "ddp_launch", *OPTIONS, sbatch=ONE_EACH, env=held)
    wait_for(lambda: len(list(submit.folder.glob(f"gate.{job.job_id}.*"))) == 2)
    submit.cluster.run("scancel", "--signal=USR2", job.job_id)
    wait_for(lambda: job.info["Restarts"] == "1", every_s=ASK_S)
    gate.unlink()
    assert job.result.assert_ok().sha == pair.sha, job.said
    assert job.info["Restarts"] == "1", job.said
    assert job.result.summary["resumed_from"] is None


def test_a_cancelled_job_saves_and_stays_cancelled(submit: Submitter) -> None:
    job = submit("train", "ddp_launch", *OPTIONS, env=submit.patch(STEP_S="0.1"), sbatch=ONE_EACH)
    wait_for(lambda: job.step > 25)
    submit.cluster.run("scancel", job.job_id)
    assert job.ended()["JobState"] == "CANCELLED"
    (stopped,) = re.findall(r"stopped after step (\d+)", job.said)
    assert job.snapshots[-1] == job.step == int(stopped)
    assert re.search(
        rf"if job \d+ is not requeued, continue from snapshot step_0*{stopped}\.", job.said
    )


def test_where_requeue_is_refused_the_log_says_how_to_go_on(
    submit: Submitter, pair: Result
) -> None:
    job = submit(
        "train",
        "ddp_launch",
        *OPTIONS,
        env=submit.patch(STEP_S="0.1"),
        sbatch=(*ONE_EACH, "--no-requeue"),
    )
    wait_for(lambda: job.step > 25)
    submit.cluster.run("scancel", "--signal=USR2", job.job_id)
    assert job.result.status == 75
    (words,) = re.findall(
        r"continue from snapshot step_\S+: sbatch \[its options and file as before\] (.+)", job.said
    )
    second = submit("train", *shlex.split(words), sbatch=ONE_EACH, name="second")
    second.run = job.run
    assert second.result.assert_ok().sha == pair.sha
    assert second.result.summary["resumed_from"] > 25


def test_the_batch_script_alone_is_told_and_no_slurmctld_answers_while_the_job_concludes(
    submit: Submitter, pair: Result
) -> None:
    job = submit("train", "ddp_launch", *OPTIONS, env=submit.patch(STEP_S="0.1"), sbatch=ONE_EACH)
    wait_for(lambda: job.step > 25)
    spool = f"{submit.cluster.folder}/spool.n[1-4]"  # another cluster may have such a job, too
    batch_script = ["pkill", "-USR2", "-f", f"{spool}/job{job.job_id}/slurm_script"]
    submit.cluster.stop_slurmctld()
    try:
        subprocess.run(batch_script, check=True)
        wait_for(lambda: "slurmctld does not answer; retrying" in job.said)
        subprocess.run(batch_script, check=True)  # a second one
    finally:
        submit.cluster.start_slurmctld()
    result = job.result.assert_ok()
    assert (result.sha, result.losses) == (pair.sha, pair.losses), job.said
    assert job.info["Restarts"] == "1"
    assert "unbound" not in job.said


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("MAX_RESTARTS", 1, "1 restarts in a row without a new snapshot"),
        ("MAX_REQUEUES", 0, "0 restarts (MAX_REQUEUES): not requeued"),
    ],
)
def test_restarts_have_an_end(submit: Submitter, limit: str, most: int, words: str) -> None:
    """A loss that is not finite right after a snapshot, again and again."""
    job = submit(
        *"train ddp_launch --lr 1e6 --snapshot-every 1 --log-every 1".split(),
        env={limit: str(most)},
        sbatch=("--nodes=1",),
    )
    info = job.ended()
    assert (info["JobState"], info["ExitCode"], info["Restarts"]) == ("FAILED", "1:0", str(most))
    assert f"error: {words}" in job.said
    assert job.said.count("is not finite") == most + 1


def test_a_failing_rank_ends_the_job_and_is_named(submit: Submitter) -> None:
    job = submit("train", "ddp_launch", env=submit.patch(FAIL_AT="5"), sbatch=ONE_EACH)
    info = job.ended()
    assert (info["JobState"], info["ExitCode"], info["Restarts"]) == ("FAILED", "1:0", "0")
    assert re.search(r"(?m)^error: rank 1 on n2: a bug of this test$", job.said)


def test_a_killed_rank_without_peers_is_named(submit: Submitter) -> None:
    """Nobody else is left to say so."""
    job = submit(
        "train",
        *"ddp_launch --nproc 1 --global-batch-size 96".split(),
        env=submit.patch(KILLED_AT="2"),
        sbatch=("--nodes=1", "--ntasks-per-node=1"),
    )
    info = job.ended()
    assert (info["JobState"], info["ExitCode"], info["Restarts"]) == ("FAILED", "1:0", "0")
    (error,) = re.findall("(?m)^error: .*$", job.said)
    assert re.match(
        "error: a rank was killed by SIGKILL; if .*, perhaps out of memory: .*--mem", error
    )


WRONG = [  # file, arguments, sbatch's options, environment, error
    ("train", "ddp_lunch", "--nodes=2", {}, "no recipe 'ddp_lunch'"),
    ("train", "ddp_launch --epocs 3", "--nodes=2 --ntasks-per-node=1", {}, "--epocs"),
    ("train", "ddp_launch", "--nodes=2", {"PYTHON": "/no/python"}, "no environment"),
    ("train", "ddp_launch --output-dir /proc/no", "--nodes=2", {}, "cannot be written"),
    ("train", "ddp_launch", "--ntasks-per-node=2 --gpus-per-node=1", {}, "2 ranks per node, but 1"),
    ("train", "ddp_launch", "--ntasks-per-node=1 --gpus-per-node=2", {}, "1 ranks per node, but 2"),
    (
        "train",
        "ddp_launch",
        "--ntasks-per-node=2 --gpus-per-node=2",
        {},
        "but this process sees no GPU",
    ),
    ("train", "ddp_launch --output-dir=x", "--array=7", {}, "tasks of the array would share"),
    ("train", "ddp_launch", "--nodes=2", {"CONTAINER": "docker:x"}, "CONTAINER must be"),
    ("train", "ddp_launch", "--nodes=1 : --nodes=1", {}, "this heterogeneous job"),
    ("torchrun", "ddp_launch --epocs 3", "--nodes=2 --ntasks-per-node=1", {}, "--epocs"),
    ("torchrun", "ddp_launch", "--nodes=2 --gpus-per-node=2", {}, "--ntasks-per-node=2"),
    ("torchrun", "ddp_launch", "--nodes=2 --ntasks=3", {}, "2,1 tasks on the nodes"),
]


def test_wrong_at_the_start(submit: Submitter) -> None:
    jobs = [
        submit(file, *words.split(), env=env, sbatch=(*asked.split(),), name=str(number))
        for number, (file, words, asked, env, _) in enumerate(WRONG)
    ]
    for job, (*_, says) in zip(jobs, WRONG, strict=True):
        info = job.ended()
        assert (info["ExitCode"], info["Restarts"]) == ("2:0", "0"), job.said
        (error,) = re.findall("(?m)^error: .*$", job.said)  # of all ranks
        assert says in error


def test_bad_input_on_one_rank_is_never_requeued(submit: Submitter) -> None:
    """Its peer is killed, with a higher status; there is a snapshot to go on from."""
    run = submit.folder / "run"
    options = ("train", "ddp_launch", *OPTIONS, "--output-dir", run)
    first = submit(*options, "--max-steps", "12", sbatch=ONE_EACH, name="first")
    first.result.assert_ok()
    env = {**submit.patch(REFUSED="1"), "MAX_RESTARTS": "1"}
    job = submit(*options, env=env, sbatch=ONE_EACH)
    info = job.ended()
    ended = (info["JobState"], info["ExitCode"], info["Restarts"])
    assert ended == ("FAILED", "2:0", "0"), job.said
    assert re.search(r"(?m)^error: rank 1 on n\d: .*--lr", job.said)
    (fix,) = re.findall("(?m)^fix this, then continue from snapshot step_.*$", job.said)
    assert fix.count("--output-dir") == 1


# A shell of a step, in an allocation.
_SESSION = (
    *"salloc --nodelist=n1 --ntasks=1 --mem-per-cpu=500 --gpus-per-node=2".split(),
    sys.executable,
    "-c",
    "import pty, sys; pty.spawn(['srun', '--pty', *sys.argv[1:]])",
)


def test_an_interactive_session_leaks_nothing_into_a_job(submit_strictly: Submitter) -> None:
    submit = submit_strictly
    noting = (
        f"grep Cpus_allowed_list /proc/self/status >> {submit.folder}/cores.$SLURM_JOB_ID; "
        f'exec {sys.executable} "$@"'
    )
    python = stub(submit.folder, "python", noting)["PATH"].split(":")[0] + "/python"
    jobs = [
        submit(
            *"train ddp_launch --max-steps 1".split(),
            sbatch=sbatch,
            env={"PYTHON": python, **env},
            inside=_SESSION,
            name=name,
        )
        for name, sbatch, env in (
            ("two", ("--ntasks-per-node=2", "--mem=4000", "--nodelist=n2"), {}),
            # And from the script of an array's task that submits the next job.
            (
                "one",
                ("--nodes=1",),
                {
                    "SLURM_ARRAY_JOB_ID": "7",
                    "SLURM_ARRAY_TASK_ID": "1",
                    "SLURM_NTASKS": "4",
                    "SLURM_RESTART_COUNT": "2",
                },
            ),
        )
    ]
    for job, world_size in zip(jobs, (2, 1), strict=True):
        assert job.result.assert_ok().summary["world_size"] == world_size, job.said
    assert json.loads((jobs[0].run / "manifest.json").read_text())["hosts"] == ["n2"]
    cores = (submit.folder / f"cores.{jobs[0].job_id}").read_text().split()[1::2]
    assert set(cores) != {"0"}, "all ranks on the session's core"


def test_ranks_left_in_the_shell_are_not_the_jobs(submit: Submitter) -> None:
    left = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    options = ("--max-steps", "1")
    job = submit("train", "ddp_launch", *options, env=left, sbatch=ONE_EACH)
    # Meanwhile, without our files.
    command = ("srun", "-N1", "-n1", sys.executable, "-m", "recipes", "ddp_launch", "--check")
    left["WORLD_SIZE"] = "2"
    bare = submit.cluster.run(*command, env={"PYTHONPATH": str(ROOT), **left}, check=False)
    assert bare.returncode == 2
    assert "error: RANK=0 WORLD_SIZE=2 in the environment" in bare.stderr
    assert job.result.assert_ok().summary["world_size"] == 2
    assert (
        "ignored, because it comes from the shell that submitted this job: WORLD_SIZE=1\n"
        in job.said
    )


def test_torchrun_has_its_ranks_memory(submit_strictly: Submitter) -> None:
    """As the README asks for it; that of one core is too little."""
    job = submit_strictly(
        *"torchrun ddp_launch --max-steps 1 --device cpu".split(),
        sbatch=("--ntasks-per-node=2", "--gpus-per-node=2"),
    )
    assert job.result.assert_ok().summary["world_size"] == 2


def test_a_site_that_kills_at_the_first_exit_lets_all_ranks_save(
    submit_strictly: Submitter, pair: Result
) -> None:
    job = submit_strictly(
        "train", "ddp_launch", *OPTIONS, env=submit_strictly.patch(STEP_S="0.1"), sbatch=ONE_EACH
    )
    went = interrupt(job, signal_tasks, pair)
    assert went.restarts in TIMES, went.said
    assert went.repeated_steps == 0


def test_rank_0_on_another_host_than_the_first_is_said(submit: Submitter) -> None:
    hosts = submit.folder / "hosts"
    hosts.write_text("n3\nn1\n")
    asked = (*ONE_EACH, "--nodelist=n[1,3]", "--distribution=arbitrary")
    env = {"SLURM_HOSTFILE": str(hosts)}
    job = submit("train", "ddp_launch", "--check", env=env, sbatch=asked)
    assert job.result.status == 2
    assert "error: rank 0 is on n3, but the other ranks look for it on n1" in job.said


def test_copies_and_links_of_the_file(submit: Submitter) -> None:
    file = ROOT / "slurm" / "train.sbatch"
    copy, link = submit.folder / "my own.job", submit.folder / "link"
    shutil.copy(file, copy)
    link.symlink_to(file)

    def start(path: Path, **env: str) -> Job:
        name = f"{path.name}{len(env)}"
        return submit(path, "ddp_launch", "--check", sbatch=("-N1",), env=env, name=name)

    lost, found, linked = start(copy), start(copy, RECIPES_ROOT=str(ROOT)), start(link)
    assert lost.result.status == 2
    assert f"error: no job.sh beside {copy}: export RECIPES_ROOT=" in lost.said
    found.result.assert_ok()
    linked.result.assert_ok()


def test_two_runs_of_one_job_do_not_share_a_folder(submit: Submitter) -> None:
    line = f"bash {ROOT}/slurm/train.sbatch ddp_launch --check"
    job = submit(submit.script(f"{line} & first=$!\n{line}; echo $?; wait $first; echo $?"))
    run = job.run.parents[1] / "ddp_launch" / job.run.name
    job.result.assert_ok()
    (error,) = re.findall("(?m)^error: .*$", job.said)
    assert error.startswith(f"error: another run of job {job.job_id} writes into {run}: give each")
    assert sorted(re.findall(r"(?m)^\d$", job.said)) == ["0", "2"]
    assert not (run / "slurm_running").exists()


def test_fewer_ranks_than_the_gpus_of_an_exclusive_node(submit: Submitter) -> None:
    asked = ("--exclusive", "--nodes=1", "--ntasks-per-node=1")
    cpu = submit("train", "ddp_launch", "--check", "--device=cpu", sbatch=asked)
    gpu = ("--gpus-per-node=h100:1",)
    one = submit("train", "ddp_launch", "--check", sbatch=(*asked, *gpu), name="one")
    for job in (cpu, one):
        job.result.assert_ok()


def go_on_together(submit: Submitter, jobs: Sequence[Job], runs: Sequence[Path]) -> None:
    """Wait until every run trains while no other one has ended, then stop them all."""
    wait_for(lambda: all(steps_of(run) > 20 for run in runs))
    for job in jobs:
        assert job.info["JobState"] == "RUNNING", job.said
        submit.cluster.run("scancel", job.job_id)
    said = [(job.ended(), job.said)[1] for job in jobs]
    assert sum(len(re.findall(r"stopped after step \d+", text)) for text in said) == len(runs)


def test_an_array_over_seeds_on_one_node_shares_no_port(submit: Submitter) -> None:
    """Each in a folder that its number names."""
    options = f"{' '.join(FOR_EVER)} --seed $SLURM_ARRAY_TASK_ID"
    options += f" --output-dir {submit.folder}/arr_$SLURM_ARRAY_TASK_ID"
    array = submit.cluster.run(
        *"sbatch --parsable --array=0-1 --ntasks-per-node=2 --nodelist=n3".split(),
        f"--output={submit.folder}/%a.log",
        *"--requeue --signal=USR2@120 --open-mode=append --time=1:00:00".split(),
        f"--wrap=bash slurm/train.sbatch ddp_launch {options}",
        env={"RUNS": str(submit.folder)},
    ).stdout.strip()
    runs = [submit.folder / f"arr_{task}" for task in (0, 1)]
    jobs = [
        Job(submit.cluster, f"{array}_{task}", submit.folder / f"{task}.log", run)
        for task, run in enumerate(runs)
    ]
    go_on_together(submit, jobs, runs)
    assert [json.loads((run / "config.json").read_text())["seed"] for run in runs] == [0, 1]


def test_data_on_each_nodes_disk(submit: Submitter) -> None:
    """The README's script, with this cluster's nodes and a folder of the test's as their disk."""
    page = (ROOT / "slurm" / "README.md").read_text()
    (script,) = re.findall(r"```\n(#!/bin/bash\n#SBATCH .*?)```", page, re.DOTALL)
    script = script.replace("--gpus-per-node=4 --ntasks-per-node=4", "--ntasks-per-node=1")
    path = submit.folder / "staged.sh"
    path.write_text(
        script.replace("/tmp", str(submit.folder / "disk"))
        .replace("slurm/train.sbatch", str(ROOT / "slurm" / "train.sbatch"))
        .replace("ddp_launch", "ddp_launch --max-steps 1 --image-size 32 --global-batch-size 4")
    )
    flowers(submit.folder / "photos")
    (submit.folder / "disk").mkdir()
    shutil.make_archive(str(submit.folder / "photos"), "tar", submit.folder, "photos")
    job = submit(path, sbatch=("--time=10",))
    job.run = submit.folder / "all runs" / "ddp_launch" / job.run.name
    assert job.result.assert_ok().summary["world_size"] == 2


def test_a_shell_that_srun_opens_is_no_rank(submit: Submitter) -> None:
    ask = "from common.launch.ranks import resolve; print(resolve().launcher)"
    found = []
    for options in ([], ["--pty"], ["--pty", "srun", "--overlap"]):
        command = ["srun", *options, sys.executable, "-c", ask]
        terminal = f"import pty; pty.spawn({command!r})"
        done = submit.cluster.run(sys.executable, "-c", terminal, env={"PYTHONPATH": str(ROOT)})
        found.append(done.stdout.split()[-1])
    assert found == ["slurm", "none", "slurm"]
    # A notebook's kernel in such a shell has no terminal.
    hidden = ["srun", "--pty", "setsid", "--wait", sys.executable, "-m", "recipes", "ddp_launch"]
    hidden += ["--nproc", "2", "--max-steps", "1"]
    said = []
    for way in ([], ["env", "-u", "SLURM_PROCID"]):
        command = [*hidden[:2], *way, *hidden[2:], "--output-dir", str(submit.folder / "run")]
        terminal = f"import pty; pty.spawn({command!r})"
        env = {"PYTHONPATH": str(ROOT)}
        said.append(submit.cluster.run(sys.executable, "-c", terminal, env=env).stdout)
    assert "if Slurm started your notebook or shell, unset SLURM_PROCID first" in said[0]
    assert "world_size 2 (launcher: recipes)" in said[1]


def probes(text: str) -> list[list[Any]]:
    lines = [line for line in text.splitlines() if line.startswith('["probe"')]
    return sorted(json.loads(line)[1:] for line in lines)


def test_ranks_and_devices_of_every_kind_of_step(submit: Submitter) -> None:
    (submit.folder / "probe.py").write_text(_PROBE)
    python = f"{sys.executable} {submit.folder}/probe.py"
    job = submit(
        submit.script(
            f"srun {python} > all\nsrun -N1 -n1 -w n2 {python} > one\n{python} > shell\n"
            f"srun -N1 -n2 --gpus-per-task=1 {python} > isolated"
        ),
        sbatch=(*TWO_BY_TWO, "--gpus-per-node=2", "--nodelist=n[1-2]"),
    )
    job.ended()

    def read(name: str) -> list[list[Any]]:
        return probes((submit.folder / name).read_text())

    assert read("all") == [
        ["slurm", rank, rank % 2, 4, 2, "n1", f"n{rank // 2 + 1}", "0,1", rank % 2]
        for rank in range(4)
    ]
    assert read("isolated") == [
        ["slurm", rank, rank, 2, 2, "n1", "n1", str(rank), 0] for rank in range(2)
    ]
    assert read("one") == [["slurm", 0, 0, 1, 1, "n2", "n2", "0,1", 0]]
    assert read("shell") == [["none", 0, 0, 1, 1, "127.0.0.1", "n1", "0,1", 0]]


def test_without_srun_and_by_torchrun_in_an_allocation(submit: Submitter) -> None:
    options = ("--max-steps", "1", "--device", "cpu", "--output-dir")
    bare = submit(
        submit.script(f"{sys.executable} -m recipes ddp_launch {' '.join(options)} bare"),
        sbatch=TWO_BY_TWO,
    ).result.assert_ok()
    assert "world_size 2 (launcher: recipes)" in bare.stdout
    assert "without srun all ranks run on this node" in bare.stdout
    done = submit.cluster.run(
        "salloc",
        "--ntasks=2",
        sys.executable,
        *"-m torch.distributed.run --nproc-per-node=2 -m recipes.ddp_launch.train".split(),
        *options,
        "torchrun",
        cwd=submit.folder,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert "world_size 2 (launcher: torchrun)" in done.stdout


def test_slurm_accepts_every_directive(cluster: Cluster) -> None:
    files = sorted((ROOT / "slurm").glob("*.sbatch"))
    assert len(files) >= 2
    for file in files:
        cluster.run("sbatch", "--test-only", file)
        assert not re.search(r"(?m)^# +SBATCH", file.read_text()), "a comment, not a directive"


def test_make_slurm_check(submit: Submitter) -> None:
    need("make")
    done = submit.cluster.run(
        "make",
        "-C",
        ROOT,
        "slurm-check",
        f"PYTHON={sys.executable}",
        "ARGS=--ntasks-per-node=1",
        env={"RUNS": str(submit.folder)},
    )
    assert re.search(r"all ranks met \d+\.\d s after they were started", done.stdout)
    assert re.search(r"1  n2 +eth0 +cpu", done.stdout), done.stdout
    assert re.search(r"n2 +[\d,]+ +-?\d+\.\d+ ± \d+\.\d+ ms", done.stdout)
    refused = submit.cluster.run(
        "make",
        "-C",
        ROOT,
        "slurm-check",
        f"PYTHON={sys.executable}",
        "ARGS=--partition=none",
        check=False,
        env={"RUNS": str(submit.folder)},
    )
    assert refused.returncode == 2
    assert "invalid partition" in refused.stderr
    assert re.search(r"(?m)^error: sbatch refuses slurm/\w+.sbatch", refused.stderr)


def test_a_slow_link_and_a_wrong_clock_are_found(submit: Submitter) -> None:
    need("tc")
    inside = ["nsenter", f"--net={submit.cluster.network('n3')}", "tc", "qdisc"]
    subprocess.run(
        [
            *inside,
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            "100mbit",
            "burst",
            "64kb",
            "latency",
            "100ms",
        ],
        check=True,
    )
    try:
        options = ("--largest", "4", "--rounds", "2")
        job = submit(
            "train",
            "check_network",
            *options,
            env=submit.patch(AHEAD="n3"),
            sbatch=("--nodes=3", "--nodelist=n[1-3]"),
        )
        info = job.ended()
    finally:
        subprocess.run([*inside, "del", "dev", "eth0", "root"], check=True)
    links = json.loads((job.run / "network.json").read_text())["links_of_rank_0"]
    # What n3 sends is limited to 12.5 MB/s, and what it gets is not.
    assert links["n3"]["bytes_per_s"] < 2 * 12.5e6 < links["n2"]["bytes_per_s"]
    assert abs(links["n3"]["clock_ahead_s"] - 5) <= links["n3"]["within_s"]
    assert info["ExitCode"] == "1:0"
    assert re.search(r"(?m)^error: rank 0 on n1: the clock of n3 differs by \+[45]\.", job.said)


def stub(folder: Path, name: str, text: str) -> dict[str, str]:
    """A program of that name first on the job's PATH."""
    path = folder / "stubs" / name
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return {"PATH": f"{path.parent}:{os.environ['PATH']}"}


def test_the_command_line_of_apptainer(submit: Submitter) -> None:
    """No apptainer here: a stand-in notes its words, then runs what follows the image."""
    path = stub(
        submit.folder,
        "apptainer",
        (
            f'printf "%s\\n" "$@" > {submit.folder}/words.$SLURM_PROCID; shift 5; [ $1 = python ]; '
            f'shift; PYTHONPATH={ROOT} exec {sys.executable} "$@"'
        ),
    )
    env = {"CONTAINER": "apptainer:/images/recipes.sif", "MOUNTS": "/data:/data", **path}
    job = submit("train", "ddp_launch", "--max-steps", "1", env=env, sbatch=ONE_EACH)
    assert job.result.assert_ok().summary["world_size"] == 2
    words = (submit.folder / "words.1").read_text().splitlines()
    assert words[:6] == [
        "exec",
        "--nv",
        "--bind",
        f"{job.run},/data:/data",
        "/images/recipes.sif",
        "python",
    ]


def test_the_command_line_of_pyxis(submit: Submitter) -> None:
    """srun knows --container-image where pyxis is installed only: a stand-in notes its words."""
    path = stub(submit.folder, "srun", f'printf "%s\\n" "$@" > {submit.folder}/words')
    env = {"CONTAINER": "pyxis:registry#recipes:1", **path}
    job = submit("train", "ddp_launch", env=env)
    assert job.ended()["ExitCode"] == "0:0", job.said
    words = (submit.folder / "words").read_text().splitlines()
    assert "--container-image=registry#recipes:1" in words
    assert f"--container-mounts={job.run}:{job.run}" in words
    assert words[words.index("--no-container-entrypoint") + 1 :][:2] == ["python", "-P"]


SWEEP = """\
from slurm.submit import submit_array

sweep = [f"--epochs 1 --lr {lr}" for lr in (0.02, 0.1)]
jobs = submit_array("ddp_launch", sweep, nodes=1, ntasks_per_node=2, time=60)
for job in jobs:
    print(job.job_id, job.task(0).result()["val_accuracy"])
"""


def test_a_job_that_submits_a_sweep_from_python(submit: Submitter) -> None:
    """From a job of another shape."""
    (submit.folder / "sweep.py").write_text(SWEEP)
    (submit.folder / "common").mkdir()  # not the repository's
    (submit.folder / "common" / "__init__.py").touch()
    driver = submit(
        submit.script(f"PYTHONPATH={ROOT} {sys.executable} sweep.py"),
        env={"RUNS": str(submit.folder), **LEAKED},
        sbatch=("--array=7", "--gpus-per-node=1", "--mem=100"),
    )
    assert driver.ended()["ExitCode"] == "0:0", driver.said
    told = dict(re.findall(r"(?m)^(\d+_\d) (0\.\d+)$", driver.said))
    runs = sorted((submit.folder / "ddp_launch").glob("slurm-*"))
    assert [run.name for run in runs] == [f"slurm-{job_id}" for job_id in told]
    assert len(runs) == 2
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        assert summary["world_size"] == 2
        assert told[run.name[6:]] == str(summary["val_accuracy"])


def test_a_held_job_outlives_ctrl_c_and_says_that_its_repository_was_moved(
    submit: Submitter,
) -> None:
    repository = submit.folder / "a repository"
    for name in ("common", "recipes", "slurm", "tools"):
        shutil.copytree(ROOT / name, repository / name)
    follower = submit.cluster.start(
        sys.executable,
        repository / "slurm" / "submit.py",
        "ddp_launch",
        "--runs",
        submit.folder,
        "--hold",
        "--follow",
        cwd=submit.folder,
        # Where the tests run in a shell's background, they and what they start are deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert follower.stdout
        begun = "".join(follower.stdout.readline() for _ in range(3))
        follower.send_signal(signal.SIGINT)
        said, errors = follower.communicate(timeout=PATIENCE_S)
    finally:
        follower.kill()
    assert follower.returncode == 130, errors
    (job,) = submitted(submit, begun)
    assert said.endswith(
        f"goes on. To follow it: tail -F {job.log}; to end it: scancel {job.job_id}\n"
    )
    assert "Traceback" not in errors
    assert job.info["JobState"] == "PENDING"
    repository.rename(submit.folder / "moved")
    submit.cluster.run("scontrol", "release", job.job_id)
    assert job.ended()["ExitCode"] == "2:0"
    assert re.search(
        r"(?m)^error: n\d sees no .*/a repository/slurm/clean_env.sh, .*moved\?", job.said
    )
