"""From a command line to a running recipe. Imports no torch, so that a launcher starts at once."""

import gc
import os
import re
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from common import ROOT
from common.errors import STATUS_FINISHED, InputError
from common.launch.capacity import refuse_more_than_fit
from common.launch.process import end_process as end_process
from common.launch.process import run_rank
from common.launch.ranks import Ranks, resolve
from common.launch.report import report, say
from common.launch.start import LaunchOptions, launch
from common.parse import input_errors, parse_group
from common.parse import parse as parse
from common.restart import with_restarts
from common.stack import check_versions

C = TypeVar("C")

# Before torch is imported: it warns about every connection from a host without a reverse name.
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
os.environ.setdefault(_LOG_LEVEL, "ERROR")


def start(name: str, arguments: Sequence[str]) -> int:
    """Run the recipe `name`; return the exit status.

    If the launch options alone decide how many ranks there are, start them without importing torch.
    """
    try:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files < 64:
            raise InputError(f"a process may open {files} files here, too few: ulimit -n 1024")
        for variable, value in os.environ.items():  # torch would abort
            whole = re.fullmatch(r"TORCH_(FR|NCCL)_\w*(SIZE|SEC|MS)", variable)
            if whole and not value.isdecimal():
                raise InputError(f"{variable}={value} is no whole number: unset it")
        ranks, given = _resolve(arguments)
        alone = ranks.launcher == "none" and not {"-h", "--help", "--dry-run"} & set(given)
        if alone and _launched(name) == "ranks":
            with input_errors():
                options = parse_group(name, LaunchOptions, given, return_unknown_args=True)[0]
            nproc = options.processes(_device(given))
            several = options.nnodes * nproc > 1 or options.restarts
            if several and not options.check:
                _warn_of_idle_nodes(options)
                refuse_more_than_fit(nproc)
                command = ["-m", "recipes", name, *given]
                return with_restarts(lambda n: launch(command, n, options), nproc, options)
    except InputError as error:
        return report(error, Ranks())
    # Imported modules hold no garbage, but searching them takes 15 % of a start's CPU time.
    gc.disable()
    try:
        recipe = import_module(f"recipes.{name}.train")
    except ImportError as error:
        return refuse_missing(error)
    except SystemExit as end:
        ends = f"recipes/{name}/train.py ends with sys.exit({end.code!r}) when it is imported"
        return report(InputError(f"{ends}, and trains nothing: remove that call"), Ranks())
    except Exception as error:
        return report(_of_a_variable(error) or error, Ranks())
    gc.freeze()
    gc.enable()
    if not hasattr(recipe, "main"):
        lacks = f"recipes/{name}/train.py has no main(arguments): copy that of ddp_launch"
        return report(InputError(lacks), Ranks())
    return int(recipe.main(arguments))


def _of_a_variable(error: Exception) -> InputError | None:
    """What is said if torch cannot be imported, perhaps because of a variable; None: it can."""
    names = [n for n in sorted(os.environ) if re.match("(PY)?TORCH", n) and n != _LOG_LEVEL]
    last = [frame.filename for frame in traceback.extract_tb(error.__traceback__)[-3:]]
    if not names or not any("/torch/" in file for file in last):
        return None
    said = next(iter(str(error).strip().splitlines()), "")
    return InputError(
        f"torch cannot be imported ({type(error).__name__}: {said}): correct or unset "
        f"{' or '.join(names)}"
    )


def run(
    name: str,
    config_class: type[C],
    train: Callable[[C, Ranks], None],
    arguments: Sequence[str] | None = None,
    spawn: Callable[[C, int, int], int] | None = None,
    processes: Callable[[C], int] | None = None,
) -> int:
    """Run the recipe `name` as a rank, or start its ranks; return the exit status.

    Args:
        name: of the recipe.
        config_class: dataclass of option groups.
        train: the recipe.
        arguments: of the command line. None: those of this process.
        spawn: for a recipe that starts its ranks itself: (config, nproc, port) to the exit status.
        processes: number of ranks that a config needs. None: one, or as many as --nproc says.
    """
    ranks = Ranks()
    try:
        _refuse_other_name(name, train)
        ranks, arguments = _resolve(sys.argv[1:] if arguments is None else arguments)
        options, config = parse(name, config_class, arguments)
        check_versions()
        if options.shrink:
            _refuse_to_shrink(config)
        alone = ranks.launcher == "none"
        needed = processes(config) if processes else None
        if _launched(name) == "one":
            needed = 1
        if alone or not options.check:
            _refuse_wrong_number(name, options, ranks, needed)
        if alone:
            nproc = needed // options.nnodes if needed else options.processes(_device(arguments))
            refuse_more_than_fit(nproc)
        if ranks.launcher == "slurm" and _launched(name) in ("ranks", "spawn"):
            _warn_of_idle_gpus(config, ranks)
        if alone and spawn and options.nnodes > 1:
            raise InputError(f"{name} starts processes on one host only: use ddp_launch")
        if options.check and "RECIPES_CHECK" not in os.environ:
            if not alone or options.nnodes > 1 or not hasattr(config, "run"):
                if ranks.is_main:
                    print("ok: the options fit; data, model and folder were not looked at")
                return STATUS_FINISHED
            with tempfile.TemporaryDirectory() as folder:
                os.environ["RECIPES_CHECK"] = folder  # tells the ranks, too
                try:
                    return run(name, config_class, train, arguments, spawn, processes)
                finally:
                    del os.environ["RECIPES_CHECK"]
        if not options.check:
            os.environ.pop("RECIPES_CHECK", None)  # of a check that started this command
        if options.check:
            options = replace(options, restarts=0, shrink=False)
        if alone and (needed != 1 or options.restarts):
            _warn_of_idle_nodes(options)
            if spawn:
                return with_restarts(lambda n: spawn(config, n, options.port), nproc, options)
            if options.nnodes * nproc > 1 or options.restarts:
                command = ["-m", "recipes", name, *arguments]
                return with_restarts(lambda n: launch(command, n, options), nproc, options)
    except InputError as error:
        return refuse(error, ranks)
    except SystemExit:  # after --help; at Python's own end, triton 3.9 shows what it leaks
        return STATUS_FINISHED

    def body() -> None:
        from common.group.rendezvous import refuse_together  # imports torch

        try:
            train(config, ranks)
        except InputError as error:
            raise refuse_together(error, ranks) from None

    return run_rank(body, ranks)


def _refuse_other_name(name: str, train: Callable[..., None]) -> None:
    """Raise InputError if the ranks, which are started by that name, would run another recipe."""
    file = getattr(train, "__globals__", {}).get("__file__")
    folder = Path(file or "/").resolve().parent
    if folder.parent == ROOT / "recipes" and folder.name != name:
        raise InputError(
            f"recipes/{folder.name}/train.py says NAME = {name!r}: write NAME = {folder.name!r}"
        )


def _launched(name: str) -> str:
    """The constant LAUNCHED of a recipe: its values are in recipes/__main__.py."""
    try:
        return str(import_module(f"recipes.{name}").LAUNCHED)
    except AttributeError:
        raise InputError(
            f"recipes/{name}/__init__.py is missing, or has no LAUNCHED: copy that of ddp_launch"
        ) from None


def _resolve(arguments: Sequence[str]) -> tuple[Ranks, list[str]]:
    """The ranks, and the arguments without the --local-rank=N of torch.distributed.launch."""
    for option, value in pairwise(["", *arguments]):
        if not value or re.fullmatch(r"--[\w-]+=", value):
            raise InputError(f"{value or option} has an empty value: is a variable not set?")
    return resolve(), [w for w in arguments if not re.fullmatch(r"--local[-_]rank=\d+", w)]


def _device(arguments: Sequence[str]) -> str:
    """--device as given: what parses the other options of a recipe imports torch."""
    given: list[str] = re.findall(r"(?<!\S)--device[ =](\S+)", " ".join(arguments))
    return given[-1] if given else "auto"


def _warn_of_idle_nodes(options: LaunchOptions) -> None:
    if os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1" and options.nnodes == 1:
        say("warning: this job has several nodes, but without srun all ranks run on this node")


def _warn_of_idle_gpus(config: Any, ranks: Ranks) -> None:
    """Slurm starts one task if none are asked for, whatever the number of GPUs."""
    given, here = os.environ.get("SLURM_GPUS_ON_NODE", "0"), ranks.local_world_size
    on_cpu = getattr(getattr(config, "run", config), "device", "auto") == "cpu"
    if ranks.is_main and not on_cpu and given.isdecimal() and int(given) > here:
        use = "one process uses one" if here == 1 else f"{here} processes use one each"
        say(
            f"warning: Slurm gave {given} GPUs of this node to this job step, and {use}: "
            f"give srun --ntasks-per-node={given}"
        )


def _refuse_wrong_number(
    name: str, options: LaunchOptions, ranks: Ranks, needed: int | None
) -> None:
    """Raise InputError unless there are, or can be started, as many processes as needed."""
    what = "one process" if needed == 1 else f"{needed} processes"
    if ranks.launcher != "none":
        way_out = ""
        if ranks.launcher == "slurm" and ranks.world_size == 1:
            tasks = needed or options.nproc or 2
            way_out = (
                f"; for more give srun --ntasks-per-node={tasks}; "
                "if Slurm started your notebook or shell, unset SLURM_PROCID first"
            )
        if needed not in (None, ranks.world_size):
            raise InputError(
                f"{name} with these options needs {what}, but {ranks.launcher} started "
                f"{ranks.world_size}{way_out}"
            )
        if options.restarts and ranks.launcher != "recipes":
            raise InputError(
                f"--restarts {options.restarts}, but {ranks.launcher} started this process, and "
                "only a launcher can restart: use torchrun --max-restarts or Slurm's --requeue"
            )
        if options.nproc not in (None, ranks.local_world_size) and not options.shrink:
            raise InputError(
                f"--nproc {options.nproc}, but this process is already one of "
                f"{ranks.local_world_size} that {ranks.launcher} started here: leave it "
                f"out{way_out}"
            )
    elif needed and needed % options.nnodes:
        raise InputError(f"{what} cannot be divided equally between {options.nnodes} hosts")
    elif needed and options.nproc not in (None, needed // options.nnodes):
        raise InputError(
            f"--nproc {options.nproc}, but {name} with these options needs {what}, whatever the "
            "number of devices: leave it out"
        )


def _refuse_to_shrink(config: Any) -> None:
    """Raise InputError unless fewer processes give the same bits."""
    if not getattr(getattr(config, "parallel", None), "virtual_ranks", 0):
        raise InputError("--shrink needs --virtual-ranks: fewer processes would give other bits")
    if config.optimizer.batch_size_per_rank:
        raise InputError(
            "--shrink needs --global-batch-size: with --batch-size-per-rank, fewer processes would "
            "train on smaller batches"
        )


def refuse(error: InputError, ranks: Ranks | None = None) -> int:
    """Show bad input that was found before training, once for all ranks; return the status."""
    try:
        ranks = ranks or resolve()
        if ranks.world_size > 1:
            from common.group.rendezvous import refuse_together  # imports torch

            error = refuse_together(error, ranks)
    except (InputError, ImportError):  # this rank does not know its peers, or torch is broken
        error.agreed = False
    return report(error, ranks or Ranks())


def refuse_missing(error: ImportError) -> int:
    """Say which package or shared library this interpreter has not; return the status."""
    if isinstance(error, ModuleNotFoundError):
        fix = "run make venv and use .venv/bin/python, or an interpreter with torch"
        return report(InputError(f"{sys.executable} has no package {error.name}: {fix}"), Ranks())
    if ".so" not in str(error):
        raise error
    # Such as another NCCL than the one that torch was built with (pytorch#122571).
    fix = "remove what LD_PRELOAD and LD_LIBRARY_PATH bring"
    return report(InputError(f"a library cannot be loaded ({error}): {fix}"), Ranks())
