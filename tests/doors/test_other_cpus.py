"""The same bits on CPUs of other kinds, which qemu emulates instruction by instruction."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import ROOT, Recipe, Result
from tests.helpers.images import photo
from tests.helpers.machine import need
from tests.helpers.pool import LONG_PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Small ones, because an emulated core is slow: the last test tries all other operations.
CASES = {
    "convolutions": "ddp_launch --max-steps 3 --data imagefolder --data-path photos "
    "--image-size 16 --global-batch-size 8 --num-workers 0",
    "transformer": "fsdp --max-steps 2 --layers 1 --width 32 --heads 2 --context 16 --data text "
    "--data-path text",
    "recurrent": "checkpoint_rnn --max-steps 2 --length 40 --hidden-size 8",
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

    def run(self, cpu: str, *python: str) -> Result:
        """Run Python on a CPU, on one core, to its end."""
        emulator = () if cpu == "native" else ("qemu-x86_64-static", "-cpu", cpu)
        env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        process = self.runner.start(*emulator, sys.executable, *python, env=env)
        return self.runner.finish(process, self.folder, LONG_PATIENCE_S).assert_ok()

    def train(self, cpu: str, *runs: str) -> Result:
        return self.run(cpu, "-c", _RUN_ALL, *runs)

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


def test_portable_kernels_give_the_same_bits_on_another_cpu(machines: Machines) -> None:
    """And so does a run that goes on elsewhere: from here to a Haswell and back."""
    resumed = f"{CASES['convolutions']} --snapshot-every 1 --output-dir resumed --max-steps"
    machines.train(
        "native", f"{resumed} 1", *(f"{CASES[c]} --output-dir native/{c}" for c in CASES)
    )
    runs = [f"{run} --output-dir Haswell/{case}" for case, run in CASES.items()]
    said = machines.train("Haswell", *runs, f"{resumed} 2")
    back = machines.train("native", f"{resumed} 3")
    for case in CASES:
        assert machines.sha(f"native/{case}") == machines.sha(f"Haswell/{case}"), case
    assert machines.sha("resumed") == machines.sha("native/convolutions")
    assert "other bits" not in said.stderr + back.stderr
    assert machines.read("resumed", "summary")["bits_hold_on"] == "any x86-64 CPU with AVX2"


def test_the_best_kernels_of_two_cpus_differ_and_a_run_that_changes_over_says_so(
    recipe: Recipe,
) -> None:
    """The twin of the test above, on kernels of this CPU that a Haswell has, too."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("needs a CPU with AVX-512")
    options = ("ddp_launch", "--nproc", "1", "--no-portable", "--snapshot-every", "1")
    haswell = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    best = recipe(*options, "--max-steps", "3", folder="best").assert_ok()
    recipe(*options, "--max-steps", "1", folder="changed").assert_ok()
    changed = recipe(*options, "--max-steps", "3", folder="changed", env=haswell).assert_ok()
    assert changed.sha != best.sha
    assert re.search(
        r"operations give other bits than before step 1 \(.*convolution.*\): the weights will",
        changed.stdout + changed.stderr,
    )
    assert best.summary["bits_hold_on"] == "this kind of CPU (AVX512)"


def test_the_page_names_every_operation_that_is_not_portable(machines: Machines) -> None:
    """Of 216; with AVX-512, each of them differs indeed, some on Intel's CPUs only."""
    page = (ROOT / "docs" / "same-numbers.md").read_text()
    part = page.split("## On every x86-64 CPU")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", part, re.M)
    named = {name for row in rows for name in re.findall("`(.*?)`", row)}
    everywhere = {name for row in rows if "Intel" not in row for name in re.findall("`(.*?)`", row)}
    native, other = (
        json.loads(machines.run(cpu, "-m", "tests.helpers.operations").stdout)
        for cpu in ("native", "EPYC-Rome")
    )
    assert len(native) > 200
    different = {name for name in native if native[name] != other[name]}
    assert different <= named
    if torch.cpu._is_avx512_supported():
        assert everywhere <= different
