"""The same bits on CPUs of other kinds, which qemu emulates instruction by instruction."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import ROOT, Recipe, Result
from tests.helpers.images import photo
from tests.helpers.machine import EMULATED_CPUS, need
from tests.helpers.pool import LONG_PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CASES = {
    "group-norm": "ddp_launch --max-steps 3",
    # Not a ResNet, which takes minutes when emulated: the last test tries its kinds of convolution.
    "photos": "ddp_launch --max-steps 2 --norm batch --data imagefolder --data-path photos "
    "--image-size 16 --global-batch-size 8 --num-workers 0",
    "bf16": "ddp_launch --max-steps 2 --precision bf16 --optimizer adamw --lr 0.001 "
    "--global-batch-size 24",
    "scratch": "dp_scratch --max-steps 2 --no-lesson --global-batch-size 24",
    "pipeline": "model_parallel_toy --max-steps 3 --clip-grad-norm 0.1",
    "transformer": "fsdp --max-steps 2 --layers 1 --data text --data-path text",
    "recurrent": "checkpoint_rnn --max-steps 2 --length 40",
}
# Under qemu, importing torch takes longer than training: one process for all runs.
_RUN_ALL = """\
import importlib, sys, torch
for line in sys.argv[1:]:
    name, *arguments = line.split()
    # oneDNN's LSTM ends qemu 7.2 with SIGSEGV; torch's own takes its place.
    torch.backends.mkldnn.enabled = name != "checkpoint_rnn"
    status = importlib.import_module(f"recipes.{name}.train").main([*arguments, "--nproc", "1"])
    assert not status, line
"""


class Machines:
    """This machine, and those that qemu makes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runner = folder, Recipe(folder)

    def train(self, **runs: Sequence[str]) -> dict[str, Result]:
        """Train the runs of each CPU, one after the other; the CPUs go on side by side."""
        begun = {}
        for cpu, each in runs.items():
            lines = [run.format(cpu=cpu) for run in each]
            begun[cpu] = self._start(cpu, "-c", _RUN_ALL, *lines)
        return {cpu: self._finish(one) for cpu, one in begun.items()}

    def operations(self, *cpus: str) -> list[dict[str, str]]:
        """Of each CPU: operation to a hash of its result, with portable kernels."""
        begun = [self._start(cpu, "-m", "tests.helpers.operations") for cpu in cpus]
        return [json.loads(self._finish(one).stdout) for one in begun]

    def _start(self, cpu: str, *python: str) -> "subprocess.Popen[str]":
        emulator = () if cpu == "native" else ("qemu-x86_64-static", "-cpu", cpu)
        return self.runner.start(*emulator, sys.executable, *python)

    def _finish(self, process: "subprocess.Popen[str]") -> Result:
        return self.runner.finish(process, self.folder, LONG_PATIENCE_S).assert_ok()

    def read(self, run: str, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / run / f"{name}.json").read_text())
        return content

    def sha(self, run: str) -> str:
        return str(self.read(run, "summary")["weights_sha256"])


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    need("qemu-x86_64-static")
    made = Machines(tmp_path_factory.mktemp("machines"))
    (made.folder / "text").write_text("".join(f"{n} times 7 is {n * 7}. " for n in range(700)))
    for number in range(32):
        photo(made.folder / "photos" / f"class {number % 2}" / f"{number}.jpg", number)
    yield made
    made.runner.stop()


def test_portable_kernels_give_the_same_bits_on_every_cpu(machines: Machines) -> None:
    """And so does a run that goes on elsewhere: from here to a Haswell and back."""
    resumed = "ddp_launch --snapshot-every 1 --output-dir resumed --max-steps"
    runs = [f"{run} --output-dir {{cpu}}/{case}" for case, run in CASES.items()]
    machines.train(native=[f"{resumed} 1", *runs])
    said = machines.train(**{"Haswell": [*runs, f"{resumed} 2"], "EPYC-Rome": runs})["Haswell"]
    back = machines.train(native=[f"{resumed} 3"])["native"]
    for case in CASES:
        found = {cpu: machines.sha(f"{cpu}/{case}") for cpu in ("native", *EMULATED_CPUS)}
        assert len(set(found.values())) == 1, (case, found)
        prints = [
            machines.read(f"{cpu}/{case}", "manifest")["fingerprint"] for cpu in EMULATED_CPUS
        ]
        assert prints[0] == prints[1]
    assert machines.sha("resumed") == machines.sha("native/group-norm")
    assert "other bits" not in said.stderr + back.stderr
    assert machines.read("resumed", "summary")["bits_hold_on"] == "any x86-64 CPU with AVX2"


def test_the_best_kernels_of_two_cpus_differ_and_a_run_that_changes_over_says_so(
    machines: Machines,
) -> None:
    """The twin of the test above: it could not pass if the emulated CPUs were not others."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("needs a CPU with AVX-512")
    run = "ddp_launch --no-portable --snapshot-every 1 --output-dir"
    begun, whole = f"{run} changed --max-steps", f"{run} {{cpu}}/best --max-steps 3"
    machines.train(native=[f"{begun} 1", whole])
    said = machines.train(Haswell=[f"{begun} 3", whole])["Haswell"]
    assert machines.sha("native/best") != machines.sha("Haswell/best")
    assert machines.sha("changed") not in (
        machines.sha("native/best"),
        machines.sha("Haswell/best"),
    )
    assert re.search(
        r"operations give other bits than before step 1 \(.*matrix product.*\): the weights will",
        said.stdout + said.stderr,
    )
    held = machines.read("native/best", "summary")["bits_hold_on"]
    assert held == "this kind of CPU (AVX512)"


def test_the_page_names_every_operation_that_is_not_portable(machines: Machines) -> None:
    """Of 215; with AVX-512, each of them differs indeed."""
    page = (ROOT / "docs" / "same-numbers.md").read_text()
    part = page.split("## On every x86-64 CPU")[1].split("\n## ")[0]
    named = {
        name
        for row in re.findall(r"^\| (`.*?) \|", part, re.M)
        for name in re.findall("`(.*?)`", row)
    }
    native, *others = machines.operations("native", *EMULATED_CPUS)
    assert len(native) > 200
    different = {name for name in native for other in others if native[name] != other[name]}
    assert different <= named
    if torch.cpu._is_avx512_supported():
        assert different == named
