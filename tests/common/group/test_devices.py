"""Which device a process takes, and what it says where there should be a GPU but none works."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common import cli
from common.errors import InputError
from common.group.devices import choose_device, why_there_are_gpus
from common.group.process_group import process_group
from common.launch.ranks import Ranks
from tests.helpers.commands import ROOT
from tools import evaluate

BEGAN = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before? "


@pytest.fixture
def gpu_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev has files of two GPUs, which nothing hides."""
    monkeypatch.setattr(Path, "glob", lambda *_: iter(["nvidia0", "nvidia1"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "this host has GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "this host has GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f6d"}, "this host has GPUs"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({"SLURM_JOB_ID": "7"}, ""),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}, "Slurm gave this job GPUs"),
    ],
)
@pytest.mark.usefixtures("gpu_files")
def test_gpus_that_the_user_or_slurm_hides_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], why: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert why_there_are_gpus().startswith(why)
    assert bool(why_there_are_gpus()) == bool(why)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if not why:
        assert choose_device("auto", Ranks()).type == "cpu"
        return
    with pytest.raises(InputError, match=why):
        choose_device("auto", Ranks())


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (f"{BEGAN}Error 34: CUDA driver is a stub library", "not CUDA's folder stubs"),
        (f"{BEGAN}Error 46: CUDA-capable device(s) is/are busy or unavailable", "exclusive mode"),
        (f"{BEGAN}Error 802: system not yet initialized", "systemctl start nvidia-fabricmanager"),
        ("CUDA unknown error - this may be due to an incorrectly set up", "/dev/nvidia-uvm"),
        ("The NVIDIA driver on your system is too old (found version 12040).", "an older driver"),
        ("No CUDA GPUs are available", "files under /dev this user may open"),
        ("Torch not compiled with CUDA enabled", "compiled"),
    ],
)
@pytest.mark.usefixtures("gpu_files")
def test_torch_says_why_a_gpu_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, said: str, advice: str
) -> None:
    def init() -> None:
        raise (AssertionError if "compiled" in said else RuntimeError)(f"{said}\nmore")

    monkeypatch.setattr(torch.cuda, "init", init)
    for counted in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=counted: count)
        with pytest.raises(InputError) as refused:
            choose_device("auto", Ranks())
        message = str(refused.value)
        assert message.startswith("this host has GPUs (/dev/nvidia*), but this process sees no G")
        assert said in message
        assert advice in message
        assert "more" not in message
        assert message.endswith("; or give --device cpu to train without GPUs")
    assert choose_device("cpu", Ranks()).type == "cpu"


def test_gpus_that_a_line_of_the_program_hides_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    choose_device("auto", Ranks())
    assert not caplog.text, "tests/conftest.py hides all of them, which needs no warning"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none, though the shell says something else")
    choose_device("auto", Ranks())
    assert "CUDA or a launcher may have read it before; set it in the shell" in caplog.text


def test_autograds_thread_has_a_context_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else cuBLAS warns in each run's first backward pass. The GPU is simulated by the CPU."""
    calls: list[str] = []
    ones, backward = torch.ones, torch.autograd.backward

    def on_cpu(*size: Any, device: torch.device, **more: Any) -> Tensor:
        calls.append(f"a tensor on {device}")
        return ones(*size, **more)

    def note(*tensors: Any, **more: Any) -> None:
        backward(*tensors, **more)
        calls.append("backward")

    def stop(_backend: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set {device}"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=""))
    monkeypatch.setattr(torch, "ones", on_cpu)
    monkeypatch.setattr(torch.autograd, "backward", note)
    monkeypatch.setattr("common.group.process_group.gloo_does_not_disturb", stop)
    gpu = torch.device("cuda", 3)
    with pytest.raises(KeyboardInterrupt), process_group(Ranks(), gpu, "gloo", 60):
        pass
    assert calls == ["set cuda:3", "a tensor on cuda:3", "backward"]


@pytest.mark.parametrize("name", ["ddp_launch", "ddp_spawn"])
def test_on_cpus_two_processes_start_however_many_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    started: list[int] = []

    def start(_start: Any, nproc: int, _options: Any) -> int:
        started.append(nproc)
        return 0

    monkeypatch.setattr("gc.freeze", lambda: None)  # of this process's objects
    monkeypatch.setattr(cli, "with_restarts", start)
    monkeypatch.setattr(cli, "refuse_more_than_fit", lambda _: None)  # on a busy machine
    monkeypatch.setattr("common.launch.start.usable_gpus", lambda: 4)
    for words in ([], ["--device", "cuda"], ["--device", "cpu"], ["--device=cpu"]):
        assert cli.start(name, words) == 0
    assert cli.start(name, ["--device", "cpu", "--nproc", "3"]) == 0
    assert started == [4, 4, 2, 2, 3]


def test_evaluate_starts_two_processes_on_cpus_however_many_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "refuse_more_than_fit", lambda _: None)
    monkeypatch.setattr(evaluate, "launch", lambda _command, nproc, _options: nproc)
    monkeypatch.setattr("common.launch.start.usable_gpus", lambda: 4)
    run = str(ROOT / "tests" / "data" / "h200" / "ddp_spawn")
    assert evaluate.main([run]) == 4
    assert evaluate.main([run, "--device", "cpu"]) == 2
