"""Submit a recipe to Slurm from Python, through submitit: a rank a task, one a GPU.

    python slurm/submit.py ddp_launch --nodes 2 --gpus-per-node 4 --time 60 -- --epochs 3
    python slurm/submit.py ddp_launch --local --tasks-per-node 2 -- --epochs 3

What follows `--` goes to the recipe, and is checked before anything is queued. Use it where jobs
are made by a program (sweeps); `sbatch slurm/train.sbatch` is simpler by hand. A stopped job is
requeued by submitit's own checkpointing and goes on from the run's snapshots.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import submitit
from submitit.helpers import DelayedSubmission
from submitit.slurm.slurm import _make_sbatch_string

from common.errors import STATUS_BAD_INPUT, STATUS_STOPPED, InputError
from recipes import cli
from recipes.__main__ import recipes

MAX_RESTARTS = 3
"""How often in a row a job may start anew without a new snapshot."""
_MAX_TIMEOUTS = 10**6  # submitit's own limit would end a long run after so many time limits


@dataclass
class Train:
    """What a job's tasks call. submitit pickles it, and calls `checkpoint` before it requeues."""

    recipe: str
    options: list[str]
    output_dir: str
    """May hold %j, the job's id."""
    restarts_from: list[str] = field(default_factory=list)
    """The newest snapshot at each restart."""

    def __call__(self) -> None:
        """Run the recipe as one rank; ends the process with its status unless that is 0."""
        sys.path.insert(0, str(ROOT))  # this object was pickled by value, its modules were not
        from common.launch import end_process
        from recipes.__main__ import main

        command = [self.recipe, *self.options, "--output-dir", str(self.folder)]
        os.environ["RECIPES_COMMAND"] = shlex.join(["python", "-m", "recipes", *command])
        sys.argv = ["recipes", *command]
        submitits = signal.getsignal(signal.SIGUSR2)
        status = main()
        if status == STATUS_STOPPED and self._is_running():
            # All ranks have saved. Now the signal goes to submitit, which requeues on rank 0.
            signal.signal(signal.SIGUSR2, submitits)
            try:
                signal.raise_signal(signal.SIGUSR2)
            except (OSError, subprocess.SubprocessError) as error:
                if getattr(error, "returncode", 1) < 0:  # the requeue kills what asked for it, too
                    end_process(status)
                print(f"stopped, and not requeued here ({error}); to go on, submit the same with "
                      f"--output-dir {shlex.quote(str(self.folder))} after the --")  # fmt: skip
                end_process(status)
            time.sleep(60)  # not rank 0: the requeue ends this task
        if status:
            end_process(status)

    def checkpoint(self) -> DelayedSubmission | None:
        """What the requeued job calls; None, and so no requeue, where restarts lead nowhere."""
        newest = max((p.name for p in self.folder.glob("snapshots/step_*.pt")), default="none")
        self.restarts_from.append(newest)
        if self.restarts_from[-MAX_RESTARTS - 1 :].count(newest) > MAX_RESTARTS:
            return None
        return DelayedSubmission(self)

    @property
    def folder(self) -> Path:
        """The run's, once there is a job."""
        return Path(self.output_dir.replace("%j", submitit.JobEnvironment().job_id))

    def _is_running(self) -> bool:
        """False for a cancelled job, which a requeue would bring back."""
        environment = submitit.JobEnvironment()
        if environment.cluster != "slurm":
            return False
        return "RUNNING" in subprocess.run(
            ["squeue", "--noheader", "--job", environment.job_id, "--format", "%T"],
            capture_output=True, text=True,
        ).stdout  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. --help lists the options; those of the recipe go after a --")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This file's options, and the recipe's."""
    here, options = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        here, options = arguments[:at], arguments[at + 1 :]
    parser = _Parser(
        prog="python slurm/submit.py",
        usage="%(prog)s RECIPE [options] -- [options of the recipe]",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("recipe", choices=recipes(), metavar="RECIPE", help=", ".join(recipes()))
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="hosts (default 1)")
    add("--gpus-per-node", type=int, default=0, metavar="N", help="(default 0: train on CPUs)")
    add("--tasks-per-node", "--ntasks-per-node", type=int, metavar="N",
        help="ranks a node (default: one a GPU)")  # fmt: skip
    add("--cpus-per-task", type=int, metavar="N", help="cores a rank, its loading processes' too")
    add("--mem", help="memory a node, as Slurm writes it: 32G")
    add("--time", type=int, default=60, metavar="MIN", help="time limit [minutes] (default 60)")
    add("--warning", type=int, default=120, metavar="S",
        help="how long before the limit ranks save and stop [s] (default 120)")  # fmt: skip
    for name in ("partition", "account", "qos", "constraint"):
        add(f"--{name}", help="as of sbatch")
    add("--slurm", action="append", default=[], metavar="NAME=VALUE",
        help="any other option of sbatch, like exclude=n7; may come several times")  # fmt: skip
    add("--runs", type=Path, default=ROOT / "runs", help="folder of all runs, seen by every node")
    add("--local", action="store_true", help="run here and now, without Slurm")
    add("--dry-run", action="store_true", help="print the sbatch file and submit nothing")
    add("--follow", action="store_true", help="show rank 0's log until the job ends")
    return parser.parse_args(here), options


def slurm_parameters(args: argparse.Namespace, tasks_per_node: int, folder: Path) -> dict[str, Any]:
    """Of the sbatch file, under submitit's names."""
    if wrong := [text for text in args.slurm if "=" not in text]:
        raise InputError(f"--slurm takes NAME=VALUE, got {wrong[0]!r}")
    # As in train.sbatch: how long the peers of a rank that has ended may take [s], and srun takes
    # no --cpus-per-task from sbatch since 22.05.
    srun_args = ["--wait=20", "--kill-on-bad-exit=0"]
    if args.cpus_per_task:
        srun_args.append(f"--cpus-per-task={args.cpus_per_task}")
    parameters = {
        "job_name": args.recipe,
        "nodes": args.nodes,
        "ntasks_per_node": tasks_per_node,
        "gpus_per_node": args.gpus_per_node or None,
        "cpus_per_task": args.cpus_per_task,
        "mem": args.mem,
        "time": args.time,
        "signal_delay_s": args.warning,
        "partition": args.partition,
        "account": args.account,
        "qos": args.qos,
        "constraint": args.constraint,
        "stderr_to_stdout": True,
        "srun_args": srun_args,
        "setup": [
            "export SLURM_EXPORT_ENV=ALL",
            f"export RECIPES_STOP_MARK={shlex.quote(str(folder))}/$SLURM_JOB_ID.stopped_early",
            'rm -f "$RECIPES_STOP_MARK"',
        ],
        # A rank that leaves before it trains never comes to submitit's handler.
        "teardown": [
            "status=$?",
            '[ ! -e "$RECIPES_STOP_MARK" ] || scontrol requeue incomplete "$SLURM_JOB_ID"',
            "exit $status",
        ],
        "additional_parameters": {
            "requeue": True,
            **dict(text.split("=", 1) for text in args.slurm),
        },
    }
    return {name: value for name, value in parameters.items() if value is not None}


def submit(arguments: list[str]) -> int:
    """Check, submit, and where asked wait; returns the exit status.

    Raises:
        InputError: what cannot work, before anything is queued.
    """
    args, options = parse(arguments)
    launched = recipes()[args.recipe][1]
    one_a_gpu = launched in ("ranks", "spawn")
    tasks_per_node = args.tasks_per_node or (max(1, args.gpus_per_node) if one_a_gpu else 1)
    if args.gpus_per_node and one_a_gpu and tasks_per_node != args.gpus_per_node:
        raise InputError(f"--tasks-per-node {tasks_per_node} but --gpus-per-node "
                         f"{args.gpus_per_node}: one rank a GPU is needed")  # fmt: skip
    config_class = import_module(f"recipes.{args.recipe}.train").Config
    _, config = cli.parse(args.recipe, config_class, options)
    from common.record import flatten  # after torch is known to be needed

    kind = "local" if args.local else "slurm"
    given = flatten(config)["output_dir"]
    output_dir = given or str(args.runs.resolve() / args.recipe / f"{kind}-%j")
    folder = args.runs.resolve() / args.recipe / "submitit"
    if args.local:
        if args.nodes > 1:
            raise InputError("--local is this machine: --nodes 1")
        executor: Any = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=args.time, gpus_per_node=args.gpus_per_node)
        if one_a_gpu:
            options = ["--nproc", str(tasks_per_node), *options]
        args.follow = True
    else:
        parameters = slurm_parameters(args, tasks_per_node, folder)
        if args.dry_run:
            command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit "
            print(_make_sbatch_string(command + shlex.quote(str(folder)), folder, **parameters))
            return 0
        try:
            executor = submitit.SlurmExecutor(folder, max_num_timeout=_MAX_TIMEOUTS)
        except RuntimeError as error:  # there is no srun
            raise InputError(f"{error} --local runs here, --dry-run shows the job") from error
        executor.update_parameters(**parameters)
    try:
        job = executor.submit(Train(args.recipe, options, output_dir))
    except submitit.core.utils.FailedJobError as error:
        raise InputError(f"sbatch refused: {str(error).strip().splitlines()[-1]}") from error
    except OSError as error:
        raise InputError(f"--runs cannot be written: {error}") from error
    print(f"job {job.job_id}\n  results  {output_dir.replace('%j', job.job_id)}\n"
          f"  log      {job.paths.stdout}", flush=True)  # fmt: skip
    return follow(job) if args.follow else 0


def follow(job: "submitit.Job[None]") -> int:
    """Show a job's log as it grows, through requeues, until the job has ended.

    Returns:
        0 if it finished, else 1.
    """
    shown: dict[Path, int] = {}

    def show(path: Path, only: str = "") -> None:
        if path.is_file():
            with path.open(errors="replace") as file:
                file.seek(shown.get(path, 0))
                text = file.read()
                shown[path] = file.tell()
            sys.stdout.write("".join(s for s in text.splitlines(True) if s.startswith(only)))
            sys.stdout.flush()

    done = False
    while not done:
        done = job.task(0).done(force_check=True)  # of the whole, force_check would be dropped
        show(job.paths.stdout)
        show(job.paths.stderr)
        time.sleep(0 if done else 2)
    for task in range(1, job.num_tasks):  # the cause may lie with another rank
        show(job.task(task).paths.stdout, only="error:")
    finished = job.paths.result_pickle.exists() and job.exception() is None
    print(f"job {job.job_id} {'finished' if finished else f'ended: {job.state}'}")
    return 0 if finished else 1


def main() -> int:
    """Run from a command line; returns the exit status."""
    try:
        return submit(sys.argv[1:])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STATUS_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
