"""What on this machine would stop a run or slow it down, and what to do about it.

    make doctor                       this machine
    make doctor NPROC=4               and a real all-reduce over 4 processes
    srun python -m recipes doctor     in a job: every host, and an all-reduce over all ranks

Each line is ok, a warning or an error. The exit status is 1 if something would stop a run, else 0.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import run
from typing import NamedTuple

from common import ROOT, stack
from common.errors import STATUS_FAILED, STATUS_FINISHED, InputError
from common.hints import SHARED_MEMORY_HINT, hint
from common.launch.capacity import usable_cores
from common.launch.process import end_with_parent
from common.launch.ranks import Ranks, resolve
from common.launch.start import LaunchOptions
from common.parse import given_path
from tools.command import Parser, attempt, printing
from tools.fresh import fresh_environment

_GIB, _MIB = 2**30, 2**20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


class Finding(NamedTuple):
    """One line for the user."""

    state: str
    """ok, warning (slower, a risk, or a stop for some runs) or error (would stop a run)."""
    found: str
    fix: str = ""


def warn_if(wrong: bool, found: str, fix: str) -> Finding:
    """A warning with its fix, or ok."""
    return Finding("warning", found, fix) if wrong else Finding("ok", found)


def place(ranks: Ranks) -> Iterator[Finding]:
    """Host, container, rank."""
    container = os.environ.get("RECIPES_STACK") or Path("/.dockerenv").exists()
    where = f"host {socket.gethostname()}{' in a container' if container else ''}"
    rank = f", rank {ranks.rank} of {ranks.world_size}" if ranks.launcher != "none" else ""
    yield Finding("ok", f"{where}, Python {sys.version.split()[0]}{rank}")


def software() -> Iterator[Finding]:
    """Versions against the table of stacks."""
    given, found = os.environ.get("RECIPES_STACK"), stack.running_versions()
    names = [name for name, parts in stack.stacks().items() if parts["torch"] == found["torch"]]
    said, wrong = ", ".join(f"{part} {number}" for part, number in found.items()), ["no stack"]
    if name := given or next(iter(names), ""):
        said, wrong = f"stack {name}: {said}", stack.differences(name, found) + stack.strangers()
    fix = "install the locked versions (make venv); remove LD_PRELOAD and LD_LIBRARY_PATH"
    one = warn_if(bool(wrong), "; ".join([said, *wrong]), fix)
    yield one._replace(state="error") if given and wrong else one  # an image refuses to run


def devices(ranks: Ranks) -> Iterator[Finding]:
    """GPUs and their free memory, or why torch cannot use them."""
    import torch

    from common.group.devices import choose_device

    if choose_device("auto", ranks).type == "cpu":
        yield Finding("ok", "no GPU: recipes train on the CPU (a container needs --gpus all)")
        return
    count = torch.cuda.device_count()
    if ranks.launcher != "none":
        # A closer look takes memory on every GPU, and fails on one that admits a single process.
        fix = "NCCL then copies through host memory (nccl#1066): give srun --gpus-per-node"
        alone = count == 1 < ranks.local_world_size
        yield warn_if(alone, f"{count} GPUs{' of this host for each rank' if alone else ''}", fix)
    elif count > 1:
        ways = os.environ.get("NCCL_ALGO", "not by NVLS or CollNet, if --deterministic")
        yield Finding("ok", f"NCCL adds between GPUs: {ways} (NCCL_ALGO)")
    for number in range(count) if ranks.launcher == "none" else ():
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        found = f"cuda:{number} {name}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
        fix = "another process uses it (nvidia-smi): choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield warn_if(free < total / 2, found, fix)


def bits(ranks: Ranks) -> Iterator[Finding]:
    """Where else this machine's bits hold, and fingerprints to compare two machines by."""
    import torch

    from common.fingerprint import digest, fingerprint
    from common.kernels import bits_hold_on
    from common.run.options import RunOptions
    from common.seeds import set_determinism

    set_determinism(**RunOptions().determinism)
    held = bits_hold_on(torch.device("cpu"), portable=True)
    kinds = ["cpu", "cuda"] if ranks.launcher == "none" and torch.cuda.is_available() else ["cpu"]
    prints = (f"fingerprint {digest(fingerprint(torch.device(kind)))} on {kind}" for kind in kinds)
    yield Finding("ok", f"a run on the CPU has the same bits on {held}; {', '.join(prints)}")


def network() -> Iterator[Finding]:
    """The interfaces that are named, and whether one leads to other hosts."""
    from common.group.interfaces import interface_towards

    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        exact = variable.startswith("GLOO") or wanted.startswith("=")  # NCCL's "^": not these
        for name in filter(None, wanted.lstrip("=").split(",") if wanted[:1] != "^" else ()):
            if not any(n == name if exact else n.startswith(name) for n in names):
                found = f"{variable} names {name}, but this host has no such interface"
                yield Finding("error", found, f"choose from {', '.join(names)}")
    towards = interface_towards("192.0.2.1")  # an address that no host has
    found = f"{towards or 'no interface'} leads to other hosts (there are {', '.join(names)})"
    yield warn_if(towards is None, found, "no problem on one host; several hosts need a network")


def shared_memory() -> Iterator[Finding]:
    """Room for the batches of loading processes, and for NCCL."""
    try:
        tempfile.TemporaryFile(dir=SHARED_MEMORY).close()
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as failed:
        found = f"{SHARED_MEMORY} cannot be written: {failed.strerror}"
        yield Finding("error", found, SHARED_MEMORY_HINT)
    else:
        found = f"{SHARED_MEMORY} has {free / _MIB:,.0f} MiB free"
        yield warn_if(free < _GIB, found, SHARED_MEMORY_HINT)


def cores(processes: int) -> Iterator[Finding]:
    """CPU cores and open files of this process, and the ranks that would share the cores."""
    usable, (files, _) = usable_cores(), resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{usable} of {os.cpu_count()} cores for {processes} processes of one thread each"
    fix = "start fewer processes (--nproc), or ask for more cores (docker --cpus; --cpus-per-task)"
    yield warn_if(usable < processes, found, fix)
    fix = "ulimit -n 65536: each connection between ranks and each batch in /dev/shm is a file"
    yield warn_if(files < 1024, f"{files} open files per process", fix)


def run_folder(folder: Path) -> Iterator[Finding]:
    """Whether snapshots can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(bytes(32 * _MIB))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as failed:
        fix = "choose an --output-dir that has room and that you may write to"
        yield Finding("error", f"{folder}: {failed.strerror}", fix)
    else:
        fix = "make room: a snapshot can be three times as large as a model"
        yield warn_if(free < _GIB, f"{folder}: {free / _GIB:,.1f} GiB free", fix)


def all_reduce(nproc: int | None) -> Iterator[Finding]:
    """Run check_network over `nproc` new processes; None: over the ranks of this job."""
    with tempfile.TemporaryDirectory() as folder:
        # The recipe's file, not its module: it is found without PYTHONPATH.
        command = [sys.executable, "-P", f"{ROOT}/recipes/check_network/train.py"]
        command += ["--largest", "8", "--output-dir", folder]
        command += ["--nproc", str(nproc)] if nproc else []
        env = fresh_environment() if nproc else None
        done = run(command, env=env, capture_output=True, text=True, preexec_fn=end_with_parent)
        measured = Path(folder, "network.json")  # written by rank 0
        rows = json.loads(measured.read_text())["all_reduce"] if measured.exists() else []
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    speeds = (f"{r['bus_bytes_per_s'] / _MIB:,.0f} at {r['bytes'] / _MIB:.0f} MiB" for r in rows)
    if done.returncode:
        yield Finding("error", lines[0][len("error: ") :] if lines else f"status {done.returncode}")
    else:
        yield Finding("ok", f"every rank met the others; bus bandwidth [MiB/s] {', '.join(speeds)}")


def findings_of(checks: dict[str, Iterator[Finding]]) -> Iterator[tuple[str, Finding]]:
    """What each finding is about, and the finding. Whatever is broken, other checks go on."""
    warnings.simplefilter("ignore")  # what torch would warn about is among the findings
    for about, check in checks.items():
        try:
            for one in check:
                yield about, one
        except InputError as refused:
            yield about, Finding("error", str(refused))
        except Exception as failed:
            said = f"{type(failed).__name__}: {failed}".partition("\n")[0]
            yield about, Finding("error", said, hint(said))


def show(findings: Sequence[tuple[str, Finding]], host: str = "") -> str:
    """The findings for a terminal."""
    text = ""
    for about, one in findings:
        text += f"  {one.state:<7}  {host}{about}: {one.found}\n"
        text += f"{'':11}-> {one.fix}\n" if one.fix else ""
    return text.rstrip("\n")


def doctor(given: argparse.Namespace) -> int:
    """Examine and print; the exit status."""
    if given.nproc is not None and given.nproc < 1:
        raise InputError(f"--nproc must be at least 1, got {given.nproc}")
    ranks = resolve()
    in_job = ranks.launcher != "none"
    checks = {"place": place(ranks), "software": software()}
    if in_job or given.nproc:  # first: a GPU in exclusive mode admits one process
        checks["all-reduce"] = all_reduce(None if in_job else given.nproc)
    checks |= {
        "bits": bits(ranks),
        "devices": devices(ranks),
        "network": network(),
        "shared memory": shared_memory(),
        "cores": cores(1 if in_job else LaunchOptions(nproc=given.nproc).processes("auto")),
        "run folder": run_folder(given.output_dir),
    }
    findings = list(findings_of(checks))
    # Rank 0 shows everything, each other host its warnings and errors, each other rank its errors.
    shown = {"error", "warning"} if ranks.local_rank == 0 else {"error"}
    unwell = [(about, one) for about, one in findings if one.state in shown]
    if ranks.is_main:
        content = [{"about": about, **one._asdict()} for about, one in findings]
        with printing():  # a reader that is gone does not change the status
            print(json.dumps(content, indent=2) if given.json else show(findings), flush=True)
    elif unwell:
        print(show(unwell, f"rank {ranks.rank} on {socket.gethostname()}: "), file=sys.stderr)
    return STATUS_FAILED if any(one.state == "error" for _, one in findings) else STATUS_FINISHED


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--nproc", type=int, help="processes here; adds a real all-reduce of them")
    parser.add_argument("--output-dir", type=given_path, default=Path("runs"), help="of all runs")
    return attempt(lambda: doctor(parser.parse_args(list(arguments))))
