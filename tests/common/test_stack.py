"""The table of stacks is what the locks pin, what the pages say and what torch loads."""

import json
import os
import re
import runpy
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from common import git, manifest, stack
from common.data import workers
from common.data.stream import Samples
from common.errors import InputError
from tests.helpers.commands import ROOT, Recipe
from tests.helpers.machine import need, small_disk

TABLE = stack.stacks()
LOCKED_VERSIONS = runpy.run_path(str(ROOT / "docker" / "verify.py"))["locked_versions"]


@pytest.mark.parametrize("name", TABLE)
def test_the_locks_pin_what_the_table_says(name: str) -> None:
    lock = (ROOT / "docker" / "stacks" / f"{name}.txt").read_text()
    assert stack.differences(name, LOCKED_VERSIONS(lock)) == []
    other = lock.replace(f"=={TABLE[name]['nccl']}", "==2.0.1")
    (difference,) = stack.differences(name, LOCKED_VERSIONS(other))
    assert difference == f"nccl 2.0.1 where {name} pins {TABLE[name]['nccl']}"


def test_the_image_was_built_twice_from_this_lock() -> None:
    """Else `make image-repro` renews the result."""
    result = json.loads((ROOT / "docker" / "results" / "repro.json").read_text())
    lock = (ROOT / "docker" / "stacks" / "cu132.txt").read_bytes()
    assert result["lock_sha256"] == sha256(lock).hexdigest()
    assert result["identical"]


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


def test_a_shared_memory_that_is_read_only_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = Samples([(torch.zeros(3, 8, 8), 0)] * 8, range(8), 0)
    with small_disk(tmp_path / "shm", "1m") as disk:
        monkeypatch.setattr(workers, "_SHARED_MEMORY", disk)
        assert workers.most_workers(samples, 1, 1)[0] > 0
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert workers.most_workers(samples, 1, 1) == (0, f"{disk} is not writable")


def test_an_image_knows_whether_its_code_is_the_commits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()  # no git checkout
    monkeypatch.setattr(git, "ROOT", copy)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    code = copy / "common" / "errors.py"
    code.parent.mkdir()
    code.write_text("one = 1")
    (tmp_path / "code.json").write_text(json.dumps(git.code_files()))

    def recorded(built_from: str) -> list[str | bool | None]:
        monkeypatch.setenv("RECIPES_COMMIT", built_from)
        found = manifest.describe_machine()
        return [found["git_commit"], found["git_dirty"], *found["changed_files"]]

    assert recorded("1234") == ["1234", False]
    assert recorded("1234-dirty") == ["1234", True]
    assert recorded("unknown") == [None, None]
    code.write_text("one = 2")
    assert recorded("1234") == ["1234", True, "common/errors.py"]
    code.write_text("one = 1")
    assert recorded("1234") == ["1234", False]
    (copy / "recipes").mkdir()
    (copy / "recipes" / "new.py").touch()
    assert recorded("1234") == ["1234", True, "recipes/new.py"]
    code.unlink()
    assert manifest.describe_machine()["changed_files"]["common/errors.py"] == "gone"


def test_image_run_takes_what_the_caller_has(recipe: Recipe) -> None:
    """Memory is locked for InfiniBand only; ranks of other hosts need the host's network."""
    need("make")
    command = (
        "make",
        "-C",
        ROOT,
        "image-run",
        "DOCKER=echo",
        f"RUNS={recipe.tmp_path}",
        "GPUS=all",
        "RECIPE=x",
    )
    one, several = (
        recipe.finish(recipe.start(*command, *more), recipe.tmp_path).assert_ok().stdout
        for more in ((), ("NNODES=2", "NODE_RANK=0", "MASTER_ADDR=10.0.0.1"))
    )
    assert "--gpus all" in one
    assert "memlock" not in one
    assert "--network" not in one
    assert "--network host" in several
    for group in os.getgroups():
        assert f"--group-add {group} " in one


def test_check_runs_the_linter_of_the_path(recipe: Recipe) -> None:
    """In the image of the tests there is no .venv; the Dockerfile must not be run as a script."""
    need("make")
    program = recipe.tmp_path / "hadolint"
    program.write_text("#!/bin/sh\necho linted $1\n")
    program.chmod(0o755)
    env = {"PATH": f"{recipe.tmp_path}:{os.environ['PATH']}"}
    done = recipe.finish(
        recipe.start("make", "-C", ROOT, "check", "PYTHON=true", env=env), recipe.tmp_path
    )
    assert "linted docker/Dockerfile\n" in done.assert_ok().stdout
