"""`doctor` finds the faults that a test creates, and reports none on a sound machine."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.launch.ranks import Ranks
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import free_port, need, need_root, small_disk
from tools import doctor
from tools.doctor import Finding


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
    for about in ("place", "software", "bits", "devices", "network", "shared memory", "cores"):
        assert f"  {about}: " in said, said
    assert "  run folder: " in said


_MACHINE = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {tmp}
mkdir {tmp}/dev && for d in null zero urandom random; do cp -a /dev/$d {tmp}/dev; done
touch {tmp}/dev/nvidia0; mkdir {tmp}/dev/shm
mount --rbind {tmp}/dev /dev
mount -t tmpfs -o size=8m tmpfs /dev/shm
ulimit -n 200
exec "$@"
"""


@pytest.mark.slow
def test_a_machine_with_many_faults(recipe: Recipe) -> None:
    """Real faults in new namespaces: mounts, limits, a GPU's file without a driver."""
    need_root()
    need("unshare")
    scratch = recipe.tmp_path / "scratch"
    scratch.mkdir()
    status, said = run(
        recipe,
        *"unshare --mount --uts sh -c".split(),
        _MACHINE.format(tmp=scratch),
        "sh",
        env={
            "CUDA_VISIBLE_DEVICES": "0",
            "GLOO_SOCKET_IFNAME": "eth77",
            "NCCL_SOCKET_IFNAME": "=eth88",
        },
    )
    assert status == 1
    for line in (
        "error    devices: this host has GPUs (/dev/nvidia*), but this process sees no GPU: ",
        "error    network: GLOO_SOCKET_IFNAME names eth77, but this host has no such interface",
        "error    network: NCCL_SOCKET_IFNAME names eth88, but this host has no such interface",
        "warning  shared memory: /dev/shm has 8 MiB free",
        "warning  cores: 200 open files per process",
    ):
        assert f"  {line}" in said, said
    assert said.count("\n           -> ") >= 4, "each with what to do"


def unwell(found: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(one.state, one.found) for one in found if one.state != "ok"]


def test_versions_of_another_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unwell(doctor.software()) == []
    monkeypatch.setenv("RECIPES_STACK", "cu128")
    ((state, found),) = unwell(doctor.software())
    assert state == "error"
    assert "where cu128 pins" in found


def test_more_processes_than_cores() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        found = unwell(doctor.cores(2))
    finally:
        os.sched_setaffinity(0, cores)
    two = f"1 of {os.cpu_count()} cores for 2 processes of one thread each"
    assert ("warning", two) in found


def test_run_folders_that_cannot_be_written(tmp_path: Path) -> None:
    assert unwell(doctor.run_folder(tmp_path / "runs")) == []
    assert list((tmp_path / "runs").iterdir()) == [], "it leaves nothing"
    (tmp_path / "file").write_text("")
    for folder, says in ((tmp_path / "file" / "runs", "Not a directory"), (Path("/proc"), "")):
        ((state, found),) = unwell(doctor.run_folder(folder))
        assert (state, says in found) == ("error", True)
    with small_disk(tmp_path / "small", "16m") as disk:
        ((state, found),) = unwell(doctor.run_folder(disk))
        assert (state, "No space left" in found) == ("error", True)
    with small_disk(tmp_path / "middling", "128m") as disk:
        ((state, found),) = unwell(doctor.run_folder(disk))
        assert (state, "0.1 GiB free" in found) == ("warning", True)


def test_shared_memory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", Path("/proc"))
    assert [state for state, _ in unwell(doctor.shared_memory())] == ["error"]


def test_gpus_in_use_or_hidden_from_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torch's answers are simulated, an error in the words of CUDA."""
    gib = {0: 10, 1: 80}

    def memory(number: int) -> tuple[int, int]:
        if number not in gib:
            raise torch.AcceleratorError(
                "CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
                "Search for `cudaErrorDevicesUnavailable' in https://docs.nvidia.com/cuda/"
            )
        return gib[number] * 2**30, 80 * 2**30

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    found = [one for _, one in doctor.findings_of({"devices": doctor.devices(Ranks())})]
    assert [(one.state, one.found) for one in found] == [
        ("ok", "NCCL adds between GPUs: not by NVLS or CollNet, if --deterministic (NCCL_ALGO)"),
        ("warning", "cuda:0 GPU, 10 of 80 GiB free"),
        ("ok", "cuda:1 GPU, 80 of 80 GiB free"),
        (
            "error",
            "AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        ),
    ]
    assert "exclusive mode" in found[3].fix
    in_job = Ranks(1, 1, 2, 2, "slurm")
    assert unwell(doctor.devices(in_job)) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    (alone,) = doctor.devices(in_job)
    assert (alone.state, alone.found) == ("warning", "1 GPUs of this host for each rank")
    assert "--gpus-per-node" in alone.fix


def test_bad_usage_is_one_line(recipe: Recipe) -> None:
    for name in ("doctor", "reproduce"):
        done = recipe.module(name, "--no-such-option")
        assert (done.status, len(done.errors), done.stderr.count("\n")) == (2, 1, 1)


def test_ranks_that_contradict_each_other_are_bad_input(recipe: Recipe) -> None:
    env = {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    done = recipe.module("doctor", env=env)
    assert (done.status, len(done.errors), done.stdout) == (2, 1, "")


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
    assert f"  warning  rank 1 on {here}: cores: 200 open files per process\n" in second.stderr
    assert "ok " not in second.stderr
