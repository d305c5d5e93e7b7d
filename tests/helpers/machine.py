"""What a test needs of the machine: programs, root, a small disk, a port, a compiled library."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from socket import socket

import pytest

from common.errors import InputError
from common.launch.port import listen

EMULATED_CPUS = ("Haswell", "EPYC-Rome")
"""An Intel and an AMD CPU, as qemu calls them: both with AVX2 and without AVX-512."""
OTHER_NCCL = "int ncclGetVersion(int *version) { *version = 21803; return 0; }"
OLD_DRIVER = """
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
"""
"""A stand-in of NVIDIA's driver for CUDA 12.4, with one GPU."""


def need(*programs: str) -> None:
    """Skip the test if a program is missing; in CI, where it can be installed, fail."""
    missing = [p for p in programs if not shutil.which(p)]
    if missing and os.environ.get("CI"):
        pytest.fail(f"CI must install {', '.join(missing)}")
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def need_root() -> None:
    """Skip the test if the user may not make namespaces and mounts; in CI, fail."""
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("CI must run as root")
        pytest.skip("needs root")


def library(folder: Path, name: str, code: str) -> Path:
    """Compile `code` to the shared library `name` in a folder; returns the folder."""
    need("gcc")
    folder.mkdir(exist_ok=True)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-xc", "-", f"-Wl,-soname,{name}", "-o", folder / name],
        input=code,
        text=True,
        check=True,
    )
    return folder


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A real file system of `size` at `folder`, to be filled."""
    need_root()
    need("mount")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def disk_that_freezes(folder: Path) -> Iterator[Path]:
    """A real file system at `folder`: after `fsfreeze --freeze` whoever writes there waits.

    Not even SIGKILL ends such a process until the file system is thawed, here at the latest.
    """
    need_root()
    need("mount", "mkfs.ext4", "fsfreeze")
    if not Path("/dev/loop-control").exists():
        pytest.skip("needs loop devices")
    image = folder.with_name(f"{folder.name}.ext4")
    image.touch()
    os.truncate(image, 2**26)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    folder.mkdir()
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", folder], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", folder], check=True)


_held: list[socket] = []


@cache
def _own_ports() -> Iterator[int]:
    """A hundred ports of this process; the last one is held, to tell the other suites so."""
    for number in range(220):
        first = 10_000 + (os.getpid() + number) % 220 * 100
        with suppress(InputError):
            _held.append(listen("127.0.0.1", first + 99))
            return itertools.cycle(range(first, first + 99))
    raise AssertionError("each hundred of ports is another suite's")


def free_port() -> int:
    """A port of this machine that stays free until the test takes it.

    Linux gives ports from 32,768 on to a program that asks for any, so this one lies below.
    """
    for port in itertools.islice(_own_ports(), 99):
        with suppress(InputError), listen("127.0.0.1", port):
            return port
    raise AssertionError("all ports of this process are in use")
