"""This machine and this environment on one screen: what would stop a run, and what to do about it.

    make doctor                       this machine
    make doctor NPROC=4               and a real all-reduce over so many processes
    srun python -m recipes doctor     in a job: every host, and an all-reduce over all its ranks

A line is ok, a warning or an error. Status 0, or 1 where something would stop a run.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from common import ROOT
from common.cli import Parser, attempt
from common.errors import STATUS_FAILED, STATUS_FINISHED, InputError
from common.group.host import control_group_limits, cpu_quotas
from common.launch import stack
from common.launch.hints import SHARED_MEMORY_HINT
from common.launch.process import end_with_parent
from common.launch.ranks import Ranks, resolve

_GIB, _MIB = 2**30, 2**20
_TRIAL_BYTES = 32 * _MIB
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True)
class Where:
    """What is examined, besides this host."""

    ranks: Ranks
    folder: Path
    """Folder of all runs."""
    nproc: int
    """Processes that would share this host; 0 where it was not said."""


@dataclass(frozen=True)
class Finding:
    """One line of the screen."""

    state: Literal["ok", "warning", "error"]
    about: str
    found: str
    fix: str = ""


def ok(about: str, found: str) -> Finding:
    """All is well."""
    return Finding("ok", about, found)


def warning(about: str, found: str, fix: str) -> Finding:
    """Slower, or a risk, or a stop for some runs."""
    return Finding("warning", about, found, fix)


def error(about: str, found: str, fix: str = "") -> Finding:
    """It would stop a run."""
    return Finding("error", about, found, fix)


def devices(where: Where) -> Iterator[Finding]:
    """GPUs, what is free on them, and whether they reach each other's memory."""
    import torch

    from common.group.devices import slurm_gave_gpus

    count, nodes = torch.cuda.device_count(), len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible, in_job = os.environ.get("CUDA_VISIBLE_DEVICES"), "SLURM_JOB_ID" in os.environ
    hidden = visible is not None and not re.match("[0-9]|GPU-|MIG-", visible)
    fix = "see what nvidia-smi says, and whether the stack fits the driver (above)"
    if count == 0 and slurm_gave_gpus():
        yield error("devices", "Slurm gave this job GPUs, but torch sees none", fix)
    elif count == 0 and nodes and not hidden and not in_job:
        yield error("devices", f"{nodes} GPUs under /dev, but torch sees none", fix)
    elif count == 0:
        why = f" of {nodes} (CUDA_VISIBLE_DEVICES, or Slurm gave none)" if nodes else ""
        yield ok("devices", f"no GPU{why}: recipes train on the CPU")
    if where.ranks.launcher != "none" and count:
        # Looking closer would take memory on every GPU, and some may belong to one process only.
        yield ok("devices", f"{count} GPUs")
        return
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        found = f"cuda:{number} {name}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
        if free < total / 2:
            yield warning(
                "devices",
                found,
                "another process is on it (nvidia-smi): choose others by CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok("devices", found)
    apart = [
        f"{a}-{b}"
        for a in range(count)
        for b in range(a + 1, count)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        yield warning(
            "devices",
            f"no peer access between GPUs {', '.join(apart)}",
            "NCCL copies through host memory: allow peer access (IOMMU, ACS, container "
            "settings), or expect less bandwidth",
        )
    elif count > 1:
        yield ok("devices", "every GPU reaches the memory of the others")


def software(where: Where) -> Iterator[Finding]:
    """Versions against the table of stacks, and the driver against torch."""
    given, table = os.environ.get("RECIPES_STACK"), stack.stacks()
    stops = error if given or "LD_PRELOAD" in os.environ else warning  # an image refuses to run
    torch_here = version("torch").split("+")[0]
    name = given or next((n for n, parts in table.items() if parts["torch"] == torch_here), None)
    try:
        if name:
            stack.check_environment(name)  # before torch is imported, which it may break
    except InputError as refused:
        yield stops("software", str(refused), "unset it")
    try:
        stack.check_driver()
    except InputError as refused:
        yield error("software", str(refused))
    found = stack.running_versions()
    words = ", ".join(f"{part} {number}" for part, number in found.items())
    if not name:
        yield warning(
            "software",
            f"of no stack of this project: {words}",
            "results may differ from those of the locked versions",
        )
    elif wrong := stack.differences(name, found) + stack.strangers():
        yield stops(
            "software",
            "; ".join(wrong),
            "take out what was added to the environment "
            "(LD_PRELOAD, LD_LIBRARY_PATH, pip), or make it anew",
        )
    else:
        yield ok("software", f"stack {name}: {words}")


def network(where: Where) -> Iterator[Finding]:
    """Interfaces and the one that would be used, names, and the port."""
    from common.group.interfaces import interface_towards

    names = [name for _, name in socket.if_nameindex()]
    towards = interface_towards(where.ranks.master_addr) if where.ranks.several_hosts else None
    if towards in (None, "lo"):  # no job of several hosts, or this is rank 0's host
        towards = interface_towards("192.0.2.1")  # an address that no host has
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        exact = variable.startswith("GLOO") or wanted.startswith("=")
        names_it = not wanted.startswith("^")  # else it names what is not to be taken
        for name in filter(None, wanted.lstrip("=").split(",")) if names_it else ():
            if not any(n == name if exact else n.startswith(name) for n in names):
                yield error(
                    "network",
                    f"{variable} names {name}, which this host lacks",
                    f"take one of {', '.join(names)}",
                )
    if towards is None:
        yield warning(
            "network",
            f"no way to other hosts (interfaces: {', '.join(names)})",
            "well on one host; for several, connect them",
        )
    else:
        gloo = os.environ.get("GLOO_SOCKET_IFNAME", "it")
        yield ok(
            "network",
            f"{towards} leads to other hosts; gloo takes {gloo} for several hosts, "
            f"NCCL what NCCL_SOCKET_IFNAME names (of {', '.join(names)})",
        )
    host = socket.gethostname()
    try:
        own = socket.getaddrinfo(host, None)[0][4][0]
        yield ok("network", f"host name {host} resolves to {own}")
    except OSError:
        yield warning(
            "network",
            f"host name {host} does not resolve",
            "well here; other software, MPI for one, needs it in /etc/hosts",
        )
    if given := os.environ.get("MASTER_ADDR"):
        try:
            socket.getaddrinfo(given, None)
            yield ok("network", f"MASTER_ADDR {given} resolves")
        except OSError:
            yield error(
                "network",
                f"MASTER_ADDR {given!r} does not resolve",
                "give rank 0's host by an address that every host knows",
            )
    port = int(os.environ.get("MASTER_PORT", 0)) if where.ranks.launcher == "none" else 0
    try:
        socket.create_server(("", port)).close()
        yield ok("network", f"port {port} is free" if port else "there are free ports")
    except OSError as taken:
        yield error(
            "network",
            f"port {port} cannot be taken: {taken.strerror}",
            "give another MASTER_PORT, or none on one host",
        )


def shared_memory(where: Where) -> Iterator[Finding]:
    """Room for what loading processes and NCCL hand over."""
    path, fix = SHARED_MEMORY, SHARED_MEMORY_HINT
    try:
        free = shutil.disk_usage(path).free
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as failed:
        yield error("shared memory", f"{path} cannot be written: {failed.strerror}", fix)
        return
    found = f"{path} has {free / _MIB:,.0f} MiB free"
    if free < _GIB:
        yield warning("shared memory", found, f"too little for many loading processes: {fix}")
    else:
        yield ok("shared memory", found)


def limits(where: Where) -> Iterator[Finding]:
    """Open files, and memory that a network card may pin."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 1024:
        yield warning(
            "limits",
            f"{files} open files a process",
            "ulimit -n 65536: sockets to every rank and loading processes' batches count",
        )
    else:
        yield ok("limits", f"{files} open files a process")
    cards = Path("/sys/class/infiniband")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if cards.is_dir() and any(cards.iterdir()):
        if locked == resource.RLIM_INFINITY:
            yield ok("limits", "InfiniBand may lock as much memory as it needs")
        else:
            yield warning(
                "limits",
                f"InfiniBand cards, but only {locked // 1024} KiB of locked memory",
                "ulimit -l unlimited; docker: --ulimit memlock=-1; Slurm: "
                "PropagateResourceLimitsExcept=MEMLOCK",
            )


def cores(where: Where) -> Iterator[Finding]:
    """CPU cores this process may use against the ranks that would share them."""
    import torch

    usable, ranks_here = len(os.sched_getaffinity(0)), 1  # a job's rank has cores of its own
    if where.ranks.launcher == "none":
        ranks_here = where.nproc or torch.cuda.device_count() or 2
    found = f"{usable} of {os.cpu_count()} cores for {ranks_here} processes of one thread each"
    quota = next((share for share in cpu_quotas() if share < usable), None)
    if quota is not None:
        yield warning(
            "cores",
            f"the container or job may use {quota:g} cores' time of {usable}",
            "docker: --cpus; Slurm: --cpus-per-task; or start fewer",
        )
    if usable < ranks_here:
        yield warning(
            "cores",
            found,
            "they share cores: start fewer by --nproc, or ask for more "
            "(Slurm: --cpus-per-task; taskset)",
        )
    else:
        yield ok("cores", found)


def memory(where: Where) -> Iterator[Finding]:
    """Main memory."""
    text = Path("/proc/meminfo").read_text()
    free = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    for limit in control_group_limits("memory.max"):
        free = min(free, int(limit.split()[0]))
    if free < 2 * _GIB:
        yield warning(
            "memory",
            f"{free / _GIB:.1f} GiB available",
            "a process takes about 0.7 GiB before its data: start fewer",
        )
    else:
        yield ok("memory", f"{free / _GIB:.0f} GiB available")


def run_folder(where: Where) -> Iterator[Finding]:
    """Whether snapshots can be written there, how fast, and published by a rename."""
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
        with old.open("rb") as reader:  # who reads the old file goes on reading it
            new.rename(old)
            whole = reader.read() == b"old" and old.stat().st_size == _TRIAL_BYTES
    except OSError as failed:
        yield error(
            "run folder",
            f"{folder}: {failed.strerror}",
            "give another --output-dir, with room and the right to write",
        )
        return
    finally:
        for path in (new, old):
            with contextlib.suppress(OSError):
                path.unlink()
    if not whole:
        yield error(
            "run folder",
            f"{folder}: a rename is not atomic there",
            "snapshots could be torn: give one on another file system",
        )
    free = shutil.disk_usage(folder).free
    found = f"{folder}: {speed / _MIB:,.0f} MiB/s to the disk, {free / _GIB:,.1f} GiB free"
    if free < _GIB:
        yield warning("run folder", found, "snapshots need room: a model three times over, each")
    else:
        yield ok("run folder", found)


def clock(where: Where) -> Iterator[Finding]:
    """The time of day: logs, run names and certificates go by it."""
    newest = max(path.stat().st_mtime for path in Path(__file__).parents[1].glob("*/*.py"))
    now_s = time.time()
    if now_s < newest - 86400:
        today = time.strftime("%Y-%m-%d", time.gmtime(now_s))
        yield error(
            "clock",
            f"it is {today}, before this code was written",
            "set it (chronyc makestep): https and run names need it",
        )
        return
    if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) not in range(5):  # adjtimex(2)
        yield warning(
            "clock",
            "no time server keeps it right",
            "well on one host; on several, run chronyd or ntpd, so that logs can be put in order",
        )
    else:
        yield ok("clock", "a time server keeps it right")


def place(where: Where) -> Iterator[Finding]:
    """Slurm, container, launcher."""
    ranks = where.ranks
    facts = [f"host {socket.gethostname()}", f"Python {sys.version.split()[0]}"]
    if job := os.environ.get("SLURM_JOB_ID"):
        facts.append(
            f"Slurm job {job}, {os.environ.get('SLURM_JOB_NUM_NODES', '?')} nodes, "
            f"{os.environ.get('SLURM_NTASKS', '?')} tasks"
        )
    if os.environ.get("RECIPES_STACK") or Path("/.dockerenv").exists():
        facts.append("in a container")
    if ranks.launcher != "none":
        facts.append(f"rank {ranks.rank} of {ranks.world_size} ({ranks.launcher})")
    yield ok("place", ", ".join(facts))


CHECKS: tuple[Callable[[Where], Iterator[Finding]], ...] = (
    place,
    software,
    devices,
    network,
    shared_memory,
    limits,
    cores,
    memory,
    run_folder,
    clock,
)


def examine(where: Where) -> list[Finding]:
    """All findings on this host."""
    found = []
    warnings.simplefilter("ignore")  # what torch would warn of is among the findings
    for check in CHECKS:
        try:
            for one in check(where):
                found.append(one)
        except Exception as failed:  # a doctor that dies of what it finds is of no use
            about = check.__name__.replace("_", " ")
            found.append(error(about, f"cannot be examined: {type(failed).__name__}: {failed}"))
    return found


def all_reduce(nproc: int | None) -> Finding:
    """check_network over `nproc` processes, or over the ranks of this job."""
    from common.launch.fresh import fresh_environment

    with tempfile.TemporaryDirectory() as folder:
        recipe = f"{ROOT}/recipes/check_network/train.py"  # found whatever PYTHONPATH says
        command = [
            sys.executable,
            "-P",
            recipe,
            "--largest",
            "8",
            "--output-dir",
            folder,
            *(["--nproc", str(nproc)] if nproc else []),
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            preexec_fn=end_with_parent,
            env=fresh_environment() if nproc else None,
        )
        measured = Path(folder, "network.json")  # by rank 0
        rows = json.loads(measured.read_text())["all_reduce"] if measured.exists() else []
    if done.returncode == 0:
        speeds = [
            f"{row['bus_bytes_per_s'] / _MIB:,.0f} MiB/s at {row['bytes'] / _MIB:.0f} MiB"
            for row in rows
        ]
        return ok("all-reduce", f"every rank met the others; bus bandwidth {', '.join(speeds)}")
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    said = lines[0].removeprefix("error: ") if lines else f"status {done.returncode}"
    return error("all-reduce", said)


def show(findings: Sequence[Finding], host: str = "") -> str:
    """What a person reads."""
    marks = {"ok": "ok     ", "warning": "warning", "error": "error  "}
    lines = []
    for one in findings:
        lines.append(f"  {marks[one.state]}  {host}{one.about}: {one.found}")
        if one.fix:
            lines.append(f"  {'':7}  -> {one.fix}")
    return "\n".join(lines)


def doctor(given: argparse.Namespace) -> int:
    """Examine, print, and say whether anything would stop a run."""
    try:
        ranks = resolve()
        findings = []
    except InputError as refused:
        ranks = Ranks()
        findings = [error("place", str(refused))]
    findings += examine(Where(ranks, given.output_dir, given.nproc or 0))
    if given.nproc or ranks.launcher != "none":
        findings.append(all_reduce(given.nproc if ranks.launcher == "none" else None))
    worst = STATUS_FAILED if any(one.state == "error" for one in findings) else STATUS_FINISHED
    if not ranks.is_main:  # of other hosts what is not well, of other ranks what would stop it
        least = ("warning", "error") if ranks.local_rank == 0 else ("error",)
        unwell = [one for one in findings if one.state in least]
        if unwell:
            print(show(unwell, f"rank {ranks.rank} on {socket.gethostname()}: "), file=sys.stderr)
    elif given.json:
        print(json.dumps([asdict(one) for one in findings], indent=2))
    else:
        print(show(findings), flush=True)
    return worst


def main(arguments: Sequence[str]) -> int:
    """Run from a command line; returns the exit status."""
    parser = Parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="a list of findings as JSON")
    parser.add_argument(
        "--nproc", type=int, help="processes: how cores are shared, and a real all-reduce over them"
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("runs"),
        help="where runs are to be written; default %(default)s",
    )
    return attempt(lambda: doctor(parser.parse_args(list(arguments))))
