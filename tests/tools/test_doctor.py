"""`doctor` finds the faults that a test creates, and reports none on a sound machine."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common import driver
from common.launch.ranks import Ranks
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import OLD_DRIVER, free_port, library, need, need_root, small_disk
from tools import doctor
from tools.doctor import Finding, Where


def run(recipe: Recipe, *words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and output of `python -m recipes doctor`; `words` come before the command."""
    command = [
        *words,
        sys.executable,
        *"-m recipes doctor --output-dir".split(),
        str(recipe.tmp_path / "runs"),
    ]
    done = recipe.finish(recipe.start(*command, env=env), recipe.tmp_path)
    assert done.stderr == ""
    return done.status, done.stdout


def test_no_processes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--nproc", "0"]) == 2
    assert "error: --nproc must be at least 1, got 0" in capsys.readouterr().err


def test_this_machine_is_well(recipe: Recipe) -> None:
    status, said = run(recipe)
    assert status == 0
    assert "error" not in said
    for about in (
        "place",
        "devices",
        "software",
        "network",
        "shared memory",
        "limits",
        "cores",
        "memory",
        "run folder",
        "clock",
    ):
        assert f"  {about}: " in said, said


_MACHINE = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {tmp}
mkdir {tmp}/dev && for d in null zero urandom random; do cp -a /dev/$d {tmp}/dev; done
touch {tmp}/dev/nvidia0; mkdir {tmp}/dev/shm
mount --rbind {tmp}/dev /dev
mount -t tmpfs -o size=8m tmpfs /dev/shm
mount -t tmpfs tmpfs /sys/class; mkdir -p /sys/class/infiniband/mlx5_0
mount -t tmpfs tmpfs /sys/fs/cgroup; echo '50000 100000' >/sys/fs/cgroup/cpu.max
sed 's/^MemAvailable:.*/MemAvailable: 500000 kB/' /proc/meminfo >{tmp}/meminfo
mount --bind {tmp}/meminfo /proc/meminfo
hostname a-name-that-nobody-knows
ulimit -n 200; ulimit -l 64
exec "$@"
"""


@pytest.mark.slow
def test_a_machine_with_many_faults(recipe: Recipe) -> None:
    """Real faults in new namespaces: mounts, limits, host name, libraries."""
    need_root()
    need("unshare")
    other, scratch = recipe.tmp_path / "other", recipe.tmp_path / "scratch"
    scratch.mkdir()
    library(other, "libcuda.so.1", OLD_DRIVER)
    status, said = run(
        recipe,
        *"unshare --mount --uts sh -c".split(),
        _MACHINE.format(tmp=scratch),
        "sh",
        env={
            "LD_LIBRARY_PATH": str(other),
            "GLOO_SOCKET_IFNAME": "eth77",
            "NCCL_SOCKET_IFNAME": "=eth88",
            "MASTER_ADDR": "no-such-host.invalid",
        },
    )
    assert status == 1
    for line in (
        "error    devices: 1 GPUs under /dev, but torch sees none",
        "error    network: GLOO_SOCKET_IFNAME names eth77, but this host has no such interface",
        "error    network: NCCL_SOCKET_IFNAME names eth88, but this host has no such interface",
        "error    network: MASTER_ADDR 'no-such-host.invalid' does not resolve",
        "warning  network: host name a-name-that-nobody-knows does not resolve",
        "warning  shared memory: /dev/shm has 8 MiB free",
        "warning  limits: 200 open files per process",
        "warning  limits: InfiniBand cards, but only 64 KiB of locked memory",
        "warning  cores: this container or job gets the CPU time of only 0.5 of",
        "warning  memory: 0.5 GiB available",
    ):
        assert f"  {line}" in said, said
    assert said.count("\n           -> ") >= 10, "each with what to do"
    status, said = run(recipe, "env", "-u", "LD_LIBRARY_PATH", f"LD_PRELOAD={other}/libcuda.so.1")
    assert status == 1
    assert "error    software: this host's NVIDIA driver supports CUDA 12.4 at most" in said


@pytest.fixture
def where(tmp_path: Path) -> Where:
    return Where(Ranks(), tmp_path / "runs", 0)


def unwell(found: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(one.state, one.found) for one in found if one.state != "ok"]


def test_versions_of_another_stack(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unwell(doctor.software(where)) == []
    monkeypatch.setenv("RECIPES_STACK", "cu128")
    ((state, found),) = unwell(doctor.software(where))
    assert state == "error"
    assert "where cu128 pins" in found


def test_a_port_that_is_taken(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        found = [text for state, text in unwell(doctor.network(where)) if state == "error"]
    assert len(found) == 1
    assert "cannot be taken" in found[0]


def test_more_processes_than_cores(where: Where) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        found = unwell(doctor.cores(where))
    finally:
        os.sched_setaffinity(0, cores)
    two = f"1 of {os.cpu_count()} cores for 2 processes of one thread each"
    assert ("warning", two) in found
    many = Where(where.ranks, where.folder, len(cores) + 1)
    assert any(f"for {len(cores) + 1} processes" in text for _, text in unwell(doctor.cores(many)))


def test_run_folders_that_cannot_be_written(where: Where, tmp_path: Path) -> None:
    assert unwell(doctor.run_folder(where)) == []
    assert list(where.folder.iterdir()) == [], "it leaves nothing"
    (tmp_path / "file").write_text("")
    for folder, says in ((tmp_path / "file" / "runs", "Not a directory"), (Path("/proc"), "")):
        ((state, found),) = unwell(doctor.run_folder(Where(where.ranks, folder, 0)))
        assert (state, says in found) == ("error", True)
    with small_disk(tmp_path / "small", "16m") as disk:
        ((state, found),) = unwell(doctor.run_folder(Where(where.ranks, disk, 0)))
        assert (state, "No space left" in found) == ("error", True)
    with small_disk(tmp_path / "middling", "128m") as disk:
        ((state, found),) = unwell(doctor.run_folder(Where(where.ranks, disk, 0)))
        assert (state, "0.1 GiB free" in found) == ("warning", True)


def test_a_folder_where_nothing_is_renamed(where: Where) -> None:
    need("chattr")
    where.folder.mkdir()
    set_flag = subprocess.run(["chattr", "+a", where.folder], capture_output=True)
    if set_flag.returncode:
        pytest.skip("this file system has no append-only folders")
    try:
        ((state, found),) = unwell(doctor.run_folder(where))
    finally:
        subprocess.run(["chattr", "-R", "-a", where.folder], check=True)
    assert (state, "not permitted" in found) == ("error", True)


def test_the_memory_of_a_container_or_job(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_limit", lambda: 700 * 2**20)
    ((state, found, _),) = doctor.memory(where)
    assert (state, found) == ("warning", "this container or job may use 0.7 GiB")


def test_shared_memory_that_cannot_be_written(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", Path("/proc"))
    assert [state for state, _ in unwell(doctor.shared_memory(where))] == ["error"]


def test_a_clock_before_this_code(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1e9)
    ((state, found),) = unwell(doctor.clock(where))
    assert (state, found) == ("error", "it is 2001-09-09, before this code was written")


def test_gpus_in_use_and_apart(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torch's answers about two GPUs are simulated."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "usable_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: ((10, 80)[n] * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _a, _b: False)
    busy, apart = unwell(doctor.devices(where))
    assert busy == ("warning", "cuda:0 GPU, 10 of 80 GiB free")
    assert apart == ("warning", "no peer access between GPUs 0-1")


def test_a_gpu_that_fails_does_not_hide_the_others(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: torch's answers about three GPUs are simulated, in the words of CUDA."""

    def memory(number: int) -> tuple[int, int]:
        if number == 1:
            raise torch.AcceleratorError(
                "CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
                "Search for `cudaErrorDevicesUnavailable' in https://docs.nvidia.com/cuda/"
            )
        return 80 * 2**30, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(driver, "usable_gpus", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: 1 not in (a, b))
    first, failed, last, nccl = doctor.devices(where)
    assert nccl == (
        "ok",
        "NCCL adds between GPUs: not by NVLS or CollNet, if --deterministic (NCCL_ALGO)",
        "",
    )
    assert first.found == "cuda:0 GPU, 80 of 80 GiB free"
    assert last.found == "cuda:2 GPU, 80 of 80 GiB free"
    busy = "cuda:1 CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert (failed.state, failed.found) == ("error", busy)
    assert "exclusive mode" in failed.fix


def test_gpus_of_the_host_that_a_container_was_not_given(
    where: Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc/driver/nvidia is simulated."""
    if driver.gpu_files():
        pytest.skip("this host has GPUs")
    monkeypatch.setattr(doctor, "HOST_GPUS", tmp_path)
    assert [one.state for one in doctor.devices(where)] == ["ok"], "a host without GPUs"
    (tmp_path / "0000:1b:00.0").mkdir()
    (found,) = doctor.devices(where)
    assert found.state == "warning"
    assert "this host has 1 GPUs, but none under /dev" in found.found
    assert "--gpus all" in found.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [one.state for one in doctor.devices(where)] == ["ok"], "none are wanted"


def test_gpus_in_mig_mode(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML's and CUDA's answers are simulated."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(driver, "usable_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "MIG 1g.5gb")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5 * 2**30, 5 * 2**30))
    mig, only = doctor.devices(where)
    assert mig.found == "8 GPUs, but a process can use only 1: MIG mode is on"
    assert "CUDA_VISIBLE_DEVICES=MIG-" in mig.fix
    assert only.found.startswith("cuda:0 MIG 1g.5gb")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # pytest has threads here
def test_the_process_that_looks_at_the_gpus_has_ended_before_the_all_reduce(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    def examined_by(_where: Where) -> Iterator[Finding]:
        yield Finding("ok", str(os.getpid()))

    monkeypatch.setattr(doctor, "CHECKS", (examined_by,))
    ((about, one),) = doctor.examine_in_child(where)
    assert about == "examined by"
    assert int(one.found) != os.getpid()
    assert not Path("/proc", one.found).exists()
    monkeypatch.setattr(doctor, "CHECKS", (lambda _: os._exit(1),))
    assert doctor.examine_in_child(where)[0][1].state == "error", "a driver that crashes"


def test_limits_are_those_of_this_process(where: Where) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        assert ("warning", "500 open files per process") in unwell(doctor.limits(where))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("env", "state"),
    [
        ({}, "error"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "error"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f6d"}, "error"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "ok"),
        ({"SLURM_JOB_ID": "7"}, "ok"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}, "error"),
    ],
)
def test_gpus_that_torch_does_not_see(
    where: Where, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], state: str
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter(["nvidia0", "nvidia1"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert [one.state for one in doctor.devices(where)] == [state]


def test_bad_usage_is_one_line(recipe: Recipe) -> None:
    for name in ("doctor", "reproduce"):
        done = recipe.module(name, "--no-such-option")
        assert (done.status, len(done.errors), done.stderr.count("\n")) == (2, 1, 1)


def test_ranks_that_contradict_each_other(recipe: Recipe) -> None:
    status, said = run(recipe, env={"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert status == 1
    assert "  error    place: " in said


@pytest.mark.slow
def test_an_all_reduce_over_two(recipe: Recipe) -> None:
    done = recipe.module("doctor", "--nproc", "2", "--json", "--output-dir", recipe.tmp_path)
    done.assert_ok()
    found = {one["about"]: one for one in json.loads(done.stdout)}
    assert found["all-reduce"]["state"] == "ok"
    assert "MiB/s" in found["all-reduce"]["found"]


@pytest.mark.slow
def test_in_a_job_every_rank_takes_part(recipe: Recipe) -> None:
    """As srun starts it on two hosts: rank 0 prints everything, rank 1 its warnings and errors."""
    port = str(free_port())
    processes = []
    for rank in ("0", "1"):
        # Without PYTHONPATH, as in a shell in the repository.
        env = {
            "RANK": rank,
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": socket.gethostname(),  # several hosts cannot meet on loopback
            "MASTER_PORT": port,
            "PYTHONPATH": "",
        }
        command = [sys.executable, "-m", "recipes", "doctor", "--output-dir", str(recipe.tmp_path)]
        files = {"0": "4096", "1": "200"}[rank]
        limited = ["sh", "-c", f'ulimit -n {files}; cd {ROOT}; exec "$@"', "sh", *command]
        processes.append(recipe.start(*limited, env=env))
    first, second = (recipe.finish(process, recipe.tmp_path) for process in processes)
    assert (first.status, second.status, second.stdout) == (0, 0, "")
    assert "rank 0 of 2" in first.stdout
    assert "all-reduce: every rank met the others" in first.stdout
    here = socket.gethostname()
    assert f"  warning  rank 1 on {here}: limits: 200 open files per process\n" in second.stderr
    assert "ok " not in second.stderr
