"""The table of stacks is what the locks pin, what the pages say and what torch loads."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from common import stack
from common.data import workers
from common.data.stream import Samples
from common.errors import InputError
from common.group.devices import check_driver
from tests.conftest import ROOT, Recipe, library

TABLE = stack.stacks()
LOCKED_VERSIONS = runpy.run_path(str(ROOT / "docker" / "verify.py"))["locked_versions"]


@pytest.mark.parametrize("name", TABLE)
def test_the_locks_pin_what_the_table_says(name: str) -> None:
    lock = (ROOT / "docker" / "stacks" / f"{name}.txt").read_text()
    assert stack.differences(name, LOCKED_VERSIONS(lock)) == []
    other = lock.replace(f"=={TABLE[name]['nccl']}", "==2.0.1")
    (difference,) = stack.differences(name, LOCKED_VERSIONS(other))
    assert difference == f"nccl 2.0.1 where {name} pins {TABLE[name]['nccl']}"


def test_the_page_shows_the_table() -> None:
    rows = re.findall(r"(?m)^\| (cu\d+) \|(.*)\|$", (ROOT / "docker" / "README.md").read_text())
    assert dict(rows) == {
        name: " {torch} | {torchvision} | {cuda} | {nccl} | {cudnn} | {driver} or newer ".format(
            **parts
        )
        for name, parts in TABLE.items()
    }


def test_a_version_may_be_told_less_exactly_but_not_otherwise() -> None:
    assert stack.differences("cu132", {"cudnn": "9.26.0", "cuda": "13.2"}) == []
    assert stack.differences("cu132", {"cudnn": "9.2"})
    assert stack.differences("cu132", {"nccl": "2.30.70"})
    with pytest.raises(InputError, match="no stack 'cu999': there are cu132, cu130, cu128"):
        stack.differences("cu999", {})


def test_the_running_versions_are_those_of_the_environment() -> None:
    """The NCCL in memory is asked, not the one torch was compiled with."""
    found = stack.running_versions()
    assert found["torch"] == torch.__version__.split("+")[0]
    if torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    known = [name for name, parts in TABLE.items() if parts["torch"] == found["torch"]]
    if not known:
        pytest.skip("this torch is of no stack")
    assert stack.differences(known[0], found) == []
    assert stack.strangers() == []


def test_a_driver_is_judged_by_its_major_version(tmp_path: Path) -> None:
    for newest, needed in ((12040, "13.2"), (11080, "12.8"), (13000, "13.2"), (13000, "12.8")):
        name = f"libcuda_{newest}.so"
        code = f"int cuDriverGetVersion(int *version) {{ *version = {newest}; return 0; }}"
        driver = library(tmp_path, name, code) / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.version, "cuda", needed)
            if newest // 1000 >= int(needed.split(".")[0]):
                check_driver(str(driver))
                continue
            fits = r"driver, take stack cu128" if newest == 12040 else "driver, or train with"
            with pytest.raises(InputError, match=fits):
                check_driver(str(driver))
    check_driver("libcuda_that_is_not_there.so")


def test_what_is_refused_in_an_image_is_refused_by_the_front_door(recipe: Recipe) -> None:
    done = recipe("ddp_launch", "--nproc", "1", "--check", env={"RECIPES_STACK": "cu999"})
    assert done.status == 2
    assert done.errors == ["error: no stack 'cu999': there are cu132, cu130, cu128"]


def test_loading_processes_are_no_more_than_shared_memory_holds() -> None:
    image = torch.zeros(3, 100, 100)
    samples = Samples([(image, 0)] * 8, range(8), 0)
    batch_bytes = 16 * (3 * 100 * 100 * 4 + 8)
    for most in (0, 1, 7):
        enough = batch_bytes * 2 * (2 * most + 2)  # two ready for each process, two in use
        assert workers.most_workers(samples, 16, 2, enough)[0] == most
        assert workers.most_workers(samples, 16, 2, enough - 1)[0] == max(0, most - 1)
    assert workers.most_workers(samples, 16, 2, 0)[0] == 0
