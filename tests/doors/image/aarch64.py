"""`make image-aarch64`: build the image for 64-bit ARM, train and test in it, under emulation.

It takes hours and needs root, so it is run by hand, and writes docker/results/aarch64.json.
qemu-aarch64 runs every program of the image: the result says nothing
of a real ARM machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT
from common.manifest import describe_machine
from common.writing import write_json
from tests.helpers.engine import FOLDER, Engine, unpack

RESULT = ROOT / "docker" / "results" / "aarch64.json"
IMAGE = "torch-recipes:aarch64"
CPU = "neoverse-n1"
"""The emulated CPU, as qemu calls it: AWS's Graviton 2 and Ampere's Altra have its cores."""

_QEMU = FOLDER / "qemu" / "usr" / "bin" / "qemu-aarch64"
"""Trixie's (10.0). With bookworm's (7.2), importing torch ends with a segmentation fault."""

_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_ELF_OF_ARM = (
    r":recipes-aarch64:M::\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7"
    r"\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:"
    f"{_QEMU}:OF"
)

RUNS = {
    "the default run": "--nproc 2",
    "3 epochs": "--nproc 2 --epochs 3",
    "3 epochs, again": "--nproc 2 --epochs 3",
    "3 epochs, stopped after step 20 and resumed": "--nproc 2 --epochs 3 --max-steps 20",
    "3 epochs, --virtual-ranks 2": "--nproc 2 --epochs 3 --virtual-ranks 2",
    "3 epochs, --virtual-ranks 2, 1 process": "--nproc 1 --epochs 3 --virtual-ranks 2",
}
"""Runs of ddp_launch. The second to fourth must give one hash, and so the last two."""

TESTS = (
    "tests/common/training/test_models.py tests/common/training/test_optimizer.py "
    "tests/common/snapshots tests/recipes/test_dp_scratch.py tests/recipes/test_checkpoint_rnn.py "
    "tests/recipes/test_model_parallel_toy.py"
)
"""Most need one process."""
NOT_ALLOWED = "test_a_full_disk_leaves_the_last_good_one"
"""It mounts a small disk, which a container without privileges may not."""


@contextmanager
def programs_of_arm_run() -> Iterator[None]:
    """Let the kernel start ARM programs in qemu, in containers too."""
    if not _QEMU.exists():
        unpack(FOLDER / "qemu", "qemu-user")
    if not (_BINFMT / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "none", _BINFMT], check=True)
    if (left := _BINFMT / "recipes-aarch64").exists():  # of a killed run
        left.write_text("-1")
    (_BINFMT / "register").write_text(_ELF_OF_ARM)
    try:
        yield
    finally:
        (_BINFMT / "recipes-aarch64").write_text("-1")


def build(engine: Engine, target: str) -> float:
    """Build a target of the shipped Dockerfile by `make image`; the seconds that it took."""
    begun_s = time.monotonic()
    arguments = " ".join(engine.build_arguments(target))
    image = f"IMAGE={IMAGE}-{target}"
    engine.call("make", "image", image, f"TARGET={target}", f"BUILD={arguments}", timeout_s=30_000)
    return round(time.monotonic() - begun_s)


def run(
    engine: Engine, target: str, folder: Path, *words: str, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run a container to its end; `folder` is its /workspace/runs."""
    user = f"{os.getuid()}:{os.getgid()}"
    options = ["--rm", "--platform=linux/arm64", "--shm-size=1g", "--user", user]
    options += ["--env", f"QEMU_CPU={CPU}", "--volume", f"{folder}:/workspace/runs"]
    if target == "development":
        options += ["--workdir", "/opt/recipes", "--entrypoint", "python"]
    image = f"{IMAGE}-{target}"
    return engine.run("run", *options, image, *words, timeout_s=30_000, check=check)


def train(engine: Engine, folder: Path) -> dict[str, Any]:
    """Every run of RUNS: its hash, where its bits hold, and its seconds."""
    found = {}
    for number, (name, options) in enumerate(RUNS.items()):
        command = ["ddp_launch", *options.split(), "--output-dir", f"runs/{number}"]
        begun_s = time.monotonic()
        run(engine, "runtime", folder, *command)
        if "--max-steps" in options:
            run(engine, "runtime", folder, *command[: command.index("--max-steps")], *command[-2:])
        summary = json.loads((folder / str(number) / "summary.json").read_text())
        seen = {key: summary[key] for key in ("weights_sha256", "val_accuracy", "bits_hold_on")}
        found[name] = {**seen, "elapsed_s": round(time.monotonic() - begun_s)}
        print(f"{name}: {found[name]}", flush=True)
    return found


def test(engine: Engine, folder: Path) -> dict[str, Any]:
    """pytest's status and last line for TESTS."""
    options = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        f"not {NOT_ALLOWED}",
    ]
    done = run(engine, "development", folder, *options, *TESTS.split(), check=False)
    print(done.stdout, flush=True)
    last = done.stdout.strip().splitlines()[-1].strip("= ")
    return {"files": TESTS, "status": done.returncode, "result": last}


def main() -> int:
    """Build, train, test; 1 if a hash differs that must not, or a test fails."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    begun_s, machine = time.monotonic(), describe_machine()
    with programs_of_arm_run(), tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        engine = Engine(architecture="arm64")
        try:
            build_s = {target: build(engine, target) for target in ("runtime", "development")}
            print(f"built: {build_s}", flush=True)
            runs = train(engine, Path(folder))
            tests = test(engine, Path(folder))
        finally:
            engine.close()
    _, one, again, resumed, two, single = (runs[name]["weights_sha256"] for name in RUNS)
    same = one == again == resumed and two == single
    version = subprocess.check_output([_QEMU, "--version"], text=True).splitlines()[0]
    write_json(
        RESULT,
        {
            "command": "make image-aarch64",
            "emulator": f"{version}, -cpu {CPU}",
            "machine": machine,
            "elapsed_s": round(time.monotonic() - begun_s),
            "build_s": build_s,
            "runs": runs,
            "the_same_bits": same,
            "tests": tests,
        },
    )
    bits = "the same bits" if same else "hashes differ"
    print(f"{bits}; {tests['result']}; {RESULT.relative_to(ROOT)}")
    return int(not same or tests["status"] != 0)


if __name__ == "__main__":
    sys.exit(main())
