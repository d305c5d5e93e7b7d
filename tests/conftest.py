"""Fixtures: a pool of ranks, and the recipes through their real command lines."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from common import log
from common.kernels import choose_kernels
from tests.helpers.commands import Recipe
from tests.helpers.pool import Pool

# No test sees a GPU or loads its driver, be it broken: what needs a GPU is in tests/gpu_check.
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
os.environ["PYTHONWARNINGS"] = "ignore:CUDA initialization:UserWarning"  # of a broken driver

# Some tests train in this process, and some modules compute when they are imported.
choose_kernels(portable=True)
torch.set_num_threads(1)  # as ranks do

# By default an example that takes 0.2 s fails its test, and so does one that is slowly drawn.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With TESTS_SEED=N, run the tests in an order drawn from N: no test may need another one.

    In one process (`-n 0`), because several share out the tests file by file.
    """
    if seed := os.environ.get("TESTS_SEED"):
        print(f"the order of the tests: TESTS_SEED={seed}")
        random.Random(seed).shuffle(items)


@pytest.fixture(scope="session", autouse=True)
def own_signals() -> None:
    """The commands hear Ctrl-C and a lost terminal under nohup and in a background, too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # a handler is not inherited, ignoring is


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    """A signal that a test left blocked would never reach the commands that later tests start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == before


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """A run in this process sets up the log; a later test would hear each of its lines twice."""
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.level, log.propagate = before


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder for the tests: runs neither read nor write the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Recipe]:
    """Runs recipes as a user does."""
    runner = Recipe(tmp_path)
    yield runner
    runner.stop()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks for the whole session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()
