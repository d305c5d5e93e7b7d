"""Submit a recipe to Slurm from Python, through submitit: one task per rank, one rank per GPU.

    from slurm.submit import submit
    job = submit("ddp_launch", ["--epochs", 3], nodes=2, gpus_per_node=4, partition="gpu")
    print(job.task(0).result()["val_accuracy"])

    python slurm/submit.py ddp_launch --nodes 2 --gpus-per-node 4 --partition gpu -- --epochs 3
    python slurm/submit.py ddp_launch --over "--lr 0.1 0.03 --seed 0 1" --gpus-per-node 1
    python slurm/submit.py ddp_launch --local --ntasks-per-node 2 -- --epochs 3

The recipe's options are checked before anything is queued. Use it if a program submits the jobs
(sweeps); by hand, `sbatch slurm/train.sbatch` is simpler. submitit requeues a stopped job, which
continues from the run's newest snapshot.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import submitit
import tyro
from submitit.helpers import DelayedSubmission
from submitit.slurm.slurm import _make_sbatch_string

from common import cli
from common.errors import STATUS_BAD_INPUT, STATUS_STOPPED, InputError
from common.launch.process import end_process
from common.parse import input_errors
from recipes import __main__ as front_door
from tools.sweep import combinations

MAX_RESTARTS = 3
"""How often in a row a job may restart without a new snapshot."""
MAX_REQUEUES = 100
"""How often in all."""
_MAX_TIMEOUTS = 10**6  # submitit's own limit would end a long run after so many time limits

Job = submitit.Job[dict[str, Any]]
"""submitit's: `task(0).result()` waits for what `Train` returns, and raises if the job failed."""


@dataclass
class Train:
    """What a job's tasks call. submitit pickles it, and calls `checkpoint` before it requeues."""

    recipe: str
    options: list[str]
    output_dir: str
    """May hold %j, the job's id."""
    restarts_from: list[str] = field(default_factory=list)
    """The newest snapshot at each restart."""

    def __call__(self) -> dict[str, Any]:
        """Run the recipe as one rank; ends the process with its status unless that is 0.

        Returns:
            On rank 0 what is in the run's summary.json, on the others nothing.
        """
        command = [self.recipe, *self.options, "--output-dir", str(self.folder)]
        os.environ["RECIPES_COMMAND"] = shlex.join(["python", "-m", "recipes", *command])
        sys.argv = ["recipes", *command]
        submitits = signal.getsignal(signal.SIGUSR2)
        status = front_door.main()
        if status == STATUS_STOPPED and self._is_running():
            # All ranks have saved. Now the signal goes to submitit, which requeues on rank 0.
            signal.signal(signal.SIGUSR2, submitits)
            try:
                signal.raise_signal(signal.SIGUSR2)
            except (OSError, subprocess.SubprocessError) as error:
                if getattr(error, "returncode", 1) < 0:  # the requeue kills what asked for it, too
                    end_process(status)
                print(
                    f"stopped, and not requeued ({error}); to continue, submit it again with "
                    f"--output-dir {shlex.quote(str(self.folder))} after the --"
                )
                end_process(status)
            time.sleep(60)  # not rank 0: the requeue ends this task
        if status:
            end_process(status)
        summary = self.folder / "summary.json"
        if submitit.JobEnvironment().global_rank or not summary.exists():
            return {}
        return dict(json.loads(summary.read_text()))

    def checkpoint(self) -> DelayedSubmission | None:
        """What the requeued job calls; None, and so no requeue, where restarts lead nowhere."""
        newest = max((p.name for p in self.folder.glob("snapshots/step_*.pt")), default="none")
        self.restarts_from.append(newest)
        stuck = self.restarts_from[-MAX_RESTARTS - 1 :].count(newest) > MAX_RESTARTS
        if stuck or len(self.restarts_from) > MAX_REQUEUES:
            print(f"not requeued after {len(self.restarts_from)} starts, the last from {newest}")
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
        squeue = ["squeue", "--noheader", "--job", environment.job_id, "--format", "%T"]
        return "RUNNING" in subprocess.run(squeue, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Request:
    """What each job asks for."""

    nodes: int = 1
    """Hosts per job."""
    gpus_per_node: int = 0
    """GPUs on each host. 0: train on CPUs."""
    ntasks_per_node: Annotated[int | None, tyro.conf.arg(aliases=["--tasks-per-node"])] = None
    """Ranks on each host. None: one per GPU."""
    cpus_per_task: int | None = None
    """Cores per rank, its loading processes included. None: the site's."""
    time: int = 60
    """Limit [minutes]."""
    warning: int = 120
    """How long before the limit the ranks save and stop [s]."""
    runs: Path | None = None
    """Folder of all runs, which every node sees. None: $RUNS, or the repository's runs."""
    local: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run the one job here and now, without Slurm."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the sbatch file, and submit nothing."""


def submit(recipe: str, options: Sequence[object] = (), **asked: Any) -> Job:
    """Submit one job; `Request` says what may be asked for, `submit_array` what is raised."""
    return submit_array(recipe, [options], **asked)[0]


def submit_array(recipe: str, options: Sequence[Sequence[object]], **asked: Any) -> list[Job]:
    """Submit jobs that differ only in the recipe's options: one, or an array.

    Args:
        recipe: its name.
        options: of the recipe; for each job a list of words, or a string as typed in a shell.
        asked: fields of `Request`; all others go to sbatch: partition="gpu", exclusive=True.

    Returns:
        The jobs, in the order of `options`.

    Raises:
        InputError: what cannot work, before anything is queued.
    """
    own = {option.name for option in fields(Request)}
    request = Request(**{name: asked.pop(name) for name in own & asked.keys()})
    return _submit(recipe, options, request, asked)


def _submit(
    recipe: str, options: Sequence[Sequence[object]], request: Request, sbatch: dict[str, Any]
) -> list[Job]:
    known = front_door.recipes()
    if recipe not in known:
        raise InputError(f"no recipe {recipe!r}: there are {', '.join(known)}")
    if "array" in sbatch:
        raise InputError(
            "array: all its tasks would do the same. Give each job its own options: "
            "-- OPTIONS -- OPTIONS, or --over"
        )
    if request.local and (request.nodes > 1 or len(options) > 1 or sbatch):
        raise InputError(
            "--local runs one job on this machine: give --nodes 1, a single -- OPTIONS, and no "
            f"option of sbatch{f' ({next(iter(sbatch))})' if sbatch else ''}"
        )
    one_a_gpu = import_module(f"recipes.{recipe}").LAUNCHED in ("ranks", "spawn")
    gpus, cores = request.gpus_per_node, request.cpus_per_task
    tasks = request.ntasks_per_node or (max(1, gpus) if one_a_gpu else 1)
    if gpus and one_a_gpu and tasks != gpus:
        raise InputError(
            f"--ntasks-per-node {tasks} but --gpus-per-node {gpus}: one rank per GPU is needed"
        )
    own = Path(request.runs or os.environ.get("RUNS") or ROOT / "runs").resolve() / recipe
    calls = _check(recipe, options, str(own / f"{'local' if request.local else 'slurm'}-%j"))
    folder = own / "submitit"
    python = [sys.executable, "-P"]  # -P: a common.py of the user's folder is not ours
    try:
        if request.local:
            if one_a_gpu:
                calls[0].options[:0] = ["--nproc", str(tasks)]
            python = ["bash", "-c", "\n".join([*_set_up(), 'exec "$@"']), "bash", *python]
            here = submitit.LocalExecutor(folder, python=shlex.join(python))
            here.update_parameters(timeout_min=request.time, gpus_per_node=gpus)
            return here.submit_array(calls)
        requeue = {} if "no_requeue" in sbatch else {"requeue": True}
        parameters: dict[str, Any] = {
            "job_name": recipe,
            "nodes": request.nodes,
            "ntasks_per_node": tasks,
            "gpus_per_node": gpus or None,
            "cpus_per_task": cores,
            "time": request.time,
            "signal_delay_s": request.warning,
            "stderr_to_stdout": True,
            "wckey": None,  # by default it is submitit's name, which some sites refuse
            "additional_parameters": {**requeue, **sbatch},
            **_script(folder, cores),
        }
        if request.dry_run:
            command = f"{shlex.join(python)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
            count = len(calls) if len(calls) > 1 else None
            print(_make_sbatch_string(command, folder, map_count=count, **parameters))
            return []
        slurm = submitit.SlurmExecutor(folder, _MAX_TIMEOUTS, python=shlex.join(python))
        slurm.update_parameters(**parameters)
        return slurm.submit_array(calls)
    except submitit.core.utils.FailedJobError as error:
        said = [line for line in str(error).splitlines() if line.startswith("sbatch: ")]
        raise InputError(f"sbatch refused: {(said or [str(error).strip()])[-1]}") from error
    except RuntimeError as error:  # there is no srun
        raise InputError(f"{error} Use --local to run here, or --dry-run to see the job") from error
    except OSError as error:
        raise InputError(f"--runs cannot be written: {error}") from error


def _check(recipe: str, options: Sequence[Sequence[object]], output_dir: str) -> list[Train]:
    """What each job calls, once its options are known to be good."""
    config_class = import_module(f"recipes.{recipe}.train").Config
    from common.run.options import flatten

    calls = []
    for given in options:
        words = shlex.split(given) if isinstance(given, str) else [str(word) for word in given]
        _, config = cli.parse(recipe, config_class, words)
        calls.append(Train(recipe, words, flatten(config)["output_dir"] or output_dir))
    fixed = [call.output_dir for call in calls if "%j" not in call.output_dir]
    if len(fixed) > len(set(fixed)):
        raise InputError(
            f"the jobs of the array would share --output-dir {fixed[0]}: add %j to it, "
            "which becomes the job's id"
        )
    return calls


def _set_up() -> list[str]:
    """What the shell of every job does first, as lines of it."""
    python, clean, root = (
        shlex.quote(str(path)) for path in (sys.executable, ROOT / "slurm" / "clean_env.sh", ROOT)
    )
    return [
        f"for file in {python} {clean}; do",
        '    [ -r "$file" ] || { echo "error: $HOSTNAME sees no $file, which this job was submitted'
        ' with: was it moved? Submit the job again from its new place" >&2; exit 2; }',
        "done",
        f". {clean}",
        f"export PYTHONPATH={root}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]


def _script(folder: Path, cpus_per_task: int | None) -> dict[str, list[str]]:
    """The lines of the sbatch file around the recipe, under submitit's names."""
    # As in train.sbatch: how long the peers of a rank that has ended may take [s], and srun takes
    # no --cpus-per-task from sbatch since 22.05.
    cores = [f"--cpus-per-task={cpus_per_task}"] if cpus_per_task else []
    return {
        "srun_args": ["--wait=20", "--kill-on-bad-exit=0", *cores],
        "setup": [
            *_set_up(),
            "export SLURM_EXPORT_ENV=ALL",
            f"export RECIPES_STATUS={shlex.quote(str(folder))}/$SLURM_JOB_ID.status",
            ': >"$RECIPES_STATUS"',
        ],
        # A rank that leaves before it trains never comes to submitit's handler. The raw id of an
        # array's last task is that of the whole array.
        "teardown": [
            "status=$?",
            "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
            'if grep -qsx 75 "$RECIPES_STATUS" && ! grep -qsx 2 "$RECIPES_STATUS"; then',
            'scontrol requeue incomplete "${job:-$SLURM_JOB_ID}"; fi',
            "exit $status",
        ],
    }


def folder_of(job: Job) -> Path:
    """The folder of a job's run."""
    train: Any = job.submission().function
    return Path(train.output_dir.replace("%j", job.job_id))


def follow(job: Job) -> int:
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


@dataclass(frozen=True)
class _Command(Request):
    """Any other option, such as --partition gpu or --exclusive, goes to sbatch.

    The recipe's options follow after a --, and those of a second job after one more --.
    """

    over: str | None = None
    """Submit an array, a job for each combination of values: "--lr 0.1 0.03 --seed 0 1"."""
    follow: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show rank 0's log until the end."""


def parse(arguments: Sequence[str]) -> tuple[str, _Command, dict[str, str | bool], list[list[str]]]:
    """The recipe, this file's options, those of sbatch, and for each job the recipe's."""
    words: list[list[str]] = [[]]
    for word in arguments:
        if word == "--":
            words.append([])
        else:
            words[-1].append(word)
    recipe, *own = words[0] or ["--help"]
    if recipe.startswith("-"):
        own = [recipe, *own]
    if "--over" in own[:-1]:  # its value begins like an option
        at = own.index("--over")
        own[at : at + 2] = [f"--over={own[at + 1]}"]
    known = [f"--{option.name.replace('_', '-')}" for option in fields(_Command)]
    with input_errors(known):
        command, others = tyro.cli(
            _Command, prog="python slurm/submit.py RECIPE", args=own, return_unknown_args=True
        )
    sbatch: dict[str, str | bool] = {}
    for word in others:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            sbatch[name.replace("-", "_")] = value if given else True
        elif not sbatch or [*sbatch.values()][-1] is not True:
            raise InputError(f"{word}: the recipe's options go after a --. --help lists the others")
        else:
            sbatch[[*sbatch][-1]] = word
    options = words[1:] or [[]]
    if command.over is not None:
        if len(options) > 1:
            raise InputError("--over makes the jobs: give one -- OPTIONS, which all of them get")
        options = [[*options[0], *job.options] for job in combinations(command.over, Path())]
    return recipe, command, sbatch, options


def main() -> int:
    """Run from a command line; returns the exit status."""
    try:
        recipe, command, sbatch, options = parse(sys.argv[1:])
        jobs = _submit(recipe, options, command, sbatch)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return STATUS_BAD_INPUT
    try:
        for job in jobs:
            print(
                f"job {job.job_id}\n  results  {folder_of(job)}\n  log      {job.paths.stdout}",
                flush=True,
            )
        return max(map(follow, jobs), default=0) if command.follow or command.local else 0
    except KeyboardInterrupt:
        for job in jobs:
            log = shlex.quote(str(job.paths.stdout))
            more = f"goes on. To follow it: tail -F {log}; to end it: scancel {job.job_id}"
            print(f"\njob {job.job_id} {'was ended by this' if command.local else more}")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
