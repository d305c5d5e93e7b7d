"""A host with GPUs whose driver is broken. The driver is a stand-in that the tests compile."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common import driver
from common.errors import InputError
from common.group.devices import check_driver, choose_device, gpu_count
from common.launch.ranks import Ranks
from common.launch.start import LaunchOptions
from tests.helpers.commands import Recipe
from tests.helpers.machine import DRIVER, library, need, need_root

# As the CUDA runtime 13.2 says it.
WORDS = {
    34: "CUDA driver is a stub library",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    100: "no CUDA-capable device is detected",
    802: "system not yet initialized",
    803: "system has unsupported display driver / cuda driver combination",
    999: "unknown error",
}


def stand_in(folder: Path, status: int, name: str = "") -> Path:
    """A driver whose start returns `status`, and which has one GPU.

    Not by its real name, by which the loader would find it in all later tests of this process.
    """
    name = name or f"libcuda_{status}.so"
    code = DRIVER.format(version=13020, status=status, words=WORDS.get(status, "no error"))
    return library(folder, name, code) / name


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two device files, as under /dev."""
    files = [tmp_path / name for name in ("nvidia0", "nvidia1")]
    for file in files:
        file.touch()
    monkeypatch.setattr(driver, "gpu_files", lambda: files)
    return files


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (34, "not CUDA's folder stubs"),
        (46, "exclusive mode"),
        (100, "check CUDA_VISIBLE_DEVICES"),
        (802, "systemctl start nvidia-fabricmanager"),
        (803, "reboot the host"),
        (999, "/dev/nvidia-uvm"),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_a_driver_that_cannot_start_is_refused(tmp_path: Path, status: int, advice: str) -> None:
    path = stand_in(tmp_path / "driver", status)
    with pytest.raises(InputError) as refused:
        check_driver(str(path))
    message = str(refused.value)
    assert message.startswith(f"2 GPUs under /dev, but CUDA error {status}: {WORDS[status]}: ")
    assert advice in message
    assert message.endswith("; or give --device cpu to train without GPUs")


def test_other_reasons_why_gpus_cannot_be_used(
    two_gpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = (str(stand_in(tmp_path / "driver", status)) for status in (999, 0))
    with monkeypatch.context() as patch:
        patch.setattr(driver, "load", lambda _name: None)
        with pytest.raises(InputError, match=r"libcuda\.so\.1 is not found: .*--gpus all"):
            choose_device("auto", Ranks())
    assert choose_device("cpu", Ranks()).type == "cpu"
    monkeypatch.setattr(os, "access", lambda _file, _mode: False)
    with pytest.raises(InputError, match=rf"may not open {two_gpus[0]} \(CUDA error 999: unknown"):
        check_driver(broken)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    check_driver(sound)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(InputError, match="is built without CUDA: install another"):
        check_driver(sound)


def test_without_gpus_the_driver_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(stand_in(tmp_path / "driver", 803))
    monkeypatch.setattr(driver, "gpu_files", list)
    check_driver(path)


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"SLURM_JOB_ID": "7"}, 0),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}, 2),
    ],
)
def test_gpus_that_the_user_or_slurm_hides_are_not_missed(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], found: int
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter(["nvidia0", "nvidia1"]))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert len(driver.gpu_files()) == found


def test_of_gpus_in_mig_mode_a_process_counts_what_it_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML counts 8 GPUs, but CUDA gives a process one instance."""
    sound, load = stand_in(tmp_path / "driver", 0), driver.load
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(driver, "load", lambda: None)
    assert gpu_count() == 8, "no driver that could say otherwise"
    monkeypatch.setattr(driver, "load", lambda: load(str(sound)))
    assert gpu_count() == 1
    assert LaunchOptions().processes == 1
    monkeypatch.setattr("common.group.devices.check_driver", lambda: None)
    assert choose_device("auto", Ranks(3, 3, 4, 4)).index == 0, "never cuda:3"


def test_gpus_that_a_line_of_the_program_hides_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("common.group.devices.check_driver", lambda: None)
    choose_device("auto", Ranks())
    assert "CUDA_VISIBLE_DEVICES" not in caplog.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # as os.environ[...] = "7"
    choose_device("auto", Ranks())
    assert "to '7': CUDA or a launcher may have read it before; set it in the shell" in caplog.text


# A tmpfs as /dev, with the device files that Python needs and those of two GPUs.
GPU_HOST = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {dev}
for d in null zero urandom random; do cp -a /dev/$d {dev}; done
touch {dev}/nvidia0 {dev}/nvidia1; mkdir {dev}/shm
mount --rbind {dev} /dev
exec "$@"
"""


@pytest.fixture
def on_gpu_host(recipe: Recipe) -> Callable[..., list[str]]:
    """The command line that runs another one on a host with two GPUs."""
    need_root()
    need("unshare")
    dev = recipe.tmp_path / "dev"
    dev.mkdir()
    script = GPU_HOST.format(dev=dev)
    return lambda *words: ["unshare", "--mount", "sh", "-c", script, "sh", *words]


def test_a_default_run_on_a_gpu_host_does_not_train_on_the_cpu(
    recipe: Recipe, on_gpu_host: Callable[..., list[str]]
) -> None:
    folder = stand_in(recipe.tmp_path / "driver", 803, driver.LIBRARY).parent
    run = recipe.tmp_path / "run"
    train = [sys.executable, "-m", "recipes", "ddp_launch", "--output-dir", str(run)]
    process = recipe.start(*on_gpu_host(*train), env={"LD_LIBRARY_PATH": str(folder)})
    done = recipe.finish(process, run)
    assert (done.status, done.stdout, run.exists()) == (2, "", False)
    assert done.stderr.splitlines() == done.errors
    (error,) = done.errors
    assert error.startswith(f"error: 2 GPUs under /dev, but CUDA error 803: {WORDS[803]}: the ")
