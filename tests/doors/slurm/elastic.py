"""Jobs that Slurm gives other nodes again and again, at random, on the cluster of the tests.

    python -m tests.doors.slurm.elastic --rounds 20

Each round is a job of one to four nodes with eight virtual ranks. Three times, at a random step, a
node is taken by another job or given back, loses its power, or the job is asked to stop. The job
must end with the weights and the losses of a run on one process that nothing disturbs.
"""

import argparse
import contextlib
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common.manifest import describe_machine
from common.terminal import progress_bar
from common.writing import write_json
from tests.helpers.cluster import NODES, Cluster, make_folder
from tests.helpers.commands import Result, make_run, wait_for
from tests.helpers.pool import PATIENCE_S
from tests.helpers.slurm_jobs import (
    ASK_S,
    OPTIONS,
    Job,
    Submitter,
    hold_a_node,
    requeue,
    signal_tasks,
)

ELASTIC = (*OPTIONS, "--virtual-ranks", "8")
RESULT = Path(__file__).with_name("results") / "elastic.json"


def give_back(cluster: Cluster, job: Job) -> None:
    """End the other jobs, and ask this one to go on with all nodes."""
    cluster.run("scancel", "--partition=high")
    requeue(cluster, job)


def cut(cluster: Cluster, job: Job) -> None:
    """Cut the power of one of the job's nodes until Slurm has seen it."""
    nodelist = job.info["NodeList"]
    *_, lost = cluster.run("scontrol", "show", "hostnames", nodelist).stdout.split()
    cluster.power_off(lost)
    try:
        ask = ("sinfo", "-h", "-n", lost, "-o", "%T")
        wait_for(lambda: "down" in cluster.run(*ask).stdout, PATIENCE_S, ASK_S)
    finally:
        cluster.power_on(lost)


def take(cluster: Cluster, job: Job) -> None:
    """Take a node, unless others have three."""
    held = cluster.run("squeue", "--noheader", "--partition=high", "--format=%i").stdout.split()
    if len(held) < len(NODES) - 1:
        hold_a_node(cluster)
    else:
        give_back(cluster, job)


HOW = {
    "a node taken by another job": take,
    "all nodes given back": give_back,
    "a power cut": cut,
    "a signal": signal_tasks,
}


def play(submit: Submitter, number: int, dice: random.Random, reference: Result) -> dict[str, Any]:
    """A job, interrupted three times; what happened, and what is wrong."""
    env = submit.patch(STEP_S="0.05", SLOW_STARTS="4")
    job = submit(
        "train", "ddp_launch", *ELASTIC, sbatch=("--nodes=1-4",), env=env, name=str(number)
    )
    happened = []
    for _ in range(3):
        until = job.step + dice.randint(12, 40)  # with a snapshot since the last start
        wait_for(lambda: job.step >= until)  # noqa: B023 - now
        happened.append(dice.choice([*HOW]))
        HOW[happened[-1]](submit.cluster, job)
    info = job.ended()
    submit.cluster.run("scancel", "--partition=high")
    wrong = []
    if info["ExitCode"] != "0:0":
        wrong.append(f"ended with {info['ExitCode']}")
    elif (result := job.result).sha != reference.sha or result.losses != reference.losses:
        wrong.append("other weights or losses")
    starts = re.findall(r"(?m)^(?:job|restart).* on (\S+), from ", job.said)
    nodes = [
        len(submit.cluster.run("scontrol", "show", "hostnames", names).stdout.split())
        for names in starts
    ]
    if wrong:
        print(f"{wrong} after {happened} on {nodes} nodes:\n{job.said}", file=sys.stderr)
    return {"interruptions": happened, "nodes": nodes, "wrong": wrong}


def main() -> int:
    """Play the rounds; the exit status is 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Cluster(make_folder())) as it:
        submit = Submitter(it, Path(folder))
        reference = make_run(1, ELASTIC, Path(folder))
        sha = reference.sha
        progress = progress_bar(options.rounds, 0, main=True)
        rounds = []
        for number in range(options.rounds):
            rounds.append(play(submit, number, dice, reference))
            progress.update()
        progress.close()
    every = Counter(how for played in rounds for how in played["interruptions"])
    found = {
        "machine": describe_machine(),
        "command": f"python -m tests.doors.slurm.elastic --rounds {options.rounds}",
        "seed": options.seed,
        "weights_sha256": sha,
        "interruptions": dict(every),
        "starts_by_nodes": dict(sorted(Counter(n for p in rounds for n in p["nodes"]).items())),
        "ended_on_other_nodes": sum(p["nodes"][0] != p["nodes"][-1] for p in rounds),
        "wrong": sum(map(bool, (played["wrong"] for played in rounds))),
        "rounds": rounds,
    }
    options.output.parent.mkdir(exist_ok=True)
    write_json(options.output, found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
