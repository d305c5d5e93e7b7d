"""What on this machine would stop a run or slow it down, and what to do about it.

    make doctor                       this machine
    make doctor NPROC=4               and a real all-reduce over 4 processes
    srun python -m recipes doctor     in a job: every host, and an all-reduce over all ranks

Each line is ok, a warning or an error. The exit status is 1 if something would stop a run, else 0.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from common import ROOT, driver, stack
from common.errors import STATUS_FAILED, STATUS_FINISHED, InputError
from common.group.host import cpu_quotas
from common.hints import LOCKED_MEMORY_HINT, SHARED_MEMORY_HINT, hint
from common.launch.capacity import memory_limit
from common.launch.process import end_with_parent
from common.launch.ranks import Ranks, resolve
from common.parse import given_path
from tools.command import Parser, attempt, printing
from tools.fresh import fresh_environment

_GIB, _MIB = 2**30, 2**20
_TRIAL_BYTES = 32 * _MIB
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
HOST_GPUS = Path("/proc/driver/nvidia/gpus")
"""The driver's list of GPUs, which a container sees even if it was given none of them."""


class Where(NamedTuple):
    """What is examined on this host."""

    ranks: Ranks
    folder: Path
    """Folder of all runs."""
    nproc: int
    """Processes that would share this host; 0: not given."""


class Finding(NamedTuple):
    """One line for the user."""

    state: str
    """ok, warning (slower, a risk, or a stop for some runs) or error (would stop a run)."""
    found: str
    fix: str = ""


def warn_if(wrong: bool, found: str, fix: str) -> Finding:
    """A warning with its fix, or ok."""
    return Finding("warning", found, fix) if wrong else Finding("ok", found)


def place(where: Where) -> Iterator[Finding]:
    """Host, Slurm job, container, rank."""
    facts = [f"host {socket.gethostname()}", f"Python {sys.version.split()[0]}"]
    if job := os.environ.get("SLURM_JOB_ID"):
        nodes, tasks = (os.environ.get(f"SLURM_{n}", "?") for n in ("JOB_NUM_NODES", "NTASKS"))
        facts.append(f"Slurm job {job}, {nodes} nodes, {tasks} tasks")
    if os.environ.get("RECIPES_STACK") or Path("/.dockerenv").exists():
        facts.append("in a container")
    ranks = where.ranks
    if ranks.launcher != "none":
        facts.append(f"rank {ranks.rank} of {ranks.world_size} ({ranks.launcher})")
    yield Finding("ok", ", ".join(facts))


def software(where: Where) -> Iterator[Finding]:
    """Versions against the table of stacks, and the driver against torch."""
    given, torch_here = os.environ.get("RECIPES_STACK"), version("torch").split("+")[0]
    names = [name for name, parts in stack.stacks().items() if parts["torch"] == torch_here]
    name = given or next(iter(names), None)
    from common.group.devices import check_driver  # imports torch

    try:
        check_driver()
    except InputError as refused:
        yield Finding("error", str(refused))
    found = stack.running_versions()
    words = ", ".join(f"{part} {number}" for part, number in found.items())
    if not name:
        fix = "results may differ from results of the locked versions; make venv installs them"
        yield Finding("warning", f"these versions match no stack of this project: {words}", fix)
    elif wrong := stack.differences(name, found) + stack.strangers():
        fix = "remove what was added (LD_PRELOAD, LD_LIBRARY_PATH, pip), or rebuild the environment"
        state = "error" if given else "warning"  # an image refuses to run with other versions
        yield Finding(state, "; ".join(wrong), fix)
    else:
        yield Finding("ok", f"stack {name}: {words}")


def devices(where: Where) -> Iterator[Finding]:
    """GPUs, their free memory, and whether they reach each other's memory."""
    import torch

    from common.group.devices import gpu_count

    count, files = gpu_count(), driver.device_files()
    wanted, gave = driver.gpu_files(), driver.slurm_gave_gpus()
    of_host = [] if files or "CUDA_VISIBLE_DEVICES" in os.environ else list(HOST_GPUS.glob("*"))
    if count == 0 and (gave or wanted):
        there = "Slurm gave this job GPUs" if gave else f"{len(files)} GPUs under /dev"
        fix = "run nvidia-smi; check that the stack fits the driver (above)"
        yield Finding("error", f"{there}, but torch sees none", fix)
    elif count == 0 and of_host:
        found = f"recipes train on the CPU: this host has {len(of_host)} GPUs, but none under /dev"
        fix = "give a container --gpus all; on the host itself, nvidia-smi makes the device files"
        yield Finding("warning", found, fix)
    elif count == 0:
        why = f" of {len(files)} (CUDA_VISIBLE_DEVICES, or Slurm gave none)" if files else ""
        yield Finding("ok", f"no GPU{why}: recipes train on the CPU")
    elif where.ranks.launcher != "none":
        # A closer look takes memory on every GPU, and fails on one that admits a single process.
        yield Finding("ok", f"{count} GPUs")
        return
    elif (counted := torch.cuda.device_count()) > count:
        found = f"{counted} GPUs, but a process can use only {count}: MIG mode is on"
        fix = "start each process with its own CUDA_VISIBLE_DEVICES=MIG-... (nvidia-smi -L)"
        yield Finding("warning", found, fix)
    sound = []
    for number in range(count):
        try:
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as failed:
            said = str(failed).partition("\n")[0]
            yield Finding("error", f"cuda:{number} {said}", hint(said))
            continue
        sound.append(number)
        name = torch.cuda.get_device_name(number)
        found = f"cuda:{number} {name}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
        fix = "another process uses it (nvidia-smi): choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield warn_if(free < total / 2, found, fix)
    reach = torch.cuda.can_device_access_peer
    apart = [f"{a}-{b}" for a, b in combinations(sound, 2) if not reach(a, b)]
    if apart:
        fix = (
            "NCCL copies through host memory, which is slower: allow peer access (IOMMU, ACS, "
            "container settings)"
        )
        yield Finding("warning", f"no peer access between GPUs {', '.join(apart)}", fix)


def bits(where: Where) -> Iterator[Finding]:
    """Where else this machine's bits hold, and fingerprints to compare two machines by."""
    import torch

    from common.fingerprint import digest, fingerprint
    from common.kernels import bits_hold_on
    from common.run.options import RunOptions
    from common.seeds import set_determinism

    set_determinism(**RunOptions().determinism)
    cpu = torch.device("cpu")
    held = bits_hold_on(cpu, portable=True)
    found = [
        f"a run on the CPU has the same bits on {held} (fingerprint {digest(fingerprint(cpu))})"
    ]
    if where.ranks.launcher == "none" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found.append(f"cuda:0 {name} has fingerprint {digest(fingerprint(torch.device('cuda')))}")
    yield Finding("ok", "; ".join(found))


def network(where: Where) -> Iterator[Finding]:
    """Interfaces, names, and the port."""
    from common.group.interfaces import interface_towards

    names = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        if wanted.startswith("^"):  # names the interfaces that NCCL must not use
            continue
        exact = variable.startswith("GLOO") or wanted.startswith("=")
        for name in filter(None, wanted.lstrip("=").split(",")):
            if not any(n == name if exact else n.startswith(name) for n in names):
                found = f"{variable} names {name}, but this host has no such interface"
                yield Finding("error", found, f"choose from {', '.join(names)}")
    towards = interface_towards(where.ranks.master_addr) if where.ranks.several_hosts else None
    if towards in (None, "lo"):  # not a job of several hosts, or this is rank 0's host
        towards = interface_towards("192.0.2.1")  # an address that no host has
    if towards is None:
        found = f"no interface leads to other hosts (there are {', '.join(names)})"
        yield Finding("warning", found, "no problem on one host; several hosts need a network")
    else:
        gloo = os.environ.get("GLOO_SOCKET_IFNAME", "it")
        nccl = os.environ.get("NCCL_SOCKET_IFNAME", f"one of {', '.join(names)}")
        yield Finding("ok", f"{towards} leads to other hosts; gloo uses {gloo}, NCCL uses {nccl}")
    host, address = socket.gethostname(), os.environ.get("MASTER_ADDR")
    if not resolves(host):
        fix = "add it to /etc/hosts for other software, for example MPI; recipes do not need it"
        yield Finding("warning", f"host name {host} does not resolve", fix)
    if address and not resolves(address):
        fix = "use an address of rank 0's host that every host knows"
        yield Finding("error", f"MASTER_ADDR {address!r} does not resolve", fix)
    port = int(os.environ.get("MASTER_PORT", 0)) if where.ranks.launcher == "none" else 0
    try:
        socket.create_server(("", port)).close()
    except OSError as taken:
        fix = "set another MASTER_PORT; on one host, unset it"
        yield Finding("error", f"port {port} cannot be taken: {taken.strerror}", fix)


def resolves(host: str) -> bool:
    """Whether a host name has an address."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(host, None))
    return False


def shared_memory(where: Where) -> Iterator[Finding]:
    """Room for the batches of loading processes, and for NCCL."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
        tempfile.TemporaryFile(dir=SHARED_MEMORY).close()
    except OSError as failed:
        found = f"{SHARED_MEMORY} cannot be written: {failed.strerror}"
        yield Finding("error", found, SHARED_MEMORY_HINT)
        return
    found = f"{SHARED_MEMORY} has {free / _MIB:,.0f} MiB free"
    fix = f"too little for many loading processes: {SHARED_MEMORY_HINT}"
    yield warn_if(free < _GIB, found, fix)


def limits(where: Where) -> Iterator[Finding]:
    """Open files, and the memory that a network card may lock."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = "ulimit -n 65536: each connection between ranks and each batch in /dev/shm is a file"
    yield warn_if(files < 1024, f"{files} open files per process", fix)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = Path("/sys/class/infiniband")
    if cards.is_dir() and any(cards.iterdir()) and locked != resource.RLIM_INFINITY:
        found = f"InfiniBand cards, but only {locked // 1024} KiB of locked memory"
        yield Finding("warning", found, LOCKED_MEMORY_HINT)


def cores(where: Where) -> Iterator[Finding]:
    """CPU cores of this process, and the ranks that would share them."""
    from common.group.devices import gpu_count  # imports torch

    usable, ranks_here = len(os.sched_getaffinity(0)), 1  # in a job, each rank has its own cores
    if where.ranks.launcher == "none":
        ranks_here = where.nproc or gpu_count() or 2
    if quota := next((share for share in cpu_quotas() if share < usable), None):
        found = f"this container or job gets the CPU time of only {quota:g} of {usable} cores"
        fix = "docker: --cpus; Slurm: --cpus-per-task; or start fewer processes"
        yield Finding("warning", found, fix)
    found = f"{usable} of {os.cpu_count()} cores for {ranks_here} processes of one thread each"
    fix = "start fewer processes (--nproc), or ask for more cores (Slurm: --cpus-per-task; taskset)"
    yield warn_if(usable < ranks_here, found, fix)


def memory(where: Where) -> Iterator[Finding]:
    """Main memory."""
    text = Path("/proc/meminfo").read_text()
    free = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    found, limit = f"{free / _GIB:.1f} GiB available", memory_limit()
    if limit is not None and limit < free:
        free, found = limit, f"this container or job may use {limit / _GIB:.1f} GiB"
    fix = "each process needs about 0.7 GiB before its data: start fewer processes"
    yield warn_if(free < 2 * _GIB, found, fix)


def run_folder(where: Where) -> Iterator[Finding]:
    """Whether snapshots can be written and renamed there, and how fast."""
    folder = where.folder
    mine = f"{socket.gethostname()}-{uuid.uuid4().hex}"  # every rank of a job tries at once
    new, old = (folder / f".doctor-{mine}-{name}" for name in ("new", "old"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old.write_bytes(b"old")
        start_s = time.perf_counter()
        with new.open("wb") as file:
            file.write(os.urandom(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
        speed = _TRIAL_BYTES / (time.perf_counter() - start_s)
        new.rename(old)
        free = shutil.disk_usage(folder).free
    except OSError as failed:
        fix = "choose an --output-dir that has room and that you may write to"
        yield Finding("error", f"{folder}: {failed.strerror}", fix)
        return
    finally:
        for path in (new, old):
            with contextlib.suppress(OSError):
                path.unlink()
    found = f"{folder}: {speed / _MIB:,.0f} MiB/s to the disk, {free / _GIB:,.1f} GiB free"
    fix = "make room: a snapshot can be three times as large as a model"
    yield warn_if(free < _GIB, found, fix)


def clock(where: Where) -> Iterator[Finding]:
    """The time of day: logs, run names and certificates need it."""
    newest = max(path.stat().st_mtime for path in ROOT.glob("*/*.py"))
    now_s = time.time()
    today = time.strftime("%Y-%m-%d", time.gmtime(now_s))
    if now_s < newest - 86400:
        fix = "set the clock (chronyc makestep): https and run names need it"
        yield Finding("error", f"it is {today}, before this code was written", fix)
    else:
        yield Finding("ok", f"it is {today}")


CHECKS = (
    place,
    software,
    bits,
    devices,
    network,
    shared_memory,
    limits,
    cores,
    memory,
    run_folder,
    clock,
)


def examine(where: Where) -> Iterator[tuple[str, Finding]]:
    """What each finding is about, and the finding."""
    warnings.simplefilter("ignore")  # what torch would warn about is among the findings
    for check in CHECKS:
        about = check.__name__.replace("_", " ")
        try:
            for one in check(where):
                yield about, one
        except Exception as failed:  # whatever is broken, the other checks must go on
            yield about, Finding("error", f"check failed: {type(failed).__name__}: {failed}")


def examine_in_child(where: Where) -> list[tuple[str, Finding]]:
    """`examine` in a process that ends: until then, CUDA keeps a context on every GPU.

    A GPU in exclusive mode would refuse the ranks of the all-reduce. The child may use CUDA after
    a fork, because this process never does.
    """
    with ProcessPoolExecutor(1, get_context("fork")) as child:
        try:
            return child.submit(_examined, where).result()
        except BrokenProcessPool:
            return [("devices", Finding("error", "a check crashed", "run nvidia-smi"))]


def _examined(where: Where) -> list[tuple[str, Finding]]:
    return list(examine(where))


def all_reduce(nproc: int | None) -> Finding:
    """Run check_network over `nproc` new processes; None: over the ranks of this job."""
    with tempfile.TemporaryDirectory() as folder:
        # The recipe's file, not its module: it is found without PYTHONPATH.
        command = [sys.executable, "-P", f"{ROOT}/recipes/check_network/train.py"]
        command += ["--largest", "8", "--output-dir", folder]
        done = subprocess.run(
            command + (["--nproc", str(nproc)] if nproc else []),
            capture_output=True,
            text=True,
            preexec_fn=end_with_parent,
            env=fresh_environment() if nproc else None,
        )
        measured = Path(folder, "network.json")  # written by rank 0
        rows = json.loads(measured.read_text())["all_reduce"] if measured.exists() else []
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        said = lines[0].removeprefix("error: ") if lines else f"status {done.returncode}"
        return Finding("error", said)
    speeds = ", ".join(
        f"{row['bus_bytes_per_s'] / _MIB:,.0f} MiB/s at {row['bytes'] / _MIB:.0f} MiB"
        for row in rows
    )
    return Finding("ok", f"every rank met the others; bus bandwidth {speeds}")


def show(findings: Sequence[tuple[str, Finding]], host: str = "") -> str:
    """The findings for a terminal."""
    lines = []
    for about, one in findings:
        lines.append(f"  {one.state:<7}  {host}{about}: {one.found}")
        lines += [f"  {'':7}  -> {one.fix}"] if one.fix else []
    return "\n".join(lines)


def doctor(given: argparse.Namespace) -> int:
    """Examine and print; the exit status."""
    if given.nproc is not None and given.nproc < 1:
        raise InputError(f"--nproc must be at least 1, got {given.nproc}")
    ranks, findings = Ranks(), []
    try:
        ranks = resolve()
    except InputError as refused:
        findings.append(("place", Finding("error", str(refused))))
    findings += examine_in_child(Where(ranks, given.output_dir, given.nproc or 0))
    in_job = ranks.launcher != "none"
    if given.nproc or in_job:
        findings.append(("all-reduce", all_reduce(None if in_job else given.nproc)))
    # Rank 0 shows everything, each other host its warnings and errors, each other rank its errors.
    shown = {"error", "warning"} if ranks.local_rank == 0 else {"error"}
    unwell = [(about, one) for about, one in findings if one.state in shown]
    if not ranks.is_main and unwell:
        print(show(unwell, f"rank {ranks.rank} on {socket.gethostname()}: "), file=sys.stderr)
    elif ranks.is_main and given.json:
        content = [{"about": about, **one._asdict()} for about, one in findings]
        with printing():  # a reader that is gone does not change the status
            print(json.dumps(content, indent=2, allow_nan=False), flush=True)
    elif ranks.is_main:
        with printing():
            print(show(findings), flush=True)
    return STATUS_FAILED if any(one.state == "error" for _, one in findings) else STATUS_FINISHED


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--nproc", type=int, help="processes that share this machine; adds a real all-reduce"
    )
    parser.add_argument(
        "--output-dir",
        type=given_path,
        default=Path("runs"),
        help="folder of the runs (default %(default)s)",
    )
    return attempt(lambda: doctor(parser.parse_args(list(arguments))))
